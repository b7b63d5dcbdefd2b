//! The files of a model, opened once and recognised again; each read directly or through the page cache.

use std::fmt;
use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::access::{Access, Evidence, IoMode, advise_random, open_directly, probe_dontcache};
use crate::block::BlockQueue;
use crate::error::{Errno, ErrnoKind, IoError, ReadRange};
use crate::limits::{ATTEMPTS_MAX, SECTOR_BYTES};

/// A file of a [`FileSet`], by its position in the list the set was opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// All files of a model, open for as long as the set lives.
pub struct FileSet {
    mode: IoMode,
    align: u32,
    files: Vec<OpenFile>,
    warnings: Mutex<Vec<String>>,
}

struct OpenFile {
    path: Arc<Path>,
    plain: File,
    direct: Option<File>,
    opened_as: Access,
    /// Set once, when a direct read turns out to be refused after all.
    downgraded: OnceLock<Access>,
    /// What the evidence leaves open.
    doubt: Option<String>,
    identity: Identity,
}

/// The properties by which a file is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

/// The descriptor a read uses now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub fd: RawFd,
    pub direct: bool,
}

impl FileSet {
    /// Opens every file and decides, by evidence, how it is read. `FileId(i)` is `paths[i]`.
    ///
    /// # Errors
    /// [`IoError::Open`] or [`IoError::NotAFile`] naming the path; [`IoError::DirectRefused`] where `mode` is
    /// [`IoMode::Direct`] and a file would not really be read directly; [`IoError::Refused`] where it is
    /// [`IoMode::DontCache`] and the kernel or a file system does not take part.
    pub fn open(paths: &[PathBuf], mode: IoMode) -> Result<FileSet, IoError> {
        if paths.len() > u32::MAX as usize {
            return Err(IoError::BadRequest { what: format!("{} files", paths.len()) });
        }
        let files = paths.iter().map(|path| open_file(path, mode)).collect::<Result<Vec<_>, _>>()?;
        let align = files.iter().map(OpenFile::align).max().unwrap_or(SECTOR_BYTES);
        Ok(FileSet { mode, align, files, warnings: Mutex::new(Vec::new()) })
    }

    /// Files of the set.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether the set has no file.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The mode the set was opened with.
    pub fn mode(&self) -> IoMode {
        self.mode
    }

    /// How the file is read now. Panics for an id that is not of this set.
    pub fn access(&self, file: FileId) -> &Access {
        let entry = self.entry(file);
        entry.downgraded.get().unwrap_or(&entry.opened_as)
    }

    /// Path the file was opened by. Panics for an id that is not of this set.
    pub fn path(&self, file: FileId) -> &Path {
        &self.entry(file).path
    }

    /// Size of the file when it was opened. Panics for an id that is not of this set.
    pub fn len_bytes(&self, file: FileId) -> u64 {
        self.entry(file).identity.bytes
    }

    /// Alignment of offsets and lengths that suits every file: 4096 unless a device needs more.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Lines to print: the mode that ran, for which files, and why.
    pub fn describe(&self) -> Vec<String> {
        let mut groups: Vec<(String, &Path, usize)> = Vec::new();
        for index in 0..self.files.len() {
            let entry = &self.files[index];
            let mut text = self.access(FileId(index as u32)).to_string();
            if let Some(doubt) = &entry.doubt {
                text = format!("{text}; {doubt}");
            }
            match groups.iter_mut().find(|(known, ..)| *known == text) {
                Some((_, _, count)) => *count += 1,
                None => groups.push((text, &entry.path, 1)),
            }
        }
        groups
            .into_iter()
            .map(|(text, path, count)| {
                let name = path.file_name().map_or(path.as_os_str(), |name| name).display();
                match count {
                    1 => format!("{name}: {text}"),
                    2 => format!("{name} and 1 more file: {text}"),
                    _ => format!("{name} and {} more files: {text}", count - 1),
                }
            })
            .collect()
    }

    /// Lines about files whose mode had to change after they were opened, each once, in order.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads `buf.len()` bytes at `offset`, at any alignment, through the page cache. For what is read once.
    ///
    /// # Errors
    /// [`IoError::EndOfFile`] where the file ends first, [`IoError::Read`] with the kernel's reason.
    pub fn read_exact_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.checked_len(file)?;
        let entry = self.entry(file);
        let wanted = buf.len() as u64;
        let range = |got: usize| ReadRange { path: Arc::clone(&entry.path), offset, wanted, got: got as u64 };
        if offset.checked_add(wanted).is_none_or(|end| end > i64::MAX as u64) {
            let what = format!("{wanted} bytes at {offset} pass the largest offset");
            return Err(IoError::BadRequest { what });
        }
        let (mut got, mut fruitless) = (0, 0);
        while got < buf.len() {
            match entry.plain.read_at(&mut buf[got..], offset + got as u64) {
                Ok(0) => return Err(IoError::EndOfFile { range: range(got) }),
                Ok(count) => (got, fruitless) = (got + count, 0),
                Err(error) => {
                    let errno = Errno::of(&error);
                    let passing = matches!(errno.kind(), ErrnoKind::Interrupted | ErrnoKind::Again);
                    fruitless += 1;
                    if !passing || fruitless >= ATTEMPTS_MAX {
                        return Err(IoError::Read { range: range(got), errno });
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether every path still leads to the file that was opened, unchanged.
    ///
    /// # Errors
    /// [`IoError::Changed`] naming the first file that is gone, replaced, resized or rewritten.
    pub fn check_unchanged(&self) -> Result<(), IoError> {
        for entry in &self.files {
            let changed = |what: String| IoError::Changed { path: Arc::clone(&entry.path), what };
            let now = std::fs::metadata(&entry.path).map_err(|error| changed(format!("{}", Errno::of(&error))))?;
            let (old, now) = (entry.identity, Identity::of(&now));
            if (old.device, old.inode) != (now.device, now.inode) {
                return Err(changed("another file has taken its place".to_owned()));
            }
            if old.bytes != now.bytes {
                return Err(changed(format!("{} bytes, were {}", now.bytes, old.bytes)));
            }
            if old.modified != now.modified {
                return Err(changed("its modification time moved".to_owned()));
            }
        }
        Ok(())
    }

    /// Size of a file given by an id that may be wrong.
    pub(crate) fn checked_len(&self, file: FileId) -> Result<u64, IoError> {
        let entry = self
            .files
            .get(file.0 as usize)
            .ok_or_else(|| IoError::BadRequest { what: format!("file {} of {}", file.0, self.files.len()) })?;
        Ok(entry.identity.bytes)
    }

    /// Size of the file now.
    pub(crate) fn len_now(&self, file: FileId) -> Result<u64, Errno> {
        self.entry(file).plain.metadata().map(|now| now.len()).map_err(|error| Errno::of(&error))
    }

    pub(crate) fn shared_path(&self, file: FileId) -> Arc<Path> {
        Arc::clone(&self.entry(file).path)
    }

    /// The descriptor reads of `file` use now.
    pub(crate) fn source(&self, file: FileId) -> Source {
        let entry = self.entry(file);
        match &entry.direct {
            Some(direct) if entry.downgraded.get().is_none() => Source { fd: direct.as_raw_fd(), direct: true },
            _ => Source { fd: entry.plain.as_raw_fd(), direct: false },
        }
    }

    /// The first file that is read directly.
    pub(crate) fn first_direct(&self) -> Option<FileId> {
        (0..self.files.len() as u32).map(FileId).find(|file| self.source(*file).direct)
    }

    /// Every descriptor reads may use: two a file, the one through the page cache and the direct one, -1 for none.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let both = |entry: &OpenFile| [entry.plain.as_raw_fd(), entry.direct.as_ref().map_or(-1, AsRawFd::as_raw_fd)];
        self.files.iter().flat_map(both).collect()
    }

    /// The queue of the block device that holds the file; `None` where it cannot be found. Panics for an id that is
    /// not of this set.
    pub fn block_queue(&self, file: FileId) -> Option<BlockQueue> {
        BlockQueue::of_device(Path::new("/sys/dev/block"), self.entry(file).identity.device)
    }

    /// What one call through the page cache returns: bytes, all there are, or a negative errno. For the simulator.
    pub(crate) fn read_once(&self, file: FileId, offset: u64, buf: &mut [u8]) -> i32 {
        let mut got = 0;
        while got < buf.len() {
            match self.entry(file).plain.read_at(&mut buf[got..], offset + got as u64) {
                Ok(0) => break,
                Ok(count) => got += count,
                Err(error) if Errno::of(&error).kind() == ErrnoKind::Interrupted => {}
                Err(error) => return -Errno::of(&error).0,
            }
        }
        i32::try_from(got).unwrap_or(i32::MAX)
    }

    /// The kernel refused a direct read of `file`: from now on the file is read through the page cache, with one
    /// warning. The direct descriptor stays open for the reads that still use it.
    ///
    /// # Errors
    /// [`IoError::DirectRefused`] where the set was opened with [`IoMode::Direct`].
    pub(crate) fn refuse_direct(&self, file: FileId, errno: Errno) -> Result<(), IoError> {
        let entry = self.entry(file);
        let why = format!("a direct read was refused: {errno}");
        if self.mode == IoMode::Direct {
            return Err(IoError::DirectRefused { path: Arc::clone(&entry.path), why });
        }
        let line = format!("{}: {why}; reading it through the page cache", entry.path.display());
        if entry.downgraded.set(Access::Buffered { why: Some(why) }).is_ok() {
            advise_random(&entry.plain);
            self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(line);
        }
        Ok(())
    }

    /// Lets tests hand the kernel offsets it will refuse.
    #[cfg(test)]
    pub(crate) fn force_align(&mut self, align: u32) {
        self.align = align;
    }

    /// Lets tests put a pipe in the place of a file, whose reads then wait for as long as the test likes.
    #[cfg(test)]
    pub(crate) fn force_plain(&mut self, file: FileId, plain: File) {
        self.files[file.0 as usize].plain = plain;
    }

    fn entry(&self, file: FileId) -> &OpenFile {
        &self.files[file.0 as usize]
    }
}

impl fmt::Debug for FileSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSet").field("mode", &self.mode).field("files", &self.files.len()).finish_non_exhaustive()
    }
}

impl OpenFile {
    fn align(&self) -> u32 {
        match self.opened_as {
            Access::Direct { mem_align, offset_align } => SECTOR_BYTES.max(mem_align).max(offset_align),
            _ => SECTOR_BYTES,
        }
    }
}

impl Identity {
    fn of(metadata: &Metadata) -> Identity {
        Identity {
            device: metadata.dev(),
            inode: metadata.ino(),
            bytes: metadata.len(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
        }
    }
}

/// The one place where a file of a model is opened.
fn open_file(path: &Path, mode: IoMode) -> Result<OpenFile, IoError> {
    let shared: Arc<Path> = Arc::from(path);
    let refused = |error: std::io::Error| IoError::Open { path: Arc::clone(&shared), errno: Errno::of(&error) };
    // A pipe would block the open and a device may act on it: look before opening.
    if !std::fs::metadata(path).map_err(refused)?.is_file() {
        return Err(IoError::NotAFile { path: Arc::clone(&shared) });
    }
    let plain = File::open(path).map_err(refused)?;
    let identity = Identity::of(&plain.metadata().map_err(refused)?);
    let as_asked = |access| Evidence { direct: None, access, doubt: None };
    let Evidence { direct, access: opened_as, doubt } = match mode {
        IoMode::Auto | IoMode::Direct => open_directly(&shared)?,
        IoMode::Buffered => as_asked(Access::Buffered { why: None }),
        IoMode::DontCache => {
            probe_dontcache(&shared, &plain)?;
            as_asked(Access::DontCache)
        }
        IoMode::Mmap => as_asked(Access::Mapped),
        IoMode::Drop => as_asked(Access::Dropped),
    };
    if let Some(direct) = &direct
        && Identity::of(&direct.metadata().map_err(refused)?) != identity
    {
        let what = "another file has taken its place".to_owned();
        return Err(IoError::Changed { path: Arc::clone(&shared), what });
    }
    match (&opened_as, mode) {
        (Access::SilentlyBuffered { why } | Access::Buffered { why: Some(why) }, IoMode::Direct) => {
            return Err(IoError::DirectRefused { path: shared, why: why.clone() });
        }
        // Readahead of a mapping is steered by advice on the mapping.
        (Access::Direct { .. } | Access::Mapped, _) => {}
        _ => advise_random(&plain),
    }
    Ok(OpenFile { path: shared, plain, direct, opened_as, downgraded: OnceLock::new(), doubt, identity })
}

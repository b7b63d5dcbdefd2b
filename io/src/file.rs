//! The files of a model, opened once and recognised again; each read directly or through the page cache.

use std::fmt;
use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::access::{Access, Evidence, IoMode, advise_random, open_directly, probe_dontcache};
use crate::block::BlockQueue;
use crate::drive::{DriveSet, Mirror};
use crate::error::{Errno, ErrnoKind, IoError, ReadRange};
use crate::limits::{ATTEMPTS_MAX, DRIVES_MAX, SECTOR_BYTES};

/// A file of a [`FileSet`], by its position in the list the set was opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// All files of a model, open for as long as the set lives; of each there may be copies on other drives.
///
/// Inside the crate a copy has an id too, above those of the files: whatever reads treats it as one more file.
pub struct FileSet {
    mode: IoMode,
    align: u32,
    /// The files, then their copies.
    files: Vec<OpenFile>,
    /// Files that are not copies.
    count: usize,
    drives: Vec<Drive>,
    /// The copy on each drive of each file: of the first file on every drive, then of the second.
    copies: Vec<Option<FileId>>,
    warnings: Mutex<Vec<String>>,
}

/// A directory that holds the files, or copies of them.
struct Drive {
    dir: PathBuf,
    /// Whether a failure of this drive has been told.
    warned: AtomicBool,
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
    drive: usize,
    /// Set when a read failed: the other copies are preferred from then on.
    avoided: AtomicBool,
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
        FileSet::open_mirrored(paths, &[], mode)
    }

    /// As [`FileSet::open`], with copies that share in the reads. A copy must be as long as its file; that its bytes
    /// are the same is the caller's word.
    ///
    /// # Errors
    /// As [`FileSet::open`], for copies too; [`IoError::NotACopy`] for one of another length.
    pub fn open_mirrored(paths: &[PathBuf], mirrors: &[Mirror], mode: IoMode) -> Result<FileSet, IoError> {
        let (count, drives) = (paths.len(), mirrors.len() + 1);
        if count.saturating_mul(drives) > u32::MAX as usize || drives > DRIVES_MAX {
            return Err(IoError::BadRequest { what: format!("{count} files on {drives} drives") });
        }
        let mut files = paths.iter().map(|path| open_file(path, 0, mode)).collect::<Result<Vec<_>, _>>()?;
        let mut copies = vec![None; count * drives];
        for file in 0..count {
            copies[file * drives] = Some(FileId(file as u32));
            for (drive, mirror) in (1..).zip(mirrors) {
                let Some(Some(path)) = mirror.copies.get(file) else { continue };
                let copy = open_file(path, drive, mode)?;
                if copy.identity.bytes != files[file].identity.bytes {
                    let (path, of) = (copy.path, Arc::clone(&files[file].path));
                    let what = format!("{} bytes, not {}", copy.identity.bytes, files[file].identity.bytes);
                    return Err(IoError::NotACopy { path, of, what });
                }
                copies[file * drives + drive] = Some(FileId(files.len() as u32));
                files.push(copy);
            }
        }
        let first = paths.first().and_then(|path| path.parent()).unwrap_or(Path::new("")).to_owned();
        let dirs = std::iter::once(first).chain(mirrors.iter().map(|mirror| mirror.dir.clone()));
        let drives = dirs.map(|dir| Drive { dir, warned: AtomicBool::new(false) }).collect();
        let align = files.iter().map(OpenFile::align).max().unwrap_or(SECTOR_BYTES);
        Ok(FileSet { mode, align, files, count, drives, copies, warnings: Mutex::new(Vec::new()) })
    }

    /// Files of the set, copies not counted.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether the set has no file.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Drives that hold the files: that of the files themselves, number 0, and those of their copies.
    pub fn drives(&self) -> usize {
        self.drives.len()
    }

    /// The directory on a drive. Panics for a number that is not of this set.
    pub fn drive_dir(&self, drive: usize) -> &Path {
        &self.drives[drive].dir
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

    /// How every file and every copy is read now.
    pub fn accesses(&self) -> impl Iterator<Item = &Access> {
        self.entries().map(|file| self.access(file))
    }

    /// Path the file was opened by. Panics for an id that is not of this set.
    pub fn path(&self, file: FileId) -> &Path {
        &self.entry(file).path
    }

    /// Size of the file when it was opened. Panics for an id that is not of this set.
    pub fn len_bytes(&self, file: FileId) -> u64 {
        self.entry(file).identity.bytes
    }

    /// Alignment of offsets and lengths that suits every file and copy: 4096 unless a device needs more.
    pub fn align(&self) -> u32 {
        self.align
    }

    /// Lines to print: the mode that ran, for which files, and why; then what is to be known of each mirror.
    pub fn describe(&self) -> Vec<String> {
        let mut groups: Vec<(usize, String, &Path, usize)> = Vec::new();
        for (entry, id) in self.files.iter().zip(self.entries()) {
            let mut text = self.access(id).to_string();
            if let Some(doubt) = &entry.doubt {
                text = format!("{text}; {doubt}");
            }
            match groups.iter_mut().find(|(drive, known, ..)| (*drive, known) == (entry.drive, &text)) {
                Some((.., count)) => *count += 1,
                None => groups.push((entry.drive, text, &entry.path, 1)),
            }
        }
        groups.sort_by_key(|(drive, ..)| *drive);
        let lines = groups.into_iter().map(|(drive, text, path, count)| {
            let name = path.file_name().map_or(path.as_os_str(), |name| name).display();
            let mirror =
                if drive > 0 { format!("mirror {}: ", self.drives[drive].dir.display()) } else { String::new() };
            match count {
                1 => format!("{mirror}{name}: {text}"),
                2 => format!("{mirror}{name} and 1 more file: {text}"),
                _ => format!("{mirror}{name} and {} more files: {text}", count - 1),
            }
        });
        lines.chain((1..self.drives.len()).flat_map(|drive| self.describe_mirror(drive))).collect()
    }

    /// What limits the use of a mirror.
    fn describe_mirror(&self, drive: usize) -> Vec<String> {
        let mut lines = Vec::new();
        let dir = self.drives[drive].dir.display();
        let there = self.files.iter().filter(|entry| entry.drive == drive).count();
        if there < self.count {
            lines.push(format!("mirror {dir} has {there} of {} files; the others have no copy there", self.count));
        }
        let shared = (0..drive)
            .find(|other| self.block_devices(*other).iter().any(|device| self.block_devices(drive).contains(device)));
        if let Some(other) = shared {
            let other = self.drives[other].dir.display();
            lines.push(format!("mirror {dir} is on the same block device as {other}: no gain is to be expected"));
        }
        lines
    }

    /// The block devices under the files of a drive, by the name of the whole disk where there is one.
    fn block_devices(&self, drive: usize) -> Vec<String> {
        let mut devices: Vec<u64> =
            self.files.iter().filter(|entry| entry.drive == drive).map(|entry| entry.identity.device).collect();
        devices.sort_unstable();
        devices.dedup();
        devices.into_iter().map(|device| disk_name(device).unwrap_or_else(|| format!("device {device}"))).collect()
    }

    /// Lines about files whose mode had to change after they were opened, each once, in order.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads `buf.len()` bytes at `offset`, at any alignment, through the page cache. For what is read once. Only the
    /// file itself is asked: nothing says of such bytes whether they are right, and a copy must not vouch for its file.
    ///
    /// # Errors
    /// [`IoError::EndOfFile`] where the file ends first, [`IoError::Read`] with the kernel's reason.
    pub fn read_exact_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.checked_len(file)?;
        self.read_entry(file, offset, buf)
    }

    /// As [`FileSet::read_exact_at`], from the copy on one drive and no other; `None` where that drive has none.
    pub fn read_copy(&self, file: FileId, drive: usize, offset: u64, buf: &mut [u8]) -> Option<Result<(), IoError>> {
        if self.checked_len(file).is_err() || drive >= self.drives.len() {
            return None;
        }
        Some(self.read_entry(self.copy_on(file, drive)?, offset, buf))
    }

    /// The copy of a file on a drive gave other bytes than were written, and nobody can say what else there is wrong: a
    /// mirror is not read any more at all, the file itself only where it has no other copy. `what` goes into the
    /// warning. Panics for an id or a number that is not of this set.
    pub fn distrust(&self, file: FileId, drive: usize, what: &str) {
        let Some(copy) = self.copy_on(file, drive) else { return };
        let on_drive = |entry: &&OpenFile| drive > 0 && entry.drive == drive;
        for entry in self.files.iter().filter(on_drive).chain([self.entry(copy)]) {
            entry.avoided.store(true, Ordering::Relaxed);
        }
        let result = if drive > 0 { "this mirror is not read any more" } else { DAMAGED };
        self.warn_of_drive(drive, &format!("{}: {what}; {result}", self.path(copy).display()));
    }

    fn read_entry(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
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
            .filter(|_| (file.0 as usize) < self.count)
            .ok_or_else(|| IoError::BadRequest { what: format!("file {} of {}", file.0, self.count) })?;
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

    /// The files and their copies.
    pub(crate) fn entries(&self) -> impl Iterator<Item = FileId> + use<> {
        (0..self.files.len() as u32).map(FileId)
    }

    /// The first file or copy that is read directly.
    pub(crate) fn first_direct(&self) -> Option<FileId> {
        self.entries().find(|file| self.source(*file).direct)
    }

    /// The drive that a file or copy is on.
    pub(crate) fn drive_of(&self, file: FileId) -> usize {
        self.entry(file).drive
    }

    /// The copy of a file on a drive; the file itself on drive 0.
    pub(crate) fn copy_on(&self, file: FileId, drive: usize) -> Option<FileId> {
        self.copies[file.0 as usize * self.drives.len() + drive]
    }

    /// The drives that hold a copy of a file.
    pub(crate) fn holders(&self, file: FileId) -> DriveSet {
        let there = |drive: &usize| self.copy_on(file, *drive).is_some();
        (0..self.drives.len()).filter(there).fold(DriveSet::default(), DriveSet::with)
    }

    /// The drives to read a file from: those with a copy that has not failed; the first where all have.
    pub(crate) fn sources(&self, file: FileId) -> DriveSet {
        if self.drives.len() == 1 {
            return DriveSet::FIRST;
        }
        let good = |drive: &usize| {
            self.copy_on(file, *drive).is_some_and(|copy| !self.entry(copy).avoided.load(Ordering::Relaxed))
        };
        let good = (0..self.drives.len()).filter(good).fold(DriveSet::default(), DriveSet::with);
        if good == DriveSet::default() { DriveSet::FIRST } else { good }
    }

    /// A read of a file or copy failed, and there is another copy: that is preferred from now on. The first failure of
    /// each drive is told.
    pub(crate) fn avoid(&self, file: FileId, error: &IoError) {
        let entry = self.entry(file);
        entry.avoided.store(true, Ordering::Relaxed);
        let result = if entry.drive > 0 { "this mirror is not read any more where it failed" } else { DAMAGED };
        self.warn_of_drive(entry.drive, &format!("{}: {error}; {result}", self.drive_dir(entry.drive).display()));
    }

    /// Keeps a line about a drive, the first.
    fn warn_of_drive(&self, drive: usize, line: &str) {
        if !self.drives[drive].warned.swap(true, Ordering::Relaxed) {
            self.warnings.lock().unwrap_or_else(PoisonError::into_inner).push(line.to_owned());
        }
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
        f.debug_struct("FileSet").field("mode", &self.mode).field("files", &self.count).finish_non_exhaustive()
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

/// What a failure on the first drive means.
const DAMAGED: &str =
    "the model's own directory is damaged, and a mirror is read in its place where it fails: repair it";

/// Name of the disk under a file system with this device number.
fn disk_name(device: u64) -> Option<String> {
    BlockQueue::of_device(Path::new("/sys/dev/block"), device).map(|queue| queue.name)
}

/// The one place where a file of a model is opened.
fn open_file(path: &Path, drive: usize, mode: IoMode) -> Result<OpenFile, IoError> {
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
    let (downgraded, avoided) = (OnceLock::new(), AtomicBool::new(false));
    Ok(OpenFile { path: shared, plain, direct, opened_as, downgraded, doubt, identity, drive, avoided })
}

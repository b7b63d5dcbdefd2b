//! The files of a model, opened once, and the evidence for how each is read: directly, or through the page cache.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::{File, Metadata, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::error::{Errno, ErrnoKind, IoError, ReadRange};
use crate::limits::{ATTEMPTS_MAX, PAGE_BYTES, SECTOR_BYTES, SECTOR_BYTES_MAX};
use crate::pool::Arena;

/// A file of a [`FileSet`], by its position in the list the set was opened with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId(pub u32);

/// How files are to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// Directly where the evidence allows, else through the page cache.
    #[default]
    Auto,
    /// Directly, or not at all.
    Direct,
    /// Through the page cache.
    Buffered,
}

impl FromStr for IoMode {
    type Err = String;

    fn from_str(text: &str) -> Result<IoMode, String> {
        match text {
            "auto" => Ok(IoMode::Auto),
            "direct" => Ok(IoMode::Direct),
            "buffered" => Ok(IoMode::Buffered),
            _ => Err(format!(
                "unknown I/O mode '{text}': auto, direct or buffered"
            )),
        }
    }
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoMode::Auto => "auto",
            IoMode::Direct => "direct",
            IoMode::Buffered => "buffered",
        })
    }
}

/// How a file is read, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// With `O_DIRECT`.
    Direct {
        /// Alignment memory addresses need.
        mem_align: u32,
        /// Alignment file offsets and lengths need.
        offset_align: u32,
    },
    /// The kernel accepts `O_DIRECT` and uses the page cache all the same; read as buffered.
    SilentlyBuffered {
        /// Evidence.
        why: String,
    },
    /// Through the page cache.
    Buffered {
        /// Why not directly; `None` where buffered reads were asked for.
        why: Option<String>,
    },
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Direct {
                mem_align,
                offset_align,
            } => {
                write!(
                    f,
                    "direct (memory aligned to {mem_align}, offsets to {offset_align})"
                )
            }
            Access::SilentlyBuffered { why } => {
                write!(f, "buffered: O_DIRECT is accepted and ignored ({why})")
            }
            Access::Buffered { why: Some(why) } => write!(f, "buffered: {why}"),
            Access::Buffered { why: None } => f.write_str("buffered, as asked"),
        }
    }
}

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
    /// [`IoMode::Direct`] and a file would not really be read directly.
    pub fn open(paths: &[PathBuf], mode: IoMode) -> Result<FileSet, IoError> {
        if paths.len() > u32::MAX as usize {
            return Err(IoError::BadRequest {
                what: format!("{} files", paths.len()),
            });
        }
        let files = paths
            .iter()
            .map(|path| open_file(path, mode))
            .collect::<Result<Vec<_>, _>>()?;
        let align = files
            .iter()
            .map(OpenFile::align)
            .max()
            .unwrap_or(SECTOR_BYTES);
        Ok(FileSet {
            mode,
            align,
            files,
            warnings: Mutex::new(Vec::new()),
        })
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
                let name = path
                    .file_name()
                    .map_or(path.as_os_str(), |name| name)
                    .display();
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
        self.warnings
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Reads `buf.len()` bytes at `offset`, at any alignment, through the page cache. For what is read once.
    ///
    /// # Errors
    /// [`IoError::EndOfFile`] where the file ends first, [`IoError::Read`] with the kernel's reason.
    pub fn read_exact_at(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<(), IoError> {
        self.checked_len(file)?;
        let entry = self.entry(file);
        let wanted = buf.len() as u64;
        let range = |got: usize| ReadRange {
            path: Arc::clone(&entry.path),
            offset,
            wanted,
            got: got as u64,
        };
        if offset
            .checked_add(wanted)
            .is_none_or(|end| end > i64::MAX as u64)
        {
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
                        return Err(IoError::Read {
                            range: range(got),
                            errno,
                        });
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
            let changed = |what: String| IoError::Changed {
                path: Arc::clone(&entry.path),
                what,
            };
            let now = std::fs::metadata(&entry.path)
                .map_err(|error| changed(format!("{}", Errno::of(&error))))?;
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
            .ok_or_else(|| IoError::BadRequest {
                what: format!("file {} of {}", file.0, self.files.len()),
            })?;
        Ok(entry.identity.bytes)
    }

    pub(crate) fn shared_path(&self, file: FileId) -> Arc<Path> {
        Arc::clone(&self.entry(file).path)
    }

    /// The descriptor reads of `file` use now.
    pub(crate) fn source(&self, file: FileId) -> Source {
        let entry = self.entry(file);
        match &entry.direct {
            Some(direct) if entry.downgraded.get().is_none() => Source {
                fd: direct.as_raw_fd(),
                direct: true,
            },
            _ => Source {
                fd: entry.plain.as_raw_fd(),
                direct: false,
            },
        }
    }

    /// The first file that is read directly.
    pub(crate) fn first_direct(&self) -> Option<FileId> {
        (0..self.files.len() as u32)
            .map(FileId)
            .find(|file| self.source(*file).direct)
    }

    /// What one call through the page cache returns: bytes, all there are, or a negative errno. For the simulator.
    pub(crate) fn read_once(&self, file: FileId, offset: u64, buf: &mut [u8]) -> i32 {
        let mut got = 0;
        while got < buf.len() {
            match self
                .entry(file)
                .plain
                .read_at(&mut buf[got..], offset + got as u64)
            {
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
            return Err(IoError::DirectRefused {
                path: Arc::clone(&entry.path),
                why,
            });
        }
        let line = format!(
            "{}: {why}; reading it through the page cache",
            entry.path.display()
        );
        if entry
            .downgraded
            .set(Access::Buffered { why: Some(why) })
            .is_ok()
        {
            advise_random(&entry.plain);
            self.warnings
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push(line);
        }
        Ok(())
    }

    /// Lets tests hand the kernel offsets it will refuse.
    #[cfg(test)]
    pub(crate) fn force_align(&mut self, align: u32) {
        self.align = align;
    }

    fn entry(&self, file: FileId) -> &OpenFile {
        &self.files[file.0 as usize]
    }
}

impl fmt::Debug for FileSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FileSet")
            .field("mode", &self.mode)
            .field("files", &self.files.len())
            .finish_non_exhaustive()
    }
}

impl OpenFile {
    fn align(&self) -> u32 {
        match self.opened_as {
            Access::Direct {
                mem_align,
                offset_align,
            } => SECTOR_BYTES.max(mem_align).max(offset_align),
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
    let refused = |error: std::io::Error| IoError::Open {
        path: Arc::clone(&shared),
        errno: Errno::of(&error),
    };
    // A pipe would block the open and a device may act on it: look before opening.
    if !std::fs::metadata(path).map_err(refused)?.is_file() {
        return Err(IoError::NotAFile {
            path: Arc::clone(&shared),
        });
    }
    let plain = File::open(path).map_err(refused)?;
    let identity = Identity::of(&plain.metadata().map_err(refused)?);
    let (direct, opened_as, doubt) = match mode {
        IoMode::Buffered => (None, Access::Buffered { why: None }, None),
        IoMode::Auto | IoMode::Direct => {
            let file = OpenOptions::new()
                .read(true)
                .custom_flags(libc::O_DIRECT)
                .open(path);
            match file {
                Ok(file) => {
                    let (access, doubt) = examine(&file)?;
                    (
                        matches!(access, Access::Direct { .. }).then_some(file),
                        access,
                        doubt,
                    )
                }
                Err(error) => {
                    let errno = Errno::of(&error);
                    if !refuses_direct(errno) {
                        return Err(refused(error));
                    }
                    (
                        None,
                        Access::Buffered {
                            why: Some(format!("O_DIRECT was refused at open: {errno}")),
                        },
                        None,
                    )
                }
            }
        }
    };
    match (&opened_as, mode) {
        (
            Access::SilentlyBuffered { why } | Access::Buffered { why: Some(why) },
            IoMode::Direct,
        ) => {
            return Err(IoError::DirectRefused {
                path: shared,
                why: why.clone(),
            });
        }
        (Access::Direct { .. }, _) => {}
        _ => advise_random(&plain),
    }
    Ok(OpenFile {
        path: shared,
        plain,
        direct,
        opened_as,
        downgraded: OnceLock::new(),
        doubt,
        identity,
    })
}

/// Whether an errno means "not directly", rather than "not at all".
pub(crate) fn refuses_direct(errno: Errno) -> bool {
    matches!(errno.kind(), ErrnoKind::Unsupported) || errno.0 == libc::EPERM
}

/// What a file opened with `O_DIRECT` will really do: the kernel's statement where it makes one, else the file system
/// and two reads, one of them misaligned, which only the page cache can serve.
fn examine(file: &File) -> Result<(Access, Option<String>), IoError> {
    let stated = stated_alignment(file);
    if stated == Some((0, 0)) {
        let why = "statx reports no direct I/O for this file".to_owned();
        return Ok((Access::SilentlyBuffered { why }, None));
    }
    let fs = file_system(file);
    if stated.is_none() && (fs == libc::TMPFS_MAGIC || fs == RAMFS_MAGIC) {
        return Ok((
            Access::SilentlyBuffered {
                why: "the file system keeps files in memory".to_owned(),
            },
            None,
        ));
    }
    let (mem, offset) = stated.unwrap_or((SECTOR_BYTES, SECTOR_BYTES));
    let align = mem.max(offset).max(512);
    if !align.is_power_of_two() || align > SECTOR_BYTES_MAX {
        return Ok((
            Access::Buffered {
                why: Some(format!("direct reads need an alignment of {align}")),
            },
            None,
        ));
    }
    let mut buffer = Arena::new(align.max(SECTOR_BYTES) as usize)?;
    match probe(file, buffer.as_mut_slice(), 0) {
        Err(errno) if refuses_direct(errno) => {
            return Ok((
                Access::Buffered {
                    why: Some(format!("a direct read was refused: {errno}")),
                },
                None,
            ));
        }
        // Damage at the first byte is the reader's error to report, not a reason to change the mode.
        Ok(_) | Err(_) => {}
    }
    let misaligned =
        stated.is_none() && probe(file, &mut buffer.as_mut_slice()[..PAGE_BYTES / 2], 1).is_ok();
    let doubt = misaligned.then(|| {
        let name = FILE_SYSTEMS
            .iter()
            .find(|(magic, _)| *magic == fs)
            .map_or("this file system", |(_, name)| name);
        format!(
            "{name} may serve some direct reads from the page cache, which cannot be told apart"
        )
    });
    Ok((
        Access::Direct {
            mem_align: mem,
            offset_align: offset,
        },
        doubt,
    ))
}

/// One read, repeated while a signal interrupts it.
fn probe(file: &File, buffer: &mut [u8], offset: u64) -> Result<usize, Errno> {
    for _ in 0..ATTEMPTS_MAX {
        match file.read_at(buffer, offset) {
            Ok(count) => return Ok(count),
            Err(error) if Errno::of(&error).kind() == ErrnoKind::Interrupted => {}
            Err(error) => return Err(Errno::of(&error)),
        }
    }
    Err(Errno(libc::EINTR))
}

/// Memory and offset alignment of direct I/O as `statx` states it; `None` where the file system says nothing.
fn stated_alignment(file: &File) -> Option<(u32, u32)> {
    // SAFETY: an all-zero `statx` is a valid value of that plain C struct.
    let mut facts: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open, the path is an empty C string, and `facts` outlives the call.
    let rc = unsafe {
        libc::statx(
            file.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            libc::STATX_DIOALIGN,
            &raw mut facts,
        )
    };
    let stated = rc == 0 && facts.stx_mask & libc::STATX_DIOALIGN != 0;
    stated.then_some((facts.stx_dio_mem_align, facts.stx_dio_offset_align))
}

/// Magic number of the file system; 0 where it cannot be had.
fn file_system(file: &File) -> i64 {
    // SAFETY: an all-zero `statfs` is a valid value of that plain C struct.
    let mut facts: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the descriptor is open and `facts` outlives the call.
    let rc = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut facts) };
    if rc == 0 { facts.f_type as i64 } else { 0 }
}

/// Tells the kernel not to read ahead: it would read half as much again for nothing.
fn advise_random(file: &File) {
    // SAFETY: advice on an open descriptor; it changes no data, and a refusal changes nothing.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
}

const RAMFS_MAGIC: i64 = 0x8584_58f6;

/// File systems that decide read by read, or pass the request on to something unseen.
const FILE_SYSTEMS: &[(i64, &str)] = &[
    (0x9123_683e, "btrfs"),
    (0x2fc1_2fc1, "zfs"),
    (0x6969, "nfs"),
    (0x6573_5546, "fuse"),
    (0x0102_1997, "9p"),
    (0x794c_7630, "overlayfs"),
];

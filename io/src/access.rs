//! How a file is read, and the evidence for it: what `open(O_DIRECT)` promises is worth nothing by itself.
#![allow(unsafe_code)]

use std::fmt;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use crate::arena::Arena;
use crate::error::{Errno, ErrnoKind, IoError};
use crate::limits::{ATTEMPTS_MAX, PAGE_BYTES, SECTOR_BYTES, SECTOR_BYTES_MAX};
use crate::sector::{align_down, align_up};

/// How files are to be read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// Directly where the evidence allows, else through the page cache.
    #[default]
    Auto,
    /// Directly, or not at all.
    Direct,
    /// Through the page cache, which keeps what was read.
    Buffered,
    /// Through the page cache with `RWF_DONTCACHE`: the kernel drops each page once it is copied. Linux 6.14 on a file
    /// system that takes part, or not at all.
    DontCache,
    /// Through a mapping of the whole file, by the device of that name only.
    Mmap,
    /// Through the page cache, telling the kernel after each request to drop its pages.
    Drop,
}

impl IoMode {
    /// Every mode, `Auto` first.
    pub const ALL: [IoMode; 6] =
        [IoMode::Auto, IoMode::Direct, IoMode::Buffered, IoMode::DontCache, IoMode::Mmap, IoMode::Drop];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            IoMode::Auto => "auto",
            IoMode::Direct => "direct",
            IoMode::Buffered => "buffered",
            IoMode::DontCache => "dontcache",
            IoMode::Mmap => "mmap",
            IoMode::Drop => "drop",
        }
    }
}

impl FromStr for IoMode {
    type Err = String;

    fn from_str(text: &str) -> Result<IoMode, String> {
        let found = IoMode::ALL.into_iter().find(|mode| mode.name() == text);
        found.ok_or_else(|| format!("unknown I/O mode '{text}': auto, direct, buffered, dontcache, mmap or drop"))
    }
}

impl fmt::Display for IoMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
    /// Through the page cache with `RWF_DONTCACHE`, which a probe read took.
    DontCache,
    /// Through a mapping.
    Mapped,
    /// Through the page cache, which is told to drop the pages of each request once they are copied.
    Dropped,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Access::Direct { mem_align, offset_align } => {
                write!(f, "direct (memory aligned to {mem_align}, offsets to {offset_align})")
            }
            Access::SilentlyBuffered { why } => {
                write!(f, "buffered: O_DIRECT is accepted and ignored ({why})")
            }
            Access::Buffered { why: Some(why) } => write!(f, "buffered: {why}"),
            Access::Buffered { why: None } => f.write_str("buffered, as asked"),
            Access::DontCache => f.write_str("buffered with RWF_DONTCACHE"),
            Access::Mapped => f.write_str("mapped"),
            Access::Dropped => f.write_str("buffered, dropped from the page cache after use"),
        }
    }
}

/// What was found out about a file.
pub(crate) struct Evidence {
    /// The descriptor for direct reads, where they are what will really happen.
    pub direct: Option<File>,
    pub access: Access,
    /// What the evidence leaves open.
    pub doubt: Option<String>,
}

/// Opens `path` for direct reads and finds out what such reads will really be.
pub(crate) fn open_directly(path: &Arc<Path>) -> Result<Evidence, IoError> {
    match OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path) {
        Ok(file) => {
            let (access, doubt) = examine(&file)?;
            let direct = matches!(access, Access::Direct { .. }).then_some(file);
            Ok(Evidence { direct, access, doubt })
        }
        Err(error) if refuses_direct(Errno::of(&error)) => {
            let why = format!("O_DIRECT was refused at open: {}", Errno::of(&error));
            Ok(Evidence { direct: None, access: Access::Buffered { why: Some(why) }, doubt: None })
        }
        Err(error) => Err(IoError::Open { path: Arc::clone(path), errno: Errno::of(&error) }),
    }
}

/// Whether an errno means "not directly", rather than "not at all".
pub(crate) fn refuses_direct(errno: Errno) -> bool {
    matches!(errno.kind(), ErrnoKind::Unsupported) || errno.0 == libc::EPERM
}

/// Whether whole multiples of `unit` bytes, from page-aligned memory, go around the page cache through `file`, which was
/// opened with `O_DIRECT`.
pub(crate) fn really_direct(file: &File, unit: usize) -> bool {
    let takes = |align: u32| align > 0 && unit.is_multiple_of(align as usize);
    match examine(file) {
        Ok((Access::Direct { mem_align, offset_align }, _)) => {
            mem_align as usize <= PAGE_BYTES && takes(mem_align) && takes(offset_align)
        }
        _ => false,
    }
}

/// Whether the kernel and the file system take reads with `RWF_DONTCACHE`, asked by one.
///
/// # Errors
/// [`IoError::Refused`] where they do not.
pub(crate) fn probe_dontcache(path: &Arc<Path>, file: &File) -> Result<(), IoError> {
    let mut byte = [0u8; 1];
    let place = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: byte.len() };
    for _ in 0..ATTEMPTS_MAX {
        // SAFETY: the descriptor is open, and `place` describes one byte that outlives the call.
        let count = unsafe { libc::preadv2(file.as_raw_fd(), &raw const place, 1, 0, libc::RWF_DONTCACHE) };
        if count >= 0 {
            return Ok(());
        }
        let errno = Errno::last();
        match errno.kind() {
            ErrnoKind::Interrupted => {}
            ErrnoKind::Unsupported | ErrnoKind::NoSystemCall => {
                let why = format!(
                    "{}: a read with RWF_DONTCACHE was refused: {errno}; it needs Linux 6.14 and a file system that \
                     takes part, such as ext4 or xfs",
                    path.display()
                );
                return Err(IoError::Refused { what: "dontcache", why });
            }
            // Damage at the first byte is the reader's error to report.
            _ => return Ok(()),
        }
    }
    Ok(())
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
        return Ok((Access::SilentlyBuffered { why: "the file system keeps files in memory".to_owned() }, None));
    }
    let (mem, offset) = stated.unwrap_or((SECTOR_BYTES, SECTOR_BYTES));
    let align = mem.max(offset).max(512);
    if !align.is_power_of_two() || align > SECTOR_BYTES_MAX {
        return Ok((Access::Buffered { why: Some(format!("direct reads need an alignment of {align}")) }, None));
    }
    let mut buffer = Arena::new(align.max(SECTOR_BYTES) as usize)?;
    match probe(file, buffer.as_mut_slice(), 0) {
        Err(errno) if refuses_direct(errno) => {
            return Ok((Access::Buffered { why: Some(format!("a direct read was refused: {errno}")) }, None));
        }
        // Damage at the first byte is the reader's error to report, not a reason to change the mode.
        Ok(_) | Err(_) => {}
    }
    let misaligned = stated.is_none() && probe(file, &mut buffer.as_mut_slice()[..PAGE_BYTES / 2], 1).is_ok();
    let doubt = misaligned.then(|| {
        let name = FILE_SYSTEMS.iter().find(|(magic, _)| *magic == fs).map_or("this file system", |(_, name)| name);
        format!("{name} may serve some direct reads from the page cache, which cannot be told apart")
    });
    Ok((Access::Direct { mem_align: mem, offset_align: offset }, doubt))
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
        libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &raw mut facts)
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
pub(crate) fn advise_random(file: &File) {
    // SAFETY: advice on an open descriptor; it changes no data, and a refusal changes nothing.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
}

/// Tells the kernel that the pages of `len` bytes at `offset` are not needed again: those that the range
/// touches, whole.
pub(crate) fn drop_cached(fd: RawFd, offset: u64, len: u64) {
    let start = align_down(offset, PAGE_BYTES as u64);
    let Some(end) = align_up(offset + len, PAGE_BYTES as u64) else {
        return;
    };
    let (start, len) = (start.cast_signed(), (end - start).cast_signed());
    // SAFETY: advice on an open descriptor; it changes no data, and a refusal changes nothing.
    let _ = unsafe { libc::posix_fadvise(fd, start, len, libc::POSIX_FADV_DONTNEED) };
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

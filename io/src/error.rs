//! What can go wrong, as values: which file, which bytes, which errno, and what to do about it.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// The bytes of a file a failed read was after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadRange {
    /// File as it was opened.
    pub path: Arc<Path>,
    /// First byte wanted.
    pub offset: u64,
    /// Bytes wanted from there.
    pub wanted: u64,
    /// Bytes that had arrived.
    pub got: u64,
}

impl fmt::Display for ReadRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ReadRange { path, offset, wanted, got } = self;
        write!(f, "{wanted} bytes at {offset} of {} ({got} arrived)", path.display())
    }
}

/// Every failure of the crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum IoError {
    /// The file could not be opened or examined.
    #[error("cannot open {}: {errno}", path.display())]
    Open {
        /// The file.
        path: Arc<Path>,
        /// What the kernel said.
        errno: Errno,
    },
    /// The path is a directory, pipe or device.
    #[error("{} is not a regular file", path.display())]
    NotAFile {
        /// The path.
        path: Arc<Path>,
    },
    /// Direct reads were demanded and are not possible, or would silently go through the page cache.
    #[error("{} cannot be read directly: {why}", path.display())]
    DirectRefused {
        /// The file.
        path: Arc<Path>,
        /// Evidence.
        why: String,
    },
    /// A mode or switch was asked for by name and is not to be had here, or not together with another.
    #[error("{what} is not possible: {why}")]
    Refused {
        /// The mode or switch: `dontcache`, `mmap`, `hugetlb`, `iopoll`, ...
        what: &'static str,
        /// Evidence, or the rule it breaks.
        why: String,
    },
    /// The kernel reported an error for a read, after the retries it deserves.
    #[error("cannot read {range}: {errno}")]
    Read {
        /// The bytes.
        range: ReadRange,
        /// What the kernel said last.
        errno: Errno,
    },
    /// The file ends before the bytes do.
    #[error("file ends early: cannot read {range}")]
    EndOfFile {
        /// The bytes.
        range: ReadRange,
    },
    /// The kernel kept returning parts, or nothing, without an error.
    #[error("gave up after {attempts} attempts to read {range}")]
    Stuck {
        /// The bytes.
        range: ReadRange,
        /// System calls spent.
        attempts: u32,
    },
    /// A byte range lies outside its file.
    #[error("{} has {file_bytes} bytes, {len} at {offset} were asked for", path.display())]
    OutOfFile {
        /// The file.
        path: Arc<Path>,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Size of the file.
        file_bytes: u64,
    },
    /// The file is no longer the one that was opened.
    #[error("{} changed since it was opened: {what}", path.display())]
    Changed {
        /// The file.
        path: Arc<Path>,
        /// Which property, with the value before and after.
        what: String,
    },
    /// What was given as a copy of a file is none.
    #[error("{} is no copy of {}: {what}", path.display(), of.display())]
    NotACopy {
        /// What was given.
        path: Arc<Path>,
        /// The file.
        of: Arc<Path>,
        /// What differs.
        what: String,
    },
    /// A request that cannot be right: zero length, misaligned, outside the slab.
    #[error("bad read request: {what}")]
    BadRequest {
        /// Which rule it breaks, with the values.
        what: String,
    },
    /// The arena could not be had.
    #[error("cannot reserve {bytes} bytes of memory: {errno}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// What the kernel said.
        errno: Errno,
    },
    /// io_uring is not available.
    #[error("io_uring is not available: {step} failed: {errno}")]
    RingRefused {
        /// System call or check that failed.
        step: &'static str,
        /// What the kernel said.
        errno: Errno,
        /// What would make it work.
        remedy: String,
    },
    /// A thread or eventfd the device needs could not be made.
    #[error("cannot start {what}: {errno}")]
    Start {
        /// Which.
        what: &'static str,
        /// What the kernel said.
        errno: Errno,
    },
    /// The device stopped working; it does not recover.
    #[error("the read device died: {cause}")]
    DeviceDied {
        /// Why.
        cause: String,
    },
    /// The read was taken back before it started.
    #[error("read cancelled before it started")]
    Cancelled,
}

impl IoError {
    /// Whether it says that this way of reading cannot be had here, rather than that reading failed.
    pub fn is_refusal(&self) -> bool {
        matches!(self, IoError::RingRefused { .. } | IoError::DirectRefused { .. } | IoError::Refused { .. })
    }

    /// What the user can do, in one line; `None` where there is nothing to say beyond the error.
    pub fn hint(&self) -> Option<String> {
        let text = match self {
            IoError::Open { errno, .. } => return errno.hint().map(str::to_owned),
            IoError::NotAFile { .. } => "give the path of the file itself",
            IoError::DirectRefused { .. } => {
                "use --io auto, or move the file to ext4 or xfs on a local drive (not tmpfs, not data=journal)"
            }
            IoError::Read { errno, .. } => return errno.hint().map(str::to_owned),
            IoError::EndOfFile { .. } | IoError::OutOfFile { .. } => {
                "the file is truncated or still being written: finish or repeat the download"
            }
            IoError::Stuck { .. } => "the file system keeps returning partial reads: try --io buffered",
            IoError::Changed { .. } => "do not write to the files of a running model; start again",
            IoError::NotACopy { .. } => "copy the file again",
            IoError::Memory { .. } => {
                "raise `ulimit -v` or the cgroup's memory.max, or free memory; a run takes less with a lower --ram"
            }
            IoError::RingRefused { remedy, .. } => return Some(remedy.clone()),
            IoError::Start { errno, .. } if errno.kind() == ErrnoKind::Again => {
                "no more threads or processes may be started: end some, or raise `ulimit -u` or the cgroup's pids.max"
            }
            IoError::Start { errno, .. } => return errno.hint().map(str::to_owned),
            IoError::DeviceDied { .. } => "start again; --device threads avoids io_uring",
            IoError::Refused { what, .. } => return REMEDIES.iter().find(|r| r.0 == *what).map(|r| r.1.to_owned()),
            IoError::BadRequest { .. } | IoError::Cancelled => return None,
        };
        Some(text.to_owned())
    }

    /// The errno inside, where the kernel gave one.
    pub fn errno(&self) -> Option<Errno> {
        match self {
            IoError::Open { errno, .. }
            | IoError::Read { errno, .. }
            | IoError::Memory { errno, .. }
            | IoError::RingRefused { errno, .. }
            | IoError::Start { errno, .. } => Some(*errno),
            _ => None,
        }
    }
}

/// What to do instead of a mode or switch that was refused.
const REMEDIES: &[(&str, &str)] = &[
    ("dontcache", "--io drop drops what was read by other means; --io auto avoids the page cache where it can"),
    ("mmap", "mapped files go with --io mmap and the device mmap, or with either left at auto"),
    ("hugetlb", "reserve pages with `sysctl vm.nr_hugepages=N`, 2 MiB each, or use transparent ones"),
    ("iopoll", "polled reads need direct reads and a driver with poll queues (nvme.poll_queues=N); leave it off"),
    (
        "numa",
        "docker forbids it without --cap-add SYS_NICE; --cpuset-cpus and --cpuset-mems place a container from outside",
    ),
    ("sqpoll", "a polling kernel thread belongs to io_uring: --device uring"),
];

/// An error number of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

/// What an errno means to this crate; the one place where numbers are told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrnoKind {
    /// A signal came first; nothing is wrong.
    Interrupted,
    /// Resources are short now; later it may work.
    Again,
    /// The drive or file system could not produce the bytes.
    Damaged,
    /// The call is understood and not possible on this file.
    Unsupported,
    /// Not allowed.
    Denied,
    /// No such path.
    Missing,
    /// Memory, or the memory that may be locked, is short.
    NoMemory,
    /// Descriptors are short.
    TooManyFiles,
    /// The kernel has no such call.
    NoSystemCall,
    /// The drive or mount went away.
    Gone,
    /// The file system, or what this user may have of it, is full, or the file may be no larger.
    Full,
    /// The file system takes no writes.
    ReadOnly,
    /// Nothing this crate acts on.
    Other,
}

impl Errno {
    /// The errno of the last failed call of this thread.
    pub(crate) fn last() -> Errno {
        Errno::of(&std::io::Error::last_os_error())
    }

    /// The errno inside a standard error; `EIO` where it carries none.
    pub fn of(error: &std::io::Error) -> Errno {
        Errno(error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// Sorts the number. Exhaustive by meaning: what is not listed is `Other` and fails the read as it is.
    pub(crate) fn kind(self) -> ErrnoKind {
        match self.0 {
            libc::EINTR => ErrnoKind::Interrupted,
            libc::EAGAIN | libc::EBUSY | libc::ETIME => ErrnoKind::Again,
            libc::EIO | libc::EBADMSG | libc::EUCLEAN | libc::EREMOTEIO | libc::ENODATA | libc::EILSEQ => {
                ErrnoKind::Damaged
            }
            libc::EINVAL | libc::EOPNOTSUPP => ErrnoKind::Unsupported,
            libc::EPERM | libc::EACCES => ErrnoKind::Denied,
            libc::ENOENT | libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG => ErrnoKind::Missing,
            libc::ENOMEM | libc::ENOBUFS => ErrnoKind::NoMemory,
            libc::EMFILE | libc::ENFILE => ErrnoKind::TooManyFiles,
            libc::ENOSYS => ErrnoKind::NoSystemCall,
            libc::ENODEV | libc::ENXIO | libc::ESTALE | libc::ENOTCONN | libc::ESHUTDOWN => ErrnoKind::Gone,
            libc::ENOSPC | libc::EDQUOT | libc::EFBIG => ErrnoKind::Full,
            libc::EROFS => ErrnoKind::ReadOnly,
            _ => ErrnoKind::Other,
        }
    }

    /// The symbol, for the numbers met in practice.
    pub fn name(self) -> &'static str {
        NAMES.iter().find(|(number, _)| *number == self.0).map_or("unnamed", |(_, name)| name)
    }

    fn hint(self) -> Option<&'static str> {
        match self.kind() {
            ErrnoKind::Damaged => Some("the drive reports damage: check `dmesg` and copy the file again"),
            ErrnoKind::Denied => Some("the file's permissions, or a security policy, do not allow reading it"),
            ErrnoKind::Missing => Some("a file of the model is missing: finish the download"),
            ErrnoKind::TooManyFiles => Some("too many open files: raise `ulimit -n`"),
            ErrnoKind::NoMemory => Some("memory is short: lower the memory budget, or raise the limit"),
            ErrnoKind::Gone => Some("the drive or mount went away: check the cable, the mount and `dmesg`"),
            ErrnoKind::Again => Some("the machine is out of resources for a moment: try again"),
            ErrnoKind::Unsupported => Some("the file system does not support this read: try --io buffered"),
            ErrnoKind::NoSystemCall => Some("the kernel is too old, or a security filter hides the call"),
            ErrnoKind::ReadOnly => Some("the file system is mounted read-only: give a place on another"),
            ErrnoKind::Full => Some(match self.0 {
                libc::EFBIG => "files may be no larger: raise `ulimit -f`, or write less",
                libc::EDQUOT => "this user's quota is used up: free space of theirs, or have it raised",
                _ => "free space, or write less",
            }),
            ErrnoKind::Interrupted | ErrnoKind::Other => None,
        }
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The standard text already ends in "(os error N)".
        write!(f, "{} [{}]", std::io::Error::from_raw_os_error(self.0), self.name())
    }
}

const NAMES: &[(i32, &str)] = &[
    (libc::EPERM, "EPERM"),
    (libc::ENOENT, "ENOENT"),
    (libc::EINTR, "EINTR"),
    (libc::EIO, "EIO"),
    (libc::ENXIO, "ENXIO"),
    (libc::EBADF, "EBADF"),
    (libc::EAGAIN, "EAGAIN"),
    (libc::ENOMEM, "ENOMEM"),
    (libc::EACCES, "EACCES"),
    (libc::EFAULT, "EFAULT"),
    (libc::EBUSY, "EBUSY"),
    (libc::EEXIST, "EEXIST"),
    (libc::ENODEV, "ENODEV"),
    (libc::EFBIG, "EFBIG"),
    (libc::ENOSPC, "ENOSPC"),
    (libc::EROFS, "EROFS"),
    (libc::EDQUOT, "EDQUOT"),
    (libc::ENOTDIR, "ENOTDIR"),
    (libc::EISDIR, "EISDIR"),
    (libc::EINVAL, "EINVAL"),
    (libc::ENFILE, "ENFILE"),
    (libc::EMFILE, "EMFILE"),
    (libc::ENAMETOOLONG, "ENAMETOOLONG"),
    (libc::ENOSYS, "ENOSYS"),
    (libc::ELOOP, "ELOOP"),
    (libc::ETIME, "ETIME"),
    (libc::EREMOTEIO, "EREMOTEIO"),
    (libc::ENODATA, "ENODATA"),
    (libc::EBADMSG, "EBADMSG"),
    (libc::EOVERFLOW, "EOVERFLOW"),
    (libc::EILSEQ, "EILSEQ"),
    (libc::EOPNOTSUPP, "EOPNOTSUPP"),
    (libc::ENOBUFS, "ENOBUFS"),
    (libc::ENOTCONN, "ENOTCONN"),
    (libc::ESTALE, "ESTALE"),
    (libc::EUCLEAN, "EUCLEAN"),
    (libc::ECANCELED, "ECANCELED"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_file_offset_wanted_got_and_errno() {
        let range = ReadRange { path: Arc::from(Path::new("/m/a.safetensors")), offset: 8192, wanted: 100, got: 7 };
        let text = IoError::Read { range: range.clone(), errno: Errno(5) }.to_string();
        for part in ["/m/a.safetensors", "8192", "100", "7 arrived", "EIO", "os error 5"] {
            assert!(text.contains(part), "{part} not in {text}");
        }
        assert!(IoError::Read { range, errno: Errno(5) }.hint().is_some_and(|h| h.contains("damage")));
    }

    #[test]
    fn a_read_that_fails_is_no_refusal_whatever_the_kernel_says() {
        let range = ReadRange { path: Arc::from(Path::new("/m/a")), offset: 0, wanted: 1, got: 0 };
        assert!(!IoError::Read { range, errno: Errno(libc::EOPNOTSUPP) }.is_refusal());
        assert!(IoError::Refused { what: "iopoll", why: "the first polled read was refused".to_owned() }.is_refusal());
    }

    #[test]
    fn a_drive_that_takes_no_more_is_not_said_to_be_damaged() {
        for (errno, words) in [
            (libc::EFBIG, "ulimit -f"),
            (libc::EDQUOT, "quota"),
            (libc::EROFS, "read-only"),
            (libc::ENOSPC, "free space"),
            (libc::EIO, "damage"),
        ] {
            let hint = Errno(errno).hint().unwrap_or_default();
            assert!(hint.contains(words) && Errno(errno).name() != "unnamed", "{errno}: {hint}");
        }
    }

    #[test]
    fn errors_stay_small_enough_to_return_by_value() {
        assert!(size_of::<IoError>() <= 128, "{}", size_of::<IoError>());
    }
}

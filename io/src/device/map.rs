//! Mapped files: threads that have the kernel bring pages in and copy them into the slabs.
//!
//! Nothing here touches a mapped byte itself. A file that shrinks under its mapping turns a touch into `SIGBUS`; asked
//! for the same bytes, `MADV_POPULATE_READ` and `process_vm_readv` answer `EFAULT`, even where the file shrinks
//! between the two. Which byte is the last is asked of the file before each copy and after it.
//!
//! What has been copied is unmapped again: as long as pages of a mapping are mapped they count as memory of the process,
//! and after a while all of the file would. The kernel keeps them in its cache as it finds best, as for any other read.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use crate::access::IoMode;
use crate::device::schedule::{Issue, Schedule};
use crate::device::threads::{Calls, limits, start};
use crate::device::{Device, DeviceConfig, DeviceReport};
use crate::error::{Errno, IoError};
use crate::file::{FileId, FileSet};
use crate::limits::{HUGE_PAGE_BYTES, PAGE_BYTES};
use crate::pool::SlabPool;
use crate::sector::align_down;

/// Maps every file and starts the threads.
pub(crate) fn open(cfg: &DeviceConfig, files: Arc<FileSet>, pool: &SlabPool) -> Result<Box<dyn Device>, IoError> {
    debug_assert_eq!(files.mode(), IoMode::Mmap);
    let maps = files.entries().map(|file| Map::of(&files, file)).collect::<Result<Vec<_>, _>>()?;
    probe(maps.first())?;
    let report = DeviceReport { name: "mmap", ..DeviceReport::default() };
    let (limits, threads) = (limits(cfg, &files, pool), cfg.threads_for(&files));
    let schedule = Schedule::new(Arc::clone(&files), pool.clone(), limits);
    start(threads, schedule, report, Copies { files, maps, process: std::process::id().cast_signed() })
}

/// Whether the kernel has the two calls this device is made of.
fn probe(first: Option<&Map>) -> Result<(), IoError> {
    let refused = |call: &str, errno: Errno, why: &str| {
        Err(IoError::Refused { what: "mmap", why: format!("{call} was refused: {errno}; {why}") })
    };
    let (from, mut to) = (7u8, 0u8);
    if let Err(errno) = copy(std::process::id().cast_signed(), NonNull::from(&mut to), NonNull::from(&from), 1) {
        return refused("process_vm_readv", errno, "a seccomp filter may forbid it");
    }
    match first.map_or(Ok(()), |map| map.advise(0, 1, libc::MADV_POPULATE_READ)) {
        Err(errno) if errno.0 == libc::EINVAL => refused("MADV_POPULATE_READ", errno, "it needs Linux 5.14"),
        // What is wrong with the first page is for its reader to report.
        Ok(()) | Err(_) => Ok(()),
    }
}

/// A file's mapping. Its bytes are never viewed as a slice: whoever writes the file would write under the view.
struct Map {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the mapping belongs to this value and is bound to no thread; only the kernel follows the pointer.
unsafe impl Send for Map {}
// SAFETY: as above; nothing is changed through `&Map`.
unsafe impl Sync for Map {}

impl Map {
    /// Maps the file at the size it was opened with; an empty file has an empty mapping.
    fn of(files: &FileSet, file: FileId) -> Result<Map, IoError> {
        let refused =
            |why: String| IoError::Refused { what: "mmap", why: format!("{}: {why}", files.path(file).display()) };
        let Ok(bytes) = usize::try_from(files.len_bytes(file)) else {
            return Err(refused("too long for this machine's addresses".to_owned()));
        };
        if bytes == 0 {
            return Ok(Map { base: NonNull::dangling(), bytes });
        }
        let fd = files.source(file).fd;
        // SAFETY: a read-only mapping at an address of the kernel's choice touches no existing memory, and the
        // descriptor is open.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ, libc::MAP_SHARED, fd, 0) };
        match NonNull::new(base.cast()).filter(|_| base != libc::MAP_FAILED) {
            Some(base) => Ok(Map { base, bytes }),
            None => Err(refused(format!("cannot map {bytes} bytes: {}", Errno::last()))),
        }
    }

    /// Address of `offset`, which must be inside.
    fn at(&self, offset: usize) -> NonNull<u8> {
        assert!(offset < self.bytes, "{offset} in a mapping of {}", self.bytes);
        // SAFETY: the offset is inside the mapping, by the assertion.
        unsafe { self.base.add(offset) }
    }

    /// Advises about the pages that hold `len` bytes at `offset`, as far as they are mapped.
    fn advise(&self, offset: usize, len: usize, advice: i32) -> Result<(), Errno> {
        if offset >= self.bytes || len == 0 {
            return Ok(());
        }
        let start = align_down(offset as u64, PAGE_BYTES as u64) as usize;
        let end = (offset + len).min(self.bytes);
        let address = self.at(start).as_ptr().cast();
        // SAFETY: the range lies in this mapping, whose last page is whole; the advices used bring pages in, or unmap pages of
        // a file that is only read: whoever asks for one again, as a neighbour of the range may, has it mapped anew.
        let rc = unsafe { libc::madvise(address, end - start, advice) };
        if rc == 0 { Ok(()) } else { Err(Errno::last()) }
    }

    /// Unmaps the pages that hold `len` bytes at `offset`, and those beside them that a fault maps with one it is asked for:
    /// of the same huge page, at most.
    fn unmap(&self, offset: usize, len: usize) {
        let start = align_down(offset as u64, HUGE_PAGE_BYTES as u64) as usize;
        let end = (offset + len).next_multiple_of(HUGE_PAGE_BYTES);
        // Where it fails memory is larger than it should be, and the bytes are right.
        let _ = self.advise(start, end - start, libc::MADV_DONTNEED);
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: the mapping was made with this size, and the threads that use it are the owners of `self`.
            let rc = unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
            debug_assert_eq!(rc, 0, "munmap of {} bytes", self.bytes);
        }
    }
}

/// Calls answered from the mappings.
struct Copies {
    files: Arc<FileSet>,
    maps: Vec<Map>,
    process: i32,
}

impl Copies {
    /// Bytes of the call that the mapping has and the file has now.
    fn there(&self, issue: &Issue) -> Result<usize, Errno> {
        let end = self.files.len_now(issue.file)?.min(self.maps[issue.file.0 as usize].bytes as u64);
        Ok(end.saturating_sub(issue.offset).min(u64::from(issue.len)) as usize)
    }

    fn read(&self, issue: &Issue) -> Result<usize, Errno> {
        let there = self.there(issue)?;
        if there == 0 {
            return Ok(0);
        }
        let map = &self.maps[issue.file.0 as usize];
        // `there` is not 0, so the offset is inside the mapping.
        let offset = issue.offset as usize;
        let came = map
            .advise(offset, there, libc::MADV_WILLNEED)
            .and_then(|()| map.advise(offset, there, libc::MADV_POPULATE_READ))
            .and_then(|()| copy(self.process, issue.address, map.at(offset), there));
        map.unmap(offset, there);
        // A file that shrank meanwhile has fewer bytes, and the last page it keeps has zeros where they were.
        let still = self.there(issue)?;
        match came {
            Ok(count) => Ok(count.min(still)),
            // The file shrank under the call: the next one finds its end.
            Err(errno) if errno.0 == libc::EFAULT && still < there => Err(Errno(libc::EINTR)),
            // A page of the file that cannot be read.
            Err(errno) if errno.0 == libc::EFAULT => Err(Errno(libc::EIO)),
            Err(errno) => Err(errno),
        }
    }
}

impl Calls for Copies {
    const PREPARES: bool = true;

    fn prepare(&self, issue: &Issue) {
        let map = &self.maps[issue.file.0 as usize];
        let (Ok(offset), len) = (usize::try_from(issue.offset), issue.len as usize) else {
            return;
        };
        // Advice: where it fails the call itself says why.
        let _ = map.advise(offset, len, libc::MADV_WILLNEED);
    }

    fn make(&self, issue: &Issue) -> i32 {
        match self.read(issue) {
            Ok(count) => i32::try_from(count).unwrap_or(i32::MAX),
            Err(errno) => -errno.0,
        }
    }
}

/// Has the kernel copy `len` bytes of this process from `from` to `to`; the count, which is short where a page beyond
/// it cannot be had.
fn copy(process: i32, to: NonNull<u8>, from: NonNull<u8>, len: usize) -> Result<usize, Errno> {
    let local = libc::iovec { iov_base: to.as_ptr().cast(), iov_len: len };
    let remote = libc::iovec { iov_base: from.as_ptr().cast(), iov_len: len };
    // SAFETY: `to` is `len` writable bytes that nobody else uses: of a slab that `Schedule` keeps in the slot of the
    // operation until `complete`, or of the probe. The kernel checks every page of `from` and faults for nobody.
    let count = unsafe { libc::process_vm_readv(process, &raw const local, 1, &raw const remote, 1, 0) };
    usize::try_from(count).map_err(|_| Errno::last())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel's own answers that the design rests on.
    #[test]
    fn a_page_that_the_file_lost_is_an_error_to_both_calls() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![5u8; 4 * PAGE_BYTES]).unwrap();
        let files = FileSet::open(&[file.path().to_owned()], IoMode::Mmap).unwrap();
        let map = Map::of(&files, FileId(0)).unwrap();
        let mut to = vec![0u8; 4 * PAGE_BYTES];
        let address = NonNull::new(to.as_mut_ptr()).unwrap();
        let process = std::process::id().cast_signed();
        assert_eq!(copy(process, address, map.at(0), 4 * PAGE_BYTES), Ok(4 * PAGE_BYTES));
        assert!(to.iter().all(|byte| *byte == 5));
        std::fs::OpenOptions::new().write(true).open(file.path()).unwrap().set_len(PAGE_BYTES as u64 + 1).unwrap();
        assert_eq!(map.advise(0, 2 * PAGE_BYTES, libc::MADV_POPULATE_READ), Ok(()));
        assert_eq!(map.advise(0, 3 * PAGE_BYTES, libc::MADV_POPULATE_READ), Err(Errno(libc::EFAULT)));
        assert_eq!(copy(process, address, map.at(0), 4 * PAGE_BYTES), Ok(2 * PAGE_BYTES), "up to the last page");
        assert_eq!(copy(process, address, map.at(2 * PAGE_BYTES), 1), Err(Errno(libc::EFAULT)));
    }
}

//! What only system calls tell: pages of a file in memory, its pieces on disk, time on the CPU.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use crate::limits::PAGE_BYTES;

/// Bytes of a file looked at in one `mincore`.
const WINDOW_BYTES: u64 = 256 << 20;

/// Asks the kernel to forget the file's clean pages. Pages that another process has mapped stay.
pub fn drop_pages(file: &File) {
    // SAFETY: advice on an open descriptor; it changes no data, and a refusal changes nothing.
    let _ = unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
}

/// Share of the file's pages that are in memory, 0 to 1; `None` where the kernel does not tell: it answers only who
/// owns the file or may write it, and tells everybody else that all of it is.
pub fn resident_share(file: &File) -> Option<f64> {
    let facts = file.metadata().ok()?;
    // SAFETY: the call takes nothing and cannot fail.
    let user = unsafe { libc::geteuid() };
    if user != 0 && user != facts.uid() {
        return None;
    }
    let pages = facts.len().div_ceil(PAGE_BYTES as u64);
    if pages == 0 {
        return Some(0.0);
    }
    let mut resident = 0;
    for from in (0..facts.len()).step_by(WINDOW_BYTES as usize) {
        resident += resident_pages(file, from, WINDOW_BYTES.min(facts.len() - from))?;
    }
    Some(resident as f64 / pages as f64)
}

fn resident_pages(file: &File, from: u64, bytes: u64) -> Option<u64> {
    let bytes = usize::try_from(bytes).ok()?;
    let window = Window::new(file, from, bytes)?;
    let mut states = vec![0u8; bytes.div_ceil(PAGE_BYTES)];
    // SAFETY: the window is mapped for `bytes` bytes, and `states` has a byte for each of its pages.
    let rc = unsafe { libc::mincore(window.address.as_ptr(), bytes, states.as_mut_ptr().cast()) };
    (rc == 0).then(|| states.iter().map(|state| u64::from(state & 1)).sum())
}

/// Part of a file, mapped and never touched.
struct Window {
    address: NonNull<libc::c_void>,
    bytes: usize,
}

impl Window {
    fn new(file: &File, from: u64, bytes: usize) -> Option<Window> {
        let (protection, flags, from) = (libc::PROT_READ, libc::MAP_SHARED, i64::try_from(from).ok()?);
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, file.as_raw_fd(), from) };
        if address == libc::MAP_FAILED {
            return None;
        }
        Some(Window { address: NonNull::new(address)?, bytes })
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new` with this size and nobody holds a reference into it.
        let _ = unsafe { libc::munmap(self.address.as_ptr(), self.bytes) };
    }
}

/// `struct fiemap` of the kernel's interface, without room for extents: then it only counts them.
#[repr(C)]
#[derive(Default)]
struct ExtentCount {
    start: u64,
    length: u64,
    flags: u32,
    mapped_extents: u32,
    extent_count: u32,
    reserved: u32,
}

/// `_IOWR('f', 11, struct fiemap)`.
const FS_IOC_FIEMAP: u64 = 0xC020_660B;

/// Pieces the file has on disk; `None` where the file system does not tell.
pub fn extents(file: &File) -> Option<u32> {
    let mut request = ExtentCount { length: u64::MAX, ..ExtentCount::default() };
    // SAFETY: `request` is a fiemap of extent_count 0, which the kernel fills without writing past it.
    let rc = unsafe { libc::ioctl(file.as_raw_fd(), FS_IOC_FIEMAP as _, &raw mut request) };
    (rc == 0).then_some(request.mapped_extents)
}

/// User and system time of this process so far, all its threads and kernel workers included.
pub fn cpu_seconds() -> f64 {
    // SAFETY: an all-zero `rusage` is a valid value of that plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid place for the answer and outlives the call.
    let rc = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    if rc == 0 { seconds(usage.ru_utime) + seconds(usage.ru_stime) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn pages_come_into_memory_and_leave_it() {
        // Where memory is the file system's only place, nothing can leave it.
        let dir = env!("CARGO_MANIFEST_DIR");
        let mut file = match tempfile::tempfile_in(dir) {
            Ok(file) => file,
            Err(error) => return eprintln!("skipped: {dir}: {error}"),
        };
        file.write_all(&vec![1; 3 << 20]).unwrap();
        file.write_all(&[1; 5]).unwrap();
        assert_eq!(resident_share(&file), Some(1.0), "just written");
        file.sync_all().unwrap();
        drop_pages(&file);
        let share = resident_share(&file).unwrap();
        if share > 0.0 {
            eprintln!("skipped: the file system of {dir} keeps {share} in memory");
        }
        assert!(extents(&file).is_none_or(|count| count >= 1));
    }

    #[test]
    fn an_empty_file_has_no_pages() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(resident_share(&file), Some(0.0));
    }

    #[test]
    fn time_on_the_cpu_grows_with_work() {
        let before = cpu_seconds();
        let mut sum = 0u64;
        while cpu_seconds() == before {
            sum = std::hint::black_box(sum.wrapping_mul(3).wrapping_add(1));
        }
        assert!(cpu_seconds() > before);
    }
}

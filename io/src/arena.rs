//! Memory for slabs and weights: zeroed, aligned, on huge pages where the machine has them, faulted in at once.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;

use crate::error::{Errno, IoError};
use crate::limits::{HUGE_PAGE_BYTES, PAGE_BYTES, POPULATE_PIECE_BYTES};

/// Small pages are worth a line where they are more than one in so many of those that might be huge.
const SMALL_NOTED: u64 = 4;

/// Which pages back an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageKind {
    /// Reserved 2 MiB pages (`vm.nr_hugepages`).
    HugeTlb,
    /// Transparent 2 MiB pages, all or most of the arena.
    Transparent,
    /// 4 KiB pages: reads cost more CPU and smaller device requests.
    Small,
}

/// Which pages are asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pages {
    /// Reserved 2 MiB pages where there are enough, else transparent ones, else what there is.
    #[default]
    Auto,
    /// Reserved 2 MiB pages, or nothing.
    HugeTlb,
    /// Transparent 2 MiB pages, as far as the machine gives them.
    Thp,
    /// 4 KiB pages, for comparison.
    Off,
}

impl Pages {
    /// Every choice, `Auto` first.
    pub const ALL: [Pages; 4] = [Pages::Auto, Pages::HugeTlb, Pages::Thp, Pages::Off];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            Pages::Auto => "auto",
            Pages::HugeTlb => "hugetlb",
            Pages::Thp => "thp",
            Pages::Off => "off",
        }
    }
}

impl FromStr for Pages {
    type Err = String;

    fn from_str(text: &str) -> Result<Pages, String> {
        let found = Pages::ALL.into_iter().find(|pages| pages.name() == text);
        found.ok_or_else(|| format!("unknown kind of pages '{text}': auto, hugetlb, thp or off"))
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// How the memory of an arena turned out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaReport {
    /// Bytes reserved and faulted in.
    pub bytes: u64,
    /// Of those, bytes on 2 MiB pages, as `/proc/self/smaps` counts them.
    pub huge_bytes: u64,
    /// The kind of page.
    pub kind: PageKind,
    /// One line to print where the pages are smaller than wished, with the remedy.
    pub note: Option<String>,
}

/// Zeroed memory, 2 MiB-aligned or, where it is smaller, to its own size rounded up to a power of two, faulted in before it is
/// handed out, with guards on both sides.
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    mapping: NonNull<u8>,
    mapping_bytes: usize,
    hugetlb: bool,
    asked: Pages,
}

// SAFETY: the arena is plain memory owned by this value; nothing in it is bound to a thread.
unsafe impl Send for Arena {}
// SAFETY: through `&Arena` the memory is only read; writers need `&mut Arena` or own a slab that is theirs alone.
unsafe impl Sync for Arena {}

impl Arena {
    /// Reserves at least `bytes`, rounded up to whole pages, and faults every page in.
    ///
    /// # Errors
    /// [`IoError::Memory`] with the size where the memory cannot be had.
    pub fn new(bytes: usize) -> Result<Arena, IoError> {
        Arena::with_pages(bytes, Pages::Auto)
    }

    /// As [`Arena::new`], on the pages asked for.
    ///
    /// # Errors
    /// [`IoError::Memory`]; [`IoError::Refused`] where reserved pages are asked for and too few are free.
    pub fn with_pages(bytes: usize, pages: Pages) -> Result<Arena, IoError> {
        let arena = Arena::mapped(bytes, pages)?;
        if !arena.hugetlb {
            arena.populate()?;
        }
        Ok(arena)
    }

    /// The memory, with its pages only where those are reserved ones.
    fn mapped(bytes: usize, pages: Pages) -> Result<Arena, IoError> {
        let too_big = || IoError::Memory { bytes: bytes as u64, errno: Errno(libc::ENOMEM) };
        let unit = if bytes >= HUGE_PAGE_BYTES || pages == Pages::HugeTlb { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let rounded = bytes.max(1).checked_next_multiple_of(unit).ok_or_else(too_big)?;
        if rounded > isize::MAX as usize - 4 * HUGE_PAGE_BYTES {
            return Err(too_big());
        }
        if matches!(pages, Pages::Auto | Pages::HugeTlb) {
            match Arena::reserved_huge(rounded, pages) {
                Ok(arena) => {
                    arena.advise(libc::MADV_DONTFORK);
                    return Ok(arena);
                }
                Err(errno) if pages == Pages::HugeTlb => {
                    let why = format!("{} reserved pages of 2 MiB are wanted: {errno}", rounded / HUGE_PAGE_BYTES);
                    return Err(IoError::Refused { what: "hugetlb", why });
                }
                Err(_) => {}
            }
        }
        let arena = Arena::anonymous(rounded, pages)?;
        // Advice may be refused by an old kernel; the report says which pages came of it.
        arena.advise(if pages == Pages::Off { libc::MADV_NOHUGEPAGE } else { libc::MADV_HUGEPAGE });
        arena.advise(libc::MADV_DONTFORK);
        Ok(arena)
    }

    /// As [`Arena::new`], but pages come when they are touched, or with [`populate`]: whoever fills the arena in parts, from
    /// several threads, need not wait for the pages of the whole before.
    ///
    /// # Errors
    /// As [`Arena::new`].
    pub fn reserved(bytes: usize) -> Result<Arena, IoError> {
        Arena::mapped(bytes, Pages::Auto)
    }

    /// First byte of the memory.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Bytes of the arena.
    pub fn len_bytes(&self) -> usize {
        self.bytes
    }

    /// The memory.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `base..base + bytes` is mapped, initialised (zero pages) and lives as long as `self`; `&self` and
        // the slab discipline of `SlabPool`, which never hands its arena out, keep writers away.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.bytes) }
    }

    /// The memory, writable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as `as_slice`, and `&mut self` makes this the only view.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.bytes) }
    }

    /// Which pages back the arena now.
    pub fn report(&self) -> ArenaReport {
        let bytes = self.bytes as u64;
        if self.hugetlb {
            return ArenaReport { bytes, huge_bytes: bytes, kind: PageKind::HugeTlb, note: None };
        }
        let start = self.base.as_ptr() as u64;
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let huge_bytes = anon_huge_bytes(&smaps, start, start + bytes).min(bytes);
        let kind = if huge_bytes * 2 >= bytes { PageKind::Transparent } else { PageKind::Small };
        let wished = bytes - bytes % HUGE_PAGE_BYTES as u64;
        let small = wished.saturating_sub(huge_bytes);
        let note = (SMALL_NOTED * small > wished && self.asked != Pages::Off).then(|| {
            let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
            let remedy = remedy(&enabled);
            format!(
                "{} of {} MiB of buffers are on 4 KiB pages: reads of those may have half the speed and take 10 times the \
                 CPU; {remedy}, or reserve vm.nr_hugepages",
                small >> 20,
                wished >> 20
            )
        });
        ArenaReport { bytes, huge_bytes, kind, note }
    }

    fn reserved_huge(bytes: usize, asked: Pages) -> Result<Arena, Errno> {
        if !bytes.is_multiple_of(HUGE_PAGE_BYTES) {
            return Err(Errno(libc::EINVAL));
        }
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        let mapping = map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags)?;
        // mmap reserved the pages, but a cgroup may still refuse them: then the arena falls back to ordinary memory.
        let arena = Arena { base: mapping, bytes, mapping, mapping_bytes: bytes, hugetlb: true, asked };
        if arena.advise(libc::MADV_POPULATE_WRITE) == 0 { Ok(arena) } else { Err(Errno::last()) }
    }

    fn anonymous(bytes: usize, asked: Pages) -> Result<Arena, IoError> {
        // Slack to align: a huge page, or what the whole arena is aligned to where it is smaller. And a page of guard on
        // each side, so that no neighbour merges with the mapping and the report counts only its own pages.
        let align = bytes.next_power_of_two().min(HUGE_PAGE_BYTES);
        let slack = align + PAGE_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let refused = |errno| IoError::Memory { bytes: bytes as u64, errno };
        let whole = map(bytes + slack, libc::PROT_NONE, flags).map_err(refused)?;
        let start = whole.as_ptr() as usize;
        let before = (start + PAGE_BYTES).next_multiple_of(align) - PAGE_BYTES - start;
        // What is left of the slack is given back: address space may be limited.
        let mapping_bytes = bytes + 2 * PAGE_BYTES;
        let after = bytes + slack - before - mapping_bytes;
        // SAFETY: `before + mapping_bytes + after` are the bytes of the mapping, so the address stays inside it.
        let mapping = unsafe { whole.add(before) };
        // SAFETY: as above.
        let base = unsafe { mapping.add(PAGE_BYTES) };
        // SAFETY: as above.
        let end = unsafe { mapping.add(mapping_bytes) };
        // SAFETY: the range was just mapped by this function, and nobody has an address inside it.
        unsafe { unmap(whole, before) };
        // SAFETY: as above.
        unsafe { unmap(end, after) };
        let arena = Arena { base, bytes, mapping, mapping_bytes, hugetlb: false, asked };
        // SAFETY: the range was just mapped by this function and nobody else knows it.
        let rc = unsafe { libc::mprotect(base.as_ptr().cast(), bytes, libc::PROT_READ | libc::PROT_WRITE) };
        if rc != 0 {
            return Err(refused(Errno::last()));
        }
        Ok(arena)
    }

    /// Faults every page in, several threads at a time where that is worth their start: first touch costs over a second a
    /// GiB.
    fn populate(&self) -> Result<(), IoError> {
        let pieces = (self.bytes / POPULATE_PIECE_BYTES).clamp(1, available_threads().min(8));
        let piece = (self.bytes / pieces).next_multiple_of(HUGE_PAGE_BYTES);
        let results: Vec<i32> = std::thread::scope(|scope| {
            let work = |index: usize| move || self.populate_range(index * piece, piece);
            // Where no thread can be had the caller does the piece itself.
            let workers: Vec<_> = (1..pieces)
                .map(|index| std::thread::Builder::new().spawn_scoped(scope, work(index)).map_err(|_| index))
                .collect();
            let first = self.populate_range(0, piece);
            let rest = workers.into_iter().map(|worker| match worker {
                Ok(worker) => worker.join().unwrap_or(libc::ENOMEM),
                Err(index) => work(index)(),
            });
            rest.chain([first]).collect()
        });
        match results.into_iter().find(|errno| *errno != 0) {
            Some(errno) => Err(IoError::Memory { bytes: self.bytes as u64, errno: Errno(errno) }),
            None => Ok(()),
        }
    }

    /// Faults `len` bytes at `from` in, as far as they lie inside; the errno, or 0.
    fn populate_range(&self, from: usize, len: usize) -> i32 {
        let end = (from + len).min(self.bytes);
        if from >= end {
            return 0;
        }
        loop {
            // SAFETY: `from` is below `bytes`, so the address is inside the mapping.
            let start = unsafe { self.base.add(from) };
            // SAFETY: the range is part of this mapping; populating changes no byte.
            let rc = unsafe { libc::madvise(start.as_ptr().cast(), end - from, libc::MADV_POPULATE_WRITE) };
            match if rc == 0 { 0 } else { Errno::last().0 } {
                0 => return 0,
                libc::EINTR | libc::EAGAIN => {}
                // Kernels before 5.14 do not know the advice: touch each page instead.
                libc::EINVAL => {
                    for page in (from..end).step_by(PAGE_BYTES) {
                        // SAFETY: `page` is below `bytes`, so the address is inside the mapping.
                        let address = unsafe { self.base.add(page) };
                        // SAFETY: the page is writable, still zero, and not shared with anybody before `new` returns.
                        unsafe { address.write_volatile(0) };
                    }
                    return 0;
                }
                errno => return errno,
            }
        }
    }

    fn advise(&self, advice: i32) -> i32 {
        // SAFETY: the range is exactly this mapping's writable part; none of the advices used discards data.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.bytes, advice) }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `map` with this size; slabs and devices hold an `Arc` of the pool, so no
        // borrower and no read in flight is left when the last owner drops it.
        unsafe { unmap(self.mapping, self.mapping_bytes) };
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena").field("bytes", &self.bytes).field("hugetlb", &self.hugetlb).finish()
    }
}

fn map(bytes: usize, protection: i32, flags: i32) -> Result<NonNull<u8>, Errno> {
    // SAFETY: an anonymous mapping at an address of the kernel's choice touches no existing memory.
    let address = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if address == libc::MAP_FAILED {
        return Err(Errno::last());
    }
    NonNull::new(address.cast()).ok_or(Errno(libc::ENOMEM))
}

/// Unmaps a mapping made by [`map`], or an end of one.
///
/// # Safety
/// The range is of such a mapping, and nobody uses an address inside it any more.
unsafe fn unmap(address: NonNull<u8>, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller keeps the contract.
        let rc = unsafe { libc::munmap(address.as_ptr().cast(), bytes) };
        debug_assert_eq!(rc, 0, "munmap of {bytes} bytes");
    }
}

fn available_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get())
}

/// Sum of `AnonHugePages` over the mappings of `smaps` that overlap `start..end`.
fn anon_huge_bytes(smaps: &str, start: u64, end: u64) -> u64 {
    let mut inside = false;
    let mut kib = 0;
    for line in smaps.lines() {
        if let Some((from, to)) = mapping_range(line) {
            inside = from < end && to > start;
        } else if inside && let Some(rest) = line.strip_prefix("AnonHugePages:") {
            kib += rest.trim().trim_end_matches("kB").trim().parse::<u64>().unwrap_or(0);
        }
    }
    kib * 1024
}

/// The address range a mapping's first line starts with.
fn mapping_range(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    Some((u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?))
}

/// What gives huge pages, where the kernel's setting for transparent ones is `enabled`: `always [madvise] never`.
fn remedy(enabled: &str) -> &'static str {
    match enabled.contains("[madvise]") || enabled.contains("[always]") {
        true => "memory is in pieces: write 1 to /proc/sys/vm/compact_memory before",
        false => "set /sys/kernel/mm/transparent_hugepage/enabled to madvise",
    }
}

/// Faults in the pages of which all is in `memory`. Where the kernel cannot be asked to, they come when they are touched.
///
/// # Errors
/// [`IoError::Memory`] where they cannot be had.
pub fn populate(memory: &mut [u8]) -> Result<(), IoError> {
    let before = memory.as_ptr().align_offset(PAGE_BYTES).min(memory.len());
    let pages = &mut memory[before..];
    let bytes = pages.len() / PAGE_BYTES * PAGE_BYTES;
    if bytes == 0 {
        return Ok(());
    }
    loop {
        // SAFETY: the range is part of `memory`, which is borrowed to be written; populating changes no byte.
        let rc = unsafe { libc::madvise(pages.as_mut_ptr().cast(), bytes, libc::MADV_POPULATE_WRITE) };
        match if rc == 0 { 0 } else { Errno::last().0 } {
            libc::EINTR | libc::EAGAIN => {}
            // Kernels before 5.14 do not know the advice.
            0 | libc::EINVAL => return Ok(()),
            errno => return Err(IoError::Memory { bytes: bytes as u64, errno: Errno(errno) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_arena_is_zero_whole_and_writable_to_its_last_byte() {
        for bytes in [1, 4097, (2 << 20) + 1, 300 << 20] {
            let mut arena = Arena::new(bytes).unwrap();
            assert!(arena.len_bytes() >= bytes && arena.len_bytes() < bytes + HUGE_PAGE_BYTES);
            assert!(arena.as_slice().iter().all(|byte| *byte == 0));
            arena.as_mut_slice().fill(9);
            assert_eq!(arena.as_slice().last(), Some(&9));
        }
        assert!(matches!(Arena::new(usize::MAX), Err(IoError::Memory { .. })));
        assert!(matches!(Arena::new(1 << 50), Err(IoError::Memory { .. })));
    }

    #[test]
    fn pages_are_those_asked_for_or_a_named_refusal() {
        for pages in Pages::ALL {
            assert_eq!(pages.to_string().parse(), Ok(pages));
            match Arena::with_pages(6 << 20, pages) {
                Ok(mut arena) => {
                    let report = arena.report();
                    match pages {
                        Pages::HugeTlb => assert_eq!(report.kind, PageKind::HugeTlb),
                        Pages::Thp => assert_ne!(report.kind, PageKind::HugeTlb),
                        Pages::Off => {
                            assert_eq!((report.kind, report.huge_bytes, report.note), (PageKind::Small, 0, None))
                        }
                        Pages::Auto => {}
                    }
                    assert_eq!(report.bytes, 6 << 20);
                    arena.as_mut_slice().fill(3);
                }
                Err(error @ IoError::Refused { what: "hugetlb", .. }) => {
                    assert_eq!(pages, Pages::HugeTlb);
                    assert!(error.to_string().contains("3 reserved pages"), "{error}");
                    assert!(error.hint().unwrap().contains("nr_hugepages"));
                }
                Err(error) => panic!("{pages}: {error}"),
            }
        }
        assert!("huge".parse::<Pages>().is_err());
    }

    #[test]
    fn huge_pages_are_counted_over_the_mappings_of_the_arena_only() {
        let smaps = "7f0000000000-7f0000200000 rw-p 00000000 00:00 0\nSize: 2048 kB\nAnonHugePages:      2048 kB\n\
                     7f0000200000-7f0000400000 rw-p 00000000 00:00 0\nAnonHugePages:         0 kB\n\
                     7f0000400000-7f0000800000 rw-p 00000000 00:00 0\nAnonHugePages:      4096 kB\n";
        assert_eq!(anon_huge_bytes(smaps, 0x7f00_0000_0000, 0x7f00_0040_0000), 2 << 20);
        assert_eq!(anon_huge_bytes(smaps, 0x7f00_0020_0000, 0x7f00_0040_0000), 0);
        assert_eq!(anon_huge_bytes(smaps, 0x7f00_0000_0000, 0x7f00_0080_0000), 6 << 20);
        assert_eq!(anon_huge_bytes("", 0, u64::MAX), 0);
    }

    /// Huge pages are forbidden to a whole process, so this runs in a child, which is this test again.
    #[test]
    fn without_huge_pages_the_arena_works_and_says_what_it_costs() {
        if std::env::var_os("MILLSTREAM_IO_NO_THP").is_none() {
            let name = "arena::tests::without_huge_pages_the_arena_works_and_says_what_it_costs";
            let mut child = std::process::Command::new(std::env::current_exe().unwrap());
            let output = child.args(["--exact", name]).env("MILLSTREAM_IO_NO_THP", "1").output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{output:?}");
            return;
        }
        // SAFETY: the call takes numbers only and changes how this process's later mappings are backed.
        let rc = unsafe { libc::prctl(libc::PR_SET_THP_DISABLE, 1, 0, 0, 0) };
        assert_eq!(rc, 0);
        let mut arena = Arena::new(8 << 20).unwrap();
        let report = arena.report();
        if report.kind == PageKind::HugeTlb {
            eprintln!("skipped: huge pages are reserved here");
            return;
        }
        assert_eq!((report.bytes, report.huge_bytes, report.kind), (8 << 20, 0, PageKind::Small));
        let note = report.note.unwrap();
        assert!(note.contains("8 of 8 MiB") && note.contains("vm.nr_hugepages"), "{note}");
        arena.as_mut_slice().fill(1);
    }

    #[test]
    fn no_setting_is_advised_that_is_so_already() {
        for enabled in ["always [madvise] never", "[always] madvise never"] {
            assert!(remedy(enabled).contains("compact_memory"), "{enabled}");
        }
        for enabled in ["always madvise [never]", ""] {
            assert!(remedy(enabled).contains("to madvise"), "{enabled}");
        }
    }
}

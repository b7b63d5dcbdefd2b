//! One pre-faulted arena of 2 MiB pages, cut into fixed slabs that are handed out, given back and never freed.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Errno, IoError};
use crate::limits::{HUGE_PAGE_BYTES, PAGE_BYTES, SLAB_BYTES_MAX};

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

/// Zeroed memory, 2 MiB-aligned, faulted in before it is handed out, with unmapped guards on both sides.
pub struct Arena {
    base: NonNull<u8>,
    bytes: usize,
    mapping: NonNull<u8>,
    mapping_bytes: usize,
    hugetlb: bool,
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
        let too_big = || IoError::Memory {
            bytes: bytes as u64,
            errno: Errno(libc::ENOMEM),
        };
        let unit = if bytes >= HUGE_PAGE_BYTES {
            HUGE_PAGE_BYTES
        } else {
            PAGE_BYTES
        };
        let rounded = bytes
            .max(1)
            .checked_next_multiple_of(unit)
            .ok_or_else(too_big)?;
        if rounded > isize::MAX as usize - 4 * HUGE_PAGE_BYTES {
            return Err(too_big());
        }
        if let Some(arena) = Arena::reserved_huge(rounded) {
            arena.advise(libc::MADV_DONTFORK);
            return Ok(arena);
        }
        let arena = Arena::anonymous(rounded)?;
        // Advice may be refused by an old kernel; the report says which pages came of it.
        arena.advise(libc::MADV_HUGEPAGE);
        arena.advise(libc::MADV_DONTFORK);
        arena.populate()?;
        Ok(arena)
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
            return ArenaReport {
                bytes,
                huge_bytes: bytes,
                kind: PageKind::HugeTlb,
                note: None,
            };
        }
        let start = self.base.as_ptr() as u64;
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let huge_bytes = anon_huge_bytes(&smaps, start, start + bytes).min(bytes);
        let kind = if huge_bytes * 2 >= bytes {
            PageKind::Transparent
        } else {
            PageKind::Small
        };
        let wished = bytes - bytes % HUGE_PAGE_BYTES as u64;
        let note = (huge_bytes < wished).then(|| {
            format!(
                "{} of {} MiB of buffers are on 4 KiB pages: expect up to half the read speed and 10 times the CPU; \
                 set /sys/kernel/mm/transparent_hugepage/enabled to madvise, or reserve vm.nr_hugepages",
                (wished - huge_bytes) >> 20,
                wished >> 20
            )
        });
        ArenaReport {
            bytes,
            huge_bytes,
            kind,
            note,
        }
    }

    fn reserved_huge(bytes: usize) -> Option<Arena> {
        if !bytes.is_multiple_of(HUGE_PAGE_BYTES) {
            return None;
        }
        let flags =
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_HUGETLB | libc::MAP_HUGE_2MB;
        let mapping = map(bytes, libc::PROT_READ | libc::PROT_WRITE, flags).ok()?;
        // mmap reserved the pages, but a cgroup may still refuse them: then the arena falls back to ordinary memory.
        let arena = Arena {
            base: mapping,
            bytes,
            mapping,
            mapping_bytes: bytes,
            hugetlb: true,
        };
        (arena.advise(libc::MADV_POPULATE_WRITE) == 0).then_some(arena)
    }

    fn anonymous(bytes: usize) -> Result<Arena, IoError> {
        // One huge page of slack to align, and at least a page of guard on each side, so that no neighbour merges
        // with the mapping and the report counts only its own pages.
        let mapping_bytes = bytes + 2 * HUGE_PAGE_BYTES;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let refused = |errno| IoError::Memory {
            bytes: bytes as u64,
            errno,
        };
        let mapping = map(mapping_bytes, libc::PROT_NONE, flags).map_err(refused)?;
        let start = mapping.as_ptr() as usize;
        let skip = (start + PAGE_BYTES).next_multiple_of(HUGE_PAGE_BYTES) - start;
        debug_assert!(skip + bytes < mapping_bytes);
        // SAFETY: `skip + bytes` is below `mapping_bytes`, so the address stays inside the mapping.
        let base = unsafe { mapping.add(skip) };
        let arena = Arena {
            base,
            bytes,
            mapping,
            mapping_bytes,
            hugetlb: false,
        };
        // SAFETY: the range was just mapped by this function and nobody else knows it.
        let rc = unsafe {
            libc::mprotect(
                base.as_ptr().cast(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
            )
        };
        if rc != 0 {
            return Err(refused(Errno::last()));
        }
        Ok(arena)
    }

    /// Faults every page in, several threads at a time for big arenas: first touch costs over a second a GiB.
    fn populate(&self) -> Result<(), IoError> {
        let pieces = (self.bytes / (256 << 20)).clamp(1, available_threads().min(8));
        let piece = (self.bytes / pieces).next_multiple_of(HUGE_PAGE_BYTES);
        let results: Vec<i32> = std::thread::scope(|scope| {
            let workers: Vec<_> = (1..pieces)
                .map(|index| scope.spawn(move || self.populate_range(index * piece, piece)))
                .collect();
            let first = self.populate_range(0, piece);
            workers
                .into_iter()
                .map(|worker| worker.join().unwrap_or(libc::ENOMEM))
                .chain([first])
                .collect()
        });
        match results.into_iter().find(|errno| *errno != 0) {
            Some(errno) => Err(IoError::Memory {
                bytes: self.bytes as u64,
                errno: Errno(errno),
            }),
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
            let rc = unsafe {
                libc::madvise(start.as_ptr().cast(), end - from, libc::MADV_POPULATE_WRITE)
            };
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
        let rc = unsafe { libc::munmap(self.mapping.as_ptr().cast(), self.mapping_bytes) };
        debug_assert_eq!(rc, 0, "munmap of {} bytes", self.mapping_bytes);
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Arena")
            .field("bytes", &self.bytes)
            .field("hugetlb", &self.hugetlb)
            .finish()
    }
}

/// Fixed slabs of one arena. Clones share it.
#[derive(Clone)]
pub struct SlabPool {
    inner: Arc<PoolInner>,
}

struct PoolInner {
    arena: Arena,
    slab_bytes: usize,
    stride: usize,
    slabs: usize,
    free: Mutex<Vec<u32>>,
}

impl SlabPool {
    /// An arena of `slabs` slabs of `slab_bytes` each, faulted in. The stride is a multiple of 2 MiB for slabs of
    /// 2 MiB and more, else of 4 KiB, so that small slabs share huge pages.
    ///
    /// # Errors
    /// [`IoError::BadRequest`] for empty slabs, no slab, or slabs above [`SLAB_BYTES_MAX`]; [`IoError::Memory`].
    pub fn new(slab_bytes: usize, slabs: usize) -> Result<SlabPool, IoError> {
        if slab_bytes == 0 || slab_bytes > SLAB_BYTES_MAX || slabs == 0 || slabs > u32::MAX as usize
        {
            let what =
                format!("{slabs} slabs of {slab_bytes} bytes; a slab has 1 to {SLAB_BYTES_MAX}");
            return Err(IoError::BadRequest { what });
        }
        let stride = SlabPool::stride_bytes(slab_bytes);
        let bytes = stride.checked_mul(slabs).ok_or(IoError::Memory {
            bytes: u64::MAX,
            errno: Errno(libc::ENOMEM),
        })?;
        let arena = Arena::new(bytes)?;
        // Popped from the end: the lowest index goes out first.
        let free = Mutex::new((0..slabs as u32).rev().collect());
        Ok(SlabPool {
            inner: Arc::new(PoolInner {
                arena,
                slab_bytes,
                stride,
                slabs,
                free,
            }),
        })
    }

    /// Distance between slabs of `slab_bytes`: what one takes of the arena.
    pub fn stride_bytes(slab_bytes: usize) -> usize {
        let unit = if slab_bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        slab_bytes.next_multiple_of(unit)
    }

    /// A free slab, with whatever bytes its last user left; `None` while all are out.
    pub fn take(&self) -> Option<Slab> {
        let index = self
            .inner
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop()?;
        Some(Slab {
            pool: Arc::clone(&self.inner),
            index,
        })
    }

    /// Bytes of a slab.
    pub fn slab_bytes(&self) -> usize {
        self.inner.slab_bytes
    }

    /// Slabs, free or not.
    pub fn slabs(&self) -> usize {
        self.inner.slabs
    }

    /// Slabs free now.
    pub fn free(&self) -> usize {
        self.inner
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .len()
    }

    /// Which pages back the slabs.
    pub fn report(&self) -> ArenaReport {
        self.inner.arena.report()
    }

    /// Distance between slabs.
    pub(crate) fn stride(&self) -> usize {
        self.inner.stride
    }

    /// First byte of the arena, for registration with the kernel.
    pub(crate) fn base(&self) -> NonNull<u8> {
        self.inner.arena.base
    }

    /// Whether `slab` is one of this pool's.
    pub(crate) fn owns(&self, slab: &Slab) -> bool {
        Arc::ptr_eq(&self.inner, &slab.pool)
    }
}

impl fmt::Debug for SlabPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PoolInner {
            slab_bytes, slabs, ..
        } = &*self.inner;
        f.debug_struct("SlabPool")
            .field("slab_bytes", slab_bytes)
            .field("slabs", slabs)
            .finish_non_exhaustive()
    }
}

/// One slab, owned: whoever holds it is its only user. Dropping it gives it back to its pool.
pub struct Slab {
    pool: Arc<PoolInner>,
    index: u32,
}

impl Slab {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slab's range is inside the arena, initialised, kept mapped by `pool`, and this value is the only
        // handle to it: the index left the free list once. A device that lets the kernel write owns the `Slab`.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.pool.slab_bytes) }
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and `&mut self` makes this the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.pool.slab_bytes) }
    }

    /// Position in the pool, `0..slabs`.
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// Address of `at`, for a device that owns this slab to let the kernel write `len` bytes there.
    pub(crate) fn address(&self, at: u32, len: u32) -> NonNull<u8> {
        let end = at as usize + len as usize;
        assert!(
            end <= self.pool.slab_bytes,
            "{at} + {len} bytes in a slab of {}",
            self.pool.slab_bytes
        );
        // SAFETY: `at` is inside the slab, by the assertion.
        unsafe { self.start().add(at as usize) }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: `index < slabs`, and the arena holds `slabs * stride` bytes.
        unsafe {
            self.pool
                .arena
                .base
                .add(self.index as usize * self.pool.stride)
        }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.pool
            .free
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(self.index);
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab")
            .field("index", &self.index)
            .finish_non_exhaustive()
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
            kib += rest
                .trim()
                .trim_end_matches("kB")
                .trim()
                .parse::<u64>()
                .unwrap_or(0);
        }
    }
    kib * 1024
}

/// The address range a mapping's first line starts with.
fn mapping_range(line: &str) -> Option<(u64, u64)> {
    let (from, to) = line.split_whitespace().next()?.split_once('-')?;
    Some((
        u64::from_str_radix(from, 16).ok()?,
        u64::from_str_radix(to, 16).ok()?,
    ))
}

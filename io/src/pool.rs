//! An arena cut into fixed slabs that are handed out, given back and never freed.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Arena, ArenaReport, Pages};
use crate::error::{Errno, IoError};
use crate::limits::{PAGE_BYTES, SLAB_BYTES_MAX};

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
    /// An arena of `slabs` slabs of `slab_bytes` each, faulted in. They lie next to each other, on whole small pages, so
    /// that two may share a huge page: reads were measured to be as fast as into slabs that begin huge pages, which
    /// take a tenth more memory at the size of GLM-5.2's experts.
    ///
    /// # Errors
    /// [`IoError::BadRequest`] for empty slabs, no slab, or slabs above [`SLAB_BYTES_MAX`]; [`IoError::Memory`].
    pub fn new(slab_bytes: usize, slabs: usize) -> Result<SlabPool, IoError> {
        SlabPool::with_pages(slab_bytes, slabs, Pages::Auto)
    }

    /// As [`SlabPool::new`], on the pages asked for.
    ///
    /// # Errors
    /// As [`SlabPool::new`], and [`IoError::Refused`] where reserved pages are asked for and too few are free.
    pub fn with_pages(slab_bytes: usize, slabs: usize, pages: Pages) -> Result<SlabPool, IoError> {
        if slab_bytes == 0 || slab_bytes > SLAB_BYTES_MAX || slabs == 0 || slabs > u32::MAX as usize {
            let what = format!("{slabs} slabs of {slab_bytes} bytes; a slab has 1 to {SLAB_BYTES_MAX}");
            return Err(IoError::BadRequest { what });
        }
        let stride = SlabPool::stride_bytes(slab_bytes);
        let bytes = stride.checked_mul(slabs).ok_or(IoError::Memory { bytes: u64::MAX, errno: Errno(libc::ENOMEM) })?;
        let arena = Arena::with_pages(bytes, pages)?;
        // Popped from the end: the lowest index goes out first.
        let free = Mutex::new((0..slabs as u32).rev().collect());
        Ok(SlabPool { inner: Arc::new(PoolInner { arena, slab_bytes, stride, slabs, free }) })
    }

    /// Distance between slabs of `slab_bytes`: what one takes of the arena. A slab whose size is a multiple of what its
    /// files must be aligned to, as [`layout`](crate::layout) makes it, is aligned to that too.
    pub fn stride_bytes(slab_bytes: usize) -> usize {
        slab_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// A free slab, with whatever bytes its last user left; `None` while all are out.
    pub fn take(&self) -> Option<Slab> {
        let index = self.inner.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Slab { pool: Arc::clone(&self.inner), index })
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
        self.inner.free.lock().unwrap_or_else(PoisonError::into_inner).len()
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
        self.inner.arena.base()
    }

    /// Whether `slab` is one of this pool's.
    pub(crate) fn owns(&self, slab: &Slab) -> bool {
        Arc::ptr_eq(&self.inner, &slab.pool)
    }
}

impl fmt::Debug for SlabPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PoolInner { slab_bytes, slabs, .. } = &*self.inner;
        f.debug_struct("SlabPool").field("slab_bytes", slab_bytes).field("slabs", slabs).finish_non_exhaustive()
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
        assert!(end <= self.pool.slab_bytes, "{at} + {len} bytes in a slab of {}", self.pool.slab_bytes);
        // SAFETY: `at` is inside the slab, by the assertion.
        unsafe { self.start().add(at as usize) }
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: `index < slabs`, and the arena holds `slabs * stride` bytes.
        unsafe { self.pool.arena.base().add(self.index as usize * self.pool.stride) }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.index);
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Slab").field("index", &self.index).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::HUGE_PAGE_BYTES;

    #[test]
    fn slabs_are_aligned_apart_and_come_back() {
        // The last is an expert of GLM-5.2.
        let expert = 4618 * 4096;
        for (slab_bytes, slabs, stride) in
            [(1, 3, 4096), (5000, 40, 8192), ((2 << 20) - 1, 3, 2 << 20), (2 << 20, 2, 2 << 20), (expert, 3, expert)]
        {
            let pool = SlabPool::new(slab_bytes, slabs).unwrap();
            assert_eq!(pool.base().as_ptr() as usize % HUGE_PAGE_BYTES, 0);
            let mut taken: Vec<Slab> = std::iter::from_fn(|| pool.take()).collect();
            assert_eq!((taken.len(), pool.free()), (slabs, 0));
            for slab in &mut taken {
                assert_eq!(slab.bytes().len(), slab_bytes);
                assert!(slab.bytes().iter().all(|byte| *byte == 0), "fresh memory is zero");
                assert_eq!(slab.bytes().as_ptr() as usize, pool.base().as_ptr() as usize + slab.index() * stride);
            }
            for slab in &mut taken {
                let mark = slab.index() as u8 + 1;
                slab.bytes_mut().fill(mark);
            }
            assert!(taken.iter().all(|slab| { slab.bytes().iter().all(|byte| *byte == slab.index() as u8 + 1) }));
            let last = taken.pop().unwrap().index();
            assert_eq!(pool.free(), 1);
            assert_eq!(pool.take().unwrap().index(), last);
            drop(taken);
            assert_eq!(pool.free(), slabs);
        }
    }

    #[test]
    fn a_slab_outlives_the_pool_it_came_from() {
        let pool = SlabPool::new(4096, 2).unwrap();
        let mut slab = pool.take().unwrap();
        drop(pool);
        slab.bytes_mut().fill(3);
        let there = std::thread::spawn(move || slab.bytes().iter().map(|byte| u32::from(*byte)).sum::<u32>());
        assert_eq!(there.join().unwrap(), 3 * 4096);
    }
}

//! An arena cut into fixed slabs that are handed out, given back and never freed.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use crate::arena::{Arena, ArenaReport, Pages};
use crate::error::{Errno, IoError};
use crate::limits::{PAGE_BYTES, SLAB_BYTES_MAX};

/// Fixed slabs of one arena, of one size or of several. Clones share it.
#[derive(Clone)]
pub struct SlabPool {
    inner: Arc<PoolInner>,
}

struct PoolInner {
    arena: Arena,
    sizes: Vec<Size>,
    slabs: usize,
    /// Of each size.
    free: Mutex<Vec<Vec<u32>>>,
}

/// Slabs of one size, side by side.
#[derive(Clone, Copy, Debug)]
struct Size {
    slab_bytes: usize,
    stride: usize,
    slabs: usize,
    /// Position in the pool of the first of them, and its place in the arena.
    first: usize,
    start: usize,
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
        SlabPool::with_sizes(&[(slab_bytes, slabs)], pages)
    }

    /// One arena of slabs of several sizes, each given as its bytes and how many there are. What is said of the pool's
    /// slab without naming a size is said of the first.
    ///
    /// # Errors
    /// As [`SlabPool::new`], for any of the sizes, or none.
    pub fn of_sizes(sizes: &[(usize, usize)]) -> Result<SlabPool, IoError> {
        SlabPool::with_sizes(sizes, Pages::Auto)
    }

    fn with_sizes(asked: &[(usize, usize)], pages: Pages) -> Result<SlabPool, IoError> {
        let too_much = || IoError::Memory { bytes: u64::MAX, errno: Errno(libc::ENOMEM) };
        let (mut sizes, mut slabs, mut bytes) = (Vec::with_capacity(asked.len()), 0usize, 0usize);
        for &(slab_bytes, count) in asked {
            if slab_bytes == 0 || slab_bytes > SLAB_BYTES_MAX || count == 0 || count > u32::MAX as usize - slabs {
                let what = format!("{count} slabs of {slab_bytes} bytes; a slab has 1 to {SLAB_BYTES_MAX}");
                return Err(IoError::BadRequest { what });
            }
            let stride = SlabPool::stride_bytes(slab_bytes);
            sizes.push(Size { slab_bytes, stride, slabs: count, first: slabs, start: bytes });
            slabs += count;
            bytes = stride.checked_mul(count).and_then(|all| all.checked_add(bytes)).ok_or_else(too_much)?;
        }
        if sizes.is_empty() {
            return Err(IoError::BadRequest { what: "a pool of no slab".to_owned() });
        }
        let arena = Arena::with_pages(bytes, pages)?;
        // Popped from the end: the lowest index goes out first.
        let free = sizes.iter().map(|size| (size.first as u32..(size.first + size.slabs) as u32).rev().collect());
        let free = Mutex::new(free.collect());
        Ok(SlabPool { inner: Arc::new(PoolInner { arena, sizes, slabs, free }) })
    }

    /// Distance between slabs of `slab_bytes`: what one takes of the arena. A slab whose size is a multiple of what its
    /// files must be aligned to, as [`layout`](crate::layout) makes it, is aligned to that too.
    pub fn stride_bytes(slab_bytes: usize) -> usize {
        slab_bytes.next_multiple_of(PAGE_BYTES)
    }

    /// A free slab, with whatever bytes its last user left; `None` while all are out.
    pub fn take(&self) -> Option<Slab> {
        self.take_of(0)
    }

    /// A free slab of the size at this position among the sizes the pool was made of.
    pub fn take_of(&self, size: usize) -> Option<Slab> {
        let index = self.inner.free.lock().unwrap_or_else(PoisonError::into_inner)[size].pop()?;
        Some(Slab { pool: Arc::clone(&self.inner), size: size as u32, index })
    }

    /// Bytes of a slab.
    pub fn slab_bytes(&self) -> usize {
        self.inner.sizes[0].slab_bytes
    }

    /// Bytes of the largest slab.
    pub fn largest_slab_bytes(&self) -> usize {
        self.inner.sizes.iter().map(|size| size.slab_bytes).max().unwrap_or(0)
    }

    /// Slabs, free or not.
    pub fn slabs(&self) -> usize {
        self.inner.slabs
    }

    /// Slabs of the size at this position among the sizes the pool was made of.
    pub fn slabs_of(&self, size: usize) -> usize {
        self.inner.sizes[size].slabs
    }

    /// Slabs free now.
    pub fn free(&self) -> usize {
        self.inner.free.lock().unwrap_or_else(PoisonError::into_inner).iter().map(Vec::len).sum()
    }

    /// Of them, slabs of the size at this position among the sizes the pool was made of.
    pub fn free_of(&self, size: usize) -> usize {
        self.inner.free.lock().unwrap_or_else(PoisonError::into_inner)[size].len()
    }

    /// Which pages back the slabs.
    pub fn report(&self) -> ArenaReport {
        self.inner.arena.report()
    }

    /// For each size the distance between its slabs and how many there are, in the order in which they lie.
    pub(crate) fn strides(&self) -> impl Iterator<Item = (usize, usize)> {
        self.inner.sizes.iter().map(|size| (size.stride, size.slabs))
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
        let sizes = self.inner.sizes.iter().map(|size| (size.slab_bytes, size.slabs));
        f.debug_struct("SlabPool").field("sizes", &sizes.collect::<Vec<_>>()).finish_non_exhaustive()
    }
}

/// One slab, owned: whoever holds it is its only user. Dropping it gives it back to its pool.
pub struct Slab {
    pool: Arc<PoolInner>,
    size: u32,
    index: u32,
}

impl Slab {
    /// The bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the slab's range is inside the arena, initialised, kept mapped by `pool`, and this value is the only
        // handle to it: the index left the free list once. A device that lets the kernel write owns the `Slab`.
        unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.size().slab_bytes) }
    }

    /// The bytes, writable.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as `bytes`, and `&mut self` makes this the only view.
        unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.size().slab_bytes) }
    }

    /// Position in the pool, `0..slabs`.
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// Address of `at`, for a device that owns this slab to let the kernel write `len` bytes there.
    pub(crate) fn address(&self, at: u32, len: u32) -> NonNull<u8> {
        let end = at as usize + len as usize;
        assert!(end <= self.size().slab_bytes, "{at} + {len} bytes in a slab of {}", self.size().slab_bytes);
        // SAFETY: `at` is inside the slab, by the assertion.
        unsafe { self.start().add(at as usize) }
    }

    fn size(&self) -> &Size {
        &self.pool.sizes[self.size as usize]
    }

    fn start(&self) -> NonNull<u8> {
        let Size { stride, first, start, .. } = *self.size();
        // SAFETY: `index` is one of the `slabs` slabs of this size from `first` on, and the arena holds `slabs * stride`
        // bytes for them from `start` on.
        unsafe { self.pool.arena.base().add(start + (self.index as usize - first) * stride) }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        self.pool.free.lock().unwrap_or_else(PoisonError::into_inner)[self.size as usize].push(self.index);
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
            let align = (stride * slabs).next_power_of_two().min(HUGE_PAGE_BYTES);
            assert_eq!(pool.base().as_ptr() as usize % align, 0);
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
    fn slabs_of_several_sizes_share_an_arena_and_each_comes_back_to_its_own() {
        let pool = SlabPool::of_sizes(&[(5000, 3), (9000, 2), (4096, 4)]).unwrap();
        assert_eq!((pool.slabs(), pool.free(), pool.slab_bytes(), pool.largest_slab_bytes()), (9, 9, 5000, 9000));
        let base = pool.base().as_ptr() as usize;
        // Whole pages: three of two, two of three, four of one.
        let expected = [(0, 5000, 0), (1, 5000, 8192), (2, 5000, 16384), (3, 9000, 24576), (4, 9000, 36864)]
            .into_iter()
            .chain((0..4).map(|i| (5 + i, 4096, 49152 + i * 4096)));
        let mut taken: Vec<Slab> =
            (0..3).flat_map(|size| std::iter::from_fn(|| pool.take_of(size)).collect::<Vec<_>>()).collect();
        let seen = taken.iter().map(|slab| (slab.index(), slab.bytes().len(), slab.bytes().as_ptr() as usize - base));
        assert_eq!(seen.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
        for slab in &mut taken {
            let mark = slab.index() as u8 + 1;
            slab.bytes_mut().fill(mark);
        }
        assert!(taken.iter().all(|slab| slab.bytes().iter().all(|byte| *byte == slab.index() as u8 + 1)));
        drop(taken.remove(3));
        assert_eq!([0, 1, 2].map(|size| pool.free_of(size)), [0, 1, 0]);
        assert!(pool.take_of(0).is_none() && pool.take_of(2).is_none());
        assert_eq!(pool.take_of(1).map(|slab| slab.index()), Some(3));
        for bad in [&[][..], &[(4096, 1), (0, 1)], &[(4096, 1), (4096, 0)], &[(4096, u32::MAX as usize), (4096, 1)]] {
            assert!(matches!(SlabPool::of_sizes(bad), Err(IoError::BadRequest { .. })), "{bad:?}");
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

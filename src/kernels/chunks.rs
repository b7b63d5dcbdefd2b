//! Disjoint pieces of a buffer, one a task: how safe code writes from several threads.
#![allow(unsafe_code)]

use super::Team;

/// The start of a slice whose pieces go to different tasks.
struct Shared<T>(*mut T);

// SAFETY: the pointer is only turned into slices that no two tasks share (see `piece`), so this is `&mut [T]` handed out
// in parts, which may cross threads when T may.
unsafe impl<T: Send> Sync for Shared<T> {}

impl<T> Shared<T> {
    /// Elements `index * chunk ..` of a slice of `len`, at most `chunk` of them.
    ///
    /// # Safety
    /// `self` must point to `len` elements borrowed exclusively for the lifetime of the result, `index * chunk < len`, and
    /// no other live piece may have the same index.
    #[allow(clippy::mut_from_ref)]
    unsafe fn piece(&self, index: usize, chunk: usize, len: usize) -> &mut [T] {
        let start = index * chunk;
        // SAFETY: `start` is inside the slice.
        let first = unsafe { self.0.add(start) };
        // SAFETY: the range ends at or before `len`, and by contract no other slice overlaps it.
        unsafe { std::slice::from_raw_parts_mut(first, chunk.min(len - start)) }
    }
}

/// What is done to two pieces of the same number.
type PairTask<'a, A, B> = &'a (dyn Fn(usize, &mut [A], &mut [B]) + Sync);

impl Team {
    /// Runs `f(i, piece)` for every consecutive piece of `chunk` elements of `out`; the last piece may be shorter.
    pub fn for_chunks<T: Send>(&self, out: &mut [T], chunk: usize, f: &(dyn Fn(usize, &mut [T]) + Sync)) {
        let (len, base) = (out.len(), Shared(out.as_mut_ptr()));
        let base = &base;
        self.run(len.div_ceil(chunk), &|i| {
            // SAFETY: `out` is borrowed until `run` returns, and `run` calls each index below the count once.
            f(i, unsafe { base.piece(i, chunk, len) });
        });
    }

    /// As [`Team::for_chunks`] over two buffers that have the same number of pieces.
    pub fn for_chunks2<A: Send, B: Send>(
        &self,
        a: &mut [A],
        chunk_a: usize,
        b: &mut [B],
        chunk_b: usize,
        f: PairTask<A, B>,
    ) {
        let tasks = a.len().div_ceil(chunk_a);
        assert_eq!(tasks, b.len().div_ceil(chunk_b), "both buffers have one piece a task");
        let (len_a, base_a) = (a.len(), Shared(a.as_mut_ptr()));
        let (len_b, base_b) = (b.len(), Shared(b.as_mut_ptr()));
        let (base_a, base_b) = (&base_a, &base_b);
        self.run(tasks, &|i| {
            // SAFETY: as in `for_chunks`.
            let piece_a = unsafe { base_a.piece(i, chunk_a, len_a) };
            // SAFETY: as in `for_chunks`.
            let piece_b = unsafe { base_b.piece(i, chunk_b, len_b) };
            f(i, piece_a, piece_b);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_written_once() {
        let team = Team::new(3);
        let mut v = vec![0u32; 1003];
        team.for_chunks(&mut v, 10, &|i, piece| {
            for (j, x) in piece.iter_mut().enumerate() {
                *x += (i * 10 + j) as u32 + 1;
            }
        });
        assert!(v.iter().enumerate().all(|(i, &x)| x == i as u32 + 1));
        let mut w = [0u8; 101];
        team.for_chunks2(&mut v, 10, &mut w, 1, &|i, a, b| {
            assert_eq!(a[0], i as u32 * 10 + 1);
            b[0] += a.len() as u8;
        });
        assert!(w[..100].iter().all(|&n| n == 10) && w[100] == 3);
    }
}

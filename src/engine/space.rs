//! Address space: what a process maps, which is more than what it holds.

use millstream_io::limits::{HUGE_PAGE_BYTES, READER_STACK_BYTES, READER_THREADS};

use crate::limits::{LOAD_WORKERS_MIN, TENSOR_UNHELD_BYTES, THREAD_SPACE_BYTES, THREADS_BESIDES};

/// What a process maps at its start differs by less than this from one start to the next.
const RAISED_BESIDES: u64 = 64 << 10;

/// A limit on what this process may map, and what is left of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// The command that sets it.
    pub set_by: &'static str,
    /// The limit, in bytes.
    pub limit: u64,
    /// Bytes of it that were left when the program began.
    pub left: u64,
    /// Bytes of the program that were mapped by then, and that a budget counts.
    pub program: u64,
    /// Whether files that are mapped count.
    pub of_files: bool,
}

impl Space {
    /// The most a budget may be, where as much as `unheld` is mapped and no part of it: what is mapped already is on one side
    /// only.
    pub fn most(&self, unheld: u64) -> u64 {
        (self.left + self.program).saturating_sub(unheld)
    }

    /// A limit that leaves `missing` bytes more, in KiB, as it is set: whole MiB, and never so few more that a stack which
    /// begins elsewhere takes them.
    pub fn raised(&self, missing: u64) -> u64 {
        (self.limit + missing + RAISED_BESIDES).div_ceil(1 << 20) << 10
    }
}

/// Bytes that are mapped and that no budget counts, as nothing is held there: stacks of `threads` that compute, or load, the
/// caller's aside, and of those that read `drives` drives; the slack that an arena is cut from; what the heap keeps of
/// reading about `tensors`; and `files` that are mapped.
pub(super) fn unheld(threads: usize, drives: usize, tensors: usize, files: u64) -> u64 {
    // Stacks of those that loaded are used again.
    let stacks = (threads.max(LOAD_WORKERS_MIN) - 1 + THREADS_BESIDES) as u64 * THREAD_SPACE_BYTES;
    let readers = (drives * READER_THREADS * READER_STACK_BYTES) as u64;
    stacks + readers + HUGE_PAGE_BYTES as u64 + tensors as u64 * TENSOR_UNHELD_BYTES + files
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_mapped_already_counts_once() {
        let space =
            Space { set_by: "ulimit -v", limit: 60_000 << 10, left: 45 << 20, program: 15 << 20, of_files: true };
        // Of 60 MiB that the program and the rest of a budget may take, stacks take 20.
        assert_eq!(space.most(20 << 20), 40 << 20);
        assert_eq!(space.most(1 << 40), 0);
        // 60,000 KiB are 58.6 MiB.
        assert_eq!((space.raised(0), space.raised(5 << 20)), (59 << 10, 64 << 10));
    }
}

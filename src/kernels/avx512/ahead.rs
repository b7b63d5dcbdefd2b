//! Weights asked for before they are multiplied.
//!
//! Where several weight rows pass at once, or activations and weights do not fit the first-level cache together, the
//! hardware's prefetches fall behind. Lines are then asked for here, in the order they lie in memory whatever the order of
//! their use, far enough ahead that they are in the second-level cache in time.

use super::fetch;
use crate::kernels::format::WeightRef;

/// Least distance, in bytes: more than memory delivers to a core while one line is on its way.
const LEAD: usize = 16 << 10;

/// The lines that lie whole groups of rows behind a group, asked for as that group is multiplied.
pub(super) struct Ahead {
    next: *const u8,
    unit: usize,
}

impl Ahead {
    /// For `count` rows from `first`, which pass together. Nothing is harmed past the end of the matrix: a hint may name any
    /// address.
    #[inline(always)]
    pub fn new(w: &WeightRef, first: usize, count: usize) -> Ahead {
        let group = count * w.format().row_bytes(w.cols());
        let next = w.row(first).as_ptr().wrapping_add(LEAD.next_multiple_of(group.max(1)));
        Ahead { next, unit: w.format().row_bytes(64) }
    }

    /// The same for the scales of groups of 64 columns.
    #[inline(always)]
    pub fn of_scales(w: &WeightRef, first: usize, count: usize) -> Ahead {
        let row = 4 * w.cols().div_ceil(64);
        let turns = LEAD.div_ceil((count * w.format().row_bytes(w.cols())).max(1));
        Ahead { next: w.scales().as_ptr().wrapping_add((first + turns * count) * row), unit: 4 }
    }

    /// Asks for the next lines, as many as `units` of 64 columns fill.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub fn step(&mut self, units: usize) {
        self.lines(units * self.unit);
    }

    /// The same for so many bytes, which takes no loop where their number is known.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
    pub fn lines(&mut self, bytes: usize) {
        for line in 0..bytes.div_ceil(64) {
            fetch(self.next.wrapping_add(64 * line));
        }
        self.next = self.next.wrapping_add(bytes);
    }
}

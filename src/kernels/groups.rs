//! Sums per group of columns, put together from exact i32 sums of smaller runs.

use super::format::WeightRef;

/// One output of a group-scaled matrix: group sums times their scales, added in column order.
pub(super) struct GroupSum<'a> {
    scales: &'a [[u8; 4]],
    runs_per_group: usize,
    runs_left: usize,
    sum: i32,
    acc: f32,
}

impl<'a> GroupSum<'a> {
    /// For weight row `row`, fed with sums over runs of `run` columns; `run` divides `group`.
    #[inline(always)]
    pub fn new(w: &WeightRef<'a>, row: usize, group: usize, run: usize) -> Self {
        GroupSum::resume(w, row, group, run, 0, 0.0)
    }

    /// As [`GroupSum::new`], after the first `groups` groups, whose sum is `acc`.
    #[inline(always)]
    pub fn resume(w: &WeightRef<'a>, row: usize, group: usize, run: usize, groups: usize, acc: f32) -> Self {
        let runs_per_group = group / run;
        let scales = &row_scales(w, row, group)[groups..];
        GroupSum { scales, runs_per_group, runs_left: runs_per_group, sum: 0, acc }
    }

    /// Takes the sums of the next runs.
    #[inline(always)]
    pub fn push(&mut self, sums: &[i32]) {
        for sum in sums {
            self.sum += sum;
            self.runs_left -= 1;
            if self.runs_left == 0 {
                self.close();
            }
        }
    }

    /// The output before the activation's scale, after a last group that may be short.
    #[inline(always)]
    pub fn finish(mut self) -> f32 {
        if self.runs_left != self.runs_per_group {
            self.close();
        }
        self.acc
    }

    #[inline(always)]
    fn close(&mut self) {
        if let Some((scale, rest)) = self.scales.split_first() {
            self.acc += self.sum as f32 * f32::from_le_bytes(*scale);
            self.scales = rest;
        }
        self.sum = 0;
        self.runs_left = self.runs_per_group;
    }
}

/// The scales of one row of a group-scaled matrix.
#[inline(always)]
pub(super) fn row_scales<'a>(w: &WeightRef<'a>, row: usize, group: usize) -> &'a [[u8; 4]] {
    let groups = w.cols().div_ceil(group);
    &w.scales().as_chunks::<4>().0[row * groups..][..groups]
}

/// The last, partial chunk of a row, followed by zeros. They meet activations that are zero too.
#[inline(always)]
pub(super) fn zero_padded<const N: usize>(tail: &[u8]) -> [u8; N] {
    let mut chunk = [0; N];
    chunk[..tail.len()].copy_from_slice(tail);
    chunk
}

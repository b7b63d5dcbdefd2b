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
        let runs_per_group = group / run;
        GroupSum { scales: row_scales(w, row, group), runs_per_group, runs_left: runs_per_group, sum: 0, acc: 0.0 }
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

/// Most units (runs of 32 or 64 columns whose sums a kernel takes from one register) of a row that go the fast way.
pub(super) const MAX_UNITS: usize = 512;

/// Weight rows whose additions of groups overlap. Each is a chain as long as the row has groups.
pub(super) const CHAINS: usize = 4;

/// Products of group sums and scales, of `CHAINS` rows.
pub(super) type Products = [[f32; MAX_UNITS]; CHAINS];

/// `products[g] = sum of group g as f32 * scales[g]`, from the sums of units.
#[inline(always)]
pub(super) fn scale_groups(units: &[i32], units_per_group: usize, scales: &[[u8; 4]], products: &mut [f32; MAX_UNITS]) {
    match units_per_group {
        1 => scale_groups_of::<1>(units, scales, products),
        2 => scale_groups_of::<2>(units, scales, products),
        3 => scale_groups_of::<3>(units, scales, products),
        4 => scale_groups_of::<4>(units, scales, products),
        _ => {
            for ((product, units), scale) in products.iter_mut().zip(units.chunks(units_per_group)).zip(scales) {
                *product = units.iter().sum::<i32>() as f32 * f32::from_le_bytes(*scale);
            }
        }
    }
}

#[inline(always)]
fn scale_groups_of<const N: usize>(units: &[i32], scales: &[[u8; 4]], products: &mut [f32; MAX_UNITS]) {
    let (groups, rest) = units.as_chunks::<N>();
    for ((product, units), scale) in products.iter_mut().zip(groups).zip(scales) {
        *product = units.iter().sum::<i32>() as f32 * f32::from_le_bytes(*scale);
    }
    if let (false, Some(scale)) = (rest.is_empty(), scales.last()) {
        products[groups.len()] = rest.iter().sum::<i32>() as f32 * f32::from_le_bytes(*scale);
    }
}

/// Adds the first `groups` products of each row in order.
#[inline(always)]
pub(super) fn add_in_order(products: &Products, groups: usize) -> [f32; CHAINS] {
    let mut acc = [0.0f32; CHAINS];
    let [a, b, c, d] = products.each_ref().map(|row| &row[..groups]);
    for g in 0..groups {
        acc = [acc[0] + a[g], acc[1] + b[g], acc[2] + c[g], acc[3] + d[g]];
    }
    acc
}

//! Activations as int8, in the orders the integer kernels read them.

use super::Kernels;
use super::panel::{self, PACKED_FROM, Panel, Tile};
use crate::limits::MAX_COLUMNS;

/// Columns are padded with zeros to a multiple of this, the columns of a 64-byte load of int2 weights.
pub(super) const BLOCK: usize = 256;

/// Bytes of one row in each order.
pub(super) fn padded(cols: usize) -> usize {
    cols.next_multiple_of(BLOCK)
}

/// Rows of int8 activations.
///
/// Per row, `scale = max(absmax / 127, 1e-12)` and `q = clamp(round_half_even(x / scale), -127, 127)`. A row with a NaN or
/// an infinity gets the scale NaN, so that every output computed from it is NaN and the fault is not hidden.
///
/// Beside the natural order a row is kept de-interleaved, so that kernels only mask and shift weights: per 128 columns the
/// even ones and then the odd ones (int4), per 256 columns those that are 0, 1, 2 and 3 modulo 4 (int2).
#[derive(Debug, Default)]
pub struct Quantized {
    rows: usize,
    cols: usize,
    scales: Vec<f32>,
    sums: Vec<i32>,
    natural: Aligned<i8>,
    halves: Aligned<i8>,
    quarters: Aligned<i8>,
    sums8: Aligned<i32>,
    sums64: Aligned<i32>,
    /// The kernels that quantized the rows have a use for tiles.
    for_tiles: bool,
    /// Filled where they have, and there are more rows than the other kernels take at once.
    tiles: Vec<Tile>,
}

/// One row, borrowed by kernels.
#[derive(Clone, Copy, Debug)]
pub(super) struct QuantRow<'a> {
    pub scale: f32,
    /// Sum of all columns.
    pub sum: i32,
    pub natural: &'a [i8],
    pub halves: &'a [i8],
    pub quarters: &'a [i8],
    /// Per run of 8 columns, minus 8 times their sum: what int4 nibbles, stored with an offset of 8, add too much.
    pub sums8: &'a [i32],
    /// The same per run of 64 columns.
    pub sums64: &'a [i32],
}

impl QuantRow<'_> {
    /// Panics unless this is a row of `cols` columns.
    pub fn check(&self, cols: usize) {
        let stride = padded(cols);
        assert_eq!(self.natural.len(), stride, "columns of a quantized row");
        assert_eq!(self.halves.len(), stride, "columns of a quantized row");
        assert_eq!(self.quarters.len(), stride, "columns of a quantized row");
        assert_eq!(self.sums8.len(), stride / 8, "columns of a quantized row");
        assert_eq!(self.sums64.len(), stride / 64, "columns of a quantized row");
    }
}

/// One row, to be filled.
pub(super) struct QuantRowMut<'a> {
    pub scale: &'a mut f32,
    pub sum: &'a mut i32,
    pub natural: &'a mut [i8],
    pub halves: &'a mut [i8],
    pub quarters: &'a mut [i8],
    pub sums8: &'a mut [i32],
    pub sums64: &'a mut [i32],
}

impl Quantized {
    /// Room for `rows` rows of `cols` columns, or any other shape that needs no more: filling it allocates nothing.
    pub fn with_capacity(rows: usize, cols: usize) -> Quantized {
        let mut quantized = Quantized::default();
        quantized.reserve(rows, cols);
        quantized
    }

    /// The same for what `k` quantizes: with room for the order of tile registers, where it has them.
    pub fn for_kernels(k: &Kernels, rows: usize, cols: usize) -> Quantized {
        let mut quantized = Quantized::with_capacity(rows, cols);
        if rows >= PACKED_FROM && k.has_tiles() {
            quantized.tiles.resize(panel::tiles_of(rows, cols), Tile::ZERO);
        }
        quantized
    }

    /// Rows filled.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of each row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Replaces the contents by `x`, `[rows, cols]`. Allocates only when the shape exceeds every earlier one. Panics when
    /// `cols` exceeds [`MAX_COLUMNS`].
    pub fn quantize(&mut self, k: &Kernels, x: &[f32], rows: usize, cols: usize) {
        assert_eq!(x.len(), rows * cols, "activations to quantize");
        assert!(cols <= MAX_COLUMNS, "{cols} columns could overflow an i32 sum");
        self.reserve(rows, cols);
        (self.rows, self.cols) = (rows, cols);
        for i in 0..rows {
            k.quantize_row(&x[i * cols..][..cols], self.row_mut(i));
        }
        self.for_tiles = k.tiles.is_some();
        self.pack();
    }

    /// Replaces the contents by copies of `rows` of `from`, in their order. Allocates only when the shape exceeds every
    /// earlier one. Panics when `from` has no such row.
    pub fn gather(&mut self, from: &Quantized, rows: impl ExactSizeIterator<Item = usize>) {
        let count = rows.len();
        self.reserve(count, from.cols);
        (self.rows, self.cols) = (count, from.cols);
        for (i, row) in rows.enumerate() {
            let (to, from) = (self.row_mut(i), from.row(row));
            *to.scale = from.scale;
            *to.sum = from.sum;
            to.natural.copy_from_slice(from.natural);
            to.halves.copy_from_slice(from.halves);
            to.quarters.copy_from_slice(from.quarters);
            to.sums8.copy_from_slice(from.sums8);
            to.sums64.copy_from_slice(from.sums64);
        }
        self.for_tiles = from.for_tiles;
        self.pack();
    }

    /// The first `rows` rows as they were packed, where they were quantized by kernels that have a use for it and are enough.
    pub(super) fn panel(&self, rows: usize) -> Option<Panel<'_>> {
        let tiles = self.tiles.get(..panel::tiles_of(rows, self.cols))?;
        (self.is_packed() && rows > 0).then(|| Panel::new(&self.scales[..rows], self.cols, tiles))
    }

    fn is_packed(&self) -> bool {
        self.for_tiles && self.rows >= PACKED_FROM && self.cols > 0
    }

    fn pack(&mut self) {
        if !self.is_packed() {
            return;
        }
        let needed = panel::tiles_of(self.rows, self.cols);
        if self.tiles.len() < needed {
            self.tiles.resize(needed, Tile::ZERO);
        }
        let natural = &self.natural.get()[..self.rows * padded(self.cols)];
        panel::pack(natural, self.cols, &mut self.tiles[..needed]);
    }

    pub(super) fn row(&self, row: usize) -> QuantRow<'_> {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        let stride = padded(self.cols);
        QuantRow {
            scale: self.scales[row],
            sum: self.sums[row],
            natural: &self.natural.get()[row * stride..][..stride],
            halves: &self.halves.get()[row * stride..][..stride],
            quarters: &self.quarters.get()[row * stride..][..stride],
            sums8: &self.sums8.get()[row * stride / 8..][..stride / 8],
            sums64: &self.sums64.get()[row * stride / 64..][..stride / 64],
        }
    }

    fn row_mut(&mut self, row: usize) -> QuantRowMut<'_> {
        let stride = padded(self.cols);
        QuantRowMut {
            scale: &mut self.scales[row],
            sum: &mut self.sums[row],
            natural: &mut self.natural.get_mut()[row * stride..][..stride],
            halves: &mut self.halves.get_mut()[row * stride..][..stride],
            quarters: &mut self.quarters.get_mut()[row * stride..][..stride],
            sums8: &mut self.sums8.get_mut()[row * stride / 8..][..stride / 8],
            sums64: &mut self.sums64.get_mut()[row * stride / 64..][..stride / 64],
        }
    }

    fn reserve(&mut self, rows: usize, cols: usize) {
        if self.scales.len() < rows {
            self.scales.resize(rows, 0.0);
            self.sums.resize(rows, 0);
        }
        let bytes = rows * padded(cols);
        self.natural.reserve(bytes);
        self.halves.reserve(bytes);
        self.quarters.reserve(bytes);
        self.sums8.reserve(bytes / 8);
        self.sums64.reserve(bytes / 64);
    }
}

/// Elements that begin on a cache line, so that no 64-byte load of a kernel touches two.
#[derive(Debug, Default)]
struct Aligned<T> {
    elements: Vec<T>,
    first: usize,
}

impl<T: Copy + Default> Aligned<T> {
    fn get(&self) -> &[T] {
        &self.elements[self.first..]
    }

    fn get_mut(&mut self) -> &mut [T] {
        &mut self.elements[self.first..]
    }

    fn reserve(&mut self, len: usize) {
        let slack = 64 / size_of::<T>();
        if self.elements.len() < len + slack {
            self.elements.resize(len + slack, T::default());
            self.first = self.elements.as_ptr().align_offset(64).min(slack);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_orders_and_sums_by_hand() {
        // absmax 127 makes the scale 1; halves round to even.
        let mut x = vec![0.0f32; 300];
        (x[0], x[1], x[2], x[5], x[129], x[299]) = (127.0, -127.0, 2.5, -3.5, 1.0, 9.0);
        for k in Kernels::all_available() {
            let mut q = Quantized::with_capacity(1, 300);
            q.quantize(k, &x, 1, 300);
            let row = q.row(0);
            assert_eq!((row.scale, row.sum), (1.0, 2 - 4 + 1 + 9), "{k:?}");
            assert_eq!(row.natural[..6], [127, -127, 2, 0, 0, -4], "{k:?}");
            assert_eq!((row.halves[0], row.halves[1], row.halves[64], row.halves[66]), (127, 2, -127, -4), "{k:?}");
            assert_eq!((row.halves[128], row.halves[192]), (0, 1), "{k:?}");
            assert_eq!((row.quarters[0], row.quarters[64], row.quarters[65], row.quarters[128]), (127, -127, -4, 2));
            assert_eq!((row.sums8[0], row.sums8[16], row.sums8[37]), (16, -8, -72), "{k:?}");
            assert_eq!(row.sums64, [16, 0, -8, 0, -72, 0, 0, 0], "{k:?}");
            assert!(row.natural[300..].iter().all(|q| *q == 0));
        }
    }

    #[test]
    fn zeros_and_faults() {
        for k in Kernels::all_available() {
            let mut q = Quantized::with_capacity(3, 2);
            q.quantize(k, &[0.0, 0.0, 1.0, f32::NAN, f32::INFINITY, 1.0], 3, 2);
            assert_eq!((q.row(0).scale, q.row(0).natural[0]), (1e-12, 0), "{k:?}");
            assert!(q.row(1).scale.is_nan() && q.row(2).scale.is_nan(), "{k:?}");
        }
    }

    #[test]
    fn rounding_is_to_even_at_every_half_and_stops_at_the_bounds() {
        // The largest value makes the scale 1, except in the last row, whose scale has a floor.
        let mut x: Vec<f32> = (-254..=254).map(|i| i as f32 / 2.0).collect();
        x.extend(x.clone().iter().map(|v| v.next_up().min(127.0)));
        let level = |v: f32| v.round_ties_even() as i8;
        let tiny = [1e-12, -2.6e-12, 1e-30, -f32::MIN_POSITIVE, 1e-45];
        for k in Kernels::all_available() {
            let mut q = Quantized::with_capacity(1, x.len());
            q.quantize(k, &x, 1, x.len());
            assert_eq!(q.row(0).scale, 1.0);
            assert!(q.row(0).natural.iter().zip(&x).all(|(q, v)| *q == level(*v)), "{k:?}");
            q.quantize(k, &tiny, 1, tiny.len());
            assert_eq!((q.row(0).scale, q.row(0).natural[..5].to_vec()), (1e-12, vec![1, -3, 0, 0, 0]), "{k:?}");
        }
    }

    #[test]
    fn gathered_rows_are_the_rows_quantized_alone() {
        let k = Kernels::best();
        let x: Vec<f32> = (0..3 * 300).map(|i| (i * 37 % 101) as f32 * (1 + i / 300) as f32 - 50.0).collect();
        let mut all = Quantized::with_capacity(3, 300);
        all.quantize(k, &x, 3, 300);
        // Larger contents first: nothing of them may stay.
        let mut some = Quantized::with_capacity(4, 600);
        some.quantize(k, &[1.0; 4 * 600], 4, 600);
        let places = (some.natural.elements.as_ptr(), some.sums8.elements.as_ptr());
        let picks = [2, 0, 2];
        some.gather(&all, picks.into_iter());
        assert_eq!((some.rows(), some.cols()), (3, 300));
        assert_eq!((some.natural.elements.as_ptr(), some.sums8.elements.as_ptr()), places, "no allocation");
        for (i, pick) in picks.into_iter().enumerate() {
            let mut alone = Quantized::default();
            alone.quantize(k, &x[pick * 300..][..300], 1, 300);
            let (got, want) = (some.row(i), alone.row(0));
            assert_eq!((got.scale, got.sum), (want.scale, want.sum));
            assert_eq!((got.natural, got.halves), (want.natural, want.halves));
            assert_eq!((got.quarters, got.sums8, got.sums64), (want.quarters, want.sums8, want.sums64));
        }
        some.gather(&all, std::iter::empty());
        assert_eq!((some.rows(), some.cols()), (0, 300));
    }

    #[test]
    fn a_smaller_shape_leaves_nothing_of_the_last() {
        let k = Kernels::best();
        let mut q = Quantized::with_capacity(1, 512);
        q.quantize(k, &[1.0; 512], 1, 512);
        q.quantize(k, &[1.0; 3], 1, 3);
        assert_eq!((q.rows(), q.cols(), q.row(0).sum), (1, 3, 3 * 127));
        assert!(q.row(0).halves[2..64].iter().all(|q| *q == 0));
    }
}

//! Rows picked from a table of numbers, as attention meets its cache.

use std::ops::Range;

/// The numbers of a table, in the precision in which they are held.
#[derive(Clone, Copy, Debug)]
pub enum Table<'a> {
    /// As they are.
    F32(&'a [f32]),
    /// The upper halves of numbers whose lower halves are zero.
    Bf16(&'a [u16]),
}

impl<'a> Table<'a> {
    /// How many numbers.
    pub fn len(&self) -> usize {
        match self {
            Table::F32(cells) => cells.len(),
            Table::Bf16(cells) => cells.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The numbers from `start` on, as many as `out` has, as they are computed with.
    pub fn copy_to(&self, start: usize, out: &mut [f32]) {
        match self {
            Table::F32(cells) => out.copy_from_slice(&cells[start..][..out.len()]),
            Table::Bf16(cells) => {
                let cells = &cells[start..][..out.len()];
                out.iter_mut().zip(cells).for_each(|(out, cell)| *out = cell.float());
            }
        }
    }
}

/// A number of a table.
pub(super) trait Cell: Copy {
    /// As it is computed with.
    fn float(self) -> f32;
}

impl Cell for f32 {
    #[inline(always)]
    fn float(self) -> f32 {
        self
    }
}

impl Cell for u16 {
    #[inline(always)]
    fn float(self) -> f32 {
        f32::from_bits(u32::from(self) << 16)
    }
}

/// The upper half of the number nearest to `value` that has no lower one; of two as near, the one whose last bit is 0. What
/// is no number stays none.
#[inline(always)]
pub fn bf16_of(value: f32) -> u16 {
    let bits = value.to_bits();
    // Half of the last bit that stays, a little less where that bit is 0: what carries is rounded up.
    let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
    let quiet = (bits >> 16) as u16 | 0x40;
    if value.is_nan() { quiet } else { rounded }
}

/// The same columns of some rows of a table. Nothing is copied.
#[derive(Clone, Copy, Debug)]
pub struct RowsAt<'a> {
    table: Table<'a>,
    stride: usize,
    first: usize,
    width: usize,
    at: &'a [u32],
}

impl<'a> RowsAt<'a> {
    /// Columns `columns` of the rows numbered `at` of a table whose rows are `stride` wide.
    ///
    /// # Panics
    /// Where a column or a row lies outside the table.
    pub fn new(table: Table<'a>, stride: usize, columns: Range<usize>, at: &'a [u32]) -> RowsAt<'a> {
        assert!(columns.start <= columns.end && columns.end <= stride, "columns {columns:?} of {stride}");
        if let Some(last) = at.iter().max() {
            assert!(*last as usize * stride + columns.end <= table.len(), "row {last} of a table of {}", table.len());
        }
        RowsAt { table, stride, first: columns.start, width: columns.len(), at }
    }

    /// How many rows.
    pub fn len(&self) -> usize {
        self.at.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.at.is_empty()
    }

    /// Columns of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The table that they are picked from.
    pub(super) fn table(&self) -> Table<'a> {
        self.table
    }

    /// A row, where `cells` are the table's.
    #[inline(always)]
    pub(super) fn row<'c, C>(&self, cells: &'c [C], index: usize) -> &'c [C] {
        &cells[self.at[index] as usize * self.stride + self.first..][..self.width]
    }

    /// `wide` has as many rows of `width` floats as `long` has of `len`.
    pub(super) fn check(&self, wide: &[f32], long: &[f32]) {
        let fits = wide.len().is_multiple_of(self.width)
            && long.len().is_multiple_of(self.len())
            && wide.len() * self.len() == long.len() * self.width;
        assert!(fits, "{} and {} floats for {} rows of {}", wide.len(), long.len(), self.len(), self.width);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Kernels;

    #[test]
    fn products_and_sums_of_two_rows_by_hand() {
        // Rows [1 2] and [5 6] of a table whose rows are three wide, read from the second column on.
        let table = [9.0, 1.0, 2.0, 9.0, 3.0, 4.0, 9.0, 5.0, 6.0];
        let halves = table.map(bf16_of);
        for (k, table) in
            Kernels::all_available().into_iter().flat_map(|k| [(k, Table::F32(&table)), (k, Table::Bf16(&halves))])
        {
            let rows = RowsAt::new(table, 3, 1..3, &[2, 0]);
            let mut products = [0.0; 4];
            k.dots(&[1.0, 10.0, -1.0, 0.5], &rows, &mut products);
            assert_eq!(products, [65.0, 21.0, -2.0, 0.0], "{k:?}");
            let mut sums = [100.0, 0.0, 0.0, 1.0];
            k.add_weighted(&[2.0, 1.0, -1.0, 3.0], &rows, &mut sums);
            assert_eq!(sums, [111.0, 14.0, -2.0, 1.0], "{k:?}");
        }
    }

    #[test]
    fn the_nearest_of_eight_bits_is_taken_and_of_two_the_even_one() {
        // Between 1 and 2 the numbers are 1/128 apart.
        let nearest = |value: f32| bf16_of(value).float();
        let step = 1.0 / 128.0;
        for (value, want) in [
            (1.0, 1.0),
            (1.0 + 0.49 * step, 1.0),
            (1.0 + 0.5 * step, 1.0),
            (1.0 + 0.51 * step, 1.0 + step),
            (1.0 + 1.5 * step, 1.0 + 2.0 * step),
            (-1.0 - 1.5 * step, -1.0 - 2.0 * step),
            (2.0 - 0.3 * step, 2.0),
            (0.0, 0.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
        ] {
            assert_eq!(nearest(value), want, "{value}");
        }
        assert_eq!(nearest(-0.0).to_bits(), (-0.0f32).to_bits());
        // A quiet one, a signalling one, and one with nothing but lower bits.
        for bits in [0x7fc0_0000, 0xff80_0001, 0x7f80_ffff] {
            assert!(nearest(f32::from_bits(bits)).is_nan(), "{bits:x}");
        }
        for half in 0..=u16::MAX {
            let value = half.float();
            assert!(value.is_nan() || bf16_of(value) == half, "{half:x} is a number of its own");
        }
    }

    #[test]
    #[should_panic(expected = "row 3 of a table of 9")]
    fn rows_past_the_table_are_refused() {
        RowsAt::new(Table::F32(&[0.0; 9]), 3, 1..3, &[0, 3]);
    }

    #[test]
    #[should_panic(expected = "4 and 3 floats for 1 rows of 2")]
    fn room_for_another_number_of_products_is_refused() {
        let rows = RowsAt::new(Table::Bf16(&[0; 2]), 2, 0..2, &[0]);
        Kernels::best().dots(&[0.0; 4], &rows, &mut [0.0; 3]);
    }
}

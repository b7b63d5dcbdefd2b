//! Rows picked from a table of floats, as attention meets its cache.

use std::ops::Range;

/// The same columns of some rows of a table. Nothing is copied.
#[derive(Clone, Copy, Debug)]
pub struct RowsAt<'a> {
    table: &'a [f32],
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
    pub fn new(table: &'a [f32], stride: usize, columns: Range<usize>, at: &'a [u32]) -> RowsAt<'a> {
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

    #[inline(always)]
    pub(super) fn row(&self, index: usize) -> &'a [f32] {
        &self.table[self.at[index] as usize * self.stride + self.first..][..self.width]
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
        let rows = RowsAt::new(&table, 3, 1..3, &[2, 0]);
        for k in Kernels::all_available() {
            let mut products = [0.0; 4];
            k.dots(&[1.0, 10.0, -1.0, 0.5], &rows, &mut products);
            assert_eq!(products, [65.0, 21.0, -2.0, 0.0], "{k:?}");
            let mut sums = [100.0, 0.0, 0.0, 1.0];
            k.add_weighted(&[2.0, 1.0, -1.0, 3.0], &rows, &mut sums);
            assert_eq!(sums, [111.0, 14.0, -2.0, 1.0], "{k:?}");
        }
    }

    #[test]
    #[should_panic(expected = "row 3 of a table of 9")]
    fn rows_past_the_table_are_refused() {
        RowsAt::new(&[0.0; 9], 3, 1..3, &[0, 3]);
    }

    #[test]
    #[should_panic(expected = "4 and 3 floats for 1 rows of 2")]
    fn room_for_another_number_of_products_is_refused() {
        let rows = RowsAt { table: &[0.0; 2], stride: 2, first: 0, width: 2, at: &[0] };
        Kernels::best().dots(&[0.0; 4], &rows, &mut [0.0; 3]);
    }
}

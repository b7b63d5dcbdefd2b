//! Activations of a batch in the order that tile registers take them in, and vectors with a lane for each row.

use std::ops::Range;

use super::quantized::padded;

/// Takes the outputs of an activation row (its number first) for consecutive weight rows (the number of the first next).
pub(super) type Put<'a> = &'a mut dyn FnMut(usize, usize, &[f32]);

/// Rows of a tile register.
pub(super) const TILE_ROWS: usize = 16;

/// Rows of a batch from which on they are packed.
pub(super) const PACKED_FROM: usize = 13;

/// Bytes of such a row; the columns of a matrix that one step multiplies.
pub(super) const TILE_COLS: usize = 64;

/// A tile register full of bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Bytes(pub [[i8; TILE_COLS]; TILE_ROWS]);

impl Bytes {
    pub const ZERO: Bytes = Bytes([[0; TILE_COLS]; TILE_ROWS]);
}

/// Columns whose sums stand beside the bytes.
pub(super) const HALF_COLS: usize = TILE_COLS / 2;

/// Activations for a tile register.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Tile {
    pub bytes: Bytes,
    /// For each of the 16 activation rows, the sums of the first 32 columns and of the other: vectors that multiply weights
    /// with an offset take away by them what that adds.
    pub sums: [[i32; TILE_ROWS]; 2],
}

impl Tile {
    pub const ZERO: Tile = Tile { bytes: Bytes::ZERO, sums: [[0; TILE_ROWS]; 2] };
}

/// Int8 activations, 16 rows and 64 columns a tile. The hardware multiplies runs of four columns, so that tile row `k` holds
/// columns `4 k..4 k + 4` of the first row, then of the second, and so on. Rows past the last are zeros.
#[derive(Clone, Copy, Debug)]
pub(super) struct Panel<'a> {
    /// One a row of the batch.
    pub scales: &'a [f32],
    /// Columns of a row.
    pub cols: usize,
    tiles: &'a [Tile],
}

impl<'a> Panel<'a> {
    /// Joins tiles that [`pack`] filled with what the rows have besides.
    pub fn new(scales: &'a [f32], cols: usize, tiles: &'a [Tile]) -> Panel<'a> {
        assert_eq!(tiles.len(), tiles_of(scales.len(), cols), "tiles of a panel");
        Panel { scales, cols, tiles }
    }

    /// Runs of 16 rows.
    pub fn runs(&self) -> usize {
        self.scales.len().div_ceil(TILE_ROWS)
    }

    /// Steps of 64 columns, the last of which may be short.
    pub fn steps(&self) -> usize {
        self.cols.div_ceil(TILE_COLS)
    }

    /// The tile of a run and a step.
    #[inline(always)]
    pub fn tile(&self, run: usize, step: usize) -> &'a Bytes {
        &self.tiles[run * (padded(self.cols) / TILE_COLS) + step].bytes
    }

    /// The tiles of a run and some steps.
    pub fn tiles(&self, run: usize, steps: Range<usize>) -> &'a [Tile] {
        &self.tiles[run * (padded(self.cols) / TILE_COLS)..][steps]
    }
}

/// Tiles of a panel.
pub(super) fn tiles_of(rows: usize, cols: usize) -> usize {
    rows.div_ceil(TILE_ROWS) * (padded(cols) / TILE_COLS)
}

/// Fills `tiles` from rows of `cols` columns in their natural order, each padded with zeros.
pub(super) fn pack(natural: &[i8], cols: usize, tiles: &mut [Tile]) {
    let stride = padded(cols);
    if stride == 0 {
        return;
    }
    for (rows, tiles) in natural.chunks(TILE_ROWS * stride).zip(tiles.chunks_mut(stride / TILE_COLS)) {
        if rows.len() < TILE_ROWS * stride {
            tiles.fill(Tile::ZERO);
        }
        for (r, row) in rows.chunks_exact(stride).enumerate() {
            for (tile, columns) in tiles.iter_mut().zip(row.as_chunks::<TILE_COLS>().0) {
                for (to, four) in tile.bytes.0.iter_mut().zip(columns.as_chunks::<4>().0) {
                    to.as_chunks_mut::<4>().0[r] = *four;
                }
                for (sums, half) in tile.sums.iter_mut().zip(columns.as_chunks::<HALF_COLS>().0) {
                    sums[r] = half.iter().map(|column| i32::from(*column)).sum();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_of_a_panel_by_hand() {
        // 17 rows of 70 columns: padded to 256, so 4 tiles a run, of which two are within the columns.
        let natural: Vec<i8> =
            (0..17 * 256).map(|i| if i % 256 < 70 { (i / 256 + i % 256) as i8 } else { 0 }).collect();
        let scales = [1.0; 17];
        let mut tiles = vec![Tile { bytes: Bytes([[99; 64]; 16]), sums: [[99; 16]; 2] }; tiles_of(17, 70)];
        pack(&natural, 70, &mut tiles);
        let panel = Panel::new(&scales, 70, &tiles);
        assert_eq!((tiles.len(), panel.runs(), panel.steps()), (8, 2, 2));
        // Row 3, column 66: the second step, the first run of four, the third of them.
        assert_eq!(panel.tile(0, 1).0[0][4 * 3 + 2], 69);
        // Row 15, column 62: the last run of four.
        assert_eq!(panel.tile(0, 0).0[15][4 * 15 + 2], 77);
        // Row 16 is the first of the second run, and alone there.
        assert_eq!(panel.tile(1, 0).0[2][..6], [24, 25, 26, 27, 0, 0]);
        assert_eq!(panel.tile(1, 1).0[2], [0; 64]);
        // Columns 64 to 69 of row 1 are 65 to 70; the others of that tile are padding. Row 17 is none.
        assert_eq!((panel.tiles(0, 1..2)[0].sums[0][1], panel.tiles(0, 1..2)[0].sums[1][1]), (405, 0));
        // Columns 32 to 63 of row 0.
        assert_eq!((panel.tiles(0, 0..1)[0].sums[1][0], panel.tiles(1, 0..1)[0].sums[1][1]), (1520, 0));
    }
}

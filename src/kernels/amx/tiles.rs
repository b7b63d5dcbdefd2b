//! What a tile register can do, apart from who does it.

use crate::kernels::panel::{Bytes, TILE_COLS, TILE_ROWS};

/// A tile register full of sums.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Sums(pub [[i32; TILE_COLS / 4]; TILE_ROWS]);

impl Sums {
    pub const ZERO: Sums = Sums([[0; TILE_COLS / 4]; TILE_ROWS]);
}

/// The eight tile registers of a thread, each configured to 16 rows of 64 bytes. Registers are named by their numbers; what
/// lies in memory has the rows one after the other.
pub(super) trait Tiles {
    /// `T = 0`.
    fn zero<const T: usize>(&mut self);

    /// `T = from`.
    fn load_bytes<const T: usize>(&mut self, from: &Bytes);

    /// `T = from`.
    fn load_sums<const T: usize>(&mut self, from: &Sums);

    /// `S[m][n] += sum of A[m][4 k + j] * B[k][4 n + j]` over `k` below 16 and `j` below 4: signed bytes, exact products,
    /// additions of i32 that wrap.
    fn dot<const S: usize, const A: usize, const B: usize>(&mut self);

    /// `to = T`.
    fn store<const T: usize>(&mut self, to: &mut Sums);
}

/// What `ldtilecfg` reads.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(super) struct Config {
    pub palette: u8,
    pub start_row: u8,
    pub reserved: [u8; 14],
    /// Bytes of a row, for each register.
    pub row_bytes: [u16; 16],
    /// Rows of each register.
    pub rows: [u8; 16],
}

impl Config {
    /// All eight registers at their full size.
    pub const FULL: Config = {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut t = 0;
        while t < 8 {
            (row_bytes[t], rows[t]) = (TILE_COLS as u16, TILE_ROWS as u8);
            t += 1;
        }
        Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
    };
}

const _: () = assert!(size_of::<Config>() == 64 && size_of::<Bytes>() == 1024 && size_of::<Sums>() == 1024);

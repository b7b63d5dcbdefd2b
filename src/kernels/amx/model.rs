//! The tile instructions as the manual's pseudocode has them, and the kernel over them: how it is tested where no processor
//! has tiles. The registers keep what they hold in bytes, and every rule whose breach the hardware answers with an exception
//! is a panic.

use std::ops::Range;

use super::product::{product, takes};
use super::tiles::{Config, Sums, Tiles};
use crate::kernels::format::{Format, MatrixSpec, WeightRef};
use crate::kernels::panel::{Bytes, Panel, Put};
use crate::kernels::{Input, Isa, Kernels, Quantized, Team, TileKernel, matmul, scalar};

const ROWS_MAX: usize = 16;
const ROW_BYTES_MAX: usize = 64;

type Memory = [u8; ROWS_MAX * ROW_BYTES_MAX];

#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    row_bytes: usize,
    /// Row after row; past the configured rows and bytes there are zeros.
    data: [[u8; ROW_BYTES_MAX]; ROWS_MAX],
}

/// The tile state of a thread.
pub(super) struct Model {
    tiles: [Tile; 8],
}

impl Model {
    /// LDTILECFG.
    pub(super) fn configure(config: &Config) -> Model {
        assert_eq!(config.palette, 1, "#GP: no such palette");
        assert_eq!(config.reserved, [0; 14], "#GP: reserved bytes");
        assert_eq!(config.start_row, 0, "a load would be taken up in the middle");
        assert!(config.row_bytes[8..].iter().all(|bytes| *bytes == 0), "#GP: a palette of eight registers");
        assert!(config.rows[8..].iter().all(|rows| *rows == 0), "#GP: a palette of eight registers");
        let tiles = std::array::from_fn(|t| {
            let (rows, row_bytes) = (usize::from(config.rows[t]), usize::from(config.row_bytes[t]));
            assert!(rows <= ROWS_MAX && row_bytes <= ROW_BYTES_MAX, "#GP: size of tmm{t}");
            assert_eq!(rows == 0, row_bytes == 0, "#GP: a register of which one side is empty");
            Tile { rows, row_bytes, data: [[0; ROW_BYTES_MAX]; ROWS_MAX] }
        });
        Model { tiles }
    }

    /// TILELOADD with a stride of 64 bytes.
    fn load(&mut self, t: usize, memory: &Memory) {
        let tile = &mut self.tiles[t];
        assert!(tile.rows > 0, "#UD: tmm{t} is not configured");
        tile.data = [[0; ROW_BYTES_MAX]; ROWS_MAX];
        for row in 0..tile.rows {
            let from = &memory[ROW_BYTES_MAX * row..][..tile.row_bytes];
            tile.data[row][..tile.row_bytes].copy_from_slice(from);
        }
    }
}

impl Tiles for Model {
    /// TILEZERO.
    fn zero<const T: usize>(&mut self) {
        assert!(self.tiles[T].rows > 0, "#UD: tmm{T} is not configured");
        self.tiles[T].data = [[0; ROW_BYTES_MAX]; ROWS_MAX];
    }

    fn load_bytes<const T: usize>(&mut self, from: &Bytes) {
        let memory: Vec<u8> = from.0.as_flattened().iter().map(|b| *b as u8).collect();
        self.load(T, memory.as_slice().try_into().unwrap());
    }

    fn load_sums<const T: usize>(&mut self, from: &Sums) {
        let memory: Vec<u8> = from.0.as_flattened().iter().flat_map(|sum| sum.to_le_bytes()).collect();
        self.load(T, memory.as_slice().try_into().unwrap());
    }

    /// TDPBSSD.
    fn dot<const S: usize, const A: usize, const B: usize>(&mut self) {
        let (a, b) = (self.tiles[A], self.tiles[B]);
        let s = &mut self.tiles[S];
        assert!(S != A && S != B && A != B, "#UD: a register twice");
        for (tile, name) in [(&*s, S), (&a, A), (&b, B)] {
            assert!(tile.rows > 0 && tile.row_bytes.is_multiple_of(4), "#UD: size of tmm{name}");
        }
        assert_eq!((a.rows, b.row_bytes, a.row_bytes / 4), (s.rows, s.row_bytes, b.rows), "#UD: sizes do not fit");
        for m in 0..s.rows {
            for k in 0..a.row_bytes / 4 {
                for n in 0..s.row_bytes / 4 {
                    let place = 4 * n..4 * n + 4;
                    let mut sum = i32::from_le_bytes(s.data[m][place.clone()].try_into().unwrap());
                    for j in 0..4 {
                        let (left, right) = (a.data[m][4 * k + j] as i8, b.data[k][4 * n + j] as i8);
                        sum = sum.wrapping_add(i32::from(left) * i32::from(right));
                    }
                    s.data[m][place].copy_from_slice(&sum.to_le_bytes());
                }
            }
        }
    }

    /// TILESTORED with a stride of 64 bytes. Rows and bytes past the configured ones are not written.
    fn store<const T: usize>(&mut self, to: &mut Sums) {
        let tile = &self.tiles[T];
        assert!(tile.rows > 0, "#UD: tmm{T} is not configured");
        for (row, to) in tile.data[..tile.rows].iter().zip(&mut to.0) {
            for (sum, bytes) in to.iter_mut().zip(row[..tile.row_bytes].as_chunks::<4>().0) {
                *sum = i32::from_le_bytes(*bytes);
            }
        }
    }
}

/// What the table's function does, over the model.
pub(super) fn product_over_model(w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    product(&mut Model::configure(&Config::FULL), w, rows, x, put);
}

/// A table of scalar kernels whose batches go over the model.
static OVER_MODEL: Kernels = Kernels {
    isa: Isa::Amx,
    tiles: Some(TileKernel { takes, few: 0, product: product_over_model }),
    ..scalar::DEFINITION
};

/// Deterministic bytes.
struct Source(u64);

impl Source {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn unit(&mut self) -> f32 {
        self.next() as f32 / (1u64 << 30) as f32 - 1.0
    }
}

fn multiply(k: &Kernels, team: &Team, w: &WeightRef, x: &[f32], batch: usize) -> Vec<u32> {
    let mut quantized = Quantized::with_capacity(batch, w.cols());
    quantized.quantize(k, x, batch, w.cols());
    multiply_quantized(k, team, w, &quantized)
}

fn multiply_quantized(k: &Kernels, team: &Team, w: &WeightRef, x: &Quantized) -> Vec<u32> {
    let input = Input { rows: x.rows(), cols: w.cols(), values: &[], quantized: Some(x) };
    let mut out = vec![f32::NAN; x.rows() * w.rows()];
    matmul(k, team, w, &input, &mut out);
    out.iter().map(|v| v.to_bits()).collect()
}

fn matrix(format: Format, rows: usize, cols: usize, source: &mut Source) -> (MatrixSpec, Vec<u8>, Vec<u8>) {
    let spec = MatrixSpec { format, rows, cols };
    let data = (0..spec.data_bytes()).map(|_| source.next() as u8).collect();
    let scales = (0..format.scale_count(rows, cols)).flat_map(|_| (source.unit() * 0.03).to_le_bytes()).collect();
    (spec, data, scales)
}

fn group(group: u16) -> Format {
    Format::Int4Group { group }
}

#[test]
fn products_over_the_model_equal_scalar() {
    products_equal_scalar(&OVER_MODEL);
}

#[test]
fn products_on_registers_equal_scalar() {
    match Kernels::for_isa(Isa::Amx) {
        Some(k) => products_equal_scalar(k),
        None => eprintln!("skipped: {}", Kernels::why_missing(Isa::Amx).unwrap()),
    }
}

/// Every edge of a tile, a pair, a pass, a step, an unpacking and a run of groups: each number of columns meets a few of
/// the others' numbers, and all of them have their turn.
fn products_equal_scalar(k: &Kernels) {
    const ROWS: [usize; 12] = [1, 2, 15, 16, 17, 31, 32, 33, 48, 63, 65, 100];
    const BATCHES: [usize; 13] = [16, 17, 31, 32, 33, 48, 49, 64, 127, 128, 129, 160, 20];
    let teams = [1, 3].map(Team::new);
    let mut source = Source(1);
    let mut turn = 0;
    for format in [Format::Int8Row, Format::Int4Row, group(64), group(128), group(256), group(512)] {
        assert!(takes(format), "{format}");
        for cols in [1, 2, 63, 64, 65, 127, 129, 255, 257, 511, 512, 513, 1023, 1024, 1100] {
            for _ in 0..4 {
                let (rows, batch) = (ROWS[turn % ROWS.len()], BATCHES[turn % BATCHES.len()]);
                turn += 1;
                let (spec, data, scales) = matrix(format, rows, cols, &mut source);
                let w = WeightRef::new(spec, &data, &scales);
                let x: Vec<f32> = (0..batch * cols).map(|_| source.unit()).collect();
                let got = multiply(k, &teams[turn % 2], &w, &x, batch);
                assert!(got == multiply(&scalar::TABLE, &teams[0], &w, &x, batch), "{spec:?}, batch {batch}");
            }
        }
    }
}

/// Small batches and other formats go the way they go without tiles.
#[test]
fn what_tiles_do_not_take_is_left_to_the_rest_of_the_table() {
    let team = Team::new(2);
    let mut source = Source(2);
    let others = [group(32), group(96), group(192), group(1024), Format::Int2Row, Format::Int3Group];
    assert!(others.iter().all(|format| !takes(*format)));
    for (format, batch) in others.map(|format| (format, 20)).into_iter().chain([(Format::Int4Row, 15), (group(64), 1)])
    {
        let (spec, data, scales) = matrix(format, 9, 300, &mut source);
        let w = WeightRef::new(spec, &data, &scales);
        let x: Vec<f32> = (0..batch * 300).map(|_| source.unit()).collect();
        let got = multiply(&OVER_MODEL, &team, &w, &x, batch);
        assert!(got == multiply(&scalar::TABLE, &team, &w, &x, batch), "{spec:?}");
    }
}

#[test]
fn rows_that_were_gathered_or_came_after_more_are_packed_anew() {
    let team = Team::new(1);
    let mut source = Source(3);
    let (spec, data, scales) = matrix(Format::Int4Row, 40, 200, &mut source);
    let w = WeightRef::new(spec, &data, &scales);
    let x: Vec<f32> = (0..64 * 200).map(|_| source.unit()).collect();
    let mut all = Quantized::with_capacity(64, 200);
    all.quantize(&OVER_MODEL, &x, 64, 200);
    for picks in [(0..64).rev().step_by(3).collect::<Vec<usize>>(), vec![5; 17], vec![63, 1, 2]] {
        let mut some = Quantized::default();
        some.quantize(&OVER_MODEL, &[1.0; 64 * 200], 64, 200);
        some.gather(&all, picks.iter().copied());
        let rows: Vec<f32> = picks.iter().flat_map(|row| &x[row * 200..][..200]).copied().collect();
        let want = multiply(&scalar::TABLE, &team, &w, &rows, picks.len());
        assert!(multiply_quantized(&OVER_MODEL, &team, &w, &some) == want, "{picks:?}");
    }
}

/// The largest products there are, in the widest rows.
#[test]
fn no_sum_on_tiles_overflows() {
    let (team, cols) = (Team::new(2), crate::limits::MAX_COLUMNS);
    for (format, byte) in [(Format::Int8Row, 0x80), (Format::Int8Row, 0x7f), (Format::Int4Row, 0), (group(512), 0xff)] {
        let spec = MatrixSpec { format, rows: 1, cols };
        let (data, scales) = (vec![byte; spec.data_bytes()], 1f32.to_le_bytes().repeat(format.scale_count(1, cols)));
        let w = WeightRef::new(spec, &data, &scales);
        let x: Vec<f32> = (0..16 * cols).map(|i| if i / cols % 2 == 0 { 1.0 } else { -1.0 }).collect();
        assert!(multiply(&OVER_MODEL, &team, &w, &x, 16) == multiply(&scalar::TABLE, &team, &w, &x, 16), "{spec:?}");
    }
}

/// Scales at the ends of the range, NaN and infinities, in weights and activations.
#[test]
fn faults_of_scales_are_the_same_on_tiles() {
    let team = Team::new(1);
    let mut source = Source(4);
    let odd = [f32::MAX, f32::MIN_POSITIVE, f32::INFINITY, f32::NAN, 0.0, -1e-40];
    for format in [Format::Int8Row, group(64)] {
        let (spec, data, _) = matrix(format, 37, 330, &mut source);
        let scales: Vec<u8> = (0..format.scale_count(37, 330)).flat_map(|i| odd[i % odd.len()].to_le_bytes()).collect();
        let w = WeightRef::new(spec, &data, &scales);
        let mut x: Vec<f32> = (0..20 * 330).map(|_| source.unit()).collect();
        (x[5], x[400]) = (f32::NAN, f32::NEG_INFINITY);
        let values = |k| multiply(k, &team, &w, &x, 20).into_iter().map(f32::from_bits);
        for (got, want) in values(&OVER_MODEL).zip(values(&scalar::TABLE)) {
            assert!(
                got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
                "{spec:?}: {got:e}, not {want:e}"
            );
        }
    }
}

/// Two rows of sums in two columns, of eight columns of bytes, so that the second four meet the second row of the right
/// operand; computed on paper.
#[test]
fn the_model_multiplies_as_computed_by_hand() {
    let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    for (t, rows, row_bytes) in [(0, 2, 8), (1, 2, 8), (2, 2, 8)] {
        (config.rows[t], config.row_bytes[t]) = (rows, row_bytes);
    }
    let mut model = Model::configure(&config);
    let (mut a, mut b) = (Bytes::ZERO, Bytes::ZERO);
    a.0[0][..8].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 8]);
    a.0[1][..8].copy_from_slice(&[-1, 0, 127, -128, 1, 1, 1, 1]);
    b.0[0][..8].copy_from_slice(&[1, 0, -1, 2, 10, 20, 30, 40]);
    b.0[1][..8].copy_from_slice(&[1, 1, 1, 1, -128, 127, 0, -1]);
    // What lies past the configured rows and bytes is not read.
    (a.0[0][8], a.0[2][0], b.0[0][8], b.0[2][0]) = (99, 99, 99, 99);
    let mut sums = Sums([[7; 16]; 16]);
    sums.0[0][..2].copy_from_slice(&[100, -100]);
    sums.0[1][..2].copy_from_slice(&[0, i32::MAX]);
    model.load_sums::<0>(&sums);
    model.load_bytes::<1>(&a);
    model.load_bytes::<2>(&b);
    model.dot::<0, 1, 2>();
    model.store::<0>(&mut sums);
    // 100 + (1 - 3 + 8) + (5 + 6 + 7 + 8); -100 + (10 + 40 + 90 + 160) + (-640 + 762 - 8).
    assert_eq!(sums.0[0][..3], [132, 314, 7]);
    // -1 - 127 - 256 + 4; MAX + (-10 + 3810 - 5120) + (-128 + 127 - 1), which does not wrap.
    assert_eq!(sums.0[1][..3], [-380, i32::MAX - 1322, 7]);
    assert_eq!(sums.0[2], [7; 16]);
    model.zero::<0>();
    model.store::<0>(&mut sums);
    assert_eq!((sums.0[0][1], sums.0[1][1], sums.0[0][2]), (0, 0, 7));
}

//! Every table against the scalar one, bit for bit, and the scalar one against plain arithmetic in f64.

use super::rows::{Table, bf16_of};
use super::*;

/// Deterministic numbers (splitmix64).
struct Source(u64);

impl Source {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Between -1 and 1.
    fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn floats(&mut self, len: usize) -> Vec<f32> {
        (0..len).map(|_| self.unit()).collect()
    }
}

/// Which corner of a format's values a matrix is made of.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// Ordinary sizes, among them subnormals of the stored type.
    Ordinary,
    /// Scales close to the ends of the range.
    Extreme,
    /// Every bit pattern, NaN and infinities included.
    Anything,
}

/// A power of two, so that it adds no rounding.
const NVFP4_FACTOR: f32 = 0.0625;

struct Matrix {
    spec: MatrixSpec,
    data: Vec<u8>,
    scales: Vec<u8>,
}

impl Matrix {
    fn new(format: Format, rows: usize, cols: usize, kind: Kind, source: &mut Source) -> Matrix {
        let spec = MatrixSpec { format, rows, cols };
        let mut data: Vec<u8> = (0..spec.data_bytes()).map(|_| source.next() as u8).collect();
        if kind != Kind::Anything {
            tame(format, &mut data, source);
        }
        if format == Format::Nvfp4 {
            // Any positive scale but NaN.
            let scales = (0..spec.scale_bytes()).map(|_| (source.next() % 127) as u8).collect();
            return Matrix { spec, data, scales };
        }
        let scales = (0..format.scale_count(rows, cols)).flat_map(|i| {
            let scale = match (kind, i % 3) {
                (Kind::Extreme, 0) => f32::MAX * source.unit(),
                (Kind::Extreme, 1) => f32::MIN_POSITIVE * source.unit(),
                _ => source.unit() * 0.03,
            };
            scale.to_le_bytes()
        });
        Matrix { spec, scales: scales.collect(), data }
    }

    fn weights(&self) -> WeightRef<'_> {
        let weights = WeightRef::new(self.spec, &self.data, &self.scales);
        if self.spec.format == Format::Nvfp4 { weights.with_factor(NVFP4_FACTOR) } else { weights }
    }

    /// Element by the container's table, with nothing of the code under test.
    fn value(&self, row: usize, col: usize) -> f64 {
        let MatrixSpec { format, rows: _, cols } = self.spec;
        let bytes = |size: usize| &self.data[(row * cols + col) * size..][..size];
        let scale = |index: usize| f64::from(f32::from_le_bytes(self.scales[4 * index..][..4].try_into().unwrap()));
        let nibble = |byte: u8| f64::from(if col.is_multiple_of(2) { byte % 16 } else { byte / 16 }) - 8.0;
        match format {
            Format::F32 => f64::from(f32::from_le_bytes(bytes(4).try_into().unwrap())),
            Format::Bf16 => small_float(u16::from_le_bytes(bytes(2).try_into().unwrap()).into(), 8, 7),
            Format::F16 => small_float(u16::from_le_bytes(bytes(2).try_into().unwrap()).into(), 5, 10),
            Format::Fp8Block => {
                small_float(bytes(1)[0].into(), 4, 3) * scale(row / 128 * cols.div_ceil(128) + col / 128)
            }
            Format::Int8Row => f64::from(bytes(1)[0] as i8) * scale(row),
            Format::Int4Row => nibble(self.data[row * cols.div_ceil(2) + col / 2]) * scale(row),
            Format::Int4Group { group } => {
                let group = usize::from(group);
                nibble(self.data[row * cols.div_ceil(2) + col / 2]) * scale(row * cols.div_ceil(group) + col / group)
            }
            Format::Int3Group => {
                let groups = cols.div_ceil(64);
                let (group, k) = (&self.data[24 * (row * groups + col / 64)..][..24], col % 64);
                let (low, high) = ((group[k / 4] >> (2 * (k % 4))) & 3, (group[16 + k / 8] >> (k % 8)) & 1);
                (f64::from(4 * high + low) - 4.0) * scale(row * groups + col / 64)
            }
            Format::Nvfp4 => {
                let byte = self.data[row * cols.div_ceil(2) + col / 2];
                let code = if col.is_multiple_of(2) { byte % 16 } else { byte / 16 };
                let scale = small_float(self.scales[row * cols.div_ceil(16) + col / 16].into(), 4, 3);
                small_float(code.into(), 2, 1) * scale * f64::from(NVFP4_FACTOR)
            }
            Format::Int2Row => {
                let byte = self.data[row * cols.div_ceil(4) + col / 4];
                (f64::from((byte >> (2 * (col % 4))) & 3) - 2.0) * scale(row)
            }
        }
    }
}

/// A finite float of any small layout, from its definition.
fn small_float(bits: u32, exponent_bits: u32, mantissa_bits: u32) -> f64 {
    let sign = if bits >> (exponent_bits + mantissa_bits) == 1 { -1.0 } else { 1.0 };
    let exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let fraction = f64::from(bits & ((1 << mantissa_bits) - 1)) / f64::from(1u32 << mantissa_bits);
    let bias = (1 << (exponent_bits - 1)) - 1;
    if exponent == 0 {
        sign * fraction * 2f64.powi(1 - bias)
    } else {
        sign * (1.0 + fraction) * 2f64.powi(exponent as i32 - bias)
    }
}

/// Replaces what is not finite, and makes large floats ordinary; a twelfth become subnormal or zero.
fn tame(format: Format, data: &mut [u8], source: &mut Source) {
    let subnormal = |source: &mut Source| source.next().is_multiple_of(12);
    match format {
        Format::F32 => {
            for b in data.as_chunks_mut::<4>().0 {
                let exponent = if subnormal(source) { 0 } else { 110 + source.next() as u32 % 18 };
                *b = (source.next() as u32 & 0x807f_ffff | exponent << 23).to_le_bytes();
            }
        }
        Format::Bf16 => {
            for b in data.as_chunks_mut::<2>().0 {
                let exponent = if subnormal(source) { 0 } else { 110 + source.next() as u16 % 18 };
                *b = (source.next() as u16 & 0x807f | exponent << 7).to_le_bytes();
            }
        }
        Format::F16 => {
            for b in data.as_chunks_mut::<2>().0 {
                let exponent = if subnormal(source) { 0 } else { 1 + source.next() as u16 % 16 };
                *b = (source.next() as u16 & 0x83ff | exponent << 10).to_le_bytes();
            }
        }
        Format::Fp8Block => {
            for b in data {
                *b = if *b & 0x7f == 0x7f { *b & 0x87 } else { *b };
            }
        }
        _ => {}
    }
}

fn formats() -> Vec<Format> {
    let mut formats = vec![Format::F32, Format::Bf16, Format::F16, Format::Fp8Block, Format::Nvfp4];
    formats.extend([Format::Int8Row, Format::Int4Row, Format::Int3Group, Format::Int2Row]);
    // The containers' groups, and sizes that only the definition handles.
    formats.extend([16, 32, 48, 64, 96, 128, 192, 256, 8, 40, 1, 5, 10].map(|group| Format::Int4Group { group }));
    formats
}

/// Every remainder of a chunk, block or load somewhere, then sizes with several whole ones before the remainder.
fn columns() -> Vec<usize> {
    let mut cols: Vec<usize> = (1..=34).collect();
    cols.extend([47, 48, 49, 63, 64, 65, 95, 96, 97, 100, 126, 127, 128, 129, 130, 159, 160, 161, 191, 192, 193]);
    cols.extend([
        255, 256, 257, 300, 383, 384, 385, 511, 512, 513, 640, 1023, 1024, 1025, 1088, 1100, 2048, 2049, 2500,
    ]);
    cols
}

fn assert_same(got: &[f32], want: &[f32], what: impl Fn() -> String) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        assert!(same, "{}: element {i} is {got:e}, the definition says {want:e}", what());
    }
}

fn multiply(k: &Kernels, team: &Team, w: &WeightRef, x: &[f32], batch: usize, integer: bool) -> Vec<f32> {
    let cols = w.cols();
    let mut quantized = Quantized::with_capacity(batch, cols);
    if integer {
        quantized.quantize(k, x, batch, cols);
    }
    let input = Input { rows: batch, cols, values: x, quantized: integer.then_some(&quantized) };
    let mut out = vec![f32::NAN; batch * w.rows()];
    matmul(k, team, w, &input, &mut out);
    out
}

/// Calls `check` with matrices of every format, size and kind, each with 9 rows of activations.
fn for_every_matrix(mut check: impl FnMut(&Matrix, &[f32], Kind)) {
    let mut source = Source(1);
    for format in formats() {
        for (i, cols) in columns().into_iter().enumerate() {
            for kind in [Kind::Ordinary, Kind::Extreme, Kind::Anything] {
                let matrix = Matrix::new(format, 1 + i % 9, cols, kind, &mut source);
                let x = source.floats(9 * cols);
                check(&matrix, &x, kind);
            }
        }
    }
}

fn products_equal_scalar(k: &Kernels) {
    let team = Team::new(1);
    let mut turn = 0;
    for_every_matrix(|matrix, x, kind| {
        let w = matrix.weights();
        turn += 1;
        let batch = 1 + turn % 9;
        let x = &x[..batch * w.cols()];
        for integer in [false, true] {
            let got = multiply(k, &team, &w, x, batch, integer);
            let want = multiply(&scalar::TABLE, &team, &w, x, batch, integer);
            assert_same(&got, &want, || format!("{k:?} {:?} {kind:?} batch {batch} integer {integer}", w.spec()));
        }
    });
}

fn every_batch_equals_scalar(k: &Kernels) {
    let team = Team::new(1);
    let mut source = Source(2);
    for format in formats() {
        // The last is wider than rows whose activations stay in the first-level cache.
        for cols in [97, 1100, 2113] {
            for rows in 1..=9 {
                let matrix = Matrix::new(format, rows, cols, Kind::Ordinary, &mut source);
                let w = matrix.weights();
                for batch in 1..=9 {
                    let x = source.floats(batch * cols);
                    for integer in [false, true] {
                        let got = multiply(k, &team, &w, &x, batch, integer);
                        let want = multiply(&scalar::TABLE, &team, &w, &x, batch, integer);
                        assert_same(&got, &want, || format!("{k:?} {:?} batch {batch} {integer}", w.spec()));
                    }
                }
            }
        }
    }
}

fn partial_fp8_blocks_equal_scalar(k: &Kernels) {
    let team = Team::new(1);
    let mut source = Source(3);
    for (rows, cols) in [(127, 130), (128, 128), (129, 127), (257, 300), (130, 1)] {
        for kind in [Kind::Ordinary, Kind::Extreme, Kind::Anything] {
            let matrix = Matrix::new(Format::Fp8Block, rows, cols, kind, &mut source);
            let x = source.floats(3 * cols);
            let got = multiply(k, &team, &matrix.weights(), &x, 3, false);
            let want = multiply(&scalar::TABLE, &team, &matrix.weights(), &x, 3, false);
            assert_same(&got, &want, || format!("{k:?} fp8 {rows} x {cols} {kind:?}"));
        }
    }
}

fn row_kernels_equal_scalar(k: &Kernels) {
    for_every_matrix(|matrix, x, kind| {
        let w = matrix.weights();
        let (cols, rows) = (w.cols(), w.rows());
        let what = || format!("{k:?} {:?} {kind:?}", w.spec());
        for row in 0..rows {
            let (mut got, mut want) = (vec![0.0; cols], vec![1.0; cols]);
            k.decode_row(&w, row, &mut got);
            scalar::TABLE.decode_row(&w, row, &mut want);
            assert_same(&got, &want, what);
        }
        let start = rows / 3;
        let (mut got, mut want) = (x[..cols].to_vec(), x[..cols].to_vec());
        k.add_scaled_rows(&w, start..rows, &x[x.len() - (rows - start)..], &mut got);
        scalar::TABLE.add_scaled_rows(&w, start..rows, &x[x.len() - (rows - start)..], &mut want);
        assert_same(&got, &want, what);
    });
}

fn vectors_equal_scalar(k: &Kernels) {
    let mut source = Source(4);
    for len in (0..=100).chain([127, 128, 129, 255, 576, 1000, 2048, 6145]) {
        for spread in [1.0, 30.0, 200.0] {
            let mut a: Vec<f32> = source.floats(len).into_iter().map(|v| v * spread).collect();
            let b = source.floats(len);
            for special in [1.0, f32::NEG_INFINITY, f32::MIN_POSITIVE / 4.0, f32::INFINITY, f32::NAN] {
                if special != 1.0 && len > 0 {
                    a[source.next() as usize % len] = special;
                }
                let what = || format!("{k:?} length {len} spread {spread} special {special}");
                assert_same(&[k.dot(&a, &b)], &[scalar::TABLE.dot(&a, &b)], what);
                let (mut got, mut want) = (b.clone(), b.clone());
                k.axpy(spread, &a, &mut got);
                scalar::TABLE.axpy(spread, &a, &mut want);
                assert_same(&got, &want, what);
                k.silu_mul(&a, &mut got);
                scalar::TABLE.silu_mul(&a, &mut want);
                assert_same(&got, &want, what);
                let (mut got, mut want) = (a.clone(), a.clone());
                let sums = [k.exp_shifted(&mut got, 1.5), scalar::TABLE.exp_shifted(&mut want, 1.5)];
                assert_same(&got, &want, what);
                assert_same(&sums[..1], &sums[1..], what);
            }
        }
    }
}

/// The order of additions as the module's documentation words it, without the chunks and loops of the code.
fn dots_add_in_the_documented_order(k: &Kernels) {
    fn tree(lanes: &[f32]) -> f32 {
        match lanes {
            [one] => *one,
            _ => {
                let (low, high) = lanes.split_at(lanes.len() / 2);
                tree(&low.iter().zip(high).map(|(a, b)| a + b).collect::<Vec<f32>>())
            }
        }
    }
    let team = Team::new(1);
    let mut source = Source(8);
    for len in columns() {
        let (a, b) = (source.floats(len), source.floats(len));
        let mut lanes = [0.0f32; 32];
        for i in 0..len {
            lanes[i % 32] = a[i].mul_add(b[i], lanes[i % 32]);
        }
        let want = tree(&lanes);
        assert_same(&[k.dot(&a, &b)], &[want], || format!("{k:?} length {len}"));
        let bytes: Vec<u8> = a.iter().flat_map(|v| v.to_le_bytes()).collect();
        let w = WeightRef::new(MatrixSpec { format: Format::F32, rows: 1, cols: len }, &bytes, &[]);
        assert_same(&multiply(k, &team, &w, &b, 1, false), &[want], || format!("{k:?} 1 x {len}"));
    }
}

/// Whatever walks together, each product and each sum has the bits it has alone.
fn rows_of_a_table_equal_one_by_one(k: &Kernels) {
    let mut source = Source(9);
    for width in [1, 5, 31, 32, 33, 64, 96, 100, 128, 160, 576] {
        for len in [0, 1, 2, 3, 4, 5, 8, 13] {
            let (stride, first) = (width + 7, 3);
            let table = source.floats(20 * stride);
            let halves: Vec<u16> = table.iter().map(|v| bf16_of(*v)).collect();
            // What the halves are the halves of.
            let whole: Vec<f32> = halves.iter().map(|half| f32::from_bits(u32::from(*half) << 16)).collect();
            // In no order, some more than once.
            let at: Vec<u32> = (0..len).map(|_| (source.next() % 20) as u32).collect();
            for (n, (held, floats)) in
                (0..=9).flat_map(|n| [(n, (Table::F32(&table), &table)), (n, (Table::Bf16(&halves), &whole))])
            {
                let rows = RowsAt::new(held, stride, first..first + width, &at);
                let row = |r: usize| &floats[at[r] as usize * stride + first..][..width];
                let what = || format!("{k:?} {n} vectors, {len} rows of {width}");
                let (vectors, weights) = (source.floats(n * width), source.floats(n * len));
                let mut got = vec![f32::NAN; n * len];
                k.dots(&vectors, &rows, &mut got);
                let want: Vec<f32> = vectors
                    .chunks_exact(width)
                    .flat_map(|vector| (0..len).map(move |r| scalar::TABLE.dot(vector, row(r))))
                    .collect();
                assert_same(&got, &want, what);
                let mut got = vectors.clone();
                k.add_weighted(&weights, &rows, &mut got);
                let mut want = vectors;
                for (v, out) in want.chunks_exact_mut(width).enumerate() {
                    (0..len).for_each(|r| scalar::TABLE.axpy(weights[v * len + r], row(r), out));
                }
                assert_same(&got, &want, what);
            }
        }
    }
}

fn quantizer_equals_scalar(k: &Kernels) {
    let mut source = Source(5);
    for cols in columns() {
        let mut x = source.floats(2 * cols);
        x[source.next() as usize % cols] = [1.0, f32::NAN, f32::NEG_INFINITY, 1e-30, 3.0e38][cols % 5];
        let (mut got, mut want) = (Quantized::with_capacity(2, cols), Quantized::with_capacity(2, cols));
        got.quantize(k, &x, 2, cols);
        want.quantize(&scalar::TABLE, &x, 2, cols);
        for i in 0..2 {
            let (got, want) = (got.row(i), want.row(i));
            assert_same(&[got.scale], &[want.scale], || format!("{k:?} scale, {cols} columns"));
            assert_eq!(got.natural, want.natural, "{k:?} {cols}");
            assert_eq!(got.halves, want.halves, "{k:?} {cols}");
            assert_eq!(got.quarters, want.quarters, "{k:?} {cols}");
            assert_eq!((got.sum, got.sums8, got.sums64), (want.sum, want.sums8, want.sums64), "{k:?} {cols}");
        }
    }
}

/// The exact path within `2 n eps sum |a b|` of f64; eps is half the distance from 1 to the next f32.
fn exact_products_are_near_f64(k: &Kernels) {
    let team = Team::new(1);
    for_every_matrix(|matrix, x, kind| {
        let w = matrix.weights();
        let cols = w.cols();
        if kind != Kind::Ordinary {
            return;
        }
        let got = multiply(k, &team, &w, &x[..2 * cols], 2, false);
        for i in 0..2 {
            for row in 0..w.rows() {
                let terms: Vec<f64> = (0..cols).map(|c| matrix.value(row, c) * f64::from(x[i * cols + c])).collect();
                let bound = cols as f64 * f64::from(f32::EPSILON) * terms.iter().map(|t| t.abs()).sum::<f64>();
                let (got, want) = (f64::from(got[i * w.rows() + row]), terms.iter().sum::<f64>());
                let tiny = cols as f64 * f64::from(f32::from_bits(1));
                assert!((got - want).abs() <= bound + tiny, "{k:?} {:?}: {got:e}, f64 says {want:e}", w.spec());
            }
        }
    });
}

/// The integer path: exact sums, then one rounding per conversion, multiplication and addition.
fn integer_products_are_near_f64(k: &Kernels) {
    let team = Team::new(1);
    for_every_matrix(|matrix, x, kind| {
        let w = matrix.weights();
        let cols = w.cols();
        if kind != Kind::Ordinary || !w.format().is_integer() {
            return;
        }
        let got = multiply(k, &team, &w, &x[..cols], 1, true);
        let step = (x[..cols].iter().fold(0.0f32, |max, v| max.max(v.abs())) / 127.0).max(1e-12);
        let levels: Vec<f64> = x[..cols].iter().map(|v| f64::from((v / step).round_ties_even())).collect();
        let run = match w.format() {
            Format::Int4Group { group } => usize::from(group),
            Format::Int3Group => 64,
            _ => cols,
        };
        for row in 0..w.rows() {
            let sums = (0..cols.div_ceil(run)).map(|g| {
                let cols = g * run..cols.min((g + 1) * run);
                cols.map(|c| matrix.value(row, c) * levels[c]).sum::<f64>() * f64::from(step)
            });
            let sums: Vec<f64> = sums.collect();
            let magnitude: f64 = sums.iter().map(|s| s.abs()).sum();
            let bound = (sums.len() + 3) as f64 * f64::from(f32::EPSILON) * magnitude;
            let (got, want) = (f64::from(got[row]), sums.iter().sum::<f64>());
            assert!((got - want).abs() <= bound, "{k:?} {:?}: {got:e}, f64 says {want:e}", w.spec());
        }
    });
}

/// The largest sums there are: every product at its extreme, and as many columns as are allowed.
fn no_integer_sum_overflows(k: &Kernels) {
    let team = Team::new(1);
    let cols = crate::limits::MAX_COLUMNS;
    let x = vec![1.0; cols];
    for (format, byte, level) in [
        (Format::Int8Row, 0x80, -128.0),
        (Format::Int8Row, 0x7f, 127.0),
        (Format::Int4Row, 0x00, -8.0),
        (Format::Int4Row, 0xff, 7.0),
        (Format::Int3Group, 0x00, -4.0),
        (Format::Int3Group, 0xff, 3.0),
        (Format::Int2Row, 0x00, -2.0),
        (Format::Int2Row, 0xff, 1.0),
        (Format::Int4Group { group: 64 }, 0x00, -8.0),
        (Format::Int4Group { group: 32768 }, 0xff, 7.0),
    ] {
        let spec = MatrixSpec { format, rows: 1, cols };
        let data = vec![byte; spec.data_bytes()];
        let scales = 1f32.to_le_bytes().repeat(format.scale_count(1, cols));
        let got = multiply(k, &team, &WeightRef::new(spec, &data, &scales), &x, 1, true)[0];
        let want = level * cols as f32;
        assert!((got / want - 1.0).abs() < 1e-6, "{k:?} {format}: {got} instead of {want}");
    }
}

fn weights_may_lie_at_any_address(k: &Kernels) {
    let team = Team::new(1);
    let mut source = Source(6);
    for format in formats() {
        let matrix = Matrix::new(format, 5, 1100, Kind::Ordinary, &mut source);
        let x = source.floats(1100);
        for integer in [false, true] {
            let want = multiply(k, &team, &matrix.weights(), &x, 1, integer);
            let data = [&[0; 3], &matrix.data[..]].concat();
            let scales = [&[0; 1], &matrix.scales[..]].concat();
            let moved = WeightRef::new(matrix.spec, &data[3..], &scales[1..]);
            let moved = if format == Format::Nvfp4 { moved.with_factor(NVFP4_FACTOR) } else { moved };
            assert_same(&multiply(k, &team, &moved, &x, 1, integer), &want, || format!("{k:?} {format} moved"));
        }
    }
}

fn batch_and_team_do_not_change_bits(k: &Kernels) {
    let teams = [1, 2, 3].map(Team::new);
    let mut source = Source(7);
    for format in formats() {
        let cols = 1500;
        let matrix = Matrix::new(format, 203, cols, Kind::Ordinary, &mut source);
        let w = matrix.weights();
        let x = source.floats(19 * cols);
        for integer in [false, true] {
            let alone: Vec<Vec<f32>> = x.chunks(cols).map(|x| multiply(k, &teams[0], &w, x, 1, integer)).collect();
            for team in &teams {
                let got = multiply(k, team, &w, &x, 19, integer);
                assert_same(&got, &alone.concat(), || format!("{k:?} {format} {team:?}"));
            }
        }
    }
}

/// More rows than any kernel takes at once, runs of rows that are packed and not full, and rows behind them that are few.
fn rows_of_a_long_batch_equal_scalar(k: &Kernels) {
    let team = Team::new(2);
    let mut source = Source(10);
    for format in formats() {
        for (batch, cols) in [(13, 1100), (16, 64), (20, 321), (30, 513), (139, 1100), (145, 97)] {
            let matrix = Matrix::new(format, 37, cols, Kind::Ordinary, &mut source);
            let x = source.floats(batch * cols);
            for integer in [false, true] {
                let got = multiply(k, &team, &matrix.weights(), &x, batch, integer);
                let want = multiply(&scalar::TABLE, &team, &matrix.weights(), &x, batch, integer);
                assert_same(&got, &want, || format!("{k:?} {format} {batch} {cols} {integer}"));
            }
        }
    }
}

/// Every number of packed rows around whole runs, and of weight rows around a block; the largest values there are.
fn packed_rows_equal_scalar(k: &Kernels) {
    let team = Team::new(2);
    let mut source = Source(11);
    for format in formats().into_iter().filter(|format| format.is_integer()) {
        for (turn, batch) in (11..=34).chain([47, 48, 52, 60, 64, 129]).enumerate() {
            let (rows, cols) =
                ([1, 7, 8, 9, 15, 16, 17, 31, 33, 300][turn % 10], [31, 64, 100, 512, 700, 1025][turn % 6]);
            for kind in [Kind::Ordinary, Kind::Extreme] {
                let matrix = Matrix::new(format, rows, cols, kind, &mut source);
                let x = source.floats(batch * cols);
                let got = multiply(k, &team, &matrix.weights(), &x, batch, true);
                let want = multiply(&scalar::TABLE, &team, &matrix.weights(), &x, batch, true);
                assert_same(&got, &want, || format!("{k:?} {:?} {kind:?} batch {batch}", matrix.spec));
            }
        }
    }
}

/// The AVX-512 table of CPUs that have no more than it asks for.
fn without_vbmi() -> Option<&'static Kernels> {
    #[cfg(target_arch = "x86_64")]
    return Kernels::for_isa(Isa::Avx512).map(|_| &avx512::TABLE);
    #[cfg(not(target_arch = "x86_64"))]
    None
}

/// Every check, once for each table. A CPU that lacks one says so and skips.
macro_rules! stamp {
    ($($name:ident: $table:expr => [$($check:ident),* $(,)?];)*) => {$(
        mod $name {
            use super::*;
            $(
                #[test]
                fn $check() {
                    match $table {
                        Some(k) => super::$check(k),
                        None => eprintln!("skipped: this CPU cannot run it"),
                    }
                }
            )*
        }
    )*};
}

macro_rules! stamp_all {
    ($($name:ident: $table:expr;)*) => {
        stamp! {$(
            $name: $table => [
                products_equal_scalar,
                every_batch_equals_scalar,
                partial_fp8_blocks_equal_scalar,
                row_kernels_equal_scalar,
                vectors_equal_scalar,
                dots_add_in_the_documented_order,
                rows_of_a_table_equal_one_by_one,
                quantizer_equals_scalar,
                exact_products_are_near_f64,
                integer_products_are_near_f64,
                no_integer_sum_overflows,
                weights_may_lie_at_any_address,
                batch_and_team_do_not_change_bits,
                rows_of_a_long_batch_equal_scalar,
                packed_rows_equal_scalar,
            ];
        )*}
    };
}

stamp_all! {
    on_scalar: Kernels::for_isa(Isa::Scalar);
    on_avx2: Kernels::for_isa(Isa::Avx2);
    on_avx512: Kernels::for_isa(Isa::Avx512);
    on_avx512_without_vbmi: without_vbmi();
    on_amx: Kernels::for_isa(Isa::Amx);
}

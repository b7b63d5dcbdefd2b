//! The definition of every kernel, in portable Rust. Slow is fine; clear and exact is the point.

use std::ops::Range;

use super::format::{FP8_BLOCK, Format, INT3_GROUP, INT3_GROUP_BYTES, NVFP4_GROUP, WeightRef, e4m3};
use super::lanes::{self, LANES};
use super::quantized::{QuantRow, QuantRowMut};
use super::{EncodeError, Isa, Kernels, MAX_BATCH, RowsAt, encode};

pub(super) static TABLE: Kernels = DEFINITION;

pub(super) const DEFINITION: Kernels = Kernels {
    isa: Isa::Scalar,
    dot,
    axpy,
    dots,
    add_weighted,
    decode_row,
    add_scaled_rows,
    silu_mul,
    exp_shifted,
    quantize_row,
    encode_row,
    exact,
    integer_batch: MAX_BATCH,
    integer,
    tiles: None,
};

fn dot(a: &[f32], b: &[f32]) -> f32 {
    lanes::dot(a, b)
}

fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    lanes::axpy(a, x, y);
}

fn dots(vectors: &[f32], rows: &RowsAt, out: &mut [f32]) {
    lanes::dots(vectors, rows, out);
}

fn add_weighted(weights: &[f32], rows: &RowsAt, out: &mut [f32]) {
    lanes::add_weighted(weights, rows, out);
}

fn silu_mul(gate: &[f32], up: &mut [f32]) {
    lanes::silu_mul(gate, up);
}

fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    lanes::exp_shifted(x, shift)
}

fn quantize_row(x: &[f32], row: QuantRowMut) {
    lanes::quantize_row(x, row);
}

fn encode_row(format: Format, row: &[f32], data: &mut [u8], scales: &mut [f32]) -> Result<(), EncodeError> {
    encode::quantized(format, row, data, scales)
}

fn decode_row(w: &WeightRef, row: usize, out: &mut [f32]) {
    decode_cols(w, row, 0, out);
}

pub(super) fn add_scaled_rows(w: &WeightRef, rows: Range<usize>, coef: &[f32], out: &mut [f32]) {
    let mut values = [0.0f32; LANES];
    for (chunk, out) in out.chunks_mut(LANES).enumerate() {
        let values = &mut values[..out.len()];
        for (row, coef) in rows.clone().zip(coef) {
            decode_cols(w, row, chunk * LANES, values);
            lanes::axpy(*coef, values, out);
        }
    }
}

/// `tile[i][r] = W[rows.start + r] . x[i]`.
pub(super) fn exact(w: &WeightRef, rows: Range<usize>, x: &[f32], tile: &mut [f32]) {
    let cols = w.cols();
    let count = rows.len();
    if cols == 0 {
        tile.fill(0.0);
        return;
    }
    let mut values = [0.0f32; LANES];
    for (r, row) in rows.enumerate() {
        let mut sums = [[0.0f32; LANES]; MAX_BATCH];
        for start in (0..cols).step_by(LANES) {
            let len = LANES.min(cols - start);
            decode_cols(w, row, start, &mut values[..len]);
            for (sums, x) in sums.iter_mut().zip(x.chunks(cols)) {
                lanes::add_tail(sums, &values[..len], &x[start..start + len]);
            }
        }
        for (tile, sums) in tile.chunks_mut(count).zip(sums) {
            tile[r] = lanes::reduce(sums);
        }
    }
}

/// As [`exact`], from integers.
pub(super) fn integer(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    let count = rows.len();
    for (r, row) in rows.enumerate() {
        for (i, x) in x.iter().enumerate() {
            tile[i * count + r] = integer_dot(w, row, x);
        }
    }
}

fn integer_dot(w: &WeightRef, row: usize, x: &QuantRow) -> f32 {
    let cols = w.cols();
    if !w.format().is_grouped() {
        return integer_sum(w, row, x, 0..cols) as f32 * w.scale(row) * x.scale;
    }
    let group = w.format().group(cols);
    let groups = cols.div_ceil(group);
    let mut acc = 0.0f32;
    for g in 0..groups {
        let sum = integer_sum(w, row, x, g * group..cols.min((g + 1) * group));
        acc += sum as f32 * w.scale(row * groups + g);
    }
    acc * x.scale
}

fn integer_sum(w: &WeightRef, row: usize, x: &QuantRow, cols: Range<usize>) -> i32 {
    let bytes = w.row(row);
    cols.map(|c| level(w.format(), bytes, c) * i32::from(x.natural[c])).sum()
}

/// The stored integer of column `c`.
#[inline(always)]
fn level(format: Format, bytes: &[u8], c: usize) -> i32 {
    match format {
        Format::Int8Row => i32::from(bytes[c] as i8),
        Format::Int4Row | Format::Int4Group { .. } => i32::from(bytes[c / 2] >> (4 * (c % 2)) & 15) - 8,
        Format::Int3Group => {
            let (bytes, c) = (&bytes[c / INT3_GROUP * INT3_GROUP_BYTES..], c % INT3_GROUP);
            let (low, high) = bytes.split_at(INT3_GROUP / 4);
            i32::from(low[c / 4] >> (2 * (c % 4)) & 3 | (high[c / 8] >> (c % 8) & 1) << 2) - 4
        }
        Format::Int2Row => i32::from(bytes[c / 4] >> (2 * (c % 4)) & 3) - 2,
        Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block | Format::Nvfp4 => {
            unreachable!("{format} holds no integers")
        }
    }
}

/// Columns `start..start + out.len()` of a row as f32. Other tables use it for what is left after whole chunks.
pub(super) fn decode_cols(w: &WeightRef, row: usize, start: usize, out: &mut [f32]) {
    let bytes = w.row(row);
    match w.format() {
        Format::F32 => {
            for (out, b) in out.iter_mut().zip(bytes[4 * start..].as_chunks::<4>().0) {
                *out = f32::from_le_bytes(*b);
            }
        }
        Format::Bf16 => {
            for (out, b) in out.iter_mut().zip(bytes[2 * start..].as_chunks::<2>().0) {
                *out = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        Format::F16 => {
            for (out, b) in out.iter_mut().zip(bytes[2 * start..].as_chunks::<2>().0) {
                *out = half::f16::from_le_bytes(*b).to_f32();
            }
        }
        Format::Fp8Block => {
            let first = row / FP8_BLOCK * w.cols().div_ceil(FP8_BLOCK);
            for (c, out) in (start..).zip(out) {
                *out = e4m3(bytes[c]) * w.scale(first + c / FP8_BLOCK);
            }
        }
        Format::Nvfp4 => {
            let first = row * w.cols().div_ceil(NVFP4_GROUP);
            for (c, out) in (start..).zip(out) {
                *out = E2M1[usize::from(bytes[c / 2] >> (4 * (c % 2)) & 15)] * w.scale(first + c / NVFP4_GROUP);
            }
        }
        Format::Int8Row | Format::Int4Row | Format::Int2Row => {
            let scale = w.scale(row);
            for (c, out) in (start..).zip(out) {
                *out = level(w.format(), bytes, c) as f32 * scale;
            }
        }
        Format::Int4Group { .. } | Format::Int3Group => {
            let group = w.format().group(w.cols());
            let first = row * w.cols().div_ceil(group);
            for (c, out) in (start..).zip(out) {
                *out = level(w.format(), bytes, c) as f32 * w.scale(first + c / group);
            }
        }
    }
}

/// What the four bits of an E2M1 float mean: two of exponent with bias 1, one of mantissa.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

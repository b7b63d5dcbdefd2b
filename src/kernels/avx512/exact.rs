//! Weights to f32, 32 columns at a time, and what is computed from them.

use std::arch::x86_64::*;
use std::ops::Range;

use super::ahead::Ahead;
use super::dots::{BLOCK_UNITS, Packed, UNIT, WIDE, stamp_dots};
use super::{int3, load_bytes, load_floats, load_half, load_lanes, load_quarter, store_floats, store_lanes};
use crate::kernels::format::{FP8_BLOCK, Format, INT3_GROUP, INT3_GROUP_BYTES, WeightRef};
use crate::kernels::groups::row_scales;
use crate::kernels::lanes::{self, LANES};
use crate::kernels::scalar;

/// Evaluates `$body` with `$rows` bound to a function `row -> (unit -> 64 decoded columns)` for the format of `$w`.
macro_rules! with_rows {
    ($w:expr, $rows:ident => $body:expr) => {{
        let w: &WeightRef = $w;
        match w.format() {
            Format::F32 => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<256>().0;
                    move |u: usize| decode_f32(&units[u])
                };
                $body
            }
            Format::Bf16 => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<128>().0;
                    move |u: usize| decode_bf16(&units[u])
                };
                $body
            }
            Format::F16 => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<128>().0;
                    move |u: usize| decode_f16(&units[u])
                };
                $body
            }
            Format::Fp8Block => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<UNIT>().0;
                    let blocks = w.cols().div_ceil(FP8_BLOCK);
                    let scales = &w.scales().as_chunks::<4>().0[row / FP8_BLOCK * blocks..][..blocks];
                    move |u: usize| decode_fp8(&units[u], f32::from_le_bytes(scales[u * UNIT / FP8_BLOCK]))
                };
                $body
            }
            Format::Int8Row => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<UNIT>().0;
                    let scale = _mm512_set1_ps(w.scale(row));
                    move |u: usize| decode_int8(&units[u]).map(|v| _mm512_mul_ps(v, scale))
                };
                $body
            }
            Format::Int4Row => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<{ UNIT / 2 }>().0;
                    let scale = _mm512_set1_ps(w.scale(row));
                    move |u: usize| decode_int4(&units[u]).map(|v| _mm512_mul_ps(v, scale))
                };
                $body
            }
            Format::Int4Group { group } => {
                let $rows = |row: usize| {
                    let group = u32::from(group);
                    let units = w.row(row).as_chunks::<{ UNIT / 2 }>().0;
                    let scales = row_scales(w, row, group as usize);
                    move |u: usize| {
                        let levels = decode_int4(&units[u]);
                        let scale = unit_scales(scales, group, u as u32 * UNIT as u32);
                        std::array::from_fn(|q| _mm512_mul_ps(levels[q], scale[q]))
                    }
                };
                $body
            }
            Format::Int3Group => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<INT3_GROUP_BYTES>().0;
                    let scales = row_scales(w, row, INT3_GROUP);
                    move |u: usize| {
                        let scale = _mm512_set1_ps(f32::from_le_bytes(scales[u]));
                        int3::decode(&units[u]).map(|v| _mm512_mul_ps(v, scale))
                    }
                };
                $body
            }
            // Decoded for a conversion only, which has more to do than this.
            Format::Nvfp4 => {
                let $rows = |row: usize| {
                    move |u: usize| {
                        let mut values = [0.0; UNIT];
                        scalar::decode_cols(w, row, u * UNIT, &mut values);
                        load_unit(&values)
                    }
                };
                $body
            }
            Format::Int2Row => {
                let $rows = |row: usize| {
                    let units = w.row(row).as_chunks::<{ UNIT / 4 }>().0;
                    let scale = _mm512_set1_ps(w.scale(row));
                    move |u: usize| decode_int2(&units[u]).map(|v| _mm512_mul_ps(v, scale))
                };
                $body
            }
        }
    }};
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn decode_row(w: &WeightRef, row: usize, out: &mut [f32]) {
    let (units, tail) = out.as_chunks_mut::<UNIT>();
    let start = units.len() * UNIT;
    with_rows!(w, rows => {
        let decode = rows(row);
        for (u, out) in units.iter_mut().enumerate() {
            store_unit(out, decode(u));
        }
    });
    scalar::decode_cols(w, row, start, tail);
}

/// `tile[i][r] = W[rows.start + r] . x[i]`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[f32], tile: &mut [f32]) {
    if rows.is_empty() || w.cols() == 0 {
        return tile.fill(0.0);
    }
    with_rows!(w, decode => dots(w, rows, x, tile, decode));
}

stamp_dots!("avx512f,avx512bw,avx512vl,avx512vnni");

/// Adds the products of a unit to its lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn add_unit(lanes: &mut [__m512; 2], weights: [__m512; 4], x: &[f32; UNIT]) {
    let x = load_unit(x);
    for q in 0..4 {
        lanes[q % 2] = _mm512_fmadd_ps(weights[q], x[q], lanes[q % 2]);
    }
}

/// Adds the columns behind the last whole unit of a row to its lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn add_tail<const N: usize>(w: &WeightRef, row: usize, x: &[&[f32]; N], sums: &mut [[__m512; 2]; N]) {
    let start = w.cols() / UNIT * UNIT;
    let mut weights = [0.0f32; UNIT];
    let weights = &mut weights[..w.cols() - start];
    if weights.is_empty() {
        return;
    }
    scalar::decode_cols(w, row, start, weights);
    for (sums, x) in sums.iter_mut().zip(x) {
        let mut lanes = [0.0; LANES];
        store_lanes(&mut lanes, *sums);
        for (weights, x) in weights.chunks(LANES).zip(x[start..].chunks(LANES)) {
            lanes::add_tail(&mut lanes, weights, x);
        }
        *sums = load_lanes(&lanes);
    }
}

/// As [`lanes::reduce`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn reduce(lanes: [__m512; 2]) -> f32 {
    let sums = _mm512_castps_pd(_mm512_add_ps(lanes[0], lanes[1]));
    let halves = [_mm512_castpd512_pd256(sums), _mm512_extractf64x4_pd::<1>(sums)].map(|v| _mm256_castpd_ps(v));
    let sums = _mm256_add_ps(halves[0], halves[1]);
    let sums = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
    let sums = _mm_add_ps(sums, _mm_movehl_ps(sums, sums));
    _mm_cvtss_f32(_mm_add_ss(sums, _mm_shuffle_ps::<1>(sums, sums)))
}

/// The same of four rows at once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn reduce_four(rows: [[__m512; 2]; 4]) -> [f32; 4] {
    let mut sums = [_mm512_setzero_ps(); 4];
    for r in 0..4 {
        sums[r] = _mm512_add_ps(rows[r][0], rows[r][1]);
    }
    // Each step brings the upper halves of the lanes of two registers beside the lower ones and adds them.
    let eight = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    let [a, b] = [eight(sums[0], sums[1]), eight(sums[2], sums[3])];
    let four = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    let two = _mm512_add_ps(four, _mm512_shuffle_ps::<0xee>(four, four));
    let mut one = [0.0; 16];
    store_floats(&mut one, _mm512_add_ps(two, _mm512_movehdup_ps(two)));
    [one[0], one[4], one[8], one[12]]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn add_scaled_rows(w: &WeightRef, rows: Range<usize>, coef: &[f32], out: &mut [f32]) {
    let (units, tail) = out.as_chunks_mut::<UNIT>();
    let start = units.len() * UNIT;
    with_rows!(w, decode => {
        let (wide, narrow) = units.as_chunks_mut::<2>();
        let first = wide.len() * 2;
        for (u, out) in wide.iter_mut().enumerate() {
            add_scaled(2 * u, out, rows.clone(), coef, &decode);
        }
        for (u, out) in narrow.as_chunks_mut::<1>().0.iter_mut().enumerate() {
            add_scaled(first + u, out, rows.clone(), coef, &decode);
        }
    });
    let mut values = [0.0f32; UNIT];
    let values = &mut values[..tail.len()];
    if !values.is_empty() {
        for (row, coef) in rows.zip(coef) {
            scalar::decode_cols(w, row, start, values);
            lanes::axpy(*coef, values, tail);
        }
    }
}

/// Units `first..first + C` of the sum, kept in registers while the rows pass.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_scaled<const C: usize, R, D>(
    first: usize,
    out: &mut [[f32; UNIT]; C],
    rows: Range<usize>,
    coef: &[f32],
    decode: &R,
) where
    R: Fn(usize) -> D,
    D: Fn(usize) -> [__m512; 4],
{
    let mut sums: [[__m512; 4]; C] = std::array::from_fn(|u| load_unit(&out[u]));
    for (row, coef) in rows.zip(coef) {
        let decode = decode(row);
        let coef = _mm512_set1_ps(*coef);
        for u in 0..C {
            let weights = decode(first + u);
            for q in 0..4 {
                sums[u][q] = _mm512_fmadd_ps(coef, weights[q], sums[u][q]);
            }
        }
    }
    for u in 0..C {
        store_unit(&mut out[u], sums[u]);
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_f32(from: &[u8; 256]) -> [__m512; 4] {
    let (quarters, _) = from.as_chunks::<64>();
    std::array::from_fn(|q| _mm512_castsi512_ps(load_bytes(&quarters[q])))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_bf16(from: &[u8; 128]) -> [__m512; 4] {
    let (quarters, _) = from.as_chunks::<32>();
    std::array::from_fn(|q| {
        let wide = _mm512_cvtepu16_epi32(load_half(&quarters[q]));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    })
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_f16(from: &[u8; 128]) -> [__m512; 4] {
    let (quarters, _) = from.as_chunks::<32>();
    std::array::from_fn(|q| _mm512_cvtph_ps(load_half(&quarters[q])))
}

/// E4M3 by way of f16: the same bits moved one place make a half of 2^-8 times the value, subnormals included, and the
/// missing 2^8 goes into the scale, which leaves one rounding. NaN is the one code that needs help.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_fp8(from: &[u8; UNIT], scale: f32) -> [__m512; 4] {
    let (halves, _) = from.as_chunks::<32>();
    let [a, b] = e4m3_halves(load_half(&halves[0]));
    let [c, d] = e4m3_halves(load_half(&halves[1]));
    // A scale this large (or NaN) would overflow when multiplied by 256: the power of two goes to the value instead.
    if scale.abs() < f32::MAX / 256.0 {
        let scale = _mm512_set1_ps(scale * 256.0);
        [a, b, c, d].map(|v| _mm512_mul_ps(v, scale))
    } else {
        let (power, scale) = (_mm512_set1_ps(256.0), _mm512_set1_ps(scale));
        [a, b, c, d].map(|v| _mm512_mul_ps(_mm512_mul_ps(v, power), scale))
    }
}

/// 32 E4M3 bytes as floats, each 2^-8 times its value.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn e4m3_halves(bytes: __m256i) -> [__m512; 2] {
    let magnitude = _mm256_and_si256(bytes, _mm256_set1_epi8(0x7f));
    let nan = _mm256_cmpeq_epi8_mask(magnitude, _mm256_set1_epi8(0x7f));
    let high = _mm512_slli_epi16::<8>(_mm512_cvtepu8_epi16(bytes));
    // The arithmetic shift leaves a copy of the sign in bit 14, where the exponent's top bit must be 0.
    let halves = _mm512_and_si512(_mm512_srai_epi16::<1>(high), _mm512_set1_epi16(0xbfff_u16 as i16));
    let halves = _mm512_mask_mov_epi16(halves, nan, _mm512_set1_epi16(0x7e00));
    [_mm512_cvtph_ps(_mm512_castsi512_si256(halves)), _mm512_cvtph_ps(_mm512_extracti64x4_epi64::<1>(halves))]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_int8(from: &[u8; UNIT]) -> [__m512; 4] {
    let (quarters, _) = from.as_chunks::<16>();
    std::array::from_fn(|q| levels(load_quarter(&quarters[q])))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_int4(from: &[u8; UNIT / 2]) -> [__m512; 4] {
    let (halves, _) = from.as_chunks::<16>();
    let (mask, offset) = (_mm_set1_epi8(15), _mm_set1_epi8(8));
    let unpack = |bytes| {
        let even = _mm_and_si128(bytes, mask);
        let odd = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
        let low = _mm_sub_epi8(_mm_unpacklo_epi8(even, odd), offset);
        let high = _mm_sub_epi8(_mm_unpackhi_epi8(even, odd), offset);
        [levels(low), levels(high)]
    };
    let [a, b] = unpack(load_quarter(&halves[0]));
    let [c, d] = unpack(load_quarter(&halves[1]));
    [a, b, c, d]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn decode_int2(from: &[u8; UNIT / 4]) -> [__m512; 4] {
    let (quarters, _) = from.as_chunks::<4>();
    let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    std::array::from_fn(|q| {
        let fields = _mm512_srlv_epi32(_mm512_set1_epi32(i32::from_le_bytes(quarters[q])), shifts);
        let fields = _mm512_and_si512(fields, _mm512_set1_epi32(3));
        _mm512_cvtepi32_ps(_mm512_sub_epi32(fields, _mm512_set1_epi32(2)))
    })
}

/// 16 signed bytes as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn levels(bytes: __m128i) -> __m512 {
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}

/// The scales of columns `start..start + 64`; groups may end among them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn unit_scales(scales: &[[u8; 4]], group: u32, start: u32) -> [__m512; 4] {
    if group.is_multiple_of(UNIT as u32) {
        [_mm512_set1_ps(f32::from_le_bytes(scales[(start / group) as usize])); 4]
    } else {
        load_unit(&std::array::from_fn(|j| f32::from_le_bytes(scales[((start + j as u32) / group) as usize])))
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn load_unit(from: &[f32; UNIT]) -> [__m512; 4] {
    let (quarters, _) = from.as_chunks::<16>();
    std::array::from_fn(|q| load_floats(&quarters[q]))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_unit(to: &mut [f32; UNIT], v: [__m512; 4]) {
    let (quarters, _) = to.as_chunks_mut::<16>();
    for q in 0..4 {
        store_floats(&mut quarters[q], v[q]);
    }
}

//! Weights to f32, 32 columns at a time, and what is computed from them.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{int3, load_bytes, load_half, load_lanes, store_lanes};
use crate::kernels::format::{FP8_BLOCK, Format, INT3_GROUP, INT3_GROUP_BYTES, WeightRef};
use crate::kernels::groups::row_scales;
use crate::kernels::lanes::{self, LANES};
use crate::kernels::scalar;

/// Evaluates `$body` with `$rows` bound to a function `row -> (chunk -> 32 decoded columns)` for the format of `$w`.
macro_rules! with_rows {
    ($w:expr, $rows:ident => $body:expr) => {{
        let w: &WeightRef = $w;
        match w.format() {
            Format::F32 => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<128>().0;
                    move |c: usize| decode_f32(&chunks[c])
                };
                $body
            }
            Format::Bf16 => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<64>().0;
                    move |c: usize| decode_bf16(&chunks[c])
                };
                $body
            }
            Format::F16 => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<64>().0;
                    move |c: usize| decode_f16(&chunks[c])
                };
                $body
            }
            Format::Fp8Block => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<32>().0;
                    let blocks = w.cols().div_ceil(FP8_BLOCK);
                    let scales = &w.scales().as_chunks::<4>().0[row / FP8_BLOCK * blocks..][..blocks];
                    move |c: usize| decode_fp8(&chunks[c], f32::from_le_bytes(scales[c * LANES / FP8_BLOCK]))
                };
                $body
            }
            Format::Int8Row => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<32>().0;
                    let scale = _mm256_set1_ps(w.scale(row));
                    move |c: usize| decode_int8(&chunks[c]).map(|v| _mm256_mul_ps(v, scale))
                };
                $body
            }
            Format::Int4Row => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<16>().0;
                    let scale = _mm256_set1_ps(w.scale(row));
                    move |c: usize| decode_int4(&chunks[c]).map(|v| _mm256_mul_ps(v, scale))
                };
                $body
            }
            Format::Int4Group { group } => {
                let $rows = |row: usize| {
                    let group = u32::from(group);
                    let chunks = w.row(row).as_chunks::<16>().0;
                    let scales = row_scales(w, row, group as usize);
                    move |c: usize| {
                        let levels = decode_int4(&chunks[c]);
                        let scale = chunk_scales(scales, group, c as u32 * LANES as u32);
                        std::array::from_fn(|q| _mm256_mul_ps(levels[q], scale[q]))
                    }
                };
                $body
            }
            Format::Int3Group => {
                let $rows = |row: usize| {
                    let groups = w.row(row).as_chunks::<INT3_GROUP_BYTES>().0;
                    let scales = row_scales(w, row, INT3_GROUP);
                    move |c: usize| {
                        let (group, half) = (&groups[c * LANES / INT3_GROUP], c % (INT3_GROUP / LANES));
                        let (low, high) = group.split_at(INT3_GROUP / 4);
                        let levels = int3::decode(&low.as_chunks().0[half], &high.as_chunks().0[half]);
                        let scale = _mm256_set1_ps(f32::from_le_bytes(scales[c * LANES / INT3_GROUP]));
                        levels.map(|v| _mm256_mul_ps(v, scale))
                    }
                };
                $body
            }
            // Decoded for a conversion only, which has more to do than this.
            Format::Nvfp4 => {
                let $rows = |row: usize| {
                    move |c: usize| {
                        let mut values = [0.0; LANES];
                        scalar::decode_cols(w, row, c * LANES, &mut values);
                        load_lanes(&values)
                    }
                };
                $body
            }
            Format::Int2Row => {
                let $rows = |row: usize| {
                    let chunks = w.row(row).as_chunks::<8>().0;
                    let scale = _mm256_set1_ps(w.scale(row));
                    move |c: usize| decode_int2(&chunks[c]).map(|v| _mm256_mul_ps(v, scale))
                };
                $body
            }
        }
    }};
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_row(w: &WeightRef, row: usize, out: &mut [f32]) {
    let (chunks, tail) = out.as_chunks_mut::<LANES>();
    let start = chunks.len() * LANES;
    with_rows!(w, rows => {
        let decode = rows(row);
        for (c, out) in chunks.iter_mut().enumerate() {
            store_lanes(out, decode(c));
        }
    });
    scalar::decode_cols(w, row, start, tail);
}

/// `tile[i][r] = W[rows.start + r] . x[i]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[f32], tile: &mut [f32]) {
    if rows.is_empty() || w.cols() == 0 {
        return tile.fill(0.0);
    }
    with_rows!(w, decode => match tile.len() / rows.len() {
        1 => dots::<1, _, _>(w, rows, x, tile, decode),
        2 => dots::<2, _, _>(w, rows, x, tile, decode),
        3 | 4 => dots::<4, _, _>(w, rows, x, tile, decode),
        _ => dots::<8, _, _>(w, rows, x, tile, decode),
    });
}

/// `N` is at least the number of activation rows; those it exceeds repeat the last one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dots<const N: usize, R, D>(w: &WeightRef, rows: Range<usize>, x: &[f32], tile: &mut [f32], decode: R)
where
    R: Fn(usize) -> D,
    D: Fn(usize) -> [__m256; 4],
{
    let cols = w.cols();
    let count = rows.len();
    let batch = tile.len() / count;
    let x: [&[f32]; N] = std::array::from_fn(|i| &x[i.min(batch - 1) * cols..][..cols]);
    let chunks = cols / LANES;
    let x_chunks = x.map(|x| &x.as_chunks::<LANES>().0[..chunks]);
    let x_tails = x.map(|x| x.as_chunks::<LANES>().1);
    for (r, row) in rows.enumerate() {
        let decode = decode(row);
        let mut sums = [[_mm256_setzero_ps(); 4]; N];
        for c in 0..chunks {
            let weights = decode(c);
            for i in 0..N {
                let x = load_lanes(&x_chunks[i][c]);
                for q in 0..4 {
                    sums[i][q] = _mm256_fmadd_ps(weights[q], x[q], sums[i][q]);
                }
            }
        }
        let mut weights = [0.0f32; LANES];
        let tail = &mut weights[..cols % LANES];
        if !tail.is_empty() {
            scalar::decode_cols(w, row, chunks * LANES, tail);
        }
        for i in 0..N {
            let mut lane = [0.0f32; LANES];
            store_lanes(&mut lane, sums[i]);
            lanes::add_tail(&mut lane, tail, x_tails[i]);
            if i < batch {
                tile[i * count + r] = lanes::reduce(lane);
            }
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn add_scaled_rows(w: &WeightRef, rows: Range<usize>, coef: &[f32], out: &mut [f32]) {
    let (chunks, tail) = out.as_chunks_mut::<LANES>();
    let start = chunks.len() * LANES;
    with_rows!(w, decode => {
        let (wide, narrow) = chunks.as_chunks_mut::<2>();
        let first = wide.len() * 2;
        for (c, out) in wide.iter_mut().enumerate() {
            add_scaled(2 * c, out, rows.clone(), coef, &decode);
        }
        for (c, out) in narrow.as_chunks_mut::<1>().0.iter_mut().enumerate() {
            add_scaled(first + c, out, rows.clone(), coef, &decode);
        }
    });
    let mut values = [0.0f32; LANES];
    let values = &mut values[..tail.len()];
    if !values.is_empty() {
        for (row, coef) in rows.zip(coef) {
            scalar::decode_cols(w, row, start, values);
            lanes::axpy(*coef, values, tail);
        }
    }
}

/// Chunks `first..first + C` of the sum, kept in registers while the rows pass.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_scaled<const C: usize, R, D>(
    first: usize,
    out: &mut [[f32; LANES]; C],
    rows: Range<usize>,
    coef: &[f32],
    decode: &R,
) where
    R: Fn(usize) -> D,
    D: Fn(usize) -> [__m256; 4],
{
    let mut sums: [[__m256; 4]; C] = std::array::from_fn(|c| load_lanes(&out[c]));
    for (row, coef) in rows.zip(coef) {
        let decode = decode(row);
        let coef = _mm256_set1_ps(*coef);
        for c in 0..C {
            let weights = decode(first + c);
            for q in 0..4 {
                sums[c][q] = _mm256_fmadd_ps(coef, weights[q], sums[c][q]);
            }
        }
    }
    for c in 0..C {
        store_lanes(&mut out[c], sums[c]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_f32(from: &[u8; 128]) -> [__m256; 4] {
    let (quarters, _) = from.as_chunks::<32>();
    std::array::from_fn(|q| _mm256_castsi256_ps(load_bytes(&quarters[q])))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_bf16(from: &[u8; 64]) -> [__m256; 4] {
    let (quarters, _) = from.as_chunks::<16>();
    std::array::from_fn(|q| {
        let wide = _mm256_cvtepu16_epi32(load_half(&quarters[q]));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    })
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_f16(from: &[u8; 64]) -> [__m256; 4] {
    let (quarters, _) = from.as_chunks::<16>();
    std::array::from_fn(|q| _mm256_cvtph_ps(load_half(&quarters[q])))
}

/// E4M3 by way of f16, as the AVX-512 kernel does it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_fp8(from: &[u8; 32], scale: f32) -> [__m256; 4] {
    let (halves, _) = from.as_chunks::<16>();
    let [a, b] = e4m3_halves(load_half(&halves[0]));
    let [c, d] = e4m3_halves(load_half(&halves[1]));
    // A scale this large (or NaN) would overflow when multiplied by 256: the power of two goes to the value instead.
    let fits = scale.abs() < f32::MAX / 256.0;
    let power = _mm256_set1_ps(if fits { 1.0 } else { 256.0 });
    let scale = _mm256_set1_ps(if fits { scale * 256.0 } else { scale });
    [a, b, c, d].map(|v| _mm256_mul_ps(_mm256_mul_ps(v, power), scale))
}

/// 16 E4M3 bytes as floats, each 2^-8 times its value.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn e4m3_halves(bytes: __m128i) -> [__m256; 2] {
    let high = _mm256_slli_epi16::<8>(_mm256_cvtepu8_epi16(bytes));
    // The arithmetic shift leaves a copy of the sign in bit 14, where the exponent's top bit must be 0.
    let halves = _mm256_and_si256(_mm256_srai_epi16::<1>(high), _mm256_set1_epi16(0xbfff_u16 as i16));
    // All seven low bits set means NaN: setting the exponent's top bit there makes it one.
    let code = _mm256_set1_epi16(0x3f80);
    let nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, code), code);
    let halves = _mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)));
    [_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_int8(from: &[u8; 32]) -> [__m256; 4] {
    let (halves, _) = from.as_chunks::<16>();
    let [a, b] = levels(load_half(&halves[0]));
    let [c, d] = levels(load_half(&halves[1]));
    [a, b, c, d]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_int4(from: &[u8; 16]) -> [__m256; 4] {
    let bytes = load_half(from);
    let mask = _mm_set1_epi8(15);
    let even = _mm_and_si128(bytes, mask);
    let odd = _mm_and_si128(_mm_srli_epi16::<4>(bytes), mask);
    let offset = _mm_set1_epi8(8);
    let [a, b] = levels(_mm_sub_epi8(_mm_unpacklo_epi8(even, odd), offset));
    let [c, d] = levels(_mm_sub_epi8(_mm_unpackhi_epi8(even, odd), offset));
    [a, b, c, d]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_int2(from: &[u8; 8]) -> [__m256; 4] {
    let (quarters, _) = from.as_chunks::<2>();
    let shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    std::array::from_fn(|q| {
        let fields = _mm256_srlv_epi32(_mm256_set1_epi32(u16::from_le_bytes(quarters[q]).into()), shifts);
        let fields = _mm256_and_si256(fields, _mm256_set1_epi32(3));
        _mm256_cvtepi32_ps(_mm256_sub_epi32(fields, _mm256_set1_epi32(2)))
    })
}

/// 16 signed bytes as floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn levels(bytes: __m128i) -> [__m256; 2] {
    let high = _mm_unpackhi_epi64(bytes, bytes);
    [bytes, high].map(|bytes| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)))
}

/// The scales of columns `start..start + 32`; a group may end among them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn chunk_scales(scales: &[[u8; 4]], group: u32, start: u32) -> [__m256; 4] {
    if group.is_multiple_of(LANES as u32) {
        [_mm256_set1_ps(f32::from_le_bytes(scales[(start / group) as usize])); 4]
    } else {
        load_lanes(&std::array::from_fn(|j| f32::from_le_bytes(scales[((start + j as u32) / group) as usize])))
    }
}

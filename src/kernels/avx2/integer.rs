//! Integer dot products: `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs into i16, which saturates, so
//! every format states why its sums fit; pairs of those then go into exact i32 sums.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_bytes, load_ints, load_signed, store_floats, store_ints};
use crate::kernels::format::{Format, WeightRef};
use crate::kernels::groups::{GroupSum, row_scales, zero_padded};
use crate::kernels::quantized::QuantRow;
use crate::kernels::scalar;

/// `tile[i][r] = W[rows.start + r] . x[i]` in integers.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    match w.format() {
        // The sign moves to the activation, which is at least -127 and so has a negative: 2 * 128 * 127 fits an i16.
        Format::Int8Row => {
            let multiply =
                |[w]: [__m256i; 1], [x]: [__m256i; 1]| _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            row_scaled::<1, _, _>(w, rows, x, |x| x.natural, 0, tile, |bytes| [bytes], multiply);
        }
        // 4 * 15 * 127 fits an i16.
        Format::Int4Row => {
            row_scaled::<2, _, _>(w, rows, x, |x| x.halves, 8, tile, |bytes| nibbles(bytes), |w, x| nibble_sums(w, x));
        }
        // 8 * 3 * 127 fits an i16.
        Format::Int2Row => {
            let mask = _mm256_set1_epi8(3);
            let unpack = |bytes| {
                [
                    _mm256_and_si256(bytes, mask),
                    _mm256_and_si256(_mm256_srli_epi16::<2>(bytes), mask),
                    _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask),
                    _mm256_and_si256(_mm256_srli_epi16::<6>(bytes), mask),
                ]
            };
            let multiply = |[a, b, c, d]: [__m256i; 4], [e, f, g, h]: [__m256i; 4]| {
                _mm256_add_epi16(nibble_sums([a, b], [e, f]), nibble_sums([c, d], [g, h]))
            };
            row_scaled::<4, _, _>(w, rows, x, |x| x.quarters, 2, tile, unpack, multiply);
        }
        Format::Int4Group { group: 64 } => groups_of_64(w, rows, x, tile),
        Format::Int4Group { group } if group % 8 == 0 => groups_of_any(w, rows, usize::from(group), x, tile),
        _ => scalar::integer(w, rows, x, tile),
    }
}

/// The even columns and the odd columns of 32 bytes, as 0..15.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibbles(bytes: __m256i) -> [__m256i; 2] {
    let mask = _mm256_set1_epi8(15);
    [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn nibble_sums(fields: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
    _mm256_add_epi16(_mm256_maddubs_epi16(fields[0], x[0]), _mm256_maddubs_epi16(fields[1], x[1]))
}

/// The order of activations that a format's kernel reads.
type Order = for<'a> fn(&QuantRow<'a>) -> &'a [i8];

/// Formats with one scale per row. 32 bytes of weights `unpack` into `P` vectors of fields, which meet the same half of `P`
/// consecutive 64-byte blocks of the activations in `order` and `multiply` to sums of i16; fields are stored with `offset`
/// added.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn row_scaled<const P: usize, U, M>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &[QuantRow],
    order: Order,
    offset: i32,
    tile: &mut [f32],
    unpack: U,
    multiply: M,
) where
    U: Fn(__m256i) -> [__m256i; P],
    M: Fn([__m256i; P], [__m256i; P]) -> __m256i,
{
    let count = rows.len();
    let mut put = |row: usize, i: usize, sum: i32| {
        if let Some(x) = x.get(i) {
            let sum = sum.wrapping_sub(offset.wrapping_mul(x.sum));
            tile[i * count + row - rows.start] = sum as f32 * w.scale(row) * x.scale;
        }
    };
    match x.len() {
        1 => row_blocks::<P, 4, 1, _, _>(w, rows.clone(), x, order, &unpack, &multiply, &mut put),
        2 => row_blocks::<P, 2, 2, _, _>(w, rows.clone(), x, order, &unpack, &multiply, &mut put),
        3 | 4 => row_blocks::<P, 2, 4, _, _>(w, rows.clone(), x, order, &unpack, &multiply, &mut put),
        _ => row_blocks::<P, 1, 8, _, _>(w, rows.clone(), x, order, &unpack, &multiply, &mut put),
    }
}

/// `W` weight rows against `N` activation rows at a time, one accumulator each; rows left over go one by one. `N` is at
/// least the number of activation rows; those it exceeds repeat the last one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn row_blocks<const P: usize, const W: usize, const N: usize, U, M>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &[QuantRow],
    order: Order,
    unpack: &U,
    multiply: &M,
    put: &mut impl FnMut(usize, usize, i32),
) where
    U: Fn(__m256i) -> [__m256i; P],
    M: Fn([__m256i; P], [__m256i; P]) -> __m256i,
{
    let x: [&[[i8; 64]]; N] = std::array::from_fn(|i| order(&x[i.min(x.len() - 1)]).as_chunks::<64>().0);
    let x = x.map(|x| x.as_chunks::<P>().0);
    let mut row = rows.start;
    while row + W <= rows.end {
        let sums = row_block::<P, W, N, U, M>(std::array::from_fn(|r| w.row(row + r)), &x, unpack, multiply);
        for r in 0..W {
            for i in 0..N {
                put(row + r, i, sums[r][i]);
            }
        }
        row += W;
    }
    while row < rows.end {
        let sums = row_block::<P, 1, N, U, M>([w.row(row)], &x, unpack, multiply);
        for i in 0..N {
            put(row, i, sums[0][i]);
        }
        row += 1;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn row_block<const P: usize, const W: usize, const N: usize, U, M>(
    weights: [&[u8]; W],
    x: &[&[[[i8; 64]; P]]; N],
    unpack: &U,
    multiply: &M,
) -> [[i32; N]; W]
where
    U: Fn(__m256i) -> [__m256i; P],
    M: Fn([__m256i; P], [__m256i; P]) -> __m256i,
{
    let whole = weights[0].len() / 64;
    let chunks = weights.map(|row| &row.as_chunks::<64>().0[..whole]);
    let x_whole: [&[[[i8; 64]; P]]; N] = x.map(|x| &x[..whole]);
    let mut sums = [[_mm256_setzero_si256(); N]; W];
    let ones = _mm256_set1_epi16(1);
    let step = |sums: &mut [__m256i; N], weights: &[u8; 64], x: [&[[i8; 64]; P]; N]| {
        for half in 0..2 {
            let fields = unpack(load_bytes(&weights.as_chunks::<32>().0[half]));
            for i in 0..N {
                let x = std::array::from_fn(|p| load_signed(&x[i][p].as_chunks::<32>().0[half]));
                sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(multiply(fields, x), ones));
            }
        }
    };
    for c in 0..whole {
        for r in 0..W {
            step(&mut sums[r], &chunks[r][c], std::array::from_fn(|i| &x_whole[i][c]));
        }
    }
    if weights[0].len() > 64 * whole {
        for r in 0..W {
            let tail = zero_padded(&weights[r][64 * whole..]);
            step(&mut sums[r], &tail, std::array::from_fn(|i| &x[i][whole]));
        }
    }
    sums.map(|row| row.map(|v| total(v)))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn total(v: __m256i) -> i32 {
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
    _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<1>(v)))
}

/// Each 32-byte load is one group of 64 columns: eight make 8 sums, which meet 8 scales at once. Four weight rows take
/// turns, so that their chains of additions overlap.
#[target_feature(enable = "avx2,fma,f16c")]
fn groups_of_64(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    let count = rows.len();
    let mut row = rows.start;
    while row + 4 <= rows.end {
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            let sums = group_rows::<4>(w, row, x);
            out[row - rows.start..][..4].copy_from_slice(&sums);
        }
        row += 4;
    }
    while row < rows.end {
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            out[row - rows.start] = group_rows::<1>(w, row, x)[0];
        }
        row += 1;
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group_rows<const W: usize>(w: &WeightRef, row: usize, x: &QuantRow) -> [f32; W] {
    let spans = w.cols() / 512;
    let weights: [&[[u8; 256]]; W] = std::array::from_fn(|r| &w.row(row + r).as_chunks::<256>().0[..spans]);
    let scales: [&[[u8; 32]]; W] =
        std::array::from_fn(|r| &row_scales(w, row + r, 64).as_flattened().as_chunks::<32>().0[..spans]);
    let halves = &x.halves.as_chunks::<512>().0[..spans];
    let sums8 = &x.sums8.as_chunks::<64>().0[..spans];
    let mut acc = [0.0f32; W];
    for s in 0..spans {
        let mut products = [[0.0f32; 8]; W];
        for r in 0..W {
            let sums = sums_of_8(&weights[r][s], &halves[s], &sums8[s]);
            let scale = _mm256_castsi256_ps(load_bytes(&scales[r][s]));
            store_floats(&mut products[r], _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scale));
        }
        for g in 0..8 {
            for r in 0..W {
                acc[r] += products[r][g];
            }
        }
    }
    if w.cols() > 512 * spans {
        for r in 0..W {
            let rest = GroupSum::resume(w, row + r, 64, 8, 8 * spans, acc[r]);
            acc[r] = chunk_sums(&w.row(row + r)[256 * spans..], w.cols() - 512 * spans, x, 8 * spans, rest);
        }
    }
    acc.map(|acc| acc * x.scale)
}

/// The sums of 8 groups of 64 columns, in order.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums_of_8(weights: &[u8; 256], halves: &[i8; 512], sums8: &[i32; 64]) -> __m256i {
    let weights = weights.as_chunks::<32>().0;
    let halves = halves.as_chunks::<32>().0;
    let sums8 = sums8.as_chunks::<8>().0;
    let part = |k: usize| {
        let even = 4 * (k / 2) + k % 2;
        dot_of_64(&weights[k], &halves[even], &halves[even + 2], &sums8[k])
    };
    let low = _mm256_hadd_epi32(_mm256_hadd_epi32(part(0), part(1)), _mm256_hadd_epi32(part(2), part(3)));
    let high = _mm256_hadd_epi32(_mm256_hadd_epi32(part(4), part(5)), _mm256_hadd_epi32(part(6), part(7)));
    // Each 128-bit lane holds half of every group's sum.
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high))
}

/// 8 sums of 8 columns each, offset removed.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_of_64(weights: &[u8; 32], even: &[i8; 32], odd: &[i8; 32], sums8: &[i32; 8]) -> __m256i {
    let pairs = nibble_sums(nibbles(load_bytes(weights)), [load_signed(even), load_signed(odd)]);
    _mm256_add_epi32(load_ints(sums8), _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Any group that is a multiple of 8 columns.
#[target_feature(enable = "avx2,fma,f16c")]
fn groups_of_any(w: &WeightRef, rows: Range<usize>, group: usize, x: &[QuantRow], tile: &mut [f32]) {
    let count = rows.len();
    for (r, row) in rows.enumerate() {
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            out[r] = chunk_sums(w.row(row), w.cols(), x, 0, GroupSum::new(w, row, group, 8)) * x.scale;
        }
    }
}

/// Feeds `total` with the sums of `cols` columns, whose activations begin at run `first` of 64 columns, an even one.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn chunk_sums(weights: &[u8], cols: usize, x: &QuantRow, first: usize, mut total: GroupSum) -> f32 {
    let halves = &x.halves.as_chunks::<32>().0[2 * first..];
    let sums8 = &x.sums8.as_chunks::<8>().0[first..];
    let runs = cols.div_ceil(8);
    for (c, weights) in weights.chunks(32).enumerate() {
        let weights = zero_padded(weights);
        let even = 4 * (c / 2) + c % 2;
        let mut sums = [0; 8];
        store_ints(&mut sums, dot_of_64(&weights, &halves[even], &halves[even + 2], &sums8[c]));
        total.push(&sums[..8.min(runs - 8 * c)]);
    }
    total.finish()
}

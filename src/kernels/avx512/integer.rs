//! Integer dot products: `vpdpbusd` multiplies unsigned weights by signed activations into exact i32 sums, and what the
//! weights' offset adds too much is subtracted.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_bytes, load_ints, load_signed, store_floats, store_ints};
use crate::kernels::format::{Format, WeightRef};
use crate::kernels::groups::{GroupSum, row_scales, zero_padded};
use crate::kernels::quantized::QuantRow;
use crate::kernels::scalar;

/// `tile[i][r] = W[rows.start + r] . x[i]` in integers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    match w.format() {
        Format::Int8Row => {
            let flip = _mm512_set1_epi8(-128);
            row_scaled::<1, _>(w, rows, x, |x| x.natural, 128, tile, |bytes| [_mm512_xor_si512(bytes, flip)]);
        }
        Format::Int4Row => row_scaled::<2, _>(w, rows, x, |x| x.halves, 8, tile, |bytes| nibbles(bytes)),
        Format::Int2Row => {
            let mask = _mm512_set1_epi8(3);
            row_scaled::<4, _>(
                w,
                rows,
                x,
                |x| x.quarters,
                2,
                tile,
                |bytes| {
                    [
                        _mm512_and_si512(bytes, mask),
                        _mm512_and_si512(_mm512_srli_epi16::<2>(bytes), mask),
                        _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask),
                        _mm512_and_si512(_mm512_srli_epi16::<6>(bytes), mask),
                    ]
                },
            );
        }
        Format::Int4Group { group: 64 } => groups_of_64(w, rows, x, tile),
        Format::Int4Group { group } if group % 8 == 0 => groups_of_any(w, rows, usize::from(group), x, tile),
        _ => scalar::integer(w, rows, x, tile),
    }
}

/// The even columns and the odd columns of 64 bytes, as 0..15.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
}

/// The order of activations that a format's kernel reads.
type Order = for<'a> fn(&QuantRow<'a>) -> &'a [i8];

/// Formats with one scale per row. 64 bytes of weights `unpack` into `P` vectors of fields, which meet `P` consecutive
/// blocks of the activations in `order`; fields are stored with `offset` added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn row_scaled<const P: usize, U>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &[QuantRow],
    order: Order,
    offset: i32,
    tile: &mut [f32],
    unpack: U,
) where
    U: Fn(__m512i) -> [__m512i; P],
{
    let count = rows.len();
    let mut put = |row: usize, i: usize, sum: i32| {
        if let Some(x) = x.get(i) {
            let sum = sum.wrapping_sub(offset.wrapping_mul(x.sum));
            tile[i * count + row - rows.start] = sum as f32 * w.scale(row) * x.scale;
        }
    };
    match x.len() {
        1 => row_blocks::<P, 4, 1, _>(w, rows.clone(), x, order, &unpack, &mut put),
        2 => row_blocks::<P, 4, 2, _>(w, rows.clone(), x, order, &unpack, &mut put),
        3 | 4 => row_blocks::<P, 4, 4, _>(w, rows.clone(), x, order, &unpack, &mut put),
        _ => row_blocks::<P, 2, 8, _>(w, rows.clone(), x, order, &unpack, &mut put),
    }
}

/// `W` weight rows against `N` activation rows at a time, one accumulator each; rows left over go one by one. `N` is at
/// least the number of activation rows; those it exceeds repeat the last one.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn row_blocks<const P: usize, const W: usize, const N: usize, U>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &[QuantRow],
    order: Order,
    unpack: &U,
    put: &mut impl FnMut(usize, usize, i32),
) where
    U: Fn(__m512i) -> [__m512i; P],
{
    let x: [&[[i8; 64]]; N] = std::array::from_fn(|i| order(&x[i.min(x.len() - 1)]).as_chunks::<64>().0);
    let mut row = rows.start;
    while row + W <= rows.end {
        let sums = row_block::<P, W, N, U>(std::array::from_fn(|r| w.row(row + r)), &x, unpack);
        for r in 0..W {
            for i in 0..N {
                put(row + r, i, sums[r][i]);
            }
        }
        row += W;
    }
    while row < rows.end {
        let sums = row_block::<P, 1, N, U>([w.row(row)], &x, unpack);
        for i in 0..N {
            put(row, i, sums[0][i]);
        }
        row += 1;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn row_block<const P: usize, const W: usize, const N: usize, U>(
    weights: [&[u8]; W],
    x: &[&[[i8; 64]]; N],
    unpack: &U,
) -> [[i32; N]; W]
where
    U: Fn(__m512i) -> [__m512i; P],
{
    let whole = weights[0].len() / 64;
    let chunks = weights.map(|row| &row.as_chunks::<64>().0[..whole]);
    let x_whole: [&[[[i8; 64]; P]]; N] = x.map(|x| &x.as_chunks::<P>().0[..whole]);
    let mut sums = [[_mm512_setzero_si512(); N]; W];
    let step = |sums: &mut [__m512i; N], fields: [__m512i; P], x: [&[[i8; 64]; P]; N]| {
        for p in 0..P {
            for i in 0..N {
                sums[i] = _mm512_dpbusd_epi32(sums[i], fields[p], load_signed(&x[i][p]));
            }
        }
    };
    for c in 0..whole {
        for r in 0..W {
            step(&mut sums[r], unpack(load_bytes(&chunks[r][c])), std::array::from_fn(|i| &x_whole[i][c]));
        }
    }
    if weights[0].len() > 64 * whole {
        for r in 0..W {
            let tail = unpack(load_bytes(&zero_padded(&weights[r][64 * whole..])));
            step(&mut sums[r], tail, std::array::from_fn(|i| &x[i].as_chunks::<P>().0[whole]));
        }
    }
    sums.map(|row| row.map(|v| _mm512_reduce_add_epi32(v)))
}

/// Groups of 64 columns share a 64-byte load in pairs: eight loads make 16 sums, which meet 16 scales at once. Four weight
/// rows take turns, so that their chains of additions overlap.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn group_rows<const W: usize>(w: &WeightRef, row: usize, x: &QuantRow) -> [f32; W] {
    let spans = w.cols() / 1024;
    let weights: [&[[u8; 512]]; W] = std::array::from_fn(|r| &w.row(row + r).as_chunks::<512>().0[..spans]);
    let scales: [&[[u8; 64]]; W] =
        std::array::from_fn(|r| &row_scales(w, row + r, 64).as_flattened().as_chunks::<64>().0[..spans]);
    let halves = &x.halves.as_chunks::<1024>().0[..spans];
    let sums8 = &x.sums8.as_chunks::<128>().0[..spans];
    let mut acc = [0.0f32; W];
    for s in 0..spans {
        let mut products = [[0.0f32; 16]; W];
        for r in 0..W {
            let sums = sums_of_16(&weights[r][s], &halves[s], &sums8[s]);
            let scale = _mm512_castsi512_ps(load_bytes(&scales[r][s]));
            store_floats(&mut products[r], _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale));
        }
        for g in 0..16 {
            for r in 0..W {
                acc[r] += products[r][g];
            }
        }
    }
    if w.cols() > 1024 * spans {
        for r in 0..W {
            let rest = GroupSum::resume(w, row + r, 64, 8, 16 * spans, acc[r]);
            acc[r] = chunk_sums(&w.row(row + r)[512 * spans..], w.cols() - 1024 * spans, x, 8 * spans, rest);
        }
    }
    acc.map(|acc| acc * x.scale)
}

/// The sums of 16 groups of 64 columns, in order.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn sums_of_16(weights: &[u8; 512], halves: &[i8; 1024], sums8: &[i32; 128]) -> __m512i {
    let weights = weights.as_chunks::<64>().0;
    let halves = halves.as_chunks::<64>().0;
    let sums8 = sums8.as_chunks::<16>().0;
    // Group 2k lies in the low half of part k, group 2k + 1 in the high half, each as 8 partial sums.
    let part = |k: usize| dot_of_128(&weights[k], &halves[2 * k], &halves[2 * k + 1], &sums8[k]);
    let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let quad = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    let low = quad(pair(part(0), part(1)), pair(part(2), part(3)));
    let high = quad(pair(part(4), part(5)), pair(part(6), part(7)));
    // Each 128-bit lane now holds its share of parts 0..4 (or 4..8); two neighbouring lanes make a group.
    let sums = _mm512_add_epi32(
        _mm512_shuffle_i32x4::<0b10_00_10_00>(low, high),
        _mm512_shuffle_i32x4::<0b11_01_11_01>(low, high),
    );
    _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15), sums)
}

/// 16 sums of 8 columns each, offset removed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot_of_128(weights: &[u8; 64], even: &[i8; 64], odd: &[i8; 64], sums8: &[i32; 16]) -> __m512i {
    let fields = nibbles(load_bytes(weights));
    let sums = _mm512_dpbusd_epi32(load_ints(sums8), fields[0], load_signed(even));
    _mm512_dpbusd_epi32(sums, fields[1], load_signed(odd))
}

/// Any group that is a multiple of 8 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn groups_of_any(w: &WeightRef, rows: Range<usize>, group: usize, x: &[QuantRow], tile: &mut [f32]) {
    let count = rows.len();
    for (r, row) in rows.enumerate() {
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            out[r] = chunk_sums(w.row(row), w.cols(), x, 0, GroupSum::new(w, row, group, 8)) * x.scale;
        }
    }
}

/// Feeds `total` with the sums of `cols` columns, whose activations begin at block `first` of 128 columns.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn chunk_sums(weights: &[u8], cols: usize, x: &QuantRow, first: usize, mut total: GroupSum) -> f32 {
    let halves = &x.halves.as_chunks::<64>().0[2 * first..];
    let sums8 = &x.sums8.as_chunks::<16>().0[first..];
    let runs = cols.div_ceil(8);
    for (c, weights) in weights.chunks(64).enumerate() {
        let weights = zero_padded(weights);
        let mut sums = [0; 16];
        store_ints(&mut sums, dot_of_128(&weights, &halves[2 * c], &halves[2 * c + 1], &sums8[c]));
        total.push(&sums[..16.min(runs - 16 * c)]);
    }
    total.finish()
}

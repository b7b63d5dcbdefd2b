//! Integer dot products: `vpmaddubsw` multiplies unsigned by signed bytes and adds pairs into i16, which saturates, so
//! every format states why its sums fit; pairs of those then go into exact i32 sums.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{int3, load_bytes, load_ints, load_signed, store_ints};
use crate::kernels::format::{Format, WeightRef};
use crate::kernels::groups::{
    CHAINS, GroupSum, MAX_UNITS, Products, add_in_order, row_scales, scale_groups, zero_padded,
};
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
        Format::Int4Group { group } if group % 64 == 0 => groups_of_units::<true>(w, rows, group.into(), x, tile),
        Format::Int4Group { group } if group % 32 == 0 => groups_of_units::<false>(w, rows, group.into(), x, tile),
        Format::Int4Group { group } if group % 8 == 0 => groups_of_any(w, rows, group.into(), x, tile),
        Format::Int3Group => int3::tile(w, rows, x, tile),
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
        1 => row_blocks::<P, 1, 1, _, _>(w, rows.clone(), x, order, &unpack, &multiply, &mut put),
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
pub(super) fn total(v: __m256i) -> i32 {
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_add_epi32(v, _mm_unpackhi_epi64(v, v));
    _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<1>(v)))
}

/// Groups of whole units of 32 columns, or of 64 where `WIDE`; as the AVX-512 kernel of the same name.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn groups_of_units<const WIDE: bool>(
    w: &WeightRef,
    rows: Range<usize>,
    group: usize,
    x: &[QuantRow],
    tile: &mut [f32],
) {
    let unit = if WIDE { 64 } else { 32 };
    let units = w.cols().div_ceil(unit);
    if units > MAX_UNITS {
        return groups_of_any(w, rows, group, x, tile);
    }
    let mut sums = [0i32; MAX_UNITS];
    let mut products: Products = [[0.0; MAX_UNITS]; CHAINS];
    let count = rows.len();
    for first in (0..count).step_by(CHAINS) {
        let block = CHAINS.min(count - first);
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            for (r, products) in products[..block].iter_mut().enumerate() {
                let row = rows.start + first + r;
                unit_sums::<WIDE>(w.row(row), x, &mut sums);
                scale_groups(&sums[..units], group / unit, row_scales(w, row, group), products);
            }
            let totals = add_in_order(&products, w.cols().div_ceil(group));
            for (out, total) in out[first..first + block].iter_mut().zip(totals) {
                *out = total * x.scale;
            }
        }
    }
}

/// The sums of all units of a row.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn unit_sums<const WIDE: bool>(weights: &[u8], x: &QuantRow, sums: &mut [i32; MAX_UNITS]) {
    let halves = x.halves.as_chunks::<128>().0;
    let sums8 = x.sums8.as_chunks::<16>().0;
    let (spans, rest) = weights.as_chunks::<256>();
    let mut done = 0;
    let per_part = if WIDE { 1 } else { 2 };
    for ((weights, halves), sums8) in spans.iter().zip(halves.as_chunks::<4>().0).zip(sums8.as_chunks::<4>().0) {
        let weights = weights.as_chunks::<32>().0;
        let [low, high] = sums_of_32(|k| dot_of_64(&weights[k], &halves[k / 2], &sums8[k / 2], k % 2));
        if WIDE {
            // Each 128-bit lane holds half of every unit's sum.
            let [even, odd] =
                [_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high)];
            store_ints(sums[done..].first_chunk_mut().expect("units were counted"), _mm256_add_epi32(even, odd));
        } else {
            let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let [low, high] = [low, high].map(|v| _mm256_permutevar8x32_epi32(v, order));
            store_ints(sums[done..].first_chunk_mut().expect("units were counted"), low);
            store_ints(sums[done + 8..].first_chunk_mut().expect("units were counted"), high);
        }
        done += 8 * per_part;
    }
    for (k, weights) in (8 * spans.len()..).zip(rest.chunks(32)) {
        let mut part = [0; 8];
        store_ints(&mut part, dot_of_64(&zero_padded(weights), &halves[k / 2], &sums8[k / 2], k % 2));
        for (sum, part) in sums[done..].iter_mut().zip(part.chunks(8 / per_part)) {
            *sum = part.iter().sum();
        }
        done += per_part;
    }
}

/// From eight parts (8 sums of 8 columns each) the sums of 32 columns: those of part `k` in element `k` of each 128-bit
/// lane of the first result, those of part `k + 4` in the second. Until they are complete the sums fit an i16,
/// `32 * 8 * 127` at most.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sums_of_32(part: impl Fn(usize) -> __m256i) -> [__m256i; 2] {
    [sums_of_four(&part), sums_of_four(|k| part(k + 4))]
}

/// From four parts their halves' sums: those of part `k` in element `k` of each 128-bit lane. Parts, and the sums of two
/// neighbours in one, fit an i16.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn sums_of_four(part: impl Fn(usize) -> __m256i) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    let join = |a, b| _mm256_madd_epi16(_mm256_packs_epi32(a, b), ones);
    join(join(part(0), part(1)), join(part(2), part(3)))
}

/// 8 sums of 8 columns each, offset removed, for the first or second `half` of 128 columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_of_64(weights: &[u8; 32], halves: &[i8; 128], sums8: &[i32; 16], half: usize) -> __m256i {
    let halves = halves.as_chunks::<32>().0;
    let x = [load_signed(&halves[half]), load_signed(&halves[half + 2])];
    let pairs = nibble_sums(nibbles(load_bytes(weights)), x);
    _mm256_add_epi32(load_ints(&sums8.as_chunks::<8>().0[half]), _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// Any group that is a multiple of 8 columns.
#[target_feature(enable = "avx2,fma,f16c")]
fn groups_of_any(w: &WeightRef, rows: Range<usize>, group: usize, x: &[QuantRow], tile: &mut [f32]) {
    let count = rows.len();
    for (r, row) in rows.enumerate() {
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            out[r] = chunk_sums(w.row(row), w.cols(), x, GroupSum::new(w, row, group, 8)) * x.scale;
        }
    }
}

/// Feeds `total` with the sums of a row's runs of 8 columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn chunk_sums(weights: &[u8], cols: usize, x: &QuantRow, mut total: GroupSum) -> f32 {
    let halves = x.halves.as_chunks::<128>().0;
    let sums8 = x.sums8.as_chunks::<16>().0;
    let runs = cols.div_ceil(8);
    for (c, weights) in weights.chunks(32).enumerate() {
        let mut sums = [0; 8];
        store_ints(&mut sums, dot_of_64(&zero_padded(weights), &halves[c / 2], &sums8[c / 2], c % 2));
        total.push(&sums[..8.min(runs - 8 * c)]);
    }
    total.finish()
}

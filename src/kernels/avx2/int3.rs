//! Three bits a weight in groups of 64 columns, arranged as the AVX-512 kernel.

use std::arch::x86_64::*;
use std::ops::Range;

use super::integer::{sums_of_four, total};
use super::{load_ints, load_signed, store_half_ints};
use crate::kernels::format::{INT3_GROUP, INT3_GROUP_BYTES, WeightRef};
use crate::kernels::groups::{CHAINS, MAX_UNITS, Products, add_in_order, row_scales, scale_groups};
use crate::kernels::quantized::QuantRow;
use crate::kernels::scalar;

/// As the kernel of int4 in groups of whole units: a unit is a group.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    let groups = w.cols().div_ceil(INT3_GROUP);
    if groups > MAX_UNITS {
        return scalar::integer(w, rows, x, tile);
    }
    let mut sums = [0i32; MAX_UNITS];
    let mut products: Products = [[0.0; MAX_UNITS]; CHAINS];
    let count = rows.len();
    for first in (0..count).step_by(CHAINS) {
        let block = CHAINS.min(count - first);
        for (x, out) in x.iter().zip(tile.chunks_mut(count)) {
            for (r, products) in products[..block].iter_mut().enumerate() {
                let row = rows.start + first + r;
                group_sums(w.row(row), x, &mut sums);
                scale_groups(&sums[..groups], 1, row_scales(w, row, INT3_GROUP), products);
            }
            let totals = add_in_order(&products, groups);
            for (out, total) in out[first..first + block].iter_mut().zip(totals) {
                *out = total * x.scale;
            }
        }
    }
}

/// The sums of all groups of a row, four at a time.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn group_sums(weights: &[u8], x: &QuantRow, sums: &mut [i32; MAX_UNITS]) {
    let (fours, rest) = weights.as_chunks::<INT3_GROUP_BYTES>().0.as_chunks::<4>();
    let (natural, sums8) = (x.natural.as_chunks::<INT3_GROUP>().0, x.sums8.as_chunks::<8>().0);
    let (x_fours, sums8_fours) = (natural.as_chunks::<4>().0, sums8.as_chunks::<4>().0);
    for (((weights, x), sums8), sums) in fours.iter().zip(x_fours).zip(sums8_fours).zip(sums.as_chunks_mut::<4>().0) {
        let halves = sums_of_four(|k| dot(&weights[k], &x[k], &sums8[k]));
        store_half_ints(sums, _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves)));
    }
    let done = 4 * fours.len();
    for (k, (weights, sum)) in rest.iter().zip(&mut sums[done..]).enumerate() {
        *sum = total(dot(weights, &natural[done + k], &sums8[done + k]));
    }
}

/// 8 sums that together are that of a group. Half of what `sums8` holds removes the offset, which is 4 here. Pairs of
/// products fit an i16, `4 * 7 * 127` after two of them are added, and each sum lies within `8 * 7 * 127 + 4 * 8 * 127`,
/// two of which fit an i16 as [`sums_of_four`] needs it.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot(weights: &[u8; INT3_GROUP_BYTES], x: &[i8; INT3_GROUP], sums8: &[i32; 8]) -> __m256i {
    let (low, high) = weights.split_at(INT3_GROUP / 4);
    let (low, high, x) = (low.as_chunks::<8>().0, high.as_chunks::<4>().0, x.as_chunks::<32>().0);
    let pairs = _mm256_add_epi16(
        _mm256_maddubs_epi16(fields(low[0], high[0]), load_signed(&x[0])),
        _mm256_maddubs_epi16(fields(low[1], high[1]), load_signed(&x[1])),
    );
    let offsets = _mm256_srai_epi32::<1>(load_ints(sums8));
    _mm256_add_epi32(offsets, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
}

/// 32 columns as 0..7.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn fields(low: [u8; 8], high: [u8; 4]) -> __m256i {
    // Copies of a byte 6 bits apart, so that its four columns stand at the bottom of the four bytes of a word.
    let bytes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(low)));
    let twice = _mm256_or_si256(bytes, _mm256_slli_epi32::<12>(bytes));
    let low = _mm256_and_si256(_mm256_or_si256(twice, _mm256_slli_epi32::<6>(twice)), _mm256_set1_epi8(3));
    // Each byte of the high bits eight times, and of each copy another bit.
    let copies = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
    let bit = _mm256_set1_epi64x(i64::from_le_bytes([1, 2, 4, 8, 16, 32, 64, 128]));
    let high = _mm256_shuffle_epi8(_mm256_set1_epi32(i32::from_le_bytes(high)), copies);
    let set = _mm256_cmpeq_epi8(_mm256_and_si256(high, bit), bit);
    _mm256_or_si256(low, _mm256_and_si256(set, _mm256_set1_epi8(4)))
}

/// Half a group as floats: its low bits and its high bits.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode(low: &[u8; 8], high: &[u8; 4]) -> [__m256; 4] {
    let low = low.as_chunks::<2>().0;
    let shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    let high_shifts = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    std::array::from_fn(|q| {
        let fields = _mm256_srlv_epi32(_mm256_set1_epi32(u16::from_le_bytes(low[q]).into()), shifts);
        let fields = _mm256_and_si256(fields, _mm256_set1_epi32(3));
        let high = _mm256_srlv_epi32(_mm256_set1_epi32(high[q].into()), high_shifts);
        let high = _mm256_slli_epi32::<2>(_mm256_and_si256(high, _mm256_set1_epi32(1)));
        _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_or_si256(fields, high), _mm256_set1_epi32(4)))
    })
}

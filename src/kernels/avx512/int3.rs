//! Three bits a weight in groups of 64 columns. The two low bits and the high one of each weight are joined to a byte, in
//! the order of columns, and then multiplied as every other format is.

use std::arch::x86_64::*;
use std::ops::Range;

use super::integer::sums_of_32;
use super::{load_quarter, load_quarter_ints, load_signed, store_quarter_ints};
use crate::kernels::format::{INT3_GROUP, INT3_GROUP_BYTES, WeightRef};
use crate::kernels::groups::{CHAINS, MAX_UNITS, Products, add_in_order, row_scales, scale_groups};
use crate::kernels::quantized::QuantRow;
use crate::kernels::scalar;

/// As the kernel of int4 in groups of whole units: a unit is a group.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn group_sums(weights: &[u8], x: &QuantRow, sums: &mut [i32; MAX_UNITS]) {
    let (fours, rest) = weights.as_chunks::<INT3_GROUP_BYTES>().0.as_chunks::<4>();
    let natural = x.natural.as_chunks::<INT3_GROUP>().0;
    let (x_fours, offsets) = (natural.as_chunks::<4>().0, x.sums64.as_chunks::<4>().0);
    for (((weights, x), offsets), sums) in fours.iter().zip(x_fours).zip(offsets).zip(sums.as_chunks_mut::<4>().0) {
        let quarters = sums_of_32(|k| dot(&weights[k], &x[k]));
        let halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64::<1>(quarters));
        let whole = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256::<1>(halves));
        // The offset is 4 here, half of what `sums64` removes.
        store_quarter_ints(sums, _mm_add_epi32(whole, _mm_srai_epi32::<1>(load_quarter_ints(offsets))));
    }
    let done = 4 * fours.len();
    for (k, (weights, sum)) in rest.iter().zip(&mut sums[done..]).enumerate() {
        *sum = _mm512_reduce_add_epi32(dot(weights, &natural[done + k])) + x.sums64[done + k] / 2;
    }
}

/// 16 sums that together are that of a group, with the offset in them: `4 * 7 * 127` at most each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot(weights: &[u8; INT3_GROUP_BYTES], x: &[i8; INT3_GROUP]) -> __m512i {
    _mm512_dpbusd_epi32(_mm512_setzero_si512(), fields(weights), load_signed(x))
}

/// The 64 columns of a group as 0..7.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn fields(weights: &[u8; INT3_GROUP_BYTES]) -> __m512i {
    let (low, high) = weights.as_chunks::<{ INT3_GROUP / 4 }>();
    // Copies of a byte 6 bits apart, so that its four columns stand at the bottom of the four bytes of a word.
    let bytes = _mm512_cvtepu8_epi32(load_quarter(&low[0]));
    let twice = _mm512_or_si512(bytes, _mm512_slli_epi32::<12>(bytes));
    let low = _mm512_and_si512(_mm512_or_si512(twice, _mm512_slli_epi32::<6>(twice)), _mm512_set1_epi8(3));
    _mm512_mask_add_epi8(low, u64::from_le_bytes(high.as_chunks().0[0]), low, _mm512_set1_epi8(4))
}

/// A group as floats.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn decode(weights: &[u8; INT3_GROUP_BYTES]) -> [__m512; 4] {
    let (low, high) = weights.split_at(INT3_GROUP / 4);
    let (low, high) = (low.as_chunks::<4>().0, high.as_chunks::<2>().0);
    let shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    std::array::from_fn(|q| {
        let fields = _mm512_srlv_epi32(_mm512_set1_epi32(i32::from_le_bytes(low[q])), shifts);
        let fields = _mm512_and_si512(fields, _mm512_set1_epi32(3));
        // A high bit that is set is the 4 that the offset takes away.
        let low = _mm512_sub_epi32(fields, _mm512_set1_epi32(4));
        _mm512_cvtepi32_ps(_mm512_mask_mov_epi32(low, u16::from_le_bytes(high[q]), fields))
    })
}

//! One activation row against int8 and int4 with one scale per row: what decoding a token is made of.
//!
//! Memory is the limit here, and on Zen 4 vectors of 256 bits, one cache line of weights an iteration, came closer to it
//! than those of 512; four lines an iteration, several weight rows at once and software prefetches all measured slower. The
//! likely reason is that loads which run far ahead reach memory before the hardware's prefetches do.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_half, load_signed_half};
use crate::kernels::format::WeightRef;
use crate::kernels::groups::zero_padded;
use crate::kernels::quantized::QuantRow;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn int8(w: &WeightRef, rows: Range<usize>, x: &QuantRow, out: &mut [f32]) {
    let flip = _mm256_set1_epi8(-128);
    row_scaled::<1, _>(w, rows, x, x.natural, 128, out, |bytes| [_mm256_xor_si256(bytes, flip)]);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn int4(w: &WeightRef, rows: Range<usize>, x: &QuantRow, out: &mut [f32]) {
    let mask = _mm256_set1_epi8(15);
    row_scaled::<2, _>(w, rows, x, x.halves, 8, out, |bytes| {
        [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
    });
}

/// 32 bytes of weights `unpack` into `P` vectors of fields, which meet the same half of `P` consecutive 64-byte blocks of
/// `order`, the activations; fields are stored with `offset` added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn row_scaled<const P: usize, U>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &QuantRow,
    order: &[i8],
    offset: i32,
    out: &mut [f32],
    unpack: U,
) where
    U: Fn(__m256i) -> [__m256i; P],
{
    let blocks = order.as_chunks::<64>().0.as_chunks::<P>().0;
    let too_much = offset.wrapping_mul(x.sum);
    for (out, row) in out.iter_mut().zip(rows) {
        let sum = dot(w.row(row), blocks, &unpack).wrapping_sub(too_much);
        *out = sum as f32 * w.scale(row) * x.scale;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot<const P: usize, U>(weights: &[u8], x: &[[[i8; 64]; P]], unpack: &U) -> i32
where
    U: Fn(__m256i) -> [__m256i; P],
{
    let mut sums = [[_mm256_setzero_si256(); P]; 2];
    let step = |sums: &mut [[__m256i; P]; 2], weights: &[u8; 64], x: &[[i8; 64]; P]| {
        let weights = weights.as_chunks::<32>().0;
        for half in 0..2 {
            let fields = unpack(load_half(&weights[half]));
            for p in 0..P {
                let x = load_signed_half(&x[p].as_chunks::<32>().0[half]);
                sums[half][p] = _mm256_dpbusd_epi32(sums[half][p], fields[p], x);
            }
        }
    };
    let (chunks, tail) = weights.as_chunks::<64>();
    for (weights, x) in chunks.iter().zip(x) {
        step(&mut sums, weights, x);
    }
    if !tail.is_empty() {
        step(&mut sums, &zero_padded(tail), &x[chunks.len()]);
    }
    let mut total = _mm256_setzero_si256();
    for half in 0..2 {
        for p in 0..P {
            total = _mm256_add_epi32(total, sums[half][p]);
        }
    }
    let sum = _mm_add_epi32(_mm256_castsi256_si128(total), _mm256_extracti128_si256::<1>(total));
    let sum = _mm_add_epi32(sum, _mm_unpackhi_epi64(sum, sum));
    _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32::<1>(sum)))
}

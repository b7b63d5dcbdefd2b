//! One activation row against int8 and int4 with one scale per row: what decoding a token is made of.
//!
//! Memory is the limit here, and on Zen 4 vectors of 256 bits, one cache line of weights an iteration, came closer to it
//! than those of 512; four lines an iteration, several weight rows at once and software prefetches all measured slower. The
//! likely reason is that loads which run far ahead reach memory before the hardware's prefetches do.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{load_bytes, load_half, load_half_ints, load_ints, load_signed, load_signed_half};
use super::{store_floats, store_half_floats, store_half_ints, store_ints};
use crate::kernels::format::WeightRef;
use crate::kernels::groups::zero_padded;
use crate::kernels::quantized::QuantRow;

/// Weight rows whose sums are brought to an end together.
const ROWS: usize = 8;

/// Columns of the rows that are so short that activations stay in registers: those of the latents that several model families
/// have in place of keys and values.
const SHORT: usize = 512;

/// Short weight rows whose sums are brought to an end together.
const SHORT_ROWS: usize = 16;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn int8(w: &WeightRef, rows: Range<usize>, x: &QuantRow, out: &mut [f32]) {
    if w.cols() == SHORT {
        let flip = _mm512_set1_epi8(-128);
        return short::<8, 1, _, _>(w, rows, x, x.natural, 128, out, |b| [_mm512_xor_si512(b, flip)], |[sum]| sum);
    }
    let flip = _mm256_set1_epi8(-128);
    row_scaled::<1, _>(w, rows, x, x.natural, 128, out, |bytes| [_mm256_xor_si256(bytes, flip)]);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn int4(w: &WeightRef, rows: Range<usize>, x: &QuantRow, out: &mut [f32]) {
    if w.cols() == SHORT {
        let (low, high) = (_mm512_set1_epi8(15), _mm512_set1_epi8(-16));
        // Upper nibbles where they stand are 16 times what they mean, and so is the sum of their products.
        let split = |bytes| [_mm512_and_si512(bytes, low), _mm512_and_si512(bytes, high)];
        let join = |[low, high]: [_; 2]| _mm512_add_epi32(low, _mm512_srai_epi32::<4>(high));
        return short::<4, 2, _, _>(w, rows, x, x.halves, 8, out, split, join);
    }
    let mask = _mm256_set1_epi8(15);
    row_scaled::<2, _>(w, rows, x, x.halves, 8, out, |bytes| {
        [_mm256_and_si256(bytes, mask), _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask)]
    });
}

/// 32 bytes of weights `unpack` into `P` vectors of fields, which meet the same half of `P` consecutive 64-byte blocks of
/// `order`, the activations; fields are stored with `offset` added. What is left to do for a row then is done for eight of
/// them at once, for which short rows are grateful.
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
    let too_much = _mm256_set1_epi32(offset.wrapping_mul(x.sum));
    let row_bytes = w.format().row_bytes(w.cols());
    let weights = &w.data()[rows.start * row_bytes..rows.end * row_bytes];
    let scales = &w.scales()[4 * rows.start..4 * rows.end];
    // Of rows that a last block lacks, it has what the one before left.
    let mut sums = [[0; ROWS]; ROWS];
    for ((weights, scales), out) in
        weights.chunks(ROWS * row_bytes).zip(scales.chunks(4 * ROWS)).zip(out.chunks_mut(ROWS))
    {
        for (weights, sums) in weights.chunks_exact(row_bytes).zip(&mut sums) {
            store_half_ints(sums, dot(weights, blocks, &unpack));
        }
        let dots = _mm256_cvtepi32_ps(_mm256_sub_epi32(totals(&sums), too_much));
        let scales = scales.first_chunk().copied().unwrap_or_else(|| zero_padded(scales));
        let scaled = _mm256_mul_ps(dots, _mm256_castsi256_ps(load_half(&scales)));
        let mut values = [0.0; ROWS];
        store_half_floats(&mut values, _mm256_mul_ps(scaled, _mm256_set1_ps(x.scale)));
        for (out, value) in out.iter_mut().zip(values) {
            *out = value;
        }
    }
}

/// As [`row_scaled`] for rows of [`SHORT`] columns, which are `C` times 64 bytes: `split` makes `P` vectors of fields of these,
/// and `join` a sum of the `P` they lead to.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn short<const C: usize, const P: usize, S, J>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &QuantRow,
    order: &[i8],
    offset: i32,
    out: &mut [f32],
    split: S,
    join: J,
) where
    S: Fn(__m512i) -> [__m512i; P],
    J: Fn([__m512i; P]) -> __m512i,
{
    let order = order.as_chunks::<64>().0.as_chunks::<P>().0;
    let mut fours = [[_mm512_setzero_si512(); P]; C];
    for (fours, order) in fours.iter_mut().zip(order) {
        for p in 0..P {
            fours[p] = load_signed(&order[p]);
        }
    }
    let too_much = _mm512_set1_epi32(offset.wrapping_mul(x.sum));
    let weights = w.data().as_chunks::<64>().0.as_chunks::<C>().0;
    let weights = &weights[rows.start..rows.end];
    let scales = &w.scales()[4 * rows.start..4 * rows.end];
    // Of rows that a last block lacks, it has what the one before left.
    let mut sums = [[0; 16]; SHORT_ROWS];
    for ((weights, scales), out) in
        weights.chunks(SHORT_ROWS).zip(scales.chunks(4 * SHORT_ROWS)).zip(out.chunks_mut(SHORT_ROWS))
    {
        for (weights, sums) in weights.iter().zip(&mut sums) {
            let mut parts = [_mm512_setzero_si512(); P];
            for c in 0..C {
                let fields = split(load_bytes(&weights[c]));
                for p in 0..P {
                    parts[p] = _mm512_dpbusd_epi32(parts[p], fields[p], fours[c][p]);
                }
            }
            store_ints(sums, join(parts));
        }
        let dots = _mm512_cvtepi32_ps(_mm512_sub_epi32(short_totals(&sums), too_much));
        let scales = scales.first_chunk().copied().unwrap_or_else(|| zero_padded(scales));
        let scaled = _mm512_mul_ps(dots, _mm512_castsi512_ps(load_bytes(&scales)));
        let mut values = [0.0; SHORT_ROWS];
        store_floats(&mut values, _mm512_mul_ps(scaled, _mm512_set1_ps(x.scale)));
        for (out, value) in out.iter_mut().zip(values) {
            *out = value;
        }
    }
}

/// The sum of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn short_totals(rows: &[[i32; 16]; SHORT_ROWS]) -> __m512i {
    let mut pairs = [_mm512_setzero_si512(); 8];
    for k in 0..8 {
        let (a, b) = (load_ints(&rows[2 * k]), load_ints(&rows[2 * k + 1]));
        pairs[k] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    // Four rows side by side in each quarter.
    let mut fours = [_mm512_setzero_si512(); 4];
    for k in 0..4 {
        let (a, b) = (pairs[2 * k], pairs[2 * k + 1]);
        fours[k] = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    }
    let halves = |a, b| _mm512_add_epi32(_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
    halves(halves(fours[0], fours[1]), halves(fours[2], fours[3]))
}

/// Eight sums that together are the dot product of a row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot<const P: usize, U>(weights: &[u8], x: &[[[i8; 64]; P]], unpack: &U) -> __m256i
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
    total
}

/// The sum of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn totals(rows: &[[i32; ROWS]; ROWS]) -> __m256i {
    let mut pairs = [_mm256_setzero_si256(); 4];
    for k in 0..4 {
        let (a, b) = (load_half_ints(&rows[2 * k]), load_half_ints(&rows[2 * k + 1]));
        pairs[k] = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    }
    let mut fours = [_mm256_setzero_si256(); 2];
    for k in 0..2 {
        let (a, b) = (pairs[2 * k], pairs[2 * k + 1]);
        fours[k] = _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
    }
    let [a, b] = fours;
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(a, b), _mm256_permute2x128_si256::<0x31>(a, b))
}

//! Integer dot products: `vpdpbusd` multiplies unsigned weights by signed activations into exact i32 sums, and what the
//! weights' offset adds too much is subtracted.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{eights, int3, panels, single};
use super::{load_bytes, load_half_ints, load_ints, load_signed, store_half_ints, store_ints};
use crate::kernels::format::{Format, WeightRef};
use crate::kernels::groups::{
    CHAINS, GroupSum, MAX_UNITS, Products, add_in_order, row_scales, scale_groups, zero_padded,
};
use crate::kernels::quantized::QuantRow;
use crate::kernels::scalar;

/// `tile[i][r] = W[rows.start + r] . x[i]` in integers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    match (w.format(), x) {
        _ if w.cols() == 0 => scalar::integer(w, rows, x, tile),
        (format, _) if x.len() >= panels_from(format) => panels::tile(w, rows, x, tile),
        (Format::Int8Row, [x]) => single::int8(w, rows, x, tile),
        (Format::Int4Row, [x]) => single::int4(w, rows, x, tile),
        (Format::Int2Row, [x]) => int2_alone(w, rows, x, tile),
        (Format::Int4Group { group: 64 }, [x]) => eights::tile(w, rows, &[*x], tile),
        (Format::Int4Group { group: 64 }, [x, y]) => eights::tile(w, rows, &[*x, *y], tile),
        (Format::Int4Group { group }, _) if group % 64 == 0 => groups_of_units::<true>(w, rows, group.into(), x, tile),
        (Format::Int4Group { group }, _) if group % 32 == 0 => groups_of_units::<false>(w, rows, group.into(), x, tile),
        (Format::Int4Group { group }, _) if group % 8 == 0 => groups_of_any(w, rows, group.into(), x, tile),
        (Format::Int3Group, _) => int3::tile(w, rows, x, tile),
        _ => scalar::integer(w, rows, x, tile),
    }
}

/// Activation rows from which on panels are faster than sums across lanes.
#[inline]
fn panels_from(format: Format) -> usize {
    match format {
        _ if !panels::takes(format) => usize::MAX,
        Format::Int4Group { .. } => 3,
        _ => 2,
    }
}

/// The even columns and the odd columns of 64 bytes, as 0..15.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn nibbles(bytes: __m512i) -> [__m512i; 2] {
    let mask = _mm512_set1_epi8(15);
    [_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask)]
}

/// The columns that are 0, 1, 2 and 3 modulo 4 of 64 bytes, as 0..3.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn pairs_of_bits(bytes: __m512i) -> [__m512i; 4] {
    let mask = _mm512_set1_epi8(3);
    [
        _mm512_and_si512(bytes, mask),
        _mm512_and_si512(_mm512_srli_epi16::<2>(bytes), mask),
        _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask),
        _mm512_and_si512(_mm512_srli_epi16::<6>(bytes), mask),
    ]
}

/// One activation row against int2, for which the loop of `single` measured slower. Memory is the limit: bytes are read in
/// the order they lie, which is what the hardware prefetches best, and four accumulators keep the additions out of the way.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn int2_alone(w: &WeightRef, rows: Range<usize>, x: &QuantRow, out: &mut [f32]) {
    let blocks = x.quarters.as_chunks::<64>().0.as_chunks::<4>().0;
    for (out, row) in out.iter_mut().zip(rows) {
        let sum = int2_dot(w.row(row), blocks).wrapping_sub(2 * x.sum);
        *out = sum as f32 * w.scale(row) * x.scale;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn int2_dot(weights: &[u8], blocks: &[[[i8; 64]; 4]]) -> i32 {
    let (chunks, tail) = weights.as_chunks::<64>();
    let (quads, rest) = chunks.as_chunks::<4>();
    let (x_quads, _) = blocks.as_chunks::<4>();
    let mut sums = [_mm512_setzero_si512(); 4];
    let step = |sum: &mut __m512i, weights: &[u8; 64], x: &[[i8; 64]; 4]| {
        let fields = pairs_of_bits(load_bytes(weights));
        for p in 0..4 {
            *sum = _mm512_dpbusd_epi32(*sum, fields[p], load_signed(&x[p]));
        }
    };
    for (weights, x) in quads.iter().zip(x_quads) {
        for j in 0..4 {
            step(&mut sums[j], &weights[j], &x[j]);
        }
    }
    let x_rest = &blocks[4 * quads.len()..];
    for (weights, x) in rest.iter().zip(x_rest) {
        step(&mut sums[0], weights, x);
    }
    if !tail.is_empty() {
        step(&mut sums[1], &zero_padded(tail), &x_rest[rest.len()]);
    }
    let low = _mm512_add_epi32(sums[0], sums[1]);
    _mm512_reduce_add_epi32(_mm512_add_epi32(low, _mm512_add_epi32(sums[2], sums[3])))
}

/// Groups of whole units of 32 columns, or of 64 where `WIDE`.
///
/// One weight row at a time is read from end to end, because memory is the limit and that is what the hardware prefetches
/// best; the additions of the groups, which must wait for each other, are put off until they can overlap with those of
/// other rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn unit_sums<const WIDE: bool>(weights: &[u8], x: &QuantRow, sums: &mut [i32; MAX_UNITS]) {
    let halves = x.halves.as_chunks::<128>().0;
    let sums8 = x.sums8.as_chunks::<16>().0;
    let (spans, rest) = weights.as_chunks::<256>();
    let sums64 = x.sums64.as_chunks::<8>().0;
    let per_part = if WIDE { 2 } else { 4 };
    let mut free = sums.as_mut_slice();
    for (s, (weights, halves)) in spans.iter().zip(halves.as_chunks::<4>().0).enumerate() {
        let weights = weights.as_chunks::<64>().0;
        if WIDE {
            let none = _mm512_setzero_si512();
            let sums = sums_of_64(sums_of_32(|k| dot_of_128(&weights[k], &halves[k], none)));
            let (to, left) = free.split_first_chunk_mut().expect("units were counted");
            store_half_ints(to, _mm256_add_epi32(sums, load_half_ints(&sums64[s])));
            free = left;
        } else {
            let quarter_sums = sums_of_32(|k| dot_of_128(&weights[k], &halves[k], load_ints(&sums8[4 * s + k])));
            let (to, left) = free.split_first_chunk_mut().expect("units were counted");
            let order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            store_ints(to, _mm512_permutexvar_epi32(order, quarter_sums));
            free = left;
        }
    }
    let mut done = MAX_UNITS - free.len();
    for (k, weights) in (4 * spans.len()..).zip(rest.chunks(64)) {
        let mut part = [0; 16];
        store_ints(&mut part, dot_of_128(&zero_padded(weights), &halves[k], load_ints(&sums8[k])));
        for (sum, part) in sums[done..].iter_mut().zip(part.chunks(16 / per_part)) {
            *sum = part.iter().sum();
        }
        done += per_part;
    }
}

/// From four parts (16 sums of 8 columns each) the sums of 32 columns: those of part `k` in element `k` of each 128-bit
/// lane.
///
/// Until they are complete the sums fit an i16, `16 * 15 * 127` at most where the offset is still in them, so that packing
/// and adding neighbours is two instructions for two parts.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn sums_of_32(part: impl Fn(usize) -> __m512i) -> __m512i {
    let ones = _mm512_set1_epi16(1);
    let join = |a, b| _mm512_madd_epi16(_mm512_packs_epi32(a, b), ones);
    let low = join(part(0), part(1));
    join(low, join(part(2), part(3)))
}

/// The sums of 64 columns, in order, from those of 32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn sums_of_64(sums: __m512i) -> __m256i {
    let sums = _mm512_add_epi32(sums, _mm512_shuffle_i32x4::<0b10_11_00_01>(sums, sums));
    let order = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 0, 8, 1, 9, 2, 10, 3, 11);
    _mm512_castsi512_si256(_mm512_permutexvar_epi32(order, sums))
}

/// 16 sums of 8 columns each, added to `sums`: what removes the offset, or nothing.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn dot_of_128(weights: &[u8; 64], halves: &[i8; 128], sums: __m512i) -> __m512i {
    let fields = nibbles(load_bytes(weights));
    let halves = halves.as_chunks::<64>().0;
    let sums = _mm512_dpbusd_epi32(sums, fields[0], load_signed(&halves[0]));
    _mm512_dpbusd_epi32(sums, fields[1], load_signed(&halves[1]))
}

/// Any group that is a multiple of 8 columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn chunk_sums(weights: &[u8], cols: usize, x: &QuantRow, mut total: GroupSum) -> f32 {
    let halves = x.halves.as_chunks::<128>().0;
    let sums8 = x.sums8.as_chunks::<16>().0;
    let runs = cols.div_ceil(8);
    for (c, weights) in weights.chunks(64).enumerate() {
        let mut sums = [0; 16];
        store_ints(&mut sums, dot_of_128(&zero_padded(weights), &halves[c], load_ints(&sums8[c])));
        total.push(&sums[..16.min(runs - 16 * c)]);
    }
    total.finish()
}

//! One or two activation rows against int4 in groups of 64 columns, eight weight rows at a time.
//!
//! 512 columns of a weight row are eight groups, whose sums fill a register. Those of eight rows are scaled and transposed,
//! so that what has to be added in the order of columns is a register each time, with a lane for every row. Rows take turns
//! every 512 columns: activations of any width stay in the first-level cache, while weights and scales are asked for in the
//! order they lie in memory.

use std::arch::x86_64::*;
use std::ops::Range;

use super::ahead::Ahead;
use super::integer::{dot_of_128, sums_of_32, sums_of_64};
use super::{load_half, load_half_floats, load_half_ints, store_half_floats};
use crate::kernels::format::WeightRef;
use crate::kernels::groups::zero_padded;
use crate::kernels::quantized::QuantRow;

/// Weight rows, and groups of a span.
const ROWS: usize = 8;

/// Columns of a group.
const GROUP: usize = 64;

/// Columns of a span.
const SPAN: usize = ROWS * GROUP;

/// Bytes of a span, and of its scales.
const SPAN_BYTES: usize = SPAN / 2;
const SPAN_SCALES: usize = 4 * ROWS;

/// An activation row, span by span.
struct Spans<'a> {
    scale: f32,
    whole: &'a [[i8; SPAN]],
    /// What removes the offset of the weights, for each group.
    offsets: &'a [[i32; ROWS]],
    /// What is behind the whole spans, with zeros behind that.
    tail: ([i8; SPAN], [i32; ROWS]),
}

impl<'a> Spans<'a> {
    fn new(x: &QuantRow<'a>) -> Spans<'a> {
        let (whole, x_rest) = x.halves.as_chunks();
        let (offsets, rest) = x.sums64.as_chunks();
        let mut tail = ([0; SPAN], [0; ROWS]);
        tail.0[..x_rest.len()].copy_from_slice(x_rest);
        tail.1[..rest.len()].copy_from_slice(rest);
        Spans { scale: x.scale, whole, offsets, tail }
    }

    #[inline(always)]
    fn span(&self, s: usize) -> (&[i8; SPAN], &[i32; ROWS]) {
        self.whole.get(s).zip(self.offsets.get(s)).unwrap_or((&self.tail.0, &self.tail.1))
    }
}

/// `tile[i][r] = W[rows.start + r] . x[i]` in integers.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn tile<const N: usize>(w: &WeightRef, rows: Range<usize>, x: &[QuantRow; N], tile: &mut [f32]) {
    let x = x.each_ref().map(Spans::new);
    let (count, row_bytes, row_scales) = (rows.len(), w.format().row_bytes(w.cols()), 4 * w.cols().div_ceil(GROUP));
    let mut ahead = [Ahead::new(w, rows.start, ROWS), Ahead::of_scales(w, rows.start, ROWS)];
    let weights = &w.data()[rows.start * row_bytes..rows.end * row_bytes];
    let scales = &w.scales()[rows.start * row_scales..rows.end * row_scales];
    let blocks = weights.chunks(ROWS * row_bytes).zip(scales.chunks(ROWS * row_scales));
    let whole = w.cols() / SPAN;
    for (first, (weights, scales)) in (0..count).step_by(ROWS).zip(blocks) {
        // Rows past the last one repeat it.
        let mut block = [Row { weights: &[], scales: &[] }; ROWS];
        for r in 0..ROWS {
            let r_or_last = r.min(count - first - 1);
            let weights = &weights[r_or_last * row_bytes..][..row_bytes];
            block[r] = Row { weights, scales: &scales[r_or_last * row_scales..][..row_scales] };
        }
        let mut totals = [_mm256_setzero_ps(); N];
        for s in 0..whole {
            let (mut pieces, mut x_spans) = ([(&[0; SPAN_BYTES], &[0; SPAN_SCALES]); ROWS], [x[0].span(s); N]);
            for r in 0..ROWS {
                pieces[r] = block[r].piece(s);
            }
            for i in 1..N {
                x_spans[i] = x[i].span(s);
            }
            add_span(&mut totals, pieces, x_spans, &mut ahead);
        }
        if whole * SPAN < w.cols() {
            add_tail(&mut totals, &block, whole, &x, &mut ahead);
        }
        for i in 0..N {
            let values = _mm256_mul_ps(totals[i], _mm256_set1_ps(x[i].scale));
            let out = &mut tile[i * count..][..count][first..];
            if let Some(out) = out.first_chunk_mut() {
                store_half_floats(out, values);
            } else {
                let mut some = [0.0; ROWS];
                store_half_floats(&mut some, values);
                out.copy_from_slice(&some[..out.len()]);
            }
        }
    }
}

/// A weight row.
#[derive(Clone, Copy)]
struct Row<'a> {
    weights: &'a [u8],
    scales: &'a [u8],
}

/// The weights and scales of a span.
type Piece<'a> = (&'a [u8; SPAN_BYTES], &'a [u8; SPAN_SCALES]);

impl<'a> Row<'a> {
    /// Those of a whole span.
    #[inline(always)]
    fn piece(self, s: usize) -> Piece<'a> {
        (&self.weights.as_chunks().0[s], &self.scales.as_chunks().0[s])
    }
}

/// Adds the groups of a span, in the order of columns, to a total for each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_span<const N: usize>(
    totals: &mut [__m256; N],
    rows: [Piece; ROWS],
    x: [(&[i8; SPAN], &[i32; ROWS]); N],
    ahead: &mut [Ahead; 2],
) {
    let mut products = [[[0.0; ROWS]; ROWS]; N];
    for (r, (weights, scales)) in rows.into_iter().enumerate() {
        ahead[0].lines(SPAN_BYTES);
        ahead[1].lines(SPAN_SCALES);
        let scales = _mm256_castsi256_ps(load_half(scales));
        for i in 0..N {
            let product = _mm256_mul_ps(_mm256_cvtepi32_ps(sums(weights, x[i])), scales);
            store_half_floats(&mut products[i][r], product);
        }
    }
    for i in 0..N {
        let mut rows = [_mm256_setzero_ps(); ROWS];
        for r in 0..ROWS {
            rows[r] = load_half_floats(&products[i][r]);
        }
        for group in transpose(rows) {
            totals[i] = _mm256_add_ps(totals[i], group);
        }
    }
}

/// The same for what is behind the whole spans, followed by zeros: they meet activations that are zero too, and a sum that
/// is zero times a scale that is zero changes no total.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_tail<const N: usize>(
    totals: &mut [__m256; N],
    rows: &[Row; ROWS],
    whole: usize,
    x: &[Spans; N],
    ahead: &mut [Ahead; 2],
) {
    let padded: [([u8; SPAN_BYTES], [u8; SPAN_SCALES]); ROWS] = rows
        .map(|row| (zero_padded(&row.weights[whole * SPAN_BYTES..]), zero_padded(&row.scales[whole * SPAN_SCALES..])));
    let pieces = padded.each_ref().map(|(weights, scales)| (weights, scales));
    add_span(totals, pieces, x.each_ref().map(|x| x.span(whole)), ahead);
}

/// The sums of a span's groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn sums(weights: &[u8; SPAN_BYTES], (x, offsets): (&[i8; SPAN], &[i32; ROWS])) -> __m256i {
    let (weights, x) = (weights.as_chunks::<64>().0, x.as_chunks::<128>().0);
    let none = _mm512_setzero_si512();
    let sums = sums_of_64(sums_of_32(|k| dot_of_128(&weights[k], &x[k], none)));
    _mm256_add_epi32(sums, load_half_ints(offsets))
}

/// Element `c` of register `r` becomes element `r` of register `c`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn transpose(rows: [__m256; ROWS]) -> [__m256; ROWS] {
    let mut pairs = rows;
    for k in 0..4 {
        let (a, b) = (rows[2 * k], rows[2 * k + 1]);
        (pairs[2 * k], pairs[2 * k + 1]) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    }
    // Half `h` of `fours[4 * k + c]` has column `4 * h + c` of rows `4 * k..4 * k + 4`.
    let mut fours = pairs;
    for k in 0..2 {
        for half in 0..2 {
            let (a, b) = (pairs[4 * k + half], pairs[4 * k + 2 + half]);
            fours[4 * k + 2 * half] = _mm256_shuffle_ps::<0x44>(a, b);
            fours[4 * k + 2 * half + 1] = _mm256_shuffle_ps::<0xee>(a, b);
        }
    }
    let mut columns = fours;
    for c in 0..4 {
        let (a, b) = (fours[c], fours[4 + c]);
        columns[c] = _mm256_permute2f128_ps::<0x20>(a, b);
        columns[4 + c] = _mm256_permute2f128_ps::<0x31>(a, b);
    }
    columns
}

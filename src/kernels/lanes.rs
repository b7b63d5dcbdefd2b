//! Float loops written once and compiled for each instruction set: every table calls them from functions that carry its
//! target features. They use only operations that round the same everywhere, in a fixed order.

use super::quantized::{BLOCK, QuantRowMut};
use super::rows::{Cell, RowsAt, Table};

/// Lanes of every float reduction.
pub(super) const LANES: usize = 32;

/// The fixed tree: 16+16, 8+8, 4+4, 2+2, 1+1.
#[inline(always)]
pub(super) fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for j in 0..width {
            lanes[j] += lanes[j + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// Adds a last, partial chunk (fewer than `LANES` elements) to the lanes.
#[inline(always)]
pub(super) fn add_tail<C: Cell>(lanes: &mut [f32; LANES], a: &[f32], b: &[C]) {
    for ((lane, a), b) in lanes.iter_mut().zip(a).zip(b) {
        *lane = a.mul_add(b.float(), *lane);
    }
}

#[inline(always)]
pub(super) fn dot<C: Cell>(a: &[f32], b: &[C]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_chunks, a_tail) = a.as_chunks::<LANES>();
    let (b_chunks, b_tail) = b.as_chunks::<LANES>();
    for (a, b) in a_chunks.iter().zip(b_chunks) {
        for j in 0..LANES {
            lanes[j] = a[j].mul_add(b[j].float(), lanes[j]);
        }
    }
    add_tail(&mut lanes, a_tail, b_tail);
    reduce(lanes)
}

#[inline(always)]
pub(super) fn axpy<C: Cell>(a: f32, x: &[C], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = a.mul_add(x.float(), *y);
    }
}

#[inline(always)]
pub(super) fn dots(vectors: &[f32], rows: &RowsAt, out: &mut [f32]) {
    match rows.table() {
        Table::F32(cells) => dots_by(vectors, rows, cells, out, dot),
        Table::Bf16(cells) => dots_by(vectors, rows, cells, out, dot),
    }
}

/// The products of every vector with every row, each by `dot`.
#[inline(always)]
pub(super) fn dots_by<C: Cell>(
    vectors: &[f32],
    rows: &RowsAt,
    cells: &[C],
    out: &mut [f32],
    dot: impl Fn(&[f32], &[C]) -> f32,
) {
    if rows.is_empty() || rows.width() == 0 {
        return out.fill(0.0);
    }
    for (vector, out) in vectors.chunks_exact(rows.width()).zip(out.chunks_exact_mut(rows.len())) {
        for (r, out) in out.iter_mut().enumerate() {
            *out = dot(vector, rows.row(cells, r));
        }
    }
}

#[inline(always)]
pub(super) fn add_weighted(weights: &[f32], rows: &RowsAt, out: &mut [f32]) {
    match rows.table() {
        Table::F32(cells) => add_weighted_of(weights, rows, cells, out),
        Table::Bf16(cells) => add_weighted_of(weights, rows, cells, out),
    }
}

#[inline(always)]
fn add_weighted_of<C: Cell>(weights: &[f32], rows: &RowsAt, cells: &[C], out: &mut [f32]) {
    if rows.is_empty() || rows.width() == 0 {
        return;
    }
    for (weights, out) in weights.chunks_exact(rows.len()).zip(out.chunks_exact_mut(rows.width())) {
        let (chunks, tail) = out.as_chunks_mut::<LANES>();
        let start = chunks.len() * LANES;
        for (c, out) in chunks.iter_mut().enumerate() {
            // Kept out of memory while the rows pass.
            let mut sums = *out;
            for (r, weight) in weights.iter().enumerate() {
                let row = &rows.row(cells, r).as_chunks::<LANES>().0[c];
                for j in 0..LANES {
                    sums[j] = weight.mul_add(row[j].float(), sums[j]);
                }
            }
            *out = sums;
        }
        if !tail.is_empty() {
            weights.iter().enumerate().for_each(|(r, weight)| axpy(*weight, &rows.row(cells, r)[start..], tail));
        }
    }
}

/// `e^x` within 1.1 units in the last place; 0 below -104, infinity above 88.73, NaN for NaN.
///
/// `x = n ln 2 + r` with `|r| <= ln 2 / 2`; the polynomial approximates `(e^r - 1 - r) / r^2` at Chebyshev nodes. `2^n` is
/// applied in two factors, so that results below the normal range are rounded once.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    const LN2_HIGH: f32 = 0.693_145_75;
    const LN2_LOW: f32 = 1.428_606_8e-6;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves the integer in the low mantissa bits
    let x = if x < -104.0 { -104.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    let shifted = x.mul_add(LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = n.mul_add(-LN2_HIGH, x);
    let r = n.mul_add(-LN2_LOW, r);
    let q = 0.001_392_632_6_f32;
    let q = q.mul_add(r, 0.008_363_293);
    let q = q.mul_add(r, 0.041_666_552);
    let q = q.mul_add(r, 0.166_665_76);
    let q = q.mul_add(r, 0.5);
    let p = (r * r).mul_add(q, r) + 1.0;
    let exponent = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = exponent >> 1;
    p * power_of_two(half) * power_of_two(exponent.wrapping_sub(half))
}

#[inline(always)]
fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits((exponent.wrapping_add(127) as u32) << 23)
}

#[inline(always)]
pub(super) fn silu_mul(gate: &[f32], up: &mut [f32]) {
    for (up, gate) in up.iter_mut().zip(gate) {
        *up *= *gate / (1.0 + exp(-*gate));
    }
}

#[inline(always)]
pub(super) fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    let mut sums = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks_mut::<LANES>();
    for chunk in chunks {
        for j in 0..LANES {
            chunk[j] = exp(chunk[j] - shift);
            sums[j] += chunk[j];
        }
    }
    for (v, sum) in tail.iter_mut().zip(&mut sums) {
        *v = exp(*v - shift);
        *sum += *v;
    }
    reduce(sums)
}

/// Quantizes one row; see [`super::Quantized`] for the rule and the layouts.
#[inline(always)]
pub(super) fn quantize_row(x: &[f32], row: QuantRowMut) {
    let QuantRowMut { scale, sum, natural, halves, quarters, sums8, sums64 } = row;
    let max = absolute_max(x);
    let step = (max / 127.0).max(1e-12);
    let (filled, padding) = natural.split_at_mut(x.len());
    if max < f32::INFINITY {
        *scale = step;
        round(x, step, filled);
    } else {
        *scale = f32::NAN;
        filled.fill(0);
    }
    padding.fill(0);
    let (natural, _) = natural.as_chunks::<BLOCK>();
    let (halves, _) = halves.as_chunks_mut::<BLOCK>();
    let (quarters, _) = quarters.as_chunks_mut::<BLOCK>();
    let (sums8, _) = sums8.as_chunks_mut::<{ BLOCK / 8 }>();
    *sum = 0;
    for (((natural, halves), quarters), sums8) in natural.iter().zip(halves).zip(quarters).zip(&mut *sums8) {
        for (natural, halves) in natural.as_chunks::<128>().0.iter().zip(halves.as_chunks_mut::<128>().0) {
            for (i, pair) in natural.as_chunks::<2>().0.iter().enumerate() {
                halves[i] = pair[0];
                halves[64 + i] = pair[1];
            }
        }
        for (i, four) in natural.as_chunks::<4>().0.iter().enumerate() {
            for k in 0..4 {
                quarters[64 * k + i] = four[k];
            }
        }
        for (sum8, eight) in sums8.iter_mut().zip(natural.as_chunks::<8>().0) {
            let total: i32 = eight.iter().map(|q| i32::from(*q)).sum();
            *sum8 = -8 * total;
            *sum += total;
        }
    }
    for (sum64, eight) in sums64.iter_mut().zip(sums8.as_flattened().as_chunks::<8>().0) {
        *sum64 = eight.iter().sum();
    }
}

/// `q = clamp(round_half_even(x / step), -127, 127)`; no quotient may be NaN.
#[inline(always)]
fn round(x: &[f32], step: f32, q: &mut [i8]) {
    // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits, which is what casts to i8 would
    // do one by one. The bounds are integers, so that rounding first would make no difference.
    const ROUND: f32 = 12_582_912.0;
    for (q, v) in q.iter_mut().zip(x) {
        let level = *v / step;
        let level = if level > 127.0 { 127.0 } else { level };
        let level = if level < -127.0 { -127.0 } else { level };
        *q = (level + ROUND).to_bits() as i8;
    }
}

/// The largest `|v|`; infinity if there is a NaN, so that it cannot hide.
#[inline(always)]
fn absolute_max(x: &[f32]) -> f32 {
    // Without their sign, floats are ordered as their bits are, and NaN comes after infinity.
    let max = x.iter().map(|v| v.to_bits() & 0x7fff_ffff).fold(0, u32::max);
    f32::from_bits(max.min(f32::INFINITY.to_bits()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Error of `exp` against f64, in units of the last place of the correctly rounded result.
    fn exp_error_ulp(x: f32) -> f64 {
        let want = f64::from(x).exp();
        let nearest = (want as f32).abs();
        let ulp = f64::from(f32::from_bits(nearest.to_bits() + 1)) - f64::from(nearest);
        (f64::from(exp(x)) - want).abs() / ulp
    }

    #[test]
    fn exp_is_within_its_bound() {
        // A prime step visits every exponent and about 20 million of the 2.2 billion floats with a finite result.
        let mut worst = (0.0, 0.0);
        for sign in [0, 1 << 31] {
            for bits in (0..104f32.to_bits()).step_by(109) {
                let x = f32::from_bits(bits | sign);
                if x <= 88.72 {
                    let error = exp_error_ulp(x);
                    worst = if error > worst.0 { (error, x) } else { worst };
                }
            }
        }
        assert!(worst.0 < 1.1, "{} ulp at {:e}", worst.0, worst.1);
    }

    #[test]
    fn exp_at_its_ends() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-104.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert!(exp(f32::NAN).is_nan());
    }
}

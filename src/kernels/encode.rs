//! Quantizers of weights: symmetric, per row or per group, rounding half to even.

use super::format::{Format, INT3_GROUP, INT3_GROUP_BYTES};
use crate::limits::WEIGHT_BELOW;

/// Why a row could not be encoded.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum EncodeError {
    /// A weight is NaN, infinite, or not below [`WEIGHT_BELOW`].
    #[error("column {index} is {value}, which no quantized format holds")]
    NotFinite {
        /// Column of the weight.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// The format is not one of the integer formats.
    #[error("{format} has no encoder")]
    NoEncoder {
        /// The format asked for.
        format: Format,
    },
}

/// Encodes one row of `cols` weights. `data` is `[format.row_bytes(cols)]`; `scales` has one element, or one per group.
///
/// Per scale, `scale = max(max|w| / qmax, 1e-8)` with qmax 127, 7 or 1 for 8, 4 or 2 bits, and
/// `q = clamp(round_half_even(w / scale), -qmax - 1, qmax)`. Of 3 bits the largest weight is level -4, so that
/// `scale = -w / 4` has the other sign: with 8 levels in use and not 7 the error is a quarter smaller. Fields past the
/// row hold 0. Nothing is written when the row is refused. Allocates nothing. Panics when the lengths disagree.
pub fn encode(
    format: Format,
    cols: usize,
    row: &[f32],
    data: &mut [u8],
    scales: &mut [f32],
) -> Result<(), EncodeError> {
    assert_eq!(row.len(), cols, "weights of a row");
    quantized(format, row, data, scales)
}

/// As [`encode`]: what every table of kernels compiles for its instruction set.
#[inline(always)]
pub(super) fn quantized(format: Format, row: &[f32], data: &mut [u8], scales: &mut [f32]) -> Result<(), EncodeError> {
    let cols = row.len();
    let group = match format {
        Format::Int8Row | Format::Int4Row | Format::Int2Row => cols,
        Format::Int4Group { group } => usize::from(group),
        Format::Int3Group => INT3_GROUP,
        Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block | Format::Nvfp4 => {
            return Err(EncodeError::NoEncoder { format });
        }
    };
    assert_eq!(data.len(), format.row_bytes(cols), "bytes of an encoded row");
    assert_eq!(scales.len(), format.scale_count(1, cols), "scales of an encoded row");
    if largest(row) >= WEIGHT_BELOW.to_bits() {
        let index = row.iter().position(|w| w.to_bits() & MAGNITUDE >= WEIGHT_BELOW.to_bits()).unwrap_or(0);
        return Err(EncodeError::NotFinite { index, value: row[index] });
    }
    if cols == 0 {
        scales.fill(1e-8);
        return Ok(());
    }
    let groups = scales.iter_mut().zip(row.chunks(group));
    match format {
        Format::Int8Row => groups.zip(data.chunks_mut(group)).for_each(|((scale, row), data)| {
            *scale = scale_of(row, 127.0);
            for (byte, &w) in data.iter_mut().zip(row) {
                *byte = level(w, *scale, 127.0) as u8;
            }
        }),
        Format::Int2Row => groups.zip(data.chunks_mut(group.div_ceil(4))).for_each(|((scale, row), data)| {
            *scale = scale_of(row, 1.0);
            fields(row, *scale, 1.0, data, 16, pack::<4, 2>);
        }),
        Format::Int3Group => groups.zip(data.chunks_mut(INT3_GROUP_BYTES)).for_each(|((scale, row), data)| {
            let most = largest(row);
            let first = row.iter().find(|w| w.to_bits() & MAGNITUDE == most).copied().unwrap_or(0.0);
            *scale = if first.abs() > 4e-8 { first / -4.0 } else { 1e-8 };
            fields(row, *scale, 3.0, data, INT3_GROUP_BYTES, |codes, data| {
                let (low, high) = data.split_at_mut(INT3_GROUP / 4);
                pack::<4, 2>(codes, low);
                pack::<8, 1>(&codes.map(|code| code >> 2), high);
            });
        }),
        _ => groups.zip(data.chunks_mut(group.div_ceil(2))).for_each(|((scale, row), data)| {
            *scale = scale_of(row, 7.0);
            fields(row, *scale, 7.0, data, 32, pack::<2, 4>);
        }),
    }
    Ok(())
}

/// Weights whose fields are made together, on the stack. Groups have whole bytes, and 3-bit ones are one block.
const BLOCK: usize = INT3_GROUP;

/// Every bit of a float but its sign: of two such the larger number is the larger magnitude, infinity and NaN above all.
const MAGNITUDE: u32 = !(1 << 31);

/// The magnitude that is largest, as bits.
#[inline(always)]
fn largest(row: &[f32]) -> u32 {
    row.iter().fold(0, |largest, w| largest.max(w.to_bits() & MAGNITUDE))
}

#[inline(always)]
fn scale_of(row: &[f32], limit: f32) -> f32 {
    (f32::from_bits(largest(row)) / limit).max(1e-8)
}

/// The level that a weight is nearest to, halves to the even one.
#[inline(always)]
fn level(w: f32, scale: f32, limit: f32) -> i32 {
    // Adding 1.5 * 2^23 rounds half to even and leaves the whole number in the low bits; unlike `round_ties_even` it is no
    // library call on the baseline instruction set.
    const ROUND: f32 = 12_582_912.0;
    ((w / scale).clamp(-limit - 1.0, limit) + ROUND).to_bits() as i32 - ROUND.to_bits() as i32
}

/// Packs the levels of `row`, with an offset that makes them unsigned, block by block: `bytes` of `data` each.
#[inline(always)]
fn fields(row: &[f32], scale: f32, limit: f32, data: &mut [u8], bytes: usize, pack: impl Fn(&[u8; BLOCK], &mut [u8])) {
    let offset = limit as i32 + 1;
    for (row, data) in row.chunks(BLOCK).zip(data.chunks_mut(bytes)) {
        let mut codes = [offset as u8; BLOCK];
        for (code, &w) in codes.iter_mut().zip(row) {
            *code = (level(w, scale, limit) + offset) as u8;
        }
        pack(&codes, data);
    }
}

/// Each byte holds the lowest `BITS` bits of `COUNT` codes.
#[inline(always)]
fn pack<const COUNT: usize, const BITS: usize>(codes: &[u8; BLOCK], data: &mut [u8]) {
    let mask = (1u8 << BITS) - 1;
    for (byte, codes) in data.iter_mut().zip(codes.as_chunks::<COUNT>().0) {
        *byte = (0..COUNT).fold(0, |byte, k| byte | (codes[k] & mask) << (BITS * k));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn int8_keeps_the_largest_weight_at_127() {
        let mut data = [0; 4];
        let mut scales = [0.0];
        encode(Format::Int8Row, 4, &[-2.54, 1.27, 0.01, 0.0], &mut data, &mut scales).unwrap();
        assert_eq!(scales, [2.54 / 127.0]);
        assert_eq!(data.map(|b| b as i8), [-127, 64, 0, 0]);
    }

    #[test]
    fn halves_round_to_the_even_level() {
        // absmax 7 makes the scale 1: 0.5 -> 0, 1.5 -> 2, -2.5 -> -2, 7 -> 7; nibbles carry an offset of 8.
        let mut data = [0; 3];
        let mut scales = [0.0];
        encode(Format::Int4Row, 5, &[0.5, 1.5, -2.5, 7.0, -7.0], &mut data, &mut scales).unwrap();
        assert_eq!(scales, [1.0]);
        assert_eq!(data, [8 | 10 << 4, 6 | 15 << 4, 1 | 8 << 4]);
    }

    #[test]
    fn int2_has_levels_minus_one_to_one_at_this_scale() {
        let mut data = [0; 2];
        let mut scales = [0.0];
        encode(Format::Int2Row, 5, &[1.0, -1.0, 0.5, 0.75, -0.75], &mut data, &mut scales).unwrap();
        assert_eq!(scales, [1.0]);
        assert_eq!(data, [3 | 1 << 2 | 2 << 4 | 3 << 6, 1 | 2 << 2 | 2 << 4 | 2 << 6]);
    }

    #[test]
    fn int3_keeps_two_low_bits_apart_from_the_high_one_and_fills_its_last_group() {
        // The largest, the first of two alike, is -4: the scale is -3/4 in the first group and -6/4 in the second. Fields
        // carry an offset of 4.
        let mut row = [0.0f32; 66];
        (row[0], row[1], row[3], row[9], row[63], row[64], row[65]) = (3.0, -3.0, 1.5, -0.5, -2.0, 6.0, -1.0);
        let (mut data, mut scales) = ([0; 48], [0.0; 2]);
        encode(Format::Int3Group, 66, &row, &mut data, &mut scales).unwrap();
        assert_eq!(scales, [-0.75, -1.5]);
        // Fields 0, 7 (4 is beyond the last level), 4, 2, ..., 5 (two thirds of a step), ..., 7; then 0, 5, 4, ...
        let mut expected = [0; 48];
        (expected[0], expected[2], expected[15], expected[24]) = (3 << 2 | 2 << 6, 1 << 2, 3 << 6, 1 << 2);
        expected[16..24].copy_from_slice(&[0b1111_0110, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        expected[40..].copy_from_slice(&[0b1111_1110, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(data, expected);
    }

    #[test]
    fn groups_have_their_own_scales_and_the_last_may_be_short() {
        let mut row = [0.0f32; 18];
        row[3] = 7.0;
        row[17] = 14.0;
        let mut data = [0; 9];
        let mut scales = [0.0; 2];
        encode(Format::Int4Group { group: 16 }, 18, &row, &mut data, &mut scales).unwrap();
        assert_eq!(scales, [1.0, 2.0]);
        assert_eq!(data, [0x88, 0xf8, 0x88, 0x88, 0x88, 0x88, 0x88, 0x88, 0xf8]);
    }

    #[test]
    fn zeros_get_the_smallest_scale() {
        let mut data = [0; 1];
        let mut scales = [0.0];
        encode(Format::Int8Row, 1, &[0.0], &mut data, &mut scales).unwrap();
        assert_eq!((data, scales), ([0], [1e-8]));
    }

    #[test]
    fn a_weight_that_is_not_finite_is_named_and_nothing_written() {
        let mut data = [77; 2];
        let mut scales = [5.0];
        let refused = encode(Format::Int4Row, 3, &[0.0, f32::INFINITY, 1.0], &mut data, &mut scales);
        assert_eq!(refused, Err(EncodeError::NotFinite { index: 1, value: f32::INFINITY }));
        assert_eq!((data, scales), ([77, 77], [5.0]));
        let none = encode(Format::Bf16, 1, &[0.0], &mut data, &mut scales);
        assert_eq!(none, Err(EncodeError::NoEncoder { format: Format::Bf16 }));
    }
}

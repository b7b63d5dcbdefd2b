//! What FP8 with block scales means, told a second time, and the decoder held against it before it is trusted with a
//! checkpoint: a wrong table or a scale of the wrong block would ruin every weight and show in none.

use crate::checkpoint::error::{CheckpointError, Result};
use crate::kernels::{FP8_BLOCK, Format, Kernels, MatrixSpec, WeightRef};

/// Decodes every code under every scale of a matrix with ragged last blocks and compares it with the definition.
pub(crate) fn fp8(kernels: &Kernels) -> Result<()> {
    fp8_with(&|weights, row, values| kernels.decode_row(weights, row, values))
}

/// Decodes one row.
type Decode<'a> = &'a dyn Fn(&WeightRef, usize, &mut [f32]);

fn fp8_with(decode: Decode) -> Result<()> {
    let (rows, cols) = (FP8_BLOCK + 2, 2 * FP8_BLOCK + 3);
    let blocks = cols.div_ceil(FP8_BLOCK);
    let code = |row: usize, col: usize| (row * 7 + col) as u8;
    // No two alike, and powers of two: then the product is exact, and there is one right value.
    let scale = |row: usize, col: usize| 2f32.powi((row / FP8_BLOCK * blocks + col / FP8_BLOCK) as i32 - 3);
    let bytes: Vec<u8> = (0..rows * cols).map(|at| code(at / cols, at % cols)).collect();
    let block_rows = rows.div_ceil(FP8_BLOCK);
    let scales: Vec<u8> = (0..block_rows * blocks)
        .flat_map(|block| scale(block / blocks * FP8_BLOCK, block % blocks * FP8_BLOCK).to_le_bytes())
        .collect();
    let weights = WeightRef::new(MatrixSpec { format: Format::Fp8Block, rows, cols }, &bytes, &scales);
    let mut values = vec![0.0; cols];
    for row in 0..rows {
        decode(&weights, row, &mut values);
        for (col, &found) in values.iter().enumerate() {
            let (code, scale) = (code(row, col), scale(row, col));
            let expected = e4m3(code) * scale;
            if found.to_bits() != expected.to_bits() && !(found.is_nan() && expected.is_nan()) {
                return Err(CheckpointError::SelfTest { code, scale, expected, found });
            }
        }
    }
    Ok(())
}

/// Value of an E4M3 code: a sign, 4 bits of exponent with bias 7, 3 of fraction; no infinity, and one NaN a sign.
fn e4m3(code: u8) -> f32 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => f32::NAN,
        (0, _) => fraction / 8.0 * 2f32.powi(-6),
        _ => (1.0 + fraction / 8.0) * 2f32.powi(exponent - 7),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_mean_what_the_format_says() {
        // From the table of the published format.
        let known = [
            (0x00, 0.0),
            (0x01, 0.001953125),
            (0x08, 0.015625),
            (0x38, 1.0),
            (0x7e, 448.0),
            (0xc0, -2.0),
            (0xfe, -448.0),
        ];
        for (code, value) in known {
            assert_eq!(e4m3(code), value);
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        Kernels::all_available().into_iter().for_each(|kernels| fp8(kernels).unwrap());
    }

    #[test]
    fn a_decoder_that_is_wrong_in_one_code_or_one_block_is_noticed() {
        let off = |weights: &WeightRef, row: usize, values: &mut [f32]| {
            Kernels::best().decode_row(weights, row, values);
            values.iter_mut().filter(|value| **value == 448.0 / 8.0).for_each(|value| *value = 480.0 / 8.0);
        };
        let error = fp8_with(&off).unwrap_err();
        assert!(matches!(error, CheckpointError::SelfTest { code: 0x7e, expected: 56.0, found: 60.0, .. }), "{error}");
        // The scales of the first row of blocks for every row: right but for the last two.
        let first_blocks = |weights: &WeightRef, row: usize, values: &mut [f32]| {
            Kernels::best().decode_row(weights, row, values);
            if row >= FP8_BLOCK {
                values.iter_mut().for_each(|value| *value /= 8.0);
            }
        };
        assert!(matches!(fp8_with(&first_blocks), Err(CheckpointError::SelfTest { .. })));
        // And without any.
        let unscaled = |_: &WeightRef, row: usize, values: &mut [f32]| {
            values.iter_mut().enumerate().for_each(|(col, value)| *value = e4m3((row * 7 + col) as u8));
        };
        assert!(matches!(fp8_with(&unscaled), Err(CheckpointError::SelfTest { .. })));
    }
}

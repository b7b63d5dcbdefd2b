//! A product on tiles held against the scalar one, before any is believed.

use std::ops::Range;

use super::missing::Missing;
use crate::kernels::format::{Format, MatrixSpec, WeightRef};
use crate::kernels::panel::{Panel, Put, Tile, pack, tiles_of};
use crate::kernels::quantized::{QuantRow, padded};
use crate::kernels::scalar;

/// More than two tiles of weights and of activations, and more steps than are unpacked at once, the last a short one: every
/// register is used, and every way to them.
const ROWS: usize = 37;
const COLS: usize = 9 * 64 + 5;
const BATCH: usize = 41;

/// What multiplies weight rows.
pub(super) type Product<'a> = &'a dyn Fn(&WeightRef, Range<usize>, &Panel, Put);

/// Multiplies a matrix of each format by `product`, which is given a whole matrix and a panel.
pub(super) fn run(product: Product) -> Result<(), Missing> {
    let mut state = 1u64;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let stride = padded(COLS);
    let natural: Vec<i8> =
        (0..BATCH * stride).map(|i| if i % stride < COLS { (byte() as i8).max(-127) } else { 0 }).collect();
    let row_scales: Vec<f32> = (0..BATCH).map(|_| f32::from(byte()) / 7.0).collect();
    let mut tiles = vec![Tile::ZERO; tiles_of(BATCH, COLS)];
    pack(&natural, COLS, &mut tiles);
    let panel = Panel::new(&row_scales, COLS, &tiles);
    for format in [Format::Int8Row, Format::Int4Row, Format::Int4Group { group: 64 }] {
        let spec = MatrixSpec { format, rows: ROWS, cols: COLS };
        let data: Vec<u8> = (0..spec.data_bytes()).map(|_| byte()).collect();
        let scales: Vec<u8> =
            (0..format.scale_count(ROWS, COLS)).flat_map(|_| (f32::from(byte()) / 900.0).to_le_bytes()).collect();
        let w = WeightRef::new(spec, &data, &scales);
        let mut got = vec![f32::NAN; BATCH * ROWS];
        product(&w, 0..ROWS, &panel, &mut |i, first, values| {
            got[i * ROWS + first..][..values.len()].copy_from_slice(values);
        });
        for (i, got) in got.chunks_exact(ROWS).enumerate() {
            let natural = &natural[i * stride..][..stride];
            // The scalar kernel reads columns in their natural order, and neither other orders nor sums.
            let x =
                QuantRow { scale: row_scales[i], sum: 0, natural, halves: &[], quarters: &[], sums8: &[], sums64: &[] };
            let mut want = [0.0; ROWS];
            scalar::integer(&w, 0..ROWS, &[x], &mut want);
            if got.iter().zip(&want).any(|(got, want)| got.to_bits() != want.to_bits()) {
                return Err(Missing::Wrong);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::model::product_over_model;
    use super::*;

    #[test]
    fn a_right_product_passes_and_one_wrong_bit_does_not() {
        assert_eq!(run(&product_over_model), Ok(()));
        // Each output in turn would be long; the first, the last, and one in between.
        for wrong in [(0, 0), (17, 20), (BATCH - 1, ROWS - 1)] {
            let product = |w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put| {
                product_over_model(w, rows, x, &mut |i, first, values| {
                    let mut values = values.to_vec();
                    if i == wrong.0 && (first..first + values.len()).contains(&wrong.1) {
                        values[wrong.1 - first] = values[wrong.1 - first].next_up();
                    }
                    put(i, first, &values);
                });
            };
            assert_eq!(run(&product), Err(Missing::Wrong), "{wrong:?}");
        }
        let unwritten = |_: &WeightRef, _: Range<usize>, _: &Panel, _: Put| {};
        assert_eq!(run(&unwritten), Err(Missing::Wrong));
    }
}

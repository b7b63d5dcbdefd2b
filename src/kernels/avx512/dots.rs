//! The loops of the exact path, stamped for each set of instructions that decodes weights: what a function calls is only
//! inlined where it asks for no more than that function does.

use crate::kernels::lanes::LANES;

/// Columns that are decoded together: two turns of the 32 lanes.
pub(super) const UNIT: usize = 2 * LANES;

/// Rows of activations wider than this take so much of the first-level cache, which weights pass through, that they no
/// longer stay in it.
pub(super) const WIDE: usize = 2048;

/// Units of a column block: 8 rows of activations that wide, and the weights they meet, fit the first-level cache.
pub(super) const BLOCK_UNITS: usize = 8;

/// The activations of a block, unit by unit, from the start of a cache line on.
#[repr(align(64))]
pub(super) struct Packed<const N: usize>(pub [[[f32; UNIT]; N]; BLOCK_UNITS]);

/// Defines `dots`.
macro_rules! stamp_dots {
    ($features:literal) => {
        /// `tile[i][r] = W[rows.start + r] . x[i]`, with `decode(row)(unit)` the columns of a unit.
        #[inline]
        #[target_feature(enable = $features)]
        fn dots<R, D>(w: &WeightRef, rows: Range<usize>, x: &[f32], tile: &mut [f32], decode: R)
        where
            R: Fn(usize) -> D,
            D: Fn(usize) -> [__m512; 4],
        {
            match tile.len() / rows.len() {
                1 if w.cols() <= WIDE && w.format() != Format::Fp8Block => {
                    rows_at_once::<1, 1, _, _>(w, rows, x, tile, decode);
                }
                1 => rows_at_once::<4, 1, _, _>(w, rows, x, tile, decode),
                2 => rows_at_once::<4, 2, _, _>(w, rows, x, tile, decode),
                3 | 4 => blocks::<2, 4, 4, _, _>(w, rows, x, tile, decode),
                _ => blocks::<1, 8, 8, _, _>(w, rows, x, tile, decode),
            }
        }

        /// `W` weight rows at a time share the loads of `N` activation rows.
        #[inline]
        #[target_feature(enable = $features)]
        fn rows_at_once<const W: usize, const N: usize, R, D>(
            w: &WeightRef,
            rows: Range<usize>,
            x: &[f32],
            tile: &mut [f32],
            decode: R,
        ) where
            R: Fn(usize) -> D,
            D: Fn(usize) -> [__m512; 4],
        {
            let (cols, count) = (w.cols(), rows.len());
            let x: [&[f32]; N] = std::array::from_fn(|i| &x[i * cols..][..cols]);
            let units = cols / UNIT;
            let x_units = x.map(|x| &x.as_chunks::<UNIT>().0[..units]);
            let mut ahead = Ahead::new(w, rows.start, W);
            for first in rows.clone().step_by(W) {
                // Rows past the last one repeat it.
                let mut places = [rows.end - 1; W];
                let mut decoders = [const { None }; W];
                for r in 0..W {
                    places[r] = (first + r).min(rows.end - 1);
                    decoders[r] = Some(decode(places[r]));
                }
                let mut lanes = [[[_mm512_setzero_ps(); 2]; N]; W];
                for u in 0..units {
                    if W > 1 {
                        ahead.step(W);
                    }
                    for r in 0..W {
                        let Some(decode) = &decoders[r] else { unreachable!() };
                        let weights = decode(u);
                        for i in 0..N {
                            add_unit(&mut lanes[r][i], weights, &x_units[i][u]);
                        }
                    }
                }
                // A copy: what is lent to a function does not stay in registers.
                let mut sums = lanes;
                for r in 0..W {
                    if units * UNIT < cols {
                        add_tail(w, places[r], &x, &mut sums[r]);
                    }
                    for i in 0..N {
                        tile[i * count + places[r] - rows.start] = reduce(sums[r][i]);
                    }
                }
            }
        }

        /// `G` times `W` weight rows pass over a block of columns before the next, whose activations are copied to lie
        /// together: rows of a batch that lie a multiple of a page apart would push each other out of the first-level
        /// cache. `N` is at least the number of activation rows; those it exceeds repeat the last one.
        #[inline]
        #[target_feature(enable = $features)]
        fn blocks<const W: usize, const N: usize, const G: usize, R, D>(
            w: &WeightRef,
            rows: Range<usize>,
            x: &[f32],
            tile: &mut [f32],
            decode: R,
        ) where
            R: Fn(usize) -> D,
            D: Fn(usize) -> [__m512; 4],
        {
            let (cols, count) = (w.cols(), rows.len());
            let batch = tile.len() / count;
            let x: [&[f32]; N] = std::array::from_fn(|i| &x[i.min(batch - 1) * cols..][..cols]);
            let units = cols / UNIT;
            let mut packed = Packed([[[0.0; UNIT]; N]; BLOCK_UNITS]);
            let packed = &mut packed.0;
            for first in rows.clone().step_by(G * W) {
                let groups = (rows.end - first).min(G * W).div_ceil(W);
                // Rows past the last one repeat it.
                let place = |g: usize, r: usize| (first + g * W + r).min(rows.end - 1);
                let mut ahead = Ahead::new(w, first, G * W);
                let mut sums = [[[[_mm512_setzero_ps(); 2]; N]; W]; G];
                for start in (0..units).step_by(BLOCK_UNITS) {
                    let block = BLOCK_UNITS.min(units - start);
                    for (i, x) in x.iter().enumerate() {
                        let x = &x.as_chunks::<UNIT>().0[start..][..block];
                        for (packed, x) in packed.iter_mut().zip(x) {
                            packed[i] = *x;
                        }
                    }
                    for (g, sums) in sums[..groups].iter_mut().enumerate() {
                        let decode: [D; W] = std::array::from_fn(|r| decode(place(g, r)));
                        let mut lanes = *sums;
                        for (u, x) in (start..).zip(&packed[..block]) {
                            ahead.step(W);
                            for r in 0..W {
                                let weights = decode[r](u);
                                for i in 0..N {
                                    add_unit(&mut lanes[r][i], weights, &x[i]);
                                }
                            }
                        }
                        *sums = lanes;
                    }
                }
                for (g, sums) in sums[..groups].iter_mut().enumerate() {
                    for r in 0..W {
                        add_tail(w, place(g, r), &x, &mut sums[r]);
                        for i in 0..batch {
                            tile[i * count + place(g, r) - rows.start] = reduce(sums[r][i]);
                        }
                    }
                }
            }
        }
    };
}
pub(super) use stamp_dots;

//! The loop over tiles, whoever carries out their instructions.
//!
//! Two tiles of weights meet two of activations in four of sums, so that every tile that is loaded is used twice. Weights
//! become signed bytes once for all the activations of a pass, in a buffer that stays in the first-level cache. They are the
//! left operand, whose rows stay as they lie; what the hardware wants regrouped are the activations, once for a whole
//! matrix.

use std::ops::Range;

use super::tiles::{Sums, Tiles};
use crate::kernels::format::{Format, WeightRef};
use crate::kernels::groups::zero_padded;
use crate::kernels::panel::{Bytes, Panel, Put, TILE_COLS, TILE_ROWS};

/// Weight rows of a block: two tiles.
const BLOCK_ROWS: usize = 2 * TILE_ROWS;

/// Steps of 64 columns whose weights are unpacked at once.
const STEPS: usize = 8;

/// Pairs of activation tiles of a pass. The next pass unpacks the weights again.
const PAIRS: usize = 4;

/// Groups whose sums wait in memory, so that their outputs are loaded and stored once for all of them.
const GROUPS: usize = 4;

/// A block of weights: per step, two tiles.
type Unpacked = [[Bytes; 2]; STEPS];

/// A block of weights times a pair of activation tiles: the upper 16 weight rows, then the lower, each with the first 16
/// rows of activations and then the second.
type Square = [[Sums; 2]; 2];

const ZERO_SQUARE: Square = [[Sums::ZERO; 2]; 2];

/// As [`Square`], scaled.
type Floats = [[[[f32; TILE_ROWS]; TILE_ROWS]; 2]; 2];

const ZERO_FLOATS: Floats = [[[[0.0; TILE_ROWS]; TILE_ROWS]; 2]; 2];

/// Whether [`product`] multiplies matrices of this format.
pub(super) fn takes(format: Format) -> bool {
    match format {
        Format::Int8Row | Format::Int4Row => true,
        // Groups are whole steps, and what is unpacked at once is whole groups.
        Format::Int4Group { group } => {
            usize::from(group).is_multiple_of(TILE_COLS) && (STEPS * TILE_COLS).is_multiple_of(group.into())
        }
        _ => false,
    }
}

/// Weight rows `rows` times every row of `x`, in integers.
#[inline(always)]
pub(super) fn product<T: Tiles>(tiles: &mut T, w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    if w.format().is_grouped() {
        grouped(tiles, w, rows, x, put);
    } else {
        row_scaled(tiles, w, rows, x, put);
    }
}

/// Formats with one scale a row: the sums of a pass wait in memory while other pairs have their turn. Those of a pass that
/// is one pair stay in their registers.
#[inline(always)]
fn row_scaled<T: Tiles>(tiles: &mut T, w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    let mut weights: Unpacked = [[Bytes::ZERO; 2]; STEPS];
    let mut squares = [ZERO_SQUARE; PAIRS];
    for block in blocks(rows) {
        let scale = |m| if block.start + m < block.end { w.scale(block.start + m) } else { 0.0 };
        let scales: [f32; BLOCK_ROWS] = std::array::from_fn(scale);
        for runs in passes(x) {
            let alone = runs.len() <= 2;
            for step in (0..x.steps()).step_by(STEPS) {
                let count = STEPS.min(x.steps() - step);
                unpack(w, &block, step, &mut weights[..count]);
                for (run, square) in runs.clone().step_by(2).zip(&mut squares) {
                    if step == 0 {
                        zero(tiles);
                    } else if !alone {
                        load(tiles, square);
                    }
                    dots(tiles, &weights[..count], x, run, step);
                    if !alone || step + count == x.steps() {
                        store(tiles, square);
                    }
                }
            }
            for (run, square) in runs.step_by(2).zip(&squares) {
                for_outputs(x, run, &block, put, |half, n, m| {
                    square[m / TILE_ROWS][half].0[m % TILE_ROWS][n] as f32 * scales[m]
                });
            }
        }
    }
}

/// Formats with one scale a group of whole steps. A group's sum is complete before it is scaled and added to those before
/// it, as the definition of the integer path wants.
#[inline(always)]
fn grouped<T: Tiles>(tiles: &mut T, w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    let group_steps = w.format().group(w.cols()) / TILE_COLS;
    let mut weights: Unpacked = [[Bytes::ZERO; 2]; STEPS];
    let mut squares = [ZERO_SQUARE; GROUPS];
    for block in blocks(rows) {
        for runs in passes(x) {
            let mut outputs = [ZERO_FLOATS; PAIRS];
            for step in (0..x.steps()).step_by(STEPS) {
                let count = STEPS.min(x.steps() - step);
                unpack(w, &block, step, &mut weights[..count]);
                for (run, outputs) in runs.clone().step_by(2).zip(&mut outputs) {
                    for first in (0..count).step_by(GROUPS * group_steps) {
                        let some = &weights[first..count.min(first + GROUPS * group_steps)];
                        for (g, (weights, square)) in some.chunks(group_steps).zip(&mut squares).enumerate() {
                            zero(tiles);
                            dots(tiles, weights, x, run, step + first + g * group_steps);
                            store(tiles, square);
                        }
                        let squares = &squares[..some.len().div_ceil(group_steps)];
                        add_scaled(w, &block, (step + first) / group_steps, squares, outputs);
                    }
                }
            }
            for (run, outputs) in runs.step_by(2).zip(&outputs) {
                for_outputs(x, run, &block, put, |half, n, m| outputs[m / TILE_ROWS][half][m % TILE_ROWS][n]);
            }
        }
    }
}

/// The blocks of some weight rows; the last may be short.
#[inline(always)]
fn blocks(rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(BLOCK_ROWS).map(move |first| first..end.min(first + BLOCK_ROWS))
}

/// The runs of activation rows, as many as a pass takes at a time.
#[inline(always)]
fn passes(x: &Panel) -> impl Iterator<Item = Range<usize>> {
    let runs = x.runs();
    (0..runs).step_by(2 * PAIRS).map(move |first| first..runs.min(first + 2 * PAIRS))
}

#[inline(always)]
fn zero<T: Tiles>(tiles: &mut T) {
    tiles.zero::<0>();
    tiles.zero::<1>();
    tiles.zero::<2>();
    tiles.zero::<3>();
}

#[inline(always)]
fn load<T: Tiles>(tiles: &mut T, square: &Square) {
    tiles.load_sums::<0>(&square[0][0]);
    tiles.load_sums::<1>(&square[0][1]);
    tiles.load_sums::<2>(&square[1][0]);
    tiles.load_sums::<3>(&square[1][1]);
}

#[inline(always)]
fn store<T: Tiles>(tiles: &mut T, square: &mut Square) {
    tiles.store::<0>(&mut square[0][0]);
    tiles.store::<1>(&mut square[0][1]);
    tiles.store::<2>(&mut square[1][0]);
    tiles.store::<3>(&mut square[1][1]);
}

/// Adds the products of consecutive steps, from `step` on, with the activations of `run` and the run after it, if any.
#[inline(always)]
fn dots<T: Tiles>(tiles: &mut T, weights: &[[Bytes; 2]], x: &Panel, run: usize, step: usize) {
    for (step, [upper, lower]) in (step..).zip(weights) {
        tiles.load_bytes::<4>(upper);
        tiles.load_bytes::<5>(lower);
        tiles.load_bytes::<6>(x.tile(run, step));
        tiles.dot::<0, 4, 6>();
        tiles.dot::<2, 5, 6>();
        if run + 1 < x.runs() {
            tiles.load_bytes::<7>(x.tile(run + 1, step));
            tiles.dot::<1, 4, 7>();
            tiles.dot::<3, 5, 7>();
        }
    }
}

/// `outputs = outputs + (group sum as f32 * group scale)` for the groups of `squares`, in their order. The first of them is
/// number `first` of its row.
#[inline(always)]
fn add_scaled(w: &WeightRef, block: &Range<usize>, first: usize, squares: &[Square], outputs: &mut Floats) {
    let groups = w.cols().div_ceil(w.format().group(w.cols()));
    for (m, row) in block.clone().enumerate() {
        for half in 0..2 {
            let outputs = &mut outputs[m / TILE_ROWS][half][m % TILE_ROWS];
            let mut total = *outputs;
            for (g, square) in squares.iter().enumerate() {
                let scale = w.scale(row * groups + first + g);
                for (total, sum) in total.iter_mut().zip(square[m / TILE_ROWS][half].0[m % TILE_ROWS]) {
                    *total += sum as f32 * scale;
                }
            }
            *outputs = total;
        }
    }
}

/// Puts what `value` gives, times the activation's scale, for every activation row of `run` and the run after it, if any.
/// `value` takes which of the two, the row in it, and the weight row in its block.
#[inline(always)]
fn for_outputs(x: &Panel, run: usize, block: &Range<usize>, put: Put, value: impl Fn(usize, usize, usize) -> f32) {
    for (i, scale) in x.scales.iter().enumerate().skip(run * TILE_ROWS).take(2 * TILE_ROWS) {
        let (half, n) = (i / TILE_ROWS - run, i % TILE_ROWS);
        let values: [f32; BLOCK_ROWS] = std::array::from_fn(|m| value(half, n, m) * scale);
        put(i, block.start, &values[..block.len()]);
    }
}

/// Signed bytes of consecutive steps of a block. What there is of rows and columns past its ends meets nothing or zeros.
#[inline(always)]
fn unpack(w: &WeightRef, block: &Range<usize>, step: usize, to: &mut [[Bytes; 2]]) {
    for (m, row) in block.clone().enumerate() {
        let lines = to.iter_mut().map(|tiles| &mut tiles[m / TILE_ROWS].0[m % TILE_ROWS]);
        if w.format() == Format::Int8Row {
            for (line, bytes) in lines.zip(w.row(row)[step * TILE_COLS..].chunks(TILE_COLS)) {
                *line = whole::<TILE_COLS>(bytes).map(|byte| byte as i8);
            }
        } else {
            for (line, bytes) in lines.zip(w.row(row)[step * TILE_COLS / 2..].chunks(TILE_COLS / 2)) {
                *line = levels(&whole(bytes));
            }
        }
    }
}

/// A chunk, followed by zeros where it is the last, partial one.
#[inline(always)]
fn whole<const N: usize>(chunk: &[u8]) -> [u8; N] {
    chunk.first_chunk().copied().unwrap_or_else(|| zero_padded(chunk))
}

/// What nibbles mean, in the order of columns.
#[inline(always)]
fn levels(nibbles: &[u8; TILE_COLS / 2]) -> [i8; TILE_COLS] {
    let mut levels = [0; TILE_COLS];
    for (pair, byte) in levels.as_chunks_mut::<2>().0.iter_mut().zip(nibbles) {
        *pair = [(byte & 15) as i8 - 8, (byte >> 4) as i8 - 8];
    }
    levels
}

//! Matrix times activations, divided among a team by output rows.
#![allow(unsafe_code)]

use std::ops::Range;

use super::format::WeightRef;
use super::panel::Panel;
use super::quantized::Quantized;
use super::team::Team;
use super::{Kernels, MAX_BATCH, MAX_INTEGER_BATCH};

/// Most weight rows of one task; also the height of the tile on its stack.
const MAX_TASK_ROWS: usize = 64;

/// The same where there is one activation row, whose outputs take no more room: what a task costs once is much where weight
/// rows are short.
const MAX_ALONE_ROWS: usize = MAX_TASK_ROWS * MAX_BATCH;

/// A task reads about this many weight bytes: far more than claiming it costs, and little enough to stay in a core's
/// second-level cache while the rows of a batch pass over it.
const TASK_BYTES: usize = 128 << 10;

/// Tasks hold a multiple of this many weight rows, so that kernels that take several at once run full.
const ROW_STEP: usize = 4;

/// The same where several activation rows meet integers.
const PANEL_STEP: usize = 16;

/// The same on tile registers, and most rows of a task there: no output waits on its stack.
const TILE_ROW_STEP: usize = 32;
const MAX_TILE_TASK_ROWS: usize = 256;

/// What a matrix is multiplied with.
#[derive(Clone, Copy, Debug)]
pub struct Input<'a> {
    /// Rows of the batch.
    pub rows: usize,
    /// Columns of each row: the matrix's.
    pub cols: usize,
    /// `[rows, cols]`. Read by the exact path only.
    pub values: &'a [f32],
    /// The same rows as int8; with integer formats it selects the integer path.
    pub quantized: Option<&'a Quantized>,
}

/// `out[i][r] = W[r] . x[i]`; `out` is `[input.rows, w.rows()]`.
///
/// Takes the integer path when the format is an integer one and `input.quantized` is there, else the exact path. The bits
/// of an output depend on its weight row and its activation row only: not on the team, nor on the rest of the batch.
/// Panics when the shapes disagree.
pub fn matmul(k: &Kernels, team: &Team, w: &WeightRef, input: &Input, out: &mut [f32]) {
    assert_eq!(input.cols, w.cols(), "columns of activations and weights");
    assert_eq!(out.len(), input.rows * w.rows(), "outputs of a matmul");
    let quantized = input.quantized.filter(|_| w.format().is_integer());
    match quantized {
        Some(q) => assert_eq!((q.rows(), q.cols()), (input.rows, input.cols), "shape of quantized activations"),
        None => assert_eq!(input.values.len(), input.rows * input.cols, "activations of a matmul"),
    }
    if out.is_empty() {
        return;
    }
    let team = team.for_work(w.data().len() * input.rows);
    let target = Outputs { first: out.as_mut_ptr(), stride: w.rows(), len: out.len() };
    let tiled = quantized.filter(|_| k.takes_tiles(w.format()));
    if let Some((q, panel)) = tiled.and_then(|q| Some((q, q.panel(k.packed_rows(q.rows()))?))) {
        return by_tiles(k, team, w, q, &panel, &target);
    }
    let panels = quantized.is_some() && input.rows > 1 && k.integer_batch > MAX_BATCH;
    let most = if input.rows == 1 { MAX_ALONE_ROWS } else { MAX_TASK_ROWS };
    let step = task_rows(w, team.threads(), if panels { PANEL_STEP } else { ROW_STEP }, most);
    let tasks = w.rows().div_ceil(step);
    team.run(tasks, &|turn| {
        let task = striped(turn, tasks, team.threads());
        let rows = task * step..w.rows().min((task + 1) * step);
        match quantized {
            // What a task keeps on its stack is made before each: little, for few rows.
            Some(q) if input.rows == 1 => integer_task::<1, MAX_ALONE_ROWS>(k, w, q, 0, rows, &target),
            Some(q) if input.rows <= MAX_BATCH => integer_task::<MAX_BATCH, MAX_TASK_ROWS>(k, w, q, 0, rows, &target),
            Some(q) => integer_task::<MAX_INTEGER_BATCH, MAX_TASK_ROWS>(k, w, q, 0, rows, &target),
            None => exact_task(k, w, input, rows, &target),
        }
    });
}

/// Packed rows first; those behind them, if any, meet the weights of a task while these are in the second-level cache.
fn by_tiles(k: &Kernels, team: &Team, w: &WeightRef, all: &Quantized, x: &Panel, out: &Outputs) {
    let by_threads = w.rows().div_ceil(4 * team.threads());
    let step = by_threads.next_multiple_of(TILE_ROW_STEP).min(MAX_TILE_TASK_ROWS);
    let tasks = w.rows().div_ceil(step);
    team.run(tasks, &|turn| {
        let task = striped(turn, tasks, team.threads());
        let rows = task * step..w.rows().min((task + 1) * step);
        k.tile_product(w, rows.clone(), x, &mut |i, first, values| out.write(i, first, values));
        let packed = x.scales.len();
        for start in rows.clone().step_by(MAX_TASK_ROWS).filter(|_| packed < all.rows()) {
            let rows = start..rows.end.min(start + MAX_TASK_ROWS);
            integer_task::<MAX_INTEGER_BATCH, MAX_TASK_ROWS>(k, w, all, packed, rows, out);
        }
    });
}

/// Activation rows from `start` on, `BATCH` of them at a time at most, with up to `ROWS` weight rows.
fn integer_task<const BATCH: usize, const ROWS: usize>(
    k: &Kernels,
    w: &WeightRef,
    x: &Quantized,
    start: usize,
    rows: Range<usize>,
    out: &Outputs,
) {
    let mut tile = [[0.0f32; ROWS]; BATCH];
    let step = BATCH.min(k.integer_batch);
    for first in (start..x.rows()).step_by(step) {
        let batch = step.min(x.rows() - first);
        let tile = &mut tile.as_flattened_mut()[..batch * rows.len()];
        let x: [_; BATCH] = std::array::from_fn(|i| x.row(first + i.min(batch - 1)));
        k.integer_tile(w, rows.clone(), &x[..batch], tile);
        out.write_tile(first, &rows, tile);
    }
}

fn exact_task(k: &Kernels, w: &WeightRef, input: &Input, rows: Range<usize>, out: &Outputs) {
    let mut tile = [[0.0f32; MAX_TASK_ROWS]; MAX_BATCH];
    for first in (0..input.rows).step_by(MAX_BATCH) {
        let batch = MAX_BATCH.min(input.rows - first);
        let tile = &mut tile.as_flattened_mut()[..batch * rows.len()];
        let x = &input.values[first * input.cols..][..batch * input.cols];
        k.exact_tile(w, rows.clone(), x, batch, tile);
        out.write_tile(first, &rows, tile);
    }
}

/// The task that comes at a turn, so that threads that take turns each walk through neighbouring rows: what is fetched ahead
/// of one task is the next of the same thread.
fn striped(turn: usize, tasks: usize, stripes: usize) -> usize {
    let (stripe, place) = (turn % stripes, turn / stripes);
    stripe * (tasks / stripes) + stripe.min(tasks % stripes) + place
}

/// Rows of a task: by bytes, but no fewer tasks than would keep the team busy, and `most` of them at most.
fn task_rows(w: &WeightRef, threads: usize, multiple: usize, most: usize) -> usize {
    let by_bytes = TASK_BYTES / w.format().row_bytes(w.cols()).max(1);
    let by_threads = w.rows().div_ceil(4 * threads);
    by_bytes.min(by_threads).next_multiple_of(multiple).clamp(multiple, most)
}

/// The output matrix as tasks see it: each writes columns no other task writes.
struct Outputs {
    first: *mut f32,
    stride: usize,
    len: usize,
}

// SAFETY: the pointer stands for an exclusive borrow that `matmul` holds for as long as any task runs, and tasks write
// disjoint column ranges.
unsafe impl Sync for Outputs {}

impl Outputs {
    fn write_tile(&self, first: usize, rows: &Range<usize>, tile: &[f32]) {
        for (i, values) in tile.chunks(rows.len()).enumerate() {
            self.write(first + i, rows.start, values);
        }
    }

    fn write(&self, row: usize, col: usize, values: &[f32]) {
        let at = row * self.stride + col;
        assert!(col + values.len() <= self.stride && at + values.len() <= self.len, "a tile outside the output");
        let target = self.first.wrapping_add(at);
        // SAFETY: the range was checked to lie inside the borrowed output, and only the task that owns these columns
        // writes them, once per batch row; `values` is that task's own tile.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), target, values.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_comes_once_and_stripes_are_neighbours() {
        for stripes in 1..=5 {
            for tasks in 0..40 {
                let mut order: Vec<usize> = (0..tasks).map(|turn| striped(turn, tasks, stripes)).collect();
                assert!(order.iter().skip(stripes).zip(&order).all(|(next, task)| *next == task + 1), "{order:?}");
                order.sort_unstable();
                assert!(order.into_iter().eq(0..tasks), "{tasks} tasks in {stripes} stripes");
            }
        }
    }
}

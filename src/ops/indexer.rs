//! The sparse-attention indexer: scores every cached position for a query row and keeps the best.

use super::Compute;
use super::attention::Attended;
use super::room::Room;
use super::topk;
use crate::kernels::{Kernels, RowsAt, Table};

/// Positions scored by one task.
const POSITIONS_A_TASK: usize = 256;

/// Heads whose products with these positions are held before they are added up.
const HEADS_A_TIME: usize = 8;

/// What each query row of a step attends to, kept for the layers that share a selection.
pub struct Selection {
    top_k: usize,
    /// Per row: attended positions of a sparse row, ascending; empty for a dense row.
    listed: Vec<Vec<u32>>,
    /// Per row: positions visible to it.
    visible: Vec<usize>,
    /// One a thread.
    desks: Vec<Desk>,
}

/// Where the positions of one row are scored and chosen.
struct Desk {
    scores: Vec<f32>,
    ranks: Vec<i32>,
}

/// What the scores of some rows are made of.
#[derive(Clone, Copy)]
pub struct Scored<'a> {
    /// Index heads.
    pub heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// `[rows, heads * dim]`, rotated.
    pub queries: &'a [f32],
    /// `[rows, heads]`, already times heads^-0.5.
    pub weights: &'a [f32],
    /// `[positions, dim]`, normed and rotated.
    pub keys: Table<'a>,
}

impl Selection {
    /// Room for `rows` rows over contexts of up to `positions`, keeping `top_k` each, on `threads` threads.
    pub fn new(rows: usize, positions: usize, top_k: usize, threads: usize, room: &mut Room) -> Selection {
        let sparse = top_k < positions;
        let (desks, positions) = if sparse { (threads, positions) } else { (0, 0) };
        Selection {
            top_k,
            listed: (0..rows).map(|_| room.empty(if sparse { top_k } else { 0 })).collect(),
            visible: room.filled(0, rows),
            desks: (0..desks).map(|_| Desk { scores: room.floats(positions), ranks: room.empty(positions) }).collect(),
        }
    }

    /// Every row sees all positions up to its own. The rows are the `first` one of the step and those after it, at positions
    /// `start..`.
    pub fn dense(&mut self, first: usize, start: usize, rows: usize) {
        for row in 0..rows {
            self.visible[first + row] = start + row + 1;
            self.listed[first + row].clear();
        }
    }

    /// What `row` attends to.
    pub fn row(&self, row: usize) -> Attended<'_> {
        match self.listed[row].as_slice() {
            [] => Attended::Prefix(self.visible[row]),
            positions => Attended::Listed(positions),
        }
    }

    /// Whether a step whose last row sees `visible` positions leaves any of them out.
    pub fn is_sparse_at(&self, visible: usize) -> bool {
        visible > self.top_k
    }

    /// Scores and selects for rows; which, as [`Selection::dense`] says.
    ///
    /// The score of position t is `sum_h weights[h] * relu(q_h . k_t * dim^-0.5)`; rows that see at most `top_k` positions
    /// stay dense.
    pub fn select(&mut self, compute: &Compute, first: usize, start: usize, of: &Scored) {
        let (rows, k, team) = (of.weights.len() / of.heads, compute.kernels, &compute.team);
        self.dense(first, start, rows);
        let (top_k, together) = (self.top_k, self.desks.len());
        let mut row = top_k.saturating_sub(start).min(rows);
        while row < rows {
            let seen = start + row + 1;
            let listed = &mut self.listed[first + row..];
            if rows - row >= together {
                // A row a thread.
                team.for_chunks2(&mut self.desks, 1, &mut listed[..together], 1, &|i, desk, listed| {
                    let Desk { scores, ranks } = &mut desk[0];
                    let scores = &mut scores[..seen + i];
                    for (task, scores) in scores.chunks_mut(POSITIONS_A_TASK).enumerate() {
                        score(k, of, row + i, task * POSITIONS_A_TASK, scores);
                    }
                    topk::largest(scores, top_k, ranks, &mut listed[0]);
                });
                row += together;
            } else {
                // One row, whose positions the threads share.
                let Desk { scores, ranks } = &mut self.desks[0];
                let scores = &mut scores[..seen];
                team.for_chunks(scores, POSITIONS_A_TASK, &|task, scores| {
                    score(k, of, row, task * POSITIONS_A_TASK, scores);
                });
                topk::largest(scores, top_k, ranks, &mut listed[0]);
                row += 1;
            }
        }
    }
}

/// The scores of `row` for up to [`POSITIONS_A_TASK`] positions from `first` on.
fn score(k: &Kernels, of: &Scored, row: usize, first: usize, scores: &mut [f32]) {
    let Scored { heads, dim, queries, weights, keys } = *of;
    let (queries, weights) = (&queries[row * heads * dim..][..heads * dim], &weights[row * heads..][..heads]);
    let scale = 1.0 / (dim as f32).sqrt();
    let at: [u32; POSITIONS_A_TASK] = std::array::from_fn(|i| (first + i) as u32);
    let rows = RowsAt::new(keys, dim, 0..dim, &at[..scores.len()]);
    scores.fill(0.0);
    let mut products = [0.0f32; HEADS_A_TIME * POSITIONS_A_TASK];
    for (queries, weights) in queries.chunks(HEADS_A_TIME * dim).zip(weights.chunks(HEADS_A_TIME)) {
        let products = &mut products[..weights.len() * scores.len()];
        k.dots(queries, &rows, products);
        for (products, weight) in products.chunks_exact(scores.len()).zip(weights) {
            for (score, product) in scores.iter_mut().zip(products) {
                *score += weight * (product * scale).max(0.0);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Team, bf16_of};
    use crate::ops::Activations;

    fn listed(selection: &Selection, row: usize) -> Vec<u32> {
        match selection.row(row) {
            Attended::Listed(positions) => positions.to_vec(),
            Attended::Prefix(n) => panic!("row {row} is dense over {n}"),
        }
    }

    #[test]
    fn keeps_the_best_positions_of_each_row_and_short_rows_stay_dense() {
        // One head of one value: the score of position t is relu(q k_t).
        let keys = [0.1, 0.9, -5.0, 0.5, 0.7];
        let of =
            Scored { heads: 1, dim: 1, queries: &[1.0, 1.0, 1.0, -1.0], weights: &[1.0; 4], keys: Table::F32(&keys) };
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads);
            let c = Compute { kernels: Kernels::best(), team, activations: Activations::F32 };
            // The rows are the third of a step and those after it.
            let mut s = Selection::new(6, 5, 2, threads, &mut Room::default());
            s.select(&c, 2, 1, &of);
            assert!(matches!(s.row(2), Attended::Prefix(2)));
            assert_eq!(listed(&s, 3), [0, 1]);
            assert_eq!(listed(&s, 4), [1, 3]);
            // Only position 2 has a positive score; the other place goes to the lowest position.
            assert_eq!(listed(&s, 5), [0, 2]);
        }
    }

    #[test]
    fn rows_of_a_batch_choose_what_each_chooses_alone() {
        // More positions than one task has, and rows on both sides of what is kept.
        let (heads, dim, top_k, start, rows) = (3, 32, 290, 280, 40);
        let floats = |n, seed| crate::ops::attention::latent::tests::noise(n, seed);
        let keys: Vec<f32> = floats((start + rows) * dim, 1);
        let halves: Vec<u16> = keys.iter().map(|value| bf16_of(*value)).collect();
        let (queries, weights) = (floats(rows * heads * dim, 2), floats(rows * heads, 3));
        for keys in [Table::F32(&keys), Table::Bf16(&halves)] {
            let of = Scored { heads, dim, queries: &queries, weights: &weights, keys };
            for threads in [1, 3] {
                let team = Team::new(threads);
                let c = Compute { kernels: Kernels::best(), team, activations: Activations::F32 };
                let mut all = Selection::new(rows, start + rows, top_k, threads, &mut Room::default());
                all.select(&c, 0, start, &of);
                let mut alone = Selection::new(1, start + rows, top_k, threads, &mut Room::default());
                for row in top_k - start..rows {
                    let of = Scored {
                        queries: &queries[row * heads * dim..][..heads * dim],
                        weights: &weights[row * heads..][..heads],
                        ..of
                    };
                    alone.select(&c, 0, start + row, &of);
                    assert_eq!(listed(&alone, 0), listed(&all, row), "row {row}, {threads} threads");
                    assert_eq!(listed(&all, row).len(), top_k);
                }
            }
        }
    }
}

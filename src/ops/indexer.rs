//! The sparse-attention indexer: scores every cached position for a query row and keeps the best.

use super::Compute;
use super::attention::Attended;
use super::room::Room;
use super::topk;
use crate::kernels::{RowsAt, Table};

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
    scores: Vec<f32>,
    order: Vec<i32>,
}

impl Selection {
    /// Room for `rows` rows over contexts of up to `positions`, keeping `top_k` each.
    pub fn new(rows: usize, positions: usize, top_k: usize, room: &mut Room) -> Selection {
        let sparse = top_k < positions;
        Selection {
            top_k,
            listed: (0..rows).map(|_| room.empty(if sparse { top_k } else { 0 })).collect(),
            visible: room.filled(0, rows),
            scores: room.floats(if sparse { positions } else { 0 }),
            order: room.empty(if sparse { positions } else { 0 }),
        }
    }

    /// Every row sees all positions up to its own.
    pub fn dense(&mut self, start: usize, rows: usize) {
        for row in 0..rows {
            self.visible[row] = start + row + 1;
            self.listed[row].clear();
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

    /// Scores and selects for rows at positions `start..`.
    ///
    /// `queries` is `[rows, heads * dim]` (rotated), `weights` is `[rows, heads]` (already times heads^-0.5), `keys` is
    /// `[positions, dim]` (normed and rotated). The score of position t is
    /// `sum_h weights[h] * relu(q_h . k_t * dim^-0.5)`; rows that see at most `top_k` positions stay dense.
    pub fn select(
        &mut self,
        compute: &Compute,
        heads: usize,
        dim: usize,
        start: usize,
        queries: &[f32],
        weights: &[f32],
        keys: Table,
    ) {
        let rows = weights.len() / heads;
        let (k, scale) = (compute.kernels, 1.0 / (dim as f32).sqrt());
        self.dense(start, rows);
        for row in 0..rows {
            let visible = self.visible[row];
            if !self.is_sparse_at(visible) {
                continue;
            }
            let (query, weights) = (&queries[row * heads * dim..][..heads * dim], &weights[row * heads..][..heads]);
            let scores = &mut self.scores[..visible];
            compute.team.for_chunks(scores, POSITIONS_A_TASK, &|task, scores| {
                let first = (task * POSITIONS_A_TASK) as u32;
                let at: [u32; POSITIONS_A_TASK] = std::array::from_fn(|i| first + i as u32);
                let rows = RowsAt::new(keys, dim, 0..dim, &at[..scores.len()]);
                scores.fill(0.0);
                let mut products = [0.0f32; HEADS_A_TIME * POSITIONS_A_TASK];
                for (query, weights) in query.chunks(HEADS_A_TIME * dim).zip(weights.chunks(HEADS_A_TIME)) {
                    let products = &mut products[..weights.len() * scores.len()];
                    k.dots(query, &rows, products);
                    for (products, weight) in products.chunks_exact(scores.len()).zip(weights) {
                        for (score, product) in scores.iter_mut().zip(products) {
                            *score += weight * (product * scale).max(0.0);
                        }
                    }
                }
            });
            topk::largest(scores, self.top_k, &mut self.order, &mut self.listed[row]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Kernels, Table, Team};
    use crate::ops::Activations;

    #[test]
    fn keeps_the_best_positions_of_each_row_and_short_rows_stay_dense() {
        let c = Compute { kernels: Kernels::best(), team: Team::new(2), activations: Activations::F32 };
        // One head of one value: the score of position t is relu(q k_t).
        let keys = [0.1, 0.9, -5.0, 0.5, 0.7];
        let mut s = Selection::new(4, 5, 2, &mut Room::default());
        s.select(&c, 1, 1, 1, &[1.0, 1.0, 1.0, -1.0], &[1.0; 4], Table::F32(&keys));
        assert!(matches!(s.row(0), Attended::Prefix(2)));
        let listed = |row| match s.row(row) {
            Attended::Listed(p) => p.to_vec(),
            Attended::Prefix(n) => panic!("row {row} is dense over {n}"),
        };
        assert_eq!(listed(1), [0, 1]);
        assert_eq!(listed(2), [1, 3]);
        // Only position 2 has a positive score; the other place goes to the lowest position.
        assert_eq!(listed(3), [0, 2]);
    }
}

//! Attention over the keys and values themselves.
//!
//! A cached position is one row `[key of each key-value head | value of each key-value head]`. Consecutive query heads
//! share a key-value head where there are fewer of those.

use super::{Attended, Cached, group_of, pool};
use crate::kernels::Table;
use crate::ops::Compute;

/// Shapes of full attention.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub dim: usize,
}

impl Shape {
    /// Width of all keys, or of all values, of a position.
    pub fn keys(&self) -> usize {
        self.kv_heads * self.dim
    }

    /// Width of all queries of a row, and of its output.
    pub fn queries(&self) -> usize {
        self.heads * self.dim
    }
}

/// Attention of query rows at positions `start..`, each over all positions up to its own.
///
/// `q` is `[rows, heads * dim]`, rotated; `cache` is `[positions, 2 * kv_heads * dim]`, keys rotated; `out` is as `q`.
pub fn attend(compute: &Compute, shape: &Shape, q: &[f32], cache: Table, start: usize, out: &mut [f32]) {
    let Shape { heads, dim, .. } = *shape;
    let sharing = heads / shape.kv_heads;
    let group = group_of(sharing, sharing);
    let (k, scale) = (compute.kernels, 1.0 / (dim as f32).sqrt());
    compute.team.for_chunks(out, group * dim, &|task, out| {
        // Tasks go through the groups of a row, row by row, as queries and outputs lie.
        let (row, head) = (task * group / heads, task * group % heads);
        let key = head / sharing * dim;
        let value = shape.keys() + key;
        let cached = Cached { rows: cache, width: 2 * shape.keys(), key: key..key + dim, value: value..value + dim };
        let queries = &q[task * group * dim..][..group * dim];
        pool(k, scale, queries, &cached, Attended::Prefix(start + row + 1), 0, out);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Kernels, Team};
    use crate::ops::Activations;
    use crate::ops::attention::latent::tests::noise;

    /// Straight from the definition, in f64: one row that sees `positions`.
    fn naive(s: &Shape, q: &[f32], cache: &[f32], positions: usize) -> Vec<f64> {
        let at = |position: usize, part: usize| &cache[(2 * position * s.kv_heads + part) * s.dim..][..s.dim];
        let product = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        let mut out = vec![];
        for h in 0..s.heads {
            let shared = h * s.kv_heads / s.heads;
            let query = &q[h * s.dim..][..s.dim];
            let weights: Vec<f64> =
                (0..positions).map(|t| (product(query, at(t, shared)) / (s.dim as f64).sqrt()).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..s.dim {
                let sum = |(t, w): (usize, &f64)| w * f64::from(at(t, s.kv_heads + shared)[d]);
                out.push(weights.iter().enumerate().map(sum).sum::<f64>() / total);
            }
        }
        out
    }

    #[test]
    fn equals_the_definition_with_and_without_shared_heads() {
        // More heads share one than walk together; a prime number of them; none at all.
        for (heads, kv_heads) in [(36, 2), (6, 2), (7, 1), (5, 5)] {
            let s = Shape { heads, kv_heads, dim: 6 };
            let (start, rows) = (298, 2);
            let (q, cache) = (noise(rows * s.queries(), 2), noise((start + rows) * 2 * s.keys(), 3));
            let mut outs = vec![];
            for threads in [1, 2] {
                let team = Team::new(threads);
                let c = Compute { kernels: Kernels::best(), team, activations: Activations::F32 };
                let mut out = vec![0.0; rows * s.queries()];
                attend(&c, &s, &q, Table::F32(&cache), start, &mut out);
                for (row, got) in out.chunks_exact(s.queries()).enumerate() {
                    let want = naive(&s, &q[row * s.queries()..], &cache, start + row + 1);
                    for (i, (got, want)) in got.iter().zip(want).enumerate() {
                        let error = (f64::from(*got) - want).abs();
                        assert!(error < 3e-6, "{s:?}, row {row}, value {i}: {got} {want}");
                    }
                }
                // One row alone gives the bits it has in the batch.
                let mut alone = vec![0.0; s.queries()];
                attend(&c, &s, &q[s.queries()..], Table::F32(&cache), start + 1, &mut alone);
                assert_eq!(alone, out[s.queries()..], "{s:?}");
                outs.push(out);
            }
            assert_eq!(outs[0], outs[1], "thread count changed a bit of {s:?}");
        }
    }
}

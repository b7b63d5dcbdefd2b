//! Multi-head latent attention over a cache of latents, in two forms that are equal in exact arithmetic.
//!
//! A cached position is one row `[latent | rotary key]` of `rank + rope` values. For head h, the first `nope` rows of its
//! block of `kv_b` make keys from a latent, the next `value` rows make values.
//!
//! - **Absorbed**: the query is carried into the latent space once, `q' = W_K^T q_nope`; it is scored against latents,
//!   latents are pooled, and one multiply by `W_V` ends it. Nothing is rebuilt: right for a few query rows.
//! - **Explicit**: keys and values of every position are rebuilt, a head at a time: right for many query rows.

use super::{Attended, Cached, Running, group_of, pool};
use crate::kernels::{Kernels, WeightRef};
use crate::limits::{MAX_KV_RANK, SCORE_BLOCK};
use crate::ops::Compute;
use crate::ops::room::Room;

/// Shapes of latent attention.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Query heads.
    pub heads: usize,
    /// Key width without rotation.
    pub nope: usize,
    /// Rotary key width.
    pub rope: usize,
    /// Value width.
    pub value: usize,
    /// Latent width.
    pub rank: usize,
}

impl Shape {
    /// Width of a cached position.
    pub fn cached(&self) -> usize {
        self.rank + self.rope
    }

    /// Width of one head's query.
    pub fn query(&self) -> usize {
        self.nope + self.rope
    }

    /// Floats that the explicit form needs for keys and values of one head a thread.
    pub fn rebuilt(&self, threads: usize, positions: usize) -> usize {
        threads * positions * (self.nope + self.value)
    }

    fn scale(&self) -> f32 {
        1.0 / (self.query() as f32).sqrt()
    }

    /// Rows from which rebuilding keys and values costs less than scoring in the latent space: per query row and
    /// position, absorbed costs `2 rank + rope` products and explicit `nope + rope + value`; rebuilding a position costs
    /// `rank (nope + value)`.
    pub fn explicit_pays_from(&self) -> usize {
        let saved = (2 * self.rank + self.rope).saturating_sub(self.query() + self.value);
        if saved == 0 { usize::MAX } else { (self.rank * (self.nope + self.value)).div_ceil(saved) }
    }
}

/// Buffers of both forms, sized once.
pub struct Scratch {
    group: usize,
    /// Absorbed: `[group][row][head in group][rank + rope]`.
    query: Vec<f32>,
    /// Absorbed: `[group][row][head in group][rank]`.
    pooled: Vec<f32>,
    /// Head outputs before they are put into rows: `[group or head][row][..][value]`.
    heads: Vec<f32>,
    /// Explicit: keys and values of one head a thread, `[thread][position][nope + value]`; empty where never used.
    rebuilt: Vec<f32>,
}

impl Scratch {
    /// Buffers for up to `rows` query rows on `threads` threads; `explicit_positions` is the longest context that the
    /// explicit form will see, 0 when it is never used.
    ///
    /// What the explicit form rebuilds is not counted in `room`: see [`Shape::rebuilt`].
    pub fn new(shape: &Shape, rows: usize, threads: usize, explicit_positions: usize, room: &mut Room) -> Scratch {
        Scratch {
            group: group_of(shape.heads, shape.heads / threads),
            query: room.floats(rows * shape.heads * shape.cached()),
            pooled: room.floats(rows * shape.heads * shape.rank),
            heads: room.floats(rows * shape.heads * shape.value),
            rebuilt: vec![0.0; shape.rebuilt(threads, explicit_positions)],
        }
    }
}

/// Absorbed attention of `rows` query rows.
///
/// `q` is `[rows, heads * (nope + rope)]` with the rotary part already rotated, `cache` is `[positions, rank + rope]`,
/// `attended(row)` says what each row sees, `out` is `[rows, heads * value]`.
pub fn absorbed<'s>(
    compute: &Compute,
    shape: &Shape,
    kv_b: &WeightRef,
    q: &[f32],
    cache: &[f32],
    attended: &(dyn Fn(usize) -> Attended<'s> + Sync),
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let rows = q.len() / (shape.heads * shape.query());
    let group = scratch.group;
    let (k, team) = (compute.kernels, &compute.team);
    let block = shape.nope + shape.value;

    let query = &mut scratch.query[..rows * shape.heads * shape.cached()];
    team.for_chunks(query, rows * group * shape.cached(), &|g, queries| {
        let mut decoded = [0.0f32; MAX_KV_RANK];
        let decoded = &mut decoded[..shape.rank];
        for h in 0..group {
            let head = g * group + h;
            for row in 0..rows {
                let query = &q[(row * shape.heads + head) * shape.query()..][..shape.query()];
                let carried = &mut queries[(row * group + h) * shape.cached()..][..shape.cached()];
                carried[..shape.rank].fill(0.0);
                carried[shape.rank..].copy_from_slice(&query[shape.nope..]);
            }
            if rows == 1 {
                let query = &q[head * shape.query()..][..shape.nope];
                let carried = &mut queries[h * shape.cached()..][..shape.rank];
                k.add_scaled_rows(kv_b, head * block..head * block + shape.nope, query, carried);
                continue;
            }
            // The same sums in the same order, each weight row decoded once for the whole batch.
            for d in 0..shape.nope {
                k.decode_row(kv_b, head * block + d, decoded);
                for row in 0..rows {
                    let a = q[(row * shape.heads + head) * shape.query() + d];
                    k.axpy(a, decoded, &mut queries[(row * group + h) * shape.cached()..][..shape.rank]);
                }
            }
        }
    });

    let query = &*query;
    let pooled = &mut scratch.pooled[..rows * shape.heads * shape.rank];
    let cached = Cached { rows: cache, width: shape.cached(), key: 0..shape.cached(), value: 0..shape.rank };
    team.for_chunks(pooled, group * shape.rank, &|task, pooled| {
        let queries = &query[task * group * shape.cached()..][..group * shape.cached()];
        pool(k, shape.scale(), queries, &cached, attended(task % rows), pooled);
    });

    let pooled = &*pooled;
    let heads = &mut scratch.heads[..rows * shape.heads * shape.value];
    team.for_chunks(heads, rows * group * shape.value, &|g, outs| {
        let mut decoded = [0.0f32; MAX_KV_RANK];
        let decoded = &mut decoded[..shape.rank];
        let pooled = &pooled[g * rows * group * shape.rank..][..rows * group * shape.rank];
        for h in 0..group {
            for d in 0..shape.value {
                k.decode_row(kv_b, (g * group + h) * block + shape.nope + d, decoded);
                for row in 0..rows {
                    let slot = row * group + h;
                    outs[slot * shape.value + d] = k.dot(decoded, &pooled[slot * shape.rank..][..shape.rank]);
                }
            }
        }
    });
    gather_heads(shape, group, rows, heads, out);
}

/// Explicit attention; arguments as [`absorbed`], with `positions` the number of cached positions to rebuild.
pub fn explicit<'s>(
    compute: &Compute,
    shape: &Shape,
    kv_b: &WeightRef,
    q: &[f32],
    cache: &[f32],
    positions: usize,
    attended: &(dyn Fn(usize) -> Attended<'s> + Sync),
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let rows = q.len() / (shape.heads * shape.query());
    let (k, team) = (compute.kernels, &compute.team);
    let block = shape.nope + shape.value;
    let threads = team.threads();
    let per_thread = scratch.rebuilt.len() / threads;
    assert!(positions * block <= per_thread, "the explicit form was sized for fewer than {positions} positions");
    for first in (0..shape.heads).step_by(threads) {
        let count = threads.min(shape.heads - first);
        let rebuilt = &mut scratch.rebuilt[..count * per_thread];
        let heads = &mut scratch.heads[first * rows * shape.value..][..count * rows * shape.value];
        team.for_chunks2(rebuilt, per_thread, heads, rows * shape.value, &|i, rebuilt, outs| {
            let head = first + i;
            rebuild(k, shape, kv_b, head, &cache[..positions * shape.cached()], rebuilt);
            for (row, out) in outs.chunks_exact_mut(shape.value).enumerate() {
                let query = &q[(row * shape.heads + head) * shape.query()..][..shape.query()];
                attend_rebuilt(k, shape, query, cache, rebuilt, attended(row), out);
            }
        });
    }
    gather_heads(shape, 1, rows, &scratch.heads[..rows * shape.heads * shape.value], out);
}

/// Keys and values of one head for every position: `rebuilt[position] = [key | value]`.
fn rebuild(k: &Kernels, shape: &Shape, kv_b: &WeightRef, head: usize, cache: &[f32], rebuilt: &mut [f32]) {
    let block = shape.nope + shape.value;
    let mut decoded = [0.0f32; MAX_KV_RANK];
    let decoded = &mut decoded[..shape.rank];
    for d in 0..block {
        k.decode_row(kv_b, head * block + d, decoded);
        for (position, cached) in cache.chunks_exact(shape.cached()).enumerate() {
            rebuilt[position * block + d] = k.dot(decoded, &cached[..shape.rank]);
        }
    }
}

fn attend_rebuilt(
    k: &Kernels,
    shape: &Shape,
    query: &[f32],
    cache: &[f32],
    rebuilt: &[f32],
    attended: Attended,
    out: &mut [f32],
) {
    out.fill(0.0);
    let (q_nope, q_rope) = query.split_at(shape.nope);
    let block = shape.nope + shape.value;
    let (n, scale) = (attended.len(), shape.scale());
    let mut running = Running::START;
    for start in (0..n).step_by(SCORE_BLOCK) {
        let mut scores = [0.0f32; SCORE_BLOCK];
        let scores = &mut scores[..SCORE_BLOCK.min(n - start)];
        for (i, s) in scores.iter_mut().enumerate() {
            let at = attended.at(start + i);
            let key = &rebuilt[at * block..][..shape.nope];
            let rotary = &cache[at * shape.cached() + shape.rank..][..shape.rope];
            *s = (k.dot(q_nope, key) + k.dot(q_rope, rotary)) * scale;
        }
        let factor = running.absorb(k, scores);
        if factor != 1.0 {
            out.iter_mut().for_each(|o| *o *= factor);
        }
        for (i, &weight) in scores.iter().enumerate() {
            k.axpy(weight, &rebuilt[attended.at(start + i) * block + shape.nope..][..shape.value], out);
        }
    }
    let inverse = 1.0 / running.sum;
    out.iter_mut().for_each(|o| *o *= inverse);
}

/// `[heads / group][row][group][value]` to `[row][heads * value]`.
fn gather_heads(shape: &Shape, group: usize, rows: usize, heads: &[f32], out: &mut [f32]) {
    let run = group * shape.value;
    for (i, piece) in heads.chunks_exact(run).enumerate() {
        let (g, row) = (i / rows, i % rows);
        out[row * shape.heads * shape.value + g * run..][..run].copy_from_slice(piece);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::kernels::{Format, MatrixSpec, Team};
    use crate::ops::Activations;

    const SHAPE: Shape = Shape { heads: 6, nope: 5, rope: 4, value: 3, rank: 7 };

    pub fn noise(n: usize, mut seed: u64) -> Vec<f32> {
        (0..n)
            .map(|_| {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Straight from the definition, in f64.
    fn naive(kv_b: &[f32], q: &[f32], cache: &[f32], attended: &[u32]) -> Vec<f64> {
        let s = SHAPE;
        let mut out = vec![];
        for h in 0..s.heads {
            let q = &q[h * s.query()..][..s.query()];
            let project = |row: usize, t: u32| -> f64 {
                (0..s.rank)
                    .map(|i| f64::from(kv_b[row * s.rank + i]) * f64::from(cache[t as usize * s.cached() + i]))
                    .sum()
            };
            let base = h * (s.nope + s.value);
            let scores: Vec<f64> = attended
                .iter()
                .map(|&t| {
                    let a: f64 = (0..s.nope).map(|d| f64::from(q[d]) * project(base + d, t)).sum();
                    let b: f64 = (0..s.rope)
                        .map(|d| f64::from(q[s.nope + d]) * f64::from(cache[t as usize * s.cached() + s.rank + d]))
                        .sum();
                    (a + b) / (s.query() as f64).sqrt()
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|x| (x - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..s.value {
                let sum: f64 = attended.iter().zip(&weights).map(|(&t, w)| w * project(base + s.nope + d, t)).sum();
                out.push(sum / total);
            }
        }
        out
    }

    fn compute(threads: usize) -> Compute {
        Compute { kernels: Kernels::best(), team: Team::new(threads), activations: Activations::F32 }
    }

    #[test]
    fn both_forms_equal_the_definition_dense_and_sparse() {
        let s = SHAPE;
        let spec = MatrixSpec { format: Format::F32, rows: s.heads * (s.nope + s.value), cols: s.rank };
        let (kv_b, positions, rows) = (noise(spec.rows * spec.cols, 1), 300usize, 3usize);
        let bytes: Vec<u8> = kv_b.iter().flat_map(|v| v.to_le_bytes()).collect();
        let w = WeightRef::new(spec, &bytes, &[]);
        let (q, cache) = (noise(rows * s.heads * s.query(), 2), noise(positions * s.cached(), 3));
        let sparse: Vec<u32> = (0..positions as u32).filter(|p| p % 3 == 1).collect();
        let attended = |row: usize| match row {
            0 => Attended::Prefix(1),
            1 => Attended::Prefix(positions),
            _ => Attended::Listed(&sparse),
        };
        let mut outs = vec![];
        for threads in [1, 2] {
            let c = compute(threads);
            let mut scratch = Scratch::new(&s, rows, threads, positions, &mut Room::default());
            let (mut a, mut b) = (vec![0.0; rows * s.heads * s.value], vec![0.0; rows * s.heads * s.value]);
            absorbed(&c, &s, &w, &q, &cache, &attended, &mut scratch, &mut a);
            explicit(&c, &s, &w, &q, &cache, positions, &attended, &mut scratch, &mut b);
            for row in 0..rows {
                let list: Vec<u32> = match attended(row) {
                    Attended::Prefix(n) => (0..n as u32).collect(),
                    Attended::Listed(p) => p.to_vec(),
                };
                let want = naive(&kv_b, &q[row * s.heads * s.query()..], &cache, &list);
                for (i, want) in want.iter().enumerate() {
                    let at = row * s.heads * s.value + i;
                    assert!((f64::from(a[at]) - want).abs() < 3e-6, "absorbed row {row} value {i}: {} {want}", a[at]);
                    assert!((f64::from(b[at]) - want).abs() < 3e-6, "explicit row {row} value {i}: {} {want}", b[at]);
                }
            }
            // One row alone gives the bits it has in the batch.
            let mut alone = vec![0.0; s.heads * s.value];
            let query = &q[2 * s.heads * s.query()..];
            absorbed(&c, &s, &w, query, &cache, &|_| attended(2), &mut scratch, &mut alone);
            assert_eq!(alone, a[2 * s.heads * s.value..]);
            outs.push((a, b));
        }
        assert_eq!(outs[0], outs[1], "thread count changed a bit");
    }

    #[test]
    fn explicit_pays_later_for_the_large_model() {
        let glm52 = Shape { heads: 64, nope: 192, rope: 64, value: 256, rank: 512 };
        // 1088 against 512 products a pair, 229,376 to rebuild a position.
        assert_eq!(glm52.explicit_pays_from(), 229_376usize.div_ceil(576));
    }
}

//! Multi-head latent attention over a cache of latents, in two forms that are equal in exact arithmetic.
//!
//! A cached position is one row `[latent | rotary key]` of `rank + rope` values. For head h, the first `nope` rows of its
//! block of `kv_b` make keys from a latent, the next `value` rows make values.
//!
//! - **Absorbed**: the query is carried into the latent space once, `q' = W_K^T q_nope`; it is scored against latents,
//!   latents are pooled, and one multiply by `W_V` ends it. Nothing is rebuilt: right for a few query rows.
//! - **Explicit**: keys and values of every position are rebuilt, a head at a time: right for many query rows.

use std::ops::Range;

use super::{Attended, Cached, attended_block, group_of, pool};
use crate::kernels::{Kernels, RowsAt, Table, WeightRef};
use crate::limits::{HEAD_GROUP, MAX_KV_RANK, SCORE_BLOCK};
use crate::ops::Compute;
use crate::ops::room::Room;

/// Rows of `kv_b` that are decoded and meet latents or queries together.
const DECODED_TOGETHER: usize = 8;

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

    /// Width of a rebuilt position of one head: `[key | value]`.
    fn rebuilt_width(&self) -> usize {
        self.query() + self.value
    }

    /// Floats that the explicit form needs for keys and values of one head a thread.
    pub fn rebuilt(&self, threads: usize, positions: usize) -> usize {
        threads * positions * self.rebuilt_width()
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
    /// Absorbed: `[group][row][head in group][rank + rope]`. Explicit: `[head][row][nope + rope]`.
    query: Vec<f32>,
    /// Absorbed: `[group][row][head in group][rank]`.
    pooled: Vec<f32>,
    /// Head outputs before they are put into rows: `[group or head][row][..][value]`.
    heads: Vec<f32>,
    /// Explicit: keys and values of one head a thread, `[thread][position][nope + rope + value]`; empty where never used.
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
            query: room.floats(rows * shape.heads * shape.cached().max(shape.query())),
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
    cache: Table,
    attended: &(dyn Fn(usize) -> Attended<'s> + Sync),
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let rows = q.len() / (shape.heads * shape.query());
    let group = scratch.group;
    let k = compute.kernels;
    let of_weights = compute.team.for_work(rows * kv_b.rows() * kv_b.cols() / 2);
    let of_cache = compute.team.for_work(rows * shape.heads * cache.len());

    let query = &mut scratch.query[..rows * shape.heads * shape.cached()];
    of_weights.for_chunks(query, rows * group * shape.cached(), &|g, queries| {
        (0..group).for_each(|h| carry(k, shape, kv_b, q, g * group + h, h, group, queries));
    });

    let query = &*query;
    let pooled = &mut scratch.pooled[..rows * shape.heads * shape.rank];
    let cached = Cached { rows: cache, width: shape.cached(), key: 0..shape.cached(), value: 0..shape.rank };
    of_cache.for_chunks(pooled, group * shape.rank, &|task, pooled| {
        let queries = &query[task * group * shape.cached()..][..group * shape.cached()];
        pool(k, shape.scale(), queries, &cached, attended(task % rows), 0, pooled);
    });

    let pooled = &*pooled;
    let heads = &mut scratch.heads[..rows * shape.heads * shape.value];
    of_weights.for_chunks(heads, rows * group * shape.value, &|g, outs| {
        let pooled = &pooled[g * rows * group * shape.rank..][..rows * group * shape.rank];
        (0..group).for_each(|h| values(k, shape, kv_b, pooled, g * group + h, h, group, outs));
    });
    gather_heads(shape, group, rows, heads, out);
}

/// Carries the queries of one head, the `h`th of its group, into the latent space: `queries` is `[row][head in
/// group][rank + rope]`.
fn carry(
    k: &Kernels,
    shape: &Shape,
    kv_b: &WeightRef,
    q: &[f32],
    head: usize,
    h: usize,
    group: usize,
    queries: &mut [f32],
) {
    let rows = q.len() / (shape.heads * shape.query());
    let query = |row: usize| &q[(row * shape.heads + head) * shape.query()..][..shape.query()];
    let slot = |row: usize| (row * group + h) * shape.cached();
    for row in 0..rows {
        let carried = &mut queries[slot(row)..][..shape.cached()];
        carried[..shape.rank].fill(0.0);
        carried[shape.rank..].copy_from_slice(&query(row)[shape.nope..]);
    }
    let keys = head * (shape.nope + shape.value)..head * (shape.nope + shape.value) + shape.nope;
    if rows == 1 {
        return k.add_scaled_rows(kv_b, keys, &query(0)[..shape.nope], &mut queries[slot(0)..][..shape.rank]);
    }
    // The same sums in the same order.
    for_decoded(k, kv_b, keys, |first, decoded, at| {
        let decoded = RowsAt::new(Table::F32(decoded), shape.rank, 0..shape.rank, at);
        for row in 0..rows {
            let weights = &query(row)[first..][..at.len()];
            k.add_weighted(weights, &decoded, &mut queries[slot(row)..][..shape.rank]);
        }
    });
}

/// Values of one head, the `h`th of its group, from pooled latents `[row][head in group][rank]` to `outs`, `[row][head in
/// group][value]`.
fn values(
    k: &Kernels,
    shape: &Shape,
    kv_b: &WeightRef,
    pooled: &[f32],
    head: usize,
    h: usize,
    group: usize,
    outs: &mut [f32],
) {
    let rows = pooled.len() / (group * shape.rank);
    let start = head * (shape.nope + shape.value) + shape.nope;
    let weights = start..start + shape.value;
    if rows == 1 {
        let out = &mut outs[h * shape.value..][..shape.value];
        return k.exact_tile(kv_b, weights, &pooled[h * shape.rank..][..shape.rank], 1, out);
    }
    // The same products.
    for_decoded(k, kv_b, weights, |first, decoded, _| {
        for start in (0..rows).step_by(SCORE_BLOCK) {
            let slots: [u32; SCORE_BLOCK] = std::array::from_fn(|i| ((start + i) * group + h) as u32);
            let slots = &slots[..SCORE_BLOCK.min(rows - start)];
            let mut products = [0.0f32; DECODED_TOGETHER * SCORE_BLOCK];
            let products = &mut products[..decoded.len() / shape.rank * slots.len()];
            k.dots(decoded, &RowsAt::new(Table::F32(pooled), shape.rank, 0..shape.rank, slots), products);
            for (d, products) in (first..).zip(products.chunks_exact(slots.len())) {
                for (slot, product) in slots.iter().zip(products) {
                    outs[*slot as usize * shape.value + d] = *product;
                }
            }
        }
    });
}

/// Decodes rows of `kv_b`, a few at a time so that whole batches meet them near: `f(first of them, their values, their
/// numbers)`, both counted from the first of `rows`.
fn for_decoded(k: &Kernels, kv_b: &WeightRef, rows: Range<usize>, mut f: impl FnMut(usize, &[f32], &[u32])) {
    const NUMBERS: [u32; DECODED_TOGETHER] = [0, 1, 2, 3, 4, 5, 6, 7];
    let mut decoded = [0.0f32; DECODED_TOGETHER * MAX_KV_RANK];
    for first in rows.clone().step_by(DECODED_TOGETHER) {
        let count = DECODED_TOGETHER.min(rows.end - first);
        let decoded = &mut decoded[..count * kv_b.cols()];
        for (i, row) in decoded.chunks_exact_mut(kv_b.cols()).enumerate() {
            k.decode_row(kv_b, first + i, row);
        }
        f(first - rows.start, decoded, &NUMBERS[..count]);
    }
}

/// Explicit attention; arguments as [`absorbed`], with `positions` the number of cached positions to rebuild.
pub fn explicit<'s>(
    compute: &Compute,
    shape: &Shape,
    kv_b: &WeightRef,
    q: &[f32],
    cache: Table,
    positions: usize,
    attended: &(dyn Fn(usize) -> Attended<'s> + Sync),
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let rows = q.len() / (shape.heads * shape.query());
    let (k, team) = (compute.kernels, &compute.team);
    let (threads, width) = (team.threads(), shape.rebuilt_width());
    let per_thread = scratch.rebuilt.len() / threads;
    assert!(positions * width <= per_thread, "the explicit form was sized for fewer than {positions} positions");
    let query = &mut scratch.query[..rows * shape.heads * shape.query()];
    team.for_chunks(query, rows * shape.query(), &|head, queries| {
        for (row, query) in queries.chunks_exact_mut(shape.query()).enumerate() {
            query.copy_from_slice(&q[(row * shape.heads + head) * shape.query()..][..shape.query()]);
        }
    });
    let query = &*query;
    for first in (0..shape.heads).step_by(threads) {
        let count = threads.min(shape.heads - first);
        let rebuilt = &mut scratch.rebuilt[..count * per_thread];
        let heads = &mut scratch.heads[first * rows * shape.value..][..count * rows * shape.value];
        team.for_chunks2(rebuilt, per_thread, heads, rows * shape.value, &|i, rebuilt, outs| {
            let head = first + i;
            rebuild(k, shape, kv_b, head, cache, &mut rebuilt[..positions * width]);
            let (key, value) = (0..shape.query(), shape.query()..width);
            let cached = Cached { rows: Table::F32(rebuilt), width, key, value };
            let queries = &query[head * rows * shape.query()..][..rows * shape.query()];
            let mut row = 0;
            while row < rows {
                let (seen, together) = together(row, rows, attended);
                let queries = &queries[row * shape.query()..][..together * shape.query()];
                let outs = &mut outs[row * shape.value..][..together * shape.value];
                pool(k, shape.scale(), queries, &cached, seen, 1, outs);
                row += together;
            }
        });
    }
    gather_heads(shape, 1, rows, &scratch.heads[..rows * shape.heads * shape.value], out);
}

/// What `row` attends to, and how many rows from it on see one position more each: they can walk the cache together.
fn together<'s>(row: usize, rows: usize, attended: &dyn Fn(usize) -> Attended<'s>) -> (Attended<'s>, usize) {
    let seen = attended(row);
    let Attended::Prefix(n) = seen else { return (seen, 1) };
    let next = |i: &usize| matches!(attended(row + i), Attended::Prefix(seen) if seen == n + i);
    (seen, (0..HEAD_GROUP.min(rows - row)).take_while(next).count())
}

/// Keys and values of one head for every position: `rebuilt[position] = [key | rotary key | value]`.
fn rebuild(k: &Kernels, shape: &Shape, kv_b: &WeightRef, head: usize, cache: Table, rebuilt: &mut [f32]) {
    let (block, width) = (shape.nope + shape.value, shape.rebuilt_width());
    let positions = rebuilt.len() / width;
    for (position, rebuilt) in rebuilt.chunks_exact_mut(width).enumerate() {
        cache.copy_to(position * shape.cached() + shape.rank, &mut rebuilt[shape.nope..shape.query()]);
    }
    let mut room = [0; SCORE_BLOCK];
    for_decoded(k, kv_b, head * block..(head + 1) * block, |first, decoded, _| {
        for start in (0..positions).step_by(SCORE_BLOCK) {
            let at = attended_block(&Attended::Prefix(positions), start, &mut room);
            let mut products = [0.0f32; DECODED_TOGETHER * SCORE_BLOCK];
            let products = &mut products[..decoded.len() / shape.rank * at.len()];
            k.dots(decoded, &RowsAt::new(cache, shape.cached(), 0..shape.rank, at), products);
            // Positions one by one: what is written to one lies together.
            for (i, rebuilt) in rebuilt[start * width..].chunks_exact_mut(width).take(at.len()).enumerate() {
                for (row, products) in (first..).zip(products.chunks_exact(at.len())) {
                    rebuilt[if row < shape.nope { row } else { row + shape.rope }] = products[i];
                }
            }
        }
    });
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
pub(in crate::ops) mod tests {
    use super::*;
    use crate::kernels::{Format, MatrixSpec, Team, bf16_of};
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
        let halves: Vec<u16> = cache.iter().map(|value| bf16_of(*value)).collect();
        let rounded: Vec<f32> = halves.iter().map(|half| f32::from_bits(u32::from(*half) << 16)).collect();
        let sparse: Vec<u32> = (0..positions as u32).filter(|p| p % 3 == 1).collect();
        let attended = |row: usize| match row {
            0 => Attended::Prefix(1),
            1 => Attended::Prefix(positions),
            _ => Attended::Listed(&sparse),
        };
        let mut outs = vec![];
        let held = [(Table::F32(&cache), &cache), (Table::F32(&rounded), &rounded), (Table::Bf16(&halves), &rounded)];
        for ((held, floats), threads) in held.into_iter().flat_map(|held| [(held, 1), (held, 2)]) {
            let c = compute(threads);
            let mut scratch = Scratch::new(&s, rows, threads, positions, &mut Room::default());
            let (mut a, mut b) = (vec![0.0; rows * s.heads * s.value], vec![0.0; rows * s.heads * s.value]);
            absorbed(&c, &s, &w, &q, held, &attended, &mut scratch, &mut a);
            explicit(&c, &s, &w, &q, held, positions, &attended, &mut scratch, &mut b);
            for row in 0..rows {
                let list: Vec<u32> = match attended(row) {
                    Attended::Prefix(n) => (0..n as u32).collect(),
                    Attended::Listed(p) => p.to_vec(),
                };
                let want = naive(&kv_b, &q[row * s.heads * s.query()..], floats, &list);
                for (i, want) in want.iter().enumerate() {
                    let at = row * s.heads * s.value + i;
                    assert!((f64::from(a[at]) - want).abs() < 3e-6, "absorbed row {row} value {i}: {} {want}", a[at]);
                    assert!((f64::from(b[at]) - want).abs() < 3e-6, "explicit row {row} value {i}: {} {want}", b[at]);
                }
            }
            // One row alone gives the bits it has in the batch.
            let mut alone = vec![0.0; s.heads * s.value];
            let query = &q[2 * s.heads * s.query()..];
            absorbed(&c, &s, &w, query, held, &|_| attended(2), &mut scratch, &mut alone);
            assert_eq!(alone, a[2 * s.heads * s.value..]);
            outs.push((a, b));
        }
        assert!(outs[0] == outs[1] && outs[2] == outs[3], "thread count changed a bit");
        assert!(outs[4] == outs[2] && outs[5] == outs[2], "halves are not the numbers they are the halves of");
        assert!(outs[0] != outs[2], "rounding makes no difference");
    }

    #[test]
    fn explicit_pays_later_for_the_large_model() {
        let glm52 = Shape { heads: 64, nope: 192, rope: 64, value: 256, rank: 512 };
        // 1088 against 512 products a pair, 229,376 to rebuild a position.
        assert_eq!(glm52.explicit_pays_from(), 229_376usize.div_ceil(576));
    }
}

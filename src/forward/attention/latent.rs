//! Latent attention: a low-rank query, a latent and a rotary key cached, positions selected by an indexer.

use super::Part;
use crate::checkpoint::arch::{IndexerArch, IndexerKind, LatentArch};
use crate::forward::state::{LayerCache, quantized};
use crate::forward::{Form, Model, Rows};
use crate::kernels::{Input, Kernels, Quantized};
use crate::limits::ATTENTION_ROWS;
use crate::model::weights::{IndexerWeights, LatentWeights};
use crate::ops::attention::latent::{self, Shape};
use crate::ops::indexer::{Scored, Selection};
use crate::ops::norm;
use crate::ops::room::Room;

/// Epsilon of the norms inside attention, which the reference does not take from the config.
const INNER_NORM_EPS: f64 = 1e-6;

/// Buffers of the block, `[rows, ..]`.
pub struct Scratch {
    arch: LatentArch,
    q_a: Vec<f32>,
    q: Vec<f32>,
    kv: Vec<f32>,
    /// Heads' outputs, `[rows, heads * value]`.
    context: Vec<f32>,
    quantized: Quantized,
    index: IndexScratch,
    selection: Selection,
    attention: latent::Scratch,
}

/// Buffers of the indexer, `[rows, ..]`.
struct IndexScratch {
    queries: Vec<f32>,
    keys: Vec<f32>,
    weights: Vec<f32>,
}

impl Scratch {
    pub(super) fn new(
        k: &Kernels,
        a: &LatentArch,
        indexer: Option<&IndexerArch>,
        rows: usize,
        context: usize,
        threads: usize,
        explicit: bool,
        room: &mut Room,
    ) -> Scratch {
        let shape = shape_of(a);
        // What a row attends to is kept for later layers; everything else is of the rows that are taken together.
        let selection = |top_k, room: &mut Room| Selection::new(rows, context, top_k, threads, room);
        let taken = rows.min(ATTENTION_ROWS);
        let (index_heads, index_dim, top_k) = indexer.map_or((0, 0, usize::MAX), |i| (i.heads, i.dim, i.top_k));
        Scratch {
            arch: *a,
            q_a: room.floats(taken * a.q_rank),
            q: room.floats(taken * a.heads * shape.query()),
            kv: room.floats(taken * shape.cached()),
            context: room.floats(taken * a.heads * a.value),
            quantized: quantized(k, taken, a.q_rank.max(a.heads * a.value), room),
            index: IndexScratch {
                queries: room.floats(taken * index_heads * index_dim),
                keys: room.floats(taken * index_dim),
                weights: room.floats(taken * index_heads),
            },
            selection: selection(top_k, room),
            attention: latent::Scratch::new(&shape, taken, threads, if explicit { context } else { 0 }, room),
        }
    }
}

/// Shapes as the arithmetic takes them.
pub(super) fn shape_of(a: &LatentArch) -> Shape {
    Shape { heads: a.heads, nope: a.nope, rope: a.rope, value: a.value, rank: a.kv_rank }
}

/// Attends from the rows of `x`; the result, `[rows, hidden]`, goes to `out`.
pub(super) fn attend(
    model: &Model,
    w: &LatentWeights,
    kind: IndexerKind,
    cache: &mut LayerCache,
    scratch: &mut Scratch,
    x: &Input,
    part: Part,
    form: Form,
    out: &mut [f32],
) {
    let Scratch { arch: a, q_a, q, kv, context, quantized, index, selection, attention } = scratch;
    let Part { first, rows } = part;
    let (c, n, shape) = (&model.compute, rows.count, shape_of(a));
    let view = |m| model.resident.view(m);
    let q_a = &mut q_a[..n * a.q_rank];
    let q = &mut q[..n * a.heads * shape.query()];

    c.matmul(&view(&w.q_a), x, q_a);
    q_a.chunks_exact_mut(a.q_rank).for_each(|row| norm::rms_in_place(row, &w.q_a_norm, INNER_NORM_EPS));
    let latent_query = c.input(q_a, n, a.q_rank, quantized);
    c.matmul(&view(&w.q_b), &latent_query, q);
    for (i, row) in q.chunks_exact_mut(a.heads * shape.query()).enumerate() {
        for head in row.chunks_exact_mut(shape.query()) {
            model.rope.rotate(&mut head[a.nope..], rows.start + i);
        }
    }
    cache_latents(model, w, a, cache, kv, x, rows);

    match (&w.indexer, kind) {
        (Some(indexer), _) if model.sparse => {
            select(model, indexer, cache, index, selection, x, &latent_query, part);
        }
        // The selection of the last full layer is still there.
        (None, IndexerKind::Shared) if model.sparse => {}
        _ => selection.dense(first, rows.start, n),
    }

    let (kv_b, positions) = (view(&w.kv_b), rows.start + n);
    let attended = |row| selection.row(first + row);
    let context = &mut context[..n * a.heads * a.value];
    let cached = cache.rows(positions);
    match form {
        Form::Absorbed => latent::absorbed(c, &shape, &kv_b, q, cached, &attended, attention, context),
        Form::Explicit => latent::explicit(c, &shape, &kv_b, q, cached, positions, &attended, attention, context),
    }
    let context = c.input(context, n, a.heads * a.value, quantized);
    c.matmul(&view(&w.o), &context, out);
}

/// Caches what the rows of `x` leave to later ones, and attends from none.
pub(super) fn cache_only(
    model: &Model,
    w: &LatentWeights,
    cache: &mut LayerCache,
    scratch: &mut Scratch,
    x: &Input,
    rows: Rows,
) {
    cache_latents(model, w, &scratch.arch, cache, &mut scratch.kv, x, rows);
    if let Some(indexer) = w.indexer.as_ref().filter(|_| model.sparse) {
        cache_index_keys(model, indexer, cache, &mut scratch.index.keys, x, rows);
    }
}

/// Caches latents and rotary keys of the rows of `x`.
fn cache_latents(
    model: &Model,
    w: &LatentWeights,
    a: &LatentArch,
    cache: &mut LayerCache,
    kv: &mut [f32],
    x: &Input,
    rows: Rows,
) {
    let cached = shape_of(a).cached();
    let kv = &mut kv[..rows.count * cached];
    model.compute.matmul(&model.resident.view(&w.kv_a), x, kv);
    for (i, row) in kv.chunks_exact_mut(cached).enumerate() {
        norm::rms_in_place(&mut row[..a.kv_rank], &w.kv_a_norm, INNER_NORM_EPS);
        model.rope.rotate(&mut row[a.kv_rank..], rows.start + i);
        cache.write(rows.start + i, 0, row);
    }
}

/// Caches index keys of the rows of `x`.
fn cache_index_keys(
    model: &Model,
    w: &IndexerWeights,
    cache: &mut LayerCache,
    keys: &mut [f32],
    x: &Input,
    rows: Rows,
) {
    let Some(shape) = model.arch.indexer else { return };
    let keys = &mut keys[..rows.count * shape.dim];
    model.compute.matmul(&model.resident.view(&w.wk), x, keys);
    for (i, key) in keys.chunks_exact_mut(shape.dim).enumerate() {
        norm::layer_norm(key, &w.k_norm, &w.k_bias, INNER_NORM_EPS);
        model.rope.rotate(key, rows.start + i);
        cache.write_index_key(rows.start + i, key);
    }
}

/// Caches the rows' index keys and selects what each row attends to.
fn select(
    model: &Model,
    w: &IndexerWeights,
    cache: &mut LayerCache,
    scratch: &mut IndexScratch,
    selection: &mut Selection,
    x: &Input,
    latent_query: &Input,
    part: Part,
) {
    let Part { first, rows } = part;
    let Some(shape) = model.arch.indexer else { return };
    let (c, n) = (&model.compute, rows.count);
    cache_index_keys(model, w, cache, &mut scratch.keys, x, rows);
    let visible = rows.start + n;
    if !selection.is_sparse_at(visible) {
        selection.dense(first, rows.start, n);
        return;
    }
    let queries = &mut scratch.queries[..n * shape.heads * shape.dim];
    c.matmul(&model.resident.view(&w.wq_b), latent_query, queries);
    for (i, row) in queries.chunks_exact_mut(shape.heads * shape.dim).enumerate() {
        row.chunks_exact_mut(shape.dim).for_each(|head| model.rope.rotate(head, rows.start + i));
    }
    let weights = &mut scratch.weights[..n * shape.heads];
    c.matmul(&model.resident.view(&w.weights_proj), x, weights);
    let factor = 1.0 / (shape.heads as f32).sqrt();
    weights.iter_mut().for_each(|v| *v *= factor);
    let keys = cache.index_keys(visible);
    selection.select(c, first, rows.start, &Scored { heads: shape.heads, dim: shape.dim, queries, weights, keys });
}

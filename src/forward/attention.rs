//! The attention block of a layer: projections, rotation, cache, selection, attention, output.

use super::state::{LayerCache, State};
use super::{Form, Model, Rows};
use crate::checkpoint::arch::IndexerKind;
use crate::kernels::Input;
use crate::model::resident::{IndexerWeights, Layer};
use crate::ops::{attention, norm};

/// Epsilon of the norms inside attention, which the reference does not take from the config.
const INNER_NORM_EPS: f64 = 1e-6;

/// Attends from the rows in `state.normed`; the result, `[rows, hidden]`, goes to `state.branch`.
pub(super) fn block(model: &Model, layer: &Layer, cache: &mut LayerCache, state: &mut State, rows: Rows, form: Form) {
    let (arch, c, w) = (&model.arch, &model.compute, &layer.attention);
    let (a, n) = (&arch.attention, rows.count);
    let view = |m| model.resident.view(m);
    let q_a = &mut state.q_a[..n * a.q_rank];
    let kv = &mut state.kv[..n * (a.kv_rank + a.rope)];
    let q = &mut state.q[..n * a.heads * (a.nope + a.rope)];

    let x = c.input(&state.normed[..n * arch.hidden], n, arch.hidden, &mut state.quantized);
    c.matmul(&view(&w.q_a), &x, q_a);
    c.matmul(&view(&w.kv_a), &x, kv);
    q_a.chunks_exact_mut(a.q_rank).for_each(|row| norm::rms_in_place(row, &w.q_a_norm, INNER_NORM_EPS));
    let latent_query = c.input(q_a, n, a.q_rank, &mut state.quantized_inner);
    c.matmul(&view(&w.q_b), &latent_query, q);
    for (i, row) in q.chunks_exact_mut(a.heads * (a.nope + a.rope)).enumerate() {
        for head in row.chunks_exact_mut(a.nope + a.rope) {
            model.rope.rotate(&mut head[a.nope..], rows.start + i);
        }
    }
    for (i, row) in kv.chunks_exact_mut(a.kv_rank + a.rope).enumerate() {
        norm::rms_in_place(&mut row[..a.kv_rank], &w.kv_a_norm, INNER_NORM_EPS);
        model.rope.rotate(&mut row[a.kv_rank..], rows.start + i);
        cache.latent_mut(rows.start + i).copy_from_slice(row);
    }

    match (&w.indexer, layer.arch.indexer) {
        (Some(indexer), _) if model.sparse => {
            let (index, selection) = (&mut state.index, &mut state.selection);
            select(model, indexer, cache, index, selection, &x, &latent_query, rows);
        }
        // The selection of the last full layer is still there.
        (None, IndexerKind::Shared) if model.sparse => {}
        _ => state.selection.dense(rows.start, n),
    }

    let (selection, shape, kv_b) = (&state.selection, &state.shape, view(&w.kv_b));
    let attended = |row| selection.row(row);
    let context = &mut state.context[..n * a.heads * a.value];
    let positions = rows.start + n;
    let cached = cache.latents(positions);
    match form {
        Form::Absorbed => attention::absorbed(c, shape, &kv_b, q, cached, &attended, &mut state.attention, context),
        Form::Explicit => {
            attention::explicit(c, shape, &kv_b, q, cached, positions, &attended, &mut state.attention, context);
        }
    }
    let context = c.input(context, n, a.heads * a.value, &mut state.quantized_inner);
    c.matmul(&view(&w.o), &context, &mut state.branch[..n * arch.hidden]);
}

/// Buffers of the indexer, `[rows, ..]`.
pub(super) struct IndexScratch {
    pub(super) queries: Vec<f32>,
    pub(super) keys: Vec<f32>,
    pub(super) weights: Vec<f32>,
}

/// Caches the rows' index keys and selects what each row attends to.
fn select(
    model: &Model,
    w: &IndexerWeights,
    cache: &mut LayerCache,
    scratch: &mut IndexScratch,
    selection: &mut crate::ops::indexer::Selection,
    x: &Input,
    latent_query: &Input,
    rows: Rows,
) {
    let Some(shape) = model.arch.indexer else { return };
    let (c, n) = (&model.compute, rows.count);
    let keys = &mut scratch.keys[..n * shape.dim];
    c.matmul(&model.resident.view(&w.wk), x, keys);
    for (i, key) in keys.chunks_exact_mut(shape.dim).enumerate() {
        norm::layer_norm(key, &w.k_norm, &w.k_bias, INNER_NORM_EPS);
        model.rope.rotate(key, rows.start + i);
        cache.index_key_mut(rows.start + i).copy_from_slice(key);
    }
    let visible = rows.start + n;
    if !selection.is_sparse_at(visible) {
        selection.dense(rows.start, n);
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
    selection.select(c, shape.heads, shape.dim, rows.start, queries, weights, cache.index_keys(visible));
}

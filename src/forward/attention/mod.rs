//! The attention block of a layer, a kind a file: projections, rotation, cache, attention, output.

mod full;
mod latent;

use super::state::{LayerCache, State};
use super::{Form, Model, Rows};
use crate::checkpoint::arch::{Arch, AttentionArch};
use crate::kernels::Kernels;
use crate::limits::ATTENTION_ROWS;
use crate::model::weights::{AttentionWeights, Layer};
use crate::ops::attention::latent::Shape;
use crate::ops::room::Room;

/// Buffers of a block, of the kind that the model has.
pub(super) enum Scratch {
    Latent(Box<latent::Scratch>),
    Full(Box<full::Scratch>),
}

impl Scratch {
    /// Arguments as of [`State::new`].
    pub(super) fn new(
        k: &Kernels,
        arch: &Arch,
        rows: usize,
        context: usize,
        threads: usize,
        explicit: bool,
        room: &mut Room,
    ) -> Scratch {
        match &arch.attention {
            AttentionArch::Latent(a) => {
                let indexer = arch.indexer.as_ref();
                Scratch::Latent(Box::new(latent::Scratch::new(k, a, indexer, rows, context, threads, explicit, room)))
            }
            AttentionArch::Full(a) => Scratch::Full(Box::new(full::Scratch::new(k, a, rows.min(ATTENTION_ROWS), room))),
        }
    }
}

/// Rows of a step that are taken together.
#[derive(Clone, Copy)]
struct Part {
    /// Which row of the step is the first.
    first: usize,
    rows: Rows,
}

/// Attends from the rows in `state.normed`; the result, `[rows, hidden]`, goes to `state.branch`.
pub(super) fn block(model: &Model, layer: &Layer, cache: &mut LayerCache, state: &mut State, rows: Rows, form: Form) {
    let hidden = model.arch.hidden;
    let State { normed, branch, attention, quantized, .. } = state;
    for first in (0..rows.count).step_by(ATTENTION_ROWS) {
        let count = ATTENTION_ROWS.min(rows.count - first);
        let part = Part { first, rows: Rows { start: rows.start + first, count } };
        let used = first * hidden..(first + count) * hidden;
        let x = model.compute.input(&normed[used.clone()], count, hidden, quantized);
        let out = &mut branch[used];
        match (&layer.attention, &mut *attention) {
            (AttentionWeights::Latent(w), Scratch::Latent(scratch)) => {
                latent::attend(model, w, layer.arch.indexer, cache, scratch, &x, part, form, out);
            }
            (AttentionWeights::Full(w), Scratch::Full(scratch)) => {
                full::attend(model, w, cache, scratch, &x, part.rows, out);
            }
            _ => unreachable!("weights and buffers are both made for the attention of the model"),
        }
    }
}

/// Caches what the rows in `state.normed` leave to later ones, of latent attention.
pub(super) fn cache_only(model: &Model, layer: &Layer, cache: &mut LayerCache, state: &mut State, rows: Rows) {
    let hidden = model.arch.hidden;
    let State { normed, attention, quantized, .. } = state;
    let (AttentionWeights::Latent(w), Scratch::Latent(scratch)) = (&layer.attention, attention) else {
        unreachable!("only the layer that drafts is cached alone, and its attention is latent")
    };
    for first in (0..rows.count).step_by(ATTENTION_ROWS) {
        let count = ATTENTION_ROWS.min(rows.count - first);
        let part = Rows { start: rows.start + first, count };
        let x = model.compute.input(&normed[first * hidden..(first + count) * hidden], count, hidden, quantized);
        latent::cache_only(model, w, cache, scratch, &x, part);
    }
}

/// Shapes of latent attention as the arithmetic takes them, where a model has that kind.
pub fn latent_shape(arch: &Arch) -> Option<Shape> {
    match &arch.attention {
        AttentionArch::Latent(a) => Some(latent::shape_of(a)),
        AttentionArch::Full(_) => None,
    }
}

//! The multi-token-prediction layer: from the hidden state of position t and token t + 1, logits of token t + 2.

use std::ops::Range;

use super::state::{KvCache, State};
use super::{ExpertExecutor, Form, ForwardError, Logits, Model, Rows, attention, decoder_layer, embed, head};
use crate::meter::{Meter, Stage};
use crate::model::weights::Mtp;
use crate::ops::norm;

/// Runs the MTP layer for positions `kv.len() ..`.
///
/// `next` holds token t + 1 for each of those positions t; `hidden` (`[next.len(), hidden]`) holds the main model's
/// state after its final norm ([`State::final_hidden`]) for a first draft, the MTP layer's own output
/// ([`State::residual`] after this step) for a further one. Logits of every row end in `state`. Panics when the model was opened without its MTP layer.
pub fn mtp_step(
    model: &Model,
    experts: &mut dyn ExpertExecutor,
    kv: &mut KvCache,
    state: &mut State,
    meter: &mut Meter,
    next: &[u32],
    hidden: &[f32],
) -> Result<(), ForwardError> {
    let mtp = loaded(model);
    let rows = Rows { start: kv.len(), count: next.len() };
    join(model, mtp, state, next, hidden);
    meter.lap(Stage::Embed);

    let [cache] = kv.layers_mut() else { panic!("the MTP layer has one cache layer") };
    decoder_layer(model, &mtp.layer, experts, cache, state, meter, rows, Form::Absorbed)?;
    kv.advance(rows.count);
    let head_matrix = mtp.head.as_ref().unwrap_or(&model.resident.head);
    head(model, head_matrix, &mtp.head_norm, state, rows.count, Logits::All);
    meter.lap(Stage::Head);
    Ok(())
}

/// Caches positions `kv.len() ..` as [`mtp_step`] would, and computes nothing else of them: what a position leaves in the
/// cache of a single layer depends on its input alone. Needs no expert.
pub fn mtp_cache(model: &Model, kv: &mut KvCache, state: &mut State, meter: &mut Meter, next: &[u32], hidden: &[f32]) {
    let mtp = loaded(model);
    let (rows, used) = (Rows { start: kv.len(), count: next.len() }, next.len() * model.arch.hidden);
    join(model, mtp, state, next, hidden);
    norm::rms_rows(&state.x[..used], &mtp.layer.input_norm, model.arch.norm_eps, &mut state.normed[..used]);
    let [cache] = kv.layers_mut() else { panic!("the MTP layer has one cache layer") };
    attention::cache_only(model, &mtp.layer, cache, state, rows);
    kv.advance(rows.count);
    meter.lap(Stage::Attention);
}

/// As [`mtp_cache`], of the first `next.len()` positions of the main model's last step.
pub fn mtp_cache_step(model: &Model, kv: &mut KvCache, state: &mut State, meter: &mut Meter, next: &[u32]) {
    let used = next.len() * model.arch.hidden;
    // Nothing is in this buffer between steps.
    let mut hidden = std::mem::take(&mut state.shared);
    final_hidden(model, state, 0..next.len(), &mut hidden[..used]);
    mtp_cache(model, kv, state, meter, next, &hidden[..used]);
    state.shared = hidden;
}

/// Hidden states after the final norm of these rows of the main model's last step, whether it computed logits or not.
pub fn final_hidden(model: &Model, state: &State, rows: Range<usize>, out: &mut [f32]) {
    let width = model.arch.hidden;
    norm::rms_rows(
        &state.x[rows.start * width..rows.end * width],
        &model.resident.final_norm,
        model.arch.norm_eps,
        out,
    );
}

/// The layer's input from tokens and hidden states, in `state.x`.
fn join(model: &Model, mtp: &Mtp, state: &mut State, next: &[u32], hidden: &[f32]) {
    let (width, eps, n) = (model.arch.hidden, model.arch.norm_eps, next.len());
    embed(model, mtp.embed.as_ref().unwrap_or(&model.resident.embed), next, &mut state.x);
    let joined = &mut state.normed[..n * 2 * width];
    for ((joined, token), hidden) in
        joined.chunks_exact_mut(2 * width).zip(state.x.chunks_exact(width)).zip(hidden.chunks_exact(width))
    {
        let (left, right) = joined.split_at_mut(width);
        norm::rms_rows(token, &mtp.enorm, eps, left);
        norm::rms_rows(hidden, &mtp.hnorm, eps, right);
    }
    let input = model.compute.input(joined, n, 2 * width, &mut state.quantized);
    model.compute.matmul(&model.resident.view(&mtp.eh_proj), &input, &mut state.x[..n * width]);
}

fn loaded(model: &Model) -> &Mtp {
    match &model.resident.mtp {
        Some(mtp) => mtp,
        None => panic!("the model was opened without its MTP layer"),
    }
}

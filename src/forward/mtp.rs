//! The multi-token-prediction layer: from the hidden state of position t and token t + 1, logits of token t + 2.

use super::state::{KvCache, State};
use super::{ExpertExecutor, Form, ForwardError, Logits, Model, Rows, decoder_layer, embed, head};
use crate::meter::{Meter, Stage};
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
    let Some(mtp) = &model.resident.mtp else { panic!("the model was opened without its MTP layer") };
    let (width, eps, n) = (model.arch.hidden, model.arch.norm_eps, next.len());
    let rows = Rows { start: kv.len(), count: n };

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
    meter.lap(Stage::Embed);

    let [cache] = kv.layers_mut() else { panic!("the MTP layer has one cache layer") };
    decoder_layer(model, &mtp.layer, experts, cache, state, meter, rows, Form::Absorbed)?;
    kv.advance(n);
    let head_matrix = mtp.head.as_ref().unwrap_or(&model.resident.head);
    head(model, head_matrix, &mtp.head_norm, state, n, Logits::All);
    meter.lap(Stage::Head);
    Ok(())
}

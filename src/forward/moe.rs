//! Feed-forward: the gated MLP, the router's choice, and the routed experts beside the shared one.

use super::state::{MlpScratch, State};
use super::{ExpertCall, ExpertExecutor, ForwardError, GuessFrom, Model, Rows, add};
use crate::checkpoint::arch::Scoring;
use crate::kernels::Input;
use crate::meter::{Meter, Stage};
use crate::model::weights::{Matrix, Mlp};
use crate::ops::route::{self, RouteRule, Scores};

/// `down(silu(gate x) * up x)` for every row of `input`.
pub(super) fn gated_mlp(model: &Model, w: &Mlp, input: &Input, scratch: &mut MlpScratch, out: &mut [f32]) {
    let view = |m| model.resident.view(m);
    scratch.gated(&model.compute, &view(&w.gate), &view(&w.up), &view(&w.down), input, out);
}

/// The rules of the model's routers.
pub(super) fn rule(model: &Model) -> RouteRule {
    let moe = &model.arch.moe;
    let scores = match moe.scoring {
        Scoring::Sigmoid => Scores::Sigmoid,
        Scoring::Softmax => Scores::Softmax,
    };
    RouteRule {
        scores,
        top_k: moe.top_k,
        groups: moe.groups,
        top_groups: moe.top_groups,
        normalize: moe.normalize,
        scaling: moe.scaling,
    }
}

/// Chooses experts and gates of every row from `state.normed`, in f32 whatever the precision of other matmuls.
pub(super) fn route(
    model: &Model,
    layer: usize,
    router: &Matrix,
    bias: &[f32],
    state: &mut State,
    rows: Rows,
) -> Result<(), ForwardError> {
    let (moe, c, n) = (&model.arch.moe, &model.compute, rows.count);
    let rule = rule(model);
    let input = c.exact(&state.normed[..n * model.arch.hidden], n, model.arch.hidden);
    let scores = &mut state.scores[..n * moe.experts];
    c.matmul(&model.resident.view(router), &input, scores);
    for row in 0..n {
        route::choose(
            &rule,
            &mut scores[row * moe.experts..][..moe.experts],
            bias,
            &mut state.biased,
            &mut state.ids[row * moe.top_k..][..moe.top_k],
            &mut state.gates[row * moe.top_k..][..moe.top_k],
        )
        .map_err(|_| ForwardError::NotFinite { layer, position: rows.start + row })?;
    }
    Ok(())
}

/// Routed plus shared experts of `state.normed` into `state.branch`.
pub(super) fn experts(
    model: &Model,
    layer: usize,
    shared: Option<&Mlp>,
    executor: &mut dyn ExpertExecutor,
    state: &mut State,
    meter: &mut Meter,
    rows: Rows,
) -> Result<(), ForwardError> {
    let (hidden, top_k, n) = (model.arch.hidden, model.arch.moe.top_k, rows.count);
    let State { x, normed, branch, shared: shared_out, mlp, quantized, ids, gates, lookahead, .. } = state;
    // Quantized once: the shared expert and every routed one read the same rows.
    let input = model.compute.input(&normed[..n * hidden], n, hidden, quantized);
    let call = ExpertCall {
        compute: &model.compute,
        layer,
        top_k,
        input,
        ids: &ids[..n * top_k],
        gates: &gates[..n * top_k],
        out: &mut branch[..n * hidden],
    };
    let shared_out = &mut shared_out[..n * hidden];
    executor.request(&call, meter)?;
    let x = &x[..n * hidden];
    let early = model.guess_from == GuessFrom::Attention || shared.is_none();
    if early && lookahead.guess(model, layer, x, None, executor) {
        meter.lap(Stage::Hint);
    }
    if let Some(w) = shared {
        gated_mlp(model, w, &input, mlp, shared_out);
        meter.lap(Stage::Shared);
    }
    if !early && lookahead.guess(model, layer, x, Some(shared_out), executor) {
        meter.lap(Stage::Hint);
    }
    executor.serve(call, meter)?;
    if shared.is_some() {
        add(&mut branch[..n * hidden], shared_out);
    }
    Ok(())
}

//! A token's path.
//!
//! [`step`] takes a run of consecutive tokens of one sequence through the model: one token is decode, many are a prefill
//! chunk. Every row is computed alone (matmuls reduce each output by one thread in a fixed order, attention walks a row's
//! own positions, expert outputs are summed in slot order), so a batch of rows gives the bits of one by one, whatever
//! the threads, the pool or the order in which reads complete.

mod attention;
mod executor;
mod lookahead;
mod moe;
mod mtp;
mod observe;
pub mod stages;
mod state;

use std::sync::atomic::{AtomicBool, Ordering};

use thiserror::Error;

use crate::checkpoint::Arch;
use crate::checkpoint::arch::RopePairs;
use crate::meter::{Meter, Stage};
use crate::model::resident::Resident;
use crate::model::weights::{Layer, Matrix, MlpWeights};
use crate::ops::room::Room;
use crate::ops::rope::{Pairs, Rope};
use crate::ops::{Compute, norm};
use crate::store::StoreError;
pub use attention::latent_shape;
pub use executor::{ExpertCall, ExpertExecutor, ExpertScratch, Streamed};
pub use lookahead::{Guess, GuessFrom, GuessRule, Lookahead, Tally};
pub use mtp::{final_hidden, mtp_cache, mtp_cache_step, mtp_step};
pub use observe::{Observed, Observer};
pub use state::{KvBits, KvCache, State};

/// Why a step has no result.
#[derive(Debug, Error)]
pub enum ForwardError {
    /// An expert could not be had.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The cancel flag was found up; the positions of the step are not part of the cache.
    #[error("cancelled")]
    Cancelled,
    /// Arithmetic left the finite numbers: the weights or the input are damaged.
    #[error("a value that is not finite reached the router of layer {layer} at position {position}")]
    NotFinite {
        /// Model layer.
        layer: usize,
        /// Position in the sequence.
        position: usize,
    },
}

/// Which arithmetic latent attention uses; the two differ in low bits only. Full attention has one form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Queries are carried into the latent space.
    Absorbed,
    /// Keys and values are rebuilt from latents.
    Explicit,
}

/// Which rows of a step get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logits {
    /// None: a prefill chunk that is not the last.
    None,
    /// The last row's.
    Last,
    /// Every row's.
    All,
}

/// The model as the forward pass sees it: everything that a step reads and never changes.
pub struct Model {
    /// Shapes and rules.
    pub arch: Arch,
    /// Weights that stay in memory.
    pub resident: Resident,
    /// Rotary tables, as long as the context.
    pub rope: Rope,
    /// Kernels, threads, precision.
    pub compute: Compute,
    /// Whether any context this model is opened for is long enough for sparse attention, and it is on.
    pub sparse: bool,
    /// Which state of a layer later ones' routers are applied to, to guess what they will choose.
    pub guess_from: GuessFrom,
}

/// Rotary tables for `positions` positions, counted in `room`.
pub fn rope_of(arch: &Arch, positions: usize, room: &mut Room) -> Rope {
    let pairs = match arch.rope_pairs {
        RopePairs::Adjacent => Pairs::Adjacent,
        RopePairs::Halves => Pairs::Halves,
    };
    Rope::new(pairs, arch.rope_theta, arch.attention.rotary(), positions, room)
}

/// What a step is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// Tokens that continue the sequence: at most the rows the state was made for, each below the vocabulary, and no more
    /// than fit into the cache.
    pub tokens: &'a [u32],
    /// Arithmetic of attention.
    pub form: Form,
    /// Rows that get logits.
    pub logits: Logits,
    /// Looked at before every layer.
    pub cancel: &'a AtomicBool,
}

/// Consecutive positions of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rows {
    /// Position of the first row.
    pub start: usize,
    /// Number of rows.
    pub count: usize,
}

/// Takes the tokens of `step` through the model; logits end in `state`. On an error they are not part of `kv`.
pub fn step(
    model: &Model,
    experts: &mut dyn ExpertExecutor,
    kv: &mut KvCache,
    state: &mut State,
    meter: &mut Meter,
    step: &Step,
) -> Result<(), ForwardError> {
    let rows = Rows { start: kv.len(), count: step.tokens.len() };
    embed(model, &model.resident.embed, step.tokens, &mut state.x);
    meter.lap(Stage::Embed);
    for (layer, cache) in model.resident.layers.iter().zip(kv.layers_mut()) {
        if step.cancel.load(Ordering::Relaxed) {
            return Err(ForwardError::Cancelled);
        }
        meter.enter(Some(layer.index as u16));
        decoder_layer(model, layer, experts, cache, state, meter, rows, step.form)?;
    }
    meter.enter(None);
    kv.advance(rows.count);
    head(model, &model.resident.head, &model.resident.final_norm, state, rows.count, step.logits);
    meter.lap(Stage::Head);
    Ok(())
}

/// `x += attention(norm(x)); x += feed_forward(norm(x))`.
fn decoder_layer(
    model: &Model,
    layer: &Layer,
    experts: &mut dyn ExpertExecutor,
    cache: &mut state::LayerCache,
    state: &mut State,
    meter: &mut Meter,
    rows: Rows,
    form: Form,
) -> Result<(), ForwardError> {
    let used = rows.count * model.arch.hidden;
    norm::rms_rows(&state.x[..used], &layer.input_norm, model.arch.norm_eps, &mut state.normed[..used]);
    attention::block(model, layer, cache, state, rows, form);
    add(&mut state.x[..used], &state.branch[..used]);
    meter.lap(Stage::Attention);

    norm::rms_rows(&state.x[..used], &layer.post_norm, model.arch.norm_eps, &mut state.normed[..used]);
    match &layer.mlp {
        MlpWeights::Dense(mlp) => {
            let early = model.guess_from == GuessFrom::Attention;
            if early && state.lookahead.guess(model, layer.index, &state.x[..used], None, experts) {
                meter.lap(Stage::Hint);
            }
            let input = model.compute.input(&state.normed[..used], rows.count, model.arch.hidden, &mut state.quantized);
            moe::gated_mlp(model, mlp, &input, &mut state.mlp, &mut state.branch[..used]);
            add(&mut state.x[..used], &state.branch[..used]);
            meter.lap(Stage::Dense);
            if !early && state.lookahead.guess(model, layer.index, &state.x[..used], None, experts) {
                meter.lap(Stage::Hint);
            }
        }
        MlpWeights::Sparse { router, bias, shared } => {
            moe::route(model, layer.index, router, bias, state, rows)?;
            state.lookahead.judge(layer.index, &state.ids[..rows.count * model.arch.moe.top_k]);
            meter.lap(Stage::Route);
            moe::experts(model, layer.index, shared.as_ref(), experts, state, meter, rows)?;
            add(&mut state.x[..used], &state.branch[..used]);
            meter.lap(Stage::Reduce);
        }
    }
    Ok(())
}

/// Rows of the embedding matrix.
fn embed(model: &Model, matrix: &Matrix, tokens: &[u32], out: &mut [f32]) {
    let table = model.resident.view(matrix);
    for (&token, out) in tokens.iter().zip(out.chunks_exact_mut(model.arch.hidden)) {
        model.compute.kernels.decode_row(&table, token as usize, out);
    }
}

/// Final norm of every row that `logits` asks for, then the output head.
fn head(model: &Model, matrix: &Matrix, weight: &[f32], state: &mut State, count: usize, logits: Logits) {
    let hidden = model.arch.hidden;
    let first = match logits {
        Logits::None => return,
        Logits::Last => count - 1,
        Logits::All => 0,
    };
    let (x, normed) = (&state.x[first * hidden..count * hidden], &mut state.normed[first * hidden..count * hidden]);
    norm::rms_rows(x, weight, model.arch.norm_eps, normed);
    let rows = count - first;
    state.logits.resize(rows * model.arch.vocab, 0.0);
    let input = model.compute.input(normed, rows, hidden, &mut state.quantized);
    model.compute.matmul(&model.resident.view(matrix), &input, &mut state.logits);
}

fn add(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.iter_mut().zip(y) {
        *x += y;
    }
}

//! A guess of what the next layer will ask for, early enough to read it meanwhile.
//!
//! The guess is the next layer's own router, applied to the state after this layer's attention as if its feed-forward
//! added nothing: the residual stream changes little in one block. It is a choice of reads and nothing else; no value that
//! reaches a logit depends on it.

use super::{ExpertExecutor, Model, moe};
use crate::checkpoint::arch::Arch;
use crate::model::weights::{Layer, MlpWeights};
use crate::ops::room::Room;
use crate::ops::{norm, route};

/// Buffers of a guess, and how good guesses have been.
pub struct Lookahead {
    normed: Vec<f32>,
    /// `[rows, experts]`.
    scores: Vec<f32>,
    biased: Vec<f32>,
    /// Of one row.
    ids: Vec<u16>,
    gates: Vec<f32>,
    /// Sum over rows of the weights with which each expert was chosen.
    weight: Vec<f32>,
    /// The last guess, the likeliest first, and the layer it is for.
    guess: Vec<u16>,
    layer: Option<usize>,
    tally: Tally,
}

/// How good guesses have been, whatever was read for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Experts that layers asked for which had been guessed about.
    pub asked: u64,
    /// Experts guessed for them.
    pub guessed: u64,
    /// Experts that were both.
    pub right: u64,
}

impl Lookahead {
    /// Buffers for steps of up to `rows` rows, counted in `room`.
    pub fn new(arch: &Arch, rows: usize, room: &mut Room) -> Lookahead {
        let moe = &arch.moe;
        Lookahead {
            normed: room.floats(rows * arch.hidden),
            scores: room.floats(rows * moe.experts),
            biased: room.floats(moe.experts),
            ids: room.counted(vec![0; moe.top_k]),
            gates: room.floats(moe.top_k),
            weight: room.floats(moe.experts),
            guess: room.empty(moe.experts),
            layer: None,
            tally: Tally::default(),
        }
    }

    /// Counters since the start or the last [`Lookahead::reset`].
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Sets the counters to zero and forgets the last guess.
    pub fn reset(&mut self) {
        self.tally = Tally::default();
        self.layer = None;
    }

    /// Compares the last guess with `ids`, every row's choice in `layer`.
    pub(super) fn judge(&mut self, layer: usize, ids: &[u16]) {
        if self.layer.take() != Some(layer) {
            return;
        }
        // The weights are of no further use: here they mark what was asked for and not yet counted.
        self.weight.fill(0.0);
        ids.iter().for_each(|&id| self.weight[id as usize] = 1.0);
        self.tally.guessed += self.guess.len() as u64;
        self.tally.asked += self.weight.iter().filter(|&&asked| asked != 0.0).count() as u64;
        self.tally.right += self.guess.iter().filter(|&&id| self.weight[id as usize] != 0.0).count() as u64;
    }

    /// Guesses for the layer after `layer`, where that is a routed one, from `x` (`[rows, hidden]`), and tells `executor`.
    pub(super) fn guess(&mut self, model: &Model, layer: usize, x: &[f32], executor: &mut dyn ExpertExecutor) {
        let Some(next) = model.resident.layers.get(layer + 1) else { return };
        if self.choose(model, next, x) {
            self.layer = Some(next.index);
            executor.hint(next.index, &self.guess);
        }
    }

    /// Fills in the guess; `false` where there is none to be made.
    fn choose(&mut self, model: &Model, next: &Layer, x: &[f32]) -> bool {
        let MlpWeights::Sparse { router, bias, .. } = &next.mlp else { return false };
        let (hidden, experts) = (model.arch.hidden, model.arch.moe.experts);
        let (rule, rows) = (moe::rule(model), x.len() / hidden);
        let normed = &mut self.normed[..x.len()];
        norm::rms_rows(x, &next.post_norm, model.arch.norm_eps, normed);
        let scores = &mut self.scores[..rows * experts];
        model.compute.matmul(&model.resident.view(router), &model.compute.exact(normed, rows, hidden), scores);
        self.weight.fill(0.0);
        for scores in scores.chunks_exact_mut(experts) {
            if route::choose(&rule, scores, bias, &mut self.biased, &mut self.ids, &mut self.gates).is_err() {
                return false;
            }
            self.ids.iter().zip(&self.gates).for_each(|(&id, gate)| self.weight[id as usize] += gate);
        }
        self.guess.clear();
        self.guess.extend((0..experts as u16).filter(|&id| self.weight[id as usize] > 0.0));
        self.guess.sort_unstable_by(|&a, &b| self.weight[b as usize].total_cmp(&self.weight[a as usize]));
        true
    }
}

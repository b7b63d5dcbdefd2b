//! A guess of what later layers will ask for, early enough to read it meanwhile.
//!
//! The guess is a later layer's own router, applied to a state of this layer as if nothing in between added anything: the
//! residual stream changes little in one block. It is a choice of reads and nothing else; no value that reaches a logit
//! depends on it.

use super::{ExpertExecutor, Model, moe};
use crate::checkpoint::arch::Arch;
use crate::limits::LOOKAHEAD_LAYERS_MAX;
use crate::meter::Share;
use crate::model::weights::{Layer, MlpWeights};
use crate::ops::room::Room;
use crate::ops::{norm, route};

/// Guesses that wait for the choice of their layer: one made a layer before, two made two layers before, and so on.
const PENDING: usize = LOOKAHEAD_LAYERS_MAX * (LOOKAHEAD_LAYERS_MAX + 1) / 2;

/// The state of a layer that a later layer's router is applied to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GuessFrom {
    /// After its attention: the guess is out before anything else of the layer is computed.
    Attention,
    /// After everything that needs no routed expert, which is the shared expert, or the whole of a dense layer: a better
    /// guess, and a later one.
    #[default]
    Shared,
}

/// How guesses are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuessRule {
    /// From which state.
    pub from: GuessFrom,
    /// For how many layers after it, 1 to [`LOOKAHEAD_LAYERS_MAX`]. A wrong guess that is being read takes those along that
    /// wait behind it for later layers.
    pub layers: usize,
}

impl Default for GuessRule {
    fn default() -> GuessRule {
        GuessRule { from: GuessFrom::default(), layers: 1 }
    }
}

/// What a layer is thought to choose.
#[derive(Clone, Copy, Debug)]
pub struct Guess<'a> {
    /// Which model layer.
    pub layer: usize,
    /// Layers from the one whose state it is made from to that one, from 1 on.
    pub ahead: usize,
    /// `[rows, top_k]`, each row's ids ascending and distinct.
    pub ids: &'a [u16],
    /// All of those, the likeliest first.
    pub experts: &'a [u16],
}

/// Buffers of guesses, and how good guesses have been.
pub struct Lookahead {
    /// `[rows, hidden]`: the state that is guessed from, normed.
    normed: Vec<f32>,
    /// `[rows, experts]`.
    scores: Vec<f32>,
    biased: Vec<f32>,
    /// Of one row.
    gates: Vec<f32>,
    /// Sum over rows of the weights with which each expert was chosen.
    weight: Vec<f32>,
    experts: Vec<u16>,
    pending: [Pending; PENDING],
    /// `[layers, top_k]`: what each layer chose for the last token.
    previous: Vec<u16>,
    has_previous: Vec<bool>,
    tally: Tally,
}

/// A guess whose layer has not chosen yet.
struct Pending {
    layer: Option<usize>,
    /// `[rows, top_k]`.
    ids: Vec<u16>,
}

/// How good guesses have been, whatever was read for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Of what tokens chose, what was guessed one layer before, two layers before, and so on.
    pub recall: [Share; LOOKAHEAD_LAYERS_MAX],
    /// Of the different experts guessed one layer before for all rows of a step, which are what is read, those that any of
    /// them chose.
    pub precision: Share,
    /// Of what tokens chose, what the layer had chosen for the token before: a guess that costs nothing.
    pub previous: Share,
}

impl Lookahead {
    /// Buffers for steps of up to `rows` rows, counted in `room`.
    pub fn new(arch: &Arch, rows: usize, room: &mut Room) -> Lookahead {
        let moe = &arch.moe;
        // The MTP layer comes after the others.
        let layers = arch.layers.len() + 1;
        Lookahead {
            normed: room.floats(rows * arch.hidden),
            scores: room.floats(rows * moe.experts),
            biased: room.floats(moe.experts),
            gates: room.floats(moe.top_k),
            weight: room.floats(moe.experts),
            experts: room.empty(moe.experts),
            pending: std::array::from_fn(|_| Pending { layer: None, ids: room.empty(rows * moe.top_k) }),
            previous: room.filled(0, layers * moe.top_k),
            has_previous: room.filled(false, layers),
            tally: Tally::default(),
        }
    }

    /// Counters since the start or the last [`Lookahead::reset`].
    pub fn tally(&self) -> Tally {
        self.tally
    }

    /// Sets the counters to zero and forgets the last guesses and choices: another sequence begins.
    pub fn reset(&mut self) {
        self.tally = Tally::default();
        self.pending.iter_mut().for_each(|pending| pending.layer = None);
        self.has_previous.fill(false);
    }

    /// Compares what was guessed with `ids`, every row's choice in `layer`.
    pub(super) fn judge(&mut self, layer: usize, ids: &[u16]) {
        let Lookahead { pending, previous, has_previous, tally, gates, weight, .. } = self;
        let top_k = gates.len();
        for ahead in 1..=LOOKAHEAD_LAYERS_MAX {
            let Pending { layer: guessed, ids: guess } = &mut pending[slot(layer, ahead)];
            // A step that was broken off may have left one for more rows or fewer.
            if guessed.take() != Some(layer) || guess.len() != ids.len() {
                continue;
            }
            let rows = ids.chunks_exact(top_k).zip(guess.chunks_exact(top_k));
            rows.for_each(|(ids, guess)| tally.recall[ahead - 1].add(ids, guess));
            if ahead == 1 {
                // The weights are of no further use: here they mark who was chosen, and who has been counted.
                tally.judge_union(ids, guess, weight);
            }
        }
        let previous = &mut previous[layer * top_k..][..top_k];
        for ids in ids.chunks_exact(top_k) {
            if std::mem::replace(&mut has_previous[layer], true) {
                tally.previous.add(ids, previous);
            }
            previous.copy_from_slice(ids);
        }
    }

    /// Guesses for the layers after `layer`, as far as `executor` wants it and as they are routed ones, from `x` plus
    /// `correction` (`[rows, hidden]`), and tells `executor`. Whether there was a guess to be made.
    pub(super) fn guess(
        &mut self,
        model: &Model,
        layer: usize,
        x: &[f32],
        correction: Option<&[f32]>,
        executor: &mut dyn ExpertExecutor,
    ) -> bool {
        let mut guessed = false;
        for ahead in 1..=executor.hints().min(LOOKAHEAD_LAYERS_MAX) {
            let Some(later) = model.resident.layers.get(layer + ahead) else { break };
            if self.choose(model, later, ahead, x, correction) {
                let ids = &self.pending[slot(later.index, ahead)].ids;
                executor.hint(&Guess { layer: later.index, ahead, ids, experts: &self.experts });
                guessed = true;
            }
        }
        guessed
    }

    /// Fills in a guess; `false` where there is none to be made.
    fn choose(&mut self, model: &Model, later: &Layer, ahead: usize, x: &[f32], correction: Option<&[f32]>) -> bool {
        let MlpWeights::Sparse { router, bias, .. } = &later.mlp else { return false };
        let (hidden, moe) = (model.arch.hidden, &model.arch.moe);
        let (rule, rows) = (moe::rule(model), x.len() / hidden);
        let normed = &mut self.normed[..x.len()];
        normed.copy_from_slice(x);
        if let Some(correction) = correction {
            super::add(normed, correction);
        }
        normed.chunks_exact_mut(hidden).for_each(|row| norm::rms_in_place(row, &later.post_norm, model.arch.norm_eps));
        let scores = &mut self.scores[..rows * moe.experts];
        model.compute.matmul(&model.resident.view(router), &model.compute.exact(normed, rows, hidden), scores);
        let Pending { layer, ids } = &mut self.pending[slot(later.index, ahead)];
        *layer = None;
        ids.resize(rows * moe.top_k, 0);
        self.weight.fill(0.0);
        for (scores, ids) in scores.chunks_exact_mut(moe.experts).zip(ids.chunks_exact_mut(moe.top_k)) {
            if route::choose(&rule, scores, bias, &mut self.biased, ids, &mut self.gates).is_err() {
                return false;
            }
            ids.iter().zip(&self.gates).for_each(|(&id, gate)| self.weight[id as usize] += gate);
        }
        *layer = Some(later.index);
        self.experts.clear();
        self.experts.extend((0..moe.experts as u16).filter(|&id| self.weight[id as usize] > 0.0));
        self.experts.sort_unstable_by(|&a, &b| self.weight[b as usize].total_cmp(&self.weight[a as usize]));
        true
    }
}

/// Where the guess for `layer` that is made `ahead` layers before it waits: it is judged before the same place is needed
/// for another.
fn slot(layer: usize, ahead: usize) -> usize {
    ahead * (ahead - 1) / 2 + layer % ahead
}

impl Tally {
    /// Counts the different experts of `guess`, and those of them that are in `ids`; `marks` has a place for each expert.
    fn judge_union(&mut self, ids: &[u16], guess: &[u16], marks: &mut [f32]) {
        const CHOSEN: f32 = 1.0;
        const COUNTED: f32 = 2.0;
        marks.fill(0.0);
        ids.iter().for_each(|&id| marks[id as usize] = CHOSEN);
        for &id in guess {
            let mark = std::mem::replace(&mut marks[id as usize], COUNTED);
            self.precision.of += u64::from(mark != COUNTED);
            self.precision.count += u64::from(mark == CHOSEN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_guess_waits_in_a_place_of_its_own() {
        // From each layer guesses go out for those after it; a place is free again once its layer has chosen.
        let mut waiting: [Option<usize>; PENDING] = [None; PENDING];
        for layer in 0..20 {
            (1..=LOOKAHEAD_LAYERS_MAX).for_each(|ahead| {
                let taken = waiting[slot(layer, ahead)].take();
                assert!(layer < ahead || taken == Some(layer), "{taken:?} waits in the place of {layer}");
            });
            for ahead in 1..=LOOKAHEAD_LAYERS_MAX {
                assert_eq!(waiting[slot(layer + ahead, ahead)].replace(layer + ahead), None);
            }
        }
    }

    #[test]
    fn what_is_guessed_for_several_rows_is_judged_once() {
        let mut tally = Tally::default();
        // Chosen 1, 2, 4 and 6; guessed 1, 4, 5 and 7.
        tally.judge_union(&[1, 4, 2, 4, 1, 6], &[1, 4, 5, 7, 1, 5], &mut [0.0; 8]);
        assert_eq!(tally.precision, Share { of: 4, count: 2 });
    }
}

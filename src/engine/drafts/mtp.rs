//! Drafts from the model's own MTP layer, which was trained to say the token after the next.
//!
//! Its cache holds, for each position of the answer so far, what the main model's output there and the token after it leave
//! in one layer. Positions are kept in step without running the layer: what became of a step's rows waits here until the
//! token after the last of them is known. Further drafts of a run feed the layer its own output; what those leave in the cache
//! is forgotten, and the main model's output takes its place.
//!
//! Positions that the main model took from a file went through no step, and are none of the layer's: its sequence begins
//! with the first that did. Scores depend on how far apart positions are, and not on where they are, so that it drafts as in a
//! shorter text.

use crate::checkpoint::arch::Arch;
use crate::engine::EngineError;
use crate::engine::sampler::{Sampler, Sampling};
use crate::forward::{self, KvCache, Model, State, Streamed};
use crate::meter::{Meter, Stage};
use crate::ops::room::Room;

/// The layer's cache, and rows of the main model that it does not hold yet.
pub(super) struct Mtp {
    kv: KvCache,
    /// `[rows, hidden]`: the main model's output after its final norm, at the positions from `kv.len()` on.
    waiting: Vec<f32>,
    /// The tokens after those; that after the last is missing until it is chosen.
    next: Vec<u32>,
    /// `[hidden]`: a row that outlives the buffers of a step.
    own: Vec<f32>,
    width: usize,
}

/// What a draft is computed with.
pub(in crate::engine) struct Tools<'a> {
    pub(in crate::engine) model: &'a Model,
    pub(in crate::engine) experts: &'a mut Streamed,
    pub(in crate::engine) state: &'a mut State,
    pub(in crate::engine) meter: &'a mut Meter,
    pub(in crate::engine) sampler: &'a mut Sampler,
    pub(in crate::engine) sampling: &'a Sampling,
}

impl Mtp {
    /// Over a cache of the layer, for steps of an answer of up to `rows` rows; all but the cache is counted in `room`.
    pub(super) fn new(arch: &Arch, kv: KvCache, rows: usize, room: &mut Room) -> Mtp {
        Mtp {
            kv,
            waiting: room.empty(rows * arch.hidden),
            next: room.empty(rows),
            own: room.floats(arch.hidden),
            width: arch.hidden,
        }
    }

    /// Another sequence begins.
    pub(super) fn begin(&mut self) {
        self.kv.truncate(0);
        self.waiting.clear();
        self.next.clear();
    }

    /// The sequence goes on with `token`.
    pub(super) fn goes_on(&mut self, token: u32) {
        if !self.waiting.is_empty() {
            self.next.push(token);
        }
    }

    /// A step of up to `rows` rows is to be made, and no draft before it.
    pub(super) fn make_room(&mut self, model: &Model, state: &mut State, meter: &mut Meter, rows: usize) {
        if self.waiting.len() + rows * self.width > self.waiting.capacity() {
            self.cache_waiting(model, state, meter, self.next.len());
        }
    }

    /// Takes the first rows of the main model's last step, those of `tokens`.
    pub(super) fn follow(&mut self, model: &Model, state: &mut State, meter: &mut Meter, tokens: &[u32]) {
        let (rows, width, first) = (tokens.len(), self.width, self.waiting.len());
        if first + rows * width <= self.waiting.capacity() {
            self.waiting.resize(first + rows * width, 0.0);
            forward::final_hidden(model, state, 0..rows, &mut self.waiting[first..]);
            self.next.extend_from_slice(&tokens[1..]);
            return;
        }
        // A chunk of a prompt. Its last row is overwritten by what is computed for those before.
        assert!(first == 0, "rows were left behind by those that follow them");
        forward::final_hidden(model, state, rows - 1..rows, &mut self.own);
        forward::mtp_cache_step(model, &mut self.kv, state, meter, &tokens[1..]);
        self.waiting.extend_from_slice(&self.own);
    }

    /// Adds up to `most` tokens to `drafts` that may follow the sequence, the first of them at `position`. After an error the
    /// cache lacks positions.
    pub(super) fn draft(
        &mut self,
        tools: &mut Tools,
        position: usize,
        most: usize,
        drafts: &mut Vec<u32>,
    ) -> Result<(), EngineError> {
        let Tools { model, experts, state, meter, sampler, sampling } = tools;
        let (last, width) = (self.next.len() - 1, self.width);
        let mut token = self.next[last];
        self.own.copy_from_slice(&self.waiting[last * width..]);
        self.cache_waiting(model, state, meter, last);
        let known = self.kv.len() + 1;
        for at in 0..most {
            forward::mtp_step(model, *experts, &mut self.kv, state, meter, &[token], &self.own)?;
            // The random number of the position is the one that its token is chosen with.
            let chosen = sampler.sample(state.logits(), sampling, (position + at) as u64);
            meter.lap(Stage::Sample);
            let Ok(id) = chosen else { break };
            drafts.push(id);
            token = id;
            self.own.copy_from_slice(state.residual(1, width));
        }
        self.kv.truncate(known);
        Ok(())
    }

    /// Caches the first `rows` of what waits, and forgets all that does.
    fn cache_waiting(&mut self, model: &Model, state: &mut State, meter: &mut Meter, rows: usize) {
        let Mtp { kv, waiting, next, width, .. } = self;
        if rows > 0 {
            forward::mtp_cache(model, kv, state, meter, &next[..rows], &waiting[..rows * *width]);
        }
        waiting.clear();
        next.clear();
    }
}

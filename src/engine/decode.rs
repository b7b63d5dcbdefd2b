//! The answer: a token a step, or as many as were drafted and turn out right.
//!
//! A step takes the current token and drafts of what follows it. The row of a token has the bits that it would have alone,
//! and its successor is chosen from its logits as of its own position. While that is what was drafted, the next row is one of
//! the answer too; the first that is something else is the current token of the next step, and rows behind it are none of the
//! cache. At whatever token an answer ends, nothing is left that a plain one would not have left.

use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use super::drafts::Tools;
use super::{Engine, EngineError, Finish, Job, Shaping};
use crate::forward::{ForwardError, Logits, Observer, Step};
use crate::meter::Stage;
use crate::store::StoreError;

impl EngineError {
    /// Whether somebody wanted the generation to end, and nothing is wrong.
    pub(super) fn is_stop(&self) -> bool {
        matches!(self, EngineError::Forward(ForwardError::Cancelled | ForwardError::Store(StoreError::GivenUp)))
    }

    /// Whether a step may have come to this by its drafts alone.
    pub(super) fn may_be_of_drafts(&self) -> bool {
        let EngineError::Forward(error) = self else { return false };
        match error {
            ForwardError::Store(error) => match error {
                StoreError::Read { .. } | StoreError::Damaged(_) | StoreError::Unfit(_) => true,
                // Said once, and of tokens that were given out.
                StoreError::Spoilt(_) => false,
                StoreError::Device(_) | StoreError::GivenUp => false,
            },
            ForwardError::NotFinite { .. } => true,
            ForwardError::Cancelled => false,
        }
    }
}

impl Engine {
    /// Goes on from the logits of the prompt until the answer ends.
    pub(super) fn decode(
        &mut self,
        job: &Job,
        shaping: &mut Shaping,
        cancel: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        observer: &mut dyn Observer,
        ids: &mut Vec<u32>,
    ) -> Result<Finish, EngineError> {
        if job.max_tokens == 0 {
            return Ok(Finish::Length);
        }
        let mut id = self.choose(job, shaping)?;
        loop {
            if let Some(finish) = self.give(id, job, shaping, on_token, ids)? {
                return Ok(finish);
            }
            // As many tokens as may follow the one that this step finds in any case.
            let room = (job.max_tokens - ids.len()).min(self.context() - self.kv.len()) - 1;
            let began = self.meter.wall();
            if !self.draft_forced(id, shaping.forced()?, room) {
                self.draft(id, job, room)?;
            }
            self.drafted_step(cancel, observer)?;
            self.drafts.observe((self.meter.wall() - began).as_secs_f64());
            loop {
                id = self.choose(job, shaping)?;
                if !self.drafts.is_next(id) {
                    break;
                }
                if let Some(finish) = self.give(id, job, shaping, on_token, ids)? {
                    self.drafts.end();
                    return Ok(finish);
                }
                self.kv.advance(1);
                self.drafts.accept();
                self.times.decode_steps += 1;
            }
            self.follow();
        }
    }

    /// Drafts what must follow `id`, up to `most` tokens of it. Whether anything must.
    fn draft_forced(&mut self, id: u32, forced: &[u32], most: usize) -> bool {
        let Engine { model, state, meter, drafts, .. } = self;
        // A guide may say what it likes.
        let known = forced.iter().take_while(|&&id| (id as usize) < model.arch.vocab).count();
        let forced = &forced[..known];
        drafts.force(model, state, meter, id, forced, most)
    }

    /// Drafts up to `most` tokens that may follow `id`.
    fn draft(&mut self, id: u32, job: &Job, most: usize) -> Result<(), EngineError> {
        let position = self.kv.len() + 1;
        let Engine { model, experts, state, meter, sampler, drafts, .. } = self;
        drafts.draft(Tools { model, experts, state, meter, sampler, sampling: &job.sampling }, id, position, most)
    }

    /// Tells what drafts which rows of the step are part of the answer.
    fn follow(&mut self) {
        let run = std::mem::take(&mut self.drafts.run);
        let Engine { model, state, meter, drafts, .. } = self;
        drafts.follow(model, state, meter, &run[..=drafts.row]);
        drafts.run = run;
    }

    /// The token that follows the last position.
    fn choose(&mut self, job: &Job, shaping: &mut Shaping) -> Result<u32, EngineError> {
        let (row, vocab, position) = (self.drafts.row, self.model.arch.vocab, self.kv.len());
        let logits = &self.state.logits()[row * vocab..][..vocab];
        let id = self.shaper.choose(&mut self.sampler, logits, &job.sampling, shaping, position as u64)?;
        self.meter.lap(Stage::Sample);
        Ok(id)
    }

    /// Hands out a token that was chosen. Why the answer ends, where it does.
    fn give(
        &mut self,
        id: u32,
        job: &Job,
        shaping: &mut Shaping,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        ids: &mut Vec<u32>,
    ) -> Result<Option<Finish>, EngineError> {
        if job.stop_ids.contains(&id) {
            return Ok(Some(Finish::Stop));
        }
        ids.push(id);
        self.drafts.push(id);
        self.shaper.push(id, shaping)?;
        if ids.len() == 1 {
            self.times.first_token = Some(self.meter.wall());
        }
        let go_on = on_token(id);
        self.meter.lap(Stage::Other);
        if go_on.is_break() {
            return Ok(Some(Finish::StopString));
        }
        if shaping.has_ended() {
            return Ok(Some(Finish::Stop));
        }
        Ok((ids.len() == job.max_tokens || self.kv.len() == self.context()).then_some(Finish::Length))
    }

    /// Puts the run of drafts through the model; after that the first of it is the last position of the cache.
    fn drafted_step(&mut self, cancel: &AtomicBool, observer: &mut dyn Observer) -> Result<(), EngineError> {
        let mut run = std::mem::take(&mut self.drafts.run);
        let mut result = self.decode_step(&run, cancel, observer);
        // What a draft asks for the answer may never need: that it cannot be had ends no answer. Nor is it asked for again: a
        // bad place of a drive may cost seconds each time.
        if run.len() > 1 && result.as_ref().is_err_and(EngineError::may_be_of_drafts) {
            self.drafts.leave();
            run.truncate(1);
            result = self.decode_step(&run, cancel, observer);
        }
        self.drafts.run = run;
        result
    }

    /// Puts `run` through the model: a token, after which the logits of its successor are there, and drafts, whose rows are
    /// there and not part of the cache yet.
    pub(super) fn decode_step(
        &mut self,
        run: &[u32],
        cancel: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let (began, start) = (self.meter.wall(), self.kv.len());
        let is_plain = run.len() == 1;
        // Steps of more rows take longer: nothing is learned from comparing them with others.
        if is_plain {
            self.turning.turn(&mut self.experts);
        } else {
            self.turning.hold(&mut self.experts);
        }
        let step = Step { tokens: run, form: self.decode_form, logits: Logits::All, cancel };
        self.observed_step(&step, observer)?;
        self.kv.truncate(start + 1);
        if is_plain {
            self.turning.judge(&self.experts, (self.meter.wall() - began).as_secs_f64());
        }
        self.drafts.tally.drafted += run.len() as u64 - 1;
        self.times.forwards += 1;
        self.times.decode_steps += 1;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Damaged, ExpertKey};
    use millstream_io::{FileId, FileSpan, IoError};

    #[test]
    fn what_is_said_of_earlier_tokens_and_of_the_device_is_never_put_down_to_drafts() {
        let key = ExpertKey { layer: 2, expert: 20 };
        let span = FileSpan { file: FileId(0), offset: 0, len: 1 };
        let damaged = Damaged { key, shard: "a".into(), span, expected: 1, found: 2, mirrored: false };
        let died = || IoError::DeviceDied { cause: "gone".to_owned() };
        let of = |error: StoreError| EngineError::Forward(ForwardError::Store(error)).may_be_of_drafts();
        assert!(!of(StoreError::Spoilt(damaged.clone())), "it is said once: nobody would ever know");
        assert!(!of(StoreError::Device(died())) && !of(StoreError::GivenUp));
        assert!(of(StoreError::Damaged(damaged)) && of(StoreError::Read { key, source: died() }));
        assert!(!EngineError::Forward(ForwardError::Cancelled).may_be_of_drafts());
        assert!(EngineError::Forward(ForwardError::NotFinite { layer: 1, position: 2 }).may_be_of_drafts());
    }
}

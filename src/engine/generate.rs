//! One generation: the prompt in chunks, then the [answer](super::decode); and texts that are scored.

use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use super::config::DEFAULT_PREFILL_ROWS;
use super::overlap::Readings;
use super::rows::chunk_of;
use super::sampler::Sampling;
use super::stats::Fetched;
use super::{Engine, EngineError, Shaping};
use crate::forward::{self, ForwardError, KvCache, Logits, Observed, Observer, Step};
use crate::meter::Stage;

/// What to generate.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Prompt token ids.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Ids that end the answer; they are not part of it.
    pub stop_ids: Vec<u32>,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model chose a stop token, or the answer is whole by its constraint.
    Stop,
    /// The token limit or the end of the context.
    Length,
    /// The callback ended it: a stop string.
    StopString,
    /// The cancel flag was set, or the watch broke a wait.
    Interrupted,
}

/// Result of a generation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Generated ids, without the stop token.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
}

/// Clock readings and counts of the last generation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Times {
    pub(super) prompt_tokens: usize,
    /// Of those, in the context or the file of one.
    pub(super) cached_tokens: usize,
    pub(super) tokens: usize,
    /// Tokens that went back into the model after the prompt.
    pub(super) decode_steps: usize,
    /// Steps that took them there: fewer where drafts were accepted.
    pub(super) forwards: usize,
    /// Until the logits of the last prompt token; none of a generation that did not come so far.
    pub(super) prefill: Option<Duration>,
    pub(super) first_token: Option<Duration>,
    /// When the prompt was done.
    pub(super) before_decode: Readings,
    /// What the prompt fetched.
    pub(super) of_prefill: Fetched,
}

impl Engine {
    /// Generates, from an empty context unless it [lasts](Engine::let_context_last). `on_token` sees each token before the next is computed and may end the answer;
    /// `cancel` is looked at before every layer; what ends the wait for a read is [`Engine::set_watch`].
    pub fn generate(
        &mut self,
        job: &Job,
        cancel: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Outcome, EngineError> {
        self.generate_observed(job, cancel, on_token, &mut ())
    }

    /// As [`Engine::generate`], showing `observer` the router's choice in every routed layer of every step, in order, and
    /// the guesses of it; those of drafts too, accepted or not.
    pub fn generate_observed(
        &mut self,
        job: &Job,
        cancel: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, EngineError> {
        self.generate_shaped(job, &mut Shaping::default(), cancel, on_token, observer)
    }

    /// As [`Engine::generate_observed`], with an answer that `shaping` has a say in.
    pub fn generate_shaped(
        &mut self,
        job: &Job,
        shaping: &mut Shaping,
        cancel: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        observer: &mut dyn Observer,
    ) -> Result<Outcome, EngineError> {
        self.check(job)?;
        shaping.check(self.model.arch.vocab)?;
        self.begin_after(self.held_of(&job.prompt), job.prompt.len());
        self.drafts.begin(&job.prompt);
        self.shaper.begin(&job.prompt, &shaping.penalties);
        // The longest answer is known here, so that no token has to make room for the next.
        let mut ids = Vec::with_capacity(job.max_tokens.min(self.context()));
        let kept = self.take_kept(&job.prompt);
        observer.kept(kept);
        let result = self
            .prefill(&job.prompt[kept..], cancel, observer)
            .and_then(|()| self.decode(job, shaping, cancel, on_token, observer, &mut ids));
        let finish = self.end(result);
        self.end_kept(&finish);
        self.times.tokens = ids.len();
        Ok(Outcome { ids, finish: finish? })
    }

    /// Logits of every position of `tokens` (`[tokens, vocab]`), from an empty context.
    pub fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.score_observed(tokens, &mut ())
    }

    /// As [`Engine::score`], showing `observer` the router's choice in every routed layer of every chunk, in order.
    pub fn score_observed(&mut self, tokens: &[u32], observer: &mut dyn Observer) -> Result<Vec<f32>, EngineError> {
        let mut scores = Vec::with_capacity(tokens.len() * self.model.arch.vocab);
        let take = &mut |logits: &[f32]| scores.extend_from_slice(logits);
        self.score_chunks(0, tokens, &AtomicBool::new(false), observer, take)?;
        Ok(scores)
    }

    /// As [`Engine::score`], handing the logits to `take` chunk by chunk: those of a long text are larger than a model's
    /// memory may be. `cancel` is looked at before every layer.
    pub fn score_to(
        &mut self,
        tokens: &[u32],
        cancel: &AtomicBool,
        take: &mut dyn FnMut(&[f32]),
    ) -> Result<Finish, EngineError> {
        self.score_behind(0, tokens, cancel, take)
    }

    /// As [`Engine::score_to`], behind the first `keep` positions of the context, which are not computed again. A logit has the
    /// bits that it would have where all of it were scored at once.
    pub fn score_behind(
        &mut self,
        keep: usize,
        tokens: &[u32],
        cancel: &AtomicBool,
        take: &mut dyn FnMut(&[f32]),
    ) -> Result<Finish, EngineError> {
        match self.score_chunks(keep, tokens, cancel, &mut (), take) {
            Err(error) if error.is_stop() => Ok(Finish::Interrupted),
            other => other.map(|()| Finish::Length),
        }
    }

    fn score_chunks(
        &mut self,
        keep: usize,
        tokens: &[u32],
        cancel: &AtomicBool,
        observer: &mut dyn Observer,
        take: &mut dyn FnMut(&[f32]),
    ) -> Result<(), EngineError> {
        self.check_ids(tokens)?;
        self.check_keep(keep, tokens.len())?;
        self.begin_after(keep, tokens.len());
        let form = self.prompt_form;
        let result = tokens.chunks(self.scored_rows()).try_for_each(|chunk| {
            self.observed_step(&Step { tokens: chunk, form, logits: Logits::All, cancel }, observer)?;
            take(self.state.logits());
            Ok(())
        });
        // Guesses of a text that was not scored to its end are not held until the next one begins.
        self.end_reads().and(result)
    }

    /// Shows `observer` what the router chooses for `tokens`, from an empty context, as it would if each were decoded.
    pub fn route(
        &mut self,
        tokens: &[u32],
        cancel: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<Finish, EngineError> {
        self.check_ids(tokens)?;
        self.begin(tokens.len());
        for chunk in tokens.chunks(self.prefill_rows) {
            let step = Step { tokens: chunk, form: self.decode_form, logits: Logits::None, cancel };
            match self.observed_step(&step, observer) {
                Err(EngineError::Forward(ForwardError::Cancelled)) => return Ok(Finish::Interrupted),
                other => other?,
            }
        }
        self.experts.store.confirm().map_err(ForwardError::Store)?;
        Ok(Finish::Length)
    }

    /// Logits of the MTP layer's first draft at every position t of `tokens` but the last (`[tokens - 1, vocab]`): its
    /// guess of token t + 2, from the hidden state of t and token t + 1. From an empty context, which is left empty.
    pub fn draft_scores(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        if self.model.resident.mtp.is_none() {
            return Err(EngineError::NoMtp);
        }
        self.check_ids(tokens)?;
        self.begin(tokens.len());
        let (form, width, cancel) = (self.prompt_form, self.model.arch.hidden, &AtomicBool::new(false));
        let mut hidden = Vec::with_capacity(tokens.len() * width);
        for chunk in tokens.chunks(self.scored_rows()) {
            self.step(&Step { tokens: chunk, form, logits: Logits::All, cancel })?;
            hidden.extend_from_slice(self.state.final_hidden(chunk.len(), width));
        }
        self.forget(0);
        let rows = self.scored_rows();
        let Engine { model, experts, kv, state, meter, .. } = self;
        let mut kv = KvCache::for_mtp(&model.arch, tokens.len(), model.sparse, kv.bits());
        let mut scores = Vec::with_capacity(tokens.len() * model.arch.vocab);
        for (next, hidden) in tokens[1..].chunks(rows).zip(hidden.chunks(rows * width)) {
            forward::mtp_step(model, experts, &mut kv, state, meter, next, &hidden[..next.len() * width])?;
            scores.extend_from_slice(state.logits());
        }
        self.end_reads()?;
        Ok(scores)
    }

    /// Ends a generation that came to `result`; that it was stopped is an end like others.
    pub(super) fn end(&mut self, result: Result<Finish, EngineError>) -> Result<Finish, EngineError> {
        let result = self.end_reads().and(result);
        self.meter.lap(Stage::Other);
        match result {
            Err(error) if error.is_stop() => Ok(Finish::Interrupted),
            other => other,
        }
    }

    /// Nothing is read ahead any more, and what comes next begins with a row's guesses, wherever this ended. Fails
    /// where what was served turned out to be wrong.
    fn end_reads(&mut self) -> Result<(), EngineError> {
        self.experts.store.drop_guesses();
        self.allow_guesses_of(1);
        Ok(self.experts.store.confirm().map_err(ForwardError::Store)?)
    }

    /// Puts `prompt` through the model in chunks; what follows is decode.
    pub(super) fn prefill(
        &mut self,
        prompt: &[u32],
        cancel: &AtomicBool,
        observer: &mut dyn Observer,
    ) -> Result<(), EngineError> {
        let (form, rows) = (self.prompt_form, chunk_of(prompt.len(), self.prefill_rows));
        let chunks = prompt.len().div_ceil(rows);
        self.allow_guesses_of(rows);
        for (i, tokens) in prompt.chunks(rows).enumerate() {
            let logits = if i + 1 == chunks { Logits::Last } else { Logits::None };
            let Engine { model, state, meter, drafts, .. } = self;
            drafts.prepare(model, state, meter, tokens[0], tokens.len());
            self.observed_step(&Step { tokens, form, logits, cancel }, observer)?;
            let Engine { model, state, meter, drafts, .. } = self;
            drafts.follow(model, state, meter, tokens);
        }
        self.allow_guesses_of(1);
        self.times.prefill = Some(self.meter.wall());
        self.times.before_decode = self.readings();
        self.times.of_prefill = self.fetched();
        Ok(())
    }

    pub(super) fn readings(&self) -> Readings {
        Readings::take(&self.meter, &self.experts.store.device().stats())
    }

    /// Rows of a chunk whose logits are all wanted: those take more memory than anything else of a row.
    fn scored_rows(&self) -> usize {
        self.prefill_rows.min(DEFAULT_PREFILL_ROWS)
    }

    fn step(&mut self, step: &Step) -> Result<(), EngineError> {
        self.observed_step(step, &mut ())
    }

    pub(super) fn observed_step(&mut self, step: &Step, observer: &mut dyn Observer) -> Result<(), EngineError> {
        self.drafts.row = 0;
        self.keep_computed();
        let Engine { model, experts, kv, state, meter, .. } = self;
        let mut experts = Observed { inner: experts, observer };
        forward::step(model, &mut experts, kv, state, meter, step)?;
        self.held.note(self.kv.len(), step.tokens);
        self.note_computed(step);
        Ok(())
    }

    fn begin(&mut self, prompt_tokens: usize) {
        self.begin_after(0, prompt_tokens);
    }

    /// Clocks and counters begin anew; the first `keep` positions of the context stay.
    pub(super) fn begin_after(&mut self, keep: usize, prompt_tokens: usize) {
        self.forget(keep);
        self.drafts.leave();
        self.experts.store.reset_stats();
        self.experts.store.exchange_pins();
        self.state.lookahead.reset();
        self.turning.begin(&mut self.experts);
        self.times = Times { prompt_tokens, ..Times::default() };
        self.meter.restart();
    }

    fn check(&self, job: &Job) -> Result<(), EngineError> {
        job.sampling.check()?;
        self.check_ids(&job.prompt)
    }

    fn check_ids(&self, tokens: &[u32]) -> Result<(), EngineError> {
        if tokens.is_empty() {
            return Err(EngineError::EmptyPrompt);
        }
        if tokens.len() > self.context() {
            return Err(EngineError::PromptTooLong { tokens: tokens.len(), context: self.context() });
        }
        self.check_vocabulary(tokens)
    }

    /// Refuses to go on behind positions that are not there, and beyond the end of the context.
    pub(super) fn check_keep(&self, keep: usize, more: usize) -> Result<(), EngineError> {
        let (tokens, context, positions) = (keep + more, self.context(), self.kv.len());
        if tokens > context {
            return Err(EngineError::PromptTooLong { tokens, context });
        }
        if keep > positions {
            return Err(EngineError::NothingToKeep { keep, positions });
        }
        Ok(())
    }

    /// Refuses ids that the model has no embedding for.
    pub(super) fn check_vocabulary(&self, tokens: &[u32]) -> Result<(), EngineError> {
        let vocab = self.model.arch.vocab;
        match tokens.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(EngineError::TokenOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }
}

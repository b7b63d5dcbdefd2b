//! One generation: prefill in chunks, then token by token.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::config::DEFAULT_PREFILL_ROWS;
use super::sampler::Sampling;
use super::{AttentionForm, Engine, EngineError};
use crate::forward::{self, Form, KvCache, Logits, Observe, Observed};
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
    /// The model chose a stop token.
    Stop,
    /// The token limit or the end of the context.
    Length,
    /// The callback ended it: a stop string.
    StopString,
    /// The cancel flag was set.
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

/// Clock readings of the last generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Times {
    pub(super) prompt_tokens: usize,
    pub(super) tokens: usize,
    pub(super) prefill: Duration,
    pub(super) first_token: Duration,
    pub(super) wall: Duration,
}

impl Engine {
    /// Generates from an empty context. `on_token` sees each token before the next is computed and may end the answer;
    /// `cancel` is looked at between steps.
    pub fn generate(
        &mut self,
        job: &Job,
        cancel: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
    ) -> Result<Outcome, EngineError> {
        self.check(job)?;
        let started = Instant::now();
        self.begin(job.prompt.len());
        // The longest answer is known here, so that no token has to make room for the next.
        let mut ids = Vec::with_capacity(job.max_tokens.min(self.context()));
        let result = self.answer(job, cancel, on_token, &mut ids, started);
        self.meter.lap(Stage::Other);
        self.times.tokens = ids.len();
        self.times.wall = started.elapsed();
        Ok(Outcome { ids, finish: result? })
    }

    /// Logits of every position of `tokens` (`[tokens, vocab]`), from an empty context.
    pub fn score(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.score_observed(tokens, &mut |_, _, _| ())
    }

    /// As [`Engine::score`], showing `observe` the router's choice in every routed layer of every chunk, in order.
    pub fn score_observed(&mut self, tokens: &[u32], observe: &mut Observe) -> Result<Vec<f32>, EngineError> {
        self.check_ids(tokens)?;
        self.begin(tokens.len());
        let form = self.prompt_form(tokens.len());
        let mut scores = Vec::with_capacity(tokens.len() * self.model.arch.vocab);
        for chunk in tokens.chunks(self.prefill_rows) {
            let Engine { model, experts, kv, state, meter, .. } = self;
            let mut experts = Observed { inner: experts, observe: &mut |layer, ids, gates| observe(layer, ids, gates) };
            forward::step(model, &mut experts, kv, state, meter, chunk, form, Logits::All)?;
            scores.extend_from_slice(self.state.logits());
        }
        Ok(scores)
    }

    /// Logits of the MTP layer's first draft at every position t of `tokens` but the last (`[tokens - 1, vocab]`): its
    /// guess of token t + 2, from the hidden state of t and token t + 1. From an empty context, which is left empty.
    pub fn draft_scores(&mut self, tokens: &[u32]) -> Result<Vec<f32>, EngineError> {
        if self.model.resident.mtp.is_none() {
            return Err(EngineError::NoMtp);
        }
        self.check_ids(tokens)?;
        self.begin(tokens.len());
        let (form, width) = (self.prompt_form(tokens.len()), self.model.arch.hidden);
        let mut hidden = Vec::with_capacity(tokens.len() * width);
        for chunk in tokens.chunks(self.prefill_rows) {
            self.step(chunk, form, Logits::All)?;
            hidden.extend_from_slice(self.state.final_hidden(chunk.len(), width));
        }
        self.kv.truncate(0);
        let Engine { model, experts, state, meter, prefill_rows, .. } = self;
        let mut kv = KvCache::for_mtp(&model.arch, tokens.len(), model.sparse);
        let mut scores = Vec::with_capacity(tokens.len() * model.arch.vocab);
        for (next, hidden) in tokens[1..].chunks(*prefill_rows).zip(hidden.chunks(*prefill_rows * width)) {
            forward::mtp_step(model, experts, &mut kv, state, meter, next, &hidden[..next.len() * width])?;
            scores.extend_from_slice(state.logits());
        }
        Ok(scores)
    }

    fn answer(
        &mut self,
        job: &Job,
        cancel: &AtomicBool,
        on_token: &mut dyn FnMut(u32) -> ControlFlow<()>,
        ids: &mut Vec<u32>,
        started: Instant,
    ) -> Result<Finish, EngineError> {
        let form = self.prompt_form(job.prompt.len());
        let chunks = job.prompt.len().div_ceil(self.prefill_rows);
        for (i, chunk) in job.prompt.chunks(self.prefill_rows).enumerate() {
            if cancel.load(Ordering::Relaxed) {
                return Ok(Finish::Interrupted);
            }
            self.step(chunk, form, if i + 1 == chunks { Logits::Last } else { Logits::None })?;
        }
        self.times.prefill = started.elapsed();
        loop {
            if cancel.load(Ordering::Relaxed) {
                return Ok(Finish::Interrupted);
            }
            if ids.len() == job.max_tokens {
                return Ok(Finish::Length);
            }
            let position = self.kv.len();
            let id = self.sampler.sample(self.state.logits(), &job.sampling, position as u64)?;
            self.meter.lap(Stage::Sample);
            if job.stop_ids.contains(&id) {
                return Ok(Finish::Stop);
            }
            ids.push(id);
            if ids.len() == 1 {
                self.times.first_token = started.elapsed();
            }
            let go_on = on_token(id);
            self.meter.lap(Stage::Other);
            if go_on.is_break() {
                return Ok(Finish::StopString);
            }
            if ids.len() == job.max_tokens || position == self.context() {
                return Ok(Finish::Length);
            }
            self.step(&[id], self.decode_form(), Logits::Last)?;
        }
    }

    fn step(&mut self, tokens: &[u32], form: Form, logits: Logits) -> Result<(), EngineError> {
        let Engine { model, experts, kv, state, meter, .. } = self;
        Ok(forward::step(model, experts, kv, state, meter, tokens, form, logits)?)
    }

    fn begin(&mut self, prompt_tokens: usize) {
        self.kv.truncate(0);
        self.experts.store.reset_stats();
        self.times = Times { prompt_tokens, ..Times::default() };
        self.meter.restart();
    }

    /// Decided by the prompt's length alone, so that chunking changes no bit.
    fn prompt_form(&self, tokens: usize) -> Form {
        let pays = tokens.min(DEFAULT_PREFILL_ROWS) >= super::shape_of(&self.model.arch).explicit_pays_from();
        match self.attention {
            AttentionForm::Auto if pays => Form::Explicit,
            AttentionForm::Auto | AttentionForm::Absorbed => Form::Absorbed,
            AttentionForm::Explicit => Form::Explicit,
        }
    }

    fn decode_form(&self) -> Form {
        match self.attention {
            AttentionForm::Explicit => Form::Explicit,
            AttentionForm::Auto | AttentionForm::Absorbed => Form::Absorbed,
        }
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
        let vocab = self.model.arch.vocab;
        match tokens.iter().find(|&&id| id as usize >= vocab) {
            Some(&id) => Err(EngineError::TokenOutOfRange { id, vocab }),
            None => Ok(()),
        }
    }
}

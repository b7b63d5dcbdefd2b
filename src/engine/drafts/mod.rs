//! Drafts: tokens that may come next, from a source that costs less than the model. A step takes them all at once, and what
//! the model would have chosen itself decides how many of them count ([`Engine::generate`](super::Engine::generate)): they
//! change how long an answer takes and no bit of it.

mod ngram;

use super::EngineError;
use crate::limits::DRAFT_TOKENS_MAX;
use crate::ops::room::Room;
use ngram::Ngram;

/// What drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSource {
    /// Nothing: a step takes a token.
    #[default]
    Off,
    /// The sequence itself: what followed the last pair of tokens the last time.
    Ngram,
}

impl DraftSource {
    /// The name people type.
    pub fn name(self) -> &'static str {
        match self {
            DraftSource::Off => "off",
            DraftSource::Ngram => "ngram",
        }
    }
}

/// What drafts, and how much.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DraftRule {
    /// From where.
    pub source: DraftSource,
    /// Most tokens drafted for a step, 1 to [`DRAFT_TOKENS_MAX`].
    pub most: usize,
}

impl Default for DraftRule {
    fn default() -> DraftRule {
        DraftRule { source: DraftSource::Off, most: DraftRule::MOST }
    }
}

impl DraftRule {
    /// Tokens drafted at most where nothing was said.
    pub const MOST: usize = 8;

    /// Rows of a step of an answer.
    pub(super) fn rows(&self) -> usize {
        match self.source {
            DraftSource::Off => 1,
            DraftSource::Ngram => 1 + self.most,
        }
    }

    /// Refuses a length that no engine drafts.
    pub(super) fn check(&self) -> Result<(), EngineError> {
        let (name, value, most) = ("drafted tokens", self.most, DRAFT_TOKENS_MAX);
        match (1..=most).contains(&value) {
            true => Ok(()),
            false => Err(EngineError::Size { name, value, least: 1, most }),
        }
    }
}

/// What drafting came to in a generation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Tokens drafted. Behind the end of an answer nothing counts.
    pub(super) drafted: u64,
    /// Of those, what the model chose too.
    pub(super) accepted: u64,
}

/// The source of drafts, and the tokens of the step that is to be made.
pub(super) struct Drafts {
    pub(super) rule: DraftRule,
    ngram: Option<Ngram>,
    /// The current token, and what may follow it.
    pub(super) run: Vec<u32>,
    /// Of the last step, the row whose logits are those of the last position: the rows behind it were not accepted.
    pub(super) row: usize,
    /// Nothing is drafted for the rest of this answer.
    given_up: bool,
    pub(super) tally: Tally,
}

impl Drafts {
    /// For contexts of up to `context` positions, counted in `room`.
    pub(super) fn new(rule: DraftRule, context: usize, room: &mut Room) -> Drafts {
        let ngram = match rule.source {
            DraftSource::Off => None,
            // The last token of an answer has no position in the context any more.
            DraftSource::Ngram => Some(Ngram::new(context + 1, room)),
        };
        Drafts { rule, ngram, run: room.empty(rule.rows()), row: 0, given_up: false, tally: Tally::default() }
    }

    /// An answer to `prompt` begins.
    pub(super) fn begin(&mut self, prompt: &[u32]) {
        (self.given_up, self.tally) = (false, Tally::default());
        if let Some(ngram) = &mut self.ngram {
            ngram.clear();
            prompt.iter().for_each(|&token| ngram.push(token));
        }
    }

    /// What a draft asked for cannot be had: nothing more is drafted for this answer.
    pub(super) fn give_up(&mut self) {
        self.given_up = true;
    }

    /// The answer goes on with `token`.
    pub(super) fn push(&mut self, token: u32) {
        if let Some(ngram) = &mut self.ngram {
            ngram.push(token);
        }
    }

    /// Fills [`Drafts::run`]: `token`, which was the last pushed, and up to `most` drafts of what follows it.
    pub(super) fn draft(&mut self, token: u32, most: usize) {
        self.run.clear();
        self.run.push(token);
        if let Some(ngram) = self.ngram.as_ref().filter(|_| !self.given_up) {
            ngram.propose(most.min(self.rule.most), &mut self.run);
        }
    }

    /// Whether `id`, which was chosen to follow the last position, is what the step has in its next row.
    pub(super) fn is_next(&self, id: u32) -> bool {
        self.run.get(self.row + 1) == Some(&id)
    }

    /// The next row of the step is one of the answer.
    pub(super) fn accept(&mut self) {
        self.row += 1;
        self.tally.accepted += 1;
    }

    /// The answer ends with the token of the next row, which has no row in the cache; what is behind it was drafted for no
    /// answer.
    pub(super) fn end(&mut self) {
        let behind = self.run.len() - (self.row + 2);
        self.tally.drafted -= behind as u64;
        self.tally.accepted += 1;
    }
}

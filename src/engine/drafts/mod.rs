//! Drafts: tokens that may come next, from a source that costs less than the model. A step takes them all at once, and what
//! the model would have chosen itself decides how many of them count ([`Engine::generate`](super::Engine::generate)): they
//! change how long an answer takes and no bit of it.

mod adapt;
mod mtp;
mod ngram;

use super::EngineError;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::arch::Arch;
use crate::forward::{KvCache, Model, State};
use crate::limits::DRAFT_TOKENS_MAX;
use crate::meter::Meter;
use crate::ops::room::Room;
use adapt::Adapt;
use mtp::Mtp;
pub(super) use mtp::Tools;
use ngram::Ngram;

/// What drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftSource {
    /// Nothing: a step takes a token.
    #[default]
    Off,
    /// As [`DraftSource::Ngram`], as many as measuring shows to pay, which may be none.
    Auto,
    /// The sequence itself: what followed the last pair of tokens the last time. As many as may be drafted.
    Ngram,
    /// The model's MTP layer. As many as may be drafted.
    Mtp,
    /// Nothing but the grammar of the answer, which drafts for every source where it knows one way only.
    Grammar,
}

impl DraftSource {
    /// What makes its drafts.
    pub fn name(self) -> &'static str {
        match self {
            DraftSource::Off => "off",
            DraftSource::Auto | DraftSource::Ngram => "ngram",
            DraftSource::Mtp => "mtp",
            DraftSource::Grammar => "grammar",
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

    /// What is left of it for a model that may not have what drafts.
    pub(super) fn of(self, arch: &Arch) -> DraftRule {
        match self.source {
            DraftSource::Mtp if arch.mtp.is_none() => DraftRule { source: DraftSource::Off, ..self },
            _ => self,
        }
    }

    /// What is worth knowing of drafts in a model for which `asked` was asked for.
    pub(super) fn note(&self, asked: DraftRule, checkpoint: &Checkpoint) -> Option<String> {
        match asked.source {
            DraftSource::Mtp if self.source == DraftSource::Off && !checkpoint.lacks_mtp() => {
                return Some("the model has no MTP layer: nothing is drafted".to_owned());
            }
            DraftSource::Auto if self.source == DraftSource::Off => {
                return Some("drafts would take memory that experts need: nothing is drafted".to_owned());
            }
            _ => {}
        }
        let narrow = checkpoint.narrow_mtp().filter(|_| self.source == DraftSource::Mtp)?;
        Some(format!("weights of the MTP layer are {narrow}: drafts of a narrow layer are seldom right"))
    }

    /// Rows of a step of an answer.
    pub(super) fn rows(&self) -> usize {
        match self.source {
            DraftSource::Off => 1,
            DraftSource::Auto | DraftSource::Ngram | DraftSource::Mtp | DraftSource::Grammar => 1 + self.most,
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
    /// Of those, what a grammar had no other way than.
    pub(super) forced: u64,
}

/// The source of drafts, and the tokens of the step that is to be made.
pub(super) struct Drafts {
    pub(super) rule: DraftRule,
    ngram: Option<Ngram>,
    adapt: Option<Adapt>,
    /// What was drafted last, or would have been, and has not come yet; and how many tokens agree before it.
    foreseen: Vec<u32>,
    agree: usize,
    mtp: Option<Mtp>,
    /// Whether a sequence is followed: one whose tokens are forced is not, and none after a draft could not be had.
    follows: bool,
    /// The current token, and what may follow it.
    pub(super) run: Vec<u32>,
    /// Whether a grammar drafted it.
    is_forced: bool,
    /// Of the last step, the row whose logits are those of the last position: the rows behind it were not accepted.
    pub(super) row: usize,
    pub(super) tally: Tally,
}

impl Drafts {
    /// For contexts of up to `context` positions, counted in `room`; not so the cache of an MTP layer, which `mtp_kv` makes.
    pub(super) fn new(
        rule: DraftRule,
        arch: &Arch,
        context: usize,
        mtp_kv: impl FnOnce() -> KvCache,
        room: &mut Room,
    ) -> Drafts {
        let (mut ngram, mut mtp) = (None, None);
        let adapt = (rule.source == DraftSource::Auto).then(Adapt::new);
        match rule.source {
            DraftSource::Off | DraftSource::Grammar => {}
            // The last token of an answer has no position in the context any more.
            DraftSource::Auto | DraftSource::Ngram => ngram = Some(Ngram::new(context + 1, room)),
            DraftSource::Mtp => mtp = Some(Mtp::new(arch, mtp_kv(), rule.rows(), room)),
        }
        let foreseen = room.empty(if adapt.is_some() { rule.most } else { 0 });
        Drafts {
            rule,
            ngram,
            adapt,
            foreseen,
            agree: 0,
            mtp,
            follows: false,
            run: room.empty(rule.rows()),
            is_forced: false,
            row: 0,
            tally: Tally::default(),
        }
    }

    /// An answer to `prompt` begins.
    pub(super) fn begin(&mut self, prompt: &[u32]) {
        (self.follows, self.tally) = (true, Tally::default());
        if let Some(mtp) = &mut self.mtp {
            mtp.begin();
        }
        self.foreseen.clear();
        if let Some(ngram) = &mut self.ngram {
            ngram.clear();
            prompt.iter().for_each(|&token| ngram.push(token));
        }
    }

    /// The answer goes on with `token`.
    pub(super) fn push(&mut self, token: u32) {
        if let Some(ngram) = &mut self.ngram {
            ngram.push(token);
        }
        let Some(adapt) = self.adapt.as_mut().filter(|_| !self.foreseen.is_empty()) else { return };
        // The next one is the last of them.
        let is_right = self.foreseen.pop() == Some(token);
        adapt.judge(self.agree, is_right);
        if !is_right {
            self.foreseen.clear();
        }
    }

    /// The step of [`Drafts::run`], and what drafted it, took so long. What a grammar forces says nothing of others.
    pub(super) fn observe(&mut self, seconds: f64) {
        if let Some(adapt) = self.adapt.as_mut().filter(|_| !self.is_forced) {
            adapt.observe(self.run.len() - 1, seconds);
        }
    }

    /// No sequence is followed, and nothing drafted, until the next begins.
    pub(super) fn leave(&mut self) {
        self.follows = false;
    }

    /// A step of up to `rows` rows without drafts is to begin with `token`.
    pub(super) fn prepare(&mut self, model: &Model, state: &mut State, meter: &mut Meter, token: u32, rows: usize) {
        if let Some(mtp) = self.mtp.as_mut().filter(|_| self.follows) {
            mtp.goes_on(token);
            mtp.make_room(model, state, meter, rows);
        }
    }

    /// The first rows of the last step, those of `tokens`, are part of the sequence.
    pub(super) fn follow(&mut self, model: &Model, state: &mut State, meter: &mut Meter, tokens: &[u32]) {
        if let Some(mtp) = self.mtp.as_mut().filter(|_| self.follows) {
            mtp.follow(model, state, meter, tokens);
        }
    }

    /// Fills [`Drafts::run`]: `token`, which was the last pushed, and up to `most` drafts of what follows it from `position`
    /// on.
    pub(super) fn draft(
        &mut self,
        mut tools: Tools,
        token: u32,
        position: usize,
        most: usize,
    ) -> Result<(), EngineError> {
        self.run.clear();
        self.run.push(token);
        let most = most.min(self.rule.most);
        if let Some(ngram) = self.ngram.as_ref().filter(|_| self.follows) {
            let agree = ngram.propose(most, &mut self.run);
            self.shorten(agree);
        }
        if most == 0 {
            self.prepare(tools.model, tools.state, tools.meter, token, 1);
        } else if let Some(mtp) = self.mtp.as_mut().filter(|_| self.follows) {
            mtp.goes_on(token);
            match mtp.draft(&mut tools, position, most, &mut self.run) {
                // Its cache lacks a position now. The answer has what was drafted so far.
                Err(error) if error.may_be_of_drafts() => self.leave(),
                drafted => drafted?,
            }
        }
        Ok(())
    }

    /// Leaves of the run what is thought to pay behind so many tokens that agree, and keeps in mind what all of it foresees.
    fn shorten(&mut self, agree: usize) {
        let Some(adapt) = &mut self.adapt else { return };
        let length = if agree > 0 { adapt.length(self.run.len() - 1, agree) } else { 0 };
        // What nobody drafts is judged to its end, as if it had been.
        if length > 0 || self.foreseen.is_empty() {
            self.foreseen.clear();
            self.foreseen.extend(self.run[1..].iter().rev());
            self.agree = agree;
        }
        self.run.truncate(1 + length);
    }

    /// As [`Drafts::draft`] where what follows `token` is `forced`. Whether it drafted any of that.
    pub(super) fn force(
        &mut self,
        model: &Model,
        state: &mut State,
        meter: &mut Meter,
        token: u32,
        forced: &[u32],
        most: usize,
    ) -> bool {
        let count = forced.len().min(most).min(self.rule.rows() - 1);
        self.is_forced = count > 0 && self.follows;
        if self.is_forced {
            self.prepare(model, state, meter, token, 1 + count);
            self.foreseen.clear();
            self.run.clear();
            self.run.push(token);
            self.run.extend_from_slice(&forced[..count]);
        }
        self.is_forced
    }

    /// Whether `id`, which was chosen to follow the last position, is what the step has in its next row.
    pub(super) fn is_next(&self, id: u32) -> bool {
        self.run.get(self.row + 1) == Some(&id)
    }

    /// The next row of the step is one of the answer.
    pub(super) fn accept(&mut self) {
        self.row += 1;
        self.count_accepted();
    }

    /// The answer ends with the token of the next row, which has no row in the cache; what is behind it was drafted for no
    /// answer.
    pub(super) fn end(&mut self) {
        let behind = self.run.len() - (self.row + 2);
        self.tally.drafted -= behind as u64;
        self.count_accepted();
    }

    fn count_accepted(&mut self) {
        self.tally.accepted += 1;
        self.tally.forced += u64::from(self.is_forced);
    }
}

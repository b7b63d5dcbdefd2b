//! What changes logits before a token is chosen from them, and what is told of the choice.
//!
//! From a row of the model to a token, in this order:
//! 1. Every logit is finite; one that is not is an error that names it.
//! 2. Bias: a number is added to the logits of single tokens, and -inf bans one.
//! 3. A constraint bans what may not come next. Where it leaves one way only, that token is taken and nothing is drawn.
//! 4. Penalties. Logits of tokens that are among the last of prompt and answer are divided by the repeat penalty where they
//!    are above 0 and multiplied by it where they are not, as llama.cpp and transformers do, once however often a token is
//!    there. Then every token of the answer loses the frequency penalty for each time it is there, and the presence penalty
//!    once, as the API of OpenAI has it.
//! 5. Temperature, top-k, top-p, min-p and the draw, which are [the sampler's](super::sampler).
//!
//! Log probabilities are of the row as the model made it, before all of this: what the model thinks, not what was asked of it.
//!
//! All of it is a function of the row, the settings and the tokens up to its position. Rows of drafts are looked at in order,
//! each after the token before it became part of the answer, so that they are shaped by what they would have been shaped by
//! without drafts.

use super::EngineError;
use super::constraint::{Constraint, allows};
use super::sampler::{Sampler, Sampling, SamplingError, check_finite};
use crate::limits::{LOGIT_BIAS_MAX, LOGIT_BIASES_MAX, LOGPROBS_MAX, PENALTY_MAX, REPEAT_PENALTY_MAX};
use crate::ops::room::Room;

/// Penalties on tokens that the text has already.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Penalties {
    /// Divides positive logits and multiplies others, of tokens among the last ones; 1 is off.
    pub repeat: f32,
    /// Among how many of prompt and answer; none is all of them, 0 is off.
    pub repeat_last: Option<usize>,
    /// Taken off once from tokens that the answer has; 0 is off.
    pub presence: f32,
    /// Taken off for each time that the answer has them; 0 is off.
    pub frequency: f32,
}

impl Default for Penalties {
    fn default() -> Penalties {
        Penalties { repeat: 1.0, repeat_last: Some(Penalties::REPEAT_LAST), presence: 0.0, frequency: 0.0 }
    }
}

impl Penalties {
    /// Tokens that the repeat penalty looks back where nothing was said, as in llama.cpp.
    pub const REPEAT_LAST: usize = 64;

    /// Refuses what has no meaning, NaN included.
    pub fn check(&self) -> Result<(), SamplingError> {
        let check = |ok: bool, name, value, range| if ok { Ok(()) } else { Err(SamplingError { name, value, range }) };
        let of_answer = -PENALTY_MAX..=PENALTY_MAX;
        let repeat_ok = self.repeat > 0.0 && self.repeat <= REPEAT_PENALTY_MAX;
        check(repeat_ok, "repeat-penalty", self.repeat, "above 0 and at most 100")?;
        check(of_answer.contains(&self.presence), "presence-penalty", self.presence, "between -2 and 2")?;
        check(of_answer.contains(&self.frequency), "frequency-penalty", self.frequency, "between -2 and 2")
    }

    fn of_last(&self) -> bool {
        self.repeat != 1.0 && self.repeat_last != Some(0)
    }

    fn of_answer(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    /// `logit` of a token that is among the last ones or not, and `times` in the answer.
    fn apply(&self, logit: f32, is_recent: bool, times: u32) -> f32 {
        let repeated = match is_recent {
            true if logit > 0.0 => logit / self.repeat,
            true => logit * self.repeat,
            false => logit,
        };
        let taken = if times > 0 { times as f32 * self.frequency + self.presence } else { 0.0 };
        (repeated - taken).clamp(f32::MIN, f32::MAX)
    }
}

/// A number that is added to the logit of a token, up to 100 either way; -inf bans it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bias {
    /// The token.
    pub id: u32,
    /// What is added.
    pub value: f32,
}

impl Bias {
    /// Refuses what has no meaning, NaN included.
    pub fn check(&self) -> Result<(), SamplingError> {
        let ok = self.value.abs() <= LOGIT_BIAS_MAX || self.value == f32::NEG_INFINITY;
        let (name, value, range) = ("logit-bias", self.value, "between -100 and 100, or -inf");
        if ok { Ok(()) } else { Err(SamplingError { name, value, range }) }
    }
}

/// What the model thought of a token that became part of the answer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scored<'a> {
    /// The token.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f64,
    /// The most likely tokens of its place and the same of theirs, best first, of equal ones by lower id.
    pub top: &'a [(u32, f64)],
}

/// Takes log probabilities of an answer.
pub struct Scores<'a> {
    /// So many of the most likely tokens beside each that was chosen, up to [`LOGPROBS_MAX`].
    pub top: usize,
    /// Gets each token of the answer as it comes, in order.
    pub take: &'a mut dyn FnMut(&Scored),
}

/// What has a say in an answer besides the model and how it is [sampled](Sampling).
#[derive(Default)]
pub struct Shaping<'a> {
    /// On tokens that the text has already.
    pub penalties: Penalties,
    /// On single tokens. Those of one token add up.
    pub bias: Vec<Bias>,
    /// Says what may come at all, and where the answer ends.
    pub constraint: Option<&'a mut dyn Constraint>,
    /// Says what will probably come where it knows one way only, which is drafted; it constrains nothing, and is asked no
    /// more once the answer went another way.
    pub guide: Option<&'a mut dyn Constraint>,
    /// Takes log probabilities.
    pub scores: Option<Scores<'a>>,
}

impl Shaping<'_> {
    /// Refuses settings without meaning; `vocab` is one more than the largest id.
    pub(super) fn check(&self, vocab: usize) -> Result<(), EngineError> {
        self.penalties.check()?;
        self.bias.iter().try_for_each(Bias::check)?;
        if let Some(&Bias { id, .. }) = self.bias.iter().find(|bias| bias.id as usize >= vocab) {
            return Err(EngineError::TokenOutOfRange { id, vocab });
        }
        let sizes = [
            ("logit biases", self.bias.len(), LOGIT_BIASES_MAX),
            ("log probabilities", self.scores.as_ref().map_or(0, |scores| scores.top), LOGPROBS_MAX),
        ];
        match sizes.into_iter().find(|&(_, value, most)| value > most) {
            Some((name, value, most)) => Err(EngineError::Size { name, value, least: 0, most }),
            None => Ok(()),
        }
    }

    fn changes_logits(&self) -> bool {
        self.penalties.of_last() || self.penalties.of_answer() || !self.bias.is_empty() || self.constraint.is_some()
    }

    /// Tokens that must come next, or will as far as a guide knows.
    pub(super) fn forced(&mut self) -> Result<&[u32], EngineError> {
        if let Some(constraint) = &mut self.constraint {
            return Ok(constraint.forced()?);
        }
        Ok(self.guide.as_mut().and_then(|guide| guide.forced().ok()).unwrap_or_default())
    }

    /// Whether the answer is whole and must end.
    pub(super) fn has_ended(&self) -> bool {
        self.constraint.as_ref().is_some_and(|constraint| constraint.has_ended())
    }
}

/// Shapes rows of logits. All that it needs is sized once; shaping allocates nothing.
pub(super) struct Shaper {
    shaped: Vec<f32>,
    /// Prompt and answer, for what leaves those that the repeat penalty is of.
    tokens: Vec<u32>,
    /// How often each token is among those.
    recent: Vec<u32>,
    /// How often each is in the answer.
    answered: Vec<u32>,
    /// Of the token chosen last.
    logprob: f64,
    top: Vec<(u32, f64)>,
}

impl Shaper {
    /// For a vocabulary and for contexts of up to `context` positions, counted in `room`.
    pub(super) fn new(vocab: usize, context: usize, room: &mut Room) -> Shaper {
        Shaper {
            shaped: room.empty(vocab),
            // The last token of an answer has no position in the context any more.
            tokens: room.empty(context + 1),
            recent: room.filled(0, vocab),
            answered: room.filled(0, vocab),
            logprob: 0.0,
            top: room.empty(LOGPROBS_MAX + 1),
        }
    }

    /// An answer to `prompt` begins.
    pub(super) fn begin(&mut self, prompt: &[u32], penalties: &Penalties) {
        self.tokens.clear();
        if penalties.of_answer() {
            self.answered.fill(0);
        }
        if penalties.of_last() {
            self.recent.fill(0);
            prompt.iter().for_each(|&id| self.remember(id, penalties.repeat_last));
        }
    }

    fn remember(&mut self, id: u32, last: Option<usize>) {
        let leaves = last.and_then(|last| self.tokens.len().checked_sub(last));
        if let Some(at) = leaves {
            self.recent[self.tokens[at] as usize] -= 1;
        }
        self.tokens.push(id);
        self.recent[id as usize] += 1;
    }

    /// Chooses the token for `position` (number of tokens before it) from `row`.
    pub(super) fn choose(
        &mut self,
        sampler: &mut Sampler,
        row: &[f32],
        sampling: &Sampling,
        shaping: &mut Shaping,
        position: u64,
    ) -> Result<u32, EngineError> {
        let id = if shaping.changes_logits() {
            check_finite(row, position)?;
            match shaping.constraint.as_mut().map(|constraint| constraint.forced()).transpose()? {
                Some(&[id, ..]) if (id as usize) < row.len() => id,
                _ => {
                    self.shape(row, shaping)?;
                    sampler.sample_allowed(&self.shaped, sampling, position)?
                }
            }
        } else {
            sampler.sample(row, sampling, position)?
        };
        if let Some(scores) = &shaping.scores {
            self.score(row, id, scores.top);
        }
        Ok(id)
    }

    fn shape(&mut self, row: &[f32], shaping: &mut Shaping) -> Result<(), EngineError> {
        self.shaped.clear();
        self.shaped.extend_from_slice(row);
        for bias in &shaping.bias {
            self.shaped[bias.id as usize] += bias.value;
        }
        if let Some(constraint) = &mut shaping.constraint {
            let mask = constraint.allowed()?;
            for (id, logit) in self.shaped.iter_mut().enumerate() {
                if !allows(mask, id) {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        let penalties = &shaping.penalties;
        let (of_last, of_answer) = (penalties.of_last(), penalties.of_answer());
        if of_last || of_answer {
            for ((logit, &recent), &times) in self.shaped.iter_mut().zip(&self.recent).zip(&self.answered) {
                let (is_recent, times) = (of_last && recent > 0, if of_answer { times } else { 0 });
                // What is banned stays so.
                if (is_recent || times > 0) && *logit > f32::NEG_INFINITY {
                    *logit = penalties.apply(*logit, is_recent, times);
                }
            }
        }
        Ok(())
    }

    /// Log probabilities of `id`, and of the `most` most likely, in `row`.
    fn score(&mut self, row: &[f32], id: u32, most: usize) {
        let best = f64::from(row.iter().copied().fold(f32::MIN, f32::max));
        let total: f64 = row.iter().map(|&logit| (f64::from(logit) - best).exp()).sum();
        let log_total = best + total.ln();
        self.logprob = f64::from(row[id as usize]) - log_total;
        self.top.clear();
        for (id, &logit) in (0u32..).zip(row) {
            let logprob = f64::from(logit) - log_total;
            let is_among = self.top.len() < most || self.top.last().is_some_and(|last| logprob > last.1);
            if most > 0 && is_among {
                let at = self.top.partition_point(|other| other.1 >= logprob);
                self.top.insert(at, (id, logprob));
                self.top.truncate(most);
            }
        }
    }

    /// The answer goes on with `id`, which was chosen last.
    pub(super) fn push(&mut self, id: u32, shaping: &mut Shaping) -> Result<(), EngineError> {
        let penalties = &shaping.penalties;
        if penalties.of_answer() {
            self.answered[id as usize] += 1;
        }
        if penalties.of_last() {
            self.remember(id, penalties.repeat_last);
        }
        if let Some(scores) = &mut shaping.scores {
            (scores.take)(&Scored { id, logprob: self.logprob, top: &self.top });
        }
        if let Some(constraint) = &mut shaping.constraint {
            constraint.accept(id)?;
        }
        if shaping.guide.as_mut().is_some_and(|guide| guide.accept(id).is_err() || guide.has_ended()) {
            shaping.guide = None;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::constraint::ConstraintError;
    use super::*;
    use proptest::prelude::*;

    fn shaper(vocab: usize) -> Shaper {
        Shaper::new(vocab, 64, &mut Room::default())
    }

    /// `row` as it is shaped behind `prompt` and `answer`.
    fn shaped(row: &[f32], prompt: &[u32], answer: &[u32], shaping: &mut Shaping) -> Vec<f32> {
        let mut shaper = shaper(row.len());
        shaper.begin(prompt, &shaping.penalties);
        answer.iter().for_each(|&id| shaper.push(id, shaping).unwrap());
        shaper.shape(row, shaping).unwrap();
        shaper.shaped
    }

    fn penalties<'a>(repeat: f32, repeat_last: Option<usize>, presence: f32, frequency: f32) -> Shaping<'a> {
        Shaping { penalties: Penalties { repeat, repeat_last, presence, frequency }, ..Shaping::default() }
    }

    #[test]
    fn what_was_said_is_penalized_as_published() {
        let row = [3.0, -3.0, 0.0, 3.0];
        // Once for each token that is there, however often, in the prompt or in the answer.
        assert_eq!(shaped(&row, &[0, 0, 1], &[2, 0], &mut penalties(2.0, None, 0.0, 0.0)), [1.5, -6.0, 0.0, 3.0]);
        assert_eq!(shaped(&row, &[0, 1], &[3], &mut penalties(2.0, Some(2), 0.0, 0.0)), [3.0, -6.0, 0.0, 1.5]);
        assert_eq!(shaped(&row, &[0, 1], &[3], &mut penalties(2.0, Some(0), 0.0, 0.0)), row);
        // Of the answer alone, three times the one and once the other.
        let said = &[0, 3, 0, 0];
        assert_eq!(shaped(&row, &[1, 2], said, &mut penalties(1.0, None, 0.5, 0.25)), [1.75, -3.0, 0.0, 2.25]);
        assert_eq!(shaped(&row, &[1], &[0, 0], &mut penalties(1.0, None, -1.0, 0.0)), [4.0, -3.0, 0.0, 3.0]);
        // The repeat penalty first: 3 / 2 - 1.
        assert_eq!(shaped(&row, &[], &[0], &mut penalties(2.0, Some(64), 1.0, 0.0)), [0.5, -3.0, 0.0, 3.0]);
        // What becomes larger than any number is the largest.
        assert_eq!(shaped(&[1e38, -1e38], &[0, 1], &[], &mut penalties(1e-9, None, 0.0, 0.0))[0], f32::MAX);
        assert_eq!(shaped(&[1e38, -1e38], &[0, 1], &[], &mut penalties(100.0, None, 0.0, 0.0))[1], f32::MIN);
    }

    #[test]
    fn a_bias_forces_and_bans() {
        let row = [1.0, 2.0, 3.0];
        let chosen = |bias: &[(u32, f32)], sampling: Sampling, position| {
            let bias = bias.iter().map(|&(id, value)| Bias { id, value }).collect();
            let mut shaping = Shaping { bias, ..penalties(1.5, None, 0.0, 0.0) };
            let mut shaper = shaper(3);
            shaper.begin(&[0, 1, 2], &shaping.penalties);
            shaper.choose(&mut Sampler::new(3), &row, &sampling, &mut shaping, position)
        };
        let warm = Sampling { temperature: 1.0, top_p: 1.0, ..Sampling::default() };
        let banned = [(2, f32::NEG_INFINITY), (1, -100.0)];
        for position in 0..100 {
            assert_eq!(chosen(&[(0, 100.0)], warm, position).unwrap(), 0);
            assert_eq!(chosen(&banned, warm, position).unwrap(), 0);
        }
        assert_eq!(chosen(&[(1, 1.5)], Sampling::greedy(), 0).unwrap(), 1);
        let all: Vec<(u32, f32)> = (0..3).map(|id| (id, f32::NEG_INFINITY)).collect();
        let error = chosen(&all, warm, 7).unwrap_err();
        assert!(error.to_string().contains("position 7") && !error.blames_files(), "{error}");
        assert!(error.hint().unwrap().contains("--logit-bias"));
    }

    #[test]
    fn what_is_not_finite_is_named_whatever_shapes_it() {
        let mut shaping = Shaping { bias: vec![Bias { id: 1, value: f32::NEG_INFINITY }], ..Shaping::default() };
        let row = [0.0, f32::NAN];
        let chosen = shaper(2).choose(&mut Sampler::new(2), &row, &Sampling::greedy(), &mut shaping, 3);
        assert_eq!(chosen.unwrap_err().to_string(), "the logit of token 1 at position 3 is NaN");
    }

    #[test]
    fn log_probabilities_are_of_the_row_as_it_came() {
        let probabilities = [0.1, 0.5, 0.1, 0.3f64];
        let row = probabilities.map(|p| p.ln() as f32 + 4.0);
        let mut told = vec![];
        let mut take = |scored: &Scored| told.push((scored.id, scored.logprob, scored.top.to_vec()));
        let mut shaping = Shaping {
            bias: vec![Bias { id: 0, value: 100.0 }],
            scores: Some(Scores { top: 3, take: &mut take }),
            ..Shaping::default()
        };
        let (mut shaper, sampling) = (shaper(4), Sampling { temperature: 0.3, ..Sampling::default() });
        let id = shaper.choose(&mut Sampler::new(4), &row, &sampling, &mut shaping, 0).unwrap();
        shaper.push(id, &mut shaping).unwrap();
        let (id, logprob, top) = told.remove(0);
        assert_eq!((id, told.len()), (0, 0), "the bias had its way");
        let is = |logprob: f64, p: f64| (logprob - p.ln()).abs() < 1e-6;
        assert!(is(logprob, 0.1), "{logprob}");
        // Of two that are equal the first.
        assert_eq!(top.iter().map(|other| other.0).collect::<Vec<u32>>(), [1, 3, 0]);
        assert!(is(top[0].1, 0.5) && is(top[1].1, 0.3) && is(top[2].1, 0.1), "{top:?}");
    }

    #[test]
    fn settings_without_meaning_are_refused() {
        let refused = |shaping: &Shaping| shaping.check(10).unwrap_err().to_string();
        for (repeat, presence, frequency, name) in [
            (0.0, 0.0, 0.0, "repeat-penalty is 0; it must be above 0"),
            (-1.0, 0.0, 0.0, "repeat-penalty"),
            (101.0, 0.0, 0.0, "repeat-penalty"),
            (f32::NAN, 0.0, 0.0, "repeat-penalty"),
            (1.0, 2.1, 0.0, "presence-penalty is 2.1; it must be between -2 and 2"),
            (1.0, f32::NAN, 0.0, "presence-penalty"),
            (1.0, 0.0, f32::INFINITY, "frequency-penalty"),
        ] {
            let error = refused(&penalties(repeat, None, presence, frequency));
            assert!(error.contains(name), "{error}");
        }
        let biased = |id, value| Shaping { bias: vec![Bias { id, value }], ..Shaping::default() };
        assert!(refused(&biased(0, f32::NAN)).contains("logit-bias is NaN"));
        assert!(refused(&biased(0, f32::INFINITY)).contains("logit-bias is inf"));
        assert!(refused(&biased(10, 1.0)).contains("token id 10"));
        assert!(biased(9, f32::NEG_INFINITY).check(10).is_ok() && Shaping::default().check(10).is_ok());
        let many = Shaping { bias: vec![Bias { id: 0, value: 0.0 }; 1025], ..Shaping::default() };
        assert!(refused(&many).contains("1025 logit biases"));
    }

    /// Allows what its list has, in order; the last of it over and over.
    struct Listed(Vec<[u32; 1]>);

    impl Constraint for Listed {
        fn forced(&mut self) -> Result<&[u32], ConstraintError> {
            Ok(&[])
        }
        fn allowed(&mut self) -> Result<&[u32], ConstraintError> {
            self.0.first().map(<[u32; 1]>::as_slice).ok_or(ConstraintError("nothing may come".into()))
        }
        fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
            self.0.remove(0);
            Ok(())
        }
        fn has_ended(&self) -> bool {
            false
        }
    }

    #[test]
    fn a_constraint_bans_the_rest_and_no_penalty_brings_it_back() {
        let mut listed = Listed(vec![[0b0110], [0b1000]]);
        let mut shaping = Shaping {
            constraint: Some(&mut listed),
            bias: vec![Bias { id: 0, value: 100.0 }],
            ..penalties(1.5, None, -2.0, -2.0)
        };
        let (row, no) = ([3.0, 1.0, 2.0, -1.0], f32::NEG_INFINITY);
        let mut shaper = shaper(4);
        shaper.begin(&[0], &shaping.penalties);
        shaper.shape(&row, &mut shaping).unwrap();
        assert_eq!(shaper.shaped, [no, 1.0, 2.0, no]);
        shaper.push(1, &mut shaping).unwrap();
        shaper.shape(&row, &mut shaping).unwrap();
        assert_eq!(shaper.shaped, [no, no, no, -1.0]);
        shaper.push(3, &mut shaping).unwrap();
        let error = shaper.shape(&row, &mut shaping).unwrap_err();
        assert_eq!(error.to_string(), "the grammar cannot go on: nothing may come");
    }

    /// The rule, with the whole text looked at for each token, in the form that transformers has of it.
    fn naive(row: &[f32], prompt: &[u32], answer: &[u32], shaping: &Shaping) -> Vec<f64> {
        let Penalties { repeat, repeat_last, presence, frequency } = shaping.penalties;
        let text = [prompt, answer].concat();
        let recent = &text[text.len() - repeat_last.unwrap_or(text.len()).min(text.len())..];
        let shape = |(id, &logit): (u32, &f32)| {
            let biases = shaping.bias.iter().filter(|bias| bias.id == id);
            let mut logit = f64::from(logit) + biases.map(|bias| f64::from(bias.value)).sum::<f64>();
            if recent.contains(&id) {
                logit = if logit < 0.0 { logit * f64::from(repeat) } else { logit / f64::from(repeat) };
            }
            let times = answer.iter().filter(|&&other| other == id).count();
            logit - times as f64 * f64::from(frequency) - f64::from(u8::from(times > 0)) * f64::from(presence)
        };
        (0u32..).zip(row).map(shape).collect()
    }

    proptest! {
        #[test]
        fn the_quick_way_is_the_plain_way(
            row in prop::collection::vec(-20.0f32..20.0, 8),
            prompt in prop::collection::vec(0u32..8, 0..24), answer in prop::collection::vec(0u32..8, 0..24),
            repeat in prop_oneof![Just(1.0f32), 0.5f32..3.0], repeat_last in prop::option::of(0usize..40),
            presence in prop_oneof![Just(0.0f32), -2.0f32..2.0], frequency in prop_oneof![Just(0.0f32), -2.0f32..2.0],
            bias in prop::collection::vec((0u32..8, -100.0f32..100.0), 0..3),
        ) {
            let bias = bias.into_iter().map(|(id, value)| Bias { id, value }).collect();
            let mut shaping = Shaping { bias, ..penalties(repeat, repeat_last, presence, frequency) };
            let shaped = shaped(&row, &prompt, &answer, &mut shaping);
            for (shaped, naive) in shaped.iter().zip(naive(&row, &prompt, &answer, &shaping)) {
                prop_assert!((f64::from(*shaped) - naive).abs() <= 1e-4, "{shaped} for {naive}");
            }
            // Another answer begins anew.
            let mut used = shaper(8);
            used.begin(&answer, &shaping.penalties);
            prompt.iter().for_each(|&id| used.push(id, &mut shaping).unwrap());
            used.begin(&prompt, &shaping.penalties);
            answer.iter().for_each(|&id| used.push(id, &mut shaping).unwrap());
            used.shape(&row, &mut shaping).unwrap();
            prop_assert_eq!(used.shaped, shaped);
        }
    }
}

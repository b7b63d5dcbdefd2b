//! Grammars: what an answer may be, as a JSON schema, in Lark or in GBNF, and the [constraint](Constraint) that follows one.
//!
//! The parser is llguidance's. It works on bytes; which tokens those come in is told by a trie of the vocabulary. Where a
//! grammar leaves one way only, the bytes of it are cut into tokens as the model's tokenizer cuts them, so that a model sees
//! what it was trained on.

pub mod gbnf;
mod vocabulary;

use std::sync::Arc;
use std::time::{Duration, Instant};

use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{InferenceCapabilities, SimpleVob, TokEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::engine::constraint::{Constraint, ConstraintError};
use crate::limits::GRAMMAR_STATES_MAX;
use crate::model::tokenizer::Tokenizer;
use vocabulary::Vocabulary;

/// A grammar as it is written.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A JSON schema: the answer is JSON that it describes.
    JsonSchema(Value),
    /// In Lark, in the dialect of llguidance.
    Lark(String),
    /// In GBNF.
    Gbnf(String),
}

/// Why a grammar is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The vocabulary has a form that no grammar is told in.
    #[error("the model's vocabulary cannot be used with a grammar: {0}")]
    Vocabulary(String),
    /// It is not GBNF.
    #[error("the grammar is not GBNF: {0}")]
    Gbnf(#[from] gbnf::GbnfError),
    /// It says what cannot be had, or nothing that means something.
    #[error("{0}")]
    Grammar(String),
    /// No answer is one of it.
    #[error("no answer can be of this grammar: {0}")]
    Unsatisfiable(String),
}

/// Makes constraints for one model.
pub struct Grammars {
    factory: ParserFactory,
    vocab: usize,
}

impl Grammars {
    /// For the tokens of `tokenizer`; an answer ends with one of `stop_ids`, or by itself where its grammar ends and there are
    /// none.
    pub fn new(tokenizer: Arc<Tokenizer>, stop_ids: &[u32]) -> Result<Grammars, GrammarError> {
        let vocab = tokenizer.vocab_size();
        let vocabulary: TokEnv = Arc::new(Vocabulary::new(tokenizer, stop_ids).map_err(GrammarError::Vocabulary)?);
        // What is forced is asked for before every token, and the answer goes on with it.
        let capabilities = InferenceCapabilities { ff_tokens: true, ..InferenceCapabilities::default() };
        let slices = llguidance::earley::SlicedBiasComputer::general_slices();
        let mut factory = ParserFactory::new(&vocabulary, capabilities, &slices)
            .map_err(|error| GrammarError::Vocabulary(error.to_string()))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        factory.limits_mut().max_lexer_states = GRAMMAR_STATES_MAX;
        Ok(Grammars { factory, vocab })
    }

    /// Compiles `source`. Refuses what no answer can be of.
    pub fn compile(&self, source: &Source) -> Result<Grammar, GrammarError> {
        let grammar = match source {
            Source::JsonSchema(schema) => TopLevelGrammar::from_json_schema(compact(schema)?),
            Source::Lark(text) => TopLevelGrammar::from_lark(text.clone()),
            Source::Gbnf(text) => TopLevelGrammar::from_lark(gbnf::to_lark(text)?),
        };
        let parser = self
            .factory
            .create_parser(grammar)
            .map_err(|error| GrammarError::Grammar(one_line(&format!("{error:#}"))))?;
        let mut matcher = Matcher::new(Ok(parser));
        if let Some(error) = matcher.get_error() {
            return Err(GrammarError::Grammar(one_line(&error)));
        }
        let first = matcher.compute_mask();
        if matcher.is_stopped() || first.is_err() {
            let why = matcher.get_error().map_or_else(|| "it is empty".to_owned(), |error| one_line(&error));
            return Err(GrammarError::Unsatisfiable(why));
        }
        Ok(Grammar {
            matcher,
            forced: Vec::new(),
            taken: 0,
            is_fresh: false,
            mask: SimpleVob::new(),
            spent: Spent::default(),
            vocab: self.vocab,
        })
    }
}

/// `schema`, with what it says nothing of decided: JSON is written as Python does, in one line with a blank behind `,` and
/// `:`. Models have seen most JSON like that; where nothing can be chosen nothing can go on forever, and more is forced.
fn compact(schema: &Value) -> Result<Value, GrammarError> {
    match schema {
        Value::Object(fields) => {
            let mut fields = fields.clone();
            let written = json!({ "whitespace_flexible": false, "item_separator": ", ", "key_separator": ": " });
            fields.entry("x-guidance").or_insert(written);
            Ok(Value::Object(fields))
        }
        Value::Bool(true) => compact(&json!({})),
        other => Err(GrammarError::Grammar(format!("a JSON schema is an object, and not {other}"))),
    }
}

fn failed(why: impl std::fmt::Display) -> ConstraintError {
    ConstraintError(one_line(&why.to_string()))
}

/// A message in one line.
fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<&str>>().join(" ")
}

/// Time that a grammar took, for figures.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spent {
    /// Masks that were computed.
    pub masks: u32,
    /// Time for all of them.
    pub in_masks: Duration,
    /// Longest.
    pub longest: Duration,
    /// Tokens of the answer.
    pub tokens: u32,
    /// Of those, what the grammar had no other way than.
    pub forced: u32,
}

/// A grammar that follows an answer from its beginning.
pub struct Grammar {
    matcher: Matcher,
    /// What must come next, of which some has come; still to be asked for unless it `is_fresh`.
    forced: Vec<u32>,
    taken: usize,
    is_fresh: bool,
    mask: SimpleVob,
    spent: Spent,
    vocab: usize,
}

impl Grammar {
    /// Whether the answer as it is now is one that the grammar describes.
    pub fn is_whole(&mut self) -> bool {
        self.matcher.stop_reason().is_ok()
            && (self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false))
    }

    /// What following took.
    pub fn spent(&self) -> Spent {
        self.spent
    }
}

impl Constraint for Grammar {
    fn forced(&mut self) -> Result<&[u32], ConstraintError> {
        if !self.is_fresh && self.taken == self.forced.len() && !self.matcher.is_stopped() {
            (self.forced, self.taken, self.is_fresh) = (self.matcher.compute_ff_tokens(), 0, true);
            if let Some(error) = self.matcher.get_error() {
                return Err(failed(error));
            }
        }
        Ok(&self.forced[self.taken..])
    }

    fn allowed(&mut self) -> Result<&[u32], ConstraintError> {
        let began = Instant::now();
        self.mask = self.matcher.compute_mask_or_eos().map_err(failed)?;
        let took = began.elapsed();
        self.spent.masks += 1;
        self.spent.in_masks += took;
        self.spent.longest = self.spent.longest.max(took);
        Ok(self.mask.as_slice())
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if token as usize >= self.vocab {
            return Err(ConstraintError(format!("token {token} has no text")));
        }
        let is_forced = self.forced.get(self.taken) == Some(&token);
        if self.matcher.try_consume_tokens(&[token]).map_err(failed)? == 0 {
            return Err(ConstraintError(format!("token {token} may not come")));
        }
        if is_forced {
            self.taken += 1;
        } else {
            (self.forced, self.taken) = (Vec::new(), 0);
        }
        self.is_fresh = false;
        self.spent.tokens += 1;
        self.spent.forced += u32::from(is_forced);
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.matcher.is_stopped()
    }
}

#[cfg(test)]
mod tests;

//! What has a say in an answer besides the model and how it is sampled: penalties, biases of single tokens, and the log
//! probabilities that are told of it.

use crate::engine::Shaping;
use crate::engine::shaping::{Bias, Penalties, Scored, Scores};
use crate::engine::stats::{TokenLogprob, TopLogprob};
use crate::limits::{LOGPROBS_MAX, MAX_CONTEXT};
use crate::model::tokenizer::Tokenizer;

use super::Failure;
use super::args::RunArgs;
use super::config::{Settings, flag_or_default, shortest};

/// Flags of `run` for this.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct ShapingArgs {
    /// Make tokens that were among the last ones less likely: positive logits are divided by P, others multiplied; 1 is off
    /// [default: 1]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub repeat_penalty: Option<f32>,
    /// How many of the last tokens, prompt and answer, that is of; -1 is all, 0 is off [default: 64]
    #[arg(long, value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=MAX_CONTEXT as i64))]
    pub repeat_last_n: Option<i64>,
    /// Take P off the logits of tokens that the answer has, -2 to 2 [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Take P off for each time that the answer has them, -2 to 2 [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Add VALUE, -100 to 100, to the logit of a token, or of each token of a text; -100 as good as bans it, 100 as good as
    /// forces it, -inf bans it. A number is a token id. May be given several times
    #[arg(long, value_name = "TOKEN=VALUE", allow_hyphen_values = true, value_parser = parse_bias)]
    pub logit_bias: Vec<TypedBias>,
    /// Tell the log probability of each token of the answer, and those of the N most likely in its place, 0 to 20, in --json
    /// and --stats-json. They are the model's own, before temperature, penalties and biases
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_logprobs)]
    pub logprobs: Option<usize>,
}

/// What a bias is of, as it was typed.
#[derive(Clone, Debug, PartialEq)]
pub enum Biased {
    /// A token.
    Id(u32),
    /// The tokens of a text.
    Text(String),
}

/// One `--logit-bias`.
#[derive(Clone, Debug, PartialEq)]
pub struct TypedBias {
    of: Biased,
    value: f32,
}

/// Reads `--logit-bias`.
fn parse_bias(text: &str) -> Result<TypedBias, String> {
    let Some((of, value)) = text.rsplit_once('=').filter(|(of, _)| !of.is_empty()) else {
        return Err("it is TOKEN=VALUE, as in 42=-100, or \" the\"=2.5".into());
    };
    let value = value.parse().map_err(|_| format!("{value:?} is not a number"))?;
    Bias { id: 0, value }.check().map_err(|error| error.to_string())?;
    let is_id = of.bytes().all(|byte| byte.is_ascii_digit());
    let of = match of.parse() {
        Ok(id) => Biased::Id(id),
        Err(_) if is_id => return Err(format!("no token has the id {of}")),
        Err(_) => Biased::Text(of.to_owned()),
    };
    Ok(TypedBias { of, value })
}

fn parse_logprobs(text: &str) -> Result<usize, String> {
    super::args::in_range(text, 0, LOGPROBS_MAX)
}

/// What was decided.
#[derive(Clone, Debug, Default)]
pub struct Shape {
    /// On tokens that the text has.
    pub penalties: Penalties,
    /// As typed.
    typed: Vec<TypedBias>,
    /// Of tokens; known once the tokenizer is.
    bias: Vec<Bias>,
    /// Of how many tokens beside each that was chosen log probabilities are told.
    pub logprobs: Option<usize>,
}

impl Shape {
    /// Decides what does not depend on the model. Refuses what cannot work.
    pub(super) fn decide(args: &RunArgs, settings: &mut Settings) -> Result<Shape, Failure> {
        let ShapingArgs { repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty, .. } = args.shaping;
        let default = Penalties::default();
        let penalties = Penalties {
            repeat: repeat_penalty.unwrap_or(default.repeat),
            repeat_last: match repeat_last_n {
                Some(last) => usize::try_from(last).ok(),
                None => default.repeat_last,
            },
            presence: presence_penalty.unwrap_or(default.presence),
            frequency: frequency_penalty.unwrap_or(default.frequency),
        };
        penalties.check().map_err(|bad| {
            Failure::usage(bad.to_string()).hint(if bad.name == "repeat-penalty" { "1 is off" } else { "0 is off" })
        })?;
        let (typed, logprobs) = (args.shaping.logit_bias.clone(), args.shaping.logprobs);
        if logprobs.is_some() && !args.json && args.stats_json.is_none() {
            return Err(Failure::usage("--logprobs: nothing shows them").hint("add --json, or --stats-json FILE"));
        }
        settings.add("repeat-penalty", shortest(penalties.repeat), flag_or_default(&repeat_penalty));
        let last = penalties.repeat_last.map_or(-1, |last| last as i64);
        settings.add("repeat-last-n", last, flag_or_default(&repeat_last_n));
        settings.add("presence-penalty", shortest(penalties.presence), flag_or_default(&presence_penalty));
        settings.add("frequency-penalty", shortest(penalties.frequency), flag_or_default(&frequency_penalty));
        let shown: Vec<String> = typed.iter().map(TypedBias::to_string).collect();
        settings.add("logit-bias", shown, if typed.is_empty() { "default" } else { "flag" });
        let shown = logprobs.map_or_else(|| "off".into(), serde_json::Value::from);
        settings.add("logprobs", shown, flag_or_default(&logprobs));
        Ok(Shape { penalties, typed, bias: Vec::new(), logprobs })
    }

    /// Finds the tokens that biases are of, in a vocabulary of `vocab`. Of two for one token the last counts.
    pub fn find_tokens(&mut self, tokenizer: Option<&Tokenizer>, vocab: usize) -> Result<(), Failure> {
        for typed in std::mem::take(&mut self.typed) {
            let ids = match (&typed.of, tokenizer) {
                (Biased::Id(id), _) if *id as usize >= vocab => {
                    return Err(Failure::usage(format!("--logit-bias {typed}: the vocabulary ends before {vocab}")));
                }
                (Biased::Id(id), _) => vec![*id],
                (Biased::Text(text), Some(tokenizer)) => {
                    tokenizer.encode_raw(text).map_err(|error| super::prompt::tokenizer_failure(&error))?
                }
                (Biased::Text(_), None) => {
                    return Err(Failure::usage(format!(
                        "--logit-bias {typed} needs the model's tokenizer.json, which is not there"
                    ))
                    .hint("a token id in its place needs none"));
                }
            };
            for id in ids {
                self.bias.retain(|other| other.id != id);
                self.bias.push(Bias { id, value: typed.value });
            }
        }
        Ok(())
    }

    /// In the terms of the engine; log probabilities go to `logprobs`.
    pub fn shaping<'a>(&self, take: &'a mut dyn FnMut(&Scored)) -> Shaping<'a> {
        let scores = self.logprobs.map(|top| Scores { top, take });
        Shaping { penalties: self.penalties, bias: self.bias.clone(), scores, ..Shaping::default() }
    }
}

impl std::fmt::Display for TypedBias {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.of {
            Biased::Id(id) => write!(f, "{id}={}", self.value),
            Biased::Text(text) => write!(f, "{text}={}", self.value),
        }
    }
}

/// Log probabilities of an answer as they come.
pub struct Logprobs {
    top: usize,
    chosen: Vec<(u32, f64)>,
    /// Those of the most likely, `top` for each that was chosen.
    others: Vec<(u32, f64)>,
}

impl Logprobs {
    /// Room for `tokens` tokens is set aside where any are told.
    pub fn new(shape: &Shape, tokens: usize) -> Logprobs {
        let (top, tokens) = (shape.logprobs.unwrap_or(0), if shape.logprobs.is_some() { tokens } else { 0 });
        Logprobs { top, chosen: Vec::with_capacity(tokens), others: Vec::with_capacity(tokens.saturating_mul(top)) }
    }

    /// Takes those of the next token.
    pub fn take(&mut self, scored: &Scored) {
        self.chosen.push((scored.id, scored.logprob));
        self.others.extend_from_slice(scored.top);
    }

    /// As they are told.
    pub fn told(&self, tokenizer: Option<&Tokenizer>) -> Vec<TokenLogprob> {
        let told = |&(id, logprob): &(u32, f64)| {
            let bytes = tokenizer.map(|tokenizer| tokenizer.token_bytes(id).to_vec());
            let token = bytes.as_ref().map(|bytes| String::from_utf8_lossy(bytes).into_owned());
            TopLogprob { id, token, bytes, logprob }
        };
        let top = |number: usize| self.others.chunks(self.top.max(1)).nth(number).unwrap_or_default();
        let all = self.chosen.iter().enumerate();
        all.map(|(number, chosen)| TokenLogprob {
            token: told(chosen),
            top_logprobs: top(number).iter().map(told).collect(),
        })
        .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bias_is_of_an_id_or_of_a_text() {
        let bias = |of, value| Ok(TypedBias { of, value });
        let text = |text: &str| Biased::Text(text.to_owned());
        assert_eq!(parse_bias("42=-100"), bias(Biased::Id(42), -100.0));
        assert_eq!(parse_bias(" the=2.5"), bias(text(" the"), 2.5));
        assert_eq!(parse_bias("a=b=-inf"), bias(text("a=b"), f32::NEG_INFINITY));
        assert_eq!(parse_bias("-1=3"), bias(text("-1"), 3.0));
        for (bad, word) in [
            ("42", "TOKEN=VALUE"),
            ("=3", "TOKEN=VALUE"),
            ("42=", "not a number"),
            ("42=x", "not a number"),
            ("42=101", "logit-bias is 101; it must be between -100 and 100"),
            ("42=inf", "logit-bias is inf"),
            ("42=nan", "logit-bias is NaN"),
            ("99999999999=1", "no token has the id 99999999999"),
        ] {
            let error = parse_bias(bad).unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
    }

    #[test]
    fn of_two_biases_of_a_token_the_last_counts() {
        let typed = vec![parse_bias("3=1").unwrap(), parse_bias("4=2").unwrap(), parse_bias("3=-5").unwrap()];
        let mut shape = Shape { typed, ..Shape::default() };
        shape.find_tokens(None, 5).unwrap();
        assert_eq!(shape.bias, [Bias { id: 4, value: 2.0 }, Bias { id: 3, value: -5.0 }]);
        for typed in ["5=1", "fox=1"] {
            let mut shape = Shape { typed: vec![parse_bias(typed).unwrap()], ..Shape::default() };
            assert_eq!(shape.find_tokens(None, 5).unwrap_err().code, 2, "{typed}");
        }
    }
}

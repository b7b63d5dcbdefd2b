//! `eval choices`: questions with several answers. An answer's score is the sum of the log probabilities of its tokens
//! behind the question; the highest is the model's choice, as it is (acc) and by its length in characters (acc_norm).
//!
//! A question is read once: its answers follow it one after another, and what one left in the context is forgotten before
//! the next. So its experts are read once too, and those of an answer find in memory what the one before needed. What a
//! question has in common with the one before it, such as examples in front of all, is not read again either.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::questions::{self, Encoded, Question};
use super::{Common, Examiner, NO_DISTRIBUTION_HINT, Subject, show};
use crate::cli::args;
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure, output, prompt, render, size};
use crate::engine::quality::surprise;
use crate::engine::{Finish, Forced};
use crate::limits::MAX_QUESTIONS;

/// Flags of `eval choices`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream eval choices questions.jsonl
  millstream eval choices arc.jsonl -m /models/glm-5.2-int4 --limit 100 --json

A question is a line of JSON: {\"context\": \"The sky is\", \"choices\": [\"blue\", \"green\"], \"answer\": 0}. query stands for \
context, options for choices, gold or label for answer; id is shown with the result. Without answer the scores are shown and \
nothing is counted.")]
pub struct ChoicesArgs {
    /// The questions, a JSON object a line; - is standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// What stands between context and choice [default: a blank]
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    delimiter: Option<String>,
    /// Most questions that are asked [default: all]
    #[arg(long, value_name = "N", value_parser = |text: &str| args::in_range(text, 1, MAX_QUESTIONS))]
    limit: Option<usize>,
    #[command(flatten)]
    common: Common,
}

/// A question's answers as the model has them.
#[derive(Clone, Debug, PartialEq)]
struct Scores {
    /// Sum of the log probabilities of each, in nats.
    sums: Vec<f64>,
    /// The same by its characters.
    per_character: Vec<f64>,
    /// Tokens of each.
    tokens: Vec<usize>,
    /// Tokens of the question that were not read again.
    kept: usize,
}

/// Asks and reports.
pub fn choices(args: &ChoicesArgs, machine: &Machine) -> Result<Done, Failure> {
    let text = prompt::read_text(&args.file)?;
    let bad = |why: String| {
        Failure::usage(format!("cannot read the questions of {}", args.file.display()))
            .cause(why)
            .hint("a line is such as {\"context\": \"The sky is\", \"choices\": [\"blue\", \"green\"], \"answer\": 0}")
    };
    let questions = questions::parse(&text, args.limit).map_err(bad)?;
    if questions.is_empty() {
        return Err(bad("there is none".to_owned()));
    }
    let Some(subject) = Subject::open(&args.common, machine)? else { return Ok(Done::Interrupted) };
    let encoded = encode(&questions, args.delimiter.as_deref().unwrap_or(" "), &subject)?;
    let longest = encoded.iter().map(Encoded::longest).max().unwrap_or(0);
    let dir = subject.files.dir.clone();
    let Some(mut examiner) = subject.load(longest)? else { return Ok(Done::Interrupted) };
    let scores = ask(&mut examiner, &questions, &encoded)?;
    let (cost, settings) = examiner.leave();
    let text = if args.common.json {
        let object = json!({
            "schema_version": 1,
            "eval": "choices",
            "model": dir.display().to_string(),
            "file": args.file.display().to_string(),
            "counts": counts(&questions, &scores),
            "interrupted": scores.len() < questions.len(),
            "results": questions.iter().zip(&scores).map(|(question, scores)| result(question, scores)).collect::<Vec<_>>(),
            "settings": show::settings(&settings),
            "cost": cost.json(),
        });
        format!("{object:#}\n")
    } else {
        text_of(&questions, &scores)
    };
    let closed = output::print(&text)?;
    Ok(match closed {
        Some(done) => done,
        None if scores.len() < questions.len() => Done::Interrupted,
        None => Done::Whole,
    })
}

/// The questions in token ids, all of which fit the model.
fn encode(questions: &[Question], delimiter: &str, subject: &Subject) -> Result<Vec<Encoded>, Failure> {
    let tokenizer = subject.tokenizer()?;
    let encode = |question: &Question| {
        let encoded = questions::encode(question, delimiter, &tokenizer).map_err(|e| prompt::tokenizer_failure(&e))?;
        subject.check_length(encoded.longest(), &format!("line {}: context and choice", question.line))?;
        match encoded.choices.iter().position(Vec::is_empty) {
            None => Ok(encoded),
            Some(choice) => Err(Failure::usage(format!(
                "line {}: choice {choice} has no token of its own: it becomes one with the context",
                question.line
            ))
            .hint("give a --delimiter, or end the context where a word ends")),
        }
    };
    questions.iter().map(encode).collect()
}

/// Puts the questions to the model, in order; fewer scores than questions where the user stopped it.
fn ask(examiner: &mut Examiner, questions: &[Question], encoded: &[Encoded]) -> Result<Vec<Scores>, Failure> {
    let waiting = render::Waiting::begin("asking the first question", examiner.quiet);
    let (mut scores, mut held): (Vec<Scores>, Vec<u32>) = (Vec::with_capacity(questions.len()), Vec::new());
    for (question, ids) in questions.iter().zip(encoded) {
        let same = held.iter().zip(&ids.context).take_while(|(a, b)| a == b).count();
        // The last token is read in any case: it is its logits that are wanted.
        let kept = same.min(ids.context.len() - 1);
        let Some(sums) = examiner.weigh(ids, kept, question.line)? else { break };
        held.clone_from(&ids.context);
        let characters = question.choices.iter().map(|choice| choice.chars().count() as f64);
        scores.push(Scores {
            per_character: sums.iter().zip(characters).map(|(sum, characters)| sum / characters).collect(),
            sums,
            tokens: ids.choices.iter().map(Vec::len).collect(),
            kept,
        });
        waiting.say(format!("{} of {} questions are answered", scores.len(), questions.len()));
    }
    Ok(scores)
}

impl Examiner {
    /// The log probability of each answer behind its question, whose first `kept` tokens went through before; none where the
    /// user stopped it.
    fn weigh(&mut self, ids: &Encoded, kept: usize, line: usize) -> Result<Option<Vec<f64>>, Failure> {
        let not_finite = || {
            Failure::work(format!("the logits behind the question of line {line} are not finite"))
                .hint(NO_DISTRIBUTION_HINT)
        };
        let read = Forced { keep: kept, prompt: &ids.context[kept..], answer: &[] };
        let finish = self.engine.force(&read, &self.stop, &mut ()).map_err(|e| self.files.failure(e))?;
        self.count(ids.context.len() - kept);
        if finish == Finish::Interrupted {
            return Ok(None);
        }
        let behind = self.engine.logits();
        let first = |choice: &Vec<u32>| surprise(behind, choice[0]).ok_or_else(not_finite);
        let mut nll = ids.choices.iter().map(first).collect::<Result<Vec<f64>, Failure>>()?;
        for (choice, nll) in ids.choices.iter().zip(&mut nll).filter(|(choice, _)| choice.len() > 1) {
            let from = ids.context.len();
            let mut row = |position: usize, logits: &[f32]| {
                *nll += surprise(logits, choice[position - from + 1]).ok_or_else(not_finite)?;
                Ok(())
            };
            if !self.score(from, &choice[..choice.len() - 1], &mut row)? {
                return Ok(None);
            }
        }
        Ok(Some(nll.into_iter().map(|nll| -nll).collect()))
    }
}

/// The first of the highest.
fn best(scores: &[f64]) -> usize {
    (1..scores.len()).fold(0, |best, at| if scores[at] > scores[best] { at } else { best })
}

/// Share of the questions with a known answer that were answered so, and its standard error as lm-eval has it.
fn share(right: usize, of: usize) -> (Option<f64>, Option<f64>) {
    let share = (of > 0).then(|| right as f64 / of as f64);
    let error = share.filter(|_| of > 1).map(|share| (share * (1.0 - share) / (of - 1) as f64).sqrt());
    (share, error)
}

fn right(questions: &[Question], scores: &[Scores], of: fn(&Scores) -> &[f64]) -> usize {
    questions.iter().zip(scores).filter(|(question, scores)| question.answer == Some(best(of(scores)))).count()
}

fn known(questions: &[Question], scores: &[Scores]) -> usize {
    questions.iter().zip(scores).filter(|(question, _)| question.answer.is_some()).count()
}

fn counts(questions: &[Question], scores: &[Scores]) -> Value {
    let known = known(questions, scores);
    let (acc, acc_stderr) = share(right(questions, scores, |scores| &scores.sums), known);
    let (acc_norm, acc_norm_stderr) = share(right(questions, scores, |scores| &scores.per_character), known);
    json!({
        "questions": scores.len(),
        "questions_asked": questions.len(),
        "with_answer": known,
        "choices": scores.iter().map(|scores| scores.sums.len()).sum::<usize>(),
        "acc": acc,
        "acc_stderr": acc_stderr,
        "acc_norm": acc_norm,
        "acc_norm_stderr": acc_norm_stderr,
        "context_tokens_kept": scores.iter().map(|scores| scores.kept).sum::<usize>(),
    })
}

fn result(question: &Question, scores: &Scores) -> Value {
    json!({
        "line": question.line,
        "id": question.id,
        "answer": question.answer,
        "choice": best(&scores.sums),
        "choice_norm": best(&scores.per_character),
        "log_likelihood": scores.sums,
        "per_character": scores.per_character,
        "tokens": scores.tokens,
    })
}

fn text_of(questions: &[Question], scores: &[Scores]) -> String {
    let known = known(questions, scores);
    let mut text = String::new();
    if scores.len() < questions.len() {
        text += &format!("interrupted after {} of {} questions\n", scores.len(), questions.len());
    }
    if known < scores.len() {
        for (question, scores) in questions.iter().zip(scores) {
            let sums: Vec<String> = scores.sums.iter().map(|sum| format!("{sum:.4}")).collect();
            text += &format!(
                "line {}: choice {}, by characters {}; log likelihoods {}\n",
                question.line,
                best(&scores.sums),
                best(&scores.per_character),
                sums.join(" ")
            );
        }
    }
    text += &format!("{}, {known} with an answer\n", size::counted(scores.len() as u64, "question"));
    type Of = fn(&Scores) -> &[f64];
    let all: [(&str, Of); 2] = [("acc", |scores| &scores.sums), ("acc_norm", |scores| &scores.per_character)];
    for (name, of) in all {
        let (Some(share), error) = share(right(questions, scores, of), known) else { continue };
        let error = error.map_or_else(String::new, |error| format!(" ± {:.2}", 100.0 * error));
        text += &format!("{name:<9} {:.2}{error} %\n", 100.0 * share);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_and_their_errors_are_those_of_lm_eval() {
        // 3 of 4: numpy.std of three ones and a zero with ddof=1 is a half, over the root of four.
        assert_eq!(share(3, 4), (Some(0.75), Some(0.25)));
        assert_eq!((share(0, 0), share(1, 1)), ((None, None), (Some(1.0), None)));
        assert_eq!((best(&[1.0, 3.0, 3.0]), best(&[-1.0])), (1, 0));
    }

    #[test]
    fn answers_are_compared_as_they_are_and_by_their_length() {
        let question = |answer| Question {
            id: Value::Null,
            context: "a".into(),
            choices: vec!["b".into(), "bcdefghi".into()],
            answer,
            line: 1,
        };
        let scores = Scores { sums: vec![-2.0, -4.0], per_character: vec![-2.0, -0.5], tokens: vec![1, 2], kept: 0 };
        let (questions, scores) = ([question(Some(0)), question(Some(1))], [scores.clone(), scores]);
        let told = counts(&questions, &scores);
        assert_eq!((&told["acc"], &told["acc_norm"], &told["with_answer"]), (&0.5.into(), &0.5.into(), &2.into()));
        assert!(text_of(&questions, &scores).contains("acc_norm  50.00 ± 50.00 %"));
        assert!(text_of(&questions, &scores[..1]).starts_with("interrupted after 1 of 2 questions\n"));
        let unknown = text_of(&[question(None)], &scores[..1]);
        assert!(unknown.contains("line 1: choice 0, by characters 1; log likelihoods -2.0000 -4.0000\n"), "{unknown}");
        assert!(!unknown.contains("acc"), "{unknown}");
    }
}

//! What shapes an answer: that drafts change nothing of it under any penalty, bias or constraint, and what is told of it.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;

use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use engines::{Arithmetic, Model, Setup, open};
use millstream::engine::constraint::{Constraint, ConstraintError};
use millstream::engine::sampler::Sampling;
use millstream::engine::shaping::{Bias, Penalties, Scored, Scores};
use millstream::engine::{Activations, DraftRule, DraftSource, Engine, Finish, Job, Outcome, Shaping};
use program::{done, json, program};

fn job(max_tokens: usize, sampling: Sampling) -> Job {
    Job { prompt: Model::TalesInt4.repetitive(), max_tokens, sampling, stop_ids: vec![] }
}

fn drawn(seed: u64) -> Sampling {
    Sampling { seed, ..Sampling::default() }
}

fn engine(source: DraftSource, most: usize) -> Engine {
    let arithmetic = Arithmetic::absorbed(Model::TalesInt4, Activations::Int8);
    open(&arithmetic, &Setup { drafts: DraftRule { source, most }, ..Setup::RESIDENT }).unwrap()
}

fn answer(engine: &mut Engine, job: &Job, shaping: &mut Shaping) -> Outcome {
    let never = AtomicBool::new(false);
    engine.generate_shaped(job, shaping, &never, &mut |_| ControlFlow::Continue(()), &mut ()).unwrap()
}

fn shapings() -> Vec<(Penalties, Vec<Bias>)> {
    let none = Penalties::default();
    let penalties = [
        Penalties { repeat: 1.3, ..none },
        Penalties { repeat: 1.1, repeat_last: Some(5), ..none },
        Penalties { repeat: 0.8, repeat_last: None, ..none },
        Penalties { presence: 0.6, ..none },
        Penalties { frequency: 0.4, ..none },
        Penalties { frequency: -0.5, presence: -0.5, ..none },
        Penalties { repeat: 1.2, repeat_last: Some(20), presence: 0.3, frequency: 0.2 },
    ];
    let bias = vec![Bias { id: 11, value: -3.0 }, Bias { id: 269, value: f32::NEG_INFINITY }];
    penalties.into_iter().map(|penalties| (penalties, vec![])).chain([(none, bias)]).collect()
}

#[test]
fn drafts_change_no_answer_under_any_penalty() {
    let (mut plain, mut drafting) = (engine(DraftSource::Off, 8), engine(DraftSource::Ngram, 6));
    let (mut accepted, mut answers) = (0, vec![]);
    for (penalties, bias) in shapings() {
        for sampling in [Sampling::greedy(), drawn(3), drawn(4)] {
            let job = job(48, sampling);
            let mut shaping = Shaping { penalties, bias: bias.clone(), ..Shaping::default() };
            let expected = answer(&mut plain, &job, &mut shaping);
            assert_eq!(answer(&mut drafting, &job, &mut shaping), expected, "{penalties:?} {bias:?} {sampling:?}");
            accepted += drafting.stats().draft.unwrap().accepted;
            assert!(bias.is_empty() || !expected.ids.contains(&269));
            answers.push(expected.ids);
        }
    }
    // Without these the comparison would be empty.
    assert!(accepted > 50, "{accepted}");
    let unshaped = answer(&mut plain, &job(48, Sampling::greedy()), &mut Shaping::default());
    assert!(answers.iter().step_by(3).filter(|ids| **ids != unshaped.ids).count() >= 5);
}

#[test]
fn a_constraint_of_its_own_tokens_is_followed_in_fewer_steps_and_ends_the_answer() {
    let said = [300u32, 301, 302, 303, 304, 305, 306, 307, 308, 309];
    let mut steps = vec![];
    for (source, most) in [(DraftSource::Off, 8), (DraftSource::Ngram, 4), (DraftSource::Grammar, 8)] {
        let mut engine = engine(source, most);
        for sampling in [Sampling::greedy(), drawn(1)] {
            // Between what is forced the model has a choice of four.
            let mut spoken = Spoken { parts: vec![&said[..4], &[], &said[4..], &[]], at: 0 };
            let outcome = answer(
                &mut engine,
                &job(60, sampling),
                &mut Shaping { constraint: Some(&mut spoken), ..Shaping::default() },
            );
            assert_eq!(outcome.finish, Finish::Stop);
            let ids = &outcome.ids;
            assert_eq!((&ids[..4], &ids[5..11], ids.len()), (&said[..4], &said[4..], 12), "{source:?}");
            assert!([ids[4], ids[11]].iter().all(|id| (400..404).contains(id)), "{ids:?}");
            let stats = engine.stats();
            let forced = stats.draft.map_or(0, |draft| draft.forced);
            // The first of all is of the prompt's logits, and where four are drafted of six the fifth is of the fourth's row.
            let expected = match source {
                DraftSource::Off => 0,
                DraftSource::Ngram => 3 + 4 + 1,
                DraftSource::Grammar => 3 + 6,
                DraftSource::Auto | DraftSource::Mtp => unreachable!(),
            };
            assert_eq!(forced, expected);
            steps.push((stats.draft.map_or(11, |draft| draft.forwards), outcome.ids));
        }
    }
    assert!(
        steps[2].1 == steps[0].1 && steps[4].1 == steps[0].1 && steps[3].1 == steps[1].1 && steps[5].1 == steps[1].1
    );
    // Said and the choice behind it: 4 tokens from the prompt, then 7, then 1. Of those 11 go back into the model.
    assert_eq!((steps[0].0, steps[4].0), (11, 2));
}

#[test]
fn an_mtp_layer_drafts_behind_what_a_constraint_forces_and_changes_nothing() {
    let said = [300u32, 301, 302, 303, 304, 305, 306, 307, 308, 309];
    let (mut plain, mut drafting) = (engine(DraftSource::Off, 8), engine(DraftSource::Mtp, 8));
    for sampling in [Sampling::greedy(), drawn(1)] {
        let of = |engine: &mut Engine| {
            let mut spoken = Spoken { parts: vec![&said[..4], &[], &said[4..], &[], &said[..2]], at: 0 };
            let mut shaping = Shaping { constraint: Some(&mut spoken), ..Shaping::default() };
            answer(engine, &job(60, sampling), &mut shaping)
        };
        let expected = of(&mut plain);
        assert_eq!(expected.ids.len(), 14);
        assert_eq!(of(&mut drafting), expected);
        assert!(drafting.stats().draft.unwrap().forced > 0);
    }
}

#[test]
fn a_guide_that_is_wrong_changes_nothing() {
    let (mut plain, mut guided) = (engine(DraftSource::Off, 8), engine(DraftSource::Grammar, 8));
    let job = job(24, drawn(9));
    let expected = answer(&mut plain, &job, &mut Shaping::default());
    let right = expected.ids[..10].to_vec();
    let wrong = [right[0], right[1], right[2], (right[3] + 1) % 4000, 5, 5];
    // Of ten the first is of the prompt's logits, and the last of the eighth draft's row.
    for (guide, accepted) in [(&right[..], 8), (&wrong, 2)] {
        let mut spoken = Spoken { parts: vec![guide], at: 0 };
        let mut shaping = Shaping { guide: Some(&mut spoken), ..Shaping::default() };
        assert_eq!(answer(&mut guided, &job, &mut shaping), expected);
        assert_eq!(guided.stats().draft.unwrap().accepted, accepted);
    }
}

/// Parts of an answer, each forced; where one is empty, any of four tokens.
struct Spoken<'a> {
    parts: Vec<&'a [u32]>,
    at: usize,
}

impl Constraint for Spoken<'_> {
    fn forced(&mut self) -> Result<&[u32], ConstraintError> {
        Ok(self.parts.first().map_or(&[][..], |part| &part[self.at.min(part.len())..]))
    }

    fn allowed(&mut self) -> Result<&[u32], ConstraintError> {
        // 400 to 403 are the lower bits of the thirteenth word.
        const CHOICE: [u32; 13] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xF << 16];
        Ok(&CHOICE)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        let part = *self.parts.first().ok_or(ConstraintError("it is over".into()))?;
        if !part.is_empty() && part[self.at] != token {
            return Err(ConstraintError("it is another".into()));
        }
        self.at += 1;
        if self.at >= part.len() {
            self.parts.remove(0);
            self.at = 0;
        }
        Ok(())
    }

    fn has_ended(&self) -> bool {
        self.parts.is_empty()
    }
}

#[test]
fn log_probabilities_are_those_of_the_scored_text_whatever_drafts() {
    let job = job(20, drawn(2));
    let mut told = vec![];
    for source in [DraftSource::Off, DraftSource::Ngram] {
        let (mut engine, mut of) = (engine(source, 6), vec![]);
        let mut take = |scored: &Scored| of.push((scored.id, scored.logprob, scored.top.to_vec()));
        let penalties = Penalties { repeat: 1.2, ..Penalties::default() };
        let mut shaping = Shaping { penalties, scores: Some(Scores { top: 3, take: &mut take }), ..Shaping::default() };
        let ids = answer(&mut engine, &job, &mut shaping).ids;
        assert!(of.iter().map(|scored| scored.0).eq(ids.iter().copied()), "one for each, in order");
        told.push((of, ids));
    }
    assert_eq!(told[0], told[1]);
    let (of, ids) = &told[0];
    let text = [&job.prompt[..], ids].concat();
    let mut scoring = engine(DraftSource::Off, 8);
    let vocab = scoring.arch().vocab;
    let scores = scoring.score(&text).unwrap();
    for (number, (id, logprob, top)) in of.iter().enumerate() {
        let row = &scores[(job.prompt.len() + number - 1) * vocab..][..vocab];
        let total: f64 = row.iter().map(|&logit| f64::from(logit).exp()).sum::<f64>().ln();
        assert!((f64::from(row[*id as usize]) - total - logprob).abs() < 1e-3, "token {number}");
        let best = row.iter().copied().fold(f32::MIN, f32::max);
        assert!((f64::from(best) - total - top[0].1).abs() < 1e-3 && top[0].1 >= top[1].1 && top[1].1 >= top[2].1);
    }
}

#[test]
fn the_program_tells_log_probabilities_and_obeys_biases() {
    let home = tempfile::tempdir().unwrap();
    let model = engines::tales();
    let run = |flags: &[&str]| {
        let mut command = program(home.path());
        command.args(["run", "-p", "Tell me a story about a fox.", "-n", "12", "--ignore-eos", "--json", "-m"]);
        done(command.arg(&model).args(flags).output().unwrap())
    };
    let plain = json(&run(&["--temp", "0", "--logprobs", "2"]));
    let told = plain["logprobs"].as_array().unwrap();
    assert_eq!(told.len(), 12);
    let mut text = vec![];
    for (scored, id) in told.iter().zip(plain["ids"].as_array().unwrap()) {
        assert_eq!(&scored["id"], id);
        // What is most likely is taken, and is told twice.
        let top = scored["top_logprobs"].as_array().unwrap();
        assert_eq!((top.len(), &top[0]["id"], &top[0]["logprob"]), (2, id, &scored["logprob"]));
        assert!(scored["logprob"].as_f64().unwrap() < 0.0 && top[1]["logprob"].as_f64() <= top[0]["logprob"].as_f64());
        text.extend(scored["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    assert_eq!(String::from_utf8_lossy(&text), plain["text"].as_str().unwrap());
    assert!(json(&run(&["--temp", "0"])).get("logprobs").is_none());

    let first = told[0]["token"].as_str().unwrap();
    let banned = json(&run(&["--temp", "0", "--logit-bias", &format!("{first}=-inf")]));
    assert!(banned["ids"].as_array().unwrap().iter().all(|id| *id != told[0]["id"]));
    let forced = json(&run(&["--seed", "1", "--logit-bias", "258=100"]));
    assert!(forced["ids"].as_array().unwrap().iter().all(|id| *id == 258), "{}", forced["ids"]);
    assert_eq!(forced["settings"]["logit-bias"], serde_json::json!(["258=100"]));
    let penalized = &["--seed", "1", "--repeat-penalty", "1.3", "--frequency-penalty", "0.5"];
    let (once, again) = (json(&run(penalized)), json(&run(&[penalized, &["--draft", "ngram"][..]].concat())));
    assert_eq!(once["ids"], again["ids"]);
    assert_ne!(once["ids"], json(&run(&["--seed", "1"]))["ids"]);
}

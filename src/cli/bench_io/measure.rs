//! The rounds: every candidate once a round, each round in another order, fio among them.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use millstream_io::IoError;
use millstream_io::measure::{Candidate, Outcome, Round, Summary, Target, shuffled, summarize};

use super::fio::{self, FioOutcome, FioRun, FioSummary};
use super::{Failure, io_failure, stopped};
use crate::cli::hanging::Silence;
use crate::cli::render::Progress;

/// What is measured, how often and how long.
pub struct Plan {
    /// The candidates.
    pub candidates: Vec<Candidate>,
    /// Measurements of each.
    pub rounds: usize,
    /// Seconds of one.
    pub seconds: f64,
    /// The yardstick.
    pub fio: Vec<FioRun>,
}

/// What was measured.
pub struct Measured {
    /// Candidates with a round at least, in the plan's order.
    pub results: Vec<Summary>,
    /// Candidates that could not be had, and why.
    pub unavailable: Vec<(String, String)>,
    /// Candidates whose reads failed, and why. What they measured before counts for nothing.
    pub failed: Vec<(String, String)>,
    /// fio, its fastest settings first.
    pub fio: Vec<FioSummary>,
    /// Why there is no figure of fio's, or what is wrong with them.
    pub fio_note: Option<String>,
    /// Whether the user stopped it.
    pub interrupted: bool,
}

/// What may happen to a candidate in a round.
enum State {
    Measured(Vec<Round>),
    Unavailable(String),
    Failed(String),
}

/// Measures everything, a candidate a time.
pub fn measure(
    plan: &Plan,
    target: &mut Target,
    stop: &AtomicBool,
    progress: &mut Progress,
) -> Result<Measured, Failure> {
    let mut states: Vec<State> = plan.candidates.iter().map(|_| State::Measured(Vec::new())).collect();
    let mut fio_rounds: Vec<Vec<FioOutcome>> = plan.fio.iter().map(|_| Vec::new()).collect();
    let mut fio_note = None;
    let count = plan.candidates.len() + plan.fio.len();
    let (mut done, begun) = (0, Instant::now());
    let (mut interrupted, mut silence) = (false, Silence::default());
    'rounds: for round in 0..plan.rounds {
        for index in shuffled(count, round as u64 + 1) {
            let seed = (round * count + index) as u64;
            let what = match plan.candidates.get(index) {
                Some(candidate) => candidate.to_string(),
                None => format!("fio {}", plan.fio[index - plan.candidates.len()]),
            };
            let left = begun.elapsed().as_secs_f64() / (done.max(1) as f64) * (plan.rounds * count - done) as f64;
            let mut go_on = |silent| {
                if let Some(line) = silence.lasts(silent) {
                    progress.note(&line);
                }
                let left = if done == 0 { String::new() } else { format!(", about {left:.0} s left") };
                progress.show(|| format!("{done} of {} measurements{left}: {what}", plan.rounds * count));
                !stopped(stop)
            };
            let went_on = match plan.candidates.get(index) {
                Some(candidate) => one(&mut states[index], candidate, target, plan.seconds, seed, &mut go_on)?,
                None if fio_note.is_some() => go_on(Duration::ZERO),
                None => {
                    let which = index - plan.candidates.len();
                    match fio::run(&plan.fio[which], plan.seconds, &mut || go_on(Duration::ZERO)) {
                        Ok(Some(outcome)) => {
                            fio_rounds[which].push(outcome);
                            true
                        }
                        Ok(None) => false,
                        Err(why) => {
                            fio_note = Some(why);
                            true
                        }
                    }
                }
            };
            if !went_on || stopped(stop) {
                interrupted = true;
                break 'rounds;
            }
            done += 1;
        }
    }
    progress.end();
    let (mut results, mut unavailable, mut failed) = (Vec::new(), Vec::new(), Vec::new());
    for (candidate, state) in plan.candidates.iter().zip(states) {
        match state {
            State::Measured(rounds) => results.extend(summarize(*candidate, &rounds)),
            State::Unavailable(why) => unavailable.push((candidate.to_string(), why)),
            State::Failed(why) => failed.push((candidate.to_string(), why)),
        }
    }
    let fio = fio::summaries(&plan.fio, &fio_rounds);
    Ok(Measured { results, unavailable, failed, fio, fio_note, interrupted })
}

/// One measurement of one candidate; `false` when the user stopped it.
fn one(
    state: &mut State,
    candidate: &Candidate,
    target: &mut Target,
    seconds: f64,
    seed: u64,
    go_on: &mut dyn FnMut(Duration) -> bool,
) -> Result<bool, Failure> {
    let State::Measured(rounds) = state else { return Ok(go_on(Duration::ZERO)) };
    match target.round(candidate, seconds, seed, go_on) {
        Ok(Outcome::Done(round)) => {
            rounds.push(*round);
            Ok(true)
        }
        Ok(Outcome::Stopped) => Ok(false),
        Err(error) if error.is_refusal() => {
            *state = State::Unavailable(error.to_string());
            Ok(true)
        }
        // No candidate is to blame for a wrong request.
        Err(error @ IoError::BadRequest { .. }) => Err(io_failure(&error)),
        Err(error) => {
            let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
            *state = State::Failed(format!("{error}{hint}"));
            Ok(true)
        }
    }
}

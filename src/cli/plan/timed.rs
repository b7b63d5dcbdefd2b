//! How long a token's arithmetic and its reads take: a slice of the model is stepped through, for about half a second where
//! the drive is timed too, longer where that is slow, and for about a fifth of a second where it is not.

use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_io::FileSet;
use millstream_io::measure::median;

use super::speed;
use crate::checkpoint::Checkpoint;
use crate::cli::machine::Machine;
use crate::engine::predict::{Costs, Line, Slice, Times, Work};
use crate::engine::trial::{Sample, Trial};
use crate::engine::{EngineConfig, EngineError};

/// Bytes of weights that a step passes at least, and at most where memory allows no more or caches are huge.
const WALK_BYTES: [u64; 2] = [64 << 20, 1 << 30];
/// Steps that read are timed for about so long.
const READING_TIME: Duration = Duration::from_millis(500);
/// Steps that only compute are timed for about so long.
const ARITHMETIC_TIME: Duration = Duration::from_millis(120);
/// And so many are at least.
const STEPS_LEAST: usize = 3;

/// What timing a slice of the model came to.
pub struct Timed {
    /// Arithmetic of a token.
    pub costs: Costs,
    /// What twice the threads would make of it: as much as the second half of these did. `None` of one thread.
    pub doubled: Option<f64>,
    /// How experts are read beside arithmetic, and the bytes of them in a second; `None` where that was not asked for, or
    /// a step reads none.
    pub drive: Option<(Line, f64)>,
    /// What makes that doubtful.
    pub doubt: Option<String>,
}

/// Times steps of a slice of the model: with all experts at hand, and where the drive is to be timed too, with all of them
/// to be read and with one, in turn, so that what changes meanwhile changes all.
pub fn timed(
    checkpoint: &Checkpoint,
    files: &Arc<FileSet>,
    work: &Work,
    engine: &EngineConfig,
    reading: bool,
    machine: &Machine,
) -> Result<Timed, EngineError> {
    let slice = Slice::of(work, walk_bytes(machine), reading);
    let mut trial = Trial::open(checkpoint, files, engine, &slice, reading)?;
    let timed = steps(&mut trial, &slice, work, engine.threads, reading);
    trial.leave();
    timed
}

fn steps(trial: &mut Trial, slice: &Slice, work: &Work, threads: usize, reading: bool) -> Result<Timed, EngineError> {
    let many = if reading { trial.most_fresh() } else { 0 };
    // The first step reads what is to be at hand, and finds threads asleep.
    trial.step(0)?;
    let [mut at_hand, mut all, mut one] = <[Vec<Sample>; 3]>::default();
    let (began, limit) = (Instant::now(), if many > 0 { READING_TIME } else { ARITHMETIC_TIME });
    while at_hand.len() < STEPS_LEAST || began.elapsed() < limit {
        at_hand.push(trial.step(0)?);
        // Of a slow drive once is enough.
        if many > 0 && (all.is_empty() || began.elapsed() < limit) {
            all.push(trial.step(many)?);
            one.push(trial.step(1)?);
        }
    }
    let mut costs = Costs::of(work, slice, &times(&at_hand));
    let slower = |samples: &[Sample]| Costs::of(work, slice, &times(samples)).token_s(work) / costs.token_s(work);
    let doubled = doubled(trial, threads, slower)?;
    if !all.is_empty() {
        let all = (many as u64, &times(&all));
        costs = costs.with_reads(work, slice, &times(&at_hand), &times(&one), all);
    }
    let drive = (!all.is_empty()).then(|| fitted(many as u64, &all, &one));
    Ok(Timed { costs, doubled, drive, doubt: speed::doubt(trial.files()) })
}

/// What twice as many `threads` would make of arithmetic, from how many times as long steps of half of them take by
/// `slower`; `None` of one.
fn doubled(trial: &mut Trial, threads: usize, slower: impl Fn(&[Sample]) -> f64) -> Result<Option<f64>, EngineError> {
    let half = threads / 2;
    if half == 0 {
        return Ok(None);
    }
    trial.set_threads(half);
    trial.step(0)?;
    let (mut samples, began) = (Vec::new(), Instant::now());
    while samples.len() < STEPS_LEAST || began.elapsed() < ARITHMETIC_TIME / 2 {
        samples.push(trial.step(0)?);
    }
    // Of an odd count the half is less than half.
    Ok(Some(slower(&samples).powf(1.0 / (threads as f64 / half as f64).log2()).clamp(1.0, 2.0)))
}

/// The drive, from steps in which each layer read `many` experts and steps in which it read one; and the bytes it read in
/// a second of the former.
fn fitted(many: u64, all: &[Sample], one: &[Sample]) -> (Line, f64) {
    let busy = |samples: &[Sample]| median(&samples.iter().map(|s| s.busy_s).collect::<Vec<_>>()).unwrap_or(0.0);
    let rates: Vec<f64> = all.iter().map(|s| s.bytes / s.busy_s.max(1e-9)).collect();
    (Line::fitted(busy(one), many, busy(all)), median(&rates).unwrap_or(0.0))
}

fn times(samples: &[Sample]) -> Times {
    Times::median(&samples.iter().map(|sample| sample.times).collect::<Vec<_>>())
}

/// Bytes that are more than the caches of `machine` keep: twice the largest, within what is sensible there.
fn walk_bytes(machine: &Machine) -> u64 {
    let [least, most] = WALK_BYTES;
    // A small part of what is to be had, so that a look takes nothing from others.
    let most = most.min(machine.memory.available / 8).max(least);
    (2 * machine.cache_bytes()).clamp(least, most)
}

//! The `tune` command: which way of reading makes this model generate fastest on this machine, kept where `run` finds it.
//!
//! Reads alone are measured first, as `bench-io --quick` does it. The most promising ways are then tried in generations,
//! the defaults among them, and what leads must gain 3 % once more in a rerun whose order is reversed.

mod choose;
mod show;
mod trial;

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use millstream_io::limits::{DEPTH_BYTES_MIN, DEPTH_SLABS_MIN};
use millstream_io::measure::{Candidate, Summary, Sweep, Target, Witness};
use millstream_io::{Access, IoMode};

use crate::checkpoint::{Checkpoint, ExpertSource};
use crate::engine::{Engine, Memory, Verify};
use crate::limits::{CHALLENGERS_MAX, TRIAL_TOKENS_MAX};

use super::args::{self, Ram, RunArgs};
use super::bench_io::facts::Facts;
use super::bench_io::measure::{self as reads, Plan};
use super::bench_io::source::Source;
use super::bench_io::{depth_max, io_failure};
use super::config::{self, ModelChoice, RunConfig};
use super::machine::Machine;
use super::reading::Reading;
use super::tuning::{self, Key, Profile};
use super::{Done, Failure, bundled, interrupt, render};
use choose::{Pair, Rerun, Sample};
use trial::{Measured, Trial};

/// Rounds of reads alone, as in `bench-io --quick`.
const READ_ROUNDS: usize = 3;
/// Seconds of one of them.
const READ_SECONDS: f64 = 1.0;
/// Generations of each way of reading before the rerun.
const ROUNDS: usize = 3;
/// Pairs of the rerun.
const PAIRS: usize = 6;
/// Seconds of a generation.
const SECONDS: f64 = 2.0;
/// Tokens of the first generation, which tells how many the others have, and least of those.
const TOKENS_MIN: usize = 8;

/// Flags of `tune`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream tune --ram 4G
  millstream tune -m /models/glm-5.2-int4 --ram 16G --json

Reads only, besides the profile it saves below $XDG_STATE_HOME or ~/.local/state. `run` then takes its settings, names \
it, and lets flags win; `run --tuning off` passes it over.
Environment: MILLSTREAM_MODEL, MILLSTREAM_RAM and MILLSTREAM_THREADS stand for the flags of these names; a flag wins.
Exit codes: 0 done, also where the defaults are best; 1 the work failed; 2 usage; 130 interrupted (nothing is saved).")]
pub struct TuneArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Threads that compute [default: the cores this process may use]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = args::parse_threads)]
    pub threads: Option<usize>,
    /// Memory for weights, context and cached experts, as a size or auto [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = args::parse_ram)]
    pub ram: Option<Ram>,
    /// Seconds of one measurement [default: 1 of reads alone, 2 of a generation]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = args::parse_seconds)]
    pub secs: Option<f64>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Print nothing but the result, and errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// A way of reading, what was measured of it, and what became of it.
struct Arm {
    candidate: Candidate,
    reading: Reading,
    summary: Option<Summary>,
    samples: Vec<Sample>,
    /// Why it could not be had.
    unavailable: Option<String>,
    /// Whether it is tried in generations.
    tried: bool,
}

/// Everything that is known in the end.
struct Report {
    facts: Facts,
    key: Key,
    /// The defaults first.
    arms: Vec<Arm>,
    /// The challenger that led and had to do so again.
    lead: Option<Lead>,
    /// The arm that is kept.
    kept: usize,
    reason: String,
    conditions: Conditions,
    profile: PathBuf,
}

/// The challenger that was fastest at first, and its rerun.
struct Lead {
    arm: usize,
    pairs: Vec<Pair>,
}

/// What the generations had in common.
struct Conditions {
    prompt_tokens: usize,
    tokens: usize,
    slabs: usize,
    experts: usize,
    /// Bytes of experts that one generation with the defaults read.
    bytes: u64,
    direct: bool,
    /// Whether the drive served them all.
    cold: bool,
}

/// Whether the user let a part of the work come to its end.
enum Went<T> {
    On(T),
    Stopped,
}

/// Tunes and saves.
pub fn tune(args: &TuneArgs, machine: &Machine) -> Result<Done, Failure> {
    let config = config::decide(&run_args(args), machine)?;
    config.check_memory(machine)?;
    let state = tuning::prepare_dir(machine)?;
    let checkpoint = match &config.model {
        ModelChoice::Dir(dir) => bundled::open(dir)?,
        ModelChoice::Bundled(source) => match bundled::container(source, machine, args.quiet)? {
            Some(checkpoint) => checkpoint,
            None => return Ok(Done::Interrupted),
        },
    };
    let stop = interrupt::watch()?;
    let Went::On(report) = measure(args, machine, &config, &checkpoint, &state, &stop)? else {
        render::stderr("interrupted; nothing was saved\n");
        return Ok(Done::Interrupted);
    };
    let text = if args.json { show::json(&report) } else { show::text(&report) };
    Ok(super::bench_io::print(&text)?.unwrap_or(Done::Whole))
}

/// The settings of `run` with the same flags.
fn run_args(args: &TuneArgs) -> RunArgs {
    RunArgs { model: args.model.clone(), threads: args.threads, ram: args.ram, ..args::plain_run() }
}

fn measure(
    args: &TuneArgs,
    machine: &Machine,
    config: &RunConfig,
    checkpoint: &Checkpoint,
    state: &Path,
    stop: &AtomicBool,
) -> Result<Went<Report>, Failure> {
    let source = Source::model(&checkpoint.dir, u64::MAX)?;
    let witness = Witness::open(&source.paths, machine.root()).map_err(|error| io_failure(&error))?;
    let (mut trial, mut conditions) = prepare(config, checkpoint, &witness, stop)?;
    let waiting =
        render::Waiting::begin("a first generation with the defaults tells how long the others take", args.quiet);
    let Some(first) = trial.run(&Reading::DEFAULT)? else { return Ok(Went::Stopped) };
    drop(waiting);
    let seconds = args.secs.unwrap_or(SECONDS);
    conditions.tokens = choose::trial_tokens(first.sample.tok_s, seconds, TOKENS_MIN, conditions.tokens);
    trial.ask(conditions.tokens);

    let Went::On((facts, mut arms)) = measure_reads(args, machine, config, checkpoint, &source, stop, |candidates| {
        announce(&first, candidates, args.secs.unwrap_or(READ_SECONDS), &conditions);
    })?
    else {
        return Ok(Went::Stopped);
    };
    let progress = render::Waiting::begin("generating", args.quiet);
    let Went::On(lead) = generate(&mut arms, &mut trial, &progress, &mut conditions)? else {
        return Ok(Went::Stopped);
    };
    drop(progress);

    let (kept, reason) = verdict(&arms, lead.as_ref());
    let (key, date) = (Key::of(machine, checkpoint), tuning::today());
    let profile = Profile { key: key.clone(), date, reading: arms[kept].reading, reason: reason.clone() };
    let profile = tuning::save(state, &profile)?;
    Ok(Went::On(Report { facts, key, arms, lead, kept, reason, conditions, profile }))
}

/// The trial, with memory for few experts, and the most tokens its context has room for.
fn prepare<'a>(
    config: &RunConfig,
    checkpoint: &'a Checkpoint,
    witness: &'a Witness,
    stop: &'a AtomicBool,
) -> Result<(Trial<'a>, Conditions), Failure> {
    let prompt = trial::prompt(checkpoint)?;
    let longest = checkpoint.arch.max_context;
    let tokens = TRIAL_TOKENS_MAX.min(longest.saturating_sub(prompt.len())).max(1);
    let mut engine = config.engine((prompt.len() + tokens).min(longest));
    let budget = Engine::plan(checkpoint, &engine).map_err(trial::failure)?;
    let layers = &checkpoint.experts.layers[..checkpoint.arch.layers.len()];
    let experts: usize = layers.iter().flatten().map(Vec::len).sum();
    let slabs = choose::trial_slabs(budget.slabs, experts as u64, checkpoint.arch.moe.top_k as u64);
    engine.memory = Memory::Slabs(slabs);
    // What is measured is reading.
    engine.verify = Verify::Off;
    let conditions =
        Conditions { prompt_tokens: prompt.len(), tokens, slabs, experts, bytes: 0, direct: true, cold: true };
    let trial = Trial::new(&checkpoint.dir, engine, prompt, TOKENS_MIN.min(tokens), witness, stop);
    Ok((trial, conditions))
}

/// Every candidate of the quick sweep and the defaults, by reads alone; `begin` is told how many there are.
fn measure_reads(
    args: &TuneArgs,
    machine: &Machine,
    config: &RunConfig,
    checkpoint: &Checkpoint,
    source: &Source,
    stop: &AtomicBool,
    begin: impl FnOnce(usize),
) -> Result<Went<(Facts, Vec<Arm>)>, Failure> {
    let slab_bytes = checkpoint.experts.layers.iter().flatten().flatten().map(ExpertSource::bytes).max().unwrap_or(1);
    let available = config.ram.map_or(machine.memory.available, |ram| ram.min(machine.memory.available));
    let depth_max = depth_max(available, slab_bytes)?;
    let mut target = Target::open(&source.paths, source.bytes_max, slab_bytes, depth_max as usize, machine.root())
        .map_err(|error| io_failure(&error))?;
    let facts = Facts::find(machine, source, &mut target, Sweep::Quick)?;
    let default = default_candidate(&facts, target.slab_bytes(), depth_max);
    let mut candidates = Sweep::Quick.candidates(target.slab_bytes(), depth_max);
    candidates.retain(|candidate| *candidate != default);
    candidates.insert(0, default);
    if !args.quiet {
        render::stderr(&facts.text());
        begin(candidates.len());
    }
    let seconds = args.secs.unwrap_or(READ_SECONDS);
    let plan = Plan { candidates, rounds: READ_ROUNDS, seconds, fio: Vec::new() };
    let measured = reads::measure(&plan, &mut target, stop, &mut render::Progress::new(args.quiet))?;
    if measured.interrupted {
        return Ok(Went::Stopped);
    }
    let unavailable = [measured.unavailable, measured.failed].concat();
    let arms = arms(&plan.candidates, &measured.results, &unavailable);
    match &arms[0].unavailable {
        Some(why) => Err(Failure::work(format!("{} cannot be read with the defaults", source.name)).cause(why)),
        None => Ok(Went::On((facts, arms))),
    }
}

/// What the defaults of `run` come to here, among the candidates of a sweep.
fn default_candidate(facts: &Facts, slab_bytes: u64, depth_max: u32) -> Candidate {
    let direct = matches!(facts.access, Access::Direct { .. });
    let depth = (DEPTH_BYTES_MIN / slab_bytes.max(1)).max(DEPTH_SLABS_MIN).min(u64::from(depth_max.max(1)));
    let device = if direct && facts.ring.is_ok() { Candidate::RING } else { Candidate::THREADS };
    Candidate { depth: depth as u32, mode: if direct { IoMode::Direct } else { IoMode::Buffered }, ..device }
}

/// Says how long it will take.
fn announce(first: &Measured, candidates: usize, read_s: f64, conditions: &Conditions) {
    let Conditions { tokens, slabs, experts, .. } = conditions;
    let reads = (candidates * READ_ROUNDS) as f64 * read_s;
    let generation = *tokens as f64 / first.sample.tok_s.max(1e-3) + first.load_s;
    let (least, most) = (2 * ROUNDS, (1 + CHALLENGERS_MAX) * ROUNDS + 2 * PAIRS);
    let (shortest, longest) = (reads + least as f64 * generation, reads + most as f64 * generation);
    render::note(
        false,
        &format!(
            "{shortest:.0} to {longest:.0} s: {candidates} ways of reading for {reads:.0} s, then {least} to {most} \
             generations of {tokens} tokens with room for {slabs} of {experts} experts, about {generation:.1} s each"
        ),
    );
}

/// The candidates with what was measured of them; the first is the default.
fn arms(candidates: &[Candidate], results: &[Summary], unavailable: &[(String, String)]) -> Vec<Arm> {
    let mut arms: Vec<Arm> = candidates
        .iter()
        .enumerate()
        .map(|(index, candidate)| {
            let name = candidate.to_string();
            Arm {
                candidate: *candidate,
                reading: if index == 0 { Reading::DEFAULT } else { Reading::of(candidate) },
                summary: results.iter().find(|summary| summary.candidate == *candidate).cloned(),
                samples: Vec::new(),
                unavailable: unavailable.iter().find(|(other, _)| *other == name).map(|(_, why)| why.clone()),
                tried: false,
            }
        })
        .collect();
    let challengers = choose::challengers(results, &candidates[0]);
    for challenger in challengers {
        let candidate = results[challenger].candidate;
        arms.iter_mut().filter(|arm| arm.candidate == candidate).for_each(|arm| arm.tried = true);
    }
    arms[0].tried = arms.iter().any(|arm| arm.tried);
    arms
}

/// Generates with every arm that is to be tried, then once more with the one that leads.
fn generate(
    arms: &mut [Arm],
    trial: &mut Trial,
    progress: &render::Waiting,
    conditions: &mut Conditions,
) -> Result<Went<Option<Lead>>, Failure> {
    let mut order: Vec<usize> = (0..arms.len()).filter(|index| arms[*index].tried).collect();
    for round in 0..ROUNDS {
        for (done, index) in order.iter().enumerate() {
            let (number, count) = (round * order.len() + done + 1, ROUNDS * order.len());
            progress.say(format!("generation {number} of {count}, {}", arms[*index].reading));
            let Went::On(measured) = one(*index, arms, trial)? else { return Ok(Went::Stopped) };
            if let Some(Measured { sample, bytes, direct, .. }) = measured {
                arms[*index].samples.push(sample);
                if *index == 0 {
                    (conditions.bytes, conditions.direct) = (bytes, direct);
                    conditions.cold &= !sample.cached;
                }
            }
        }
        order.reverse();
    }
    let rate = |arm: &Arm| choose::rate(&arm.samples).filter(|_| arm.unavailable.is_none());
    let others: Vec<Option<f64>> = arms[1..].iter().map(rate).collect();
    let Some(leader) = choose::leader(rate(&arms[0]), &others).map(|index| index + 1) else {
        return Ok(Went::On(None));
    };
    let mut pairs = Vec::new();
    for number in 0..PAIRS {
        progress.say(format!("rerun {} of {PAIRS}, {} against the defaults", number + 1, arms[leader].reading));
        // The other way round than before, and every time the other way round.
        let first = if number % 2 == 0 { [leader, 0] } else { [0, leader] };
        let mut rates = [None; 2];
        for index in first {
            let Went::On(measured) = one(index, arms, trial)? else { return Ok(Went::Stopped) };
            rates[usize::from(index == 0)] = measured.map(|m| m.sample).filter(|s| !s.cached).map(|s| s.tok_s);
        }
        if let [Some(challenger), Some(default)] = rates {
            pairs.push(Pair { challenger, default });
        }
    }
    Ok(Went::On(Some(Lead { arm: leader, pairs })))
}

/// A generation with one arm; none where it cannot be had. The defaults must be had.
fn one(index: usize, arms: &mut [Arm], trial: &mut Trial) -> Result<Went<Option<Measured>>, Failure> {
    if arms[index].unavailable.is_some() {
        return Ok(Went::On(None));
    }
    match trial.run(&arms[index].reading) {
        Ok(None) => Ok(Went::Stopped),
        Ok(measured) => Ok(Went::On(measured)),
        Err(failure) if index == 0 => Err(failure),
        Err(failure) => {
            let cause = failure.cause.map(|cause| format!(": {cause}")).unwrap_or_default();
            arms[index].unavailable = Some(failure.error + &cause);
            Ok(Went::On(None))
        }
    }
}

/// The arm that is kept, and why.
fn verdict(arms: &[Arm], lead: Option<&Lead>) -> (usize, String) {
    let stay = |why: &str| (0, format!("the defaults are best here: {why}"));
    if !arms[0].tried {
        return stay("there is no other way of reading, or memory served all of them");
    }
    if arms[0].samples.iter().any(|sample| sample.cached) {
        return stay("memory served some of their reads, so that nothing can be told of the drive");
    }
    let Some(Lead { arm: leader, pairs }) = lead else {
        return stay("no other way of reading generated 3 % faster");
    };
    let name = &arms[*leader].reading;
    let found = match Rerun::of(pairs) {
        Some(found) if found.pairs == PAIRS => found,
        _ => return stay(&format!("{name} led, but not all of its rerun could be measured")),
    };
    let percent = 100.0 * (found.gain - 1.0);
    let told = format!("in a rerun in reversed order it was faster in {} of {} pairs", found.faster, found.pairs);
    match found.holds() {
        true => (*leader, format!("{name} generates {percent:.1} % faster than the defaults: {told}, by that median")),
        false => stay(&format!("{name} led, but {told}, and by {percent:.1} % in the median")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arm(rates: &[f64], cached: bool) -> Arm {
        Arm {
            candidate: Candidate::RING,
            reading: Reading::of(&Candidate::RING),
            summary: None,
            samples: rates.iter().map(|&tok_s| Sample { tok_s, cached }).collect(),
            unavailable: None,
            tried: true,
        }
    }

    fn pairs(gain: f64, count: usize) -> Lead {
        Lead { arm: 1, pairs: vec![Pair { challenger: 10.0 * gain, default: 10.0 }; count] }
    }

    #[test]
    fn only_a_gain_that_holds_up_is_kept() {
        let arms = [arm(&[10.0], false), arm(&[11.0], false)];
        let (kept, reason) = verdict(&arms, Some(&pairs(1.05, PAIRS)));
        assert_eq!(kept, 1);
        assert!(reason.contains("--depth 4 generates 5.0 % faster") && reason.contains("6 of 6"), "{reason}");
        for (rerun, words) in [
            (Some(pairs(1.02, PAIRS)), "faster in 6 of 6 pairs, and by 2.0 %"),
            (Some(pairs(1.05, PAIRS - 1)), "not all of its rerun"),
            (Some(pairs(1.05, 0)), "not all of its rerun"),
            (None, "no other way of reading generated 3 % faster"),
        ] {
            let (kept, reason) = verdict(&arms, rerun.as_ref());
            assert!(
                kept == 0 && reason.starts_with("the defaults are best here") && reason.contains(words),
                "{reason}"
            );
        }
        let (kept, reason) = verdict(&[arm(&[10.0], true), arm(&[11.0], false)], None);
        assert!(kept == 0 && reason.contains("memory served"), "{reason}");
        let alone = [Arm { tried: false, ..arm(&[], false) }];
        assert_eq!(verdict(&alone, None).0, 0);
    }

    #[test]
    fn what_could_not_be_measured_keeps_its_reason_and_the_default_is_tried_where_another_is() {
        let candidates = [Candidate::RING, Candidate::THREADS];
        let refused = [(Candidate::THREADS.to_string(), "no threads".to_owned())];
        let arms = arms(&candidates, &[], &refused);
        assert_eq!((arms[0].reading, arms[0].tried, arms[1].tried), (Reading::DEFAULT, false, false));
        assert_eq!(arms[1].unavailable.as_deref(), Some("no threads"));
    }
}

//! The `tune` command: which way of reading makes this model generate fastest on this machine, kept where `run` finds it.
//!
//! Reads alone are measured first, as `bench-io --quick` does it. The most promising ways are then tried in generations,
//! the defaults among them, and what leads must gain 3 % once more in a rerun whose order is reversed.

mod arms;
mod choose;
mod show;
mod trial;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::limits::{DEPTH_BYTES_MIN, DEPTH_SLABS_MIN};
use millstream_io::measure::{Candidate, Sweep, Target, Witness};
use millstream_io::{Access, IoMode};

use crate::checkpoint::{Checkpoint, ExpertSource};
use crate::engine::{Engine, Memory, Switch, Verify};
use crate::limits::{CHALLENGERS_MAX, TRIAL_TOKENS_MAX};

use super::args::{self, EngineArgs, Ram, RunArgs};
use super::bench_io::facts::Facts;
use super::bench_io::measure::{self as reads, Plan};
use super::bench_io::source::Source;
use super::bench_io::{depth_max, io_failure};
use super::config::{self, RunConfig};
use super::job;
use super::machine::Machine;
use super::numa::{self, Numa};
use super::reading::Reading;
use super::tuning::{self, Key, Profile};
use super::{Done, Failure, interrupt, output, render};
use arms::{Arm, Lead, PAIRS, ROUNDS, Went, arms, generate, verdict};
use trial::{Measured, Trial};

/// Rounds of reads alone, as in `bench-io --quick`.
const READ_ROUNDS: usize = 3;
/// Seconds of one of them.
const READ_SECONDS: f64 = 1.0;
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
    /// Where memory lies and threads run on a machine with several nodes of memory, as run has it [default: off]
    #[arg(long, value_name = "HOW", value_parser = |text: &str| args::NUMA.parse(text))]
    pub numa: Option<Numa>,
    /// Memory the process may use, as a size or auto: program, weights, context, cached experts [default: auto]
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

/// Tunes and saves.
pub fn tune(args: &TuneArgs, machine: &Machine) -> Result<Done, Failure> {
    let run_args = run_args(args);
    let machine = &numa::place(&run_args, machine)?;
    let mut config = config::decide(&run_args, machine)?;
    config.check_memory(machine)?;
    let state = tuning::prepare_dir(machine)?;
    let Some(checkpoint) = job::open_checkpoint(&run_args, &mut config, machine)? else { return Ok(Done::Interrupted) };
    for name in ["MILLSTREAM_IO", "MILLSTREAM_DEVICE"].into_iter().filter(|name| machine.variable(name).is_some()) {
        render::note(args.quiet, &format!("{name} is set: not here, but in run it wins over what is found"));
    }
    let stop = interrupt::watch()?;
    let Went::On(report) = measure(args, machine, &config, &checkpoint, &state, &stop)? else {
        render::stderr("interrupted; nothing was saved\n");
        return Ok(Done::Interrupted);
    };
    let text = if args.json { show::json(&report) } else { show::text(&report) };
    Ok(output::print(&text)?.unwrap_or(Done::Whole))
}

/// The settings of `run` with the same flags.
fn run_args(args: &TuneArgs) -> RunArgs {
    // What an earlier tune found does not count.
    let plain = args::plain_run();
    let engine =
        EngineArgs { threads: args.threads, numa: args.numa, ram: args.ram, tuning: Some(false), ..plain.engine };
    RunArgs { model: args.model.clone(), quiet: args.quiet, engine, ..plain }
}

fn measure(
    args: &TuneArgs,
    machine: &Machine,
    config: &RunConfig,
    checkpoint: &Checkpoint,
    state: &Path,
    stop: &Arc<AtomicBool>,
) -> Result<Went<Report>, Failure> {
    let source = Source::model(&checkpoint.dir, u64::MAX)?;
    let witness = Witness::open(&source.paths, machine.root()).map_err(|error| io_failure(&error))?;
    let (mut trial, mut conditions) = prepare(config.clone(), checkpoint, &witness, stop, args.quiet)?;
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
    let Went::On(lead) = generate(&mut arms, &mut |reading| trial.run(reading), &progress, &mut conditions)? else {
        return Ok(Went::Stopped);
    };
    drop(progress);

    let (kept, reason) = verdict(&arms, lead.as_ref());
    let (key, date) = (Key::of(machine, checkpoint), tuning::today());
    let profile = Profile {
        key: key.clone(),
        date,
        reading: arms[kept].reading,
        reason: reason.clone(),
        gb_s: reads_alone(&arms[kept]),
    };
    let profile = tuning::save(state, &profile)?;
    Ok(Went::On(Report { facts, key, arms, lead, kept, reason, conditions, profile }))
}

/// What reads alone reached as the profile has them made, where memory served none of them.
fn reads_alone(kept: &Arm) -> Option<f64> {
    kept.summary.as_ref().filter(|summary| !summary.cached).map(|summary| summary.gb_s)
}

/// The trial, with memory for few experts, and the most tokens its context has room for.
fn prepare<'a>(
    mut config: RunConfig,
    checkpoint: &'a Checkpoint,
    witness: &'a Witness,
    stop: &Arc<AtomicBool>,
    quiet: bool,
) -> Result<(Trial<'a>, Conditions), Failure> {
    let prompt = trial::prompt(checkpoint)?;
    config.prompt_has(prompt.len());
    let longest = checkpoint.arch.max_context;
    let tokens = TRIAL_TOKENS_MAX.min(longest.saturating_sub(prompt.len())).max(1);
    let mut engine = config.engine((prompt.len() + tokens).min(longest));
    let divided = Engine::divide(checkpoint, &engine).map_err(job::engine_failure_as_stored)?;
    let experts = checkpoint.routed().flatten().count();
    // So many of each size: what the scarcest has.
    let fewest = divided.budget().slabs.iter().map(|slabs| slabs.count).min().unwrap_or(0);
    let slabs = choose::trial_slabs(fewest, experts as u64, checkpoint.arch.moe.top_k as u64);
    // Experts are read as they will be, in one piece or in two.
    let keep_scales = if divided.keeps_scales() { Switch::On } else { Switch::Off };
    engine.keep_scales = keep_scales;
    engine.memory = Memory::Slabs(slabs);
    // What is measured is reading.
    engine.verify = Verify::Off;
    let conditions =
        Conditions { prompt_tokens: prompt.len(), tokens, slabs, experts, bytes: 0, direct: true, cold: true };
    let trial = Trial::new(&checkpoint.dir, engine, prompt, TOKENS_MIN.min(tokens), witness, stop.clone(), quiet);
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
    let generation = *tokens as f64 / first.sample.tok_s.max(1e-3) + first.before_s;
    let (least, most) = (2 * ROUNDS, (1 + CHALLENGERS_MAX) * ROUNDS + 2 * PAIRS);
    let (shortest, longest) = (reads + least as f64 * generation, reads + most as f64 * generation);
    render::note(
        false,
        &format!(
            "about {shortest:.0} to {longest:.0} s: {candidates} ways of reading for {reads:.0} s, then {least} to {most} \
             generations of {tokens} tokens with room for {slabs} of {experts} experts, {generation:.1} s each"
        ),
    );
}

//! The `sweep` command: one generation under a range of values of one setting. The same prompt, the same tokens, an empty
//! expert cache each time; every value once a round, rounds in turn forwards and backwards, medians with their spread.
//! Of precisions, which change the tokens, it is the logits that are compared: see [`bits`].

mod bits;
mod measure;
mod picture;
mod range;
mod show;

use std::path::PathBuf;

use clap::Subcommand;

use crate::engine::{Engine, EngineError, Memory};
use crate::limits::SWEEP_VALUES_MAX;

use super::args::{self, Ram, RunArgs};
use super::job::{self, Prepared};
use super::machine::Machine;
use super::{Done, Failure, numa, output, render, size};
use bits::BitsArgs;
use measure::{Arm, Measured};

/// Rounds when `-r` is not given.
const ROUNDS_DEFAULT: usize = 3;
/// Tokens generated when `-n` is not given.
const TOKENS_DEFAULT: i64 = 32;

/// Flags of `sweep`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream sweep threads -p \"Tell me a story about a fox.\"
  millstream sweep ram -m /models/glm-5.2-int4 --values 8G,12G,16G -p \"Why is the sky blue?\" --svg ram.svg

Exit codes: 0 done, 1 a value failed (the others are shown), 2 usage, 130 interrupted (what was measured is shown).")]
pub struct SweepArgs {
    /// What to vary.
    #[command(subcommand)]
    what: SweepCommand,
}

#[derive(Debug, Subcommand)]
enum SweepCommand {
    /// Memory: what a larger cache of experts is worth
    Ram(Box<RamArgs>),
    /// Threads that compute
    Threads(Box<ThreadsArgs>),
    /// Precision of the weights: what each costs in agreement, perplexity and divergence
    Bits(Box<BitsArgs>),
}

/// Flags of `sweep ram`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
struct RamArgs {
    /// Sizes to try, such as 4G,8G,16G [default: six, from the least that works to all that is available]
    #[arg(long, value_name = "SIZES", value_delimiter = ',', value_parser = parse_size)]
    values: Vec<u64>,
    #[command(flatten)]
    common: Common,
}

/// Flags of `sweep threads`.
#[derive(Debug, clap::Args)]
#[command(after_help = AFTER)]
struct ThreadsArgs {
    /// Counts to try, such as 1,2,4 [default: from 1 to the cores this process may use]
    #[arg(long, value_name = "COUNTS", value_delimiter = ',', value_parser = parse_count)]
    values: Vec<u64>,
    #[command(flatten)]
    common: Common,
}

const AFTER: &str = "Every flag of `run` but the one that is varied means the same here; without -n there are at most \
                     32 tokens. The answer is not shown.";

#[derive(Debug, clap::Args)]
struct Common {
    /// Generations with each value [default: 3]
    #[arg(short = 'r', long, value_name = "N", allow_negative_numbers = true, value_parser = args::parse_rounds)]
    repetitions: Option<usize>,
    /// Draw the sweep into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    #[command(flatten)]
    run: RunArgs,
}

/// The setting that is varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knob {
    Ram,
    Threads,
}

impl Knob {
    fn name(self) -> &'static str {
        match self {
            Knob::Ram => "ram",
            Knob::Threads => "threads",
        }
    }

    /// A value as people read it.
    fn show(self, value: u64) -> String {
        match self {
            Knob::Ram => size::show(value),
            Knob::Threads => value.to_string(),
        }
    }
}

/// Everything that is known in the end.
struct Report {
    knob: Knob,
    rounds: usize,
    arms: Vec<Arm>,
    measured: Measured,
}

impl Report {
    /// Whether no generation was done.
    fn is_empty(&self) -> bool {
        self.arms.iter().all(|arm| arm.samples.is_empty())
    }
}

/// Sweeps and reports.
pub fn sweep(args: &SweepArgs, machine: &Machine) -> Result<Done, Failure> {
    let (knob, mut values, common) = match &args.what {
        SweepCommand::Ram(args) => (Knob::Ram, args.values.clone(), &args.common),
        SweepCommand::Threads(args) => (Knob::Threads, args.values.clone(), &args.common),
        SweepCommand::Bits(args) => return bits::bits(args, machine),
    };
    values.sort_unstable();
    values.dedup();
    check(knob, &values, common, machine)?;
    let run_args = run_args(knob, &values, common);
    let machine = &numa::place(&run_args, machine)?;
    let Some(prepared) = job::prepare(&run_args, machine)? else { return Ok(Done::Interrupted) };
    if values.is_empty() {
        values = match knob {
            Knob::Ram => ram_values(&prepared, machine)?,
            Knob::Threads => range::threads(machine.cores),
        };
    }
    if let Some(busy) = machine.kernel_facts().busy(machine.cores) {
        render::note(run_args.quiet, &busy);
    }
    let rounds = common.repetitions.unwrap_or(ROUNDS_DEFAULT);
    let (arms, measured) = measure::measure(knob, &values, rounds, &run_args, machine, prepared)?;
    let report = Report { knob, rounds, arms, measured };
    if report.is_empty() && report.measured.interrupted {
        render::stderr("interrupted before the first generation was done\n");
        return Ok(Done::Interrupted);
    }
    if report.is_empty()
        && let Some(failure) = report.arms.iter().find_map(|arm| arm.failed.clone())
    {
        return Err(failure);
    }
    let text = if common.run.json { show::json(&report) } else { show::text(&report) };
    let closed = output::print(&text)?;
    if let Some(path) = &common.svg {
        output::write(path, "picture", picture::draw(&report))?;
    }
    Ok(match closed {
        Some(done) => done,
        None if report.measured.interrupted => Done::Interrupted,
        None if report.arms.iter().any(|arm| arm.failed.is_some()) => Done::Unwell,
        None => Done::Whole,
    })
}

/// Refuses what makes no sweep, before a model is opened.
fn check(knob: Knob, values: &[u64], common: &Common, machine: &Machine) -> Result<(), Failure> {
    let varied = match knob {
        Knob::Ram => common.run.engine.ram.is_some(),
        Knob::Threads => common.run.engine.threads.is_some(),
    };
    if varied {
        let name = knob.name();
        let values = match knob {
            Knob::Ram => "4G,8G",
            Knob::Threads => "4,8",
        };
        return Err(Failure::usage(format!("--{name} is what `sweep {name}` varies"))
            .hint(format!("give the values to try with --values, such as --values {values}")));
    }
    if values.len() > SWEEP_VALUES_MAX {
        return Err(Failure::usage(format!("{} values: at most {SWEEP_VALUES_MAX} are tried", values.len())));
    }
    if common.run.stats_json.is_some() {
        return Err(Failure::usage("--stats-json is of one run, and a sweep has many")
            .hint("--json prints every sample of the sweep"));
    }
    if common.run.timeline.is_some() {
        return Err(Failure::usage("--timeline is of one run, and a sweep has many")
            .hint("`millstream profile --timeline FILE` writes that of one"));
    }
    if common.run.kv.is_some() {
        return Err(Failure::usage("--kv goes on with one context, and every run of a sweep begins anew")
            .hint("leave --kv out"));
    }
    match &common.svg {
        Some(path) => output::check(path, "picture", &job::inputs(&common.run, machine)),
        None => Ok(()),
    }
}

/// The settings of `run` with the same flags. Memory that is given need not be found out.
fn run_args(knob: Knob, values: &[u64], common: &Common) -> RunArgs {
    let mut run = common.run.clone();
    run.max_tokens = run.max_tokens.or(Some(TOKENS_DEFAULT));
    if let (Knob::Ram, Some(most)) = (knob, values.last()) {
        run.engine.ram = Some(Ram::Bytes(*most));
    }
    run
}

/// From the least budget that works to all that is available, or to where every expert is in memory.
fn ram_values(prepared: &Prepared, machine: &Machine) -> Result<Vec<u64>, Failure> {
    let Prepared { config, checkpoint, context, files, .. } = prepared;
    let mut engine = config.engine(*context);
    // As `run` finds it with too little: what a budget by slabs comes to may be less, as it may keep scales in memory.
    engine.memory = Memory::Total(Some(0));
    let least = match Engine::plan(checkpoint, &engine) {
        Ok(budget) => budget.total,
        Err(EngineError::TooSmall(error)) => error.needed(),
        Err(error) => return Err(files.failure(error)),
    };
    engine.memory = Memory::Slabs(checkpoint.routed().flatten().count());
    let whole = Engine::plan(checkpoint, &engine).map_err(|e| files.failure(e))?.total;
    engine.memory = Memory::Total(None);
    let most = Engine::plan(checkpoint, &engine).map_err(|e| files.failure(e))?.total.min(whole);
    let values = range::memory(least, most);
    if most < whole {
        let (whole, most) = (size::show(whole), size::show(most));
        render::note(false, &format!("all experts would take {whole}; {} leaves {most}", machine.memory.source));
    }
    Ok(values)
}

fn parse_size(text: &str) -> Result<u64, String> {
    match args::parse_ram(text)? {
        Ram::Bytes(bytes) => Ok(bytes),
        Ram::Auto => Err("a sweep takes sizes, such as 4G,8G".to_owned()),
    }
}

fn parse_count(text: &str) -> Result<u64, String> {
    args::parse_threads(text).map(|count| count as u64)
}

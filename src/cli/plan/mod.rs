//! The `plan` command: where everything would live, what a token would read and how long it would take, what other
//! machines would make of it, and the stages it goes through.

mod change;
mod expected;
mod show;
pub mod speed;
mod timed;

use std::mem::ManuallyDrop;
use std::path::PathBuf;

use crate::checkpoint::Checkpoint;
use crate::engine::budget::{Budget, TooSmall};
use crate::engine::config::DEFAULT_CONTEXT;
use crate::engine::predict::{self, Answer, Choice, Line, Work};
use crate::engine::{Engine, EngineConfig, EngineError, StageGraph, Switch};

use super::args::{self, EngineArgs, Ram, RunArgs, WidthArgs};
use super::config::{self, MaxTokens, RunConfig};
use super::machine::Machine;
use super::numa::{self, Numa};
use super::tuning::{self, Lookup};
use super::usage::{Usage, UsageChoice};
use super::{Done, Failure, job, output, render, size};
use change::Change;
use expected::{Expected, Facts};
use timed::{Timed, timed};

/// Flags of `plan`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream plan -m /models/glm-5.2-int4 --ram 16G --what-if ram=64G,disk=7GB/s
  millstream plan -m /models/glm-5.2-int4 --graph --dot | dot -Tsvg > step.svg

Nothing is loaded. A speed is of the answer that is asked about, from an empty cache: what each expert is first chosen for \
must be read. Beside it stands that of long answers, and what is sure: the speed that nothing in memory makes. What the cache \
will find follows from the model's history of selections; without one it is what was found for other models. \
Steps of a few layers are timed for half a second, longer where the drive is slow, and for a fifth of a second where --disk \
or a tuning profile says what the drive reads and no expert is quantized. With --untimed nothing is.
Exit codes: 0 done, 1 the work failed, 2 usage.")]
pub struct PlanArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Memory for weights, context and cached experts, as a size or auto [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = args::parse_ram)]
    ram: Option<Ram>,
    #[command(flatten)]
    widths: WidthArgs,
    /// Tokens of context [default: 4096, or what the model has]
    #[arg(short, long, visible_alias = "context", value_name = "N", value_parser = args::parse_context)]
    ctx_size: Option<usize>,
    /// Tokens of the prompt: a short one leaves more memory to experts, and fewer of them in it [default: as many as are put
    /// through at once]
    #[arg(long, value_name = "N", value_parser = args::parse_context)]
    prompt_tokens: Option<usize>,
    /// Tokens of the answer that is predicted, as run has it; -1 goes on to the end of the context [default: 512, or what
    /// the context has]
    #[arg(short = 'n', long, visible_alias = "tokens", value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=1 << 31))]
    max_tokens: Option<i64>,
    /// What the drive reads, in GB/s, as bench-io measures it [default: of the tuning profile, else measured]
    #[arg(long, value_name = "GB/S", allow_negative_numbers = true, value_parser = args::parse_rate)]
    disk: Option<f64>,
    /// Threads that compute [default: the cores this process may use]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = args::parse_threads)]
    threads: Option<usize>,
    /// Where memory lies and threads run on a machine with several nodes of memory, as run has it [default: off]
    #[arg(long, value_name = "HOW", value_parser = |text: &str| args::NUMA.parse(text))]
    numa: Option<Numa>,
    /// Where selections are remembered: auto, off or a file, as run has it [default: auto]
    #[arg(long, value_name = "WHERE", value_parser = UsageChoice::parse)]
    usage: Option<UsageChoice>,
    /// What another machine would make of it, such as ram=64G,disk=7GB/s,drives=2,cores=16, where ram is what --ram would
    /// say there; may be given again
    #[arg(long, value_name = "CHANGES", value_parser = Change::parse)]
    what_if: Vec<Change>,
    /// Read ahead what the next layer's router will probably choose: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| args::SWITCH.parse(text))]
    prefetch: Option<Switch>,
    /// Time nothing and predict no speed: all that is said is from headers
    #[arg(long)]
    untimed: bool,
    /// Print the stages of a step and what each needs
    #[arg(long)]
    graph: bool,
    /// Print them for Graphviz
    #[arg(long, conflicts_with = "json")]
    dot: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Prints the plan.
pub fn plan(args: &PlanArgs, machine: &Machine) -> Result<Done, Failure> {
    let plain = args::plain_run();
    let engine = EngineArgs {
        ram: args.ram,
        widths: args.widths,
        prefetch: args.prefetch,
        threads: args.threads,
        numa: args.numa,
        usage: args.usage.clone(),
        ..plain.engine
    };
    let run = RunArgs { model: args.model.clone(), max_tokens: args.max_tokens, quiet: true, engine, ..plain };
    let machine = &numa::place(&run, machine)?;
    let mut config = config::decide(&run, machine)?;
    config.check_memory(machine)?;
    if let Some(tokens) = args.prompt_tokens {
        config.prompt_has(tokens);
    }
    let Some(checkpoint) = job::open_checkpoint(&run, &mut config, machine)? else { return Ok(Done::Interrupted) };
    // A hundred thousand tensors take a tenth of the time to take apart that they took to know, and the process ends.
    let checkpoint = ManuallyDrop::new(checkpoint);
    let context = args.ctx_size.unwrap_or(checkpoint.arch.max_context.min(DEFAULT_CONTEXT));
    if let Some(tokens) = args.prompt_tokens.filter(|&tokens| tokens >= context) {
        let what = format!("--prompt-tokens {tokens} leaves no place for an answer in a context of {context}");
        return Err(Failure::usage(what).hint("give a longer context with -c, or fewer tokens"));
    }
    let graph = StageGraph::new(&checkpoint.arch, config.engine(context).switches.guesses());
    let text = if args.dot {
        graph.dot()
    } else {
        let plan = Plan::make(args, &config, &checkpoint, context, machine)?;
        match args.json {
            true => show::json(&plan, args.graph.then_some(&graph)).to_string() + "\n",
            false => show::text(&plan, args.graph.then_some(&graph)),
        }
    };
    Ok(output::print(&text)?.unwrap_or(Done::Whole))
}

/// Everything that is expected of a model here.
struct Plan {
    /// Tokens of context that it is for.
    context: usize,
    budget: Budget,
    /// Who says how much memory there is.
    source: String,
    facts: Facts,
    /// That others are at work on this machine, while it is timed.
    busy: Option<String>,
    /// Selections of the history; 0 where there is none.
    selections: u64,
    /// Whether the weights are drawn.
    drawn: bool,
    here: Expected,
    /// Machines the model would not fit have the reason.
    what_if: Vec<(Change, Result<Expected, TooSmall>)>,
    /// Whether the user asked for the changes.
    asked: bool,
}

impl Plan {
    fn make(
        args: &PlanArgs,
        config: &RunConfig,
        checkpoint: &Checkpoint,
        context: usize,
        machine: &Machine,
    ) -> Result<Plan, Failure> {
        let engine = config.engine(context);
        let divided =
            Engine::divide(checkpoint, &engine).map_err(|error| job::engine_failure_of(error, &config.model))?;
        // Experts are timed as they will be read, in one piece or in two.
        let keep_scales = if divided.keeps_scales() { Switch::On } else { Switch::Off };
        let timed_engine = EngineConfig { keep_scales, ..engine.clone() };
        let (usage, warning) = Usage::open(&config.usage, checkpoint, machine);
        warning.iter().for_each(|line| render::note(false, line));
        let work = Work::of(checkpoint, &engine.widths);
        let expert_bytes = checkpoint.token_expert_bytes() as f64 / work.used().max(1) as f64;
        let told = told_of_drive(args, checkpoint, machine);
        let holes = speed::holes(checkpoint);
        // What quantizing takes is seen in steps that read, if only holes.
        let reading = holes.is_none() && told.is_none() || divided.budget().staging > 0;
        let timed = match args.untimed {
            true => Err("not asked for".to_owned()),
            false => timed(checkpoint, divided.files(), &work, &timed_engine, reading, machine)
                .map_err(|error| error.to_string()),
        };
        let (drive, disk) = drive(told, holes, &timed, expert_bytes);
        let (costs, doubled) = match timed {
            Ok(timed) => (Ok(timed.costs), timed.doubled),
            Err(why) => (Err(why), None),
        };
        let (history, drawn) = (usage.before(), checkpoint.is_drawn());
        let facts = Facts {
            expert_bytes,
            choice: Choice::of(history, &work, drawn),
            costs,
            drive,
            disk,
            cores: config.threads as u64,
            doubled,
            guessed: engine.switches.guesses().map_or(0.0, |_| predict::GUESSED),
            answer: answer(args, config, &engine, context),
            work,
        };
        let here = facts.expected(&Change::default(), divided.budget().slots());
        let mut plan = Plan {
            context,
            source: if config.ram.is_some() { "asked for".to_owned() } else { machine.memory.source.clone() },
            facts,
            busy: machine.kernel_facts().busy(machine.cores).filter(|_| !args.untimed),
            selections: history.iter().sum(),
            drawn,
            here,
            what_if: vec![],
            asked: !args.what_if.is_empty(),
            budget: divided.budget().clone(),
        };
        for change in if plan.asked { args.what_if.clone() } else { plan.one_more() } {
            let slots = match change.ram {
                None => Ok(plan.budget.slots()),
                Some(ram) => divided.of_ram(ram).map(|budget| budget.slots()),
            };
            let expected = match slots {
                Ok(slots) => Ok(plan.facts.expected(&change, slots)),
                Err(EngineError::TooSmall(too_small)) => Err(too_small),
                Err(other) => return Err(job::engine_failure(other)),
            };
            plan.what_if.push((change, expected));
        }
        Ok(plan)
    }

    /// One more of each resource: twice the memory it may use, a second drive, a drive twice as fast, as many cores again
    /// where it is known what those that are there make of one another.
    fn one_more(&self) -> Vec<Change> {
        let nothing = Change::default();
        let mut changes = vec![Change { ram: Some(change::round(2 * self.budget.total)), ..nothing }];
        if let Ok((gb_s, ..)) = self.facts.disk {
            changes.push(Change { drives: Some(2), ..nothing });
            changes.push(Change { disk: Some(size::short(2.0 * gb_s)), ..nothing });
        }
        if self.facts.doubled.is_some() {
            changes.push(Change { cores: Some(2 * self.facts.cores), ..nothing });
        }
        changes
    }
}

/// The answer that is asked about: what is not said of prompt and answer is as long as the other one leaves room for, or half
/// of the context, and no longer than a run makes it.
fn answer(args: &PlanArgs, config: &RunConfig, engine: &EngineConfig, context: usize) -> Answer {
    let rest = match args.max_tokens {
        Some(tokens) if tokens > 0 => context.saturating_sub(tokens as usize),
        _ => context / 2,
    };
    let prompt = args.prompt_tokens.unwrap_or(engine.prefill_rows.min(rest).max(1));
    let room = context - prompt;
    let tokens = match config.max_tokens {
        MaxTokens::AtMost(tokens) => tokens.min(room),
        MaxTokens::Context => room,
    };
    Answer { prompt: prompt as u64, tokens: tokens as u64 }
}

/// What the drive reads in GB/s, who says so, and what makes it doubtful; or why it is not known.
type Disk = Result<(f64, &'static str, Option<String>), String>;

/// What the drive reads in GB/s, where somebody says so, and who.
fn told_of_drive(args: &PlanArgs, checkpoint: &Checkpoint, machine: &Machine) -> Option<(f64, &'static str)> {
    if let Some(gb_s) = args.disk {
        return Some((gb_s, "asked for"));
    }
    match tuning::find(machine, checkpoint) {
        Lookup::Found(profile) => profile.gb_s.map(|gb_s| (gb_s, "the tuning profile")),
        Lookup::None | Lookup::Unusable(_) => None,
    }
}

/// How the drive reads, and who says so.
fn drive(
    told: Option<(f64, &'static str)>,
    holes: Option<String>,
    timed: &Result<Timed, String>,
    expert_bytes: f64,
) -> (Option<Line>, Disk) {
    if let Some((gb_s, source)) = told {
        return (Some(Line::steady(gb_s, expert_bytes)), Ok((gb_s, source, None)));
    }
    match (holes, timed) {
        (Some(why), _) => (None, Err(why)),
        (None, Err(why)) => (None, Err(why.clone())),
        (None, Ok(Timed { drive: Some((drive, bytes_s)), doubt, .. })) => {
            (Some(*drive), Ok((bytes_s / 1e9, "measured", doubt.clone())))
        }
        (None, Ok(Timed { drive: None, .. })) => (None, Err("a token uses every expert of its layers".to_owned())),
    }
}

//! The `run` command: one generation.

use std::io::Write;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use crate::checkpoint::{Arch, Checkpoint};
use crate::engine::stats::Stats;
use crate::engine::stop::StopMatcher;
use crate::engine::{Engine, EngineError, Finish, Job, Observe, Outcome};
use crate::model::tokenizer::{Tokenizer, TokenizerError};
use crate::store::trace::Recorder;

use super::args::RunArgs;
use super::config::{self, ModelChoice, RunConfig};
use super::machine::Machine;
use super::printer::{Printer, Show};
use super::usage::Usage;
use super::{Done, Failure, bundled, hanging, interrupt, notes, prompt, render, size, tuning};

/// Runs one generation.
pub fn run(args: &RunArgs, machine: &Machine) -> Result<Done, Failure> {
    run_observed(args, machine, None)
}

/// As [`run`]; what the router chooses goes into `recorded`.
pub fn run_recorded(args: &RunArgs, machine: &Machine, recorded: &mut Option<Recorder>) -> Result<Done, Failure> {
    run_observed(args, machine, Some(recorded))
}

fn run_observed(args: &RunArgs, machine: &Machine, recorded: Option<&mut Option<Recorder>>) -> Result<Done, Failure> {
    let mut config = config::decide(args, machine)?;
    config.check_memory(machine)?;
    let text = prompt::read_prompt(args)?;
    let typed_ids = if args.ids { Some(prompt::parse_ids(&text)?) } else { None };
    if let Some(path) = &args.timeline {
        check_writable(path, "timeline")?;
    }
    if let Some(path) = &args.stats_json {
        check_writable(path, "statistics")?;
    }
    let Some(checkpoint) = open_checkpoint(args, &mut config, machine)? else { return Ok(Done::Interrupted) };
    let dir = checkpoint.dir.clone();
    let files = Files { dir: &dir, cached: matches!(config.model, ModelChoice::Bundled(_)) };
    let longest = checkpoint.arch.max_context;
    let tokenizer =
        prompt::open_tokenizer(&dir, &checkpoint.arch, args.ids).map_err(|failure| files.blamed(failure))?;
    let prompt = match (typed_ids, &tokenizer) {
        (Some(ids), _) => prompt::check_ids(ids, &checkpoint.arch)?,
        (None, Some(tokenizer)) => {
            config.could_fit(tokenizer.least_tokens(text.trim().len()), longest)?;
            prompt::encode(args, &dir, tokenizer, &text).map_err(|failure| files.blamed(failure))?
        }
        (None, None) => return Err(prompt::tokenizer_failure(&TokenizerError::Missing { dir: dir.clone() })),
    };
    let (stop_ids, stops) = split_stops(&config, tokenizer.as_ref(), ends_turn(args, &checkpoint.arch))?;
    let (context, max_tokens) = config.fit(prompt.len(), longest)?;
    let (usage, warning) = Usage::open(&config.usage, &checkpoint, machine);
    warning.iter().for_each(|line| render::note(args.quiet, line));
    config.history = usage.before().to_vec();
    let formats = checkpoint.formats().map(|format| format.to_string()).collect();
    let mut engine = open(args, &config, machine, checkpoint, context).map_err(|e| files.failure(e))?;

    let job = Job { prompt, max_tokens, sampling: config.sampling, stop_ids };
    let show = match (args.json, args.ids) {
        (true, _) => Show::Nothing,
        (false, true) => Show::Ids,
        (false, false) => Show::Text,
    };
    let mut printer =
        Printer::new(show, std::io::stdout().lock(), tokenizer.as_ref(), &job.stop_ids, stops, max_tokens);
    let interrupted = interrupt::watch()?;
    engine.set_watch(hanging::watch_reads(interrupted.clone(), args.quiet));
    let outcome = match recorded {
        None => generate(&mut engine, &job, &interrupted, &mut printer, args.quiet, &mut |_, _, _| ()),
        Some(recorded) => {
            let recorder = recorded.insert(Recorder::new(engine.traced().clone()));
            let mut observe = |layer, ids: &[u16], _: &[f32]| recorder.saw(layer, ids);
            generate(&mut engine, &job, &interrupted, &mut printer, args.quiet, &mut observe)
        }
    };
    printer.finish();
    // Also of a run that was interrupted or failed: what was chosen was chosen.
    usage.update(engine.store().usage()).iter().for_each(|line| render::note(args.quiet, line));
    if let Some(error) = printer.failed() {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Ok(Done::PipeClosed);
        }
        return Err(Failure::work("cannot write the answer to standard output").cause(error));
    }
    for line in engine.warnings() {
        render::note(args.quiet, &line);
    }
    let outcome = outcome.map_err(|e| files.failure(e))?;
    let mut stats = engine.stats();
    complete(&mut stats, &outcome, &config, machine, &dir);
    stats.model.formats = formats;
    stats.text = printer.text().to_owned();
    stats.stop_string = printer.stopped_by().map(str::to_owned);
    drop(printer);
    if let Some(path) = &args.timeline {
        std::fs::write(path, engine.timeline())
            .map_err(|e| Failure::work(format!("cannot write the timeline to {}", path.display())).cause(e))?;
    }
    report(args, &stats, &config)?;
    hanging::leave(engine, args.quiet);
    Ok(if outcome.finish == Finish::Interrupted { Done::Interrupted } else { Done::Whole })
}

/// Opens the model that `config` chose, and takes what was measured for it; none when its conversion was interrupted.
pub fn open_checkpoint(
    args: &RunArgs,
    config: &mut RunConfig,
    machine: &Machine,
) -> Result<Option<Checkpoint>, Failure> {
    let checkpoint = match &config.model {
        ModelChoice::Dir(dir) => Some(bundled::open(dir)?),
        ModelChoice::Bundled(source) => bundled::container(source, machine, args.quiet)?,
    };
    if let Some(checkpoint) = &checkpoint
        && config.tuning
        && let Some(line) = config.tune(tuning::find(machine, checkpoint))
    {
        render::note(args.quiet, &line);
    }
    Ok(checkpoint)
}

/// Opens the engine and says what is worth knowing about it.
pub fn open(
    args: &RunArgs,
    config: &RunConfig,
    machine: &Machine,
    checkpoint: Checkpoint,
    context: usize,
) -> Result<Engine, EngineError> {
    let note = |line: &str| render::note(args.quiet, line);
    if args.verbose {
        render::stderr(&render::settings_text(&config.settings));
        notes::on_sampling(&checkpoint.dir, &config.sampling).iter().for_each(|line| note(line));
    }
    notes::on_machine(config, machine).iter().for_each(|line| note(line));
    let waiting = render::Waiting::begin("loading the model", args.quiet);
    let engine = Engine::open(checkpoint, &config.engine(context))?;
    drop(waiting);
    engine.notes().iter().for_each(|line| note(line));
    let device = engine.store().device().describe();
    if args.verbose && device.name == "io_uring" {
        let (registered, all) = (size::show(device.registered_bytes), size::show(engine.budget().experts()));
        note(&format!("{registered} of {all} of slabs are registered with the kernel"));
    }
    Ok(engine)
}

/// The files of the model that runs.
struct Files<'a> {
    dir: &'a Path,
    /// They are this program's own copy, and can be made anew.
    cached: bool,
}

impl Files<'_> {
    /// A failure for which the files are to blame.
    fn blamed(&self, failure: Failure) -> Failure {
        match self.cached && failure.code == 1 {
            true => failure.hint(format!("delete the directory {}: the next run makes it anew", self.dir.display())),
            false => failure,
        }
    }

    fn failure(&self, error: EngineError) -> Failure {
        let blames_files = error.blames_files();
        let failure = engine_failure(error);
        if blames_files { self.blamed(failure) } else { failure }
    }
}

/// Runs the job until it is done or `interrupted` is raised.
fn generate<W: Write>(
    engine: &mut Engine,
    job: &Job,
    interrupted: &AtomicBool,
    printer: &mut Printer<'_, W>,
    quiet: bool,
    observe: &mut Observe,
) -> Result<Outcome, EngineError> {
    let mut waiting = Some(render::Waiting::begin("reading the prompt", quiet));
    let mut on_token = |id| {
        waiting = None;
        printer.token(id)
    };
    engine.generate_observed(job, interrupted, &mut on_token, observe)
}

/// A failure of the engine: of what was asked for, where that is at fault.
pub fn engine_failure(error: EngineError) -> Failure {
    use EngineError::{Context, EmptyPrompt, NoIndexer, NoIsa, PromptTooLong, Sampling, TokenOutOfRange};
    let mut failure = Failure::of(&error);
    if matches!(&error, EngineError::Mirror(e) if e.is_choice())
        || matches!(
            error,
            NoIsa(_)
                | NoIndexer
                | Context { .. }
                | EmptyPrompt
                | PromptTooLong { .. }
                | TokenOutOfRange { .. }
                | Sampling(_)
        )
    {
        failure.code = 2;
    }
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

/// Ids by which the model ends its turn.
fn ends_turn(args: &RunArgs, arch: &Arch) -> Vec<u32> {
    if args.ignore_eos { Vec::new() } else { arch.stop_ids.clone() }
}

/// Stop strings that name a control token stop at that token, which has no text; the others watch the text.
fn split_stops(
    config: &RunConfig,
    tokenizer: Option<&Tokenizer>,
    mut ids: Vec<u32>,
) -> Result<(Vec<u32>, StopMatcher), Failure> {
    let mut texts = Vec::new();
    for stop in &config.stops {
        let Some(tokenizer) = tokenizer else {
            return Err(Failure::usage("--stop needs the model's tokenizer.json, which is not there"));
        };
        match tokenizer.control().id(stop) {
            Some(id) => ids.push(id),
            None => texts.push(stop.clone()),
        }
    }
    ids.sort_unstable();
    ids.dedup();
    let stops = StopMatcher::new(texts).map_err(|e| Failure::usage(e.to_string()))?;
    Ok((ids, stops))
}

fn complete(stats: &mut Stats, outcome: &Outcome, config: &RunConfig, machine: &Machine, dir: &Path) {
    stats.settings = config.settings.iter().map(|s| (s.name.to_owned(), s.value.clone())).collect();
    stats.model.dir = dir.display().to_string();
    stats.machine.cpu = machine.cpu.clone();
    stats.machine.ram = machine.memory.total;
    stats.machine.kernel = machine.kernel.clone();
    stats.machine.fs = machine.file_system(dir);
    stats.memory.rss_peak = machine.peak_rss();
    stats.ids = outcome.ids.clone();
    stats.tokens = outcome.ids.len();
    stats.finish_reason = match outcome.finish {
        Finish::Stop | Finish::StopString => "stop",
        Finish::Length => "length",
        Finish::Interrupted => "interrupted",
    };
    stats.context_full = outcome.finish == Finish::Length && config.context_limits;
    stats.derive();
}

fn report(args: &RunArgs, stats: &Stats, config: &RunConfig) -> Result<(), Failure> {
    let cannot = |e: serde_json::Error| Failure::work("cannot write the statistics as JSON").cause(e);
    if let Some(path) = &args.stats_json {
        let json = serde_json::to_string_pretty(stats).map_err(cannot)? + "\n";
        std::fs::write(path, json)
            .map_err(|e| Failure::work(format!("cannot write the statistics to {}", path.display())).cause(e))?;
    }
    if args.json {
        let json = serde_json::to_string(stats).map_err(cannot)? + "\n";
        let written = std::io::stdout().lock().write_all(json.as_bytes());
        return match written {
            Err(e) if e.kind() != std::io::ErrorKind::BrokenPipe => {
                Err(Failure::work("cannot write to standard output").cause(e))
            }
            _ => Ok(()),
        };
    }
    if !args.quiet {
        let seed = (config.sampling.temperature > 0.0).then_some(config.sampling.seed);
        render::stderr(&render::stats_text(stats, seed));
    }
    Ok(())
}

/// A file that cannot be written is better known before minutes of work than after. `what` goes into it.
pub fn check_writable(path: &Path, what: &str) -> Result<(), Failure> {
    let existed = path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    match opened {
        Ok(_) if !existed => {
            // Only a trial; a failure to remove it leaves an empty file that the statistics replace.
            let _ = std::fs::remove_file(path);
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(e) => Err(Failure::usage(format!("cannot write the {what} to {}", path.display())).cause(e)),
    }
}

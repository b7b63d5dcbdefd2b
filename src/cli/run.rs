//! The `run` command: one generation.

use std::cell::RefCell;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::checkpoint::Checkpoint;
use crate::engine::shaping::Scored;
use crate::engine::stats::Stats;
use crate::engine::{Engine, EngineError, Finish, Guess, Job, Loaded, Observer, Outcome, Shaping};
use crate::store::trace::Recorder;

use super::advice::Known;
use super::args::RunArgs;
use super::config::RunConfig;
use super::grammar::Followed;
use super::job::{self, Prepared};
use super::machine::Machine;
use super::printer::{Printer, Show};
use super::shaping::Logprobs;
use super::{Done, Failure, grammar, hanging, interrupt, kvfile, notes, numa, output, render, size};

/// Runs one generation.
pub fn run(args: &RunArgs, machine: &Machine) -> Result<Done, Failure> {
    run_observed(args, machine, None)
}

/// As [`run`]; what the router chooses goes into `recorded`.
pub fn run_recorded(args: &RunArgs, machine: &Machine, recorded: &mut Option<Recorder>) -> Result<Done, Failure> {
    run_observed(args, machine, Some(recorded))
}

fn run_observed(args: &RunArgs, machine: &Machine, recorded: Option<&mut Option<Recorder>>) -> Result<Done, Failure> {
    let machine = &numa::place(args, machine)?;
    let Some(prepared) = job::prepare(args, machine)? else { return Ok(Done::Interrupted) };
    let show = match (args.json, args.ids) {
        (true, _) => Show::Nothing,
        (false, true) => Show::Ids,
        (false, false) => Show::Text,
    };
    let witness = Witness { show, recorded, tokens: None };
    perform(args, machine, prepared, witness, &mut |stats, config| report(args, stats, config))
}

/// Who sees what of a generation while it runs.
pub struct Witness<'a> {
    /// What of the answer goes to stdout.
    pub show: Show,
    /// Where the router's choices go.
    pub recorded: Option<&'a mut Option<Recorder>>,
    /// Where goes when each token was chosen.
    pub tokens: Option<&'a mut Vec<Instant>>,
}

/// Runs what was prepared; `report` gets its numbers.
pub fn perform(
    args: &RunArgs,
    machine: &Machine,
    prepared: Prepared,
    witness: Witness,
    report: &mut dyn FnMut(&Stats, &RunConfig) -> Result<(), Failure>,
) -> Result<Done, Failure> {
    let known = Known::of(args, machine, &prepared.config, &prepared.checkpoint);
    let Prepared { config, usage, checkpoint, files, tokenizer, job, mut grammar, stops, context } = prepared;
    let formats = checkpoint.formats().map(|format| format.to_string()).collect();
    let interrupted = interrupt::watch()?;
    let opened = open(args, &config, machine, checkpoint, context, &interrupted).map_err(|e| files.failure(e))?;
    let Some(mut engine) = opened else { return Ok(Done::Interrupted) };
    if let Some(path) = &args.kv {
        kvfile::keep(&mut engine, path).iter().for_each(|line| render::note(args.quiet, line));
    }
    let out = std::io::stdout().lock();
    let mut printer = Printer::new(witness.show, out, tokenizer.as_deref(), &job.stop_ids, stops, job.max_tokens);
    engine.set_watch(hanging::watch_reads(interrupted.clone(), args.quiet));
    let mut logprobs = Logprobs::new(&config.shape, job.max_tokens);
    let mut take = |scored: &Scored| logprobs.take(scored);
    let mut shaping = config.shape.shaping(&mut take);
    grammar.iter_mut().for_each(|grammar| grammar.shape(&mut shaping));
    let outcome = generate(&mut engine, &job, &mut shaping, &interrupted, &mut printer, args.quiet, witness);
    printer.finish();
    // Also of a run that was interrupted or failed: what was chosen was chosen.
    usage.update(&engine.store().usage()).iter().for_each(|line| render::note(args.quiet, line));
    if let Some(error) = printer.failed() {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Ok(Done::PipeClosed);
        }
        return Err(Failure::work("cannot write the answer to standard output").cause(error));
    }
    for line in engine.warnings() {
        render::note(args.quiet && !engine.warns_of_damage(), &line);
    }
    let outcome = outcome.map_err(|e| files.failure(e))?;
    let mut stats = engine.stats();
    complete(&mut stats, &outcome, &config, machine, &files.dir);
    stats.model.formats = formats;
    stats.advice = known.judge(&stats, None).map(|judgement| judgement.advice.to_string());
    stats.text = printer.text().to_owned();
    stats.grammar = grammar.as_mut().map(Followed::stats);
    let incomplete = stats.grammar.as_ref().and_then(|stats| grammar::incomplete(stats, outcome.finish));
    incomplete.iter().for_each(|line| render::note(args.quiet, line));
    stats.logprobs = config.shape.logprobs.map(|_| logprobs.told(tokenizer.as_deref()));
    stats.stop_string = printer.stopped_by().map(str::to_owned);
    drop(printer);
    // What cannot be written, a disk being full, must not cost the report.
    let written = args.timeline.as_ref().map_or(Ok(()), |path| output::write(path, "timeline", engine.timeline()));
    report(&stats, &config)?;
    hanging::leave(engine, args.quiet);
    written?;
    Ok(if outcome.finish == Finish::Interrupted { Done::Interrupted } else { Done::Whole })
}

/// Opens the engine and says what is worth knowing about it; none, with a word, where `interrupted` was raised meanwhile.
pub fn open(
    args: &RunArgs,
    config: &RunConfig,
    machine: &Machine,
    checkpoint: Checkpoint,
    context: usize,
    interrupted: &AtomicBool,
) -> Result<Option<Engine>, EngineError> {
    let note = |line: &str| render::note(args.quiet, line);
    if args.verbose {
        render::stderr(&render::settings_text(&config.settings));
        notes::on_sampling(&checkpoint.dir, &config.sampling).iter().for_each(|line| note(line));
    }
    notes::on_machine(config, machine).iter().for_each(|line| note(line));
    let loaded = Arc::new(Loaded::default());
    let (began, follows) = (Instant::now(), Arc::clone(&loaded));
    let text = move || loading_line(follows.bytes(), began.elapsed().as_secs_f64());
    let waiting = render::Waiting::following(text, args.quiet);
    let opened = Engine::open_followed(checkpoint, &config.engine(context), interrupted, &loaded);
    drop(waiting);
    let engine = match opened {
        Err(error) if error.is_cancelled() => {
            render::stderr("interrupted while the model was loaded\n");
            return Ok(None);
        }
        opened => opened?,
    };
    engine.notes().iter().for_each(|line| note(line));
    let device = engine.store().device().describe();
    if args.verbose && device.name == "io_uring" {
        let (registered, all) = (size::show(device.registered_bytes), size::show(engine.budget().experts()));
        note(&format!("{registered} of {all} of slabs are registered with the kernel"));
    }
    Ok(Some(engine))
}

/// How far loading is, from the bytes that are in memory and that will be.
fn loading_line(bytes: Option<(u64, u64)>, seconds: f64) -> String {
    match bytes {
        None => format!("loading the model: {seconds:.0} s so far"),
        Some((done, of)) => {
            let percent = done as f64 / of.max(1) as f64 * 100.0;
            let (done, of) = (size::show(done), size::show(of));
            format!("loading the model: {done} of {of} of weights ({percent:.0} %), {seconds:.0} s so far")
        }
    }
}

/// Runs the job until it is done or `interrupted` is raised.
fn generate<W: Write>(
    engine: &mut Engine,
    job: &Job,
    shaping: &mut Shaping,
    interrupted: &AtomicBool,
    printer: &mut Printer<'_, W>,
    quiet: bool,
    witness: Witness,
) -> Result<Outcome, EngineError> {
    let Witness { show, recorded, mut tokens } = witness;
    let recorder = recorded.map(|recorded| recorded.insert(Recorder::new(engine.traced().clone())));
    let waiting = RefCell::new(Some(render::Waiting::begin("reading the prompt", quiet)));
    let mut looking_on = LookingOn::new(engine, job.prompt.len(), recorder, &waiting);
    let mut chosen = 0;
    let mut on_token = |id| {
        chosen += 1;
        if chosen == 1 {
            *waiting.borrow_mut() = (show == Show::Nothing).then(|| render::Waiting::begin("generating", quiet));
        }
        if let Some(waiting) = waiting.borrow().as_ref() {
            waiting.say(format!("generating, {chosen} of at most {} tokens", size::grouped(job.max_tokens as u64)));
        }
        if let Some(tokens) = &mut tokens {
            tokens.push(Instant::now());
        }
        printer.token(id)
    };
    engine.generate_shaped(job, shaping, interrupted, &mut on_token, &mut looking_on)
}

/// Records what routers choose, and says how far the prompt has been read.
pub struct LookingOn<'a> {
    recorder: Option<&'a mut Recorder>,
    prompt: PromptProgress,
    waiting: &'a RefCell<Option<render::Waiting>>,
    top_k: usize,
}

impl<'a> LookingOn<'a> {
    /// Says in `waiting` how far `engine` has read a prompt of `tokens` tokens.
    pub fn new(
        engine: &Engine,
        tokens: usize,
        recorder: Option<&'a mut Recorder>,
        waiting: &'a RefCell<Option<render::Waiting>>,
    ) -> LookingOn<'a> {
        let (layers, top_k) = (engine.arch().layers.len(), engine.arch().moe.top_k.max(1));
        LookingOn { recorder, prompt: PromptProgress::new(tokens, layers), waiting, top_k }
    }
}

impl Observer for LookingOn<'_> {
    fn chose(&mut self, layer: usize, ids: &[u16], gates: &[f32]) {
        if let Some(recorder) = &mut self.recorder {
            recorder.chose(layer, ids, gates);
        }
        if let Some(text) = self.prompt.saw(layer, ids.len() / self.top_k)
            && let Some(waiting) = self.waiting.borrow().as_ref()
        {
            waiting.say(text);
        }
    }

    fn kept(&mut self, positions: usize) {
        self.prompt.done = positions;
    }

    fn hints(&self) -> usize {
        self.recorder.as_ref().map_or(0, |recorder| recorder.hints())
    }

    fn guessed(&mut self, guess: &Guess<'_>) {
        if let Some(recorder) = &mut self.recorder {
            recorder.guessed(guess);
        }
    }
}

/// How far the prompt has been read, from the layers that are seen at work.
struct PromptProgress {
    tokens: usize,
    layers: usize,
    /// Tokens of chunks that are done, and of the one at work.
    done: usize,
    rows: usize,
    layer: usize,
}

impl PromptProgress {
    fn new(tokens: usize, layers: usize) -> PromptProgress {
        PromptProgress { tokens, layers, done: 0, rows: 0, layer: 0 }
    }

    /// Takes the layer that begins its experts for `rows` tokens. What is to be said about it; nothing after the prompt.
    fn saw(&mut self, layer: usize, rows: usize) -> Option<String> {
        if layer <= self.layer {
            self.done += self.rows;
        }
        (self.layer, self.rows) = (layer, rows);
        let (first, last) = (self.done + 1, self.done + rows);
        (last <= self.tokens).then(|| {
            let tokens = size::grouped(self.tokens as u64);
            format!(
                "reading the prompt, layer {} of {} of tokens {first} to {last} of {tokens}",
                layer + 1,
                self.layers
            )
        })
    }
}

/// Adds to the numbers of a generation what the engine does not know.
pub fn complete(stats: &mut Stats, outcome: &Outcome, config: &RunConfig, machine: &Machine, dir: &Path) {
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
    if !args.json && !args.quiet {
        let seed = (config.sampling.temperature > 0.0).then_some(config.sampling.seed);
        render::stderr(&render::stats_text(stats, seed));
    }
    report_json(args, stats)
}

/// Writes the statistics where they are wanted as JSON.
pub fn report_json(args: &RunArgs, stats: &Stats) -> Result<(), Failure> {
    let cannot = |e: serde_json::Error| Failure::work("cannot write the statistics as JSON").cause(e);
    if args.json {
        output::print(&(serde_json::to_string(stats).map_err(cannot)? + "\n"))?;
    }
    match &args.stats_json {
        Some(path) => output::write(path, "statistics", serde_json::to_string_pretty(stats).map_err(cannot)? + "\n"),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loading_says_what_is_there_and_what_will_be() {
        assert_eq!(loading_line(None, 1.4), "loading the model: 1 s so far");
        let line = loading_line(Some((3_000_000_000, 12_000_000_000)), 3.2);
        assert_eq!(line, "loading the model: 3.00 GB of 12.0 GB of weights (25 %), 3 s so far");
    }

    #[test]
    fn the_layers_at_work_tell_how_far_the_prompt_has_been_read() {
        // Three layers, the first of them dense; two chunks of a prompt of 1,030 tokens, then a token.
        let mut progress = PromptProgress::new(1030, 3);
        let said: Vec<Option<String>> = [(1, 1024), (2, 1024), (1, 6), (2, 6), (1, 1)]
            .iter()
            .map(|&(layer, rows)| progress.saw(layer, rows))
            .collect();
        let line = |text: &str| Some(format!("reading the prompt, layer {text} of 1,030"));
        assert_eq!(said[0], line("2 of 3 of tokens 1 to 1024"));
        assert_eq!(said[1], line("3 of 3 of tokens 1 to 1024"));
        assert_eq!(said[2..4], [line("2 of 3 of tokens 1025 to 1030"), line("3 of 3 of tokens 1025 to 1030")]);
        assert_eq!(said[4], None);
    }
}

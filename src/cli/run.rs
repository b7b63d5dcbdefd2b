//! The `run` command: one generation.

use std::io::{IsTerminal, Read, Write};
use std::path::Path;

use crate::checkpoint::Arch;
use crate::engine::stats::Stats;
use crate::engine::stop::StopMatcher;
use crate::engine::{Engine, EngineError, Finish, Job, Outcome};
use crate::limits::MAX_PROMPT_BYTES;
use crate::model::template::{ChatTemplate, Message, RenderOptions, Role};
use crate::model::tokenizer::{Tokenizer, TokenizerError};

use super::args::RunArgs;
use super::config::{self, ModelChoice, RunConfig};
use super::machine::Machine;
use super::printer::{Printer, Show};
use super::{Done, Failure, bundled, render, size};

/// Runs one generation.
pub fn run(args: &RunArgs, machine: &Machine) -> Result<Done, Failure> {
    let mut config = config::decide(args, machine)?;
    let prompt = read_prompt(args)?;
    let typed_ids = if args.ids { Some(parse_ids(&prompt)?) } else { None };
    if let Some(path) = &args.stats_json {
        check_writable(path)?;
    }
    let checkpoint = match &config.model {
        ModelChoice::Dir(dir) => bundled::open(dir)?,
        ModelChoice::Bundled(source) => bundled::container(source, machine, args.quiet)?,
    };
    let dir = checkpoint.dir.clone();
    let tokenizer = open_tokenizer(&dir, args.ids)?;
    let prompt = match (typed_ids, &tokenizer) {
        (Some(ids), _) => check_ids(ids, &checkpoint.arch)?,
        (None, Some(tokenizer)) => encode(args, &dir, tokenizer, &prompt)?,
        (None, None) => return Err(tokenizer_failure(&TokenizerError::Missing { dir: dir.clone() })),
    };
    let (stop_ids, stops) = split_stops(&config, tokenizer.as_ref(), ends_turn(args, &checkpoint.arch))?;
    let (context, max_tokens) = config.fit(prompt.len(), checkpoint.arch.max_context)?;
    if args.verbose {
        render::stderr(&render::settings_text(&config.settings));
    }

    let memory = &machine.memory;
    if memory.limited {
        let (limit, room) = (&memory.source, size::show(memory.available));
        render::note(args.quiet, &format!("the {limit} leaves {room}, less than the machine has: that is what counts"));
    }
    let formats = checkpoint.formats().map(|format| format.to_string()).collect();
    let waiting = render::Waiting::begin("loading the model", args.quiet);
    let mut engine = Engine::open(checkpoint, &config.engine(context)).map_err(engine_failure)?;
    drop(waiting);
    for line in engine.notes() {
        render::note(args.quiet, line);
    }

    let job = Job { prompt, max_tokens, sampling: config.sampling, stop_ids };
    let show = match (args.json, args.ids) {
        (true, _) => Show::Nothing,
        (false, true) => Show::Ids,
        (false, false) => Show::Text,
    };
    let mut printer =
        Printer::new(show, std::io::stdout().lock(), tokenizer.as_ref(), &job.stop_ids, stops, max_tokens);
    let outcome = generate(&mut engine, &job, &mut printer, args.quiet);
    printer.finish();
    if let Some(error) = printer.failed() {
        if error.kind() == std::io::ErrorKind::BrokenPipe {
            return Ok(Done::PipeClosed);
        }
        return Err(Failure::work("cannot write the answer to standard output").cause(error));
    }
    for line in engine.warnings() {
        render::note(args.quiet, &line);
    }
    let outcome = outcome?;
    let mut stats = engine.stats();
    complete(&mut stats, &outcome, &config, machine, &dir);
    stats.model.formats = formats;
    stats.text = printer.text().to_owned();
    stats.stop_string = printer.stopped_by().map(str::to_owned);
    drop(printer);
    report(args, &stats, &config)?;
    Ok(if outcome.finish == Finish::Interrupted { Done::Interrupted } else { Done::Whole })
}

/// Runs the job. The first interrupt ends it cleanly, the second ends the process.
fn generate<W: Write>(
    engine: &mut Engine,
    job: &Job,
    printer: &mut Printer<'_, W>,
    quiet: bool,
) -> Result<Outcome, Failure> {
    let interrupted = super::interrupts()?;
    let mut waiting = Some(render::Waiting::begin("reading the prompt", quiet));
    let mut on_token = |id| {
        waiting = None;
        printer.token(id)
    };
    engine.generate(job, &interrupted, &mut on_token).map_err(engine_failure)
}

fn read_prompt(args: &RunArgs) -> Result<String, Failure> {
    let read = |source: &mut dyn Read, name: &str| {
        let mut bytes = Vec::new();
        let cannot = |cause: String| Failure::usage(format!("cannot read the prompt from {name}")).cause(cause);
        source.take(MAX_PROMPT_BYTES + 1).read_to_end(&mut bytes).map_err(|e| cannot(e.to_string()))?;
        if bytes.len() as u64 > MAX_PROMPT_BYTES {
            return Err(cannot(format!("it is longer than {MAX_PROMPT_BYTES} bytes")));
        }
        let mut text = String::from_utf8(bytes).map_err(|e| cannot(format!("it is not UTF-8: {e}")))?;
        // Files and pipes end in a newline that nobody means.
        if text.ends_with('\n') {
            text.truncate(text.len() - if text.ends_with("\r\n") { 2 } else { 1 });
        }
        Ok(text)
    };
    let mut stdin = std::io::stdin();
    let text = match (&args.prompt, &args.file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) if path != Path::new("-") => {
            let name = path.display().to_string();
            let mut file = std::fs::File::open(path)
                .map_err(|e| Failure::usage(format!("cannot read the prompt from {name}")).cause(e))?;
            read(&mut file, &name)?
        }
        (None, None) if stdin.is_terminal() => {
            return Err(Failure::usage("there is no prompt").hint("give one with -p TEXT or -f FILE, or pipe it in"));
        }
        _ => read(&mut stdin, "standard input")?,
    };
    if text.is_empty() {
        return Err(Failure::usage("the prompt is empty").hint("give one with -p TEXT or -f FILE, or pipe it in"));
    }
    Ok(text)
}

fn parse_ids(text: &str) -> Result<Vec<u32>, Failure> {
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty());
    let ids: Vec<u32> = words
        .map(|word| {
            word.parse().map_err(|_| {
                Failure::usage(format!("{word:?} in the prompt is not a token id"))
                    .hint("with --ids the prompt is numbers with commas or blanks between them")
            })
        })
        .collect::<Result<_, _>>()?;
    if ids.is_empty() {
        return Err(Failure::usage("the prompt holds no token id").hint("write it as in --ids -p \"17, 4 256\""));
    }
    Ok(ids)
}

fn check_ids(ids: Vec<u32>, arch: &Arch) -> Result<Vec<u32>, Failure> {
    match ids.iter().find(|id| **id as usize >= arch.vocab) {
        None => Ok(ids),
        Some(id) => {
            Err(Failure::usage(format!("token id {id} in the prompt is beyond the vocabulary of {}", arch.vocab))
                .hint("the ids belong to another model, or one has a digit too many"))
        }
    }
}

fn open_tokenizer(dir: &Path, optional: bool) -> Result<Option<Tokenizer>, Failure> {
    match Tokenizer::open(dir) {
        Ok(tokenizer) => Ok(Some(tokenizer)),
        Err(TokenizerError::Missing { .. }) if optional => Ok(None),
        Err(error) => Err(tokenizer_failure(&error)),
    }
}

fn tokenizer_failure(error: &TokenizerError) -> Failure {
    Failure::of(error).hint(error.hint())
}

fn engine_failure(error: EngineError) -> Failure {
    use EngineError::{Context, EmptyPrompt, NoIndexer, NoIsa, PromptTooLong, Sampling, TokenOutOfRange};
    let mut failure = Failure::of(&error);
    if matches!(
        error,
        NoIsa(_)
            | NoIndexer
            | Context { .. }
            | EmptyPrompt
            | PromptTooLong { .. }
            | TokenOutOfRange { .. }
            | Sampling(_)
    ) {
        failure.code = 2;
    }
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

fn encode(args: &RunArgs, dir: &Path, tokenizer: &Tokenizer, prompt: &str) -> Result<Vec<u32>, Failure> {
    if args.raw {
        return tokenizer.encode_raw(prompt).map_err(|e| tokenizer_failure(&e));
    }
    let template = ChatTemplate::open(dir).map_err(|e| Failure::of(&e).hint(e.hint()))?;
    let system = args.system.as_ref().map(|text| Message::new(Role::System, text));
    let messages: Vec<Message> = system.into_iter().chain([Message::new(Role::User, prompt)]).collect();
    let options = RenderOptions { enable_thinking: Some(false), add_generation_prompt: true };
    let rendered =
        template.render(&messages, &options, tokenizer.control()).map_err(|e| Failure::of(&e).hint(e.hint()))?;
    tokenizer.encode_rendered(&rendered).map_err(|e| tokenizer_failure(&e))
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

/// A file that cannot be written is better known before minutes of work than after.
fn check_writable(path: &Path) -> Result<(), Failure> {
    let existed = path.exists();
    let opened = std::fs::OpenOptions::new().append(true).create(true).open(path);
    match opened {
        Ok(_) if !existed => {
            // Only a trial; a failure to remove it leaves an empty file that the statistics replace.
            let _ = std::fs::remove_file(path);
            Ok(())
        }
        Ok(_) => Ok(()),
        Err(e) => Err(Failure::usage(format!("cannot write the statistics to {}", path.display())).cause(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_ids_are_read_with_commas_or_blanks() {
        assert_eq!(parse_ids(" 1, 2,3\n4\t5 ").unwrap(), [1, 2, 3, 4, 5]);
        assert!(parse_ids("1 x").unwrap_err().error.contains("\"x\""));
        assert!(parse_ids("1 -2").unwrap_err().error.contains("\"-2\""));
        assert!(parse_ids("4294967296").is_err());
        assert!(parse_ids(" , ").unwrap_err().error.contains("no token id"));
    }
}

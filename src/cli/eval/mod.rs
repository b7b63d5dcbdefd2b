//! The `eval` command: what a model says of given tokens, as numbers. A text's perplexity, and how far its logits are from
//! others that were kept; questions with several answers; logits against those of another program.

mod choices;
mod ids;
mod kept;
mod logits;
mod npy;
mod perplexity;
mod questions;
mod rows;
mod show;
mod windows;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::Subcommand;

use crate::checkpoint::Checkpoint;
use crate::engine::{Engine, Finish};
use crate::limits::MAX_ROWS;
use crate::model::tokenizer::{Tokenizer, TokenizerError};

use super::args::{EngineArgs, RunArgs, plain_run};
use super::config::{self, RunConfig, Setting};
use super::job::{self, Files};
use super::machine::Machine;
use super::usage::Usage;
use super::{Done, Failure, hanging, interrupt, numa, prompt, render, run, size};

/// What to do about logits that are not finite.
const NO_DISTRIBUTION_HINT: &str = "weights or memory are damaged, or values beyond what the arithmetic holds: millstream doctor --deep reads the whole model";

/// Flags of `eval`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream eval perplexity -f wiki.test.raw
  millstream eval choices questions.jsonl -m /models/glm-5.2-int4

Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted (what was evaluated is shown).")]
pub struct EvalArgs {
    /// What to evaluate.
    #[command(subcommand)]
    what: EvalCommand,
}

#[derive(Debug, Subcommand)]
enum EvalCommand {
    /// Perplexity of a text as llama-perplexity has it, and its divergence from logits that were kept
    Perplexity(Box<perplexity::PerplexityArgs>),
    /// Questions with several answers: how often the right one is the most likely
    Choices(Box<choices::ChoicesArgs>),
    /// Logits of given tokens against those of a file: largest difference, agreement, divergence
    Logits(Box<logits::LogitsArgs>),
}

/// Flags that all of them have.
#[derive(Clone, Debug, clap::Args)]
struct Common {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// How the model is run.
    #[command(flatten)]
    engine: EngineArgs,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print nothing but the result, and errors
    #[arg(short, long, conflicts_with = "verbose")]
    quiet: bool,
    /// Show every setting and where it came from
    #[arg(short, long)]
    verbose: bool,
}

impl Common {
    /// What `run` has of these. A history of how often experts were chosen is read and not added to: what a text that is
    /// evaluated asks for says little of what people do.
    fn run(&self) -> RunArgs {
        let Common { model, engine, json: _, quiet, verbose } = self.clone();
        RunArgs { model, engine, quiet, verbose, ..plain_run() }
    }
}

/// Evaluates.
pub fn eval(args: &EvalArgs, machine: &Machine) -> Result<Done, Failure> {
    match &args.what {
        EvalCommand::Perplexity(args) => perplexity::perplexity(args, machine),
        EvalCommand::Choices(args) => choices::choices(args, machine),
        EvalCommand::Logits(args) => logits::logits(args, machine),
    }
}

/// A model that is opened and checked, and not loaded.
struct Subject {
    run: RunArgs,
    machine: Machine,
    config: RunConfig,
    checkpoint: Checkpoint,
    files: Files,
}

impl Subject {
    /// Opens the model that the flags ask for; none where the user stopped its conversion.
    fn open(common: &Common, machine: &Machine) -> Result<Option<Subject>, Failure> {
        let run = common.run();
        let machine = numa::place(&run, machine)?;
        let mut config = config::decide(&run, &machine)?;
        config.check_memory(&machine)?;
        let Some(checkpoint) = job::open_checkpoint(&run, &mut config, &machine)? else { return Ok(None) };
        let (usage, warning) = Usage::open(&config.usage, &checkpoint, &machine);
        warning.iter().for_each(|line| render::note(run.quiet, line));
        config.history = usage.before().to_vec();
        let files = Files::new(checkpoint.dir.clone(), config.model.clone());
        Ok(Some(Subject { run, machine, config, checkpoint, files }))
    }

    /// The tokenizer, which a text cannot do without.
    fn tokenizer(&self) -> Result<Tokenizer, Failure> {
        let dir = &self.checkpoint.dir;
        match prompt::open_tokenizer(dir, &self.checkpoint.arch, false)? {
            Some(tokenizer) => Ok(tokenizer),
            None => Err(prompt::tokenizer_failure(&TokenizerError::Missing { dir: dir.clone() })),
        }
    }

    /// Refuses sequences that are longer than the model's context.
    fn check_length(&self, tokens: usize, what: &str) -> Result<(), Failure> {
        let longest = self.checkpoint.arch.max_context;
        match tokens > longest {
            false => Ok(()),
            true => Err(Failure::usage(format!("{what} of {tokens} tokens: the model's context is {longest}"))),
        }
    }

    /// Loads it, for sequences of at most `tokens` tokens; none, with a word, where the user stopped it.
    fn load(mut self, tokens: usize) -> Result<Option<Examiner>, Failure> {
        self.config.prompt_has(tokens.min(MAX_ROWS));
        let stop = interrupt::watch()?;
        let Subject { run, machine, config, checkpoint, files } = self;
        let vocab = checkpoint.arch.vocab;
        let opened = run::open(&run, &config, &machine, checkpoint, tokens, &stop).map_err(|e| files.failure(e))?;
        let Some(mut engine) = opened else { return Ok(None) };
        engine.set_watch(hanging::watch_reads(stop.clone(), run.quiet));
        let settings = config.settings.into_iter().filter(|setting| !OF_ANSWERS.contains(&setting.name)).collect();
        Ok(Some(Examiner { engine, vocab, stop, files, quiet: run.quiet, settings, cost: Cost::default() }))
    }
}

/// Settings of `run` that are of answers: nothing is sampled here.
const OF_ANSWERS: [&str; 10] =
    ["temp", "top-p", "top-k", "min-p", "seed", "max-tokens", "stop", "draft", "draft-max", "kv"];

/// A loaded model that is put to the test.
struct Examiner {
    engine: Engine,
    vocab: usize,
    /// Raised when the user wants it to end.
    stop: Arc<AtomicBool>,
    files: Files,
    quiet: bool,
    settings: Vec<Setting>,
    cost: Cost,
}

/// What it took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Cost {
    /// Tokens that went through the model.
    tokens: usize,
    seconds: f64,
    /// Experts that layers asked for, and those of them that were not in memory.
    requested: u64,
    missed: u64,
    /// Bytes that were read.
    bytes: u64,
}

/// Looks at the logits of a position, and may refuse them.
type Look<'a> = dyn FnMut(usize, &[f32]) -> Result<(), Failure> + 'a;

impl Examiner {
    /// Shows `row` the logits of each of `tokens`, behind the first `keep` positions of what went through before; false where
    /// the user stopped it. What `row` refuses is told once the tokens are through.
    fn score(&mut self, keep: usize, tokens: &[u32], row: &mut Look) -> Result<bool, Failure> {
        let (vocab, mut position, mut seen) = (self.vocab, keep, Ok(()));
        let mut take = |logits: &[f32]| {
            for logits in logits.chunks_exact(vocab) {
                if seen.is_ok() {
                    seen = row(position, logits);
                }
                position += 1;
            }
        };
        let scored = self.engine.score_behind(keep, tokens, &self.stop, &mut take);
        let finish = scored.map_err(|e| self.files.failure(e))?;
        self.count(tokens.len());
        seen.map(|()| finish != Finish::Interrupted)
    }

    /// Adds what the last tokens took.
    fn count(&mut self, tokens: usize) {
        let stats = self.engine.stats();
        self.cost.tokens += tokens;
        self.cost.seconds += stats.wall_s;
        self.cost.requested += stats.experts.requested;
        self.cost.missed += stats.experts.missed;
        self.cost.bytes += stats.io.bytes;
    }

    /// Warnings, what it took, and the end of the engine.
    fn leave(self) -> (Cost, Vec<Setting>) {
        let Examiner { engine, quiet, settings, cost, .. } = self;
        engine.warnings().iter().for_each(|line| render::note(quiet && !engine.warns_of_damage(), line));
        if !quiet {
            render::stderr(&cost.text());
        }
        hanging::leave(engine, quiet);
        (cost, settings)
    }
}

impl Cost {
    fn text(&self) -> String {
        let rate = self.tokens as f64 / self.seconds.max(1e-9);
        let found = 100.0 * (1.0 - self.missed as f64 / self.requested.max(1) as f64);
        format!(
            "{} tokens in {}, {rate:.1} tok/s; read {} of experts, {found:.1} % were in memory\n",
            size::grouped(self.tokens as u64),
            render::seconds(self.seconds),
            size::show(self.bytes),
        )
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tok_s": (self.seconds > 0.0).then(|| self.tokens as f64 / self.seconds),
            "experts_requested": self.requested,
            "experts_missed": self.missed,
            "read_bytes": self.bytes,
        })
    }
}

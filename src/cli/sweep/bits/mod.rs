//! `sweep bits`: what each precision of the weights costs. A text is scored with the weights as they are, then with each
//! container that `convert` can make of them, one after another, and the logits are compared position by position.

mod arms;
mod measure;
mod picture;
mod scratch;
mod show;

use std::path::{Path, PathBuf};

use crate::checkpoint::Checkpoint;
use crate::checkpoint::convert::{ConvertOptions, Planned, Width, planned};
use crate::engine::quality::Quality;
use crate::engine::{Activations, EngineConfig};
use crate::limits::SWEEP_VALUES_MAX;
use crate::model::tokenizer::Tokenizer;

use crate::cli::args::{self, ModelArgs, Ram, RunArgs};
use crate::cli::config::{self, ModelChoice};
use crate::cli::machine::Machine;
use crate::cli::usage::UsageChoice;
use crate::cli::{Done, Failure, bundled, interrupt, job, output, prompt, render, size};
use arms::{Arm, Group, Precision};
use measure::Study;
use scratch::Scratch;

/// Tokens of a window where the model has no fewer.
const WINDOW_DEFAULT: usize = 1024;
/// Windows that are scored where there is text for them.
const WINDOWS_DEFAULT: usize = 20;
/// The text that lies beside the model that comes with the program: tales that it was not trained on.
const TEXT_NAME: &str = "heldout.txt";

/// Flags of `sweep bits`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream sweep bits --svg bits.svg
  millstream sweep bits /models/OLMoE-1B-7B --text mine.txt --experts 8,4 --dense 8,4 --group row,64

The model is an unquantized checkpoint. Each container lies in a directory of its own below --dir while it is measured, \
one at a time, beside the logits of the unquantized weights: both are removed, also after Ctrl-C, and what a killed \
sweep left, by the next. Divergence is \
Kullback-Leibler: the sum over the vocabulary of p ln(p/q), p with the weights as they are, q with those of the \
container, in nats, averaged over all positions of all windows.")]
pub struct BitsArgs {
    #[command(flatten)]
    model: ModelArgs,
    /// The text that is scored, UTF-8 [default: tales that come with the program]
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// The text is a list of token ids (commas or blanks between them)
    #[arg(long, requires = "text")]
    ids: bool,
    /// Widths of the routed experts: 16, 8, 4, 3, 2 [default: 16,8,4,2]
    #[arg(long, value_name = "BITS", value_delimiter = ',')]
    experts: Vec<Width>,
    /// Widths of attention, dense and shared layers, likewise [default: 16,8,4,2]
    #[arg(long, value_name = "BITS", value_delimiter = ',')]
    dense: Vec<Width>,
    /// Widths of embeddings and output head [default: 8]
    #[arg(long, value_name = "BITS", value_delimiter = ',')]
    io_bits: Vec<Width>,
    /// Columns that share a scale where that can be chosen: row, or as convert has it [default: row,64]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = Group::parse)]
    group: Vec<Group>,
    /// Tokens of a window; each is scored from an empty context [default: 1024, or what the model has]
    #[arg(short, long, visible_alias = "context", value_name = "N", value_parser = args::parse_context)]
    ctx_size: Option<usize>,
    /// Windows that are scored at most [default: 20]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = args::parse_rounds)]
    chunks: Option<usize>,
    /// Make containers below this directory [default: that of temporary files]
    #[arg(long = "dir", value_name = "DIR")]
    below: Option<PathBuf>,
    /// Memory the process may use, as run has it [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = args::parse_ram)]
    ram: Option<Ram>,
    /// Threads that compute [default: the cores this process may use]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = args::parse_threads)]
    threads: Option<usize>,
    /// Arithmetic of quantized layers: f32, so that only weights differ, or int8, as run has it [default: f32]
    #[arg(long, value_name = "KIND", value_parser = |text: &str| args::ACTIVATIONS.parse(text))]
    activations: Option<Activations>,
    /// Draw the sweep into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Print nothing but the result, and errors
    #[arg(short, long)]
    quiet: bool,
}

/// Everything that is known in the end.
struct Report {
    dir: PathBuf,
    text: PathBuf,
    windows: usize,
    window: usize,
    activations: Activations,
    /// Of the weights as they are.
    base: Base,
    arms: Vec<Arm>,
    interrupted: bool,
}

impl Report {
    /// How many precisions were measured.
    fn measured(&self) -> usize {
        self.arms.iter().filter(|arm| arm.quality.is_some()).count()
    }
}

/// The model as it came.
#[derive(Default)]
struct Base {
    formats: Vec<String>,
    bytes: u64,
    expert_bytes: u64,
    resident_bytes: u64,
    perplexity: Option<f64>,
}

/// Measures and reports.
pub fn bits(args: &BitsArgs, machine: &Machine) -> Result<Done, Failure> {
    let run = run_args(args);
    let precisions = arms::precisions(&args.experts, &args.dense, &args.io_bits, &args.group);
    if precisions.len() > SWEEP_VALUES_MAX {
        let many = format!("{} precisions: at most {SWEEP_VALUES_MAX} are tried", precisions.len());
        return Err(Failure::usage(many).hint("leave some out with --experts, --dense, --io-bits and --group"));
    }
    if let Some(path) = &args.svg {
        let inputs: Vec<PathBuf> = args.model.inputs(machine).into_iter().chain(args.text.clone()).collect();
        output::check(path, "picture", &inputs)?;
    }
    let config = config::decide(&run, machine)?;
    config.check_memory(machine)?;
    // The bundled checkpoint itself, and not the container that is made of it.
    let (ModelChoice::Dir(dir) | ModelChoice::Bundled(dir)) = &config.model;
    let source = bundled::open(dir)?;
    let text = match &args.text {
        Some(path) => path.clone(),
        None => bundled::find(machine)?.join(TEXT_NAME),
    };
    let windows = windows(args, &source, &text)?;
    let longest = windows.first().map_or(0, Vec::len);
    let engine = EngineConfig { activations: args.activations.unwrap_or(Activations::F32), ..config.engine(longest) };
    let arms = plan(&source, precisions)?;
    let below = args.below.as_deref().unwrap_or(&machine.temp);
    let positions: usize = windows.iter().map(Vec::len).sum();
    let stop = interrupt::watch()?;
    let scratch = Scratch::make(below, machine.uid)?;
    check_space(&source, &arms, positions, below)?;
    let study = Study { source: &source, windows: &windows, engine, scratch: &scratch, stop, quiet: args.quiet };
    let (base, arms, interrupted) = measure::measure(&study, arms)?;
    let report = Report {
        dir: source.dir.clone(),
        text,
        windows: windows.len(),
        window: longest,
        activations: study.engine.activations,
        base,
        arms,
        interrupted,
    };
    tell(args, &report)
}

/// Prints and draws; fails where nothing could be measured.
fn tell(args: &BitsArgs, report: &Report) -> Result<Done, Failure> {
    if report.interrupted && report.measured() == 0 {
        render::stderr("interrupted before the first precision was measured\n");
        return Ok(Done::Interrupted);
    }
    if report.measured() == 0
        && let Some(failure) = report.arms.iter().find_map(|arm| arm.failed.clone())
    {
        return Err(failure);
    }
    let closed = output::print(&if args.json { show::json(report) } else { show::text(report) })?;
    if let Some(path) = &args.svg {
        output::write(path, "picture", picture::draw(report))?;
    }
    Ok(match closed {
        Some(done) => done,
        None if report.interrupted => Done::Interrupted,
        None if report.arms.iter().any(|arm| arm.failed.is_some()) => Done::Unwell,
        None => Done::Whole,
    })
}

/// What `run` has of these flags.
fn run_args(args: &BitsArgs) -> RunArgs {
    let mut run = RunArgs { quiet: true, ..args.model.run() };
    (run.engine.ram, run.engine.threads) = (args.ram, args.threads);
    (run.engine.usage, run.engine.tuning) = (Some(UsageChoice::Off), Some(false));
    run
}

/// The text as windows of ids: whole ones, or the one that a short text is.
fn windows(args: &BitsArgs, source: &Checkpoint, path: &Path) -> Result<Vec<Vec<u32>>, Failure> {
    let text = prompt::read_text(path)?;
    let ids = if args.ids {
        prompt::check_ids(prompt::parse_ids(&text)?, &source.arch)?
    } else {
        let tokenizer = prompt::open_tokenizer(&source.dir, &source.arch, false)?;
        let encode = |tokenizer: &Tokenizer| tokenizer.encode_raw(&text).map_err(|e| prompt::tokenizer_failure(&e));
        tokenizer.as_ref().map(encode).transpose()?.unwrap_or_default()
    };
    let longest = source.arch.max_context;
    let window = match args.ctx_size {
        None => longest.min(WINDOW_DEFAULT),
        Some(asked) if asked <= longest => asked,
        Some(asked) => {
            return Err(Failure::usage(format!("windows of {asked} tokens: the model's context is {longest}")));
        }
    };
    if ids.len() < 2 || window < 2 {
        let what = format!("{} has {} tokens in windows of {window}", path.display(), ids.len());
        return Err(Failure::usage(what).hint("it takes two tokens to predict one from the other"));
    }
    let most = args.chunks.unwrap_or(WINDOWS_DEFAULT);
    let whole = ids.chunks_exact(window).take(most).map(<[u32]>::to_vec);
    Ok(if ids.len() < window { vec![ids] } else { whole.collect() })
}

/// How large each container will be. What cannot be made of this model is told with its place; where nothing can, that
/// is the answer.
fn plan(source: &Checkpoint, precisions: Vec<Precision>) -> Result<Vec<Arm>, Failure> {
    if let Some(format) = source.formats().find(|format| format.is_integer()) {
        return Err(Failure::usage(format!("{} has weights in {format}", source.dir.display()))
            .cause("what precision costs is told by weights that were not quantized to integers")
            .hint("name the vendor's checkpoint that the container was made of"));
    }
    let mut arms = Vec::with_capacity(precisions.len());
    for precision in precisions {
        let arm = Arm::new(precision);
        arms.push(match planned(source, &precision.options()) {
            Ok(Planned { weight_bytes, file_bytes }) => Arm { bytes: weight_bytes, file_bytes, ..arm },
            Err(e) => Arm { failed: Some(Failure::of(&e).hint(e.hint())), ..arm },
        });
    }
    if let Some(Arm { failed: Some(failure), .. }) = arms.first()
        && arms.iter().all(|arm| arm.failed.is_some())
    {
        return Err(failure.clone());
    }
    Ok(arms)
}

/// Refuses to begin where the largest container and the logits would not fit.
fn check_space(source: &Checkpoint, arms: &[Arm], positions: usize, dir: &Path) -> Result<(), Failure> {
    let logits = positions as u64 * source.arch.vocab as u64 * size_of::<f32>() as u64;
    let largest = arms.iter().map(|arm| arm.file_bytes).max().unwrap_or(0);
    let cannot = |e| Failure::work(format!("cannot ask the free space of {}", dir.display())).cause(e);
    let (needed, free) = (logits + largest, millstream_io::free_bytes(dir).map_err(cannot)?);
    if needed <= free {
        return Ok(());
    }
    let (container, logits) = (size::show(largest), size::show(logits));
    Err(Failure::work(format!("{} has {} free and {} are needed", dir.display(), size::show(free), size::show(needed)))
        .cause(format!("the largest container takes {container}, the logits to compare with {logits}"))
        .hint("name a directory with more room with --dir, score less with --chunks, or leave out wide containers"))
}

//! What was typed. Nothing is decided here beyond the form of each value.

use std::fmt;
use std::path::PathBuf;

use clap::{Parser, Subcommand};

use millstream_io::limits::CHUNK_BYTES_MIN;
use millstream_io::{CHUNK_WHOLE, DeviceKind, IoMode};

use crate::checkpoint::container::GROUP_SIZES;
use crate::checkpoint::convert::{Width, Widths};
use crate::engine::{Activations, AttentionForm, Depth, DraftSource, Dsa, KvBits, PolicyKind, Switch, Verify};
use crate::kernels::Isa;
use crate::limits::{DRAFT_TOKENS_MAX, MAX_CONTEXT, MAX_THREADS, RAM_BYTES_MIN, ROUNDS_MAX, SECONDS_MAX, SECONDS_MIN};

use super::bench::BenchArgs;
use super::census::CensusArgs;
use super::chat::ChatArgs;
use super::grammar::GrammarArgs;
use super::info::InfoArgs;
use super::machine::Machine;
use super::numa::Numa;
use super::plan::PlanArgs;
use super::profile::ProfileArgs;
use super::shaping::ShapingArgs;
use super::size;
use super::sweep::SweepArgs;
use super::synth::SynthArgs;
use super::tune::TuneArgs;
use super::usage::UsageChoice;

/// Runs Mixture-of-Experts models far bigger than memory by streaming their experts from NVMe.
#[derive(Debug, Parser)]
#[command(name = "millstream", version, arg_required_else_help = true, disable_help_subcommand = true)]
// A flag given twice counts as given last, so that a script's flags can be changed behind it.
#[command(args_override_self = true)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// One generation: the answer goes to stdout, statistics to stderr.
    Run(Box<RunArgs>),
    /// A conversation: what was said before is not computed again.
    Chat(Box<ChatArgs>),
    /// Turns a published checkpoint into a quantized container laid out for streaming.
    Convert(super::convert::ConvertArgs),
    /// Whether a model will run here: files, machine and memory, as ok, warn, fail and skip lines.
    Doctor(DoctorArgs),
    /// How fast prompts are read and tokens follow, on given tokens: pp and tg tables in the manner of llama-bench.
    Bench(Box<BenchArgs>),
    /// Measures which way of reading is best on this machine's drive: devices, modes, depths, request sizes, pages.
    BenchIo(BenchIoArgs),
    /// Finds the way of reading with which this model generates fastest on this machine, and keeps it for run.
    Tune(TuneArgs),
    /// What the model and this machine are, on one screen.
    Info(InfoArgs),
    /// What a model's bytes are for, by part and by format, and what single tensors hold; reads headers only.
    Census(CensusArgs),
    /// Where everything would live, what a token would read, and the stages it goes through; loads nothing.
    Plan(PlanArgs),
    /// Writes a model of true shapes with drawn weights, for measuring one that is not at hand.
    Synth(SynthArgs),
    /// One generation with the full accounting: where its time went, what bound it, and what to change.
    Profile(Box<ProfileArgs>),
    /// One generation under a range of values of one setting: what memory, or threads, are worth.
    Sweep(SweepArgs),
    /// What the model makes of given tokens: perplexity of a text, questions with several answers, logits of a reference.
    Eval(super::eval::EvalArgs),
    /// Which experts the router chooses: recorded, replayed over cache policies, drawn.
    Trace(super::trace::TraceArgs),
}

/// Flags of `run`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream run -p \"Tell me a story about a fox.\"
  millstream run -m /models/glm-5.2-int4 --ram 16G -n 200 -f question.txt --temp 0 --stats-json stats.json

Environment: MILLSTREAM_MODEL, MILLSTREAM_RAM, MILLSTREAM_THREADS, MILLSTREAM_IO and MILLSTREAM_DEVICE stand for the \
flags of these names; a flag wins.
Sizes: 500M, 20G and 16GiB count in 1024s, 16GB in 1000s.
Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted (what was generated is shown).")]
pub struct RunArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// The prompt [default: standard input, when it is not a terminal]
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// Read the prompt from a file; - is standard input. One newline at its end is dropped
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Instructions to the model, before the prompt
    #[arg(long, alias = "system-prompt", value_name = "TEXT", conflicts_with_all = ["raw", "ids"], allow_hyphen_values = true)]
    pub system: Option<String>,
    /// Continue the prompt as it is, without the chat template. Control tokens it spells count as such
    #[arg(long)]
    pub raw: bool,
    /// The prompt is a list of token ids (commas or blanks between them), and so is the answer; nothing is added
    #[arg(long, conflicts_with = "raw")]
    pub ids: bool,
    /// Most tokens to generate; -1 goes on to a stop or the end of the context [default: to a stop or the end of the
    /// context, but at most 512]
    #[arg(short = 'n', long, visible_alias = "n-predict", alias = "predict", value_name = "N", allow_negative_numbers = true,
          value_parser = clap::value_parser!(i64).range(-1..=1 << 31))]
    pub max_tokens: Option<i64>,
    /// Temperature; 0 always takes the most likely token [default: 0.7]
    #[arg(long, visible_alias = "temperature", value_name = "T", allow_negative_numbers = true)]
    pub temp: Option<f32>,
    /// Choose among the most likely tokens that have this share of the probability together [default: 0.9]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Choose among the K most likely tokens; 0 is all [default: 0]
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<usize>,
    /// Choose among tokens at least this fraction as likely as the most likely one [default: 0]
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// What makes single tokens more or less likely.
    #[command(flatten)]
    pub shaping: ShapingArgs,
    /// What the answer may be at all.
    #[command(flatten)]
    pub grammar: GrammarArgs,
    /// Same seed, same answer; -1 is another each time [default: -1; it is shown]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = parse_seed)]
    pub seed: Option<Seed>,
    /// End the answer before this text; may be given several times. The name of a control token means that token
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Go on when the model ends its turn
    #[arg(long)]
    pub ignore_eos: bool,
    /// Draft tokens that may come next and check several in one step, which changes no answer: off, ngram (what followed where
    /// the text last went as it does now), mtp (the model's own layer for it), auto (as ngram, as many as turn out to pay), or
    /// grammar (what --grammar or --json-schema has no other way than, without holding the answer to it) [default: off; with
    /// a grammar, which the answer is held to then, what it has no other way than]
    #[arg(long, value_name = "SOURCE", value_parser = |text: &str| DRAFT.parse(text))]
    pub draft: Option<DraftSource>,
    /// Most tokens drafted for a step, 1 to 32 [default: 8; 32 where only a grammar drafts]
    #[arg(long, visible_alias = "draft-n", value_name = "N", allow_negative_numbers = true,
          value_parser = |text: &str| in_range(text, 1, DRAFT_TOKENS_MAX))]
    pub draft_max: Option<usize>,
    /// Tokens of context, prompt and answer together [default: what prompt and -n need]
    #[arg(short, long, visible_alias = "context", value_name = "N", allow_negative_numbers = true, value_parser = parse_context)]
    pub ctx_size: Option<usize>,
    /// Begin with what this file has of the prompt, and leave the context there for the next run: what is computed stays
    /// computed. Another model's file is put aside
    #[arg(long, value_name = "FILE")]
    pub kv: Option<PathBuf>,
    /// How the model is run.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Print one JSON object with answer and statistics instead of text
    #[arg(long)]
    pub json: bool,
    /// Write the statistics to a file as JSON (--json prints them)
    #[arg(long, value_name = "FILE")]
    pub stats_json: Option<PathBuf>,
    /// Write what was done when (stages, reads, waits, reads ahead) to a file that ui.perfetto.dev and chrome://tracing
    /// open; of a long generation the end
    #[arg(long, value_name = "FILE")]
    pub timeline: Option<PathBuf>,
    /// Print nothing but the answer, and errors
    #[arg(short, long, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Show every setting and where it came from
    #[arg(short, long)]
    pub verbose: bool,
}

/// Precision of what is quantized on its way, for whatever opens a model. Of weights it is what `convert` has for its
/// container.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct WidthArgs {
    /// Quantize routed experts as they are read, as convert would: 16, 8, 4, 3 or 2 bits. Memory holds more of them, the drive
    /// reads as much of each as before, and each takes arithmetic when it is read. What is narrower already stays
    /// [default: as stored]
    #[arg(long, value_name = "BITS")]
    pub expert_bits: Option<Width>,
    /// Quantize attention, dense and shared layers while they are loaded, as convert would: 16, 8, 4, 3 or 2 bits. What is
    /// narrower already stays [default: as stored]
    #[arg(long, value_name = "BITS")]
    pub dense_bits: Option<Width>,
    /// The same of embeddings and output head [default: as stored]
    #[arg(long, value_name = "BITS")]
    pub io_bits: Option<Width>,
    /// The same of the sparse-attention indexer [default: as stored]
    #[arg(long, value_name = "BITS")]
    pub indexer_bits: Option<Width>,
    /// Columns that share a scale in weights that become 4-bit: 16, 32, 48, 64, 96, 128, 192 or 256 [default: a whole row]
    #[arg(long, value_name = "N", value_parser = parse_group)]
    pub group: Option<u16>,
    /// Precision of what attention keeps of each position: 32 bits, or 16 (bf16) in half the memory [default: 32]
    #[arg(long, value_name = "BITS", value_parser = |text: &str| KV_BITS.parse(text))]
    pub kv_bits: Option<KvBits>,
}

impl WidthArgs {
    /// Those of weights in the terms of the engine.
    pub fn widths(&self) -> Widths {
        let WidthArgs {
            expert_bits: experts,
            dense_bits: dense,
            io_bits: io,
            indexer_bits: indexer,
            group,
            kv_bits: _,
        } = *self;
        Widths { experts, dense, io, mtp: None, indexer, group }
    }
}

/// How a model is run, whatever it is run for: threads, memory, reading, caching, arithmetic.
#[derive(Clone, Debug, clap::Args)]
pub struct EngineArgs {
    /// Threads that compute [default: the cores this process may use]
    #[arg(short, long, value_name = "N", allow_negative_numbers = true, value_parser = parse_threads)]
    pub threads: Option<usize>,
    /// Where memory lies and threads run on a machine with several nodes of memory: interleave or distribute (pages in
    /// turn on each, threads spread evenly), isolate (all on one, near the drive where that is known; its memory is what is
    /// available), off or numactl (as the system has it, or who started the program) [default: off]
    #[arg(long, value_name = "HOW", value_parser = |text: &str| NUMA.parse(text))]
    pub numa: Option<Numa>,
    /// Memory the process may use, as a size or auto: the program itself, weights, context and cached experts
    /// [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = parse_ram)]
    pub ram: Option<Ram>,
    /// What of the model is quantized while it is loaded.
    #[command(flatten)]
    pub widths: WidthArgs,
    /// A directory on another drive with copies of the model's shards, all or some; may be given several times. Reads are
    /// shared out by how fast the drives are
    #[arg(long, value_name = "DIR")]
    pub mirror: Vec<PathBuf>,
    /// How files are read: auto, direct (around the page cache, or fail), buffered, dontcache and drop (through the page
    /// cache without staying in it) or mmap [default: auto]
    #[arg(long, value_name = "MODE")]
    pub io: Option<IoMode>,
    /// What reads them: auto, uring, threads or mmap [default: auto]
    #[arg(long, value_name = "KIND")]
    pub device: Option<DeviceKind>,
    /// How much is read at a time: a number of experts, a size such as 64M, or auto [default: auto]
    #[arg(long, value_name = "N", value_parser = parse_depth)]
    pub depth: Option<Depth>,
    /// Largest single request: whole (an expert), a multiple of 64K up to 1G, or auto [default: auto]
    #[arg(long, value_name = "SIZE", value_parser = parse_chunk)]
    pub chunk: Option<Chunk>,
    /// Where this machine was tuned for the model (millstream tune), use what was found for --io, --device, --depth and
    /// --chunk, unless they are given: auto or off [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| TUNING.parse(text))]
    pub tuning: Option<bool>,
    /// Compute while experts are read: auto, on, or off (a layer reads all it needs, then computes) [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| SWITCH.parse(text))]
    pub pipeline: Option<Switch>,
    /// Read ahead what the next layer's router will probably choose: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| SWITCH.parse(text))]
    pub prefetch: Option<Switch>,
    /// Which cached expert gives way to another: auto, lru, 2q, arc, s3-fifo, lfru or lookahead; the manual's chapter on
    /// caching compares them [default: auto]
    #[arg(long, value_name = "POLICY", value_parser = parse_policy)]
    pub policy: Option<PolicyKind>,
    /// Where it is kept how often each expert was chosen in all runs, which tells the next run what to keep in memory: a
    /// file, off, or auto (beside the model or, where that cannot be written, in the state directory) [default: auto]
    #[arg(long, value_name = "FILE", value_parser = UsageChoice::parse)]
    pub usage: Option<UsageChoice>,
    /// Whether the experts chosen most in earlier runs stay in memory whatever the policy says: on, off or auto (where
    /// the policy itself does not count) [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| SWITCH.parse(text))]
    pub pins: Option<Switch>,
    /// Instruction set: auto, scalar, avx2, avx512 or amx [default: auto]
    #[arg(long, value_name = "SET", value_parser = parse_kernels)]
    pub kernels: Option<KernelChoice>,
    /// Arithmetic of quantized layers: int8 (fast) or f32 (exact) [default: int8]
    #[arg(long, value_name = "KIND", value_parser = |text: &str| ACTIVATIONS.parse(text))]
    pub activations: Option<Activations>,
    /// Form of attention: auto, absorbed or explicit [default: auto]
    #[arg(long, value_name = "FORM", value_parser = |text: &str| ATTENTION.parse(text))]
    pub attention: Option<AttentionForm>,
    /// Sparse attention: auto, on or off [default: auto]
    #[arg(long, value_name = "WHEN", value_parser = |text: &str| DSA.parse(text))]
    pub dsa: Option<Dsa>,
    /// Compare what is read with the container's checksums: off, sample (the first read of one expert in 64; with
    /// mirrors the first 64 reads and some of each layer too, and everything once something was wrong) or all.
    /// All hashes every expert read, at 5 GB/s or more, on the thread that computes, and reads resident weights twice
    /// [default: sample]
    #[arg(long, value_name = "WHAT", value_parser = |text: &str| VERIFY.parse(text))]
    pub verify: Option<Verify>,
}

/// Flags of `doctor`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream doctor -m /models/glm-5.2-int4
  millstream doctor --deep --json -m /models/glm-5.2-int4

Without --deep no matrix is read: what doctor passes runs, unless a weight is damaged. What --deep passes runs. Exit codes: 0 all well, or warnings only; \
1 something fails; 2 usage, a model that is not there included; 130 interrupted.")]
pub struct DoctorArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// What of the model is quantized while it is loaded.
    #[command(flatten)]
    pub widths: WidthArgs,
    /// Read the whole model: compare it with its checksums, and look at every weight and scale
    #[arg(long)]
    pub deep: bool,
    /// Print one JSON object instead of lines
    #[arg(long)]
    pub json: bool,
}

/// Flags of `bench-io`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream bench-io --quick
  millstream bench-io -m /models/glm-5.2-int4 --fio --svg sweep.svg --json

Without --file or -m it reads a scratch file, which it makes in --dir and which has no name: it is gone when the \
program ends, however it ends. Nothing else is ever written to the drive. Files read through the page cache are dropped \
from it before each measurement.
Sizes: 500M, 20G and 16GiB count in 1024s, 16GB in 1000s.
Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted (what was measured is shown).")]
pub struct BenchIoArgs {
    /// Read this file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["model", "dir"])]
    pub file: Option<PathBuf>,
    /// Read the shards of the model in this directory
    #[arg(short, long, value_name = "DIR", conflicts_with = "dir")]
    pub model: Option<PathBuf>,
    /// Make the scratch file here [default: the current directory]
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// Size of the scratch file, or of the part of each file that is read [default: a tenth of the free space, at most
    /// 4G; the whole of a file]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub size: Option<u64>,
    /// Bytes read as one [default: 19M, less where files are small]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    pub slab: Option<u64>,
    /// Seconds of one measurement [default: 2, with --quick 1]
    #[arg(long, value_name = "S", allow_negative_numbers = true, value_parser = parse_seconds)]
    pub secs: Option<f64>,
    /// Measurements of each candidate [default: 5, with --quick 3]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = parse_rounds)]
    pub rounds: Option<usize>,
    /// Try only what a recommendation needs: half a minute instead of several
    #[arg(long)]
    pub quick: bool,
    /// Run fio in the same rounds, as the yardstick
    #[arg(long)]
    pub fio: bool,
    /// Print one JSON object
    #[arg(long, conflicts_with_all = ["md", "csv"])]
    pub json: bool,
    /// Print a Markdown table
    #[arg(long, conflicts_with = "csv")]
    pub md: bool,
    /// Print comma-separated values
    #[arg(long)]
    pub csv: bool,
    /// Draw the sweep into this file
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// Print nothing but the result, and errors
    #[arg(short, long)]
    pub quiet: bool,
}

/// `millstream run` alone: every flag at its default.
pub fn plain_run() -> RunArgs {
    match Args::try_parse_from(["millstream", "run"]).map(|args| args.command) {
        Ok(Command::Run(run)) => *run,
        other => unreachable!("`millstream run` was read as {other:?}"),
    }
}

/// The model of a command that looks at one.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(value_name = "DIR", conflicts_with = "model")]
    dir: Option<PathBuf>,
    /// The same as a flag
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
}

impl ModelArgs {
    /// What `run` has of these.
    pub fn run(&self) -> RunArgs {
        RunArgs { model: self.model.clone().or_else(|| self.dir.clone()), ..plain_run() }
    }

    /// The directory that is read, as far as the user named it.
    pub fn inputs(&self, machine: &Machine) -> Vec<PathBuf> {
        super::job::inputs(&self.run(), machine)
    }
}

/// `--seed`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// Another one each time.
    Random,
    /// This one.
    Fixed(u64),
}

/// `--ram`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ram {
    /// From the memory that is available.
    Auto,
    /// This many bytes.
    Bytes(u64),
}

/// `--kernels`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelChoice {
    /// The best this processor has.
    Auto,
    /// This one.
    Isa(Isa),
}

impl fmt::Display for Ram {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ram::Auto => f.write_str("auto"),
            Ram::Bytes(bytes) => bytes.fmt(f),
        }
    }
}

impl fmt::Display for KernelChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            KernelChoice::Auto => f.write_str("auto"),
            KernelChoice::Isa(isa) => isa.fmt(f),
        }
    }
}

/// Largest single request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chunk {
    /// As the device likes it.
    Auto,
    /// An expert's part of a file.
    Whole,
    /// So many bytes.
    Bytes(u32),
}

impl Chunk {
    /// In the terms of a device.
    pub fn bytes(self) -> Option<u32> {
        match self {
            Chunk::Auto => None,
            Chunk::Whole => Some(CHUNK_WHOLE),
            Chunk::Bytes(bytes) => Some(bytes),
        }
    }
}

/// The values of a setting, by the names people type.
pub struct Choices<T: 'static>(pub(super) &'static [(&'static str, T)]);

/// `--activations`.
pub const ACTIVATIONS: Choices<Activations> = Choices(&[("int8", Activations::Int8), ("f32", Activations::F32)]);
/// `--attention`.
pub const ATTENTION: Choices<AttentionForm> = Choices(&[
    ("auto", AttentionForm::Auto),
    ("absorbed", AttentionForm::Absorbed),
    ("explicit", AttentionForm::Explicit),
]);
/// `--kv-bits`.
pub const KV_BITS: Choices<KvBits> = Choices(&[("32", KvBits::Bits32), ("16", KvBits::Bits16)]);
/// `--dsa`.
pub const DSA: Choices<Dsa> = Choices(&[("auto", Dsa::Auto), ("on", Dsa::On), ("off", Dsa::Off)]);
/// `--pipeline` and `--prefetch`.
pub const SWITCH: Choices<Switch> = Choices(&[("auto", Switch::Auto), ("on", Switch::On), ("off", Switch::Off)]);

/// `--draft`.
pub const DRAFT: Choices<DraftSource> = Choices(&[
    ("auto", DraftSource::Auto),
    ("off", DraftSource::Off),
    ("ngram", DraftSource::Ngram),
    ("mtp", DraftSource::Mtp),
    ("grammar", DraftSource::Grammar),
]);

/// A switch of which nothing is decided by measuring.
pub const ON_OFF: Choices<bool> = Choices(&[("on", true), ("off", false)]);

/// `--numa`; behind ours are the names of llama.cpp.
pub const NUMA: Choices<Numa> = Choices(&[
    ("off", Numa::Off),
    ("interleave", Numa::Interleave),
    ("isolate", Numa::Isolate),
    ("distribute", Numa::Interleave),
    ("numactl", Numa::Off),
]);

/// `--tuning`.
pub const TUNING: Choices<bool> = Choices(&[("auto", true), ("off", false)]);

/// `--verify`.
pub const VERIFY: Choices<Verify> = Choices(&[("off", Verify::Off), ("sample", Verify::Sample), ("all", Verify::All)]);

impl<T: Copy + PartialEq> Choices<T> {
    /// The value called `text`.
    pub fn parse(&self, text: &str) -> Result<T, String> {
        let known = || self.0.iter().map(|(name, _)| *name).collect::<Vec<_>>().join(", ");
        self.0
            .iter()
            .find(|(name, _)| *name == text)
            .map(|(_, value)| *value)
            .ok_or_else(|| format!("known are {}", known()))
    }

    /// The name of `value`.
    pub fn name(&self, value: T) -> &'static str {
        self.0.iter().find(|(_, other)| *other == value).map_or("?", |(name, _)| name)
    }
}

/// Reads `--seed`; -1 is the field's way of asking for a random one.
pub fn parse_seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" | "random" => Ok(Seed::Random),
        _ => text
            .parse()
            .map(Seed::Fixed)
            .map_err(|_| "a seed is a whole number from 0 on, or -1 for a random one".into()),
    }
}

/// Reads `--depth`: a bare number counts experts.
pub fn parse_depth(text: &str) -> Result<Depth, String> {
    if text == "auto" {
        return Ok(Depth::Auto);
    }
    let refuse = || format!("'{text}' is neither a number of experts from 1 on, nor a size such as 64M, nor auto");
    if text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().ok().filter(|slabs| *slabs > 0).map(Depth::Slabs).ok_or_else(refuse);
    }
    size::parse(text).ok().filter(|bytes| *bytes > 0).map(Depth::Bytes).ok_or_else(refuse)
}

/// Reads `--chunk`.
pub fn parse_chunk(text: &str) -> Result<Chunk, String> {
    match text {
        "auto" => Ok(Chunk::Auto),
        "whole" => Ok(Chunk::Whole),
        _ => {
            let bytes = size::parse(text)?;
            let fits = bytes > 0 && bytes <= u64::from(CHUNK_WHOLE) && bytes.is_multiple_of(CHUNK_BYTES_MIN.into());
            match u32::try_from(bytes) {
                Ok(bytes) if fits => Ok(Chunk::Bytes(bytes)),
                _ => Err(format!("{text} is not a multiple of 64K up to 1G")),
            }
        }
    }
}

/// Reads `--ram`.
pub fn parse_ram(text: &str) -> Result<Ram, String> {
    match text {
        "auto" => Ok(Ram::Auto),
        _ => match size::parse(text)? {
            0 => Err("no model fits no memory: write a size such as 16G, or auto".into()),
            1..RAM_BYTES_MIN => Err("no model fits so few bytes: write a size such as 16G, or auto".into()),
            bytes => Ok(Ram::Bytes(bytes)),
        },
    }
}

/// Reads `--threads`.
pub fn parse_threads(text: &str) -> Result<usize, String> {
    in_range(text, 1, MAX_THREADS)
}

/// Reads `--policy`.
fn parse_policy(text: &str) -> Result<PolicyKind, String> {
    match text {
        "auto" => Ok(PolicyKind::default()),
        _ => text.parse().map_err(|_| format!("known are auto, {}", PolicyKind::ALL.map(PolicyKind::name).join(", "))),
    }
}

/// Reads `--group`.
pub(super) fn parse_group(text: &str) -> Result<u16, String> {
    let known = || GROUP_SIZES.map(|size| size.to_string()).join(", ");
    let group = text.parse().ok().filter(|group| GROUP_SIZES.contains(group));
    group.ok_or_else(|| format!("it must be one of {}", known()))
}

/// Reads `--ctx-size`.
pub fn parse_context(text: &str) -> Result<usize, String> {
    in_range(text, 1, MAX_CONTEXT)
}

fn parse_kernels(text: &str) -> Result<KernelChoice, String> {
    if text == "auto" {
        Ok(KernelChoice::Auto)
    } else {
        text.parse::<Isa>().map(KernelChoice::Isa).map_err(|e| e.to_string())
    }
}

/// Reads `--secs`.
pub fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (SECONDS_MIN..=SECONDS_MAX).contains(&seconds) => Ok(seconds),
        _ => Err(format!("it must be a number from {SECONDS_MIN} to {SECONDS_MAX}")),
    }
}

/// Reads a number of repetitions.
pub fn parse_rounds(text: &str) -> Result<usize, String> {
    in_range(text, 1, ROUNDS_MAX)
}

/// Reads a rate, in GB/s.
pub fn parse_rate(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(rate) if rate.is_finite() && rate > 0.0 => Ok(rate),
        _ => Err("it must be a number of GB/s above 0, such as 3.1".to_owned()),
    }
}

pub(super) fn in_range(text: &str, min: usize, max: usize) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("it must be a whole number from {min} to {max}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_command_shows_two_examples() {
        for command in Args::command().get_subcommands_mut() {
            let name = command.get_name().to_owned();
            let help = command.render_help().to_string();
            assert_eq!(help.matches(&format!("\n  millstream {name} ")).count(), 2, "{help}");
        }
    }

    #[test]
    fn depth_counts_experts_or_bytes_and_chunk_counts_bytes() {
        let depth = |text| parse_depth(text).unwrap();
        assert_eq!(["auto", "4", "64M"].map(depth), [Depth::Auto, Depth::Slabs(4), Depth::Bytes(64 << 20)]);
        let chunk = |text| parse_chunk(text).unwrap().bytes();
        assert_eq!(["auto", "256K", "4M"].map(chunk), [None, Some(262_144), Some(4_194_304)]);
        assert_eq!((chunk("whole"), chunk("1G")), (Some(1 << 30), Some(1 << 30)));
    }

    #[test]
    fn unknown_settings_are_refused() {
        for bad in [
            &["frobnicate"][..],
            &["run", "--tempo", "1"],
            &["run", "--io", "telepathy"],
            &["run", "--device", "direct"],
            &["run", "--depth", "0"],
            &["run", "--depth", "deep"],
            &["run", "--chunk", "65537"],
            &["run", "--chunk", "0"],
            &["run", "--chunk", "2G"],
            &["run", "--threads", "0"],
            &["run", "-p", "a", "-f", "b"],
            &["run", "--raw", "--system", "x"],
            &["run", "--ids", "--raw"],
            &["run", "-q", "-v"],
            &["run", "-n", "-2"],
            &["run", "--draft", "guess"],
            &["run", "--draft-max", "0"],
            &["run", "--draft-max", "33"],
            &["run", "stray"],
            &["run", "--numa", "both"],
            &["run", "--ram", "0"],
            &["run", "--ram", "0.0G"],
            &["convert", "a", "b", "--group", "17"],
            &["run", "--dense-bits", "5"],
            &["plan", "--io-bits", "fp8"],
            &["bench", "--group", "17"],
            &["convert", "a"],
            &["convert", "a", "b", "--experts", "5"],
            &["bench-io", "--json", "--md"],
            &["bench-io", "--csv", "--md"],
            &["bench-io", "--file", "a", "-m", "b"],
            &["bench-io", "--file", "a", "--dir", "b"],
            &["bench-io", "--secs", "0"],
            &["bench-io", "--secs", "nan"],
            &["bench-io", "--rounds", "0"],
            &["bench-io", "--slab", "-1"],
            &["bench-io", "--size", "much"],
            &["bench-io", "--write"],
            &["tune", "--secs", "0"],
            &["tune", "--threads", "0"],
            &["tune", "--io", "direct"],
            &["run", "--tuning", "maybe"],
            &["synth"],
            &["synth", "d", "--preset", "glm-9"],
            &["synth", "d", "--layers", "0"],
            &["synth", "d", "--format", "int3"],
            &["synth", "d", "--dense-bits", "16"],
        ] {
            let arguments = ["millstream"].iter().chain(bad);
            let refused = Args::try_parse_from(arguments).expect_err("refused");
            assert_eq!(refused.exit_code(), 2, "{bad:?}");
        }
    }

    #[test]
    fn what_can_be_asked_for_is_what_the_engine_can_have() {
        for (flag, most) in [("-t", 1024u64), ("-c", 2_097_152)] {
            let typed = |n: u64| Args::try_parse_from(["millstream", "run", flag, &n.to_string()]);
            assert!(typed(most).is_ok() && typed(1).is_ok(), "{flag}");
            let refused = typed(most + 1).unwrap_err().to_string();
            assert!(refused.contains(&format!("from 1 to {most}")), "{refused}");
        }
    }

    #[test]
    fn a_flag_given_twice_counts_as_given_last() {
        let typed = "millstream run -p a -n 5 --temp 1 --stop x -q -n 6 --temp 0.5 --stop y -p b -q";
        let Command::Run(run) = Args::try_parse_from(typed.split(' ')).unwrap().command else {
            panic!("another command")
        };
        assert_eq!((run.prompt.as_deref(), run.max_tokens, run.temp, run.quiet), (Some("b"), Some(6), Some(0.5), true));
        assert_eq!(run.stop, ["x", "y"]);
        let typed = "millstream convert a b --experts 8 --experts 4";
        let Command::Convert(convert) = Args::try_parse_from(typed.split(' ')).unwrap().command else {
            panic!("another command")
        };
        assert_eq!(convert.experts, Some(crate::checkpoint::convert::Width::Bits4));
    }

    #[test]
    fn the_groups_that_work_are_listed_in_help_and_error() {
        let help = Args::command().find_subcommand_mut("convert").unwrap().render_long_help().to_string();
        let refused = Args::try_parse_from("millstream convert a b --group 17".split(' ')).unwrap_err().to_string();
        assert!(refused.contains("--group"), "{refused}");
        for size in GROUP_SIZES {
            assert!(help.contains(&size.to_string()) && refused.contains(&size.to_string()), "{size}: {help}{refused}");
            assert_eq!(parse_group(&size.to_string()), Ok(size));
        }
    }

    #[test]
    fn the_names_people_type_are_known() {
        let typed =
            "millstream run -m d -n 5 --temperature 0 --top-k 40 --seed -1 --stop a --stop -b -t 2 -c 100 --ram 2G";
        let Command::Run(run) = Args::try_parse_from(typed.split(' ')).unwrap().command else {
            panic!("another command")
        };
        assert_eq!(run.stop, ["a", "-b"]);
        assert_eq!((run.temp, run.seed, run.engine.ram), (Some(0.0), Some(Seed::Random), Some(Ram::Bytes(2 << 30))));
        let Command::Run(run) =
            Args::try_parse_from(["millstream", "run", "--n-predict", "-1", "-p", "-x"]).unwrap().command
        else {
            panic!("another command")
        };
        assert_eq!((run.max_tokens, run.prompt.as_deref()), (Some(-1), Some("-x")));
    }
}

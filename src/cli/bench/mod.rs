//! The `bench` command, in the manner of llama-bench: how fast a prompt is read and how fast tokens follow, at any depth of
//! context. The tokens are given, not chosen, and the same in every repetition: what a model reads depends on them.

mod measure;
mod show;
mod tokens;
mod work;

use std::path::PathBuf;

use millstream_io::measure::Witness;

use crate::checkpoint::census::Census;
use crate::checkpoint::{Arch, Checkpoint};
use crate::limits::BENCH_TESTS_MAX;

use super::args::{self, EngineArgs, RunArgs};
use super::bench_io::io_failure;
use super::config::{self, RunConfig};
use super::machine::Machine;
use super::usage::{Usage, UsageChoice};
use super::{Done, Failure, cold, interrupt, job, numa, output, render};
use measure::{How, Measure, Taken, Went};
use tokens::Tokens;
use work::{Counts, Test};

/// Tokens of a prompt where nothing is asked for.
const PROMPT_DEFAULT: usize = 512;
/// Tokens that follow where nothing is asked for.
const ANSWER_DEFAULT: usize = 128;
/// Repetitions when `-r` is not given.
const REPETITIONS_DEFAULT: usize = 5;

/// Flags of `bench`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream bench -p 512 -n 128 -r 5
  millstream bench -m /models/glm-5.2-int4 --ram 16G --replay ids.json --prompt-tokens 64 --cold -r 3 -o json

A length is a number, a list (512,1024) or a range (0-4096+1024, 128-2048*2); 0 is none. pp is reading a prompt, tg one token \
after the other. Rates are means over the repetitions, with the standard deviation, as llama-bench has them; -o json has \
every sample. Warm, each test is done once before it is timed, so that the cache holds what fits of what it needs.
Exit codes: 0 done, 1 the work failed (what was measured is shown), 2 usage, 130 interrupted (likewise).")]
pub struct BenchArgs {
    /// Model directory [default: the model that comes with the program]
    #[arg(short, long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Tokens of a prompt [default: 512, where no other test is asked for]
    #[arg(short = 'p', long = "pp", alias = "n-prompt", value_name = "N", value_delimiter = ',', value_parser = work::parse_counts)]
    prompts: Vec<Counts>,
    /// Tokens that follow one by one [default: 128, where no other test is asked for]
    #[arg(short = 'n', long = "tg", alias = "n-gen", value_name = "N", value_delimiter = ',', value_parser = work::parse_counts)]
    answers: Vec<Counts>,
    /// Both, timed as one; may be given several times
    #[arg(long = "pg", value_name = "PP,TG", value_parser = work::parse_pair)]
    pairs: Vec<(usize, usize)>,
    /// Tokens in the context before the clock starts [default: 0]
    #[arg(short = 'd', long = "n-depth", value_name = "N", value_delimiter = ',', value_parser = work::parse_counts)]
    depths: Vec<Counts>,
    /// Put these tokens through the model instead: a file with a JSON list of ids. The first are read as a prompt, the
    /// others follow one by one, whatever the model would choose
    #[arg(long, value_name = "FILE", requires = "prompt_tokens", conflicts_with_all = ["prompts", "answers", "pairs", "depths"])]
    replay: Option<PathBuf>,
    /// How many of them are the prompt
    #[arg(long, value_name = "K", requires = "replay")]
    prompt_tokens: Option<usize>,
    /// Times that each test is timed [default: 5]
    #[arg(short = 'r', long, value_name = "N", allow_negative_numbers = true, value_parser = args::parse_rounds)]
    repetitions: Option<usize>,
    /// Open the model anew before each time, so that no expert is in memory
    #[arg(long)]
    cold: bool,
    /// Time the first time too
    #[arg(long)]
    no_warmup: bool,
    /// What is printed: md, csv, json, jsonl or sql [default: md]
    #[arg(short, long, value_name = "FORMAT", value_parser = |text: &str| show::OUTPUT.parse(text))]
    output: Option<show::Output>,
    /// The same as -o json
    #[arg(long, conflicts_with = "output")]
    json: bool,
    /// How the model is run.
    #[command(flatten)]
    engine: EngineArgs,
    /// Print nothing but the result, and errors
    #[arg(short, long)]
    quiet: bool,
}

/// Everything that is known in the end.
struct Report<'a> {
    config: &'a RunConfig,
    machine: &'a Machine,
    model: Model,
    how: How,
    tokens: &'a Tokens,
    taken: Vec<Taken>,
    went: Went,
}

/// What ran.
struct Model {
    dir: PathBuf,
    arch: Arch,
    formats: Vec<String>,
    /// Which of them are whose.
    widths: String,
    /// Bytes of its shards.
    bytes: u64,
    parameters: u64,
}

impl Model {
    fn of(checkpoint: &Checkpoint) -> Result<Model, Failure> {
        let census = Census::take(checkpoint).map_err(|e| Failure::of(&e).hint(e.hint()))?;
        Ok(Model {
            dir: checkpoint.dir.clone(),
            arch: checkpoint.arch.clone(),
            formats: checkpoint.formats().map(|format| format.to_string()).collect(),
            widths: census.widths(),
            bytes: census.bytes,
            parameters: census.used().weights,
        })
    }
}

/// Benchmarks and reports.
pub fn bench(args: &BenchArgs, machine: &Machine) -> Result<Done, Failure> {
    let format = if args.json { show::Output::Json } else { args.output.unwrap_or_default() };
    let tests = tests(args)?;
    let run_args = run_args(args);
    let machine = &numa::place(&run_args, machine)?;
    let mut config = config::decide(&run_args, machine)?;
    config.check_memory(machine)?;
    let Some(checkpoint) = job::open_checkpoint(&run_args, &mut config, machine)? else { return Ok(Done::Interrupted) };
    let model = Model::of(&checkpoint)?;
    let (tests, tokens) = with_tokens(args, tests, &checkpoint)?;
    let (usage, warning) = Usage::open(&config.usage, &checkpoint, machine);
    warning.iter().for_each(|line| render::note(args.quiet, line));
    // Every test begins with the same history, and none adds to it.
    config.history = usage.before().to_vec();
    let witness = Witness::open(checkpoint.tensors.paths(), machine.root()).map_err(|error| io_failure(&error))?;
    drop(checkpoint);

    let stop = interrupt::watch()?;
    let how =
        How { repetitions: args.repetitions.unwrap_or(REPETITIONS_DEFAULT), cold: args.cold, warmup: !args.no_warmup };
    let waiting = render::Waiting::begin("opening the model", args.quiet);
    let context = tests.iter().map(Test::context).max().unwrap_or(1);
    // What is decoded needs no rows of a prompt.
    config.prompt_has(tests.iter().map(|test| test.depth + test.prompt).max().unwrap_or(1));
    let subject = cold::Subject { dir: &model.dir, witness: &witness, stop, quiet: args.quiet };
    let measure = Measure { config: &config, context, tokens: &tokens.ids, how, subject, waiting: &waiting };
    let mut taken = Vec::with_capacity(tests.len());
    let went = measure.take(&tests, &mut taken);
    drop(waiting);

    taken.retain(|taken| !taken.samples.is_empty());
    let report = Report { config: &config, machine, model, how, tokens: &tokens, taken, went };
    let closed = if report.taken.is_empty() { None } else { output::print(&show::text(&report, format))? };
    match (report.went, closed) {
        (Went::Failed(failure), _) => Err(failure),
        (_, Some(done)) => Ok(done),
        (Went::Interrupted, None) => Ok(Done::Interrupted),
        (Went::Whole, None) => Ok(Done::Whole),
    }
}

/// What is asked for; none where a file will tell.
fn tests(args: &BenchArgs) -> Result<Vec<Test>, Failure> {
    if args.replay.is_some() {
        return Ok(Vec::new());
    }
    let flat = |list: &[Counts]| list.iter().flat_map(|counts| counts.0.iter().copied()).collect::<Vec<_>>();
    let (mut prompts, mut answers, mut depths) = (flat(&args.prompts), flat(&args.answers), flat(&args.depths));
    if prompts.is_empty() && answers.is_empty() && args.pairs.is_empty() {
        (prompts, answers) = (vec![PROMPT_DEFAULT], vec![ANSWER_DEFAULT]);
    }
    if depths.is_empty() {
        depths.push(0);
    }
    let tests = work::tests(&prompts, &answers, &args.pairs, &depths);
    if tests.is_empty() {
        return Err(Failure::usage("there is nothing to measure: every length is 0"));
    }
    if tests.len() > BENCH_TESTS_MAX {
        return Err(Failure::usage(format!("{} tests: at most {BENCH_TESTS_MAX} are taken", tests.len())));
    }
    if args.cold && tests.iter().any(|test| test.depth > 0) {
        return Err(Failure::usage(
            "--cold begins without any expert in memory, and filling a context of -d reads some",
        )
        .hint("leave one of the two out; --pg PP,TG times a prompt and what follows it from cold"));
    }
    Ok(tests)
}

/// The tests and their tokens, which fit the model.
fn with_tokens(args: &BenchArgs, tests: Vec<Test>, checkpoint: &Checkpoint) -> Result<(Vec<Test>, Tokens), Failure> {
    let Checkpoint { arch, dir, .. } = checkpoint;
    let (tests, tokens) = match (&args.replay, args.prompt_tokens) {
        (Some(path), Some(prompt)) => {
            let tokens = tokens::of_file(path, arch)?;
            let count = tokens.ids.len();
            if prompt > count || count == 0 {
                let name = path.display();
                return Err(Failure::usage(format!("--prompt-tokens {prompt}, and {name} lists {count} ids")));
            }
            (vec![Test { depth: 0, prompt, answer: count - prompt, apart: true }], tokens)
        }
        _ => {
            let most = tests.iter().map(Test::context).max().unwrap_or(0);
            (tests, tokens::of_text(dir, arch, most.min(arch.max_context))?)
        }
    };
    match tests.iter().find(|test| test.context() > arch.max_context) {
        None => Ok((tests, tokens)),
        Some(test) => {
            let (needs, longest) = (test.context(), arch.max_context);
            Err(Failure::usage(format!("a test takes {needs} tokens of context, and the model's longest is {longest}")))
        }
    }
}

/// The settings of `run` with the same flags.
fn run_args(args: &BenchArgs) -> RunArgs {
    let mut engine = args.engine.clone();
    // What other runs chose would make one day's numbers differ from the next day's, unless it is asked for.
    engine.usage = engine.usage.or(Some(UsageChoice::Off));
    RunArgs { model: args.model.clone(), quiet: args.quiet, engine, ..args::plain_run() }
}

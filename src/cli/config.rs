//! Everything decided: flags and machine in, settings out, each with where it came from.

use std::fmt::Display;
use std::path::{Path, PathBuf};

use millstream_io::limits::DRIVES_MAX;
use millstream_io::{DeviceKind, IoMode, settle};
use serde_json::Value as Json;

use crate::checkpoint::convert::Widths;
use crate::engine::config::{DEFAULT_CONTEXT, DEFAULT_PREFILL_ROWS};
use crate::engine::sampler::Sampling;
use crate::engine::stop::{StopError, StopMatcher};
use crate::engine::{Activations, AttentionForm, DraftRule, DraftSource, Dsa, EngineConfig, Memory};
use crate::limits::{DRAFT_TOKENS_MAX, GRAMMAR_BYTES, MAX_ROWS, PROGRAM_REST_BYTES, THREAD_BYTES, TOKENIZER_TIMES};

use super::Failure;
use super::args::{self, Chunk, EngineArgs, KernelChoice, Ram, RunArgs, Seed, WidthArgs};
use super::machine::Machine;
use super::numa;
use super::reading::{Asked, Reading};
use super::shaping::Shape;
use super::tuning::{Lookup, Profile};
use super::usage::UsageChoice;

/// Tokens generated when `-n` is not given.
pub const MAX_TOKENS_DEFAULT: usize = 512;
/// Contexts are sized in steps of this many tokens.
const CONTEXT_STEP: usize = 64;

/// Environment variables that stand for flags.
const VARIABLES: [&str; 5] =
    ["MILLSTREAM_MODEL", "MILLSTREAM_RAM", "MILLSTREAM_THREADS", "MILLSTREAM_IO", "MILLSTREAM_DEVICE"];
/// Variables that begin like this belong to the test suite.
const VARIABLES_OF_TESTS: &str = "MILLSTREAM_TEST_";

/// A resolved setting, for `-v` and the statistics.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// Name of the flag.
    pub name: &'static str,
    /// What it is.
    pub value: Json,
    /// Where that came from.
    pub origin: String,
}

/// Which model runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ModelChoice {
    /// The directory of a model.
    Dir(PathBuf),
    /// The checkpoint that comes with the program, in this directory.
    Bundled(PathBuf),
}

impl ModelChoice {
    /// The directory's own name, as people call the model.
    pub fn name(&self) -> String {
        let (ModelChoice::Dir(dir) | ModelChoice::Bundled(dir)) = self;
        let dir = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
        dir.file_name().unwrap_or(Path::new("/").as_os_str()).to_string_lossy().into_owned()
    }
}

/// How long the answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// At most so many tokens.
    AtMost(usize),
    /// To the end of the context.
    Context,
}

/// Settings of `run`, before the model is known.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Which model.
    pub model: ModelChoice,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What else has a say in it.
    pub shape: Shape,
    /// How many there may be.
    pub max_tokens: MaxTokens,
    /// Tokens of context asked for.
    pub context: Option<usize>,
    /// Checked stop strings.
    pub stops: Vec<String>,
    /// Whether it is the context that limits the answer, and not the tokens asked for; known after [`RunConfig::fit`].
    pub context_limits: bool,
    /// Rows of a prefill chunk: no more than the prompt has, once [`RunConfig::fit`] knows it. Rows that no chunk fills are
    /// memory that the cache of experts lacks.
    prefill_rows: usize,
    /// What was decided.
    pub settings: Vec<Setting>,
    /// Threads that compute.
    pub threads: usize,
    /// Bytes of memory asked for; none takes what is available.
    pub ram: Option<u64>,
    /// What the process itself holds; without the tokenizer until the model is known.
    pub program_bytes: u64,
    /// Whether what was found out by tuning counts.
    pub tuning: bool,
    reading: Reading,
    asked: Asked,
    /// What the engine is told besides.
    engine: EngineConfig,
    /// Where selections are remembered.
    pub usage: UsageChoice,
    /// How often each expert was chosen in earlier runs; known once the model is.
    pub history: Vec<u64>,
}

/// Decides everything that does not depend on the model. Refuses what cannot work, before any file is read.
pub fn decide(args: &RunArgs, machine: &Machine) -> Result<RunConfig, Failure> {
    if let Some(unknown) = machine
        .variables_from("MILLSTREAM_")
        .find(|name| !VARIABLES.contains(name) && !name.starts_with(VARIABLES_OF_TESTS))
    {
        return Err(Failure::usage(format!("the environment variable {unknown} is not a setting"))
            .hint(format!("known are {}", VARIABLES.join(", "))));
    }
    if args.stats_json.as_deref() == Some(Path::new("-")) {
        return Err(Failure::usage("--stats-json takes a file, and standard output is for the answer")
            .hint("--json prints answer and statistics together as JSON; a file called - is ./-"));
    }
    let mut settings = Settings(Vec::new());
    let model = decide_model(args, machine, &mut settings)?;
    let sampling = decide_sampling(args, &mut settings)?;
    let shape = Shape::decide(args, &mut settings)?;
    let max_tokens = match args.max_tokens {
        None => MaxTokens::AtMost(MAX_TOKENS_DEFAULT),
        Some(-1) => MaxTokens::Context,
        Some(0) => {
            return Err(Failure::usage("-n 0 asks for no token").hint("-n takes 1 or more, or -1 for no limit"));
        }
        Some(n) => MaxTokens::AtMost(n as usize),
    };
    let shown = match max_tokens {
        MaxTokens::AtMost(n) => Json::from(n),
        MaxTokens::Context => Json::from("context"),
    };
    settings.add("max-tokens", shown, flag_or_default(&args.max_tokens));
    let drafts = decide_drafts(args, &mut settings)?;
    StopMatcher::new(args.stop.clone()).map_err(stop_failure)?;
    settings.add("stop", args.stop.clone(), if args.stop.is_empty() { "default" } else { "flag" });

    let default_threads = (machine.cores, "cores this process may use");
    let threads = settings.pick("threads", args.engine.threads, machine, args::parse_threads, default_threads)?;
    settings.add("numa", args::NUMA.name(args.engine.numa.unwrap_or_default()), numa::origin(args, machine));
    let ram = settings.pick("ram", args.engine.ram, machine, args::parse_ram, (Ram::Auto, &machine.memory.source))?;
    let (reading, asked) = decide_reading(&args.engine, machine, &mut settings)?;
    let mirrors = decide_mirrors(&args.engine, &mut settings)?;
    let tuning = args.engine.tuning.unwrap_or(true);
    settings.add("tuning", args::TUNING.name(tuning), flag_or_default(&args.engine.tuning));
    let usage = args.engine.usage.clone().unwrap_or_default();
    settings.add("usage", usage.name(), flag_or_default(&args.engine.usage));
    let mut engine = EngineConfig {
        mirrors,
        verify_seed: sampling.seed,
        timeline: args.timeline.is_some(),
        drafts,
        space: machine.memory.space,
        nodes: machine.placed.spread.clone(),
        ..EngineConfig::new(machine.memory.shared)
    };
    engine.widths = decide_widths(&args.engine.widths, &mut settings)?;
    engine.kv_bits = args.engine.widths.kv_bits.unwrap_or_default();
    settings.add("kv-bits", args::KV_BITS.name(engine.kv_bits), flag_or_default(&args.engine.widths.kv_bits));
    engine.kv_file = args.kv.is_some();
    let kept = args.kv.as_ref().map_or_else(|| "off".to_owned(), |path| path.display().to_string());
    settings.add("kv", kept, flag_or_default(&args.kv));
    decide_arithmetic(&args.engine, &mut engine, &mut settings);
    decide_experts(&args.engine, &mut engine, &mut settings);
    Ok(RunConfig {
        model,
        sampling,
        shape,
        max_tokens,
        context: args.ctx_size,
        stops: args.stop.clone(),
        context_limits: false,
        prefill_rows: DEFAULT_PREFILL_ROWS,
        settings: settings.0,
        threads,
        ram: match ram {
            Ram::Auto => None,
            Ram::Bytes(bytes) => Some(bytes),
        },
        program_bytes: machine.program_bytes() + PROGRAM_REST_BYTES + threads as u64 * THREAD_BYTES,
        tuning,
        reading,
        asked,
        engine,
        usage,
        history: Vec::new(),
    })
}

impl RunConfig {
    /// What the engine needs, for a context of `context` tokens.
    pub fn engine(&self, context: usize) -> EngineConfig {
        self.reading.configure(EngineConfig {
            memory: Memory::Total(self.ram),
            threads: self.threads,
            context: Some(context),
            prefill_rows: self.prefill_rows,
            program_bytes: self.program_bytes,
            history: self.history.clone(),
            ..self.engine.clone()
        })
    }

    /// Counts the tokenizer of the model in `dir` to what the process itself holds.
    pub fn count_tokenizer(&mut self, dir: &Path) {
        let tokenizer = std::fs::metadata(dir.join("tokenizer.json"));
        self.program_bytes += tokenizer.map_or(0, |meta| meta.len()) * TOKENIZER_TIMES;
    }

    /// Counts what following a grammar may take.
    pub fn count_grammar(&mut self) {
        self.program_bytes += GRAMMAR_BYTES;
    }

    /// Takes from a tuning profile what was not asked for. Returns the line that names the profile.
    pub fn tune(&mut self, found: Lookup) -> Option<String> {
        let profile = match found {
            Lookup::None => return None,
            Lookup::Unusable(why) => return Some(why),
            Lookup::Found(profile) => *profile,
        };
        let Profile { date, reading: best, .. } = profile;
        if !self.engine.mirrors.is_empty() {
            return Some(format!("the tune of {date} read one drive, and is left aside for several"));
        }
        let before = self.reading;
        self.reading = before.tuned(self.asked, best);
        self.set("tuning", date.clone(), "tuning profile of this machine and model");
        let mut taken = Vec::new();
        for ((name, was), (_, now)) in before.texts().into_iter().zip(self.reading.texts()) {
            if was != now {
                taken.push(format!("--{name} {now}"));
                self.set(name, now, "tuning profile");
            }
        }
        Some(match (best == Reading::DEFAULT, taken.is_empty()) {
            (true, _) => format!("the tune of {date} found that the defaults are best here"),
            (false, true) => format!("the tune of {date} found {best}, in place of which stands what was asked for"),
            (false, false) => format!("settings from the tune of {date}: {}", taken.join(" ")),
        })
    }

    fn set(&mut self, name: &str, value: impl Into<Json>, origin: &str) {
        if let Some(setting) = self.settings.iter_mut().find(|setting| setting.name == name) {
            (setting.value, setting.origin) = (value.into(), origin.to_owned());
        }
    }

    /// Refuses to guess how much memory there is.
    pub fn check_memory(&self, machine: &Machine) -> Result<(), Failure> {
        match self.ram {
            None if !machine.memory.known => {
                Err(Failure::usage("cannot tell how much memory is available")
                    .hint("give --ram SIZE, such as --ram 16G"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses a prompt of at least `least` tokens that [`RunConfig::fit`] would refuse, before its tokens are counted.
    pub fn could_fit(&self, least: usize, longest: usize) -> Result<(), Failure> {
        let limit = self.context.unwrap_or(longest).min(longest);
        if least < limit {
            return Ok(());
        }
        Err(Failure::usage(format!(
            "the prompt has at least {least} tokens, by its length; the context has {limit} and the answer needs one"
        ))
        .hint(if least < longest {
            format!("the model allows up to -c {longest}")
        } else {
            "shorten the prompt".into()
        }))
    }

    /// Fits prompt and answer into a context of at most `longest` tokens. Returns the context and the most tokens the
    /// answer may have; a prompt that leaves no room for one is refused with both numbers, never cut.
    pub fn fit(&mut self, prompt_tokens: usize, longest: usize) -> Result<(usize, usize), Failure> {
        let limit = self.asked_context(longest)?.unwrap_or(longest);
        if prompt_tokens >= limit {
            let whose = if self.context.is_some() { "asked for with -c" } else { "of the model" };
            return Err(Failure::usage(format!(
                "the prompt has {prompt_tokens} tokens; the context {whose} has {limit} and the answer needs one"
            ))
            .hint(match self.context {
                Some(_) if prompt_tokens < longest => format!("the model allows up to -c {longest}"),
                _ => "shorten the prompt".into(),
            }));
        }
        let room = limit - prompt_tokens;
        let answer = match self.max_tokens {
            MaxTokens::AtMost(n) => n.min(room),
            MaxTokens::Context => room,
        };
        self.context_limits = match self.max_tokens {
            MaxTokens::AtMost(n) => n > room,
            MaxTokens::Context => true,
        };
        let (context, origin) = match self.context {
            Some(asked) => (asked, "flag".into()),
            None => {
                let context = (prompt_tokens + answer).next_multiple_of(CONTEXT_STEP).min(longest);
                (context, format!("prompt and answer; the model's limit is {longest}"))
            }
        };
        self.settings.push(Setting { name: "ctx-size", value: context.into(), origin });
        self.prompt_has(prompt_tokens);
        Ok((context, answer))
    }

    /// Tokens of context for a conversation, which may come to any length.
    pub fn converse(&mut self, longest: usize) -> Result<usize, Failure> {
        let (context, origin) = match self.asked_context(longest)? {
            Some(asked) => (asked, "flag".to_owned()),
            None => (longest.min(DEFAULT_CONTEXT), format!("default; the model's limit is {longest}")),
        };
        self.context_limits = self.max_tokens == MaxTokens::Context;
        self.settings.push(Setting { name: "ctx-size", value: context.into(), origin });
        Ok(context)
    }

    /// The context asked for, which a model that allows `longest` tokens must be able to have.
    fn asked_context(&self, longest: usize) -> Result<Option<usize>, Failure> {
        match self.context {
            Some(asked) if asked > longest => {
                Err(Failure::usage(format!("a context of {asked} tokens is more than the model's {longest}"))
                    .hint(format!("ask for -c {longest} or less")))
            }
            asked => Ok(asked),
        }
    }

    /// No prompt has more than so many tokens.
    pub fn prompt_has(&mut self, tokens: usize) {
        self.prefill_rows = tokens.clamp(1, MAX_ROWS);
    }
}

fn decide_model(args: &RunArgs, machine: &Machine, settings: &mut Settings) -> Result<ModelChoice, Failure> {
    let (dir, origin) = match (&args.model, machine.variable("MILLSTREAM_MODEL")) {
        (Some(dir), _) => (dir.clone(), "flag"),
        (None, Some(dir)) => (PathBuf::from(dir), "MILLSTREAM_MODEL"),
        (None, None) => {
            let dir = super::bundled::find(machine)?;
            settings.add("model", dir.display().to_string(), "comes with the program");
            return Ok(ModelChoice::Bundled(dir));
        }
    };
    check_model_dir(&dir, "-m")?;
    settings.add("model", dir.display().to_string(), origin);
    Ok(ModelChoice::Dir(dir))
}

/// Refuses what cannot be the directory of a model. `flag` is what takes it.
pub fn check_model_dir(dir: &Path, flag: &str) -> Result<(), Failure> {
    check_dir("model", dir, &format!("{flag} takes the directory that holds config.json and the shards"))
}

/// Refuses what is no directory; `what` it should be, and what to do about it.
fn check_dir(what: &str, dir: &Path, hint: &str) -> Result<(), Failure> {
    match dir.metadata() {
        Ok(meta) if meta.is_dir() => Ok(()),
        Ok(_) => Err(Failure::usage(format!("the {what} {} is not a directory", dir.display())).hint(hint)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => {
            Err(Failure::usage(format!("the {what} {} does not exist", dir.display())).hint(hint))
        }
        Err(e) => {
            let hint = match e.kind() {
                std::io::ErrorKind::PermissionDenied => "this user may not enter a directory above it",
                _ => hint,
            };
            Err(Failure::usage(format!("the {what} {} cannot be looked at", dir.display())).cause(e).hint(hint))
        }
    }
}

fn decide_reading(args: &EngineArgs, machine: &Machine, settings: &mut Settings) -> Result<(Reading, Asked), Failure> {
    let io = settings.pick("io", args.io, machine, str::parse, (IoMode::Auto, "default"))?;
    let device = settings.pick("device", args.device, machine, str::parse, (DeviceKind::Auto, "default"))?;
    settle(io, device).map_err(|error| Failure { hint: error.hint(), ..Failure::usage(error.to_string()) })?;
    let reading =
        Reading { io, device, depth: args.depth.unwrap_or_default(), chunk: args.chunk.unwrap_or(Chunk::Auto) };
    let [.., (_, depth), (_, chunk)] = reading.texts();
    settings.add("depth", depth, flag_or_default(&args.depth));
    settings.add("chunk", chunk, flag_or_default(&args.chunk));
    let asked = Asked {
        io: args.io.is_some() || machine.variable("MILLSTREAM_IO").is_some(),
        device: args.device.is_some() || machine.variable("MILLSTREAM_DEVICE").is_some(),
        depth: args.depth.is_some(),
        chunk: args.chunk.is_some(),
    };
    Ok((reading, asked))
}

fn decide_mirrors(args: &EngineArgs, settings: &mut Settings) -> Result<Vec<PathBuf>, Failure> {
    for dir in &args.mirror {
        check_dir("mirror", dir, "--mirror takes a directory with copies of the model's shards")?;
    }
    if args.mirror.len() >= DRIVES_MAX {
        return Err(Failure::usage(format!("{} mirrors: at most {} are read", args.mirror.len(), DRIVES_MAX - 1)));
    }
    let shown: Vec<String> = args.mirror.iter().map(|dir| dir.display().to_string()).collect();
    settings.add("mirror", shown, if args.mirror.is_empty() { "default" } else { "flag" });
    Ok(args.mirror.clone())
}

/// What of the weights is quantized while it is loaded, or read.
fn decide_widths(args: &WidthArgs, settings: &mut Settings) -> Result<Widths, Failure> {
    let WidthArgs { expert_bits, dense_bits, io_bits, indexer_bits, group, kv_bits: _ } = args;
    let widths = [("expert-bits", expert_bits), ("dense-bits", dense_bits)];
    for (name, width) in widths.into_iter().chain([("io-bits", io_bits), ("indexer-bits", indexer_bits)]) {
        let shown = width.map_or_else(|| "as stored".to_owned(), |width| width.to_string());
        settings.add(name, shown, flag_or_default(width));
    }
    args.widths().check().map_err(|error| {
        Failure::usage(error.to_string()).hint("give a 4-bit width such as --dense-bits 4, or leave --group out")
    })?;
    let shown = group.map_or_else(|| "row".to_owned(), |group| group.to_string());
    settings.add("group", shown, flag_or_default(group));
    Ok(args.widths())
}

/// How numbers are computed.
fn decide_arithmetic(args: &EngineArgs, engine: &mut EngineConfig, settings: &mut Settings) {
    let kernels = args.kernels.unwrap_or(KernelChoice::Auto);
    settings.add("kernels", kernels.to_string(), flag_or_default(&args.kernels));
    engine.isa = match kernels {
        KernelChoice::Auto => None,
        KernelChoice::Isa(isa) => Some(isa),
    };
    engine.activations = args.activations.unwrap_or(Activations::Int8);
    settings.add("activations", args::ACTIVATIONS.name(engine.activations), flag_or_default(&args.activations));
    engine.attention = args.attention.unwrap_or(AttentionForm::Auto);
    settings.add("attention", args::ATTENTION.name(engine.attention), flag_or_default(&args.attention));
    engine.dsa = args.dsa.unwrap_or(Dsa::Auto);
    settings.add("dsa", args::DSA.name(engine.dsa), flag_or_default(&args.dsa));
}

/// When experts are read, which of them stay, and which are checked.
fn decide_experts(args: &EngineArgs, engine: &mut EngineConfig, settings: &mut Settings) {
    let switches = &mut engine.switches;
    switches.pipeline = args.pipeline.unwrap_or_default();
    settings.add("pipeline", args::SWITCH.name(switches.pipeline), flag_or_default(&args.pipeline));
    switches.prefetch = args.prefetch.unwrap_or_default();
    settings.add("prefetch", args::SWITCH.name(switches.prefetch), flag_or_default(&args.prefetch));
    engine.policy = args.policy.unwrap_or_default();
    settings.add("policy", engine.policy.name(), flag_or_default(&args.policy));
    engine.pins = args.pins.unwrap_or_default();
    settings.add("pins", args::SWITCH.name(engine.pins), flag_or_default(&args.pins));
    engine.verify = args.verify.unwrap_or_default();
    settings.add("verify", args::VERIFY.name(engine.verify), flag_or_default(&args.verify));
}

fn decide_sampling(args: &RunArgs, settings: &mut Settings) -> Result<Sampling, Failure> {
    let default = Sampling::default();
    let seed = match args.seed {
        Some(Seed::Fixed(seed)) => seed,
        Some(Seed::Random) | None => random_seed(),
    };
    let sampling = Sampling {
        temperature: args.temp.unwrap_or(default.temperature),
        top_k: args.top_k.unwrap_or(default.top_k),
        top_p: args.top_p.unwrap_or(default.top_p),
        min_p: args.min_p.unwrap_or(default.min_p),
        seed,
    };
    sampling.check().map_err(|bad| {
        let hint = if bad.name == "temperature" { "--temp 0 always takes the most likely token" } else { "1 is off" };
        let hint = if bad.name == "min-p" { "0 is off" } else { hint };
        Failure::usage(bad.to_string()).hint(hint)
    })?;
    settings.add("temp", shortest(sampling.temperature), flag_or_default(&args.temp));
    settings.add("top-k", sampling.top_k, flag_or_default(&args.top_k));
    settings.add("top-p", shortest(sampling.top_p), flag_or_default(&args.top_p));
    settings.add("min-p", shortest(sampling.min_p), flag_or_default(&args.min_p));
    settings.add("seed", seed, if matches!(args.seed, Some(Seed::Fixed(_))) { "flag" } else { "random" });
    Ok(sampling)
}

fn decide_drafts(args: &RunArgs, settings: &mut Settings) -> Result<DraftRule, Failure> {
    let has_grammar = args.grammar.is_given();
    settings.add("grammar", args.grammar.name(), if has_grammar { "flag" } else { "default" });
    if args.draft == Some(DraftSource::Grammar) && !has_grammar {
        return Err(
            Failure::usage("--draft grammar: there is no grammar").hint("add --grammar FILE or --json-schema FILE")
        );
    }
    let default = if has_grammar { DraftSource::Grammar } else { DraftSource::Off };
    let source = args.draft.unwrap_or(default);
    // What a grammar drafts is right, unless the answer is not held to it.
    let most = if source == DraftSource::Grammar { DRAFT_TOKENS_MAX } else { DraftRule::MOST };
    let rule = DraftRule { source, most: args.draft_max.unwrap_or(most) };
    settings.add("draft", args::DRAFT.name(rule.source), flag_or_default(&args.draft));
    settings.add("draft-max", rule.most, flag_or_default(&args.draft_max));
    Ok(rule)
}

/// 0.7 and not 0.699999988079071.
pub(super) fn shortest(x: f32) -> f64 {
    x.to_string().parse().unwrap_or(f64::from(x))
}

/// A seed that differs from run to run and is easy to type.
pub(super) fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) >> 32
}

fn stop_failure(error: StopError) -> Failure {
    Failure::usage(error.to_string()).hint("--stop takes the text the answer shall end before")
}

pub(super) fn flag_or_default<T>(flag: &Option<T>) -> &'static str {
    if flag.is_some() { "flag" } else { "default" }
}

pub(super) struct Settings(Vec<Setting>);

impl Settings {
    pub(super) fn add(&mut self, name: &'static str, value: impl Into<Json>, origin: impl Into<String>) {
        self.0.push(Setting { name, value: value.into(), origin: origin.into() });
    }

    /// Flag, else environment, else default.
    fn pick<T: Display, E: Display>(
        &mut self,
        name: &'static str,
        flag: Option<T>,
        machine: &Machine,
        parse: impl Fn(&str) -> Result<T, E>,
        (default, why): (T, &str),
    ) -> Result<T, Failure> {
        let variable = format!("MILLSTREAM_{}", name.to_ascii_uppercase());
        let (value, origin) = match (flag, machine.variable(&variable)) {
            (Some(value), _) => (value, "flag".to_owned()),
            (None, Some(text)) => {
                let text = text.to_string_lossy();
                let refuse = |e: E| Failure::usage(format!("the environment variable {variable} is {text:?}: {e}"));
                (parse(&text).map_err(refuse)?, variable.clone())
            }
            (None, None) => (default, why.to_owned()),
        };
        let shown = value.to_string();
        self.add(name, shown.parse::<u64>().map_or_else(|_| Json::from(shown), Json::from), origin);
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Depth;
    use clap::Parser;
    use std::collections::BTreeMap;
    use std::ffi::OsString;

    fn machine(environment: &[(&str, &str)]) -> Machine {
        let environment: BTreeMap<String, OsString> =
            environment.iter().map(|(name, value)| (name.to_string(), value.into())).collect();
        Machine::read(Path::new("/nonexistent"), 3, "/tmp".into(), environment)
    }

    fn decided(typed: &[&str], environment: &[(&str, &str)]) -> Result<RunConfig, Failure> {
        let arguments = ["millstream", "run", "-m", "/"].iter().chain(typed);
        let args::Command::Run(run) = args::Args::try_parse_from(arguments).unwrap().command else { panic!() };
        decide(&run, &machine(environment))
    }

    fn origin<'a>(config: &'a RunConfig, name: &str) -> (String, &'a str) {
        let setting = config.settings.iter().find(|s| s.name == name).unwrap();
        (setting.value.as_str().map_or(setting.value.to_string(), str::to_owned), &setting.origin)
    }

    #[test]
    fn a_flag_wins_over_the_environment_and_that_over_the_default() {
        let environment = [("MILLSTREAM_THREADS", "7"), ("MILLSTREAM_RAM", "1G"), ("MILLSTREAM_IO", "")];
        let config = decided(&["-t", "5"], &environment).unwrap();
        assert_eq!(origin(&config, "threads"), ("5".into(), "flag"));
        assert_eq!(origin(&config, "ram"), ("1073741824".into(), "MILLSTREAM_RAM"));
        assert_eq!(origin(&config, "io"), ("auto".into(), "default"));
        assert_eq!(origin(&config, "temp"), ("0.7".into(), "default"));
        let engine = config.engine(10);
        assert_eq!((engine.threads, engine.memory, engine.context), (5, Memory::Total(Some(1 << 30)), Some(10)));
        let config = decided(&[], &[]).unwrap();
        assert_eq!(origin(&config, "threads"), ("3".into(), "cores this process may use"));
        assert_eq!((config.sampling.top_p, config.sampling.top_k), (0.90, 0));
        assert_eq!(config.max_tokens, MaxTokens::AtMost(512));
    }

    #[test]
    fn how_files_are_read_reaches_the_engine() {
        let typed = ["--io", "drop", "--device", "uring", "--depth", "6", "--chunk", "512K"];
        let engine = decided(&typed, &[]).unwrap().engine(64);
        assert_eq!((engine.io, engine.device), (IoMode::Drop, DeviceKind::Uring));
        assert_eq!((engine.depth, engine.chunk_bytes), (Depth::Slabs(6), Some(512 << 10)));
        assert_eq!(engine.depth.bytes(19 << 20), 6 * (19 << 20));
        let config = decided(&["--io", "mmap", "--depth", "64M", "--chunk", "whole"], &[]).unwrap();
        assert_eq!(origin(&config, "depth"), ("67108864B".to_string(), "flag"));
        assert_eq!(origin(&config, "chunk"), ("whole".to_string(), "flag"));
        let failure = decided(&["--device", "mmap"], &[("MILLSTREAM_IO", "direct")]).unwrap_err();
        assert_eq!(failure.code, 2);
        assert!(failure.error.contains("exclude each other") && failure.hint.is_some(), "{}", failure.error);
    }

    #[test]
    fn bad_values_are_usage_errors_that_name_them() {
        for (typed, environment, words) in [
            (&["--temp", "-1"][..], None, "temperature is -1"),
            (&["--temp", "nan"], None, "temperature is NaN"),
            (&["--top-p", "0"], None, "top-p is 0"),
            (&["--min-p", "2"], None, "min-p is 2"),
            (&["-n", "0"], None, "-n 0"),
            (&["--stop", ""], None, "stop string is empty"),
            (&["--stats-json", "-"], None, "--stats-json takes a file"),
            (&["-m", "/etc/passwd/x"], None, "/etc/passwd/x cannot be looked at"),
            (&[], Some(("MILLSTREAM_THREADS", "many")), "MILLSTREAM_THREADS is \"many\""),
            (&[], Some(("MILLSTREAM_THREAD", "1")), "MILLSTREAM_THREAD is not a setting"),
            (&["-m", "/no/such/dir"], None, "/no/such/dir does not exist"),
            (&["-m", "/etc/passwd"], None, "/etc/passwd is not a directory"),
        ] {
            let typed: Vec<&str> = typed.to_vec();
            let arguments: Vec<&str> = if typed.first() == Some(&"-m") {
                [&["millstream", "run"], &typed[..]].concat()
            } else {
                [&["millstream", "run", "-m", "/"], &typed[..]].concat()
            };
            let args::Command::Run(run) = args::Args::try_parse_from(arguments).unwrap().command else { panic!() };
            let failure = decide(&run, &machine(environment.as_slice())).unwrap_err();
            assert_eq!(failure.code, 2);
            assert!(failure.error.contains(words), "{failure:?}");
        }
    }

    #[test]
    fn memory_that_cannot_be_told_must_be_given() {
        let nothing = machine(&[]);
        let failure = decided(&[], &[]).unwrap().check_memory(&nothing).unwrap_err();
        assert_eq!(failure.code, 2);
        assert!(failure.error.contains("cannot tell how much memory") && failure.hint.unwrap().contains("--ram"));
        decided(&["--ram", "1G"], &[]).unwrap().check_memory(&nothing).unwrap();
    }

    #[test]
    fn buffers_have_the_rows_of_the_prompt_however_long_the_answer_may_be() {
        let rows = |prompt, answer| {
            let mut config = decided(&["-n", answer], &[]).unwrap();
            let (context, _) = config.fit(prompt, 4096).unwrap();
            config.engine(context).prefill_rows
        };
        assert_eq!((rows(3, "8"), rows(3, "2000"), rows(511, "-1")), (3, 3, 511));
        assert_eq!((rows(2048, "1"), rows(3000, "1")), (2048, 2048), "no more than a step takes");
        assert_eq!(decided(&[], &[]).unwrap().engine(4096).prefill_rows, 512, "of a prompt that nobody knows");
    }

    #[test]
    fn prompt_and_answer_are_fitted_and_never_cut() {
        let mut config = decided(&["-n", "100"], &[]).unwrap();
        assert_eq!(config.fit(30, 4096).unwrap(), (192, 100));
        assert_eq!(config.fit(4000, 4096).unwrap(), (4096, 96));
        assert!(config.context_limits);
        config.fit(3996, 4096).unwrap();
        assert!(!config.context_limits, "the last token of the context is the last one asked for");
        assert!(config.could_fit(4095, 4096).is_ok());
        assert!(config.could_fit(4096, 4096).unwrap_err().error.contains("at least 4096 tokens"));
        let failure = config.fit(4096, 4096).unwrap_err();
        assert!(failure.error.contains("4096 tokens") && failure.code == 2, "{failure:?}");

        let mut config = decided(&["-n", "-1", "-c", "50"], &[]).unwrap();
        assert_eq!(config.fit(30, 4096).unwrap(), (50, 20));
        assert!(config.fit(50, 4096).unwrap_err().error.contains("has 50"));
        let failure = config.fit(5, 40).unwrap_err();
        assert!(failure.error.contains("50 tokens is more than the model's 40"), "{failure:?}");
    }
}

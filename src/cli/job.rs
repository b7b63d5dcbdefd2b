//! From flags to a generation that can begin: settings, model, prompt, context, and how failures on the way are told.

use std::path::PathBuf;
use std::sync::Arc;

use crate::checkpoint::{Arch, Checkpoint};
use crate::engine::stop::StopMatcher;
use crate::engine::{EngineError, Job};
use crate::model::load::LoadError;
use crate::model::tokenizer::{Tokenizer, TokenizerError};

use super::args::{EngineArgs, ModelArgs, RunArgs, WidthArgs};
use super::config::{self, ModelChoice, RunConfig};
use super::machine::Machine;
use super::usage::Usage;
use super::{Failure, bundled, grammar, kvfile, output, prompt, render, tuning};

/// A generation of which everything is decided and nothing is loaded.
pub struct Prepared {
    /// What was decided.
    pub config: RunConfig,
    /// How often each expert was chosen before; to be brought up to date after the run.
    pub usage: Usage,
    /// The model.
    pub checkpoint: Checkpoint,
    /// Its files.
    pub files: Files,
    /// Its tokenizer; with token ids in and out it may be missing.
    pub tokenizer: Option<Arc<Tokenizer>>,
    /// What to generate.
    pub job: Job,
    /// What the answer may be, where there is a grammar.
    pub grammar: Option<grammar::Followed>,
    /// Texts that end the answer.
    pub stops: StopMatcher,
    /// Positions that prompt and answer need.
    pub context: usize,
}

/// What a generation with these flags reads, as far as the user named it. What comes with the program is in no danger: it
/// is copied from or made anew.
pub fn inputs(args: &RunArgs, machine: &Machine) -> Vec<PathBuf> {
    let grammar = args.grammar.file().map(PathBuf::from);
    let files = args.file.iter().chain(&args.kv).cloned().chain(grammar);
    model_dir(args, machine).into_iter().chain(args.engine.mirror.iter().cloned()).chain(files).collect()
}

/// The directory of the model, where the user named it.
pub fn model_dir(args: &RunArgs, machine: &Machine) -> Option<PathBuf> {
    args.model.clone().or_else(|| machine.variable("MILLSTREAM_MODEL").map(PathBuf::from))
}

/// Prepares the generation that `args` ask for; none when the model's conversion was interrupted.
pub fn prepare(args: &RunArgs, machine: &Machine) -> Result<Option<Prepared>, Failure> {
    let mut config = config::decide(args, machine)?;
    config.check_memory(machine)?;
    let text = prompt::read_prompt(args)?;
    let grammar = grammar::read(args)?;
    let typed_ids = if args.ids { Some(prompt::parse_ids(&text)?) } else { None };
    let inputs = inputs(args, machine);
    if let Some(path) = &args.timeline {
        output::check(path, "timeline", &inputs)?;
    }
    if let Some(path) = &args.stats_json {
        output::check(path, "statistics", &inputs)?;
    }
    if let Some(path) = &args.kv {
        kvfile::check(path, &config.usage)?;
    }
    let Some(checkpoint) = open_checkpoint(args, &mut config, machine)? else { return Ok(None) };
    let dir = checkpoint.dir.clone();
    let files = Files::new(dir.clone(), config.model.clone());
    let longest = checkpoint.arch.max_context;
    let tokenizer = prompt::open_tokenizer(&dir, &checkpoint.arch, args.ids)
        .map_err(|failure| files.blamed(failure))?
        .map(Arc::new);
    let prompt = match (typed_ids, &tokenizer) {
        (Some(ids), _) => prompt::check_ids(ids, &checkpoint.arch)?,
        (None, Some(tokenizer)) => {
            config.could_fit(tokenizer.least_tokens(text.trim().len()), longest)?;
            prompt::encode(args, &dir, tokenizer, &text).map_err(|failure| files.blamed(failure))?
        }
        (None, None) => return Err(prompt::tokenizer_failure(&TokenizerError::Missing { dir })),
    };
    let (stop_ids, stops) = split_stops(&config, tokenizer.as_deref(), ends_turn(args, &checkpoint.arch))?;
    if let Some(tokenizer) = tokenizer.as_deref().filter(|_| grammar.is_some())
        && let Some(failure) = prompt::beyond_vocabulary(&dir, tokenizer, &checkpoint.arch)
    {
        return Err(files.blamed(failure));
    }
    let compile = |source| grammar::compile(&source, tokenizer.as_ref(), &stop_ids, args.draft);
    let grammar = grammar.map(compile).transpose()?;
    if grammar.is_some() {
        config.count_grammar();
    }
    config.shape.find_tokens(tokenizer.as_deref(), checkpoint.arch.vocab)?;
    let (context, max_tokens) = config.fit(prompt.len(), longest)?;
    let (usage, warning) = Usage::open(&config.usage, &checkpoint, machine);
    warning.iter().for_each(|line| render::note(args.quiet, line));
    config.history = usage.before().to_vec();
    let job = Job { prompt, max_tokens, sampling: config.sampling, stop_ids };
    Ok(Some(Prepared { config, usage, checkpoint, files, tokenizer, job, grammar, stops, context }))
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
    if let Some(checkpoint) = &checkpoint {
        config.count_tokenizer(&checkpoint.dir);
    }
    if let Some(checkpoint) = &checkpoint
        && config.tuning
        && let Some(line) = config.tune(tuning::find(machine, checkpoint))
    {
        render::note(args.quiet, &line);
    }
    Ok(checkpoint)
}

/// Opens the model of a command that only looks at it, with the settings that `run` would have with these widths; none
/// when its conversion was interrupted.
pub fn open_model(
    args: &ModelArgs,
    widths: WidthArgs,
    machine: &Machine,
) -> Result<Option<(Checkpoint, RunConfig)>, Failure> {
    let run = args.run();
    let run = RunArgs { quiet: true, engine: EngineArgs { widths, ..run.engine }, ..run };
    let mut config = config::decide(&run, machine)?;
    Ok(open_checkpoint(&run, &mut config, machine)?.map(|checkpoint| (checkpoint, config)))
}

/// The files of the model that runs.
pub struct Files {
    /// The directory.
    pub dir: PathBuf,
    /// What was chosen: of the model that comes with the program they are a copy, which can be made anew.
    model: ModelChoice,
}

impl Files {
    /// Those of the model in `dir`, which was chosen like that.
    pub fn new(dir: PathBuf, model: ModelChoice) -> Files {
        Files { dir, model }
    }

    /// A failure for which the files are to blame.
    pub fn blamed(&self, failure: Failure) -> Failure {
        match self.model {
            ModelChoice::Bundled(_) if failure.code == 1 => {
                failure.hint(format!("delete the directory {}: the next run makes it anew", self.dir.display()))
            }
            _ => failure,
        }
    }

    /// A failure of the engine, for which they may be to blame.
    pub fn failure(&self, error: EngineError) -> Failure {
        let blames_files = error.blames_files();
        let failure = engine_failure_of(error, &self.model);
        if blames_files { self.blamed(failure) } else { failure }
    }
}

/// As [`engine_failure`], of a command that cannot be told what to quantize: no hint says so.
pub fn engine_failure_as_stored(mut error: EngineError) -> Failure {
    if let EngineError::TooSmall(too_small) = &mut error {
        too_small.narrower = None;
    }
    engine_failure(error)
}

/// As [`engine_failure`]: who chose no model and asks for wider weights than its copy has learns where the original is.
pub fn engine_failure_of(error: EngineError, model: &ModelChoice) -> Failure {
    let is_narrower = matches!(error, EngineError::Resident(LoadError::Requantized { .. }));
    let failure = engine_failure(error);
    match model {
        ModelChoice::Bundled(source) if is_narrower => failure.hint(format!(
            "the model that comes with the program is used as a container of int4 and int8; its original weights take any \
             width: -m {}",
            source.display()
        )),
        _ => failure,
    }
}

/// A failure of the engine: of what was asked for, where that is at fault.
pub fn engine_failure(error: EngineError) -> Failure {
    use EngineError::{
        Context, EmptyPrompt, NoIndexer, NoIsa, OneForm, PromptTooLong, Resident, Sampling, TokenOutOfRange,
    };
    let mut failure = Failure::of(&error);
    if matches!(&error, EngineError::Mirror(e) if e.is_choice())
        || matches!(
            error,
            NoIsa(_)
                | NoIndexer
                | OneForm
                | Resident(LoadError::Requantized { .. })
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
pub fn ends_turn(args: &RunArgs, arch: &Arch) -> Vec<u32> {
    if args.ignore_eos { Vec::new() } else { arch.stop_ids.clone() }
}

/// Stop strings that name a control token stop at that token, which has no text; the others watch the text.
pub fn split_stops(
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

//! The grammar of an answer: where it is read from, and what is told of how it was followed.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use serde_json::Value;

use crate::engine::stats::GrammarStats;
use crate::engine::{DraftSource, Finish, Shaping};
use crate::grammar::{Grammar, Grammars, Source, gbnf};
use crate::limits::MAX_GRAMMAR_BYTES;
use crate::model::tokenizer::Tokenizer;

use super::Failure;
use super::args::RunArgs;

/// Flags of `run` for this.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct GrammarArgs {
    /// Answer in JSON that this JSON schema describes, in a file; - is standard input. What of JSON schema is not supported is
    /// refused by name
    #[arg(long, alias = "json-schema-file", value_name = "FILE", conflicts_with_all = ["json_schema_text", "grammar"])]
    pub json_schema: Option<PathBuf>,
    /// The same, with the schema itself instead of a file
    #[arg(short = 'j', long = "json-schema-text", value_name = "TEXT", conflicts_with = "grammar")]
    pub json_schema_text: Option<String>,
    /// Answer in what this grammar describes, in Lark (as llguidance has it) or GBNF (as llama.cpp has it); - is standard input
    #[arg(long, alias = "grammar-file", value_name = "FILE")]
    pub grammar: Option<PathBuf>,
}

impl GrammarArgs {
    /// Whether any is given.
    pub fn is_given(&self) -> bool {
        self.json_schema.is_some() || self.json_schema_text.is_some() || self.grammar.is_some()
    }

    /// The file, where it is one.
    pub fn file(&self) -> Option<&Path> {
        self.json_schema.as_deref().or(self.grammar.as_deref()).filter(|path| *path != Path::new("-"))
    }

    /// As it is told among the settings.
    pub fn name(&self) -> String {
        match (&self.json_schema, &self.json_schema_text, &self.grammar) {
            (Some(path), ..) => format!("JSON schema {}", path.display()),
            (_, Some(_), _) => "JSON schema".to_owned(),
            (.., Some(path)) => path.display().to_string(),
            (None, None, None) => "off".to_owned(),
        }
    }
}

/// Reads the grammar that `args` name.
pub fn read(args: &RunArgs) -> Result<Option<Source>, Failure> {
    let GrammarArgs { json_schema, json_schema_text, grammar } = &args.grammar;
    if let Some(text) = json_schema_text {
        return Ok(Some(Source::JsonSchema(schema(text, "-j")?)));
    }
    let Some(path) = json_schema.as_ref().or(grammar.as_ref()) else { return Ok(None) };
    let prompt_is_piped = args.prompt.is_none() && args.file.as_ref().is_none_or(|file| file == Path::new("-"));
    if path == Path::new("-") && prompt_is_piped {
        return Err(Failure::usage("prompt and grammar cannot both be read from standard input")
            .hint("give the prompt with -p TEXT or -f FILE"));
    }
    let (text, name) = read_text(path)?;
    Ok(Some(match json_schema {
        Some(_) => Source::JsonSchema(schema(&text, &name)?),
        None if gbnf::is_gbnf(&text) => Source::Gbnf(text),
        None => Source::Lark(text),
    }))
}

fn read_text(path: &Path) -> Result<(String, String), Failure> {
    let is_piped = path == Path::new("-");
    let name = if is_piped { "standard input".to_owned() } else { path.display().to_string() };
    let cannot = |cause: String| Failure::usage(format!("cannot read the grammar from {name}")).cause(cause);
    let mut source: Box<dyn Read> = match is_piped {
        true => Box::new(std::io::stdin()),
        false => Box::new(std::fs::File::open(path).map_err(|error| cannot(error.to_string()))?),
    };
    let mut bytes = Vec::new();
    source.by_ref().take(MAX_GRAMMAR_BYTES + 1).read_to_end(&mut bytes).map_err(|error| cannot(error.to_string()))?;
    if bytes.len() as u64 > MAX_GRAMMAR_BYTES {
        return Err(cannot(format!("it is longer than {MAX_GRAMMAR_BYTES} bytes")));
    }
    let text = String::from_utf8(bytes).map_err(|error| cannot(format!("it is not UTF-8: {error}")))?;
    Ok((text, name))
}

fn schema(text: &str, name: &str) -> Result<Value, Failure> {
    serde_json::from_str(text)
        .map_err(|error| Failure::usage(format!("the JSON schema of {name} is not JSON")).cause(error))
}

/// A grammar at work.
pub struct Followed {
    grammar: Grammar,
    /// Whether it only drafts.
    guides: bool,
    compile_s: f64,
}

/// Compiles what was read, for a model with this tokenizer; an answer ends with `stop_ids`.
pub fn compile(
    source: &Source,
    tokenizer: Option<&Arc<Tokenizer>>,
    stop_ids: &[u32],
    draft: Option<DraftSource>,
) -> Result<Followed, Failure> {
    let Some(tokenizer) = tokenizer else {
        return Err(Failure::usage("a grammar needs the model's tokenizer.json, which is not there"));
    };
    let began = Instant::now();
    let grammar = Grammars::new(Arc::clone(tokenizer), stop_ids)
        .and_then(|grammars| grammars.compile(source))
        .map_err(|error| match source {
            Source::JsonSchema(_) => Failure::usage("the JSON schema cannot be followed").cause(error),
            Source::Lark(_) | Source::Gbnf(_) => Failure::usage("the grammar cannot be followed").cause(error),
        })?;
    let guides = draft == Some(DraftSource::Grammar);
    Ok(Followed { grammar, guides, compile_s: began.elapsed().as_secs_f64() })
}

impl Followed {
    /// Gives `shaping` what the grammar has to say.
    pub fn shape<'a>(&'a mut self, shaping: &mut Shaping<'a>) {
        match self.guides {
            true => shaping.guide = Some(&mut self.grammar),
            false => shaping.constraint = Some(&mut self.grammar),
        }
    }

    /// What following came to.
    pub fn stats(&mut self) -> GrammarStats {
        let spent = self.grammar.spent();
        GrammarStats {
            constrains: !self.guides,
            complete: self.grammar.is_whole(),
            tokens: spent.tokens,
            forced: spent.forced,
            masks: spent.masks,
            compile_s: self.compile_s,
            mask_s: spent.in_masks.as_secs_f64(),
            mask_max_us: spent.longest.as_secs_f64() * 1e6,
        }
    }
}

/// What is to be said of an answer that ended otherwise than its grammar.
pub fn incomplete(stats: &GrammarStats, finish: Finish) -> Option<String> {
    let why = match finish {
        Finish::Length => "its length ended it; -n allows more",
        Finish::Interrupted => "it was interrupted",
        Finish::StopString => "a stop string ended it",
        Finish::Stop => "the model ended it",
    };
    (stats.constrains && !stats.complete).then(|| format!("the answer is not whole by its grammar: {why}"))
}

//! `eval perplexity`: how likely a text is to a model, window by window, by the rules of llama-perplexity; and how far its
//! logits are from those that another run kept.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::kept::{Keeper, Kept};
use super::windows::{Unfit, Windows};
use super::{Common, Examiner, NO_DISTRIBUTION_HINT, Subject, ids, show};
use crate::cli::args;
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure, job, output, prompt, render};
use crate::engine::quality::{Likelihood, Quality, Window, surprise};
use crate::limits::MAX_CONTEXT;

/// Tokens of a window when none are asked for.
const WINDOW_DEFAULT: usize = 512;

/// Flags of `eval perplexity`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream eval perplexity -f wiki.test.raw -c 512 --chunks 20
  millstream eval perplexity -m glm-5.2-int4 -f wiki.test.raw --kl-base full.safetensors

Windows are those of llama-perplexity: one behind the other, the second half of each is scored; with --stride S they are \
S/2 tokens longer, overlap, and the last S tokens are scored. Nothing is added to the text, and control tokens it spells count \
as such. The figure behind each number in brackets is the perplexity of all windows so far.
--save-logits keeps the logits of what is scored as safetensors (a window of 512 takes 255 times the vocabulary times 4 bytes); \
--kl-base compares with such a file, position by position.")]
pub struct PerplexityArgs {
    /// Score the text of this file; - is standard input
    #[arg(short, long, value_name = "FILE", required_unless_present = "ids_file")]
    file: Option<PathBuf>,
    /// Score the token ids of this file: a list with commas or blanks, or an array of numpy.save. A row of an array of two
    /// dimensions is a window
    #[arg(long, value_name = "FILE", conflicts_with = "file")]
    ids_file: Option<PathBuf>,
    /// Tokens of a window; each begins with an empty context [default: 512, or a row of --ids-file]
    #[arg(short, long, visible_alias = "context", value_name = "N", value_parser = args::parse_context)]
    ctx_size: Option<usize>,
    /// Most windows that are scored [default: all]
    #[arg(long, value_name = "N", value_parser = |text: &str| args::in_range(text, 1, MAX_CONTEXT))]
    chunks: Option<usize>,
    /// Tokens from the beginning of a window to that of the next [default: as many as a window has]
    #[arg(long, value_name = "S", value_parser = args::parse_context)]
    stride: Option<usize>,
    /// Tokens of a window that are read only; 0 scores all but the first [default: half of them]
    #[arg(long, value_name = "N", value_parser = |text: &str| args::in_range(text, 0, MAX_CONTEXT), conflicts_with = "stride")]
    skip: Option<usize>,
    /// Keep the logits in this file
    #[arg(long, value_name = "FILE")]
    save_logits: Option<PathBuf>,
    /// Compare with the logits of this file
    #[arg(long, value_name = "FILE")]
    kl_base: Option<PathBuf>,
    #[command(flatten)]
    common: Common,
}

/// What the windows that were scored came to.
#[derive(Default)]
pub struct Scored {
    pub likelihood: Likelihood,
    /// Nats of each window.
    pub nll: Vec<f64>,
    /// How far each is from the logits that were kept.
    pub compared: Vec<Window>,
    pub interrupted: bool,
}

impl Scored {
    pub fn quality(&self) -> Option<Quality> {
        Quality::of(&self.compared)
    }
}

/// Scores and reports.
pub fn perplexity(args: &PerplexityArgs, machine: &Machine) -> Result<Done, Failure> {
    if let Some(path) = &args.save_logits {
        check_output(args, path, machine)?;
    }
    // Before a model is opened: standard input is read once.
    let text = args.file.as_deref().map(prompt::read_text).transpose()?;
    let Some(subject) = Subject::open(&args.common, machine)? else { return Ok(Done::Interrupted) };
    let windows = windows(args, &subject, text.as_deref())?;
    subject.check_length(windows.length, "windows")?;
    let vocab = subject.checkpoint.arch.vocab;
    let base = args.kl_base.as_ref().map(|path| Base::open(path, &windows, vocab)).transpose()?;
    let keeper = args.save_logits.as_ref().map(|path| Keeper::create(path, &windows, vocab)).transpose()?;
    let dir = subject.files.dir.clone();
    let Some(mut examiner) = subject.load(windows.length)? else { return Ok(Done::Interrupted) };
    let mut teller = Teller { json: args.common.json, closed: None };
    let (scored, keeper) = score(&mut examiner, &windows, base, keeper, &mut teller)?;
    let kept_bytes = keeper.map(|keeper| keeper.finish(&windows)).transpose()?;
    let (cost, settings) = examiner.leave();
    if let Some(done) = teller.closed {
        return Ok(done);
    }
    let text = if args.common.json {
        let of = json!({
            "model": dir.display().to_string(),
            "text": args.file.as_ref().map(|path| path.display().to_string()),
            "ids_file": args.ids_file.as_ref().map(|path| path.display().to_string()),
            "stride": args.stride,
            "kl_base": args.kl_base.as_ref().map(|path| path.display().to_string()),
            "saved_bytes": kept_bytes,
            "settings": show::settings(&settings),
            "cost": cost.json(),
        });
        format!("{:#}\n", report(of, &windows, &scored))
    } else {
        teller.end(&windows, &scored)
    };
    let closed = output::print(&text)?;
    Ok(match closed {
        Some(done) => done,
        None if scored.interrupted => Done::Interrupted,
        None => Done::Whole,
    })
}

/// The logits must not go over what is read.
fn check_output(args: &PerplexityArgs, path: &Path, machine: &Machine) -> Result<(), Failure> {
    let named = job::inputs(&args.common.run(), machine).into_iter();
    let inputs: Vec<PathBuf> =
        named.chain([&args.file, &args.ids_file, &args.kl_base].into_iter().flatten().cloned()).collect();
    output::check(path, "logits", &inputs)?;
    match std::fs::metadata(path) {
        Ok(there) if !there.is_file() => {
            Err(Failure::usage(format!("cannot write the logits to {}", path.display())).cause("it is no regular file"))
        }
        _ => Ok(()),
    }
}

fn windows(args: &PerplexityArgs, subject: &Subject, text: Option<&str>) -> Result<Windows, Failure> {
    let (ids, row) = match (&args.ids_file, text) {
        (Some(path), _) => {
            let ids::Ids { ids, row } = ids::read(path, subject.checkpoint.arch.vocab)?;
            (ids, row)
        }
        (None, text) => {
            let text = text.unwrap_or_default();
            // As there: files end in a newline that nobody means.
            let encoded = subject.tokenizer()?.encode_raw(text.strip_suffix('\n').unwrap_or(text));
            (encoded.map_err(|e| prompt::tokenizer_failure(&e))?, None)
        }
    };
    if let Some(row) = row
        && (args.ctx_size.is_some_and(|asked| asked != row) || args.stride.is_some())
    {
        return Err(Failure::usage(format!("a row of the ids has {row} tokens, and is a window"))
            .hint("leave out -c and --stride, or give the ids without rows"));
    }
    let length = args.ctx_size.or(row).unwrap_or(WINDOW_DEFAULT);
    let windows = match args.stride {
        Some(stride) => Windows::strided(ids, length, stride),
        None => Windows::plain(ids, length, args.skip),
    };
    let windows = windows.map_err(|unfit| {
        let failure = Failure::usage(unfit.to_string());
        match unfit {
            Unfit::Short { .. } => failure.hint("score it in shorter windows, with -c, or give a longer text"),
            Unfit::NothingScored { .. } => failure.hint("ask for longer windows with -c, or read less with --skip"),
            Unfit::Stride { .. } => failure.hint("ask for a shorter --stride, or longer windows with -c"),
        }
    })?;
    Ok(windows.take(args.chunks))
}

/// Logits that another run kept, of the same windows.
struct Base {
    path: PathBuf,
    kept: Kept,
    /// The position of a window that its first logits are of.
    first: usize,
}

impl Base {
    fn open(path: &Path, windows: &Windows, vocab: usize) -> Result<Base, Failure> {
        let kept = Kept::open(path, vocab)?;
        let [count, positions, _] = kept.shape;
        let other = |cause: String| {
            Err(Failure::usage(format!("the logits of {} are not of these windows", path.display()))
                .cause(cause)
                .hint("give the same text, -c, --stride and --skip as they were kept with"))
        };
        let Some((ids, length)) = &kept.ids else {
            return other("the file says of no ids that they are theirs".to_owned());
        };
        if *length != windows.length {
            return other(format!("its windows have {length} tokens, and these {}", windows.length));
        }
        let first = kept.first.unwrap_or(length.saturating_sub(positions));
        if first > windows.first || first + positions + 1 < windows.length {
            let last = first + positions;
            return other(format!(
                "it has those of positions {first} to {last}, and those from {} on are scored",
                windows.first
            ));
        }
        if count < windows.count {
            let hint = format!("score as many with --chunks {count}");
            return Err(Failure::usage(format!("{} has logits of {count} windows", path.display()))
                .cause(format!("{} are to be scored", windows.count))
                .hint(hint));
        }
        match (0..windows.count).find(|&number| ids[number * length..][..*length] != *windows.at(number)) {
            Some(number) => other(format!("window {} has other tokens", number + 1)),
            None => Ok(Base { path: path.to_owned(), kept, first }),
        }
    }
}

/// Shows each window as it is scored.
struct Teller {
    json: bool,
    /// Nobody reads it any more.
    closed: Option<Done>,
}

impl Teller {
    fn window(&mut self, number: usize, scored: &Scored) -> Result<(), Failure> {
        if !self.json {
            self.closed = output::print(&format!("[{}]{:.4},", number + 1, scored.likelihood.perplexity()))?;
        }
        Ok(())
    }

    /// What follows the windows.
    fn end(&self, windows: &Windows, scored: &Scored) -> String {
        let done = scored.nll.len();
        let mut text = String::from(if done > 0 { "\n" } else { "" });
        if scored.interrupted {
            text += &format!("interrupted after {done} of {} windows\n", windows.count);
        }
        if done > 0 {
            let of = &scored.likelihood;
            text += &format!(
                "Final estimate: PPL = {:.4} +/- {:.5}\n",
                of.perplexity(),
                of.perplexity_error().unwrap_or(0.0)
            );
        }
        if let Some(quality) = scored.quality() {
            text += &show::compared(&quality, &scored.compared);
        }
        text
    }
}

/// Puts every window through the model.
fn score(
    examiner: &mut Examiner,
    windows: &Windows,
    mut base: Option<Base>,
    mut keeper: Option<Keeper>,
    teller: &mut Teller,
) -> Result<(Scored, Option<Keeper>), Failure> {
    let waiting = render::Waiting::begin("scoring the first window", examiner.quiet || !teller.json);
    let mut scored = Scored::default();
    for number in 0..windows.count {
        let ids = windows.at(number);
        // What a window that is interrupted came to counts nowhere.
        let (mut likelihood, mut window) = (scored.likelihood, Window::default());
        let mut row = |position: usize, logits: &[f32]| {
            let Some(&next) = ids.get(position + 1).filter(|_| position >= windows.first) else { return Ok(()) };
            let nll = surprise(logits, next).ok_or_else(|| not_finite("the model", number, position))?;
            likelihood.add(nll);
            if let Some(base) = &mut base {
                let other = base.kept.row(number, position - base.first)?;
                let name = || format!("{}", base.path.display());
                window.add(other, logits, Some(next)).map_err(|_| not_finite(&name(), number, position))?;
            }
            keeper.as_mut().map_or(Ok(()), |keeper| keeper.row(logits))
        };
        if !examiner.score(0, ids, &mut row)? {
            scored.interrupted = true;
            break;
        }
        scored.nll.push(likelihood.nll - scored.likelihood.nll);
        scored.likelihood = likelihood;
        scored.compared.extend(base.is_some().then_some(window));
        keeper.iter_mut().for_each(Keeper::end_window);
        waiting.say(format!("{} of {} windows are scored", number + 1, windows.count));
        teller.window(number, &scored)?;
        if teller.closed.is_some() {
            break;
        }
    }
    Ok((scored, keeper))
}

fn not_finite(whose: &str, window: usize, position: usize) -> Failure {
    Failure::work(format!("the logits of {whose} are not finite at position {position} of window {}", window + 1))
        .hint(NO_DISTRIBUTION_HINT)
}

/// The object of `--json`: what is known of the run, and what it came to.
fn report(of: Value, windows: &Windows, scored: &Scored) -> Value {
    let likelihood = &scored.likelihood;
    let is_any = likelihood.tokens > 0;
    let mut object = json!({
        "schema_version": 1,
        "eval": "perplexity",
        "tokens": likelihood.tokens,
        "nll_per_token": is_any.then(|| likelihood.mean()),
        "nll_error": likelihood.error(),
        "perplexity": is_any.then(|| likelihood.perplexity()),
        "perplexity_error": likelihood.perplexity_error(),
        "windows": scored.nll.len(),
        "windows_asked": windows.count,
        "window_tokens": windows.length,
        "first_position": windows.first,
        "nll_per_window": scored.nll,
        "interrupted": scored.interrupted,
        "compared": scored.quality().map(|quality| show::compared_json(&quality, &scored.compared)),
    });
    if let (Value::Object(object), Value::Object(of)) = (&mut object, of) {
        object.extend(of);
    }
    object
}

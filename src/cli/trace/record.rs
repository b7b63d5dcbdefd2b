//! `trace record`: a generation, or the model led along a text, and what its router chose.

use std::path::PathBuf;
use std::sync::atomic::Ordering;

use crate::engine::{DraftSource, Finish};
use crate::model::tokenizer::TokenizerError;
use crate::store::trace::{Recorder, Trace};

use crate::cli::args::RunArgs;
use crate::cli::machine::Machine;
use crate::cli::{Done, Failure, config, interrupt, job, numa, output, prompt, render, run, size};

/// Tokens of a sequence when a text is recorded and no context is asked for.
const TEXT_CONTEXT: usize = 1024;

/// Flags of `trace record`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream trace record fox.trace -p \"Tell me a story about a fox.\" -n 300
  millstream trace record tales.trace --text -f heldout.txt

Every flag of `run` is one of this command, and means the same. What was recorded when it is interrupted is written.")]
pub struct RecordArgs {
    /// Where the trace goes
    #[arg(value_name = "OUT")]
    out: PathBuf,
    /// Record what the router chooses for the prompt's own tokens, as if each had been generated, and generate nothing. A
    /// text longer than the context (-c, 1024 when not given) is cut into sequences
    #[arg(long, conflicts_with_all = ["system", "max_tokens", "stop", "json", "stats_json", "timeline", "kv"])]
    text: bool,
    #[command(flatten)]
    run: RunArgs,
}

/// Records.
pub fn record(args: &RecordArgs, machine: &Machine) -> Result<Done, Failure> {
    if args.run.draft.is_some_and(|source| source != DraftSource::Off) {
        return Err(Failure::usage(
            "--draft: a trace is of what tokens choose, and drafts that are not accepted are none",
        )
        .hint("leave --draft out: the answer is the same"));
    }
    if args.run.kv.is_some() {
        return Err(Failure::usage(
            "--kv: a trace is of what tokens choose, and what is taken from a file is not computed",
        )
        .hint("leave --kv out: the answer is the same"));
    }
    output::check(&args.out, "trace", &job::inputs(&args.run, machine))?;
    let mut recorded = None;
    let done = if args.text {
        record_text(args, machine, &mut recorded)
    } else {
        run::run_recorded(&args.run, machine, &mut recorded)
    }?;
    let Some(trace) = recorded.map(Recorder::finish) else { return Ok(done) };
    output::write(&args.out, "trace", trace.encode())?;
    render::note(args.run.quiet, &wrote(args, &trace));
    Ok(done)
}

fn wrote(args: &RecordArgs, trace: &Trace) -> String {
    let (tokens, steps) = (size::grouped(trace.tokens()), size::grouped(trace.steps() as u64));
    format!("recorded {tokens} tokens in {steps} steps to {}", args.out.display())
}

fn record_text(args: &RecordArgs, machine: &Machine, recorded: &mut Option<Recorder>) -> Result<Done, Failure> {
    // The text itself: a chat template would add tokens to it.
    let run_args = RunArgs { raw: !args.run.ids, ..args.run.clone() };
    let machine = &numa::place(&run_args, machine)?;
    let mut settings = config::decide(&run_args, machine)?;
    settings.check_memory(machine)?;
    let text = prompt::read_prompt(&run_args)?;
    let Some(checkpoint) = job::open_checkpoint(&run_args, &mut settings, machine)? else {
        return Ok(Done::Interrupted);
    };
    let (dir, arch) = (checkpoint.dir.clone(), &checkpoint.arch);
    let ids = match prompt::open_tokenizer(&dir, arch, run_args.ids)? {
        _ if run_args.ids => prompt::check_ids(prompt::parse_ids(&text)?, arch)?,
        Some(tokenizer) => prompt::encode(&run_args, &dir, &tokenizer, &text)?,
        None => return Err(prompt::tokenizer_failure(&TokenizerError::Missing { dir })),
    };
    let context = run_args.ctx_size.unwrap_or(TEXT_CONTEXT).min(arch.max_context);
    let interrupted = interrupt::watch()?;
    let opened = run::open(&run_args, &settings, machine, checkpoint, context, &interrupted);
    let Some(mut engine) = opened.map_err(job::engine_failure)? else { return Ok(Done::Interrupted) };
    let mut progress = render::Progress::new(run_args.quiet);
    let recorder = recorded.insert(Recorder::new(engine.traced().clone()));
    for (done, window) in ids.chunks(context).enumerate() {
        progress.show(|| format!("recording: {} of {} tokens", done * context, ids.len()));
        recorder.begin(true);
        let routed = engine.route(window, &interrupted, recorder);
        if routed.map_err(job::engine_failure)? == Finish::Interrupted {
            break;
        }
    }
    progress.end();
    Ok(if interrupted.load(Ordering::Relaxed) { Done::Interrupted } else { Done::Whole })
}

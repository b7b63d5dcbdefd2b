//! The `trace` command: routing traces recorded, made up, replayed over cache policies, and looked at.

mod record;
mod report;
mod simulate;
mod svg;
mod synth;

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use clap::Subcommand;

use crate::limits::MAX_TRACE_BYTES;
use crate::store::trace::{Decoded, Trace};

use super::machine::Machine;
use super::{Done, Failure, render};

/// Flags of `trace`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream trace record fox.trace -p \"Tell me a story about a fox.\"
  millstream trace simulate fox.trace --budgets 25%,50%,16G --disk 3

A trace says which experts the router chose, token by token. What a cache makes of it can be tried without the model: \
any size, any policy, any drive.")]
pub struct TraceArgs {
    /// What to do with traces.
    #[command(subcommand)]
    command: TraceCommand,
}

#[derive(Debug, Subcommand)]
enum TraceCommand {
    /// Runs a generation, or the model over a text, and writes what its router chose
    Record(Box<record::RecordArgs>),
    /// Replays traces over cache policies and sizes: hit rates, bytes a token, predicted tokens a second
    Simulate(simulate::SimulateArgs),
    /// What is in traces: heat by layer and expert, skew, reuse distances, how well the next layer can be guessed
    Report(report::ReportArgs),
    /// Writes the trace of a made-up router
    Synth(synth::SynthArgs),
}

/// Runs one of the commands.
pub fn trace(args: &TraceArgs, machine: &Machine) -> Result<Done, Failure> {
    match &args.command {
        TraceCommand::Record(args) => record::record(args, machine),
        TraceCommand::Simulate(args) => simulate::simulate(args),
        TraceCommand::Report(args) => report::report(args),
        TraceCommand::Synth(args) => synth::synth(args),
    }
}

/// Reads traces, which must be of one model.
fn read_all(paths: &[PathBuf]) -> Result<Vec<Trace>, Failure> {
    let mut traces: Vec<Trace> = Vec::new();
    for path in paths {
        let trace = read(path)?;
        if trace.steps() == 0 {
            return Err(Failure::work(format!("the trace {} has no step", path.display()))
                .hint("its recording was ended before the first token; record it again"));
        }
        if let Some(first) = traces.first().filter(|first| first.header() != trace.header()) {
            let (a, b) = (shape(first), shape(&trace));
            return Err(Failure::usage(format!(
                "{} and {} are of different models",
                paths[0].display(),
                path.display()
            ))
            .cause(format!("{a}; {b}"))
            .hint("give traces of one model at a time"));
        }
        traces.push(trace);
    }
    Ok(traces)
}

fn read(path: &Path) -> Result<Trace, Failure> {
    let cannot =
        |cause: &dyn std::fmt::Display| Failure::work(format!("cannot read the trace {}", path.display())).cause(cause);
    let mut bytes = Vec::new();
    let file = fs::File::open(path).map_err(|e| Failure { code: 2, ..cannot(&e) })?;
    file.take(MAX_TRACE_BYTES + 1).read_to_end(&mut bytes).map_err(|e| cannot(&e))?;
    if bytes.len() as u64 > MAX_TRACE_BYTES {
        return Err(cannot(&format!("it is longer than {MAX_TRACE_BYTES} bytes")));
    }
    let Decoded { trace, note } =
        Trace::decode(&bytes).map_err(|e| cannot(&e).hint("`millstream trace record FILE -p TEXT` makes one"))?;
    if let Some(note) = note {
        render::note(false, &format!("{} is {note}", path.display()));
    }
    Ok(trace)
}

/// The model of a trace, in words.
fn shape(trace: &Trace) -> String {
    let header = trace.header();
    format!(
        "{} routed layers of {} experts, {} a token, model {:016x}",
        header.layers.len(),
        header.experts,
        header.top_k,
        header.fingerprint
    )
}

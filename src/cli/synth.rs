//! The `synth` command.

use std::path::PathBuf;
use std::time::Instant;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::convert::Width;
use crate::checkpoint::synth::{Precision, Preset, SynthOptions, synth as write_model};
use crate::checkpoint::write::{Cancel, Counts, Progress};
use crate::limits::{MAX_EXPERTS, MAX_LAYERS};

use super::{Done, Failure, interrupt, render, size};

/// Flags of `synth`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream synth --layers 4 /models/glm-5.2-4-layers
  millstream synth --dense-bits 4 --sparse-experts /models/glm-5.2-hollow

The same flags write the same bytes, on any machine. What such a model says means nothing; what it costs is true.
Its tokens are bytes: give a prompt with run --raw -p TEXT, or token ids with run --ids -p \"1 2 3\".
Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted (what was written is removed).")]
pub struct SynthArgs {
    /// Directory of the model; created when it is not there, refused when it holds anything
    #[arg(value_name = "DST")]
    destination: PathBuf,
    /// Whose shapes: glm-5.2, medium for measuring, or small for tests
    #[arg(long, value_name = "NAME", default_value = Preset::ALL[0].name)]
    preset: Preset,
    /// Decoder layers [default: as many as the model has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..MAX_LAYERS as u64))]
    layers: Option<u64>,
    /// Leading layers without experts [default: as many as the model has, but at most a third of the layers]
    #[arg(long, visible_alias = "dense", value_name = "N")]
    dense_layers: Option<usize>,
    /// Routed experts a layer [default: as many as the model has]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_EXPERTS as u64))]
    experts: Option<u64>,
    /// Add the multi-token-prediction layer
    #[arg(long)]
    mtp: bool,
    /// int4 as convert makes it, or fp8 or bf16 as publishers do: a source for convert
    #[arg(long, value_name = "FORMAT", default_value_t = Precision::Int4)]
    format: Precision,
    /// With int4, the width of attention, dense and shared layers: 4 or 8 [default: 8]
    #[arg(long, value_name = "BITS", value_parser = parse_dense_bits)]
    dense_bits: Option<Width>,
    /// With fp8 or bf16, bytes with which a shard ends, behind the tensor that reaches them [default: 5GB]
    #[arg(long, value_name = "SIZE", value_parser = size::parse)]
    shard_size: Option<u64>,
    /// Decides the weights
    #[arg(short, long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Leave the experts as holes in their files, which read as zeros and take no space
    #[arg(long)]
    sparse_experts: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

/// Writes a synthetic model.
pub fn synth(args: &SynthArgs) -> Result<Done, Failure> {
    if args.dense_bits.is_some() && args.format != Precision::Int4 {
        return Err(Failure::usage(format!("--dense-bits is a width in int4 models, and --format is {}", args.format)));
    }
    if args.shard_size.is_some() && (args.format == Precision::Int4 || args.sparse_experts) {
        return Err(Failure::usage("--shard-size goes with --format fp8 or bf16, and without --sparse-experts"));
    }
    let options = SynthOptions { cancel: Some(Cancel(interrupt::watch()?)), ..options(args) };
    let (start, place) = (Instant::now(), args.destination.display());
    let mut bar = render::Progress::new(args.quiet);
    let result = write_model(&args.destination, &options, &mut |progress| match progress {
        Progress::Plan { lines, shards, bytes, stored } => {
            lines.iter().for_each(|line| render::note(args.quiet, &line.to_string()));
            let holes = if stored < bytes { format!(", {} of them stored", size::show(stored)) } else { String::new() };
            let text = format!("{} in {shards} shards{holes}, to be written to {place}", size::show(bytes));
            render::note(args.quiet, &text);
        }
        Progress::Shard { .. } | Progress::Note(_) => {}
        Progress::Bytes(Counts { done, of, .. }) => bar.show(|| {
            let percent = if of == 0 { 100.0 } else { done as f64 / of as f64 * 100.0 };
            format!("writing: {} of {} ({percent:.0} %)", size::show(done), size::show(of))
        }),
    });
    bar.end();
    match result {
        Ok(report) => {
            let took = start.elapsed().as_secs_f64();
            render::note(args.quiet, &format!("wrote {} to {place} in {took:.1} s", size::show(report.bytes_written)));
            Ok(Done::Whole)
        }
        Err(CheckpointError::Interrupted { .. }) => {
            render::stderr("interrupted; what was written is removed\n");
            Ok(Done::Interrupted)
        }
        Err(e) => {
            let asked = matches!(e, CheckpointError::SynthOptions { .. } | CheckpointError::ConvertOccupied { .. });
            let failure = Failure::of(&e).hint(e.hint());
            Err(if asked { Failure { code: 2, ..failure } } else { failure })
        }
    }
}

fn options(args: &SynthArgs) -> SynthOptions {
    let default = SynthOptions::new(args.preset);
    SynthOptions {
        layers: args.layers.map(|layers| layers as usize),
        dense_layers: args.dense_layers,
        experts: args.experts.map(|experts| experts as usize),
        mtp: args.mtp,
        precision: args.format,
        dense: args.dense_bits.unwrap_or(default.dense),
        shard_bytes: args.shard_size.unwrap_or(default.shard_bytes),
        seed: args.seed,
        hollow_experts: args.sparse_experts,
        ..default
    }
}

fn parse_dense_bits(text: &str) -> Result<Width, String> {
    match text {
        "4" => Ok(Width::Bits4),
        "8" => Ok(Width::Bits8),
        _ => Err("it must be 4 or 8".into()),
    }
}

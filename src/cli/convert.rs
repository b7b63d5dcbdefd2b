//! The `convert` command.

use std::time::Instant;

use crate::checkpoint::convert::{ConvertOptions, Progress, Width, convert as convert_checkpoint};

use super::args::ConvertArgs;
use super::{Done, Failure, render, size};

/// Converts a checkpoint.
pub fn convert(args: &ConvertArgs) -> Result<Done, Failure> {
    if !args.source.is_dir() {
        let what = if args.source.exists() { "is not a directory" } else { "does not exist" };
        return Err(Failure::usage(format!("the checkpoint {} {what}", args.source.display()))
            .hint("SRC is the directory that holds config.json and the shards"));
    }
    let options = options(args);
    let start = Instant::now();
    let mut bar = render::Progress::new(args.quiet);
    let mut show = |progress: Progress| match progress {
        Progress::Plan { lines, shards, bytes } => {
            lines.iter().for_each(|line| render::note(args.quiet, line));
            render::note(args.quiet, &format!("{} in {shards} shards", size::show(bytes)));
        }
        Progress::Shard { name, kept: true, .. } => render::note(args.quiet, &format!("{name} was finished before")),
        Progress::Shard { .. } => {}
        Progress::Bytes { done, of } => bar.show(|| {
            let percent = if of == 0 { 100.0 } else { done as f64 / of as f64 * 100.0 };
            format!("converting: {} of {} ({percent:.0} %)", size::show(done), size::show(of))
        }),
    };
    let report = convert_checkpoint(&args.source, &args.destination, &options, &mut show)
        .map_err(|e| Failure::of(&e).hint(e.hint()))?;
    bar.end();
    let took = start.elapsed().as_secs_f64();
    let (bytes, place) = (size::show(report.bytes_written), args.destination.display());
    render::note(args.quiet, &format!("wrote {bytes} to {place} in {took:.1} s"));
    Ok(Done::Whole)
}

fn options(args: &ConvertArgs) -> ConvertOptions {
    let default = ConvertOptions::default();
    let or = |bits: Option<u8>, default: Width| match bits {
        Some(16) => Width::Bits16,
        Some(8) => Width::Bits8,
        Some(4) => Width::Bits4,
        Some(2) => Width::Bits2,
        _ => default,
    };
    ConvertOptions {
        experts: or(args.experts, default.experts),
        dense: or(args.dense, default.dense),
        io_bits: or(args.io_bits, default.io_bits),
        mtp: or(args.mtp, default.mtp),
        group: args.group.or(default.group),
        ..default
    }
}

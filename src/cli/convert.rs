//! The `convert` command.

use std::time::{Duration, Instant};

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
    let mut show = |progress: Progress| {
        let (done, total) = (progress.done_bytes, progress.total_bytes);
        let percent = if total == 0 { 100 } else { (done as f64 / total as f64 * 100.0) as u64 };
        bar.show(|| format!("converting: {} of {} ({percent} %)", size::show(done), size::show(total)));
    };
    let report = convert_checkpoint(&args.source, &args.destination, &options, &mut show)
        .map_err(|e| Failure::of(&e).hint(e.hint()))?;
    bar.end();
    let took = start.elapsed();
    let (bytes, place) = (size::show(report.bytes), args.destination.display());
    render::note(args.quiet, &format!("wrote {bytes} to {place} in {:.1} s", took.as_secs_f64()));
    if took > Duration::from_secs(1) {
        let per_second = report.bytes as f64 / took.as_secs_f64();
        render::note(args.quiet, &format!("that is {} a second", size::show(per_second as u64)));
    }
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

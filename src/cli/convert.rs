//! The `convert` command.

use std::path::PathBuf;
use std::time::Instant;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::convert::{
    Cancel, ConvertOptions, ConvertReport, Counts, Progress, Verified, Width, convert as convert_checkpoint,
    verify as verify_conversion,
};

use super::args::parse_group;
use super::config::check_model_dir;
use super::{Done, Failure, interrupt, render, size};

/// Flags of `convert`.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  millstream convert /models/GLM-5.2-FP8 /models/glm-5.2-int4
  millstream convert --group 64 --dense 4 --delete-source /models/GLM-5.2-FP8 /models/glm-5.2-g64

Widths are bits: 16, 8, 4, 3 or 2. Three come in groups of 64 columns.
A conversion that was stopped, by Ctrl-C or a crash, goes on when the same command is given again.
Exit codes: 0 done, 1 the work failed, 2 usage, 130 interrupted.")]
pub struct ConvertArgs {
    /// Directory of the checkpoint
    #[arg(value_name = "SRC")]
    source: PathBuf,
    /// Directory of the container; created when it is not there
    #[arg(value_name = "DST")]
    destination: PathBuf,
    /// Width of the routed experts [default: 4]
    #[arg(long, visible_alias = "expert-bits", value_name = "BITS")]
    pub(super) experts: Option<Width>,
    /// Width of attention, dense and shared layers; 4 halves what stays in memory [default: 8]
    #[arg(long, visible_alias = "dense-bits", value_name = "BITS")]
    dense: Option<Width>,
    /// Width of embeddings and output head [default: 8]
    #[arg(long, value_name = "BITS")]
    io_bits: Option<Width>,
    /// Width of the multi-token-prediction layer [default: 8]
    #[arg(long, visible_alias = "mtp-bits", value_name = "BITS")]
    mtp: Option<Width>,
    /// Width of the sparse-attention indexer [default: 8]
    #[arg(long, visible_alias = "indexer-bits", value_name = "BITS")]
    indexer: Option<Width>,
    /// Columns that share a scale in 4-bit matrices (3-bit ones have 64): 16, 32, 48, 64, 96, 128, 192 or 256 [default: a whole row]
    #[arg(long, value_name = "N", value_parser = parse_group)]
    group: Option<u16>,
    /// Keep every weight bit for bit and change only the layout: what a container gains from being read directly
    #[arg(long, conflicts_with_all = ["experts", "dense", "io_bits", "mtp", "indexer", "group"])]
    repack: bool,
    /// What SRC is: container means --repack, checkpoint that weights are quantized [default: checkpoint]
    #[arg(long, value_name = "KIND", value_parser = ["container", "checkpoint"])]
    from: Option<String>,
    /// Remove each shard of SRC once all that is made from it is written, durable and was read back. What that saves hangs on
    /// SRC: a shard stays until the last layer that reaches into it is stored, and where every shard holds of every layer
    /// the disk holds SRC and DST whole at the end. SRC is no model any more as soon as the first is gone
    #[arg(long)]
    delete_source: bool,
    /// Write nothing: read the finished conversion in DST, compare it with its checksums, and convert SRC again to compare
    /// those too. Where shards of SRC were removed the checksums are all there is
    #[arg(long, conflicts_with = "delete_source")]
    verify: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

/// Converts a checkpoint.
pub fn convert(args: &ConvertArgs) -> Result<Done, Failure> {
    // A check goes without the source where somebody has removed it.
    if !args.verify || args.source.exists() {
        check_model_dir(&args.source, "SRC")?;
    }
    let options = ConvertOptions { cancel: Some(Cancel(interrupt::watch()?)), ..options(args)? };
    if args.verify {
        return verify(args, &options);
    }
    let start = Instant::now();
    let mut bar = render::Progress::new(args.quiet);
    let mut show = |progress: Progress| match progress {
        Progress::Note(line) => bar.note(&line),
        Progress::Plan { lines, shards, bytes, .. } => {
            lines.iter().for_each(|line| render::note(args.quiet, &line.to_string()));
            render::note(args.quiet, &format!("{} in {shards} shards", size::show(bytes)));
        }
        Progress::Shard { name, kept: true, .. } => bar.note(&format!("{name} was finished before")),
        Progress::Shard { .. } => {}
        Progress::Bytes(counts) => bar.show(|| line(counts, start.elapsed().as_secs_f64())),
    };
    let result = convert_checkpoint(&args.source, &args.destination, &options, &mut show);
    bar.end();
    let report = match result {
        Ok(report) => report,
        Err(CheckpointError::Interrupted { .. }) => {
            render::stderr(render::INTERRUPTED);
            return Ok(Done::Interrupted);
        }
        Err(e) => return Err(Failure::of(&e).hint(e.hint())),
    };
    render::note(args.quiet, &outcome(&report, args, start.elapsed().as_secs_f64()));
    Ok(Done::Whole)
}

/// Checks a finished conversion.
fn verify(args: &ConvertArgs, options: &ConvertOptions) -> Result<Done, Failure> {
    let start = Instant::now();
    let mut bar = render::Progress::new(args.quiet);
    let result = verify_conversion(&args.source, &args.destination, options, &mut |progress| {
        if let Progress::Bytes(counts) = progress {
            bar.show(|| checking_line(counts, start.elapsed().as_secs_f64()));
        }
    });
    bar.end();
    let place = args.destination.display();
    let verified = match result {
        Ok(verified) => verified,
        Err(CheckpointError::Interrupted { .. }) => {
            render::stderr("interrupted\n");
            return Ok(Done::Interrupted);
        }
        Err(e) => return Err(Failure::of(&e).hint(e.hint())),
    };
    let Verified { shards, bytes, direct, from_source, damage } = verified;
    if !damage.is_empty() {
        let what = format!("{} of {shards} shards in {place} are not as they should be", damage.len());
        let hint = match from_source {
            true => {
                "keep both: a shard that is not as its own checksums say is damaged, but where only the source makes other \
                 weights, it is the source that has changed; converting into a new directory loses nothing"
            }
            false => "keep this directory: its source is not whole any more; check the drive's health (dmesg)",
        };
        return Err(Failure::work(what).cause(damage.join("\n")).hint(hint));
    }
    let how = if direct { "" } else { " through the page cache" };
    let source = args.source.display();
    let against = match from_source {
        true => "as the source converts to".to_owned(),
        false if args.source.exists() => {
            format!("as its checksums say; the shards of {source} are not all there to be converted again")
        }
        false => format!("as its checksums say; there is no {source} to be converted again"),
    };
    let took = start.elapsed().as_secs_f64();
    let text = format!("{place}: {} in {shards} shards read{how} in {took:.1} s, all {against}", size::show(bytes));
    render::note(args.quiet, &text);
    Ok(Done::Whole)
}

fn checking_line(counts: Counts, seconds: f64) -> String {
    let Counts { done, of, left, taken, checked, .. } = counts;
    let percent = if of == 0 { 100.0 } else { done as f64 / of as f64 * 100.0 };
    let rate = |bytes: u64| bytes as f64 / 1e9 / seconds.max(1e-9);
    let time = if done == 0 { "?".to_owned() } else { duration(left as f64 / done as f64 * seconds) };
    let (read, source) = (rate(checked), rate(taken));
    format!("checking: {percent:.0} %, reading {read:.2} GB/s, and {source:.2} GB/s of the source, {time} left")
}

/// How far it is, how fast, and how long it will take at that.
fn line(counts: Counts, seconds: f64) -> String {
    let Counts { done, of, written, worked, left, taken, .. } = counts;
    let percent = if of == 0 { 100.0 } else { done as f64 / of as f64 * 100.0 };
    let rate = |bytes: u64| bytes as f64 / 1e9 / seconds.max(1e-9);
    let time = match worked {
        0 => "?".to_owned(),
        _ => duration(left as f64 / worked as f64 * seconds),
    };
    let (read, write) = (rate(taken), rate(written));
    let (done, of) = (size::show(done), size::show(of));
    format!("converting: {done} of {of} ({percent:.0} %), reading {read:.2} GB/s, writing {write:.2} GB/s, {time} left")
}

/// `48 s`, `7 min`, `3 h 20 min`.
fn duration(seconds: f64) -> String {
    let minutes = (seconds / 60.0).round() as u64;
    match minutes {
        _ if seconds < 99.5 => format!("{seconds:.0} s"),
        0..100 => format!("{minutes} min"),
        _ => format!("{} h {} min", minutes / 60, minutes % 60),
    }
}

fn outcome(report: &ConvertReport, args: &ConvertArgs, seconds: f64) -> String {
    let (bytes, place) = (size::show(report.bytes_written), args.destination.display());
    let read_back = match report.read_back_directly {
        Some(true) => ", read back from the drive and found as written",
        Some(false) => ", read back through the page cache and found as written",
        None => "",
    };
    let removed = match report.source_shards_removed {
        0 => String::new(),
        count => {
            let shards = if count == 1 { "shard" } else { "shards" };
            format!("; removed {count} {shards} of the source, {}", size::show(report.source_bytes_removed))
        }
    };
    let kept = match report.source_shards_kept.as_slice() {
        [] => String::new(),
        [shard] => format!("; kept {shard}, which holds more than was converted"),
        [first, others @ ..] => {
            format!("; kept {first} and {} more, which hold more than was converted", others.len())
        }
    };
    format!("wrote {bytes} to {place} in {seconds:.1} s{read_back}{removed}{kept}")
}

fn options(args: &ConvertArgs) -> Result<ConvertOptions, Failure> {
    let default = ConvertOptions::default();
    let options = ConvertOptions {
        experts: args.experts.unwrap_or(default.experts),
        dense: args.dense.unwrap_or(default.dense),
        io_bits: args.io_bits.unwrap_or(default.io_bits),
        mtp: args.mtp.unwrap_or(default.mtp),
        indexer: args.indexer.unwrap_or(default.indexer),
        group: args.group.or(default.group),
        repack: args.repack || args.from.as_deref() == Some("container"),
        delete_source: args.delete_source,
        ..default
    };
    let widths = [args.experts, args.dense, args.io_bits, args.mtp, args.indexer];
    if options.repack && (widths.iter().flatten().next().is_some() || args.group.is_some()) {
        return Err(Failure::usage("--from container keeps every weight as it is: it goes with no width and no group"));
    }
    if args.repack && args.from.as_deref() == Some("checkpoint") {
        return Err(Failure::usage("--repack keeps weights as they are, and --from checkpoint quantizes them"));
    }
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Args, Command};
    use clap::Parser;

    fn typed(flags: &[&str]) -> Result<Result<ConvertOptions, Failure>, clap::Error> {
        let arguments = ["millstream", "convert", "a", "b"].iter().chain(flags);
        match Args::try_parse_from(arguments)?.command {
            Command::Convert(args) => Ok(options(&args)),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn every_width_that_parses_is_the_width_that_is_written() {
        let widths =
            [("2", Width::Bits2), ("3", Width::Bits3), ("4", Width::Bits4), ("8", Width::Bits8), ("16", Width::Bits16)];
        for (text, width) in widths {
            let flags = ["--experts", "--dense", "--io-bits", "--mtp", "--indexer"].map(|flag| [flag, text]);
            let options = typed(flags.as_flattened()).unwrap().unwrap();
            let ConvertOptions { experts, dense, io_bits, mtp, indexer, .. } = options;
            assert_eq!([experts, dense, io_bits, mtp, indexer], [width; 5]);
        }
        // Each flag is for its own kind of weight.
        let narrow = |flag| typed(&[flag, "2"]).unwrap().unwrap();
        let default = ConvertOptions::default();
        let named = ["--expert-bits", "--dense-bits", "--mtp-bits", "--indexer-bits"].map(narrow);
        assert_eq!(named, ["--experts", "--dense", "--mtp", "--indexer"].map(narrow), "the names that run has");
        assert_eq!(narrow("--indexer"), ConvertOptions { indexer: Width::Bits2, ..default.clone() });
        assert_eq!(narrow("--mtp"), ConvertOptions { mtp: Width::Bits2, ..default.clone() });
        assert_eq!(typed(&[]).unwrap().unwrap(), default);
        for text in ["1", "32", "04", "int4", ""] {
            let refused = typed(&["--experts", text]).unwrap_err().to_string();
            assert!(refused.contains("a width is 2, 3, 4, 8 or 16"), "{refused}");
        }
    }

    #[test]
    fn a_repack_goes_with_no_width() {
        let repack = ConvertOptions { repack: true, ..ConvertOptions::default() };
        assert_eq!(typed(&["--repack"]).unwrap().unwrap(), repack);
        assert_eq!(typed(&["--from", "container"]).unwrap().unwrap(), repack);
        assert_eq!(typed(&["--from", "checkpoint"]).unwrap().unwrap(), ConvertOptions::default());
        assert!(typed(&["--repack", "--dense", "4"]).is_err());
        assert!(typed(&["--from", "disk"]).is_err());
        for flags in [["--from", "container", "--group", "64"], ["--from", "container", "--mtp", "4"]] {
            assert_eq!(typed(&flags).unwrap().unwrap_err().code, 2);
        }
        assert_eq!(typed(&["--repack", "--from", "checkpoint"]).unwrap().unwrap_err().code, 2);
    }

    #[test]
    fn progress_says_how_fast_and_how_long() {
        let counts = Counts {
            done: 3_000_000_000,
            of: 9_000_000_000,
            written: 2_000_000_000,
            worked: 3_000_000_000,
            left: 9_000_000_000,
            taken: 4_000_000_000,
            checked: 1_000_000_000,
        };
        let expected = "converting: 3.00 GB of 9.00 GB (33 %), reading 1.00 GB/s, writing 0.50 GB/s, 12 s left";
        assert_eq!(line(counts, 4.0), expected);
        assert!(line(Counts::default(), 0.0).ends_with("(100 %), reading 0.00 GB/s, writing 0.00 GB/s, ? left"));
        assert_eq!([99.0, 100.0, 5969.0, 12_000.0].map(duration), ["99 s", "2 min", "99 min", "3 h 20 min"]);
    }
}

//! The `convert` command.

use std::time::Instant;

use crate::checkpoint::CheckpointError;
use crate::checkpoint::convert::{Cancel, ConvertOptions, Progress, convert as convert_checkpoint};

use super::args::ConvertArgs;
use super::config::check_model_dir;
use super::{Done, Failure, interrupt, render, size};

/// Converts a checkpoint.
pub fn convert(args: &ConvertArgs) -> Result<Done, Failure> {
    check_model_dir(&args.source, "SRC")?;
    let options = ConvertOptions { cancel: Some(Cancel(interrupt::watch()?)), ..options(args) };
    let start = Instant::now();
    let mut bar = render::Progress::new(args.quiet);
    let mut show = |progress: Progress| match progress {
        Progress::Plan { lines, shards, bytes, .. } => {
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
    let took = start.elapsed().as_secs_f64();
    let (bytes, place) = (size::show(report.bytes_written), args.destination.display());
    render::note(args.quiet, &format!("wrote {bytes} to {place} in {took:.1} s"));
    Ok(Done::Whole)
}

fn options(args: &ConvertArgs) -> ConvertOptions {
    let default = ConvertOptions::default();
    ConvertOptions {
        experts: args.experts.unwrap_or(default.experts),
        dense: args.dense.unwrap_or(default.dense),
        io_bits: args.io_bits.unwrap_or(default.io_bits),
        mtp: args.mtp.unwrap_or(default.mtp),
        group: args.group.or(default.group),
        ..default
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::convert::Width;
    use crate::cli::args::{Args, Command};
    use clap::Parser;

    fn typed(flags: &[&str]) -> Result<ConvertOptions, clap::Error> {
        let arguments = ["millstream", "convert", "a", "b"].iter().chain(flags);
        match Args::try_parse_from(arguments)?.command {
            Command::Convert(args) => Ok(options(&args)),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn every_width_that_parses_is_the_width_that_is_written() {
        let widths = [("2", Width::Bits2), ("4", Width::Bits4), ("8", Width::Bits8), ("16", Width::Bits16)];
        for (text, width) in widths {
            let options = typed(&["--experts", text, "--dense", text, "--io-bits", text, "--mtp", text]).unwrap();
            let ConvertOptions { experts, dense, io_bits, mtp, .. } = options;
            assert_eq!([experts, dense, io_bits, mtp], [width; 4]);
        }
        assert_eq!(typed(&[]).unwrap(), ConvertOptions::default());
        for text in ["3", "32", "04", "int4", ""] {
            let refused = typed(&["--experts", text]).unwrap_err().to_string();
            assert!(refused.contains("a width is 2, 4, 8 or 16"), "{refused}");
        }
    }
}

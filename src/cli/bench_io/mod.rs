//! The `bench-io` command: which way of reading slabs is best on this drive, and how good that is.

mod chart;
pub(super) mod facts;
mod fio;
pub(super) mod json;
pub(super) mod measure;
pub(super) mod source;
mod svg;
mod table;

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use millstream_io::measure::{Recommendation, Summary, Sweep, Target, recommend};
use millstream_io::{IoError, Pages};

use crate::limits::SWEEP_DEPTH_MAX;

use super::args::BenchIoArgs;
use super::machine::Machine;
use super::{Done, Failure, interrupt, output, render, size};
use facts::Facts;
use fio::FioSummary;
use source::Source;

/// Share of the memory that is available that slabs may take: of reserved pages, huge pages and small ones together.
const MEMORY_SHARE: u64 = 4;

/// What was measured.
pub struct Report {
    facts: Facts,
    results: Vec<Summary>,
    /// Candidates that could not be had, and why.
    unavailable: Vec<(String, String)>,
    /// Candidates whose reads failed, and why.
    failed: Vec<(String, String)>,
    /// The yardstick: its best depth first.
    fio: Vec<FioSummary>,
    fio_note: Option<String>,
    recommendation: Option<Recommendation>,
    interrupted: bool,
}

impl Report {
    /// Throughput of the fastest real result over fio's.
    fn ratio_to_fio(&self) -> Option<f64> {
        let best = &self.results[self.recommendation.as_ref()?.best];
        Some(best.gb_s / self.fio.first()?.gb_s)
    }

    /// Why nothing is recommended, where that is so.
    fn why_nothing(&self) -> &'static str {
        match (self.results.is_empty(), self.failed.is_empty()) {
            (false, _) if self.facts.places == 1 => "there is a single place to read, over and over",
            (false, _) if self.results.iter().any(|summary| !summary.cached) => {
                "it was interrupted before everything was measured once"
            }
            (false, _) => "memory served every figure here, so none of them is the drive's",
            (true, false) => "every read failed",
            (true, true) => "nothing was measured",
        }
    }
}

/// Measures and reports.
pub fn bench_io(args: &BenchIoArgs, machine: &Machine) -> Result<Done, Failure> {
    if args.fio {
        fio::check()?;
    }
    if let Some(path) = &args.svg {
        let inputs: Vec<&PathBuf> = args.file.iter().chain(&args.model).collect();
        output::check(path, "chart", &inputs)?;
    }
    let stop = interrupt::watch()?;
    let mut progress = render::Progress::new(args.quiet);
    let Some(source) = Source::choose(args, &stop, &mut progress)? else { return Ok(Done::Interrupted) };
    let slab_bytes = source.slab_bytes(args)?;
    let depth_max = depth_max(machine.memory.available, slab_bytes)?;
    let mut target = Target::open(&source.paths, source.bytes_max, slab_bytes, depth_max as usize, machine.root())
        .map_err(|error| io_failure(&error))?;
    let sweep = if args.quick { Sweep::Quick } else { Sweep::Full };
    let facts = Facts::find(machine, &source, &mut target, sweep)?;
    let text = facts.text();
    if args.json || args.csv {
        if !args.quiet {
            render::stderr(&text);
        }
    } else {
        let head = if args.md { table::facts_md(&text) } else { text };
        if output::print(&head)?.is_some() {
            return Ok(Done::PipeClosed);
        }
    }
    let plan = measure::Plan {
        candidates: sweep.candidates(target.slab_bytes(), depth_max),
        rounds: args.rounds.unwrap_or(if args.quick { 3 } else { 5 }),
        seconds: args.secs.unwrap_or(if args.quick { 1.0 } else { 2.0 }),
        fio: if args.fio { fio::runs(machine, &source, target.slab_bytes(), args.quick) } else { Vec::new() },
    };
    let measured = measure::measure(&plan, &mut target, &stop, &mut progress)?;
    let had = measured.results.len() + measured.unavailable.len() + measured.failed.len();
    let tells = had == plan.candidates.len() && target.places() > 1;
    let report = Report {
        recommendation: if tells { recommend(&measured.results) } else { None },
        facts,
        results: measured.results,
        unavailable: source::named(&source, measured.unavailable),
        failed: source::named(&source, measured.failed),
        fio: measured.fio,
        fio_note: measured.fio_note,
        interrupted: measured.interrupted,
    };
    show(args, &report)
}

fn show(args: &BenchIoArgs, report: &Report) -> Result<Done, Failure> {
    let text = if args.json {
        json::text(report)
    } else if args.csv {
        table::csv(report)
    } else if args.md {
        table::md(report)
    } else {
        table::plain(report) + "\n" + &chart::bars(report) + "\n" + &table::verdict(report)
    };
    let closed = output::print(&text)?;
    if let Some(path) = &args.svg {
        output::write(path, "chart", svg::draw(report))?;
    }
    Ok(match closed {
        Some(done) => done,
        None if report.interrupted => Done::Interrupted,
        None if !report.failed.is_empty() => Done::Unwell,
        None => Done::Whole,
    })
}

fn stopped(stop: &AtomicBool) -> bool {
    stop.load(Ordering::Relaxed)
}

/// Slabs in flight that memory allows.
pub(super) fn depth_max(available: u64, slab_bytes: u64) -> Result<u32, Failure> {
    let stride = millstream_io::SlabPool::stride_bytes(usize::try_from(slab_bytes).unwrap_or(usize::MAX / 2)) as u64;
    let slabs = available / MEMORY_SHARE / Pages::ALL.len() as u64 / stride;
    if slabs == 0 && available > 0 {
        let (slab, room) = (size::show(slab_bytes), size::show(available));
        return Err(Failure::usage(format!("slabs of {slab} are too large for the {room} of memory available"))
            .hint("ask for smaller ones with --slab"));
    }
    Ok(if available == 0 { SWEEP_DEPTH_MAX } else { slabs.min(SWEEP_DEPTH_MAX) } as u32)
}

pub(super) fn io_failure(error: &IoError) -> Failure {
    let failure = match error {
        IoError::Open { .. } | IoError::NotAFile { .. } | IoError::BadRequest { .. } => {
            Failure { code: 2, ..Failure::of(error) }
        }
        _ => Failure::of(error),
    };
    match error.hint() {
        Some(hint) => failure.hint(hint),
        None => failure,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_bounds_the_depth() {
        assert_eq!(depth_max(16 << 30, 19 << 20).unwrap(), 16);
        // A sixteenth of 1 GiB holds three strides of 20 MiB.
        assert_eq!(depth_max(1 << 30, 19 << 20).unwrap(), 3);
        assert_eq!(depth_max(100 << 20, 19 << 20).unwrap_err().code, 2);
        assert_eq!(depth_max(0, 19 << 20).unwrap(), 16, "unknown memory bounds nothing");
    }
}

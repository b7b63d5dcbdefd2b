//! The profile as text.

use std::fmt::Write as _;

use crate::cli::advice;
use crate::cli::render::{self, micros, seconds};
use crate::cli::size;
use crate::engine::stats::{Directness, ExpertStats, Stats};

use super::{Ceiling, Report};

/// Columns of the longest bar.
const BAR: usize = 24;
/// What is not known.
pub const UNKNOWN: &str = "-";

/// The whole report.
pub fn text(report: &Report) -> String {
    let stats = &report.stats;
    let mut text = String::new();
    line(&mut text, "model", &format!("{}: {}", stats.model.dir, model(stats)));
    line(&mut text, "machine", &machine(stats));
    rates(&mut text, report);
    stages(&mut text, stats);
    disk(&mut text, report);
    experts(&mut text, &stats.experts);
    line(&mut text, "overlap", &overlap(stats));
    memory(&mut text, stats);
    verdict(&mut text, report);
    text
}

/// A line of the report: what it is about, and what is to be said.
fn line(text: &mut String, name: &str, said: &str) {
    let _ = writeln!(text, "{name:<9} {said}");
}

/// The model in words.
pub fn model(stats: &Stats) -> String {
    let model = &stats.model;
    format!("{}, {} layers of {} experts, {}", model.arch, model.layers, model.experts, model.formats.join(", "))
}

/// The machine in words.
pub fn machine(stats: &Stats) -> String {
    let machine = &stats.machine;
    let threads = stats.settings.get("threads").map_or_else(|| UNKNOWN.to_owned(), |threads| threads.to_string());
    let ram = size::show(machine.ram);
    format!(
        "{}, {threads} threads of {}, {ram} of memory, Linux {}, {}",
        machine.cpu, machine.kernels, machine.kernel, machine.fs
    )
}

fn rates(text: &mut String, report: &Report) {
    let stats = &report.stats;
    let rate = |rate: Option<f64>| rate.map_or_else(|| UNKNOWN.to_owned(), |rate| format!("{rate:.2} tok/s"));
    let (prompt, answer) = (size::grouped(stats.prompt_tokens as u64), size::grouped(stats.tokens as u64));
    let loaded = seconds(stats.load_s);
    line(
        text,
        "prompt",
        &format!(
            "{prompt} tokens in {}, {}; model loaded in {loaded}",
            seconds(stats.prefill_s),
            rate(stats.prefill_tok_s)
        ),
    );
    let seed = report.seed.map_or_else(String::new, |seed| format!(", seed {seed}"));
    let (time, ended) = (seconds(stats.decode_s), render::ended(stats));
    let steps = render::over_steps(stats).map_or_else(String::new, |steps| format!(" {steps}"));
    line(text, "answer", &format!("{answer} tokens in {time}, {}{steps}; {ended}{seed}", rate(stats.decode_tok_s)));
    if let Some(tokens) = &report.tokens {
        let [p50, p99, max] = [tokens.p50, tokens.p99, tokens.max].map(|ms| micros(ms * 1e3));
        line(text, "a token", &format!("takes {p50} in the median, {p99} at the 99th percentile, {max} at most"));
    }
}

fn stages(text: &mut String, stats: &Stats) {
    let total = stats.stages.busy_s();
    let share = |part: f64| if stats.wall_s > 0.0 { part / stats.wall_s } else { 0.0 };
    let longest = stats.stages.0.iter().map(|(_, stage)| stage.busy_s).fold(0.0, f64::max);
    let _ = writeln!(
        text,
        "\n{:<10}{:>10}{:>9}  {:<BAR$}{:>11}{:>11}{:>11}",
        "stage", "time", "share", "", "median", "p99", "visits"
    );
    for (name, stage) in &stats.stages.0 {
        let columns = if longest > 0.0 { (stage.busy_s / longest * BAR as f64).round() as usize } else { 0 };
        let (time, percent, bar) = (time(stage.busy_s), 100.0 * share(stage.busy_s), "#".repeat(columns));
        let (median, p99, visits) = (micros(stage.p50_us), micros(stage.p99_us), size::grouped(stage.n));
        let _ = writeln!(text, "{name:<10}{time:>10}{percent:>7.1} %  {bar:<BAR$}{median:>11}{p99:>11}{visits:>11}");
    }
    let (time, percent) = (time(total), 100.0 * share(total));
    let _ = writeln!(
        text,
        "{:<10}{time:>10}{percent:>7.1} %  of {} from the first to the last moment\n",
        "all",
        seconds(stats.wall_s)
    );
}

/// A time in the unit that leaves it digits.
pub fn time(s: f64) -> String {
    if s < 1.0 { micros(1e6 * s) } else { seconds(s) }
}

fn disk(text: &mut String, report: &Report) {
    let (stats, io) = (&report.stats, &report.stats.io);
    line(text, "disk", &disk_how(stats));
    line(text, "", &disk_felt(stats));
    let depth = io.depth_mean.map_or_else(|| UNKNOWN.to_owned(), |depth| format!("{depth:.1}"));
    let rate = match io.gb_s {
        None => "no rate: nothing was read".to_owned(),
        Some(gb_s) => format!("{gb_s:.2} GB/s while busy{}, {depth} reads in flight", against(gb_s, report)),
    };
    line(text, "", &rate);
    line(text, "", &slab_times(stats));
    io.drives.iter().for_each(|drive| line(text, "drive", &render::drive_text(drive)));
}

/// What was read, and how.
pub fn disk_how(stats: &Stats) -> String {
    let io = &stats.io;
    let how = match io.direct {
        Directness::Direct => "direct",
        Directness::Buffered => "through the page cache, which may have served some of it",
        Directness::SilentlyBuffered => "asked to be direct, served by the page cache",
    };
    format!("{} in {} reads by {}, {how}", size::show(io.bytes), size::grouped(io.reads), io.device)
}

/// How long reads took, and how much of that was felt.
pub fn disk_felt(stats: &Stats) -> String {
    let io = &stats.io;
    let [queued, service, busy, wait] = [io.queued_s, io.service_s, io.busy_s, io.wait_s].map(time);
    let hidden = time((io.busy_s - io.wait_s).max(0.0));
    format!(
        "Added up, reads stood in the queue for {queued} and were served for {service}; side by side that was {busy}: \
         {wait} of it was waited for, {hidden} was hidden behind arithmetic"
    )
}

/// How long the read of one expert takes, and what of the processor reads take.
pub fn slab_times(stats: &Stats) -> String {
    let ms = |ms: Option<f64>| ms.map_or_else(|| UNKNOWN.to_owned(), |ms| micros(ms * 1e3));
    let io = &stats.io;
    let cpu =
        io.cpu_s.map_or_else(String::new, |cpu| format!("; the threads that read took {} of a processor", time(cpu)));
    format!(
        "One expert takes {} in the median, {} at the 99th percentile, its time in the queue included{cpu}",
        ms(io.slab_p50_ms),
        ms(io.slab_p99_ms)
    )
}

/// The rate against what the drive can do.
fn against(gb_s: f64, report: &Report) -> String {
    match &report.ceiling {
        None => String::new(),
        Some(Ceiling { gb_s: most, source }) => {
            format!(", {:.0} % of the {most:.2} GB/s it can do ({source})", 100.0 * gb_s / most)
        }
    }
}

/// How many experts each tier served, fastest first; the last is the drive, which was waited for.
pub fn tiers(experts: &ExpertStats) -> [(&'static str, u64); 4] {
    [
        ("pinned", experts.hit_pinned),
        ("cached", experts.hit_cached),
        ("read ahead", experts.hit_prefetched),
        ("from disk", experts.missed),
    ]
}

fn experts(text: &mut String, experts: &ExpertStats) {
    let percent = |part: u64| if experts.requested > 0 { 100.0 * part as f64 / experts.requested as f64 } else { 0.0 };
    let parts: Vec<String> = tiers(experts)
        .iter()
        .map(|(name, count)| format!("{name} {} ({:.1} %)", size::grouped(*count), percent(*count)))
        .collect();
    line(text, "experts", &format!("{} asked for: {}", size::grouped(experts.requested), parts.join(", ")));
    if experts.prefetch_issued > 0 {
        line(text, "ahead", &ahead(experts));
    }
    if experts.verified > 0 {
        let (reads, took) = (size::counted(experts.verified, "read"), seconds(experts.verify_s));
        line(text, "checked", &format!("{reads} of experts by their checksums in {took}"));
    }
}

/// What reading ahead came to; nothing where there was none.
pub fn ahead(experts: &ExpertStats) -> String {
    if experts.prefetch_issued == 0 {
        return String::new();
    }
    let share =
        |share: Option<f64>| share.map_or_else(|| UNKNOWN.to_owned(), |share| format!("{:.1} %", 100.0 * share));
    format!(
        "{} read ahead, {} of them used, {} wasted, {} read for nothing; {} of what was asked for was guessed ({} was what \
         the token before had asked for), and {} of the guesses were right",
        size::grouped(experts.prefetch_issued),
        size::grouped(experts.prefetch_used),
        size::grouped(experts.prefetch_wasted),
        size::show(experts.prefetch_wasted_bytes),
        share(experts.lookahead_recall),
        share(experts.previous_token_recall),
        share(experts.lookahead_precision)
    )
}

/// Drive and arithmetic after the prompt.
fn overlap(stats: &Stats) -> String {
    let Some(overlap) = &stats.overlap else { return UNKNOWN.to_owned() };
    let [disk, compute, waited, wall] =
        [overlap.disk_busy_s, overlap.compute_busy_s, overlap.wait_s, overlap.wall_s].map(time);
    let efficiency = overlap.efficiency;
    format!(
        "of {wall} after the prompt the drive was busy {disk}, arithmetic {compute}, and {waited} was waited for: \
         efficiency {efficiency:.2}"
    )
}

fn memory(text: &mut String, stats: &Stats) {
    let memory = &stats.memory;
    line(
        text,
        "memory",
        &format!(
            "{} at its peak of {} allowed: {} resident weights, {} expert cache, {} context",
            size::show(memory.rss_peak),
            size::show(memory.budget),
            size::show(memory.resident),
            size::show(memory.cache),
            size::show(memory.kv)
        ),
    );
}

fn verdict(text: &mut String, report: &Report) {
    let Some(judgement) = &report.judgement else {
        return line(text, "verdict", "none: nothing was generated after the prompt");
    };
    let (verdict, why) = (advice::name(judgement.verdict), &judgement.why);
    let _ = writeln!(text, "\nverdict   {verdict}: {why}\nadvice    {}", judgement.advice);
}

//! How things look on stderr: notes, progress, and the statistics after an answer.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write as _};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::engine::stats::{Directness, DraftStats, DriveUse, ExpertStats, IoStats, Stats};

use super::config::Setting;
use super::machine::Machine;
use super::size;

/// Nothing takes longer than this without a word.
const SILENCE: Duration = Duration::from_secs(5);
/// A line of progress on a terminal changes this often.
const REDRAW: Duration = Duration::from_millis(200);

/// What is said when a conversion is interrupted.
pub const INTERRUPTED: &str = "interrupted; the same command continues\n";

/// Writes to stderr; that nobody reads it is no failure.
pub fn stderr(text: &str) {
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}

/// Writes `note: text` to stderr, unless quiet.
pub fn note(quiet: bool, text: &str) {
    if !quiet {
        stderr(&format!("note: {text}\n"));
    }
}

/// Writes a note in the middle of an answer: on a terminal below what was written of it.
pub fn aside(quiet: bool, text: &str) {
    if !quiet && std::io::stderr().is_terminal() {
        stderr("\n");
    }
    note(quiet, text);
}

/// Progress of known length: one line that changes on a terminal that can do it, a line now and then elsewhere.
pub struct Progress {
    quiet: bool,
    redraws: bool,
    last: Instant,
    drawn: bool,
}

impl Progress {
    /// Progress that has shown nothing yet.
    pub fn new(quiet: bool) -> Progress {
        Progress { quiet, redraws: Machine::redraws(), last: Instant::now(), drawn: false }
    }

    /// Shows the line `text` makes, when it is time to.
    pub fn show(&mut self, text: impl FnOnce() -> String) {
        let pause = if self.redraws { REDRAW } else { SILENCE };
        if self.quiet || self.last.elapsed() < pause {
            return;
        }
        self.last = Instant::now();
        self.drawn = true;
        stderr(&line(&text(), self.redraws));
    }

    /// Writes a note in place of the line.
    pub fn note(&mut self, text: &str) {
        self.end();
        note(self.quiet, text);
    }

    /// Clears the line.
    pub fn end(&mut self) {
        if self.drawn && self.redraws {
            stderr("\r\x1b[K");
        }
        self.drawn = false;
    }
}

/// A line of progress. One that is drawn over is cut off by the terminal where its columns end, instead of being continued
/// below, where nothing would clear it.
fn line(text: &str, redraws: bool) -> String {
    if redraws { format!("\r\x1b[K\x1b[?7l{text}\x1b[?7h") } else { format!("{text}\n") }
}

/// Says every few seconds what is being waited for, until dropped.
pub struct Waiting {
    what: Arc<Mutex<String>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Waiting {
    /// Begins to wait for `what`.
    pub fn begin(what: &str, quiet: bool) -> Waiting {
        let what = Arc::new(Mutex::new(what.to_owned()));
        if quiet {
            return Waiting { what, stop: None, thread: None };
        }
        let (stop, stopped) = mpsc::channel();
        let begun = Instant::now();
        let said = Arc::clone(&what);
        let thread = std::thread::Builder::new().name("waiting".into()).spawn(move || {
            while stopped.recv_timeout(SILENCE) == Err(RecvTimeoutError::Timeout) {
                let what = said.lock().unwrap_or_else(PoisonError::into_inner).clone();
                stderr(&format!("{what}: {:.0} s so far\n", begun.elapsed().as_secs_f64()));
            }
        });
        // Without the thread there is silence, nothing worse.
        Waiting { what, stop: Some(stop), thread: thread.ok() }
    }

    /// Shows the line that `text` makes, as [`Progress`] does, until dropped.
    pub fn following(text: impl Fn() -> String + Send + 'static, quiet: bool) -> Waiting {
        let what = Arc::default();
        if quiet {
            return Waiting { what, stop: None, thread: None };
        }
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("waiting".into()).spawn(move || {
            let mut bar = Progress::new(quiet);
            while stopped.recv_timeout(REDRAW) == Err(RecvTimeoutError::Timeout) {
                bar.show(&text);
            }
            bar.end();
        });
        Waiting { what, stop: Some(stop), thread: thread.ok() }
    }

    /// From here on it is `what` that is being waited for.
    pub fn say(&self, what: String) {
        *self.what.lock().unwrap_or_else(PoisonError::into_inner) = what;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Every setting, its value and where it came from, a line each.
pub fn settings_text(settings: &[Setting]) -> String {
    let width = settings.iter().map(|s| s.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for Setting { name, value, origin } in settings {
        let value = setting_text(name, value);
        let _ = writeln!(text, "setting: {name:width$}  {value}  ({origin})");
    }
    text
}

/// The value of a setting as people read it.
pub fn setting_text(name: &str, value: &Value) -> String {
    match value {
        Value::String(text) if name == "ram" => text.parse().map_or_else(|_| text.clone(), size::show),
        Value::String(text) => text.clone(),
        Value::Array(all) if all.is_empty() => "none".to_owned(),
        other => other.to_string(),
    }
}

/// The statistics after an answer.
pub fn stats_text(stats: &Stats, seed: Option<u64>) -> String {
    let mut text = String::from("\n");
    let rate = |rate: Option<f64>| rate.map_or_else(|| "      -      ".into(), |r| format!("{r:>7.1} tok/s"));
    let first = stats.ttft_s.map_or_else(|| "no token".into(), |s| format!("first token after {}", seconds(s)));
    let _ = writeln!(
        text,
        "prompt  {:>7} tokens in {:>8}  {}  {first}, model loaded in {}",
        size::grouped(stats.prompt_tokens as u64),
        seconds(stats.prefill_s),
        rate(stats.prefill_tok_s),
        seconds(stats.load_s),
    );
    kept_line(&mut text, stats);
    let ended = ended(stats);
    let _ = writeln!(
        text,
        "answer  {:>7} tokens in {:>8}  {}  {}{ended}{}",
        size::grouped(stats.tokens as u64),
        seconds(stats.decode_s),
        rate(stats.decode_tok_s),
        over_steps(stats).map_or_else(String::new, |steps| format!("{steps}, ")),
        seed.map_or_else(String::new, |seed| format!(", seed {seed}")),
    );
    draft_line(&mut text, stats);
    stage_table(&mut text, stats);
    disk_lines(&mut text, &stats.io);
    expert_lines(&mut text, &stats.experts);
    if let Some(o) = &stats.overlap {
        let _ = writeln!(
            text,
            "decode  {}: disk busy {}, computing {}, waiting {}; overlap efficiency {:.2}",
            seconds(o.wall_s),
            seconds(o.disk_busy_s),
            seconds(o.compute_busy_s),
            seconds(o.wait_s),
            o.efficiency,
        );
    }
    if let (Some(verdict), Some(advice)) = (stats.verdict, &stats.advice) {
        let _ = writeln!(text, "bound   {verdict}: {advice}");
    }
    let memory = &stats.memory;
    let _ = writeln!(
        text,
        "memory  {} at its peak: {} resident weights, {} expert cache, {} context",
        size::show(memory.rss_peak),
        size::show(memory.resident),
        size::show(memory.cache),
        size::show(memory.kv),
    );
    text
}

/// What drafts were worth.
fn draft_line(text: &mut String, stats: &Stats) {
    let Some(DraftStats { source, drafted, accepted, acceptance, tokens_per_forward, .. }) = stats.draft else {
        return;
    };
    let Some(tokens) = tokens_per_forward else { return };
    let accepted = acceptance.map_or_else(String::new, |share| {
        format!(", {} of them right ({:.1} %)", size::grouped(accepted), 100.0 * share)
    });
    let _ =
        writeln!(text, "drafts  {} by {source}{accepted}; {tokens:.2} tokens a step", size::counted(drafted, "token"),);
}

/// What of the prompt was not computed, and what is kept of the answer.
fn kept_line(text: &mut String, stats: &Stats) {
    let in_context = stats.cached_tokens - stats.kv_file.map_or(0, |file| file.taken).min(stats.cached_tokens);
    if in_context > 0 {
        let tokens = size::grouped(in_context as u64);
        let _ = writeln!(text, "kept    {tokens:>7} of these tokens were in the context, and not computed again");
    }
    let Some(file) = &stats.kv_file else { return };
    let [read, write] = [file.read_s, file.write_s].map(|s| micros(s * 1e6));
    let _ = writeln!(
        text,
        "kept    {:>7} of these tokens were in the file, read in {read}; {} added in {write}",
        size::grouped(file.taken as u64),
        size::grouped(file.added as u64),
    );
}

/// What was read, by which device and from which drives.
fn disk_lines(text: &mut String, io: &IoStats) {
    let how = match io.direct {
        Directness::Direct => "direct",
        Directness::Buffered => "buffered: the page cache may have served some of it",
        Directness::SilentlyBuffered => "asked to be direct, served by the page cache",
    };
    let _ = writeln!(
        text,
        "disk    {} in {} reads, {}, {} waited for ({}, {how})",
        size::show(io.bytes),
        size::grouped(io.reads),
        io.gb_s.map_or_else(|| "no rate".into(), |gb_s| format!("{gb_s:.2} GB/s while reading")),
        seconds(io.wait_s),
        io.device,
    );
    if !io.drives.is_empty() {
        let uses: Vec<String> = io.drives.iter().map(drive_text).collect();
        let _ = writeln!(text, "drives  {}", uses.join("; "));
    }
}

/// Where experts were found, how many were checked, and what reading ahead was worth.
fn expert_lines(text: &mut String, experts: &ExpertStats) {
    let _ = writeln!(
        text,
        "experts {} used, {} from disk, hit rate {}",
        size::grouped(experts.requested),
        size::grouped(experts.missed),
        experts.hit_rate.map_or_else(|| "-".into(), |rate| format!("{:.1} %", 100.0 * rate)),
    );
    if experts.verified > 0 {
        let (reads, took) = (size::counted(experts.verified, "read"), seconds(experts.verify_s));
        let _ = writeln!(text, "checked {reads} of experts by their checksums in {took}");
    }
    if let Some(recall) = experts.lookahead_recall {
        let _ = writeln!(
            text,
            "ahead   {} experts read ahead, {} of them used, {} taken back; {:.1} % of what was asked for was guessed{}",
            size::grouped(experts.prefetch_issued),
            size::grouped(experts.prefetch_used),
            size::grouped(experts.prefetch_cancelled),
            100.0 * recall,
            experts.previous_token_recall.map_or_else(String::new, |share| {
                format!(", {:.1} % was what the token before had asked for", 100.0 * share)
            }),
        );
    }
}

/// What the rate of the answer is of, where that is not its tokens: the first of them came of the prompt.
pub fn over_steps(stats: &Stats) -> Option<String> {
    let steps = stats.decode_steps;
    // A step that checked drafts found several.
    let each = if stats.draft.is_some() { "token" } else { "step" };
    (steps != stats.tokens && stats.decode_tok_s.is_some())
        .then(|| format!("over {}", size::counted(steps as u64, each)))
}

/// How the answer ended.
pub fn ended(stats: &Stats) -> String {
    match (stats.finish_reason, &stats.stop_string) {
        (_, Some(stop)) => format!("stopped before {stop:?}"),
        ("length", _) if stats.context_full => "ended at the end of the context".into(),
        ("length", _) => "ended by its length".into(),
        ("interrupted", _) => "interrupted".into(),
        _ => "ended by the model".into(),
    }
}

/// What one of several drives did.
pub fn drive_text(drive: &DriveUse) -> String {
    let rate = drive.gb_s.map_or_else(String::new, |gb_s| format!(" at {gb_s:.2} GB/s"));
    let failed = match drive.errors {
        0 => String::new(),
        1 => ", 1 request failed".into(),
        errors => format!(", {} requests failed", size::grouped(errors)),
    };
    let wrong = match (drive.wrong, drive.dropped) {
        (_, true) => ", gave wrong bytes and is not read any more",
        (true, false) => ", gave wrong bytes",
        (false, false) => "",
    };
    format!("{} {}{rate}{failed}{wrong}", drive.path, size::show(drive.bytes))
}

fn stage_table(text: &mut String, stats: &Stats) {
    if stats.stages.0.is_empty() {
        return;
    }
    let total = stats.stages.busy_s();
    let share = |part: f64| if total > 0.0 { 100.0 * part / total } else { 0.0 };
    let _ = writeln!(text, "{:<12}{:>10}{:>9}{:>11}{:>11}{:>10}", "stage", "time", "share", "median", "p99", "visits");
    for (name, stage) in &stats.stages.0 {
        let (time, share) = (seconds(stage.busy_s), share(stage.busy_s));
        let (median, p99, visits) = (micros(stage.p50_us), micros(stage.p99_us), size::grouped(stage.n));
        let _ = writeln!(text, "{name:<12}{time:>10}{share:>7.1} %{median:>11}{p99:>11}{visits:>10}");
    }
    let _ = writeln!(text, "{:<12}{:>10}{:>7.1} %", "total", seconds(total), share(total));
}

/// A time with four digits or so.
pub fn seconds(s: f64) -> String {
    if s < 9.9995 {
        format!("{s:.3} s")
    } else if s < 999.95 {
        format!("{s:.1} s")
    } else {
        format!("{s:.0} s")
    }
}

/// A time given in microseconds, with its unit.
pub fn micros(us: f64) -> String {
    if us < 999.95 {
        format!("{us:.1} us")
    } else if us < 999_950.0 {
        format!("{:.1} ms", us / 1e3)
    } else {
        format!("{:.1} s", us / 1e6)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::stats::{ExpertStats, IoStats, MemoryStats, StageStats, Stages};

    #[test]
    fn a_line_that_is_drawn_over_is_not_continued_below_and_one_that_is_not_holds_no_escapes() {
        assert_eq!(line("4 of 24", true), "\r\x1b[K\x1b[?7l4 of 24\x1b[?7h");
        assert_eq!(line("4 of 24", false), "4 of 24\n");
    }

    #[test]
    fn the_statistics_add_up_and_read_well() {
        let stage = |busy_s, n| StageStats { busy_s, p50_us: 12.3, p99_us: 4500.0, n };
        let mut stats = Stats {
            prompt_tokens: 14,
            tokens: 128,
            finish_reason: "length",
            load_s: 0.0312,
            ttft_s: Some(0.131),
            decode_steps: 127,
            prefill_s: 0.125,
            decode_s: 3.175,
            wall_s: 3.3,
            stages: Stages(vec![("attention", stage(1.65, 768)), ("experts", stage(1.65, 12_800))]),
            io: IoStats {
                device: "uring".into(),
                direct: Directness::Direct,
                reads: 1234,
                bytes: 4_200_000_000,
                busy_s: 2.0,
                wait_s: 0.5,
                ..IoStats::default()
            },
            experts: ExpertStats { requested: 10_000, missed: 690, hit_cached: 9310, ..ExpertStats::default() },
            memory: MemoryStats {
                rss_peak: 123_000_000,
                resident: 5_000_000,
                cache: 9_000_000,
                kv: 200_000,
                ..MemoryStats::default()
            },
            ..Stats::default()
        };
        stats.derive();
        let expected = "
prompt       14 tokens in  0.125 s    112.0 tok/s  first token after 0.131 s, model loaded in 0.031 s
answer      128 tokens in  3.175 s     40.0 tok/s  over 127 steps, ended by its length, seed 7
stage             time    share     median        p99    visits
attention      1.650 s   50.0 %    12.3 us     4.5 ms       768
experts        1.650 s   50.0 %    12.3 us     4.5 ms    12,800
total          3.300 s  100.0 %
disk    4.20 GB in 1,234 reads, 2.10 GB/s while reading, 0.500 s waited for (uring, direct)
experts 10,000 used, 690 from disk, hit rate 93.1 %
memory  123 MB at its peak: 5.00 MB resident weights, 9.00 MB expert cache, 200 kB context
";
        assert_eq!(stats_text(&stats, Some(7)), expected);
    }

    #[test]
    fn each_drive_of_several_has_its_share_and_its_rate() {
        let drive = |path: &str, bytes, busy_s, errors| DriveUse {
            path: path.into(),
            bytes,
            busy_s,
            errors,
            dropped: errors == 1,
            ..DriveUse::default()
        };
        let drives =
            vec![drive("/a", 3_000_000_000, 1.5, 0), drive("/b", 500_000_000, 2.0, 1), drive("/c", 0, 0.0, 12)];
        let mut stats = Stats { io: IoStats { drives, ..IoStats::default() }, ..Stats::default() };
        stats.derive();
        let expected = "\ndrives  /a 3.00 GB at 2.00 GB/s; /b 500 MB at 0.25 GB/s, 1 request failed, \
                        gave wrong bytes and is not read any more; /c 0 B, 12 requests failed\n";
        assert!(stats_text(&stats, None).contains(expected), "{}", stats_text(&stats, None));
    }

    #[test]
    fn nothing_done_can_be_shown() {
        let mut stats = Stats::default();
        stats.derive();
        let text = stats_text(&stats, None);
        assert!(text.contains("hit rate -"), "{text}");
        assert!(!text.contains("NaN"), "{text}");
    }
}

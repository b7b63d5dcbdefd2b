//! fio as the yardstick: the same reads of the same file by a program whose figures everybody knows.

use std::fmt;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use millstream_io::measure::median;
use serde_json::Value;

use super::source::Source;
use crate::cli::Failure;
use crate::cli::machine::Machine;

/// A reserved page.
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// The child is looked at this often.
const LOOK: Duration = Duration::from_millis(50);
/// What it may take beyond its run.
const PATIENCE: Duration = Duration::from_secs(60);
/// Depths that are tried with buffers on huge pages.
const DEPTHS: &[u32] = &[1, 2, 4, 8];
/// Depths of the quick form.
const DEPTHS_QUICK: &[u32] = &[2, 4];
/// Without huge pages fio needs more in flight.
const DEPTHS_SMALL_PAGES: &[u32] = &[4, 32];

/// Settings of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FioRun {
    path: PathBuf,
    bytes: u64,
    slab_bytes: u64,
    /// Slabs in flight.
    pub depth: u32,
    /// Whether buffers are on reserved huge pages. If not, the figure is no ceiling.
    pub huge: bool,
}

/// What a run measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FioOutcome {
    gb_s: f64,
    cpu_s_per_gb: f64,
    p50_ms: f64,
    p99_ms: f64,
}

/// The runs of the same settings.
#[derive(Clone, Debug)]
pub struct FioSummary {
    /// The settings.
    pub run: FioRun,
    /// Runs.
    pub rounds: usize,
    /// Median of GB/s.
    pub gb_s: f64,
    /// Slowest run.
    pub gb_s_min: f64,
    /// Fastest run.
    pub gb_s_max: f64,
    /// Median of CPU seconds per GB.
    pub cpu_s_per_gb: f64,
    /// Median of the runs' medians of completion latency.
    pub p50_ms: f64,
    /// Median of the runs' 99th percentiles.
    pub p99_ms: f64,
}

impl fmt::Display for FioRun {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = if self.huge { "shmhuge" } else { "malloc (4 KiB pages)" };
        write!(f, "io_uring direct bs={}k iodepth={} iomem={memory} fixedbufs", self.slab_bytes >> 10, self.depth)
    }
}

impl FioRun {
    fn arguments(&self, seconds: f64) -> Vec<String> {
        // A colon separates file names for fio.
        let path = self.path.display().to_string().replace(':', "\\:");
        let memory = if self.huge { "shmhuge" } else { "malloc" };
        let milliseconds = (seconds * 1000.0).ceil().max(1.0);
        [
            "--name=yardstick".to_owned(),
            format!("--filename={path}"),
            format!("--size={}", self.bytes),
            format!("--bs={}", self.slab_bytes),
            format!("--iodepth={}", self.depth),
            format!("--iomem={memory}"),
            format!("--runtime={milliseconds}ms"),
        ]
        .into_iter()
        .chain(
            [
                "--readonly",
                "--rw=randread",
                "--ioengine=io_uring",
                "--direct=1",
                "--fixedbufs=1",
                "--time_based",
                "--norandommap",
                "--randrepeat=0",
                "--thread",
                "--invalidate=0",
                "--output-format=json",
            ]
            .map(str::to_owned),
        )
        .collect()
    }
}

/// Whether there is a fio to run.
pub fn check() -> Result<(), Failure> {
    match Command::new("fio").arg("--version").stdin(Stdio::null()).output() {
        Ok(output) if output.status.success() => Ok(()),
        Ok(output) => Err(Failure::work(format!("fio --version ended with {}", output.status))),
        Err(error) => Err(Failure::work("--fio runs fio, which cannot be started")
            .cause(error)
            .hint("install it (apt-get install fio), or leave --fio out")),
    }
}

/// The runs to make: on reserved huge pages where enough are free, else marked and deeper.
pub fn runs(machine: &Machine, source: &Source, slab_bytes: u64, quick: bool) -> Vec<FioRun> {
    let Some(path) = source.paths.iter().max_by_key(|path| std::fs::metadata(path).map_or(0, |facts| facts.len()))
    else {
        return Vec::new();
    };
    let bytes = source.largest_bytes / slab_bytes * slab_bytes;
    let free = machine.kernel_facts().free_hugepages;
    let fits = |depth: &u32| (slab_bytes * u64::from(*depth)).div_ceil(HUGE_PAGE_BYTES) < free;
    let run = |huge| move |depth: &u32| FioRun { path: path.clone(), bytes, slab_bytes, depth: *depth, huge };
    let depths = if quick { DEPTHS_QUICK } else { DEPTHS };
    let on_huge: Vec<FioRun> = depths.iter().filter(|depth| fits(depth)).map(run(true)).collect();
    let enough = machine.memory.available / 4 / slab_bytes;
    let on_small = DEPTHS_SMALL_PAGES.iter().filter(|depth| u64::from(**depth) <= enough.max(4)).map(run(false));
    if on_huge.is_empty() { on_small.collect() } else { on_huge }
}

/// Makes one run; `None` when the user stopped it. The error says why there is no figure.
pub fn run(run: &FioRun, seconds: f64, go_on: &mut dyn FnMut() -> bool) -> Result<Option<FioOutcome>, String> {
    let mut command = Command::new("fio");
    command.args(run.arguments(seconds)).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("fio cannot be started: {error}"))?;
    // What it prints fits no pipe's buffer: read it while it runs.
    let collect = |pipe: Option<Box<dyn Read + Send>>| {
        std::thread::spawn(move || {
            let mut text = String::new();
            let _ = pipe.map(|mut pipe| pipe.read_to_string(&mut text));
            text
        })
    };
    let output = collect(child.stdout.take().map(|pipe| Box::new(pipe) as _));
    let errors = collect(child.stderr.take().map(|pipe| Box::new(pipe) as _));
    let late = Instant::now() + Duration::from_secs_f64(seconds) + PATIENCE;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < late && go_on() => std::thread::sleep(LOOK),
            Ok(None) | Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                if Instant::now() < late {
                    return Ok(None);
                }
                return Err(format!("fio ({run}) did not end in time"));
            }
        }
    };
    let (output, errors) = (output.join().unwrap_or_default(), errors.join().unwrap_or_default());
    if !status.success() {
        // An interrupt reaches the child too.
        if !go_on() {
            return Ok(None);
        }
        let said = errors.lines().chain(output.lines()).find(|line| !line.trim().is_empty()).unwrap_or("").trim();
        return Err(format!("fio ({run}) ended with {status}: {said}"));
    }
    parse(&output).map(Some).ok_or_else(|| format!("fio ({run}) printed no figures"))
}

/// The figures in fio's JSON, before which it may print warnings.
fn parse(text: &str) -> Option<FioOutcome> {
    let json: Value = serde_json::from_str(&text[text.find('{')?..]).ok()?;
    let job = &json["jobs"][0];
    let read = &job["read"];
    let bytes = read["io_bytes"].as_f64()?;
    let seconds = read["runtime"].as_f64()? / 1e3;
    let busy = (job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?) / 100.0 * job["job_runtime"].as_f64()? / 1e3;
    let latency = |name: &str| read["clat_ns"]["percentile"][name].as_f64().map(|ns| ns / 1e6);
    if bytes <= 0.0 || seconds <= 0.0 {
        return None;
    }
    Some(FioOutcome {
        gb_s: bytes / 1e9 / seconds,
        cpu_s_per_gb: busy / (bytes / 1e9),
        p50_ms: latency("50.000000")?,
        p99_ms: latency("99.000000")?,
    })
}

/// Medians of the settings that ran, the fastest first.
pub fn summaries(runs: &[FioRun], rounds: &[Vec<FioOutcome>]) -> Vec<FioSummary> {
    let mut all: Vec<FioSummary> = runs
        .iter()
        .zip(rounds)
        .filter_map(|(run, rounds)| {
            let of = |value: fn(&FioOutcome) -> f64| rounds.iter().map(value).collect::<Vec<f64>>();
            let speeds = of(|outcome| outcome.gb_s);
            Some(FioSummary {
                run: run.clone(),
                rounds: rounds.len(),
                gb_s: median(&speeds)?,
                gb_s_min: speeds.iter().copied().fold(f64::INFINITY, f64::min),
                gb_s_max: speeds.iter().copied().fold(0.0, f64::max),
                cpu_s_per_gb: median(&of(|outcome| outcome.cpu_s_per_gb))?,
                p50_ms: median(&of(|outcome| outcome.p50_ms))?,
                p99_ms: median(&of(|outcome| outcome.p99_ms))?,
            })
        })
        .collect();
    all.sort_by(|a, b| b.gb_s.total_cmp(&a.gb_s));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = r#"fio: a warning
{ "fio version" : "fio-3.33", "jobs" : [ { "jobname" : "yardstick", "job_runtime" : 2000, "usr_cpu" : 0.5,
  "sys_cpu" : 1.0, "read" : { "io_bytes" : 4000000000, "runtime" : 2000,
  "clat_ns" : { "percentile" : { "50.000000" : 46000000, "99.000000" : 99000000 } } } } ] }"#;

    fn yardstick(depth: u32) -> FioRun {
        FioRun { path: "/a:b".into(), bytes: 40 << 20, slab_bytes: 19 << 20, depth, huge: true }
    }

    #[test]
    fn figures_are_read_from_its_json() {
        // 4 GB in 2 s; 1.5 % of 2 s are 0.03 s of CPU.
        let outcome = parse(OUTPUT).unwrap();
        assert_eq!((outcome.gb_s, outcome.p50_ms, outcome.p99_ms), (2.0, 46.0, 99.0));
        assert!((outcome.cpu_s_per_gb - 0.0075).abs() < 1e-12);
        assert_eq!(parse("fio: it failed"), None);
        assert_eq!(parse("{}"), None);
        assert_eq!(parse(&OUTPUT.replace("4000000000", "0")), None);
    }

    #[test]
    fn a_colon_in_a_name_is_no_separator_and_nothing_can_be_written() {
        let arguments = yardstick(4).arguments(0.5);
        for wanted in ["--filename=/a\\:b", "--readonly", "--bs=19922944", "--iodepth=4", "--runtime=500ms"] {
            assert!(arguments.iter().any(|argument| argument == wanted), "{arguments:?}");
        }
    }

    #[test]
    fn the_fastest_settings_come_first_and_what_never_ran_is_left_out() {
        let outcome = |gb_s| FioOutcome { gb_s, cpu_s_per_gb: 0.1, p50_ms: 1.0, p99_ms: 2.0 };
        let runs = [yardstick(1), yardstick(2), yardstick(4)];
        let rounds = [vec![outcome(1.0), outcome(3.0), outcome(2.0)], vec![], vec![outcome(2.5)]];
        let all = summaries(&runs, &rounds);
        assert_eq!(all.iter().map(|s| (s.run.depth, s.gb_s)).collect::<Vec<_>>(), [(4, 2.5), (1, 2.0)]);
        assert_eq!((all[1].gb_s_min, all[1].gb_s_max, all[1].rounds), (1.0, 3.0, 3));
    }
}

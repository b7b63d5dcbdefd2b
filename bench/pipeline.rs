//! What overlap and reading ahead are worth, in every fixed position of their switches and left to themselves, on drives
//! of every speed.
//!
//! `cargo bench --bench pipeline` draws a model of a few hundred megabytes, measures what a token of it takes without
//! reading, and plays drives beside which that is little, as much, or a lot, and one that serves one read after the
//! other. On each of them one engine generates the same tokens in every position of `--pipeline` and `--prefetch`, the
//! positions taking turns in a new order each round. One engine, as two that are set alike differ by more than what is
//! looked for: by where their memory lies. One position takes part twice, which shows what is left of that.
//!
//! What a run finds in the cache is what the prompt before its answer left: it is the same for all, and asks for more
//! experts than there are slabs. What is counted begins after it. `auto` goes on from what it measured in its own runs;
//! it measures nothing in those of others. "early" are guesses made before the shared expert.
//!
//! Medians are printed as a Markdown table, and every position is compared with the best fixed one round by round. The
//! experts come from the page cache, so that the played drive is the slower one; one thread computes, in f32, and one
//! copies, so that each has a core of its own. Under `cargo test` it does the same with a few tokens.
//! `MILLSTREAM_BENCH_DIR` names the directory of the model, which is removed at the end, `MILLSTREAM_BENCH_ONLY` a
//! part of the name of the drives to play, and `MILLSTREAM_BENCH_LAYERS` how many layers the model is to have.

// An engine's error is large, and made once an engine at most.
#![allow(clippy::result_large_err)]

use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::arch::MlpKind;
use millstream::checkpoint::synth::{SynthOptions, synth};
use millstream::engine::sampler::Sampling;
use millstream::engine::stats::Stats;
use millstream::engine::{Activations, Engine, EngineConfig, GuessFrom, GuessRule, Job, Memory, Switch, Switches};
use millstream_io::{DeviceConfig, DeviceKind, IoMode, ThrottleConfig, open_device, throttled};

/// Share of the experts that there are slabs for.
const CACHED: f64 = 0.4;
/// Reads that a drive serves at a time, where it is not one.
const PARALLEL: usize = 8;
/// Before the first byte of a read.
const LATENCY: Duration = Duration::from_micros(80);

/// A position of the switches.
struct Position {
    pipeline: &'static str,
    prefetch: &'static str,
    switches: Switches,
    /// Whether it is one that `auto` is measured against.
    fixed: bool,
}

const fn position(pipeline: (&'static str, Switch), prefetch: (&'static str, Switch), from: GuessFrom) -> Position {
    let guess = GuessRule { from, layers: 1 };
    Position {
        pipeline: pipeline.0,
        prefetch: prefetch.0,
        switches: Switches { pipeline: pipeline.1, prefetch: prefetch.1, guess },
        fixed: true,
    }
}

const ON: (&str, Switch) = ("on", Switch::On);
const OFF: (&str, Switch) = ("off", Switch::Off);
const AUTO: (&str, Switch) = ("auto", Switch::Auto);
/// Guesses are worse, and there sooner.
const EARLY: (&str, Switch) = ("early", Switch::On);
/// The first position once more.
const AGAIN: (&str, Switch) = ("on, again", Switch::On);

const POSITIONS: [Position; 7] = [
    position(ON, ON, GuessFrom::Shared),
    position(ON, EARLY, GuessFrom::Attention),
    position(ON, OFF, GuessFrom::Shared),
    position(OFF, ON, GuessFrom::Shared),
    position(OFF, OFF, GuessFrom::Shared),
    Position { fixed: false, ..position(ON, AGAIN, GuessFrom::Shared) },
    Position { fixed: false, ..position(AUTO, AUTO, GuessFrom::Shared) },
];

/// How much one measurement does.
struct Size {
    preset: &'static str,
    tokens: usize,
    rounds: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let measuring = std::env::args().any(|arg| arg == "--bench");
    let size = match measuring {
        true => Size { preset: "medium", tokens: 32, rounds: 9 },
        false => Size { preset: "small", tokens: 6, rounds: 1 },
    };
    let layers = match std::env::var("MILLSTREAM_BENCH_LAYERS") {
        Ok(layers) if measuring => Some(layers.parse::<usize>()?),
        _ => None,
    };
    // About as many visits of layers, however many a token has.
    let tokens = layers.map_or(size.tokens, |layers| (256 / layers).max(8));
    let size = Size { tokens, ..size };
    let dir = std::env::var_os("MILLSTREAM_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let dir = tempfile::tempdir_in(dir)?;
    let model = dir.path().join("model");
    let dense_layers = layers.map(|_| 1);
    synth(&model, &SynthOptions { layers, dense_layers, ..SynthOptions::new(size.preset.parse()?) }, &mut |_| {})?;
    let drives = drives(&model, &size)?;
    let only = std::env::var("MILLSTREAM_BENCH_ONLY").ok();
    for (name, drive) in drives.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| name.contains(only))) {
        let runs = measure(&model, drive, &size)?;
        let latency = drive.latency.as_secs_f64() * 1e3;
        println!(
            "### {name}: {:.2} GB/s, {latency:.2} ms, {} at a time\n",
            drive.bytes_per_s as f64 / 1e9,
            drive.parallelism
        );
        show(&runs)?;
    }
    Ok(())
}

/// Drives that are played, by what the arithmetic and the reads of a token take here.
fn drives(model: &Path, size: &Size) -> Result<[(&'static str, ThrottleConfig); 4], Box<dyn Error>> {
    let unaided = Switches { pipeline: Switch::On, prefetch: Switch::Off, ..Switches::default() };
    // Once through the page cache, and what a token takes where nothing is read or waited for.
    let mut resident = open(model, None)?;
    resident.set_switches(unaided)?;
    generate(&mut resident, size)?;
    let stats = generate(&mut resident, size)?;
    let compute_s = stats.decode_s / stats.decode_steps as f64;
    drop(resident);
    // What a token reads where experts have to share slabs, and the bytes of a read.
    let mut streamed = open(model, Some(ThrottleConfig::default()))?;
    streamed.set_switches(unaided)?;
    // Of the answer alone: what its prompt reads, after such an answer, is taken off.
    generate(&mut streamed, size)?;
    let stats = generate(&mut streamed, size)?;
    let prompt = generate(&mut streamed, &Size { tokens: 1, ..*size })?;
    let steps = stats.decode_steps as f64;
    let bytes = stats.io.bytes.saturating_sub(prompt.io.bytes) as f64 / steps;
    let reads = stats.io.reads.saturating_sub(prompt.io.reads) as f64 / steps;
    println!("a token computes {:.2} ms and reads {:.2} MB in {reads:.1} reads\n", compute_s * 1e3, bytes / 1e6);
    let parallel = |times: f64| ThrottleConfig {
        latency: LATENCY,
        bytes_per_s: (bytes / (compute_s * times)) as u64 + 1,
        parallelism: PARALLEL,
        queue: 64,
    };
    // Half of its time is latency, which nothing hides.
    let one_by_one = ThrottleConfig {
        latency: Duration::from_secs_f64(compute_s / reads / 2.0),
        bytes_per_s: (bytes / (compute_s / 2.0)) as u64 + 1,
        parallelism: 1,
        queue: 64,
    };
    Ok([
        ("disk 4 times arithmetic", parallel(4.0)),
        ("balanced", parallel(1.0)),
        ("balanced, one read at a time", one_by_one),
        ("arithmetic 4 times disk", parallel(0.25)),
    ])
}

/// For each position the statistics of its runs, one a round. The first round fills the cache, and is not counted.
fn measure(model: &Path, drive: &ThrottleConfig, size: &Size) -> Result<Vec<Vec<Stats>>, Box<dyn Error>> {
    let mut engine = open(model, Some(*drive))?;
    let mut runs = vec![vec![]; POSITIONS.len()];
    let mut order: Vec<usize> = (0..POSITIONS.len()).collect();
    let mut random = Random(1);
    for _ in 0..=size.rounds {
        for at in (1..order.len()).rev() {
            order.swap(at, random.below(at + 1));
        }
        for &at in &order {
            engine.set_switches(POSITIONS[at].switches)?;
            runs[at].push(generate(&mut engine, size)?);
        }
    }
    Ok(runs)
}

/// A linear congruential generator: the order of the positions is the same in every run of the bench.
struct Random(u64);

impl Random {
    /// Even enough for a handful of values.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % bound
    }
}

/// Prints the table of one drive.
fn show(runs: &[Vec<Stats>]) -> Result<(), Box<dyn Error>> {
    // Of each position, by round; the first is not counted.
    let took: Vec<Vec<f64>> =
        runs.iter().map(|runs| runs.iter().map(|s| 1e3 * s.decode_s / s.decode_steps as f64).collect()).collect();
    let medians: Vec<f64> = took.iter().map(|took| quartiles(&took[1..])[1]).collect();
    let fixed = (0..runs.len()).filter(|&at| POSITIONS[at].fixed);
    let best = fixed.min_by(|&a, &b| medians[a].total_cmp(&medians[b])).ok_or("no fixed position")?;
    println!(
        "| pipeline | prefetch | ms a token | least | most | of the best [quartiles] | efficiency | disk | arithmetic | \
         wait | hits | ahead | used |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for (at, position) in POSITIONS.iter().enumerate() {
        let times = &took[at][1..];
        // The run whose time is the median stands for the others.
        let median = times.iter().position(|&took| took == medians[at]).ok_or("no median run")?;
        let stats = &runs[at][1 + median];
        let ratios = ratios(&took[at], &took[best]);
        let [low, ratio, high] = quartiles(&ratios[1..]);
        let (overlap, experts) = (stats.overlap.unwrap_or_default(), &stats.experts);
        let share = |seconds: f64| 100.0 * seconds / overlap.wall_s;
        println!(
            "| {} | {} | {:.2} | {:.2} | {:.2} | {ratio:.3} [{low:.3}..{high:.3}] | {:.3} | {:.0} % | {:.0} % | {:.0} % \
             | {:.2} | {} | {} |",
            position.pipeline,
            position.prefetch,
            medians[at],
            times.iter().copied().fold(f64::INFINITY, f64::min),
            times.iter().copied().fold(0.0, f64::max),
            overlap.efficiency,
            share(overlap.disk_busy_s),
            share(overlap.compute_busy_s),
            share(overlap.wait_s),
            experts.hit_rate.unwrap_or(0.0),
            experts.prefetch_issued,
            experts.prefetch_used,
        );
    }
    let auto = POSITIONS.len() - 1;
    println!(
        "\nThe best fixed position is {}, {}. auto takes {:.3} of it by medians. Recall of guesses: {:.2}.\n",
        POSITIONS[best].pipeline,
        POSITIONS[best].prefetch,
        medians[auto] / medians[best],
        runs[0][0].experts.lookahead_recall.unwrap_or(0.0)
    );
    Ok(())
}

/// Round by round.
fn ratios(times: &[f64], of: &[f64]) -> Vec<f64> {
    times.iter().zip(of).map(|(time, of)| time / of).collect()
}

/// First quartile, median and third, each of them one of the values.
fn quartiles(values: &[f64]) -> [f64; 3] {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    [1, 2, 3].map(|n| sorted[(sorted.len() - 1) * n / 4])
}

/// An engine whose experts come from the page cache, slowed down where `drive` says so; all there without it.
fn open(model: &Path, drive: Option<ThrottleConfig>) -> Result<Engine, Box<dyn Error>> {
    let checkpoint = Checkpoint::open(model)?;
    let arch = &checkpoint.arch;
    let experts = arch.layers.iter().filter(|layer| layer.mlp == MlpKind::Sparse).count() * arch.moe.experts;
    let slabs = if drive.is_some() { (experts as f64 * CACHED) as usize } else { experts };
    let config = EngineConfig {
        io: IoMode::Buffered,
        memory: Memory::Slabs(slabs),
        context: Some(256),
        // The slower arithmetic: more time for each byte that has to be copied.
        activations: Activations::F32,
        ..EngineConfig::new(1 << 40)
    };
    Ok(Engine::open_with(checkpoint, &config, &|files, pool| {
        // A second one would copy on the core that computes.
        let threads = DeviceConfig { kind: DeviceKind::Threads, threads: 1, ..DeviceConfig::default() };
        let inner = open_device(&threads, files.clone(), pool)?;
        Ok(match drive {
            Some(drive) => throttled(inner, &drive)?,
            None => inner,
        })
    })?)
}

fn generate(engine: &mut Engine, size: &Size) -> Result<Stats, Box<dyn Error>> {
    let vocab = engine.arch().vocab as u32;
    let prompt = (0..8).map(|i| (i * 97 + 5) % vocab).collect();
    // At this temperature drawn weights do not fall into a loop of a few tokens.
    let sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7 };
    let job = Job { prompt, max_tokens: size.tokens, sampling, stop_ids: vec![] };
    engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(()))?;
    Ok(engine.stats())
}

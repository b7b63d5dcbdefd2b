//! What overlap and reading ahead are worth, in every fixed position of their switches and left to themselves, on drives
//! of every speed.
//!
//! `cargo bench --bench pipeline` draws a model of a few hundred megabytes, measures what a token of it takes without
//! reading, and plays drives beside which that is little, as much, or a lot, and one that serves one read after the other.
//! On each of them every position of `--pipeline` and `--prefetch` generates the same tokens, the positions taking
//! turns, in another order each round; medians are printed as a Markdown table. `auto` is compared with the best fixed
//! position round by round. "early" are guesses made before the shared expert. The experts come from the page cache, so
//! that the played drive is the slower one; one thread computes, and in f32, so that copying has a core of its own and
//! takes little of its time. Under `cargo test` it does the same with a few tokens. `MILLSTREAM_BENCH_DIR` names the
//! directory of the model, which is removed at the end.

// An engine's error is large, and made once an engine at most.
#![allow(clippy::result_large_err)]

use std::error::Error;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::synth::{Preset, SynthOptions, synth};
use millstream::engine::sampler::Sampling;
use millstream::engine::stats::Stats;
use millstream::engine::{Activations, Engine, EngineConfig, GuessFrom, GuessRule, Job, Memory, Switch};
use millstream_io::{DeviceConfig, DeviceKind, IoMode, ThrottleConfig, open_device, throttled};

/// Share of the experts that there are slabs for.
const CACHED: f64 = 0.4;
/// Reads that a drive serves at a time, where it is not one.
const PARALLEL: usize = 8;
/// Before the first byte of a read.
const LATENCY: Duration = Duration::from_micros(80);

/// A position of `--pipeline` and `--prefetch`, and where guesses are made.
struct Position {
    pipeline: (&'static str, Switch),
    prefetch: (&'static str, Switch),
    from: GuessFrom,
}

const ON: (&str, Switch) = ("on", Switch::On);
const OFF: (&str, Switch) = ("off", Switch::Off);
const AUTO: (&str, Switch) = ("auto", Switch::Auto);
/// Guesses are worse, and there sooner.
const EARLY: (&str, Switch) = ("early", Switch::On);

const fn position(pipeline: (&'static str, Switch), prefetch: (&'static str, Switch)) -> Position {
    Position { pipeline, prefetch, from: GuessFrom::Shared }
}

/// The last is compared with the others.
const POSITIONS: [Position; 6] = [
    position(ON, ON),
    Position { from: GuessFrom::Attention, ..position(ON, EARLY) },
    position(ON, OFF),
    position(OFF, ON),
    position(OFF, OFF),
    position(AUTO, AUTO),
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
    let dir = std::env::var_os("MILLSTREAM_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let dir = tempfile::tempdir_in(dir)?;
    let model = dir.path().join("model");
    synth(&model, &SynthOptions::new(size.preset.parse::<Preset>()?), &mut |_| {})?;
    // Once through the page cache, and what a token takes where nothing is read or waited for.
    let mut resident = open(&model, None, &position(ON, OFF))?;
    generate(&mut resident, &size)?;
    let stats = generate(&mut resident, &size)?;
    let compute_s = stats.decode_s / stats.decode_steps as f64;
    drop(resident);
    // What a token reads where experts have to share slabs, and the bytes of a read.
    let mut streamed = open(&model, Some(ThrottleConfig::default()), &position(ON, OFF))?;
    let stats = generate(&mut streamed, &size)?;
    let bytes = stats.io.bytes as f64 / (stats.prompt_tokens + stats.decode_steps) as f64;
    let reads = stats.io.reads as f64 / (stats.prompt_tokens + stats.decode_steps) as f64;
    drop(streamed);
    println!(
        "a token computes {:.2} ms and reads {:.2} MB in {reads:.1} reads, hit rate {:.2}\n",
        compute_s * 1e3,
        bytes / 1e6,
        stats.experts.hit_rate.unwrap_or(0.0)
    );
    let parallel = |times: f64| ThrottleConfig {
        latency: LATENCY,
        bytes_per_s: (bytes / (compute_s * times)) as u64 + 1,
        parallelism: PARALLEL,
        queue: 64,
    };
    // Half of its time is latency, which nothing hides.
    let serial = ThrottleConfig {
        latency: Duration::from_secs_f64(compute_s / reads / 2.0),
        bytes_per_s: (bytes / (compute_s / 2.0)) as u64 + 1,
        parallelism: 1,
        queue: 64,
    };
    let regimes = [
        ("disk 4 times arithmetic", parallel(4.0)),
        ("balanced", parallel(1.0)),
        ("arithmetic 4 times disk", parallel(0.25)),
        ("balanced, one read at a time", serial),
    ];
    let only = std::env::var("MILLSTREAM_BENCH_ONLY").ok();
    for (name, drive) in regimes.iter().filter(|(name, _)| only.as_ref().is_none_or(|only| name.contains(only))) {
        regime(&model, name, drive, &size)?;
    }
    Ok(())
}

/// Prints the table of one drive.
fn regime(model: &Path, name: &str, drive: &ThrottleConfig, size: &Size) -> Result<(), Box<dyn Error>> {
    let mut arms = vec![];
    for position in &POSITIONS {
        arms.push((position.pipeline.0, position.prefetch.0, open(model, Some(*drive), position)?, vec![]));
    }
    // The first round fills the cache and is not counted.
    for round in 0..=size.rounds {
        for turn in 0..arms.len() {
            // Each round begins with another one, and every second goes backwards.
            let step = if round % 2 == 0 { turn } else { arms.len() - turn };
            let at = (round + step) % arms.len();
            let (_, _, engine, runs) = &mut arms[at];
            let stats = generate(engine, size)?;
            if round > 0 {
                runs.push(stats);
            }
        }
    }
    let latency = drive.latency.as_secs_f64() * 1e3;
    println!(
        "### {name}: {:.2} GB/s, {latency:.2} ms, {} at a time\n",
        drive.bytes_per_s as f64 / 1e9,
        drive.parallelism
    );
    println!(
        "| pipeline | prefetch | ms a token | least | most | efficiency | disk | arithmetic | wait | hits | ahead | used |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|");
    let took = |stats: &Stats| 1e3 * stats.decode_s / stats.decode_steps as f64;
    let rounds: Vec<Vec<f64>> = arms.iter().map(|(_, _, _, runs)| runs.iter().map(took).collect()).collect();
    let mut table: Vec<(f64, &str, &str, Vec<Stats>)> = vec![];
    for (pipeline, prefetch, _, mut runs) in arms {
        runs.sort_by(|a, b| took(a).total_cmp(&took(b)));
        table.push((took(&runs[runs.len() / 2]), pipeline, prefetch, runs));
    }
    for (median, pipeline, prefetch, runs) in &table {
        let stats = &runs[runs.len() / 2];
        let (overlap, experts) = (stats.overlap.unwrap_or_default(), &stats.experts);
        let share = |seconds: f64| 100.0 * seconds / overlap.wall_s;
        println!(
            "| {pipeline} | {prefetch} | {median:.2} | {:.2} | {:.2} | {:.3} | {:.0} % | {:.0} % | {:.0} % | {:.2} | {} | {} |",
            took(&runs[0]),
            took(&runs[runs.len() - 1]),
            overlap.efficiency,
            share(overlap.disk_busy_s),
            share(overlap.compute_busy_s),
            share(overlap.wait_s),
            experts.hit_rate.unwrap_or(0.0),
            experts.prefetch_issued,
            experts.prefetch_used,
        );
    }
    let (auto, fixed) = rounds.split_last().ok_or("no position")?;
    let best = (0..fixed.len()).min_by(|&a, &b| table[a].0.total_cmp(&table[b].0)).ok_or("no fixed position")?;
    let mut ratios: Vec<f64> = auto.iter().zip(&fixed[best]).map(|(auto, best)| auto / best).collect();
    ratios.sort_by(f64::total_cmp);
    let quartile = |n: usize| ratios[(ratios.len() - 1) * n / 4];
    let recall = table[0].3[0].experts.lookahead_recall.unwrap_or(0.0);
    println!(
        "\nauto takes {:.3} of {}, {}, the best fixed position, in the median of {} rounds [quartiles {:.3}..{:.3}]; ratio of \
         medians {:.3}; recall of guesses {recall:.2}\n",
        quartile(2),
        table[best].1,
        table[best].2,
        ratios.len(),
        quartile(1),
        quartile(3),
        table[table.len() - 1].0 / table[best].0
    );
    Ok(())
}

/// An engine whose experts come from the page cache, slowed down where `drive` says so; all there without it.
fn open(model: &Path, drive: Option<ThrottleConfig>, position: &Position) -> Result<Engine, Box<dyn Error>> {
    let checkpoint = Checkpoint::open(model)?;
    let arch = &checkpoint.arch;
    let experts = arch.layers.iter().filter(|layer| layer.mlp == millstream::checkpoint::arch::MlpKind::Sparse).count()
        * arch.moe.experts;
    let slabs = if drive.is_some() { (experts as f64 * CACHED) as usize } else { experts };
    let config = EngineConfig {
        io: IoMode::Buffered,
        memory: Memory::Slabs(slabs),
        context: Some(256),
        // The slower arithmetic: more time for each byte that has to be copied.
        activations: Activations::F32,
        pipeline: position.pipeline.1,
        prefetch: position.prefetch.1,
        guess: GuessRule { from: position.from, ..GuessRule::default() },
        ..EngineConfig::new(1 << 40)
    };
    Ok(Engine::open_with(checkpoint, &config, &|files, pool| {
        let threads = DeviceConfig { kind: DeviceKind::Threads, threads: 2, ..DeviceConfig::default() };
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

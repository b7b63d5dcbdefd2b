//! What each precision costs in agreement with the unquantized model, as a table.
//!
//! `cargo bench --bench quality` measures every precision on all held-out windows (20,460 tokens); without `--bench` (a
//! test run) one short window of two precisions shows that it works.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../tests/golden/quality.rs"]
mod quality;
#[allow(dead_code)]
#[path = "../tests/golden/reference.rs"]
mod reference;
#[allow(dead_code)]
#[path = "../tests/golden/scores.rs"]
mod scores;

use std::path::Path;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::container::MatrixSource;
use millstream::engine::quality::{Estimate, Quality, Window};
use millstream::engine::{Activations, Engine, EngineConfig, KvBits};
use scores::{argmaxes, nll};

/// Ids of the window of a test run.
const SMOKE_IDS: usize = 48;
/// Positions of the longest context.
const CONTEXT: usize = 4096;

fn main() {
    let full = std::env::args().any(|a| a == "--bench");
    let mut windows = reference::windows();
    let mut precisions = quality::precisions();
    if !full {
        windows.truncate(1);
        windows[0].truncate(SMOKE_IDS);
        precisions.truncate(2);
    }

    println!(
        "| weights | activations | expert bytes | argmax, prompts | argmax, held-out | perplexity | of unquantized |"
    );
    println!("|---|---|---|---|---|---|---|");
    let source = reference::Reference::glm_tales().model;
    let (base, base_argmax) = held_out(&mut quality::open(&source, Activations::F32), &windows);
    let row = |name: &str, dir: &Path, activations: Activations| {
        let mut engine = quality::open(dir, activations);
        let agreement = quality::prompt_agreement(&mut engine);
        let (perplexity, argmax) = held_out(&mut engine, &windows);
        let same = 1.0 - scores::differing(&argmax, &base_argmax).len() as f64 / argmax.len() as f64;
        println!(
            "| {name} | {} | {} | {agreement:.4} | {same:.4} | {perplexity:.3} | {:+.2} % |",
            match activations {
                Activations::F32 => "f32",
                Activations::Int8 => "int8",
            },
            expert_bytes(dir),
            (perplexity / base - 1.0) * 100.0,
        );
    };
    row("FP8, as trained", &source, Activations::F32);
    for precision in &precisions {
        let dir = tempfile::tempdir().expect("a temporary directory");
        quality::make(precision, dir.path());
        row(precision.name, dir.path(), Activations::F32);
        row(precision.name, dir.path(), Activations::Int8);
    }
    halves(&source, &windows);
    // As long as the context: most of what there is to see is chosen by index keys.
    let all: Vec<u32> = windows.concat();
    halves(&source, &all.chunks_exact(if full { CONTEXT } else { SMOKE_IDS }).map(<[u32]>::to_vec).collect::<Vec<_>>());
}

/// What a cache of halves costs over `windows`, against one of f32 with the same weights.
fn halves(model: &Path, windows: &[Vec<u32>]) {
    let [mut whole, mut halves] = [KvBits::Bits32, KvBits::Bits16].map(|kv_bits| {
        let config = EngineConfig { activations: Activations::F32, threads: 2, kv_bits, ..EngineConfig::new(1 << 30) };
        Engine::open(Checkpoint::open(model).unwrap(), &config).unwrap()
    });
    let vocab = whole.arch().vocab;
    let compared: Vec<Window> = windows
        .iter()
        .map(|ids| {
            let (base, other) = (whole.score(ids).unwrap(), halves.score(ids).unwrap());
            let mut window = Window::default();
            for (at, (base, other)) in base.chunks_exact(vocab).zip(other.chunks_exact(vocab)).enumerate() {
                window.add(base, other, ids.get(at + 1).copied()).unwrap();
            }
            window
        })
        .collect();
    let quality = Quality::of(&compared).unwrap();
    let error = |of: Estimate| of.error.unwrap_or(0.0);
    println!(
        "\ncache of bf16, {} windows of {}: argmax {:.4}, perplexity {:.3}, {:+.3} ± {:.3} % of a cache of f32, divergence {:.6} ± {:.6} nats, p99 {:.5}",
        windows.len(),
        windows[0].len(),
        quality.agreement,
        quality.perplexity,
        (quality.ratio() - 1.0) * 100.0,
        error(quality.loss) * 100.0,
        quality.divergence.mean,
        error(quality.divergence),
        quality.divergence_p99,
    );
}

/// Bytes of one routed expert of the model in `dir`, scales included.
fn expert_bytes(dir: &Path) -> u64 {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let expert = &checkpoint.experts.layers.iter().flatten().next().unwrap()[0];
    let bytes = |m: &MatrixSource| m.data.len + m.scales.map_or(0, |s| s.len);
    bytes(&expert.gate) + bytes(&expert.up) + bytes(&expert.down)
}

/// Perplexity over `windows`, and the argmax of every position.
fn held_out(engine: &mut Engine, windows: &[Vec<u32>]) -> (f64, Vec<u32>) {
    let vocab = engine.arch().vocab;
    let (mut total, mut tokens, mut argmax) = (0.0, 0, vec![]);
    for ids in windows {
        let logits = engine.score(ids).unwrap();
        total += nll(&logits, ids);
        tokens += ids.len() - 1;
        argmax.extend(argmaxes(&logits, vocab));
    }
    ((total / tokens as f64).exp(), argmax)
}

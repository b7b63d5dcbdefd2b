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
use millstream::engine::{Activations, Engine};
use scores::{argmaxes, nll};

/// Ids of the window of a test run.
const SMOKE_IDS: usize = 48;

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

//! Which cache policy comes nearest the optimum, as tables: on what the bundled model's router chooses, and on made-up
//! routers of other skews.
//!
//! `cargo bench --bench policies` records the held-out windows of the bundled model and replays everything; it measures
//! no time, so that any machine gives the same tables but for the last bits of the model's arithmetic. Without `--bench`
//! (a test run) it does the same with a few tokens.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../tests/golden/reference.rs"]
mod reference;

use std::sync::atomic::AtomicBool;

use millstream::checkpoint::Checkpoint;
use millstream::engine::{AttentionForm, Engine, EngineConfig, Memory};
use millstream::store::policy::PolicyKind;
use millstream::store::trace::simulate::Requests;
use millstream::store::trace::synth::{Shape, synthesize};
use millstream::store::trace::{Recorder, Trace};

/// Shares of the working set.
const SIZES: [usize; 4] = [10, 25, 50, 75];

/// Traces that are replayed one after another.
struct Set {
    name: &'static str,
    traces: Vec<Trace>,
}

fn main() {
    let full = std::env::args().any(|a| a == "--bench");
    let mut windows = reference::windows();
    let mut tokens = 2000;
    if !full {
        windows.truncate(2);
        windows.iter_mut().for_each(|window| window.truncate(40));
        tokens = 30;
    }
    // A decay period was chosen on every other window; the rest is held out.
    let [tuned, held_out] = record(&windows);
    let made_up = |name, skew, repeat, topic| {
        let shape = Shape { layers: 16, experts: 64, top_k: 6, tokens, skew, repeat, topic, seed: 1 };
        Set { name, traces: vec![synthesize(&shape)] }
    };
    let sets = [
        Set { name: "glm-tales, held-out text", traces: vec![held_out] },
        Set { name: "glm-tales, the text that the decay period was chosen on", traces: vec![tuned] },
        made_up("made up: all experts alike", 0.0, 0.0, 0),
        made_up("made up: skew 0.5", 0.5, 0.0, 0),
        made_up("made up: skew 1", 1.0, 0.0, 0),
        made_up("made up: skew 1, another topic every 200 tokens", 1.0, 0.0, 200),
        made_up("made up: skew 0.8, three of ten choices are the last token's", 0.8, 0.3, 0),
        made_up("made up: the same, another topic every 400 tokens", 0.8, 0.3, 400),
        made_up("made up: skew 0.3, half of the choices are the last token's", 0.3, 0.5, 0),
    ];
    let long_past = |name, skew, repeat, topic| {
        let (past, now) = (tokens, tokens / 7);
        let shape = Shape { layers: 12, experts: 256, top_k: 8, tokens: past + now, skew, repeat, topic, seed: 1 };
        let all = synthesize(&shape);
        (name, all.part(0..past), all.part(past..past + now))
    };
    let begins = sets[0].traces[0].part(0..400.min(sets[0].traces[0].steps()));
    let histories = [
        ("glm-tales, the first 400 tokens after 10,240 of other text", sets[1].traces[0].clone(), begins),
        long_past("made up: 256 experts, skew 1", 1.0, 0.0, 0),
        long_past("made up: 256 experts, skew 0.5", 0.5, 0.0, 0),
        long_past("made up: 256 experts, skew 0.8, two of ten choices are the last token's", 0.8, 0.2, 0),
        long_past("made up: the same, another topic every 200 tokens", 0.8, 0.2, 200),
    ];
    let mut of_optimum = [0.0; PolicyKind::ALL.len()];
    sets.iter().for_each(|set| show(set, &mut of_optimum));
    println!("## After earlier runs\n\nWhat a history of selections is worth: pinned, or remembered as heat.\n");
    println!("| trace | cache | lru | lru, pinned | lookahead | lookahead, pinned | lookahead, remembered | belady |");
    println!("|---|---|---|---|---|---|---|---|");
    histories.iter().for_each(|(name, past, now)| show_history(name, past, now));
    println!();
    println!("Mean share of the optimum's hit rate over all rows:\n");
    for (kind, sum) in PolicyKind::ALL.iter().zip(of_optimum) {
        println!("- {kind}: {:.3}", sum / (sets.len() * SIZES.len()) as f64);
    }
}

/// Prints what a past is worth to a policy that can only pin by it, and to one that can remember it.
fn show_history(name: &str, past: &Trace, now: &Trace) {
    let (history, requests) = (Requests::of(&[past]).usage(), Requests::of(&[now]));
    for size in SIZES {
        let capacity = (requests.keys() * size / 100).max(1);
        let cold = |kind| requests.replay(kind, capacity).hit_rate();
        let with = |kind, pinned| requests.replay_with_history(kind, capacity, &history, pinned).hit_rate();
        println!(
            "| {name} | {size} % | {:.3} | {:.3} | {:.3} | {:.3} | {:.3} | {:.3} |",
            cold(PolicyKind::Lru),
            with(PolicyKind::Lru, true),
            cold(PolicyKind::Lookahead),
            with(PolicyKind::Lookahead, true),
            with(PolicyKind::Lookahead, false),
            requests.optimum(capacity).hit_rate(),
        );
    }
}

/// What the router chooses for `windows`: for every other one, and for the rest.
fn record(windows: &[Vec<u32>]) -> [Trace; 2] {
    let source = reference::Reference::glm_tales().model;
    let config = EngineConfig {
        memory: Memory::Slabs(1000),
        attention: AttentionForm::Absorbed,
        context: Some(windows[0].len()),
        threads: 2,
        ..EngineConfig::new(0)
    };
    let mut engine = Engine::open(Checkpoint::open(&source).unwrap(), &config).unwrap();
    let mut recorders = [0, 1].map(|_| Recorder::new(engine.traced().clone()));
    for (number, window) in windows.iter().enumerate() {
        let recorder = &mut recorders[number % 2];
        recorder.begin(true);
        engine.route(window, &AtomicBool::new(false), recorder).unwrap();
    }
    recorders.map(Recorder::finish)
}

/// Prints the hit rates of a set, and adds up each policy's shares of the optimum.
fn show(set: &Set, of_optimum: &mut [f64]) {
    let requests = Requests::of(&set.traces.iter().collect::<Vec<_>>());
    let working_set = requests.working_set();
    let tokens: u64 = set.traces.iter().map(Trace::tokens).sum();
    println!("## {}\n\n{tokens} tokens use {working_set} of {} experts.\n", set.name, requests.keys());
    let names: Vec<String> = PolicyKind::ALL.iter().map(PolicyKind::to_string).collect();
    println!("| cache | {} | belady | best of belady |", names.join(" | "));
    println!("|---|{}---|---|", "---|".repeat(names.len()));
    for size in SIZES {
        let capacity = (working_set * size / 100).max(1);
        let optimum = requests.optimum(capacity).hit_rate();
        let rates = PolicyKind::ALL.map(|kind| requests.replay(kind, capacity).hit_rate());
        let best = rates.into_iter().fold(0.0, f64::max);
        let cells = rates.map(|rate| if rate == best { format!("**{rate:.3}**") } else { format!("{rate:.3}") });
        println!("| {size} % | {} | {optimum:.3} | {:.3} |", cells.join(" | "), best / optimum);
        of_optimum.iter_mut().zip(rates).for_each(|(sum, rate)| *sum += rate / optimum);
    }
    println!();
}

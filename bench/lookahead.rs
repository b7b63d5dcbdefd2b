//! How well the experts of later layers can be guessed, as tables: from each state that a guess can be made from, one and
//! two layers ahead, beside the guess that a layer chooses what it chose for the token before.
//!
//! `cargo bench --bench lookahead` leads the bundled model along its held-out windows, and drawn models of two presets
//! along drawn tokens. It measures no time, so that any machine gives the same tables but for the last bits of the models'
//! arithmetic. Without `--bench` (a test run) it does the same with a few tokens.
#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../tests/golden/reference.rs"]
mod reference;

use std::path::Path;
use std::sync::atomic::AtomicBool;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::synth::{Preset, SynthOptions, synth};
use millstream::engine::{AttentionForm, Engine, EngineConfig, GuessFrom, GuessRule, Memory, Switch, Switches};
use millstream::meter::Share;
use millstream::store::trace::report::{Foretold, Report};
use millstream::store::trace::{Recorder, Trace};

const STATES: [(&str, GuessFrom); 2] =
    [("after attention", GuessFrom::Attention), ("with the shared expert", GuessFrom::Shared)];

fn main() {
    let full = std::env::args().any(|a| a == "--bench");
    let tales = reference::Reference::glm_tales().model;
    let mut windows = reference::windows();
    let (mut presets, mut tokens) = (&["small", "medium"][..], 2048);
    if !full {
        windows.truncate(1);
        windows[0].truncate(40);
        (presets, tokens) = (&["small"], 20);
    }
    show("glm-tales, held-out text", &tales, &windows);
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for preset in presets {
        let model = dir.path().join(preset);
        synth(&model, &SynthOptions::new(preset.parse::<Preset>().unwrap()), &mut |_| {}).unwrap();
        // Drawn weights make nothing of a text: any tokens do, none of them next to one that says anything about it.
        let vocab = Checkpoint::open(&model).unwrap().arch.vocab as u64;
        let drawn: Vec<u32> = (0..tokens)
            .map(|i: u64| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % vocab)
            .map(|id| id as u32)
            .collect();
        show(&format!("synth --preset {preset}"), &model, &[drawn]);
    }
}

/// Prints what can be foretold of a model's choices.
fn show(name: &str, model: &Path, windows: &[Vec<u32>]) {
    let reports = STATES.map(|(_, from)| Report::of(&[&record(model, from, windows)]));
    let tokens: usize = windows.iter().map(Vec::len).sum();
    println!("## {name}\n\n{tokens} tokens.\n");
    print!("| layer | token before |");
    STATES.iter().for_each(|(state, _)| print!(" {state}, one layer | two layers |"));
    println!("\n|---|---|{}", "---|---|".repeat(STATES.len()));
    let row = |name: &str, foretold: [Foretold; 2]| {
        let cell = |share: Share| share.fraction().map_or_else(|| "-".to_owned(), |share| format!("{share:.3}"));
        print!("| {name} | {} |", cell(foretold[0].previous));
        foretold.iter().for_each(|Foretold { recall, .. }| print!(" {} | {} |", cell(recall[0]), cell(recall[1])));
        println!();
    };
    for (first, second) in reports[0].layers.iter().zip(&reports[1].layers) {
        row(&first.layer.to_string(), [first.foretold, second.foretold]);
    }
    row("all", [reports[0].foretold(), reports[1].foretold()]);
    println!();
}

/// What the router chooses for `windows`, and what is guessed of it.
fn record(model: &Path, from: GuessFrom, windows: &[Vec<u32>]) -> Trace {
    let config = EngineConfig {
        memory: Memory::Slabs(1000),
        attention: AttentionForm::Absorbed,
        context: Some(windows[0].len()),
        threads: 2,
        // Guesses are made for the recorder; nothing has to be read by them.
        switches: Switches {
            prefetch: Switch::Off,
            guess: GuessRule { from, ..GuessRule::default() },
            ..Switches::default()
        },
        ..EngineConfig::new(0)
    };
    let mut engine = Engine::open(Checkpoint::open(model).unwrap(), &config).unwrap();
    let mut recorder = Recorder::new(engine.traced().clone());
    for window in windows {
        recorder.begin(true);
        engine.route(window, &AtomicBool::new(false), &mut recorder).unwrap();
    }
    recorder.finish()
}

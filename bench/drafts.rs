//! What drafts are worth, as tables: how often those of the MTP layer are right by the width of its weights, and what each
//! source brings a step and costs in bytes of a drive.
//!
//! `cargo bench --bench drafts` converts the bundled model and lets it answer held-out prompts, openings of stories, and
//! texts that repeat themselves. It measures no time. Bytes are of answers that each begin with empty slabs, without the
//! prompt's; nothing is read on a guess. Without `--bench` (a test run) it does the same with a prompt of each.
#![allow(clippy::unwrap_used)]

#[path = "drafts_texts.rs"]
mod drafts;
#[allow(dead_code)]
#[path = "../tests/golden/reference.rs"]
mod reference;
#[allow(dead_code)]
#[path = "../tests/golden/scores.rs"]
mod scores;

use std::cell::RefCell;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use millstream::checkpoint::Checkpoint;
use millstream::checkpoint::convert::{ConvertOptions, Width, convert};
use millstream::engine::sampler::Sampling;
use millstream::engine::stats::Stats;
use millstream::engine::{
    Activations, DraftRule, DraftSource, Engine, EngineConfig, Job, Memory, Observer, Switch, Switches,
};

/// Slabs of the cold runs: less than a third of the experts.
const SLABS: usize = 48;
/// Slabs for all experts of the bundled model.
const ALL: usize = 32 * 6;
/// Tokens of an answer, where nothing is compared with the reference.
const ANSWER: usize = 128;

const fn rule(source: DraftSource, most: usize) -> DraftRule {
    DraftRule { source, most }
}

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let mut texts = drafts::texts();
    if !full {
        texts.values_mut().for_each(|texts| texts.ids.truncate(1));
    }
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = reference::Reference::glm_tales().model;
    let made = |name: &str, options: ConvertOptions| {
        let path = dir.path().join(name);
        convert(&source, &path, &options, &mut |_| ()).unwrap();
        path
    };
    let default = made("default", ConvertOptions::default());
    let narrow = made("narrow", ConvertOptions { mtp: Width::Bits4, ..ConvertOptions::default() });
    let narrower = made("narrower", ConvertOptions { mtp: Width::Bits2, ..ConvertOptions::default() });

    println!(
        "## The layer\n\n| prompts | weights | first right | reference | in its own text | live, first | second | tokens a step |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, texts) in &texts {
        let mut trained = open(&source, Activations::F32, rule(DraftSource::Off, 1), ALL);
        let written: &Vec<Vec<u32>> = &texts.ids.iter().map(|prompt| drafts::greedy(&mut trained, prompt)).collect();
        for (weights, model, activations) in [
            ("FP8, as trained", &source, Activations::F32),
            ("int4 experts, MTP int8 (default)", &default, Activations::Int8),
            ("int4 experts, MTP int4", &narrow, Activations::Int8),
            ("int4 experts, MTP int2", &narrower, Activations::Int8),
        ] {
            let mut engine = open(model, activations, rule(DraftSource::Mtp, 1), ALL);
            let own: Vec<Vec<u32>> = texts.ids.iter().map(|prompt| drafts::greedy(&mut engine, prompt)).collect();
            let [first, own] = [written, &own].map(|texts| drafts::first_right(&mut engine, texts));
            let live = Live::of(&mut open(model, activations, rule(DraftSource::Mtp, 2), ALL), &texts.ids);
            println!(
                "| {name} | {weights} | {first:.4} | {:.4} | {own:.4} | {:.4} | {:.4} of {:.4} | {:.2} |",
                texts.accept_1,
                live.right[0] as f64 / live.steps as f64,
                live.right[1] as f64 / live.right[0].max(1) as f64,
                texts.accept_2_given_1,
                (live.steps + live.right[0] + live.right[1]) as f64 / live.steps as f64,
            );
        }
    }

    let held = &texts["held-out"].ids;
    let repeated: Vec<Vec<u32>> = held.iter().map(|ids| ids[..8].repeat(5)).collect();
    let drawn = Sampling { temperature: 0.7, top_k: 0, top_p: 0.9, min_p: 0.0, seed: 1 };
    println!(
        "\n## The sources\n\n| text | drafts | tokens a step | right | KB a token, cold | of off |\n|---|---|---|---|---|---|"
    );
    for (text, prompts, sampling) in [
        ("held-out, greedy", held, Sampling::greedy()),
        ("held-out, 0.7 / 0.9", held, drawn),
        ("openings, greedy", &texts["openings"].ids, Sampling::greedy()),
        ("eight tokens five times, greedy", &repeated, Sampling::greedy()),
    ] {
        let mut off = None;
        for (source, most) in [
            (DraftSource::Off, 1),
            (DraftSource::Ngram, 8),
            (DraftSource::Ngram, 4),
            (DraftSource::Mtp, 1),
            (DraftSource::Mtp, 2),
            (DraftSource::Mtp, 4),
        ] {
            let (worth, ids) = Worth::of(&default, rule(source, most), prompts, sampling);
            let (plain, plain_ids) = off.get_or_insert_with(|| (worth.bytes_a_token(), ids.clone()));
            assert!(ids == *plain_ids, "drafts changed an answer");
            let name = if source == DraftSource::Off { "off".to_owned() } else { format!("{} {most}", source.name()) };
            println!(
                "| {text} | {name} | {:.2} | {} | {:.1} | {:.2} |",
                worth.tokens as f64 / worth.forwards as f64,
                if worth.drafted == 0 {
                    "-".to_owned()
                } else {
                    format!("{:.3}", worth.accepted as f64 / worth.drafted as f64)
                },
                worth.bytes_a_token() / 1e3,
                worth.bytes_a_token() / *plain,
            );
        }
    }
}

fn open(model: &Path, activations: Activations, drafts: DraftRule, slabs: usize) -> Engine {
    let switches = Switches { prefetch: Switch::Off, ..Switches::default() };
    let (memory, threads) = (Memory::Slabs(slabs), 2);
    let config = EngineConfig { activations, drafts, switches, memory, threads, ..EngineConfig::new(1 << 30) };
    Engine::open(Checkpoint::open(model).unwrap(), &config).unwrap()
}

/// How far the two drafts of each step were right.
#[derive(Default)]
struct Live {
    steps: usize,
    /// Steps of which the first was, and the second too.
    right: [usize; 2],
}

impl Live {
    /// Of answers of up to as many tokens as the reference's. Steps at the end that may not take both drafts are not counted.
    fn of(engine: &mut Engine, prompts: &[Vec<u32>]) -> Live {
        let mut live = Live::default();
        for prompt in prompts {
            let steps = RefCell::new(vec![]);
            let mut observer = Rows { steps: &steps, first: None, top_k: engine.arch().moe.top_k };
            let job = Job {
                prompt: prompt.clone(),
                max_tokens: drafts::ANSWER,
                sampling: Sampling::greedy(),
                stop_ids: vec![],
            };
            let mut is_first = true;
            let mut on_token = |_| {
                let mut steps = steps.borrow_mut();
                // The prompt's chunks found the first token.
                if std::mem::take(&mut is_first) {
                    steps.clear();
                } else if let Some((_, tokens)) = steps.last_mut() {
                    *tokens += 1;
                }
                ControlFlow::Continue(())
            };
            engine.generate_observed(&job, &AtomicBool::new(false), &mut on_token, &mut observer).unwrap();
            for &(_, tokens) in steps.borrow().iter().filter(|(rows, _)| *rows == 3) {
                live.steps += 1;
                live.right[0] += usize::from(tokens > 1);
                live.right[1] += usize::from(tokens > 2);
            }
        }
        live
    }
}

/// Rows of each step, and tokens that came of it.
struct Rows<'a> {
    steps: &'a RefCell<Vec<(usize, usize)>>,
    /// The first routed layer.
    first: Option<usize>,
    top_k: usize,
}

impl Observer for Rows<'_> {
    fn chose(&mut self, layer: usize, ids: &[u16], _gates: &[f32]) {
        if *self.first.get_or_insert(layer) == layer {
            self.steps.borrow_mut().push((ids.len() / self.top_k, 0));
        }
    }
}

/// What drafts came to in answers that each began with empty slabs.
#[derive(Default)]
struct Worth {
    tokens: usize,
    forwards: usize,
    drafted: u64,
    accepted: u64,
    bytes: u64,
}

impl Worth {
    fn of(model: &Path, drafts: DraftRule, prompts: &[Vec<u32>], sampling: Sampling) -> (Worth, Vec<Vec<u32>>) {
        let mut worth = Worth::default();
        let answer = |prompt: &Vec<u32>| {
            let mut engine = open(model, Activations::Int8, drafts, SLABS);
            let job = Job { prompt: prompt.clone(), max_tokens: ANSWER, sampling, stop_ids: vec![] };
            let outcome = engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap();
            worth.add(&engine.stats());
            outcome.ids
        };
        let ids = prompts.iter().map(answer).collect();
        (worth, ids)
    }

    fn add(&mut self, stats: &Stats) {
        let draft = stats.draft.unwrap_or_default();
        self.tokens += stats.decode_steps;
        self.forwards += if stats.draft.is_some() { draft.forwards } else { stats.decode_steps };
        self.drafted += draft.drafted;
        self.accepted += draft.accepted;
        self.bytes += stats.io.bytes - stats.prefill.bytes;
    }

    fn bytes_a_token(&self) -> f64 {
        self.bytes as f64 / self.tokens as f64
    }
}

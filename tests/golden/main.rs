//! The forward pass against transformers: exact activations, weights as the checkpoint stores them.
//!
//! # How far logits may be off
//!
//! Both sides compute in float32 and sum in different orders. The references' own rounding is known: transformers in
//! float64 was run on every prompt, and `rounding.json` says how far the stored float32 logits are from it. With e the
//! largest of those distances, an engine that is no worse than the reference is off from float64 by at most e too, so
//!
//! `|engine - reference| <= |engine - float64| + |float64 - reference| <= 2 e`
//!
//! which is 2.4e-5 for glm-tales, 3.4e-5 for its tiny oracle, 5.2e-6 and 1.0e-5 for the two of OLMoE. An equal argmax needs less than half the distance
//! between a first and a second logit, which is 2.0e-4 for glm-tales and 1.1e-3 or more for the tiny oracles at the closest
//! position; the bound used is the smaller of the two, and the error met is printed.
//!
//! This holds while both sides choose the same experts and positions. Where two candidates are closer than rounding,
//! float32 cannot say who is right; no prompt here has such a position, three of the perplexity windows do.
#![allow(clippy::unwrap_used)]

mod perplexity;
mod quality;
mod reference;
mod scores;
mod ties;
mod trend;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use millstream::checkpoint::Checkpoint;
use millstream::engine::sampler::Sampling;
use millstream::engine::{Activations, AttentionForm, Engine, EngineConfig, Finish, Job};
use reference::{Prompt, Reference};
use scores::{argmaxes, differing};

/// Weights of chosen experts. They are stored to six places and are at most the scaling factor, 2.5; ten units of the last
/// place leave room for a relative error of 4e-6.
const GATE_BOUND: f32 = 1e-5;

fn open(model: &Path, form: AttentionForm) -> Engine {
    let config = EngineConfig {
        activations: Activations::F32,
        attention: form,
        threads: 2,
        load_mtp: true,
        ..EngineConfig::new(1 << 30)
    };
    Engine::open(Checkpoint::open(model).unwrap(), &config).unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn greedy(engine: &mut Engine, prompt: &Prompt) -> Vec<u32> {
    let job = Job {
        prompt: prompt.ids.clone(),
        max_tokens: prompt.greedy.len(),
        sampling: Sampling::greedy(),
        stop_ids: vec![],
    };
    let outcome = engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap();
    assert_eq!(outcome.finish, Finish::Length);
    outcome.ids
}

/// Teacher-forced argmax, logits, greedy continuation and drafts of every prompt.
fn forward(reference: &Reference, form: AttentionForm) {
    let mut engine = open(&reference.model, form);
    let vocab = engine.arch().vocab;
    let bound = (2.0 * reference.rounding_max()).min(reference.margin_min() / 2.0);
    for (name, prompt) in &reference.expected() {
        let logits = engine.score(&prompt.ids).unwrap();
        let differ = differing(&argmaxes(&logits, vocab), &prompt.argmax);
        assert_eq!(differ, [0usize; 0], "argmax of {name}, {form:?}");

        let mut error = largest_difference(&logits[logits.len() - vocab..], &prompt.last_logits());
        if let Some(all) = prompt.all_logits() {
            error = error.max(largest_difference(&logits, &all));
        }
        println!(
            "{name}, {form:?}: {} positions, largest logit error {error:.1e}, bound {bound:.1e}",
            prompt.ids.len()
        );
        assert!(error < bound, "{name}, {form:?}: a logit is off by {error}, more than {bound}");

        assert_eq!(greedy(&mut engine, prompt), prompt.greedy, "greedy continuation of {name}, {form:?}");
        if engine.arch().mtp.is_some() {
            let drafts = engine.draft_scores(&prompt.ids).unwrap();
            assert_eq!(argmaxes(&drafts, vocab), prompt.mtp_argmax, "drafts of {name}, {form:?}");
        }
    }
}

#[test]
fn glm_tales_absorbed() {
    forward(&Reference::glm_tales(), AttentionForm::Absorbed);
}

#[test]
fn glm_tales_explicit() {
    forward(&Reference::glm_tales(), AttentionForm::Explicit);
}

#[test]
fn tiny_oracle_absorbed() {
    forward(&Reference::tiny(), AttentionForm::Absorbed);
}

#[test]
fn tiny_oracle_explicit() {
    forward(&Reference::tiny(), AttentionForm::Explicit);
}

#[test]
fn tiny_olmoe() {
    forward(&Reference::tiny_olmoe(), AttentionForm::Auto);
}

#[test]
fn tiny_olmoe_grouped() {
    forward(&Reference::tiny_olmoe_grouped(), AttentionForm::Auto);
}

/// Chosen experts and their weights, in every routed layer at every position of `name`.
fn router(reference: &Reference, name: &str, form: AttentionForm) {
    let prompt = &reference.expected()[name];
    let mut engine = open(&reference.model, form);
    let top_k = engine.arch().moe.top_k;
    let mut seen: std::collections::BTreeMap<String, (Vec<u16>, Vec<f32>)> = Default::default();
    engine
        .score_observed(&prompt.ids, &mut |layer: usize, ids: &[u16], gates: &[f32]| {
            let (all_ids, all_gates) = seen.entry(layer.to_string()).or_default();
            all_ids.extend_from_slice(ids);
            all_gates.extend_from_slice(gates);
        })
        .unwrap();
    assert!(!prompt.router_topk.is_empty());
    assert!(seen.keys().eq(prompt.router_topk.keys()));
    let mut worst = 0.0f32;
    for (layer, choices) in &prompt.router_topk {
        let (ids, gates) = &seen[layer];
        for (position, experts) in choices.experts.iter().enumerate() {
            let run = position * top_k..(position + 1) * top_k;
            assert_eq!(ids[run.clone()], experts[..], "layer {layer}, position {position} of {name}, {form:?}");
            worst = worst.max(largest_difference(&gates[run], &choices.weights[position]));
        }
        assert_eq!(ids.len(), top_k * choices.experts.len());
    }
    println!("{name}, {form:?}: experts equal, largest difference of a weight {worst:.1e}, bound {GATE_BOUND:.1e}");
    assert!(worst < GATE_BOUND);
}

#[test]
fn router_choices() {
    for form in [AttentionForm::Absorbed, AttentionForm::Explicit] {
        router(&Reference::glm_tales(), "medium", form);
        router(&Reference::tiny(), "forty", form);
    }
    router(&Reference::tiny_olmoe_grouped(), "forty", AttentionForm::Auto);
}

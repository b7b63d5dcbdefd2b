//! Perplexity of held-out text against transformers: windows of 1024 ids, so that three quarters of the positions go sparse.

use millstream::engine::AttentionForm;
use serde::Deserialize;

use super::open;
use super::reference::{Reference, WINDOW, file, windows};
use super::scores::nll;

/// Relative difference of a perplexity that is allowed.
const RELATIVE_BOUND: f64 = 1e-4;

#[derive(Deserialize)]
struct Original {
    context_1024: Total,
}

#[derive(Deserialize)]
struct Total {
    tokens: usize,
    perplexity: f64,
}

#[derive(Deserialize)]
struct Stable {
    tokens: usize,
    perplexity: f64,
    nll_per_window: Vec<f64>,
}

fn read<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    serde_json::from_slice(&std::fs::read(file(name)).unwrap()).unwrap()
}

/// All 20,460 tokens, against both the stable reference and transformers as it is. Ties put those two 8e-5
/// apart; the engine stays within 1e-4 of both.
#[test]
#[cfg_attr(debug_assertions, ignore = "minutes without optimization")]
fn of_held_out_text() {
    let original: Original = read("glm-tales-fp8/perplexity.json");
    let stable: Stable = read("glm-tales-fp8-stable/perplexity.json");
    let windows = windows();
    let tokens = windows.len() * (WINDOW - 1);
    assert_eq!((original.context_1024.tokens, stable.tokens), (tokens, tokens));

    let mut engine = open(&Reference::glm_tales().model, AttentionForm::Auto);
    let mut total = 0.0;
    for (i, (ids, want)) in windows.iter().zip(&stable.nll_per_window).enumerate() {
        let got = nll(&engine.score(ids).unwrap(), ids);
        let off = ((got - want) / (WINDOW - 1) as f64).exp() - 1.0;
        println!("window {i}: perplexity off by {off:+.1e} of itself");
        assert!(off.abs() < RELATIVE_BOUND, "window {i}: {got} nats, the reference has {want}");
        total += got;
    }
    let got = (total / tokens as f64).exp();
    for (name, want) in [("stable", stable.perplexity), ("original", original.context_1024.perplexity)] {
        let off = got / want - 1.0;
        println!("perplexity {got:.6}, {name} {want:.6}, off by {off:+.1e} of itself");
        assert!(off.abs() < RELATIVE_BOUND, "{name}");
    }
}

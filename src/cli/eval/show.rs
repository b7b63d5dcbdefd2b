//! What evaluations look like: comparisons with other logits, as lines and as JSON. Keys are stable; more may be added.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::cli::config::Setting;
use crate::engine::quality::{Estimate, Quality, Window};

/// Lines of a comparison, in the words of llama-perplexity.
pub fn compared(quality: &Quality, windows: &[Window]) -> String {
    let (change, rms) = changes(windows);
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<25}: {value}");
    };
    line("Mean PPL(Q)", format!("{:.6}", quality.perplexity));
    line("Mean PPL(base)", format!("{:.6}", quality.perplexity / quality.ratio()));
    line("Mean ln(PPL(Q)/PPL(base))", estimate(quality.loss, 1.0));
    line("Mean PPL(Q)/PPL(base)", format!("{:.6}", quality.ratio()));
    line("Mean KLD", estimate(quality.divergence, 1.0));
    line("99.0% KLD", format!("{:.6}", quality.divergence_p99));
    line("Maximum KLD", format!("{:.6}", quality.divergence_largest));
    line("Mean Δp", format!("{:.3} %", 100.0 * change));
    line("RMS Δp", format!("{:.3} %", 100.0 * rms));
    line("Same top p", format!("{:.3} %", 100.0 * quality.agreement));
    text
}

fn estimate(of: Estimate, times: f64) -> String {
    let error = of.error.map_or_else(String::new, |error| format!(" ± {:.6}", error * times));
    format!("{:.6}{error}", of.mean * times)
}

/// The same as an object.
pub fn compared_json(quality: &Quality, windows: &[Window]) -> Value {
    let (change, rms) = changes(windows);
    json!({
        "positions": quality.positions,
        "agreement": quality.agreement,
        "perplexity": quality.perplexity,
        "base_perplexity": quality.perplexity / quality.ratio(),
        "loss_nats": quality.loss.mean,
        "loss_error": quality.loss.error,
        "divergence_nats": quality.divergence.mean,
        "divergence_error": quality.divergence.error,
        "divergence_p99": quality.divergence_p99,
        "divergence_largest": quality.divergence_largest,
        "change_mean": change,
        "change_rms": rms,
    })
}

/// How much more probable a token of the text is than to the base: on average, and the root of the mean square.
fn changes(windows: &[Window]) -> (f64, f64) {
    let changes = || windows.iter().flat_map(|window| window.changes.iter().copied());
    let count = changes().count().max(1) as f64;
    (changes().sum::<f64>() / count, (changes().map(|change| change * change).sum::<f64>() / count).sqrt())
}

/// Settings as an object.
pub fn settings(settings: &[Setting]) -> Value {
    let pairs = settings.iter().map(|setting| (setting.name.to_owned(), setting.value.clone()));
    Value::Object(pairs.collect::<Map<_, _>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comparison_shows_what_its_numbers_are() {
        let logits = |chances: [f32; 2]| chances.map(f32::ln);
        let mut window = Window::default();
        // A half became a quarter, then a quarter a half: no change on average, a quarter by its squares.
        window.add(&logits([0.5, 0.5]), &logits([0.25, 0.75]), Some(0)).unwrap();
        window.add(&logits([0.25, 0.75]), &logits([0.5, 0.5]), Some(0)).unwrap();
        let windows = [window];
        let quality = Quality::of(&windows).unwrap();
        let (change, rms) = changes(&windows);
        assert!(change.abs() < 1e-7 && (rms - 0.25).abs() < 1e-7, "{change} {rms}");
        let text = compared(&quality, &windows);
        for (name, value) in [("Mean PPL(Q)/PPL(base)", "1.000000"), ("RMS Δp", "25.000 %"), ("Same top p", "0.000 %")]
        {
            let line = text.lines().find(|line| line.starts_with(name)).unwrap();
            assert!(line.ends_with(&format!(": {value}")), "{line}");
        }
        let json = compared_json(&quality, &windows);
        assert!((json["base_perplexity"].as_f64().unwrap() - 8f64.sqrt()).abs() < 1e-6, "{json}");
    }
}

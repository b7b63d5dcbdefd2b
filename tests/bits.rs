//! `sweep bits` as a whole command: what it says of a precision, held against transformers' logits and against arithmetic
//! made here.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/program.rs"]
mod program;
#[allow(dead_code)]
#[path = "golden/reference.rs"]
mod reference;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use millstream::checkpoint::Checkpoint;
use millstream::engine::{Activations, Engine, EngineConfig};
use program::{done, json, program, refused, stderr};
use reference::{Reference, file, windows};
use serde_json::Value;
use tempfile::TempDir;

/// A place for one sweep, with the ids that it scores.
struct Place {
    home: TempDir,
    text: PathBuf,
}

impl Place {
    fn of(ids: &[u32]) -> Place {
        let home = TempDir::new().unwrap();
        let text = home.path().join("ids.txt");
        fs::write(&text, ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ")).unwrap();
        Place { home, text }
    }

    fn sweep(&self, model: &Path, extra: &[&str]) -> Output {
        let mut asked = program(self.home.path());
        asked.args(["sweep", "bits", "-q", "-m"]).arg(model).arg("--text").arg(&self.text).args(extra);
        asked.output().unwrap()
    }

    /// Names of what is left beside the text.
    fn left(&self) -> Vec<String> {
        let names = fs::read_dir(self.home.path()).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.to_string_lossy().into_owned()).filter(|name| name != "ids.txt").collect()
    }
}

fn number(object: &Value, name: &str) -> f64 {
    object[name].as_f64().unwrap_or_else(|| panic!("no number {name} in {object}"))
}

/// Chances of every token, the plain way.
fn chances(logits: &[f32]) -> Vec<f64> {
    let exponentials: Vec<f64> = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.iter().map(|e| e / sum).collect()
}

fn most_likely(chances: &[f64]) -> usize {
    (0..chances.len()).rev().max_by(|&a, &b| chances[a].total_cmp(&chances[b])).unwrap()
}

#[test]
fn a_precision_is_as_far_from_the_unquantized_logits_of_transformers_as_it_says() {
    let reference = Reference::glm_tales();
    let prompt = &reference.original["unicode"];
    let place = Place::of(&prompt.ids);
    let flags = ["--ids", "--experts", "4", "--dense", "8", "--group", "row", "--json"];
    let report = json(&done(place.sweep(&reference.model, &flags)));
    let told = &report["values"][0];

    // The container that the flags of `convert` make, scored by the engine; the other side comes from a file.
    let container = place.home.path().join("container");
    let mut made = program(place.home.path());
    made.args(["convert", "-q", "--experts", "4", "--dense", "8"]).arg(&reference.model).arg(&container);
    done(made.output().unwrap());
    let config = EngineConfig { activations: Activations::F32, ..EngineConfig::new(1 << 30) };
    let mut engine = Engine::open(Checkpoint::open(&container).unwrap(), &config).unwrap();
    let vocab = engine.arch().vocab;
    let (base, other) = (prompt.all_logits().unwrap(), engine.score(&prompt.ids).unwrap());
    let (mut divergence, mut same, mut nll, mut base_nll) = (0.0, 0, 0.0, 0.0);
    for (position, (base, other)) in base.chunks(vocab).zip(other.chunks(vocab)).enumerate() {
        let (p, q) = (chances(base), chances(other));
        divergence += p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        same += usize::from(most_likely(&p) == most_likely(&q));
        if let Some(&next) = prompt.ids.get(position + 1) {
            nll -= q[next as usize].ln();
            base_nll -= p[next as usize].ln();
        }
    }
    let (positions, tokens) = (prompt.ids.len() as f64, (prompt.ids.len() - 1) as f64);
    assert_eq!((number(told, "positions"), number(told, "tokens")), (positions, tokens));
    // Float32 logits of two programs: 2.4e-5 of each other, which moves a divergence of 0.01 by much less than this.
    let near = |told: f64, want: f64| assert!((told / want - 1.0).abs() < 1e-3, "{told}, counted {want}");
    near(number(told, "divergence_nats"), divergence / positions);
    near(number(told, "perplexity"), (nll / tokens).exp());
    near(number(&report["unquantized"], "perplexity"), (base_nll / tokens).exp());
    near(number(told, "loss_nats").exp(), ((nll - base_nll) / tokens).exp());
    assert_eq!(number(told, "agreement"), same as f64 / positions);
    assert_eq!(told["divergence_error"], Value::Null, "one window says nothing of how windows differ");
    assert_eq!((&told["best_of_its_size"], &report["interrupted"]), (&true.into(), &false.into()));
}

#[test]
fn the_perplexity_of_held_out_windows_is_that_of_transformers() {
    let stable: Value =
        serde_json::from_slice(&fs::read(file("glm-tales-fp8-stable/perplexity.json")).unwrap()).unwrap();
    let windows = windows();
    let place = Place::of(&windows[..2].concat());
    let flags = ["--ids", "--experts", "2", "--dense", "2", "--io-bits", "2", "--group", "row", "--json"];
    let report = json(&done(place.sweep(&Reference::glm_tales().model, &flags)));
    assert_eq!((&report["windows"], &report["window_tokens"]), (&2.into(), &1024.into()));
    let nll: f64 = (0..2).map(|window| stable["nll_per_window"][window].as_f64().unwrap()).sum();
    let (got, want) = (number(&report["unquantized"], "perplexity"), (nll / 2046.0).exp());
    assert!((got / want - 1.0).abs() < 1e-4, "{got}, transformers has {want}");
    let told = &report["values"][0];
    assert!(number(told, "perplexity") > 5.0 * want && number(told, "divergence_error") > 0.0, "{told}");
    assert_eq!(report["smallest_within"], Value::Null);
}

#[test]
fn what_is_stored_as_it_was_loses_nothing_and_nothing_is_left_behind() {
    let place = Place::of(&(1..80).collect::<Vec<_>>());
    let flags = ["--ids", "-c", "20", "--experts", "16,2", "--dense", "16", "--io-bits", "16", "--json"];
    let report = json(&done(place.sweep(&Reference::tiny_olmoe().model, &flags)));
    // Four windows of twenty would take eighty ids, and there are seventy-nine.
    assert_eq!((&report["windows"], &report["values"][0]["positions"]), (&3.into(), &60.into()));
    let [same, coarse] = [0, 1].map(|arm| &report["values"][arm]);
    assert_eq!((&same["experts"], &coarse["experts"]), (&"16".into(), &"2".into()));
    assert_eq!((number(same, "agreement"), number(same, "loss_nats")), (1.0, 0.0));
    assert!(number(same, "divergence_largest") < 1e-12, "{same}");
    assert!(number(coarse, "divergence_nats") > 0.0 && number(coarse, "bytes") < number(same, "bytes"), "{coarse}");
    // Weights of three matrices of an expert in two bytes each, as its config has it.
    let config: Value =
        serde_json::from_slice(&fs::read(Reference::tiny_olmoe().model.join("config.json")).unwrap()).unwrap();
    let expert = 3.0 * 2.0 * number(&config, "hidden_size") * number(&config, "intermediate_size");
    assert_eq!(number(same, "expert_bytes"), expert);
    assert_eq!(place.left(), [""; 0]);
}

#[test]
fn the_table_and_the_picture_show_every_precision() {
    let place = Place::of(&(1..40).collect::<Vec<_>>());
    let svg = place.home.path().join("bits.svg");
    let flags = ["--ids", "--experts", "8,4", "--dense", "8", "--group", "row,16", "--svg", svg.to_str().unwrap()];
    let output = done(place.sweep(&Reference::tiny_olmoe().model, &flags));
    let table = program::stdout(&output);
    for words in ["divergence", "of unquantized", "as it is", "p ln(p/q)", "\n       8      8   8    row"] {
        assert!(table.contains(words), "no {words:?} in {table}");
    }
    let svg = fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
    // Three precisions, of which one has groups, and the colour of the dense width.
    assert_eq!(svg.matches("<circle ").count(), 4);
}

#[test]
fn an_interrupt_leaves_nothing_behind() {
    let home = TempDir::new().unwrap();
    let mut asked = program(home.path());
    asked.args(["sweep", "bits", "-m"]).arg(Reference::glm_tales().model);
    let mut child = asked.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(said.any(|line| line.contains("s so far")), "it says what it is at");
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the child is not waited for yet, so its id is its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let drained = std::thread::spawn(move || said.for_each(drop));
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drained.join().unwrap();
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0);
}

#[test]
fn what_makes_no_sweep_is_refused() {
    let place = Place::of(&[1, 2, 3]);
    let container = place.home.path().join("container");
    let model = Reference::tiny_olmoe().model;
    done(program(place.home.path()).args(["convert", "-q"]).arg(&model).arg(&container).output().unwrap());
    refused(&place.sweep(&container, &["--ids"]), 2, &["has weights in int", "not quantized", "vendor's checkpoint"]);
    for (flags, words) in [
        (&["--ids", "-c", "1000000"][..], "the model's context is"),
        (&["--ids", "-c", "1"], "it takes two tokens"),
        (&["--experts", "5"], "a width is"),
        (&["--group", "65"], "row, or"),
        (&["--ids", "--dir", "/proc/none"], "cannot make a directory in /proc/none"),
        (&["--ids", "--svg", place.text.to_str().unwrap()], "which this command reads"),
    ] {
        let output = place.sweep(&model, flags);
        assert!(!output.status.success() && stderr(&output).contains(words), "{flags:?}: {}", stderr(&output));
    }
    fs::write(&place.text, "1 2 9999999").unwrap();
    refused(&place.sweep(&model, &["--ids"]), 2, &["token id 9999999", "beyond the vocabulary"]);
    fs::remove_file(&place.text).unwrap();
    refused(&place.sweep(&model, &[]), 2, &["cannot read the text", "ids.txt"]);
    assert_eq!(place.left(), ["container"]);
}

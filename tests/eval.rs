//! `eval` as whole commands: what it says of a text, of questions and of logits, held against transformers and against
//! arithmetic made here. Then what cannot be evaluated.
#![allow(clippy::unwrap_used)]
#![allow(unsafe_code)]

#[path = "common/program.rs"]
mod program;
#[allow(dead_code)]
#[path = "golden/reference.rs"]
mod reference;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::fs;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::atomic::AtomicBool;

use millstream::checkpoint::Checkpoint;
use millstream::engine::{Activations, AttentionForm, Engine, EngineConfig, Finish, Forced};
use program::{done, json, program, refused, stderr, stdout};
use reference::{Reference, file, windows};
use safetensors::{Shard, Tensor};
use serde_json::Value;
use tempfile::TempDir;

/// How far a number may be from that of transformers.
const NEAR: f64 = 1e-4;

struct Place {
    home: TempDir,
}

impl Place {
    fn new() -> Place {
        Place { home: TempDir::new().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// A file with these contents.
    fn file(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), bytes).unwrap();
        self.path(name)
    }

    fn ids(&self, ids: &[u32]) -> PathBuf {
        self.file("ids.txt", ids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "))
    }

    /// Unquantized arithmetic of glm-tales as it is published.
    fn eval(&self, what: &str, extra: &[&str]) -> Output {
        let mut asked = program(self.home.path());
        asked.args(["eval", what, "-q", "--activations", "f32", "-m"]).arg(Reference::glm_tales().model).args(extra);
        asked.output().unwrap()
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[track_caller]
fn near(got: &Value, want: &Value) {
    let (got, want) = (got.as_f64().unwrap(), want.as_f64().unwrap());
    assert!((got / want - 1.0).abs() < NEAR, "{got}, transformers has {want}");
}

#[track_caller]
fn all_near(got: &Value, want: &Value) {
    let (got, want) = (got.as_array().unwrap(), want.as_array().unwrap());
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).for_each(|(got, want)| near(got, want));
}

/// What transformers found for `scripts/golden.py evaluate`.
fn found() -> Value {
    serde_json::from_slice(&fs::read(file("glm-tales-fp8-stable/evaluate.json")).unwrap()).unwrap()
}

fn bytes_of(floats: impl IntoIterator<Item = f32>) -> Vec<u8> {
    floats.into_iter().flat_map(f32::to_le_bytes).collect()
}

/// Logits as another program would keep them.
fn reference_file(place: &Place, name: &str, ids: &[u32], logits: &[f32], vocab: usize) -> PathBuf {
    let rows = (logits.len() / vocab) as u64;
    let path = place.path(name);
    let ids_bytes = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    let tensors = vec![
        Tensor::new("logits", "F32", &[1, rows, vocab as u64], bytes_of(logits.iter().copied())),
        Tensor::new("ids", "I64", &[1, ids.len() as u64], ids_bytes),
    ];
    Shard { tensors, ..Shard::default() }.write(&path);
    path
}

#[test]
fn the_second_halves_of_windows_have_the_perplexity_that_transformers_finds() {
    let (place, want) = (Place::new(), &found()["halves"]);
    let ids = place.ids(&windows().concat()[..4096 + 100]);
    let flags = ["--ids-file", text(&ids), "-c", "512"];
    let report = json(&done(place.eval("perplexity", &[&flags[..], &["--json"]].concat())));
    for name in ["nll_per_token", "perplexity", "perplexity_error"] {
        near(&report[name], &want[name]);
    }
    all_near(&report["nll_per_window"], &want["nll_per_window"]);
    assert_eq!(
        (&report["tokens"], &report["windows"], &report["interrupted"]),
        (&2040.into(), &8.into(), &false.into())
    );
    assert_eq!((&report["window_tokens"], &report["first_position"]), (&512.into(), &256.into()));
    assert_eq!(report["cost"]["tokens"], 4096);

    // What scripts that read llama-perplexity look for, to the last place.
    let told = done(place.eval("perplexity", &[&flags[..], &["--chunks", "3"]].concat()));
    let running: Vec<f64> = want["running"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
    let (line, last) = stdout(&told).split_once('\n').unwrap();
    let shown: Vec<f64> = line.split(',').filter_map(|part| part.split_once(']')?.1.parse().ok()).collect();
    assert!(line.starts_with("[1]37.5") && line.contains(",[3]45.5") && line.ends_with(','), "{line}");
    assert!(
        shown.len() == 3 && shown.iter().zip(&running).all(|(got, want)| (got / want - 1.0).abs() < NEAR),
        "{line}"
    );
    assert!(last.starts_with("Final estimate: PPL = 45.5") && last.contains(" +/- "), "{last}");
}

#[test]
fn strided_windows_have_the_perplexity_that_transformers_finds() {
    let (place, want) = (Place::new(), &found()["strided"]);
    let ids = place.ids(&windows().concat()[..1024]);
    let flags = ["--ids-file", text(&ids), "-c", "256", "--stride", "64", "--json"];
    let report = json(&done(place.eval("perplexity", &flags)));
    near(&report["perplexity"], &want["perplexity"]);
    all_near(&report["nll_per_window"], &want["nll_per_window"]);
    assert_eq!((&report["window_tokens"], &report["first_position"]), (&288.into(), &223.into()));
}

#[test]
fn rows_of_an_array_are_windows_and_all_of_them_may_be_scored() {
    let stable: Value =
        serde_json::from_slice(&fs::read(file("glm-tales-fp8-stable/perplexity.json")).unwrap()).unwrap();
    let array = file("glm-tales-fp8/ppl_windows_1024.npy");
    let flags = ["--ids-file", text(&array), "--skip", "0", "--chunks", "2", "--json"];
    let report = json(&done(Place::new().eval("perplexity", &flags)));
    let want = Value::from(stable["nll_per_window"].as_array().unwrap()[..2].to_vec());
    all_near(&report["nll_per_window"], &want);
    assert_eq!((&report["tokens"], &report["windows_asked"]), (&2046.into(), &2.into()));
}

#[test]
fn a_text_is_scored_as_its_ids_are() {
    let place = Place::new();
    let model = Reference::glm_tales().model;
    let held_out = fs::read_to_string(model.join("heldout.txt")).unwrap();
    // Ends in a newline that does not count.
    let part = place.file("part.txt", format!("{}\n", held_out[..1500].trim_end()));
    let tokenizer = millstream::model::tokenizer::Tokenizer::open(&model).unwrap();
    let ids = place.ids(&tokenizer.encode_raw(held_out[..1500].trim_end()).unwrap());
    let of = |flags: &[&str]| json(&done(place.eval("perplexity", &[flags, &["-c", "64", "--json"]].concat())));
    let (by_text, by_ids) = (of(&["-f", text(&part)]), of(&["--ids-file", text(&ids)]));
    assert_eq!(by_text["nll_per_window"], by_ids["nll_per_window"]);
    assert!(by_text["windows"].as_u64().unwrap() > 3);
}

/// Chances of every token, the plain way.
fn chances(logits: &[f32]) -> Vec<f64> {
    let exponentials: Vec<f64> = logits.iter().map(|&logit| f64::from(logit).exp()).collect();
    let sum: f64 = exponentials.iter().sum();
    exponentials.iter().map(|e| e / sum).collect()
}

#[test]
fn the_divergence_from_kept_logits_is_that_of_its_definition() {
    let prompt = &Reference::glm_tales().original["unicode"];
    let (ours, vocab) = (prompt.all_logits().unwrap(), 4096);
    // A base that is sure of less than the model, and of another token in every fifth position.
    let base: Vec<f32> = ours
        .chunks(vocab)
        .enumerate()
        .flat_map(|(at, row)| {
            let mut row: Vec<f32> = row.iter().map(|logit| 0.8 * logit).collect();
            if at % 5 == 0 {
                row[at] = 30.0;
            }
            row
        })
        .collect();
    let place = Place::new();
    let ids = place.ids(&prompt.ids);
    let kept = reference_file(&place, "base.safetensors", &prompt.ids, &base, vocab);
    let flags = ["--ids-file", text(&ids), "-c", "49", "--kl-base", text(&kept), "--json"];
    let report = json(&done(place.eval("perplexity", &flags)));
    let (mut divergence, mut same, mut base_nll, mut changes) = (0.0, 0, 0.0, 0.0);
    for position in 24..48 {
        let row = |logits: &[f32]| chances(&logits[position * vocab..][..vocab]);
        let (p, q, next) = (row(&base), row(&ours), prompt.ids[position + 1] as usize);
        let best = |of: &[f64]| (0..vocab).max_by(|&a, &b| of[a].total_cmp(&of[b])).unwrap();
        divergence += p.iter().zip(&q).map(|(p, q)| p * (p / q).ln()).sum::<f64>();
        same += usize::from(best(&p) == best(&q));
        base_nll -= p[next].ln();
        changes += q[next] - p[next];
    }
    let told = &report["compared"];
    near(&told["divergence_nats"], &(divergence / 24.0).into());
    near(&told["base_perplexity"], &(base_nll / 24.0f64).exp().into());
    near(&told["change_mean"], &(changes / 24.0).into());
    assert_eq!((&told["agreement"], &told["positions"]), (&(same as f64 / 24.0).into(), &24.into()));
    assert!((10..24).contains(&same), "{same}");
    // The same in words.
    let told = done(place.eval("perplexity", &flags[..flags.len() - 1]));
    for name in ["Mean PPL(Q)", "Mean KLD", "99.0% KLD", "RMS Δp", "Same top p"] {
        assert!(stdout(&told).lines().any(|line| line.starts_with(name)), "{}", stdout(&told));
    }
}

#[test]
fn kept_logits_are_those_of_the_model_and_are_found_again() {
    let place = Place::new();
    let ids_of = &windows()[0];
    let (ids, kept) = (place.ids(ids_of), place.path("kept.safetensors"));
    let of = ["--ids-file", text(&ids), "-c", "128", "--chunks", "3"];
    done(place.eval("perplexity", &[&of[..], &["--save-logits", text(&kept)]].concat()));
    let shard = Shard::read(&kept);
    let (logits, kept_ids) = (shard.get("logits"), shard.get("ids"));
    assert_eq!((logits.shape.as_slice(), kept_ids.shape.as_slice()), (&[3, 63, 4096][..], &[3, 128][..]));
    assert_eq!(shard.metadata["first_position"], "64");
    let config = EngineConfig { activations: Activations::F32, ..EngineConfig::new(1 << 30) };
    let mut engine = Engine::open(Checkpoint::open(&Reference::glm_tales().model).unwrap(), &config).unwrap();
    let second = engine.score(&ids_of[128..256]).unwrap();
    assert_eq!(logits.data[63 * 4096 * 4..][..63 * 4096 * 4], bytes_of(second[64 * 4096..127 * 4096].iter().copied()));
    assert_eq!(kept_ids.data[128 * 8..129 * 8], i64::from(ids_of[128]).to_le_bytes());

    let again = [&of[..], &["--kl-base", text(&kept), "--json"]].concat();
    let report = json(&done(place.eval("perplexity", &again)));
    let told = &report["compared"];
    assert!(told["divergence_largest"].as_f64().unwrap().abs() < 1e-12 && told["agreement"] == 1.0, "{told}");
    assert_eq!((&told["loss_nats"], &told["positions"]), (&0.0.into(), &189.into()));
    // Other windows are not these.
    refused(
        &place.eval("perplexity", &["--ids-file", text(&ids), "-c", "100", "--kl-base", text(&kept)]),
        2,
        &["are not of these windows", "128 tokens", "hint:"],
    );
    let other: Vec<u32> = ids_of.iter().enumerate().map(|(at, id)| if at == 200 { 7 } else { *id }).collect();
    let ids = place.ids(&other);
    let flags = ["--ids-file", text(&ids), "-c", "128", "--chunks", "3", "--kl-base", text(&kept)];
    refused(&place.eval("perplexity", &flags), 2, &["window 2 has other tokens"]);
}

#[test]
fn answers_have_the_likelihood_that_transformers_finds() {
    let (place, want) = (Place::new(), &found()["choices"]);
    let questions = file("glm-tales-fp8/questions.jsonl");
    let report = json(&done(place.eval("choices", &[text(&questions), "--json"])));
    let results = report["results"].as_array().unwrap();
    assert_eq!(results.len(), want["results"].as_array().unwrap().len());
    for (result, want) in results.iter().zip(want["results"].as_array().unwrap()) {
        all_near(&result["log_likelihood"], &want["log_likelihood"]);
    }
    near(&report["counts"]["acc"], &want["acc"]);
    near(&report["counts"]["acc_norm"], &want["acc_norm"]);
    // The fourth question begins as the third, the last is the one before it but for its final token.
    assert!(report["counts"]["context_tokens_kept"].as_u64().unwrap() > 20, "{}", report["counts"]);

    // A question is the same by itself, and its answers in any order: nothing of another is left in the context.
    let alone = |name: &str, line: &str| {
        let path = place.file(name, line);
        json(&done(place.eval("choices", &[text(&path), "--json"])))["results"][0]["log_likelihood"].clone()
    };
    let text_of = fs::read_to_string(&questions).unwrap();
    let line = text_of.lines().nth(3).unwrap();
    assert_eq!(alone("alone.jsonl", line), results[3]["log_likelihood"]);
    let mut turned: Value = serde_json::from_str(line).unwrap();
    turned["choices"].as_array_mut().unwrap().reverse();
    let mut backwards = alone("turned.jsonl", &turned.to_string());
    backwards.as_array_mut().unwrap().reverse();
    assert_eq!(backwards, results[3]["log_likelihood"]);
    let told = done(place.eval("choices", &[text(&questions)]));
    assert!(
        stdout(&told).starts_with("7 questions, 7 with an answer\nacc       28.57 ± 18.44 %\nacc_norm  42.86"),
        "{told:?}"
    );
}

#[test]
fn what_follows_a_kept_context_has_the_bits_of_the_whole() {
    for (reference, form) in [
        (Reference::tiny(), AttentionForm::Absorbed),
        (Reference::tiny(), AttentionForm::Explicit),
        (Reference::tiny_olmoe(), AttentionForm::Auto),
    ] {
        let config = EngineConfig { activations: Activations::F32, attention: form, ..EngineConfig::new(1 << 30) };
        let mut engine = Engine::open(Checkpoint::open(&reference.model).unwrap(), &config).unwrap();
        let (ids, go_on) = (&reference.original["hundred"].ids, AtomicBool::new(false));
        let (vocab, whole) = (engine.arch().vocab, engine.score(ids).unwrap());
        for keep in [1, 40, 99] {
            let read = Forced { keep: 0, prompt: &ids[..keep], answer: &[] };
            assert_eq!(engine.force(&read, &go_on, &mut ()).unwrap(), Finish::Length);
            assert_eq!(engine.logits(), &whole[(keep - 1) * vocab..keep * vocab], "the last of {keep}");
            for _ in 0..2 {
                let mut behind = Vec::new();
                let mut take = |logits: &[f32]| behind.extend_from_slice(logits);
                engine.score_behind(keep, &ids[keep..], &go_on, &mut take).unwrap();
                assert_eq!(behind, whole[keep * vocab..], "behind {keep}, {form:?}");
            }
        }
        assert!(engine.score_behind(101, &ids[..1], &go_on, &mut |_| ()).is_err(), "no such position");
    }
}

#[test]
fn logits_are_as_far_from_those_of_transformers_as_it_says() {
    let (place, reference) = (Place::new(), Reference::glm_tales());
    let prompt = &reference.original["unicode"];
    let (ids, array) = (place.ids(&prompt.ids), file("glm-tales-fp8/unicode.all_logits.npy"));
    let flags = [text(&array), "--ids-file", text(&ids), "--bound", "2.4e-5"];
    let report = json(&done(place.eval("logits", &[&flags[..], &["--json"]].concat())));
    assert_eq!(
        (&report["positions"], &report["agreement"], &report["within_bound"]),
        (&49.into(), &1.0.into(), &true.into())
    );
    let largest = report["difference_largest"].as_f64().unwrap();
    let config = EngineConfig { activations: Activations::F32, ..EngineConfig::new(1 << 30) };
    let mut engine = Engine::open(Checkpoint::open(&reference.model).unwrap(), &config).unwrap();
    let (ours, theirs) = (engine.score(&prompt.ids).unwrap(), prompt.all_logits().unwrap());
    let want = ours.iter().zip(&theirs).map(|(a, b)| (f64::from(*a) - f64::from(*b)).abs()).fold(0.0, f64::max);
    assert_eq!(largest, want);
    assert!(largest > 0.0 && report["divergence_nats"].as_f64().unwrap().abs() < 1e-8, "{report}");

    // One logit that is off by a half is found where it is, and beyond the bound.
    let mut wrong = theirs.clone();
    wrong[30 * 4096 + 77] += 0.5;
    let kept = reference_file(&place, "wrong.safetensors", &prompt.ids, &wrong, 4096);
    let output = place.eval("logits", &[text(&kept), "--bound", "0.1", "--json"]);
    let (report, place_of) = (json(&output), json(&output)["difference_place"].clone());
    assert_eq!(output.status.code(), Some(1));
    assert_eq!((&place_of["position"], &place_of["token"]), (&30.into(), &77.into()));
    assert!((report["difference_largest"].as_f64().unwrap() - 0.5).abs() < 1e-4, "{report}");
    // Those of the last position alone.
    let last = file("glm-tales-fp8/unicode.last_logits.npy");
    let told = done(place.eval("logits", &[text(&last), "--ids-file", text(&ids), "--bound", "2.4e-5"]));
    assert!(stdout(&told).starts_with("1 position of 1 sequence\n"), "{}", stdout(&told));
    assert!(stdout(&told).contains("same most likely    100.000 %") && stdout(&told).contains("within the bound"));
}

#[test]
fn what_cannot_be_evaluated_says_why() {
    let place = Place::new();
    let (empty, short) = (place.file("empty", ""), place.file("short", "Once upon a time"));
    let ids = place.file("large.txt", "1 2 4096");
    let perplexity = |flags: &[&str], words: &[&str]| refused(&place.eval("perplexity", flags), 2, words);
    perplexity(&["-f", text(&empty)], &["has 0 tokens, and a window 512", "hint:"]);
    perplexity(&["-f", text(&short)], &["tokens, and a window 512", "-c"]);
    perplexity(&["-f", text(&short), "-c", "1"], &["none to be predicted"]);
    perplexity(&["-f", text(&short), "-c", "4", "--stride", "8"], &["a stride of 8", "hint:"]);
    perplexity(&["-f", text(&short), "-c", "100000"], &["a window 100000"]);
    perplexity(&["-f", "/nowhere/text"], &["cannot read the text /nowhere/text"]);
    perplexity(&["-f", text(&place.file("bytes", b"\xff"))], &["not UTF-8"]);
    perplexity(&["--ids-file", text(&ids)], &["token id 4096, number 2", "vocabulary of 4096"]);
    perplexity(&[], &["--file", "required"]);
    let config = Reference::glm_tales().model.join("config.json");
    perplexity(&["-f", text(&short), "--save-logits", text(&config)], &["which this command reads"]);
    perplexity(&["-f", text(&short), "-c", "2", "--save-logits", "/dev/null"], &["no regular file"]);
    perplexity(&["-f", text(&short), "-c", "3", "--kl-base", text(&short)], &["cannot read the logits of", "hint:"]);

    let choices = |name: &str, contents: &str, words: &[&str]| {
        refused(&place.eval("choices", &[text(&place.file(name, contents))]), 2, words);
    };
    let good = r#"{"context": "a", "choices": ["b", "c"]}"#;
    choices("none.jsonl", "\n \n", &["there is none", "hint:"]);
    choices("bad.jsonl", &format!("{good}\n{{\"context\": 3}}\n"), &["line 2: ", "hint:"]);
    choices("few.jsonl", r#"{"context": "a", "choices": ["b"]}"#, &["line 1: 1 choices"]);

    let prompt = &Reference::glm_tales().original["short"];
    let mut logits = prompt.all_logits().unwrap();
    let array = file("glm-tales-fp8/short.all_logits.npy");
    refused(&place.eval("logits", &[text(&array)]), 2, &["of which tokens", "--ids-file"]);
    refused(
        &place.eval("logits", &[text(&array), "--ids-file", text(&place.ids(&[1, 2]))]),
        2,
        &["10 positions", "2 tokens"],
    );
    logits[5 * 4096] = f32::NAN;
    let kept = reference_file(&place, "nan.safetensors", &prompt.ids, &logits, 4096);
    refused(&place.eval("logits", &[text(&kept)]), 1, &["nan.safetensors are not finite at position 5 of sequence 0"]);
    let ids = place.ids(&prompt.ids);
    let flags = ["--ids-file", text(&ids), "-c", "10", "--json", "--kl-base", text(&kept)];
    refused(&place.eval("perplexity", &flags), 1, &["nan.safetensors are not finite at position 5 of window 1"]);
    // Logits of a model with another vocabulary.
    let tiny = file("tiny-olmoe/forty.all_logits.npy");
    refused(&place.eval("logits", &[text(&tiny), "--ids-file", text(&ids)]), 2, &["272 ids, and the model has 4096"]);
}

#[test]
fn an_interrupt_shows_what_there_is_and_keeps_whole_windows() {
    let place = Place::new();
    let (model, kept) = (Reference::glm_tales().model, place.path("kept"));
    let text_path = model.join("heldout.txt");
    let mut asked = program(place.home.path());
    asked.args([
        "eval",
        "perplexity",
        "-q",
        "-c",
        "64",
        "-t",
        "1",
        "-f",
        text(&text_path),
        "--save-logits",
        text(&kept),
    ]);
    let mut child = asked.arg("-m").arg(&model).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(child.stdout.take().unwrap());
    let mut first = [0; 4];
    said.read_exact(&mut first).unwrap();
    assert_eq!(&first[..3], b"[1]");
    let pid = i32::try_from(child.id()).unwrap();
    // SAFETY: the child is not waited for yet, so its id is its own.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGINT) }, 0);
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    let ended = child.wait_with_output().unwrap();
    assert_eq!(ended.status.code(), Some(130), "{}", stderr(&ended));
    let done: usize = rest.split("interrupted after ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(done >= 1 && rest.contains("Final estimate: PPL = "), "{rest}");
    assert_eq!(Shard::read(&kept).get("ids").shape, [done as u64, 64]);
}

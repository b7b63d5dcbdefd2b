//! Model directories and prompts that cannot work, as vendor's checkpoint and as container: `run` refuses each before the
//! first token and says what is wrong where, and `doctor` fails each model that `run` would refuse.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use program::{done, program, stderr, stdout};
use safetensors::{Shard, Tensor, file_bytes, tiny_model};
use serde_json::{Map, Value, json};

const EXPERT: &str = "model.layers.1.mlp.experts.0.down_proj.weight";
const NORM: &str = "model.layers.2.post_attention_layernorm.weight";

/// A copy of a model that is about to be harmed.
struct Patient<'a> {
    dir: &'a Path,
    /// Whether weights are packed and have scales beside them.
    packed: bool,
}

impl Patient<'_> {
    fn shards(&self) -> Vec<PathBuf> {
        let paths = fs::read_dir(self.dir).unwrap().map(|entry| entry.unwrap().path());
        let mut shards: Vec<_> = paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
        shards.sort();
        shards
    }

    /// The shard that holds `tensor`.
    fn shard_of(&self, tensor: &str) -> PathBuf {
        let holds = |path: &PathBuf| Shard::read(path).tensors.iter().any(|found| found.name == tensor);
        self.shards().into_iter().find(holds).unwrap_or_else(|| panic!("{tensor}"))
    }

    /// The shard that holds `tensor`, to be written again.
    fn edit(&self, tensor: &str, edit: impl FnOnce(&mut Shard)) {
        let path = self.shard_of(tensor);
        let mut shard = Shard::read(&path);
        edit(&mut shard);
        shard.write(&path);
        // What the converter wrote of the former file says nothing of this one.
        let _ = fs::remove_file(self.dir.join("model.safetensors.index.json"));
    }

    /// The header of the shard that holds [`NORM`].
    fn edit_header(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        let path = &self.shard_of(NORM);
        let shard = Shard::read(path);
        let mut header = shard.header();
        edit(&mut header);
        fs::write(path, file_bytes(&Value::Object(header).to_string(), &shard.data())).unwrap();
    }

    fn config(&self, edit: impl FnOnce(&mut Map<String, Value>)) {
        let path = self.dir.join("config.json");
        let mut config: Map<String, Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut config);
        fs::write(path, Value::Object(config).to_string()).unwrap();
    }

    fn without(&self, key: &str) {
        self.config(|config| drop(config.remove(key)));
    }

    fn begin(&self, bytes: &[u8]) {
        let path = &self.shards()[0];
        let mut shard = fs::read(path).unwrap();
        shard[..bytes.len()].copy_from_slice(bytes);
        fs::write(path, shard).unwrap();
    }
}

/// What is done to a model, and what must be said of it, the file first. Before a `|` for a vendor's checkpoint, behind it
/// for a container, where they differ.
type Harm = (&'static str, fn(&Patient), &'static [&'static str]);

const HARMS: &[Harm] = &[
    (
        "a shard cut short",
        |p| {
            let (path, bytes) = (&p.shards()[0], fs::read(&p.shards()[0]).unwrap());
            fs::write(path, &bytes[..bytes.len() - 100]).unwrap();
        },
        &[".safetensors", "cut short", "expected", "found"],
    ),
    ("a norm is missing", |p| p.edit(NORM, |shard| drop(shard.remove(NORM))), &[NORM, "[64]", "does not exist"]),
    (
        "an expert's weight is missing",
        |p| p.edit(EXPERT, |shard| drop(shard.remove(EXPERT))),
        &[EXPERT, "does not exist"],
    ),
    (
        "a scale is missing",
        |p| match p.packed {
            true => p.edit(EXPERT, |shard| drop(shard.remove(&format!("{EXPERT}.qs")))),
            false => p.edit(EXPERT, |shard| {
                *shard.get_mut(EXPERT) = Tensor::new(EXPERT, "F8_E4M3", &[64, 64], vec![0; 4096])
            }),
        },
        &[".safetensors", EXPERT, "_scale_inv|.qs"],
    ),
    (
        "a scale's type is relabelled",
        |p| {
            let name = if p.packed { format!("{EXPERT}.qs") } else { format!("{EXPERT}_scale_inv") };
            p.edit(EXPERT, |shard| match p.packed {
                true => {
                    let scales = shard.get_mut(&name);
                    (scales.dtype, scales.shape[0]) = ("BF16".into(), scales.shape[0] * 2);
                }
                false => {
                    *shard.get_mut(EXPERT) = Tensor::new(EXPERT, "F8_E4M3", &[64, 64], vec![0; 4096]);
                    shard.tensors.push(Tensor::new(&name, "BF16", &[1, 2], vec![0; 4]));
                }
            });
        },
        &[".safetensors", EXPERT, "expected F32", "BF16"],
    ),
    (
        "a type that nobody knows",
        |p| p.edit_header(|header| header[NORM]["dtype"] = "Q9_K".into()),
        &[".safetensors", "tensor", NORM, "dtype", "Q9_K"],
    ),
    (
        "an expert of the wrong size",
        |p| {
            p.edit(EXPERT, |shard| {
                let tensor = shard.get_mut(EXPERT);
                tensor.data.truncate(tensor.data.len() - 64);
                let size = if tensor.dtype == "U8" { 1 } else { 2 };
                tensor.shape = vec![tensor.data.len() as u64 / size];
            });
        },
        &[".safetensors", EXPERT, "expected", "[64, 64]", "found"],
    ),
    (
        "a norm of one value",
        |p| {
            p.edit(NORM, |shard| {
                let tensor = shard.get_mut(NORM);
                tensor.data.truncate(if tensor.dtype == "F32" { 4 } else { 2 });
                tensor.shape = vec![1];
            });
        },
        &[".safetensors", NORM, "expected [64]", "found [1]"],
    ),
    (
        "a header that is no JSON",
        |p| p.begin(&[8, 0, 0, 0, 0, 0, 0, 0, b'n', b'o', b' ', b'j', b's', b'o', b'n', b'!']),
        &[".safetensors", "header"],
    ),
    (
        "a header of 2^40 bytes",
        |p| p.begin(&(1u64 << 40).to_le_bytes()),
        &[".safetensors", "header length", "1099511627776"],
    ),
    (
        "a header of 2^63 bytes",
        |p| p.begin(&(1u64 << 63).to_le_bytes()),
        &[".safetensors", "header length", "9223372036854775808"],
    ),
    (
        "offsets past the end",
        |p| {
            p.edit_header(|header| {
                let end = header.values().filter_map(|t| t["data_offsets"][1].as_u64()).max().unwrap();
                let last = header.values_mut().find(|t| t["data_offsets"][1].as_u64() == Some(end)).unwrap();
                last["data_offsets"] = json!([last["data_offsets"][0], end + (1 << 40)]);
            });
        },
        &[".safetensors", "data_offsets", "expected", "found"],
    ),
    (
        "an entry without offsets",
        |p| p.edit_header(|header| drop(header[NORM].as_object_mut().unwrap().remove("data_offsets"))),
        &[".safetensors", "tensor", NORM, "data_offsets"],
    ),
    (
        "an entry whose shape is no list",
        |p| p.edit_header(|header| header[NORM]["shape"] = "64".into()),
        &[".safetensors", "tensor", NORM, "\"64\"", "expected"],
    ),
    (
        "a shard of no bytes",
        |p| fs::write(&p.shards()[0], b"").unwrap(),
        &[".safetensors", "at least 8 bytes", "0 bytes"],
    ),
    ("a config without hidden_size", |p| p.without("hidden_size"), &["config.json", "hidden_size", "found nothing"]),
    (
        "hidden_size as a string",
        |p| p.config(|config| drop(config.insert("hidden_size".into(), "64".into()))),
        &["config.json", "hidden_size", "found \"64\""],
    ),
    (
        "a config cut in half",
        |p| {
            let text = fs::read(p.dir.join("config.json")).unwrap();
            fs::write(p.dir.join("config.json"), &text[..text.len() / 2]).unwrap();
        },
        // The text ends within a value or between two.
        &["config.json", "JSON", "EOF while parsing"],
    ),
    ("a config without eps", |p| p.without("rms_norm_eps"), &["config.json", "rms_norm_eps", "found nothing"]),
    ("without a routed scale", |p| p.without("routed_scaling_factor"), &["config.json", "routed_scaling_factor"]),
    ("without a rotary base", |p| p.without("rope_parameters"), &["config.json", "rope_theta"]),
    ("without norm_topk_prob", |p| p.without("norm_topk_prob"), &["config.json", "norm_topk_prob"]),
    (
        "a hidden_size that the weights have not",
        |p| p.config(|config| drop(config.insert("hidden_size".into(), 128.into()))),
        // 272 tokens: [272, 128] is asked for, [272, 64] is there, and int8 is a byte a weight.
        &[
            ".safetensors",
            "model.embed_tokens.weight",
            "expected",
            "[272, 128]|int8-row of [272, 128]",
            "[272, 64]|17408 bytes",
        ],
    ),
    (
        "more experts a token than there are",
        |p| p.config(|config| drop(config.insert("num_experts_per_tok".into(), 9.into()))),
        &["config.json", "num_experts_per_tok", "found 9"],
    ),
    ("no tokenizer", |p| fs::remove_file(p.dir.join("tokenizer.json")).unwrap(), &["tokenizer.json"]),
    ("a tokenizer of nothing", |p| fs::write(p.dir.join("tokenizer.json"), "{}").unwrap(), &["tokenizer.json"]),
    (
        "one tensor in two shards",
        |p| {
            let twice = Shard { tensors: vec![Tensor::new(NORM, "F32", &[64], vec![0; 256])], ..Shard::default() };
            twice.write(&p.dir.join("twice.safetensors"));
        },
        &["twice.safetensors", NORM],
    ),
    (
        "an empty directory",
        |p| fs::read_dir(p.dir).unwrap().for_each(|entry| fs::remove_file(entry.unwrap().path()).unwrap()),
        &["config.json"],
    ),
];

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(|entry| entry.unwrap()) {
        fs::write(to.join(entry.file_name()), fs::read(entry.path()).unwrap()).unwrap();
    }
}

fn run(home: &Path, model: &Path, prompt: &[&str]) -> Output {
    let mut run = program(home);
    run.args(["run", "-q", "-n", "1", "--raw", "--usage", "off", "-m"]).arg(model).args(prompt).output().unwrap()
}

/// Details of what `doctor` fails.
fn failed(home: &Path, model: &Path) -> String {
    let (code, details) = unwell(home, model);
    assert_eq!(code, i32::from(!details.is_empty()), "{details}");
    details
}

/// The exit code of `doctor`, and details of what it fails.
fn unwell(home: &Path, model: &Path) -> (i32, String) {
    let output = program(home).args(["doctor", "--json", "-m"]).arg(model).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap().iter().filter(|check| check["status"] == "fail");
    let details: Vec<&str> = checks.map(|check| check["detail"].as_str().unwrap()).collect();
    assert_eq!(&report["result"] == "fail", !details.is_empty(), "{report}");
    (output.status.code().unwrap(), details.join("\n"))
}

#[test]
fn whatever_is_wrong_is_refused_by_name_before_the_first_token_and_doctor_fails_it() {
    let home = tempfile::tempdir().unwrap();
    let container = home.path().join("container");
    done(program(home.path()).arg("convert").arg(tiny_model()).arg(&container).output().unwrap());
    for (from, packed) in [(tiny_model(), false), (container.as_path(), true)] {
        for (name, harm, words) in HARMS {
            let model = home.path().join("model");
            copy(from, &model);
            harm(&Patient { dir: &model, packed });
            let refused = run(home.path(), &model, &["-p", "x"]);
            let (said, failed) = (stderr(&refused), failed(home.path(), &model));
            assert_eq!((refused.status.code(), stdout(&refused)), (Some(1), ""), "{name}, packed {packed}: {said}");
            for words in *words {
                let (vendor, container) = words.split_once('|').unwrap_or((words, words));
                let word = if packed { container } else { vendor };
                assert!(said.contains(word), "{name}, packed {packed}: no {word:?} in: {said}");
                assert!(failed.contains(word), "{name}, packed {packed}: no {word:?} in what doctor fails: {failed}");
            }
            assert!(said.contains("hint:"), "{name}: {said}");
            fs::remove_dir_all(&model).unwrap();
        }
        // The same model unharmed.
        assert_eq!(failed(home.path(), from), "");
        done(run(home.path(), from, &["-p", "x"]));
    }
}

#[test]
fn a_directory_that_is_not_there_is_a_usage_error_of_both() {
    let home = tempfile::tempdir().unwrap();
    let nowhere = home.path().join("nowhere");
    let refused = run(home.path(), &nowhere, &["-p", "x"]);
    assert_eq!((refused.status.code(), stdout(&refused)), (Some(2), ""));
    assert!(stderr(&refused).contains("nowhere does not exist"));
    let (code, failed) = unwell(home.path(), &nowhere);
    assert!(code == 2 && failed.contains("nowhere does not exist"), "{code}: {failed}");
}

#[test]
fn a_shard_cut_short_is_refused_with_the_length_it_should_have_and_the_one_it_has() {
    let home = tempfile::tempdir().unwrap();
    let container = home.path().join("container");
    done(program(home.path()).arg("convert").arg(tiny_model()).arg(&container).output().unwrap());
    for (from, packed) in [(tiny_model(), false), (container.as_path(), true)] {
        let model = home.path().join("model");
        copy(from, &model);
        let shard = &Patient { dir: &model, packed }.shards()[0];
        let whole = fs::read(shard).unwrap();
        fs::write(shard, &whole[..whole.len() - 100]).unwrap();
        let said = stderr(&run(home.path(), &model, &["-p", "x"])).to_owned();
        let (expected, found) =
            (format!("expected {} bytes", whole.len()), format!("found {} bytes", whole.len() - 100));
        for words in [shard.file_name().unwrap().to_str().unwrap(), "cut short", &expected, &found] {
            assert!(said.contains(words), "no {words:?} in: {said}");
        }
        fs::remove_dir_all(&model).unwrap();
    }
}

#[test]
fn prompts_that_cannot_be_answered_are_refused_with_both_numbers() {
    let home = tempfile::tempdir().unwrap();
    let empty = run(home.path(), tiny_model(), &["-p", ""]);
    assert_eq!((empty.status.code(), stdout(&empty)), (Some(2), ""), "{}", stderr(&empty));
    assert!(stderr(&empty).contains("the prompt is empty"), "{}", stderr(&empty));
    // The tiny model has 512 positions, and no token of it is longer than the 15 bytes of <|observation|>.
    let long = "zq ".repeat(4000);
    let long = run(home.path(), tiny_model(), &["-p", &long]);
    assert_eq!((long.status.code(), stdout(&long)), (Some(2), ""));
    assert!(stderr(&long).contains("512") && stderr(&long).contains("at least 800 tokens"), "{}", stderr(&long));
}

//! A weight that is not a number, infinite or larger than any weight is, in each format: `doctor --deep` names it, and `run`
//! refuses it or answers with numbers.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use engines::Model;
use millstream::checkpoint::convert::{ConvertOptions, Width, convert};
use millstream::checkpoint::{Checkpoint, CheckpointError, finite};
use millstream_io::{DeviceKind, IoMode};
use program::{json, program, refused};
use safetensors::{Shard, Tensor};
use serde_json::Value;
use tempfile::TempDir;

const Q: &str = "model.layers.1.self_attn.q_a_proj.weight";

/// A number of `Q` to spoil.
struct Case {
    model: PathBuf,
    /// What follows the weight's name in that of the tensor that holds it.
    suffix: &'static str,
    at: At,
    bytes: Vec<u8>,
    value: String,
}

/// Which of its numbers.
enum At {
    Cell(usize, usize),
    Scale(usize),
}

/// A copy of `dir`.
fn copy(dir: &Path) -> TempDir {
    let copy = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        fs::copy(&entry, copy.path().join(entry.file_name().unwrap())).unwrap();
    }
    copy
}

/// Writes `bytes` over those of `tensor` from that on which `place` finds among its rows and their columns and its length.
fn spoil(dir: &Path, tensor: &str, bytes: &[u8], place: impl Fn(usize, usize) -> usize) {
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_none_or(|extension| extension != "safetensors") {
            continue;
        }
        let whole = fs::read(&path).unwrap();
        let length = u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&whole[8..][..length]).unwrap();
        let Some(entry) = header.get(tensor) else { continue };
        let number = |value: &Value| value.as_u64().unwrap() as usize;
        let (from, to) = (number(&entry["data_offsets"][0]), number(&entry["data_offsets"][1]));
        let cols = entry["shape"].as_array().unwrap().last().map_or(1, number);
        let at = 8 + length + from + place(cols, to - from);
        fs::File::options().write(true).open(&path).unwrap().write_all_at(bytes, at as u64).unwrap();
        return;
    }
    panic!("no {tensor} in {}", dir.display());
}

fn doctor(dir: &Path, flags: &[&str]) -> (Value, Option<i32>) {
    let home = tempfile::tempdir().unwrap();
    let output = program(home.path()).args(["doctor", "--json", "-m"]).arg(dir).args(flags).output().unwrap();
    (json(&output), output.status.code())
}

/// Details of the checks of weights with this status.
fn weights(report: &Value, status: &str) -> Vec<String> {
    let checks = report["checks"].as_array().unwrap().iter();
    let these = checks.filter(|check| check["id"] == "weights" && check["status"] == status);
    these.map(|check| check["detail"].as_str().unwrap().to_owned()).collect()
}

fn container(parent: &Path, name: &str, options: &ConvertOptions) -> PathBuf {
    let dir = parent.join(name);
    convert(&engines::tiny(), &dir, options, &mut |_| {}).unwrap();
    dir
}

/// One of each format, weights and scales.
fn cases(made: &Path) -> Vec<Case> {
    let dense = |name, width, group| {
        container(made, name, &ConvertOptions { dense: width, group, ..ConvertOptions::default() })
    };
    let (four, grouped) = (dense("int4", Width::Bits4, None), dense("int4-g16", Width::Bits4, Some(16)));
    let (eight, two) = (dense("int8", Width::Bits8, None), dense("int2", Width::Bits2, None));
    // The tiny model has BF16; as many zeros in F32 and F16 are as good.
    let floats = |dtype: &'static str, bytes: usize| {
        let dir = copy(&engines::tiny()).keep();
        let path = dir.join("model.safetensors");
        let mut shard = Shard::read(&path);
        let Tensor { shape, data, .. } = shard.get(Q).clone();
        *shard.get_mut(Q) = Tensor::new(Q, dtype, &shape, vec![0; data.len() / 2 * bytes]);
        shard.write(&path);
        fs::rename(&dir, made.join(dtype)).unwrap();
        made.join(dtype)
    };
    let (tiny, tales, single, half) = (engines::tiny(), engines::tales(), floats("F32", 4), floats("F16", 2));
    let case = |model: &Path, suffix, at, bytes: &[u8], value: &str| Case {
        model: model.to_owned(),
        suffix,
        at,
        bytes: bytes.to_vec(),
        value: value.to_owned(),
    };
    let (nan, infinite) = (f32::NAN.to_le_bytes(), f32::NEG_INFINITY.to_le_bytes());
    vec![
        case(&tiny, "", At::Cell(2, 3), &[0xc0, 0x7f], "NaN"),
        case(&tiny, "", At::Cell(1, 0), &[0x80, 0xff], "-inf"),
        case(&single, "", At::Cell(1, 15), &nan, "NaN"),
        case(&half, "", At::Cell(0, 5), &[0x00, 0x7c], "inf"),
        case(&half, "", At::Cell(0, 6), &[0x01, 0xfc], "NaN"),
        case(&tales, "", At::Cell(1, 1), &[0xff], "NaN"),
        case(&tales, "_scale_inv", At::Scale(1), &infinite, "-inf"),
        case(&eight, ".qs", At::Scale(3), &nan, "NaN"),
        case(&four, ".qs", At::Scale(4), &nan, "NaN"),
        case(&grouped, ".qs", At::Scale(9), &infinite, "-inf"),
        case(&two, ".qs", At::Scale(0), &nan, "NaN"),
        // Numbers, but none of a weight.
        case(&tiny, "", At::Cell(2, 3), &[0x7f, 0x7f], "3.3895314e38, and weights are below 1024"),
        case(&tiny, "", At::Cell(2, 3), &[0x80, 0xc4], "-1024, and weights are below 1024"),
        case(&single, "", At::Cell(0, 1), &3e38f32.to_le_bytes(), "3e38, and weights are below 1024"),
        case(&half, "", At::Cell(1, 5), &[0xff, 0x7b], "65504, and weights are below 1024"),
        // Below 1024 by 448, 127, 7 and 1.
        case(
            &tales,
            "_scale_inv",
            At::Scale(1),
            &1e6f32.to_le_bytes(),
            "1e6, and scales of its codes are below 2.2857144",
        ),
        case(&eight, ".qs", At::Scale(3), &8.5f32.to_le_bytes(), "8.5, and scales of its codes are below 8.062992"),
        case(&four, ".qs", At::Scale(2), &3e38f32.to_le_bytes(), "3e38, and scales of its codes are below 146.28572"),
        case(
            &grouped,
            ".qs",
            At::Scale(9),
            &(-147f32).to_le_bytes(),
            "-147, and scales of its codes are below 146.28572",
        ),
        case(&two, ".qs", At::Scale(0), &1024f32.to_le_bytes(), "1024, and scales of its codes are below 1024"),
    ]
}

#[test]
fn a_number_that_no_weight_is_is_named_and_makes_no_answer_of_none() {
    let made = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for Case { model, suffix, at, bytes, value } in cases(made.path()) {
        let spoilt = copy(&model);
        let size = if suffix.is_empty() { bytes.len() } else { 4 };
        let (said, number) = match at {
            At::Cell(row, col) => (format!("row {row}, column {col} is {value}"), (row, col)),
            At::Scale(scale) => (format!("scale {scale} is {value}"), (0, scale)),
        };
        spoil(spoilt.path(), &format!("{Q}{suffix}"), &bytes, |cols, _| size * (number.0 * cols + number.1));
        let (report, code) = doctor(spoilt.path(), &["--deep"]);
        let failed = weights(&report, "fail");
        let [detail] = &failed[..] else { panic!("{model:?} {said}: {report}") };
        assert!(detail.ends_with(&format!(".safetensors: tensor {Q}: {said}")), "{model:?}: {detail}");
        assert_eq!(code, Some(1));
        let home = tempfile::tempdir().unwrap();
        let mut run = program(home.path());
        let run = run.args(["run", "--ids", "-p", "1 2 3", "-n", "2", "-m"]).arg(spoilt.path()).output().unwrap();
        let told = program::stderr(&run);
        let is_finite = bytes.len() == size && said.contains("below");
        match run.status.code() {
            // What is no number comes out as none, or ends the run.
            Some(0) => assert!(is_finite, "{model:?} {said}"),
            code => {
                assert_eq!(code, Some(1), "{model:?} {said}: {told}");
                assert!(["not finite", "is inf", "is NaN"].iter().any(|text| told.contains(text)), "{said}: {told}");
                assert!(told.contains("doctor --deep -m DIR` says where"), "{said}: {told}");
            }
        }
    }
}

/// Tensors that are read otherwise than the matrix above: a gain, a bias, the embedding, the head.
#[test]
fn an_absurd_number_is_named_wherever_it_is() {
    let large = [0x7f, 0x7f];
    let tensors = [
        ("model.layers.0.input_layernorm.weight", true),
        ("model.layers.1.mlp.gate.e_score_correction_bias", true),
        ("model.embed_tokens.weight", false),
        ("lm_head.weight", false),
        ("model.layers.1.mlp.gate.weight", false),
        ("model.layers.1.mlp.experts.3.down_proj.weight", false),
    ];
    for (tensor, is_vector) in tensors {
        let spoilt = copy(&Model::Tiny.dir());
        // The upper half of an F32, or the first BF16.
        let at = if tensor.ends_with("bias") { 2 } else { 0 };
        spoil(spoilt.path(), tensor, &large, |_, _| at);
        for flags in [&["--deep"][..], &[]] {
            let (report, code) = doctor(spoilt.path(), flags);
            let failed = weights(&report, "fail");
            let is_named = failed.iter().any(|detail| {
                detail.contains(tensor) && detail.contains("row 0, column 0 is 3.") && detail.contains("below 1024")
            });
            let is_seen = is_vector || !flags.is_empty();
            assert_eq!((is_named, code), (is_seen, Some(i32::from(is_seen))), "{tensor} {flags:?}: {report}");
        }
        let (home, prompt) = (tempfile::tempdir().unwrap(), "1 2 3 4 5 6 7 8 9");
        let mut run = program(home.path());
        let run = run.args(["run", "--ids", "-n", "3", "-p", prompt, "-m"]).arg(spoilt.path()).output().unwrap();
        let told = program::stderr(&run);
        match run.status.code() {
            Some(0) => assert!(!is_vector, "{tensor}"),
            code => assert!(code == Some(1) && told.contains("doctor --deep"), "{tensor}: {told}"),
        }
        if is_vector {
            refused(&run, 1, &[tensor, "and weights are below 1024", "hint: this shard is damaged"]);
        }
    }
}

/// The bound is what the assertions of `limits` say it is: a model all of whose weights are as large as may be, and of one
/// sign, so that nothing cancels, stays with numbers.
#[test]
fn no_model_of_numbers_below_the_bound_leaves_the_finite_ones() {
    for model in [Model::Tiny, Model::TinyOlmoe] {
        let large = copy(&model.dir());
        for path in fs::read_dir(large.path()).unwrap().map(|entry| entry.unwrap().path()) {
            if path.extension().is_none_or(|extension| extension != "safetensors") {
                continue;
            }
            let mut shard = Shard::read(&path);
            for tensor in &mut shard.tensors {
                let number: &[u8] = if tensor.dtype == "F32" { &[0xff, 0xff, 0x7f, 0x44] } else { &[0x7f, 0x44] };
                assert!(["F32", "BF16"].contains(&&*tensor.dtype), "{}", tensor.dtype);
                tensor.data = number.repeat(tensor.data.len() / number.len());
            }
            shard.write(&path);
        }
        let (report, code) = doctor(large.path(), &["--deep"]);
        assert_eq!((weights(&report, "ok").len(), code), (1, Some(0)), "{model:?}: {report}");
        for flags in
            [&["--activations", "f32"][..], &["--activations", "int8"], &["--dense-bits", "2", "--expert-bits", "4"]]
        {
            let home = tempfile::tempdir().unwrap();
            let mut run = program(home.path());
            let run = run.args(["run", "--ids", "-n", "4", "-p", "1 2 3 4 5 6 7 8 9"]).args(flags);
            program::done(run.arg("-m").arg(large.path()).output().unwrap());
        }
    }
}

/// A value of config.json that no weight makes up for.
#[test]
fn a_config_that_makes_numbers_of_none_is_refused() {
    for (field, value) in [("rms_norm_eps", 1e-300), ("rope_theta", 1e-300), ("routed_scaling_factor", 1e30)] {
        let dir = copy(&Model::Tiny.dir());
        let path = dir.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        match config.get_mut("rope_parameters").filter(|_| field == "rope_theta") {
            Some(parameters) => parameters[field] = value.into(),
            None => config[field] = value.into(),
        }
        fs::write(&path, config.to_string()).unwrap();
        let home = tempfile::tempdir().unwrap();
        let mut run = program(home.path());
        let run = run.args(["run", "--ids", "-n", "1", "-p", "1", "-m"]).arg(dir.path()).output().unwrap();
        refused(
            &run,
            1,
            &[field, "least 1", "hint: "].map(|text| match (field, text) {
                ("routed_scaling_factor", "least 1") => "at most 64",
                _ => text,
            }),
        );
    }
}

/// Of a model of two shards the first ends early once the look has begun, and somebody gives up before the end of the second.
#[test]
fn what_was_found_is_named_however_the_look_ends() {
    let dir = copy(&Model::Tales.dir());
    let (early, late) = ("model.layers.0.input_layernorm.weight", "lm_head.weight");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let file = |tensor: &str| checkpoint.tensors.get(tensor).unwrap().file;
    assert_ne!(file(early), file(late), "the test needs them apart");
    spoil(dir.path(), early, &[0xc0, 0xff], |_, _| 0);
    spoil(dir.path(), late, &[0xc0, 0xff], |_, _| 0);
    let numbers = finite::all(&checkpoint).unwrap();
    let how = (IoMode::Buffered, DeviceKind::Threads);
    let named = |found: &finite::Findings| found.bad.iter().map(|bad| bad.tensor.clone()).collect::<Vec<_>>();

    let (found, end) = finite::check(&checkpoint, &numbers, how, &mut |looked| match looked.bad {
        0 => Ok(()),
        _ => Err(CheckpointError::Interrupted { dir: dir.path().to_owned() }),
    });
    assert_eq!(named(&found), [if file(early) < file(late) { early } else { late }]);
    assert!(matches!(end, Err(CheckpointError::Interrupted { .. })), "{end:?}");

    let first = checkpoint.tensors.path(file(early).min(file(late)));
    let bytes = fs::metadata(first).unwrap().len();
    let (found, end) = finite::check(&checkpoint, &numbers, how, &mut |_| {
        fs::File::options().write(true).open(first).unwrap().set_len(bytes / 4).unwrap();
        Ok(())
    });
    assert_eq!(named(&found).last().unwrap(), late, "behind what could not be read");
    let unread = &found.unread[0];
    assert!(unread.to_string().contains(&first.display().to_string()) && !unread.tensors.is_empty(), "{unread}");
    assert!(end.unwrap_err().to_string().contains("changed"));
}

#[test]
fn experts_are_looked_at_too_and_models_without_fault_pass() {
    for model in [Model::Tiny, Model::TinyInt4, Model::TinyOlmoe, Model::Tales] {
        let (report, code) = doctor(&model.dir(), &["--deep"]);
        assert_eq!((weights(&report, "ok").len(), weights(&report, "fail").len(), code), (1, 0, Some(0)), "{report}");
    }
    let expert = "model.layers.1.mlp.experts.3.down_proj.weight";
    let spoilt = copy(&Model::Tiny.dir());
    spoil(spoilt.path(), expert, &[0x80, 0x7f], |_, bytes| bytes - 2);
    spoil(spoilt.path(), expert, &[0xff, 0x7f, 0x80, 0x7f], |_, _| 0);
    let (report, _) = doctor(spoilt.path(), &["--deep"]);
    let failed = weights(&report, "fail");
    assert!(failed[0].ends_with(": row 0, column 0 is NaN; 2 more of it are not finite or too large"), "{failed:?}");
    // Nor can it be quantized as it is read, and whoever runs a model is not sent to the source of a conversion.
    let (home, prompt) = (tempfile::tempdir().unwrap(), (1..40).map(|id| id.to_string()).collect::<Vec<_>>().join(" "));
    let mut run = program(home.path());
    let run = run.args(["run", "--expert-bits", "4", "--ids", "-n", "1", "-p", &prompt, "-m"]).arg(spoilt.path());
    let run = run.output().unwrap();
    let told = program::stderr(&run);
    let wanted = [expert, "hint: this shard is damaged", "doctor --deep"];
    assert!(run.status.code() == Some(1) && wanted.iter().all(|text| told.contains(text)), "{told}");
}

/// Norms are read before anything is: nobody has to ask for that.
#[test]
fn a_norm_that_is_not_finite_is_refused_by_whoever_reads_it() {
    let norm = "model.layers.0.input_layernorm.weight";
    let spoilt = copy(&Model::Tiny.dir());
    spoil(spoilt.path(), norm, &[0xc0, 0xff], |_, _| 6);
    let (report, code) = doctor(spoilt.path(), &[]);
    let failed = weights(&report, "fail");
    assert!(failed[0].contains(norm) && failed[0].ends_with("column 3 is NaN") && code == Some(1), "{report}");
    // Once, as what it is: no fault of memory.
    let checks = report["checks"].as_array().unwrap().iter();
    let failed: Vec<&Value> = checks.filter(|check| check["status"] == "fail").map(|check| &check["id"]).collect();
    assert_eq!(failed, ["weights"]);
    for command in [&["run", "--ids", "-p", "1", "-m"][..], &["plan", "-m"]] {
        let home = tempfile::tempdir().unwrap();
        let output = program(home.path()).args(command).arg(spoilt.path()).output().unwrap();
        refused(&output, 1, &[norm, "column 3 is NaN", "hint: "]);
    }
}

/// What is kept as it is, is looked at on its way: a model that cannot run is not made, and its source not removed for it.
#[test]
fn no_conversion_keeps_a_number_that_is_not_finite() {
    let expert = "model.layers.1.mlp.experts.3.down_proj.weight";
    let cases: [(&str, &[&str]); 5] = [
        ("model.layers.0.input_layernorm.weight", &[]),
        ("model.layers.1.mlp.gate.weight", &[]),
        ("lm_head.weight", &["--io-bits", "16"]),
        (expert, &["--experts", "16"]),
        (expert, &["--repack"]),
    ];
    for (tensor, flags) in cases {
        let spoilt = copy(&Model::Tiny.dir());
        spoil(spoilt.path(), tensor, &[0xc0, 0xff], |_, _| 6);
        let shards = |dir: &Path| {
            let names = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
            names.filter(|name| name.extension().is_some_and(|kind| kind == "safetensors")).count()
        };
        let (before, made, home) = (shards(spoilt.path()), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let mut convert = program(home.path());
        let convert = convert.args(["convert", "--delete-source"]).args(flags).arg(spoilt.path());
        let output = convert.arg(made.path().join("made")).output().unwrap();
        refused(&output, 1, &[tensor, "row 0, column 3 is NaN", "hint: the source"]);
        assert_eq!(shards(spoilt.path()), before, "{tensor} {flags:?}");
    }
}

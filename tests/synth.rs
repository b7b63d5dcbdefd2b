//! Models with drawn weights: the same bytes every time, shapes as published, and every command takes them for models.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/program.rs"]
mod program;
#[path = "common/quick.rs"]
mod quick;

use millstream::checkpoint::convert::{ConvertOptions, Width, convert};
use millstream::checkpoint::synth::{Precision, Preset, SynthOptions, synth};
use millstream::checkpoint::write::{Cancel, PlanLine, Progress};
use millstream::checkpoint::{Checkpoint, CheckpointError};
use millstream::engine::{Engine, EngineConfig, Memory};
use millstream::kernels::Format;
use program::forget_settings;
use quick::quick_dir;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn small() -> SynthOptions {
    let preset = "small".parse::<Preset>().unwrap();
    SynthOptions { layers: Some(3), mtp: true, ..SynthOptions::new(preset) }
}

fn quietly(dst: &Path, options: &SynthOptions) -> Result<(), CheckpointError> {
    synth(dst, options, &mut |_| {}).map(|_| ())
}

fn made(options: &SynthOptions) -> tempfile::TempDir {
    let dst = quick_dir();
    quietly(dst.path(), options).unwrap();
    dst
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap()))
        .collect()
}

fn millstream(arguments: &[&str], dir: &Path) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    forget_settings(&mut command);
    command.args(arguments).current_dir(dir).output().unwrap()
}

/// Standard output of a command that succeeds.
#[track_caller]
fn succeeds(arguments: &[&str], dir: &Path) -> String {
    let output = millstream(arguments, dir);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn the_same_options_write_the_same_bytes_and_other_seeds_others() {
    let first = contents(made(&small()).path());
    assert!(first == contents(made(&small()).path()));
    let other = contents(made(&SynthOptions { seed: 1, ..small() }).path());
    assert_eq!(first.keys().collect::<Vec<_>>(), other.keys().collect::<Vec<_>>());
    for (name, bytes) in &first {
        // Only what says what the model is does not depend on the seed.
        assert_eq!(other[name] == *bytes, !name.ends_with("safetensors"), "{name}");
    }
}

#[test]
fn writing_that_was_killed_continues_to_the_same_bytes() {
    let whole = contents(made(&small()).path());
    for stop in [2, 5, 8] {
        let dst = quick_dir();
        let mut seen = 0;
        let killed = catch_unwind(AssertUnwindSafe(|| {
            synth(dst.path(), &small(), &mut |progress| {
                seen += usize::from(matches!(progress, Progress::Shard { .. }));
                if seen == stop {
                    std::panic::resume_unwind(Box::new("killed"));
                }
            })
        }));
        assert!(killed.is_err());
        assert!(Checkpoint::open(dst.path()).is_err(), "an unfinished model opened");
        let other = SynthOptions { seed: 5, ..small() };
        let error = quietly(dst.path(), &other).unwrap_err();
        assert!(matches!(error, CheckpointError::ConvertDiffers { .. }), "{error}");
        let report = synth(dst.path(), &small(), &mut |_| {}).unwrap();
        assert_eq!(report.shards_kept, stop - 1);
        assert!(contents(dst.path()) == whole);
    }
}

#[test]
fn nothing_stays_of_what_is_interrupted() {
    let parent = quick_dir();
    for (name, exists) in [("new", false), ("empty", true)] {
        let dst = parent.path().join(name);
        if exists {
            fs::create_dir(&dst).unwrap();
        }
        let raised = Arc::new(AtomicBool::new(false));
        let options = SynthOptions { cancel: Some(Cancel(raised.clone())), ..small() };
        let mut shards = 0;
        let result = synth(&dst, &options, &mut |progress| {
            shards += usize::from(matches!(progress, Progress::Shard { .. }));
            raised.store(shards == 4, Ordering::Relaxed);
        });
        assert!(matches!(result, Err(CheckpointError::Interrupted { .. })));
        assert_eq!(dst.exists(), exists);
        assert!(!exists || contents(&dst).is_empty());
    }
}

#[test]
fn a_directory_that_holds_anything_is_refused_and_left_alone() {
    let dst = quick_dir();
    fs::write(dst.path().join("notes.txt"), "mine").unwrap();
    let output = millstream(&["synth", "--preset", "small", "."], dst.path());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(said.contains("notes.txt") && said.contains("hint: give an empty or new directory"), "{said}");
    assert_eq!(contents(dst.path()).keys().collect::<Vec<_>>(), ["notes.txt"]);
    let finished = made(&small());
    let before = contents(finished.path());
    let error = quietly(finished.path(), &small()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertOccupied { .. }), "{error}");
    assert!(contents(finished.path()) == before);
}

#[test]
fn shapes_that_make_no_model_are_usage_errors() {
    let dir = quick_dir();
    for (flags, words) in [
        (&["--layers", "3", "--dense", "3"][..], "expected fewer than the 3 layers"),
        (&["--experts", "7"], "expected at least the 8 that a token chooses, found 7"),
        (&["--layers", "2000"], "1..1024"),
        (&["--format", "fp8", "--dense-bits", "4"], "--format is fp8"),
        (&["--shard-size", "1GB"], "--shard-size goes with --format fp8 or bf16"),
    ] {
        let output = millstream(&[&["synth"], flags, &["model"]].concat(), dir.path());
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(words), "{said}");
        assert!(!dir.path().join("model").exists());
    }
}

/// Lines of the plan and bytes, of all shards and of those that are stored.
fn planned(options: SynthOptions) -> (Vec<PlanLine>, u64, u64) {
    let dst = quick_dir();
    let mut plan = None;
    let options = SynthOptions { free_bytes: Some(0), ..options };
    let result = synth(&dst.path().join("model"), &options, &mut |progress| {
        if let Progress::Plan { lines, bytes, stored, .. } = progress {
            plan = Some((lines, bytes, stored));
        }
    });
    assert!(matches!(result, Err(CheckpointError::NoSpace { .. })));
    assert!(contents(dst.path()).is_empty(), "the directory was made and stays");
    plan.unwrap()
}

#[test]
fn the_whole_of_glm_5_2_has_its_published_size() {
    let whole =
        SynthOptions { dense: Width::Bits4, mtp: true, hollow_experts: true, ..SynthOptions::new(Preset::ALL[0]) };
    let (lines, bytes, stored) = planned(whole);
    // 75 sparse layers of 256 experts: 3 matrices of 2,048 x 6,144 at 4 bits, and 2,048 + 2,048 + 6,144 scales.
    let experts = 75 * 256 * (3 * 6_291_456 + 4 * 10_240u64);
    let line = |kind, tensors, format, bytes| PlanLine { kind, format, tensors, bytes };
    assert!(lines.contains(&line("routed experts", 57_600, Format::Int4Row, experts)), "{lines:?}");
    // The MTP layer's have 8 bits.
    let drafting = 256 * (3 * 12_582_912 + 4 * 10_240u64);
    assert!(lines.contains(&line("MTP experts", 768, Format::Int8Row, drafting)), "{lines:?}");
    // 383.7 GB in published containers; this layout begins experts on a huge page.
    assert!((383.3e9..384.3e9).contains(&(bytes as f64)), "{bytes}");
    let dense = bytes - experts - drafting;
    assert!(stored < dense && dense - stored < 76 * (2 << 20), "{stored} bytes for {dense} of dense weights");
}

#[test]
fn layers_without_experts_are_scaled_with_the_depth() {
    for (layers, dense, expected) in [(None, None, 75), (Some(3), None, 2), (Some(2), None, 2), (Some(5), Some(3), 2)] {
        let (lines, ..) = planned(SynthOptions { layers, dense_layers: dense, ..SynthOptions::new(Preset::ALL[0]) });
        let line = lines.iter().find(|line| line.kind == "routed experts").unwrap();
        assert_eq!(line.tensors, expected * 256 * 3);
    }
}

#[test]
fn holes_take_no_space_read_as_zeros_and_have_right_checksums() {
    let dir = quick_dir();
    succeeds(&["synth", "-q", "--preset", "small", "--sparse-experts", "hollow"], dir.path());
    let checkpoint = Checkpoint::open(&dir.path().join("hollow")).unwrap();
    let source = checkpoint.experts.get(1, 7).unwrap().gate;
    let file = fs::read(checkpoint.tensors.path(source.data.file)).unwrap();
    for span in [source.data, source.scales.unwrap()] {
        assert!(file[span.offset as usize..][..span.len as usize].iter().all(|&byte| byte == 0));
    }
    // A file system without holes fills them.
    let meta = fs::metadata(checkpoint.tensors.path(source.data.file)).unwrap();
    if meta.blocks() * 512 >= meta.len() {
        println!("holes are filled on this file system");
    }
    let said = millstream(&["doctor", "--deep", "-m", "hollow"], dir.path());
    let said = String::from_utf8(said.stdout).unwrap();
    assert!(said.contains("all as written"), "{said}");
    let ids = succeeds(&["run", "-q", "-m", "hollow", "--ids", "-p", "1 2 3", "-n", "5", "--temp", "0"], dir.path());
    assert_eq!(ids.split_whitespace().count(), 5);
}

#[test]
fn every_format_runs_and_converts() {
    let dir = quick_dir();
    for format in ["int4", "fp8", "bf16"] {
        succeeds(&["synth", "-q", "--preset", "small", "--mtp", "--format", format, format], dir.path());
        let ids = succeeds(&["run", "-q", "-m", format, "--ids", "-p", "9 8 7", "-n", "20"], dir.path());
        assert_eq!(ids.split_whitespace().count(), 20, "{format}: {ids}");
        succeeds(&["run", "-q", "-m", format, "-p", "Is this text?", "-n", "4"], dir.path());
        if format != "int4" {
            convert(&dir.path().join(format), &dir.path().join("converted"), &ConvertOptions::default(), &mut |_| {})
                .unwrap();
            Checkpoint::open(&dir.path().join("converted")).unwrap();
            fs::remove_dir_all(dir.path().join("converted")).unwrap();
        }
    }
    assert_eq!("fp8".parse(), Ok(Precision::Fp8));
}

#[test]
fn published_shards_end_behind_the_tensor_that_reaches_their_size() {
    let dir = quick_dir();
    let made = |flags: &[&str], name: &str| {
        succeeds(&[&["synth", "-q", "--preset", "small", "--format", "bf16"], flags, &[name]].concat(), dir.path());
        let mut tensors: Vec<(String, u64, Vec<u64>)> = Vec::new();
        let checkpoint = Checkpoint::open(&dir.path().join(name)).unwrap();
        for (number, path) in checkpoint.tensors.paths().iter().enumerate() {
            let of_shard = checkpoint.tensors.iter().filter(|(_, tensor)| tensor.file.0 as usize == number);
            let mut places: Vec<(u64, u64)> = of_shard.map(|(_, tensor)| (tensor.offset, tensor.bytes)).collect();
            places.sort_unstable();
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            tensors.push((name, places.len() as u64, places.into_iter().map(|(_, bytes)| bytes).collect()));
        }
        tensors
    };
    let (one, many) = (made(&[], "one"), made(&["--shard-size", "300kB"], "many"));
    assert_eq!((one.len(), one[0].0.as_str()), (1, "model-00001-of-00001.safetensors"));
    assert!(many.len() > 3, "{} shards", many.len());
    for (_, _, bytes) in &many[..many.len() - 1] {
        let (all, last): (u64, u64) = (bytes.iter().sum(), *bytes.last().unwrap());
        assert!(all >= 300_000 && all - last < 300_000, "{bytes:?}");
    }
    assert_eq!(many.iter().map(|shard| shard.1).sum::<u64>(), one[0].1);
}

#[test]
fn routing_reaches_every_expert_and_prefers_some() {
    let dst = made(&SynthOptions { layers: Some(6), experts: Some(64), ..small() });
    let config = EngineConfig { memory: Memory::Slabs(64), ..EngineConfig::new(1 << 32) };
    let mut engine = Engine::open(Checkpoint::open(dst.path()).unwrap(), &config).unwrap();
    let tokens: Vec<u32> = (0..512).collect();
    let mut chosen: BTreeMap<usize, Vec<u32>> = BTreeMap::new();
    let logits = engine.score_observed(&tokens, &mut |layer: usize, ids: &[u16], _: &[f32]| {
        let counts = chosen.entry(layer).or_insert_with(|| vec![0; 64]);
        ids.iter().for_each(|&id| counts[usize::from(id)] += 1);
    });
    assert!(logits.unwrap().iter().all(|logit| logit.is_finite()));
    assert_eq!(chosen.len(), 5, "layers with experts");
    for (layer, counts) in chosen {
        // 512 tokens choose 4 of 64: 32 is the mean.
        assert_eq!(counts.iter().sum::<u32>(), 512 * 4);
        assert!(counts.iter().filter(|&&count| count > 0).count() >= 60, "layer {layer}: {counts:?}");
        assert!((64..512).contains(counts.iter().max().unwrap()), "layer {layer}: {counts:?}");
    }
}

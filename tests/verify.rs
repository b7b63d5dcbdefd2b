//! Checksums of a container: which bytes they cover, what a damaged one looks like to the reader, to an engine and to
//! the program, and that what `doctor` passes runs.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;
#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use engines::{Arithmetic, Model, Setup, answer, assert_same, greedy, has_ring};
use millstream::checkpoint::verify::{self, Checked, Fault, Manifest, Report};
use millstream::checkpoint::{Checkpoint, CheckpointError};
use millstream::engine::{Activations, Engine, EngineConfig, EngineError, Verify};
use millstream_io::{
    Completion, Device, DeviceConfig, DeviceKind, DeviceReport, DeviceStats, FileSet, IoError, IoMode, Read, Rejected,
    SimConfig, SimFault, Slab, SlabPool, Wait, open_device, sim_device,
};
use program::forget_settings;
use safetensors::{Shard, Tensor};
use serde_json::{Map, Value};
use tempfile::TempDir;

/// A copy of a converted model that may be damaged, on a disk.
fn copy(model: Model) -> TempDir {
    copy_of(&model.dir())
}

fn copy_of(dir: &Path) -> TempDir {
    let copy = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// A header, read by other means than the engine's.
fn header(shard: &Path) -> (Map<String, Value>, u64) {
    let bytes = fs::read(shard).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    (serde_json::from_slice(&bytes[8..][..length as usize]).unwrap(), 8 + length)
}

fn shards(dir: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut shards: Vec<PathBuf> = paths.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

/// Shard, first byte and end of the tensors whose names begin with `prefix`.
fn place(dir: &Path, prefix: &str) -> (PathBuf, u64, u64) {
    for shard in shards(dir) {
        let (header, data) = header(&shard);
        let places = header.iter().filter(|(name, _)| name.starts_with(prefix)).map(|(_, tensor)| {
            let [begin, end] = [0, 1].map(|i| tensor["data_offsets"][i].as_u64().unwrap());
            (data + begin, data + end)
        });
        if let Some((begin, end)) = places.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))) {
            return (shard, begin, end);
        }
    }
    panic!("no tensor {prefix}*");
}

fn flip(shard: &Path, offset: u64) {
    let file = fs::File::options().read(true).write(true).open(shard).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
}

fn ring_or_threads() -> Vec<DeviceKind> {
    if has_ring() { vec![DeviceKind::Uring, DeviceKind::Threads] } else { vec![DeviceKind::Threads] }
}

/// A whole check of `dir`, through the device and into the pool that `open` makes.
fn check_with(
    dir: &Path,
    pool: impl Fn(&Manifest, &FileSet) -> SlabPool,
    device: impl Fn(&Arc<FileSet>, &SlabPool) -> Box<dyn Device>,
    cancel: bool,
) -> (Manifest, Report, Checked) {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let manifest = Manifest::read(&checkpoint).unwrap();
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap());
    let pool = pool(&manifest, &files);
    let mut device = device(&files, &pool);
    let mut last = Checked::default();
    let cancel = AtomicBool::new(cancel);
    let report =
        verify::check(&manifest.runs, &files, &pool, &mut *device, 2, &cancel, &mut |checked| last = checked).unwrap();
    drop(device);
    assert_eq!(pool.free(), pool.slabs());
    (manifest, report, last)
}

fn check(dir: &Path, kind: DeviceKind) -> (Manifest, Report) {
    let device = |files: &Arc<FileSet>, pool: &SlabPool| {
        open_device(&DeviceConfig { kind, ..DeviceConfig::default() }, files.clone(), pool).unwrap()
    };
    let (manifest, report, _) =
        check_with(dir, |manifest, files| verify::pool_for(&manifest.runs, files, 8).unwrap(), device, false);
    (manifest, report)
}

fn simulated(config: &SimConfig) -> impl Fn(&Arc<FileSet>, &SlabPool) -> Box<dyn Device> + '_ {
    |files, pool| sim_device(config, files.clone(), pool).unwrap()
}

/// Takes reads and answers none.
struct Deaf {
    reads: Vec<(Read, Slab)>,
    report: DeviceReport,
}

impl Device for Deaf {
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected> {
        self.reads.push((read, slab));
        Ok(())
    }
    fn reap(&mut self, _: Wait) -> Result<Option<Completion>, IoError> {
        Ok(None)
    }
    fn in_flight(&self) -> usize {
        self.reads.len()
    }
    fn cancel_lookahead(&mut self) -> usize {
        0
    }
    fn promote(&mut self, _: u64) {}
    fn stats(&self) -> DeviceStats {
        DeviceStats::default()
    }
    fn describe(&self) -> &DeviceReport {
        &self.report
    }
}

impl Drop for Deaf {
    fn drop(&mut self) {
        panic!("dropping a device waits for a drive that never answers");
    }
}

#[test]
fn a_check_on_a_drive_that_hangs_tells_for_how_long_and_can_be_left() {
    let checkpoint = Checkpoint::open(&Model::TinyInt4.dir()).unwrap();
    let manifest = Manifest::read(&checkpoint).unwrap();
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap());
    let pool = verify::pool_for(&manifest.runs, &files, 4).unwrap();
    let mut device: Box<dyn Device> = Box::new(Deaf { reads: Vec::new(), report: DeviceReport::default() });
    let (cancel, mut silent) = (AtomicBool::new(false), Vec::new());
    let mut told = |checked: Checked| {
        silent.push(checked.silent);
        cancel.store(silent.len() == 3, Ordering::Relaxed);
    };
    let report = verify::check(&manifest.runs, &files, &pool, &mut *device, 1, &cancel, &mut told).unwrap();
    assert!(report.interrupted && report.runs == 0);
    assert!(!silent[0].is_zero() && silent.is_sorted(), "{silent:?}");
    assert_eq!(millstream_io::leave(device), 4);
    assert_eq!(pool.free(), 0, "the slabs are the drive's for good");
}

#[test]
fn every_tensor_of_a_container_is_covered_and_agrees() {
    for model in [Model::TinyInt4, Model::TinyInt4Groups, Model::TinyInt2, Model::TalesInt4] {
        let dir = model.dir();
        let hashes: usize = shards(&dir)
            .iter()
            .map(|shard| {
                let text = header(shard).0["__metadata__"]["millstream.xxh3"].as_str().unwrap().to_owned();
                serde_json::from_str::<Map<String, Value>>(&text).unwrap().len()
            })
            .sum();
        for kind in ring_or_threads() {
            let (manifest, report) = check(&dir, kind);
            assert_eq!((manifest.runs.len(), manifest.unhashed), (hashes, 0));
            assert_eq!((report.runs, report.bytes), (hashes, manifest.bytes()));
            assert!(report.damage.is_empty() && !report.interrupted, "{:?}", report.damage);
        }
    }
}

#[test]
fn a_vendor_checkpoint_has_no_checksums() {
    for model in [Model::Tiny, Model::Tales] {
        let manifest = Manifest::read(&Checkpoint::open(&model.dir()).unwrap()).unwrap();
        assert!(manifest.is_empty());
    }
}

#[test]
fn one_bit_is_found_at_either_end_of_an_expert_and_of_a_dense_tensor_and_nothing_else_is() {
    let model = copy(Model::TinyInt4Groups);
    let dir = model.path();
    let expert = "model.layers.2.mlp.experts.5.";
    let dense = "model.layers.1.self_attn.q_b_proj.weight";
    for (prefix, title) in [(expert, "expert 5 of layer 2"), (dense, "tensor model.layers.1.self_attn.q_b_proj.weight")]
    {
        let (shard, begin, end) = place(dir, prefix);
        for at in [begin, end - 1] {
            flip(&shard, at);
            for kind in ring_or_threads() {
                let (_, report) = check(dir, kind);
                let [damage] = report.damage.as_slice() else { panic!("{:?}", report.damage) };
                assert_eq!((&damage.shard, damage.run.span.offset), (&shard, begin));
                assert_eq!(damage.run.span.len, end - begin);
                assert_eq!(damage.run.title(), title);
                assert!(matches!(damage.fault, Fault::Differs { expected, found } if expected != found));
            }
            flip(&shard, at);
        }
        // The bytes before and behind belong to others or to nobody.
        assert!(check(dir, DeviceKind::Threads).1.damage.is_empty());
    }
}

#[test]
fn runs_longer_than_a_slab_and_parts_in_any_order_give_the_same() {
    let model = copy(Model::TinyInt4);
    let (shard, begin, end) = place(model.path(), "model.embed_tokens.weight");
    assert!(end - begin > 3 * 4096, "{}", end - begin);
    flip(&shard, end - 1);
    for seed in 0..40 {
        let config = SimConfig {
            reorder: true,
            delay: Duration::ZERO..Duration::from_millis(5),
            short_per_mille: 100,
            eagain_per_mille: 50,
            queue: 1 + seed as usize % 5,
            ..SimConfig::calm(seed)
        };
        let slabs = 1 + seed as usize % 7;
        let pool = |_: &Manifest, _: &FileSet| SlabPool::new(12288, slabs).unwrap();
        let (manifest, report, last) = check_with(model.path(), pool, simulated(&config), false);
        let damaged: Vec<&str> = report.damage.iter().map(|damage| damage.run.name.as_str()).collect();
        assert_eq!(damaged, ["model.embed_tokens.weight"], "seed {seed}");
        assert_eq!(report.runs, manifest.runs.len());
        assert_eq!((last.bytes, last.of), (manifest.bytes(), manifest.bytes()));
    }
}

#[test]
fn what_cannot_be_read_is_listed_with_what_differs() {
    let dir = Model::TinyInt4.dir();
    // The second run fails and so does its repeat; which call that is follows from one slab and one call a run.
    let eio = SimFault::Errno(5);
    let config = SimConfig { script: vec![(1, eio), (2, eio)], ..SimConfig::calm(1) };
    let pool = |manifest: &Manifest, files: &FileSet| verify::pool_for(&manifest.runs, files, 1).unwrap();
    let (manifest, report, last) = check_with(&dir, pool, simulated(&config), false);
    let [damage] = report.damage.as_slice() else { panic!("{:?}", report.damage) };
    assert_eq!(damage.run, manifest.runs[1]);
    assert!(matches!(&damage.fault, Fault::Unreadable(IoError::Read { errno, .. }) if errno.0 == 5));
    assert_eq!((report.runs, last.damaged), (manifest.runs.len(), 1));
}

#[test]
fn a_check_can_be_stopped() {
    let pool = |manifest: &Manifest, files: &FileSet| verify::pool_for(&manifest.runs, files, 2).unwrap();
    let (_, report, _) = check_with(&Model::TinyInt4.dir(), pool, simulated(&SimConfig::calm(1)), true);
    assert!(report.interrupted && report.runs == 0);
}

#[test]
fn a_file_that_is_replaced_meanwhile_ends_the_check() {
    let model = copy(Model::TinyInt4);
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let manifest = Manifest::read(&checkpoint).unwrap();
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), IoMode::Auto).unwrap());
    let pool = verify::pool_for(&manifest.runs, &files, 2).unwrap();
    let mut device = sim_device(&SimConfig::calm(1), files.clone(), &pool).unwrap();
    let shard = &shards(model.path())[0];
    let mut replace = |_| {
        let other = model.path().join("other");
        fs::copy(shard, &other).unwrap();
        fs::rename(&other, shard).unwrap();
    };
    let never = AtomicBool::new(false);
    let error = verify::check(&manifest.runs, &files, &pool, &mut *device, 1, &never, &mut replace).unwrap_err();
    assert!(matches!(&error, IoError::Changed { path, .. } if **path == **shard), "{error}");
}

/// Writes other checksums into the metadata of a shard. The header keeps its length: spaces end it.
fn edit_hashes(shard: &Path, edit: impl FnOnce(&mut BTreeMap<String, String>)) {
    let mut bytes = fs::read(shard).unwrap();
    let (mut header, data) = header(shard);
    let text = header["__metadata__"]["millstream.xxh3"].as_str().unwrap().to_owned();
    let mut hashes = serde_json::from_str(&text).unwrap();
    edit(&mut hashes);
    header["__metadata__"]["millstream.xxh3"] = serde_json::to_string(&hashes).unwrap().into();
    let mut json = Value::Object(header).to_string().into_bytes();
    json.resize(data as usize - 8, b' ');
    bytes[8..data as usize].copy_from_slice(&json);
    fs::write(shard, bytes).unwrap();
}

#[test]
fn checksums_that_are_none_or_of_nothing_are_a_damaged_header() {
    let source = Model::TinyInt4.dir();
    type Edit = fn(&mut BTreeMap<String, String>);
    let edits: [(Edit, &str); 3] = [
        (|hashes| hashes.values_mut().next().unwrap().replace_range(..1, "z"), "16 hexadecimal digits"),
        (|hashes| hashes.values_mut().next().unwrap().truncate(15), "16 hexadecimal digits"),
        (
            |hashes| {
                let (name, hash) = hashes.pop_first().unwrap();
                hashes.insert(name.replacen("model", "moddl", 1), hash);
            },
            "moddl",
        ),
    ];
    for (edit, words) in edits {
        let model = copy_of(&source);
        let (shard, ..) = place(model.path(), "model.layers.2.mlp.experts.");
        edit_hashes(&shard, edit);
        let error = Manifest::read(&Checkpoint::open(model.path()).unwrap()).unwrap_err();
        assert!(matches!(error, CheckpointError::Header { .. }));
        assert!(error.to_string().contains(words), "{error}");
        let output = millstream(&["doctor", "-m", model.path().to_str().unwrap()]);
        assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
    }
    let model = copy_of(&source);
    let (shard, ..) = place(model.path(), "model.layers.2.mlp.experts.");
    edit_hashes(&shard, |hashes| drop(hashes.pop_first()));
    let manifest = Manifest::read(&Checkpoint::open(model.path()).unwrap()).unwrap();
    assert_eq!(manifest.unhashed, 6, "three matrices and their scales");
}

fn engine(dir: &Path, verify: Verify, verify_seed: u64) -> Result<Engine, EngineError> {
    let arithmetic = Arithmetic::absorbed(Model::TalesInt4, Activations::Int8);
    let setup = Setup { slabs: 5, ..Setup::default() };
    let config = EngineConfig { verify, verify_seed, ..engines::config(&arithmetic, &setup) };
    Engine::open(Checkpoint::open(dir)?, &config)
}

#[test]
fn the_answer_is_the_same_with_and_without_checks() {
    let dir = Model::TalesInt4.dir();
    let prompt = Model::TalesInt4.prompt(37);
    let mut off = engine(&dir, Verify::Off, 0).unwrap();
    let expected = answer(&mut off, &prompt, 12);
    assert_eq!(off.store().stats().checked, 0);
    let mut all = engine(&dir, Verify::All, 0).unwrap();
    assert_same(&expected, &answer(&mut all, &prompt, 12), &Verify::All);
    assert_eq!(all.store().stats().checked, all.store().device_stats().reads);
    for seed in 0..4 {
        let mut sample = engine(&dir, Verify::Sample, seed).unwrap();
        assert_same(&expected, &answer(&mut sample, &prompt, 12), &seed);
    }
}

/// A sparse layer and an expert of it that the prompt needs.
fn needed(prompt: &[u32]) -> (usize, u16) {
    let mut found = None;
    let mut engine = engine(&Model::TalesInt4.dir(), Verify::Off, 0).unwrap();
    engine
        .score_observed(prompt, &mut |layer: usize, ids: &[u16], _: &[f32]| {
            found.get_or_insert((layer, ids[0]));
        })
        .unwrap();
    found.unwrap()
}

#[test]
fn a_damaged_expert_ends_a_checked_generation_and_no_other() {
    let prompt = Model::TalesInt4.prompt(9);
    let (layer, expert) = needed(&prompt);
    let model = copy(Model::TalesInt4);
    let (shard, begin, end) = place(model.path(), &format!("model.layers.{layer}.mlp.experts.{expert}."));
    flip(&shard, begin);
    let mut checked = engine(model.path(), Verify::All, 0).unwrap();
    for _ in 0..2 {
        let error = greedy(&mut checked, &prompt, 4).unwrap_err();
        let message = format!("{error}");
        let wanted = format!(
            "expert {expert} of layer {layer} is damaged: {} bytes at {begin} of {}",
            end - begin,
            shard.display()
        );
        assert!(message.contains(&wanted), "{message}");
        assert!(error.hint().unwrap().contains("doctor --deep"));
    }
    greedy(&mut engine(model.path(), Verify::Off, 0).unwrap(), &prompt, 4).unwrap();
    // Some seed draws it, and then it is found.
    let drawn =
        (0..2000).find(|&seed| greedy(&mut engine(model.path(), Verify::Sample, seed).unwrap(), &prompt, 1).is_err());
    assert!(drawn.is_some());
}

#[test]
fn a_damaged_resident_weight_is_refused_where_everything_is_checked() {
    let model = copy(Model::TalesInt4);
    let (shard, begin, _) = place(model.path(), "model.layers.0.self_attn.o_proj.weight");
    flip(&shard, begin + 7);
    let Err(error) = engine(model.path(), Verify::All, 0) else { panic!("it was not noticed") };
    assert!(error.to_string().contains("model.layers.0.self_attn.o_proj.weight"), "{error}");
    assert!(error.hint().unwrap().contains("doctor --deep"));
    assert!(engine(model.path(), Verify::Sample, 0).is_ok());
    // The MTP layer is not loaded, so what is wrong with it does not matter.
    flip(&shard, begin + 7);
    let (shard, begin, _) = place(model.path(), "model.layers.6.self_attn.o_proj.weight");
    flip(&shard, begin);
    assert!(engine(model.path(), Verify::All, 0).is_ok());
}

fn millstream(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    forget_settings(&mut command);
    // No tuning profile of whoever runs this.
    command.args(arguments).env("XDG_STATE_HOME", "/dev/null/nowhere").stdin(Stdio::null()).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

/// The report of `doctor`, its exit code compared with its verdict.
#[track_caller]
fn doctor(dir: &Path, flags: &[&str]) -> Value {
    let output = millstream(&[&["doctor", "--json", "-m", dir.to_str().unwrap()], flags].concat());
    let report: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|e| panic!("{e}: {} {}", text(&output.stdout), text(&output.stderr)));
    let worst = |status: &str| report["checks"].as_array().unwrap().iter().any(|check| check["status"] == status);
    let (result, code) = match (worst("fail"), worst("warn")) {
        (true, _) => ("fail", 1),
        (false, true) => ("warning", 0),
        (false, false) => ("ok", 0),
    };
    assert_eq!((&report["result"], output.status.code()), (&result.into(), Some(code)), "{report}");
    for check in report["checks"].as_array().unwrap() {
        let bad = check["status"] == "fail" || check["status"] == "warn";
        assert!(!bad || check["hint"].is_string(), "no hint: {check}");
    }
    report
}

#[track_caller]
fn status<'a>(report: &'a Value, id: &str) -> (&'a str, &'a str) {
    let check = report["checks"].as_array().unwrap().iter().find(|check| check["id"] == id);
    let check = check.unwrap_or_else(|| panic!("no check {id} in {report}"));
    (check["status"].as_str().unwrap(), check["detail"].as_str().unwrap())
}

#[test]
fn the_program_finds_one_flipped_bit() {
    let prompt = Model::TalesInt4.prompt(9);
    let (layer, expert) = needed(&prompt);
    let model = copy(Model::TalesInt4);
    let dir = model.path().to_str().unwrap();
    assert_eq!(status(&doctor(model.path(), &["--deep"]), "checksums").0, "ok");
    let (shard, begin, end) = place(model.path(), &format!("model.layers.{layer}.mlp.experts.{expert}."));
    flip(&shard, end - 1);

    assert_eq!(status(&doctor(model.path(), &[]), "checksums").0, "skip");
    let report = doctor(model.path(), &["--deep"]);
    let damaged: Vec<&Value> =
        report["checks"].as_array().unwrap().iter().filter(|check| check["status"] == "fail").collect();
    let [damage] = damaged.as_slice() else { panic!("{report}") };
    assert_eq!(
        (&damage["id"], &damage["layer"], &damage["expert"], &damage["offset"], &damage["length"]),
        (&"checksums".into(), &layer.into(), &expert.into(), &begin.into(), &(end - begin).into())
    );
    assert_eq!(damage["shard"], shard.to_str().unwrap());
    let spoken = millstream(&["doctor", "--deep", "-m", dir]);
    assert_eq!(spoken.status.code(), Some(1));
    assert!(text(&spoken.stdout).contains(&format!("expert {expert} of layer {layer}")));
    assert!(text(&spoken.stdout).ends_with("result: fail\n"));

    let ids: Vec<String> = prompt.iter().map(u32::to_string).collect();
    let run = |verify: &str| {
        millstream(&["run", "-m", dir, "--ids", "-p", &ids.join(","), "-n", "3", "--temp", "0", "--verify", verify])
    };
    let all = run("all");
    assert_eq!((all.status.code(), text(&all.stdout).trim()), (Some(1), ""), "{}", text(&all.stderr));
    for words in
        [&format!("expert {expert} of layer {layer} is damaged"), "expected", "hint: `millstream doctor --deep"]
    {
        assert!(text(&all.stderr).contains(words), "no {words:?} in {}", text(&all.stderr));
    }
    assert_eq!(run("off").status.code(), Some(0));
    assert_eq!(run("most").status.code(), Some(2));
}

#[test]
fn without_checksums_there_is_nothing_to_check() {
    let report = doctor(&Model::Tales.dir(), &["--deep"]);
    assert_eq!(report["result"], "ok", "{report}");
    assert_eq!(status(&report, "checksums").0, "skip");
    let dir = Model::Tales.dir();
    let run = |extra: &[&str]| {
        let output = millstream(&[&["run", "-p", "x", "-n", "1", "-m", dir.to_str().unwrap()], extra].concat());
        assert_eq!(output.status.code(), Some(0));
        text(&output.stderr).contains("no checksums")
    };
    assert!(run(&["--verify", "all"]), "an explicit wish that cannot be met is said");
    assert!(!run(&[]));
}

/// Something done to a whole copy of a model.
type Harm = fn(&Path);

fn edit(path: PathBuf, change: impl FnOnce(String) -> String) {
    let text = fs::read_to_string(&path).unwrap();
    fs::write(path, change(text)).unwrap();
}

fn shorten(path: &Path, by: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(file.metadata().unwrap().len() - by).unwrap();
}

#[test]
fn what_doctor_passes_runs_and_what_it_refuses_does_not() {
    let harms: [(&str, &str, Harm); 12] = [
        ("nothing", "", |_| {}),
        ("no config", "config", |dir| fs::remove_file(dir.join("config.json")).unwrap()),
        ("another family", "config", |dir| edit(dir.join("config.json"), |t| t.replace("glm_moe_dsa", "llama"))),
        ("no tokenizer", "tokenizer", |dir| fs::remove_file(dir.join("tokenizer.json")).unwrap()),
        ("a broken tokenizer", "tokenizer", |dir| fs::write(dir.join("tokenizer.json"), "{}").unwrap()),
        ("a broken template", "template", |dir| fs::write(dir.join("chat_template.jinja"), "{% if").unwrap()),
        ("no generation config", "", |dir| fs::remove_file(dir.join("generation_config.json")).unwrap()),
        ("a bad stop token", "config", |dir| {
            fs::write(dir.join("generation_config.json"), r#"{"eos_token_id": 99999999}"#).unwrap();
        }),
        ("a shard cut short", "headers", |dir| shorten(&shards(dir)[0], 4096)),
        ("two shards cut short", "headers", |dir| shards(dir)[1..3].iter().for_each(|shard| shorten(shard, 1))),
        ("a missing shard", "shards", |dir| fs::remove_file(&shards(dir)[2]).unwrap()),
        ("an unfinished conversion", "shards", |dir| fs::write(dir.join(".millstream-convert.json"), "{}").unwrap()),
    ];
    for (name, id, harm) in harms {
        let model = copy(Model::TalesInt4);
        harm(model.path());
        let report = doctor(model.path(), &["--deep"]);
        let failed: Vec<&Value> =
            report["checks"].as_array().unwrap().iter().filter(|check| check["status"] == "fail").collect();
        let run = millstream(&["run", "-p", "x", "-n", "1", "-m", model.path().to_str().unwrap()]);
        if id.is_empty() {
            assert!(failed.is_empty(), "{name}: {report}");
            assert_eq!(run.status.code(), Some(0), "{name}: {}", text(&run.stderr));
        } else {
            assert!(failed.iter().any(|check| check["id"] == id), "{name}: {report}");
            assert_eq!(run.status.code(), Some(1), "{name}: {}", text(&run.stderr));
        }
        let expected = if name == "two shards cut short" { 2 } else { failed.len() };
        assert_eq!(failed.len(), expected, "each bad header is named: {report}");
    }
}

#[test]
fn of_a_source_that_was_consumed_doctor_names_what_it_was_made_into() {
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let source = safetensors::Model::tiny();
    let (from, into) = (source.path().to_str().unwrap(), home.path().join("made"));
    let made = millstream(&["convert", "-q", "--delete-source", from, into.to_str().unwrap()]);
    assert_eq!(made.status.code(), Some(0), "{}", text(&made.stderr));
    let report = doctor(source.path(), &[]);
    let (status, detail) = status(&report, "shards");
    let into = fs::canonicalize(into).unwrap();
    assert!(status == "fail" && detail.contains(into.to_str().unwrap()), "{report}");
    let run = millstream(&["run", "--raw", "-p", "x", "-m", from]);
    assert!(run.status.code() == Some(1) && text(&run.stderr).contains(detail), "{}", text(&run.stderr));
}

#[test]
fn experts_in_pieces_are_to_be_laid_together_by_what_takes_their_weights() {
    let placement = |dir: &Path| {
        let report = doctor(dir, &[]);
        let check = report["checks"].as_array().unwrap().iter().find(|check| check["id"] == "placement");
        let check = check.unwrap_or_else(|| panic!("{report}"));
        assert_eq!(check["status"], "warn", "{check}");
        check["hint"].as_str().unwrap().to_owned()
    };
    for (from, command) in [(Model::TalesInt4, "`millstream convert --repack`"), (Model::Tales, "`millstream convert`")]
    {
        let model = copy(from);
        for path in shards(model.path()) {
            let mut shard = Shard::read(&path);
            // Experts with checksums are in one piece, or damaged.
            shard.metadata.remove("millstream.xxh3");
            let tensors = std::mem::take(&mut shard.tensors);
            for (number, tensor) in tensors.into_iter().enumerate() {
                shard.tensors.push(tensor);
                shard.tensors.push(Tensor::new(&format!("__pad__apart.{number}"), "U8", &[8], vec![0; 8]));
            }
            shard.write(&path);
        }
        let hint = placement(model.path());
        assert!(hint.contains(command), "{hint}");
    }
}

#[test]
fn a_tensor_that_is_missing_is_named() {
    let model = safetensors::Model::tiny();
    let tensor = "model.layers.2.self_attn.o_proj.weight";
    model.edit_shard(|shard| drop(shard.remove(tensor)));
    let (found, detail) = {
        let report = doctor(model.path(), &[]);
        let (status, detail) = status(&report, "tensors");
        (status.to_owned(), detail.to_owned())
    };
    assert_eq!(found, "fail");
    assert!(detail.contains(tensor), "{detail}");
}

#[test]
fn without_a_template_doctor_warns_and_raw_prompts_run() {
    let model = copy(Model::TalesInt4);
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        let _ = fs::remove_file(model.path().join(name));
    }
    let report = doctor(model.path(), &[]);
    assert_eq!((&report["result"], status(&report, "template").0), (&"warning".into(), "warn"), "{report}");
    let raw = millstream(&["run", "--raw", "-p", "Once", "-n", "1", "-m", model.path().to_str().unwrap()]);
    assert_eq!(raw.status.code(), Some(0), "{}", text(&raw.stderr));
}

#[test]
fn where_only_a_long_context_does_not_fit_doctor_warns_and_a_short_run_works() {
    let dir = Model::TalesInt4.dir();
    let with_ram = |ram: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        let output = command.args(["doctor", "--json", "-m"]).arg(&dir).env("MILLSTREAM_RAM", ram).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let report = with_ram("5M");
    let checks = report["checks"].as_array().unwrap();
    let hint = checks.iter().find(|check| check["id"] == "memory").unwrap()["hint"].as_str().unwrap();
    let least = hint.rsplit("--ram ").next().unwrap();
    let report = with_ram(least);
    let (found, detail) = status(&report, "memory");
    assert!(found == "warn" && detail.contains("for a context of 64 ("), "{report}");
    let run = ["run", "--raw", "-p", "Once", "-n", "1", "--ram", least, "-m", dir.to_str().unwrap()];
    let output = millstream(&run);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
}

#[test]
fn too_little_memory_and_bad_settings_fail() {
    let dir = Model::TalesInt4.dir();
    let with = |name: &str, value: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        let output = command.args(["doctor", "--json", "-m"]).arg(&dir).env(name, value).output().unwrap();
        serde_json::from_slice::<Value>(&output.stdout).unwrap()
    };
    let report = with("MILLSTREAM_RAM", "5M");
    assert_eq!(status(&report, "memory").0, "fail");
    assert!(status(&report, "memory").1.contains("the model needs "), "{report}");
    assert_eq!(status(&with("MILLSTREAM_RAM", "lots"), "settings").0, "fail");
    assert_eq!(status(&with("MILLSTREAM_MODEL", "/nope"), "directory").0, "ok", "the flag wins");
    let missing = millstream(&["doctor", "-m", "/no/such/dir"]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(text(&missing.stdout).contains("/no/such/dir does not exist"));
}

#[test]
fn files_in_memory_are_a_warning_with_the_file_system() {
    let Ok(memory) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("skipped: /dev/shm cannot be written to");
        return;
    };
    for entry in fs::read_dir(Model::TalesInt4.dir()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), memory.path().join(entry.file_name())).unwrap();
    }
    let report = doctor(memory.path(), &["--deep"]);
    let (status_of_files, detail) = status(&report, "files");
    assert_eq!(status_of_files, "warn", "{report}");
    assert!(detail.contains("tmpfs") && detail.contains("O_DIRECT"), "{detail}");
    assert!(status(&report, "checksums").1.contains("through the page cache"), "{report}");
}

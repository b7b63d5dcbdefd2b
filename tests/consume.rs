//! Conversions that remove their source as they go, that are killed at any time, and that are checked afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use millstream::checkpoint::convert::{ConvertOptions, Progress, Verified, convert, verify};
use millstream::checkpoint::{Checkpoint, CheckpointError};
use program::{done, program, refused, stderr};
use safetensors::{Model, Shard, Tensor, tiny_model};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const SHARDS: usize = 6;

/// A directory where making files durable costs nothing, where there is one with room: some machines have 64 MB of it.
fn quick_dir() -> tempfile::TempDir {
    const ROOM_BYTES: u64 = 1 << 30;
    let memory = Path::new("/dev/shm");
    let roomy = millstream_io::free_bytes(memory).is_ok_and(|free| free >= ROOM_BYTES);
    let in_memory = roomy.then(|| tempfile::tempdir_in(memory).ok()).flatten();
    in_memory.unwrap_or_else(|| tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap())
}

/// A writable copy of `model` in several shards; each tensor goes to the next shard in turn for the first half of them,
/// then they go in order: some parts of the container need every shard, others one.
fn sharded(model: &Path) -> tempfile::TempDir {
    let dir = quick_dir();
    let mut tensors = Vec::new();
    for entry in fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        match name.ends_with(".safetensors") {
            true => tensors.extend(Shard::read(&path).tensors),
            false if name.contains("index") => {}
            false => drop(fs::copy(&path, dir.path().join(name)).unwrap()),
        }
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let count = tensors.len();
    let mut shards = vec![Shard::default(); SHARDS];
    for (number, tensor) in tensors.into_iter().enumerate() {
        let shard =
            if number < count / 2 { number % 2 } else { 2 + (number - count / 2) * (SHARDS - 2) / count.div_ceil(2) };
        shards[shard].tensors.push(tensor);
    }
    let mut weight_map = serde_json::Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", number + 1);
        shard.tensors.iter().for_each(|tensor| drop(weight_map.insert(tensor.name.clone(), name.clone().into())));
        shard.write(&dir.path().join(name));
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    dir
}

fn options() -> ConvertOptions {
    ConvertOptions { delete_source: true, ..ConvertOptions::default() }
}

fn quietly(src: &Path, dst: &Path, options: &ConvertOptions) -> Result<(), CheckpointError> {
    convert(src, dst, options, &mut |_| {}).map(|_| ())
}

/// Every file of a directory by name.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())).collect()
}

#[track_caller]
fn assert_same_files(found: &Path, expected: &BTreeMap<String, Vec<u8>>) {
    let found = contents(found);
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in expected {
        assert!(found[name] == *bytes, "{name} differs");
    }
}

/// What an uninterrupted conversion of a source that stays writes.
fn whole(src: &Path) -> BTreeMap<String, Vec<u8>> {
    let dst = quick_dir();
    quietly(src, dst.path(), &ConvertOptions::default()).unwrap();
    contents(dst.path())
}

/// Names and lengths of the shards in a directory.
fn shards(dir: &Path) -> BTreeMap<String, u64> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let lengths = files.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()));
    lengths.filter(|(name, _)| name.ends_with(".safetensors")).collect()
}

/// Tensors of each shard, without their scales.
fn tensors_of(dir: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let weights = |shard: Shard| shard.tensors.into_iter().map(|tensor| tensor.name);
    let names = |name: &String| weights(Shard::read(&dir.join(name))).filter(|name| !name.ends_with("_scale_inv"));
    shards(dir).keys().map(|name| (name.clone(), names(name).collect())).collect()
}

/// Whatever is gone from the source is whole in the container, under its final name.
fn assert_nothing_lost(src: &Path, dst: &Path, before: &BTreeMap<String, BTreeSet<String>>) {
    let here = shards(src);
    let converted: BTreeSet<String> = tensors_of(dst).into_values().flatten().collect();
    for (shard, tensors) in before.iter().filter(|(shard, _)| !here.contains_key(*shard)) {
        let lost: Vec<&String> = tensors.difference(&converted).collect();
        assert!(lost.is_empty(), "{shard} is gone, and nowhere is {lost:?}");
    }
}

#[test]
fn a_source_goes_shard_by_shard_and_the_disk_never_holds_more_than_one_shard_twice() {
    let src = sharded(tiny_model());
    let expected = whole(src.path());
    let (dst, before) = (quick_dir(), tensors_of(src.path()));
    let source_bytes: u64 = shards(src.path()).values().sum();
    let (mut peak, mut left) = (0, BTreeSet::new());
    let report = convert(src.path(), dst.path(), &options(), &mut |_| {
        assert_nothing_lost(src.path(), dst.path(), &before);
        let of =
            |dir: &Path| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum::<u64>();
        peak = peak.max(of(dst.path()) + shards(src.path()).values().sum::<u64>());
        left.insert(shards(src.path()).len());
    })
    .unwrap();
    assert_same_files(dst.path(), &expected);
    assert_eq!((report.source_shards_removed, report.source_bytes_removed), (SHARDS, source_bytes));
    assert!(shards(src.path()).is_empty() && src.path().join("config.json").exists());
    assert!(left.len() > 3, "they go one after the other: {left:?} were left at different times");
    let converted: Vec<u64> = shards(dst.path()).into_values().collect();
    let most = source_bytes.max(converted.iter().sum()) + converted.iter().max().unwrap() * 2;
    assert!(peak < most, "{peak} bytes at a time, of {source_bytes} in the source and {converted:?} in the container");

    // What is left says where the model is, and the same command finds everything done.
    let error = Checkpoint::open(src.path()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Consumed { gone: SHARDS, .. }), "{error}");
    assert!(error.to_string().contains(dst.path().to_str().unwrap()), "{error}");
    let again = convert(src.path(), dst.path(), &options(), &mut |_| {}).unwrap();
    assert_eq!((again.shards_written, again.source_shards_removed), (0, 0));
    assert_same_files(dst.path(), &expected);
}

#[test]
fn a_shard_with_a_tensor_that_the_container_lacks_stays_and_is_named() {
    let src = sharded(tiny_model());
    let (fourth, stray) = ("model-00004-of-00006.safetensors", "model.layers.7.mlp.shared_head.weight");
    let add = |shard: &str, name: &str| {
        let mut changed = Shard::read(&src.path().join(shard));
        changed.tensors.push(Tensor::new(name, "BF16", &[3, 5], vec![7; 30]));
        changed.write(&src.path().join(shard));
    };
    add(fourth, stray);
    // A scale of activations is no part of a weight.
    add("model-00002-of-00006.safetensors", "model.layers.1.mlp.experts.0.gate_proj.input_scale");
    fs::remove_file(src.path().join("model.safetensors.index.json")).unwrap();
    let (expected, whole_shard) = (whole(src.path()), fs::read(src.path().join(fourth)).unwrap());
    let dst = quick_dir();
    let mut notes = Vec::new();
    let report = convert(src.path(), dst.path(), &options(), &mut |progress| {
        if let Progress::Note(note) = progress {
            notes.push(note);
        }
    })
    .unwrap();
    assert_eq!((report.source_shards_removed, report.source_shards_kept), (SHARDS - 1, vec![fourth.to_owned()]));
    assert!(notes.iter().any(|note| note.contains(fourth) && note.contains(stray)), "{notes:?}");
    assert!(notes.iter().any(|note| note.contains("2 tensors are not used by this model")), "{notes:?}");
    assert_eq!(shards(src.path()).into_keys().collect::<Vec<_>>(), [fourth]);
    assert!(fs::read(src.path().join(fourth)).unwrap() == whole_shard);
    assert_same_files(dst.path(), &expected);
    // Given again, it stays again.
    let again = convert(src.path(), dst.path(), &options(), &mut |_| {}).unwrap();
    assert_eq!((again.source_shards_removed, again.source_shards_kept.len()), (0, 1));
    assert!(src.path().join(fourth).exists());
}

#[test]
fn a_stop_anywhere_loses_nothing_and_the_rest_gives_the_same_bytes() {
    let template = sharded(tiny_model());
    let (expected, before) = (whole(template.path()), tensors_of(template.path()));
    let mut stop = 0;
    loop {
        stop += 1;
        let (src, dst) = (sharded(tiny_model()), quick_dir());
        let mut seen = 0;
        let stopped = catch_unwind(AssertUnwindSafe(|| {
            convert(src.path(), dst.path(), &options(), &mut |_| {
                seen += 1;
                if seen == stop {
                    std::panic::resume_unwind(Box::new("stopped"));
                }
            })
        }));
        if stopped.is_ok() {
            break;
        }
        assert_nothing_lost(src.path(), dst.path(), &before);
        assert!(Checkpoint::open(dst.path()).is_err(), "an unfinished conversion opened as a model");
        // Half a shard that a killed run left.
        fs::write(dst.path().join(".millstream-out-00004.safetensors.tmp"), vec![7; 5000]).unwrap();
        // Whoever goes on need not ask for the removal again.
        let keeps = stop % 3 == 0;
        let shards_left = shards(src.path());
        quietly(src.path(), dst.path(), &ConvertOptions { delete_source: !keeps, ..options() }).unwrap();
        assert_same_files(dst.path(), &expected);
        assert_eq!(shards(src.path()), if keeps { shards_left } else { BTreeMap::new() });
    }
    assert!(stop > 30, "{stop} stops");
}

#[test]
fn a_kill_between_two_removals_is_continued() {
    let src = sharded(tiny_model());
    let (expected, copy) = (whole(src.path()), contents(src.path()));
    for survivor in shards(src.path()).into_keys() {
        let (src, dst) = (quick_dir(), quick_dir());
        copy.iter().for_each(|(name, bytes)| fs::write(src.path().join(name), bytes).unwrap());
        quietly(src.path(), dst.path(), &options()).unwrap();
        // As if it had been killed before this one was removed, and before the container was declared finished.
        fs::write(src.path().join(&survivor), &copy[&survivor]).unwrap();
        let parameters = ConvertOptions::default().parameters();
        let shard = Shard::read(&dst.path().join("out-00000.safetensors"));
        let identity = shard.metadata["millstream.source"].as_str().unwrap();
        let marker = serde_json::json!({"conversion": format!("{parameters} source={identity}")});
        fs::write(dst.path().join(".millstream-convert.json"), format!("{marker}\n")).unwrap();
        let report = convert(src.path(), dst.path(), &options(), &mut |_| {}).unwrap();
        assert_eq!((report.shards_written, report.source_shards_removed), (0, 1), "{survivor}");
        assert_same_files(dst.path(), &expected);
        assert!(shards(src.path()).is_empty());
    }
}

#[test]
fn a_damaged_shard_of_an_earlier_run_is_written_anew_before_its_source_goes() {
    let src = sharded(tiny_model());
    let dst = quick_dir();
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    let expected = contents(dst.path());
    damage(&dst.path().join("out-00003.safetensors"));
    let mut notes = Vec::new();
    let report = convert(src.path(), dst.path(), &options(), &mut |progress| {
        if let Progress::Note(note) = progress {
            notes.push(note);
        }
    })
    .unwrap();
    let remade = expected["out-00003.safetensors"].len() as u64;
    assert_eq!((report.shards_written, report.shards_kept, report.bytes_written), (1, 11, remade));
    let named = |note: &String| note.contains("out-00003.safetensors") && note.contains("written anew");
    assert!(notes.iter().any(named), "{notes:?}");
    assert_same_files(dst.path(), &expected);
    assert!(shards(src.path()).is_empty());
}

#[test]
fn a_source_is_not_removed_where_what_was_made_from_it_is_damaged_and_part_of_it_is_gone() {
    let src = sharded(tiny_model());
    let copy = contents(src.path());
    let dst = quick_dir();
    quietly(src.path(), dst.path(), &options()).unwrap();
    // Killed before one of the shards that it needs was removed.
    let victim = dst.path().join("out-00003.safetensors");
    damage(&victim);
    let survivor = |name: &str| fs::write(src.path().join(name), &copy[name]).unwrap();
    survivor("model-00001-of-00006.safetensors");
    let error = quietly(src.path(), dst.path(), &options()).unwrap_err();
    assert!(matches!(error, CheckpointError::ReadBack { kept: true, .. }), "{error}");
    assert!(error.to_string().contains("out-00003.safetensors"), "{error}");
    assert_eq!(shards(src.path()).len(), 1);
    // What the hint says works.
    assert!(error.hint().contains("fetch them again, remove this shard"), "{}", error.hint());
    shards_of(&copy).for_each(survivor);
    fs::remove_file(&victim).unwrap();
    quietly(src.path(), dst.path(), &options()).unwrap();
    assert!(Checkpoint::open(dst.path()).is_ok() && shards(src.path()).is_empty());
}

#[test]
fn a_header_that_the_drive_gives_back_otherwise_keeps_the_source() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    let unfinished = dst.path().join(".millstream-out-00001.safetensors.tmp");
    let before = shards(src.path());
    // While the weights are written the header is still to come; the last time it is there.
    let result = convert(src.path(), dst.path(), &options(), &mut |_| {
        if let Ok(file) = fs::File::options().write(true).open(&unfinished) {
            file.write_all_at(b"#", 40).unwrap();
        }
    });
    let error = result.unwrap_err();
    assert!(matches!(error, CheckpointError::ReadBack { kept: false, .. }), "{error}");
    assert!(error.to_string().contains("out-00001.safetensors") && error.to_string().contains("header"), "{error}");
    assert_eq!(shards(src.path()), before);
    assert!(!unfinished.exists() && !dst.path().join("out-00001.safetensors").exists());
}

#[test]
fn a_source_is_not_removed_for_what_another_one_was_made_into() {
    let (first, second) = (Model::tiny(), Model::tiny());
    let dst = quick_dir();
    quietly(first.path(), dst.path(), &ConvertOptions::default()).unwrap();
    let made = contents(dst.path());
    // Between two of the sixteen samples of 4,096 bytes that tell sources apart.
    let path = second.shard_path();
    let mut bytes = fs::read(&path).unwrap();
    let between = (bytes.len() - 4096) / 16 * 8 + 4096 + 1000;
    bytes[between..][..256].iter_mut().for_each(|byte| *byte ^= 0x80);
    fs::write(&path, &bytes).unwrap();
    let error = quietly(second.path(), dst.path(), &options()).unwrap_err();
    assert!(matches!(error, CheckpointError::OtherWeights { .. }), "{error}");
    assert!(error.hint().contains("another destination"), "{}", error.hint());
    assert!(fs::read(&path).unwrap() == bytes, "the source is there");
    assert_same_files(dst.path(), &made);
    // Of its own source it is the proof.
    quietly(first.path(), dst.path(), &options()).unwrap();
    assert_same_files(dst.path(), &made);
}

/// Flips a bit of a weight.
fn damage(shard: &Path) {
    let mut bytes = fs::read(shard).unwrap();
    let at = bytes.len() - 3 * 4096;
    bytes[at] ^= 16;
    fs::write(shard, &bytes).unwrap();
}

fn shards_of(contents: &BTreeMap<String, Vec<u8>>) -> impl Iterator<Item = &str> {
    contents.keys().map(String::as_str).filter(|name| name.ends_with(".safetensors"))
}

#[test]
fn what_cannot_be_removed_or_must_not_be_is_refused_before_the_first_byte() {
    let refuse = |src: &Path, dst: &Path, words: &[&str]| {
        let before = contents(src);
        let error = quietly(src, dst, &options()).unwrap_err().to_string();
        words.iter().for_each(|word| assert!(error.contains(word), "no {word:?} in {error}"));
        assert!(contents(src) == before, "the source changed");
        assert!(!dst.join("config.json").exists() || fs::canonicalize(src).unwrap() == fs::canonicalize(dst).unwrap());
    };
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    refuse(src.path(), src.path(), &["--delete-source", "not the source"]);
    let other = quick_dir();
    let dotted = other.path().join("link");
    symlink(src.path(), &dotted).unwrap();
    refuse(&dotted, src.path(), &["--delete-source", "not the source"]);

    // Who sees that the source is no model any more may remove all that is in it.
    refuse(src.path(), &src.path().join("out/deep"), &["--delete-source", "outside the source"]);

    // A link frees nothing, and what it points to may be somebody else's: so it is in download caches.
    let first = "model-00001-of-00006.safetensors";
    fs::rename(src.path().join(first), other.path().join("blob")).unwrap();
    symlink(other.path().join("blob"), src.path().join(first)).unwrap();
    refuse(src.path(), dst.path(), &["--delete-source", first]);
    fs::remove_file(src.path().join(first)).unwrap();
    fs::hard_link(other.path().join("blob"), src.path().join(first)).unwrap();
    refuse(src.path(), dst.path(), &["--delete-source", first]);
    // Without the removal both convert.
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
}

#[test]
fn a_consumed_source_is_neither_taken_for_another_nor_for_a_damaged_one() {
    let src = sharded(tiny_model());
    let copy = contents(src.path());
    let dst = quick_dir();
    let stopped = catch_unwind(AssertUnwindSafe(|| {
        convert(src.path(), dst.path(), &options(), &mut |_| {
            if shards(src.path()).len() < 4 {
                std::panic::resume_unwind(Box::new("stopped"));
            }
        })
    }));
    assert!(stopped.is_err());
    // Another destination would need what is gone.
    let error = quietly(src.path(), quick_dir().path(), &ConvertOptions::default()).unwrap_err();
    let CheckpointError::SourceGone { gone, into, .. } = &error else { panic!("{error}") };
    assert!(gone.iter().all(|name| copy.contains_key(name)) && *into == fs::canonicalize(dst.path()).unwrap());
    // Other parameters do not go on where these stopped: both are shown.
    let other = ConvertOptions { group: Some(32), ..options() };
    let error = quietly(src.path(), dst.path(), &other).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertDiffers { .. }), "{error}");
    assert!(error.to_string().contains("group=row") && error.to_string().contains("group=32"), "{error}");
    assert!(error.hint().contains("only copy") && !error.hint().contains("remove this"), "{}", error.hint());
    // A shard that is still there and not what it was makes another source of it.
    let last = "model-00006-of-00006.safetensors";
    let changed: Vec<u8> = copy[last].iter().enumerate().map(|(at, byte)| byte ^ u8::from(at > 20_000)).collect();
    fs::write(src.path().join(last), changed).unwrap();
    let error = quietly(src.path(), dst.path(), &options()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertDiffers { .. }), "{error}");
    fs::write(src.path().join(last), &copy[last]).unwrap();
    // One that is gone without having been consumed is missed by name.
    let found = fs::read_dir(dst.path()).unwrap().count();
    fs::remove_file(src.path().join(last)).unwrap();
    let error = quietly(src.path(), dst.path(), &options()).unwrap_err();
    assert!(matches!(&error, CheckpointError::SourceGone { gone, .. } if gone.contains(&last.to_owned())), "{error}");
    fs::write(src.path().join(last), &copy[last]).unwrap();
    assert_eq!(fs::read_dir(dst.path()).unwrap().count(), found);
    quietly(src.path(), dst.path(), &options()).unwrap();
    let unconsumed = quick_dir();
    copy.iter().for_each(|(name, bytes)| fs::write(unconsumed.path().join(name), bytes).unwrap());
    assert_same_files(dst.path(), &whole(unconsumed.path()));
}

#[test]
fn a_consumed_source_is_no_place_to_convert_back_into() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    quietly(src.path(), dst.path(), &options()).unwrap();
    let before = (contents(src.path()), contents(dst.path()));
    for delete_source in [false, true] {
        let back = ConvertOptions { repack: true, delete_source, ..ConvertOptions::default() };
        let error = quietly(dst.path(), src.path(), &back).unwrap_err().to_string();
        assert!(error.contains("already holds") && error.contains(".millstream-consumed.json"), "{error}");
    }
    assert!((contents(src.path()), contents(dst.path())) == before);
}

#[test]
fn a_source_is_consumed_by_one_at_a_time() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    let before = contents(src.path());
    let other = fs::File::open(src.path()).unwrap();
    other.lock().unwrap();
    let error = quietly(src.path(), dst.path(), &options()).unwrap_err();
    assert!(matches!(error, CheckpointError::SourceBusy { .. }), "{error}");
    assert!(contents(src.path()) == before && contents(dst.path()).is_empty());
    // Who removes nothing may read it.
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    other.unlock().unwrap();
    quietly(src.path(), dst.path(), &options()).unwrap();
    // Nobody holds it any more.
    other.try_lock().unwrap();
}

#[test]
fn space_that_the_source_gives_back_counts() {
    let src = sharded(tiny_model());
    let all: u64 =
        whole(src.path()).iter().filter(|(name, _)| name.ends_with(".safetensors")).map(|(_, b)| b.len() as u64).sum();
    let needed = |delete_source| {
        let options = ConvertOptions { delete_source, free_bytes: Some(0), ..ConvertOptions::default() };
        match quietly(src.path(), quick_dir().path(), &options).unwrap_err() {
            CheckpointError::NoSpace { needed, .. } => needed,
            other => panic!("{other}"),
        }
    };
    let (plain, consuming) = (needed(false), needed(true));
    assert!(plain >= all && consuming < plain, "{consuming} of {plain}");
    assert_eq!(shards(src.path()).len(), SHARDS, "nothing was removed");
    let options = ConvertOptions { free_bytes: Some(consuming), ..options() };
    quietly(src.path(), quick_dir().path(), &options).unwrap();
}

// The program, killed for good.

fn convert_command(src: &Path, dst: &Path, flags: &[&str]) -> Command {
    let mut command = program(dst.parent().unwrap());
    command.arg("convert").args([src, dst]).args(flags).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

/// Kills the program at many times of its conversion, with SIGKILL, and lets it end the next time.
fn killed_at_many_times(flags: &[&str], template: &Path, after: impl Fn(&Path, &Path)) {
    let expected = whole(template);
    let source = contents(template);
    let copy = || {
        let dir = quick_dir();
        source.iter().for_each(|(name, bytes)| fs::write(dir.path().join(name), bytes).unwrap());
        dir
    };
    let home = quick_dir();
    let began = Instant::now();
    assert!(convert_command(copy().path(), &home.path().join("timed"), flags).status().unwrap().success());
    let took = began.elapsed();
    let mut unfinished = 0;
    for kill in 1..=24u32 {
        let (src, dst) = (copy(), home.path().join(kill.to_string()));
        let mut child = convert_command(src.path(), &dst, flags).spawn().unwrap();
        std::thread::sleep(took * kill / 24 + Duration::from_millis(1));
        child.kill().unwrap();
        let ended = child.wait().unwrap().success();
        unfinished += usize::from(!ended);
        if dst.exists() {
            assert!(ended || Checkpoint::open(&dst).is_err() || shards(&dst).len() == 12);
            after(src.path(), &dst);
        }
        let output = convert_command(src.path(), &dst, flags).stderr(Stdio::piped()).output().unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        assert_same_files(&dst, &expected);
        fs::remove_dir_all(&dst).unwrap();
    }
    println!("{unfinished} of 24 were killed before their end");
}

#[test]
fn a_program_killed_at_any_time_goes_on_to_the_same_bytes() {
    let template = sharded(tiny_model());
    killed_at_many_times(&[], template.path(), |_, _| {});
}

#[test]
fn a_program_killed_while_it_consumes_its_source_goes_on_to_the_same_bytes() {
    let template = sharded(tiny_model());
    let before = tensors_of(template.path());
    killed_at_many_times(&["--delete-source"], template.path(), |src, dst| assert_nothing_lost(src, dst, &before));
}

// Checks of a finished conversion.

fn verified(src: &Path, dst: &Path) -> Result<Verified, CheckpointError> {
    verify(src, dst, &ConvertOptions::default(), &mut |_| {})
}

#[test]
fn a_check_reads_everything_and_makes_it_again() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    assert!(verified(src.path(), dst.path()).is_err(), "there is nothing to check");
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    let before = contents(dst.path());
    let good = verified(src.path(), dst.path()).unwrap();
    assert!(good.damage.is_empty() && good.from_source && good.shards == 12, "{good:?}");

    // A byte of a weight: the drive gives back something else than was written.
    let victim = dst.path().join("out-00003.safetensors");
    let mut bytes = fs::read(&victim).unwrap();
    let at = bytes.len() - 3 * 4096;
    bytes[at] ^= 1;
    fs::write(&victim, &bytes).unwrap();
    let bad = verified(src.path(), dst.path()).unwrap();
    assert_eq!(bad.damage.len(), 1, "{bad:?}");
    assert!(bad.damage[0].contains("out-00003.safetensors") && bad.damage[0].contains("experts"), "{bad:?}");
    assert!(fs::read(&victim).unwrap() == bytes, "a check writes nothing");
    fs::write(&victim, &before["out-00003.safetensors"]).unwrap();

    // A conversion in progress is not a finished one, and other parameters are not these.
    let grouped = ConvertOptions { group: Some(32), ..ConvertOptions::default() };
    let error = verify(src.path(), dst.path(), &grouped, &mut |_| {}).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertDiffers { .. }), "{error}");
    fs::write(dst.path().join(".millstream-convert.json"), "{}").unwrap();
    assert!(matches!(verified(src.path(), dst.path()), Err(CheckpointError::Unfinished { .. })));
    fs::remove_file(dst.path().join(".millstream-convert.json")).unwrap();

    // Without a source there are the checksums.
    for name in shards(src.path()).keys() {
        fs::remove_file(src.path().join(name)).unwrap();
    }
    let alone = verified(src.path(), dst.path()).unwrap();
    assert!(alone.damage.is_empty() && !alone.from_source && alone.shards == 12, "{alone:?}");
    assert!(verified(&src.path().join("gone"), dst.path()).unwrap().damage.is_empty());
    fs::write(&victim, &bytes).unwrap();
    assert_eq!(verified(src.path(), dst.path()).unwrap().damage.len(), 1);
}

#[test]
fn a_check_changes_nothing_and_needs_no_lock() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    // What a killed run left, which only whoever writes may remove; and whoever writes holds the lock.
    fs::write(dst.path().join(".millstream-out-00004.safetensors.tmp"), [7; 100]).unwrap();
    let before = contents(dst.path());
    let writer = fs::File::open(dst.path()).unwrap();
    writer.lock().unwrap();
    let good = verified(src.path(), dst.path()).unwrap();
    assert!(good.damage.is_empty() && good.from_source, "{good:?}");
    assert_same_files(dst.path(), &before);
    let error = quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap_err();
    assert!(matches!(error, CheckpointError::ConvertBusy { .. }), "{error}");
}

#[test]
fn a_shard_without_checksums_is_not_among_those_that_are_as_their_checksums_say() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    quietly(src.path(), dst.path(), &options()).unwrap();
    fs::remove_file(src.path().join(".millstream-consumed.json")).unwrap();
    assert!(verified(src.path(), dst.path()).unwrap().damage.is_empty());
    // As if it had been copied in from another container of the same model.
    let stranger = dst.path().join("out-00003.safetensors");
    let mut shard = Shard::read(&stranger);
    shard.metadata.remove("millstream.xxh3");
    shard.write(&stranger);
    let found = verified(src.path(), dst.path()).unwrap();
    // Eight experts of three matrices, each with its scales.
    let [line] = found.damage.as_slice() else { panic!("{found:?}") };
    assert!(line.contains("out-00003.safetensors: no checksum covers model.layers.1.mlp.experts.0."), "{line}");
    assert!(line.ends_with("and 47 more"), "{line}");
}

#[test]
fn a_check_notices_weights_that_the_source_does_not_make() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    // Wrong from the start: stored, and with the checksum of what is stored.
    let victim = dst.path().join("out-00003.safetensors");
    let mut bytes = fs::read(&victim).unwrap();
    let shard = Shard::read(&victim);
    let name = "model.layers.1.mlp.experts.";
    let (expert, text) = (format!("{name}5"), shard.metadata["millstream.xxh3"].as_str().unwrap().to_owned());
    let hashes: BTreeMap<String, String> = serde_json::from_str(&text).unwrap();
    if !hashes.contains_key(&expert) {
        panic!("another layer's shard: {:?}", hashes.keys());
    }
    let header = shard.header();
    let data_start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let place = |tensor: &str, end: usize| {
        let name = format!("{expert}.{tensor}");
        data_start + header[&name]["data_offsets"][end].as_u64().unwrap() as usize
    };
    let run = place("gate_proj.weight", 0)..place("down_proj.weight.qs", 1);
    bytes[run.start + 9] ^= 1;
    let wrong = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&bytes[run]));
    let at = bytes.windows(16).position(|w| w == hashes[&expert].as_bytes()).unwrap();
    bytes[at..at + 16].copy_from_slice(wrong.as_bytes());
    fs::write(&victim, &bytes).unwrap();
    let found = verified(src.path(), dst.path()).unwrap();
    assert_eq!(found.damage.len(), 1, "{found:?}");
    assert!(found.damage[0].contains(&expert) && found.damage[0].contains("other weights"), "{found:?}");
}

#[test]
fn the_command_says_what_it_found_and_what_it_removed() {
    let (src, home) = (sharded(tiny_model()), quick_dir());
    let dst = home.path().join("dst");
    let run = |flags: &[&str]| {
        convert_command(src.path(), &dst, flags).stderr(Stdio::piped()).stdout(Stdio::piped()).output().unwrap()
    };
    refused(&run(&["--verify"]), 1, &["holds no *.safetensors file"]);
    let converted = done(run(&[]));
    assert!(stderr(&converted).contains("read back"), "{}", stderr(&converted));
    let checked = done(run(&["--verify"]));
    assert!(stderr(&checked).contains("12 shards") && stderr(&checked).contains("as the source converts to"));
    refused(&run(&["--verify", "--group", "32"]), 1, &["group=32", "group=row", "hint: a check needs the flags"]);
    refused(&run(&["--verify", "--delete-source"]), 2, &["--verify", "--delete-source"]);
    let removed = done(run(&["--delete-source"]));
    assert!(stderr(&removed).contains("removed 6 shards of the source"), "{}", stderr(&removed));
    // Nobody is told to remove the only copy of the model.
    for flags in [&["--group", "32"][..], &["--group", "32", "--delete-source"]] {
        refused(&run(flags), 1, &["a finished container", "group=32", "group=row", "keep this directory"]);
    }
    let alone = done(run(&["--verify"]));
    assert!(stderr(&alone).contains("as its checksums say; the shards of"), "{}", stderr(&alone));
    // A check against a source whose name is mistyped says what it did not do.
    let nowhere = home.path().join("nowhere");
    let output = convert_command(&nowhere, &dst, &["--verify"]).stderr(Stdio::piped()).output().unwrap();
    assert!(stderr(&output).contains(&format!("there is no {}", nowhere.display())), "{}", stderr(&output));
    let mut bytes = fs::read(dst.join("out-00000.safetensors")).unwrap();
    let at = bytes.len() / 2;
    bytes[at] ^= 4;
    fs::write(dst.join("out-00000.safetensors"), bytes).unwrap();
    // Nobody is told to remove what cannot be made again.
    refused(
        &run(&["--verify"]),
        1,
        &["1 of 12 shards", "out-00000.safetensors", "checksum", "hint: keep this directory"],
    );
    // The consumed source is refused as a model, with the place of what it became.
    let run_it = program(home.path()).args(["run", "-m", src.path().to_str().unwrap(), "-p", "x"]).output().unwrap();
    refused(&run_it, 1, &["converted into", dst.to_str().unwrap()]);
    assert_eq!(fs::metadata(dst.join("config.json")).unwrap().nlink(), 1);
}

#[test]
fn a_container_is_repacked_by_flag_bit_for_bit() {
    let (src, home) = (sharded(tiny_model()), quick_dir());
    let (packed, plain) = (home.path().join("a"), home.path().join("b"));
    quietly(src.path(), &packed, &ConvertOptions::default()).unwrap();
    let output = |flags: &[&str], dst: &Path| {
        convert_command(&packed, dst, flags).stderr(Stdio::piped()).stdout(Stdio::piped()).output().unwrap()
    };
    refused(&output(&["--experts", "8"], &plain), 1, &["experts.0.gate_proj.weight", "repack"]);
    refused(&output(&["--repack", "--dense", "4"], &plain), 2, &["--repack"]);
    done(output(&["--repack"], &plain));
    let again = home.path().join("c");
    done(output(&["--from", "container"], &again));
    assert!(contents(&again) == contents(&plain));
    let weights = |dir: &Path| -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
        let tensors = shards(dir).into_keys().flat_map(|name| Shard::read(&dir.join(name)).tensors);
        let kept = tensors.filter(|tensor| !tensor.name.starts_with("__pad__"));
        kept.map(|tensor| (tensor.name, (tensor.dtype, tensor.shape, tensor.data))).collect()
    };
    assert!(weights(&plain) == weights(&packed));
}

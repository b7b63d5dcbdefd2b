//! Conversions that remove their source as they go, and that are checked afterwards.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/conversions.rs"]
mod conversions;
#[path = "common/program.rs"]
mod program;
#[path = "common/safetensors.rs"]
mod safetensors;

use conversions::*;
use millstream::checkpoint::convert::{ConvertOptions, Progress, Verified, convert, verify};
use millstream::checkpoint::synth::{Precision, Preset, SynthOptions, synth};
use millstream::checkpoint::{Checkpoint, CheckpointError};
use program::{done, program, refused, stderr};
use safetensors::{Model, Shard, Tensor, tiny_model};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt, symlink};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Stops a conversion that removes its source as soon as fewer than so many shards of it are left.
fn stop_below(src: &Path, dst: &Path, least: usize) {
    let stopped = catch_unwind(AssertUnwindSafe(|| {
        convert(src, dst, &options(), &mut |_| {
            if shards(src).len() < least {
                std::panic::resume_unwind(Box::new("stopped"));
            }
        })
    }));
    assert!(stopped.is_err());
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
    assert!(matches!(&error, CheckpointError::Damaged { gone, .. } if !gone.is_empty()), "{error}");
    assert!(error.to_string().contains("out-00003.safetensors"), "{error}");
    assert_eq!(shards(src.path()).len(), 1);
    // What the hint says works.
    assert!(error.hint().contains("fetch again what it was made from, remove the damaged shard"), "{}", error.hint());
    shards_of(&copy).for_each(survivor);
    fs::remove_file(&victim).unwrap();
    quietly(src.path(), dst.path(), &options()).unwrap();
    assert!(Checkpoint::open(dst.path()).is_ok() && shards(src.path()).is_empty());
}

/// Bytes of the source that a conversion took, and its notes.
fn taken(src: &Path, dst: &Path, options: &ConvertOptions) -> (u64, Vec<String>) {
    let (mut bytes, mut notes) = (0, Vec::new());
    convert(src, dst, options, &mut |progress| match progress {
        Progress::Bytes(counts) => bytes = counts.taken,
        Progress::Note(note) => notes.push(note),
        _ => {}
    })
    .unwrap();
    (bytes, notes)
}

#[test]
fn a_source_that_is_still_the_files_that_were_converted_is_not_converted_again_before_it_goes() {
    for changed in [false, true] {
        let (src, dst) = (sharded(tiny_model()), quick_dir());
        quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
        let made = contents(dst.path());
        // Finished, and given again without the removal: nothing is to be proved.
        assert_eq!(taken(src.path(), dst.path(), &ConvertOptions::default()).0, 0);
        if changed {
            // The same bytes in another file, as a copy or a new download has them.
            let shard = src.path().join("model-00004-of-00006.safetensors");
            fs::copy(&shard, src.path().join("copy")).unwrap();
            fs::rename(src.path().join("copy"), &shard).unwrap();
        }
        let (bytes, notes) = taken(src.path(), dst.path(), &options());
        let told = |word: &str| notes.iter().any(|note| note.contains(word));
        assert!((bytes > 0) == changed && told("to be compared") == changed, "{bytes} bytes read: {notes:?}");
        assert!(told("finished shards"), "{notes:?}");
        assert_same_files(dst.path(), &made);
        assert!(shards(src.path()).is_empty() && !dst.path().join(STAMPS).exists());
    }
}

#[test]
fn what_was_made_from_two_copies_of_a_source_is_compared_with_the_one_that_goes() {
    let (first, second, dst) = (sharded(tiny_model()), sharded(tiny_model()), quick_dir());
    let stopped = catch_unwind(AssertUnwindSafe(|| {
        convert(first.path(), dst.path(), &ConvertOptions::default(), &mut |progress| {
            if matches!(progress, Progress::Shard { number: 6, .. }) {
                std::panic::resume_unwind(Box::new("stopped"));
            }
        })
    }));
    assert!(stopped.is_err() && dst.path().join(STAMPS).exists());
    quietly(second.path(), dst.path(), &ConvertOptions::default()).unwrap();
    assert!(!dst.path().join(STAMPS).exists());
    // Neither of them made all of it.
    for source in [&first, &second] {
        let copy = quick_dir();
        contents(dst.path()).iter().for_each(|(name, bytes)| fs::write(copy.path().join(name), bytes).unwrap());
        assert!(taken(source.path(), copy.path(), &options()).0 > 0);
    }
}

#[test]
fn a_resumed_conversion_finds_what_is_damaged_and_cannot_be_made_again() {
    for delete_source in [true, false] {
        let (src, dst) = (sharded(tiny_model()), quick_dir());
        let copy = contents(src.path());
        stop_below(src.path(), dst.path(), 3);
        let victim = dst.path().join("out-00003.safetensors");
        let whole = fs::read(&victim).unwrap();
        let (left, done) = (shards(src.path()), shards(dst.path()).len());
        let again = ConvertOptions { delete_source, ..ConvertOptions::default() };
        let mut cut = whole.clone();
        cut.truncate(whole.len() - 5000);
        let mut header = whole.clone();
        header[200] ^= 1;
        let mut weight = whole.clone();
        weight[whole.len() - 3 * 4096] ^= 16;
        for damaged in [cut, header, weight] {
            fs::write(&victim, damaged).unwrap();
            let error = quietly(src.path(), dst.path(), &again).unwrap_err();
            let CheckpointError::Damaged { file, gone, .. } = &error else { panic!("{error}") };
            assert_eq!(file, &victim);
            assert!(!gone.is_empty() && gone.iter().all(|name| !left.contains_key(name)), "{error}");
            assert!(error.hint().contains("fetch again what it was made from"), "{}", error.hint());
            assert_eq!((&shards(src.path()), shards(dst.path()).len()), (&left, done), "nothing else happens");
        }
        // A whole copy in its place is one way on.
        fs::write(&victim, &whole).unwrap();
        let (_, notes) = taken(src.path(), dst.path(), &again);
        assert!(notes.iter().any(|note| note.contains("to be read again")), "{notes:?}");
        let unconsumed = quick_dir();
        copy.iter().for_each(|(name, bytes)| fs::write(unconsumed.path().join(name), bytes).unwrap());
        assert_same_files(dst.path(), &self::whole(unconsumed.path()));
    }
}

#[test]
fn a_damaged_shard_whose_source_is_there_may_be_removed_and_is_made_anew() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    let expected = contents(dst.path());
    let victim = dst.path().join("out-00003.safetensors");
    fs::write(&victim, &expected["out-00003.safetensors"][..100_000]).unwrap();
    let by_check = verified(src.path(), dst.path()).unwrap_err();
    for error in [quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap_err(), by_check] {
        assert!(matches!(&error, CheckpointError::Damaged { gone, .. } if gone.is_empty()), "{error}");
        assert!(error.to_string().contains("out-00003.safetensors"), "{error}");
        assert!(error.hint().contains("remove it and convert again with the same flags"), "{}", error.hint());
    }
    fs::remove_file(&victim).unwrap();
    quietly(src.path(), dst.path(), &ConvertOptions::default()).unwrap();
    assert_same_files(dst.path(), &expected);
}

#[test]
fn a_record_that_was_lost_half_way_is_put_right_as_its_hint_says() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    let copy = contents(src.path());
    stop_below(src.path(), dst.path(), 4);
    let record = src.path().join(".millstream-consumed.json");
    fs::write(&record, "").unwrap();
    let before = (contents(src.path()), shards(dst.path()));
    let error = quietly(src.path(), dst.path(), &options()).unwrap_err();
    assert!(matches!(&error, CheckpointError::Record { file, .. } if *file == record), "{error}");
    assert!(error.hint().contains("fetch those shards again and remove it"), "{}", error.hint());
    assert!((contents(src.path()), shards(dst.path())) == before);
    shards_of(&copy).for_each(|name| fs::write(src.path().join(name), &copy[name]).unwrap());
    fs::remove_file(&record).unwrap();
    let kept = before.1.len();
    let report = convert(src.path(), dst.path(), &options(), &mut |_| {}).unwrap();
    assert_eq!((report.shards_kept, report.source_shards_removed), (kept, SHARDS));
}

#[test]
fn the_work_that_is_left_is_none_when_all_is_read_back_and_not_before() {
    let (src, dst) = (sharded(tiny_model()), quick_dir());
    let (mut seen, mut reading) = (Vec::new(), 0);
    convert(src.path(), dst.path(), &options(), &mut |progress| {
        if let Progress::Bytes(counts) = progress {
            // All is stored, and the last shard is being read back.
            reading += usize::from(counts.done == counts.of && counts.left > 0);
            seen.push((counts.worked, counts.left));
        }
    })
    .unwrap();
    let all = seen.last().unwrap().0;
    assert!(reading > 0 && seen.last().unwrap().1 == 0, "{:?}", seen.last());
    assert!(seen.iter().all(|(worked, left)| worked + left == all), "{seen:?}");
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
    assert!(matches!(error, CheckpointError::ReadBack { .. }), "{error}");
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
    stop_below(src.path(), dst.path(), 4);
    // Another destination would need what is gone.
    let place = quick_dir();
    let other = place.path().join("other");
    let error = quietly(src.path(), &other, &ConvertOptions::default()).unwrap_err();
    assert!(error.hint().starts_with("continue the conversion") && !other.exists(), "{}", error.hint());
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
    // A shard of the container that is lost after that is made by what it was made from, and by nothing else.
    let lost = shards(dst.path()).into_keys().next().unwrap();
    let bytes = fs::read(dst.path().join(&lost)).unwrap();
    fs::remove_file(dst.path().join(&lost)).unwrap();
    let error = quietly(src.path(), dst.path(), &options()).unwrap_err();
    let CheckpointError::SourceGone { gone, .. } = &error else { panic!("{error}") };
    assert!(error.hint().starts_with("fetch again what is gone"), "{}", error.hint());
    gone.iter().for_each(|name| fs::write(src.path().join(name), &copy[name]).unwrap());
    quietly(src.path(), dst.path(), &options()).unwrap();
    assert!(fs::read(dst.path().join(&lost)).unwrap() == bytes);
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
    // Whoever gives a container is told of the flag that it needs.
    for flags in [["--group", "32"], ["--experts", "8"]] {
        refused(&output(&flags, &plain), 1, &["experts.0.gate_proj.weight", "int4 already", "hint: give --repack"]);
    }
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
    // Damage is not made whole by new checksums, and nothing is removed for a source that is not sound.
    let other = home.path().join("d");
    let damaged = ["model.norm.weight", "model.layers.4.mlp.experts.5.up_proj.weight"].map(|name| flip(&packed, name));
    let [one, two] = damaged.each_ref().map(|shard| shard.to_str().unwrap());
    assert_ne!(one, two);
    let before = contents(&packed);
    let told = output(&["--repack", "--delete-source"], &other);
    refused(&told, 1, &[one, two, "is damaged", "; and 1 more", "nothing removed", "doctor --deep"]);
    assert!(contents(&packed) == before && !other.exists());
}

/// Everything behind the header of a shard, which says what source it is of.
fn weights_in(dir: &Path, shard: &str) -> Vec<u8> {
    Shard::read(&dir.join(shard)).data()
}

/// Changes the lowest bit in the middle of a tensor, wherever it is.
fn flip(dir: &Path, tensor: &str) -> PathBuf {
    for name in shards(dir).into_keys() {
        let file = dir.join(name);
        let mut bytes = fs::read(&file).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let Some(offsets) = header[tensor]["data_offsets"].as_array() else { continue };
        let [from, to] = [0, 1].map(|at| offsets[at].as_u64().unwrap() as usize);
        bytes[8 + len + from + (to - from) / 8 * 4] ^= 1;
        fs::write(&file, bytes).unwrap();
        return file;
    }
    panic!("{tensor} is nowhere");
}

#[test]
fn a_damaged_source_that_has_checksums_is_named_and_nothing_is_made_of_what_is_damaged() {
    let home = quick_dir();
    let (packed, fp8) = (home.path().join("packed"), home.path().join("fp8"));
    quietly(tiny_model(), &packed, &ConvertOptions { repack: true, ..ConvertOptions::default() }).unwrap();
    let drawn = SynthOptions {
        layers: Some(3),
        experts: Some(8),
        precision: Precision::Fp8,
        shard_bytes: 400_000,
        ..SynthOptions::new(Preset::ALL[2])
    };
    synth(&fp8, &drawn, &mut |_| {}).unwrap();
    let expert = "model.layers.2.mlp.experts.5";
    let of_packed = [format!("{expert}.gate_proj.weight"), format!("{expert}.down_proj.weight")];
    let of_fp8 = [format!("{expert}.up_proj.weight"), format!("{expert}.up_proj.weight_scale_inv")];
    let dense = ["model.layers.1.self_attn.o_proj.weight", "model.norm.weight", "lm_head.weight"].map(str::to_owned);
    for (source, own) in [(&packed, of_packed), (&fp8, of_fp8)] {
        let (right, copy) = (quick_dir(), contents(source));
        quietly(source, right.path(), &ConvertOptions::default()).unwrap();
        for (tensor, removes) in own.iter().chain(&dense).flat_map(|tensor| [(tensor, false), (tensor, true)]) {
            let (src, dst) = (quick_dir(), quick_dir());
            copy.iter().for_each(|(name, bytes)| fs::write(src.path().join(name), bytes).unwrap());
            let shard = flip(src.path(), tensor);
            let before = contents(src.path());
            let options = ConvertOptions { delete_source: removes, ..options() };
            let error = quietly(src.path(), dst.path(), &options).unwrap_err();
            let CheckpointError::SourceDamaged { damage, is_whole, .. } = &error else { panic!("{tensor}: {error}") };
            assert!(damage.shard == shard && *is_whole, "{tensor}: {error}");
            let title = damage.run.title();
            assert!(
                title == format!("tensor {tensor}") || title == "expert 5 of layer 2" || tensor.ends_with("_inv"),
                "{title}"
            );
            assert!(contents(src.path()) == before, "{tensor}");
            let made = shards(dst.path());
            assert!(!removes || made.is_empty());
            assert!(made.keys().all(|name| weights_in(dst.path(), name) == weights_in(right.path(), name)), "{tensor}");
            assert!(made.len() < shards(right.path()).len());
        }
    }
}

#[test]
fn a_source_that_is_damaged_while_it_goes_is_put_right_and_the_same_command_goes_on() {
    let (home, whole, dst) = (quick_dir(), quick_dir(), quick_dir());
    let packed = home.path().join("packed");
    let repack = ConvertOptions { repack: true, ..ConvertOptions::default() };
    quietly(tiny_model(), &packed, &repack).unwrap();
    quietly(&packed, whole.path(), &repack).unwrap();
    let options = ConvertOptions { repack: true, ..options() };
    let (right, before) = (contents(&packed), tensors_of(&packed));
    let mut victim = None;
    let error = convert(&packed, dst.path(), &options, &mut |_| {
        if victim.is_none() && shards(&packed).len() < before.len() {
            victim = Some(flip(&packed, "model.layers.4.mlp.experts.5.down_proj.weight"));
        }
    })
    .unwrap_err();
    let victim = victim.unwrap();
    // Whoever goes on without a right copy is told the same, and nothing more is removed.
    let left = contents(&packed);
    let again = quietly(&packed, dst.path(), &options).unwrap_err();
    for error in [error, again] {
        let CheckpointError::SourceDamaged { damage, is_whole: false, .. } = &error else { panic!("{error}") };
        assert_eq!((&damage.shard, damage.run.title().as_str()), (&victim, "expert 5 of layer 4"));
        assert!(error.hint().contains("put a right copy"), "{}", error.hint());
        assert!(contents(&packed) == left);
        assert_nothing_lost(&packed, dst.path(), &before);
    }
    fs::write(&victim, &right[victim.file_name().unwrap().to_str().unwrap()]).unwrap();
    quietly(&packed, dst.path(), &options).unwrap();
    assert_same_files(dst.path(), &contents(whole.path()));
    assert!(shards(&packed).is_empty());
}

#[test]
fn a_source_is_no_place_for_what_is_made_of_it_and_no_hint_says_to_remove_it() {
    let src = sharded(tiny_model());
    for flags in [&[][..], &["--repack"], &["--delete-source"]] {
        let mut asked = convert_command(src.path(), src.path(), flags);
        let output = asked.stderr(Stdio::piped()).stdout(Stdio::piped()).output().unwrap();
        refused(&output, 1, &["that is not the source"]);
        assert!(!stderr(&output).contains("remove"), "{}", stderr(&output));
    }
}

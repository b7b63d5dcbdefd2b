//! Failing drives. The right tokens or an error that names the expert, never a wrong token; and the engine lives on.
// An engine's error is large, and made once an answer at most.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;

use std::error::Error;
use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use engines::{Arithmetic, Model, Reader, Setup, config, greedy, has, has_ring, tales, tiny};
use millstream::checkpoint::Checkpoint;
use millstream::engine::sampler::Sampling;
use millstream::engine::{Activations, Engine, EngineError, Finish, Job, Notice};
use millstream::forward::ForwardError;
use millstream::store::{ExpertKey, StoreError};
use millstream_io::{FileSet, IoError, IoMode, ReadRange, SimConfig, SimFault, sim_device};

const TOKENS: usize = 10;
const PROMPT: usize = 20;

fn arithmetic(model: Model) -> Arithmetic {
    Arithmetic::absorbed(model, Activations::Int8)
}

fn simulated(model: Model, setup: &Setup, sim: &SimConfig) -> Engine {
    let (checkpoint, config) = (Checkpoint::open(&model.dir()).unwrap(), config(&arithmetic(model), setup));
    Engine::open_with(checkpoint, &config, &|files, pool| Ok(sim_device(sim, files.clone(), pool)?)).unwrap()
}

/// What the healthy engine says.
fn expected(model: Model) -> Vec<u32> {
    let mut engine = engines::open(&arithmetic(model), &Setup::default()).unwrap();
    greedy(&mut engine, &model.prompt(PROMPT), TOKENS).unwrap()
}

fn assert_no_slab_is_lost(engine: &Engine) {
    let store = engine.store();
    assert_eq!(store.pool().free() + store.resting(), store.pool().slabs());
}

fn read_error(error: &EngineError) -> (ExpertKey, &IoError) {
    match error {
        EngineError::Forward(ForwardError::Store(StoreError::Read { key, source })) => (*key, source),
        other => panic!("not an error of one read: {other:?}"),
    }
}

fn is_death(error: &EngineError) -> bool {
    matches!(error, EngineError::Forward(ForwardError::Store(StoreError::Device(IoError::DeviceDied { .. }))))
}

/// Error and causes, as they are printed.
fn chain(error: &EngineError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The range lies in the file and sectors of the expert that is named.
fn assert_range_is_the_experts(checkpoint: &Checkpoint, key: ExpertKey, range: &ReadRange) {
    let expert = checkpoint.experts.get(key.layer.into(), key.expert.into()).expect("an expert of the model");
    let spans = expert.matrices().into_iter().flat_map(|m| [Some(m.data), m.scales]).flatten();
    let inside = |file: &Path, from: u64, to: u64| {
        *file == *range.path && from / 4096 * 4096 <= range.offset && range.offset < to
    };
    let mut spans = spans.map(|s| (checkpoint.tensors.path(s.file), s.offset, s.offset + s.len));
    assert!(spans.any(|(file, from, to)| inside(file, from, to)), "{range} is not of {key:?}");
}

#[test]
fn two_hundred_seeds_of_faults_give_the_right_tokens_or_a_named_error() {
    // The tiny model reaches more seeds in the time, the trained one adds more experts up.
    let models = [Model::Tiny, Model::Tales]
        .map(|model| (model, expected(model), model.prompt(PROMPT), Checkpoint::open(&model.dir()).unwrap()));
    // By the kind of fault, which is the seed's remainder by 4.
    let (mut right, mut failed, mut recovered, mut died) = ([0; 4], [0; 4], [0; 4], 0);
    for seed in 0..200u64 {
        let (model, want, prompt, checkpoint) = &models[usize::from(seed % 5 == 0)];
        // A burst of errors or a death at a call that the first generation reaches; see the last test of the file.
        let (at, fault) = (seed * 7 % 60, (seed % 4) as usize);
        let mild = SimConfig { eio_per_mille: 0, zero_per_mille: 0, ..SimConfig::stormy(seed) };
        let sim = match seed % 4 {
            0 => SimConfig { short_per_mille: 300, eagain_per_mille: 200, stall_per_mille: 100, ..mild },
            1 => SimConfig { eio_per_mille: 60, zero_per_mille: 60, ..SimConfig::stormy(seed) },
            2 => SimConfig { script: (at..at + 12).map(|call| (call, SimFault::Errno(5))).collect(), ..mild },
            _ => SimConfig { script: vec![(at, SimFault::Die)], ..mild },
        };
        let sim = SimConfig { queue: 1 + (seed % 11) as usize, ..sim };
        let setup = Setup { slabs: 1 + (seed % 13) as usize, rows: [1, 6, 128][seed as usize % 3], ..Setup::default() };
        let mut engine = simulated(*model, &setup, &sim);
        let (mut after_error, mut dead) = (false, false);
        for _ in 0..14 {
            let result = greedy(&mut engine, prompt, TOKENS);
            if !dead && !result.as_ref().is_err_and(is_death) {
                assert_no_slab_is_lost(&engine);
            }
            match result {
                Ok(ids) => {
                    assert!(!dead, "seed {seed}: the dead speak");
                    assert_eq!(ids, *want, "seed {seed}");
                    right[fault] += 1;
                    recovered[fault] += u32::from(after_error);
                    after_error = false;
                    if seed % 4 != 1 && seed % 4 != 3 {
                        break;
                    }
                }
                Err(e) if is_death(&e) => {
                    assert_eq!(seed % 4, 3, "seed {seed}");
                    dead = true;
                }
                Err(e) => {
                    assert!(!dead, "seed {seed}: {e}");
                    let (key, source) = read_error(&e);
                    match source {
                        IoError::Read { range, errno } => {
                            assert!(seed % 4 == 3 || errno.0 == 5, "seed {seed}: {errno}");
                            assert_range_is_the_experts(checkpoint, key, range);
                        }
                        IoError::EndOfFile { range } => assert_range_is_the_experts(checkpoint, key, range),
                        // What else was queued when the device died.
                        IoError::Cancelled => assert_eq!(seed % 4, 3),
                        other => panic!("seed {seed}: {other}"),
                    }
                    assert_ne!(seed % 4, 0, "seed {seed}: what passes by itself is not an error: {source}");
                    failed[fault] += 1;
                    after_error = true;
                }
            }
        }
        match seed % 4 {
            2 => assert!(!after_error, "seed {seed}: the errors ended and the engine did not recover"),
            3 => assert!(dead, "seed {seed}"),
            _ => {}
        }
        died += u32::from(dead);
    }
    println!("{right:?} right, {failed:?} named errors, {recovered:?} recoveries, {died} deaths");
    // Fifty seeds of each kind. What passes by itself never fails, a burst of errors ends in the right tokens, and every
    // scripted death comes; chance must have made errors and let generations succeed after them.
    assert_eq!((right[0], failed[0], right[2], died), (50, 0, 50, 50));
    assert!(failed[1] > 0 && recovered[1] > 0 && failed[2] > 0 && recovered[2] > 0);
}

#[test]
fn eio_on_one_expert_in_the_middle_names_shard_bytes_and_errno() {
    let model = Model::Tales;
    let want = expected(model);
    let setup = Setup { slabs: 12, ..Setup::default() };
    // A healthy run tells how many calls there are: an expert of this model is read with one.
    let mut calm = simulated(model, &setup, &SimConfig::calm(0));
    greedy(&mut calm, &model.prompt(PROMPT), TOKENS).unwrap();
    let middle = calm.store().device_stats().reads / 2;

    let script = (middle..middle + 40).map(|call| (call, SimFault::Errno(5))).collect();
    let sim = SimConfig { script, ..SimConfig::calm(0) };
    let mut engine = simulated(model, &setup, &sim);
    let error = greedy(&mut engine, &model.prompt(PROMPT), TOKENS).unwrap_err();
    let (key, source) = read_error(&error);
    let IoError::Read { range, errno } = source else { panic!("{source}") };
    assert_eq!(errno.0, 5);
    assert_range_is_the_experts(&Checkpoint::open(&tales()).unwrap(), key, range);
    let text = chain(&error);
    let shard = range.path.file_name().unwrap().to_str().unwrap();
    assert!(shard.starts_with("model-0000") && shard.ends_with("-of-00002.safetensors"), "{shard}");
    for part in [
        format!("expert {} of layer {}", key.expert, key.layer),
        format!("{} bytes at {}", range.wanted, range.offset),
        shard.to_owned(),
        "os error 5".to_owned(),
    ] {
        assert!(text.contains(&part), "no `{part}` in: {text}");
    }
    assert!(error.hint().is_some());
    assert_no_slab_is_lost(&engine);
    let mut tries = 0;
    let ids = loop {
        tries += 1;
        match greedy(&mut engine, &model.prompt(PROMPT), TOKENS) {
            Ok(ids) => break ids,
            Err(e) => assert!(tries < 40, "{}", chain(&e)),
        }
    };
    assert_eq!(ids, want);
}

#[test]
fn half_the_bytes_once_is_no_error_and_nothing_twice_names_what_was_wanted_and_got() {
    let want = expected(Model::Tiny);
    let prompt = Model::Tiny.prompt(PROMPT);
    let open = |script| {
        let setup = Setup { slabs: 2, ..Setup::default() };
        simulated(Model::Tiny, &setup, &SimConfig { script, ..SimConfig::calm(0) })
    };
    let mut half = open(vec![(3, SimFault::Short(12_288)), (9, SimFault::Short(1))]);
    assert_eq!(greedy(&mut half, &prompt, TOKENS).unwrap(), want);
    assert_eq!(half.store().device().stats().retries, 2);

    let mut nothing = open((3..20).map(|call| (call, SimFault::Zero)).collect());
    let error = greedy(&mut nothing, &prompt, TOKENS).unwrap_err();
    let (key, IoError::EndOfFile { range }) = read_error(&error) else { panic!("{}", chain(&error)) };
    assert_range_is_the_experts(&Checkpoint::open(&tiny()).unwrap(), key, range);
    // Gate, up and down of 64 x 64 BF16 and the sectors they begin and end in.
    assert!((24_576..24_576 + 4096).contains(&range.wanted), "{range}");
    assert_eq!(range.got, 0);
    assert!(chain(&error).contains("(0 arrived)"), "{}", chain(&error));
}

#[test]
fn a_direct_read_that_is_refused_falls_back_once_with_the_same_tokens() {
    if !has(IoMode::Direct) {
        return;
    }
    let want = expected(Model::Tiny);
    let prompt = Model::Tiny.prompt(PROMPT);
    let sim = SimConfig { script: vec![(5, SimFault::Errno(22))], ..SimConfig::calm(0) };
    let setup = Setup { slabs: 2, ..Setup::default() };
    let mut engine = simulated(Model::Tiny, &setup, &sim);
    assert_eq!(greedy(&mut engine, &prompt, TOKENS).unwrap(), want);
    let warnings = engine.warnings();
    assert_eq!(warnings.len(), 1);
    assert!(warnings[0].contains("model.safetensors") && warnings[0].contains("refused"), "{warnings:?}");

    // Where direct reads were demanded, going through the page cache would be a lie.
    let demanded = Setup { io: IoMode::Direct, ..setup };
    let mut engine = simulated(Model::Tiny, &demanded, &sim);
    let error = greedy(&mut engine, &prompt, TOKENS).unwrap_err();
    assert!(matches!(read_error(&error).1, IoError::DirectRefused { .. }), "{}", chain(&error));
    assert_eq!(greedy(&mut engine, &prompt, TOKENS).unwrap(), want);
}

#[test]
fn a_generation_outlasts_a_drive_that_hangs_or_is_ended_by_whoever_watches_and_the_next_is_right() {
    let (want, prompt) = (expected(Model::Tiny), Model::Tiny.prompt(PROMPT));
    let sim = SimConfig { script: vec![(9, SimFault::Stall(Duration::from_secs(50)))], ..SimConfig::calm(0) };
    for gives_up in [false, true] {
        let mut engine = simulated(Model::Tiny, &Setup { slabs: 4, ..Setup::default() }, &sim);
        let (tell, told) = mpsc::channel();
        engine.set_watch(Box::new(move |what| {
            let hangs = matches!(what, Notice::Hung(_));
            tell.send(what).unwrap();
            if hangs && gives_up { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }));
        let job = Job { prompt: prompt.clone(), max_tokens: TOKENS, sampling: Sampling::greedy(), stop_ids: vec![] };
        let generate = |engine: &mut Engine| {
            engine.generate(&job, &AtomicBool::new(false), &mut |_| ControlFlow::Continue(())).unwrap()
        };
        let first = generate(&mut engine);
        let hung: Vec<Notice> = told.try_iter().filter(|what| *what != Notice::Waiting).collect();
        let Notice::Hung(read) = &hung[0] else { panic!("{hung:?}") };
        assert!(read.file.ends_with("model.safetensors") && read.waited == Duration::from_secs(30), "{read:?}");
        if gives_up {
            assert_eq!((first.finish, first.ids.len(), hung.len()), (Finish::Interrupted, 0, 1));
            let store = engine.store();
            assert!(store.gave_up());
            assert!(store.pool().free() + store.resting() < store.pool().slabs(), "the device keeps the slab");
            // The rest of the 50 seconds passes first.
            assert_eq!(generate(&mut engine).ids, want);
        } else {
            assert!(matches!(hung[1..], [Notice::Answered { .. }]), "{hung:?}");
            assert_eq!((first.finish, first.ids), (Finish::Length, want.clone()));
        }
        assert_no_slab_is_lost(&engine);
    }
}

/// A copy of the tiny model on a disk, which may be damaged.
fn copy_of_tiny() -> tempfile::TempDir {
    let copy = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for entry in fs::read_dir(tiny()).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    copy
}

/// Every way there is to read the copy.
fn readers() -> Vec<Setup> {
    let few = Setup { slabs: 3, ..Setup::default() };
    let mut readers = vec![few, Setup { io: IoMode::Buffered, ..few }, Setup { reader: Reader::Shuffled(5), ..few }];
    readers.push(Setup { reader: Reader::Map, ..few });
    readers.push(Setup { io: IoMode::Drop, ..few });
    if has_ring() {
        readers.push(Setup { reader: Reader::Ring, ..few });
        readers.push(Setup { reader: Reader::Ring, io: IoMode::Buffered, ..few });
    }
    readers
}

/// Opens the copy in `dir`; also returns the set of its files.
fn open_copy(dir: &Path, setup: &Setup) -> (Engine, Arc<FileSet>) {
    let (checkpoint, config) = (Checkpoint::open(dir).unwrap(), config(&arithmetic(Model::Tiny), setup));
    let set = std::cell::OnceCell::new();
    let engine = Engine::open_with(checkpoint, &config, &|files, pool| {
        set.get_or_init(|| files.clone());
        match setup.reader {
            Reader::Shuffled(seed) => Ok(sim_device(&engines::shuffled(seed), files.clone(), pool)?),
            _ => {
                let device = millstream_io::DeviceConfig { kind: config.device, ..Default::default() };
                Ok(millstream_io::open_device(&device, files.clone(), pool)?)
            }
        }
    });
    (engine.unwrap(), set.into_inner().unwrap())
}

#[test]
fn a_shard_truncated_while_open_is_named_and_the_engine_recovers_when_it_is_whole_again() {
    let want = expected(Model::Tiny);
    let prompt = Model::Tiny.prompt(PROMPT);
    for setup in readers() {
        let copy = copy_of_tiny();
        let shard = copy.path().join("model.safetensors");
        let whole = fs::read(&shard).unwrap();
        let checkpoint = Checkpoint::open(copy.path()).unwrap();
        let (mut engine, files) = open_copy(copy.path(), &setup);
        assert_eq!(greedy(&mut engine, &prompt, TOKENS).unwrap(), want, "{setup:?}");

        // An odd length, so that one read ends in the middle of a sector.
        let file = OpenOptions::new().write(true).open(&shard).unwrap();
        file.set_len(whole.len() as u64 / 2 + 1001).unwrap();
        let error = greedy(&mut engine, &prompt, TOKENS).unwrap_err();
        let (key, IoError::EndOfFile { range }) = read_error(&error) else { panic!("{}", chain(&error)) };
        assert_range_is_the_experts(&checkpoint, key, range);
        assert!(range.got < range.wanted);
        assert!(error.hint().unwrap().contains("truncated"), "{:?}", error.hint());
        assert_no_slab_is_lost(&engine);
        let changed = files.check_unchanged().unwrap_err();
        assert!(changed.to_string().contains("model.safetensors"), "{changed}");

        (&file).seek(SeekFrom::Start(0)).unwrap();
        (&file).write_all(&whole).unwrap();
        assert_eq!(greedy(&mut engine, &prompt, TOKENS).unwrap(), want, "{setup:?}");
        assert_no_slab_is_lost(&engine);
    }
}

#[test]
fn a_shard_replaced_while_open_is_read_as_it_was_and_the_change_can_be_told() {
    let want = expected(Model::Tiny);
    let prompt = Model::Tiny.prompt(PROMPT);
    for setup in readers() {
        let copy = copy_of_tiny();
        let (mut engine, files) = open_copy(copy.path(), &setup);
        files.check_unchanged().unwrap();
        let (shard, other) = (copy.path().join("model.safetensors"), copy.path().join("other"));
        fs::write(&other, vec![0xFF; fs::metadata(&shard).unwrap().len() as usize]).unwrap();
        fs::rename(&other, &shard).unwrap();
        assert_eq!(greedy(&mut engine, &prompt, TOKENS).unwrap(), want, "{setup:?}");
        let changed = files.check_unchanged().unwrap_err();
        assert!(matches!(&changed, IoError::Changed { path, .. } if **path == *shard), "{changed}");
    }
}

#[test]
fn a_weight_that_is_not_a_number_ends_the_answer_with_a_name() {
    // A NaN in one expert reaches the next layer's router, or the logits; in the head, one logit.
    let damage =
        [("model.layers.1.mlp.experts.", true), ("model.layers.4.mlp.experts.", true), ("lm_head.weight", false)];
    for (prefix, in_expert) in damage {
        let copy = copy_of_tiny();
        let shard = copy.path().join("model.safetensors");
        let mut bytes = fs::read(&shard).unwrap();
        let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
        for (name, tensor) in header.as_object().unwrap() {
            if name.starts_with(prefix) {
                let at = 8 + header_len + tensor["data_offsets"][0].as_u64().unwrap() as usize;
                bytes[at..at + 2].copy_from_slice(&[0xC0, 0x7F]);
            }
        }
        fs::write(&shard, bytes).unwrap();
        let (mut engine, _) = open_copy(copy.path(), &Setup { slabs: 3, ..Setup::default() });
        let error = greedy(&mut engine, &Model::Tiny.prompt(PROMPT), TOKENS).unwrap_err();
        match (&error, in_expert) {
            (EngineError::Forward(ForwardError::NotFinite { layer, .. }), true) => assert_eq!(*layer, 2),
            (EngineError::Sample(_), _) => assert!(prefix != "model.layers.1.mlp.experts."),
            _ => panic!("{error:?}"),
        }
        assert!(error.hint().is_some());
    }
}

#[test]
fn the_first_generation_of_the_storms_makes_enough_calls() {
    // The bursts and deaths above are placed at calls 0 to 59, and the largest pool reads least.
    let setup = Setup { slabs: 13, ..Setup::default() };
    let mut engine = simulated(Model::Tiny, &setup, &SimConfig::calm(0));
    greedy(&mut engine, &Model::Tiny.prompt(PROMPT), TOKENS).unwrap();
    let reads = engine.store().device_stats().reads;
    assert!(reads >= 60, "{reads}");
}

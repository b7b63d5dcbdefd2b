//! Copies of a model on other drives: the same answers as without, whatever happens to them, and no copy that is none.
// An engine's error is large, and made once an answer at most.
#![allow(clippy::unwrap_used, clippy::result_large_err)]

#[path = "common/engines.rs"]
mod engines;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use engines::{Answer, Arithmetic, Model, Reader, Setup, answer, assert_same, config, has_ring, shuffled};
use millstream::checkpoint::Checkpoint;
use millstream::engine::{Activations, Engine, EngineConfig, EngineError, Verify};
use millstream_io::{IoMode, sim_device};
use tempfile::TempDir;

const ARITHMETIC: Arithmetic = Arithmetic::absorbed(Model::TalesInt4, Activations::Int8);
const TOKENS: usize = 12;
/// Longer than a drive can be left out for having been slow.
const PATIENCE: Duration = Duration::from_secs(100);

fn shards(dir: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut shards: Vec<PathBuf> = files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    shards.sort();
    shards
}

/// Copies of every `step`th shard of the model, from the second on: that and every second one after it hold experts.
fn mirror(step: usize) -> TempDir {
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (number, shard) in shards(&ARITHMETIC.model.dir()).iter().enumerate() {
        if number % step == 1 % step {
            std::fs::copy(shard, dir.path().join(shard.file_name().unwrap())).unwrap();
        }
    }
    dir
}

fn readers() -> Vec<Reader> {
    let ring = has_ring().then_some(Reader::Ring);
    ring.into_iter().chain([Reader::Threads, Reader::Map, Reader::Shuffled(5), Reader::Shuffled(11)]).collect()
}

/// Few slabs, so that experts are read again and again, and requests smaller than an expert.
fn setup(reader: Reader) -> Setup {
    Setup { slabs: 3, reader, chunk_bytes: Some(64 << 10), ..Setup::RESIDENT }
}

fn with(mirrors: &[&TempDir], reader: Reader) -> EngineConfig {
    let mirrors = mirrors.iter().map(|dir| dir.path().to_owned()).collect();
    EngineConfig { mirrors, verify: Verify::Off, ..config(&ARITHMETIC, &setup(reader)) }
}

fn open(config: &EngineConfig, reader: Reader) -> Result<Engine, EngineError> {
    let checkpoint = Checkpoint::open(&ARITHMETIC.model.dir())?;
    match reader {
        Reader::Shuffled(seed) => {
            Engine::open_with(checkpoint, config, &|files, pool| Ok(sim_device(&shuffled(seed), files.clone(), pool)?))
        }
        _ => Engine::open(checkpoint, config),
    }
}

fn prompt() -> Vec<u32> {
    ARITHMETIC.model.prompt(30)
}

fn without() -> Answer {
    answer(&mut engines::open(&ARITHMETIC, &setup(Reader::Threads)).unwrap(), &prompt(), TOKENS)
}

#[test]
fn answers_are_the_same_with_mirrors_whole_and_partial() {
    let (expected, whole, part) = (without(), mirror(1), mirror(4));
    for reader in readers() {
        for mirrors in [&[&whole][..], &[&part], &[&part, &whole]] {
            let mut engine = open(&with(mirrors, reader), reader).unwrap();
            let found = answer(&mut engine, &prompt(), TOKENS);
            assert_same(&expected, &found, &(reader, mirrors.len()));
            assert_eq!(engine.warnings(), [""; 0], "{reader:?}");
            let drives = engine.store().device().drives();
            assert!(
                drives.len() == mirrors.len() + 1 && drives.iter().all(|drive| drive.bytes > 0),
                "{reader:?} {drives:?}"
            );
        }
    }
}

#[test]
fn a_mirror_cut_short_under_the_run_costs_a_warning_and_not_a_bit() {
    let expected = without();
    for reader in readers() {
        let dir = mirror(1);
        let mut engine = open(&with(&[&dir], reader), reader).unwrap();
        assert_same(&expected, &answer(&mut engine, &prompt(), TOKENS), &reader);
        for copy in shards(dir.path()) {
            std::fs::OpenOptions::new().write(true).open(copy).unwrap().set_len(4096).unwrap();
        }
        // A drive that was slow for a moment is left out for a while.
        let began = Instant::now();
        while engine.warnings().is_empty() && began.elapsed() < PATIENCE {
            assert_same(&expected, &answer(&mut engine, &prompt(), TOKENS), &reader);
        }
        let warnings = engine.warnings();
        assert!(warnings.len() == 1 && warnings[0].starts_with(&*dir.path().to_string_lossy()), "{warnings:?}");
    }
}

/// Flips a bit in the last tenth of every shard that holds experts.
fn damage(dir: &Path) {
    for shard in shards(dir).iter().filter(|shard| shard.metadata().unwrap().len() > 3_000_000) {
        let mut bytes = std::fs::read(shard).unwrap();
        for at in (bytes.len() / 20..bytes.len()).step_by(40_000) {
            bytes[at] ^= 4;
        }
        std::fs::write(shard, bytes).unwrap();
    }
}

#[test]
fn wrong_bytes_of_a_mirror_are_read_again_from_the_model() {
    let expected = without();
    for reader in readers() {
        let dir = mirror(1);
        damage(dir.path());
        let config = EngineConfig { verify: Verify::All, ..with(&[&dir], reader) };
        let mut engine = open(&config, reader).unwrap();
        assert_same(&expected, &answer(&mut engine, &prompt(), TOKENS), &reader);
        let warnings = engine.warnings();
        assert!(warnings.len() == 1, "{reader:?}: {warnings:?}");
        let path = dir.path().to_string_lossy();
        let drives: Vec<_> = engine.stats().io.drives.iter().map(|drive| (drive.wrong, drive.dropped)).collect();
        assert_eq!(drives, [(false, false), (true, true)], "{reader:?}");
        let parts = [&*path, "have the checksum", "this mirror is not read any more"];
        assert!(parts.iter().all(|part| warnings[0].contains(part)), "{reader:?}: {warnings:?}");
    }
}

/// A model whose mirror has the right headers and wrong weights, sampled: no seed lets wrong text pass for an answer.
#[test]
fn a_mirror_of_other_weights_is_found_by_the_sample_or_ends_the_run() {
    let dir = mirror(1);
    damage(dir.path());
    let model = ARITHMETIC.model.dir();
    let run = |mirrored: bool, more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
        command.args(["run", "-q", "-n", "16", "--temp", "0", "-p", "Once upon a time"]).args(more);
        command.arg("-m").arg(&model);
        if mirrored {
            command.arg("--mirror").arg(dir.path());
        }
        command.output().unwrap()
    };
    let expected = run(false, &[]);
    assert!(expected.status.success(), "{}", String::from_utf8_lossy(&expected.stderr));
    for seed in ["1", "2", "3", "4", "5", "6"] {
        let found = run(true, &["--seed", seed]);
        let text = String::from_utf8_lossy(&found.stderr);
        assert!(text.contains("this mirror is not read any more"), "quiet hides notes and no damage: {text}");
        if found.status.success() {
            assert_eq!(found.stdout, expected.stdout, "seed {seed}");
        } else {
            assert_eq!(found.status.code(), Some(1), "seed {seed}");
            assert!(text.contains("what was computed so far is wrong") && text.contains("hint: "), "{text}");
        }
    }
}

#[test]
fn wrong_bytes_of_the_model_are_read_from_a_mirror() {
    let expected = without();
    // A model of its own, to be damaged; its mirror is the one that all tests share.
    let own = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for file in std::fs::read_dir(ARITHMETIC.model.dir()).unwrap().map(|file| file.unwrap().path()) {
        std::fs::copy(&file, own.path().join(file.file_name().unwrap())).unwrap();
    }
    damage(own.path());
    for mirrored in [true, false] {
        let mirrors = if mirrored { vec![ARITHMETIC.model.dir()] } else { vec![] };
        let config = EngineConfig { mirrors, ..config(&ARITHMETIC, &Setup { slabs: 3, ..Setup::RESIDENT }) };
        let mut engine = Engine::open(Checkpoint::open(own.path()).unwrap(), &config).unwrap();
        if mirrored {
            assert_same(&expected, &answer(&mut engine, &prompt(), TOKENS), &"damaged model");
            let warnings = engine.warnings();
            assert!(warnings.len() == 1 && warnings[0].contains("own directory is damaged"), "{warnings:?}");
        } else {
            let error = engines::greedy(&mut engine, &prompt(), TOKENS).unwrap_err();
            assert!(error.to_string().contains("is damaged"), "{error}");
        }
    }
}

#[test]
fn statistics_and_notes_name_the_drives() {
    let (whole, part) = (mirror(1), mirror(3));
    let config = EngineConfig { io: IoMode::Auto, ..with(&[&whole, &part], Reader::Threads) };
    let mut engine = open(&config, Reader::Threads).unwrap();
    // Of 14 shards the second, fifth, eighth, eleventh and fourteenth.
    let note = format!("mirror {} has 5 of 14 files", part.path().display());
    assert!(engine.notes().iter().any(|line| line.starts_with(&note)), "{:?}", engine.notes());
    answer(&mut engine, &prompt(), TOKENS);
    let mut stats = engine.stats();
    stats.derive();
    let paths: Vec<&str> = stats.io.drives.iter().map(|drive| &*drive.path).collect();
    let expected = [ARITHMETIC.model.dir(), whole.path().to_owned(), part.path().to_owned()];
    assert_eq!(paths, expected.iter().map(|path| path.to_str().unwrap()).collect::<Vec<_>>());
    assert_eq!(stats.io.drives.iter().map(|drive| drive.bytes).sum::<u64>(), stats.io.bytes);
    assert!(stats.io.drives.iter().all(|drive| drive.errors == 0 && !drive.wrong && !drive.dropped));

    let engine = open(&with(&[], Reader::Threads), Reader::Threads).unwrap();
    assert!(engine.stats().io.drives.is_empty(), "one drive is no list of drives");
}

/// `run` on the model with mirrors, asked for one token.
fn run(mirrors: &[&Path]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(["run", "-n", "1", "-p", "x", "-m"]).arg(ARITHMETIC.model.dir());
    for dir in mirrors {
        command.arg("--mirror").arg(dir);
    }
    command.output().unwrap()
}

#[track_caller]
fn refused(mirrors: &[&Path], code: i32, words: &[&str]) {
    let output = run(mirrors);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{text}");
    assert!(output.stdout.is_empty() && text.contains("hint: "), "{text}");
    words.iter().for_each(|word| assert!(text.contains(word), "no {word:?} in {text}"));
    assert!(!text.contains("loading"), "it is refused before anything is loaded: {text}");
}

#[test]
fn a_directory_that_is_no_mirror_is_refused() {
    let model = ARITHMETIC.model.dir();
    refused(&[&model], 2, &["is the same directory as"]);
    let other_name = mirror(20);
    let link = other_name.path().join("link");
    std::os::unix::fs::symlink(&model, &link).unwrap();
    refused(&[&link], 2, &["is the same directory as"]);
    refused(&[other_name.path(), other_name.path()], 2, &["is the same directory as"]);
    refused(&[Path::new("/no/such/mirror")], 2, &["the mirror /no/such/mirror does not exist"]);
    refused(&[&shards(&model)[0]], 2, &["is not a directory"]);
    let empty = tempfile::tempdir().unwrap();
    refused(&[empty.path()], 2, &["has no copy of any of the 14 shards"]);
    // A link to the very shard brings no second drive.
    let first = &shards(&model)[0];
    std::os::unix::fs::symlink(first, empty.path().join(first.file_name().unwrap())).unwrap();
    refused(&[empty.path()], 2, &["has no copy of any of the 14 shards"]);
    assert_eq!(run(&[other_name.path()]).status.code(), Some(0), "one shard is enough");
}

#[test]
fn a_copy_that_differs_in_length_or_header_is_refused_by_name() {
    let dir = mirror(1);
    let copies = shards(dir.path());
    let name = |copy: &Path| copy.display().to_string();
    let bytes = std::fs::read(&copies[3]).unwrap();

    let mut changed = bytes.clone();
    // Inside the header, after its length of eight bytes.
    changed[57] ^= 1;
    std::fs::write(&copies[3], &changed).unwrap();
    refused(&[dir.path()], 1, &[&name(&copies[3]), "header", "byte 57"]);

    let mut changed = bytes.clone();
    changed[..8].copy_from_slice(&(u64::from_le_bytes(bytes[..8].try_into().unwrap()) - 1).to_le_bytes());
    std::fs::write(&copies[3], &changed).unwrap();
    refused(&[dir.path()], 1, &[&name(&copies[3]), "header length"]);

    std::fs::write(&copies[3], &bytes[..bytes.len() - 1]).unwrap();
    let found = format!("expected {} bytes, found {} bytes", bytes.len(), bytes.len() - 1);
    refused(&[dir.path()], 1, &[&name(&copies[3]), "length", &found]);

    std::fs::write(&copies[3], []).unwrap();
    refused(&[dir.path()], 1, &[&name(&copies[3]), "length"]);

    std::fs::remove_file(&copies[3]).unwrap();
    std::fs::create_dir(&copies[3]).unwrap();
    refused(&[dir.path()], 1, &[&name(&copies[3]), "kind of file"]);
}

#[test]
fn a_mirror_does_not_stand_in_for_a_shard_that_the_model_lacks() {
    let own = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for file in std::fs::read_dir(ARITHMETIC.model.dir()).unwrap().map(|file| file.unwrap().path()) {
        std::fs::copy(&file, own.path().join(file.file_name().unwrap())).unwrap();
    }
    let gone = shards(own.path())[4].clone();
    std::fs::remove_file(&gone).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_millstream"));
    command.args(["run", "-n", "1", "-p", "x", "-m"]).arg(own.path()).arg("--mirror").arg(ARITHMETIC.model.dir());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && output.stdout.is_empty(), "{text}");
    assert!(text.contains(gone.file_name().unwrap().to_str().unwrap()) && text.contains("hint: "), "{text}");
}

#[test]
fn a_copy_that_cannot_be_read_at_the_start_is_refused_by_name() {
    let dir = mirror(1);
    let copy = shards(dir.path())[3].clone();
    std::fs::remove_file(&copy).unwrap();
    // A link to itself: unreadable for root too.
    std::os::unix::fs::symlink(&copy, &copy).unwrap();
    refused(&[dir.path()], 1, &[&copy.display().to_string(), "leave --mirror out"]);
}

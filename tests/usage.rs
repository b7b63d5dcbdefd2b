//! The usage history as people meet it: what a run leaves behind, what the next makes of it, and that nothing about it is
//! ever more than a warning.
#![allow(clippy::unwrap_used)]

#[path = "common/program.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use millstream::checkpoint::Checkpoint;
use millstream::store::history;
use program::{program, stderr};
use tempfile::TempDir;

const NAME: &str = ".millstream-usage";
/// Four sparse layers of eight experts, two a token.
const LAYERS: u64 = 4;
const TOP_K: u64 = 2;

/// A model of its own, and a home of its own.
struct Place {
    dir: TempDir,
}

impl Place {
    fn new() -> Place {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("model")).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-glm-moe-dsa");
        for entry in fs::read_dir(source).unwrap() {
            let entry = entry.unwrap();
            // A history that another run left beside the source is not part of the model.
            if entry.file_name() != NAME {
                fs::copy(entry.path(), dir.path().join("model").join(entry.file_name())).unwrap();
            }
        }
        Place { dir }
    }

    fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    fn beside(&self) -> PathBuf {
        self.model().join(NAME)
    }

    /// Four tokens of prompt and five of answer, seen by the router: eight of them.
    fn run(&self, extra: &[&str]) -> Output {
        let mut command = program(self.dir.path());
        command.env("XDG_STATE_HOME", self.dir.path().join("state"));
        command.args(["run", "-m"]).arg(self.model());
        command.args(["--ids", "-p", "1 2 3 4", "-n", "5", "--ignore-eos", "--temp", "0"]).args(extra);
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        output
    }

    fn read(&self, path: &Path) -> Vec<u64> {
        let fingerprint = Checkpoint::open(&self.model()).unwrap().fingerprint();
        history::decode(&fs::read(path).unwrap(), fingerprint).unwrap()
    }
}

/// Warnings about the history.
fn warnings(output: &Output) -> Vec<&str> {
    stderr(output).lines().filter(|line| line.contains("usage history")).collect()
}

#[test]
fn every_selection_of_every_run_is_counted() {
    let place = Place::new();
    let first = place.run(&[]);
    let usage = place.read(&place.beside());
    assert_eq!(usage.len(), 4 * 8);
    assert_eq!(usage.iter().sum::<u64>(), 8 * LAYERS * TOP_K);
    let second = place.run(&[]);
    assert_eq!(second.stdout, first.stdout, "a history changes no answer");
    let twice: Vec<u64> = usage.iter().map(|count| 2 * count).collect();
    assert_eq!(place.read(&place.beside()), twice);
    assert!(warnings(&first).is_empty() && warnings(&second).is_empty());
}

#[test]
fn a_history_is_kept_where_it_is_asked_for() {
    let place = Place::new();
    place.run(&["--usage", "off"]);
    assert!(!place.beside().exists() && !place.dir.path().join("state").exists());
    let file = place.dir.path().join("elsewhere");
    place.run(&["--usage", file.to_str().unwrap()]);
    assert!(!place.beside().exists());
    assert_eq!(place.read(&file).iter().sum::<u64>(), 8 * LAYERS * TOP_K);
}

#[test]
fn a_damaged_or_foreign_history_is_one_warning_and_is_replaced() {
    let place = Place::new();
    let plain = place.run(&["--usage", "off"]);
    place.run(&[]);
    let whole = fs::read(place.beside()).unwrap();
    let mut flipped = whole.clone();
    flipped[20] ^= 1;
    let foreign = history::encode(1, &[5; 32]);
    for (bytes, word) in [
        (&whole[..whole.len() - 3], "damaged"),
        (&flipped, "damaged"),
        (&b"hello"[..], "not a usage history"),
        (&foreign, "belongs to another model"),
    ] {
        fs::write(place.beside(), bytes).unwrap();
        let output = place.run(&[]);
        let warnings = warnings(&output);
        assert!(warnings.len() == 1 && warnings[0].contains(word), "{warnings:?}");
        assert_eq!(output.stdout, plain.stdout);
        assert_eq!(place.read(&place.beside()).iter().sum::<u64>(), 8 * LAYERS * TOP_K);
    }
}

#[test]
fn a_named_file_that_is_no_history_is_left_as_it_is() {
    let place = Place::new();
    let file = place.dir.path().join("notes.txt");
    fs::write(&file, "weights, or a letter").unwrap();
    let output = place.run(&["--usage", file.to_str().unwrap()]);
    assert_eq!(warnings(&output).len(), 1, "{}", stderr(&output));
    assert_eq!(fs::read(&file).unwrap(), b"weights, or a letter");
}

#[test]
fn a_model_that_cannot_be_written_has_its_history_in_the_state_directory() {
    let place = Place::new();
    // Root may write into any directory, but nobody can replace one by a file.
    fs::create_dir_all(place.beside().join("in the way")).unwrap();
    let output = place.run(&[]);
    assert_eq!(warnings(&output).len(), 1, "{}", stderr(&output));
    let kept: Vec<_> = fs::read_dir(place.dir.path().join("state/millstream/usage")).unwrap().collect();
    assert_eq!(kept.len(), 1);
    let kept = kept.into_iter().next().unwrap().unwrap().path();
    assert_eq!(place.read(&kept).iter().sum::<u64>(), 8 * LAYERS * TOP_K);
    fs::remove_dir_all(place.beside()).unwrap();
    // It is found there by the next run, though the model can be written now.
    place.run(&[]);
    assert_eq!(place.read(&place.beside()).iter().sum::<u64>(), 2 * 8 * LAYERS * TOP_K);
}

#[test]
fn policy_and_pins_are_settings_that_change_no_answer() {
    let place = Place::new();
    let plain = place.run(&[]);
    for flags in
        [&["--policy", "lru"][..], &["--policy", "arc", "--pins", "on"], &["--policy", "auto", "--pins", "off"]]
    {
        assert_eq!(place.run(flags).stdout, plain.stdout, "{flags:?}");
    }
    let output = place.run(&["--policy", "2q", "--verbose"]);
    assert!(stderr(&output).contains("2q  (flag)"), "{}", stderr(&output));
}

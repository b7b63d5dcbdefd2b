//! The history of how often each expert of a model was chosen: where it is kept, read and brought up to date.
//!
//! It is advice for the expert cache. Whatever is wrong with it costs one line of warning and the advice.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::Checkpoint;
use crate::limits::MAX_HISTORY_BYTES;
use crate::store::history;

use super::machine::Machine;
use super::output;

/// Name of the file beside a model.
const NAME: &str = ".millstream-usage";

/// Where the history is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum UsageChoice {
    /// Beside the model; where that cannot be written, in the user's state directory.
    #[default]
    Auto,
    /// Nowhere.
    Off,
    /// In this file.
    File(PathBuf),
}

impl UsageChoice {
    /// Reads `--usage`.
    pub fn parse(text: &str) -> Result<UsageChoice, String> {
        match text {
            "auto" => Ok(UsageChoice::Auto),
            "off" => Ok(UsageChoice::Off),
            "" => Err("it is auto, off or a file".into()),
            file => Ok(UsageChoice::File(file.into())),
        }
    }

    /// As it is typed.
    pub fn name(&self) -> String {
        match self {
            UsageChoice::Auto => "auto".into(),
            UsageChoice::Off => "off".into(),
            UsageChoice::File(path) => path.display().to_string(),
        }
    }
}

/// The history of one model.
pub struct Usage {
    fingerprint: u64,
    /// Files it may be in, the first that there is counts.
    places: Vec<PathBuf>,
    /// Selections of each expert when this run began.
    before: Vec<u64>,
}

impl Usage {
    /// The history of `checkpoint`, and what is wrong with it.
    pub fn open(choice: &UsageChoice, checkpoint: &Checkpoint, machine: &Machine) -> (Usage, Option<String>) {
        let mut places = match choice {
            UsageChoice::Off => vec![],
            UsageChoice::File(path) => vec![path.clone()],
            UsageChoice::Auto => vec![checkpoint.dir.join(NAME)],
        };
        if *choice == UsageChoice::Auto {
            places.extend(in_state_dir(machine, checkpoint));
        }
        let fingerprint = checkpoint.fingerprint();
        let (before, warning) = match read(&places, fingerprint) {
            Ok(before) => (before, None),
            // A file that the user named and that is something else is not ours to replace.
            Err(why) if matches!(choice, UsageChoice::File(_)) => {
                places.clear();
                (vec![], Some(format!("the usage history is neither used nor kept: {why}")))
            }
            Err(why) => (vec![], Some(format!("the usage history is not used: {why}"))),
        };
        (Usage { fingerprint, places, before }, warning)
    }

    /// Selections of each expert in earlier runs; empty where there is no history.
    pub fn before(&self) -> &[u64] {
        &self.before
    }

    /// Writes the history with what this run added: `now` are its selections and those before. Returns what is wrong.
    ///
    /// The file is read again, so that what other runs added meanwhile is kept.
    pub fn update(&self, now: &[u64]) -> Option<String> {
        let added = |i: usize| now[i] - self.before.get(i).copied().unwrap_or(0).min(now[i]);
        if self.places.is_empty() || (0..now.len()).all(|i| added(i) == 0) {
            return None;
        }
        // What cannot be read was said to be so when the run began, and is replaced.
        let mut usage = read(&self.places, self.fingerprint).unwrap_or_default();
        usage.resize(usage.len().max(now.len()), 0);
        for (i, count) in usage.iter_mut().enumerate().take(now.len()) {
            *count = count.saturating_add(added(i));
        }
        let bytes = history::encode(self.fingerprint, &usage);
        let mut refused = Vec::new();
        for place in &self.places {
            match replace(place, &bytes) {
                Ok(()) => return None,
                Err(error) => refused.push(format!("{}: {error}", place.display())),
            }
        }
        Some(format!("the usage history cannot be written: {}", refused.join("; ")))
    }
}

/// In the state directory. Models of one shape have one fingerprint, so the directory is part of the name.
fn in_state_dir(machine: &Machine, checkpoint: &Checkpoint) -> Option<PathBuf> {
    let state = machine.state_dir()?;
    let dir = fs::canonicalize(&checkpoint.dir).unwrap_or_else(|_| checkpoint.dir.clone());
    let place = xxh3_64(dir.as_os_str().as_encoded_bytes());
    Some(state.join("usage").join(format!("{}-{place:016x}", checkpoint.fingerprint_hex())))
}

/// The history in the first of `places` that is there; empty where none is.
fn read(places: &[PathBuf], fingerprint: u64) -> Result<Vec<u64>, String> {
    for place in places {
        let file = match fs::File::open(place) {
            Ok(file) => file,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(format!("{}: {error}", place.display())),
        };
        let mut bytes = Vec::new();
        file.take(MAX_HISTORY_BYTES).read_to_end(&mut bytes).map_err(|e| format!("{}: {e}", place.display()))?;
        return history::decode(&bytes, fingerprint).map_err(|e| format!("{}: {e}", place.display()));
    }
    Ok(vec![])
}

/// Writes a file that holds all of it or what it held before.
fn replace(place: &Path, bytes: &[u8]) -> std::io::Result<()> {
    if let Some(dir) = place.parent().filter(|dir| dir.ends_with("millstream/usage")) {
        fs::create_dir_all(dir)?;
    }
    output::replace(place, bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(places: Vec<PathBuf>, before: Vec<u64>) -> Usage {
        Usage { fingerprint: 7, places, before }
    }

    #[test]
    fn what_runs_add_adds_up() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("usage");
        assert_eq!(usage(vec![place.clone()], vec![]).update(&[1, 2, 0]), None);
        assert_eq!(read(std::slice::from_ref(&place), 7), Ok(vec![1, 2, 0]));
        // Two runs began with the same history; the second to end keeps what the first added.
        assert_eq!(usage(vec![place.clone()], vec![1, 2, 0]).update(&[1, 5, 0]), None);
        assert_eq!(usage(vec![place.clone()], vec![1, 2, 0]).update(&[2, 2, 9]), None);
        assert_eq!(read(std::slice::from_ref(&place), 7), Ok(vec![2, 5, 9]));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn the_second_place_is_taken_where_the_first_cannot_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let (first, second) = (dir.path().join("nowhere/usage"), dir.path().join("millstream/usage/x"));
        let places = vec![first, second.clone()];
        assert_eq!(usage(places.clone(), vec![]).update(&[3]), None);
        assert_eq!(read(&[second], 7), Ok(vec![3]));
        assert_eq!(read(&places, 7), Ok(vec![3]));
        let warning = usage(vec![dir.path().join("nowhere/usage")], vec![]).update(&[3]).unwrap();
        assert!(warning.contains("cannot be written") && warning.contains("No such file"), "{warning}");
    }

    #[test]
    fn damaged_and_foreign_histories_are_named_and_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("usage");
        for bytes in [&b""[..], b"something else", &history::encode(8, &[1]), &history::encode(7, &[1])[..20]] {
            fs::write(&place, bytes).unwrap();
            let why = read(std::slice::from_ref(&place), 7).unwrap_err();
            assert!(why.starts_with(&place.display().to_string()), "{why}");
            assert_eq!(usage(vec![place.clone()], vec![]).update(&[4]), None);
            assert_eq!(read(std::slice::from_ref(&place), 7), Ok(vec![4]));
        }
        // Whatever a directory is, it is no history.
        assert!(read(&[dir.path().to_owned()], 7).is_err());
    }

    #[test]
    fn nothing_added_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().join("usage");
        assert_eq!(usage(vec![place.clone()], vec![5]).update(&[5, 0]), None);
        assert_eq!(usage(vec![], vec![]).update(&[5, 0]), None);
        assert!(!place.exists());
    }
}

//! What `tune` found out about a model on this machine, where it is kept, and whether it still holds.
//!
//! A profile is advice: it is found by what the machine, the file system and the model are, and where it cannot be read
//! or belongs to others, one line says so and nothing else changes.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use millstream_io::BlockDevice;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::checkpoint::Checkpoint;
use crate::limits::MAX_PROFILE_BYTES;

use super::machine::Machine;
use super::reading::Reading;
use super::{Failure, bundled, output};

/// Version of the fields of a profile.
const SCHEMA_VERSION: u64 = 1;

/// What a profile is about: where any of it differs, the profile does not apply.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Key {
    /// Processor.
    pub cpu: String,
    /// Cores this process may use.
    pub cores: usize,
    /// Release of the kernel.
    pub kernel: String,
    /// Type of the file system that holds the shards.
    pub fs: String,
    /// The block device under it.
    pub device: String,
    /// Configuration and headers of the model. Two trainings of one shape have the same; reading is the same too.
    pub model: String,
}

/// Settings that were found best, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// What it is about.
    pub key: Key,
    /// Day on which it was made.
    pub date: String,
    /// The settings; [`Reading::DEFAULT`] where nothing is better.
    pub reading: Reading,
    /// Why these.
    pub reason: String,
    /// What reads alone reached, in GB/s; none where memory served all that was measured.
    pub gb_s: Option<f64>,
}

/// A profile as it is kept.
#[derive(Serialize, Deserialize)]
struct Stored {
    schema_version: u64,
    date: String,
    program: String,
    key: Key,
    settings: StoredSettings,
    reason: String,
    /// Profiles of former versions have none.
    #[serde(default)]
    gb_s: Option<f64>,
}

#[derive(Serialize, Deserialize)]
struct StoredSettings {
    io: String,
    device: String,
    depth: String,
    chunk: String,
}

/// What looking for a profile came to.
#[derive(Clone, Debug, PartialEq)]
pub enum Lookup {
    /// There is none.
    None,
    /// It applies.
    Found(Box<Profile>),
    /// There is one that says nothing, with the reason.
    Unusable(String),
}

impl Key {
    /// The key of `checkpoint` on `machine`.
    pub fn of(machine: &Machine, checkpoint: &Checkpoint) -> Key {
        let place = checkpoint.tensors.paths().first().unwrap_or(&checkpoint.dir);
        let device = BlockDevice::holding(place, machine.root()).map_or_else(|| "none".to_owned(), |disk| disk.name);
        Key {
            cpu: machine.cpu.clone(),
            cores: machine.cores,
            kernel: machine.kernel.clone(),
            fs: machine.file_system(place),
            device,
            model: checkpoint.fingerprint_hex(),
        }
    }

    /// A name of its own for each key.
    fn file_name(&self) -> String {
        let Key { cpu, cores, kernel, fs, device, model } = self;
        let machine = [cpu, &cores.to_string(), kernel, fs, device].map(String::as_str).join("\n");
        format!("{model}-{:016x}.json", xxh3_64(machine.as_bytes()))
    }
}

/// Where profiles are kept: below `$XDG_STATE_HOME`, or `~/.local/state` where that is not set.
fn state_dir(machine: &Machine) -> Option<PathBuf> {
    let absolute = |name: &str| machine.variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))?;
    Some(state.join("millstream/tuning"))
}

/// The directory for profiles, made and tried out: better known before minutes of measuring than after.
pub fn prepare_dir(machine: &Machine) -> Result<PathBuf, Failure> {
    let hint = "set XDG_STATE_HOME to a directory that can be written";
    let Some(dir) = state_dir(machine) else {
        return Err(
            Failure::usage("there is no directory for the profile: neither XDG_STATE_HOME nor HOME is set").hint(hint)
        );
    };
    bundled::make_writable(&dir, 0o755)
        .map_err(|e| Failure::work(format!("cannot keep a profile in {}", dir.display())).cause(e).hint(hint))?;
    Ok(dir)
}

/// Puts the profile into `dir`: whoever looks finds the former one or this one whole. Returns its path.
pub fn save(dir: &Path, profile: &Profile) -> Result<PathBuf, Failure> {
    let path = dir.join(profile.key.file_name());
    let [io, device, depth, chunk] = profile.reading.texts().map(|(_, value)| value);
    let stored = Stored {
        schema_version: SCHEMA_VERSION,
        date: profile.date.clone(),
        program: env!("CARGO_PKG_VERSION").to_owned(),
        key: profile.key.clone(),
        settings: StoredSettings { io, device, depth, chunk },
        reason: profile.reason.clone(),
        gb_s: profile.gb_s,
    };
    let text = serde_json::to_string_pretty(&stored)
        .map_err(|e| Failure::work("cannot write the profile as JSON").cause(e))?;
    output::write(&path, "profile", text + "\n")?;
    Ok(path)
}

/// The profile of `checkpoint` on `machine`.
pub fn find(machine: &Machine, checkpoint: &Checkpoint) -> Lookup {
    let Some(dir) = state_dir(machine) else { return Lookup::None };
    let key = Key::of(machine, checkpoint);
    let path = dir.join(key.file_name());
    let unusable = |why: String| {
        Lookup::Unusable(format!(
            "the tuning profile {} is left aside, {why}: millstream tune makes a new one",
            path.display()
        ))
    };
    let text = match read(&path) {
        Ok(text) => text,
        // A file where a directory would be holds no profile either.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Lookup::None,
        Err(error) => return unusable(format!("it cannot be read ({error})")),
    };
    match parse(&text, &key) {
        Ok(profile) => Lookup::Found(Box::new(profile)),
        Err(why) => unusable(why),
    }
}

fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    let mut text = Vec::new();
    File::open(path)?.take(MAX_PROFILE_BYTES).read_to_end(&mut text)?;
    Ok(text)
}

/// The profile in `text`, if it is about `key`.
fn parse(text: &[u8], key: &Key) -> Result<Profile, String> {
    let value: Value = serde_json::from_slice(text).map_err(|error| format!("it is damaged ({error})"))?;
    match value["schema_version"].as_u64() {
        Some(SCHEMA_VERSION) => {}
        Some(version) => return Err(format!("its version is {version} and this program knows {SCHEMA_VERSION}")),
        None => return Err("it is damaged (no schema_version)".to_owned()),
    }
    let stored: Stored = serde_json::from_value(value).map_err(|error| format!("it is damaged ({error})"))?;
    if stored.key != *key {
        return Err("it is about another machine, file system or model".to_owned());
    }
    let StoredSettings { io, device, depth, chunk } = &stored.settings;
    let reading = Reading::parse(io, device, depth, chunk).map_err(|why| format!("it is damaged ({why})"))?;
    // It is shown to people: a day, whatever was written there.
    let date: String = stored.date.chars().filter(|c| c.is_ascii_digit() || *c == '-').take(10).collect();
    let gb_s = stored.gb_s.filter(|gb_s| gb_s.is_finite() && *gb_s > 0.0);
    Ok(Profile { key: stored.key, date, reading, reason: stored.reason, gb_s })
}

/// Today, in UTC.
pub fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    date_of(seconds)
}

/// The day of the Gregorian calendar that lies so many seconds after the beginning of 1970.
fn date_of(seconds: u64) -> String {
    // Days since 0000-03-01, in eras of 400 years; a year that begins in March has its leap day last.
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::cli::args::Chunk;
    use crate::engine::Depth;
    use millstream_io::{DeviceKind, IoMode};

    fn key() -> Key {
        let text = |text: &str| text.to_owned();
        let (cpu, kernel, fs, device) = (text("A CPU"), text("6.18.0"), text("ext4"), text("nvme0n1"));
        Key { cpu, cores: 8, kernel, fs, device, model: text("00112233445566ff") }
    }

    fn profile() -> Profile {
        let reading = Reading {
            io: IoMode::Buffered,
            device: DeviceKind::Threads,
            depth: Depth::Slabs(8),
            chunk: Chunk::Bytes(1 << 20),
        };
        Profile { key: key(), date: "2024-02-29".to_owned(), reading, reason: "faster".to_owned(), gb_s: Some(2.5) }
    }

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (seconds, date) in [
            (0, "1970-01-01"),
            (86_399, "1970-01-01"),
            (86_400, "1970-01-02"),
            // date -u -d 2000-02-29 +%s, and so on.
            (951_782_400, "2000-02-29"),
            (1_709_164_800, "2024-02-29"),
            (1_709_251_200, "2024-03-01"),
            (1_735_689_599, "2024-12-31"),
            (4_107_542_400, "2100-03-01"),
        ] {
            assert_eq!(date_of(seconds), date);
        }
    }

    #[test]
    fn a_profile_is_read_as_it_was_saved_and_nothing_lies_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = save(dir.path(), &profile()).unwrap();
        assert_eq!(parse(&fs::read(&path).unwrap(), &key()), Ok(profile()));
        let best = Profile { reading: Reading::DEFAULT, ..profile() };
        assert_eq!(save(dir.path(), &best).unwrap(), path, "one file for one key");
        assert_eq!(parse(&fs::read(&path).unwrap(), &key()), Ok(best));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn whatever_differs_in_the_key_is_another_profile() {
        let text = |text: &str| text.to_owned();
        let others = [
            Key { cpu: text("B CPU"), ..key() },
            Key { cores: 4, ..key() },
            Key { kernel: text("6.19.0"), ..key() },
            Key { fs: text("xfs"), ..key() },
            Key { device: text("nvme1n1"), ..key() },
            Key { model: text("ff00"), ..key() },
        ];
        let dir = tempfile::tempdir().unwrap();
        let saved = fs::read(save(dir.path(), &profile()).unwrap()).unwrap();
        for other in others {
            assert_ne!(other.file_name(), key().file_name());
            assert!(parse(&saved, &other).unwrap_err().contains("another machine"));
        }
    }

    #[test]
    fn what_cannot_be_used_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let saved = fs::read_to_string(save(dir.path(), &profile()).unwrap()).unwrap();
        for (from, to, words) in [
            ("{", "", "damaged"),
            ("\"schema_version\": 1", "\"schema_version\": 2", "its version is 2"),
            ("\"schema_version\": 1", "\"schema_version\": \"x\"", "no schema_version"),
            ("\"io\": \"buffered\"", "\"io\": \"direct\"", "may be refused"),
            ("\"depth\": \"8\"", "\"depth\": \"0\"", "0"),
            ("\"depth\": \"8\",", "", "missing field"),
            ("\"kernel\": \"6.18.0\"", "\"kernel\": \"5.0\"", "another machine"),
        ] {
            assert!(saved.contains(from), "{from} in {saved}");
            let why = parse(saved.replacen(from, to, 1).as_bytes(), &key()).unwrap_err();
            assert!(why.contains(words), "{why}");
        }
        assert!(parse(b"", &key()).is_err() && parse(b"[]", &key()).is_err() && parse(&[0xff; 9], &key()).is_err());
    }
}

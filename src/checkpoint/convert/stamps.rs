//! Which files a conversion was made from: what tells, when they are to go, whether they are still those.
//!
//! That two sources have the same headers and samples does not make them one. A file whose number, length and times of
//! modification and change are what they were has not been written to since, and then what was made from it need not be
//! made again to know that. The times of change are the kernel's own: no program sets them back.

use crate::checkpoint::error::{Result, io_error};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Name of the file beside the result that holds them.
pub(crate) const STAMPS_NAME: &str = ".millstream-source.json";

/// A stamp for each shard of a source, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamps(BTreeMap<String, String>);

impl Stamps {
    /// Of the files at these paths, as they are.
    pub fn of<'a>(paths: impl Iterator<Item = &'a PathBuf>) -> Result<Stamps> {
        let stamp = |path: &'a PathBuf| Ok((name(path), stamp(path)?));
        paths.map(stamp).collect::<Result<_>>().map(Stamps)
    }

    /// Those that an earlier run left in `dst`. Without them everything is compared, so that what cannot be read counts
    /// as none.
    pub fn read(dst: &Path) -> Stamps {
        let text = crate::checkpoint::config::read_small(&dst.join(STAMPS_NAME)).unwrap_or_default();
        Stamps(serde_json::from_slice(&text).unwrap_or_default())
    }

    /// The bytes of the file that holds them.
    pub fn bytes(&self) -> Vec<u8> {
        let map: serde_json::Map<String, Value> =
            self.0.iter().map(|(name, stamp)| (name.clone(), stamp.clone().into())).collect();
        format!("{:#}\n", Value::Object(map)).into_bytes()
    }

    /// Whether the file at `path` is in both, and the same.
    pub fn agree(&self, other: &Stamps, path: &Path) -> bool {
        let name = name(path);
        self.0.get(&name).is_some_and(|stamp| other.0.get(&name) == Some(stamp))
    }
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// The device is left out: its number may be another after the machine was started again.
fn stamp(path: &Path) -> Result<String> {
    let found = fs::metadata(path).map_err(io_error("look at", path))?;
    let mut hasher = Xxh3::new();
    for number in [found.mtime(), found.mtime_nsec(), found.ctime(), found.ctime_nsec()] {
        hasher.update(&number.to_le_bytes());
    }
    hasher.update(&found.ino().to_le_bytes());
    hasher.update(&found.len().to_le_bytes());
    Ok(format!("{:016x}", hasher.digest()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    #[test]
    fn a_file_that_was_written_to_replaced_or_set_back_in_time_is_another() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a", "b", "c", "d"].map(|name| dir.path().join(name));
        paths.iter().for_each(|path| fs::write(path, "0123456789").unwrap());
        let [same, rewritten, replaced, set_back] = &paths;
        let before = Stamps::of(paths.iter()).unwrap();
        fs::write(dir.path().join(STAMPS_NAME), before.bytes()).unwrap();
        // Longer than any file system's idea of now.
        std::thread::sleep(Duration::from_millis(20));
        let times = fs::metadata(set_back).unwrap().modified().unwrap();
        fs::write(rewritten, "9876543210").unwrap();
        fs::write(dir.path().join("new"), "0123456789").unwrap();
        fs::rename(dir.path().join("new"), replaced).unwrap();
        fs::write(set_back, "9876543210").unwrap();
        let file = fs::File::options().write(true).open(set_back).unwrap();
        file.set_times(fs::FileTimes::new().set_modified(times)).unwrap();
        assert!(times <= SystemTime::now());
        let (earlier, now) = (Stamps::read(dir.path()), Stamps::of(paths.iter()).unwrap());
        assert_eq!(earlier, before);
        assert_eq!(paths.each_ref().map(|path| now.agree(&earlier, path)), [true, false, false, false]);
        assert!(now.agree(&now, same) && !now.agree(&now, &dir.path().join("e")));
        fs::write(dir.path().join(STAMPS_NAME), "{\"a\":").unwrap();
        assert_eq!(Stamps::read(dir.path()), Stamps::default());
    }
}

//! A source whose shards are removed as they are converted, and what is remembered of them.
//!
//! Without its headers nobody could say any more what a source was, nor go on converting the rest of it. Before the first
//! shard is removed a record of all of them is made durable beside them: name, length, header, and a hash of samples of
//! the weights. From then on a shard that is missing is one that was removed, not one that was never there.

use super::error::{CheckpointError, Result, io_error, is_there};
use super::tensors::Headers;
use crate::limits::{MAX_HEADER_BYTES, MAX_RECORD_BYTES};
use crate::size;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Name of the record.
pub(crate) const RECORD_NAME: &str = ".millstream-consumed.json";
const TEMPORARY_NAME: &str = ".millstream-consumed.json.tmp";
const VERSION: u32 = 1;

/// What is remembered of a source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    version: u32,
    /// The directory its shards are converted into.
    pub into: PathBuf,
    pub shards: Vec<Remembered>,
}

/// A shard of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Remembered {
    pub name: String,
    pub bytes: u64,
    /// Hash of samples of its weights.
    pub sample: u64,
    /// As it is in the file.
    pub header: String,
}

impl Record {
    /// Remembers shards, each with the hash of its samples, before they are converted into `into`.
    pub fn of(shards: &[(PathBuf, u64)], into: &Path) -> Result<Record> {
        let into = fs::canonicalize(into).map_err(io_error("look at", into))?;
        let shards = shards.iter().map(|(path, sample)| remember(path, *sample)).collect::<Result<_>>()?;
        Ok(Record { version: VERSION, into, shards })
    }

    /// The record of the source in `dir`; `None` where none of its shards was ever to be removed.
    pub fn read(dir: &Path) -> Result<Option<Record>> {
        let path = dir.join(RECORD_NAME);
        if !is_there(&path)? {
            return Ok(None);
        }
        let fault = |expected: &str, found: String| CheckpointError::Record {
            file: path.clone(),
            expected: expected.to_owned(),
            found,
        };
        let mut bytes = Vec::new();
        let file = File::open(&path).map_err(io_error("open", &path))?;
        file.take(MAX_RECORD_BYTES + 1).read_to_end(&mut bytes).map_err(io_error("read", &path))?;
        if bytes.len() as u64 > MAX_RECORD_BYTES {
            return Err(fault("a record of shards", format!("more than {}", size::show(MAX_RECORD_BYTES))));
        }
        let record: Record =
            serde_json::from_slice(&bytes).map_err(|error| fault("a record of shards", error.to_string()))?;
        match record.odd() {
            _ if record.version != VERSION => Err(fault("version 1", record.version.to_string())),
            Some(odd) => Err(fault("names of files", odd.name.escape_debug().to_string())),
            None => Ok(Some(record)),
        }
    }

    /// A shard whose name leads elsewhere, which would have something else taken for it.
    fn odd(&self) -> Option<&Remembered> {
        self.shards.iter().find(|shard| Path::new(&shard.name).file_name() != Some(shard.name.as_ref()))
    }

    /// Makes the record durable in `dir`. Refuses one that could not be read again.
    pub fn write(&self, dir: &Path) -> Result<()> {
        self.write_within(dir, MAX_RECORD_BYTES)
    }

    fn write_within(&self, dir: &Path, most_bytes: u64) -> Result<()> {
        let unreadable = |expected: String, found: String| {
            let what = "--delete-source".to_owned();
            Err(CheckpointError::ConvertOptions { what, expected, found })
        };
        if let Some(odd) = self.odd() {
            let expected = "shards with names that can be recorded".to_owned();
            return unreadable(expected, odd.name.escape_debug().to_string());
        }
        let text = serde_json::to_vec(self).unwrap_or_else(|error| unreachable!("a record is plain data: {error}"));
        if text.len() as u64 > most_bytes {
            let expected = format!("a source whose headers are recorded in {}", size::show(most_bytes));
            return unreadable(expected, size::show(text.len() as u64));
        }
        let refused = |source| CheckpointError::SourceKept { dir: dir.to_owned(), source };
        let temporary = dir.join(TEMPORARY_NAME);
        let mut file = File::create(&temporary).map_err(refused)?;
        file.write_all(&text).and_then(|()| file.sync_all()).map_err(refused)?;
        fs::rename(&temporary, dir.join(RECORD_NAME)).map_err(refused)?;
        sync(dir)
    }

    /// Headers by name, for opening the source as it was.
    pub fn headers(&self) -> Headers {
        self.shards.iter().map(|shard| (shard.name.clone(), (shard.bytes, shard.header.clone()))).collect()
    }

    /// What is remembered of the shard at `path`.
    pub fn find(&self, path: &Path) -> Option<&Remembered> {
        self.shards.iter().find(|shard| path.file_name() == Some(shard.name.as_ref()))
    }

    /// Shards of the source in `dir` that are gone.
    pub fn gone(&self, dir: &Path) -> Result<Vec<String>> {
        let mut gone = Vec::new();
        for shard in &self.shards {
            if !is_there(&dir.join(&shard.name))? {
                gone.push(shard.name.clone());
            }
        }
        Ok(gone)
    }
}

/// A source that was consumed, in part or whole, is no model any more.
pub(crate) fn refuse_consumed(dir: &Path) -> Result<()> {
    let Some(record) = Record::read(dir)? else { return Ok(()) };
    match record.gone(dir)?.len() {
        0 => Ok(()),
        gone => Err(CheckpointError::Consumed { dir: dir.to_owned(), into: record.into, gone }),
    }
}

/// The right to remove shards of a source, which one process has at a time: another's record would name another place
/// that they were converted into.
pub(crate) struct Lock(Option<File>);

impl Lock {
    /// Takes the lock of the source in `dir`. A file system without locks has none.
    pub fn take(dir: &Path) -> Result<Lock> {
        let file = File::open(dir).map_err(io_error("open", dir))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock(Some(file))),
            Err(TryLockError::WouldBlock) => Err(CheckpointError::SourceBusy { dir: dir.to_owned() }),
            Err(TryLockError::Error(_)) => Ok(Lock(None)),
        }
    }
}

impl Drop for Lock {
    /// Closing alone would not do: a process that this one is just starting has the descriptor too, until it runs.
    fn drop(&mut self) {
        // The lock ends with the process at the latest.
        let _ = self.0.as_ref().map(File::unlock);
    }
}

/// Removes shards of the source in `dir`, those that are not gone already, and makes that durable.
pub(crate) fn remove(dir: &Path, shards: &[PathBuf]) -> Result<()> {
    for path in shards {
        match fs::remove_file(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => other.map_err(io_error("remove", path))?,
        }
    }
    if shards.is_empty() { Ok(()) } else { sync(dir) }
}

fn sync(dir: &Path) -> Result<()> {
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(io_error("sync", dir))
}

fn remember(path: &Path, sample: u64) -> Result<Remembered> {
    let file = File::open(path).map_err(io_error("open", path))?;
    let mut prefix = [0; 8];
    file.read_exact_at(&mut prefix, 0).map_err(io_error("read", path))?;
    let mut header = vec![0; u64::from_le_bytes(prefix).min(MAX_HEADER_BYTES) as usize];
    file.read_exact_at(&mut header, 8).map_err(io_error("read", path))?;
    let header = String::from_utf8(header).map_err(|error| CheckpointError::Header {
        file: path.to_owned(),
        tensor: None,
        what: "header",
        expected: "UTF-8".to_owned(),
        found: error.to_string(),
    })?;
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_owned();
    let bytes = file.metadata().map_err(io_error("read", path))?.len();
    Ok(Remembered { name, bytes, sample, header })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> Record {
        let shard = Remembered { name: name.to_owned(), bytes: 10, sample: u64::MAX, header: "{\"a\":1}".to_owned() };
        Record { version: VERSION, into: "/models/out".into(), shards: vec![shard] }
    }

    #[test]
    fn a_record_is_read_as_it_was_written_and_tells_what_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Record::read(dir.path()).unwrap().is_none());
        let written = record("a.safetensors");
        written.write(dir.path()).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Some(written.clone()));
        assert_eq!(written.gone(dir.path()).unwrap(), ["a.safetensors"]);
        assert!(matches!(refuse_consumed(dir.path()), Err(CheckpointError::Consumed { gone: 1, .. })));
        fs::write(dir.path().join("a.safetensors"), "").unwrap();
        refuse_consumed(dir.path()).unwrap();
    }

    #[test]
    fn a_shard_that_is_gone_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let [gone, here] = ["a.safetensors", "b.safetensors"].map(|name| dir.path().join(name));
        fs::write(&here, "").unwrap();
        remove(dir.path(), &[gone, here.clone()]).unwrap();
        assert!(!here.exists());
    }

    #[test]
    fn a_record_that_cannot_be_one_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        for name in ["../a.safetensors", "/etc/passwd", "", ".."] {
            fs::write(dir.path().join(RECORD_NAME), serde_json::to_vec(&record(name)).unwrap()).unwrap();
            let error = Record::read(dir.path()).unwrap_err();
            assert!(error.to_string().contains("names of files"), "{error}");
            assert!(error.hint().contains("fetch those shards again"), "{}", error.hint());
        }
        for text in ["", "{", "[]", "{\"version\":1}", "{\"version\":2,\"into\":\"/\",\"shards\":[]}"] {
            fs::write(dir.path().join(RECORD_NAME), text).unwrap();
            assert!(Record::read(dir.path()).is_err(), "{text}");
        }
    }
    #[test]
    fn a_record_that_could_not_be_read_again_is_not_written() {
        let dir = tempfile::tempdir().unwrap();
        let error = record("../a.safetensors").write(dir.path()).unwrap_err().to_string();
        assert!(error.contains("--delete-source") && error.contains("../a.safetensors"), "{error}");
        let whole = record("a.safetensors");
        let bytes = serde_json::to_vec(&whole).unwrap().len() as u64;
        let error = whole.write_within(dir.path(), bytes - 1).unwrap_err().to_string();
        assert!(error.contains("--delete-source") && error.contains(&format!("found {bytes} B")), "{error}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        whole.write_within(dir.path(), bytes).unwrap();
        assert_eq!(Record::read(dir.path()).unwrap(), Some(whole));
    }
}

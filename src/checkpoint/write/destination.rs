//! The directory a model is written into: whose it is, what is finished in it, and how files appear in it.

use super::layout::{HASHES_KEY, PARAMETERS_KEY, SOURCE_KEY, ShardLayout, ShardPlan};
use crate::checkpoint::UNFINISHED_NAME;
use crate::checkpoint::config::read_small;
use crate::checkpoint::error::{CheckpointError, Result, Way, io_error, is_there};
use crate::checkpoint::header;
use crate::checkpoint::index::INDEX_NAME;
use crate::checkpoint::tensors::shard_paths;
use millstream_io::FileId;
use serde_json::{Map, Value, json};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

const TEMPORARY_PREFIX: &str = ".millstream-";
const TEMPORARY_SUFFIX: &str = ".tmp";

/// A small file of a model: name and bytes.
pub(crate) type SmallFile = (&'static str, Vec<u8>);

pub(crate) struct Destination {
    dir: PathBuf,
    /// The directory; where it is written into it is locked until that ends: of two that write the same files under the
    /// same temporary names, one would publish what the other has half written. The lock is on the directory because that
    /// is neither renamed nor removed while it is written into, as the files in it are; it goes with the process that held
    /// it.
    opened: File,
    /// What the marker of unfinished writing says.
    marker: String,
    small_files: Vec<SmallFile>,
}

impl Destination {
    /// Makes `dst` if need be, refuses one that somebody else writes into or with other contents, and removes what a
    /// killed run left half written.
    pub fn prepare(
        dst: &Path,
        shards: &[ShardPlan],
        small_files: Vec<SmallFile>,
        identity: &str,
        parameters: &str,
    ) -> Result<Destination> {
        make_dir(dst)?;
        let destination = Destination::of(dst, lock(dst)?, shards, small_files, identity, parameters)?;
        destination.remove_leftovers()?;
        Ok(destination)
    }

    /// As [`Destination::prepare`], to look at what is there: changes nothing, and locks out nobody.
    pub fn look(
        dst: &Path,
        shards: &[ShardPlan],
        small_files: Vec<SmallFile>,
        identity: &str,
        parameters: &str,
    ) -> Result<Destination> {
        let opened = File::open(dst).map_err(io_error("open", dst))?;
        Destination::of(dst, opened, shards, small_files, identity, parameters)
    }

    /// The directory that is open, if what it holds is of this writing.
    fn of(
        dst: &Path,
        opened: File,
        shards: &[ShardPlan],
        small_files: Vec<SmallFile>,
        identity: &str,
        parameters: &str,
    ) -> Result<Destination> {
        let marker = format!("{parameters} source={identity}");
        let destination = Destination { dir: dst.to_owned(), opened, marker, small_files };
        destination.check_owner(shards)?;
        Ok(destination)
    }

    /// The hashes of those shards of the plan that are there already, whole.
    pub fn finished(&self, shards: &[ShardPlan], layouts: &[ShardLayout]) -> Result<Vec<Option<Vec<u64>>>> {
        let mut finished = Vec::with_capacity(shards.len());
        for (shard, layout) in shards.iter().zip(layouts) {
            let path = self.dir.join(&shard.file_name);
            finished.push(if is_there(&path)? { Some(self.hashes_of(&path, layout)?) } else { None });
        }
        Ok(finished)
    }

    /// Whether what is removed on this device makes room here.
    pub fn is_on(&self, device: u64) -> Result<bool> {
        Ok(self.opened.metadata().map_err(io_error("look at", &self.dir))?.dev() == device)
    }

    /// Refuses to begin where there is no room for `shard_bytes`, the most that the shards take at any time.
    pub fn check_space(&self, shard_bytes: u64, free_bytes: Option<u64>) -> Result<()> {
        let small_bytes: u64 = self.small_files.iter().map(|(_, bytes)| bytes.len() as u64).sum();
        let needed = shard_bytes + small_bytes;
        let available = match free_bytes {
            Some(bytes) => bytes,
            None => millstream_io::free_bytes(&self.dir).map_err(io_error("ask the free space of", &self.dir))?,
        };
        if shard_bytes > 0 && needed > available {
            // Where nothing can be written, room is not what is wanting.
            let trial = self.temporary("room");
            let tried = File::create(&trial).and_then(|_| fs::remove_file(&trial));
            let forbidden = [ErrorKind::ReadOnlyFilesystem, ErrorKind::PermissionDenied];
            if let Err(refused) = tried
                && forbidden.contains(&refused.kind())
            {
                return Err(io_error("write", &trial)(refused));
            }
            return Err(CheckpointError::NoSpace { dir: self.dir.clone(), needed, available });
        }
        Ok(())
    }

    /// Marks the directory as unfinished, so that it does not open as a model until it is one.
    pub fn begin(&self) -> Result<()> {
        self.write_small(UNFINISHED_NAME, format!("{}\n", json!({ "conversion": self.marker })).as_bytes())
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn interrupted(&self) -> CheckpointError {
        CheckpointError::Interrupted { dir: self.dir.clone() }
    }

    /// Where to write a file before it gets its name.
    pub fn temporary(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{TEMPORARY_PREFIX}{}{TEMPORARY_SUFFIX}", name.trim_start_matches('.')))
    }

    /// Gives a durable file its name.
    pub fn publish(&self, temporary: &Path, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        fs::rename(temporary, &path).map_err(io_error("rename", temporary))?;
        self.sync()
    }

    /// Adds the small files and the index.
    pub fn add_small_files(&self, shards: &[ShardPlan]) -> Result<()> {
        for (name, bytes) in &self.small_files {
            self.write_small(name, bytes)?;
        }
        self.write_small(INDEX_NAME, self.index(shards)?.as_bytes())
    }

    /// Takes the mark of [`Destination::begin`] away, where there is one: the directory is a model.
    pub fn end(&self) -> Result<()> {
        self.remove_small(UNFINISHED_NAME)
    }

    /// Removes a small file, where there is one.
    pub fn remove_small(&self, name: &str) -> Result<()> {
        let path = self.dir.join(name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => other.map_err(io_error("remove", &path))?,
        }
        self.sync()
    }

    /// Removes all that is written here.
    pub fn discard(&self, shards: &[ShardPlan]) {
        let small_files = self.small_files.iter().map(|(name, _)| *name);
        let shards = shards.iter().map(|shard| shard.file_name.as_str());
        // The marker goes last: what cannot be removed does not open as a model.
        for name in shards.chain(small_files).chain([INDEX_NAME, UNFINISHED_NAME]) {
            // A file that is not there is as it should be; one that stays is for its owner to see to.
            let _ = fs::remove_file(self.dir.join(name));
        }
    }

    /// Whatever is in the directory must be of this writing: same source, same parameters, no other shards.
    fn check_owner(&self, shards: &[ShardPlan]) -> Result<()> {
        let marker = self.dir.join(UNFINISHED_NAME);
        let mut ours = false;
        if is_there(&marker)? {
            let value: Value = serde_json::from_slice(&read_small(&marker)?).unwrap_or_default();
            self.check_parameters(value["conversion"].as_str().unwrap_or("an unreadable record"))?;
            ours = true;
        }
        for path in shard_paths(&self.dir)? {
            let planned = shards.iter().any(|shard| path.ends_with(&shard.file_name));
            let metadata = match header::read(&path, FileId(0)) {
                Err(error) if planned => return Err(damaged(error)),
                read => read?.metadata,
            };
            match (metadata.get(PARAMETERS_KEY), metadata.get(SOURCE_KEY)) {
                (Some(parameters), Some(source)) => {
                    self.check_parameters(&format!("{parameters} source={source}"))?;
                }
                _ => return Err(self.occupied(path)),
            }
            if !planned {
                return Err(self.occupied(path));
            }
            ours = true;
        }
        for (name, bytes) in &self.small_files {
            let path = self.dir.join(name);
            if !ours && is_there(&path)? && read_small(&path)? != *bytes {
                return Err(self.occupied(path));
            }
        }
        Ok(())
    }

    fn check_parameters(&self, found: &str) -> Result<()> {
        if found == self.marker {
            return Ok(());
        }
        let (wanted, found) = (differing(&self.marker, found), differing(found, &self.marker));
        let finished = !is_there(&self.dir.join(UNFINISHED_NAME))?;
        Err(CheckpointError::ConvertDiffers { dir: self.dir.clone(), wanted, found, finished, way: Way::Another })
    }

    fn occupied(&self, file: PathBuf) -> CheckpointError {
        CheckpointError::ConvertOccupied { dir: self.dir.clone(), file }
    }

    fn remove_leftovers(&self) -> Result<()> {
        for entry in fs::read_dir(&self.dir).map_err(io_error("list", &self.dir))? {
            let path = entry.map_err(io_error("list", &self.dir))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if name.starts_with(TEMPORARY_PREFIX) && name.ends_with(TEMPORARY_SUFFIX) {
                fs::remove_file(&path).map_err(io_error("remove", &path))?;
            }
        }
        Ok(())
    }

    /// A shard has its name only when it is whole; its header must be the planned one, whatever its hashes.
    fn hashes_of(&self, path: &Path, layout: &ShardLayout) -> Result<Vec<u64>> {
        let metadata = header::read(path, FileId(0)).map_err(damaged)?.metadata;
        let other = || {
            let damage = "its header is another than this conversion writes".to_owned();
            CheckpointError::Damaged { file: path.to_owned(), damage, gone: Vec::new() }
        };
        let hashes: Map<String, Value> =
            metadata.get(HASHES_KEY).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
        let hash = |name: &String| u64::from_str_radix(hashes.get(name)?.as_str()?, 16).ok();
        let Some(hashes) = layout.run_names().iter().map(hash).collect::<Option<Vec<u64>>>() else {
            return Err(other());
        };
        let planned = layout.header(&hashes);
        let mut found = Vec::with_capacity(planned.len());
        let file = File::open(path).map_err(io_error("open", path))?;
        file.take(planned.len() as u64).read_to_end(&mut found).map_err(io_error("read", path))?;
        if found != planned {
            return Err(other());
        }
        Ok(hashes)
    }

    /// Refuses a shard whose header is not the planned one with these hashes: it says where everything lies.
    pub fn check_header(&self, path: &Path, layout: &ShardLayout, hashes: &[u64]) -> Result<()> {
        match self.hashes_of(path, layout) {
            Ok(found) if found == hashes => Ok(()),
            Ok(_) | Err(CheckpointError::Damaged { .. }) => {
                let damage = "its header is another than was written".to_owned();
                Err(CheckpointError::ReadBack { file: path.to_owned(), damage })
            }
            Err(error) => Err(error),
        }
    }

    fn index(&self, shards: &[ShardPlan]) -> Result<String> {
        let mut weight_map = std::collections::BTreeMap::new();
        let mut total = 0;
        for shard in shards {
            let path = self.dir.join(&shard.file_name);
            for (name, tensor) in header::read(&path, FileId(0))?.tensors {
                if !name.starts_with(crate::checkpoint::tensors::PAD_PREFIX) {
                    total += tensor.bytes;
                    weight_map.insert(name, shard.file_name.clone());
                }
            }
        }
        let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
        Ok(format!("{}\n", serde_json::to_string_pretty(&index).unwrap_or_default()))
    }

    /// Writes a small file, whole or not at all.
    pub fn write_small(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let temporary = self.temporary(name);
        let mut file = File::create(&temporary).map_err(io_error("create", &temporary))?;
        file.write_all(bytes).map_err(io_error("write", &temporary))?;
        file.sync_all().map_err(io_error("sync", &temporary))?;
        self.publish(&temporary, name)
    }

    fn sync(&self) -> Result<()> {
        self.opened.sync_all().map_err(io_error("sync", &self.dir))
    }
}

/// A header that breaks the format, of a shard that this program wrote.
fn damaged(error: CheckpointError) -> CheckpointError {
    match error {
        CheckpointError::Header { file, tensor, what, expected, found } => {
            let place = tensor.map_or(String::new(), |tensor| format!("tensor {tensor}: "));
            let damage = format!("{place}{what}: expected {expected}, found {found}");
            CheckpointError::Damaged { file, damage, gone: Vec::new() }
        }
        other => other,
    }
}

/// Those of the parameters `of` that `other` lacks.
fn differing(of: &str, other: &str) -> String {
    let others: Vec<&str> = other.split(' ').collect();
    of.split(' ').filter(|parameter| !others.contains(parameter)).collect::<Vec<_>>().join(" ")
}

impl Drop for Destination {
    /// Closing alone would not do: a process that this one is just starting has the descriptor too, until it runs.
    fn drop(&mut self) {
        // The lock ends with the process at the latest.
        let _ = self.opened.unlock();
    }
}

/// Makes `dir` and what is missing above it, and makes each name durable: one that a power cut takes has all with it that
/// was made durable below.
fn make_dir(dir: &Path) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let above = match dir.parent() {
        Some(above) if above.as_os_str().is_empty() => Path::new("."),
        Some(above) => above,
        None => dir,
    };
    if above != dir {
        make_dir(above)?;
    }
    match fs::create_dir(dir) {
        // Somebody else has made it.
        Err(_) if dir.is_dir() => {}
        other => other.map_err(io_error("create", dir))?,
    }
    File::open(above).and_then(|above| above.sync_all()).map_err(io_error("sync", above))
}

/// Opens `dir` and locks it against others who write into it.
fn lock(dir: &Path) -> Result<File> {
    let file = File::open(dir).map_err(io_error("open", dir))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => Err(CheckpointError::ConvertBusy { dir: dir.to_owned() }),
        Err(TryLockError::Error(source)) => Err(io_error("lock", dir)(source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_directories_are_made_one_below_the_other_and_what_is_in_the_way_is_named() {
        let home = tempfile::tempdir().unwrap();
        for deep in ["a", "a/b/c/d", "a/b", "x/../y"] {
            make_dir(&home.path().join(deep)).unwrap();
            assert!(home.path().join(deep).is_dir(), "{deep}");
        }
        fs::write(home.path().join("file"), "").unwrap();
        for (below, named) in [("file", "file: "), ("file/a", "file: "), ("a/../file/b/c", "a/../file: ")] {
            let error = make_dir(&home.path().join(below)).unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
            assert!(error.hint().contains("a file is where a directory should be"), "{}", error.hint());
        }
    }
}

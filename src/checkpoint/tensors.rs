//! Where every tensor of a model lies: the headers of its safetensors shards, checked before anything trusts them.

use super::error::{CheckpointError, Result, io_error};
use super::header::{self, Header};
use super::index;
use super::names::NameMap;
use crate::limits::{HEADER_SHARDS_MIN, HEADER_THREADS_MAX, MAX_NUMBERED_SHARDS};
use millstream_io::{FileId, FileSpan};
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};

/// Tensors of this prefix only fill space between others.
pub const PAD_PREFIX: &str = "__pad__";
/// Digits of the number in a shard's name.
const NUMBER_DIGITS: usize = 5;

/// Headers of shards by file name, each with the length of its file.
pub(crate) type Headers = BTreeMap<String, (u64, String)>;

/// Element type of a tensor, as safetensors names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Dtype {
    F64,
    F32,
    F16,
    Bf16,
    F8E4M3,
    F8E5M2,
    F8E8M0,
    I64,
    I32,
    I16,
    I8,
    U64,
    U32,
    U16,
    U8,
    Bool,
}

impl Dtype {
    const NAMES: [(&'static str, Dtype); 16] = [
        ("F64", Dtype::F64),
        ("F32", Dtype::F32),
        ("F16", Dtype::F16),
        ("BF16", Dtype::Bf16),
        ("F8_E4M3", Dtype::F8E4M3),
        ("F8_E5M2", Dtype::F8E5M2),
        ("F8_E8M0", Dtype::F8E8M0),
        ("I64", Dtype::I64),
        ("I32", Dtype::I32),
        ("I16", Dtype::I16),
        ("I8", Dtype::I8),
        ("U64", Dtype::U64),
        ("U32", Dtype::U32),
        ("U16", Dtype::U16),
        ("U8", Dtype::U8),
        ("BOOL", Dtype::Bool),
    ];

    /// The type of this name, or `None` for one this engine has no use for.
    pub fn from_name(name: &str) -> Option<Dtype> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, dtype)| dtype)
    }

    /// The name in a safetensors header.
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|&&(_, dtype)| dtype == self).map_or("?", |&(name, _)| name)
    }

    /// Bytes of one element.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F16 | Dtype::Bf16 | Dtype::I16 | Dtype::U16 => 2,
            _ => 1,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One tensor: its type, shape and place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// The shard, as an index into [`TensorMap::paths`].
    pub file: FileId,
    /// First byte, from the start of the file.
    pub offset: u64,
    /// Length in bytes; equals the shape's product times the size of an element.
    pub bytes: u64,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, slowest first; empty for a scalar.
    pub shape: Vec<u64>,
}

impl TensorInfo {
    /// The bytes of the tensor.
    pub fn span(&self) -> FileSpan {
        FileSpan { file: self.file, offset: self.offset, len: self.bytes }
    }

    /// Type and shape for a message: `BF16 [64, 32]`.
    pub fn describe(&self) -> String {
        format!("{} {:?}", self.dtype, self.shape)
    }
}

/// Every tensor of a model directory, by name.
#[derive(Debug)]
pub struct TensorMap {
    dir: PathBuf,
    paths: Vec<PathBuf>,
    tensors: NameMap<TensorInfo>,
    stamps: HashMap<String, String>,
    metadata: Vec<HashMap<String, String>>,
    notes: Vec<String>,
    hash: u64,
    file_bytes: u64,
}

impl TensorMap {
    /// Reads and checks the headers of every `*.safetensors` file of `dir`, and the index where there is one.
    ///
    /// No weight is read. Files are ordered by name; links, as download caches make them, are followed.
    pub fn open(dir: &Path) -> Result<TensorMap> {
        TensorMap::open_remembering(dir, &Headers::new())
    }

    /// As [`TensorMap::open`], with the shards that are not there any more and whose headers are in `remembered`.
    pub(crate) fn open_remembering(dir: &Path, remembered: &Headers) -> Result<TensorMap> {
        let mut paths = shard_paths(dir)?;
        let gone: HashMap<PathBuf, &(u64, String)> = remembered
            .iter()
            .map(|(name, header)| (dir.join(name), header))
            .filter(|(path, _)| paths.binary_search(path).is_err())
            .collect();
        paths.extend(gone.keys().cloned());
        paths.sort();
        if paths.is_empty() {
            return Err(CheckpointError::NoShards { dir: dir.to_owned() });
        }
        let mut notes = Vec::new();
        let json = index::read(dir)?;
        let index = match &json {
            Some(json) => index::parse(dir, json, &paths, &mut notes)?,
            None => None,
        };
        let mut map = TensorMap {
            dir: dir.to_owned(),
            tensors: NameMap::default(),
            stamps: HashMap::new(),
            metadata: Vec::with_capacity(paths.len()),
            notes,
            hash: 0,
            file_bytes: 0,
            paths,
        };
        let mut hasher = xxhash_rust::xxh3::Xxh3::new();
        let headers = read_headers(&map.paths, &gone);
        map.tensors.reserve(headers.iter().flatten().map(|header| header.tensors.len()).sum());
        for (file, header) in headers.into_iter().enumerate() {
            let header = header?;
            hasher.update(&header.hash.to_le_bytes());
            map.file_bytes += header.file_bytes;
            map.add(file, header)?;
        }
        map.hash = hasher.digest();
        if let Some(index) = index {
            index.check(&map)?.into_iter().for_each(|note| map.notes.push(note));
        }
        Ok(map)
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// Names and tensors, in no particular order, without padding.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// How many tensors there are, without padding.
    pub fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether no shard holds any tensor.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The model directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The shards, sorted by name; a [`FileId`] is an index into them.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The shard of a file id of this map.
    pub fn path(&self, file: FileId) -> &Path {
        &self.paths[file.0 as usize]
    }

    /// `__metadata__` of a shard.
    pub fn metadata(&self, file: FileId) -> &HashMap<String, String> {
        &self.metadata[file.0 as usize]
    }

    /// Names of shards that are not there, where the others are numbered: those between two that are, and up to the number
    /// of all where names have it.
    pub(crate) fn absent(&self) -> Vec<String> {
        let names = self.paths.iter().map(|path| path.file_name()?.to_str()?.strip_suffix(".safetensors"));
        let numbered = |name: Option<&str>| {
            let name = name?;
            let (counted, of) = name.split_once("-of-").map_or((name, None), |(counted, of)| (counted, Some(of)));
            let (kind, number) = counted.rsplit_once('-').filter(|(_, number)| number.len() == NUMBER_DIGITS)?;
            Some((number.parse::<u32>().ok()?, kind.to_owned(), of.map(str::to_owned)))
        };
        let Some(numbers) = names.map(numbered).collect::<Option<Vec<_>>>() else { return Vec::new() };
        let is_one_series = numbers.windows(2).all(|two| (&two[0].1, &two[0].2) == (&two[1].1, &two[1].2));
        let (Some((first, kind, of)), Some((last, ..))) = (numbers.first(), numbers.last()) else { return Vec::new() };
        let (first, last) = match of.as_ref().map(|of| of.parse::<u32>().unwrap_or(*last)) {
            // Numbered from 1, or from 0.
            Some(all) => ((*first).min(1), all.min(MAX_NUMBERED_SHARDS).saturating_sub(u32::from(*first == 0))),
            None => (*first, *last),
        };
        let of = of.as_ref().map_or_else(String::new, |of| format!("-of-{of}"));
        let is_here = |number: &u32| numbers.iter().any(|(here, ..)| here == number);
        let absent = (first..=last).filter(|number| is_one_series && !is_here(number));
        absent.map(|number| format!("{kind}-{number:0NUMBER_DIGITS$}{of}.safetensors")).collect()
    }

    /// The format a container's metadata names for a tensor.
    pub fn stamp(&self, name: &str) -> Option<&str> {
        self.stamps.get(name).map(String::as_str)
    }

    /// Lines worth printing once: what was ignored and why.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Hash over the headers and lengths of all shards.
    pub fn header_hash(&self) -> u64 {
        self.hash
    }

    /// Bytes of all shards, as long as they were when their headers were checked.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes
    }

    fn add(&mut self, file: usize, header: Header) -> Result<()> {
        for (name, tensor) in header.tensors {
            if name.starts_with(PAD_PREFIX) {
                continue;
            }
            match self.tensors.entry(name) {
                Entry::Vacant(slot) => {
                    slot.insert(tensor);
                }
                Entry::Occupied(slot) => {
                    return Err(CheckpointError::Duplicate {
                        tensor: slot.key().clone(),
                        first: self.paths[slot.get().file.0 as usize].clone(),
                        second: self.paths[file].clone(),
                    });
                }
            }
        }
        self.stamps.extend(header.stamps);
        self.metadata.push(header.metadata);
        Ok(())
    }
}

/// The header of each shard. Large models have a hundred megabytes of them, so that threads share them.
fn read_headers(paths: &[PathBuf], gone: &HashMap<PathBuf, &(u64, String)>) -> Vec<Result<Header>> {
    shared(paths, paths.len(), |number, path| match gone.get(path) {
        Some((bytes, json)) => header::parse(path, FileId(number as u32), *bytes, json.as_bytes()),
        None => header::read(path, FileId(number as u32)),
    })
}

/// What `work` makes of each of `items` and its number, in their order. Threads share them where a model has so many shards
/// that this is worth their start.
pub(super) fn shared<T: Sync, R: Send>(items: &[T], shards: usize, work: impl Fn(usize, &T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(HEADER_THREADS_MAX);
    let threads = if shards < HEADER_SHARDS_MIN { 1 } else { threads };
    let all = |first: usize, items: &[T]| -> Vec<R> {
        items.iter().zip(first..).map(|(item, number)| work(number, item)).collect()
    };
    let all = &all;
    let share = items.len().div_ceil(threads).max(1);
    let mut shares = items.chunks(share).enumerate().map(|(number, items)| (number * share, items));
    let (first, own) = shares.next().unwrap_or_default();
    std::thread::scope(|scope| {
        // Where no thread can be had the caller does the share itself.
        let others: Vec<_> = shares
            .map(|(first, items)| {
                let spawned = std::thread::Builder::new().spawn_scoped(scope, move || all(first, items));
                spawned.map_err(|_| (first, items))
            })
            .collect();
        let mut made = all(first, own);
        for other in others {
            made.extend(match other {
                Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                Err((first, items)) => all(first, items),
            });
        }
        made
    })
}

/// The shards of a directory, sorted by name. Names that begin with a dot are unfinished or private to a tool.
pub(crate) fn shard_paths(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io_error("list", dir))? {
        let path = entry.map_err(io_error("list", dir))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else {
            continue;
        };
        if name.ends_with(".safetensors") && !name.starts_with('.') {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

//! The header of one safetensors shard. Every byte of it is untrusted.
//!
//! Layout: 8 bytes little-endian header length, the header (JSON), then the data. Offsets in the header count from the
//! start of the data. Tensors cover the data exactly: no overlap, no hole, nothing after the last one.

use super::error::{CheckpointError, Result, io_error};
use super::tensors::{Dtype, PAD_PREFIX, TensorInfo};
use crate::limits::{MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_NAME_BYTES};
use millstream_io::FileId;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};
use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Key of the map of format names in a container's metadata.
pub(crate) const STAMP_KEY: &str = "colibri.fmt";

/// A header that passed every check.
pub(crate) struct Header {
    /// Tensors in order of their data.
    pub tensors: Vec<(String, TensorInfo)>,
    /// `__metadata__`.
    pub metadata: HashMap<String, String>,
    /// Format names by tensor.
    pub stamps: HashMap<String, String>,
    /// Hash of the header's bytes and the file's length.
    pub hash: u64,
    /// Length of the file, where its last tensor ends.
    pub file_bytes: u64,
}

/// Reads and checks the header of the shard at `path`.
pub(crate) fn read(path: &Path, file: FileId) -> Result<Header> {
    // Opening a pipe would wait for a writer.
    let metadata = std::fs::metadata(path).map_err(io_error("open", path))?;
    if !metadata.is_file() {
        return Err(fault(path, None, "kind of file", "a regular file".to_owned(), "something else".to_owned()));
    }
    let shard = File::open(path).map_err(io_error("open", path))?;
    let file_bytes = shard.metadata().map_err(io_error("read", path))?.len();
    let mut prefix = [0u8; 8];
    if file_bytes < 8 {
        let found = format!("{file_bytes} bytes");
        return Err(fault(path, None, "file length", "at least 8 bytes".to_owned(), found));
    }
    shard.read_exact_at(&mut prefix, 0).map_err(io_error("read", path))?;
    let header_bytes = u64::from_le_bytes(prefix);
    if header_bytes > MAX_HEADER_BYTES {
        let expected = format!("at most {MAX_HEADER_BYTES} bytes");
        return Err(fault(path, None, "header length", expected, format!("{header_bytes} bytes")));
    }
    if header_bytes > file_bytes - 8 {
        let expected = format!("at most {} bytes, the rest of the file", file_bytes - 8);
        return Err(fault(path, None, "header length", expected, format!("{header_bytes} bytes")));
    }
    let mut json = vec![0u8; header_bytes as usize];
    shard.read_exact_at(&mut json, 8).map_err(io_error("read", path))?;
    parse(path, file, file_bytes, &json)
}

/// Checks the bytes of a header against the length of its file.
pub(crate) fn parse(path: &Path, file: FileId, file_bytes: u64, json: &[u8]) -> Result<Header> {
    let raw: RawHeader = serde_json::from_slice(json)
        .map_err(|error| fault(path, None, "header", "safetensors JSON".to_owned(), error.to_string()))?;
    let data_start = 8 + json.len() as u64;
    let mut tensors = Vec::with_capacity(raw.tensors.len());
    for (name, tensor) in raw.tensors {
        let info = check_tensor(path, file, data_start, &name, tensor)?;
        tensors.push((name, info));
    }
    tensors.sort_unstable_by(|a, b| (a.1.offset, a.1.bytes, &a.0).cmp(&(b.1.offset, b.1.bytes, &b.0)));
    check_coverage(path, data_start, file_bytes, &tensors)?;
    let stamps = parse_stamps(path, &raw.metadata)?;
    let mut hasher = xxhash_rust::xxh3::Xxh3::new();
    hasher.update(&file_bytes.to_le_bytes());
    hasher.update(json);
    Ok(Header { tensors, metadata: raw.metadata, stamps, hash: hasher.digest(), file_bytes })
}

/// Type known, rank bounded, and shape times element size equal to the byte range.
fn check_tensor(path: &Path, file: FileId, data_start: u64, name: &str, raw: RawTensor) -> Result<TensorInfo> {
    let bad = |what, expected: String, found: String| fault(path, Some(name), what, expected, found);
    if name.len() > MAX_NAME_BYTES || name.contains(char::is_control) {
        let expected = format!("at most {MAX_NAME_BYTES} bytes without control characters");
        return Err(bad("name", expected, format!("{} bytes", name.len())));
    }
    let [begin, end] = raw.data_offsets;
    let Some(dtype) = Dtype::from_name(&raw.dtype) else {
        let known = "a known type (F32, BF16, F16, F8_E4M3, U8, ...)".to_owned();
        return Err(bad("dtype", known, clip(&raw.dtype)));
    };
    if raw.shape.len() > MAX_DIMENSIONS {
        let expected = format!("at most {MAX_DIMENSIONS} dimensions");
        return Err(bad("shape", expected, format!("{} dimensions", raw.shape.len())));
    }
    if end < begin {
        return Err(bad("data_offsets", "begin <= end".to_owned(), format!("[{begin}, {end}]")));
    }
    let bytes = end - begin;
    let wanted = raw.shape.iter().try_fold(dtype.bytes(), |size, &dim| size.checked_mul(dim));
    match wanted {
        Some(wanted) if wanted == bytes => {}
        Some(wanted) => {
            let expected = format!("{wanted} bytes for {dtype} {:?}", raw.shape);
            return Err(bad("data_offsets", expected, format!("{bytes} bytes")));
        }
        None => {
            let expected = format!("{bytes} bytes, as data_offsets say");
            let found = format!("{dtype} {:?}, more than 2^64 bytes", raw.shape);
            return Err(bad("shape", expected, found));
        }
    }
    let Some(offset) = data_start.checked_add(begin).filter(|o| o.checked_add(bytes).is_some()) else {
        return Err(bad("data_offsets", "less than 2^64".to_owned(), format!("[{begin}, {end}]")));
    };
    Ok(TensorInfo { file, offset, bytes, dtype, shape: raw.shape })
}

/// Tensors, sorted by offset, follow each other without overlap or hole and end where the file ends.
fn check_coverage(path: &Path, data_start: u64, file_bytes: u64, tensors: &[(String, TensorInfo)]) -> Result<()> {
    let mut end = data_start;
    let mut previous = "the start of the data";
    for (name, tensor) in tensors {
        if tensor.offset != end {
            let overlap = tensor.offset < end;
            let what = if overlap { "data overlaps another tensor" } else { "hole before data" };
            let expected = format!("to begin at byte {end}, the end of {}", shown(previous));
            return Err(fault(path, Some(name), what, expected, format!("byte {}", tensor.offset)));
        }
        end += tensor.bytes;
        previous = name;
    }
    if end == file_bytes {
        return Ok(());
    }
    let what = if end > file_bytes { "file is cut short" } else { "bytes after the last tensor" };
    let expected = format!("{end} bytes, the end of {}", shown(previous));
    Err(fault(path, None, what, expected, format!("{file_bytes} bytes")))
}

fn parse_stamps(path: &Path, metadata: &HashMap<String, String>) -> Result<HashMap<String, String>> {
    let Some(text) = metadata.get(STAMP_KEY) else {
        return Ok(HashMap::new());
    };
    serde_json::from_str(text).map_err(|error| {
        let expected = format!("{STAMP_KEY} to map tensor names to format names");
        fault(path, None, "__metadata__", expected, error.to_string())
    })
}

fn fault(path: &Path, tensor: Option<&str>, what: &'static str, expected: String, found: String) -> CheckpointError {
    let tensor = tensor.map(shown);
    CheckpointError::Header { file: path.to_owned(), tensor, what, expected, found }
}

/// A tensor's name as a message may show it; of what fills the room between tensors nobody knows the name.
fn shown(name: &str) -> String {
    if name.starts_with(PAD_PREFIX) { "its padding".to_owned() } else { clip(name) }
}

/// Text of an untrusted file as a message may show it: of bounded length, control characters escaped.
fn clip(text: &str) -> String {
    const SHOWN: usize = 200;
    let mut shown: String = text.chars().take(SHOWN).flat_map(char::escape_debug).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

#[derive(serde::Deserialize)]
struct RawTensor<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct RawHeader<'a> {
    tensors: Vec<(String, RawTensor<'a>)>,
    metadata: HashMap<String, String>,
}

impl<'de> Deserialize<'de> for RawHeader<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps names to tensors")
            }

            /// JSON lets a key come twice and most readers keep the last: here that is an error.
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut header = RawHeader { tensors: Vec::new(), metadata: HashMap::new() };
                let mut metadata_seen = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name != "__metadata__" {
                        let tensor = map.next_value::<RawTensor>().map_err(|error| of_tensor(&name, error))?;
                        header.tensors.push((name, tensor));
                        continue;
                    }
                    header.metadata = map.next_value::<Metadata>()?.0;
                    if std::mem::replace(&mut metadata_seen, true) {
                        return Err(repeated(&name));
                    }
                }
                let mut names: Vec<&str> = header.tensors.iter().map(|(name, _)| name.as_str()).collect();
                names.sort_unstable();
                if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                    return Err(repeated(pair[0]));
                }
                Ok(header)
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// What is wrong with the entry of a tensor, among many thousands. The place in the text is added to every error, and is in
/// this one already.
fn of_tensor<E: de::Error>(name: &str, error: E) -> E {
    let text = error.to_string();
    let cause = text.split_once(" at line ").map_or(text.as_str(), |(cause, _)| cause);
    E::custom(format!("tensor {}: {cause}", clip(name)))
}

fn repeated<E: de::Error>(name: &str) -> E {
    E::custom(format!("the key {} twice", clip(name)))
}

struct Metadata(HashMap<String, String>);

impl<'de> Deserialize<'de> for Metadata {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Metadata;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps strings to strings")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut entries = HashMap::new();
                while let Some((key, value)) = map.next_entry::<String, String>()? {
                    if entries.insert(key.clone(), value).is_some() {
                        return Err(repeated(&key));
                    }
                }
                Ok(Metadata(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

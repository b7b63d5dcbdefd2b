//! `model.safetensors.index.json`: a claim about which shard holds what, never the truth about it.
//!
//! Headers decide what is loaded. The index serves to notice an incomplete download; one that names none of the shards
//! on disk belongs to the checkpoint a container was made from, and is ignored.

use super::config::read_small;
use super::error::{CheckpointError, Result, is_there};
use super::names::Names;
use super::tensors::TensorMap;
use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use std::borrow::Cow;
use std::collections::{BTreeSet, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

pub(crate) const INDEX_NAME: &str = "model.safetensors.index.json";

/// An index all of whose shards are on disk.
pub(crate) struct Index<'a> {
    path: PathBuf,
    weight_map: Entries<'a>,
}

#[derive(serde::Deserialize)]
struct RawIndex<'a> {
    #[serde(borrow)]
    weight_map: Entries<'a>,
}

/// Names of tensors and of the shards that hold them, in the order of the file. A large model has a hundred thousand: they
/// are parts of its text.
struct Entries<'a>(Vec<(Text<'a>, Text<'a>)>);

#[derive(serde::Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(transparent)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

/// The text of the index of `dir`; `None` when there is none.
pub(crate) fn read(dir: &Path) -> Result<Option<Vec<u8>>> {
    let path = dir.join(INDEX_NAME);
    if is_there(&path)? { Ok(Some(read_small(&path)?)) } else { Ok(None) }
}

/// The index of `dir`, whose text is `json`; `None` when it is a stale one, which adds a line to `notes`.
pub(crate) fn parse<'a>(
    dir: &Path,
    json: &'a [u8],
    shards: &[PathBuf],
    notes: &mut Vec<String>,
) -> Result<Option<Index<'a>>> {
    let path = dir.join(INDEX_NAME);
    let raw: RawIndex<'a> = serde_json::from_slice(json).map_err(|error| CheckpointError::Config {
        file: path.display().to_string(),
        field: "weight_map".to_owned(),
        expected: "an object that maps tensor names to shard names".to_owned(),
        found: error.to_string(),
    })?;
    let named: BTreeSet<&str> = raw.weight_map.0.iter().map(|(_, shard)| &*shard.0).collect();
    let on_disk: HashSet<&str> =
        shards.iter().filter_map(|path| path.file_name().and_then(|name| name.to_str())).collect();
    let missing: Vec<String> =
        named.iter().filter(|name| !on_disk.contains(**name)).map(|name| (*name).into()).collect();
    if !named.is_empty() && missing.len() == named.len() {
        notes.push(format!("{INDEX_NAME} names none of the {} shards here: ignored as stale", shards.len()));
        return Ok(None);
    }
    if !missing.is_empty() {
        return Err(CheckpointError::ShardsMissing { index: path, missing });
    }
    Ok(Some(Index { path, weight_map: raw.weight_map }))
}

impl Index<'_> {
    /// Compares the index with the headers; returns lines to print.
    pub fn check(&self, map: &TensorMap) -> Result<Option<String>> {
        let names: Vec<Option<&str>> =
            map.paths().iter().map(|path| path.file_name().and_then(|name| name.to_str())).collect();
        let holder = |tensor: &str| map.get(tensor).and_then(|info| names[info.file.0 as usize]);
        let entries = self.weight_map.0.iter().map(|(tensor, shard)| (&*tensor.0, &*shard.0));
        if let Some((tensor, shard)) = entries.clone().filter(|(tensor, shard)| holder(tensor) != Some(*shard)).min() {
            return Err(CheckpointError::IndexDiffers {
                index: self.path.clone(),
                tensor: tensor.to_owned(),
                shard: map.dir().join(shard),
                found: map.get(tensor).map(|info| map.path(info.file).to_owned()),
            });
        }
        // Every name of the index is in the map, so that equal numbers are equal names; one that comes twice hides the note
        // about one that is left out, and no more.
        if self.weight_map.0.len() == map.len() {
            return Ok(None);
        }
        let listed: HashSet<&str, Names> = entries.map(|(tensor, _)| tensor).collect();
        let omitted = map.iter().map(|(name, _)| name).filter(|name| !listed.contains(name));
        let (count, first) = omitted.fold((0usize, None), |(count, first), name| {
            (count + 1, Some(first.map_or(name, |first: &str| first.min(name))))
        });
        Ok(first.map(|first| {
            format!("{INDEX_NAME} omits {count} tensors that the shards hold, such as {first}: they are used")
        }))
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Entries<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pairs<'a>(PhantomData<&'a str>);
        impl<'de: 'a, 'a> Visitor<'de> for Pairs<'a> {
            type Value = Entries<'a>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object that maps names to shards")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<Self::Value, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Pairs(PhantomData))
    }
}

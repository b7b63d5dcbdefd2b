//! `model.safetensors.index.json`: a claim about which shard holds what, never the truth about it.
//!
//! Headers decide what is loaded. The index serves to notice an incomplete download; one that names none of the shards
//! on disk belongs to the checkpoint a container was made from, and is ignored.

use super::config::read_small;
use super::error::{CheckpointError, Result, is_there};
use super::names::NameMap;
use super::tensors::TensorMap;
use serde::Deserialize;
use std::collections::{BTreeSet, HashSet};
use std::path::{Path, PathBuf};

pub(crate) const INDEX_NAME: &str = "model.safetensors.index.json";

/// An index all of whose shards are on disk.
pub(crate) struct Index {
    path: PathBuf,
    weight_map: NameMap<String>,
}

#[derive(Deserialize)]
struct RawIndex {
    weight_map: NameMap<String>,
}

/// Reads the index of `dir`; `None` when there is none or a stale one, which adds a line to `notes`.
pub(crate) fn read(dir: &Path, shards: &[PathBuf], notes: &mut Vec<String>) -> Result<Option<Index>> {
    let path = dir.join(INDEX_NAME);
    if !is_there(&path)? {
        return Ok(None);
    }
    let raw: RawIndex = serde_json::from_slice(&read_small(&path)?).map_err(|error| CheckpointError::Config {
        file: path.display().to_string(),
        field: "weight_map".to_owned(),
        expected: "an object that maps tensor names to shard names".to_owned(),
        found: error.to_string(),
    })?;
    let named: BTreeSet<&str> = raw.weight_map.values().map(String::as_str).collect();
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

impl Index {
    /// Compares the index with the headers; returns lines to print.
    pub fn check(&self, map: &TensorMap) -> Result<Option<String>> {
        let mut wrong: Vec<(&String, &String)> = Vec::new();
        for (tensor, shard) in &self.weight_map {
            let holder = map.get(tensor).and_then(|info| map.path(info.file).file_name());
            if holder.and_then(|name| name.to_str()) != Some(shard) {
                wrong.push((tensor, shard));
            }
        }
        if let Some((tensor, shard)) = wrong.into_iter().min() {
            return Err(CheckpointError::IndexDiffers {
                index: self.path.clone(),
                tensor: tensor.clone(),
                shard: map.dir().join(shard),
                found: map.get(tensor).map(|info| map.path(info.file).to_owned()),
            });
        }
        // Every name of the index is in the map, so that equal numbers are equal names.
        if self.weight_map.len() == map.len() {
            return Ok(None);
        }
        let omitted = map.iter().map(|(name, _)| name).filter(|n| !self.weight_map.contains_key(*n));
        let (count, first) = omitted.fold((0usize, None), |(count, first), name| {
            (count + 1, Some(first.map_or(name, |first: &str| first.min(name))))
        });
        Ok(first.map(|first| {
            format!("{INDEX_NAME} omits {count} tensors that the shards hold, such as {first}: they are used")
        }))
    }
}

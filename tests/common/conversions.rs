//! Conversions of a small model in several shards, and what is to be found of it whatever stops them.
#![allow(dead_code)]

#[path = "quick.rs"]
mod quick;

pub use quick::quick_dir;

use crate::program::program;
use crate::safetensors::Shard;
use millstream::checkpoint::CheckpointError;
use millstream::checkpoint::convert::{ConvertOptions, convert};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

pub const SHARDS: usize = 6;
/// What tells whether a source is still the files that were converted.
pub const STAMPS: &str = ".millstream-source.json";

/// A writable copy of `model` in several shards; each tensor goes to the next shard in turn for the first half of them,
/// then they go in order: some parts of the container need every shard, others one.
pub fn sharded(model: &Path) -> tempfile::TempDir {
    let dir = quick_dir();
    let mut tensors = Vec::new();
    for entry in fs::read_dir(model).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        match name.ends_with(".safetensors") {
            true => tensors.extend(Shard::read(&path).tensors),
            false if name.contains("index") => {}
            false => drop(fs::copy(&path, dir.path().join(name)).unwrap()),
        }
    }
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let count = tensors.len();
    let mut shards = vec![Shard::default(); SHARDS];
    for (number, tensor) in tensors.into_iter().enumerate() {
        let shard =
            if number < count / 2 { number % 2 } else { 2 + (number - count / 2) * (SHARDS - 2) / count.div_ceil(2) };
        shards[shard].tensors.push(tensor);
    }
    let mut weight_map = serde_json::Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{SHARDS:05}.safetensors", number + 1);
        shard.tensors.iter().for_each(|tensor| drop(weight_map.insert(tensor.name.clone(), name.clone().into())));
        shard.write(&dir.path().join(name));
    }
    let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    dir
}

pub fn options() -> ConvertOptions {
    ConvertOptions { delete_source: true, ..ConvertOptions::default() }
}

pub fn quietly(src: &Path, dst: &Path, options: &ConvertOptions) -> Result<(), CheckpointError> {
    convert(src, dst, options, &mut |_| {}).map(|_| ())
}

/// Every file of a directory by name; but for the stamps of the source's files, which every copy of it has others of.
pub fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).filter(|path| path.is_file());
    let files = files.filter(|path| !path.ends_with(STAMPS));
    files.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), fs::read(&path).unwrap())).collect()
}

#[track_caller]
pub fn assert_same_files(found: &Path, expected: &BTreeMap<String, Vec<u8>>) {
    let found = contents(found);
    assert_eq!(found.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
    for (name, bytes) in expected {
        assert!(found[name] == *bytes, "{name} differs");
    }
}

/// What an uninterrupted conversion of a source that stays writes.
pub fn whole(src: &Path) -> BTreeMap<String, Vec<u8>> {
    let dst = quick_dir();
    quietly(src, dst.path(), &ConvertOptions::default()).unwrap();
    contents(dst.path())
}

/// Names and lengths of the shards in a directory.
pub fn shards(dir: &Path) -> BTreeMap<String, u64> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let lengths = files.map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()));
    lengths.filter(|(name, _)| name.ends_with(".safetensors")).collect()
}

/// Tensors of each shard, without their scales and padding.
pub fn tensors_of(dir: &Path) -> BTreeMap<String, BTreeSet<String>> {
    let weights = |shard: Shard| shard.tensors.into_iter().map(|tensor| tensor.name);
    let is_weight = |name: &String| !name.ends_with("_scale_inv") && !name.starts_with("__pad__");
    let names = |name: &String| weights(Shard::read(&dir.join(name))).filter(is_weight);
    shards(dir).keys().map(|name| (name.clone(), names(name).collect())).collect()
}

/// Whatever is gone from the source is whole in the container, under its final name.
pub fn assert_nothing_lost(src: &Path, dst: &Path, before: &BTreeMap<String, BTreeSet<String>>) {
    let here = shards(src);
    let converted: BTreeSet<String> = tensors_of(dst).into_values().flatten().collect();
    for (shard, tensors) in before.iter().filter(|(shard, _)| !here.contains_key(*shard)) {
        let lost: Vec<&String> = tensors.difference(&converted).collect();
        assert!(lost.is_empty(), "{shard} is gone, and nowhere is {lost:?}");
    }
}

pub fn convert_command(src: &Path, dst: &Path, flags: &[&str]) -> Command {
    let mut command = program(dst.parent().unwrap());
    command.arg("convert").args([src, dst]).args(flags).stdout(Stdio::null()).stderr(Stdio::null());
    command
}

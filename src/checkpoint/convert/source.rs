//! What a conversion reads: which model it is, which shards each part of the container needs, and when they may go.

use super::stamps::Stamps;
use super::weights::source_of;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::consumed::{self, Record};
use crate::checkpoint::error::{CheckpointError, Result, io_error, is_there};
use crate::checkpoint::identity::sample;
use crate::checkpoint::write::layout::{Item, ShardPlan};
use crate::checkpoint::write::{Frees, Proof, Writing};
use millstream_io::{FileId, FileSpan};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::Xxh3;

/// Last part of the names of NVFP4's scales of activations, which no weight is scaled with.
const INPUT_SCALE_SUFFIX: &str = ".input_scale";

/// A source, and what an earlier conversion left of it.
pub(crate) struct Source<'a> {
    checkpoint: &'a Checkpoint,
    record: Option<Record>,
    /// Hash of samples of each shard.
    samples: Vec<u64>,
    /// Shards that are gone.
    gone: BTreeSet<FileId>,
}

impl<'a> Source<'a> {
    /// Looks at every shard, or at what the record says of it.
    pub fn new(checkpoint: &'a Checkpoint, record: Option<Record>) -> Result<Source<'a>> {
        let mut source = Source { checkpoint, record, samples: Vec::new(), gone: BTreeSet::new() };
        for (path, file) in checkpoint.tensors.paths().iter().zip((0..).map(FileId)) {
            let remembered = source.record.as_ref().and_then(|record| record.find(path));
            let sample = match remembered {
                Some(remembered) if !is_there(path)? => {
                    source.gone.insert(file);
                    remembered.sample
                }
                _ => sample(path)?,
            };
            source.samples.push(sample);
        }
        Ok(source)
    }

    /// Tells sources apart, and of two trainings of one architecture, whose configurations and headers are the same, those
    /// that differ in what is sampled: a hash of those, and of some weights of every shard. Where only others differ, what
    /// was made is compared before its source goes. It stays the same while shards are removed.
    pub fn identity(&self) -> String {
        let mut hasher = Xxh3::new();
        hasher.update(&self.checkpoint.fingerprint().to_le_bytes());
        self.samples.iter().for_each(|sample| hasher.update(&sample.to_le_bytes()));
        format!("{:016x}", hasher.digest())
    }

    /// For each shard of the container the shards of the source that it is made from.
    pub fn needs(&self, shards: &[ShardPlan]) -> Result<Vec<BTreeSet<FileId>>> {
        let needs_of = |shard: &ShardPlan| -> Result<BTreeSet<FileId>> {
            let mut files = BTreeSet::new();
            for item in shard.runs.iter().flat_map(|run| &run.items) {
                files.extend(self.spans_of(item)?.map(|span| span.file));
            }
            Ok(files)
        };
        shards.iter().map(needs_of).collect()
    }

    /// The bytes that an item is made from.
    fn spans_of(&self, item: &Item) -> Result<impl Iterator<Item = FileSpan>> {
        let source = source_of(item, &self.checkpoint.tensors)?;
        Ok([Some(source.data), source.scales, source.factor].into_iter().flatten())
    }

    /// Names of the tensors of each shard that nothing of the container is made from, and that would be nowhere once the
    /// shard is gone. The scales of activations that come with NVFP4 are no part of any weight.
    fn left_out(&self, shards: &[ShardPlan]) -> Result<BTreeMap<FileId, Vec<&str>>> {
        let mut taken = HashSet::new();
        for item in shards.iter().flat_map(|shard| &shard.runs).flat_map(|run| &run.items) {
            taken.extend(self.spans_of(item)?.map(|span| (span.file, span.offset)));
        }
        let mut left_out: BTreeMap<FileId, Vec<&str>> = BTreeMap::new();
        for (name, tensor) in self.checkpoint.tensors.iter() {
            if !taken.contains(&(tensor.file, tensor.offset)) && !name.ends_with(INPUT_SCALE_SUFFIX) {
                left_out.entry(tensor.file).or_default().push(name);
            }
        }
        left_out.values_mut().for_each(|names| names.sort_unstable());
        Ok(left_out)
    }

    /// Refuses to write what needs a shard that is gone.
    pub fn check_whole(&self, writing: &Writing, needs: &[BTreeSet<FileId>]) -> Result<()> {
        let Some(record) = &self.record else { return Ok(()) };
        let all = self.gone(needs);
        for (number, shard) in writing.missing() {
            let gone = all[number].clone();
            if !gone.is_empty() {
                let (dir, into) = (self.checkpoint.dir.clone(), record.into.clone());
                let is_here = fs::canonicalize(writing.destination().dir()).is_ok_and(|here| here == into);
                return Err(CheckpointError::SourceGone { dir, shard: shard.to_owned(), gone, into, is_here });
            }
        }
        Ok(())
    }

    /// How each shard that an earlier run had finished is proved; `is_same` says whether a shard of the source is still
    /// the file that it was made from.
    pub fn proofs(
        &self,
        needs: &[BTreeSet<FileId>],
        consume: Option<&Consume>,
        is_same: &dyn Fn(&Path) -> bool,
    ) -> Vec<Proof> {
        let same = |file: &FileId| is_same(self.checkpoint.tensors.path(*file));
        let proof = |(number, files): (usize, &BTreeSet<FileId>)| {
            let goes = consume.is_some_and(|consume| consume.needs_proof[number]);
            match files.is_disjoint(&self.gone) {
                // It cannot be made again, and only its checksums tell what it was. What is left of its source was told
                // from another by samples.
                false => Proof::Read,
                true if !goes => Proof::None,
                true if files.iter().all(same) => Proof::Read,
                true => Proof::Compared,
            }
        };
        needs.iter().enumerate().map(proof).collect()
    }

    /// For each shard of the container names of those that it is made from and that are gone.
    pub fn gone(&self, needs: &[BTreeSet<FileId>]) -> Vec<Vec<String>> {
        let names = |files: &BTreeSet<FileId>| files.intersection(&self.gone).map(|&file| self.name(file)).collect();
        needs.iter().map(names).collect()
    }

    /// Whether every shard that is there is as `is` says.
    pub fn all_here(&self, is: &dyn Fn(&Path) -> bool) -> bool {
        let mut paths = self.checkpoint.tensors.paths().iter().zip((0..).map(FileId));
        paths.all(|(path, file)| self.gone.contains(&file) || is(path))
    }

    /// Stamps of the shards that are there.
    pub fn stamps(&self) -> Result<Stamps> {
        let paths = self.checkpoint.tensors.paths().iter().zip((0..).map(FileId));
        Stamps::of(paths.filter(|(_, file)| !self.gone.contains(file)).map(|(path, _)| path))
    }

    /// Which shards may go, and when: those of which everything is in the container. Refuses a source whose shards cannot
    /// be removed, or where that frees nothing.
    pub fn consume(&self, dst: &Path, shards: &[ShardPlan], needs: &[BTreeSet<FileId>]) -> Result<Consume> {
        let dir = &self.checkpoint.dir;
        let refuse = |expected: &str, found: String| {
            Err(CheckpointError::ConvertOptions {
                what: "--delete-source".to_owned(),
                expected: expected.to_owned(),
                found,
            })
        };
        let here = fs::metadata(dir).map_err(io_error("look at", dir))?;
        if let Ok(there) = fs::metadata(dst)
            && (there.dev(), there.ino()) == (here.dev(), here.ino())
        {
            return refuse("a destination that is not the source", format!("{} for both", dst.display()));
        }
        // Who sees that the source is no model any more may remove it whole.
        let absolute = std::path::absolute(dst).map_err(io_error("look at", dst))?;
        let inside = absolute.ancestors().find_map(|place| fs::canonicalize(place).ok());
        if let (Some(inside), Ok(dir)) = (inside, fs::canonicalize(dir))
            && inside.starts_with(dir)
        {
            return refuse("a destination outside the source", dst.display().to_string());
        }
        let left_out = self.left_out(shards)?;
        let stays = |file: &FileId| self.gone.contains(file) || left_out.contains_key(file);
        let mut last: BTreeMap<FileId, usize> = BTreeMap::new();
        for (number, files) in needs.iter().enumerate() {
            last.extend(files.iter().filter(|&file| !stays(file)).map(|&file| (file, number)));
        }
        let kept = left_out.iter().filter(|(file, _)| !self.gone.contains(file));
        let mut consume = Consume {
            dir: dir.clone(),
            after: vec![Vec::new(); needs.len()],
            frees: Frees { device: here.dev(), after: vec![0; needs.len()] },
            needs_proof: needs.iter().map(|files| files.iter().any(|file| last.contains_key(file))).collect(),
            removed: (0, 0),
            kept: kept.map(|(&file, names)| (self.name(file), reason_to_stay(names))).collect(),
        };
        for (file, number) in last {
            let path = self.checkpoint.tensors.path(file);
            let found = fs::symlink_metadata(path).map_err(io_error("look at", path))?;
            if found.is_symlink() || found.nlink() > 1 {
                let place = path.display();
                return refuse(
                    "shards with one name, so that removing it frees their space",
                    format!("{place} with more"),
                );
            }
            // A file with holes takes less than its length.
            consume.frees.after[number] += found.len().min(found.blocks() * 512);
            consume.after[number].push((path.to_owned(), found.len()));
        }
        Ok(consume)
    }

    /// Makes sure that what may be removed is remembered.
    pub fn remember(&self, dst: &Path) -> Result<()> {
        // The record that is there tells of shards that nobody can look at any more.
        if !self.gone.is_empty() {
            return Ok(());
        }
        let paths = self.checkpoint.tensors.paths();
        let shards: Vec<(PathBuf, u64)> = paths.iter().cloned().zip(self.samples.iter().copied()).collect();
        Record::of(&shards, dst)?.write(&self.checkpoint.dir)
    }

    /// Whether every shard is there.
    pub fn is_whole(&self) -> bool {
        self.gone.is_empty()
    }

    /// Whether a shard was removed.
    pub fn is_gone(&self, file: FileId) -> bool {
        self.gone.contains(&file)
    }

    fn name(&self, file: FileId) -> String {
        let path = self.checkpoint.tensors.path(file);
        path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
    }
}

/// Shards of a source on their way out.
pub(crate) struct Consume {
    dir: PathBuf,
    /// After each shard of the container, those that nothing needs any more, with their lengths.
    after: Vec<Vec<(PathBuf, u64)>>,
    /// The space that gives.
    pub frees: Frees,
    /// For each shard of the container, whether something that it is made from is removed.
    needs_proof: Vec<bool>,
    /// Shards removed, and their bytes.
    pub removed: (usize, u64),
    /// Shards that stay, and why.
    pub kept: Vec<(String, String)>,
}

impl Consume {
    /// All shards of the container up to this one are stored.
    pub fn stored(&mut self, number: usize) -> Result<()> {
        let (paths, bytes): (Vec<PathBuf>, Vec<u64>) = self.after[number].drain(..).unzip();
        consumed::remove(&self.dir, &paths)?;
        self.removed.0 += paths.len();
        self.removed.1 += bytes.iter().sum::<u64>();
        Ok(())
    }
}

/// Why a shard with these tensors is not removed.
fn reason_to_stay(names: &[&str]) -> String {
    let more = if names.len() == 1 { String::new() } else { format!(" and {} more", names.len() - 1) };
    format!("{}{more} would be lost with it, since nothing of the container is made from that", names[0])
}

//! Which weights a checkpoint holds, as a number: what was computed with them is of no use to others.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use xxhash_rust::xxh3::Xxh3;

use super::Checkpoint;
use super::error::{Result, io_error};
use super::verify::Manifest;

impl Checkpoint {
    /// Tells models apart by configuration, headers and weights, without reading all of them.
    ///
    /// Where every tensor has a checksum in its header, the headers say it all. Two trainings of one architecture have the same
    /// headers otherwise, and are told apart by some weights of every shard and by when it was written. A copy that
    /// was given another time then counts as another model, which costs less than the opposite.
    pub fn weights_id(&self) -> Result<u64> {
        let mut hasher = Xxh3::new();
        hasher.update(&self.fingerprint().to_le_bytes());
        if Manifest::read(self)?.unhashed > 0 {
            for path in self.tensors.paths() {
                let written = fs::metadata(path).map_err(io_error("look at", path))?;
                for number in [written.mtime(), written.mtime_nsec()] {
                    hasher.update(&number.to_le_bytes());
                }
                hasher.update(&sample(path)?.to_le_bytes());
            }
        }
        Ok(hasher.digest())
    }
}

/// Hash of some weights of a shard.
pub(super) fn sample(path: &Path) -> Result<u64> {
    const SAMPLES: u64 = 16;
    let mut hasher = Xxh3::new();
    let mut sample = [0; 4096];
    let file = File::open(path).map_err(io_error("open", path))?;
    let end = file.metadata().map_err(io_error("read", path))?.len().saturating_sub(sample.len() as u64);
    for number in 1..=SAMPLES {
        let read = file.read_at(&mut sample, end / SAMPLES * number).map_err(io_error("read", path))?;
        hasher.update(&sample[..read]);
    }
    Ok(hasher.digest())
}

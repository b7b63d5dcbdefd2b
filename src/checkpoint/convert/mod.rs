//! From a vendor's checkpoint, or a container, to a container laid out for direct reads.
//!
//! The plan, every shard's header and the room needed are settled before the first byte. A shard is written under a
//! temporary name, made durable and then renamed, so a shard that has its name is whole; a conversion that was killed
//! goes on with the first shard that has not. What a shard holds depends on source and parameters only, hence a
//! continued conversion gives the same bytes as one that was never stopped.

mod destination;
pub mod layout;
mod options;
mod plan;
mod shard;

pub use options::{Cancel, ConvertOptions, Width};

use super::error::{CheckpointError, Result, io_error};
use super::{Checkpoint, refuse_unfinished};
use destination::Destination;
use layout::{ShardLayout, ShardPlan};
use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// What a conversion reports while it runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Once, before the first byte: what will be written.
    Plan {
        /// One line for each kind of weight and format.
        lines: Vec<String>,
        /// Shards in all.
        shards: usize,
        /// Bytes of all shards.
        bytes: u64,
    },
    /// A shard is begun, or was found finished.
    Shard {
        /// Its file name.
        name: String,
        /// Its number, from 1.
        number: usize,
        /// Shards in all.
        of: usize,
        /// Whether an earlier run had finished it.
        kept: bool,
    },
    /// A megabyte or more, or the rest of a shard, has been added.
    Bytes {
        /// Bytes of all shards so far, kept ones included.
        done: u64,
        /// Bytes of all shards.
        of: u64,
    },
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Progress::Plan { lines, shards, bytes } => {
                write!(f, "{}; {bytes} bytes in {shards} shards", lines.join("; "))
            }
            Progress::Shard { name, number, of, kept } => {
                write!(f, "shard {number} of {of}: {name}{}", if *kept { ", finished before" } else { "" })
            }
            Progress::Bytes { done, of } => write!(f, "{done} of {of} bytes"),
        }
    }
}

/// What a conversion did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertReport {
    /// Shards written by this run.
    pub shards_written: usize,
    /// Shards an earlier run had finished.
    pub shards_kept: usize,
    /// Bytes written by this run.
    pub bytes_written: u64,
    /// Bytes of all shards.
    pub bytes_total: u64,
    /// The plan's lines, proved against the headers on disk.
    pub lines: Vec<String>,
}

/// Progress is reported each time at least so many bytes were added.
const PROGRESS_BYTES: u64 = 1 << 20;

/// Converts the model in `src` into a container in `dst`, which is made if it is not there.
///
/// Continues a conversion of the same source and parameters; refuses a directory that holds anything else. On an error
/// the finished shards stay, and the same call goes on from them.
pub fn convert(
    src: &Path,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    options.check()?;
    refuse_unfinished(src)?;
    convert_opened(&Checkpoint::open_with(src, &["config.json"])?, dst, options, progress)
}

/// As [`convert`], from a checkpoint that is open already.
pub fn convert_opened(
    source: &Checkpoint,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    options.check()?;
    let shards = plan::shards(source, options)?;
    let lines = plan::describe(&shards);
    let (identity, parameters) = (source_identity(source)?, options.parameters());
    let layouts: Vec<ShardLayout> =
        shards.iter().map(|shard| ShardLayout::new(shard, &identity, &parameters)).collect();
    let bytes_total = layouts.iter().map(|layout| layout.file_bytes).sum();
    progress(Progress::Plan { lines: lines.clone(), shards: shards.len(), bytes: bytes_total });

    let destination = Destination::prepare(&source.dir, dst, &shards, &identity, &parameters)?;
    let kept = destination.finished(&shards, &layouts)?;
    let missing = |number: &usize| !kept[*number];
    let needed = (0..shards.len()).filter(missing).map(|number| layouts[number].file_bytes).sum();
    destination.check_space(needed, options.free_bytes)?;
    destination.begin()?;

    let mut done = 0;
    for (number, (shard, layout)) in shards.iter().zip(&layouts).enumerate() {
        let name = shard.file_name.clone();
        progress(Progress::Shard { name, number: number + 1, of: shards.len(), kept: kept[number] });
        let end = done + layout.file_bytes;
        if !kept[number] {
            let mut reported = done;
            let temporary = destination.temporary(&shard.file_name);
            let written = shard::write(shard, layout, &source.tensors, &temporary, &mut |bytes| {
                done += bytes;
                if done - reported >= PROGRESS_BYTES {
                    reported = done;
                    progress(Progress::Bytes { done, of: bytes_total });
                }
                match &options.cancel {
                    Some(cancel) if cancel.raised() => Err(CheckpointError::Interrupted { dir: dst.to_owned() }),
                    _ => Ok(()),
                }
            });
            if written.is_err() {
                // Half a shard is of no use; the next conversion removes it if this fails.
                let _ = std::fs::remove_file(&temporary);
            }
            written?;
            destination.publish(&temporary, &shard.file_name)?;
        }
        done = end;
        progress(Progress::Bytes { done, of: bytes_total });
    }
    destination.add_small_files(&shards)?;
    verify(dst, &shards)?;
    destination.end()?;
    let shards_kept = kept.iter().filter(|kept| **kept).count();
    let shards_written = shards.len() - shards_kept;
    Ok(ConvertReport { shards_written, shards_kept, bytes_written: needed, bytes_total, lines })
}

/// Tells sources apart, also two trainings of one architecture, whose configurations and headers are the same: hashes
/// some weights of every shard with them.
fn source_identity(source: &Checkpoint) -> Result<String> {
    const SAMPLES: u64 = 16;
    let mut hasher = Xxh3::new();
    hasher.update(&source.fingerprint().to_le_bytes());
    let mut sample = [0; 4096];
    for path in source.tensors.paths() {
        let file = File::open(path).map_err(io_error("open", path))?;
        let end = file.metadata().map_err(io_error("read", path))?.len().saturating_sub(sample.len() as u64);
        for number in 1..=SAMPLES {
            let read = file.read_at(&mut sample, end / SAMPLES * number).map_err(io_error("read", path))?;
            hasher.update(&sample[..read]);
        }
    }
    Ok(format!("{:016x}", hasher.digest()))
}

/// Reads the result back as any reader would: every weight must be found in the format that was planned.
fn verify(dst: &Path, shards: &[ShardPlan]) -> Result<()> {
    let result = Checkpoint::open_with(dst, &["config.json"])?;
    for item in shards.iter().flat_map(|shard| &shard.runs).flat_map(|run| &run.items) {
        let (rows, cols) = (item.source.spec.rows, item.source.spec.cols);
        if item.shape.len() == 1 {
            result.tensors.vector(&item.name, cols)?;
            continue;
        }
        let found = result.tensors.matrix(&item.name, rows, cols)?;
        if found.spec.format != item.target {
            return Err(CheckpointError::Tensor {
                file: result.tensors.path(found.data.file).to_owned(),
                tensor: item.name.clone(),
                what: "format after conversion",
                expected: item.target.to_string(),
                found: found.spec.format.to_string(),
            });
        }
    }
    Ok(())
}

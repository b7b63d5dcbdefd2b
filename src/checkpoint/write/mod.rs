//! Writing a container laid out for direct reads, wherever its weights come from.
//!
//! The plan, every shard's header and the room needed are settled before the first byte. A shard is written under a
//! temporary name, made durable and then renamed, so a shard that has its name is whole; writing that was killed goes on
//! with the first shard that has not. What a shard holds depends on its plan and its weights only, hence continued
//! writing gives the same bytes as one that was never stopped.

mod destination;
pub mod layout;
pub(crate) mod plan;
mod shard;

use super::Checkpoint;
use super::error::{CheckpointError, Result};
use super::required::Shape;
use crate::kernels::Format;
use destination::Destination;
pub(crate) use destination::SmallFile;
use layout::{Item, ShardLayout, ShardPlan};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

/// What is reported while a container is written.
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
        /// Of those, bytes that take space: all that are not in holes.
        stored: u64,
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
    /// A megabyte or more, or the rest of a shard, has been stored.
    Bytes {
        /// Bytes stored of all shards so far, kept ones included.
        done: u64,
        /// Bytes of all shards that are to be stored.
        of: u64,
    },
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Progress::Plan { lines, shards, bytes, .. } => {
                write!(f, "{}; {bytes} bytes in {shards} shards", lines.join("; "))
            }
            Progress::Shard { name, number, of, kept } => {
                write!(f, "shard {number} of {of}: {name}{}", if *kept { ", finished before" } else { "" })
            }
            Progress::Bytes { done, of } => write!(f, "{done} of {of} bytes"),
        }
    }
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
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

/// Ends the writing from outside: between two writes it looks whether the flag is up.
#[derive(Clone, Debug)]
pub struct Cancel(pub Arc<AtomicBool>);

impl Cancel {
    fn raised(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl PartialEq for Cancel {
    fn eq(&self, other: &Cancel) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cancel {}

/// Where the values of weights come from.
pub(crate) trait Weights {
    /// Hands the weights of `item`, in its target format, to `put` in pieces of bounded size, and returns their scales,
    /// little-endian.
    fn write(&mut self, item: &Item, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<Vec<u8>>;
}

/// What a container is to hold.
pub(crate) struct Contents {
    pub shards: Vec<ShardPlan>,
    pub small_files: Vec<SmallFile>,
    /// Tells sources of weights apart.
    pub identity: String,
    /// Everything else that decides the bytes.
    pub parameters: String,
}

/// The threads that encode; none where none can be started, and then the caller encodes.
pub(crate) fn threads() -> Option<&'static ThreadPool> {
    static THREADS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| ThreadPoolBuilder::new().build().ok());
    THREADS.as_ref()
}

/// Progress is reported each time at least so many bytes were added.
const PROGRESS_BYTES: u64 = 1 << 20;

/// A container about to be written: everything is settled and nothing is there yet but what an earlier run finished.
pub(crate) struct Writing {
    shards: Vec<ShardPlan>,
    layouts: Vec<ShardLayout>,
    kept: Vec<bool>,
    destination: Destination,
    lines: Vec<String>,
    bytes_total: u64,
    bytes_stored: u64,
    /// Bytes still to be stored.
    needed: u64,
}

impl Writing {
    /// Reports the plan, then refuses a destination that holds anything else, is being written into, or has too little
    /// room: `free_bytes`, or what its file system says.
    pub fn prepare(
        dst: &Path,
        contents: Contents,
        free_bytes: Option<u64>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Writing> {
        let Contents { shards, small_files, identity, parameters } = contents;
        let lines = describe(&shards);
        let layouts: Vec<ShardLayout> =
            shards.iter().map(|shard| ShardLayout::new(shard, &identity, &parameters)).collect();
        let bytes_total = layouts.iter().map(|layout| layout.file_bytes).sum();
        let bytes_stored = layouts.iter().map(ShardLayout::stored_bytes).sum();
        let (count, bytes, stored) = (shards.len(), bytes_total, bytes_stored);
        progress(Progress::Plan { lines: lines.clone(), shards: count, bytes, stored });

        let destination = Destination::prepare(dst, &shards, small_files, &identity, &parameters)?;
        let kept = destination.finished(&shards, &layouts)?;
        let missing = layouts.iter().zip(&kept).filter(|(_, kept)| !**kept);
        let needed = missing.map(|(layout, _)| layout.stored_bytes()).sum();
        destination.check_space(needed, free_bytes)?;
        Ok(Writing { shards, layouts, kept, destination, lines, bytes_total, bytes_stored, needed })
    }

    /// Writes what is missing and reads all of it back. What is finished stays when it fails.
    pub fn run(
        &self,
        weights: &mut dyn Weights,
        cancel: Option<&Cancel>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Report> {
        let Writing { shards, layouts, kept, destination, bytes_stored, .. } = self;
        destination.begin()?;
        let mut done = 0;
        for (number, (shard, layout)) in shards.iter().zip(layouts).enumerate() {
            let name = shard.file_name.clone();
            progress(Progress::Shard { name, number: number + 1, of: shards.len(), kept: kept[number] });
            let end = done + layout.stored_bytes();
            if !kept[number] {
                let mut reported = done;
                let temporary = destination.temporary(&shard.file_name);
                let written = shard::write(shard, layout, weights, &temporary, &mut |bytes| {
                    done += bytes;
                    if done - reported >= PROGRESS_BYTES {
                        reported = done;
                        progress(Progress::Bytes { done, of: *bytes_stored });
                    }
                    match cancel {
                        Some(cancel) if cancel.raised() => Err(destination.interrupted()),
                        _ => Ok(()),
                    }
                });
                if written.is_err() {
                    // Half a shard is of no use; the next run removes it if this fails.
                    let _ = std::fs::remove_file(&temporary);
                }
                written?;
                destination.publish(&temporary, &shard.file_name)?;
            }
            done = end;
            progress(Progress::Bytes { done, of: *bytes_stored });
        }
        destination.add_small_files(shards)?;
        verify(destination.dir(), shards)?;
        destination.end()?;
        let shards_kept = kept.iter().filter(|kept| **kept).count();
        let shards_written = shards.len() - shards_kept;
        let Writing { needed: bytes_written, bytes_total, .. } = *self;
        Ok(Report { shards_written, shards_kept, bytes_written, bytes_total, lines: self.lines.clone() })
    }

    /// Removes all that is written.
    pub fn discard(&self) {
        self.destination.discard(&self.shards);
    }
}

/// Lines that say what will be written: for each kind of weight its format, count and bytes.
fn describe(shards: &[ShardPlan]) -> Vec<String> {
    let mut tally: BTreeMap<(&str, Format), (usize, u64)> = BTreeMap::new();
    for shard in shards {
        for item in shard.runs.iter().flat_map(|run| &run.items) {
            let kind = match (shard.experts, item.target) {
                (true, _) if shard.file_name.starts_with(layout::MTP_STEM) => "MTP experts",
                (true, _) => "routed experts",
                (false, _) => "dense weights",
            };
            let (count, bytes) = tally.entry((kind, item.target)).or_default();
            *count += 1;
            *bytes += item.data_bytes() + 4 * item.scale_count();
        }
    }
    let line = |((kind, format), (count, bytes)): ((&str, Format), (usize, u64))| {
        format!("{kind}: {count} tensors as {format}, {bytes} bytes")
    };
    tally.into_iter().map(line).collect()
}

/// Reads the result back as any reader would: every weight must be found in the format that was planned.
fn verify(dst: &Path, shards: &[ShardPlan]) -> Result<()> {
    let result = Checkpoint::open_with(dst, &["config.json"])?;
    for item in shards.iter().flat_map(|shard| &shard.runs).flat_map(|run| &run.items) {
        let (rows, cols) = match item.shape {
            Shape::Vector(len) => {
                result.tensors.vector(&item.name, len)?;
                continue;
            }
            Shape::Matrix { rows, cols } => (rows, cols),
        };
        let found = result.tensors.matrix(&item.name, rows, cols)?;
        if found.spec.format != item.target {
            return Err(CheckpointError::Tensor {
                file: result.tensors.path(found.data.file).to_owned(),
                tensor: item.name.clone(),
                what: "format after it was written",
                expected: item.target.to_string(),
                found: found.spec.format.to_string(),
            });
        }
    }
    Ok(())
}

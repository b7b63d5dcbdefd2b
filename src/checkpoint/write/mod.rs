//! Writing a container laid out for direct reads, wherever its weights come from.
//!
//! The plan, every shard's header and the room needed are settled before the first byte. A shard is written under a
//! temporary name, made durable, read back, header and runs, and then renamed, so a shard that has its name is whole and as
//! it was meant; writing that was killed goes on with the first shard that has not. What a shard holds depends on its plan
//! and its weights only, hence continued writing gives the same bytes as one that was never stopped.

mod check;
mod destination;
pub mod layout;
pub(crate) mod plan;
mod readback;
mod shard;

use super::Checkpoint;
use super::error::{CheckpointError, Result};
use super::required::Shape;
use crate::kernels::Format;
pub(crate) use check::{Checked, check, check_alone};
use destination::Destination;
pub(crate) use destination::SmallFile;
use layout::{Item, ShardLayout, ShardPlan};
use millstream_io::{SlabPool, write_pool};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

/// What is reported while a container is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// What whoever has this done should know: what of the source is left out, what is not as it was expected.
    Note(String),
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
    /// A megabyte or more, or the rest of a shard, has been stored or read back.
    Bytes(Counts),
}

/// How far the writing is, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Stored of all shards so far, kept ones included.
    pub done: u64,
    /// Of all shards, to be stored.
    pub of: u64,
    /// Stored by this run.
    pub written: u64,
    /// Still to be stored by this run.
    pub left: u64,
    /// Read by this run of what the weights are made from.
    pub taken: u64,
    /// Read back by this run and found as written.
    pub checked: u64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Progress::Note(line) => f.write_str(line),
            Progress::Plan { lines, shards, bytes, .. } => {
                write!(f, "{}; {bytes} bytes in {shards} shards", lines.join("; "))
            }
            Progress::Shard { name, number, of, kept } => {
                write!(f, "shard {number} of {of}: {name}{}", if *kept { ", finished before" } else { "" })
            }
            Progress::Bytes(Counts { done, of, .. }) => write!(f, "{done} of {of} bytes"),
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
    /// Whether all that this run read back, what it wrote and what it proved, came around the page cache; `None` where
    /// there was nothing.
    pub read_back_directly: Option<bool>,
    /// Shards of the source that this run removed.
    pub source_shards_removed: usize,
    /// Their bytes.
    pub source_bytes_removed: u64,
    /// Names of those that stay because they hold more than was converted.
    pub source_shards_kept: Vec<String>,
    /// The plan's lines, proved against the headers on disk.
    pub lines: Vec<String>,
}

/// Ends the writing from outside: between two writes it looks whether the flag is up.
#[derive(Clone, Debug)]
pub struct Cancel(pub Arc<AtomicBool>);

impl PartialEq for Cancel {
    fn eq(&self, other: &Cancel) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Cancel {}

/// Where the values of weights come from.
pub(crate) trait Weights {
    /// The items of this shard are asked for next, in order.
    fn begin(&mut self, _shard: &ShardPlan) -> Result<()> {
        Ok(())
    }

    /// Hands the weights of `item`, in its target format, to `put` in pieces of bounded size, and returns their scales,
    /// little-endian. A piece of no byte only asks whether to go on.
    fn write(&mut self, item: &Item, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<Vec<u8>>;

    /// All items of the shard were asked for.
    fn end(&mut self) -> Result<()> {
        Ok(())
    }

    /// Whether something is lost for good once the shard of this number is stored: then it must be proved, whoever wrote
    /// it.
    fn needs_proof(&self, _number: usize) -> bool {
        false
    }

    /// Whether all that the shard of this number is made from is still there.
    fn can_make(&self, _number: usize) -> bool {
        true
    }

    /// Where they come from, for a message.
    fn source(&self) -> &Path {
        Path::new("")
    }

    /// The shard of this number is durable, proved, and has its name.
    fn stored(&mut self, _number: usize) -> Result<()> {
        Ok(())
    }

    /// Counts the bytes of the source that were read.
    fn taken(&self) -> Arc<AtomicU64> {
        Arc::default()
    }
}

/// What a container is to hold.
pub(crate) struct Contents {
    pub shards: Vec<ShardPlan>,
    pub small_files: Vec<SmallFile>,
    /// Tells sources of weights apart.
    pub identity: String,
    /// Everything else that decides the bytes.
    pub parameters: String,
    /// What becomes free while they are written.
    pub frees: Frees,
}

/// Space that is given back as shards are stored.
#[derive(Clone, Debug, Default)]
pub(crate) struct Frees {
    /// Where.
    pub device: u64,
    /// Bytes after each shard; none where nothing is.
    pub after: Vec<u64>,
}

impl Frees {
    /// The most that shards of so many bytes take at any time, given what becomes free before each is begun.
    fn peak(&self, stored: impl Iterator<Item = u64>) -> u64 {
        let (mut taken, mut peak) = (0i128, 0);
        for (number, bytes) in stored.enumerate() {
            taken += i128::from(bytes);
            peak = peak.max(taken);
            taken -= i128::from(self.after.get(number).copied().unwrap_or(0));
        }
        u64::try_from(peak).unwrap_or(u64::MAX)
    }
}

/// The threads that encode; none where none can be started, and then the caller encodes.
pub(crate) fn threads() -> Option<&'static ThreadPool> {
    static THREADS: LazyLock<Option<ThreadPool>> = LazyLock::new(|| ThreadPoolBuilder::new().build().ok());
    THREADS.as_ref()
}

/// Opens a destination, to write into it or to look at it.
type OpenDestination = fn(&Path, &[ShardPlan], Vec<SmallFile>, &str, &str) -> Result<Destination>;

/// Progress is reported each time at least so many bytes were added.
const PROGRESS_BYTES: u64 = 1 << 20;

/// A container about to be written: everything is settled and nothing is there yet but what an earlier run finished.
pub(crate) struct Writing {
    shards: Vec<ShardPlan>,
    layouts: Vec<ShardLayout>,
    /// Hashes of the shards that an earlier run had finished.
    kept: Vec<Option<Vec<u64>>>,
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
        let frees = contents.frees.clone();
        let writing = Writing::settle(dst, contents, Destination::prepare, progress)?;
        let frees = if writing.destination.is_on(frees.device)? { frees } else { Frees::default() };
        let missing = writing.layouts.iter().zip(&writing.kept).map(|(layout, kept)| missing_bytes(layout, kept));
        writing.destination.check_space(frees.peak(missing), free_bytes)?;
        Ok(writing)
    }

    /// As [`Writing::prepare`], to look at what was written: changes nothing in `dst`.
    pub fn look(dst: &Path, contents: Contents, progress: &mut dyn FnMut(Progress)) -> Result<Writing> {
        Writing::settle(dst, contents, Destination::look, progress)
    }

    fn settle(
        dst: &Path,
        contents: Contents,
        open: OpenDestination,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Writing> {
        let Contents { shards, small_files, identity, parameters, .. } = contents;
        let lines = describe(&shards);
        let layouts: Vec<ShardLayout> =
            shards.iter().map(|shard| ShardLayout::new(shard, &identity, &parameters)).collect();
        let bytes_total = layouts.iter().map(|layout| layout.file_bytes).sum();
        let bytes_stored = layouts.iter().map(ShardLayout::stored_bytes).sum();
        let (count, bytes, stored) = (shards.len(), bytes_total, bytes_stored);
        progress(Progress::Plan { lines: lines.clone(), shards: count, bytes, stored });

        let destination = open(dst, &shards, small_files, &identity, &parameters)?;
        let kept = destination.finished(&shards, &layouts)?;
        let needed = layouts.iter().zip(&kept).map(|(layout, kept)| missing_bytes(layout, kept)).sum();
        Ok(Writing { shards, layouts, kept, destination, lines, bytes_total, bytes_stored, needed })
    }

    /// Shards that this writing has to make, by number and name.
    pub fn missing(&self) -> impl Iterator<Item = (usize, &str)> {
        let shards = self.shards.iter().zip(&self.kept).enumerate();
        shards.filter(|(_, (_, kept))| kept.is_none()).map(|(number, (shard, _))| (number, shard.file_name.as_str()))
    }

    /// Writes what is missing, each shard read back before it gets its name. What is finished stays when it fails.
    pub fn run(
        &self,
        weights: &mut dyn Weights,
        cancel: Option<&Cancel>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Report> {
        let Writing { shards, layouts, kept, destination, .. } = self;
        // A whole container stays one while it is only proved.
        if self.missing().next().is_some() {
            destination.begin()?;
        }
        let of = self.bytes_stored;
        let mut run = Run {
            destination,
            pool: write_pool()?,
            cancel: cancel.map(|cancel| Arc::clone(&cancel.0)).unwrap_or_default(),
            taken: weights.taken(),
            counts: Counts { of, left: self.needed, ..Counts::default() },
            reported: 0,
            progress,
            direct: None,
            remade: 0,
        };
        for (number, (shard, layout)) in shards.iter().zip(layouts).enumerate() {
            let name = shard.file_name.clone();
            let is_kept = kept[number].is_some();
            (run.progress)(Progress::Shard { name, number: number + 1, of: shards.len(), kept: is_kept });
            match &kept[number] {
                Some(hashes) => {
                    run.counts.done += layout.stored_bytes();
                    if weights.needs_proof(number) {
                        run.kept(number, shard, layout, hashes, weights)?;
                    }
                }
                None => run.shard(shard, layout, weights)?,
            }
            weights.stored(number)?;
            run.report();
        }
        let (read_back_directly, bytes_written, remade) = (run.direct, run.counts.written, run.remade);
        destination.add_small_files(shards)?;
        verify(destination.dir(), shards)?;
        destination.end()?;
        let shards_kept = kept.iter().flatten().count() - remade;
        let shards_written = shards.len() - shards_kept;
        let bytes_total = self.bytes_total;
        let lines = self.lines.clone();
        Ok(Report {
            shards_written,
            shards_kept,
            bytes_written,
            bytes_total,
            read_back_directly,
            source_shards_removed: 0,
            source_bytes_removed: 0,
            source_shards_kept: Vec::new(),
            lines,
        })
    }

    /// Removes all that is written.
    pub fn discard(&self) {
        self.destination.discard(&self.shards);
    }
}

/// What is still to be stored of a shard.
fn missing_bytes(layout: &ShardLayout, kept: &Option<Vec<u64>>) -> u64 {
    if kept.is_some() { 0 } else { layout.stored_bytes() }
}

/// The writing as it goes on.
struct Run<'a> {
    destination: &'a Destination,
    pool: SlabPool,
    cancel: Arc<AtomicBool>,
    taken: Arc<AtomicU64>,
    counts: Counts,
    /// Bytes written and checked when progress was last reported.
    reported: u64,
    progress: &'a mut dyn FnMut(Progress),
    /// Whether all that was read back came around the page cache.
    direct: Option<bool>,
    /// Shards of an earlier run that were damaged and are written anew.
    remade: usize,
}

impl Run<'_> {
    /// Proves a shard that an earlier run had finished: that the drive has it, and, while its source is there, that it is
    /// what that makes; of another source it would be the same headers and samples. A damaged one is written anew.
    fn kept(
        &mut self,
        number: usize,
        shard: &ShardPlan,
        layout: &ShardLayout,
        hashes: &[u64],
        weights: &mut dyn Weights,
    ) -> Result<()> {
        match self.read_back(&self.destination.dir().join(&shard.file_name), layout, hashes) {
            Err(error @ CheckpointError::ReadBack { .. }) if weights.can_make(number) => {
                (self.progress)(Progress::Note(format!("{error}; it is written anew")));
                self.remade += 1;
                self.counts.done -= layout.stored_bytes();
                self.counts.left += layout.stored_bytes();
                self.shard(shard, layout, weights)
            }
            Err(CheckpointError::ReadBack { file, damage, .. }) => {
                Err(CheckpointError::ReadBack { file, damage, kept: true })
            }
            Ok(()) if weights.can_make(number) => self.compare(shard, layout, hashes, weights),
            other => other,
        }
    }

    /// Makes the runs of a shard again and compares them with those that are stored.
    fn compare(
        &mut self,
        shard: &ShardPlan,
        layout: &ShardLayout,
        hashes: &[u64],
        weights: &mut dyn Weights,
    ) -> Result<()> {
        let made = shard::hashes(shard, layout, weights, &mut |_| self.go_on())?;
        match layout.run_names().iter().zip(hashes.iter().zip(&made)).find(|(_, (stored, made))| stored != made) {
            None => Ok(()),
            Some((run, _)) => {
                let file = self.destination.dir().join(&shard.file_name);
                Err(CheckpointError::OtherWeights { file, run: run.clone(), dir: weights.source().to_owned() })
            }
        }
    }

    /// Writes one shard, proves it and gives it its name. Half a shard is of no use and is removed.
    fn shard(&mut self, shard: &ShardPlan, layout: &ShardLayout, weights: &mut dyn Weights) -> Result<()> {
        let temporary = self.destination.temporary(&shard.file_name);
        let proved = self.prove(shard, layout, weights, &temporary);
        if proved.is_err() {
            // The next run removes it if this fails.
            let _ = std::fs::remove_file(&temporary);
        }
        proved?;
        self.destination.publish(&temporary, &shard.file_name)
    }

    fn prove(
        &mut self,
        shard: &ShardPlan,
        layout: &ShardLayout,
        weights: &mut dyn Weights,
        temporary: &Path,
    ) -> Result<()> {
        let end = self.counts.done + layout.stored_bytes();
        let pool = self.pool.clone();
        let hashes = shard::write(shard, layout, weights, temporary, &pool, &mut |bytes| {
            self.add(bytes);
            self.go_on()
        })?;
        // A hole has nothing to add.
        self.add(end - self.counts.done);
        self.report();
        self.destination.check_header(temporary, layout, &hashes)?;
        self.read_back(temporary, layout, &hashes)
    }

    /// Reads a shard as the drive gives it; a hole has nothing to be read.
    fn read_back(&mut self, path: &Path, layout: &ShardLayout, hashes: &[u64]) -> Result<()> {
        if layout.hollow {
            return Ok(());
        }
        let cancel = Arc::clone(&self.cancel);
        let read_back = readback::compare(path, layout, hashes, &cancel, &mut |bytes| {
            self.counts.checked += bytes;
            self.report_now_and_then();
        })?;
        let Some(direct) = read_back else { return Err(self.destination.interrupted()) };
        if !direct && self.direct != Some(false) {
            let place = self.destination.dir().display();
            let line =
                format!("{place} cannot be read directly: what is read back may be what is left of it in memory");
            (self.progress)(Progress::Note(line));
        }
        self.direct = Some(direct && self.direct.unwrap_or(true));
        Ok(())
    }

    fn add(&mut self, bytes: u64) {
        self.counts.done += bytes;
        self.counts.written += bytes;
        self.counts.left = self.counts.left.saturating_sub(bytes);
        self.report_now_and_then();
    }

    fn report_now_and_then(&mut self) {
        if self.counts.written + self.counts.checked - self.reported >= PROGRESS_BYTES {
            self.report();
        }
    }

    fn report(&mut self) {
        self.counts.taken = self.taken.load(Ordering::Relaxed);
        self.reported = self.counts.written + self.counts.checked;
        (self.progress)(Progress::Bytes(self.counts));
    }

    fn go_on(&self) -> Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(self.destination.interrupted()),
            false => Ok(()),
        }
    }
}

/// Lines that say what will be written: for each kind of weight its format, count and bytes.
fn describe(shards: &[ShardPlan]) -> Vec<String> {
    let mut tally: BTreeMap<(&str, Format), (usize, u64)> = BTreeMap::new();
    for shard in shards {
        for item in shard.runs.iter().flat_map(|run| &run.items) {
            let kind = match item.name.contains(".mlp.experts.") {
                true if shard.file_name.starts_with(layout::MTP_STEM) => "MTP experts",
                true => "routed experts",
                false => "dense weights",
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

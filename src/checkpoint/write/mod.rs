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
mod progress;
pub(super) mod readback;
mod run;
mod shard;

use super::Checkpoint;
use super::error::{CheckpointError, Result};
use super::required::Shape;
use crate::kernels::Format;
use crate::size;
pub(crate) use check::{Checked, check, check_alone};
use destination::Destination;
pub(crate) use destination::SmallFile;
use layout::{Item, ShardLayout, ShardPlan};
pub use progress::{Cancel, Counts, PlanLine, Progress, Report};
use rayon::{ThreadPool, ThreadPoolBuilder};
use run::Run;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

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

    /// How the shard of this number is proved where an earlier run had finished it.
    fn proof(&self, _number: usize) -> Proof {
        Proof::None
    }

    /// What of the source the shard of this number is made from, and is there no more.
    fn gone(&self, _number: usize) -> Vec<String> {
        Vec::new()
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

/// What is asked of a shard that an earlier run had finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Proof {
    /// Nothing: what it is made from is there and stays.
    None,
    /// That it reads back as it was written: something that it is made from is gone, or goes.
    Read,
    /// That too, and that it is what its source makes: whether that is what it was made from is not known.
    Compared,
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

/// Threads that make weights; none where none can be started, and then the caller makes them.
pub(crate) fn threads() -> Option<ThreadPool> {
    ThreadPoolBuilder::new().build().ok()
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
    lines: Vec<PlanLine>,
    bytes_total: u64,
    bytes_stored: u64,
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
        Ok(Writing { shards, layouts, kept, destination, lines, bytes_total, bytes_stored })
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
        let counts = Counts { of: self.bytes_stored, left: self.work(weights), ..Counts::default() };
        let mut run = Run::new(destination, weights.taken(), counts, cancel, progress)?;
        self.proofs(weights).into_iter().for_each(|line| run.tell(Progress::Note(line)));
        for (number, (shard, layout)) in shards.iter().zip(layouts).enumerate() {
            let name = shard.file_name.clone();
            let is_kept = kept[number].is_some();
            run.tell(Progress::Shard { name, number: number + 1, of: shards.len(), kept: is_kept });
            match &kept[number] {
                Some(hashes) => run.kept(number, shard, layout, hashes, weights)?,
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

    /// Bytes that a run with `weights` writes, reads back and compares.
    fn work(&self, weights: &dyn Weights) -> u64 {
        let work = |(number, layout): (usize, &ShardLayout)| match (&self.kept[number], weights.proof(number)) {
            (None, _) => layout.work_bytes(),
            (Some(_), Proof::None) => 0,
            (Some(_), Proof::Read) => layout.checked_bytes(),
            (Some(_), Proof::Compared) => layout.checked_bytes() + layout.stored_bytes(),
        };
        self.layouts.iter().enumerate().map(work).sum()
    }

    /// Says what of an earlier run is proved, since that takes its time.
    fn proofs(&self, weights: &dyn Weights) -> Vec<String> {
        let line = |proof: Proof, what: &str| {
            let asked = |number: &usize| self.kept[*number].is_some() && weights.proof(*number) == proof;
            let layouts: Vec<&ShardLayout> =
                (0..self.kept.len()).filter(asked).map(|number| &self.layouts[number]).collect();
            let bytes = size::show(layouts.iter().map(|layout| layout.checked_bytes()).sum());
            let shards = if layouts.len() == 1 { "shard" } else { "shards" };
            (!layouts.is_empty()).then(|| format!("{} finished {shards}, {bytes}, {what}", layouts.len()))
        };
        let read = "to be read again: what they are made from is gone, or goes";
        let compared =
            "to be read again and made again to be compared: what they are made from goes, and may have changed";
        [line(Proof::Read, read), line(Proof::Compared, compared)].into_iter().flatten().collect()
    }

    /// Whether no shard of an earlier run is there.
    pub fn is_new(&self) -> bool {
        self.kept.iter().all(Option::is_none)
    }

    /// Where it goes.
    pub fn destination(&self) -> &Destination {
        &self.destination
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

/// Lines that say what will be written: for each kind of weight its format, count and bytes.
fn describe(shards: &[ShardPlan]) -> Vec<PlanLine> {
    let mut tally: BTreeMap<(&'static str, Format), (usize, u64)> = BTreeMap::new();
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
    let line = |((kind, format), (tensors, bytes))| PlanLine { kind, format, tensors, bytes };
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

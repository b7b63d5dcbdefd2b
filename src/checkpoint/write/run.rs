//! One run of the writing: shards made, proved and named, one after the other.

use super::destination::Destination;
use super::layout::{ShardLayout, ShardPlan};
use super::{Cancel, Counts, PROGRESS_BYTES, Progress, Proof, Weights, readback, shard};
use crate::checkpoint::error::{CheckpointError, Result};
use millstream_io::{SlabPool, write_pool};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The writing as it goes on.
pub(super) struct Run<'a> {
    destination: &'a Destination,
    pool: SlabPool,
    cancel: Arc<AtomicBool>,
    taken: Arc<AtomicU64>,
    pub counts: Counts,
    /// Bytes of work when progress was last reported.
    reported: u64,
    progress: &'a mut dyn FnMut(Progress),
    /// Whether all that was read back came around the page cache.
    pub direct: Option<bool>,
    /// Shards of an earlier run that were damaged and are written anew.
    pub remade: usize,
}

impl<'a> Run<'a> {
    /// A run with `counts.of` bytes to store in all and `counts.left` bytes of work.
    pub fn new(
        destination: &'a Destination,
        taken: Arc<AtomicU64>,
        counts: Counts,
        cancel: Option<&Cancel>,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Result<Run<'a>> {
        let cancel = cancel.map(|cancel| Arc::clone(&cancel.0)).unwrap_or_default();
        let pool = write_pool()?;
        Ok(Run { destination, pool, cancel, taken, counts, reported: 0, progress, direct: None, remade: 0 })
    }

    pub fn tell(&mut self, progress: Progress) {
        (self.progress)(progress);
    }

    /// Proves a shard that an earlier run had finished, as its source asks for. A damaged one is written anew while what
    /// it is made from is there.
    pub fn kept(
        &mut self,
        number: usize,
        shard: &ShardPlan,
        layout: &ShardLayout,
        hashes: &[u64],
        weights: &mut dyn Weights,
    ) -> Result<()> {
        self.counts.done += layout.stored_bytes();
        let proof = weights.proof(number);
        if proof == Proof::None {
            return Ok(());
        }
        match self.read_back(&self.destination.dir().join(&shard.file_name), layout, hashes) {
            Err(CheckpointError::ReadBack { file, damage }) => {
                let gone = weights.gone(number);
                if !gone.is_empty() {
                    return Err(CheckpointError::Damaged { file, damage, gone });
                }
                let line = format!(
                    "{} reads back otherwise than it was written: {damage}; it is written anew",
                    file.display()
                );
                self.tell(Progress::Note(line));
                self.remade += 1;
                self.counts.done -= layout.stored_bytes();
                // It is not compared any more.
                let dropped = if proof == Proof::Compared { layout.stored_bytes() } else { 0 };
                self.counts.left = self.counts.left.saturating_sub(dropped) + layout.work_bytes();
                self.shard(shard, layout, weights)
            }
            Ok(()) if proof == Proof::Compared => self.compare(shard, layout, hashes, weights),
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
        let made = shard::hashes(shard, layout, weights, &mut |bytes| {
            self.work(bytes);
            self.go_on()
        })?;
        match layout.run_names().iter().zip(hashes.iter().zip(&made)).find(|(_, (stored, made))| stored != made) {
            None => Ok(()),
            Some((run, _)) => {
                let file = self.destination.dir().join(&shard.file_name);
                Err(CheckpointError::OtherWeights { file, run: run.clone(), dir: weights.source().to_owned() })
            }
        }
    }

    /// Writes one shard, proves it and gives it its name. Half a shard is of no use and is removed.
    pub fn shard(&mut self, shard: &ShardPlan, layout: &ShardLayout, weights: &mut dyn Weights) -> Result<()> {
        let temporary = self.destination.temporary(&shard.file_name);
        let proved = self.prove(shard, layout, weights, &temporary);
        if proved.is_err() {
            // The next run removes it if this fails.
            let _ = std::fs::remove_file(&temporary);
        }
        proved.map_err(|error| match error {
            // What it is to be, and not what it was called until it was removed.
            CheckpointError::ReadBack { damage, .. } => {
                CheckpointError::ReadBack { file: self.destination.dir().join(&shard.file_name), damage }
            }
            other => other,
        })?;
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
            self.work(bytes);
        })?;
        let Some(direct) = read_back else { return Err(self.destination.interrupted()) };
        if !direct && self.direct != Some(false) {
            let place = self.destination.dir().display();
            let line =
                format!("{place} cannot be read directly: what is read back may be what is left of it in memory");
            self.tell(Progress::Note(line));
        }
        self.direct = Some(direct && self.direct.unwrap_or(true));
        Ok(())
    }

    fn add(&mut self, bytes: u64) {
        self.counts.done += bytes;
        self.counts.written += bytes;
        self.work(bytes);
    }

    /// So much of the work is done.
    fn work(&mut self, bytes: u64) {
        self.counts.worked += bytes;
        self.counts.left = self.counts.left.saturating_sub(bytes);
        if self.counts.worked - self.reported >= PROGRESS_BYTES {
            self.report();
        }
    }

    pub fn report(&mut self) {
        self.counts.taken = self.taken.load(Ordering::Relaxed);
        self.reported = self.counts.worked;
        self.tell(Progress::Bytes(self.counts));
    }

    fn go_on(&self) -> Result<()> {
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(self.destination.interrupted()),
            false => Ok(()),
        }
    }
}

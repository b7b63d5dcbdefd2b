//! What a store counts itself, and what it takes from its device's counters: everything since the last
//! [`ExpertStore::reset_stats`].

use std::time::{Duration, Instant};

use millstream_io::{Completion, Device, DeviceStats, DriveStats};

use super::{ExpertKey, ExpertStore};
use crate::meter::{Durations, Recent};

/// What the store has done so far. What the drive did for it is the device's to count: see [`ExpertStore::device_stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreStats {
    /// Experts asked for, counted once a layer and step.
    pub requested: u64,
    /// Requests served from a slab that an earlier request had filled.
    pub hits: u64,
    /// Of those, experts that are pinned.
    pub pinned: u64,
    /// Requests served from a slab that a guess had filled, for the first time.
    pub prefetched: u64,
    /// Requests that had to wait for a read, late guesses included.
    pub misses: u64,
    /// Requests for what a guess was still reading.
    pub late: u64,
    /// Guesses whose read was submitted.
    pub guessed: u64,
    /// Guesses taken back before they were read, or before they were wholly read.
    pub cancelled: u64,
    /// Guesses that were read and not asked for by the request they were for.
    pub wasted: u64,
    /// Bytes of the files read for those, and for guesses that were taken back half read.
    pub wasted_bytes: u64,
    /// Bytes of the experts that were read, without what lies around them.
    pub useful_bytes: u64,
    /// Reads whose bytes were compared with their hash, and experts that were when others had been wrong.
    pub checked: u64,
    /// Of those reads, wrong ones that the bytes of another copy put right.
    pub healed: u64,
    /// Of those experts, wrong ones that were in memory.
    pub discarded: u64,
    /// Time that took.
    pub checking: Duration,
}

/// A read that is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRecord {
    /// What was read.
    pub key: ExpertKey,
    /// Whether it was a guess until the end.
    pub guess: bool,
    /// Whether it was whole.
    pub well: bool,
    /// When it was submitted.
    pub submitted: Instant,
    /// From then to its completion, with its time in the queue.
    pub took: Duration,
}

/// Counters, and where those of the device stood when they were reset.
pub(super) struct Accounts {
    pub(super) stats: StoreStats,
    device: DeviceStats,
    drives: Vec<DriveStats>,
    /// From submission to completion, of every read that went well.
    took: Durations,
    /// When the read into each slot was submitted, and the last reads; empty unless reads are recorded.
    submitted: Vec<Instant>,
    reads: Recent<ReadRecord>,
}

impl Accounts {
    /// Nothing was counted yet.
    pub(super) fn new(device: &dyn Device) -> Accounts {
        Accounts {
            stats: StoreStats::default(),
            device: device.stats(),
            drives: device.drives(),
            took: Durations::new(),
            submitted: vec![],
            reads: Recent::new(0),
        }
    }

    /// A read into `slot` is submitted.
    pub(super) fn submits(&mut self, slot: u32) {
        if let Some(submitted) = self.submitted.get_mut(slot as usize) {
            *submitted = Instant::now();
        }
    }

    /// The read of `key` into `slot` is over.
    pub(super) fn read(&mut self, key: ExpertKey, slot: u32, guess: bool, done: &Completion) {
        let (well, took) = (done.result.is_ok(), done.took());
        if well {
            self.took.record(took);
        }
        if let Some(&submitted) = self.submitted.get(slot as usize) {
            self.reads.push(ReadRecord { key, guess, well, submitted, took });
        }
    }
}

impl ExpertStore {
    /// Counters since the start or the last [`ExpertStore::reset_stats`].
    pub fn stats(&self) -> StoreStats {
        self.accounts.stats
    }

    /// What the device did in the same time.
    pub fn device_stats(&self) -> DeviceStats {
        self.device.stats().since(&self.accounts.device)
    }

    /// And each drive, where the device knows any.
    pub fn drive_stats(&self) -> impl Iterator<Item = DriveStats> {
        let now = self.device.drives().into_iter();
        now.zip(&self.accounts.drives).map(|(now, before)| now.since(before))
    }

    /// How long the reads of single experts took in the same time, from submission to completion.
    pub fn read_times(&self) -> &Durations {
        &self.accounts.took
    }

    /// Sets the counters to zero.
    pub fn reset_stats(&mut self) {
        let Accounts { stats, device, drives, took, submitted: _, reads } = &mut self.accounts;
        *stats = StoreStats::default();
        (*device, *drives) = (self.device.stats(), self.device.drives());
        took.clear();
        reads.clear();
    }

    /// From now on keeps the last `most` reads.
    pub fn record_reads(&mut self, most: usize) {
        self.accounts.submitted = vec![Instant::now(); self.slots.len()];
        self.accounts.reads = Recent::new(most);
    }

    /// The last reads since the last [`ExpertStore::reset_stats`], in the order in which they came in, where they are kept.
    pub fn reads(&self) -> impl Iterator<Item = &ReadRecord> {
        self.accounts.reads.iter()
    }
}

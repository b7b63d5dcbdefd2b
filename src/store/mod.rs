//! Lends experts from a fixed pool of slabs, reading the ones that are not there.
//!
//! The store knows layers, experts and bytes; it knows no arithmetic. One engine thread owns it. A step asks for the union
//! of its rows' experts with [`ExpertStore::request`], then takes [`Lease`]s as experts become ready, hits first, and gives
//! each back. A union larger than the pool is served as slabs come back, so any pool of at least one slab works.
//!
//! A slot is empty, in flight (its slab belongs to the device), or resting (its slab holds an expert). Leased and wanted
//! slots are held: eviction never takes them. What it takes, [`policy`] decides.
//!
//! [`ExpertStore::hint`] reads what a later request is expected to ask for; `guesses.rs` has the rules.

mod accounts;
mod checks;
mod doubt;
mod guesses;
pub mod history;
mod placement;
pub mod policy;
mod scales;
mod sizes;
mod staged;
mod table;
#[cfg(test)]
mod tests;
pub mod trace;
mod watch;

use std::collections::VecDeque;
use std::sync::Arc;

use millstream_io::{Arena, Completion, Device, FileSet, IoError, Priority, Read, RejectReason, Slab, SlabPool, Wait};
use thiserror::Error;

use crate::checkpoint::CheckpointError;
use crate::kernels::WeightRef;
use accounts::Accounts;
pub use accounts::{ReadRecord, StoreStats};
pub use checks::{Checks, Damaged, SAMPLE_FIRST, SAMPLE_ONE_IN, Verify};
use doubt::Spoilt;
use guesses::Guesses;
use placement::Placement;
pub use placement::Tier;
use policy::{Key, PolicyKind, Wanted};
pub use scales::KeptScales;
pub use sizes::SlabSize;
pub use table::{ExpertTable, TableError};
pub use watch::{Hung, Notice, Vigil, Watch};

/// One routed expert of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertKey {
    /// Model layer.
    pub layer: u16,
    /// Expert within the layer.
    pub expert: u16,
}

/// Why an expert could not be lent.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The read of one expert failed; the store stays usable.
    #[error("cannot read expert {} of layer {}", key.expert, key.layer)]
    Read {
        /// Which expert.
        key: ExpertKey,
        /// What the device said.
        #[source]
        source: IoError,
    },
    /// The read went well and the bytes are wrong; the store stays usable and keeps nothing of them.
    #[error(transparent)]
    Damaged(#[from] Damaged),
    /// The read went well and a weight cannot be quantized; the store stays usable.
    #[error(transparent)]
    Unfit(Box<CheckpointError>),
    /// What was served before was wrong, and is found out only now: what was computed from it is of no worth. The store
    /// stays usable and keeps nothing of it.
    #[error(
        "what was computed so far is wrong: expert {} of layer {} was used, and its {} bytes at {} of {} had the \
         checksum {:016x}, expected {:016x}",
        .0.key.expert, .0.key.layer, .0.span.len, .0.span.offset, .0.shard.display(), .0.found, .0.expected
    )]
    Spoilt(Damaged),
    /// The device itself failed; every later request fails too.
    #[error("the read device stopped working")]
    Device(#[source] IoError),
    /// Whoever watches the store broke a wait; the store stays usable.
    #[error("the wait for a read was given up")]
    GivenUp,
}

/// The right to use one resting expert; give it back with [`ExpertStore::release`].
#[derive(Debug)]
#[must_use = "a lease that is not released holds its slab"]
pub struct Lease {
    slot: u32,
    key: ExpertKey,
}

impl Lease {
    /// Which expert this is.
    pub fn expert(&self) -> u16 {
        self.key.expert
    }
}

/// The three matrices of a leased expert.
#[derive(Clone, Copy, Debug)]
pub struct ExpertWeights<'a> {
    /// `[width, hidden]`.
    pub gate: WeightRef<'a>,
    /// `[width, hidden]`.
    pub up: WeightRef<'a>,
    /// `[hidden, width]`.
    pub down: WeightRef<'a>,
}

enum Content {
    Empty,
    /// The slab that is read into is with the device; `wanted` where the current request waits for it, else it is a guess.
    /// `own` is the slab of an expert that is read into another one.
    InFlight {
        key: ExpertKey,
        wanted: bool,
        own: Option<Slab>,
    },
    /// Read, and not yet made into what its own slab is to hold: a guess, or ready for the current request.
    Stored {
        key: ExpertKey,
        read: Slab,
        own: Slab,
    },
    Resting(ExpertKey, Slab),
}

impl Content {
    /// The expert that is there.
    fn arrived(&self) -> Option<ExpertKey> {
        match self {
            Content::Stored { key, .. } | Content::Resting(key, _) => Some(*key),
            Content::Empty | Content::InFlight { .. } => None,
        }
    }
}

/// See the module's description.
pub struct ExpertStore {
    table: ExpertTable,
    device: Box<dyn Device>,
    pool: SlabPool,
    slots: Vec<Content>,
    /// Slot of each expert that has one, its read done or not, by `table.index(key)`.
    slot_of: Vec<u32>,
    placement: Placement,
    /// Experts of the current request that have no slab yet, in file order.
    missing: VecDeque<ExpertKey>,
    /// Held slots of the current request that are resting and not yet lent.
    ready: VecDeque<u32>,
    /// Reads of the current request that are under way.
    awaited: usize,
    guesses: Guesses,
    /// What the device died of. It may have taken slabs along, so no later request can be served to its end.
    dead: Option<IoError>,
    /// The last request was given up, and `awaited` reads of it may still be under way.
    given_up: bool,
    /// Who is told of long waits, and the files to name.
    watch: Option<(Watch, Arc<FileSet>)>,
    /// The scales of which the table says that they are kept.
    scales: Option<Arena>,
    checks: Checks,
    spoilt: Spoilt,
    accounts: Accounts,
}

const NO_SLOT: u32 = u32::MAX;

impl ExpertStore {
    /// A store over `pool`, every slab of it free and of the sizes of `table` and of its staging, reading through `device`.
    pub fn new(table: ExpertTable, device: Box<dyn Device>, pool: SlabPool) -> ExpertStore {
        let slots: Vec<usize> = (0..table.sizes().len()).map(|size| pool.slabs_of(size)).collect();
        let size_of = table.keys().map(|key| table.size_of(key.layer.into()) as u16).collect();
        let widest = table.widest_layer();
        ExpertStore {
            slots: (0..slots.iter().sum()).map(|_| Content::Empty).collect(),
            slot_of: vec![NO_SLOT; table.experts()],
            placement: Placement::new(PolicyKind::default(), &table.routed_layers(), &slots, size_of),
            missing: VecDeque::with_capacity(widest),
            ready: VecDeque::with_capacity(widest),
            awaited: 0,
            guesses: Guesses::none(slots.iter().sum()),
            dead: None,
            given_up: false,
            watch: None,
            scales: None,
            checks: Checks::off(),
            spoilt: Spoilt::default(),
            accounts: Accounts::new(&*device),
            table,
            device,
            pool,
        }
    }

    /// From now on compares the bytes of reads with what `checks`, made for the same table, expects.
    pub fn set_checks(&mut self, checks: Checks) {
        self.checks = checks;
    }

    /// Takes the scales that [`ExpertTable::kept_scales`] lists, each in its place. Before the first request, where there
    /// are any.
    pub fn set_scales(&mut self, scales: Arena) {
        self.scales = Some(scales);
    }

    /// From now on evicts by another policy. Nothing may have been asked for yet.
    pub fn set_policy(&mut self, kind: PolicyKind) {
        self.placement.set_policy(kind);
    }

    /// Goes on from a history: how often each expert was chosen in earlier runs, `top_k` experts a row. Nothing may have
    /// been asked for yet. `pin` says whether the hottest are pinned; by default they are where the policy itself can
    /// make no use of a history.
    ///
    /// What is pinned stays once it was read, and is read when it is asked for: reading it before would delay the first
    /// token by what it saves later.
    pub fn remember(&mut self, usage: Vec<u64>, top_k: usize, pin: Option<bool>) {
        self.placement.remember(usage, top_k, pin);
    }

    /// How often each expert was chosen, since ever as far as is known: by layer, then by number.
    pub fn usage(&self) -> Vec<u64> {
        self.placement.usage()
    }

    /// Experts that are pinned.
    pub fn pinned(&self) -> usize {
        self.placement.pinned()
    }

    /// Between generations: exchanges the coldest pins for experts that have become clearly hotter. Returns how many.
    pub fn exchange_pins(&mut self) -> usize {
        self.placement.exchange_pins()
    }

    /// Where an expert is now.
    pub fn tier(&self, key: ExpertKey) -> Tier {
        let number = self.table.index(key);
        let slot = self.slot_of[number];
        match slot != NO_SLOT && self.slots[slot as usize].arrived().is_some() {
            false => Tier::Disk,
            true if self.placement.is_pinned(number as Key) => Tier::Pinned,
            true => Tier::Cached,
        }
    }

    /// The device, for its report and counters.
    pub fn device(&self) -> &dyn Device {
        &*self.device
    }

    /// The pool, for its report.
    pub fn pool(&self) -> &SlabPool {
        &self.pool
    }

    /// Experts that can be in memory. Slabs that experts are only read into are none of them.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of an expert, on average.
    pub fn mean_expert_bytes(&self) -> u64 {
        self.table.total_useful_bytes() / (self.table.experts() as u64).max(1)
    }

    /// Slabs that hold an expert, or are to. With the pool's free ones they are all slabs, unless a request is being served.
    pub fn resting(&self) -> usize {
        let slabs = |slot: &Content| match slot {
            Content::Resting(..) => 1,
            Content::Stored { .. } => 2,
            Content::Empty | Content::InFlight { .. } => 0,
        };
        self.slots.iter().map(slabs).sum()
    }

    /// Begins serving `experts` (ascending, without repeats) of `layer`: hits become ready at once, the reads of misses
    /// are submitted together in file order, as far as slabs go.
    ///
    /// The previous request must have been served to its end or have failed; where it was given up, its reads are waited
    /// for first. Leases may still be held, but not of every slab.
    pub fn request(&mut self, layer: usize, experts: &[u16]) -> Result<(), StoreError> {
        self.request_for(1, layer, experts, |_| 1)
    }

    /// As [`ExpertStore::request`] for `rows` rows, of which `rows_of(i)` chose `experts[i]`.
    pub fn request_for(
        &mut self,
        rows: u32,
        layer: usize,
        experts: &[u16],
        rows_of: impl Fn(usize) -> u32,
    ) -> Result<(), StoreError> {
        assert!(
            self.missing.is_empty() && self.ready.is_empty() && (self.awaited == 0 || self.given_up),
            "a request is still being served"
        );
        self.settle()?;
        self.given_up = false;
        self.let_go_of_wrong()?;
        if let Some(dead) = &self.dead {
            return Err(StoreError::Device(dead.clone()));
        }
        self.guesses.forget_waiting();
        if self.guesses.in_flight() > 0 {
            while self.reap_or_abandon(Wait::No)? {}
        }
        let number = |expert| self.table.index(ExpertKey { layer: layer as u16, expert }) as Key;
        let wanted = experts.iter().enumerate().map(|(i, &expert)| Wanted { key: number(expert), rows: rows_of(i) });
        self.placement.request(rows, wanted);
        for &expert in experts {
            let key = ExpertKey { layer: layer as u16, expert };
            let number = self.table.index(key);
            self.accounts.stats.requested += 1;
            match self.slot_of[number] {
                NO_SLOT => {
                    self.accounts.stats.misses += 1;
                    self.placement.miss(number as Key);
                    self.missing.push_back(key);
                }
                slot => self.want(slot, number as Key),
            }
        }
        if self.judge_guesses(layer) {
            // Their slabs first, or the misses would take those of experts that are worth more.
            while self.reap_or_abandon(Wait::No)? {}
        }
        let table = &self.table;
        self.missing.make_contiguous().sort_unstable_by_key(|&key| table.file_order(key));
        self.submit_missing()
    }

    /// The next expert of the request, waiting for a read when none is ready; `None` when all have been lent.
    ///
    /// On an error the rest of the request is dropped: reads under way are waited for and kept.
    pub fn next_ready(&mut self) -> Result<Option<Lease>, StoreError> {
        loop {
            self.confirm_or_abandon()?;
            if let Some(slot) = self.ready.pop_front() {
                let Some(key) = self.slots[slot as usize].arrived() else {
                    unreachable!("slot {slot} is ready but holds no expert");
                };
                return Ok(Some(Lease { slot, key }));
            }
            if self.awaited == 0 {
                if self.missing.is_empty() {
                    return Ok(None);
                }
                // Not to be taken for the end of the request: the caller would go on without these experts.
                let waiting = self.missing.len();
                assert!(self.guesses.in_flight() > 0, "{waiting} experts wait for a slab that nothing will free");
            }
            // A completion makes room in the device's queue, where that was what kept a read back.
            self.wait_or_abandon()?;
        }
    }

    /// Whether [`ExpertStore::next_ready`] would return without waiting. Takes in what the device has finished.
    pub fn poll(&mut self) -> Result<bool, StoreError> {
        while self.ready.is_empty() && (self.awaited > 0 || !self.missing.is_empty()) {
            if !self.reap_or_abandon(Wait::No)? {
                return Ok(false);
            }
            self.submit_missing()?;
        }
        Ok(true)
    }

    /// Whether a read of the request is under way.
    pub fn is_reading(&self) -> bool {
        self.awaited > 0
    }

    /// Waits until no read of the request is under way: what has a slab is ready.
    pub fn wait_for_all(&mut self) -> Result<(), StoreError> {
        while self.awaited > 0 {
            self.wait_or_abandon()?;
        }
        Ok(())
    }

    /// The weights of a leased expert, after [`ExpertStore::quantize`] where the table quantizes any.
    pub fn weights(&self, lease: &Lease) -> ExpertWeights<'_> {
        let Content::Resting(key, slab) = &self.slots[lease.slot as usize] else {
            unreachable!("a leased slot rests, once it is quantized");
        };
        self.table.weights(*key, slab.bytes(), self.scales.as_ref().map_or(&[], Arena::as_slice))
    }

    /// Gives a lease back; its slab may now be evicted, and a read that waited for one is submitted.
    pub fn release(&mut self, lease: Lease) -> Result<(), StoreError> {
        self.placement.let_go(lease.slot);
        self.submit_missing()?;
        self.read_ahead();
        Ok(())
    }

    /// Drops the current request: nothing stays held. Reads under way finish and their experts stay cached.
    pub fn abandon(&mut self) {
        self.missing.clear();
        self.let_go_of_ready();
        if !self.given_up {
            // A device that died is dead for the next request too; reads given up now are waited for by it.
            let _ = self.settle();
            self.drop_guesses();
        }
    }

    fn let_go_of_ready(&mut self) {
        while let Some(slot) = self.ready.pop_front() {
            self.placement.let_go(slot);
            self.drop_if_stored(slot);
        }
    }

    /// Takes the slot that holds requested expert `number`, or that it is being read into, for the request.
    fn want(&mut self, slot: u32, number: Key) {
        let guessed = self.guesses.used(slot);
        self.placement.hit(slot, number);
        match &mut self.slots[slot as usize] {
            Content::Resting(..) | Content::Stored { .. } => {
                *(if guessed { &mut self.accounts.stats.prefetched } else { &mut self.accounts.stats.hits }) += 1;
                self.accounts.stats.pinned += u64::from(!guessed && self.placement.is_pinned(number));
                self.placement.hold(slot);
                self.ready.push_back(slot);
            }
            Content::InFlight { wanted, .. } => {
                self.accounts.stats.misses += 1;
                self.accounts.stats.late += 1;
                *wanted = true;
                self.awaited += 1;
                self.device.promote(slot.into());
            }
            Content::Empty => unreachable!("slot {slot} is listed and empty"),
        }
    }

    fn submit_missing(&mut self) -> Result<(), StoreError> {
        while let Some(&key) = self.missing.front() {
            // A slab to read into is free again when what it holds is quantized.
            if !self.may_stage(key, false) {
                break;
            }
            let Some((slot, slab)) = self.claim(key) else { break };
            if let Err(why) = self.submit(key, slot, slab, Priority::Demand) {
                let error = match why {
                    // The queue empties as reads complete, and `next_ready` submits again.
                    RejectReason::Full if self.awaited + self.guesses.in_flight() > 0 => break,
                    RejectReason::Full => unreachable!("the device is full with no read under way"),
                    RejectReason::Dead(e) => self.died(e),
                    RejectReason::Bad(source) => StoreError::Read { key, source },
                };
                self.abandon();
                return Err(error);
            }
            self.missing.pop_front();
            self.awaited += 1;
        }
        Ok(())
    }

    /// Gives the device a read into a claimed slot; where it does not take it, the slot is empty again.
    fn submit(&mut self, key: ExpertKey, slot: u32, slab: Slab, priority: Priority) -> Result<(), RejectReason> {
        let read = Read { tag: slot.into(), priority, segments: self.table.segments(key) };
        let (into, own) = self.stage(key, slab);
        self.slots[slot as usize] = Content::InFlight { key, wanted: priority == Priority::Demand, own };
        self.accounts.submits(slot);
        let number = self.table.index(key);
        self.slot_of[number] = slot;
        self.placement.hold(slot);
        if priority == Priority::Demand {
            self.placement.join(slot, number as Key);
        }
        self.device.submit(read, into).map_err(|rejected| {
            self.clear(slot, key);
            rejected.why
        })
    }

    /// Empties a slot whose read brought nothing: it is the first to be reused.
    fn clear(&mut self, slot: u32, key: ExpertKey) {
        self.slots[slot as usize] = Content::Empty;
        let number = self.table.index(key);
        self.slot_of[number] = NO_SLOT;
        self.placement.let_go(slot);
        self.placement.discard(slot, number as Key);
    }

    /// An empty slot with a slab for `key`; where no slab of its size is free, that of the expert which gives way.
    fn claim(&mut self, key: ExpertKey) -> Option<(u32, Slab)> {
        let slot = self.placement.victim(self.table.index(key) as Key, &self.slot_of)?;
        match std::mem::replace(&mut self.slots[slot as usize], Content::Empty) {
            Content::Empty => {
                let slab = self.pool.take_of(self.table.size_of(key.layer.into()))?;
                self.placement.take(slot, None);
                Some((slot, slab))
            }
            Content::Resting(key, slab) => {
                let number = self.table.index(key);
                self.placement.take(slot, Some(number as Key));
                self.slot_of[number] = NO_SLOT;
                Some((slot, slab))
            }
            Content::InFlight { key, .. } | Content::Stored { key, .. } => {
                unreachable!("slot {slot} of {key:?} is a victim before it was lent")
            }
        }
    }

    /// Waits for a completion and submits what it makes room for; where that fails, the request is over.
    fn wait_or_abandon(&mut self) -> Result<(), StoreError> {
        let waited = self.wait().and_then(|()| self.submit_missing());
        if waited.is_err() {
            self.abandon();
        }
        waited
    }

    /// As [`ExpertStore::reap`]; where a read failed that the request waits for, the request is over.
    fn reap_or_abandon(&mut self, wait: Wait) -> Result<bool, StoreError> {
        let reaped = self.reap(wait);
        if reaped.is_err() {
            self.abandon();
        }
        reaped
    }

    /// Takes in one completion; `false` when none was there.
    fn reap(&mut self, wait: Wait) -> Result<bool, StoreError> {
        let done = match self.device.reap(wait) {
            Ok(Some(done)) => done,
            Ok(None) => {
                let lost = wait != Wait::No && self.device.in_flight() == 0;
                let reads = self.awaited + self.guesses.in_flight();
                assert!(!lost || reads == 0, "the device lost {reads} reads");
                return Ok(false);
            }
            Err(e) => return Err(self.died(e)),
        };
        let slot = done.tag as u32;
        let content = std::mem::replace(&mut self.slots[slot as usize], Content::Empty);
        let Content::InFlight { key, wanted, own } = content else {
            unreachable!("the device completed slot {slot}, which is not being read");
        };
        if done.result == Err(IoError::Cancelled) {
            self.accounts.stats.wasted_bytes += done.bytes;
            self.taken_back(slot, key, wanted, done.slab);
            return Ok(true);
        }
        self.accounts.read(key, slot, !wanted, &done);
        let Completion { mut slab, result, .. } = done;
        let result =
            result.map_err(|source| StoreError::Read { key, source }).and_then(|()| self.checked(key, &mut slab));
        match result {
            Ok(()) => {
                self.accounts.stats.useful_bytes += self.table.useful_bytes(key);
                self.slots[slot as usize] = match own {
                    None => Content::Resting(key, slab),
                    Some(own) => Content::Stored { key, read: slab, own },
                };
            }
            // The slab goes back to the pool: nothing half-read is kept.
            Err(_) => {
                drop(slab);
                self.clear(slot, key);
            }
        }
        if wanted {
            self.awaited -= 1;
            result?;
            self.ready.push_back(slot);
        } else {
            // A guess that failed is not an error: whoever asks for the expert reads it again and hears of it then.
            self.guess_arrived(slot, key, result.is_ok());
        }
        Ok(true)
    }

    fn died(&mut self, e: IoError) -> StoreError {
        self.dead = Some(e.clone());
        StoreError::Device(e)
    }
}

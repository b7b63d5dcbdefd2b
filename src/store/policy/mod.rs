//! Which cached expert gives way when a slab is needed. Pure: experts are numbers, there is no slab and no I/O.
//!
//! A layer asks for the union of its rows' experts at once, and all of a union must be there together: whoever owns a
//! [`Policy`] tells it the request, then each hit and miss of it, then asks for a victim whenever a miss finds no free
//! slab. Experts in use are held, and a held expert is never a victim.

mod arc;
pub mod belady;
mod cached;
mod counters;
mod lfru;
mod lookahead;
mod lru;
mod pins;
mod queues;
mod rates;
mod s3_fifo;
#[cfg(test)]
mod tests;
mod two_queues;
mod worths;

use std::fmt;
use std::str::FromStr;

pub use pins::{CONFIDENT_SELECTIONS, Pins};

/// A routed expert as a number: experts are numbered layer after layer.
pub type Key = u32;

/// What a layer asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wanted {
    /// Which expert.
    pub key: Key,
    /// Rows that chose it.
    pub rows: u32,
}

/// What was chosen in earlier runs.
#[derive(Clone, Copy, Debug)]
pub struct Past<'a> {
    /// Selections of every expert.
    pub usage: &'a [u64],
    /// Experts a row chooses.
    pub top_k: u32,
    /// Visits of each layer that it counts for.
    pub visits: u32,
}

impl<'a> Past<'a> {
    /// A history, trusted the more the longer it is.
    pub fn of(usage: &'a [u64], top_k: u32) -> Past<'a> {
        // Enough to begin well where nothing changes, and soon outweighed where topics do.
        const TRUSTED_VISITS: u64 = 64;
        let visits = TRUSTED_VISITS * pins::confidence(usage) / CONFIDENT_SELECTIONS;
        Past { usage, top_k, visits: visits as u32 }
    }
}

/// Orders cached experts from the first to give way to the last.
///
/// Calls come in this order: [`Policy::request`] once for a layer; [`Policy::hit`] or [`Policy::miss`] once for each expert
/// of it; then, for each miss as a slab is found for it, [`Policy::victim`] and [`Policy::evict`] where no slab is free,
/// and [`Policy::insert`].
pub trait Policy {
    /// `rows` rows of a layer ask for `wanted`: ascending, at least one.
    fn request(&mut self, rows: u32, wanted: &[Wanted]);

    /// `key` was asked for and is cached.
    fn hit(&mut self, key: Key);

    /// `key` was asked for and is not cached.
    fn miss(&mut self, key: Key);

    /// The cached expert that gives way, `held` ones left alone; `None` when all are held.
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key>;

    /// `key`, the last victim, is cached no more.
    fn evict(&mut self, key: Key);

    /// `key` is cached from now on.
    fn insert(&mut self, key: Key);

    /// `key` turned out not to be cached: its read failed. It leaves no trace.
    fn forget(&mut self, key: Key);

    /// Begins with what was chosen in earlier runs; nothing has been asked for yet. Whether the policy makes use of it: one
    /// that counts nothing cannot.
    fn remember(&mut self, _past: &Past) -> bool {
        false
    }

    /// The next layers are thought to ask for `keys`.
    fn hint(&mut self, _keys: &[Key]) {}
}

/// The policies, by the names people type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// The one asked for longest ago gives way.
    Lru,
    /// Two queues: what is asked for a second time soon after it was evicted is kept longer.
    TwoQueues,
    /// The adaptive replacement cache: balances recency and frequency by what it evicted too soon.
    Arc,
    /// Three static queues, first in first out, with second chances.
    S3Fifo,
    /// Frequency with decay; recency breaks ties.
    Lfru,
    /// What is worth least gives way: by how soon experts like it were used, by the way to its layer, and by guesses.
    #[default]
    Lookahead,
}

impl PolicyKind {
    /// All of them.
    pub const ALL: [PolicyKind; 6] = [
        PolicyKind::Lru,
        PolicyKind::TwoQueues,
        PolicyKind::Arc,
        PolicyKind::S3Fifo,
        PolicyKind::Lfru,
        PolicyKind::Lookahead,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            PolicyKind::Lru => "lru",
            PolicyKind::TwoQueues => "2q",
            PolicyKind::Arc => "arc",
            PolicyKind::S3Fifo => "s3-fifo",
            PolicyKind::Lfru => "lfru",
            PolicyKind::Lookahead => "lookahead",
        }
    }

    /// A policy over the experts of `layers` that caches up to `capacity` of them.
    pub fn build(self, layers: &Layers, capacity: usize) -> Box<dyn Policy> {
        let keys = layers.keys();
        match self {
            PolicyKind::Lru => Box::new(lru::Lru::new(keys)),
            PolicyKind::TwoQueues => Box::new(two_queues::TwoQueues::new(keys, capacity)),
            PolicyKind::Arc => Box::new(arc::Arc::new(keys, capacity)),
            PolicyKind::S3Fifo => Box::new(s3_fifo::S3Fifo::new(keys, capacity)),
            PolicyKind::Lfru => Box::new(lfru::Lfru::new(layers)),
            PolicyKind::Lookahead => Box::new(lookahead::Lookahead::new(layers)),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyKind {
    type Err = String;

    fn from_str(text: &str) -> Result<PolicyKind, String> {
        let known = || PolicyKind::ALL.map(PolicyKind::name).join(", ");
        PolicyKind::ALL.into_iter().find(|kind| kind.name() == text).ok_or_else(|| format!("known are {}", known()))
    }
}

/// How many experts each routed layer has, in the order in which a step visits them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layers {
    /// Number of experts before each layer, and of all at the end.
    first: Vec<Key>,
    /// The layer of each expert.
    layer_of: Vec<u16>,
}

impl Layers {
    /// Layers of as many experts as `experts` says.
    pub fn new(experts: impl IntoIterator<Item = usize>) -> Layers {
        let mut layers = Layers { first: vec![0], layer_of: vec![] };
        for (layer, count) in experts.into_iter().enumerate() {
            layers.layer_of.extend(std::iter::repeat_n(layer as u16, count));
            layers.first.push(layers.layer_of.len() as Key);
        }
        layers
    }

    /// Experts in all.
    pub fn keys(&self) -> usize {
        self.layer_of.len()
    }

    /// Layers.
    pub fn count(&self) -> usize {
        self.first.len() - 1
    }

    /// The layer of `key`, which must be below [`Layers::keys`].
    pub fn of(&self, key: Key) -> usize {
        self.layer_of[key as usize].into()
    }

    /// The experts of a layer.
    pub fn range(&self, layer: usize) -> std::ops::Range<usize> {
        self.first[layer] as usize..self.first[layer + 1] as usize
    }
}

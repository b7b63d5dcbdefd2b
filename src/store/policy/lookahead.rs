//! The expert that will be needed last, as far as can be told, gives way.
//!
//! A model visits its layers in a circle, so that recency misleads: what a layer used just now is needed again a whole
//! round later at the earliest, while what the next layer used is needed soonest and was used longest ago. The wait for
//! an expert is the way to its layer, and as many rounds as it is expected not to be chosen there. Where a guess was made
//! of what a layer will ask for, it replaces that expectation.

use super::counters::{Cached, Counters};
use super::hazard::{CellNumber, Hazard};
use super::{Key, Layers, Policy, Wanted};

/// A round, in the unit of waits.
const ROUND: u64 = 256;

pub(super) struct Lookahead {
    layers: Layers,
    counters: Counters,
    hazard: Hazard,
    cached: Cached,
    /// The cell of each expert since the last visit of its layer.
    cells: Vec<CellNumber>,
    /// Rounds that each expert is expected to wait from the next visit of its layer on.
    rounds: Vec<u32>,
    guessed: Vec<bool>,
    /// Layers that a guess was made for.
    has_guess: Vec<bool>,
    /// The layer that asked last.
    layer: usize,
}

impl Lookahead {
    pub(super) fn new(layers: &Layers) -> Lookahead {
        let keys = layers.keys();
        Lookahead {
            layers: layers.clone(),
            counters: Counters::new(layers),
            hazard: Hazard::new(),
            cached: Cached::new(keys),
            cells: vec![Hazard::cell(1, 1); keys],
            rounds: vec![u32::MAX; keys],
            guessed: vec![false; keys],
            has_guess: vec![false; layers.count()],
            layer: 0,
        }
    }

    /// Learns from what a layer chose, and expects anew for all of its experts: nothing changes until its next visit.
    fn visit(&mut self, rows: u32, wanted: &[Wanted]) {
        self.layer = self.counters.request(rows, wanted);
        let mut chosen = wanted.iter().map(|wanted| wanted.key).peekable();
        for key in self.layers.range(self.layer) {
            let was_chosen = chosen.next_if_eq(&(key as Key)).is_some();
            // A batch of rows chooses nearly everything, which says nothing about one row.
            if rows == 1 {
                self.hazard.saw(self.cells[key], was_chosen);
            }
            let rate = self.counters.rate(key as Key, self.layer);
            let cell = Hazard::cell(self.counters.age(key as Key, self.layer), rate);
            self.cells[key] = cell;
            // Not chosen at the next visit, it waits as long as one of its rate does.
            let skipped = 65536 - self.hazard.chance(cell, rate).min(65536);
            self.rounds[key] = (ROUND * u64::from(skipped) / u64::from(rate)) as u32;
        }
        if std::mem::take(&mut self.has_guess[self.layer]) {
            self.guessed[self.layers.range(self.layer)].fill(false);
        }
    }

    /// How long `key` is expected not to be needed.
    fn wait(&self, key: Key) -> u64 {
        let (layer, count) = (self.layers.of(key), self.layers.count());
        let way = if layer > self.layer { layer - self.layer } else { layer + count - self.layer };
        let rounds = u64::from(self.rounds[key as usize]);
        let rounds = match (self.has_guess[layer], self.guessed[key as usize]) {
            (true, true) => 0,
            (true, false) => rounds + ROUND,
            (false, _) => rounds,
        };
        rounds * count as u64 + ROUND * way as u64
    }
}

impl Policy for Lookahead {
    fn request(&mut self, rows: u32, wanted: &[Wanted]) {
        self.visit(rows, wanted);
    }

    fn hit(&mut self, _key: Key) {}

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.cached.least(|key| u64::MAX - self.wait(key), held)
    }

    fn evict(&mut self, key: Key) {
        self.cached.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.cached.insert(key);
    }

    fn forget(&mut self, key: Key) {
        self.cached.remove(key);
    }

    fn hint(&mut self, keys: &[Key]) {
        for &key in keys {
            self.has_guess[self.layers.of(key)] = true;
            self.guessed[key as usize] = true;
        }
    }
}

//! The expert that will be needed last, as far as can be told, gives way.
//!
//! A model visits its layers in a circle, so that recency misleads: what a layer used just now is needed again a whole
//! round later at the earliest, while what the next layer used is needed soonest and was used longest ago. The wait for
//! an expert is the way to its layer, and as many rounds as it is expected not to be chosen there. Where a guess was made
//! of what a layer will ask for, it replaces that expectation.

use super::cached::Cached;
use super::counters::Counters;
use super::hazard::{CellNumber, Hazard};
use super::{Key, Layers, Past, Policy, Wanted};

/// A round, in the unit of waits.
const ROUND: u64 = 256;

pub(super) struct Lookahead {
    forecast: Forecast,
    cached: Cached,
}

impl Lookahead {
    pub(super) fn new(layers: &Layers) -> Lookahead {
        Lookahead { forecast: Forecast::new(layers), cached: Cached::new(layers) }
    }
}

impl Policy for Lookahead {
    fn request(&mut self, rows: u32, wanted: &[Wanted]) {
        self.forecast.visit(rows, wanted);
        self.cached.changed(self.forecast.layer);
    }

    fn hit(&mut self, _key: Key) {}

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let Lookahead { forecast, cached } = self;
        // What waits longest is worth least.
        let in_all = |layer, worth| u64::MAX - forecast.wait(layer, u64::MAX - worth);
        cached.least(|key| u64::MAX - forecast.rounds(key), in_all, held)
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

    fn remember(&mut self, past: &Past) -> bool {
        self.forecast.remember(past);
        true
    }

    fn hint(&mut self, keys: &[Key]) {
        for &key in keys {
            self.cached.changed(self.forecast.guess(key));
        }
    }
}

/// When experts will be needed.
struct Forecast {
    layers: Layers,
    counters: Counters,
    hazard: Hazard,
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

impl Forecast {
    fn new(layers: &Layers) -> Forecast {
        let keys = layers.keys();
        Forecast {
            layers: layers.clone(),
            counters: Counters::new(layers),
            hazard: Hazard::new(),
            cells: vec![Hazard::cell(1, 1); keys],
            rounds: vec![u32::MAX; keys],
            guessed: vec![false; keys],
            has_guess: vec![false; layers.count()],
            layer: 0,
        }
    }

    fn remember(&mut self, past: &Past) {
        self.counters.remember(past);
        for layer in 0..self.layers.count() {
            self.layers.range(layer).for_each(|key| self.foresee(key as Key, layer));
        }
    }

    /// Learns from what a layer chose, and foresees anew for all of its experts: nothing changes until its next visit.
    fn visit(&mut self, rows: u32, wanted: &[Wanted]) {
        self.layer = self.counters.request(rows, wanted);
        let mut chosen = wanted.iter().map(|wanted| wanted.key).peekable();
        for key in self.layers.range(self.layer) {
            let was_chosen = chosen.next_if_eq(&(key as Key)).is_some();
            // A batch of rows chooses nearly everything, which says nothing about one row.
            if rows == 1 {
                self.hazard.saw(self.cells[key], was_chosen);
            }
            self.foresee(key as Key, self.layer);
        }
        if std::mem::take(&mut self.has_guess[self.layer]) {
            self.guessed[self.layers.range(self.layer)].fill(false);
        }
    }

    /// Works out how many rounds `key` waits from the next visit of its layer on.
    fn foresee(&mut self, key: Key, layer: usize) {
        let rate = self.counters.rate(key, layer);
        let cell = Hazard::cell(self.counters.age(key, layer), rate);
        self.cells[key as usize] = cell;
        // Not chosen at the next visit, it waits as long as one of its rate does.
        let skipped = 65536 - self.hazard.chance(cell, rate).min(65536);
        self.rounds[key as usize] = (ROUND * u64::from(skipped) / u64::from(rate)) as u32;
    }

    /// `key` is thought to be asked for at the next visit of its layer, which is returned.
    fn guess(&mut self, key: Key) -> usize {
        let layer = self.layers.of(key);
        self.has_guess[layer] = true;
        self.guessed[key as usize] = true;
        layer
    }

    /// Rounds that `key` is expected to wait, by a guess where there is one.
    fn rounds(&self, key: Key) -> u64 {
        let rounds = u64::from(self.rounds[key as usize]);
        match (self.has_guess[self.layers.of(key)], self.guessed[key as usize]) {
            (true, true) => 0,
            (true, false) => rounds + ROUND,
            (false, _) => rounds,
        }
    }

    /// Layers from here to an expert of `layer` that waits so many rounds there.
    fn wait(&self, layer: usize, rounds: u64) -> u64 {
        let count = self.layers.count();
        let way = if layer > self.layer { layer - self.layer } else { layer + count - self.layer };
        rounds * count as u64 + ROUND * way as u64
    }
}

//! Frequency with decay; recency only breaks close calls.

use super::cached::Cached;
use super::counters::Counters;
use super::{Key, Layers, Past, Policy, Wanted};

pub(super) struct Lfru {
    layers: Layers,
    counters: Counters,
    cached: Cached,
}

impl Lfru {
    pub(super) fn new(layers: &Layers) -> Lfru {
        Lfru { layers: layers.clone(), counters: Counters::new(layers), cached: Cached::new(layers) }
    }
}

impl Policy for Lfru {
    fn request(&mut self, rows: u32, wanted: &[Wanted]) {
        let layer = self.counters.request(rows, wanted);
        self.cached.changed(layer);
    }

    fn hit(&mut self, _key: Key) {}

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let Lfru { layers, counters, cached } = self;
        cached.least(|key| counters.score(key, layers.of(key)), |_, score| score, held)
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
        self.counters.remember(past);
        true
    }
}

//! Frequency with decay; recency only breaks close calls.

use super::counters::{Cached, Counters};
use super::{Key, Layers, Policy, Wanted};

pub(super) struct Lfru {
    layers: Layers,
    counters: Counters,
    cached: Cached,
}

impl Lfru {
    pub(super) fn new(layers: &Layers) -> Lfru {
        Lfru { layers: layers.clone(), counters: Counters::new(layers), cached: Cached::new(layers.keys()) }
    }
}

impl Policy for Lfru {
    fn request(&mut self, rows: u32, wanted: &[Wanted]) {
        self.counters.request(rows, wanted);
    }

    fn hit(&mut self, _key: Key) {}

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.cached.least(|key| self.counters.score(key, self.layers.of(key)), held)
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
}

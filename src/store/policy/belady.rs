//! The bound: Belady's optimum, which knows the future and so gives up what is needed last.
//!
//! All of a request must be there together, so what the request itself wants is held and not given up; among the rest the
//! one with the farthest next use is still the best choice, as a search of all choices shows (see the tests).

use super::cached::Cached;
use super::{Key, Layers, Policy, Wanted};

/// Later than any request.
const NEVER: u64 = u64::MAX;

/// A policy for one replay, of the requests it was made for.
pub struct Belady {
    layers: Layers,
    /// For each expert wanted, in the order of requests: which later one wants it again.
    next_uses: Vec<u64>,
    /// Experts wanted so far.
    at: usize,
    /// The next use of each expert.
    next: Vec<u64>,
    cached: Cached,
}

impl Belady {
    /// For `requests` of `layers`.
    pub fn new<'a>(
        layers: &Layers,
        requests: impl DoubleEndedIterator<Item = &'a [Wanted]> + ExactSizeIterator,
    ) -> Belady {
        let mut next = vec![NEVER; layers.keys()];
        let mut next_uses = Vec::new();
        let count = requests.len() as u64;
        for (before, wanted) in requests.rev().enumerate() {
            let number = count - 1 - before as u64;
            for &Wanted { key, .. } in wanted.iter().rev() {
                next_uses.push(std::mem::replace(&mut next[key as usize], number));
            }
        }
        next_uses.reverse();
        Belady { layers: layers.clone(), next_uses, at: 0, next, cached: Cached::new(layers) }
    }
}

impl Policy for Belady {
    fn request(&mut self, _rows: u32, wanted: &[Wanted]) {
        for &Wanted { key, .. } in wanted {
            self.next[key as usize] = self.next_uses[self.at];
            self.at += 1;
            self.cached.changed(self.layers.of(key));
        }
    }

    fn hit(&mut self, _key: Key) {}

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let Belady { next, cached, .. } = self;
        cached.least(|key| NEVER - next[key as usize], |_, worth| worth, held)
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

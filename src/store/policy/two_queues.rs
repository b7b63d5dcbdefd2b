//! 2Q (Johnson and Shasha 1994, the full version): an expert begins in a short queue, first in first out; one that is
//! asked for again after it left that queue is kept by recency.

use super::queues::Queues;
use super::{Key, Policy, Wanted};

/// Newcomers, oldest first whatever happens to them.
const NEW: usize = 0;
/// Experts that proved themselves, by recency.
const PROVEN: usize = 1;
/// Newcomers that were evicted, by number only.
const LEFT: usize = 2;

pub(super) struct TwoQueues {
    queues: Queues<3>,
    /// Newcomers give way while there are more than this: a quarter of the cache, as its authors have it.
    new_most: usize,
    /// Half of the cache, likewise.
    left_most: usize,
    /// What asked for now was among those that left.
    proven: Vec<bool>,
}

impl TwoQueues {
    pub(super) fn new(keys: usize, capacity: usize) -> TwoQueues {
        TwoQueues {
            queues: Queues::new(keys),
            new_most: (capacity / 4).max(1),
            left_most: (capacity / 2).max(1),
            proven: vec![false; keys],
        }
    }
}

impl Policy for TwoQueues {
    fn request(&mut self, _rows: u32, _wanted: &[Wanted]) {}

    fn hit(&mut self, key: Key) {
        if self.queues.queue_of(key) == Some(PROVEN) {
            self.queues.push(PROVEN, key);
        }
    }

    fn miss(&mut self, key: Key) {
        self.proven[key as usize] = self.queues.queue_of(key) == Some(LEFT);
        self.queues.remove(key);
    }

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let [first, second] = if self.queues.len(NEW) > self.new_most { [NEW, PROVEN] } else { [PROVEN, NEW] };
        self.queues.front_but(first, held).or_else(|| self.queues.front_but(second, held))
    }

    fn evict(&mut self, key: Key) {
        if self.queues.queue_of(key) == Some(NEW) {
            self.queues.push(LEFT, key);
            self.queues.trim(LEFT, self.left_most);
        } else {
            self.queues.remove(key);
        }
    }

    fn insert(&mut self, key: Key) {
        let proven = std::mem::take(&mut self.proven[key as usize]);
        self.queues.push(if proven { PROVEN } else { NEW }, key);
    }

    fn forget(&mut self, key: Key) {
        self.queues.remove(key);
    }
}

//! The expert asked for longest ago gives way.

use super::queues::Queues;
use super::{Key, Policy, Wanted};

pub(super) struct Lru {
    queue: Queues<1>,
}

impl Lru {
    pub(super) fn new(keys: usize) -> Lru {
        Lru { queue: Queues::new(keys) }
    }
}

impl Policy for Lru {
    fn request(&mut self, _rows: u32, _wanted: &[Wanted]) {}

    fn hit(&mut self, key: Key) {
        self.queue.push(0, key);
    }

    fn miss(&mut self, _key: Key) {}

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.queue.front_but(0, held)
    }

    fn evict(&mut self, key: Key) {
        self.queue.remove(key);
    }

    fn insert(&mut self, key: Key) {
        self.queue.push(0, key);
    }

    fn forget(&mut self, key: Key) {
        self.queue.remove(key);
    }
}

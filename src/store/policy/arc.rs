//! ARC (Megiddo and Modha 2003): one queue for experts seen once, one for those seen again, and the numbers of what each
//! evicted. A miss among those numbers moves the balance towards the queue that evicted too soon.

use super::queues::Queues;
use super::{Key, Policy, Wanted};

/// Asked for once, by recency.
const ONCE: usize = 0;
/// Asked for more than once, by recency.
const AGAIN: usize = 1;
/// What was evicted from each, by number only.
const ONCE_LEFT: usize = 2;
const AGAIN_LEFT: usize = 3;

pub(super) struct Arc {
    queues: Queues<4>,
    capacity: usize,
    /// Experts that the first queue should have.
    once_target: usize,
    /// Whether what is missing was evicted lately, and so goes into the second queue.
    known: Vec<bool>,
    /// Whether the last miss was among what the second queue evicted: it breaks a tie.
    from_again: bool,
}

impl Arc {
    pub(super) fn new(keys: usize, capacity: usize) -> Arc {
        let queues = Queues::new(keys);
        Arc { queues, capacity, once_target: 0, known: vec![false; keys], from_again: false }
    }
}

impl Policy for Arc {
    fn request(&mut self, _rows: u32, _wanted: &[Wanted]) {}

    fn hit(&mut self, key: Key) {
        self.queues.push(AGAIN, key);
    }

    fn miss(&mut self, key: Key) {
        let (once_left, again_left) = (self.queues.len(ONCE_LEFT), self.queues.len(AGAIN_LEFT));
        let from = self.queues.queue_of(key);
        match from {
            Some(ONCE_LEFT) => {
                let step = (again_left / once_left).max(1);
                self.once_target = (self.once_target + step).min(self.capacity);
            }
            Some(AGAIN_LEFT) => {
                let step = (once_left / again_left).max(1);
                self.once_target = self.once_target.saturating_sub(step);
            }
            _ => {}
        }
        self.from_again = from == Some(AGAIN_LEFT);
        self.known[key as usize] = from.is_some();
        self.queues.remove(key);
    }

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let once = self.queues.len(ONCE);
        let over = once > self.once_target || (once == self.once_target && self.from_again);
        let [first, second] = if once > 0 && over { [ONCE, AGAIN] } else { [AGAIN, ONCE] };
        self.queues.front_but(first, held).or_else(|| self.queues.front_but(second, held))
    }

    fn evict(&mut self, key: Key) {
        let left = if self.queues.queue_of(key) == Some(ONCE) { ONCE_LEFT } else { AGAIN_LEFT };
        self.queues.push(left, key);
        // Numbers of both kinds together are as many as the cache has slabs; those of the first kind and its queue, too.
        self.queues.trim(ONCE_LEFT, self.capacity.saturating_sub(self.queues.len(ONCE)));
        let cached = self.queues.len(ONCE) + self.queues.len(AGAIN);
        let most = (2 * self.capacity).saturating_sub(cached + self.queues.len(ONCE_LEFT));
        self.queues.trim(AGAIN_LEFT, most);
    }

    fn insert(&mut self, key: Key) {
        let known = std::mem::take(&mut self.known[key as usize]);
        self.queues.push(if known { AGAIN } else { ONCE }, key);
    }

    fn forget(&mut self, key: Key) {
        self.queues.remove(key);
    }
}

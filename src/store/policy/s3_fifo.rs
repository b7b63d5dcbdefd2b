//! S3-FIFO (Yang and others 2023): a small queue in which most newcomers end, a main queue that gives as many further
//! rounds as an expert was asked for, up to three, and the numbers of what the small queue evicted.

use super::queues::Queues;
use super::{Key, Policy, Wanted};

/// Newcomers, oldest first.
const SMALL: usize = 0;
/// The rest, oldest first, with further rounds.
const MAIN: usize = 1;
/// What left the small queue, by number only.
const LEFT: usize = 2;
/// Requests that are counted.
const ROUNDS: u8 = 3;

pub(super) struct S3Fifo {
    queues: Queues<3>,
    /// A tenth of the cache, as its authors have it.
    small_most: usize,
    left_most: usize,
    /// Requests since an expert came into its queue.
    asked: Vec<u8>,
    known: Vec<bool>,
}

impl S3Fifo {
    pub(super) fn new(keys: usize, capacity: usize) -> S3Fifo {
        let small_most = (capacity / 10).max(1);
        S3Fifo {
            queues: Queues::new(keys),
            small_most,
            left_most: capacity.saturating_sub(small_most).max(1),
            asked: vec![0; keys],
            known: vec![false; keys],
        }
    }

    /// The oldest newcomer that was asked for at most once; the others on the way move to the main queue.
    fn small_victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        while let Some(key) = self.queues.front_but(SMALL, held) {
            if self.asked[key as usize] <= 1 {
                return Some(key);
            }
            self.asked[key as usize] = 0;
            self.queues.push(MAIN, key);
        }
        None
    }

    /// The oldest that has no round left; the others on the way lose one.
    fn main_victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        while let Some(key) = self.queues.front_but(MAIN, held) {
            if self.asked[key as usize] == 0 {
                return Some(key);
            }
            self.asked[key as usize] -= 1;
            self.queues.push(MAIN, key);
        }
        None
    }
}

impl Policy for S3Fifo {
    fn request(&mut self, _rows: u32, _wanted: &[Wanted]) {}

    fn hit(&mut self, key: Key) {
        self.asked[key as usize] = (self.asked[key as usize] + 1).min(ROUNDS);
    }

    fn miss(&mut self, key: Key) {
        self.known[key as usize] = self.queues.queue_of(key) == Some(LEFT);
        self.queues.remove(key);
    }

    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        if self.queues.len(SMALL) >= self.small_most
            && let Some(key) = self.small_victim(held)
        {
            return Some(key);
        }
        self.main_victim(held).or_else(|| self.small_victim(held))
    }

    fn evict(&mut self, key: Key) {
        if self.queues.queue_of(key) == Some(SMALL) {
            self.queues.push(LEFT, key);
            self.queues.trim(LEFT, self.left_most);
        } else {
            self.queues.remove(key);
        }
    }

    fn insert(&mut self, key: Key) {
        let known = std::mem::take(&mut self.known[key as usize]);
        self.asked[key as usize] = 0;
        self.queues.push(if known { MAIN } else { SMALL }, key);
    }

    fn forget(&mut self, key: Key) {
        self.queues.remove(key);
    }
}

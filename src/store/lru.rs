//! Least-recently-used order over slots, with pins. Pure: no slab, no expert, no I/O.

const NONE: u32 = u32::MAX;

/// A doubly linked list over slot numbers; unpinned slots are linked from the next victim to the newest.
pub(super) struct Lru {
    next: Vec<u32>,
    prev: Vec<u32>,
    pins: Vec<u32>,
    head: u32,
    tail: u32,
}

impl Lru {
    /// All slots unpinned; slot 0 is the first victim.
    pub(super) fn new(slots: usize) -> Lru {
        let mut lru =
            Lru { next: vec![NONE; slots], prev: vec![NONE; slots], pins: vec![0; slots], head: NONE, tail: NONE };
        for slot in 0..slots as u32 {
            lru.push_newest(slot);
        }
        lru
    }

    /// The slot to reuse next, `None` when every slot is pinned.
    pub(super) fn victim(&self) -> Option<u32> {
        (self.head != NONE).then_some(self.head)
    }

    /// Keeps `slot` from being a victim; pins nest.
    pub(super) fn pin(&mut self, slot: u32) {
        if self.pins[slot as usize] == 0 {
            self.unlink(slot);
        }
        self.pins[slot as usize] += 1;
    }

    /// Takes one pin off; the slot becomes the most recently used one.
    pub(super) fn unpin(&mut self, slot: u32) {
        self.pins[slot as usize] -= 1;
        if self.pins[slot as usize] == 0 {
            self.push_newest(slot);
        }
    }

    /// Makes an unpinned slot the next victim: what it holds is worth nothing.
    pub(super) fn forget(&mut self, slot: u32) {
        self.unlink(slot);
        self.next[slot as usize] = self.head;
        self.prev[slot as usize] = NONE;
        match self.head {
            NONE => self.tail = slot,
            head => self.prev[head as usize] = slot,
        }
        self.head = slot;
    }

    fn push_newest(&mut self, slot: u32) {
        self.prev[slot as usize] = self.tail;
        self.next[slot as usize] = NONE;
        match self.tail {
            NONE => self.head = slot,
            tail => self.next[tail as usize] = slot,
        }
        self.tail = slot;
    }

    fn unlink(&mut self, slot: u32) {
        let (prev, next) = (self.prev[slot as usize], self.next[slot as usize]);
        match prev {
            NONE => self.head = next,
            p => self.next[p as usize] = next,
        }
        match next {
            NONE => self.tail = prev,
            n => self.prev[n as usize] = prev,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Against a list that is searched and rebuilt at every step.
        #[test]
        fn behaves_as_a_plain_list(slots in 1usize..9, steps in prop::collection::vec((0u8..3, 0u32..9), 0..200)) {
            let mut lru = Lru::new(slots);
            let mut order: Vec<u32> = (0..slots as u32).collect();
            let mut pins = vec![0; slots];
            for (step, slot) in steps {
                let slot = slot % slots as u32;
                match step {
                    0 => {
                        lru.pin(slot);
                        pins[slot as usize] += 1;
                        order.retain(|&s| s != slot);
                    }
                    1 if pins[slot as usize] > 0 => {
                        lru.unpin(slot);
                        pins[slot as usize] -= 1;
                        if pins[slot as usize] == 0 {
                            order.push(slot);
                        }
                    }
                    2 if pins[slot as usize] == 0 => {
                        lru.forget(slot);
                        order.retain(|&s| s != slot);
                        order.insert(0, slot);
                    }
                    _ => {}
                }
                prop_assert_eq!(lru.victim(), order.first().copied());
            }
        }
    }
}

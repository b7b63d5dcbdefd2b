//! Reading ahead: which slots hold experts that nobody has asked for, and what becomes of them.
//!
//! A guess is for one layer. It may take an empty slot, or the slot that the next miss would take: the cache's own
//! measure says that nothing is worth less than what is there, and the router's score says that the guess is worth
//! more. Until its layer has asked, the cache's policy knows nothing of it, and it is no victim. What keeps a run of bad
//! guesses from emptying the cache is the bound on slots that hold guesses, all layers together; it also leaves demand the
//! slots it needs, of each size and beside those of pinned experts, which give way to nothing. The request of
//! the layer judges: what it asks for becomes an ordinary member of the cache, everything
//! else is taken back from the device as far as the kernel does not have it, and is the next victim where it was read.

use millstream_io::{Priority, Slab};

use super::{ExpertKey, ExpertStore, NO_SLOT};

/// Slots that hold guesses.
pub(super) struct Guesses {
    most: usize,
    /// Slots of every size that are left to requests.
    demand: usize,
    held: Vec<Held>,
    /// Guesses that wait until every miss of the request has its slab, the likeliest last.
    waiting: Vec<ExpertKey>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Held {
    slot: u32,
    /// Of the slot.
    size: u16,
    layer: u16,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    InFlight,
    /// In flight, and the layer it was for did not ask for it.
    Wrong,
    Resting,
}

/// What became of an attempt to read ahead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guessed {
    /// It is read, or was there.
    Done,
    /// There is no slab for it now.
    Later,
    /// Guesses have what they may have, or nothing can be read.
    Never,
}

/// What becomes of a guess whose read is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It waits for its layer.
    Waits,
    /// Its layer has passed.
    Wrong,
}

impl Guesses {
    /// None of `slots` slots may hold a guess.
    pub(super) fn none(slots: usize) -> Guesses {
        Guesses { most: 0, demand: 0, held: Vec::with_capacity(slots), waiting: Vec::with_capacity(slots) }
    }

    /// `most` slots may, and of every size all but `demand`. Those that do stay.
    fn bound(&mut self, most: usize, demand: usize) {
        (self.most, self.demand) = (most, demand);
    }

    /// What waits is not read any more.
    pub(super) fn forget_waiting(&mut self) {
        self.waiting.clear();
    }

    /// Whether one more slot of `size` may hold one, where so many of that size are lent to guesses and
    /// requests: all but those of pinned experts.
    fn has_room(&self, size: u16, slots: usize) -> bool {
        let of_size = self.held.iter().filter(|held| held.size == size).count();
        self.held.len() < self.most && of_size + self.demand < slots
    }

    fn add(&mut self, slot: u32, size: u16, layer: u16) {
        self.held.push(Held { slot, size, layer, state: State::InFlight });
    }

    /// Reads under way that nobody waits for.
    pub(super) fn in_flight(&self) -> usize {
        self.held.iter().filter(|held| held.state != State::Resting).count()
    }

    /// The slot is asked for: whether it was a guess until now.
    pub(super) fn used(&mut self, slot: u32) -> bool {
        self.remove(slot).is_some()
    }

    fn remove(&mut self, slot: u32) -> Option<Held> {
        let at = self.held.iter().position(|held| held.slot == slot)?;
        Some(self.held.swap_remove(at))
    }

    /// The read into `slot` is over and went well.
    fn arrived(&mut self, slot: u32) -> Fate {
        match self.held.iter_mut().find(|held| held.slot == slot) {
            Some(held) if held.state == State::InFlight => {
                held.state = State::Resting;
                Fate::Waits
            }
            _ => {
                self.remove(slot);
                Fate::Wrong
            }
        }
    }

    /// A guess that is not for a layer after `layer` and rests, as long as there is one; those in flight become wrong.
    fn next_wrong(&mut self, layer: u16) -> Option<u32> {
        let mut at = 0;
        while let Some(held) = self.held.get_mut(at) {
            if held.layer <= layer {
                match held.state {
                    State::Resting => return Some(self.held.swap_remove(at).slot),
                    State::InFlight | State::Wrong => held.state = State::Wrong,
                }
            }
            at += 1;
        }
        None
    }

    fn has_wrong_in_flight(&self) -> bool {
        self.held.iter().any(|held| held.state == State::Wrong)
    }
}

impl ExpertStore {
    /// From now on lets up to `most` slots hold guesses, and always leaves at least `demand` of every size to requests.
    pub fn allow_guesses(&mut self, most: usize, demand: usize) {
        self.guesses.bound(most.min(self.slots.len()), demand.max(1));
    }

    /// Expects a request of `layer`, one of those after the current request's, for `experts`, the likeliest first: what is not
    /// there is read as far as there are slots for guesses, behind everything that is waited for. Never waits. What
    /// cannot be read is forgotten: the request will read it.
    pub fn hint(&mut self, layer: usize, experts: &[u16]) {
        let key = |&expert: &u16| ExpertKey { layer: layer as u16, expert };
        for number in experts.iter().map(|expert| self.table.index(key(expert))) {
            self.placement.hint(number as u32);
        }
        if self.missing.is_empty() {
            experts.iter().map(key).take_while(|&key| self.guess(key) == Guessed::Done).for_each(drop);
            return;
        }
        // While a miss waits for a slab, a guess would take it away. It waits behind those of a nearer layer, which are at
        // the end: the last is read next.
        let slot_of = |key: &ExpertKey| self.slot_of[self.table.index(*key)];
        let absent = experts.iter().map(key).filter(|key| slot_of(key) == NO_SLOT);
        let waiting = &mut self.guesses.waiting;
        let before = waiting.len();
        waiting.extend(absent.take(self.guesses.most.saturating_sub(before)));
        waiting[before..].reverse();
        waiting.rotate_left(before);
    }

    /// Begins to read the guesses that wait, as far as there are slots, unless misses wait too.
    pub(super) fn read_ahead(&mut self) {
        if !self.missing.is_empty() {
            return;
        }
        while let Some(&key) = self.guesses.waiting.last() {
            match self.guess(key) {
                Guessed::Done => drop(self.guesses.waiting.pop()),
                Guessed::Later => return,
                Guessed::Never => return self.guesses.forget_waiting(),
            }
        }
    }

    /// Begins to read `key`, if it is not there.
    fn guess(&mut self, key: ExpertKey) -> Guessed {
        let size = self.table.size_of(usize::from(key.layer)) as u16;
        if self.dead.is_some() || !self.guesses.has_room(size, self.placement.unpinned(size)) {
            return Guessed::Never;
        }
        if self.slot_of[self.table.index(key)] != NO_SLOT {
            return Guessed::Done;
        }
        if !self.may_stage(key, true) {
            return Guessed::Later;
        }
        // The next slot that is let go of will do.
        let Some((slot, slab)) = self.claim(key) else { return Guessed::Later };
        if self.submit(key, slot, slab, Priority::Lookahead).is_err() {
            return Guessed::Never;
        }
        self.guesses.add(slot, size, key.layer);
        self.accounts.stats.guessed += 1;
        Guessed::Done
    }

    /// Takes back or waits for every guess under way; those that rest are the next victims. Nothing is in flight then
    /// that no request waits for.
    pub fn drop_guesses(&mut self) {
        self.guesses.forget_waiting();
        self.judge_guesses(usize::from(u16::MAX));
        while self.guesses.in_flight() > 0 {
            // A dead device is dead for the next request too, and what is given up is waited for by nobody.
            if self.wait().is_err() {
                return;
            }
        }
    }

    /// Gives up the guesses for layers up to `layer` that its request, which has taken its own, does not want. Whether
    /// slabs come back from the device for it.
    pub(super) fn judge_guesses(&mut self, layer: usize) -> bool {
        while let Some(slot) = self.guesses.next_wrong(layer as u16) {
            let Some(key) = self.slots[slot as usize].arrived() else {
                unreachable!("slot {slot} holds a guess and no expert")
            };
            self.waste_in(slot, key);
        }
        // Guesses for later layers go with them: the next hint for the next layer is the better one, and for those after it
        // there is another only where hints go as far.
        self.guesses.has_wrong_in_flight() && self.device.cancel_lookahead() > 0
    }

    /// Takes in a guess whose read is over, in its slot or, where it failed, nowhere.
    pub(super) fn guess_arrived(&mut self, slot: u32, key: ExpertKey, well: bool) {
        if !well {
            self.guesses.used(slot);
            return;
        }
        self.placement.let_go(slot);
        if self.guesses.arrived(slot) == Fate::Wrong {
            self.waste_in(slot, key);
        }
    }

    /// A guess was for nothing: what is in its slot is the next victim, or goes at once where it is not yet quantized.
    fn waste_in(&mut self, slot: u32, key: ExpertKey) {
        self.waste(key);
        if !self.drop_if_stored(slot) {
            self.placement.discard(slot, self.table.index(key) as u32);
        }
    }

    /// Counts an expert that was read for nothing.
    pub(super) fn waste(&mut self, key: ExpertKey) {
        self.accounts.stats.wasted += 1;
        self.accounts.stats.wasted_bytes += self.table.read_bytes(key);
    }

    /// Takes in a read that the device gave back before it was over. A request may have begun to wait for it
    /// meanwhile: then it is a miss like any other.
    pub(super) fn taken_back(&mut self, slot: u32, key: ExpertKey, wanted: bool, slab: Slab) {
        drop(slab);
        self.clear(slot, key);
        if wanted {
            self.awaited -= 1;
            self.missing.push_front(key);
        } else {
            self.guesses.used(slot);
            self.accounts.stats.cancelled += 1;
        }
    }
}

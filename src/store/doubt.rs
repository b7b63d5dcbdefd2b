//! What follows once a read brought wrong bytes: the sample let others pass before it, of the same drive perhaps.
//!
//! From then on every read is checked, those under way too. What rests is hashed at once. Where some of that is wrong, or
//! the copies of what is not there any more are, tokens may have been computed from it: the request fails, with
//! [`StoreError::Spoilt`], instead of going on as if nothing had happened. Wrong experts are emptied out, the next request
//! reads them again, and its reads are put right from a drive that is right.

use super::{Content, Damaged, ExpertKey, ExpertStore, NO_SLOT, StoreError};

/// What was found to be wrong after it had been taken in.
#[derive(Default)]
pub(super) struct Spoilt {
    /// The first such expert, until somebody was told.
    first: Option<Damaged>,
    /// Slots of wrong experts that were in use when that was found.
    held: Vec<(u32, Damaged)>,
}

impl ExpertStore {
    /// Fails where what was served before was found to be wrong since the last call. To be asked at the end of what belongs
    /// together, too: reads that nobody waited for may have found it.
    pub fn confirm(&mut self) -> Result<(), StoreError> {
        self.spoilt.first.take().map_or(Ok(()), |damaged| Err(StoreError::Spoilt(damaged)))
    }

    /// As [`ExpertStore::confirm`], in the middle of a request, which is over then.
    pub(super) fn confirm_or_abandon(&mut self) -> Result<(), StoreError> {
        if self.spoilt.first.is_some() {
            self.abandon();
        }
        self.confirm()
    }

    /// Empties the slots of wrong experts that were in use before. Fails where one still is.
    pub(super) fn let_go_of_wrong(&mut self) -> Result<(), StoreError> {
        for (slot, damaged) in std::mem::take(&mut self.spoilt.held) {
            self.throw_away(slot, damaged);
        }
        self.spoilt.held.first().map_or(Ok(()), |(_, damaged)| Err(StoreError::Spoilt(damaged.clone())))
    }

    /// Something was wrong for the first time: looks at everything that was taken in before.
    pub(super) fn check_what_was_taken_in(&mut self) {
        for slot in 0..self.slots.len() {
            let (key, read) = match &self.slots[slot] {
                // It was made from what was checked, or from what cannot be.
                Content::Resting(key, _) if self.table.is_quantized(*key) => continue,
                Content::Resting(key, read) | Content::Stored { key, read, .. } => (*key, read),
                Content::Empty | Content::InFlight { .. } => continue,
            };
            self.accounts.stats.checked += 1;
            if let Some(damaged) = self.checks.wrong(&self.table, key, read.bytes()) {
                self.accounts.stats.discarded += 1;
                self.spoilt.first.get_or_insert_with(|| damaged.clone());
                self.throw_away(slot as u32, damaged);
            }
        }
        if self.spoilt.first.is_none() {
            let slot_of = &self.slot_of;
            self.spoilt.first = self.checks.wrong_copy_of_gone(&self.table, |number| slot_of[number] == NO_SLOT);
        }
    }

    /// Empties the slot of a wrong expert, or makes a note of it where it is in use. It may hold another one by now.
    fn throw_away(&mut self, slot: u32, damaged: Damaged) {
        let key = damaged.key;
        if self.slots[slot as usize].arrived() != Some(key) {
            return;
        }
        if self.placement.is_held(slot) {
            self.spoilt.held.push((slot, damaged));
            return;
        }
        if self.guesses.used(slot) {
            self.waste(key);
        }
        self.forget(slot, key);
    }

    /// Empties a slot that nobody uses: it is the first to be reused.
    pub(super) fn forget(&mut self, slot: u32, key: ExpertKey) {
        self.slots[slot as usize] = Content::Empty;
        let number = self.table.index(key);
        self.slot_of[number] = NO_SLOT;
        self.placement.discard(slot, number as u32);
    }
}

//! Which slot is used next, and which experts stay: the cache's policy, joined to slots.
//!
//! A slot is spare (empty, or holding what is worth nothing), a guess (in nobody's hands until its layer has asked), or a
//! member of the cache. The policy knows members only. A slot in use is no victim, nor is a pinned expert's.

use super::policy::{Key, Layers, Past, Pins, Policy, PolicyKind, Wanted};

/// Where an expert can be, the fastest place first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// Memory of an accelerator. Nothing puts experts there yet.
    Vram,
    /// Memory, whatever the policy says.
    Pinned,
    /// Memory, until the policy gives it up.
    Cached,
    /// The drive, or the kernel's page cache over it.
    Disk,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    Spare,
    Guess,
    Member,
}

/// See the module's description.
pub(super) struct Placement {
    layers: Layers,
    policy: Box<dyn Policy>,
    pins: Pins,
    roles: Vec<Role>,
    /// Spare slots; the last is used next.
    spare: Vec<u32>,
    /// Users of each slot.
    users: Vec<u32>,
    wanted: Vec<Wanted>,
}

impl Placement {
    /// All of `slots` slots are spare, slot 0 the next.
    pub(super) fn new(kind: PolicyKind, layers: Layers, slots: usize) -> Placement {
        let widest = (0..layers.count()).map(|layer| layers.range(layer).len()).max().unwrap_or(0);
        Placement {
            policy: kind.build(&layers, slots),
            pins: Pins::none(layers.keys()),
            roles: vec![Role::Spare; slots],
            spare: (0..slots as u32).rev().collect(),
            users: vec![0; slots],
            wanted: Vec::with_capacity(widest),
            layers,
        }
    }

    /// Goes on with another policy. Every slot must be spare.
    pub(super) fn set_policy(&mut self, kind: PolicyKind) {
        assert_eq!(self.spare.len(), self.roles.len(), "the cache is in use");
        self.policy = kind.build(&self.layers, self.roles.len());
    }

    /// Begins with the selections of earlier runs, of `top_k` a row. A policy that counts selections takes them for its
    /// own, which serves better than pins; for one that does not, or where it is asked for, the hottest are pinned.
    pub(super) fn remember(&mut self, mut usage: Vec<u64>, top_k: usize, pin: Option<bool>) {
        usage.resize(self.layers.keys(), 0);
        let taken = self.policy.remember(&Past::of(&usage, top_k as u32));
        let pin = pin.unwrap_or(!taken);
        self.pins = if pin { Pins::from_history(usage, self.roles.len()) } else { Pins::counting(usage) };
    }

    /// Pins and selections.
    pub(super) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Between two generations: the worst pins for clearly hotter experts.
    pub(super) fn exchange_pins(&mut self) -> usize {
        self.pins.exchange()
    }

    /// `rows` rows of a layer ask for `wanted`.
    pub(super) fn request(&mut self, rows: u32, wanted: impl Iterator<Item = Wanted>) {
        self.wanted.clear();
        self.wanted.extend(wanted);
        self.wanted.iter().for_each(|wanted| self.pins.chose(wanted.key, wanted.rows));
        if !self.wanted.is_empty() {
            self.policy.request(rows, &self.wanted);
        }
    }

    /// `key` was asked for and has no slot.
    pub(super) fn miss(&mut self, key: Key) {
        self.policy.miss(key);
    }

    /// `key` was asked for and has this slot, or will have.
    pub(super) fn hit(&mut self, slot: u32, key: Key) {
        if self.roles[slot as usize] == Role::Member {
            self.policy.hit(key);
            return;
        }
        if self.roles[slot as usize] == Role::Spare {
            self.spare.retain(|&other| other != slot);
        }
        self.policy.miss(key);
        self.join(slot, key);
    }

    /// `key` was missed and is being read into this slot, which was taken for it.
    pub(super) fn join(&mut self, slot: u32, key: Key) {
        self.roles[slot as usize] = Role::Member;
        self.policy.insert(key);
    }

    /// A guess of what the next layers ask for.
    pub(super) fn hint(&mut self, key: Key) {
        self.policy.hint(&[key]);
    }

    /// The slot to use next: spare, or that of an expert which gives way; `None` when all are in use.
    pub(super) fn victim(&mut self, slot_of: &[u32]) -> Option<u32> {
        if let Some(&slot) = self.spare.last() {
            return Some(slot);
        }
        let (users, pins) = (&self.users, &self.pins);
        let kept = |key: Key| pins.is_pinned(key) || users[slot_of[key as usize] as usize] > 0;
        self.policy.victim(&kept).map(|key| slot_of[key as usize])
    }

    /// The slot that [`Placement::victim`] named is taken, from `key` where it held one. Until it joins it is a guess.
    pub(super) fn take(&mut self, slot: u32, key: Option<Key>) {
        match (self.roles[slot as usize], key) {
            (Role::Member, Some(key)) => self.policy.evict(key),
            _ => {
                let last = self.spare.pop();
                debug_assert_eq!(last, Some(slot));
            }
        }
        self.roles[slot as usize] = Role::Guess;
    }

    /// What the slot holds, or was to hold, is worth nothing: it is used next.
    pub(super) fn discard(&mut self, slot: u32, key: Key) {
        match std::mem::replace(&mut self.roles[slot as usize], Role::Spare) {
            Role::Spare => return,
            Role::Guess => {}
            Role::Member => self.policy.forget(key),
        }
        self.spare.push(slot);
    }

    /// The slot is in use once more, and no victim.
    pub(super) fn hold(&mut self, slot: u32) {
        self.users[slot as usize] += 1;
    }

    /// Whether the slot is in use.
    pub(super) fn is_held(&self, slot: u32) -> bool {
        self.users[slot as usize] > 0
    }

    /// The slot is in use once less.
    pub(super) fn let_go(&mut self, slot: u32) {
        self.users[slot as usize] -= 1;
    }
}

//! Which slot is used next, and which experts stay: the cache's policy, joined to slots.
//!
//! A slot is spare (empty, or holding what is worth nothing), a guess (in nobody's hands until its layer has asked), or a
//! member of the cache. The policy knows members only. A slot in use is no victim, nor is a pinned expert's.
//!
//! Slots of one size are a shelf with a policy of its own: an expert gives way only to one that fits in its place.

use std::ops::Range;

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

/// See the module's description. Slots are numbered over all shelves, and so are experts.
pub(super) struct Placement {
    shelves: Vec<Shelf>,
    /// Of each slot.
    shelf_of_slot: Vec<u16>,
    /// Of each expert.
    shelf_of: Vec<u16>,
}

impl Placement {
    /// All slots are spare. There are `slots[i]` of size `i`, numbered after those of the sizes before; `size_of` is the
    /// size that each expert needs.
    pub(super) fn new(kind: PolicyKind, layers: &Layers, slots: &[usize], size_of: Vec<u16>) -> Placement {
        let (mut shelves, mut shelf_of_slot) = (Vec::with_capacity(slots.len()), vec![]);
        for (size, &count) in (0u16..).zip(slots) {
            let first = shelf_of_slot.len() as u32;
            shelves.push(Shelf::new(kind, layers.clone(), first..first + count as u32));
            shelf_of_slot.resize(shelf_of_slot.len() + count, size);
        }
        Placement { shelves, shelf_of_slot, shelf_of: size_of }
    }

    /// Goes on with another policy. Every slot must be spare.
    pub(super) fn set_policy(&mut self, kind: PolicyKind) {
        self.shelves.iter_mut().for_each(|shelf| shelf.set_policy(kind));
    }

    /// Begins with the selections of earlier runs, of `top_k` a row. A policy that counts selections takes them for its
    /// own, which serves better than pins; for one that does not, or where it is asked for, the hottest are pinned.
    pub(super) fn remember(&mut self, mut usage: Vec<u64>, top_k: usize, pin: Option<bool>) {
        usage.resize(self.shelf_of.len(), 0);
        for (number, shelf) in (0..).zip(&mut self.shelves) {
            let of_shelf = |(&count, &of): (&u64, &u16)| if of == number { count } else { 0 };
            shelf.remember(usage.iter().zip(&self.shelf_of).map(of_shelf).collect(), top_k, pin);
        }
    }

    /// Selections of each expert since ever.
    pub(super) fn usage(&self) -> Vec<u64> {
        let of = |(key, &shelf): (usize, &u16)| self.shelves[usize::from(shelf)].pins.usage()[key];
        self.shelf_of.iter().enumerate().map(of).collect()
    }

    /// Experts that are pinned.
    pub(super) fn pinned(&self) -> usize {
        self.shelves.iter().map(|shelf| shelf.pins.count()).sum()
    }

    /// Slots of size `size` that a pinned expert is not, nor will be, in.
    pub(super) fn unpinned(&self, size: u16) -> usize {
        let shelf = &self.shelves[usize::from(size)];
        shelf.slots.len().saturating_sub(shelf.pins.count())
    }

    /// Whether `key` is pinned.
    pub(super) fn is_pinned(&self, key: Key) -> bool {
        self.shelf_of(key).pins.is_pinned(key)
    }

    /// Between two generations: the worst pins for clearly hotter experts.
    pub(super) fn exchange_pins(&mut self) -> usize {
        self.shelves.iter_mut().map(|shelf| shelf.pins.exchange()).sum()
    }

    /// `rows` rows of a layer ask for `wanted`, all of one size.
    pub(super) fn request(&mut self, rows: u32, mut wanted: impl Iterator<Item = Wanted>) {
        if let Some(first) = wanted.next() {
            self.shelf_of_mut(first.key).request(rows, [first].into_iter().chain(wanted));
        }
    }

    /// `key` was asked for and has no slot.
    pub(super) fn miss(&mut self, key: Key) {
        self.shelf_of_mut(key).policy.miss(key);
    }

    /// `key` was asked for and has this slot, or will have.
    pub(super) fn hit(&mut self, slot: u32, key: Key) {
        self.shelf_of_mut(key).hit(slot, key);
    }

    /// `key` was missed and is being read into this slot, which was taken for it.
    pub(super) fn join(&mut self, slot: u32, key: Key) {
        self.shelf_of_mut(key).join(slot, key);
    }

    /// A guess of what the next layers ask for.
    pub(super) fn hint(&mut self, key: Key) {
        self.shelf_of_mut(key).policy.hint(&[key]);
    }

    /// The slot that `key` would be read into next: spare, or that of an expert which gives way; `None` when all of its size
    /// are in use.
    pub(super) fn victim(&mut self, key: Key, slot_of: &[u32]) -> Option<u32> {
        self.shelf_of_mut(key).victim(slot_of)
    }

    /// The slot that [`Placement::victim`] named is taken, from `key` where it held one. Until it joins it is a guess.
    pub(super) fn take(&mut self, slot: u32, key: Option<Key>) {
        self.shelf_with(slot).take(slot, key);
    }

    /// What the slot holds, or was to hold, is worth nothing: it is used next.
    pub(super) fn discard(&mut self, slot: u32, key: Key) {
        self.shelf_with(slot).discard(slot, key);
    }

    /// The slot is in use once more, and no victim.
    pub(super) fn hold(&mut self, slot: u32) {
        self.shelf_with(slot).hold(slot);
    }

    /// Whether the slot is in use.
    pub(super) fn is_held(&self, slot: u32) -> bool {
        self.shelves[usize::from(self.shelf_of_slot[slot as usize])].is_held(slot)
    }

    /// The slot is in use once less.
    pub(super) fn let_go(&mut self, slot: u32) {
        self.shelf_with(slot).let_go(slot);
    }

    fn shelf_of(&self, key: Key) -> &Shelf {
        &self.shelves[usize::from(self.shelf_of[key as usize])]
    }

    fn shelf_of_mut(&mut self, key: Key) -> &mut Shelf {
        &mut self.shelves[usize::from(self.shelf_of[key as usize])]
    }

    fn shelf_with(&mut self, slot: u32) -> &mut Shelf {
        &mut self.shelves[usize::from(self.shelf_of_slot[slot as usize])]
    }
}

/// The slots of one size. Tables by slot go up to its last slot, and tables by expert know all experts: both are small.
struct Shelf {
    slots: Range<u32>,
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

impl Shelf {
    /// All of `slots` are spare, the first of them the next.
    fn new(kind: PolicyKind, layers: Layers, slots: Range<u32>) -> Shelf {
        let widest = (0..layers.count()).map(|layer| layers.range(layer).len()).max().unwrap_or(0);
        Shelf {
            policy: kind.build(&layers, slots.len()),
            pins: Pins::none(layers.keys()),
            roles: vec![Role::Spare; slots.end as usize],
            spare: slots.clone().rev().collect(),
            users: vec![0; slots.end as usize],
            wanted: Vec::with_capacity(widest),
            layers,
            slots,
        }
    }

    fn set_policy(&mut self, kind: PolicyKind) {
        assert_eq!(self.spare.len(), self.slots.len(), "the cache is in use");
        self.policy = kind.build(&self.layers, self.slots.len());
    }

    fn remember(&mut self, usage: Vec<u64>, top_k: usize, pin: Option<bool>) {
        let taken = self.policy.remember(&Past::of(&usage, top_k as u32));
        let pin = pin.unwrap_or(!taken);
        self.pins = if pin { Pins::from_history(usage, self.slots.len()) } else { Pins::counting(usage) };
    }

    fn request(&mut self, rows: u32, wanted: impl Iterator<Item = Wanted>) {
        self.wanted.clear();
        self.wanted.extend(wanted);
        self.wanted.iter().for_each(|wanted| self.pins.chose(wanted.key, wanted.rows));
        self.policy.request(rows, &self.wanted);
    }

    fn hit(&mut self, slot: u32, key: Key) {
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

    fn join(&mut self, slot: u32, key: Key) {
        self.roles[slot as usize] = Role::Member;
        self.policy.insert(key);
    }

    fn victim(&mut self, slot_of: &[u32]) -> Option<u32> {
        if let Some(&slot) = self.spare.last() {
            return Some(slot);
        }
        let (users, pins) = (&self.users, &self.pins);
        let kept = |key: Key| pins.is_pinned(key) || users[slot_of[key as usize] as usize] > 0;
        self.policy.victim(&kept).map(|key| slot_of[key as usize])
    }

    fn take(&mut self, slot: u32, key: Option<Key>) {
        match (self.roles[slot as usize], key) {
            (Role::Member, Some(key)) => self.policy.evict(key),
            _ => {
                let last = self.spare.pop();
                debug_assert_eq!(last, Some(slot));
            }
        }
        self.roles[slot as usize] = Role::Guess;
    }

    fn discard(&mut self, slot: u32, key: Key) {
        match std::mem::replace(&mut self.roles[slot as usize], Role::Spare) {
            Role::Spare => return,
            Role::Guess => {}
            Role::Member => self.policy.forget(key),
        }
        self.spare.push(slot);
    }

    fn hold(&mut self, slot: u32) {
        self.users[slot as usize] += 1;
    }

    fn is_held(&self, slot: u32) -> bool {
        self.users[slot as usize] > 0
    }

    fn let_go(&mut self, slot: u32) {
        self.users[slot as usize] -= 1;
    }
}

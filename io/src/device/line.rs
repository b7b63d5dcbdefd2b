//! Whose turn it is: reads that wait, and those that are being handed out. Pure bookkeeping over the slots of a schedule.

use crate::device::{Priority, Read};
use crate::file::FileId;

/// Reads that are not wholly handed out.
pub(crate) struct Line {
    /// Sorted. Nothing of a lookahead here has been handed out.
    waiting: Vec<Waiting>,
    /// The read being handed out, one for each priority.
    current: [Option<u32>; 2],
    /// Where the last demand that started lies: the sweep goes on upwards from here, so that no read is passed over
    /// for ever by newcomers in front of it.
    head: Option<Turn>,
    /// Lookahead reads that have joined so far.
    guesses: u64,
}

/// A read that waits for its turn, by the order in which reads are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    turn: Turn,
    submitted_ns: u64,
    slot: u32,
}

/// Demands are all needed, so they are read in the order of the file, before any lookahead. Of guesses only the first few
/// are ever read, so those go in the order in which they joined: the likeliest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Demand(FileId, u64),
    Lookahead(u64),
}

impl Turn {
    fn priority(self) -> Priority {
        match self {
            Turn::Demand(..) => Priority::Demand,
            Turn::Lookahead(_) => Priority::Lookahead,
        }
    }
}

/// The read to hand out from, and its place in the line where it still waits there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Next {
    pub slot: u32,
    position: Option<usize>,
}

impl Line {
    /// For up to `reads` reads.
    pub fn new(reads: usize) -> Line {
        Line { waiting: Vec::with_capacity(reads), current: [None; 2], head: None, guesses: 0 }
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.current.iter().all(Option::is_none)
    }

    /// Reads that wait; those being handed out do not.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Puts a read where its turn is.
    pub fn join(&mut self, slot: u32, read: &Read, submitted_ns: u64) {
        let turn = match read.priority {
            Priority::Demand => Turn::Demand(read.segments[0].file, read.segments[0].offset),
            Priority::Lookahead => Turn::Lookahead(self.guesses),
        };
        self.guesses += u64::from(read.priority == Priority::Lookahead);
        let newcomer = Waiting { turn, submitted_ns, slot };
        let position = self.waiting.partition_point(|other| *other < newcomer);
        self.waiting.insert(position, newcomer);
    }

    /// Of each priority first the one that has started; then the next demand upwards of `head`, the lowest, or the first
    /// guess.
    pub fn next(&self) -> Option<Next> {
        let above = self.waiting.partition_point(|other| Some(other.turn) <= self.head);
        for priority in [Priority::Demand, Priority::Lookahead] {
            if let Some(slot) = self.current[priority as usize] {
                return Some(Next { slot, position: None });
            }
            let of_priority = |position: &usize| {
                self.waiting.get(*position).is_some_and(|waiting| waiting.turn.priority() == priority)
            };
            // The lowest demand is the first of all that wait; above the last demand the guesses begin.
            if let Some(position) = [above, 0].into_iter().find(of_priority) {
                return Some(Next { slot: self.waiting[position].slot, position: Some(position) });
            }
        }
        None
    }

    /// Something of `next`, which is to be the line's own answer, is handed out.
    pub fn start(&mut self, next: Next) {
        let Some(position) = next.position else { return };
        let turn = self.waiting.remove(position).turn;
        if turn.priority() == Priority::Demand {
            self.head = Some(turn);
        }
        self.current[turn.priority() as usize] = Some(next.slot);
    }

    /// Nothing more of `slot` is to be handed out.
    pub fn leave(&mut self, slot: u32) {
        for current in &mut self.current {
            current.take_if(|current| *current == slot);
        }
        self.waiting.retain(|waiting| waiting.slot != slot);
    }

    /// `slot`, a lookahead until now, holds a demand.
    pub fn promote(&mut self, slot: u32, read: &Read, submitted_ns: u64) {
        let [demand, lookahead] = &mut self.current;
        if lookahead.take_if(|current| *current == slot).is_some() {
            match demand {
                None => *demand = Some(slot),
                Some(_) => self.join(slot, read, submitted_ns),
            }
        } else if let Some(position) = self.waiting.iter().position(|waiting| waiting.slot == slot) {
            self.waiting.remove(position);
            self.join(slot, read, submitted_ns);
        }
    }

    /// Takes the last lookahead out that nothing was handed out of.
    pub fn pop_lookahead(&mut self) -> Option<u32> {
        Some(self.waiting.pop_if(|last| last.turn.priority() == Priority::Lookahead)?.slot)
    }

    /// Takes the lookahead out that is being handed out.
    pub fn stop_lookahead(&mut self) -> Option<u32> {
        self.current[Priority::Lookahead as usize].take()
    }

    pub fn clear(&mut self) {
        self.waiting.clear();
        self.current = [None; 2];
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Segment, Segments};
    use proptest::prelude::*;

    /// A read that is not wholly handed out.
    #[derive(Clone, Copy, Debug)]
    struct Known {
        slot: u32,
        priority: Priority,
        place: (FileId, u64),
        submitted_ns: u64,
        /// Being handed out.
        current: bool,
    }

    impl Known {
        fn read(&self) -> Read {
            let (file, offset) = self.place;
            let segment = Segment { file, offset, len: 4096, at: 0, want: 4096 };
            let segments = Segments::from_slice(&[segment]).unwrap();
            Read { tag: self.slot.into(), priority: self.priority, segments }
        }

        fn waits(&self, priority: Priority) -> bool {
            self.priority == priority && !self.current
        }
    }

    /// The rules as they are said, over reads in the order in which they came.
    #[derive(Default)]
    struct Plain {
        reads: Vec<Known>,
        head: Option<(FileId, u64)>,
    }

    impl Plain {
        fn current(&self, priority: Priority) -> Option<&Known> {
            self.reads.iter().find(|read| read.priority == priority && read.current)
        }

        fn next(&self) -> Option<u32> {
            let order = |read: &&Known| (read.place, read.submitted_ns, read.slot);
            let demands = || self.reads.iter().filter(|read| read.waits(Priority::Demand));
            self.current(Priority::Demand)
                .or_else(|| demands().filter(|read| Some(read.place) > self.head).min_by_key(order))
                .or_else(|| demands().min_by_key(order))
                .or_else(|| self.current(Priority::Lookahead))
                .or_else(|| self.reads.iter().find(|read| read.waits(Priority::Lookahead)))
                .map(|read| read.slot)
        }

        fn start(&mut self, slot: u32) {
            let Some(read) = self.reads.iter_mut().find(|read| read.slot == slot && !read.current) else { return };
            read.current = true;
            if read.priority == Priority::Demand {
                self.head = Some(read.place);
            }
        }

        fn promote(&mut self, slot: u32) {
            let busy = self.current(Priority::Demand).is_some();
            let Some(read) = self.reads.iter_mut().find(|read| read.slot == slot) else { return };
            read.priority = Priority::Demand;
            read.current &= !busy;
        }

        fn take(&mut self, which: impl Fn(&Known) -> bool) -> Option<u32> {
            let position = self.reads.iter().rposition(which)?;
            Some(self.reads.remove(position).slot)
        }
    }

    proptest! {
        #[test]
        fn turns_are_those_of_a_list_that_is_searched_each_time(
            steps in prop::collection::vec((0..7u8, 0..12u32, 0..2u32, 0..5u64), 1..200),
        ) {
            let (mut line, mut plain) = (Line::new(12), Plain::default());
            for (now_ns, (step, slot, file, offset)) in (0..).zip(steps) {
                let known = plain.reads.iter().copied().find(|read| read.slot == slot);
                match (step, known) {
                    (0 | 1, None) => {
                        let priority = if step == 0 { Priority::Demand } else { Priority::Lookahead };
                        let place = (FileId(file), offset * 4096);
                        // Some come in the same instant.
                        let newcomer = Known { slot, priority, place, submitted_ns: now_ns / 4, current: false };
                        line.join(slot, &newcomer.read(), newcomer.submitted_ns);
                        plain.reads.push(newcomer);
                    }
                    (0..=2, _) => {
                        if let Some(next) = line.next() {
                            line.start(next);
                            plain.start(next.slot);
                        }
                    }
                    (3, _) => {
                        line.leave(slot);
                        plain.take(|read| read.slot == slot);
                    }
                    (4, Some(read)) if read.priority == Priority::Lookahead => {
                        let demand = Known { priority: Priority::Demand, ..read };
                        line.promote(slot, &demand.read(), read.submitted_ns);
                        plain.promote(slot);
                    }
                    (5, _) => {
                        prop_assert_eq!(line.pop_lookahead(), plain.take(|read| read.waits(Priority::Lookahead)));
                    }
                    (6, _) => {
                        let current = |read: &Known| read.priority == Priority::Lookahead && read.current;
                        prop_assert_eq!(line.stop_lookahead(), plain.take(current));
                    }
                    _ => {}
                }
                prop_assert_eq!(line.next().map(|next| next.slot), plain.next());
                prop_assert_eq!(line.waiting(), plain.reads.iter().filter(|read| !read.current).count());
                prop_assert_eq!(line.is_empty(), plain.reads.is_empty());
            }
        }
    }
}

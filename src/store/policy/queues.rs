//! Queues over numbered members, each in one queue at most; every operation but the search past held ones is immediate.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    next: u32,
    prev: u32,
    queue: Option<u8>,
}

#[derive(Clone, Copy)]
struct Ends {
    head: u32,
    tail: u32,
    len: usize,
}

/// `N` doubly linked lists over the numbers below a bound.
pub(super) struct Queues<const N: usize> {
    links: Vec<Link>,
    ends: [Ends; N],
}

impl<const N: usize> Queues<N> {
    /// Empty queues for members below `members`.
    pub(super) fn new(members: usize) -> Queues<N> {
        Queues {
            links: vec![Link { next: NONE, prev: NONE, queue: None }; members],
            ends: [Ends { head: NONE, tail: NONE, len: 0 }; N],
        }
    }

    /// The queue that `member` is in.
    pub(super) fn queue_of(&self, member: u32) -> Option<usize> {
        self.links[member as usize].queue.map(usize::from)
    }

    /// Members of a queue.
    pub(super) fn len(&self, queue: usize) -> usize {
        self.ends[queue].len
    }

    /// The oldest member of a queue.
    pub(super) fn front(&self, queue: usize) -> Option<u32> {
        self.front_but(queue, &|_| false)
    }

    /// The oldest member of a queue that is not held.
    pub(super) fn front_but(&self, queue: usize, held: &dyn Fn(u32) -> bool) -> Option<u32> {
        let mut member = self.ends[queue].head;
        while member != NONE && held(member) {
            member = self.links[member as usize].next;
        }
        (member != NONE).then_some(member)
    }

    /// Makes `member` the newest of `queue`, wherever it was before.
    pub(super) fn push(&mut self, queue: usize, member: u32) {
        self.remove(member);
        let ends = &mut self.ends[queue];
        self.links[member as usize] = Link { next: NONE, prev: ends.tail, queue: Some(queue as u8) };
        match ends.tail {
            NONE => ends.head = member,
            tail => self.links[tail as usize].next = member,
        }
        ends.tail = member;
        ends.len += 1;
    }

    /// Takes `member` out of its queue, where it is in one.
    pub(super) fn remove(&mut self, member: u32) {
        let Link { next, prev, queue: Some(queue) } = self.links[member as usize] else { return };
        let ends = &mut self.ends[usize::from(queue)];
        match prev {
            NONE => ends.head = next,
            prev => self.links[prev as usize].next = next,
        }
        match next {
            NONE => ends.tail = prev,
            next => self.links[next as usize].prev = prev,
        }
        ends.len -= 1;
        self.links[member as usize].queue = None;
    }

    /// Takes the oldest members out of `queue` until it has `most`.
    pub(super) fn trim(&mut self, queue: usize, most: usize) {
        while self.len(queue) > most
            && let Some(oldest) = self.front(queue)
        {
            self.remove(oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;

    proptest! {
        /// Against lists that are searched at every step.
        #[test]
        fn behave_as_plain_lists(steps in prop::collection::vec((0u8..3, 0usize..3, 0u32..7, 0u32..128), 0..200)) {
            let mut queues = Queues::<3>::new(7);
            let mut lists: [VecDeque<u32>; 3] = Default::default();
            for (step, queue, member, held) in steps {
                let is_held = |m: u32| held >> m & 1 == 1;
                match step {
                    0 => {
                        queues.push(queue, member);
                        lists.iter_mut().for_each(|list| list.retain(|&m| m != member));
                        lists[queue].push_back(member);
                    }
                    1 => {
                        queues.remove(member);
                        lists.iter_mut().for_each(|list| list.retain(|&m| m != member));
                    }
                    _ => {
                        let most = held as usize % 5;
                        queues.trim(queue, most);
                        while lists[queue].len() > most {
                            lists[queue].pop_front();
                        }
                    }
                }
                for (queue, list) in lists.iter().enumerate() {
                    prop_assert_eq!(queues.len(queue), list.len());
                    prop_assert_eq!(queues.front(queue), list.front().copied());
                    let free = list.iter().copied().find(|&m| !is_held(m));
                    prop_assert_eq!(queues.front_but(queue, &is_held), free);
                }
                for member in 0..7 {
                    let queue = lists.iter().position(|list| list.contains(&member));
                    prop_assert_eq!(queues.queue_of(member), queue);
                }
            }
        }
    }
}

//! Each policy against a second one, written plainly from its definition: lists that are searched, sums over the whole past.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::belady::Belady;
use super::{Key, Layers, Policy, PolicyKind, Wanted};

const LAYERS: usize = 3;
const EXPERTS: usize = 5;

fn layers() -> Layers {
    Layers::new([EXPERTS; LAYERS])
}

/// Requests of layer after layer: for each the experts, as bits.
fn rounds(count: impl Into<prop::collection::SizeRange>) -> impl Strategy<Value = Vec<Vec<Wanted>>> {
    prop::collection::vec(1u32..1 << EXPERTS, count).prop_map(|masks| {
        let request = |(number, mask): (usize, u32)| {
            let first = (number % LAYERS * EXPERTS) as Key;
            (0..EXPERTS as Key).filter(|e| mask >> e & 1 == 1).map(|e| Wanted { key: first + e, rows: 1 }).collect()
        };
        masks.into_iter().enumerate().map(request).collect()
    })
}

/// A cache that serves requests by two policies and sees to it that they agree. Returns the misses.
fn serve(
    policy: &mut dyn Policy,
    model: &mut dyn Policy,
    requests: &[Vec<Wanted>],
    capacity: usize,
) -> Result<u64, TestCaseError> {
    let (mut cached, mut misses) = (Vec::<Key>::new(), 0);
    for wanted in requests {
        let mut held = VecDeque::new();
        let mut both = |call: &dyn Fn(&mut dyn Policy)| {
            call(policy);
            call(model);
        };
        both(&|p| p.request(1, wanted));
        let (hits, missing): (Vec<Key>, Vec<Key>) = wanted.iter().map(|w| w.key).partition(|key| cached.contains(key));
        for w in wanted {
            both(&|p| if hits.contains(&w.key) { p.hit(w.key) } else { p.miss(w.key) });
        }
        held.extend(hits);
        for key in missing {
            misses += 1;
            while cached.len() == capacity {
                let victim = policy.victim(&|key| held.contains(&key));
                prop_assert_eq!(victim, model.victim(&|key| held.contains(&key)));
                let Some(victim) = victim else {
                    prop_assert!(held.pop_front().is_some(), "nothing is held and there is no victim");
                    continue;
                };
                prop_assert!(cached.contains(&victim) && !held.contains(&victim));
                cached.retain(|&key| key != victim);
                policy.evict(victim);
                model.evict(victim);
            }
            // Every seventh read fails: its expert is inserted and forgotten.
            policy.insert(key);
            model.insert(key);
            if misses % 7 == 0 {
                policy.forget(key);
                model.forget(key);
            } else {
                cached.push(key);
                held.push_back(key);
            }
        }
    }
    Ok(misses)
}

/// Lists by name, oldest first, and what each policy does with them.
#[derive(Default)]
struct Lists {
    capacity: usize,
    lists: [Vec<Key>; 4],
    target: usize,
    from_again: bool,
    asked: Vec<u8>,
    returning: Vec<Key>,
}

impl Lists {
    fn new(capacity: usize) -> Lists {
        Lists { capacity, asked: vec![0; LAYERS * EXPERTS], ..Lists::default() }
    }

    fn find(&self, key: Key) -> Option<usize> {
        self.lists.iter().position(|list| list.contains(&key))
    }

    fn drop(&mut self, key: Key) {
        self.lists.iter_mut().for_each(|list| list.retain(|&other| other != key));
    }

    fn put(&mut self, list: usize, key: Key) {
        self.drop(key);
        self.lists[list].push(key);
    }

    fn oldest(&self, list: usize, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.lists[list].iter().copied().find(|&key| !held(key))
    }

    fn cut(&mut self, list: usize, most: usize) {
        while self.lists[list].len() > most {
            self.lists[list].remove(0);
        }
    }

    /// Whether a key comes back from a list of those that left.
    fn returns(&mut self, key: Key) -> bool {
        let returns = self.returning.contains(&key);
        self.returning.retain(|&other| other != key);
        returns
    }
}

struct PlainLru(Lists);

impl Policy for PlainLru {
    fn request(&mut self, _: u32, _: &[Wanted]) {}
    fn hit(&mut self, key: Key) {
        self.0.put(0, key);
    }
    fn miss(&mut self, _: Key) {}
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        self.0.oldest(0, held)
    }
    fn evict(&mut self, key: Key) {
        self.0.drop(key);
    }
    fn insert(&mut self, key: Key) {
        self.0.put(0, key);
    }
    fn forget(&mut self, key: Key) {
        self.0.drop(key);
    }
}

/// Lists: A1in, Am, A1out of the paper.
struct PlainTwoQueues(Lists);

impl Policy for PlainTwoQueues {
    fn request(&mut self, _: u32, _: &[Wanted]) {}
    fn hit(&mut self, key: Key) {
        if self.0.lists[1].contains(&key) {
            self.0.put(1, key);
        }
    }
    fn miss(&mut self, key: Key) {
        if self.0.lists[2].contains(&key) {
            self.0.returning.push(key);
            self.0.drop(key);
        }
    }
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let first = if self.0.lists[0].len() > (self.0.capacity / 4).max(1) { 0 } else { 1 };
        self.0.oldest(first, held).or_else(|| self.0.oldest(1 - first, held))
    }
    fn evict(&mut self, key: Key) {
        if self.0.lists[0].contains(&key) {
            self.0.put(2, key);
            self.0.cut(2, (self.0.capacity / 2).max(1));
        } else {
            self.0.drop(key);
        }
    }
    fn insert(&mut self, key: Key) {
        let list = usize::from(self.0.returns(key));
        self.0.put(list, key);
    }
    fn forget(&mut self, key: Key) {
        self.0.drop(key);
    }
}

/// Lists: T1, T2, B1, B2 of the paper.
struct PlainArc(Lists);

impl Policy for PlainArc {
    fn request(&mut self, _: u32, _: &[Wanted]) {}
    fn hit(&mut self, key: Key) {
        self.0.put(1, key);
    }
    fn miss(&mut self, key: Key) {
        let [b1, b2] = [2, 3].map(|list: usize| self.0.lists[list].len());
        let ghost = self.0.find(key);
        if ghost == Some(2) {
            self.0.target = self.0.capacity.min(self.0.target + if b1 >= b2 { 1 } else { b2 / b1 });
        } else if ghost == Some(3) {
            self.0.target -= self.0.target.min(if b2 >= b1 { 1 } else { b1 / b2 });
        }
        self.0.from_again = ghost == Some(3);
        if ghost.is_some() {
            self.0.returning.push(key);
            self.0.drop(key);
        }
    }
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let t1 = self.0.lists[0].len();
        let from_t1 = t1 >= 1 && ((self.0.from_again && t1 == self.0.target) || t1 > self.0.target);
        let first = if from_t1 { 0 } else { 1 };
        self.0.oldest(first, held).or_else(|| self.0.oldest(1 - first, held))
    }
    fn evict(&mut self, key: Key) {
        let ghost = if self.0.lists[0].contains(&key) { 2 } else { 3 };
        self.0.put(ghost, key);
        let [t1, t2, ..] = [0, 1].map(|list: usize| self.0.lists[list].len());
        let c = self.0.capacity;
        self.0.cut(2, c.saturating_sub(t1));
        self.0.cut(3, (2 * c).saturating_sub(t1 + t2 + self.0.lists[2].len()));
    }
    fn insert(&mut self, key: Key) {
        let list = usize::from(self.0.returns(key));
        self.0.put(list, key);
    }
    fn forget(&mut self, key: Key) {
        self.0.drop(key);
    }
}

/// Lists: S, M, G of the paper.
struct PlainS3Fifo(Lists);

impl PlainS3Fifo {
    fn small_victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        loop {
            let key = self.0.oldest(0, held)?;
            if self.0.asked[key as usize] < 2 {
                return Some(key);
            }
            self.0.asked[key as usize] = 0;
            self.0.put(1, key);
        }
    }
    fn main_victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        loop {
            let key = self.0.oldest(1, held)?;
            if self.0.asked[key as usize] == 0 {
                return Some(key);
            }
            self.0.asked[key as usize] -= 1;
            self.0.put(1, key);
        }
    }
}

impl Policy for PlainS3Fifo {
    fn request(&mut self, _: u32, _: &[Wanted]) {}
    fn hit(&mut self, key: Key) {
        self.0.asked[key as usize] = (self.0.asked[key as usize] + 1).min(3);
    }
    fn miss(&mut self, key: Key) {
        if self.0.lists[2].contains(&key) {
            self.0.returning.push(key);
            self.0.drop(key);
        }
    }
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let small = self.0.lists[0].len() >= (self.0.capacity / 10).max(1);
        let first = if small { self.small_victim(held) } else { None };
        first.or_else(|| self.main_victim(held)).or_else(|| self.small_victim(held))
    }
    fn evict(&mut self, key: Key) {
        if self.0.lists[0].contains(&key) {
            self.0.put(2, key);
            let small = (self.0.capacity / 10).max(1);
            self.0.cut(2, self.0.capacity.saturating_sub(small).max(1));
        } else {
            self.0.drop(key);
        }
    }
    fn insert(&mut self, key: Key) {
        self.0.asked[key as usize] = 0;
        let list = usize::from(self.0.returns(key));
        self.0.put(list, key);
    }
    fn forget(&mut self, key: Key) {
        self.0.drop(key);
    }
}

/// Scores from the whole past, each time anew. Periods of 128 visits, as decided.
struct PlainLfru {
    cached: Vec<Key>,
    /// Visits of each layer: the experts chosen.
    past: Vec<Vec<Vec<Key>>>,
}

impl PlainLfru {
    fn new() -> PlainLfru {
        PlainLfru { cached: vec![], past: vec![vec![]; LAYERS] }
    }

    /// Heat in 256ths and visits since the last selection, 0 for the visit itself; all of the visits for none.
    fn heat_and_age(&self, key: Key) -> (u64, u64) {
        let visits = &self.past[key as usize / EXPERTS];
        let (mut heat, mut last) = (0, 0);
        for (number, chosen) in visits.iter().enumerate().map(|(number, chosen)| (number as u64 + 1, chosen)) {
            if number % 128 == 0 {
                heat /= 2;
            }
            if chosen.contains(&key) {
                (heat, last) = (heat + 256, number);
            }
        }
        (heat, visits.len() as u64 - last)
    }
}

impl Policy for PlainLfru {
    fn request(&mut self, _: u32, wanted: &[Wanted]) {
        self.past[wanted[0].key as usize / EXPERTS].push(wanted.iter().map(|w| w.key).collect());
    }
    fn hit(&mut self, _: Key) {}
    fn miss(&mut self, _: Key) {}
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let score = |key: Key| {
            let (heat, age) = self.heat_and_age(key);
            heat + 255u64.saturating_sub(age)
        };
        self.cached.iter().copied().filter(|&key| !held(key)).min_by_key(|&key| (score(key), key))
    }
    fn evict(&mut self, key: Key) {
        self.cached.retain(|&other| other != key);
    }
    fn insert(&mut self, key: Key) {
        self.cached.push(key);
    }
    fn forget(&mut self, key: Key) {
        self.evict(key);
    }
}

/// Worths from the whole past, each time anew.
struct PlainLookahead {
    past: PlainLfru,
    /// What layers, in the order of their requests, chose.
    requests: Vec<usize>,
}

impl PlainLookahead {
    /// Chances in 65536 that a visit chooses `key`, where each visit takes one part in `fading` from what was before.
    fn rate(visits: &[Vec<Key>], key: Key, fading: u64) -> u64 {
        let (mut heat, mut weight) = (0, 0);
        for chosen in visits {
            let fade = |value: u64| value - value.div_ceil(fading);
            heat = fade(heat) + if chosen.contains(&key) { 65536 } else { 0 };
            weight = fade(weight) + 65536;
        }
        ((heat + 16384) * 65536 / weight.max(65536)).clamp(1, 65536)
    }

    /// Powers of two of the age, half powers of the rate, and how the rate of late stands to it.
    fn kind(age: u64, rate: u64, lately: u64) -> (u32, u32, u32) {
        let octave = 63 - rate.leading_zeros();
        let upper = octave > 0 && rate >= (1 << octave) + (1 << (octave - 1));
        let trend = match lately {
            _ if lately < rate / 2 => 0,
            _ if lately < rate => 1,
            _ if lately < 2 * rate => 2,
            _ if lately < 4 * rate => 3,
            _ => 4,
        };
        ((63 - age.leading_zeros()).min(7), 2 * octave + u32::from(upper), trend)
    }

    /// The worth of every expert when its layer is next. What was foretold and came of each kind is added up from the
    /// beginning.
    fn worths(&self) -> Vec<u64> {
        let mut sums = std::collections::BTreeMap::<(u32, u32, u32), (u64, u64)>::new();
        let mut outlooks = [None; LAYERS * EXPERTS];
        let mut visits = [0; LAYERS];
        for &layer in &self.requests {
            visits[layer] += 1;
            let seen = &self.past.past[layer][..visits[layer]];
            for key in (layer * EXPERTS..(layer + 1) * EXPERTS).map(|key| key as Key) {
                let chosen = |visit: &Vec<Key>| visit.contains(&key);
                let age = seen.iter().rev().position(chosen).map_or(seen.len() as u64, |age| age as u64) + 1;
                let (rate, lately) = (PlainLookahead::rate(seen, key, 256), PlainLookahead::rate(seen, key, 32));
                let kind = PlainLookahead::kind(age, rate, lately);
                let by_rate = 2 * 65536 * rate / (65536 + rate);
                let (foretold, came) = sums.get(&kind).copied().unwrap_or_default();
                let worth = (by_rate * (came + 16 * by_rate) / (foretold + 16 * by_rate)).min(65536);
                if let Some((kind, by_rate, _)) = outlooks[key as usize].replace((kind, by_rate, worth)) {
                    let sums = sums.entry(kind).or_default();
                    sums.0 += by_rate;
                    sums.1 += if chosen(&seen[seen.len() - 1]) { 65536 } else { worth / 2 };
                }
            }
        }
        outlooks.iter().map(|outlook| outlook.map_or(0, |(.., worth)| worth)).collect()
    }
}

impl Policy for PlainLookahead {
    fn request(&mut self, rows: u32, wanted: &[Wanted]) {
        self.requests.push(wanted[0].key as usize / EXPERTS);
        self.past.request(rows, wanted);
    }
    fn hit(&mut self, _: Key) {}
    fn miss(&mut self, _: Key) {}
    fn victim(&mut self, held: &dyn Fn(Key) -> bool) -> Option<Key> {
        let (worths, here) = (self.worths(), self.requests[self.requests.len() - 1]);
        let worth = |key: Key| {
            let way = (1..=LAYERS).find(|way| (here + way) % LAYERS == key as usize / EXPERTS).unwrap_or(0);
            worths[key as usize] * (2 * LAYERS - way) as u64
        };
        let free = self.past.cached.iter().copied().filter(|&key| !held(key));
        free.min_by_key(|&key| (worth(key), key))
    }
    fn evict(&mut self, key: Key) {
        self.past.evict(key);
    }
    fn insert(&mut self, key: Key) {
        self.past.insert(key);
    }
    fn forget(&mut self, key: Key) {
        self.past.evict(key);
    }
}

fn plain(kind: PolicyKind, capacity: usize) -> Box<dyn Policy> {
    let lists = Lists::new(capacity);
    match kind {
        PolicyKind::Lru => Box::new(PlainLru(lists)),
        PolicyKind::TwoQueues => Box::new(PlainTwoQueues(lists)),
        PolicyKind::Arc => Box::new(PlainArc(lists)),
        PolicyKind::S3Fifo => Box::new(PlainS3Fifo(lists)),
        PolicyKind::Lfru => Box::new(PlainLfru::new()),
        PolicyKind::Lookahead => Box::new(PlainLookahead { past: PlainLfru::new(), requests: vec![] }),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn every_policy_does_what_its_definition_says(
        requests in rounds(1..120),
        capacity in 1usize..12,
        kind in prop::sample::select(PolicyKind::ALL.to_vec()),
    ) {
        serve(&mut *kind.build(&layers(), capacity), &mut *plain(kind, capacity), &requests, capacity)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, ..ProptestConfig::default() })]

    /// Long enough for heat to be halved twice.
    #[test]
    fn what_is_long_past_counts_less(requests in rounds(LAYERS * 260..LAYERS * 270), capacity in 4usize..12) {
        let kind = PolicyKind::Lfru;
        serve(&mut *kind.build(&layers(), capacity), &mut *plain(kind, capacity), &requests, capacity)?;
    }
}

/// Fewest misses of `requests`, trying every choice of what to keep. A union larger than the cache is not tried.
fn fewest_misses(requests: &[Vec<Wanted>], capacity: usize) -> u64 {
    let mut best = std::collections::BTreeMap::from([(0u32, 0u64)]);
    for wanted in requests {
        let union = wanted.iter().fold(0u32, |bits, w| bits | 1 << w.key);
        let mut next = std::collections::BTreeMap::new();
        for (&cached, &misses) in &best {
            let all = cached | union;
            let misses = misses + u64::from((union & !cached).count_ones());
            // Every subset of what is there that holds the union and fits; dropping what would fit is never better.
            let spare = all & !union;
            let mut kept = spare;
            loop {
                let now = union | kept;
                if now.count_ones() as usize <= capacity {
                    let known = next.entry(now).or_insert(u64::MAX);
                    *known = misses.min(*known);
                }
                if kept == 0 {
                    break;
                }
                kept = (kept - 1) & spare;
            }
        }
        best = next;
    }
    best.values().copied().min().unwrap_or(0)
}

proptest! {
    #[test]
    fn belady_is_the_best_there_is(
        masks in prop::collection::vec(1u32..8, 1..14),
        capacity in 3usize..6,
    ) {
        // Two layers of three experts; no union is larger than the cache.
        let requests: Vec<Vec<Wanted>> = masks.iter().enumerate().map(|(number, mask)| {
            let first = (number % 2 * 3) as Key;
            (0..3).filter(|e| mask >> e & 1 == 1).map(|e| Wanted { key: first + e, rows: 1 }).collect()
        }).collect();
        let mut belady = Belady::new(&Layers::new([3, 3]), requests.iter().map(Vec::as_slice));
        let (mut cached, mut misses) = (Vec::<Key>::new(), 0);
        for wanted in &requests {
            belady.request(1, wanted);
            for key in wanted.iter().map(|w| w.key).filter(|key| !cached.contains(key)).collect::<Vec<_>>() {
                misses += 1;
                if cached.len() == capacity {
                    let victim = belady.victim(&|key| wanted.iter().any(|w| w.key == key)).unwrap();
                    belady.evict(victim);
                    cached.retain(|&key| key != victim);
                }
                belady.insert(key);
                cached.push(key);
            }
        }
        prop_assert_eq!(misses, fewest_misses(&requests, capacity));
    }
}

#[test]
fn rows_of_a_batch_are_visits_one_after_another() {
    // Of 256 rows every second chose expert 0 and none expert 1; then one row at a time chooses expert 1. A window holds
    // 128 to 255 visits, so that expert 1 is the hotter one after 255 at the latest, and not after a few.
    let mut lfru = PolicyKind::Lfru.build(&layers(), 2);
    lfru.request(256, &[Wanted { key: 0, rows: 128 }]);
    lfru.insert(0);
    lfru.insert(1);
    let mut visits = 0;
    while lfru.victim(&|_| false) == Some(1) {
        lfru.request(1, &[Wanted { key: 1, rows: 1 }]);
        visits += 1;
    }
    assert!((32..255).contains(&visits), "{visits}");
}

#[test]
fn what_is_guessed_is_kept_and_what_is_not_goes_first() {
    let mut policy = PolicyKind::Lookahead.build(&layers(), 3);
    let request = |keys: &[Key]| keys.iter().map(|&key| Wanted { key, rows: 1 }).collect::<Vec<_>>();
    for key in [5, 6, 10] {
        policy.insert(key);
    }
    // Expert 5 was chosen every time, 6 and 10 never.
    for _ in 0..20 {
        policy.request(1, &request(&[0]));
        policy.request(1, &request(&[5]));
        policy.request(1, &request(&[11]));
    }
    policy.request(1, &request(&[0]));
    assert_ne!(policy.victim(&|_| false), Some(5));
    policy.hint(&[6]);
    assert_ne!(policy.victim(&|_| false), Some(6));
    assert_eq!(policy.victim(&|key| key == 10), Some(5), "a guess says that it is not needed");
    // The guess is used up by the visit.
    policy.request(1, &request(&[6]));
    assert_ne!(policy.victim(&|key| key == 10), Some(5));
}

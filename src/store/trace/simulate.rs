//! Replays traces against a cache of so many experts: hits and reads, without a model or a drive.

use std::collections::VecDeque;

use super::{Choice, Trace};
use crate::store::policy::belady::Belady;
use crate::store::policy::{Key, Layers, Past, Pins, Policy, PolicyKind, Wanted};

/// What one layer of one step asks for.
#[derive(Clone, Copy, Debug)]
struct Request {
    /// End of its experts; they begin where the previous request's end.
    end: usize,
    /// End of what was guessed for it.
    guess_end: usize,
    rows: u32,
}

/// The requests of traces, one after another.
pub struct Requests {
    layers: Layers,
    requests: Vec<Request>,
    wanted: Vec<Wanted>,
    guessed: Vec<Key>,
    tokens: u64,
    top_k: u32,
    expert_bytes: u64,
}

/// What a replay came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Experts asked for, once a layer and step.
    pub requested: u64,
    /// Of them, those that were there.
    pub hits: u64,
    /// Tokens of the replay.
    pub tokens: u64,
    /// Bytes of an expert.
    pub expert_bytes: u64,
}

impl Outcome {
    /// Hits among requests; 0 of nothing.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.requested.max(1) as f64
    }

    /// Bytes read for a token.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_of(self.requested - self.hits)
    }

    /// Bytes of experts that are multiplied for a token.
    pub fn used_bytes_per_token(&self) -> f64 {
        self.bytes_of(self.requested)
    }

    fn bytes_of(&self, experts: u64) -> f64 {
        (experts * self.expert_bytes) as f64 / self.tokens.max(1) as f64
    }
}

impl Requests {
    /// The requests of `traces`, which must be of one model, at least one of them.
    pub fn of(traces: &[&Trace]) -> Requests {
        let header = traces[0].header();
        let mut all = Requests {
            layers: Layers::new(header.layers.iter().map(|_| header.experts.into())),
            requests: vec![],
            wanted: vec![],
            guessed: vec![],
            tokens: 0,
            top_k: header.top_k.into(),
            expert_bytes: header.expert_bytes.into(),
        };
        let mut rows_of = vec![0u32; header.experts.into()];
        for trace in traces {
            assert_eq!(trace.header(), header, "traces of different models");
            all.tokens += trace.tokens();
            for step in 0..trace.steps() {
                for layer in 0..header.layers.len() {
                    all.push(layer, trace.rows(step) as u32, trace.choice(step, layer), &mut rows_of);
                }
            }
        }
        all
    }

    fn push(&mut self, layer: usize, rows: u32, Choice { ids, guesses }: Choice, rows_of: &mut [u32]) {
        let first = self.layers.range(layer).start as Key;
        ids.iter().for_each(|&id| rows_of[usize::from(id)] += 1);
        for (id, rows) in rows_of.iter_mut().enumerate().filter(|(_, rows)| **rows > 0) {
            self.wanted.push(Wanted { key: first + id as Key, rows: std::mem::take(rows) });
        }
        let mut guess: Vec<Key> = guesses[0].iter().map(|&id| first + Key::from(id)).collect();
        guess.sort_unstable();
        guess.dedup();
        self.guessed.extend(guess);
        self.requests.push(Request { end: self.wanted.len(), guess_end: self.guessed.len(), rows });
    }

    /// Different experts that are ever asked for: a cache of more has no use.
    pub fn working_set(&self) -> usize {
        let mut seen = vec![false; self.layers.keys()];
        self.wanted.iter().for_each(|wanted| seen[wanted.key as usize] = true);
        seen.iter().filter(|seen| **seen).count()
    }

    /// Experts of the model.
    pub fn keys(&self) -> usize {
        self.layers.keys()
    }

    /// Bytes of an expert.
    pub fn expert_bytes(&self) -> u64 {
        self.expert_bytes
    }

    /// Replays through a policy, from an empty cache of `capacity` experts, at least one.
    pub fn replay(&self, kind: PolicyKind, capacity: usize) -> Outcome {
        self.run(&mut *kind.build(&self.layers, capacity), capacity, &Pins::none(self.keys()))
    }

    /// Selections of each expert.
    pub fn usage(&self) -> Vec<u64> {
        let mut usage = vec![0; self.layers.keys()];
        self.wanted.iter().for_each(|wanted| usage[wanted.key as usize] += u64::from(wanted.rows));
        usage
    }

    /// As [`Requests::replay`], in a run after others: with what a history of selections says, either pinned or
    /// remembered by the policy.
    pub fn replay_with_history(&self, kind: PolicyKind, capacity: usize, history: &[u64], pinned: bool) -> Outcome {
        let mut policy = kind.build(&self.layers, capacity);
        let mut pins = Pins::none(self.keys());
        if pinned {
            pins = Pins::from_history(history.to_vec(), capacity);
        } else {
            policy.remember(&Past::of(history, self.top_k));
        }
        self.run(&mut *policy, capacity, &pins)
    }

    /// What no policy can do better.
    pub fn optimum(&self, capacity: usize) -> Outcome {
        self.run(&mut Belady::new(&self.layers, self.iter()), capacity, &Pins::none(self.keys()))
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &[Wanted]> + ExactSizeIterator {
        (0..self.requests.len()).map(|number| self.request(number))
    }

    fn request(&self, number: usize) -> &[Wanted] {
        let begin = number.checked_sub(1).map_or(0, |before| self.requests[before].end);
        &self.wanted[begin..self.requests[number].end]
    }

    fn guess(&self, number: usize) -> &[Key] {
        let Some(request) = self.requests.get(number) else { return &[] };
        let begin = number.checked_sub(1).map_or(0, |before| self.requests[before].guess_end);
        &self.guessed[begin..request.guess_end]
    }

    fn run(&self, policy: &mut dyn Policy, capacity: usize, pins: &Pins) -> Outcome {
        assert!(capacity > 0, "a cache of nothing");
        let mut cache = Cache::new(self.layers.keys(), capacity);
        for (number, wanted) in self.iter().enumerate() {
            cache.serve(self.requests[number].rows, wanted, policy, pins);
            policy.hint(self.guess(number + 1));
        }
        Outcome {
            requested: self.wanted.len() as u64,
            hits: cache.hits,
            tokens: self.tokens,
            expert_bytes: self.expert_bytes,
        }
    }
}

/// A cache by numbers, that serves requests as the store does.
struct Cache {
    is_cached: Vec<bool>,
    is_held: Vec<bool>,
    free: usize,
    hits: u64,
    missing: Vec<Key>,
    /// Held experts, in the order in which they are given back.
    held: VecDeque<Key>,
}

impl Cache {
    fn new(keys: usize, capacity: usize) -> Cache {
        Cache {
            is_cached: vec![false; keys],
            is_held: vec![false; keys],
            free: capacity,
            hits: 0,
            missing: vec![],
            held: VecDeque::new(),
        }
    }

    fn serve(&mut self, rows: u32, wanted: &[Wanted], policy: &mut dyn Policy, pins: &Pins) {
        policy.request(rows, wanted);
        for &Wanted { key, .. } in wanted {
            if self.is_cached[key as usize] {
                policy.hit(key);
                self.hits += 1;
                self.hold(key);
            } else {
                policy.miss(key);
                self.missing.push(key);
            }
        }
        let missing = std::mem::take(&mut self.missing);
        for &key in &missing {
            self.make_room(policy, pins);
            policy.insert(key);
            self.is_cached[key as usize] = true;
            self.hold(key);
        }
        while self.give_back() {}
        self.missing = missing;
        self.missing.clear();
    }

    fn hold(&mut self, key: Key) {
        self.is_held[key as usize] = true;
        self.held.push_back(key);
    }

    fn give_back(&mut self) -> bool {
        let first = self.held.pop_front();
        first.inspect(|&key| self.is_held[key as usize] = false).is_some()
    }

    /// Takes a free slab, or a victim's; where all are held, those that came first are computed and given back.
    fn make_room(&mut self, policy: &mut dyn Policy, pins: &Pins) {
        if self.free > 0 {
            self.free -= 1;
            return;
        }
        loop {
            if let Some(victim) = policy.victim(&|key| self.is_held[key as usize] || pins.is_pinned(key)) {
                assert!(self.is_cached[victim as usize], "{victim} is no cached expert");
                policy.evict(victim);
                self.is_cached[victim as usize] = false;
                return;
            }
            assert!(self.give_back(), "no expert is cached and no slab is free");
        }
    }
}

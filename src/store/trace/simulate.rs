//! Replays traces against a cache of so many experts: hits and reads, without a model or a drive.

use super::replay::{Call, Replay};
use super::{Choice, Trace};
use crate::limits::LOOKAHEAD_LAYERS_MAX;
use crate::store::policy::belady::Belady;
use crate::store::policy::{Key, Layers, Past, Pins, Policy, PolicyKind, Wanted};

pub use super::replay::Pace;

/// What one layer of one step asks for.
#[derive(Clone, Copy, Debug)]
struct Request {
    /// End of its experts; they begin where the previous request's end.
    end: usize,
    /// Ends of what was guessed for it one layer before, two layers before, and so on; each begins where the one before
    /// ends.
    guess_ends: [usize; LOOKAHEAD_LAYERS_MAX],
    rows: u32,
}

/// Under what conditions requests are replayed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Conditions {
    /// Layers ahead of which guesses are read; with 0 nothing is read ahead.
    pub ahead: usize,
    /// How long things take.
    pub pace: Pace,
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
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Experts asked for, once a layer and step.
    pub requested: u64,
    /// Of them, those that were there.
    pub hits: u64,
    /// Of the hits, those that were there thanks to a guess.
    pub prefetched: u64,
    /// Experts asked for that were not there yet, while a guess was being read or waited to be.
    pub late: u64,
    /// Guesses that were to be read.
    pub guessed: u64,
    /// Of them, those that turned out wrong before their read began.
    pub cancelled: u64,
    /// Of them, those that were read for nothing.
    pub wasted: u64,
    /// Tokens of the replay.
    pub tokens: u64,
    /// Bytes of an expert.
    pub expert_bytes: u64,
    /// How long it takes by the pace that was given: a layer asks once the one before is done, and its experts are
    /// multiplied as they come.
    pub seconds: f64,
}

impl Outcome {
    /// Hits among requests; 0 of nothing.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / self.requested.max(1) as f64
    }

    /// Bytes read for a token.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_of(self.requested - self.hits - self.late + self.guessed - self.cancelled)
    }

    /// Of those, the bytes of wrong guesses.
    pub fn wasted_bytes_per_token(&self) -> f64 {
        self.bytes_of(self.wasted)
    }

    /// Tokens a second, where anything takes time.
    pub fn tokens_per_s(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.tokens as f64 / self.seconds)
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
        let guess_ends = guesses.map(|guess| {
            let mut guess: Vec<Key> = guess.iter().map(|&id| first + Key::from(id)).collect();
            guess.sort_unstable();
            guess.dedup();
            self.guessed.extend(guess);
            self.guessed.len()
        });
        self.requests.push(Request { end: self.wanted.len(), guess_ends, rows });
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

    /// Routed layers.
    pub fn layers(&self) -> usize {
        self.layers.count()
    }

    /// Whether anything was guessed.
    pub fn has_guesses(&self) -> bool {
        !self.guessed.is_empty()
    }

    /// Bytes of an expert.
    pub fn expert_bytes(&self) -> u64 {
        self.expert_bytes
    }

    /// Replays through a policy, from an empty cache of `capacity` experts, at least one.
    pub fn replay(&self, kind: PolicyKind, capacity: usize) -> Outcome {
        self.replay_under(kind, capacity, &Conditions::default())
    }

    /// The same, reading guesses ahead as the store does, at a pace.
    pub fn replay_under(&self, kind: PolicyKind, capacity: usize, conditions: &Conditions) -> Outcome {
        self.run(&mut *kind.build(&self.layers, capacity), capacity, &Pins::none(self.keys()), conditions)
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
        self.run(&mut *policy, capacity, &pins, &Conditions::default())
    }

    /// What no policy can do better that reads nothing ahead.
    pub fn optimum(&self, capacity: usize) -> Outcome {
        self.optimum_at(capacity, Pace::default())
    }

    /// The same, at a pace.
    pub fn optimum_at(&self, capacity: usize, pace: Pace) -> Outcome {
        let conditions = Conditions { ahead: 0, pace };
        self.run(&mut Belady::new(&self.layers, self.iter()), capacity, &Pins::none(self.keys()), &conditions)
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &[Wanted]> + ExactSizeIterator {
        (0..self.requests.len()).map(|number| self.request(number))
    }

    fn request(&self, number: usize) -> &[Wanted] {
        let begin = number.checked_sub(1).map_or(0, |before| self.requests[before].end);
        &self.wanted[begin..self.requests[number].end]
    }

    /// What was guessed for a request `ahead` layers before it; nothing for one that there is not.
    fn guess(&self, number: usize, ahead: usize) -> &[Key] {
        let Some(request) = self.requests.get(number) else { return &[] };
        let before = |number: usize| self.requests[number].guess_ends[LOOKAHEAD_LAYERS_MAX - 1];
        let begin = match ahead.checked_sub(2) {
            Some(place) => request.guess_ends[place],
            None => number.checked_sub(1).map_or(0, before),
        };
        &self.guessed[begin..request.guess_ends[ahead - 1]]
    }

    fn run(&self, policy: &mut dyn Policy, capacity: usize, pins: &Pins, conditions: &Conditions) -> Outcome {
        let &Conditions { ahead, pace } = conditions;
        // As the engine bounds them: what a row needs is left to it.
        let top_k = self.top_k as usize;
        let most_guesses = if ahead == 0 { 0 } else { ((1 + ahead) * top_k).min(capacity.saturating_sub(top_k)) };
        let mut replay = Replay::new(policy, pins, self.keys(), capacity, most_guesses, pace);
        let layers = self.layers.count();
        let mut guesses: Vec<(usize, &[Key])> = Vec::with_capacity(LOOKAHEAD_LAYERS_MAX);
        for (number, wanted) in self.iter().enumerate() {
            let layer = number % layers;
            if layer == 0 {
                // The first routed layers may have been guessed from layers that are not routed.
                for place in 0..ahead.min(layers) {
                    let early = place + 1..=ahead;
                    guesses.extend(early.rev().map(|ahead| (number + place, self.guess(number + place, ahead))));
                }
                replay.foresee(&guesses);
                guesses.clear();
            }
            let later = (1..=ahead).filter(|ahead| layer + ahead < layers);
            guesses.extend(later.map(|ahead| (number + ahead, self.guess(number + ahead, ahead))));
            replay.serve(&Call { number, rows: self.requests[number].rows, wanted, guesses: &guesses });
            guesses.clear();
        }
        Outcome { tokens: self.tokens, expert_bytes: self.expert_bytes, ..replay.finish() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::trace::Header;

    /// Two layers of four experts, one a token. What the first layer chooses is never guessed, what the second does always,
    /// and every other time right.
    fn requests() -> Requests {
        let header = Header { fingerprint: 0, layers: vec![1, 2], experts: 4, top_k: 1, expert_bytes: 1000 };
        let mut trace = Trace::new(header);
        for (token, [first, second, guess]) in [[0, 0, 0], [1, 1, 2], [2, 2, 2], [3, 3, 0]].into_iter().enumerate() {
            let second = Choice { ids: &[second], guesses: [&[guess], &[]] };
            trace.push(1, token == 0, [Choice { ids: &[first], ..Choice::default() }, second]);
        }
        Requests::of(&[&trace])
    }

    #[test]
    fn guesses_that_are_read_in_time_are_hits_and_wrong_ones_are_waste() {
        let ahead = Conditions { ahead: 1, ..Conditions::default() };
        let outcome = requests().replay_under(PolicyKind::Lru, 4, &ahead);
        // Of the second layer, 0 and 2 were guessed and asked for; 2 and 0 were read for nothing: the slot of the first was
        // taken by the miss of that layer, and the expert of the second had been evicted to make room for a guess.
        assert_eq!((outcome.requested, outcome.hits, outcome.prefetched, outcome.wasted), (8, 2, 2, 2));
        assert_eq!(outcome.guessed, outcome.prefetched + outcome.wasted);
        assert_eq!(
            outcome.bytes_per_token() * 4.0,
            1000.0 * (outcome.requested - outcome.hits + outcome.guessed) as f64
        );
        assert_eq!((outcome.late, outcome.cancelled, outcome.tokens_per_s()), (0, 0, None));
        let without = requests().replay(PolicyKind::Lru, 4);
        assert_eq!((without.hits, without.guessed, without.bytes_per_token()), (0, 0, 2000.0));
    }

    #[test]
    fn a_layer_asks_when_the_one_before_is_done_and_the_drive_reads_meanwhile() {
        // A read takes 4, a multiplication 3, the rest of a layer 2. Without guesses a layer is 2 + 4 + 3.
        let pace = Pace { read_s: 4.0, multiply_s: 3.0, rest_s: 2.0 };
        let without = requests().replay_under(PolicyKind::Lru, 8, &Conditions { ahead: 0, pace });
        assert_eq!(without.seconds, 8.0 * 9.0);
        let with = requests().replay_under(PolicyKind::Lru, 8, &Conditions { ahead: 1, pace });
        // The guess is read from 6 on, when the drive is done with the first layer's miss, to 10. The second layer asks at
        // 11, when it is there, and is done at 14. The second token's first layer asks at 16, reads to 20, is done at 23;
        // a wrong guess is read from 20 to 24. Its second layer asks at 25, reads to 29, is done at 32.
        let two_tokens = {
            let trace = requests_of_two();
            trace.replay_under(PolicyKind::Lru, 8, &Conditions { ahead: 1, pace })
        };
        assert_eq!((two_tokens.seconds, two_tokens.prefetched, two_tokens.wasted), (32.0, 1, 1));
        // The third token is as the first, 9 + 5. What is guessed of the fourth is there already, and wrong.
        assert_eq!((with.seconds, with.prefetched, with.hits, with.guessed), (32.0 + 14.0 + 18.0, 2, 2, 3));
        // On a drive four times as slow the guess is still being read when its layer asks, at 23, until 34; the wrong one
        // of the second token is in the way of its own layer.
        let slow = Pace { read_s: 16.0, ..pace };
        let late = requests_of_two().replay_under(PolicyKind::Lru, 8, &Conditions { ahead: 1, pace: slow });
        assert_eq!((late.late, late.wasted, late.cancelled), (1, 1, 0));
        // Done at 21, at 34 + 3; asks at 39, done at 58; asks at 60 behind the wrong guess from 55 to 71, and has it at 87.
        assert_eq!(late.seconds, 90.0);
    }

    fn requests_of_two() -> Requests {
        let all = requests();
        let Requests { layers, top_k, expert_bytes, .. } = all;
        let (requests, wanted, guessed) = (all.requests[..4].to_vec(), all.wanted[..4].to_vec(), all.guessed.clone());
        Requests { layers, requests, wanted, guessed, tokens: 2, top_k, expert_bytes }
    }

    #[test]
    fn what_was_guessed_two_layers_before_is_read_where_it_is_asked_for() {
        let header = Header { fingerprint: 0, layers: vec![1, 2, 3], experts: 4, top_k: 1, expert_bytes: 1000 };
        let mut trace = Trace::new(header);
        let first = Choice { ids: &[0], guesses: [&[0], &[]] };
        let second = Choice { ids: &[1], guesses: [&[3], &[1]] };
        let third = Choice { ids: &[2], guesses: [&[2], &[2]] };
        trace.push(1, true, [first, second, third]);
        let requests = Requests::of(&[&trace]);
        let under = |ahead| requests.replay_under(PolicyKind::Lru, 12, &Conditions { ahead, ..Conditions::default() });
        let (none, one, two) = (under(0), under(1), under(2));
        assert_eq!((none.hits, none.guessed), (0, 0));
        // The first layer may be guessed too, from one that is not routed.
        assert_eq!((one.prefetched, one.guessed, one.wasted), (2, 3, 1));
        assert_eq!((two.prefetched, two.guessed, two.wasted), (3, 4, 1));
    }
}

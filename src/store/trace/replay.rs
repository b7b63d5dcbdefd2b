//! A cache and a drive by numbers, which serve requests as the store does, guesses included.

use std::collections::VecDeque;

use crate::store::policy::{Key, Pins, Policy, Wanted};

use super::simulate::Outcome;

/// Seconds that things take. Where nothing takes any, every guess is read before its layer asks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Pace {
    /// To read an expert.
    pub read_s: f64,
    /// To multiply one.
    pub multiply_s: f64,
    /// Everything else of a layer, before it asks for experts.
    pub rest_s: f64,
}

/// What a layer asks for, and what is thought meanwhile that later ones will.
pub(super) struct Call<'a> {
    /// Counted from the beginning of the replay.
    pub number: usize,
    pub rows: u32,
    pub wanted: &'a [Wanted],
    /// Requests by number and experts, in the order of their guesses.
    pub guesses: &'a [(usize, &'a [Key])],
}

/// See the module's description. One read goes on at a time; demand goes before guesses, and a read that has begun ends.
pub(super) struct Replay<'a> {
    policy: &'a mut dyn Policy,
    pins: &'a Pins,
    pace: Pace,
    /// Slots that guesses may hold.
    most_guesses: usize,
    is_cached: Vec<bool>,
    is_held: Vec<bool>,
    /// Held experts, in the order in which they are given back.
    held: VecDeque<Key>,
    /// Slots that hold nothing, or a guess that was wrong; the last is used next.
    spare: Vec<Option<Key>>,
    guesses: Vec<Guess>,
    missing: Vec<Key>,
    /// When each expert of the request is there.
    arrivals: Vec<f64>,
    clock_s: f64,
    drive_free_s: f64,
    outcome: Outcome,
}

struct Guess {
    key: Key,
    /// The request that it is for.
    number: usize,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    /// Its read has not begun.
    Queued {
        since_s: f64,
    },
    Reading {
        until_s: f64,
    },
    Resting,
}

impl<'a> Replay<'a> {
    /// An empty cache of `capacity` experts of `keys`.
    pub(super) fn new(
        policy: &'a mut dyn Policy,
        pins: &'a Pins,
        keys: usize,
        capacity: usize,
        most_guesses: usize,
        pace: Pace,
    ) -> Replay<'a> {
        assert!(capacity > 0, "a cache of nothing");
        Replay {
            policy,
            pins,
            pace,
            most_guesses,
            is_cached: vec![false; keys],
            is_held: vec![false; keys],
            held: VecDeque::new(),
            spare: vec![None; capacity],
            guesses: vec![],
            missing: vec![],
            arrivals: vec![],
            clock_s: 0.0,
            drive_free_s: 0.0,
            outcome: Outcome::default(),
        }
    }

    /// Experts are thought to be asked for before any layer has asked.
    pub(super) fn foresee(&mut self, guesses: &[(usize, &[Key])]) {
        let now_s = self.clock_s;
        guesses.iter().for_each(|(number, keys)| self.hint(*number, keys, now_s));
    }

    pub(super) fn serve(&mut self, call: &Call) {
        let now_s = self.clock_s + self.pace.rest_s;
        self.run_drive(now_s, call.number);
        self.policy.request(call.rows, call.wanted);
        self.outcome.requested += call.wanted.len() as u64;
        call.wanted.iter().for_each(|wanted| self.want(wanted.key, now_s));
        self.judge(call.number);
        let missing = std::mem::take(&mut self.missing);
        let mut crowded = false;
        for &key in &missing {
            crowded |= self.make_room();
            self.join(key);
            self.read(now_s);
        }
        // While a miss waits for a slab, a guess would take it away.
        if !crowded {
            call.guesses.iter().for_each(|(number, keys)| self.hint(*number, keys, now_s));
        }
        self.missing = missing;
        self.missing.clear();
        self.multiply(now_s);
        while self.give_back() {}
    }

    /// What came of it; guesses that nobody asked for until now are wrong.
    pub(super) fn finish(mut self) -> Outcome {
        self.run_drive(self.clock_s, usize::MAX);
        for guess in std::mem::take(&mut self.guesses) {
            match guess.state {
                State::Queued { .. } => self.outcome.cancelled += 1,
                State::Reading { .. } | State::Resting => self.outcome.wasted += 1,
            }
        }
        Outcome { seconds: self.clock_s, ..self.outcome }
    }

    /// Takes requested expert `key` from where it is; else it is missing.
    fn want(&mut self, key: Key, now_s: f64) {
        if self.is_cached[key as usize] {
            self.policy.hit(key);
            self.outcome.hits += 1;
            self.hold(key);
            return self.arrivals.push(now_s);
        }
        self.policy.miss(key);
        if let Some(at) = self.guesses.iter().position(|guess| guess.key == key) {
            let guess = self.guesses.remove(at);
            self.join(key);
            match guess.state {
                State::Resting => {
                    self.outcome.hits += 1;
                    self.outcome.prefetched += 1;
                    self.arrivals.push(now_s);
                }
                State::Reading { until_s } => {
                    self.outcome.late += 1;
                    self.arrivals.push(until_s);
                }
                State::Queued { .. } => {
                    self.outcome.late += 1;
                    self.read(now_s);
                }
            }
        } else if let Some(at) = self.spare.iter().position(|&spare| spare == Some(key)) {
            self.spare.remove(at);
            self.join(key);
            self.outcome.hits += 1;
            self.arrivals.push(now_s);
        } else {
            self.missing.push(key);
        }
    }

    /// Gives up the guesses that request `number` was to ask for: those that rest are used next, and what has not begun is
    /// not read. Guesses for later requests leave the drive's queue with them.
    fn judge(&mut self, number: usize) {
        let wrong = |guess: &Guess| guess.number <= number;
        let clears_queue = self.guesses.iter().any(|guess| wrong(guess) && guess.state != State::Resting);
        let (outcome, spare) = (&mut self.outcome, &mut self.spare);
        self.guesses.retain(|guess| match guess.state {
            State::Resting if wrong(guess) => {
                outcome.wasted += 1;
                spare.push(Some(guess.key));
                false
            }
            State::Queued { .. } if clears_queue => {
                outcome.cancelled += 1;
                spare.push(None);
                false
            }
            _ => true,
        });
    }

    /// Lets the drive read guesses until `now_s`. One that arrives after its request, which `number` is not before, is
    /// wrong.
    fn run_drive(&mut self, now_s: f64, number: usize) {
        for guess in &mut self.guesses {
            if let State::Queued { since_s } = guess.state {
                let begin_s = self.drive_free_s.max(since_s);
                if begin_s >= now_s && self.pace.read_s > 0.0 {
                    break;
                }
                self.drive_free_s = begin_s + self.pace.read_s;
                guess.state = State::Reading { until_s: self.drive_free_s };
            }
        }
        let (outcome, spare) = (&mut self.outcome, &mut self.spare);
        self.guesses.retain_mut(|guess| {
            match guess.state {
                State::Reading { until_s } if until_s <= now_s && guess.number < number => {
                    outcome.wasted += 1;
                    spare.push(Some(guess.key));
                    return false;
                }
                State::Reading { until_s } if until_s <= now_s => guess.state = State::Resting,
                _ => {}
            }
            true
        });
    }

    /// Reads an expert that is waited for.
    fn read(&mut self, now_s: f64) {
        self.drive_free_s = self.drive_free_s.max(now_s) + self.pace.read_s;
        self.arrivals.push(self.drive_free_s);
    }

    /// Multiplies the experts of the request as they come.
    fn multiply(&mut self, now_s: f64) {
        self.arrivals.sort_unstable_by(f64::total_cmp);
        self.clock_s = self.arrivals.drain(..).fold(now_s, |clock, arrival| clock.max(arrival) + self.pace.multiply_s);
    }

    fn hint(&mut self, number: usize, keys: &[Key], now_s: f64) {
        self.policy.hint(keys);
        for &key in keys {
            if self.guesses.len() == self.most_guesses {
                return;
            }
            let is_there = self.is_cached[key as usize]
                || self.guesses.iter().any(|guess| guess.key == key)
                || self.spare.contains(&Some(key));
            if is_there {
                continue;
            }
            if !self.take_slot() {
                return;
            }
            self.guesses.push(Guess { key, number, state: State::Queued { since_s: now_s } });
            self.outcome.guessed += 1;
        }
    }

    fn join(&mut self, key: Key) {
        self.policy.insert(key);
        self.is_cached[key as usize] = true;
        self.hold(key);
    }

    fn hold(&mut self, key: Key) {
        self.is_held[key as usize] = true;
        self.held.push_back(key);
    }

    fn give_back(&mut self) -> bool {
        let first = self.held.pop_front();
        first.inspect(|&key| self.is_held[key as usize] = false).is_some()
    }

    /// Takes a slot for a miss; where all are held, those that came first are computed and given back, and `true` is
    /// returned.
    fn make_room(&mut self) -> bool {
        let mut crowded = false;
        while !self.take_slot() {
            crowded = true;
            assert!(self.give_back(), "no expert is cached and no slab is free");
        }
        crowded
    }

    /// Takes a spare slot, or a victim's; `false` where all are in use.
    fn take_slot(&mut self) -> bool {
        if self.spare.pop().is_some() {
            return true;
        }
        let (is_held, pins) = (&self.is_held, self.pins);
        let Some(victim) = self.policy.victim(&|key| is_held[key as usize] || pins.is_pinned(key)) else {
            return false;
        };
        assert!(self.is_cached[victim as usize], "{victim} is no cached expert");
        self.policy.evict(victim);
        self.is_cached[victim as usize] = false;
        true
    }
}

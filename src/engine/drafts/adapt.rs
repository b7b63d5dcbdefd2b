//! How many tokens are drafted where that is left to measuring. Pure: agreements and times in, lengths out.
//!
//! What drafting n tokens is worth follows from two numbers: the share p of drafted tokens that are right behind right ones, and
//! what a further row costs, as a part e of a plain step. Such a step brings `(1 - p^(n+1)) / (1 - p)` tokens on average and takes
//! `1 + n e`. The length that brings most for its time is taken, and none where a plain step does.
//!
//! What would have been drafted is compared with what came, whether it was drafted or not: p costs nothing to know. Drafts of
//! places that agree for longer are better, so p is kept by how much agrees.
//!
//! The other number has to be tried out, and must not be thought smaller than it is: that would make all steps longer. While
//! the cache of experts fills, plain steps become shorter, and a drafted one looks cheap beside those before it. So drafted
//! steps are compared with the last plain one where that was shorter than others, all of them anew whenever there is one, and
//! only few are made before the next: one, two, four and so on while they pay. That nothing pays is forgotten after some plain
//! steps, more of them each time that it was found. Then, as in the beginning, one token is drafted where it may pay.

use crate::limits::{DRAFT_TRIAL_PAUSE_MAX, DRAFT_TRIAL_PAUSE_MIN};

/// Kinds of drafts: by tokens that agree before them, 2, 3 or 4, up to 8, and more.
const KINDS: usize = 4;
/// Right and wrong tokens that each kind is taken to have drafted before any was seen.
const PRESUMED: f64 = 1.0;
/// Weight of a token among those of its kind before it, once they are many.
const NEWS: f64 = 1.0 / 32.0;
/// What a row beside the first may cost of a plain step, for it to be tried out.
const EXTRA_PRESUMED: f64 = 0.5;
/// A draft must be expected to bring so much more for its time than a plain step.
const WORTH: f64 = 1.05;
/// Plain steps that are remembered, and that must have been made before others are compared with them.
const PLAIN: usize = 5;
/// Drafted steps that are remembered.
const DRAFTED: usize = 8;
/// Drafted steps in a row after which a plain one is due, where all goes well.
const DRAFTED_MOST: u32 = 16;

/// Decides lengths from what it is told.
#[derive(Clone, Debug)]
pub(super) struct Adapt {
    kinds: [Agreement; KINDS],
    /// Seconds of each.
    plain: Recent<f64, PLAIN>,
    drafted: Recent<Drafted, DRAFTED>,
    plain_in_a_row: u32,
    drafted_in_a_row: u32,
    /// Drafted steps after which a plain one is due.
    due: u32,
    /// Plain steps after which it is forgotten that nothing pays.
    pause: u32,
    /// The share of right tokens with which the step at hand is a trial.
    trial: Option<f64>,
}

/// Drafted tokens of a kind, the latest of the most weight.
#[derive(Clone, Copy, Debug)]
struct Agreement {
    right: f64,
    wrong: f64,
}

/// A step with drafts.
#[derive(Clone, Copy, Debug, Default)]
struct Drafted {
    tokens: usize,
    seconds: f64,
}

/// The last few of something.
#[derive(Clone, Copy, Debug)]
struct Recent<T, const N: usize> {
    values: [T; N],
    count: usize,
}

impl<T: Copy + Default, const N: usize> Recent<T, N> {
    fn new() -> Recent<T, N> {
        Recent { values: [T::default(); N], count: 0 }
    }

    /// The latest is the first.
    fn push(&mut self, value: T) {
        self.values.rotate_right(1);
        self.values[0] = value;
        self.count = (self.count + 1).min(N);
    }

    fn values(&self) -> &[T] {
        &self.values[..self.count]
    }
}

impl Adapt {
    /// One that knows nothing.
    pub(super) fn new() -> Adapt {
        Adapt {
            kinds: [Agreement { right: PRESUMED, wrong: PRESUMED }; KINDS],
            plain: Recent::new(),
            drafted: Recent::new(),
            plain_in_a_row: 0,
            drafted_in_a_row: 0,
            due: 1,
            pause: DRAFT_TRIAL_PAUSE_MIN,
            trial: None,
        }
    }

    /// How many of up to `most` tokens to draft behind so many that agree.
    pub(super) fn length(&mut self, most: usize, agree: usize) -> usize {
        self.trial = None;
        if self.plain.count < PLAIN || self.drafted_in_a_row >= self.due {
            return 0;
        }
        let Agreement { right, wrong } = self.kinds[kind(agree)];
        let share = right / (right + wrong);
        let may_pay = best(share, EXTRA_PRESUMED, most) > 0;
        if let Some(extra) = self.extra() {
            let length = best(share, extra, most);
            if length > 0 || !may_pay || self.plain_in_a_row < self.pause {
                return length;
            }
            self.drafted.count = 0;
        }
        self.trial = may_pay.then_some(share);
        usize::from(may_pay)
    }

    /// A token that was drafted behind so many that agree, or would have been, is right or wrong.
    pub(super) fn judge(&mut self, agree: usize, is_right: bool) {
        let Agreement { right, wrong } = &mut self.kinds[kind(agree)];
        (*right, *wrong) = (*right * (1.0 - NEWS), *wrong * (1.0 - NEWS));
        *if is_right { right } else { wrong } += 1.0;
    }

    /// A step of so many drafted tokens, and what drafted them, took so long.
    pub(super) fn observe(&mut self, tokens: usize, seconds: f64) {
        if tokens == 0 {
            if self.drafted_in_a_row >= self.due {
                self.due = (2 * self.due).min(DRAFTED_MOST);
            }
            self.plain.push(seconds);
            self.plain_in_a_row = self.plain_in_a_row.saturating_add(1);
            self.drafted_in_a_row = 0;
            return;
        }
        self.drafted.push(Drafted { tokens, seconds });
        self.plain_in_a_row = 0;
        self.drafted_in_a_row += 1;
        let Some(share) = self.trial.take() else { return };
        self.due = 1;
        let pays = self.extra().is_some_and(|extra| best(share, extra, 1) > 0);
        self.pause = if pays { DRAFT_TRIAL_PAUSE_MIN } else { (2 * self.pause).min(DRAFT_TRIAL_PAUSE_MAX) };
    }

    /// What a row beside the first costs of a plain step, as far as that is known.
    fn extra(&self) -> Option<f64> {
        let (latest, mut sorted) = (*self.plain.values().first()?, self.plain.values);
        let sorted = &mut sorted[..self.plain.count];
        sorted.sort_unstable_by(f64::total_cmp);
        let plain = latest.min(sorted[sorted.len() / 2]);
        let drafted = self.drafted.values();
        let tokens: usize = drafted.iter().map(|step| step.tokens).sum();
        let seconds: f64 = drafted.iter().map(|step| step.seconds).sum();
        (tokens > 0 && plain > 0.0).then(|| (seconds / plain - drafted.len() as f64) / tokens as f64)
    }
}

/// Which kind drafts are of behind so many tokens that agree.
fn kind(agree: usize) -> usize {
    match agree {
        0..=2 => 0,
        3..=4 => 1,
        5..=8 => 2,
        _ => 3,
    }
}

/// The length up to `most` that brings most tokens for its time, where each is right with this share and a row costs `extra`
/// of a plain step; 0 where none is worth it.
fn best(share: f64, extra: f64, most: usize) -> usize {
    let (mut best, mut best_rate) = (0, WORTH);
    let (mut tokens, mut chance) = (1.0, 1.0);
    for length in 1..=most {
        chance *= share;
        tokens += chance;
        // However much faster than a plain step one was by chance, a row takes some time.
        let rate = tokens / (1.0 + length as f64 * extra.max(0.0));
        if rate > best_rate {
            (best, best_rate) = (length, rate);
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_length_that_brings_most_for_its_time_is_taken() {
        // Three of four right, a row a quarter of a step: 1.4, 1.54, 1.56, 1.53 tokens for the time of one.
        assert_eq!(best(0.75, 0.25, 8), 3);
        assert_eq!(best(0.75, 0.25, 2), 2);
        assert_eq!(best(1.0, 0.5, 8), 8, "what is always right is drafted as far as may be");
        assert_eq!((best(0.5, 0.5, 8), best(0.9, 1.0, 8), best(0.0, 0.0, 8)), (0, 0, 0));
        assert_eq!(best(0.9, -3.0, 4), 4);
    }

    #[test]
    fn a_row_costs_what_drafted_steps_take_beyond_a_short_plain_one() {
        let mut adapt = Adapt::new();
        [3.0, 2.0, 9.0, 2.0, 2.0].iter().for_each(|seconds| adapt.observe(0, *seconds));
        assert_eq!(adapt.extra(), None);
        // Beside steps of two seconds: one second for a row, then five for three.
        adapt.observe(1, 3.0);
        assert_eq!(adapt.extra(), Some(0.5));
        adapt.observe(3, 7.0);
        assert_eq!(adapt.extra(), Some(0.75));
        // A longer plain step is an exception, a shorter one shows what a plain step takes by now.
        adapt.observe(0, 8.0);
        assert_eq!(adapt.extra(), Some(0.75));
        adapt.observe(0, 1.0);
        assert_eq!(adapt.extra(), Some(2.0));
    }

    /// Steps with drafts that are right with this share, of rows that cost `extra`: tokens for the time of plain steps, and the
    /// share of steps that were drafted. A plain step takes what `plain` says at its place in the answer.
    fn play(share: f64, extra: f64, tokens: usize, plain: impl Fn(usize) -> f64, seed: u64) -> (f64, f64) {
        let (mut adapt, mut state) = (Adapt::new(), seed);
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let (mut at, mut time, mut steps, mut drafted_steps) = (0, 0.0, 0, 0);
        while at < tokens {
            let length = adapt.length(8, 2);
            let right = (0..8).take_while(|_| random() < share).count();
            // What is behind the first wrong token of a draft is not judged.
            (0..=right.min(7)).for_each(|at| adapt.judge(2, at < right));
            let noise = 0.8 + 0.4 * random();
            let took = plain(at) * (1.0 + length as f64 * extra) * noise;
            adapt.observe(length, took);
            (at, time) = (at + 1 + right.min(length), time + took);
            (steps, drafted_steps) = (steps + 1, drafted_steps + usize::from(length > 0));
        }
        ((0..at).map(plain).sum::<f64>() / time, drafted_steps as f64 / steps as f64)
    }

    const PAYING: [(f64, f64); 3] = [(0.9, 0.2), (0.8, 0.3), (0.6, 0.1)];
    const LOSING: [(f64, f64); 5] = [(0.1, 0.9), (0.5, 0.8), (0.9, 1.5), (0.0, 0.1), (0.7, 0.95)];

    /// The mean over seeds.
    fn plays(share: f64, extra: f64, plain: impl Fn(usize) -> f64 + Copy) -> (f64, f64) {
        const SEEDS: u64 = 50;
        let all = (0..SEEDS).map(|seed| play(share, extra, 256, plain, seed));
        let (rates, drafted): (Vec<f64>, Vec<f64>) = all.unzip();
        (rates.iter().sum::<f64>() / SEEDS as f64, drafted.iter().sum::<f64>() / SEEDS as f64)
    }

    #[test]
    fn drafts_that_pay_are_made_and_others_cost_next_to_nothing() {
        for (share, extra) in PAYING {
            let (rate, drafted) = plays(share, extra, |_| 1.0);
            assert!(rate > 1.15 && drafted > 0.6, "{share} right at {extra}: {rate}, {drafted}");
        }
        for (share, extra) in LOSING {
            let (rate, drafted) = plays(share, extra, |_| 1.0);
            assert!(rate > 0.98 && drafted < 0.05, "{share} right at {extra}: {rate}, {drafted}");
        }
    }

    #[test]
    fn steps_that_become_shorter_by_themselves_are_not_put_down_to_drafts() {
        // From 20 times as long to nearly 1 within some dozens of tokens.
        let cold = |at: usize| 1.0 + 20.0 * (-(at as f64) / 16.0).exp();
        for (share, extra) in LOSING {
            let (rate, drafted) = plays(share, extra, cold);
            assert!(rate > 0.97 && drafted < 0.1, "{share} right at {extra}: {rate}, {drafted}");
        }
    }

    #[test]
    fn what_has_become_cheap_is_found_out() {
        let mut adapt = Adapt::new();
        let mut drafted = [0, 0];
        for step in 0..2000 {
            let length = adapt.length(4, 9);
            adapt.judge(9, step % 8 != 0);
            let extra = if step < 1000 { 2.0 } else { 0.1 };
            adapt.observe(length, 1.0 + length as f64 * extra);
            drafted[step / 1000] += usize::from(length > 0);
        }
        assert!(drafted[0] < 20 && drafted[1] > 400, "{drafted:?}");
    }

    #[test]
    fn plain_steps_are_taken_in_between_ever_more_rarely() {
        let mut adapt = Adapt::new();
        let lengths = (0..64).map(|_| {
            let length = adapt.length(4, 9);
            adapt.judge(9, true);
            adapt.observe(length, 1.0);
            length
        });
        let lengths: Vec<usize> = lengths.collect();
        assert_eq!(lengths[..6], [0, 0, 0, 0, 0, 1], "nothing is known before, and then a token is tried");
        let plain: Vec<usize> = (0..64).filter(|&at| lengths[at] == 0).collect();
        assert_eq!(plain[5..], [6, 9, 14, 23, 40, 57], "behind one, two, four, eight and sixteen");
    }

    proptest! {
        #[test]
        fn no_times_break_it(steps in prop::collection::vec((0.0..1e9f64, any::<bool>(), 0..20usize), 0..300)) {
            let mut adapt = Adapt::new();
            for (seconds, right, agree) in steps {
                let length = adapt.length(8, agree);
                prop_assert!(length <= 8);
                adapt.judge(agree, right);
                adapt.observe(length, seconds);
                prop_assert!(adapt.extra().is_none_or(f64::is_finite) && adapt.pause <= DRAFT_TRIAL_PAUSE_MAX);
            }
        }
    }
}

//! How many of the experts of a token a cache will have.

use std::collections::BTreeMap;

use super::Work;

/// Of the selections of a router, those that the cache finds that counts, by the share of experts that it holds, straight
/// between what was measured. How steep it is says how often the experts there are chosen, the likeliest first.
type Curve = [(f64, f64); 6];

/// What policy `lookahead` found of held-out text of the model that comes with the program
/// (`bench/record/epyc-zen4-2c/2026-11-30-policies.md`). No router that was trained chooses evenly.
const TRAINED: Curve = [(0.0, 0.0), (0.10, 0.199), (0.25, 0.418), (0.50, 0.676), (0.75, 0.886), (1.0, 1.0)];
/// What it found of routers whose weights are drawn, which choose more evenly and know no topic
/// (`bench/record/epyc-zen4-2c/2026-11-30-plan.md`).
const DRAWN: Curve = [(0.0, 0.0), (0.10, 0.13), (0.25, 0.325), (0.50, 0.62), (0.75, 0.845), (1.0, 1.0)];

/// How experts are chosen.
pub enum Choice {
    /// As often as a history says.
    Known {
        /// Experts that were chosen so often, of those that were chosen at all.
        experts_of: BTreeMap<u64, u64>,
        /// Selections of all.
        selections: u64,
        /// Tokens that made them.
        tokens: f64,
    },
    /// As another model chooses.
    Assumed {
        /// What a cache finds of it.
        curve: &'static Curve,
        /// Experts of all layers.
        experts: f64,
        /// Chance that a token chooses an expert, on average.
        chance: f64,
    },
}

impl Choice {
    /// As `history` says how often each expert was chosen; where it says nothing, as models of this kind choose, whose
    /// weights were `drawn` or trained.
    pub fn of(history: &[u64], work: &Work, drawn: bool) -> Choice {
        let (selections, experts) = (history.iter().sum(), work.experts.max(1) as f64);
        if selections == 0 {
            let curve = if drawn { &DRAWN } else { &TRAINED };
            return Choice::Assumed { curve, experts, chance: work.used() as f64 / experts };
        }
        let mut experts_of = BTreeMap::new();
        history.iter().filter(|&&count| count > 0).for_each(|&count| *experts_of.entry(count).or_default() += 1);
        Choice::Known { experts_of, selections, tokens: selections as f64 / work.used().max(1) as f64 }
    }

    /// The share of its selections that a token finds in a cache of `slots` experts, which was empty so many `tokens` before
    /// it: the first selection of each expert finds nothing, and of those that were chosen since the cache has the
    /// likeliest, as many as it has slots. After infinitely many that is what it finds in long answers.
    pub fn found(&self, slots: u64, tokens: f64) -> f64 {
        match self {
            Choice::Known { experts_of, selections, tokens: all } => {
                by_history(experts_of, slots as f64, |count| seen(count as f64 / all, tokens)) / *selections as f64
            }
            Choice::Assumed { curve, experts, chance } => {
                by_curve(curve, *experts, slots as f64, |often| seen(chance * often, tokens))
            }
        }
    }
}

/// How likely an expert was chosen by one of so many `tokens`, each of which chooses it with `chance`.
fn seen(chance: f64, tokens: f64) -> f64 {
    1.0 - (1.0 - chance.min(1.0)).powf(tokens)
}

/// The share of selections that are found. `seen` of an expert that is chosen so many times as often as the average.
fn by_curve(curve: &Curve, experts: f64, slots: f64, seen: impl Fn(f64) -> f64) -> f64 {
    let (mut hits, mut likelier) = (0.0, 0.0);
    for pair in curve.windows(2) {
        let (part, selections) = (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1);
        let seen = seen(selections / part);
        let candidates = experts * part * seen;
        if candidates > 0.0 {
            hits += selections * seen * ((slots - likelier) / candidates).clamp(0.0, 1.0);
        }
        likelier += candidates;
    }
    hits
}

/// The selections that are found, each held against what all others say: an expert that was never chosen but this once is
/// no hit, so that a short history does not promise what it cannot know; and of experts that were chosen exactly
/// as often as one another the one in question comes last, so that it errs low. `seen` of an expert that was chosen so
/// often.
fn by_history(experts_of: &BTreeMap<u64, u64>, slots: f64, seen: impl Fn(u64) -> f64) -> f64 {
    let (mut hits, mut likelier) = (0.0, 0.0);
    for (&count, &experts) in experts_of.iter().rev() {
        let (own, without) = (seen(count), seen(count - 1));
        // Without this selection the expert stands behind all others of its count, among those with one less.
        let before = likelier + (experts - 1) as f64 * own;
        let level = experts_of.get(&(count - 1)).copied().unwrap_or(0) as f64 * without + 1.0;
        hits += without * ((slots - before) / level).clamp(0.0, 1.0) * (count * experts) as f64;
        likelier += experts as f64 * own;
    }
    hits
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::engine::predict::LayerWork;

    /// One layer of so many experts, of which a token chooses `top_k`.
    fn work(experts: u64, top_k: u64) -> Work {
        let layer = LayerWork { expert: Some(1), ..LayerWork::default() };
        Work { head: 1, vocab: 1, layers: vec![layer], top_k, experts }
    }

    /// What is found long after the cache was empty.
    fn at_last(history: &[u64], slots: u64) -> f64 {
        Choice::of(history, &work(history.len() as u64, 1), false).found(slots, f64::INFINITY)
    }

    #[test]
    fn without_a_history_a_cache_finds_what_it_finds_of_the_model_that_is_known() {
        let found = |share: f64, drawn| {
            Choice::of(&[0; 1000], &work(1000, 8), drawn).found((1000.0 * share) as u64, f64::INFINITY)
        };
        for (share, trained) in [(0.0, 0.0), (0.05, 0.0995), (0.25, 0.418), (0.375, 0.547), (0.75, 0.886), (1.0, 1.0)] {
            assert!((found(share, false) - trained).abs() < 1e-12, "{share}");
        }
        for (share, drawn) in [(0.1, 0.13), (0.375, 0.4725), (1.0, 1.0)] {
            assert!((found(share, true) - drawn).abs() < 1e-12, "{share}");
        }
        // More is never worse, and never less than an even choice would find.
        for drawn in [false, true] {
            let shares = (0..=100).map(|percent| f64::from(percent) / 100.0);
            let all: Vec<(f64, f64)> = shares.map(|share| (share, found(share, drawn))).collect();
            assert!(all.iter().all(|(share, found)| *found >= share - 1e-12));
            assert!(all.windows(2).all(|pair| pair[0].1 < pair[1].1));
        }
    }

    #[test]
    fn an_even_choice_finds_what_tokens_before_it_drew() {
        const EVEN: Curve = [(0.0, 0.0), (0.2, 0.2), (0.4, 0.4), (0.6, 0.6), (0.8, 0.8), (1.0, 1.0)];
        // 8 of 40 in each of three layers: t tokens chose n (1 - (1 - k/n)^t) of n.
        let even = Choice::Assumed { curve: &EVEN, experts: 120.0, chance: 0.2 };
        for (tokens, seen) in [(0.0, 0.0), (1.0, 0.2), (2.0, 0.36), (3.0, 0.488), (10.0, 0.892_625_817_6)] {
            assert!((even.found(120, tokens) - seen).abs() < 1e-9, "{tokens}");
            // A cache that is full finds its share of all, however many were seen.
            assert!((even.found(30, tokens) - f64::min(seen, 0.25)).abs() < 1e-9, "{tokens}");
        }
    }

    #[test]
    fn the_first_selection_of_an_expert_finds_nothing() {
        // The tenth of the trained curve that is chosen most has 1.99 times its share of selections, and so on: a token chooses
        // each of them with a chance of 0.398, 0.292, 0.2064, 0.168, 0.0912, where it chooses a fifth of all.
        let trained = Choice::of(&[], &work(40, 8), false);
        let first: f64 = 0.199 * 0.398 + 0.219 * 0.292 + 0.258 * 0.2064 + 0.21 * 0.168 + 0.114 * 0.0912;
        assert!((trained.found(40, 1.0) - first).abs() < 1e-12);
        // After one token 1.592, 1.752, 2.064, 1.68 and 0.912 of 8 are there; a cache of 4 has the first two, and 0.656 of the
        // third kind.
        let four = 0.199 * 0.398 + 0.219 * 0.292 + 0.258 * 0.2064 * (0.656 / 2.064);
        assert!((trained.found(4, 1.0) - four).abs() < 1e-12);
        assert_eq!(trained.found(40, 0.0), 0.0);
        // Eight tokens, six of which chose the one expert and two the other. Without the selection in question one token chooses
        // the first with 5/8 and the second with 1/8.
        let known = Choice::of(&[6, 2], &work(2, 1), false);
        assert_eq!(known.found(2, 1.0), (6.0 * 0.625 + 2.0 * 0.125) / 8.0);
        // One slot: the first is there in three of four cases.
        assert_eq!(known.found(1, 1.0), (6.0 * 0.625 + 2.0 * 0.125 * 0.25) / 8.0);
    }

    #[test]
    fn a_history_promises_what_was_seen_more_than_once() {
        // Every expert once: whatever the cache, none would have been there.
        assert_eq!(at_last(&[1, 1, 1, 1], 4), 0.0);
        // One slot: all ten find the first, held against the other nine; what came once finds nothing.
        assert_eq!(at_last(&[10, 1, 1], 1), 10.0 / 12.0);
        // Two experts of five and one slot: without the selection in question the other one is ahead.
        assert_eq!(at_last(&[5, 5], 1), 0.0);
        assert_eq!(at_last(&[5, 5], 2), 1.0);
        // No better than the share of the hottest.
        let history: Vec<u64> = (1..=100).collect();
        for slots in [1, 10, 50, 99, 100] {
            let best: u64 = history.iter().rev().take(slots).sum();
            let found = at_last(&history, slots as u64);
            assert!(found <= best as f64 / 5050.0 + 1e-12 && found > best as f64 / 5050.0 - 0.05, "{slots}: {found}");
        }
    }

    proptest! {
        /// Selections drawn at known rates: what is promised is what the experts that were chosen most will be chosen.
        #[test]
        fn a_long_history_promises_what_a_cache_of_the_hottest_will_find(
            seed in any::<u64>(), experts in 20usize..200, skew in 0.0f64..1.5, share in 0.1f64..0.9,
        ) {
            let weights: Vec<f64> = (1..=experts).map(|rank| (rank as f64).powf(-skew)).collect();
            let sum: f64 = weights.iter().sum();
            let (mut state, mut counts) = (seed | 1, vec![0u64; experts]);
            for _ in 0..200 * experts {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let mut at = (state >> 11) as f64 / (1u64 << 53) as f64 * sum;
                let drawn = weights.iter().position(|weight| { at -= weight; at < 0.0 });
                counts[drawn.unwrap_or(experts - 1)] += 1;
            }
            let slots = (share * experts as f64) as usize;
            let mut hottest: Vec<usize> = (0..experts).collect();
            hottest.sort_by_key(|&expert| std::cmp::Reverse(counts[expert]));
            let finds = hottest[..slots].iter().map(|&expert| weights[expert]).sum::<f64>() / sum;
            let promised = at_last(&counts, slots as u64);
            // Where experts are chosen nearly alike many are chosen as often as one another, and it errs low by a few of them.
            prop_assert!((promised - finds).abs() < 0.03 + 1.5 / experts as f64, "{promised} promised, {finds} found");
        }
    }
}

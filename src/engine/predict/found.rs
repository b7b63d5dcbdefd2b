//! How many of the experts of a token a cache will have.

use std::collections::BTreeMap;

use super::Work;

/// Shares of selections, by shares of experts, straight between what was measured.
type Curve = [(f64, f64)];

/// Of all selections, those of the experts that are chosen most. Models whose weights are drawn hardly differ in it from the
/// one that comes with the program (`bench/record/epyc-zen4-2c/2026-11-30-plan.md`).
const USED: &Curve =
    &[(0.0, 0.0), (0.10, 0.19), (0.25, 0.40), (0.50, 0.68), (0.75, 0.88), (0.90, 0.967), (0.95, 0.988), (1.0, 1.0)];
/// Of the selections of a router that was trained, those that the cache finds that counts: what policy `lookahead` found of
/// held-out text of the model that comes with the program (`bench/record/epyc-zen4-2c/2026-11-30-policies.md`).
const TRAINED: &Curve = &[(0.0, 0.0), (0.10, 0.199), (0.25, 0.418), (0.50, 0.676), (0.75, 0.886), (1.0, 1.0)];
/// The same of routers whose weights are drawn, which know no topic (`2026-11-30-plan.md` there).
const DRAWN: &Curve =
    &[(0.0, 0.0), (0.10, 0.15), (0.25, 0.365), (0.50, 0.65), (0.75, 0.863), (0.90, 0.958), (1.0, 1.0)];

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
    /// As other models choose.
    Assumed {
        /// How much of it a cache finds.
        found: &'static Curve,
        /// Experts of all layers.
        experts: f64,
        /// Chance that a token chooses an expert, on average.
        chance: f64,
    },
}

impl Choice {
    /// As `history` says how often each expert was chosen; where it says nothing, as models are known to choose whose weights
    /// were `drawn`, or trained.
    pub fn of(history: &[u64], work: &Work, drawn: bool) -> Choice {
        let (selections, experts) = (history.iter().sum(), work.experts.max(1) as f64);
        if selections == 0 {
            let found = if drawn { DRAWN } else { TRAINED };
            return Choice::Assumed { found, experts, chance: work.used() as f64 / experts };
        }
        let mut experts_of = BTreeMap::new();
        history.iter().filter(|&&count| count > 0).for_each(|&count| *experts_of.entry(count).or_default() += 1);
        Choice::Known { experts_of, selections, tokens: selections as f64 / work.used().max(1) as f64 }
    }

    /// The share of its selections that a token finds in a cache of `slots` experts, long after it was empty.
    pub fn at_last(&self, slots: u64) -> f64 {
        match self {
            Choice::Known { experts_of, selections, .. } => by_history(experts_of, slots) / *selections as f64,
            Choice::Assumed { found, experts, .. } => at(found, slots as f64 / experts),
        }
    }

    /// The share of its selections that one of so many `tokens` before it made too: the first use of an expert finds
    /// nothing, whatever the cache.
    pub fn seen(&self, tokens: f64) -> f64 {
        let seen = |chance: f64| 1.0 - (1.0 - chance.min(1.0)).powf(tokens);
        match self {
            // Held against what all other selections say, as what is found is.
            Choice::Known { experts_of, selections, tokens: all } => {
                let of = |(&count, &experts): (&u64, &u64)| (count * experts) as f64 * seen((count - 1) as f64 / all);
                experts_of.iter().map(of).sum::<f64>() / *selections as f64
            }
            Choice::Assumed { chance, .. } => {
                let parts = USED.windows(2).map(|pair| (pair[1].0 - pair[0].0, pair[1].1 - pair[0].1));
                parts.map(|(experts, selections)| selections * seen(chance * selections / experts)).sum()
            }
        }
    }
}

/// What a curve has at `share`.
fn at(curve: &Curve, share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    let pairs = curve.windows(2).map(|pair| (pair[0], pair[1]));
    let mut around = pairs.filter(|(_, to)| share <= to.0);
    around.next().map_or(1.0, |((from, least), (to, most))| least + (most - least) * (share - from) / (to - from))
}

/// The selections that a cache of `slots` experts finds: each is held against a cache of those that all others choose most. One
/// that was never seen before is no hit, so that a short history does not promise what it cannot know; and of experts that
/// were chosen exactly as often as one another the one in question comes last, so that it errs low.
fn by_history(experts_of: &BTreeMap<u64, u64>, slots: u64) -> f64 {
    let mut hits = 0.0;
    let mut hotter = 0;
    for (&count, &experts) in experts_of.iter().rev() {
        // Without this selection the expert stands behind all others of its count, among those with one less.
        let (before, level) = (hotter + experts - 1, experts_of.get(&(count - 1)).copied().unwrap_or(0) + 1);
        let chance = ((slots as f64 - before as f64) / level as f64).clamp(0.0, 1.0);
        if count > 1 {
            hits += chance * (count * experts) as f64;
        }
        hotter += experts;
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

    fn at_last(history: &[u64], slots: u64) -> f64 {
        Choice::of(history, &work(history.len() as u64, 1), false).at_last(slots)
    }

    #[test]
    fn without_a_history_a_cache_finds_what_it_finds_of_models_that_are_known() {
        let found = |share: f64, drawn| Choice::of(&[0; 1000], &work(1000, 8), drawn).at_last((1000.0 * share) as u64);
        for (share, trained) in [(0.0, 0.0), (0.05, 0.0995), (0.25, 0.418), (0.375, 0.547), (0.75, 0.886), (1.0, 1.0)] {
            assert!((found(share, false) - trained).abs() < 1e-12, "{share}");
        }
        for (share, drawn) in [(0.1, 0.15), (0.375, 0.5075), (0.825, 0.9105), (1.0, 1.0), (1.5, 1.0)] {
            assert!((found(share, true) - drawn).abs() < 1e-12, "{share}");
        }
        // More is never worse, and never less than an even choice would find.
        for drawn in [false, true] {
            let shares = (0..=100).map(|percent| f64::from(percent) / 100.0);
            let all: Vec<(f64, f64)> = shares.map(|share| (share, found(share, drawn))).collect();
            assert!(all.iter().all(|(share, found)| *found >= share - 1e-12));
            assert!(all.windows(2).all(|pair| pair[0].1 < pair[1].1));
        }
        let steepness = USED.windows(2).map(|pair| (pair[1].1 - pair[0].1) / (pair[1].0 - pair[0].0));
        assert!(steepness.collect::<Vec<_>>().is_sorted_by(|a, b| a > b), "those that are chosen most come first");
    }

    #[test]
    fn what_tokens_drew_before_is_what_one_can_find() {
        // A choice by a history of all alike: n (1 - (1 - k/n)^t) of n are drawn by t tokens. So long a history says the same
        // with any one selection left out.
        let even = Choice::of(&[1 << 40; 40], &work(40, 8), false);
        for (tokens, seen) in [(0.0, 0.0), (1.0, 0.2), (2.0, 0.36), (3.0, 0.488), (10.0, 0.892_625_817_6)] {
            assert!((even.seen(tokens) - seen).abs() < 1e-9, "{tokens}");
        }
        // A token that chooses a fifth of all chooses each of the first tenth with a chance of 0.2 * 1.9, of the next 15 % of
        // 0.2 * 1.4, and so on: 1.12, 0.8, 0.58, 0.42, 0.24.
        let trained = Choice::of(&[], &work(40, 8), false);
        let one = 0.19 * 0.38 + 0.21 * 0.28 + 0.28 * 0.224 + 0.2 * 0.16 + 0.087 * 0.116 + 0.021 * 0.084 + 0.012 * 0.048;
        assert!((trained.seen(1.0) - one).abs() < 1e-12);
        assert_eq!((trained.seen(0.0), trained.seen(1e9)), (0.0, 1.0));
        // Eight tokens, six of which chose the one expert and two the other. Without the selection in question one token chooses
        // the first with 5/8 and the second with 1/8; two miss the first with 9/64 and the second with 49/64.
        let known = Choice::of(&[6, 2, 0], &work(3, 1), false);
        assert_eq!(known.seen(1.0), (6.0 * 0.625 + 2.0 * 0.125) / 8.0);
        assert_eq!(known.seen(2.0), (6.0 * 55.0 + 2.0 * 15.0) / 64.0 / 8.0);
        // What was chosen but once nobody else saw.
        assert_eq!(Choice::of(&[7, 1], &work(2, 1), false).seen(1e9), 7.0 / 8.0);
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
            // Of experts that are chosen alike, 200 times on average, a share of 1 / sqrt(2 pi 200) have one and the same count.
            // A selection less puts an expert behind those of its own count and among those of the next: it errs low by two
            // such shares at most, and either way by what is chance in the draw.
            let alike = 2.0 / (2.0 * std::f64::consts::PI * 200.0).sqrt();
            prop_assert!(finds - promised < alike + 0.01 + 3.0 / experts as f64, "{promised} promised, {finds} found");
            prop_assert!(promised - finds < 0.01 + 3.0 / experts as f64, "{promised} promised, {finds} found");
        }
    }
}

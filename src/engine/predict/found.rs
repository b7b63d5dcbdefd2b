//! How many of the experts of a token a cache will have.

use std::collections::BTreeMap;

/// Of the selections of a trained router, those that the cache finds that counts, by the share of experts that it holds:
/// what policy `lookahead` found of held-out text of the model that comes with the program
/// (`bench/record/epyc-zen4-2c/2026-11-30-policies.md`).
const FOUND: [(f64, f64); 6] = [(0.0, 0.0), (0.10, 0.199), (0.25, 0.418), (0.50, 0.676), (0.75, 0.886), (1.0, 1.0)];

/// The share of selections that a cache finds that holds `share` of all experts, where nothing is known of how the model
/// chooses: as much as the model does that is known, straight between what was measured of it. No router that was trained
/// chooses evenly, which would be `share` itself.
pub fn hit_rate_without_history(share: f64) -> f64 {
    let share = share.clamp(0.0, 1.0);
    let pairs = FOUND.windows(2).map(|pair| (pair[0], pair[1]));
    let mut around = pairs.filter(|(_, to)| share <= to.0);
    around.next().map_or(1.0, |((from, least), (to, most))| least + (most - least) * (share - from) / (to - from))
}

/// The share of selections that a cache of `slots` experts finds that counts, from how often each expert was chosen: each
/// selection is held against a cache of those that all others choose most. One that was never seen before is no hit, so
/// that a short history does not promise what it cannot know; and of experts that were chosen exactly as often as one
/// another the one in question comes last, so that it errs low. `None` without selections.
pub fn hit_rate(selections: &[u64], slots: u64) -> Option<f64> {
    let all: u64 = selections.iter().sum();
    if all == 0 {
        return None;
    }
    let mut experts_of: BTreeMap<u64, u64> = BTreeMap::new();
    selections.iter().filter(|&&count| count > 0).for_each(|&count| *experts_of.entry(count).or_default() += 1);
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
    Some(hits / all as f64)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn without_a_history_a_cache_finds_what_it_finds_of_the_model_that_is_known() {
        for (share, found) in [(0.0, 0.0), (0.05, 0.0995), (0.25, 0.418), (0.375, 0.547), (0.75, 0.886), (1.0, 1.0)] {
            assert!((hit_rate_without_history(share) - found).abs() < 1e-12, "{share}");
        }
        assert_eq!([-1.0, 2.0].map(hit_rate_without_history), [0.0, 1.0]);
        // More is never worse, and never less than an even choice would find.
        let shares = (0..=100).map(|percent| f64::from(percent) / 100.0);
        let all: Vec<(f64, f64)> = shares.map(|share| (share, hit_rate_without_history(share))).collect();
        assert!(all.iter().all(|(share, found)| found >= share));
        assert!(all.windows(2).all(|pair| pair[0].1 < pair[1].1));
    }

    #[test]
    fn a_history_promises_what_was_seen_more_than_once() {
        assert_eq!(hit_rate(&[0, 0], 2), None);
        // Every expert once: whatever the cache, none would have been there.
        assert_eq!(hit_rate(&[1, 1, 1, 1], 4), Some(0.0));
        // One slot: all ten find the first, held against the other nine; what came once finds nothing.
        assert_eq!(hit_rate(&[10, 1, 1], 1), Some(10.0 / 12.0));
        // Two experts of five and one slot: without the selection in question the other one is ahead.
        assert_eq!(hit_rate(&[5, 5], 1), Some(0.0));
        assert_eq!(hit_rate(&[5, 5], 2), Some(1.0));
        // No better than the share of the hottest.
        let history: Vec<u64> = (1..=100).collect();
        for slots in [1, 10, 50, 99, 100] {
            let best: u64 = history.iter().rev().take(slots).sum();
            let found = hit_rate(&history, slots as u64).unwrap();
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
            let promised = hit_rate(&counts, slots as u64).unwrap();
            // Where experts are chosen nearly alike many are chosen as often as one another, and it errs low by a few of them.
            prop_assert!((promised - finds).abs() < 0.03 + 1.5 / experts as f64, "{promised} promised, {finds} found");
        }
    }
}

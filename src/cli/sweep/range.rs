//! Which values a sweep tries, and from which on more of them changes little. Pure.

/// Values of a sweep of memory where none are given.
const STEPS: usize = 6;
/// Thread counts up to this are all tried; above it, powers of two.
const EACH_UP_TO: usize = 8;
/// Within this part of the best a value is as good as it.
const GOOD_ENOUGH: f64 = 0.95;

/// From the least that works to the most that is there, each the same factor larger than the one before.
pub fn memory(least: u64, most: u64) -> Vec<u64> {
    if most <= least {
        return vec![least];
    }
    let factor = most as f64 / least.max(1) as f64;
    let mut values: Vec<u64> = (0..STEPS)
        .map(|step| match step {
            0 => least,
            _ if step + 1 == STEPS => most,
            _ => ((least.max(1) as f64) * factor.powf(step as f64 / (STEPS - 1) as f64)).round() as u64,
        })
        .map(|value| value.clamp(least, most))
        .collect();
    values.dedup();
    values
}

/// From one to as many as there are cores.
pub fn threads(cores: usize) -> Vec<u64> {
    let cores = cores.max(1);
    let few = 1..=cores.min(EACH_UP_TO);
    let doubled = std::iter::successors(Some(2 * EACH_UP_TO), |n| Some(2 * n)).take_while(|n| *n < cores);
    let mut values: Vec<u64> = few.chain(doubled).chain([cores]).map(|n| n as u64).collect();
    values.dedup();
    values
}

/// The place of the first value whose rate is as good as the best one's; values ascend.
pub fn enough(rates: &[Option<f64>]) -> Option<usize> {
    let best = rates.iter().flatten().copied().reduce(f64::max)?;
    rates.iter().position(|rate| rate.is_some_and(|rate| rate >= GOOD_ENOUGH * best))
}

/// Whether chance alone may have put the value at `chosen` before or behind another: medians are further apart than what is
/// as good, and the ranges from least to most overlap. `spreads` are median, least and most of each.
pub fn by_chance(spreads: &[Option<[f64; 3]>], chosen: usize) -> bool {
    let Some([median, least, most]) = spreads[chosen] else { return false };
    spreads.iter().flatten().any(|&[other, other_least, other_most]| {
        let apart = median.min(other) < GOOD_ENOUGH * median.max(other);
        apart && least <= other_most && other_least <= most
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_grows_by_one_factor_from_the_least_to_the_most() {
        assert_eq!(memory(100, 3200), [100, 200, 400, 800, 1600, 3200]);
        assert_eq!(memory(100, 100), [100]);
        assert_eq!(memory(100, 50), [100], "what does not work is the first value's to say");
        assert_eq!(memory(1, 3), [1, 2, 3]);
        let values = memory(5_000_000_000, 17_000_000_000);
        assert_eq!((values[0], values[5], values.len()), (5_000_000_000, 17_000_000_000, 6));
    }

    #[test]
    fn threads_go_from_one_to_the_cores() {
        assert_eq!(threads(1), [1]);
        assert_eq!(threads(2), [1, 2]);
        assert_eq!(threads(6), [1, 2, 3, 4, 5, 6]);
        assert_eq!(threads(16), [1, 2, 3, 4, 5, 6, 7, 8, 16]);
        assert_eq!(threads(96), [1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 96]);
        assert_eq!(threads(0), [1]);
    }

    #[test]
    fn enough_is_the_first_value_within_five_percent_of_the_best() {
        assert_eq!(enough(&[Some(1.0), Some(9.4), Some(9.5), Some(10.0)]), Some(2));
        assert_eq!(enough(&[None, Some(2.0)]), Some(1));
        assert_eq!(enough(&[Some(10.0), Some(1.0)]), Some(0));
        assert_eq!(enough(&[None]), None);
    }

    #[test]
    fn ranges_that_overlap_tell_nothing_of_medians_that_lie_apart() {
        let noise = [Some([2.38, 1.75, 3.00]), Some([1.84, 1.60, 2.07])];
        assert!(by_chance(&noise, 0) && by_chance(&noise, 1));
        let clear = [Some([1.0, 0.9, 1.1]), None, Some([2.0, 1.9, 2.1]), Some([2.05, 1.9, 2.2])];
        assert!(!by_chance(&clear, 2), "the last one is as good, and the first far away");
        assert!(!by_chance(&clear, 1));
        // One round has no range.
        assert!(!by_chance(&[Some([1.0; 3]), Some([2.0; 3])], 1));
    }
}

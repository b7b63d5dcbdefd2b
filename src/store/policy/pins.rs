//! Experts that are kept whatever the policy says, because they were chosen most since ever.

use super::Key;
use crate::limits::PIN_SHARE_PERCENT_MAX;

/// Selections after which a history is trusted in full.
pub const CONFIDENT_SELECTIONS: u64 = 200_000;

/// How often each expert was chosen since ever, and which ones are pinned for it.
#[derive(Clone, Debug)]
pub struct Pins {
    usage: Vec<u64>,
    is_pinned: Vec<bool>,
    pinned: Vec<Key>,
}

impl Pins {
    /// Nothing was chosen and nothing is pinned of `keys` experts.
    pub fn none(keys: usize) -> Pins {
        Pins { usage: vec![0; keys], is_pinned: vec![false; keys], pinned: Vec::with_capacity(keys) }
    }

    /// Goes on from a history, and pins nothing.
    pub fn counting(usage: Vec<u64>) -> Pins {
        let none = Pins::none(usage.len());
        Pins { usage, ..none }
    }

    /// Goes on from a history, and pins as many of the hottest as it is worth in a cache of `capacity` experts.
    ///
    /// A short history pins little: half of the cache at most, and that only after many selections.
    pub fn from_history(usage: Vec<u64>, capacity: usize) -> Pins {
        let share = u128::from(confidence(&usage)) * capacity as u128 * u128::from(PIN_SHARE_PERCENT_MAX);
        let count = (share / 100 / u128::from(CONFIDENT_SELECTIONS)) as usize;
        let mut hottest: Vec<Key> = (0..usage.len() as Key).filter(|&key| usage[key as usize] > 0).collect();
        hottest.sort_unstable_by_key(|&key| (std::cmp::Reverse(usage[key as usize]), key));
        hottest.truncate(count);
        let mut pins = Pins::counting(usage);
        hottest.iter().for_each(|&key| pins.is_pinned[key as usize] = true);
        pins.pinned.extend(hottest);
        pins
    }

    /// Selections of each expert since ever.
    pub fn usage(&self) -> &[u64] {
        &self.usage
    }

    /// Experts that are pinned.
    pub fn count(&self) -> usize {
        self.pinned.len()
    }

    /// Whether `key` is pinned.
    pub fn is_pinned(&self, key: Key) -> bool {
        self.is_pinned[key as usize]
    }

    /// `key` was chosen by so many rows.
    pub fn chose(&mut self, key: Key, rows: u32) {
        self.usage[key as usize] = self.usage[key as usize].saturating_add(rows.into());
    }

    /// Exchanges the worst pins for experts that have become clearly hotter: by a quarter and four selections, so that
    /// two that are alike do not change places for ever. Returns how many.
    pub fn exchange(&mut self) -> usize {
        let mut exchanged = 0;
        while let Some((place, cold)) = self.coldest()
            && let Some(hot) = self.hottest_unpinned()
            && is_clearly_hotter(self.usage[hot as usize], self.usage[cold as usize])
        {
            self.is_pinned[cold as usize] = false;
            self.is_pinned[hot as usize] = true;
            self.pinned[place] = hot;
            exchanged += 1;
        }
        exchanged
    }

    fn coldest(&self) -> Option<(usize, Key)> {
        self.pinned.iter().copied().enumerate().min_by_key(|&(_, key)| (self.usage[key as usize], key))
    }

    fn hottest_unpinned(&self) -> Option<Key> {
        let unpinned = (0..self.usage.len() as Key).filter(|&key| !self.is_pinned[key as usize]);
        unpinned.max_by_key(|&key| (self.usage[key as usize], std::cmp::Reverse(key)))
    }
}

/// How far a history is trusted: out of [`CONFIDENT_SELECTIONS`].
pub fn confidence(usage: &[u64]) -> u64 {
    usage.iter().fold(0u64, |sum, &count| sum.saturating_add(count)).min(CONFIDENT_SELECTIONS)
}

fn is_clearly_hotter(hot: u64, cold: u64) -> bool {
    hot > cold.saturating_add(cold / 4).saturating_add(4)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn what_is_pinned_grows_with_what_is_known() {
        // Eight experts, of which 3 and 5 are the hottest; a cache of four.
        let usage = |scale: u64| [1, 2, 3, 40, 5, 30, 7, 0].map(|count| count * scale).to_vec();
        let pinned = |pins: &Pins| (0..8).filter(|&key| pins.is_pinned(key)).collect::<Vec<Key>>();
        // 88 selections of 200,000: two thousandths of an expert.
        assert_eq!(Pins::from_history(usage(1), 4).count(), 0);
        // 100,320: a quarter of the cache.
        assert_eq!(pinned(&Pins::from_history(usage(1140), 4)), [3]);
        // More than 200,000: half of the cache, whatever more there is.
        assert_eq!(pinned(&Pins::from_history(usage(1_000_000), 4)), [3, 5]);
        assert_eq!(Pins::from_history(vec![u64::MAX; 3], 2).count(), 1);
    }

    #[test]
    fn two_that_are_alike_do_not_change_places() {
        let mut usage = vec![100_000; 4];
        usage[0] += 10;
        let mut pins = Pins::from_history(usage, 2);
        assert!(pins.is_pinned(0));
        // A quarter and four more than 100,010 are 125,016: up to there nothing happens.
        pins.chose(1, 25_016);
        assert_eq!(pins.exchange(), 0);
        pins.chose(1, 1);
        assert_eq!((pins.exchange(), pins.is_pinned(0), pins.is_pinned(1)), (1, false, true));
        assert_eq!(pins.exchange(), 0);
    }

    proptest! {
        /// Whatever is chosen, an exchange ends, keeps the number of pins, and leaves nothing to exchange.
        #[test]
        fn an_exchange_settles(
            usage in prop::collection::vec(0u64..100_000, 1..20),
            capacity in 1usize..20,
            chosen in prop::collection::vec((any::<prop::sample::Index>(), 1u32..100_000), 0..30),
        ) {
            let keys = usage.len();
            let mut pins = Pins::from_history(usage, capacity);
            let before = pins.count();
            for (key, rows) in chosen {
                pins.chose(key.index(keys) as Key, rows);
            }
            pins.exchange();
            prop_assert_eq!(pins.count(), before);
            prop_assert_eq!((0..keys as Key).filter(|&key| pins.is_pinned(key)).count(), before);
            for hot in (0..keys as Key).filter(|&key| !pins.is_pinned(key)) {
                for cold in (0..keys as Key).filter(|&key| pins.is_pinned(key)) {
                    let [hot, cold] = [hot, cold].map(|key| pins.usage()[key as usize]);
                    prop_assert!(4 * hot <= 5 * cold + 16 + 3);
                }
            }
        }
    }
}

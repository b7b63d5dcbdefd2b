//! Drafts from the sequence itself: what followed where it last went as it does now.
//!
//! Texts repeat names, phrases, code and what they quote. The last two tokens are looked up among all earlier pairs; of
//! the places found, the one that agrees furthest back is taken, of equally good ones the latest, and what followed there is
//! the draft. Where the draft runs into the end of the sequence it goes on with itself, so that a loop is drafted round and
//! round. Pure: tokens in, tokens out.

use crate::limits::{NGRAM_CHAIN_MAX, NGRAM_MATCH_MAX};
use crate::ops::room::Room;

/// Tokens of a sequence, and where each pair of them was seen.
pub(super) struct Ngram {
    tokens: Vec<u32>,
    /// By the bucket of a pair: one more than the position at which a pair of it last ended, 0 where none has.
    last: Vec<u32>,
    /// By position: the same of the pair before in its bucket.
    before: Vec<u32>,
}

impl Ngram {
    /// An empty one for sequences of up to `tokens` tokens, counted in `room`.
    pub(super) fn new(tokens: usize, room: &mut Room) -> Ngram {
        Ngram {
            tokens: room.empty(tokens),
            last: room.filled(0, tokens.next_power_of_two()),
            before: room.empty(tokens),
        }
    }

    /// Forgets the sequence.
    pub(super) fn clear(&mut self) {
        self.tokens.clear();
        self.before.clear();
        self.last.fill(0);
    }

    /// The sequence goes on with `token`.
    pub(super) fn push(&mut self, token: u32) {
        let Some(&previous) = self.tokens.last() else {
            self.tokens.push(token);
            self.before.push(0);
            return;
        };
        let bucket = bucket(previous, token, self.last.len());
        self.tokens.push(token);
        self.before.push(std::mem::replace(&mut self.last[bucket], self.tokens.len() as u32));
    }

    /// Adds up to `most` tokens to `drafts` that may follow the sequence. How many tokens agree before them; 0 where nothing is
    /// proposed.
    pub(super) fn propose(&self, most: usize, drafts: &mut Vec<u32>) -> usize {
        let Some((place, agree)) = self.best() else { return 0 };
        let (first, ahead) = (drafts.len(), &self.tokens[place + 1..]);
        for at in 0..most {
            let token = ahead.get(at).copied().unwrap_or_else(|| drafts[first + at - ahead.len()]);
            drafts.push(token);
        }
        agree
    }

    /// Where the sequence was before as it is now at its end: the position of the last token that agrees, and how many do.
    fn best(&self) -> Option<(usize, usize)> {
        let (mut best, mut length) = (None, 1);
        let end = self.tokens.len().checked_sub(1)?;
        let mut next = self.before[end];
        for _ in 0..NGRAM_CHAIN_MAX {
            let place = (next as usize).checked_sub(1)?;
            let agree = self.agreement(place, end);
            if agree > length {
                (best, length) = (Some((place, agree)), agree);
            }
            next = self.before[place];
            if next == 0 || length == NGRAM_MATCH_MAX {
                break;
            }
        }
        best
    }

    /// Tokens that agree backwards from two positions, the first of which is the lower.
    fn agreement(&self, place: usize, end: usize) -> usize {
        let backwards = |from: usize| self.tokens[..=from].iter().rev().take(NGRAM_MATCH_MAX);
        backwards(place).zip(backwards(end)).take_while(|(a, b)| a == b).count()
    }
}

/// Where a pair is looked up in a table of `buckets`, a power of two.
fn bucket(first: u32, second: u32, buckets: usize) -> usize {
    let pair = u64::from(first) << 32 | u64::from(second);
    let mixed = pair.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    // The upper bits depend on all of the pair.
    (mixed >> 32) as usize & (buckets - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn proposed(tokens: &[u32], most: usize) -> Vec<u32> {
        let mut ngram = Ngram::new(tokens.len(), &mut Room::default());
        tokens.iter().for_each(|&token| ngram.push(token));
        let mut drafts = vec![99];
        ngram.propose(most, &mut drafts);
        assert_eq!(drafts.remove(0), 99, "what was there stays");
        drafts
    }

    #[test]
    fn what_followed_the_pair_is_proposed() {
        assert_eq!(proposed(&[1, 2, 3, 4, 5, 1, 2], 3), [3, 4, 5]);
        assert_eq!(proposed(&[1, 2, 3, 1, 2, 4, 1, 2], 1), [4], "the last time");
        assert_eq!(proposed(&[7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], 1), [3], "where more agrees");
        assert!(proposed(&[1, 2, 3, 2], 4).is_empty(), "a pair that is new");
        assert!(proposed(&[], 4).is_empty() && proposed(&[1], 4).is_empty());
        assert!(proposed(&[1, 2, 1, 2], 0).is_empty());
    }

    #[test]
    fn a_loop_is_proposed_round_and_round() {
        assert_eq!(proposed(&[5, 1, 2, 3, 1, 2], 7), [3, 1, 2, 3, 1, 2, 3]);
        assert_eq!(proposed(&[4, 4, 4], 3), [4, 4, 4]);
    }

    #[test]
    fn another_sequence_knows_nothing_of_the_one_before() {
        let mut ngram = Ngram::new(8, &mut Room::default());
        [1, 2, 3, 1, 2].into_iter().for_each(|token| ngram.push(token));
        ngram.clear();
        [1, 2].into_iter().for_each(|token| ngram.push(token));
        let mut drafts = vec![];
        ngram.propose(4, &mut drafts);
        assert!(drafts.is_empty());
    }

    /// The rule, with every place looked at.
    fn naive(tokens: &[u32], most: usize) -> Vec<u32> {
        let end = tokens.len() - 1;
        let agreement = |place: usize| {
            (0..=place.min(NGRAM_MATCH_MAX - 1)).take_while(|&i| tokens[place - i] == tokens[end - i]).count()
        };
        let Some(place) =
            (1..end).filter(|&place| agreement(place) >= 2).max_by_key(|&place| (agreement(place), place))
        else {
            return vec![];
        };
        let mut all = tokens.to_vec();
        (0..most).for_each(|at| all.push(all[place + 1 + at]));
        all[tokens.len()..].to_vec()
    }

    proptest! {
        #[test]
        fn the_quick_way_is_the_plain_way(tokens in prop::collection::vec(0..6u32, 1..40), most in 0..9usize) {
            // Short enough that no chain is cut.
            let longest = (0..tokens.len()).map(|i| tokens[i..].windows(2).filter(|w| w[..] == tokens[i..][..2]).count()).max();
            prop_assume!(longest.unwrap_or(0) < NGRAM_CHAIN_MAX);
            prop_assert_eq!(proposed(&tokens, most), naive(&tokens, most));
        }
    }
}

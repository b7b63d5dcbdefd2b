//! How much of an answer finds what: a cache begins empty, and has more to find with every token.

use super::{Bottleneck, Choice, Prediction, Speeds, Work};

/// Of what was put through before, at most one part in so many is answered before it is looked at again.
const STRETCH: u64 = 4;

/// An answer that is generated from an empty cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Tokens of the prompt, which fill the cache.
    pub prompt: u64,
    /// Tokens of the answer. The first of them is what the prompt gives, and each other takes a step.
    pub tokens: u64,
}

impl Answer {
    /// For each stretch of the answer the share of its steps, and the share of their selections that a cache of `slots`
    /// experts finds: what was seen before, as far as it finds so much at last.
    pub fn found(&self, choice: &Choice, slots: u64) -> Vec<(f64, f64)> {
        // Of an answer of one token, which takes no step, the one after it is said.
        let steps = self.tokens.saturating_sub(1).max(1);
        let (mut stretches, mut done, at_last) = (vec![], 0, choice.at_last(slots));
        while done < steps {
            let before = self.prompt + done;
            let many = (before / STRETCH).clamp(1, steps - done);
            let middle = before as f64 + (many - 1) as f64 / 2.0;
            stretches.push((many as f64 / steps as f64, choice.seen(middle).min(at_last)));
            done += many;
        }
        stretches
    }
}

impl Prediction {
    /// Predicts the mean of tokens of which such shares find such shares of their experts in memory; `None` where any must
    /// read and nothing is known of the drive.
    pub fn of_all(work: &Work, speeds: &Speeds, found: &[(f64, f64)], guessed: f64) -> Option<Prediction> {
        let (mut token_s, mut disk_s, mut compute_s) = (0.0, 0.0, 0.0);
        for &(share, hit_rate) in found {
            let p = Prediction::of(work, speeds, hit_rate, guessed)?;
            token_s += share * p.token_s;
            disk_s += share * p.disk_s;
            compute_s += share * p.compute_s;
        }
        Some(Prediction { token_s, disk_s, compute_s, bottleneck: Bottleneck::of(disk_s, compute_s) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::predict::{Costs, LayerWork, Line};

    /// Ten layers of ten experts, of which a token chooses two.
    fn work() -> Work {
        let layer = LayerWork { expert: Some(1), ..LayerWork::default() };
        Work { head: 1, vocab: 1, layers: vec![layer; 10], top_k: 2, experts: 100 }
    }

    #[test]
    fn every_step_is_counted_once_and_few_together_at_first() {
        let choice = Choice::of(&[], &work(), false);
        let shares = |prompt, tokens| {
            let found = Answer { prompt, tokens }.found(&choice, 50);
            assert!((found.iter().map(|(share, _)| share).sum::<f64>() - 1.0).abs() < 1e-9);
            assert!(found.windows(2).all(|pair| pair[0].1 <= pair[1].1), "{found:?}");
            found.into_iter().map(|(share, _)| (share * (tokens - 1).max(1) as f64).round() as u64).collect::<Vec<_>>()
        };
        // After one token each of seven by itself, as a fourth of what was before is less than two.
        assert_eq!(shares(1, 17), [1, 1, 1, 1, 1, 1, 1, 2, 2, 3, 2]);
        assert_eq!(shares(16, 12), [4, 5, 2]);
        assert_eq!((shares(512, 2), shares(3, 1)), (vec![1], vec![1]));
        assert!(shares(1, 1 << 31).len() < 120);
    }

    #[test]
    fn a_stretch_stands_for_the_steps_in_it() {
        let choice = Choice::of(&[], &work(), true);
        let one_by_one = |prompt: u64, tokens: u64| {
            let steps = (0..tokens - 1).map(|step| choice.seen((prompt + step) as f64).min(choice.at_last(80)));
            steps.sum::<f64>() / (tokens - 1) as f64
        };
        for (prompt, tokens) in [(1, 20), (3, 20), (16, 150), (512, 512)] {
            let found = Answer { prompt, tokens }.found(&choice, 80);
            let mean: f64 = found.iter().map(|(share, hit_rate)| share * hit_rate).sum();
            assert!((mean - one_by_one(prompt, tokens)).abs() < 0.002, "{prompt}, {tokens}");
        }
    }

    #[test]
    fn tokens_that_find_different_shares_are_the_mean_of_them() {
        let costs = Costs { once_s: 0.5, before_s: 0.05, shared_s: 0.05, expert_s: 0.1, ..Costs::default() };
        let drive = Some(Line { first_s: 0.5, each_s: 1.0 });
        let predict = |found: &[(f64, f64)]| Prediction::of_all(&work(), &Speeds { costs, drive }, found, 0.0);
        // All found: 3.5 s of arithmetic. None: 0.5 s, and in ten layers 0.05 s, reads of 2.5 s, 0.1 s.
        let p = predict(&[(0.75, 1.0), (0.25, 0.0)]).unwrap();
        assert!((p.token_s - (0.75 * 3.5 + 0.25 * 27.0)).abs() < 1e-9 && (p.disk_s - 6.25).abs() < 1e-9, "{p:?}");
        assert_eq!(p.bottleneck, Bottleneck::Disk);
        // Where reading is the shorter part by far, arithmetic binds; what must read needs a drive that is known.
        assert_eq!(predict(&[(0.95, 1.0), (0.05, 0.0)]).unwrap().bottleneck, Bottleneck::Arithmetic);
        let unknown = Speeds { costs, drive: None };
        assert!(Prediction::of_all(&work(), &unknown, &[(0.9, 1.0), (0.1, 0.5)], 0.0).is_none());
    }
}

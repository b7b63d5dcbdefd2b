//! What a model's logits say of a text, and how far they are from those of another precision. Pure arithmetic, in f64.

mod likelihood;

pub use likelihood::{Likelihood, surprise};

/// A window of text, scored from an empty context by two models.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// Kullback-Leibler divergence at every position, in nats.
    pub divergences: Vec<f64>,
    /// Positions at which both have the same most likely token.
    pub same: usize,
    /// Tokens that were predicted: all but the first.
    pub tokens: usize,
    /// Their negative log likelihood, in nats, by the model that is compared.
    pub nll: f64,
    /// By the one it is compared with.
    pub base_nll: f64,
    /// How much more probable each predicted token is to the model that is compared, as a share of one.
    pub changes: Vec<f64>,
}

/// Logits that are no distribution: one is no number or plus infinity, or all are minus infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the logits of the {} at position {position} of a window are not finite", if *base { "weights as they are" } else { "container" })]
pub struct NoDistribution {
    /// Position in the window.
    pub position: usize,
    /// Whether they are of the model that is compared with.
    pub base: bool,
}

impl Window {
    /// Takes in one position: the logits of both, and the token that follows, where one does. A logit of minus infinity is
    /// a token that cannot come.
    pub fn add(&mut self, base: &[f32], other: &[f32], next: Option<u32>) -> Result<(), NoDistribution> {
        let (base_sum, sum) = (log_sum(base), log_sum(other));
        if let Some(base) = [(base_sum, true), (sum, false)].iter().find(|(sum, _)| !sum.is_finite()).map(|of| of.1) {
            return Err(NoDistribution { position: self.divergences.len(), base });
        }
        self.divergences.push(divergence(base, base_sum, other, sum));
        self.same += usize::from(best(base) == best(other));
        if let Some(next) = next {
            let (nll, base_nll) = (sum - f64::from(other[next as usize]), base_sum - f64::from(base[next as usize]));
            self.tokens += 1;
            self.nll += nll;
            self.base_nll += base_nll;
            self.changes.push((-nll).exp() - (-base_nll).exp());
        }
        Ok(())
    }
}

/// A text in one precision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quality {
    /// Positions that were compared.
    pub positions: usize,
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Share of the positions at which the most likely token is the same.
    pub agreement: f64,
    /// Perplexity: e to the mean negative log likelihood.
    pub perplexity: f64,
    /// Mean negative log likelihood beyond that of the base, in nats a token.
    pub loss: Estimate,
    /// Mean divergence over positions, in nats.
    pub divergence: Estimate,
    /// 99 of 100 positions diverge no more than this.
    pub divergence_p99: f64,
    /// No position diverges more.
    pub divergence_largest: f64,
}

/// A mean, and how far it may be off.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The mean over all of the text.
    pub mean: f64,
    /// Standard error of it, from how the windows differ: positions of one window are no independent samples. `None` of
    /// fewer than two windows.
    pub error: Option<f64>,
}

impl Quality {
    /// Sums up `windows`; `None` where nothing was predicted.
    pub fn of(windows: &[Window]) -> Option<Quality> {
        let positions: usize = windows.iter().map(|window| window.divergences.len()).sum();
        let tokens: usize = windows.iter().map(|window| window.tokens).sum();
        if tokens == 0 {
            return None;
        }
        let nll: f64 = windows.iter().map(|window| window.nll).sum();
        let same: usize = windows.iter().map(|window| window.same).sum();
        let mut divergences: Vec<f64> = windows.iter().flat_map(|window| window.divergences.iter().copied()).collect();
        divergences.sort_unstable_by(f64::total_cmp);
        let sums = |of: fn(&Window) -> (f64, usize)| windows.iter().map(of).collect::<Vec<_>>();
        Some(Quality {
            positions,
            tokens,
            agreement: same as f64 / positions as f64,
            perplexity: (nll / tokens as f64).exp(),
            loss: Estimate::of(&sums(|window| (window.nll - window.base_nll, window.tokens))),
            divergence: Estimate::of(&sums(|window| (window.divergences.iter().sum(), window.divergences.len()))),
            divergence_p99: divergences[(positions * 99).div_ceil(100) - 1],
            divergence_largest: divergences[positions - 1],
        })
    }

    /// Perplexity in units of that of the base.
    pub fn ratio(&self) -> f64 {
        self.loss.mean.exp()
    }
}

impl Estimate {
    /// Of the sum and the number of samples of each window: the mean of all, and the error of a ratio of two sums.
    fn of(windows: &[(f64, usize)]) -> Estimate {
        let count: usize = windows.iter().map(|(_, count)| count).sum();
        let mean = windows.iter().map(|(sum, _)| sum).sum::<f64>() / count as f64;
        let n = windows.len() as f64;
        let squares: f64 = windows.iter().map(|&(sum, count)| (sum - mean * count as f64).powi(2)).sum();
        let error = (windows.len() > 1).then(|| (squares * n / (n - 1.0)).sqrt() / count as f64);
        Estimate { mean, error }
    }
}

/// The logarithm of the sum of the exponentials.
fn log_sum(logits: &[f32]) -> f64 {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    f64::from(most) + logits.iter().map(|&logit| f64::from(logit - most).exp()).sum::<f64>().ln()
}

/// The sum over all tokens of `p * (ln p - ln q)`, p of `base` and q of `other`. What cannot come by p adds nothing.
fn divergence(base: &[f32], base_sum: f64, other: &[f32], sum: f64) -> f64 {
    let of = |(&base, &other): (&f32, &f32)| {
        let log_p = f64::from(base) - base_sum;
        match log_p.exp() {
            0.0 => 0.0,
            p => p * (log_p - (f64::from(other) - sum)),
        }
    };
    base.iter().zip(other).map(of).sum()
}

/// The first of the most likely.
fn best(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, token| if logits[token] > logits[best] { token } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) -> bool {
        (a - b).abs() < 1e-5
    }

    /// Logits of these chances, shifted: only differences count.
    fn logits(chances: &[f32], shift: f32) -> Vec<f32> {
        chances.iter().map(|chance| chance.ln() + shift).collect()
    }

    #[test]
    fn divergence_and_likelihood_are_those_of_their_definitions() {
        let (p, q) = (logits(&[0.5, 0.25, 0.25], 3.0), logits(&[0.25, 0.5, 0.25], -8.0));
        let mut window = Window::default();
        window.add(&p, &q, Some(1)).unwrap();
        // 0.5 ln 2 - 0.25 ln 2; the token has a quarter in the base and a half in the other.
        assert!(close(window.divergences[0], 0.25 * 2f64.ln()), "{window:?}");
        assert!(close(window.nll, 2f64.ln()) && close(window.base_nll, 4f64.ln()));
        assert_eq!((window.same, window.tokens), (0, 1));
        assert!(close(window.changes[0], 0.25), "{window:?}");
        window.add(&q, &q, None).unwrap();
        assert!(window.divergences[1].abs() < 1e-12);
        assert_eq!((window.same, window.tokens), (1, 1));
        let quality = Quality::of(&[window]).unwrap();
        assert!(close(quality.perplexity, 2.0) && close(quality.ratio(), 0.5) && close(quality.agreement, 0.5));
        assert!(close(quality.divergence.mean, 0.125 * 2f64.ln()) && quality.divergence.error.is_none());
        assert_eq!(quality.divergence_p99, quality.divergence_largest);
        assert_eq!(Quality::of(&[]), None);
    }

    #[test]
    fn a_token_that_cannot_come_adds_nothing_and_what_is_no_number_is_refused_by_its_position() {
        let (never, nan) = (f32::NEG_INFINITY, f32::NAN);
        let mut window = Window::default();
        // Two tokens of a half each against a half and a quarter: 0.5 ln 2, whatever the third is of.
        window.add(&[0.0, 0.0, never], &logits(&[0.5, 0.25, 0.25], 0.0), None).unwrap();
        assert!(close(window.divergences[0], 0.5 * 2f64.ln()), "{window:?}");
        window.add(&[0.0, 0.0, never], &[0.0, 0.0, never], Some(1)).unwrap();
        assert!(close(window.divergences[1], 0.0) && close(window.nll, 2f64.ln()), "{window:?}");
        // So unlikely that its chance is nothing in any arithmetic, and impossible to the other.
        window.add(&[0.0, -2000.0], &[0.0, never], None).unwrap();
        assert!(close(window.divergences[2], 0.0), "{window:?}");
        window.add(&[0.0, 0.0], &[0.0, never], None).unwrap();
        assert_eq!(window.divergences[3], f64::INFINITY, "what can come and the other rules out");
        let whole = window.clone();
        for (base, other, of_base) in
            [([0.0, nan], [0.0, 0.0], true), ([0.0, 0.0], [f32::INFINITY, 0.0], false), ([never; 2], [nan; 2], true)]
        {
            assert_eq!(window.add(&base, &other, Some(0)), Err(NoDistribution { position: 4, base: of_base }));
        }
        assert_eq!(window, whole);
    }

    #[test]
    fn equal_logits_agree_by_the_first_of_them() {
        assert_eq!((best(&[1.0, 3.0, 3.0]), best(&[2.0])), (1, 0));
        assert_eq!(best(&[f32::NEG_INFINITY, -1.0]), 1);
    }

    #[test]
    fn the_error_of_a_mean_comes_from_how_windows_differ() {
        // Means 1 and 3 of windows alike: their spread is the square root of two, over the square root of two windows.
        let estimate = Estimate::of(&[(10.0, 10), (30.0, 10)]);
        assert!(close(estimate.mean, 2.0) && close(estimate.error.unwrap(), 1.0), "{estimate:?}");
        // Windows that say the same leave no doubt, whatever their lengths.
        assert_eq!(Estimate::of(&[(10.0, 10), (5.0, 5)]), Estimate { mean: 1.0, error: Some(0.0) });
    }

    #[test]
    fn the_ninety_ninth_of_a_hundred_is_the_second_largest() {
        let window = Window { divergences: (1..=100).map(f64::from).collect(), tokens: 1, ..Window::default() };
        let quality = Quality::of(&[window]).unwrap();
        assert_eq!((quality.divergence_p99, quality.divergence_largest), (99.0, 100.0));
    }
}

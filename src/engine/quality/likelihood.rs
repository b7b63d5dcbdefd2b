//! How likely a text is to a model: negative log likelihoods of its tokens, summed up.

use super::log_sum;

/// The negative log likelihood of `token`, in nats, by the logits before it; `None` where these are no distribution: one is
/// no number or plus infinity, or all are minus infinity.
pub fn surprise(logits: &[f32], token: u32) -> Option<f64> {
    let sum = log_sum(logits);
    sum.is_finite().then(|| sum - f64::from(logits[token as usize]))
}

/// Predicted tokens of a text and what they came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Likelihood {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Their negative log likelihood, in nats.
    pub nll: f64,
    squares: f64,
}

impl Likelihood {
    /// Takes in one token, of so many nats.
    pub fn add(&mut self, nll: f64) {
        self.tokens += 1;
        self.nll += nll;
        self.squares += nll * nll;
    }

    /// Nats a token; no number where there is none.
    pub fn mean(&self) -> f64 {
        self.nll / self.tokens as f64
    }

    /// Standard error of the mean as llama-perplexity tells it, which takes tokens for independent samples: those of one text
    /// are none, so the true one is larger. `None` of fewer than two tokens.
    pub fn error(&self) -> Option<f64> {
        let variance = self.squares / self.tokens as f64 - self.mean().powi(2);
        (self.tokens > 1).then(|| (variance.max(0.0) / (self.tokens - 1) as f64).sqrt())
    }

    /// e to the mean.
    pub fn perplexity(&self) -> f64 {
        self.mean().exp()
    }

    /// What [`Likelihood::error`] is to the perplexity.
    pub fn perplexity_error(&self) -> Option<f64> {
        self.error().map(|error| error * self.perplexity())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_surprise_is_minus_the_logarithm_of_a_chance() {
        // Chances of a half, a quarter and a quarter, whatever is added to all.
        let logits = [0.5f32, 0.25, 0.25].map(|chance| chance.ln() - 7.0);
        assert!((surprise(&logits, 0).unwrap() - 2f64.ln()).abs() < 1e-6);
        assert!((surprise(&logits, 2).unwrap() - 4f64.ln()).abs() < 1e-6);
        assert_eq!(surprise(&[0.0, f32::NEG_INFINITY], 1), Some(f64::INFINITY), "what cannot come");
        for bad in [[f32::NAN, 0.0], [0.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
            assert_eq!(surprise(&bad, 0), None);
        }
    }

    #[test]
    fn a_perplexity_and_its_error_are_those_of_llama_perplexity() {
        let mut likelihood = Likelihood::default();
        assert!(likelihood.perplexity().is_nan() && likelihood.error().is_none());
        likelihood.add(1.0);
        assert_eq!((likelihood.perplexity(), likelihood.error()), (1f64.exp(), None));
        [2.0, 3.0, 6.0].into_iter().for_each(|nll| likelihood.add(nll));
        // A mean of 3; squares 1 + 4 + 9 + 36 over 4 are 12.5, less 9 are 3.5, over 3, of which the root.
        assert_eq!((likelihood.tokens, likelihood.mean()), (4, 3.0));
        let error = (3.5f64 / 3.0).sqrt();
        assert!((likelihood.error().unwrap() - error).abs() < 1e-12);
        assert!((likelihood.perplexity_error().unwrap() - error * 3f64.exp()).abs() < 1e-9);
    }
}

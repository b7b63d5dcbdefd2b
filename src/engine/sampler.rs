//! From logits to a token.
//!
//! The rule: logits are divided by the temperature and made probabilities over the whole vocabulary; `top_k` keeps the
//! k most likely tokens (equal ones by lower id), `top_p` keeps the shortest head of those whose share of the kept
//! probability reaches p, `min_p` keeps what has at least that fraction of the best token's probability; one token is
//! drawn from what is left. Temperature 0 takes the most likely token, of equal ones the one with the lowest id.
//!
//! The random number of a position depends on the seed and the position alone, so whoever knows both can tell which
//! token would be drawn without having drawn the ones before.

use crate::limits::MAX_TEMPERATURE;

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Sampling {
    /// 0 is greedy; at most [`MAX_TEMPERATURE`].
    pub temperature: f32,
    /// Most likely tokens that stay; 0 is all.
    pub top_k: usize,
    /// Share of the probability that stays, above 0 and at most 1.
    pub top_p: f32,
    /// Fraction of the best token's probability a token needs to stay, 0 to 1.
    pub min_p: f32,
    /// Same seed, same tokens.
    pub seed: u64,
}

impl Default for Sampling {
    /// The vendor's 1.0 and 0.95 are milder than this: the tail of a quantized model is mostly quantization noise.
    fn default() -> Self {
        Sampling { temperature: 0.7, top_k: 0, top_p: 0.90, min_p: 0.0, seed: 0 }
    }
}

/// A sampling setting out of its range.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("{name} is {value}; it must be {range}")]
pub struct SamplingError {
    /// The setting.
    pub name: &'static str,
    /// What it was set to.
    pub value: f32,
    /// What it may be.
    pub range: &'static str,
}

impl Sampling {
    /// Greedy decoding.
    pub fn greedy() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }

    /// Refuses what has no meaning, NaN included.
    pub fn check(&self) -> Result<(), SamplingError> {
        let check = |ok: bool, name, value, range| if ok { Ok(()) } else { Err(SamplingError { name, value, range }) };
        let temperature_ok = (0.0..=MAX_TEMPERATURE).contains(&self.temperature);
        check(temperature_ok, "temperature", self.temperature, "between 0 (greedy) and 100")?;
        check(self.top_p > 0.0 && self.top_p <= 1.0, "top-p", self.top_p, "above 0 and at most 1")?;
        check((0.0..=1.0).contains(&self.min_p), "min-p", self.min_p, "between 0 and 1")
    }
}

/// Logits no token can be chosen from.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum SampleError {
    /// A logit is not a finite number.
    #[error("the logit of token {token} at position {position} is {value}")]
    NotFinite {
        /// Which token.
        token: u32,
        /// Its logit.
        value: f32,
        /// Position of the token to be chosen.
        position: u64,
    },
    /// There are no logits.
    #[error("there are no logits at position {position}")]
    Empty {
        /// Position of the token to be chosen.
        position: u64,
    },
    /// Every token is banned.
    #[error("no token may follow at position {position}: all are banned")]
    AllBanned {
        /// Position of the token to be chosen.
        position: u64,
    },
}

/// Chooses tokens. Its scratch memory is sized once; choosing allocates nothing.
pub struct Sampler {
    kept: Vec<Candidate>,
}

#[derive(Clone, Copy, Debug)]
struct Candidate {
    /// Probability relative to the best token's, so 0 to 1.
    weight: f64,
    id: u32,
}

/// Heads of this many candidates are sorted first when the number needed is unknown; then eight times as many.
const HEAD_FIRST: usize = 64;

impl Sampler {
    /// A sampler for up to `vocab` logits.
    pub fn new(vocab: usize) -> Sampler {
        Sampler { kept: Vec::with_capacity(vocab) }
    }

    /// Bytes of the scratch memory of one for `vocab` logits.
    pub fn bytes(vocab: usize) -> usize {
        vocab * size_of::<Candidate>()
    }

    /// Chooses the token for `position` (number of tokens before it) from `logits`, one for each id.
    pub fn sample(&mut self, logits: &[f32], sampling: &Sampling, position: u64) -> Result<u32, SampleError> {
        check_finite(logits, position)?;
        self.sample_allowed(logits, sampling, position)
    }

    /// As [`Sampler::sample`], from logits that were finite before tokens were banned: those are -inf, and never chosen.
    pub fn sample_allowed(&mut self, logits: &[f32], sampling: &Sampling, position: u64) -> Result<u32, SampleError> {
        let best = largest(logits);
        if logits[best as usize] == f32::NEG_INFINITY {
            return Err(SampleError::AllBanned { position });
        }
        if sampling.temperature == 0.0 || sampling.top_k == 1 {
            return Ok(best);
        }
        let (temperature, top) = (f64::from(sampling.temperature), f64::from(logits[best as usize]));
        let weights = logits.iter().zip(0u32..).map(|(logit, id)| {
            let weight = ((f64::from(*logit) - top) / temperature).exp();
            Candidate { weight, id }
        });
        self.kept.clear();
        self.kept.extend(weights);

        if sampling.top_k > 0 && sampling.top_k < self.kept.len() {
            self.kept.select_nth_unstable_by(sampling.top_k - 1, better);
            self.kept.truncate(sampling.top_k);
            self.kept.sort_unstable_by(better);
        }
        if sampling.top_p < 1.0 {
            self.keep_nucleus(f64::from(sampling.top_p));
        }
        if sampling.min_p > 0.0 {
            let floor = f64::from(sampling.min_p);
            self.kept.retain(|c| c.weight >= floor);
        }
        Ok(self.draw(uniform(sampling.seed, position)))
    }

    /// Keeps the shortest head, most likely first, whose weight reaches `share` of all weight that is there.
    fn keep_nucleus(&mut self, share: f64) {
        let total: f64 = self.kept.iter().map(|c| c.weight).sum();
        let needed = share * total;
        // Tokens below this weigh less than (1 - share) of the total together: the head is complete without them.
        let floor = (1.0 - share) * total / self.kept.len() as f64;
        self.kept.retain(|c| c.weight >= floor);
        let mut head = HEAD_FIRST.min(self.kept.len());
        loop {
            if head < self.kept.len() {
                self.kept.select_nth_unstable_by(head - 1, better);
            }
            self.kept[..head].sort_unstable_by(better);
            let mut sum = 0.0;
            for i in 0..head {
                sum += self.kept[i].weight;
                if sum >= needed {
                    self.kept.truncate(i + 1);
                    return;
                }
            }
            if head == self.kept.len() {
                return;
            }
            head = (8 * head).min(self.kept.len());
        }
    }

    /// The candidate in whose part of the summed weight `uniform` lies.
    fn draw(&self, uniform: f64) -> u32 {
        let total: f64 = self.kept.iter().map(|c| c.weight).sum();
        let mut left = uniform * total;
        for candidate in &self.kept {
            if left < candidate.weight {
                return candidate.id;
            }
            left -= candidate.weight;
        }
        // Rounding may leave a remainder behind the last candidate that has any weight.
        self.kept.iter().rev().find(|c| c.weight > 0.0).map_or(0, |c| c.id)
    }
}

fn better(a: &Candidate, b: &Candidate) -> std::cmp::Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// Refuses anything but finite numbers, and none.
pub fn check_finite(logits: &[f32], position: u64) -> Result<(), SampleError> {
    match (0u32..).zip(logits).find(|(_, value)| !value.is_finite()) {
        Some((token, &value)) => Err(SampleError::NotFinite { token, value, position }),
        None if logits.is_empty() => Err(SampleError::Empty { position }),
        None => Ok(()),
    }
}

/// The id of the largest logit, of equal ones the lowest.
fn largest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, value) in (0u32..).zip(logits) {
        if *value > logits[best as usize] {
            best = id;
        }
    }
    best
}

/// The random number of `position` under `seed`, in [0, 1): output number `position` of SplitMix64, its upper 53 bits.
pub fn uniform(seed: u64, position: u64) -> f64 {
    (splitmix64(seed, position) >> 11) as f64 / (1u64 << 53) as f64
}

fn splitmix64(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn warm() -> Sampling {
        Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 1 }
    }

    fn ln(p: f64) -> f32 {
        p.ln() as f32
    }

    /// How often each token comes in `n` positions.
    fn counts(logits: &[f32], sampling: &Sampling, n: u64) -> Vec<u64> {
        let mut sampler = Sampler::new(logits.len());
        let mut counts = vec![0; logits.len()];
        for position in 0..n {
            counts[sampler.sample(logits, sampling, position).unwrap() as usize] += 1;
        }
        counts
    }

    #[test]
    fn the_generator_is_splitmix64() {
        // Published outputs for seed 1234567.
        let known =
            [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821];
        for (i, x) in known.into_iter().enumerate() {
            assert_eq!(splitmix64(1234567, i as u64), x);
        }
    }

    #[test]
    fn greedy_takes_the_best_and_of_equals_the_first() {
        let mut sampler = Sampler::new(4);
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, -1.0], &Sampling::greedy(), 0), Ok(1));
        let one = Sampling { top_k: 1, ..warm() };
        assert_eq!(sampler.sample(&[1.0, 3.0, 3.0, -1.0], &one, 0), Ok(1));
    }

    #[test]
    fn what_is_not_finite_is_named() {
        let mut sampler = Sampler::new(3);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for sampling in [Sampling::greedy(), warm()] {
                let error = sampler.sample(&[0.0, 1.0, bad], &sampling, 17).unwrap_err();
                assert!(matches!(error, SampleError::NotFinite { token: 2, position: 17, .. }), "{error}");
                assert!(sampler.sample(&[bad; 3], &sampling, 0).is_err());
            }
        }
        assert_eq!(sampler.sample(&[], &warm(), 5), Err(SampleError::Empty { position: 5 }));
    }

    #[test]
    fn what_is_banned_is_never_chosen() {
        let no = f32::NEG_INFINITY;
        let mut sampler = Sampler::new(5);
        for sampling in [Sampling::greedy(), warm(), Sampling { top_k: 4, top_p: 0.99, min_p: 0.01, ..warm() }] {
            for position in 0..200 {
                let id = sampler.sample_allowed(&[no, 1.0, no, 0.0, no], &sampling, position).unwrap();
                assert!(id == 1 || id == 3 && sampling.temperature > 0.0, "{id}");
                assert_eq!(sampler.sample_allowed(&[no, no, no, -50.0, no], &sampling, position), Ok(3));
            }
            let error = sampler.sample_allowed(&[no; 5], &sampling, 4);
            assert_eq!(error, Err(SampleError::AllBanned { position: 4 }));
        }
    }

    #[test]
    fn settings_without_meaning_are_refused() {
        let with = |change: fn(&mut Sampling)| {
            let mut s = warm();
            change(&mut s);
            s.check().map_err(|e| e.name)
        };
        assert_eq!(Sampling::default().check(), Ok(()));
        assert_eq!(with(|s| s.temperature = 0.0), Ok(()));
        assert_eq!(with(|s| s.temperature = -0.1), Err("temperature"));
        assert_eq!(with(|s| s.temperature = f32::NAN), Err("temperature"));
        assert_eq!(with(|s| s.temperature = f32::INFINITY), Err("temperature"));
        assert_eq!(with(|s| s.top_p = 0.0), Err("top-p"));
        assert_eq!(with(|s| s.top_p = 1.5), Err("top-p"));
        assert_eq!(with(|s| s.top_p = f32::NAN), Err("top-p"));
        assert_eq!(with(|s| s.min_p = -1.0), Err("min-p"));
        assert_eq!(with(|s| s.min_p = f32::NAN), Err("min-p"));
        assert_eq!(with(|s| s.top_k = 0), Ok(()));
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [ln(0.5), ln(0.3), ln(0.2)];
        let n = 100_000;
        for (p, count) in [0.5, 0.3, 0.2].into_iter().zip(counts(&logits, &warm(), n)) {
            // Five standard deviations of a binomial.
            let bound = 5.0 * (n as f64 * p * (1.0 - p)).sqrt();
            assert!((count as f64 - n as f64 * p).abs() < bound, "{count} of {n} at {p}");
        }
        // At temperature 0.5 the probabilities are squared: 25, 9, 4 of 38.
        let cold = Sampling { temperature: 0.5, ..warm() };
        let share = counts(&logits, &cold, n)[0] as f64 / n as f64;
        assert!((share - 25.0 / 38.0).abs() < 0.01, "{share}");
    }

    #[test]
    fn each_filter_keeps_what_it_says() {
        let logits = [ln(0.2), ln(0.5), ln(0.2), ln(0.1)];
        let kept = |sampling: Sampling| -> Vec<usize> {
            let counts = counts(&logits, &sampling, 2000);
            (0..4).filter(|i| counts[*i] > 0).collect()
        };
        assert_eq!(kept(Sampling { top_k: 2, ..warm() }), [0, 1]);
        assert_eq!(kept(Sampling { top_p: 0.45, ..warm() }), [1]);
        assert_eq!(kept(Sampling { top_p: 0.6, ..warm() }), [0, 1]);
        assert_eq!(kept(Sampling { top_p: 0.85, ..warm() }), [0, 1, 2]);
        assert_eq!(kept(Sampling { min_p: 0.3, ..warm() }), [0, 1, 2]);
        assert_eq!(kept(Sampling { min_p: 1.0, ..warm() }), [1]);
        // Among the best two, 0.5 is 0.71 of what is kept.
        assert_eq!(kept(Sampling { top_k: 2, top_p: 0.7, ..warm() }), [1]);
    }

    #[test]
    fn a_position_does_not_depend_on_its_history() {
        let logits: Vec<f32> = (0..50).map(|i| (i as f32 * 0.37).sin()).collect();
        let mut sampler = Sampler::new(50);
        let forward: Vec<u32> = (0..40).map(|p| sampler.sample(&logits, &warm(), p).unwrap()).collect();
        let mut backward: Vec<u32> = (0..40).rev().map(|p| sampler.sample(&logits, &warm(), p).unwrap()).collect();
        backward.reverse();
        assert_eq!(forward, backward);
        let other = Sampling { seed: 2, ..warm() };
        let differs: Vec<u32> = (0..40).map(|p| sampler.sample(&logits, &other, p).unwrap()).collect();
        assert_ne!(forward, differs);
    }

    #[test]
    fn a_cold_extreme_stays_finite() {
        let cold = Sampling { temperature: 1e-30, ..warm() };
        assert_eq!(Sampler::new(3).sample(&[1e30, -1e30, 0.0], &cold, 0), Ok(0));
    }

    /// The rule of the module, with a full sort and nothing else clever.
    fn naive(logits: &[f32], s: &Sampling, position: u64) -> (u32, usize) {
        let top = logits.iter().copied().fold(f32::MIN, f32::max);
        let weight = |l: f32| ((f64::from(l) - f64::from(top)) / f64::from(s.temperature)).exp();
        let mut all: Vec<(f64, u32)> = logits.iter().zip(0..).map(|(l, i)| (weight(*l), i)).collect();
        all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        if s.top_k > 0 {
            all.truncate(s.top_k);
        }
        let total: f64 = all.iter().map(|c| c.0).sum();
        let mut sum = 0.0;
        let head = all.iter().position(|c| {
            sum += c.0;
            sum >= f64::from(s.top_p) * total
        });
        all.truncate(head.map_or(all.len(), |i| i + 1));
        all.retain(|c| c.0 >= f64::from(s.min_p));
        let kept: f64 = all.iter().map(|c| c.0).sum();
        let mut left = uniform(s.seed, position) * kept;
        for c in &all {
            if left < c.0 {
                return (c.1, all.len());
            }
            left -= c.0;
        }
        (all[all.len() - 1].1, all.len())
    }

    proptest! {
        #[test]
        fn the_quick_way_is_the_plain_way(
            logits in proptest::collection::vec(-8.0f32..8.0, 1..400),
            temperature in 0.05f32..3.0, top_k in 0usize..300, top_p in 0.01f32..0.999, min_p in 0.0f32..0.3,
            seed in any::<u64>(), position in 0u64..1_000_000,
        ) {
            let sampling = Sampling { temperature, top_k, top_p, min_p, seed };
            let mut sampler = Sampler::new(logits.len());
            let capacity = sampler.kept.capacity();
            let token = sampler.sample(&logits, &sampling, position).unwrap();
            let (expected, kept) = naive(&logits, &sampling, position);
            // Sums in another order may differ in the last bit and move the edge of the nucleus by one token.
            prop_assert!(sampler.kept.len().abs_diff(kept) <= 1);
            if sampler.kept.len() == kept {
                prop_assert_eq!(token, expected);
            }
            prop_assert_eq!(sampler.kept.capacity(), capacity);
        }
    }
}

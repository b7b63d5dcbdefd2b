//! What is tried in generations, and what of it is kept. Pure.

use millstream_io::measure::{Candidate, Summary, median};

use crate::limits::{CHALLENGERS_MAX, MIN_SLABS};

/// What is kept must generate this much faster than the defaults.
pub const GAIN_MIN: f64 = 1.03;
/// Below this share of the fastest, taking little CPU does not make up for it.
const NEAR: f64 = 0.8;
/// The trial's cache holds one expert in so many, so that most are read.
const CACHED_ONE_IN: u64 = 8;
/// But as many as this many times what a token uses of a layer, so that no read waits for a place to go to.
const CACHED_USES: u64 = 4;

/// One generation: how fast it was, and whether memory served its reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    /// Tokens per second after the prompt.
    pub tok_s: f64,
    /// Whether memory may have served some of the reads, so that the rate is not the drive's.
    pub cached: bool,
}

/// A generation with the challenger and one with the defaults, one right after the other.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pair {
    /// Tokens per second with the challenger.
    pub challenger: f64,
    /// Tokens per second with the defaults.
    pub default: f64,
}

/// What the rerun says of the challenger.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rerun {
    /// Median over pairs of challenger / defaults.
    pub gain: f64,
    /// Pairs in which the challenger was faster.
    pub faster: usize,
    /// Pairs.
    pub pairs: usize,
}

/// Positions of the ways of reading that are tried in generations: by turns the fastest and the one that takes least CPU
/// of those near the fastest. Nothing that memory served, nothing that cannot be asked for, and not the default.
pub fn challengers(list: &[Summary], default: &Candidate) -> Vec<usize> {
    let fair = |index: &usize| !list[*index].cached && list[*index].candidate.is_offered();
    let mut fast: Vec<usize> = (0..list.len()).filter(fair).collect();
    fast.sort_by(|a, b| list[*b].gb_s.total_cmp(&list[*a].gb_s));
    let Some(fastest) = fast.first().map(|index| list[*index].gb_s) else { return Vec::new() };
    fast.retain(|index| list[*index].candidate != *default);
    let mut frugal = fast.clone();
    frugal.retain(|index| list[*index].gb_s >= NEAR * fastest);
    frugal.sort_by(|a, b| list[*a].cpu_s_per_gb.total_cmp(&list[*b].cpu_s_per_gb));
    let mut chosen: Vec<usize> = Vec::new();
    for turn in 0..fast.len() {
        for index in [&fast, &frugal].into_iter().filter_map(|list| list.get(turn)) {
            if !chosen.contains(index) && chosen.len() < CHALLENGERS_MAX {
                chosen.push(*index);
            }
        }
    }
    chosen
}

/// Median rate of samples that the drive served; `None` where memory served one, or there is none.
pub fn rate(samples: &[Sample]) -> Option<f64> {
    let rates: Vec<f64> = samples.iter().map(|sample| sample.tok_s).collect();
    median(&rates).filter(|_| samples.iter().all(|sample| !sample.cached))
}

/// The challenger that was fastest, if it gained enough to be worth a rerun.
pub fn leader(default: Option<f64>, challengers: &[Option<f64>]) -> Option<usize> {
    let default = default?;
    let rates = challengers.iter().enumerate().filter_map(|(index, rate)| Some((index, (*rate)?)));
    let (index, rate) = rates.max_by(|a, b| a.1.total_cmp(&b.1))?;
    (rate >= GAIN_MIN * default).then_some(index)
}

impl Rerun {
    /// What `pairs` say; `None` without any.
    pub fn of(pairs: &[Pair]) -> Option<Rerun> {
        let gains: Vec<f64> = pairs.iter().map(|pair| pair.challenger / pair.default).collect();
        let faster = gains.iter().filter(|gain| **gain > 1.0).count();
        Some(Rerun { gain: median(&gains)?, faster, pairs: pairs.len() })
    }

    /// Whether the challenger is kept: the median pair gains 3 %, and every pair but one gains something. Of six pairs
    /// that differ by chance alone, five come out on one side in one of nine tries; a median alone in one of two.
    pub fn holds(&self) -> bool {
        self.gain >= GAIN_MIN && self.faster + 1 >= self.pairs
    }
}

/// Slabs of the trial: few, so that experts are read and not found, and never more than memory allows.
pub fn trial_slabs(allowed: u64, experts: u64, used_of_a_layer: u64) -> usize {
    let few = (experts / CACHED_ONE_IN).max(CACHED_USES * used_of_a_layer);
    (few.min(allowed) as usize).max(MIN_SLABS)
}

/// Tokens to generate in about `seconds` at `tok_s`, at least `least` and at most `most`.
pub fn trial_tokens(tok_s: f64, seconds: f64, least: usize, most: usize) -> usize {
    // A rate that is no number asks for none.
    ((tok_s * seconds) as usize).max(least).min(most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_io::IoMode;
    use millstream_io::PageKind;

    fn summary(candidate: Candidate, gb_s: f64, cpu_s_per_gb: f64) -> Summary {
        Summary {
            candidate,
            registered: true,
            pages: PageKind::Transparent,
            rounds: 3,
            gb_s,
            gb_s_min: gb_s,
            gb_s_max: gb_s,
            cpu_s_per_gb,
            slabs: 100,
            p50_ms: 1.0,
            p99_ms: 1.0,
            submit_p50_us: 1.0,
            submit_p99_us: 1.0,
            amplification: None,
            request_kib: None,
            cached: false,
        }
    }

    const DEFAULT: Candidate = Candidate::RING;

    fn depth(depth: u32) -> Candidate {
        Candidate { depth, ..Candidate::RING }
    }

    #[test]
    fn fast_and_frugal_ones_are_tried_by_turns() {
        let list = [
            summary(DEFAULT, 2.0, 0.001),
            summary(depth(1), 1.7, 0.002),
            summary(depth(2), 1.9, 0.005),
            summary(depth(8), 2.1, 0.009),
            summary(Candidate::THREADS, 1.8, 0.003),
            // Frugal, but 1.5 is less than 0.8 x 2.1.
            summary(depth(16), 1.5, 0.0001),
        ];
        // Fastest 8, most frugal 1; then 2 and THREADS.
        assert_eq!(challengers(&list, &DEFAULT), [3, 1, 2, 4]);
        // Far behind, but a generation is not a sweep.
        let slow = [summary(DEFAULT, 2.0, 0.001), summary(depth(1), 0.5, 0.001), summary(depth(2), 0.9, 0.002)];
        assert_eq!(challengers(&slow, &DEFAULT), [2, 1]);
        assert_eq!(challengers(&list[..2], &DEFAULT), [1]);
        assert!(challengers(&list[..1], &DEFAULT).is_empty());
        assert!(challengers(&[], &DEFAULT).is_empty());
    }

    #[test]
    fn what_memory_served_or_cannot_be_asked_for_is_not_tried() {
        let buffered = Candidate { mode: IoMode::Buffered, ..Candidate::THREADS };
        let list = [
            summary(DEFAULT, 2.0, 0.001),
            Summary { cached: true, ..summary(buffered, 9.0, 0.1) },
            summary(Candidate { sqpoll: true, ..DEFAULT }, 2.2, 0.5),
            summary(Candidate { register: false, ..DEFAULT }, 2.2, 0.5),
            summary(depth(2), 1.9, 0.005),
        ];
        assert_eq!(challengers(&list, &DEFAULT), [4]);
        let warm: Vec<Summary> = list.iter().map(|one| Summary { cached: true, ..one.clone() }).collect();
        assert!(challengers(&warm, &DEFAULT).is_empty());
    }

    #[test]
    fn at_most_four_are_tried() {
        let list: Vec<Summary> = (1..=9).map(|n| summary(depth(n), 2.0, f64::from(n))).collect();
        assert_eq!(challengers(&list, &DEFAULT).len(), 4);
    }

    #[test]
    fn a_leader_gains_three_percent_in_the_median() {
        let real = |rates: &[f64]| rates.iter().map(|&tok_s| Sample { tok_s, cached: false }).collect::<Vec<_>>();
        assert_eq!(rate(&real(&[10.0, 90.0, 11.0])), Some(11.0));
        assert_eq!(rate(&[]), None);
        let mut warm = real(&[10.0, 11.0]);
        warm[0].cached = true;
        assert_eq!(rate(&warm), None, "one warm generation makes the rate warm");
        assert_eq!(leader(Some(100.0), &[Some(102.9), None, Some(99.0)]), None);
        assert_eq!(leader(Some(100.0), &[Some(103.0), None, Some(99.0)]), Some(0));
        assert_eq!(leader(Some(100.0), &[Some(104.0), None, Some(105.0)]), Some(2));
        assert_eq!(leader(None, &[Some(104.0)]), None);
        assert_eq!(leader(Some(100.0), &[]), None);
    }

    #[test]
    fn a_gain_holds_where_the_median_pair_and_all_but_one_gain() {
        let rerun = |gains: &[f64]| {
            let pairs: Vec<Pair> = gains.iter().map(|gain| Pair { challenger: 50.0 * gain, default: 50.0 }).collect();
            Rerun::of(&pairs)
        };
        assert_eq!(rerun(&[]), None);
        // (1.04 + 1.05) / 2.
        let six = rerun(&[1.02, 1.04, 0.98, 1.05, 1.06, 1.50]).unwrap();
        assert!((six.gain - 1.045).abs() < 1e-9 && six.faster == 5 && six.holds(), "{six:?}");
        for too_little in [
            &[1.02, 1.02, 1.02, 1.02, 1.02, 1.50][..],
            &[1.50, 1.50, 1.50, 1.50, 0.99, 0.99],
            &[0.5, 0.6, 0.7, 0.8, 0.9, 9.0],
            &[1.0, 1.0, 1.0, 1.0, 1.0, 1.0],
        ] {
            assert!(!rerun(too_little).unwrap().holds(), "{too_little:?}");
        }
    }

    #[test]
    fn the_trial_holds_few_experts_and_takes_its_time() {
        // GLM-5.2: 75 layers of 256, eight used.
        assert_eq!(trial_slabs(10_000, 19_200, 8), 2_400);
        assert_eq!(trial_slabs(500, 19_200, 8), 500);
        assert_eq!(trial_slabs(10_000, 128, 8), 32);
        assert_eq!(trial_slabs(0, 128, 8), 1);
        assert_eq!(trial_tokens(100.0, 2.0, 8, 256), 200);
        assert_eq!(trial_tokens(0.5, 2.0, 8, 256), 8);
        assert_eq!(trial_tokens(1e9, 2.0, 8, 256), 256);
        assert_eq!(trial_tokens(f64::NAN, 2.0, 8, 256), 8);
        assert_eq!(trial_tokens(100.0, 2.0, 8, 5), 5, "a short context has no room for more");
    }
}

//! Traces of models that are not there, for policies to be tried on other skews than those of the models at hand.

use super::{Choice, Header, Trace};

/// What a made-up router is like.
#[derive(Clone, Debug, PartialEq)]
pub struct Shape {
    /// Routed layers.
    pub layers: u16,
    /// Experts of each.
    pub experts: u16,
    /// Experts a token.
    pub top_k: u16,
    /// Tokens.
    pub tokens: usize,
    /// The expert of rank r is chosen in proportion to 1 / r^skew; 0 chooses all alike.
    pub skew: f64,
    /// Chance that a choice is one of the previous token's.
    pub repeat: f64,
    /// Tokens after which half of the ranks are dealt anew; 0 for never.
    pub topic: usize,
    /// Same seed, same trace.
    pub seed: u64,
}

/// A trace of `shape`. Panics where it describes no model.
pub fn synthesize(shape: &Shape) -> Trace {
    let Shape { layers, experts, top_k, tokens, skew, repeat, topic, seed } = *shape;
    let header = Header { fingerprint: 0, layers: (0..layers).collect(), experts, top_k, expert_bytes: 18_915_328 };
    let mut trace = Trace::new(header);
    let mut random = Random(seed);
    let weights: Vec<f64> = (1..=experts).map(|rank| f64::from(rank).powf(-skew)).collect();
    let mut ranked: Vec<Vec<u16>> = (0..layers).map(|_| random.shuffled(experts)).collect();
    let mut before: Vec<Vec<u16>> = vec![vec![]; layers.into()];
    for token in 0..tokens {
        if topic > 0 && token > 0 && token % topic == 0 {
            ranked.iter_mut().for_each(|ranked| random.deal_half_anew(ranked));
        }
        let chosen: Vec<Vec<u16>> = ranked
            .iter()
            .zip(&before)
            .map(|(ranked, before)| random.choose(ranked, &weights, before, repeat, top_k.into()))
            .collect();
        trace.push(1, token == 0, chosen.iter().map(|ids| Choice { ids, ..Choice::default() }));
        before = chosen;
    }
    trace
}

/// SplitMix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// From 0 on, below 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, bound: usize) -> usize {
        ((u128::from(self.next()) * bound as u128) >> 64) as usize
    }

    fn shuffled(&mut self, count: u16) -> Vec<u16> {
        let mut all: Vec<u16> = (0..count).collect();
        self.shuffle(&mut all);
        all
    }

    fn shuffle(&mut self, items: &mut [u16]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// Every other rank gets another expert.
    fn deal_half_anew(&mut self, ranked: &mut [u16]) {
        let mut dealt: Vec<u16> = ranked.iter().copied().step_by(2).collect();
        self.shuffle(&mut dealt);
        ranked.iter_mut().step_by(2).zip(dealt).for_each(|(place, expert)| *place = expert);
    }

    /// `top_k` different experts, ascending.
    fn choose(&mut self, ranked: &[u16], weights: &[f64], before: &[u16], repeat: f64, top_k: usize) -> Vec<u16> {
        let mut left = weights.to_vec();
        let mut total: f64 = left.iter().sum();
        let mut chosen: Vec<u16> = Vec::with_capacity(top_k);
        while chosen.len() < top_k {
            if !before.is_empty() && self.unit() < repeat {
                let again = before[self.below(before.len())];
                if !chosen.contains(&again) {
                    let rank = ranked.iter().position(|&expert| expert == again).unwrap_or(0);
                    total -= std::mem::take(&mut left[rank]);
                    chosen.push(again);
                    continue;
                }
            }
            let mut point = self.unit() * total;
            let in_reach = |weight: &f64| {
                point -= *weight;
                point < 0.0 && *weight > 0.0
            };
            // Rounding may leave the point behind the last weight.
            let last = || weights.len() - 1 - left.iter().rev().position(|&weight| weight > 0.0).unwrap_or(0);
            let rank = left.iter().position(in_reach).unwrap_or_else(last);
            total -= std::mem::take(&mut left[rank]);
            chosen.push(ranked[rank]);
        }
        chosen.sort_unstable();
        chosen
    }
}

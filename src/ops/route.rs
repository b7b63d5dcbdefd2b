//! The router's choice: scores, a correction bias that only steers the choice, groups, normalized weights.

use crate::limits::MAX_GROUPS;

/// What makes a router's outputs scores between 0 and 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// Each by itself.
    Sigmoid,
    /// Shares of all experts, which sum to 1.
    Softmax,
}

impl Scores {
    /// Replaces outputs by scores.
    fn apply(self, row: &mut [f32]) {
        match self {
            Scores::Sigmoid => row.iter_mut().for_each(|s| *s = 1.0 / (1.0 + (-*s).exp())),
            Scores::Softmax => {
                let max = row.iter().fold(f32::NEG_INFINITY, |max, &s| max.max(s));
                row.iter_mut().for_each(|s| *s = (*s - max).exp());
                let sum: f32 = row.iter().sum();
                row.iter_mut().for_each(|s| *s /= sum);
            }
        }
    }
}

/// Rules of a router; see the manual's chapter on the model's arithmetic.
#[derive(Clone, Copy, Debug)]
pub struct RouteRule {
    /// How outputs become scores.
    pub scores: Scores,
    /// Experts chosen a row.
    pub top_k: usize,
    /// Groups of consecutive experts, at most [`MAX_GROUPS`]; 1 for none.
    pub groups: usize,
    /// Groups that stay eligible.
    pub top_groups: usize,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Factor on the weights.
    pub scaling: f32,
}

/// Turns one row of router outputs (`logits`, one an expert) into the chosen expert ids, ascending, and their weights.
///
/// Choice: the `top_k` largest of `score + bias` inside the best groups, lower id first among equals. Weight: the score
/// without the bias. `biased` is scratch of `logits.len()`; `ids` and `gates` have `top_k` entries.
/// Returns the first expert whose score is not finite, with nothing chosen.
pub fn choose(
    rule: &RouteRule,
    logits: &mut [f32],
    bias: &[f32],
    biased: &mut [f32],
    ids: &mut [u16],
    gates: &mut [f32],
) -> Result<(), usize> {
    rule.scores.apply(logits);
    for (e, (&s, (&b, biased))) in logits.iter().zip(bias.iter().zip(biased.iter_mut())).enumerate() {
        *biased = s + b;
        if !biased.is_finite() {
            return Err(e);
        }
    }
    let scores = &*logits;
    if rule.groups > 1 {
        mask_groups(rule, biased);
    }
    for slot in ids.iter_mut() {
        let best = best_index(biased);
        *slot = best as u16;
        biased[best] = f32::NEG_INFINITY;
    }
    ids.sort_unstable();
    let mut sum = 0.0f32;
    for (g, &id) in gates.iter_mut().zip(ids.iter()) {
        *g = scores[id as usize];
        sum += *g;
    }
    let divisor = if rule.normalize { sum + 1e-20 } else { 1.0 };
    for g in gates.iter_mut() {
        *g = *g / divisor * rule.scaling;
    }
    Ok(())
}

/// Removes every group but the `top_groups` whose two best biased scores have the largest sum.
fn mask_groups(rule: &RouteRule, biased: &mut [f32]) {
    let size = biased.len() / rule.groups;
    let mut sums = [f32::NEG_INFINITY; MAX_GROUPS];
    let sums = &mut sums[..rule.groups];
    for (sum, group) in sums.iter_mut().zip(biased.chunks_exact(size)) {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &v in group {
            if v > first {
                (first, second) = (v, first);
            } else if v > second {
                second = v;
            }
        }
        *sum = if size > 1 { first + second } else { first };
    }
    let mut keep = [false; MAX_GROUPS];
    for _ in 0..rule.top_groups {
        let best = best_index(sums);
        keep[best] = true;
        sums[best] = f32::NEG_INFINITY;
    }
    for (group, keep) in biased.chunks_exact_mut(size).zip(keep) {
        if !keep {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

/// Index of the first largest value; values are never NaN here.
fn best_index(values: &[f32]) -> usize {
    let mut best = 0;
    for (i, &v) in values.iter().enumerate() {
        if v > values[best] {
            best = i;
        }
    }
    best
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(rule: RouteRule, logits: &[f32], bias: &[f32]) -> (Vec<u16>, Vec<f32>) {
        let (mut ids, mut gates) = (vec![0; rule.top_k], vec![0.0; rule.top_k]);
        let mut biased = vec![0.0; logits.len()];
        choose(&rule, &mut logits.to_vec(), bias, &mut biased, &mut ids, &mut gates).unwrap();
        (ids, gates)
    }

    const PLAIN: RouteRule =
        RouteRule { scores: Scores::Sigmoid, top_k: 2, groups: 1, top_groups: 1, normalize: true, scaling: 2.5 };

    #[test]
    fn the_bias_steers_the_choice_and_not_the_weight() {
        let (ids, gates) = pick(PLAIN, &[0.0, 0.0, 2.0, -2.0], &[0.0, 0.0, 0.0, 5.0]);
        assert_eq!(ids, [2, 3]);
        let (a, b) = (1.0 / (1.0 + (-2f32).exp()), 1.0 / (1.0 + 2f32.exp()));
        assert!((gates[0] - 2.5 * a / (a + b)).abs() < 1e-6);
        assert!((gates[1] - 2.5 * b / (a + b)).abs() < 1e-6);
    }

    #[test]
    fn equal_scores_go_to_the_lower_ids() {
        assert_eq!(pick(PLAIN, &[1.0; 5], &[0.0; 5]).0, [0, 1]);
    }

    #[test]
    fn masked_groups_cannot_win_however_negative_the_bias() {
        // Four groups of two; every biased score is far below zero, so a mask of zero would let a masked group win.
        let rule = RouteRule { top_k: 3, groups: 4, top_groups: 2, normalize: false, scaling: 1.0, ..PLAIN };
        let (ids, gates) = pick(rule, &[0.0, 0.1, 3.0, -1.0, 0.5, 0.6, -2.0, -2.0], &[-100.0; 8]);
        // Sums of two: group 1 = s(3) + s(-1) = 1.22, group 2 = 1.27, group 0 = 1.02, group 3 = 0.24.
        assert_eq!(ids, [2, 4, 5]);
        assert!((gates[0] - 1.0 / (1.0 + (-3f32).exp())).abs() < 1e-6);
    }

    #[test]
    fn a_group_is_scored_by_its_best_two() {
        let rule = RouteRule { top_k: 1, groups: 2, top_groups: 1, normalize: false, scaling: 1.0, ..PLAIN };
        // Expert 0 is the best of all, but its group's best two sum to less.
        assert_eq!(pick(rule, &[2.0, -6.0, -6.0, 1.0, 1.0, -6.0], &[0.0; 6]).0, [3]);
    }

    #[test]
    fn softmax_weights_are_shares_of_all_experts_not_of_the_chosen() {
        let rule = RouteRule { scores: Scores::Softmax, normalize: false, scaling: 1.0, ..PLAIN };
        // 2^0 + 2^3 + 2^1 + 2^2 = 15; an offset of all changes nothing, however large.
        let outputs = [0.0, 3.0, 1.0, 2.0].map(|power| power * std::f32::consts::LN_2 + 200.0);
        let (ids, gates) = pick(rule, &outputs, &[0.0; 4]);
        assert_eq!(ids, [1, 3]);
        assert!((gates[0] - 8.0 / 15.0).abs() < 1e-5 && (gates[1] - 4.0 / 15.0).abs() < 1e-5, "{gates:?}");
        let (_, gates) = pick(RouteRule { normalize: true, ..rule }, &outputs, &[0.0; 4]);
        assert!((gates[0] - 2.0 / 3.0).abs() < 1e-5 && (gates[1] - 1.0 / 3.0).abs() < 1e-5, "{gates:?}");
    }

    #[test]
    fn a_softmax_of_what_is_not_finite_chooses_nothing() {
        let rule = RouteRule { scores: Scores::Softmax, ..PLAIN };
        for bad in [f32::NAN, f32::INFINITY] {
            let got = choose(&rule, &mut [0.0, bad, 0.0], &[0.0; 3], &mut [0.0; 3], &mut [0; 2], &mut [0.0; 2]);
            assert!(got.is_err(), "{bad}");
        }
    }

    #[test]
    fn a_score_that_is_not_finite_is_named() {
        let mut logits = [0.0, f32::NAN, 0.0];
        let got = choose(&PLAIN, &mut logits, &[0.0; 3], &mut [0.0; 3], &mut [0; 2], &mut [0.0; 2]);
        assert_eq!(got, Err(1));
    }
}

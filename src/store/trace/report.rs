//! What is in traces: how uneven the choice of experts is, how soon it repeats, and how well it can be guessed.

use super::Trace;
use crate::limits::LOOKAHEAD_LAYERS_MAX;
use crate::meter::Share;

/// Reuse distances are told apart by powers of two up to this many.
const DISTANCES: usize = 24;

/// One routed layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerReport {
    /// Model layer.
    pub layer: u16,
    /// Selections of each expert.
    pub selections: Vec<u64>,
    /// How uneven they are: 0 where all are alike, nearly 1 where one takes all.
    pub gini: f64,
    /// Bits that say which expert a selection was; as many as the experts' number takes where all are alike.
    pub entropy_bits: f64,
    /// Share of the hottest quarter of the experts.
    pub hottest_quarter: f64,
    /// How well its choices can be foretold.
    pub foretold: Foretold,
}

/// How well choices can be foretold, token by token.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Foretold {
    /// Of what tokens chose, what the token before had chosen.
    pub previous: Share,
    /// Of what tokens chose, what was guessed one layer before, two layers before, and so on.
    pub recall: [Share; LOOKAHEAD_LAYERS_MAX],
}

impl Foretold {
    /// Counts a token that chose `ids`, the token before it `before`, of which `guesses` were made.
    fn add(&mut self, ids: &[u16], before: &[u16], guesses: [&[u16]; LOOKAHEAD_LAYERS_MAX]) {
        if !before.is_empty() {
            self.previous.add(ids, before);
        }
        for (ahead, guess) in guesses.iter().enumerate().filter(|(_, guess)| !guess.is_empty()) {
            self.recall[ahead].add(ids, guess);
        }
    }

    fn add_all(&mut self, other: &Foretold) {
        self.previous.add_all(other.previous);
        self.recall.iter_mut().zip(other.recall).for_each(|(our, other)| our.add_all(other));
    }
}

/// What is in traces of one model.
#[derive(Clone, Debug, PartialEq)]
pub struct Report {
    /// Each routed layer.
    pub layers: Vec<LayerReport>,
    /// Requests whose expert was asked for before, with as many different ones in between: place `i` counts those below
    /// `2^i` and not below half of that. A cache that evicts by recency serves them when it holds as many.
    pub reuse: Vec<u64>,
    /// Requests for an expert that was never asked for before.
    pub first_uses: u64,
}

impl Report {
    /// Looks at `traces`, which must be of one model, at least one of them.
    pub fn of(traces: &[&Trace]) -> Report {
        let header = traces[0].header();
        let layers = (0..header.layers.len()).map(|layer| layer_report(traces, layer)).collect();
        let (reuse, first_uses) = reuse_distances(traces);
        Report { layers, reuse, first_uses }
    }

    /// How well choices can be foretold, over all layers.
    pub fn foretold(&self) -> Foretold {
        let mut all = Foretold::default();
        self.layers.iter().for_each(|layer| all.add_all(&layer.foretold));
        all
    }
}

fn layer_report(traces: &[&Trace], layer: usize) -> LayerReport {
    let header = traces[0].header();
    let top_k = usize::from(header.top_k);
    let mut selections = vec![0u64; header.experts.into()];
    let mut foretold = Foretold::default();
    for trace in traces {
        let mut before: &[u16] = &[];
        for step in 0..trace.steps() {
            if trace.begins(step) {
                before = &[];
            }
            let choice = trace.choice(step, layer);
            let rows = trace.rows(step);
            for (row, ids) in choice.ids.chunks_exact(top_k).enumerate() {
                ids.iter().for_each(|&id| selections[usize::from(id)] += 1);
                let of_row = |guess: &'_ [u16]| row * guess.len() / rows..(row + 1) * guess.len() / rows;
                foretold.add(ids, before, choice.guesses.map(|guess| &guess[of_row(guess)]));
                before = ids;
            }
        }
    }
    let mut sorted = selections.clone();
    sorted.sort_unstable();
    LayerReport {
        layer: header.layers[layer],
        gini: gini(&sorted),
        entropy_bits: entropy_bits(&sorted),
        hottest_quarter: hottest_quarter(&sorted),
        selections,
        foretold,
    }
}

/// Of counts in ascending order.
fn gini(sorted: &[u64]) -> f64 {
    let total: u64 = sorted.iter().sum();
    let n = sorted.len() as f64;
    let weighted: f64 = sorted.iter().enumerate().map(|(i, &count)| (i + 1) as f64 * count as f64).sum();
    if total == 0 { 0.0 } else { 2.0 * weighted / (n * total as f64) - (n + 1.0) / n }
}

fn entropy_bits(counts: &[u64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let bits = |&count: &u64| {
        let share = count as f64 / total as f64;
        -share * share.log2()
    };
    counts.iter().filter(|count| **count > 0).map(bits).sum()
}

fn hottest_quarter(sorted: &[u64]) -> f64 {
    let total: u64 = sorted.iter().sum();
    let hottest: u64 = sorted.iter().rev().take(sorted.len().div_ceil(4)).sum();
    hottest as f64 / total.max(1) as f64
}

/// Distances by powers of two, and first uses. Experts of one layer and step count once.
fn reuse_distances(traces: &[&Trace]) -> (Vec<u64>, u64) {
    let header = traces[0].header();
    let experts = usize::from(header.experts);
    let mut uses: Vec<usize> = Vec::new();
    for trace in traces {
        for step in 0..trace.steps() {
            for layer in 0..header.layers.len() {
                let mut ids = trace.choice(step, layer).ids.to_vec();
                ids.sort_unstable();
                ids.dedup();
                uses.extend(ids.iter().map(|&id| layer * experts + usize::from(id)));
            }
        }
    }
    let (mut reuse, mut first_uses) = (vec![0u64; DISTANCES], 0);
    let mut last_use: Vec<Option<usize>> = vec![None; header.keys()];
    // A mark stands at the last use of each expert so far: those after an expert's own are the experts in between.
    let mut marks = Marks::new(uses.len());
    for (now, &key) in uses.iter().enumerate() {
        match last_use[key].replace(now) {
            None => first_uses += 1,
            Some(before) => {
                marks.add(before, -1);
                let between = marks.before(now) - marks.before(before);
                let place = (u64::BITS - (between as u64).leading_zeros()) as usize;
                reuse[place.min(DISTANCES - 1)] += 1;
            }
        }
        marks.add(now, 1);
    }
    let len = reuse.iter().rposition(|&count| count > 0).map_or(0, |last| last + 1);
    reuse.truncate(len);
    (reuse, first_uses)
}

/// Sums over beginnings of a row of numbers that change one at a time (a Fenwick tree).
struct Marks {
    sums: Vec<i64>,
}

impl Marks {
    fn new(len: usize) -> Marks {
        Marks { sums: vec![0; len + 1] }
    }

    fn add(&mut self, at: usize, change: i64) {
        let mut node = at + 1;
        while node < self.sums.len() {
            self.sums[node] += change;
            node += node & node.wrapping_neg();
        }
    }

    /// Sum of the numbers before `at`.
    fn before(&self, at: usize) -> i64 {
        let (mut node, mut sum) = (at, 0);
        while node > 0 {
            sum += self.sums[node];
            node &= node - 1;
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::trace::{Choice, Header};

    fn trace(steps: &[[&[u16]; 2]], guesses: &[&[u16]]) -> Trace {
        let header = Header { fingerprint: 0, layers: vec![1, 2], experts: 4, top_k: 2, expert_bytes: 1 };
        let mut trace = Trace::new(header);
        for (number, [first, second]) in steps.iter().enumerate() {
            let guess = guesses.get(number).copied().unwrap_or_default();
            let rows = first.len() / 2;
            trace.push(
                rows,
                number == 0,
                [Choice { ids: first, ..Choice::default() }, Choice { ids: second, guesses: [guess, first] }],
            );
        }
        trace
    }

    #[test]
    fn selections_skew_and_recall_of_a_small_trace() {
        let trace = trace(&[[&[0, 1, 0, 2], &[0, 1, 0, 1]], [&[0, 1], &[0, 1]]], &[&[0, 3, 0, 1], &[2, 3]]);
        let report = Report::of(&[&trace]);
        let [first, second] = &report.layers[..] else { panic!("two layers") };
        assert_eq!((first.layer, &first.selections[..]), (1, &[3, 2, 1, 0][..]));
        // Sorted 0, 1, 2, 3: 2 * (0 + 2 + 6 + 12) / (4 * 6) - 5 / 4.
        assert!((first.gini - (40.0 / 24.0 - 1.25)).abs() < 1e-12);
        assert!((first.entropy_bits - 1.459_147_917).abs() < 1e-6);
        assert_eq!(first.hottest_quarter, 0.5);
        // {0,2} after {0,1} and {0,1} after {0,2}: one of two each time.
        assert_eq!(first.foretold.previous, Share { of: 4, count: 2 });
        assert_eq!(first.foretold.recall.map(Share::fraction), [None, None]);
        // {0,1} guessed {0,3}: 1; {0,1} guessed {0,1}: 2; {0,1} guessed {2,3}: 0.
        let Foretold { previous, recall } = second.foretold;
        assert_eq!(recall[0], Share { of: 6, count: 3 });
        // Two layers before, what the first layer chose: {0,1}, {0,2} and {0,1} for {0,1} each time.
        assert_eq!(recall[1], Share { of: 6, count: 5 });
        assert_eq!(previous, Share { of: 4, count: 4 });
        assert_eq!(report.foretold().previous, Share { of: 8, count: 6 });
        assert_eq!(second.entropy_bits, 1.0);
    }

    #[test]
    fn a_sequence_has_no_token_before_its_first() {
        let one = trace(&[[&[0, 1], &[0, 1]]], &[]);
        assert_eq!(Report::of(&[&one, &one]).foretold().previous.fraction(), None);
    }

    #[test]
    fn reuse_distance_counts_the_different_experts_in_between() {
        // Layer 1 uses 0 and 1, layer 2 uses 0 and 1 (other experts), then layer 1 again: between the two uses of layer
        // 1's expert 0 lie its expert 1 and two of layer 2; the same for expert 1, whose neighbour 0 was used again.
        let trace = trace(&[[&[0, 1], &[0, 1]], [&[0, 1], &[2, 3]]], &[]);
        let report = Report::of(&[&trace]);
        assert_eq!((report.reuse, report.first_uses), (vec![0, 0, 2], 6));
    }

    #[test]
    fn distances_are_those_of_a_list_that_is_searched() {
        let steps: Vec<[Vec<u16>; 2]> = (0..60u16).map(|n| [vec![n * 7 % 3, 3], vec![n % 3, 3]]).collect();
        let steps: Vec<[&[u16]; 2]> = steps.iter().map(|[a, b]| [&a[..], &b[..]]).collect();
        let trace = trace(&steps, &[]);
        let mut stack: Vec<u16> = vec![];
        let (mut expected, mut first_uses) = (vec![0u64; 8], 0);
        for [a, b] in &steps {
            for key in a.iter().copied().chain(b.iter().map(|id| id + 4)) {
                match stack.iter().rev().position(|&other| other == key) {
                    None => first_uses += 1,
                    Some(between) => {
                        let place = (0..8).find(|&place| between < 1 << place).unwrap();
                        expected[place] += 1;
                        stack.retain(|&other| other != key);
                    }
                }
                stack.push(key);
            }
        }
        let report = Report::of(&[&trace]);
        expected.truncate(report.reuse.len());
        assert_eq!((report.reuse, report.first_uses), (expected, first_uses));
    }
}

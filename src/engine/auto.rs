//! Finding out while running whether a switch is better on or off. Pure: times in, positions out.
//!
//! What a step takes depends on which experts it happens to need, far more than on a switch that is worth a few percent,
//! so single steps are compared with their neighbours: now and then one is taken with the switch turned, and its time
//! divided by that of the steps before and after it. Even so one comparison says little. The switch is turned once the
//! mean of the logarithms is further from nothing than chance would explain, and by enough to matter.
//!
//! How often is asked is decided by each comparison alone: one that speaks for the position makes the question rarer, one
//! that speaks against it makes it more frequent. What costs much to ask is soon asked rarely, what makes no difference
//! costs nothing however often it is asked, and a drive that has changed is asked about often again.

use crate::limits::{PROBE_PAUSE_MAX, PROBE_PAUSE_MIN};

/// Turning a switch must be worth this part of a step's time.
const MARGIN: f64 = 0.01;
/// Weight of a new comparison among the old ones, once there are many.
const NEWS: f64 = 1.0 / 32.0;
/// Comparisons from which on their spread tells how sure their mean is.
const COMPARISONS_ENOUGH: u32 = 8;
/// Sum of fewer than those that chance hardly makes.
const TOGETHER: f64 = 0.80;
/// Standard errors that the mean must be away from nothing.
const ERRORS: f64 = 2.0;
/// A difference after which less needs to be asked.
const STRIKING: f64 = 0.10;
/// One after which hardly anything does.
const GLARING: f64 = 0.40;

/// A switch that is decided by measuring.
#[derive(Clone, Debug)]
pub(super) struct Chooser {
    position: bool,
    /// Steps until the next probe.
    until_probe: u32,
    pause: u32,
    state: State,
    /// Of the logarithm of the turned step's time over its neighbours'.
    mean: f64,
    variance: f64,
    /// Sum of the squares of the weights that the comparisons have in the mean: of `n` of equal weight, `1 / n`.
    weights: f64,
    comparisons: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// The last step had the switch in its position and took so long; 0 when there was none.
    Steady { last: f64 },
    /// The last step was the probe.
    Probed { before: f64, probe: f64 },
}

impl Chooser {
    /// A switch that starts as `position`.
    pub(super) fn new(position: bool) -> Chooser {
        Chooser {
            position,
            until_probe: PROBE_PAUSE_MIN,
            pause: PROBE_PAUSE_MIN,
            state: State::Steady { last: 0.0 },
            mean: 0.0,
            variance: 0.0,
            weights: 1.0,
            comparisons: 0,
        }
    }

    /// Where it stands while nothing is asked.
    pub(super) fn position(&self) -> bool {
        self.position
    }

    /// Another sequence begins: its first step has no step before it to be compared with.
    pub(super) fn begin(&mut self) {
        self.state = State::Steady { last: 0.0 };
    }

    /// Whether the next step is one in which nothing else should be turned.
    pub(super) fn is_probing(&self) -> bool {
        self.until_probe == 0 || matches!(self.state, State::Probed { .. })
    }

    /// Whether the next step is one that a probe is compared with.
    pub(super) fn is_compared(&self) -> bool {
        matches!(self.state, State::Probed { .. })
    }

    /// How the next step is to be taken; `may_probe` is whether the switch may be turned for it.
    pub(super) fn next(&mut self, may_probe: bool) -> bool {
        match self.state {
            State::Steady { last } if self.until_probe == 0 && may_probe && last > 0.0 => !self.position,
            _ => self.position,
        }
    }

    /// Takes the time of the step that was taken as `taken`.
    pub(super) fn observe(&mut self, taken: bool, seconds: f64) {
        if seconds <= 0.0 {
            return;
        }
        self.state = match self.state {
            State::Steady { last } if taken != self.position => State::Probed { before: last, probe: seconds },
            State::Steady { .. } => {
                self.until_probe = self.until_probe.saturating_sub(1);
                State::Steady { last: seconds }
            }
            State::Probed { before, probe } => {
                self.compare((probe / ((before + seconds) / 2.0)).ln());
                self.until_probe = self.pause;
                State::Steady { last: seconds }
            }
        };
    }

    fn compare(&mut self, difference: f64) {
        self.comparisons += 1;
        let weight = NEWS.max(1.0 / f64::from(self.comparisons));
        let off = difference - self.mean;
        self.mean += weight * off;
        self.variance = (1.0 - weight) * (self.variance + weight * off * off);
        self.weights = (1.0 - weight).powi(2) * self.weights + weight.powi(2);
        let is_known = match self.comparisons {
            COMPARISONS_ENOUGH.. => {
                let error = (self.variance * self.weights / (1.0 - self.weights)).sqrt();
                self.mean.abs() > ERRORS * error
            }
            few => self.mean.abs() * f64::from(few) > TOGETHER,
        };
        if is_known && self.mean < -MARGIN {
            // What was learned of the old position is of no use for the new one.
            *self = Chooser { state: self.state, ..Chooser::new(!self.position) };
            return;
        }
        let times = match difference.abs() {
            GLARING.. => 16,
            STRIKING.. => 4,
            _ => 2,
        };
        self.pause = match difference > 0.0 {
            true => (self.pause * times).min(PROBE_PAUSE_MAX),
            false => (self.pause / times).max(PROBE_PAUSE_MIN),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Steps that take 1 with the switch on and `off` with it off, times noise; total time over that of the better.
    fn cost(start: bool, off: f64, noise: f64, steps: usize, seed: u64) -> (f64, bool) {
        let mut chooser = Chooser::new(start);
        let mut state = seed;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let (mut total, mut best) = (0.0, 0.0);
        for _ in 0..steps {
            let on = chooser.next(true);
            let luck = 1.0 + noise * (random() + random() - 1.0);
            let took = if on { 1.0 } else { off } * luck;
            total += took;
            best += off.min(1.0) * luck;
            chooser.observe(on, took);
        }
        (total / best, chooser.position)
    }

    #[test]
    fn the_better_position_is_found_and_asking_costs_less_than_3_percent() {
        for start in [false, true] {
            for off in [0.5, 0.7, 0.9, 1.1, 1.4, 2.0, 3.0] {
                let costs: Vec<f64> = (0..20)
                    .map(|seed| {
                        let (cost, on) = cost(start, off, 0.1, 512, seed);
                        assert_eq!(on, off > 1.0, "started {start}, off takes {off}, seed {seed}");
                        cost
                    })
                    .collect();
                let mean = costs.iter().sum::<f64>() / costs.len() as f64;
                assert!(mean < 1.03, "started {start}, off takes {off}: {mean}");
            }
        }
    }

    #[test]
    fn what_makes_no_difference_is_left_alone_nearly_always() {
        let wandered = (0..50).filter(|&seed| !cost(true, 1.0, 0.2, 512, seed).1).count();
        assert!(wandered < 25, "{wandered} of 50");
    }

    #[test]
    fn steps_that_vary_by_far_more_than_a_switch_is_worth_turn_it_hardly_ever() {
        // A comparison varies by a fifth, as on drives that bind.
        for off in [1.05, 1.1, 1.3] {
            let all: Vec<(f64, bool)> = (0..100).map(|seed| cost(true, off, 0.4, 512, seed)).collect();
            let mean = all.iter().map(|(cost, _)| cost).sum::<f64>() / 100.0;
            let turned = all.iter().filter(|(_, on)| !on).count();
            assert!(mean < 1.015 && turned <= 5, "off takes {off}: {mean}, {turned} of 100 turned");
        }
    }

    #[test]
    fn a_drive_that_changes_is_noticed() {
        let mut chooser = Chooser::new(true);
        for step in 0..4000 {
            let on = chooser.next(true);
            let on_is_better = step < 1000;
            chooser.observe(on, if on == on_is_better { 1.0 } else { 1.5 });
        }
        assert!(!chooser.position);
    }

    #[test]
    fn nothing_is_turned_while_it_may_not() {
        let mut chooser = Chooser::new(true);
        for _ in 0..100 {
            assert!(chooser.next(false));
            chooser.observe(true, 1.0);
        }
        assert!(chooser.is_probing() && !chooser.next(true));
    }

    proptest! {
        #[test]
        fn no_times_break_it(times in prop::collection::vec(prop_oneof![Just(0.0), 1e-9..1e9f64], 0..300)) {
            let mut chooser = Chooser::new(true);
            for seconds in times {
                let on = chooser.next(true);
                chooser.observe(on, seconds);
                prop_assert!(chooser.mean.is_finite() && chooser.variance.is_finite() && chooser.variance >= 0.0);
                prop_assert!(chooser.pause <= PROBE_PAUSE_MAX);
            }
        }
    }
}

//! Where a token's time goes.
//!
//! The meter is a chain of laps: each lap gives the time since the last mark to one stage, so the stages add up to the
//! measured wall time by construction. It belongs to the engine thread and takes no lock.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

/// What the engine thread is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Token embeddings.
    Embed,
    /// Norm, projections, rotation, cache, indexer, scores and output projection.
    Attention,
    /// Router scores and the choice of experts.
    Route,
    /// Looking experts up and submitting the reads of misses.
    Request,
    /// Guessing what the next layer will ask for, and submitting those reads.
    Hint,
    /// Shared expert, computed while reads are under way.
    Shared,
    /// Dense feed-forward of the first layers.
    Dense,
    /// Nothing to compute: the next expert is still on its way.
    Wait,
    /// Routed experts.
    Experts,
    /// Expert outputs summed in slot order.
    Reduce,
    /// Final norm and output head.
    Head,
    /// Choosing the next token.
    Sample,
    /// Everything else between the first and the last mark.
    Other,
}

impl Stage {
    /// All stages, in the order in which a token meets them.
    pub const ALL: [Stage; 13] = [
        Stage::Embed,
        Stage::Attention,
        Stage::Route,
        Stage::Request,
        Stage::Hint,
        Stage::Shared,
        Stage::Dense,
        Stage::Wait,
        Stage::Experts,
        Stage::Reduce,
        Stage::Head,
        Stage::Sample,
        Stage::Other,
    ];

    /// Name used in reports.
    pub fn name(self) -> &'static str {
        match self {
            Stage::Embed => "embed",
            Stage::Attention => "attention",
            Stage::Route => "route",
            Stage::Request => "request",
            Stage::Hint => "hint",
            Stage::Shared => "shared",
            Stage::Dense => "dense",
            Stage::Wait => "wait",
            Stage::Experts => "experts",
            Stage::Reduce => "reduce",
            Stage::Head => "head",
            Stage::Sample => "sample",
            Stage::Other => "other",
        }
    }
}

/// Time of one stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StageTime {
    /// Total time.
    pub busy: Duration,
    /// Number of laps.
    pub laps: u64,
    /// Median lap.
    pub p50: Duration,
    /// 99th percentile of laps.
    pub p99: Duration,
}

struct Tally {
    busy: Duration,
    laps: u64,
    nanos: Histogram<u64>,
}

/// Collects stage times; see the module's description.
pub struct Meter {
    tallies: Vec<Tally>,
    mark: Instant,
    started: Instant,
}

/// Longest lap that the percentiles tell apart; a longer one counts as this long in them, and fully in the totals.
const LONGEST_LAP_NS: u64 = 600_000_000_000;

impl Default for Meter {
    fn default() -> Self {
        Meter::new()
    }
}

impl Meter {
    /// A meter whose clock starts now. All memory it will ever use is allocated here.
    pub fn new() -> Meter {
        let tally = || Tally {
            busy: Duration::ZERO,
            laps: 0,
            // Two significant digits over a fixed range; these bounds are valid, so this cannot fail.
            nanos: Histogram::new_with_bounds(1, LONGEST_LAP_NS, 2).expect("constant histogram bounds"),
        };
        let now = Instant::now();
        Meter { tallies: Stage::ALL.iter().map(|_| tally()).collect(), mark: now, started: now }
    }

    /// Forgets everything and starts the clock again.
    pub fn restart(&mut self) {
        for t in &mut self.tallies {
            t.busy = Duration::ZERO;
            t.laps = 0;
            t.nanos.reset();
        }
        self.started = Instant::now();
        self.mark = self.started;
    }

    /// Gives the time since the last mark to `stage`.
    pub fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        let spent = now - self.mark;
        self.mark = now;
        let t = &mut self.tallies[stage as usize];
        t.busy += spent;
        t.laps += 1;
        t.nanos.saturating_record(spent.as_nanos().min(LONGEST_LAP_NS as u128) as u64);
    }

    /// Time from the start to the last mark: what the stages add up to.
    pub fn wall(&self) -> Duration {
        self.mark - self.started
    }

    /// Times of one stage.
    pub fn stage(&self, stage: Stage) -> StageTime {
        let t = &self.tallies[stage as usize];
        let at = |q| Duration::from_nanos(t.nanos.value_at_quantile(q));
        StageTime { busy: t.busy, laps: t.laps, p50: at(0.5), p99: at(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_add_up_to_the_wall() {
        let mut m = Meter::new();
        for i in 0..100u64 {
            std::hint::black_box((0..i * 50).sum::<u64>());
            m.lap(Stage::ALL[i as usize % Stage::ALL.len()]);
        }
        let sum: Duration = Stage::ALL.iter().map(|&s| m.stage(s).busy).sum();
        assert_eq!(sum, m.wall());
        assert_eq!(Stage::ALL.iter().map(|&s| m.stage(s).laps).sum::<u64>(), 100);
    }

    #[test]
    fn every_stage_has_its_own_tally() {
        for (i, s) in Stage::ALL.iter().enumerate() {
            assert_eq!(*s as usize, i);
        }
    }
}

//! Where a token's time goes.
//!
//! The meter is a chain of laps: each lap gives the time since the last mark to one stage, so the stages add up to the
//! measured wall time by construction. It belongs to the engine thread and takes no lock.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::limits::DURATION_NS_MAX;

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
    /// Making what an expert is held as of what was read, where that is something else.
    Quantize,
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
    pub const ALL: [Stage; 14] = [
        Stage::Embed,
        Stage::Attention,
        Stage::Route,
        Stage::Request,
        Stage::Hint,
        Stage::Shared,
        Stage::Dense,
        Stage::Wait,
        Stage::Quantize,
        Stage::Experts,
        Stage::Reduce,
        Stage::Head,
        Stage::Sample,
        Stage::Other,
    ];

    /// Whether it is arithmetic on the way to a token, and not waiting, bookkeeping or what the caller does.
    pub fn computes(self) -> bool {
        !matches!(self, Stage::Request | Stage::Wait | Stage::Other)
    }

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
            Stage::Quantize => "quantize",
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
    spread: Durations,
}

/// How often durations came, told apart by two significant digits, in memory that is allocated once.
#[derive(Clone, Debug)]
pub struct Durations {
    nanos: Histogram<u64>,
}

impl Default for Durations {
    fn default() -> Durations {
        Durations::new()
    }
}

impl Durations {
    /// None yet.
    pub fn new() -> Durations {
        // These bounds are valid, so this cannot fail.
        Durations { nanos: Histogram::new_with_bounds(1, DURATION_NS_MAX, 2).expect("constant histogram bounds") }
    }

    /// One more.
    pub fn record(&mut self, took: Duration) {
        self.nanos.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.nanos.reset();
    }

    /// The least duration that this share of them does not exceed; `None` of none.
    pub fn at(&self, share: f64) -> Option<Duration> {
        (!self.nanos.is_empty()).then(|| Duration::from_nanos(self.nanos.value_at_quantile(share)))
    }
}

/// Some of some things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Share {
    /// How many there were.
    pub of: u64,
    /// How many of them are meant.
    pub count: u64,
}

impl Share {
    /// As a fraction; none of nothing.
    pub fn fraction(self) -> Option<f64> {
        (self.of > 0).then(|| self.count as f64 / self.of as f64)
    }

    /// Counts `these`, and those of them that are in `those`.
    pub fn add(&mut self, these: &[u16], those: &[u16]) {
        self.of += these.len() as u64;
        self.count += these.iter().filter(|id| those.contains(id)).count() as u64;
    }

    /// Counts what `other` counted.
    pub fn add_all(&mut self, other: Share) {
        self.of += other.of;
        self.count += other.count;
    }
}

/// One visit of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lap {
    /// Which stage.
    pub stage: Stage,
    /// Model layer it belonged to.
    pub layer: Option<u16>,
    /// When it began.
    pub began: Instant,
    /// How long it took.
    pub took: Duration,
}

/// The last elements of a sequence of any length, in memory that is allocated once.
#[derive(Clone, Debug)]
pub struct Recent<T> {
    kept: Vec<T>,
    /// Where the next one goes once all places are taken.
    next: usize,
}

impl<T> Recent<T> {
    /// Room for `most`; none keeps nothing.
    pub fn new(most: usize) -> Recent<T> {
        Recent { kept: Vec::with_capacity(most), next: 0 }
    }

    /// Adds one, in place of the oldest where all places are taken.
    pub fn push(&mut self, element: T) {
        if self.kept.len() < self.kept.capacity() {
            self.kept.push(element);
        } else if let Some(oldest) = self.kept.get_mut(self.next) {
            *oldest = element;
            self.next = (self.next + 1) % self.kept.len();
        }
    }

    /// From the oldest to the newest.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        let (newer, older) = self.kept.split_at(self.next.min(self.kept.len()));
        older.iter().chain(newer)
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.kept.clear();
        self.next = 0;
    }
}

/// Collects stage times; see the module's description.
pub struct Meter {
    tallies: Vec<Tally>,
    mark: Instant,
    started: Instant,
    layer: Option<u16>,
    /// Empty unless a timeline is kept.
    laps: Recent<Lap>,
}

impl Default for Meter {
    fn default() -> Self {
        Meter::new()
    }
}

impl Meter {
    /// A meter whose clock starts now. All memory it will ever use is allocated here.
    pub fn new() -> Meter {
        Meter::with_timeline(0)
    }

    /// As [`Meter::new`]; the last `laps` laps can be had one by one.
    pub fn with_timeline(laps: usize) -> Meter {
        let tally = || Tally { busy: Duration::ZERO, laps: 0, spread: Durations::new() };
        let now = Instant::now();
        let tallies = Stage::ALL.iter().map(|_| tally()).collect();
        Meter { tallies, mark: now, started: now, layer: None, laps: Recent::new(laps) }
    }

    /// Forgets everything and starts the clock again.
    pub fn restart(&mut self) {
        for t in &mut self.tallies {
            t.busy = Duration::ZERO;
            t.laps = 0;
            t.spread.clear();
        }
        self.laps.clear();
        self.started = Instant::now();
        self.mark = self.started;
    }

    /// The laps from now on belong to `layer`.
    pub fn enter(&mut self, layer: Option<u16>) {
        self.layer = layer;
    }

    /// The last laps, where a timeline is kept.
    pub fn laps(&self) -> impl Iterator<Item = &Lap> {
        self.laps.iter()
    }

    /// When the clock was started.
    pub fn started(&self) -> Instant {
        self.started
    }

    /// Gives the time since the last mark to `stage`.
    pub fn lap(&mut self, stage: Stage) {
        let now = Instant::now();
        let spent = now - self.mark;
        self.laps.push(Lap { stage, layer: self.layer, began: self.mark, took: spent });
        self.mark = now;
        let t = &mut self.tallies[stage as usize];
        t.busy += spent;
        t.laps += 1;
        t.spread.record(spent);
    }

    /// Time from the start to the last mark: what the stages add up to.
    pub fn wall(&self) -> Duration {
        self.mark - self.started
    }

    /// Times of one stage.
    pub fn stage(&self, stage: Stage) -> StageTime {
        let t = &self.tallies[stage as usize];
        let at = |share| t.spread.at(share).unwrap_or_default();
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
    fn the_last_laps_are_kept_in_order_and_with_their_layer() {
        let mut m = Meter::with_timeline(3);
        let stages = [Stage::Embed, Stage::Attention, Stage::Route, Stage::Dense, Stage::Head];
        for (layer, &stage) in stages.iter().enumerate() {
            m.enter(Some(layer as u16));
            m.lap(stage);
        }
        let laps: Vec<&Lap> = m.laps().collect();
        assert_eq!(
            laps.iter().map(|lap| (lap.stage, lap.layer)).collect::<Vec<_>>(),
            [(Stage::Route, Some(2)), (Stage::Dense, Some(3)), (Stage::Head, Some(4)),]
        );
        assert!(laps.windows(2).all(|pair| pair[0].began + pair[0].took == pair[1].began));
        m.restart();
        assert_eq!(m.laps().count(), 0);
        assert_eq!(Meter::new().laps.kept.capacity(), 0);
    }

    #[test]
    fn percentiles_are_within_a_hundredth_of_the_least_duration_that_enough_do_not_exceed() {
        let mut durations = Durations::new();
        assert_eq!(durations.at(0.5), None);
        // 1 to 100 ms, in the wrong order.
        (1..=100).rev().for_each(|ms| durations.record(Duration::from_millis(ms)));
        for (share, ms) in [(0.5, 50.0), (0.99, 99.0), (1.0, 100.0), (0.0, 1.0)] {
            let at = durations.at(share).unwrap().as_secs_f64() * 1e3;
            assert!((at / ms - 1.0).abs() <= 0.01, "{share}: {at} ms");
        }
        durations.clear();
        durations.record(Duration::from_secs(3600));
        assert!(durations.at(0.5).unwrap() >= Duration::from_secs(594), "the longest that is told apart");
    }

    #[test]
    fn every_stage_has_its_own_tally() {
        for (i, s) in Stage::ALL.iter().enumerate() {
            assert_eq!(*s as usize, i);
        }
    }
}

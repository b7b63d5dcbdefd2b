//! Which drive serves a request where several hold the bytes. Pure bookkeeping, without any I/O.
//!
//! A request goes to the drive that would have it done first: bytes the drive has in hand and those of the request, at
//! the rate the drive showed while it was busy. Drives that are kept busy so share in the ratio of their rates, and a
//! drive so slow that it needs longer for one request than the others for all they hold gets none.
//!
//! A drive whose rate is not known counts as fast as the fastest, and gets no more than [`UNKNOWN_CALLS_MAX`] requests
//! before it answers one; the others are not given all there is meanwhile, as its answer may be near. A rate is a memory, so it is forgotten: that of a drive that was left out, after the others
//! have worked for [`PROBE_PAUSES`] times as long as it needed for a request, which bounds what asking again costs. A
//! drive that owes its answer for much longer than its rate allows gets nothing until it gives it.

use crate::device::Priority;
use crate::device::schedule::RequestCap;
use crate::drive::{DriveSet, DriveStats};
use crate::limits::{
    LOOKAHEAD_BYTES, LOOKAHEAD_CALLS, LOOKAHEAD_NS, PROBE_PAUSE_NS_MAX, PROBE_PAUSES, RATE_WINDOW_NS, STALL_NS_MIN,
    STALL_TIMES, UNKNOWN_CALLS_MAX,
};

/// What each drive has in hand, how fast it is, and how much more it may be given.
pub(crate) struct Router {
    lanes: Vec<Lane>,
    /// Of each drive.
    depth_bytes: u64,
    calls_max: usize,
    calls_out: usize,
    /// Time during which some drive had a request, up to `clock_ns`.
    worked_ns: u64,
    clock_ns: u64,
}

/// One drive.
#[derive(Clone, Debug, Default)]
struct Lane {
    /// Bound by the drive's queue, where it is known.
    cap: Option<RequestCap>,
    bytes_out: u64,
    requests_out: u64,
    calls_out: usize,
    /// Last result, or the request that ended a time without any.
    since_ns: u64,
    /// `Router::worked_ns` at the last result.
    left_ns: u64,
    /// Bytes and busy time of late: the rate is their quotient. Both are halved when the time gets long, and none when
    /// the rate is to be asked again.
    recent_bytes: u64,
    recent_ns: u64,
    stats: DriveStats,
}

impl Router {
    /// One lane for each of `caps`; `depth_bytes` and `calls_max` bound what each may have in hand.
    pub fn new(caps: &[Option<RequestCap>], depth_bytes: u64, calls_max: usize) -> Router {
        let lanes = caps.iter().map(|cap| Lane { cap: *cap, ..Lane::default() }).collect();
        Router { lanes, depth_bytes, calls_max, calls_out: 0, worked_ns: 0, clock_ns: 0 }
    }

    /// Calls made and not completed.
    pub fn calls_out(&self) -> usize {
        self.calls_out
    }

    pub fn stats(&self) -> impl Iterator<Item = DriveStats> {
        self.lanes.iter().map(|lane| DriveStats { owed: lane.calls_out, ..lane.stats })
    }

    /// The drive of `copies` to read `len` bytes from now; `None` where the best one has no room for them, as waiting
    /// for it is then quicker than asking another.
    pub fn choose(&mut self, copies: DriveSet, len: u32, priority: Priority, now_ns: u64) -> Option<usize> {
        if copies.len() <= 1 {
            return copies.first().filter(|drive| self.fits(*drive, len, priority));
        }
        let best = self.soonest(copies, len, now_ns);
        if let Some(due) = copies.iter().find(|drive| Some(*drive) != best && self.is_due(*drive, len)) {
            let lane = &mut self.lanes[due];
            (lane.recent_bytes, lane.recent_ns) = (0, 0);
            return Some(due);
        }
        let known = |lane: &Lane| lane.rate().is_some() || lane.calls_out < UNKNOWN_CALLS_MAX;
        best.filter(|drive| known(&self.lanes[*drive]) && self.fits(*drive, len, priority))
    }

    /// The drive of `copies` that would have `len` bytes first, whether it has room for them now or not.
    pub fn soonest(&self, copies: DriveSet, len: u32, now_ns: u64) -> Option<usize> {
        let fastest = self.fastest();
        let stalled = |drive: usize| self.lanes[drive].stalls_ns(fastest).is_some_and(|at| at <= now_ns);
        let all_stalled = copies.iter().all(stalled);
        let mut best: Option<(usize, f64)> = None;
        for drive in copies.iter().filter(|drive| all_stalled || !stalled(*drive)) {
            let lane = &self.lanes[drive];
            let rate = lane.rate().or(fastest).unwrap_or(1.0);
            let done_in = (lane.bytes_out + u64::from(len)) as f64 / rate;
            if best.is_none_or(|(_, sooner)| done_in < sooner) {
                best = Some((drive, done_in));
            }
        }
        best.map(|(drive, _)| drive)
    }

    /// Whether `drive` may have `len` bytes more in hand. One request always passes, or a depth below the request size
    /// would stop everything.
    ///
    /// A guess is read only where the drive has nothing to do, or soon would have: a demand that comes next waits for what
    /// is in its hands, and a guess that turns out wrong cannot be called back from there.
    pub fn fits(&self, drive: usize, len: u32, priority: Priority) -> bool {
        let lane = &self.lanes[drive];
        let calls_max = match priority {
            Priority::Demand => self.calls_max,
            Priority::Lookahead if !lane.is_through_within(LOOKAHEAD_NS) => 1,
            // However small requests are made: small ones are no more in hand than large ones would be.
            Priority::Lookahead if lane.bytes_out + u64::from(len) <= LOOKAHEAD_BYTES => self.calls_max,
            Priority::Lookahead => self.calls_max.min(LOOKAHEAD_CALLS),
        };
        let queue = |cap: RequestCap| lane.requests_out + cap.taken_by(len) <= cap.requests;
        let room = lane.bytes_out + u64::from(len) <= self.depth_bytes && lane.cap.is_none_or(queue);
        lane.calls_out == 0 || (room && lane.calls_out < calls_max)
    }

    /// A call for `len` bytes goes to `drive`.
    pub fn went(&mut self, drive: usize, len: u32, now_ns: u64) {
        self.tick(now_ns);
        let lane = &mut self.lanes[drive];
        if lane.calls_out == 0 {
            lane.since_ns = now_ns;
        }
        lane.bytes_out += u64::from(len);
        lane.requests_out += lane.cap.map_or(0, |cap| cap.taken_by(len));
        lane.calls_out += 1;
        self.calls_out += 1;
    }

    /// A call for `len` bytes comes back from `drive` with `arrived` of them.
    pub fn came(&mut self, drive: usize, len: u32, arrived: u64, now_ns: u64) {
        self.tick(now_ns);
        let lane = &mut self.lanes[drive];
        lane.bytes_out -= u64::from(len);
        lane.requests_out -= lane.cap.map_or(0, |cap| cap.taken_by(len));
        lane.calls_out -= 1;
        self.calls_out -= 1;
        let busy_ns = now_ns.saturating_sub(lane.since_ns);
        lane.since_ns = lane.since_ns.max(now_ns);
        lane.left_ns = self.worked_ns;
        lane.stats.bytes += arrived;
        lane.stats.busy_ns += busy_ns;
        lane.recent_bytes += arrived;
        lane.recent_ns += busy_ns;
        if lane.recent_ns > RATE_WINDOW_NS {
            lane.recent_bytes /= 2;
            lane.recent_ns /= 2;
        }
    }

    /// When the next drive gets so late that it is waited for no longer.
    pub fn next_stall_ns(&self, now_ns: u64) -> Option<u64> {
        let others = self.lanes.len() > 1;
        let fastest = self.fastest();
        self.lanes.iter().filter_map(|lane| lane.stalls_ns(fastest)).filter(|at| others && *at > now_ns).min()
    }

    /// A request was given up at `drive`.
    pub fn failed(&mut self, drive: usize) {
        self.lanes[drive].stats.errors += 1;
    }

    /// Whether `drive` has nothing to do, and its rate is not known or was found so long ago that it is to be asked.
    fn is_due(&self, drive: usize, len: u32) -> bool {
        let lane = &self.lanes[drive];
        if lane.calls_out > 0 {
            return false;
        }
        let Some(rate) = lane.rate() else { return true };
        let pause_ns = (PROBE_PAUSES as f64 * f64::from(len) / rate).min(PROBE_PAUSE_NS_MAX as f64);
        (self.worked_ns - lane.left_ns) as f64 > pause_ns
    }

    /// The rate of the fastest drive, which is taken for that of one that has not shown any.
    fn fastest(&self) -> Option<f64> {
        self.lanes.iter().filter_map(Lane::rate).reduce(f64::max)
    }

    fn tick(&mut self, now_ns: u64) {
        if self.calls_out > 0 {
            self.worked_ns += now_ns.saturating_sub(self.clock_ns);
        }
        self.clock_ns = self.clock_ns.max(now_ns);
    }
}

impl Lane {
    /// Bytes a nanosecond; `None` before anything came.
    fn rate(&self) -> Option<f64> {
        (self.recent_bytes > 0 && self.recent_ns > 0).then(|| self.recent_bytes as f64 / self.recent_ns as f64)
    }

    /// Whether the drive, at the rate it has shown, would be done with what it has in hand.
    fn is_through_within(&self, ns: u64) -> bool {
        self.rate().is_some_and(|rate| self.bytes_out as f64 <= rate * ns as f64)
    }

    /// When an answer is owed for [`STALL_TIMES`] as long as everything in hand should take, at the drive's own rate or
    /// the `assumed` one, unless a result comes before.
    fn stalls_ns(&self, assumed: Option<f64>) -> Option<u64> {
        let rate = self.rate().or(assumed).filter(|_| self.calls_out > 0)?;
        let expected_ns = (STALL_TIMES as f64 * self.bytes_out as f64 / rate) as u64;
        Some(self.since_ns.saturating_add(expected_ns).saturating_add(STALL_NS_MIN).saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;
    const CHUNK: u32 = 2 << 20;
    const DEPTH: u64 = 64 * MIB;

    /// Drives that serve one request after the other, each at a rate that time may change, and requests that never
    /// run out before `chunks` are done.
    struct Race<'a> {
        rates: &'a dyn Fn(usize, u64) -> f64,
        router: Router,
        /// What each drive has in hand: due times, in order.
        queues: Vec<std::collections::VecDeque<u64>>,
        now_ns: u64,
        done: Vec<u64>,
    }

    impl<'a> Race<'a> {
        fn new(drives: usize, rates: &'a dyn Fn(usize, u64) -> f64) -> Race<'a> {
            let router = Router::new(&vec![None; drives], DEPTH, usize::MAX);
            let queues = vec![std::collections::VecDeque::new(); drives];
            Race { rates, router, queues, now_ns: 0, done: vec![0; drives] }
        }

        /// Runs `chunks` more requests; `false` where nothing more would ever answer.
        fn run(&mut self, chunks: usize) -> bool {
            let all = (0..self.queues.len()).fold(DriveSet::default(), DriveSet::with);
            let (mut left, mut out) = (chunks, self.router.calls_out());
            while left > 0 || out > 0 {
                while left > 0
                    && let Some(drive) = self.router.choose(all, CHUNK, Priority::Demand, self.now_ns)
                {
                    self.router.went(drive, CHUNK, self.now_ns);
                    let start = self.queues[drive].back().map_or(self.now_ns, |last| (*last).max(self.now_ns));
                    let takes = f64::from(CHUNK) / (self.rates)(drive, start);
                    self.queues[drive].push_back(start.saturating_add(takes as u64));
                    (left, out) = (left - 1, out + 1);
                }
                let due = |drive: &usize| self.queues[*drive].front().copied().unwrap_or(u64::MAX);
                let Some(drive) = (0..self.queues.len()).min_by_key(due).filter(|drive| due(drive) < u64::MAX) else {
                    return false;
                };
                self.now_ns = self.now_ns.max(due(&drive));
                self.queues[drive].pop_front();
                self.router.came(drive, CHUNK, u64::from(CHUNK), self.now_ns);
                self.done[drive] += u64::from(CHUNK);
                out -= 1;
            }
            true
        }
    }

    #[test]
    fn bytes_are_shared_in_the_ratio_of_the_rates() {
        let rates = |drive: usize, _| [0.5, 1.5][drive];
        let mut race = Race::new(2, &rates);
        assert!(race.run(2048));
        // 4 GiB at 1:3: a drive that is never idle does a quarter, give or take what the other has in hand at the end.
        assert!(race.done[0].abs_diff(1024 * MIB) <= DEPTH, "{:?}", race.done);
        // 4 GiB at 2 bytes a nanosecond are 2.147 s; at the end one drive may wait for a request of the slower one.
        assert!(race.now_ns < 2_147_483_648 + 2 * 4_194_304, "{}", race.now_ns);
        let stats: Vec<DriveStats> = race.router.stats().collect();
        assert_eq!([stats[0].bytes, stats[1].bytes], race.done[..]);
        assert!(stats.iter().all(|drive| drive.busy_ns <= race.now_ns && drive.busy_ns > race.now_ns / 10 * 9));
    }

    #[test]
    fn a_drive_that_stops_answering_holds_no_more_than_it_has() {
        // From 100 ms on a request to the second drive takes for ever.
        let rates = |drive: usize, at: u64| if drive == 1 && at > 100_000_000 { 1e-9 } else { 1.0 };
        let mut race = Race::new(2, &rates);
        // The race ends with the answers of the second drive, after half an hour and more each.
        assert!(race.run(2000));
        let in_time = race.done[1].min(100 * MIB);
        assert!(race.done[1] - in_time <= DEPTH + 2 * u64::from(CHUNK), "{:?}", race.done);
        assert!(race.done[0] >= 2000 * u64::from(CHUNK) - 100 * MIB - 2 * DEPTH, "{:?}", race.done);
    }

    #[test]
    fn a_drive_that_was_slow_is_found_again() {
        // Slow by a factor of 200 until five seconds have passed, then equal.
        let rates = |drive: usize, at: u64| if drive == 1 && at < 5_000_000_000 { 0.005 } else { 1.0 };
        let mut race = Race::new(2, &rates);
        while race.now_ns < 5_000_000_000 {
            assert!(race.run(64));
        }
        assert!(race.done[1] < race.done[0] / 20, "it was left out while slow: {:?}", race.done);
        // It needed 420 ms for a request, so the others work for 32 times as long, 13.4 s, until it is asked again.
        while race.now_ns < 20_000_000_000 {
            assert!(race.run(64));
        }
        let before = race.done.clone();
        assert!(race.run(4096));
        let shares = [race.done[0] - before[0], race.done[1] - before[1]];
        assert!(shares[0].abs_diff(shares[1]) <= 2 * DEPTH, "{shares:?}");
    }

    #[test]
    fn one_request_at_a_time_still_finds_the_faster_drive() {
        // Nothing is ever in hand when a drive is chosen: only its rate tells.
        for fast in 0..2 {
            let rates = |drive: usize, _| if drive == fast { 2.0 } else { 0.5 };
            let mut race = Race::new(2, &rates);
            for _ in 0..400 {
                assert!(race.run(1));
            }
            // After the first answers the slow one is asked once in the time of 32 of its requests, 128 of the fast.
            assert!((1..=6).contains(&(race.done[1 - fast] / u64::from(CHUNK))), "{:?}", race.done);
        }
    }

    #[test]
    fn lookahead_has_two_requests_of_a_fast_drive_and_one_of_a_slow_one() {
        let all = DriveSet::FIRST.with(1);
        let mut router = Router::new(&[None; 2], 4 * u64::from(CHUNK), usize::MAX);
        let fill = |router: &mut Router, priority| {
            let mut given = [0, 0];
            while let Some(drive) = router.choose(all, CHUNK, priority, 0) {
                router.went(drive, CHUNK, 0);
                given[drive] += 1;
            }
            given
        };
        // One answer each, so that their rates are known: they need 1 and 4 ms for a request.
        for drive in 0..2 {
            router.went(drive, CHUNK, 0);
            router.came(drive, CHUNK, u64::from(CHUNK), [1, 4][drive] * 1_000_000);
        }
        assert_eq!(fill(&mut router, Priority::Lookahead), [2, 0], "the fast one is worth waiting for");
        let slow = DriveSet::default().with(1);
        assert_eq!(router.choose(slow, CHUNK, Priority::Lookahead, 0), Some(1));
        router.went(1, CHUNK, 0);
        assert_eq!(router.choose(slow, CHUNK, Priority::Lookahead, 0), None);
        assert_eq!(fill(&mut router, Priority::Demand), [2, 0]);
        assert_eq!(fill(&mut router, Priority::Lookahead), [0, 0]);
    }

    #[test]
    fn the_first_to_answer_does_not_get_everything_while_the_others_are_about_to() {
        // By a hair the first: everything would be in its hand before the others have shown that they are as fast.
        let rates = |drive: usize, _| [2.318, 1.638, 1.776, 2.157][drive];
        let mut race = Race::new(4, &rates);
        assert!(race.run(64));
        // 128 MiB at 7.889 bytes a nanosecond are 17.0 ms; the slowest needs 1.28 ms for a request, and one is more
        // or less at the end.
        assert!(race.now_ns < 17_013_000 + 2 * 1_280_000, "{}", race.now_ns);
    }

    #[test]
    fn a_fast_drive_never_takes_the_threads_of_a_slow_one() {
        let all = DriveSet::FIRST.with(1);
        // Eight threads for two drives, one eight times as fast: by bytes alone it would get all of them.
        let mut router = Router::new(&[None; 2], DEPTH, 4);
        for (drive, takes_ns) in [(0, 8_000_000), (1, 1_000_000)] {
            router.went(drive, CHUNK, router.clock_ns);
            router.came(drive, CHUNK, u64::from(CHUNK), router.clock_ns + takes_ns);
        }
        let now_ns = router.clock_ns;
        let mut given = [0, 0];
        while let Some(drive) = router.choose(all, CHUNK, Priority::Demand, now_ns) {
            router.went(drive, CHUNK, now_ns);
            given[drive] += 1;
        }
        assert_eq!(given, [0, 4], "the fast one is worth waiting for");
        // It hangs: what it has should take 4 ms, and is waited for four times as long and 50 ms.
        let later = now_ns + 4 * 4_000_000 + STALL_NS_MIN;
        assert_eq!(router.choose(all, CHUNK, Priority::Demand, later - 1000), None);
        let left = router.choose(all, CHUNK, Priority::Demand, later + 1000);
        assert_eq!(left, Some(0), "four threads are left for the other");
    }

    proptest! {
        /// Against the two stupid ways: everything to the fastest drive, and the same share to each.
        #[test]
        fn no_worse_than_the_fastest_alone_or_equal_shares(
            rates in proptest::collection::vec(0.02f64..3.0, 2..5), chunks in 64usize..1500
        ) {
            let rate = |drive: usize, _: u64| rates[drive];
            let mut race = Race::new(rates.len(), &rate);
            prop_assert!(race.run(chunks));
            prop_assert_eq!(race.done.iter().sum::<u64>(), chunks as u64 * u64::from(CHUNK));
            let bytes = chunks as f64 * f64::from(CHUNK);
            let (slowest, fastest) = rates.iter().fold((f64::MAX, 0f64), |(s, f), rate| (s.min(*rate), f.max(*rate)));
            let equal = bytes / rates.len() as f64 / slowest;
            // What is asked of a drive before it is known, and at most one more each of a last round.
            let asking = (UNKNOWN_CALLS_MAX + 1) as f64 * f64::from(CHUNK) / slowest;
            let stupid = (bytes / fastest).min(equal);
            prop_assert!(race.now_ns as f64 <= stupid + asking, "{} ns, {stupid} and {asking}", race.now_ns);
            // Nor much worse than all of them together could do.
            let ideal = bytes / rates.iter().sum::<f64>();
            let slack = asking + DEPTH as f64 / fastest;
            prop_assert!(race.now_ns as f64 <= ideal * 1.1 + slack, "{} ns, {ideal} and {slack}", race.now_ns);
        }
    }
}

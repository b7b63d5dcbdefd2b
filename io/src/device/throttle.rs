//! Another device's reads, given back no earlier than a drive of given latency, bandwidth and parallelism would have
//! them done: what overlap and lookahead are worth on drives that this machine does not have can be measured on it.
//!
//! Time is real. A read goes to the inner device at once, and its completion is held back until the drive that is played
//! would be done with it, so the inner device has to be the faster one. The played drive takes reads from its own queue,
//! demands before lookahead and else in the order of submission, and a guess only when it is nearly out of work, as the
//! other devices do; once it has begun a read, nothing stops it.

use std::time::{Duration, Instant};

use crate::device::{Completion, Device, DeviceReport, DeviceStats, Priority, Read, RejectReason, Rejected, Wait};
use crate::drive::DriveStats;
use crate::error::IoError;
use crate::limits::{LOOKAHEAD_CALLS, LOOKAHEAD_NS, QUEUE_READS, QUEUE_READS_MAX, THROTTLE_SPIN};
use crate::pool::Slab;

/// The drive that is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleConfig {
    /// From the moment the drive begins a read to its first byte. Reads that are served together wait together.
    pub latency: Duration,
    /// Bytes a second, of all reads together: there is one way out of the drive.
    pub bytes_per_s: u64,
    /// Reads served at a time. With 1, no read begins before the one ahead of it is done.
    pub parallelism: usize,
    /// Most reads queued, served and not yet reaped together.
    pub queue: usize,
}

impl Default for ThrottleConfig {
    /// A drive that delays nothing.
    fn default() -> ThrottleConfig {
        ThrottleConfig { latency: Duration::ZERO, bytes_per_s: u64::MAX, parallelism: QUEUE_READS, queue: QUEUE_READS }
    }
}

/// Slows `inner` down to the drive that `cfg` describes.
///
/// # Errors
/// [`IoError::BadRequest`] where a bound is zero or the queue is longer than any device's.
pub fn throttled(inner: Box<dyn Device>, cfg: &ThrottleConfig) -> Result<Box<dyn Device>, IoError> {
    if cfg.bytes_per_s == 0 || cfg.parallelism == 0 || cfg.queue == 0 || cfg.queue > QUEUE_READS_MAX {
        let what = format!("a throttled device needs bandwidth, parallelism and a queue up to {QUEUE_READS_MAX}");
        return Err(IoError::BadRequest { what });
    }
    let mut report = inner.describe().clone();
    report.notes.push(format!(
        "slowed down to {:.3} GB/s, {:.3} ms a read, {} at a time",
        cfg.bytes_per_s as f64 / 1e9,
        cfg.latency.as_secs_f64() * 1e3,
        cfg.parallelism
    ));
    report.name = "throttled";
    Ok(Box::new(Throttle { inner, drive: Drive::new(cfg), dead: None, epoch: Instant::now(), report }))
}

struct Throttle {
    inner: Box<dyn Device>,
    drive: Drive,
    /// What the inner device died of.
    dead: Option<IoError>,
    epoch: Instant,
    report: DeviceReport,
}

impl Throttle {
    fn now_ns(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Takes what the inner device has finished, waiting for it as long as `wait` allows.
    fn land(&mut self, wait: Wait) {
        let mut wait = wait;
        while self.dead.is_none() {
            match self.inner.reap(wait) {
                Ok(Some(done)) => self.drive.land(done),
                Ok(None) => return,
                Err(dead) => {
                    self.drive.lose();
                    self.dead = Some(dead);
                }
            }
            wait = Wait::No;
        }
    }

    /// Lets time pass until something may have happened, at most `left`.
    fn pause(&mut self, left: Duration) {
        let due = self.drive.next_due_ns();
        let until_due = due.map_or(Duration::MAX, |due| Duration::from_nanos(due.saturating_sub(self.now_ns())));
        // An unbounded wait is cut into long ones; the caller looks again.
        let pause = until_due.min(left).min(Duration::from_secs(60));
        if self.inner.in_flight() > 0 {
            return self.land(Wait::AtMost(pause));
        }
        // The system wakes a sleeper late; a read held back for that long would be a slower drive than asked for.
        let until = Instant::now() + pause;
        std::thread::sleep(pause.saturating_sub(THROTTLE_SPIN));
        while Instant::now() < until {
            std::hint::spin_loop();
        }
    }
}

impl Device for Throttle {
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected> {
        self.land(Wait::No);
        if let Some(dead) = &self.dead {
            let why = RejectReason::Dead(dead.clone());
            return Err(Rejected { slab, read, why });
        }
        let now_ns = self.now_ns();
        self.drive.advance(now_ns);
        let Some(entry) = self.drive.free_entry() else {
            return Err(Rejected { slab, read, why: RejectReason::Full });
        };
        match self.inner.submit(Read { tag: entry.into(), ..read }, slab) {
            Ok(()) => {
                self.drive.begin(entry, &read, now_ns);
                Ok(())
            }
            Err(rejected) => Err(Rejected { read, ..rejected }),
        }
    }

    fn reap(&mut self, wait: Wait) -> Result<Option<Completion>, IoError> {
        let asked = Instant::now();
        loop {
            self.land(Wait::No);
            self.drive.advance(self.now_ns());
            if let Some(done) = self.drive.take_done() {
                return Ok(Some(done));
            }
            if self.drive.in_flight() == 0 {
                return self.dead.clone().map_or(Ok(None), Err);
            }
            let left = match wait {
                Wait::No => Duration::ZERO,
                Wait::Block => Duration::MAX,
                Wait::AtMost(limit) => limit.saturating_sub(asked.elapsed()),
            };
            if left.is_zero() {
                return Ok(None);
            }
            self.pause(left);
        }
    }

    fn in_flight(&self) -> usize {
        self.drive.in_flight()
    }

    fn cancel_lookahead(&mut self) -> usize {
        self.land(Wait::No);
        self.drive.advance(self.now_ns());
        // The inner device goes on with them: it may not have begun a read that the played drive has.
        self.drive.cancel_lookahead()
    }

    fn promote(&mut self, tag: u64) {
        self.drive.advance(self.now_ns());
        for entry in self.drive.promote(tag) {
            self.inner.promote(u64::from(entry));
        }
    }

    fn drives(&self) -> Vec<DriveStats> {
        self.inner.drives()
    }

    fn stats(&self) -> DeviceStats {
        let DeviceStats { retries, cpu_ns, .. } = self.inner.stats();
        DeviceStats { retries, cpu_ns, ..self.drive.stats_at(self.now_ns()) }
    }

    fn describe(&self) -> &DeviceReport {
        &self.report
    }
}

/// The played drive: queue, lanes and the one way out, on a clock that the caller moves.
struct Drive {
    cfg: ThrottleConfig,
    entries: Vec<Option<Entry>>,
    /// Entries that hold a read.
    held: usize,
    waiting: usize,
    served: usize,
    /// Submissions so far.
    submitted: u64,
    /// When the way out has carried everything that was begun.
    free_at_ns: u64,
    clock_ns: u64,
    stats: DeviceStats,
}

struct Entry {
    tag: u64,
    priority: Priority,
    order: u64,
    bytes: u64,
    useful_bytes: u64,
    submitted_ns: u64,
    /// When the played drive began with it.
    begun_ns: u64,
    phase: Phase,
    /// What the inner device returned, and when on this clock.
    landed: Option<(Completion, u64)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Served { due_ns: u64 },
    Done { at_ns: u64 },
    Cancelled,
}

impl Drive {
    fn new(cfg: &ThrottleConfig) -> Drive {
        Drive {
            entries: (0..cfg.queue).map(|_| None).collect(),
            cfg: *cfg,
            held: 0,
            waiting: 0,
            served: 0,
            submitted: 0,
            free_at_ns: 0,
            clock_ns: 0,
            stats: DeviceStats::default(),
        }
    }

    /// A place for a read.
    fn free_entry(&self) -> Option<u32> {
        self.entries.iter().position(Option::is_none).map(|entry| entry as u32)
    }

    /// Queues a read at the place that [`Drive::free_entry`] named.
    fn begin(&mut self, entry: u32, read: &Read, now_ns: u64) {
        self.submitted += 1;
        self.entries[entry as usize] = Some(Entry {
            tag: read.tag,
            priority: read.priority,
            order: self.submitted,
            bytes: read.segments.len_bytes(),
            useful_bytes: read.segments.iter().map(|segment| u64::from(segment.want)).sum(),
            submitted_ns: now_ns,
            begun_ns: now_ns,
            phase: Phase::Waiting,
            landed: None,
        });
        self.held += 1;
        self.waiting += 1;
        self.advance(now_ns);
    }

    /// Takes a completion of the inner device, tagged with its entry.
    fn land(&mut self, done: Completion) {
        let Some(entry) = &mut self.entries[done.tag as usize] else {
            unreachable!("the inner device completed entry {}, which holds no read", done.tag)
        };
        let at_ns = entry.submitted_ns.saturating_add(done.took().as_nanos() as u64);
        entry.landed = Some((done, at_ns));
    }

    /// Forgets the reads that the inner device will never return.
    fn lose(&mut self) {
        for slot in &mut self.entries {
            if let Some(lost) = slot.take_if(|entry| entry.landed.is_none()) {
                self.held -= 1;
                self.waiting -= usize::from(lost.phase == Phase::Waiting);
                self.served -= usize::from(matches!(lost.phase, Phase::Served { .. }));
            }
        }
    }

    /// Moves the clock to `now_ns`, in steps of what happens until then.
    fn advance(&mut self, now_ns: u64) {
        loop {
            while self.served < self.cfg.parallelism && self.serve_next() {}
            let ends = self.entries.iter().enumerate().filter_map(|(i, entry)| Some((entry.as_ref()?.end_ns()?, i)));
            let end = ends.min();
            let guess_ns = self.guess_ns().filter(|at| *at > self.clock_ns && end.is_none_or(|(end, _)| *at < end));
            match (guess_ns, end) {
                (Some(at), _) if at <= now_ns => self.tick(at),
                (None, Some((end_ns, entry))) if end_ns <= now_ns => self.end(entry, end_ns),
                _ => break,
            }
        }
        self.tick(now_ns);
    }

    /// From when on a guess may be begun beside what is being served: when that is nearly done.
    fn guess_ns(&self) -> Option<u64> {
        let waits = self.waiting > 0 && self.served < LOOKAHEAD_CALLS.min(self.cfg.parallelism);
        waits.then(|| self.free_at_ns.saturating_sub(LOOKAHEAD_NS))
    }

    /// Begins the waiting read whose turn it is.
    fn serve_next(&mut self) -> bool {
        let may_guess = self.served == 0 || self.guess_ns().is_some_and(|at| at <= self.clock_ns);
        let waiting = self.entries.iter_mut().flatten().filter(|entry| entry.phase == Phase::Waiting);
        let next = waiting.min_by_key(|entry| (entry.priority, entry.order));
        let Some(entry) = next.filter(|entry| entry.priority == Priority::Demand || may_guess) else { return false };
        let transfer_ns = u128::from(entry.bytes) * 1_000_000_000 / u128::from(self.cfg.bytes_per_s);
        let first_byte_ns = (self.clock_ns + self.cfg.latency.as_nanos() as u64).max(self.free_at_ns);
        self.free_at_ns = first_byte_ns + transfer_ns as u64;
        entry.begun_ns = self.clock_ns;
        entry.phase = Phase::Served { due_ns: self.free_at_ns };
        self.waiting -= 1;
        self.served += 1;
        true
    }

    fn end(&mut self, entry: usize, end_ns: u64) {
        self.tick(end_ns);
        self.served -= 1;
        let Some(entry) = &mut self.entries[entry] else { return };
        entry.phase = Phase::Done { at_ns: end_ns };
        self.stats.reads += 1;
        if let Some((done, _)) = &entry.landed {
            self.stats.bytes += done.bytes;
            self.stats.useful_bytes += if done.result.is_ok() { entry.useful_bytes } else { 0 };
        }
    }

    /// Brings the time integrals up to `now_ns`.
    fn tick(&mut self, now_ns: u64) {
        self.stats = self.stats_at(now_ns);
        self.clock_ns = self.clock_ns.max(now_ns);
    }

    fn stats_at(&self, now_ns: u64) -> DeviceStats {
        let passed = now_ns.saturating_sub(self.clock_ns);
        let mut stats = self.stats;
        stats.busy_ns += if self.waiting + self.served > 0 { passed } else { 0 };
        stats.queued_ns += passed * self.waiting as u64;
        stats.service_ns += passed * self.served as u64;
        stats
    }

    /// When the next read that is back from the inner device is done.
    fn next_due_ns(&self) -> Option<u64> {
        self.entries.iter().flatten().filter_map(Entry::end_ns).min()
    }

    /// The read that was done first; one that was cancelled as soon as its slab is back.
    fn take_done(&mut self) -> Option<Completion> {
        let over = self.entries.iter_mut().filter_map(|slot| Some((slot.as_ref()?.over_ns()?, slot)));
        let (at_ns, slot) = over.min_by_key(|(at_ns, _)| *at_ns)?;
        let Entry { tag, phase, submitted_ns, begun_ns, landed, .. } = slot.take()?;
        self.held -= 1;
        let (done, _) = landed?;
        let nanos = |from_ns: u64, to_ns: u64| Duration::from_nanos(to_ns.saturating_sub(from_ns));
        Some(match phase {
            Phase::Cancelled => {
                let (queued, service) = (nanos(submitted_ns, at_ns), Duration::ZERO);
                Completion { tag, result: Err(IoError::Cancelled), bytes: 0, queued, service, ..done }
            }
            _ => Completion { tag, queued: nanos(submitted_ns, begun_ns), service: nanos(begun_ns, at_ns), ..done },
        })
    }

    fn in_flight(&self) -> usize {
        self.held
    }

    fn cancel_lookahead(&mut self) -> usize {
        let mut count = 0;
        for entry in self.entries.iter_mut().flatten() {
            if entry.phase == Phase::Waiting && entry.priority == Priority::Lookahead {
                entry.phase = Phase::Cancelled;
                count += 1;
            }
        }
        self.waiting -= count;
        count
    }

    /// Makes demands of the lookahead reads called `tag`; their entries.
    fn promote(&mut self, tag: u64) -> impl Iterator<Item = u32> {
        self.entries.iter_mut().zip(0..).filter_map(move |(slot, at)| {
            let entry = slot.as_mut().filter(|entry| entry.tag == tag && entry.priority == Priority::Lookahead)?;
            entry.priority = Priority::Demand;
            Some(at)
        })
    }
}

impl Entry {
    /// When a read that is being served ends; unknown while the inner device has it.
    fn end_ns(&self) -> Option<u64> {
        match (self.phase, &self.landed) {
            (Phase::Served { due_ns }, Some((_, landed_ns))) => Some(due_ns.max(*landed_ns)),
            _ => None,
        }
    }

    /// When a read was over that can be given back.
    fn over_ns(&self) -> Option<u64> {
        match (self.phase, &self.landed) {
            (Phase::Done { at_ns }, Some(_)) => Some(at_ns),
            (Phase::Cancelled, Some((_, landed_ns))) => Some(*landed_ns),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::FileId;
    use crate::plan::{Segment, Segments};
    use crate::pool::SlabPool;

    const MS: u64 = 1_000_000;
    const BYTES: u32 = 8192;

    /// 3 ms to the first byte and 2 ms a read.
    fn drive(parallelism: usize) -> (Drive, SlabPool) {
        let cfg = ThrottleConfig {
            latency: Duration::from_millis(3),
            bytes_per_s: u64::from(BYTES) * 500,
            parallelism,
            queue: 8,
        };
        (Drive::new(&cfg), SlabPool::new(BYTES as usize, 8).unwrap())
    }

    /// Submits a read whose bytes are there at once.
    fn submit(drive: &mut Drive, pool: &SlabPool, tag: u64, priority: Priority, now_ns: u64) {
        drive.advance(now_ns);
        let entry = drive.free_entry().unwrap();
        let segment = Segment { file: FileId(0), offset: 0, len: BYTES, at: 0, want: 5000 };
        let read = Read { tag, priority, segments: Segments::from_slice(&[segment]).unwrap() };
        drive.begin(entry, &read, now_ns);
        let (slab, result) = (pool.take().unwrap(), Ok(()));
        let bytes = u64::from(BYTES);
        let (queued, service) = (Duration::ZERO, Duration::from_micros(1));
        drive.land(Completion { tag: entry.into(), slab, result, bytes, queued, service });
    }

    /// Everything that is over at `now_ns`: tag and milliseconds from submission.
    fn done(drive: &mut Drive, now_ns: u64) -> Vec<(u64, u128)> {
        drive.advance(now_ns);
        std::iter::from_fn(|| drive.take_done()).map(|done| (done.tag, done.took().as_millis())).collect()
    }

    #[test]
    fn a_serial_drive_waits_for_each_read_and_a_parallel_one_for_its_way_out() {
        use Priority::Demand;
        for (parallelism, ends) in [(1, [5, 10, 15, 20]), (2, [5, 7, 10, 12]), (4, [5, 7, 9, 11])] {
            let (mut drive, pool) = drive(parallelism);
            for tag in 0..4 {
                submit(&mut drive, &pool, tag, Demand, 0);
            }
            assert_eq!(done(&mut drive, 5 * MS - 1), []);
            assert_eq!(drive.next_due_ns(), Some(5 * MS));
            // Looked at once, long after: each was begun when it could be, not when somebody looked.
            let want: Vec<(u64, u128)> = (0..4).zip(ends).collect();
            assert_eq!(done(&mut drive, 100 * MS), want, "{parallelism} at a time");
            let stats = drive.stats_at(200 * MS);
            assert_eq!((stats.reads, stats.bytes, stats.useful_bytes), (4, 4 * 8192, 4 * 5000));
            assert_eq!(stats.busy_ns, ends[3] as u64 * MS, "idle since the last one");
            assert_eq!((drive.in_flight(), pool.free()), (0, 8));
        }
    }

    #[test]
    fn two_at_a_time_are_two_on_average() {
        let (mut drive, pool) = drive(2);
        for tag in 0..4 {
            submit(&mut drive, &pool, tag, Priority::Demand, 0);
        }
        done(&mut drive, 100 * MS);
        // Two from 0 to 10 ms, where the third ends, and the fourth alone to 12.
        let stats = drive.stats_at(100 * MS);
        assert_eq!(stats.service_ns, (2 * 10 + 2) * MS);
        // The third began at 5 ms and the fourth at 7.
        assert_eq!(stats.queued_ns, (5 + 7) * MS);
    }

    #[test]
    fn a_demand_overtakes_what_waits_and_not_what_is_served() {
        let (mut drive, pool) = drive(1);
        for tag in 0..3 {
            submit(&mut drive, &pool, tag, Priority::Lookahead, 0);
        }
        submit(&mut drive, &pool, 7, Priority::Demand, MS);
        assert_eq!(drive.promote(2).collect::<Vec<_>>(), [2]);
        assert_eq!(done(&mut drive, 100 * MS), [(0, 5), (2, 10), (7, 14), (1, 20)], "2 was submitted before 7");
    }

    #[test]
    fn a_guess_waits_until_the_drive_is_nearly_out_of_work() {
        // 3 ms to the first byte and 2 ms a read: four reads at once end after 5, 7, 9 and 11 ms.
        let (mut drive, pool) = drive(8);
        for tag in 0..4 {
            submit(&mut drive, &pool, tag, Priority::Demand, 0);
        }
        submit(&mut drive, &pool, 8, Priority::Lookahead, 0);
        submit(&mut drive, &pool, 9, Priority::Lookahead, 0);
        submit(&mut drive, &pool, 6, Priority::Lookahead, 0);
        // The first is begun beside the last of four, which is 2 ms from its end after 9 ms, and ends after 14. The second is
        // begun beside it 2 ms before that, after 12, and ends after 17. A demand at 13 overtakes the third only.
        submit(&mut drive, &pool, 7, Priority::Demand, 13 * MS);
        assert_eq!(drive.cancel_lookahead(), 1);
        drive.advance(13 * MS);
        let over: Vec<_> = std::iter::from_fn(|| drive.take_done()).map(|done| done.tag).collect();
        assert_eq!(over, [6, 0, 1, 2, 3]);
        assert_eq!(done(&mut drive, 100 * MS), [(8, 14), (9, 17), (7, 6)]);
    }

    #[test]
    fn cancelled_are_those_that_wait_and_were_not_promoted() {
        let (mut drive, pool) = drive(1);
        for tag in 0..4 {
            submit(&mut drive, &pool, tag, Priority::Lookahead, 0);
        }
        drive.promote(3).for_each(drop);
        drive.advance(MS);
        assert_eq!(drive.cancel_lookahead(), 2);
        drive.advance(MS);
        let cancelled: Vec<_> = std::iter::from_fn(|| drive.take_done()).map(|d| (d.tag, d.result, d.bytes)).collect();
        assert_eq!(cancelled, [(1, Err(IoError::Cancelled), 0), (2, Err(IoError::Cancelled), 0)]);
        assert_eq!(done(&mut drive, 100 * MS), [(0, 5), (3, 10)]);
        let stats = drive.stats;
        assert_eq!((stats.reads, stats.busy_ns, stats.service_ns), (2, 10 * MS, 10 * MS));
        assert_eq!(
            stats.queued_ns,
            3 * MS + 4 * MS,
            "three waited until two were taken back, and one from there to 5 ms"
        );
    }

    #[test]
    fn a_read_that_the_inner_device_still_has_keeps_its_lane_and_is_forgotten_when_lost() {
        let (mut drive, pool) = drive(1);
        let segment = Segment { file: FileId(0), offset: 0, len: BYTES, at: 0, want: BYTES };
        let read = Read { tag: 9, priority: Priority::Demand, segments: Segments::from_slice(&[segment]).unwrap() };
        drive.begin(0, &read, 0);
        submit(&mut drive, &pool, 1, Priority::Demand, 0);
        assert_eq!(done(&mut drive, 50 * MS), []);
        drive.lose();
        assert_eq!(done(&mut drive, 54 * MS), [], "it began when the lane was free");
        assert_eq!(done(&mut drive, 55 * MS), [(1, 55)]);
        assert_eq!(drive.in_flight(), 0);
    }

    #[test]
    fn impossible_drives_are_refused() {
        let ok = ThrottleConfig::default();
        let files = std::sync::Arc::new(crate::FileSet::open(&[], crate::IoMode::Auto).unwrap());
        let pool = SlabPool::new(4096, 1).unwrap();
        let inner = || crate::sim_device(&crate::SimConfig::calm(1), files.clone(), &pool).unwrap();
        for bad in [
            ThrottleConfig { bytes_per_s: 0, ..ok },
            ThrottleConfig { parallelism: 0, ..ok },
            ThrottleConfig { queue: 0, ..ok },
            ThrottleConfig { queue: QUEUE_READS_MAX + 1, ..ok },
        ] {
            assert!(matches!(throttled(inner(), &bad), Err(IoError::BadRequest { .. })), "{bad:?}");
        }
        assert!(throttled(inner(), &ok).is_ok());
    }
}

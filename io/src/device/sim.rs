//! A device whose every result, delay and order comes from a seed.
//!
//! The bytes are the files' own; what is distorted is the result of each system call, below the state machine that
//! all devices share. Time is simulated: nothing here sleeps. As a direct read would, a call at a misaligned offset is
//! refused, and memory behind a short or failed result holds rubbish.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::device::schedule::{Issue, Limits, RequestCap, Schedule};
use crate::device::{Completion, Device, DeviceReport, DeviceStats, Read, RejectReason, Rejected, Wait};
use crate::drive::DriveStats;
use crate::error::IoError;
use crate::file::FileSet;
use crate::limits::{DEPTH_BYTES_MIN, DRIVES_MAX, QUEUE_READS, RING_CHUNK_BYTES, RING_ENTRIES};
use crate::pool::{Slab, SlabPool};
use crate::sector::is_aligned;

/// A result the simulator puts in place of the kernel's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SimFault {
    /// Only this many bytes, at most what the file has.
    Short(u32),
    /// No byte, no error.
    Zero,
    /// This errno.
    Errno(i32),
    /// The right result, this much later on the simulated clock.
    Stall(Duration),
    /// The device dies instead of answering.
    Die,
}

/// What the simulator does to the calls it serves.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// Decides everything below. The same seed and the same calls give the same history.
    pub seed: u64,
    /// Whether results may come in another order than the calls went out.
    pub reorder: bool,
    /// Simulated time a call takes, evenly spread.
    pub delay: Range<Duration>,
    /// Calls in a thousand that return only a part.
    pub short_per_mille: u16,
    /// Calls in a thousand that return nothing, without an error.
    pub zero_per_mille: u16,
    /// Calls in a thousand that fail with `EIO`.
    pub eio_per_mille: u16,
    /// Calls in a thousand that fail with `EAGAIN`.
    pub eagain_per_mille: u16,
    /// Calls in a thousand that fail with `EINTR`.
    pub eintr_per_mille: u16,
    /// Calls in a thousand that take [`SimConfig::stall`] longer.
    pub stall_per_mille: u16,
    /// How long a stall lasts.
    pub stall: Duration,
    /// Of the drives that hold the files, one that fails every call with `EIO` from this one on, counted over all.
    pub lost: Option<(usize, u64)>,
    /// One that answers no call from this one on, until the device is dropped.
    pub hangs: Option<(usize, u64)>,
    /// One that returns a flipped bit with so many of a thousand calls, and says nothing of it.
    pub flips: Option<(usize, u16)>,
    /// Faults at given calls, counted from 0 over the life of the device; they come before chance.
    pub script: Vec<(u64, SimFault)>,
    /// Cap on bytes handed out at a time.
    pub depth_bytes: u64,
    /// Largest single call.
    pub chunk_bytes: u32,
    /// More calls out and reads waiting than this, and a segment is one call.
    pub whole_when_waiting: usize,
    /// Requests that each drive's queue may hold, and the bytes of one; `None` for no bound.
    pub requests: Option<(u64, u64)>,
    /// Calls at a time.
    pub calls: usize,
    /// Of those, the most that are of one drive.
    pub calls_of_drive: usize,
    /// Most reads admitted and not yet reaped.
    pub queue: usize,
}

impl SimConfig {
    /// No fault, no delay, results in order.
    pub fn calm(seed: u64) -> SimConfig {
        SimConfig {
            seed,
            reorder: false,
            delay: Duration::ZERO..Duration::ZERO,
            short_per_mille: 0,
            zero_per_mille: 0,
            eio_per_mille: 0,
            eagain_per_mille: 0,
            eintr_per_mille: 0,
            stall_per_mille: 0,
            stall: Duration::from_secs(5),
            lost: None,
            hangs: None,
            flips: None,
            script: Vec::new(),
            depth_bytes: DEPTH_BYTES_MIN,
            chunk_bytes: RING_CHUNK_BYTES,
            whole_when_waiting: usize::MAX,
            requests: None,
            calls: RING_ENTRIES as usize,
            calls_of_drive: usize::MAX,
            queue: QUEUE_READS,
        }
    }

    /// Everything that can go wrong does, now and then.
    pub fn stormy(seed: u64) -> SimConfig {
        SimConfig {
            reorder: true,
            delay: Duration::from_micros(50)..Duration::from_millis(20),
            short_per_mille: 100,
            zero_per_mille: 10,
            eio_per_mille: 10,
            eagain_per_mille: 50,
            eintr_per_mille: 50,
            stall_per_mille: 10,
            ..SimConfig::calm(seed)
        }
    }
}

/// Makes a simulated device over `files` that fills slabs of `pool`.
///
/// # Errors
/// [`IoError::BadRequest`] where a bound is zero.
pub fn sim_device(cfg: &SimConfig, files: Arc<FileSet>, pool: &SlabPool) -> Result<Box<dyn Device>, IoError> {
    if cfg.calls == 0 || cfg.queue == 0 || cfg.chunk_bytes == 0 {
        return Err(IoError::BadRequest {
            what: "a simulated device needs calls, a queue and a request size".to_owned(),
        });
    }
    let align = files.align();
    let cap = cfg.requests.map(|(requests, request_bytes)| RequestCap { requests, request_bytes });
    let limits = Limits {
        depth_bytes: cfg.depth_bytes,
        chunk_bytes: cfg.chunk_bytes.next_multiple_of(align),
        whole_when_waiting: cfg.whole_when_waiting,
        calls: cfg.calls,
        calls_of_drive: cfg.calls_of_drive,
        reads: cfg.queue,
        caps: [cap; DRIVES_MAX],
    };
    Ok(Box::new(Sim {
        schedule: Schedule::new(Arc::clone(&files), pool.clone(), limits),
        files,
        random: SplitMix(cfg.seed),
        cfg: cfg.clone(),
        clock_ns: 0,
        last_due_ns: 0,
        calls: 0,
        pending: Vec::with_capacity(cfg.calls),
        dead: None,
        report: DeviceReport { name: "sim", ..DeviceReport::default() },
    }))
}

struct Sim {
    schedule: Schedule,
    files: Arc<FileSet>,
    cfg: SimConfig,
    random: SplitMix,
    clock_ns: u64,
    last_due_ns: u64,
    calls: u64,
    pending: Vec<Pending>,
    dead: Option<IoError>,
    report: DeviceReport,
}

struct Pending {
    issue: Call,
    fault: Option<SimFault>,
    /// Whether a bit of the answer is flipped.
    flipped: bool,
    due_ns: u64,
    number: u64,
}

/// The part of an [`Issue`] the simulator needs; memory is reached through the schedule.
#[derive(Clone, Copy)]
struct Call {
    op: u32,
    file: crate::file::FileId,
    direct: bool,
    offset: u64,
    len: u32,
}

impl Sim {
    /// Hands out every call that may go now.
    fn pump(&mut self) {
        while self.dead.is_none()
            && let Some(Issue { op, file, direct, offset, len, .. }) = self.schedule.next(self.clock_ns)
        {
            let number = self.calls;
            self.calls += 1;
            let drawn = self.draw(number, len);
            let drive = self.files.drive_of(file);
            let is_hit = |fault: Option<(usize, u64)>| fault.is_some_and(|(at, from)| at == drive && from <= number);
            let fault = if is_hit(self.cfg.lost) { Some(SimFault::Errno(libc::EIO)) } else { drawn };
            let flips = self.cfg.flips.filter(|(at, _)| *at == drive);
            let flipped = flips.is_some_and(|(_, per_mille)| self.random.below(1000) < u64::from(per_mille));
            let due_ns = if is_hit(self.cfg.hangs) { self.clock_ns + NEVER_NS } else { self.due_ns(fault) };
            let issue = Call { op, file, direct, offset, len };
            self.pending.push(Pending { issue, fault, flipped, due_ns, number });
        }
    }

    /// When a call that goes out now is answered.
    fn due_ns(&mut self, fault: Option<SimFault>) -> u64 {
        let mut due_ns = self.clock_ns + self.delay_ns();
        if let Some(SimFault::Stall(stall)) = fault {
            due_ns += stall.as_nanos() as u64;
        }
        if !self.cfg.reorder {
            due_ns = due_ns.max(self.last_due_ns);
        }
        self.last_due_ns = due_ns;
        due_ns
    }

    fn draw(&mut self, number: u64, len: u32) -> Option<SimFault> {
        if let Some((_, fault)) = self.cfg.script.iter().find(|(at, _)| *at == number) {
            return Some(*fault);
        }
        let part = self.random.below(u64::from(len)) as u32;
        let faults = [
            (self.cfg.short_per_mille, SimFault::Short(part.max(1))),
            (self.cfg.zero_per_mille, SimFault::Zero),
            (self.cfg.eio_per_mille, SimFault::Errno(libc::EIO)),
            (self.cfg.eagain_per_mille, SimFault::Errno(libc::EAGAIN)),
            (self.cfg.eintr_per_mille, SimFault::Errno(libc::EINTR)),
            (self.cfg.stall_per_mille, SimFault::Stall(self.cfg.stall)),
        ];
        let mut roll = self.random.below(1000);
        for (per_mille, fault) in faults {
            match roll.checked_sub(u64::from(per_mille)) {
                Some(rest) => roll = rest,
                None => return Some(fault),
            }
        }
        None
    }

    fn delay_ns(&mut self) -> u64 {
        let (from, to) = (self.cfg.delay.start.as_nanos() as u64, self.cfg.delay.end.as_nanos() as u64);
        from + self.random.below(to.saturating_sub(from))
    }

    /// A caller that polls sees time pass too: one event a call, or [`POLL`] where the next one is further away.
    fn pass_a_poll(&mut self) {
        let until_ns = self.clock_ns.saturating_add(POLL.as_nanos() as u64);
        match self.next_event_ns() {
            _ if self.schedule.has_ready() => {}
            Some(at) if at > until_ns => self.clock_ns = until_ns,
            _ => drop(self.step()),
        }
    }

    /// When the next thing happens.
    fn next_event_ns(&self) -> Option<u64> {
        let due = self.next_pending().map(|next| self.pending[next].due_ns);
        due.into_iter().chain(self.schedule.next_retry_ns(self.clock_ns)).min()
    }

    /// Lets things happen until a read is finished or the clock shows `until_ns`, as it does for a wait in vain.
    fn run_until(&mut self, until_ns: u64) {
        while !self.schedule.has_ready() {
            match self.next_event_ns() {
                Some(at) if at <= until_ns => drop(self.step()),
                Some(_) => {
                    self.clock_ns = until_ns;
                    return;
                }
                None => return,
            }
        }
    }

    /// The call that is answered next.
    fn next_pending(&self) -> Option<usize> {
        (0..self.pending.len()).min_by_key(|index| (self.pending[*index].due_ns, self.pending[*index].number))
    }

    /// Lets the next thing happen: a result, the end of a pause, or of the patience with a drive. `false` where nothing is left to happen.
    fn step(&mut self) -> bool {
        let Some(at) = self.next_event_ns() else { return false };
        self.clock_ns = self.clock_ns.max(at);
        let Some(next) = self.next_pending().filter(|next| self.pending[*next].due_ns <= self.clock_ns) else {
            self.pump();
            return true;
        };
        let Pending { issue, fault, flipped, .. } = self.pending.swap_remove(next);
        if fault == Some(SimFault::Die) {
            self.dead.get_or_insert(IoError::DeviceDied { cause: "the script says so".to_owned() });
        }
        let result = self.answer(issue, fault, flipped);
        self.schedule.complete(issue.op, result, self.clock_ns);
        if self.dead.is_some() {
            self.schedule.stop(self.clock_ns);
        }
        self.pump();
        true
    }

    /// Fills the memory of a call and returns what the kernel would.
    fn answer(&mut self, call: Call, fault: Option<SimFault>, flipped: bool) -> i32 {
        let align = u64::from(self.files.align());
        let aligned = is_aligned(call.offset, align) && is_aligned(u64::from(call.len), align);
        let memory = self.schedule.call_bytes(call.op);
        let result = match fault {
            Some(SimFault::Errno(errno)) => -errno,
            Some(SimFault::Die) => -libc::ESHUTDOWN,
            Some(SimFault::Zero) => 0,
            _ if call.direct && !aligned => -libc::EINVAL,
            Some(SimFault::Short(bytes)) => self.files.read_once(call.file, call.offset, memory).min(bytes as i32),
            Some(SimFault::Stall(_)) | None => self.files.read_once(call.file, call.offset, memory),
        };
        let arrived = usize::try_from(result).unwrap_or(0);
        memory[arrived..].fill(RUBBISH);
        // In the middle, where no padding is.
        if let Some(byte) = memory[..arrived].get_mut(arrived / 2).filter(|_| flipped) {
            *byte ^= 1;
        }
        result
    }
}

impl Device for Sim {
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected> {
        if let Some(dead) = &self.dead {
            let why = RejectReason::Dead(dead.clone());
            return Err(Rejected { slab, read, why });
        }
        self.schedule.admit(read, slab, self.clock_ns)?;
        self.pump();
        Ok(())
    }

    fn reap(&mut self, wait: Wait) -> Result<Option<Completion>, IoError> {
        match wait {
            Wait::No => self.pass_a_poll(),
            Wait::Block => while !self.schedule.has_ready() && self.step() {},
            Wait::AtMost(limit) => self.run_until(self.clock_ns.saturating_add(limit.as_nanos() as u64)),
        }
        match (self.schedule.take_ready(), &self.dead) {
            (Some(done), _) => Ok(Some(done)),
            (None, Some(dead)) => Err(dead.clone()),
            (None, None) => Ok(None),
        }
    }

    fn in_flight(&self) -> usize {
        self.schedule.in_flight()
    }

    fn cancel_lookahead(&mut self) -> usize {
        self.schedule.cancel_lookahead(self.clock_ns)
    }

    fn promote(&mut self, tag: u64) {
        self.schedule.promote(tag);
        self.pump();
    }

    fn stats(&self) -> DeviceStats {
        self.schedule.stats()
    }

    fn drives(&self) -> Vec<DriveStats> {
        self.schedule.drives()
    }

    fn describe(&self) -> &DeviceReport {
        &self.report
    }
}

impl Drop for Sim {
    /// As a kernel would: what is in flight still lands.
    fn drop(&mut self) {
        self.schedule.stop(self.clock_ns);
        while self.step() {}
    }
}

/// Time that passes between two looks of a caller that polls, at most.
const POLL: Duration = Duration::from_secs(1);
/// A year: how long a drive that hangs is silent on the simulated clock.
const NEVER_NS: u64 = 365 * 24 * 3600 * 1_000_000_000;
const RUBBISH: u8 = 0xA5;

/// Steele, Lea and Flood's SplitMix64.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Evenly below `bound`, as far as 64 bits allow; 0 for a bound of 0.
    fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}

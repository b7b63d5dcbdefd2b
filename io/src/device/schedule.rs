//! Order, depth and bookkeeping of reads, without any I/O: which call to make next, and what a result completes.
//!
//! Everything is sized at the start. A read occupies a slot from `admit` to its completion, and its requests occupy
//! operations from `next` to their last result; slabs sit in the slots, so nobody else can touch them meanwhile.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use crate::device::line::Line;
use crate::device::progress::{Call, Chunk, Fault, Step};
use crate::device::route::Router;
use crate::device::{Completion, DeviceStats, Priority, Read, RejectReason, Rejected};
use crate::drive::{DriveSet, DriveStats};
use crate::error::{IoError, ReadRange};
use crate::file::{FileId, FileSet, refused};
use crate::limits::DRIVES_MAX;
use crate::plan::Segment;
use crate::pool::{Slab, SlabPool};
use crate::sector::is_aligned;

/// Bounds of a schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Of each drive.
    pub depth_bytes: u64,
    pub chunk_bytes: u32,
    /// With more than this, calls out and reads waiting together, a segment is one request: parallelism then comes from
    /// the reads.
    pub whole_when_waiting: usize,
    /// Requests handed out at a time.
    pub calls: usize,
    /// Of those, the most that are of one drive.
    pub calls_of_drive: usize,
    /// Reads admitted and not yet taken as completions.
    pub reads: usize,
    /// Bound by each drive's queue, where it is known.
    pub caps: [Option<RequestCap>; DRIVES_MAX],
}

/// How many requests of a drive's queue may be taken, and the bytes of one: a longer call takes several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RequestCap {
    pub requests: u64,
    pub request_bytes: u64,
}

impl RequestCap {
    pub fn taken_by(self, len: u32) -> u64 {
        u64::from(len).div_ceil(self.request_bytes)
    }
}

/// A call to make: read `len` bytes at `offset` of `fd` to `address`, then report the result for `op`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issue {
    pub op: u32,
    /// The file, or the copy of it that is read.
    pub file: FileId,
    pub fd: RawFd,
    pub direct: bool,
    pub offset: u64,
    pub len: u32,
    /// Stays valid, and nobody else's, until `complete` is called for `op`.
    pub address: NonNull<u8>,
}

pub(crate) struct Schedule {
    files: Arc<FileSet>,
    pool: SlabPool,
    limits: Limits,
    slots: Vec<Option<Active>>,
    free_slots: Vec<u32>,
    line: Line,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    /// Operations to be called again.
    again: Vec<u32>,
    ready: VecDeque<Completion>,
    router: Router,
    active: usize,
    started: usize,
    stopping: bool,
    stats: DeviceStats,
    clock_ns: u64,
}

struct Active {
    read: Read,
    slab: Slab,
    submitted_ns: u64,
    /// When its first request went out.
    started_ns: Option<u64>,
    /// First byte not yet handed out: segment and offset inside it.
    segment: usize,
    inside: u32,
    /// Operations of this read, in the kernel or waiting to be called again.
    outstanding: u32,
    bytes: u64,
    /// The failure nearest to the start of the slab, with its place.
    failure: Option<(u32, IoError)>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Op {
    slot: u32,
    segment: usize,
    chunk: Chunk,
    call: Call,
    not_before_ns: u64,
    drive: usize,
    /// Drives that have failed this request, and what the file itself had to say, the first drive.
    failed: DriveSet,
    fault: Option<(Fault, u32)>,
}

impl Schedule {
    pub fn new(files: Arc<FileSet>, pool: SlabPool, limits: Limits) -> Schedule {
        let Limits { reads, calls, .. } = limits;
        let share = if files.drives() > 1 { (calls / files.drives()).max(1) } else { calls };
        // A drive that hangs must not keep the operations that others are read with.
        let calls_of_drive = limits.calls_of_drive.min(share);
        let router = Router::new(&limits.caps[..files.drives()], limits.depth_bytes, calls_of_drive);
        Schedule {
            files,
            pool,
            limits,
            slots: (0..reads).map(|_| None).collect(),
            free_slots: (0..reads as u32).rev().collect(),
            line: Line::new(reads),
            ops: vec![Op::default(); calls],
            free_ops: (0..calls as u32).rev().collect(),
            again: Vec::with_capacity(calls),
            ready: VecDeque::with_capacity(reads),
            router,
            active: 0,
            started: 0,
            stopping: false,
            stats: DeviceStats::default(),
            clock_ns: 0,
        }
    }

    /// Takes a read, or gives it back.
    #[allow(clippy::result_large_err, reason = "boxing the rejection would allocate on the path that never allocates")]
    pub fn admit(&mut self, read: Read, slab: Slab, now_ns: u64) -> Result<(), Rejected> {
        if let Err(error) = self.check(&read, &slab) {
            return Err(Rejected { slab, read, why: RejectReason::Bad(error) });
        }
        if self.in_flight() >= self.limits.reads {
            return Err(Rejected { slab, read, why: RejectReason::Full });
        }
        let Some(slot) = self.free_slots.pop() else {
            return Err(Rejected { slab, read, why: RejectReason::Full });
        };
        self.tick(now_ns);
        self.active += 1;
        self.slots[slot as usize] = Some(Active {
            read,
            slab,
            submitted_ns: now_ns,
            started_ns: None,
            segment: 0,
            inside: 0,
            outstanding: 0,
            bytes: 0,
            failure: None,
        });
        self.line.join(slot, &read, now_ns);
        Ok(())
    }

    /// The next call to make, if depth allows one now.
    pub fn next(&mut self, now_ns: u64) -> Option<Issue> {
        if let Some(position) = self.again.iter().position(|op| self.may_repeat(*op, now_ns)) {
            let op = self.again.swap_remove(position);
            return Some(self.issue(op, now_ns));
        }
        let next = self.line.next()?;
        let slot = next.slot;
        let active = self.slots[slot as usize].as_ref()?;
        let (priority, segment) = (active.read.priority, active.read.segments[active.segment]);
        let rest = segment.len - active.inside;
        let busy = self.line.waiting() + self.calls_out() > self.limits.whole_when_waiting;
        // A guess can be stopped between requests only.
        let whole = busy && priority == Priority::Demand;
        let len = if whole { rest } else { rest.min(self.limits.chunk_bytes) };
        if self.free_ops.is_empty() {
            return None;
        }
        let sources = self.files.sources(segment.file, DriveSet::default());
        // A drive whose rate is asked again has lost the old one: from here on the request goes out.
        let drive = self.router.choose(sources, len, priority, now_ns)?;
        let op = self.free_ops.pop()?;
        self.tick(now_ns);
        self.line.start(next);
        let active = self.slots[slot as usize].as_mut()?;
        // One that was promoted while it was being handed out waits a second time.
        self.started += usize::from(active.started_ns.is_none());
        active.started_ns.get_or_insert(now_ns);
        let file = self.files.copy_on(segment.file, drive).unwrap_or(segment.file);
        let chunk = chunk_at(segment, file, active.inside, len);
        self.ops[op as usize] =
            Op { slot, segment: active.segment, chunk, drive, not_before_ns: now_ns, ..Op::default() };
        active.outstanding += 1;
        active.inside += len;
        // Padding after the last wanted byte is read with it or not at all.
        if active.inside >= segment.want {
            active.segment += 1;
            active.inside = 0;
        }
        if active.segment == active.read.segments.len() {
            self.line.leave(slot);
        }
        Some(self.issue(op, now_ns))
    }

    /// Takes the result of a call: bytes, or a negative errno.
    pub fn complete(&mut self, op: u32, result: i32, now_ns: u64) {
        let record = &mut self.ops[op as usize];
        let arrived = u64::try_from(result).unwrap_or(0);
        self.router.came(record.drive, record.call.len, arrived, now_ns);
        let step = record.chunk.advance(record.call, result);
        let (slot, chunk) = (record.slot, record.chunk);
        self.stats.bytes += arrived;
        if let Some(active) = &mut self.slots[slot as usize] {
            active.bytes += arrived;
        }
        let fault = match step {
            Step::Done => None,
            Step::Again { pause_ns } => return self.repeat(op, now_ns.saturating_add(pause_ns), now_ns),
            Step::Refused(errno) => match self.files.refuse_direct(chunk.file, errno) {
                Ok(()) => return self.repeat(op, now_ns, now_ns),
                Err(_) => Some(Fault::Refused(errno)),
            },
            Step::Failed(fault) => Some(fault),
        };
        if let Some(fault) = fault {
            let error = self.failure(op, chunk.file, (fault, chunk.got));
            if self.fail_over(op, fault, &error, now_ns) {
                return self.repeat(op, now_ns, now_ns);
            }
            // What the file itself had to say is the error, whichever copy was the last to fail.
            let error = match self.ops[op as usize].fault {
                Some(first) => self.failure(op, self.segment_of(op).file, first),
                None => error,
            };
            self.fail(slot, chunk.at, error, now_ns);
        }
        self.release(op, now_ns);
    }

    /// Has `op` read from another copy after `fault`; `false` where none is left that has not failed it.
    fn fail_over(&mut self, op: u32, fault: Fault, error: &IoError, now_ns: u64) -> bool {
        let file = self.segment_of(op).file;
        let record = &mut self.ops[op as usize];
        self.router.failed(record.drive);
        if record.drive == 0 {
            record.fault = Some((fault, record.chunk.got));
        }
        record.failed = record.failed.with(record.drive);
        if self.files.has_copies(file) {
            self.files.avoid(file, record.drive, error);
        }
        let Chunk { offset, at, len, want, .. } = record.chunk;
        let sources = self.files.sources(file, record.failed);
        let Some(drive) = self.router.soonest(sources, len, now_ns).or(sources.first()) else {
            return false;
        };
        record.drive = drive;
        record.chunk = Chunk::new(self.files.copy_on(file, drive).unwrap_or(file), offset, at, len, want);
        true
    }

    /// The part of its read that `op` belongs to.
    fn segment_of(&self, op: u32) -> Segment {
        let Op { slot, segment, .. } = self.ops[op as usize];
        self.slots[slot as usize].as_ref().map(|active| active.read.segments[segment]).unwrap_or_default()
    }

    pub fn take_ready(&mut self) -> Option<Completion> {
        self.ready.pop_front()
    }

    pub fn has_ready(&self) -> bool {
        !self.ready.is_empty()
    }

    /// Reads admitted and not yet taken.
    pub fn in_flight(&self) -> usize {
        self.active + self.ready.len()
    }

    /// Calls made and not completed.
    pub fn calls_out(&self) -> usize {
        self.router.calls_out()
    }

    /// Whether `next` may have something once depth or time allows.
    pub fn has_work(&self) -> bool {
        self.has_unsent() || !self.again.is_empty()
    }

    /// Whether a read is not handed out whole.
    fn has_unsent(&self) -> bool {
        !self.line.is_empty()
    }

    /// When `next` may have something though no result came: a pause ends, or a drive that was waited for is so late
    /// that another is asked.
    pub fn next_retry_ns(&self, now_ns: u64) -> Option<u64> {
        let pauses = self.again.iter().map(|op| self.ops[*op as usize].not_before_ns);
        let stall = self.router.next_stall_ns(now_ns).filter(|_| self.has_unsent());
        pauses.chain(stall).filter(|at| *at > now_ns).min()
    }

    pub fn cancel_lookahead(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        while let Some(slot) = self.line.pop_lookahead() {
            self.finish(slot, Err(IoError::Cancelled), now_ns);
            count += 1;
        }
        // What is in the kernel's hands comes back first.
        if let Some(slot) = self.line.stop_lookahead() {
            self.cut_short(slot, now_ns);
            count += 1;
        }
        count
    }

    /// Hands out no more of a read that has begun.
    fn cut_short(&mut self, slot: u32, now_ns: u64) {
        let Some(active) = &mut self.slots[slot as usize] else { return };
        // Behind every place: an error that came before is reported instead, as it may concern other reads too.
        active.failure.get_or_insert((u32::MAX, IoError::Cancelled));
        if active.outstanding == 0 {
            self.finish(slot, Err(IoError::Cancelled), now_ns);
        }
    }

    /// Makes a demand of the lookahead read called `tag`, where there is one: what of it has not been handed out goes
    /// before every lookahead, in its turn among the demands.
    pub fn promote(&mut self, tag: u64) {
        let is_it = |active: &Active| active.read.tag == tag && active.read.priority == Priority::Lookahead;
        let Some(slot) = self.slots.iter().position(|slot| slot.as_ref().is_some_and(is_it)) else { return };
        let Some(active) = &mut self.slots[slot] else { return };
        active.read.priority = Priority::Demand;
        self.line.promote(slot as u32, &active.read, active.submitted_ns);
    }

    pub fn stats(&self) -> DeviceStats {
        self.stats
    }

    /// Whether every file is read directly now, copies included.
    pub fn is_direct(&self) -> bool {
        self.files.entries().all(|file| self.files.source(file).direct)
    }

    /// Drives that are read.
    pub fn drives_len(&self) -> usize {
        self.files.drives()
    }

    /// What each drive did.
    pub fn drives(&self) -> Vec<DriveStats> {
        self.router.stats().collect()
    }

    /// From now on no call is handed out; reads without one in the kernel give their slabs back.
    pub fn stop(&mut self, now_ns: u64) {
        self.stopping = true;
        self.line.clear();
        while let Some(op) = self.again.pop() {
            self.release(op, now_ns);
        }
        for slot in 0..self.slots.len() {
            if self.slots[slot].as_ref().is_some_and(|active| active.outstanding == 0) {
                self.finish(slot as u32, Err(IoError::Cancelled), now_ns);
            }
        }
    }

    /// The kernel may go on writing and nobody will hear of it: the slabs it has are never given back.
    pub fn abandon(&mut self) {
        for slot in &mut self.slots {
            if let Some(active) = slot.take_if(|active| active.outstanding > 0) {
                std::mem::forget(active.slab);
            }
        }
    }

    /// The bytes a call is to fill, for a device that fills them itself.
    pub fn call_bytes(&mut self, op: u32) -> &mut [u8] {
        let Op { slot, chunk, call, .. } = self.ops[op as usize];
        let from = (chunk.at + call.skip) as usize;
        let active = self.slots[slot as usize].as_mut();
        active.map_or(&mut [], |active| &mut active.slab.bytes_mut()[from..from + call.len as usize])
    }

    fn check(&self, read: &Read, slab: &Slab) -> Result<(), IoError> {
        let bad = |what: String| Err(IoError::BadRequest { what });
        if !self.pool.owns(slab) {
            return bad("the slab is of another pool".to_owned());
        }
        if read.segments.is_empty() {
            return bad("no segment".to_owned());
        }
        let (align, slab_bytes) = (u64::from(self.files.align()), slab.bytes().len() as u64);
        let mut free_from = 0;
        for Segment { file, offset, len, at, want } in read.segments.iter().copied() {
            self.files.checked_len(file)?;
            if want == 0 || want > len {
                return bad(format!("{want} of {len} bytes wanted"));
            }
            if !(is_aligned(offset, align) && is_aligned(u64::from(len), align) && is_aligned(u64::from(at), align)) {
                return bad(format!("{len} bytes at {offset} to {at} of the slab are not aligned to {align}"));
            }
            if offset.checked_add(u64::from(len)).is_none_or(|end| end > i64::MAX as u64) {
                return bad(format!("{len} bytes at {offset} pass the largest offset"));
            }
            if u64::from(at) < free_from || u64::from(at) + u64::from(len) > slab_bytes {
                return bad(format!("{len} bytes at {at} of a slab of {slab_bytes} whose first {free_from} are taken"));
            }
            free_from = u64::from(at) + u64::from(len);
        }
        Ok(())
    }

    /// Whether the pause of `op` is over and depth allows its call.
    fn may_repeat(&self, op: u32, now_ns: u64) -> bool {
        let Op { slot, chunk, drive, not_before_ns, .. } = self.ops[op as usize];
        let priority = self.slots[slot as usize].as_ref().map_or(Priority::Demand, |active| active.read.priority);
        not_before_ns <= now_ns && self.router.fits(drive, chunk.len - chunk.got, priority)
    }

    fn issue(&mut self, op: u32, now_ns: u64) -> Issue {
        let align = self.files.align();
        let record = &mut self.ops[op as usize];
        let chunk = &record.chunk;
        let source = self.files.source(chunk.file);
        let call = chunk.call(source.direct, align);
        record.call = call;
        self.router.went(record.drive, call.len, now_ns);
        let slab = self.slots[record.slot as usize].as_ref().map(|active| &active.slab);
        let Some(slab) = slab else { unreachable!("operation {op} belongs to no read") };
        Issue {
            op,
            file: chunk.file,
            fd: source.fd,
            direct: source.direct,
            offset: chunk.offset + u64::from(call.skip),
            len: call.len,
            address: slab.address(chunk.at + call.skip, call.len),
        }
    }

    /// Calls `op` again, unless its read has failed nearer to the start or the device is stopping.
    fn repeat(&mut self, op: u32, not_before_ns: u64, now_ns: u64) {
        self.stats.retries += 1;
        let record = &mut self.ops[op as usize];
        record.not_before_ns = not_before_ns;
        let (slot, at) = (record.slot, record.chunk.at);
        let failure = self.slots[slot as usize].as_ref().and_then(|active| active.failure.as_ref());
        // What follows a failure is of no use to anybody, and nothing is of a read that was cut short.
        let useless = |(failed_at, error): &(u32, IoError)| *failed_at < at || *error == IoError::Cancelled;
        if self.stopping || failure.is_some_and(useless) {
            self.release(op, now_ns);
        } else {
            self.again.push(op);
        }
    }

    /// Records a failure: nothing new of the read is handed out, and what is paused behind the failure is dropped.
    /// What lies before it goes on, so that the error is the same whatever the order of results.
    fn fail(&mut self, slot: u32, at: u32, error: IoError, now_ns: u64) {
        let Some(active) = &mut self.slots[slot as usize] else {
            return;
        };
        match &active.failure {
            Some((known, _)) if *known <= at => {}
            _ => active.failure = Some((at, error)),
        }
        self.line.leave(slot);
        let mut position = 0;
        while position < self.again.len() {
            let op = self.again[position];
            let record = &self.ops[op as usize];
            if record.slot == slot && record.chunk.at > at {
                self.again.swap_remove(position);
                self.release(op, now_ns);
            } else {
                position += 1;
            }
        }
    }

    /// Ends an operation, and its read with the last one.
    fn release(&mut self, op: u32, now_ns: u64) {
        let slot = self.ops[op as usize].slot;
        self.free_ops.push(op);
        let Some(active) = &mut self.slots[slot as usize] else {
            return;
        };
        active.outstanding -= 1;
        let handed_out = active.segment == active.read.segments.len();
        if active.outstanding == 0 && (handed_out || active.failure.is_some() || self.stopping) {
            let result = match active.failure.take() {
                Some((_, error)) => Err(error),
                None if self.stopping => Err(IoError::Cancelled),
                None => Ok(()),
            };
            self.finish(slot, result, now_ns);
        }
    }

    fn finish(&mut self, slot: u32, result: Result<(), IoError>, now_ns: u64) {
        self.tick(now_ns);
        let Some(Active { read, slab, submitted_ns, started_ns, bytes, .. }) = self.slots[slot as usize].take() else {
            return;
        };
        self.free_slots.push(slot);
        self.active -= 1;
        self.started -= usize::from(started_ns.is_some());
        let started_ns = started_ns.unwrap_or(now_ns);
        let queued_ns = started_ns.saturating_sub(submitted_ns);
        if result != Err(IoError::Cancelled) {
            self.stats.reads += 1;
        }
        if result.is_ok() {
            self.stats.useful_bytes += read.segments.iter().map(|segment| u64::from(segment.want)).sum::<u64>();
        }
        let [queued, service] = [queued_ns, now_ns.saturating_sub(started_ns)].map(Duration::from_nanos);
        self.ready.push_back(Completion { tag: read.tag, slab, result, bytes, queued, service });
    }

    /// The error of `op` where `file`, of which `got` bytes had arrived, met `fault`.
    fn failure(&self, op: u32, file: FileId, (fault, got): (Fault, u32)) -> IoError {
        let (whole, chunk) = (self.segment_of(op), &self.ops[op as usize].chunk);
        let range = ReadRange {
            path: self.files.shared_path(file),
            offset: whole.offset,
            wanted: u64::from(whole.want),
            got: chunk.offset - whole.offset + u64::from(got),
        };
        match fault {
            Fault::Refused(errno) => refused(range.path, errno),
            Fault::Errno(errno) => IoError::Read { range, errno },
            Fault::EndOfFile => IoError::EndOfFile { range },
            Fault::Stuck { attempts } => IoError::Stuck { range, attempts },
        }
    }

    /// Brings the time integrals up to `now`.
    fn tick(&mut self, now_ns: u64) {
        let passed = now_ns.saturating_sub(self.clock_ns);
        self.clock_ns = self.clock_ns.max(now_ns);
        if self.active > 0 {
            self.stats.busy_ns += passed;
        }
        self.stats.queued_ns += passed * (self.active - self.started) as u64;
        self.stats.service_ns += passed * self.started as u64;
    }
}

/// The request to `file` for `len` bytes from `inside` of a segment.
fn chunk_at(segment: Segment, file: FileId, inside: u32, len: u32) -> Chunk {
    let want = (segment.want - inside).min(len);
    Chunk::new(file, segment.offset + u64::from(inside), segment.at + inside, len, want)
}

#[cfg(test)]
mod tests;

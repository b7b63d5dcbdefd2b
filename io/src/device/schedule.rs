//! Order, depth and bookkeeping of reads, without any I/O: which call to make next, and what a result completes.
//!
//! Everything is sized at the start. A read occupies a slot from `admit` to its completion, and its requests occupy
//! operations from `next` to their last result; slabs sit in the slots, so nobody else can touch them meanwhile.

use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

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
    /// Reads that are not being handed out, sorted. Nothing of a lookahead here has been handed out.
    waiting: Vec<Waiting>,
    /// Lookahead reads admitted so far.
    guesses: u64,
    /// The read being handed out, one for each priority.
    current: [Option<u32>; 2],
    /// Where the last demand that started lies: the sweep goes on upwards from here, so that no read is passed over
    /// for ever by newcomers in front of it.
    head: Option<Turn>,
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

/// A read that waits for its turn, by the order in which reads are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Waiting {
    turn: Turn,
    submitted_ns: u64,
    slot: u32,
}

/// Demands are all needed, so they are read in the order of the file, before any lookahead. Of guesses only the first few
/// are ever read, so those go in the order in which they were admitted: the likeliest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Turn {
    Demand(FileId, u64),
    Lookahead(u64),
}

impl Turn {
    fn priority(self) -> Priority {
        match self {
            Turn::Demand(..) => Priority::Demand,
            Turn::Lookahead(_) => Priority::Lookahead,
        }
    }
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
            waiting: Vec::with_capacity(reads),
            guesses: 0,
            current: [None; 2],
            head: None,
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
        self.wait_in_line(slot);
        Ok(())
    }

    /// The next call to make, if depth allows one now.
    pub fn next(&mut self, now_ns: u64) -> Option<Issue> {
        if let Some(position) = self.again.iter().position(|op| self.may_repeat(*op, now_ns)) {
            let op = self.again.swap_remove(position);
            return Some(self.issue(op, now_ns));
        }
        let (slot, position) = self.choose()?;
        let active = self.slots[slot as usize].as_ref()?;
        let (priority, segment) = (active.read.priority, active.read.segments[active.segment]);
        let rest = segment.len - active.inside;
        let busy = self.waiting.len() + self.calls_out() > self.limits.whole_when_waiting;
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
        if let Some(position) = position {
            let turn = self.waiting.remove(position).turn;
            if priority == Priority::Demand {
                self.head = Some(turn);
            }
            self.current[priority as usize] = Some(slot);
        }
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
            self.current[priority as usize] = None;
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
        !self.waiting.is_empty() || self.current.iter().any(Option::is_some)
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
        while let Some(last) = self.waiting.pop_if(|last| last.turn.priority() == Priority::Lookahead) {
            self.finish(last.slot, Err(IoError::Cancelled), now_ns);
            count += 1;
        }
        // What is in the kernel's hands comes back first.
        if let Some(slot) = self.current[Priority::Lookahead as usize].take() {
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
        let slot = slot as u32;
        let [demand, lookahead] = &mut self.current;
        if lookahead.take_if(|current| *current == slot).is_some() {
            match demand {
                None => *demand = Some(slot),
                Some(_) => self.wait_in_line(slot),
            }
        } else if let Some(position) = self.waiting.iter().position(|waiting| waiting.slot == slot) {
            self.waiting.remove(position);
            self.wait_in_line(slot);
        }
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
        self.waiting.clear();
        self.current = [None; 2];
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
        let (align, slab_bytes) = (u64::from(self.files.align()), self.pool.slab_bytes() as u64);
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

    /// Puts a read where its turn is among those that wait.
    fn wait_in_line(&mut self, slot: u32) {
        let Some(Active { read, submitted_ns, .. }) = &self.slots[slot as usize] else { return };
        let turn = match read.priority {
            Priority::Demand => Turn::Demand(read.segments[0].file, read.segments[0].offset),
            Priority::Lookahead => Turn::Lookahead(self.guesses),
        };
        self.guesses += u64::from(read.priority == Priority::Lookahead);
        let newcomer = Waiting { turn, submitted_ns: *submitted_ns, slot };
        let position = self.waiting.partition_point(|other| *other < newcomer);
        self.waiting.insert(position, newcomer);
    }

    /// Whether the pause of `op` is over and depth allows its call.
    fn may_repeat(&self, op: u32, now_ns: u64) -> bool {
        let Op { slot, chunk, drive, not_before_ns, .. } = self.ops[op as usize];
        let priority = self.slots[slot as usize].as_ref().map_or(Priority::Demand, |active| active.read.priority);
        not_before_ns <= now_ns && self.router.fits(drive, chunk.len - chunk.got, priority)
    }

    /// The read to hand out from: of each priority first the one that has started; then the next demand upwards of
    /// `head`, the lowest, or the first guess. With its position where it waits.
    fn choose(&self) -> Option<(u32, Option<usize>)> {
        let above = self.waiting.partition_point(|other| Some(other.turn) <= self.head);
        for priority in [Priority::Demand, Priority::Lookahead] {
            if let Some(slot) = self.current[priority as usize] {
                return Some((slot, None));
            }
            let of_priority = |position: &usize| {
                self.waiting.get(*position).is_some_and(|waiting| waiting.turn.priority() == priority)
            };
            // The lowest demand is the first of all that wait; above the last demand the guesses begin.
            if let Some(position) = [above, 0].into_iter().find(of_priority) {
                return Some((self.waiting[position].slot, Some(position)));
            }
        }
        None
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
        if self.stopping || failure.is_some_and(|(failed_at, _)| *failed_at < at) {
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
        for current in &mut self.current {
            current.take_if(|current| *current == slot);
        }
        self.waiting.retain(|waiting| waiting.slot != slot);
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
            self.stats.queued_ns += queued_ns;
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
        self.stats.service_ns += passed * self.started as u64;
    }
}

/// The request to `file` for `len` bytes from `inside` of a segment.
fn chunk_at(segment: Segment, file: FileId, inside: u32, len: u32) -> Chunk {
    let want = (segment.want - inside).min(len);
    Chunk::new(file, segment.offset + u64::from(inside), segment.at + inside, len, want)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::IoMode;
    use crate::drive::Mirror;
    use crate::plan::Segments;

    const SLAB: u32 = 1 << 20;
    const CHUNK: u32 = 256 << 10;

    /// Four chunks a read, over a file nobody reads.
    fn schedule(depth_bytes: u64, calls: usize) -> (Schedule, SlabPool, tempfile::NamedTempFile) {
        let file = tempfile::NamedTempFile::new().unwrap();
        let files = Arc::new(FileSet::open(&[file.path().to_owned()], IoMode::Buffered).unwrap());
        let pool = SlabPool::new(SLAB as usize, 8).unwrap();
        let whole_when_waiting = usize::MAX;
        let limits = Limits {
            depth_bytes,
            chunk_bytes: CHUNK,
            whole_when_waiting,
            calls,
            calls_of_drive: usize::MAX,
            reads: 8,
            caps: [None; 8],
        };
        (Schedule::new(files, pool.clone(), limits), pool, file)
    }

    fn read(tag: u64, priority: Priority, offset: u64) -> Read {
        let segment = Segment { file: FileId(0), offset, len: SLAB, at: 0, want: SLAB };
        Read { tag, priority, segments: Segments::from_slice(&[segment]).unwrap() }
    }

    fn offsets(schedule: &mut Schedule) -> Vec<u64> {
        std::iter::from_fn(|| schedule.next(0)).map(|issue| issue.offset / u64::from(CHUNK)).collect()
    }

    /// Completes every call that is out, in full, and hands out what may follow; the order of offsets in chunks.
    fn run_dry(schedule: &mut Schedule) -> Vec<u64> {
        let mut order = Vec::new();
        while let Some(issue) = schedule.next(0) {
            order.push(issue.offset / u64::from(CHUNK));
            schedule.complete(issue.op, issue.len as i32, 0);
        }
        order
    }

    #[test]
    fn demand_goes_first_then_by_offset_and_started_reads_are_finished() {
        let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
        let slab = || pool.take().unwrap();
        let mib = u64::from(SLAB);
        schedule.admit(read(0, Priority::Lookahead, 0), slab(), 0).unwrap();
        let first = schedule.next(0).unwrap();
        schedule.admit(read(1, Priority::Demand, 9 * mib), slab(), 0).unwrap();
        schedule.admit(read(2, Priority::Demand, 5 * mib), slab(), 0).unwrap();
        schedule.admit(read(3, Priority::Lookahead, 2 * mib), slab(), 0).unwrap();
        assert_eq!(offsets(&mut schedule), [], "the depth is one chunk");
        schedule.complete(first.op, CHUNK as i32, 0);
        let (five, nine, zero, two) = ([20, 21, 22, 23], [36, 37, 38, 39], [1, 2, 3], [8, 9, 10, 11]);
        assert_eq!(run_dry(&mut schedule), [&five[..], &nine, &zero, &two].concat());
        let tags: Vec<u64> = std::iter::from_fn(|| schedule.take_ready()).map(|done| done.tag).collect();
        assert_eq!(tags, [2, 1, 0, 3]);
    }

    #[test]
    fn of_guesses_the_first_goes_first_and_what_is_not_handed_out_can_be_taken_back() {
        let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
        for (tag, offset) in [(0, 9), (1, 2), (2, 5)] {
            let read = read(tag, Priority::Lookahead, offset * u64::from(SLAB));
            schedule.admit(read, pool.take().unwrap(), 0).unwrap();
        }
        let handed_out: Vec<Issue> = std::iter::from_fn(|| schedule.next(0)).collect();
        let chunks: Vec<u64> = handed_out.iter().map(|issue| issue.offset / u64::from(CHUNK)).collect();
        assert_eq!(chunks, [36, 37], "two requests of the first, though another lies before it");
        // A chunk a millisecond makes four in hand, of which one is there: the rest of the first, one of the second.
        schedule.complete(handed_out[0].op, CHUNK as i32, 1_000_000);
        let more: Vec<Issue> = std::iter::from_fn(|| schedule.next(1_000_000)).collect();
        let chunks: Vec<u64> = more.iter().map(|issue| issue.offset / u64::from(CHUNK)).collect();
        assert_eq!(chunks, [38, 39, 8]);
        assert_eq!(schedule.cancel_lookahead(1_000_000), 2, "half of the second, and the third");
        assert!(schedule.next(2_000_000).is_none() && !schedule.has_work());
        for issue in handed_out[1..].iter().chain(&more) {
            schedule.complete(issue.op, CHUNK as i32, 3_000_000);
        }
        let done: Vec<_> =
            std::iter::from_fn(|| schedule.take_ready()).map(|done| (done.tag, done.result, done.bytes)).collect();
        let (whole, cancelled) = (u64::from(SLAB), Err(IoError::Cancelled));
        assert_eq!(done, [(2, cancelled.clone(), 0), (0, Ok(()), whole), (1, cancelled, u64::from(CHUNK))]);
        assert_eq!((schedule.in_flight(), schedule.started, pool.free()), (0, 0, 8));
    }

    #[test]
    fn a_promoted_read_goes_in_its_turn_among_the_demands_and_is_finished_once() {
        let mib = u64::from(SLAB);
        let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
        let slab = || pool.take().unwrap();
        // Being handed out when it is promoted, with a demand in between; queued; and never promoted.
        schedule.admit(read(0, Priority::Lookahead, 0), slab(), 0).unwrap();
        let first = schedule.next(0).unwrap();
        schedule.admit(read(1, Priority::Demand, 7 * mib), slab(), 0).unwrap();
        schedule.complete(first.op, CHUNK as i32, 0);
        let second = schedule.next(0).unwrap();
        assert_eq!(second.offset, 7 * mib);
        for (tag, offset) in [(2, 9), (3, 2), (4, 3)] {
            schedule.admit(read(tag, Priority::Lookahead, offset * mib), slab(), 0).unwrap();
        }
        for tag in [2, 0, 0, 1, 77] {
            schedule.promote(tag);
        }
        assert_eq!(schedule.cancel_lookahead(0), 2);
        schedule.complete(second.op, CHUNK as i32, 0);
        assert_eq!(run_dry(&mut schedule), [29, 30, 31, 36, 37, 38, 39, 1, 2, 3]);
        let done: Vec<_> = std::iter::from_fn(|| schedule.take_ready()).map(|done| (done.tag, done.result)).collect();
        let cancelled = Err(IoError::Cancelled);
        assert_eq!(done, [(4, cancelled.clone()), (3, cancelled), (1, Ok(())), (2, Ok(())), (0, Ok(()))]);
        assert_eq!((schedule.in_flight(), schedule.started, schedule.stats().reads), (0, 0, 3));
    }

    #[test]
    fn a_promoted_read_that_fails_while_it_waits_is_handed_out_no_more() {
        let (mut schedule, pool, _file) = schedule(u64::from(CHUNK) * 2, 64);
        schedule.admit(read(0, Priority::Lookahead, 0), pool.take().unwrap(), 0).unwrap();
        let first = schedule.next(0).unwrap();
        schedule.admit(read(1, Priority::Demand, 64 << 20), pool.take().unwrap(), 0).unwrap();
        let other = schedule.next(0).unwrap();
        schedule.promote(0);
        schedule.complete(first.op, -libc::ENODEV, 0);
        schedule.complete(other.op, CHUNK as i32, 0);
        assert_eq!(run_dry(&mut schedule), [257, 258, 259]);
        let failed = schedule.take_ready().unwrap();
        assert!(failed.tag == 0 && failed.result.is_err());
        assert!(schedule.take_ready().unwrap().result.is_ok());
        assert_eq!((schedule.in_flight(), schedule.started, schedule.has_work()), (0, 0, false));
    }

    #[test]
    fn requests_of_the_drive_are_counted_by_their_size_and_never_pass_the_bound() {
        let chunk = u64::from(CHUNK);
        // Requests of half a chunk, of one, and of more: a call takes two, one, one.
        for (request_bytes, calls_out) in [(chunk / 2, 3), (chunk, 7), (chunk * 3, 7)] {
            let (mut schedule, pool, _file) = schedule(1 << 40, 64);
            schedule.router = Router::new(&[Some(RequestCap { requests: 7, request_bytes })], 1 << 40, usize::MAX);
            for tag in 0..8 {
                let offset = tag * u64::from(SLAB);
                schedule.admit(read(tag, Priority::Demand, offset), pool.take().unwrap(), 0).unwrap();
            }
            let mut out = Vec::new();
            let mut done = 0;
            while done < 8 * u64::from(SLAB / CHUNK) {
                out.extend(std::iter::from_fn(|| schedule.next(0)));
                assert!(out.len() <= calls_out && (out.len() == calls_out || !schedule.has_work()), "{}", out.len());
                let issue: Issue = out.pop().unwrap();
                schedule.complete(issue.op, issue.len as i32, 0);
                done += 1;
            }
            assert_eq!(schedule.calls_out(), 0);
        }
        // One call passes, whatever it takes.
        let (mut schedule, pool, _file) = schedule(1 << 40, 64);
        schedule.router = Router::new(&[Some(RequestCap { requests: 1, request_bytes: 4096 })], 1 << 40, usize::MAX);
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        assert_eq!(run_dry(&mut schedule), [0, 1, 2, 3]);
    }

    #[test]
    fn newcomers_in_front_do_not_starve_a_read_behind_the_sweep() {
        let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
        let mib = u64::from(SLAB);
        for (tag, offset) in [(0, 4 * mib), (1, 8 * mib)] {
            schedule.admit(read(tag, Priority::Demand, offset), pool.take().unwrap(), 0).unwrap();
        }
        let mut order = Vec::new();
        for tag in 2..6 {
            while order.len() < (tag - 1) * 4 {
                let issue = schedule.next(0).unwrap();
                schedule.complete(issue.op, issue.len as i32, 0);
                order.push(issue.offset / mib);
            }
            drop(schedule.take_ready());
            schedule.admit(read(tag as u64, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        }
        assert_eq!(order[..8], [4, 4, 4, 4, 8, 8, 8, 8], "the sweep reaches 8 before it turns back to 0");
    }

    #[test]
    fn bytes_and_calls_out_stay_below_their_caps() {
        let (mut schedule, pool, _file) = schedule(6 * u64::from(CHUNK), 64);
        for tag in 0..3 {
            schedule.admit(read(tag, Priority::Demand, tag << 20), pool.take().unwrap(), 0).unwrap();
        }
        assert_eq!(offsets(&mut schedule), [0, 1, 2, 3, 4, 5]);

        let (mut schedule, pool, _file) = self::schedule(8 * u64::from(CHUNK), 64);
        for tag in 0..3 {
            schedule.admit(read(tag, Priority::Lookahead, tag << 20), pool.take().unwrap(), 0).unwrap();
        }
        assert_eq!(offsets(&mut schedule), [0, 1], "of a drive that is not known yet");
        schedule.admit(read(7, Priority::Demand, 64 << 20), pool.take().unwrap(), 0).unwrap();
        assert_eq!(offsets(&mut schedule), [256, 257, 258, 259], "demand has what lookahead leaves");

        let (mut schedule, pool, _file) = self::schedule(u64::MAX, 3);
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        assert_eq!(offsets(&mut schedule), [0, 1, 2]);
        assert_eq!(schedule.calls_out(), 3);
    }

    #[test]
    fn reads_are_split_only_while_there_are_fewer_than_could_be_read_at_once() {
        let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
        schedule.limits.whole_when_waiting = 2;
        let admit = |schedule: &mut Schedule, tag| {
            schedule.admit(read(tag, Priority::Demand, tag << 20), pool.take().unwrap(), 0).unwrap();
        };
        (0..4).for_each(|tag| admit(&mut schedule, tag));
        let whole: Vec<Issue> = std::iter::from_fn(|| schedule.next(0)).collect();
        assert_eq!(whole.iter().map(|issue| issue.len / CHUNK).collect::<Vec<_>>(), [4, 4, 4, 4]);
        for issue in &whole[..2] {
            schedule.complete(issue.op, SLAB as i32, 0);
        }
        // The next makes three with the two that are still out.
        admit(&mut schedule, 4);
        assert_eq!(schedule.next(0).unwrap().len, SLAB);
        while schedule.take_ready().is_some() {}

        // Alone, a read is split for whoever is idle; the third call makes three.
        let (mut schedule, pool, _file) = self::schedule(u64::MAX, 64);
        schedule.limits.whole_when_waiting = 2;
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        let lens: Vec<u32> = std::iter::from_fn(|| schedule.next(0)).map(|issue| issue.len / CHUNK).collect();
        assert_eq!(lens, [1, 1, 1, 1]);
    }

    #[test]
    fn the_error_reported_is_the_one_nearest_the_start_whatever_the_order() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]] {
            let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
            schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
            let issues: Vec<Issue> = std::iter::from_fn(|| schedule.next(0)).collect();
            // The file ends inside the second chunk; the rest returns nothing.
            let result = |offset: u64| (300_000 - offset as i64).clamp(0, i64::from(CHUNK)) as i32;
            for index in order {
                schedule.complete(issues[index].op, result(issues[index].offset), 0);
            }
            while let Some(issue) = schedule.next(0) {
                schedule.complete(issue.op, result(issue.offset), 0);
            }
            let done = schedule.take_ready().unwrap();
            let IoError::EndOfFile { range } = done.result.unwrap_err() else { panic!("not the end of the file") };
            assert_eq!((range.offset, range.wanted, range.got), (0, u64::from(SLAB), 300_000));
            assert_eq!(schedule.in_flight(), 0);
        }
    }

    /// As `schedule`, with copies of the file on a second drive.
    fn mirrored(depth_bytes: u64, calls: usize, mode: IoMode) -> (Schedule, SlabPool, [tempfile::NamedTempFile; 2]) {
        let files = [(); 2].map(|()| tempfile::NamedTempFile::new().unwrap());
        let [own, copy] = [&files[0], &files[1]].map(|file| file.path().to_owned());
        let mirror = Mirror { dir: "mirror".into(), copies: vec![Some(copy)], seen: vec![] };
        let set = FileSet::open_mirrored(&[own], &[mirror], mode).unwrap();
        let (mut schedule, pool, _) = schedule(depth_bytes, calls);
        schedule = Schedule::new(Arc::new(set), pool.clone(), schedule.limits);
        (schedule, pool, files)
    }

    #[test]
    fn a_drive_that_cannot_be_asked_keeps_its_rate() {
        let (mut schedule, pool, _files) = mirrored(u64::MAX, 1, IoMode::Buffered);
        // The second drive is slow, and was left alone for long while the first one worked.
        for (drive, from, to) in [(1, 0, 1_000_000_000), (0, 1_000_000_000, 80_000_000_000)] {
            schedule.router.went(drive, CHUNK, from);
            let bytes = if drive == 0 { u64::MAX >> 20 } else { 1 << 20 };
            schedule.router.came(drive, CHUNK, bytes, to);
        }
        let now_ns = 80_000_000_000;
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), now_ns).unwrap();
        let asked = schedule.next(now_ns).unwrap();
        assert_eq!(schedule.ops[asked.op as usize].drive, 1, "the slow drive is due");
        schedule.complete(asked.op, 1 << 18, now_ns + 1_000_000_000);
        let first = schedule.next(now_ns + 1_000_000_000).unwrap();
        assert_eq!(schedule.ops[first.op as usize].drive, 0);
        // No operation is left, and the slow drive is due once more: nothing goes out, and nothing is forgotten.
        let later = now_ns + 60_000_000_000;
        schedule.router.went(0, 4096, later);
        schedule.router.came(0, 4096, 4096, later + 31_000_000_000);
        let soonest = |schedule: &Schedule| schedule.router.soonest(DriveSet::FIRST.with(1), CHUNK, later);
        let before = soonest(&schedule);
        assert!(schedule.next(later + 31_000_000_000).is_none());
        assert_eq!((before, soonest(&schedule)), (Some(0), Some(0)));
    }

    #[test]
    fn the_error_of_two_copies_is_what_the_models_own_had_to_say() {
        let own_says = [(libc::EIO, libc::EINVAL), (libc::EINVAL, libc::EIO)];
        for (own, other) in own_says {
            let (mut schedule, pool, files) = mirrored(u64::MAX, 4, IoMode::Buffered);
            schedule.files = match FileSet::open_mirrored(
                &[files[0].path().to_owned()],
                &[Mirror { dir: "mirror".into(), copies: vec![Some(files[1].path().to_owned())], seen: vec![] }],
                IoMode::Direct,
            ) {
                Ok(files) => Arc::new(files),
                Err(error) => return eprintln!("skipped: {error}"),
            };
            schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
            while let Some(issue) = schedule.next(0) {
                let errno = if issue.file == FileId(0) { own } else { other };
                schedule.complete(issue.op, -errno, 0);
            }
            let error = schedule.take_ready().unwrap().result.unwrap_err();
            let path = match &error {
                IoError::Read { range, errno } if errno.0 == libc::EIO && own == libc::EIO => &range.path,
                IoError::DirectRefused { path, .. } if own == libc::EINVAL => path,
                _ => panic!("{own}, {other}: {error:?}"),
            };
            assert_eq!(&**path, files[0].path());
            let lines = schedule.files.warnings();
            let about = |line: &String| line.contains("own directory is damaged");
            assert_eq!((lines.len(), lines.iter().any(about)), (2, own == libc::EIO), "{lines:?}");
        }
    }

    #[test]
    fn an_abandoned_slab_is_never_given_back() {
        let (mut schedule, pool, _file) = schedule(u64::MAX, 64);
        schedule.admit(read(0, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        assert!(schedule.next(0).is_some());
        schedule.admit(read(1, Priority::Demand, 0), pool.take().unwrap(), 0).unwrap();
        schedule.abandon();
        drop(schedule);
        assert_eq!(pool.free(), 7, "the one the kernel has stays out, the other comes back");
    }

    #[test]
    fn stopping_gives_back_what_the_kernel_does_not_have() {
        let (mut schedule, pool, _file) = schedule(u64::from(CHUNK), 64);
        for tag in 0..3 {
            schedule.admit(read(tag, Priority::Demand, tag << 20), pool.take().unwrap(), 0).unwrap();
        }
        let issue = schedule.next(0).unwrap();
        schedule.stop(0);
        assert!(schedule.next(0).is_none());
        let results: Vec<_> =
            std::iter::from_fn(|| schedule.take_ready()).map(|done| (done.tag, done.result)).collect();
        assert_eq!(results, [(1, Err(IoError::Cancelled)), (2, Err(IoError::Cancelled))]);
        schedule.complete(issue.op, CHUNK as i32, 0);
        assert_eq!(schedule.take_ready().unwrap().result, Err(IoError::Cancelled), "three chunks never went out");
        assert_eq!((schedule.in_flight(), pool.free()), (0, 8));
    }
}

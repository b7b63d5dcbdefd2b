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
use crate::device::{Completion, DeviceStats, Priority, Read, RejectReason, Rejected};
use crate::error::{IoError, ReadRange};
use crate::file::{FileId, FileSet};
use crate::plan::Segment;
use crate::pool::{Slab, SlabPool};
use crate::sector::is_aligned;

/// Bounds of a schedule.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub depth_bytes: u64,
    pub chunk_bytes: u32,
    /// Requests handed out at a time.
    pub calls: usize,
    /// Reads admitted and not yet taken as completions.
    pub reads: usize,
}

/// A call to make: read `len` bytes at `offset` of `fd` to `address`, then report the result for `op`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Issue {
    pub op: u32,
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
    /// Slots with requests not yet handed out; the next one last.
    waiting: Vec<u32>,
    ops: Vec<Op>,
    free_ops: Vec<u32>,
    /// Operations to be called again.
    again: Vec<u32>,
    ready: VecDeque<Completion>,
    bytes_out: u64,
    calls_out: usize,
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
    started: bool,
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
}

impl Schedule {
    pub fn new(files: Arc<FileSet>, pool: SlabPool, limits: Limits) -> Schedule {
        let Limits { reads, calls, .. } = limits;
        Schedule {
            files,
            pool,
            limits,
            slots: (0..reads).map(|_| None).collect(),
            free_slots: (0..reads as u32).rev().collect(),
            waiting: Vec::with_capacity(reads),
            ops: vec![Op::default(); calls],
            free_ops: (0..calls as u32).rev().collect(),
            again: Vec::with_capacity(calls),
            ready: VecDeque::with_capacity(reads),
            bytes_out: 0,
            calls_out: 0,
            active: 0,
            started: 0,
            stopping: false,
            stats: DeviceStats::default(),
            clock_ns: 0,
        }
    }

    /// Takes a read, or gives it back.
    #[allow(
        clippy::result_large_err,
        reason = "boxing the rejection would allocate on the path that never allocates"
    )]
    pub fn admit(&mut self, read: Read, slab: Slab, now_ns: u64) -> Result<(), Rejected> {
        if let Err(error) = self.check(&read, &slab) {
            return Err(Rejected {
                slab,
                read,
                why: RejectReason::Bad(error),
            });
        }
        if self.in_flight() >= self.limits.reads {
            return Err(Rejected {
                slab,
                read,
                why: RejectReason::Full,
            });
        }
        let Some(slot) = self.free_slots.pop() else {
            return Err(Rejected {
                slab,
                read,
                why: RejectReason::Full,
            });
        };
        self.tick(now_ns);
        self.active += 1;
        self.slots[slot as usize] = Some(Active {
            read,
            slab,
            submitted_ns: now_ns,
            started: false,
            segment: 0,
            inside: 0,
            outstanding: 0,
            bytes: 0,
            failure: None,
        });
        let key = self.key(slot);
        // Served from the end: everything that comes later than the newcomer stays in front of it.
        let position = self.waiting.partition_point(|other| self.key(*other) > key);
        self.waiting.insert(position, slot);
        Ok(())
    }

    /// The next call to make, if depth allows one now.
    pub fn next(&mut self, now_ns: u64) -> Option<Issue> {
        if let Some(position) = self
            .again
            .iter()
            .position(|op| self.ops[*op as usize].not_before_ns <= now_ns)
        {
            let op = self.again[position];
            let Op { chunk, slot, .. } = self.ops[op as usize];
            let priority = self.slots[slot as usize]
                .as_ref()
                .map_or(Priority::Demand, |active| active.read.priority);
            if !self.fits(chunk.len - chunk.got, priority) {
                return None;
            }
            self.again.swap_remove(position);
            return Some(self.issue(op));
        }
        let slot = *self.waiting.last()?;
        let chunk_bytes = self.limits.chunk_bytes;
        let active = self.slots[slot as usize].as_ref()?;
        let segment = active.read.segments[active.segment];
        let len = chunk_bytes.min(segment.len - active.inside);
        if !self.fits(len, active.read.priority) {
            return None;
        }
        let op = self.free_ops.pop()?;
        self.tick(now_ns);
        let active = self.slots[slot as usize].as_mut()?;
        let chunk = chunk_at(segment, active.inside, len);
        self.ops[op as usize] = Op {
            slot,
            segment: active.segment,
            chunk,
            call: Call::default(),
            not_before_ns: now_ns,
        };
        active.outstanding += 1;
        if !std::mem::replace(&mut active.started, true) {
            self.started += 1;
        }
        active.inside += len;
        // Padding after the last wanted byte is read with it or not at all.
        if active.inside >= segment.want {
            active.segment += 1;
            active.inside = 0;
        }
        if active.segment == active.read.segments.len() {
            self.waiting.pop();
        }
        Some(self.issue(op))
    }

    /// Takes the result of a call: bytes, or a negative errno.
    pub fn complete(&mut self, op: u32, result: i32, now_ns: u64) {
        let record = &mut self.ops[op as usize];
        self.bytes_out -= u64::from(record.call.len);
        self.calls_out -= 1;
        let step = record.chunk.advance(record.call, result);
        let (slot, chunk, segment) = (record.slot, record.chunk, record.segment);
        let arrived = u64::try_from(result).unwrap_or(0);
        self.stats.bytes += arrived;
        if let Some(active) = &mut self.slots[slot as usize] {
            active.bytes += arrived;
        }
        match step {
            Step::Done => {}
            Step::Again { pause_ns } => {
                return self.repeat(op, now_ns.saturating_add(pause_ns), now_ns);
            }
            Step::Refused(errno) => match self.files.refuse_direct(chunk.file, errno) {
                Ok(()) => return self.repeat(op, now_ns, now_ns),
                Err(error) => self.fail(slot, chunk.at, error, now_ns),
            },
            Step::Failed(fault) => {
                let error = self.failure(slot, segment, &chunk, fault);
                self.fail(slot, chunk.at, error, now_ns);
            }
        }
        self.release(op, now_ns);
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
        self.calls_out
    }

    /// Whether `next` may have something once depth or time allows.
    pub fn has_work(&self) -> bool {
        !self.waiting.is_empty() || !self.again.is_empty()
    }

    /// When the earliest paused request may go on.
    pub fn next_retry_ns(&self) -> Option<u64> {
        self.again
            .iter()
            .map(|op| self.ops[*op as usize].not_before_ns)
            .min()
    }

    pub fn cancel_lookahead(&mut self, now_ns: u64) -> usize {
        let mut count = 0;
        for position in (0..self.waiting.len()).rev() {
            let slot = self.waiting[position];
            let idle =
                |active: &Active| active.read.priority == Priority::Lookahead && !active.started;
            if self.slots[slot as usize].as_ref().is_some_and(idle) {
                self.waiting.remove(position);
                self.finish(slot, Err(IoError::Cancelled), now_ns);
                count += 1;
            }
        }
        count
    }

    pub fn stats(&self) -> DeviceStats {
        self.stats
    }

    /// From now on no call is handed out; reads without one in the kernel give their slabs back.
    pub fn stop(&mut self, now_ns: u64) {
        self.stopping = true;
        self.waiting.clear();
        while let Some(op) = self.again.pop() {
            self.release(op, now_ns);
        }
        for slot in 0..self.slots.len() {
            if self.slots[slot]
                .as_ref()
                .is_some_and(|active| active.outstanding == 0)
            {
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
        let Op {
            slot, chunk, call, ..
        } = self.ops[op as usize];
        let from = (chunk.at + call.skip) as usize;
        let active = self.slots[slot as usize].as_mut();
        active.map_or(&mut [], |active| {
            &mut active.slab.bytes_mut()[from..from + call.len as usize]
        })
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
        for Segment {
            file,
            offset,
            len,
            at,
            want,
        } in read.segments.iter().copied()
        {
            self.files.checked_len(file)?;
            if want == 0 || want > len {
                return bad(format!("{want} of {len} bytes wanted"));
            }
            if !(is_aligned(offset, align)
                && is_aligned(u64::from(len), align)
                && is_aligned(u64::from(at), align))
            {
                return bad(format!(
                    "{len} bytes at {offset} to {at} of the slab are not aligned to {align}"
                ));
            }
            if offset
                .checked_add(u64::from(len))
                .is_none_or(|end| end > i64::MAX as u64)
            {
                return bad(format!("{len} bytes at {offset} pass the largest offset"));
            }
            if u64::from(at) < free_from || u64::from(at) + u64::from(len) > slab_bytes {
                return bad(format!(
                    "{len} bytes at {at} of a slab of {slab_bytes} whose first {free_from} are taken"
                ));
            }
            free_from = u64::from(at) + u64::from(len);
        }
        Ok(())
    }

    /// Sort key of a waiting read: the smallest is served first. A read that has started is finished first.
    fn key(&self, slot: u32) -> (Priority, bool, FileId, u64, u64) {
        match &self.slots[slot as usize] {
            Some(Active {
                read,
                started,
                submitted_ns,
                ..
            }) => {
                let first = read.segments[0];
                (
                    read.priority,
                    !started,
                    first.file,
                    first.offset,
                    *submitted_ns,
                )
            }
            None => (
                Priority::Lookahead,
                true,
                FileId(u32::MAX),
                u64::MAX,
                u64::MAX,
            ),
        }
    }

    /// Whether `len` more bytes may go to the kernel. Lookahead leaves a quarter of the depth to demand. One request
    /// always passes, or a depth below the request size would stop everything.
    fn fits(&self, len: u32, priority: Priority) -> bool {
        let depth = match priority {
            Priority::Demand => self.limits.depth_bytes,
            Priority::Lookahead => self.limits.depth_bytes / 4 * 3,
        };
        self.calls_out == 0 || self.bytes_out + u64::from(len) <= depth
    }

    fn issue(&mut self, op: u32) -> Issue {
        let align = self.files.align();
        let record = &mut self.ops[op as usize];
        let chunk = &record.chunk;
        let source = self.files.source(chunk.file);
        let call = chunk.call(source.direct, align);
        record.call = call;
        self.bytes_out += u64::from(call.len);
        self.calls_out += 1;
        let slab = self.slots[record.slot as usize]
            .as_ref()
            .map(|active| &active.slab);
        let Some(slab) = slab else {
            unreachable!("operation {op} belongs to no read")
        };
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
        let failure = self.slots[slot as usize]
            .as_ref()
            .and_then(|active| active.failure.as_ref());
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
        self.waiting.retain(|other| *other != slot);
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
        let Some(Active {
            read,
            slab,
            submitted_ns,
            started,
            bytes,
            ..
        }) = self.slots[slot as usize].take()
        else {
            return;
        };
        self.free_slots.push(slot);
        self.active -= 1;
        self.started -= usize::from(started);
        let service_ns = now_ns.saturating_sub(submitted_ns);
        if result != Err(IoError::Cancelled) {
            self.stats.reads += 1;
            self.stats.service_ns += service_ns;
        }
        if result.is_ok() {
            self.stats.useful_bytes += read
                .segments
                .iter()
                .map(|segment| u64::from(segment.want))
                .sum::<u64>();
        }
        let service = Duration::from_nanos(service_ns);
        self.ready.push_back(Completion {
            tag: read.tag,
            slab,
            result,
            bytes,
            service,
        });
    }

    fn failure(&self, slot: u32, segment: usize, chunk: &Chunk, fault: Fault) -> IoError {
        let whole = self.slots[slot as usize]
            .as_ref()
            .map(|active| active.read.segments[segment]);
        let whole = whole.unwrap_or_default();
        let range = ReadRange {
            path: self.files.shared_path(chunk.file),
            offset: whole.offset,
            wanted: u64::from(whole.want),
            got: chunk.offset - whole.offset + u64::from(chunk.got),
        };
        match fault {
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
        self.stats.depth_integral_ns += passed * self.started as u64;
    }
}

/// The request for `len` bytes from `inside` of a segment.
fn chunk_at(segment: Segment, inside: u32, len: u32) -> Chunk {
    let want = (segment.want - inside).min(len);
    Chunk::new(
        segment.file,
        segment.offset + u64::from(inside),
        segment.at + inside,
        len,
        want,
    )
}

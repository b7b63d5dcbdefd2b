//! Threads that make the calls of a schedule: `pread` into the slabs, same contract as the ring, no call that a
//! container would refuse. The device that copies from mappings brings its own way to make a call.
#![allow(unsafe_code)]

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::access::{IoMode, drop_cached};
use crate::device::host::{Hosted, Shared, Waker};
use crate::device::schedule::{Issue, Limits, Schedule};
use crate::device::{Device, DeviceConfig, DeviceReport, requests_max};
use crate::error::{Errno, IoError};
use crate::file::FileSet;
use crate::limits::{DRIVES_MAX, READER_STACK_BYTES, THREAD_CHUNK_BYTES};
use crate::pool::SlabPool;

/// How the threads of a device read.
pub(crate) trait Calls: Send + Sync + 'static {
    /// Whether `prepare` does anything.
    const PREPARES: bool;

    /// Gets a call under way that this thread will make after the one it has.
    fn prepare(&self, issue: &Issue);

    /// Makes the call: bytes, or a negative errno.
    fn make(&self, issue: &Issue) -> i32;
}

/// Starts the readers. `fallback` is why they were not the first choice.
pub(crate) fn open(
    cfg: &DeviceConfig,
    files: Arc<FileSet>,
    pool: &SlabPool,
    fallback: Option<String>,
) -> Result<Box<dyn Device>, IoError> {
    let limits = Limits { caps: cfg.request_caps(&files, pool), ..limits(cfg, &files, pool) };
    let calls = Preads {
        flags: if files.mode() == IoMode::DontCache { libc::RWF_DONTCACHE } else { 0 },
        drop_after: files.mode() == IoMode::Drop,
    };
    let report = DeviceReport {
        name: "threads",
        fallback,
        requests_max: requests_max(&limits.caps[..files.drives()]),
        ..DeviceReport::default()
    };
    start(cfg.threads_for(&files), Schedule::new(files, pool.clone(), limits), report, calls)
}

/// Bounds of a schedule whose calls are made by threads.
pub(crate) fn limits(cfg: &DeviceConfig, files: &FileSet, pool: &SlabPool) -> Limits {
    let threads = cfg.threads_for(files);
    // A slab that is to be striped is never one request.
    let whole = cfg.chunk_bytes.is_none() && files.drives() == 1;
    Limits {
        depth_bytes: cfg.depth_for(pool.largest_slab_bytes()),
        chunk_bytes: cfg.chunk_for(THREAD_CHUNK_BYTES, files),
        whole_when_waiting: if whole { threads - 1 } else { usize::MAX },
        // A request that waits to be repeated keeps its operation, which must not stop a thread that is idle.
        calls: threads * 4,
        // A drive that hangs keeps its own threads and leaves the others theirs.
        calls_of_drive: if files.drives() > 1 { (threads / files.drives()).max(1) } else { usize::MAX },
        reads: cfg.queue,
        caps: [None; DRIVES_MAX],
    }
}

/// Starts so many threads over `schedule`.
pub(crate) fn start(
    threads: usize,
    schedule: Schedule,
    report: DeviceReport,
    calls: impl Calls,
) -> Result<Box<dyn Device>, IoError> {
    let (shared, calls) = (Shared::new(schedule), Arc::new(calls));
    let mut hosted = Hosted::new(Arc::clone(&shared), Waker::Condvar, Vec::with_capacity(threads), report);
    for index in 0..threads {
        let (shared, calls) = (Arc::clone(&shared), Arc::clone(&calls));
        let reader = std::thread::Builder::new().name(format!("read-{index}")).stack_size(READER_STACK_BYTES);
        let thread = reader.spawn(move || {
            let guard = DeathWatch(&shared);
            serve(&shared, &*calls);
            std::mem::forget(guard);
        });
        // On an error `hosted` is dropped, which stops and joins the threads already running.
        let thread = thread.map_err(|error| IoError::Start { what: "a reader thread", errno: Errno::of(&error) })?;
        hosted.push_thread(thread);
    }
    Ok(Box::new(hosted))
}

/// One reader: takes a call, makes it, reports it, until the device stops.
fn serve<C: Calls>(shared: &Shared, calls: &C) {
    // A call that is this thread's already, prepared and not made.
    let mut ahead: Option<Issue> = None;
    let mut state = shared.lock();
    loop {
        let now_ns = shared.now_ns();
        if state.stop {
            if let Some(issue) = ahead {
                // Nothing was read for it: to the schedule that is an interrupted call, which it drops when stopping.
                state.schedule.complete(issue.op, -libc::EINTR, now_ns);
            }
            return;
        }
        let Some(issue) = ahead.take().or_else(|| state.schedule.next(now_ns)) else {
            let pause =
                state.schedule.next_retry_ns(now_ns).map(|at| Duration::from_nanos(at.saturating_sub(now_ns).max(1)));
            state.idle += 1;
            state = match pause {
                Some(pause) => shared.work.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0,
                None => shared.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            state.idle -= 1;
            continue;
        };
        // A call taken ahead is lost to the other threads, so only where none of them has nothing to do; and where it is
        // of the same drive, as it waits for the call before it.
        if C::PREPARES && state.idle == 0 && state.schedule.drives_len() == 1 {
            ahead = state.schedule.next(now_ns);
        }
        if state.schedule.has_work() {
            shared.work.notify_one();
        }
        drop(state);
        if let Some(next) = &ahead {
            calls.prepare(next);
        }
        let result = calls.make(&issue);
        state = shared.lock();
        let now_ns = shared.now_ns();
        state.schedule.complete(issue.op, result, now_ns);
        if state.schedule.has_ready() {
            shared.notify_ready();
        }
    }
}

/// System calls that read, in the mode of the files.
struct Preads {
    /// Of `preadv2`.
    flags: i32,
    /// Whether the page cache is to forget what a call has copied.
    drop_after: bool,
}

impl Calls for Preads {
    const PREPARES: bool = false;

    fn prepare(&self, _: &Issue) {}

    fn make(&self, issue: &Issue) -> i32 {
        let place = libc::iovec { iov_base: issue.address.as_ptr().cast(), iov_len: issue.len as usize };
        let offset = issue.offset.cast_signed();
        let count = if self.flags == 0 {
            // SAFETY: `Schedule` keeps the slab that holds `address..address + len` in the slot of this operation until
            // `complete` is called for it, so the memory is mapped and nobody else reads or writes it during the call.
            unsafe { libc::pread(issue.fd, place.iov_base, place.iov_len, offset) }
        } else {
            // SAFETY: as above; `place` outlives the call.
            unsafe { libc::preadv2(issue.fd, &raw const place, 1, offset, self.flags) }
        };
        let result = match i32::try_from(count) {
            Ok(count) if count >= 0 => count,
            _ => -Errno::last().0,
        };
        if self.drop_after && result > 0 {
            drop_cached(issue.fd, issue.offset, u64::from(result.cast_unsigned()));
        }
        result
    }
}

/// Latches the device as dead when its thread unwinds.
struct DeathWatch<'a>(&'a Shared);

impl Drop for DeathWatch<'_> {
    fn drop(&mut self) {
        self.0.die("a reader thread panicked".to_owned());
    }
}

//! Reader threads: `pread` into the slabs, same contract as the ring, no call that a container would refuse.
#![allow(unsafe_code)]

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use crate::device::host::{Hosted, Shared, Waker};
use crate::device::schedule::{Issue, Limits, Schedule};
use crate::device::{Device, DeviceConfig, DeviceReport};
use crate::error::{Errno, IoError};
use crate::file::FileSet;
use crate::limits::THREAD_CHUNK_BYTES;
use crate::pool::SlabPool;

/// Starts the readers. `fallback` is why they were not the first choice.
pub(crate) fn open(
    cfg: &DeviceConfig,
    files: Arc<FileSet>,
    pool: &SlabPool,
    fallback: Option<String>,
) -> Result<Box<dyn Device>, IoError> {
    let limits = Limits {
        depth_bytes: cfg.depth_for(pool.slab_bytes()),
        chunk_bytes: cfg.chunk_for(THREAD_CHUNK_BYTES, &files),
        whole_when_waiting: if cfg.chunk_bytes.is_none() { cfg.threads - 1 } else { usize::MAX },
        // A request that waits to be repeated keeps its operation, which must not stop a thread that is idle.
        calls: cfg.threads * 4,
        reads: cfg.queue,
    };
    let shared = Shared::new(Schedule::new(files, pool.clone(), limits));
    let report = DeviceReport { name: "threads", fallback, ..DeviceReport::default() };
    let mut hosted = Hosted::new(Arc::clone(&shared), Waker::Condvar, Vec::with_capacity(cfg.threads), report);
    for index in 0..cfg.threads {
        let shared = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name(format!("read-{index}")).spawn(move || {
            let guard = DeathWatch(&shared);
            serve(&shared);
            std::mem::forget(guard);
        });
        // On an error `hosted` is dropped, which stops and joins the threads already running.
        let thread = thread.map_err(|error| IoError::Start { what: "a reader thread", errno: Errno::of(&error) })?;
        hosted.push_thread(thread);
    }
    Ok(Box::new(hosted))
}

/// One reader: takes a call, makes it, reports it, until the device stops.
fn serve(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        if state.stop {
            return;
        }
        let now_ns = shared.now_ns();
        let Some(issue) = state.schedule.next(now_ns) else {
            let pause = state.schedule.next_retry_ns().map(|at| Duration::from_nanos(at.saturating_sub(now_ns).max(1)));
            state = match pause {
                Some(pause) => shared.work.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0,
                None => shared.work.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
            continue;
        };
        if state.schedule.has_work() {
            shared.work.notify_one();
        }
        drop(state);
        let result = read(&issue);
        state = shared.lock();
        let now_ns = shared.now_ns();
        state.schedule.complete(issue.op, result, now_ns);
        if state.schedule.has_ready() {
            shared.notify_ready();
        }
    }
}

/// One `pread`: bytes, or a negative errno.
fn read(issue: &Issue) -> i32 {
    // SAFETY: `Schedule` keeps the slab that holds `address..address + len` in the slot of this operation until
    // `complete` is called for it, so the memory is mapped and nobody else reads or writes it during the call.
    let count =
        unsafe { libc::pread(issue.fd, issue.address.as_ptr().cast(), issue.len as usize, issue.offset.cast_signed()) };
    match i32::try_from(count) {
        Ok(count) if count >= 0 => count,
        _ => -Errno::last().0,
    }
}

/// Latches the device as dead when its thread unwinds.
struct DeathWatch<'a>(&'a Shared);

impl Drop for DeathWatch<'_> {
    fn drop(&mut self) {
        self.0.die("a reader thread panicked".to_owned());
    }
}

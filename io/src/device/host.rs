//! The caller's half of a device whose reads are made by threads of its own.
//!
//! One lock guards the schedule. It is held for bookkeeping only, never across a system call that reads, so a
//! submission takes microseconds even while the kernel makes the I/O thread wait.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::device::schedule::Schedule;
use crate::device::{Completion, Device, DeviceReport, DeviceStats, Read, RejectReason, Rejected, Wait};
use crate::error::IoError;
use crate::pool::Slab;

/// What the caller and the I/O threads share.
pub(crate) struct Shared {
    state: Mutex<State>,
    /// Something can be reaped, or nothing ever will.
    ready: Condvar,
    /// Something can be read, or it is time to stop.
    pub work: Condvar,
    epoch: Instant,
}

pub(crate) struct State {
    pub schedule: Schedule,
    pub dead: Option<IoError>,
    pub stop: bool,
    /// The ring's thread is about to wait in the kernel, or does.
    pub asleep: bool,
}

/// How to call the I/O threads' attention.
pub(crate) enum Waker {
    Condvar,
    Event(File),
}

pub(crate) struct Hosted {
    shared: Arc<Shared>,
    waker: Waker,
    threads: Vec<JoinHandle<()>>,
    report: DeviceReport,
}

impl Shared {
    pub fn new(schedule: Schedule) -> Arc<Shared> {
        Arc::new(Shared {
            state: Mutex::new(State { schedule, dead: None, stop: false, asleep: false }),
            ready: Condvar::new(),
            work: Condvar::new(),
            epoch: Instant::now(),
        })
    }

    /// A panic under the lock is caught by the death of its thread; the state itself stays usable for draining.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn now_ns(&self) -> u64 {
        u64::try_from(self.epoch.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    pub fn notify_ready(&self) {
        self.ready.notify_all();
    }

    /// Latches the first cause of death and wakes everybody who waits.
    pub fn die(&self, cause: String) {
        let mut state = self.lock();
        state.stop = true;
        state.dead.get_or_insert(IoError::DeviceDied { cause });
        drop(state);
        self.ready.notify_all();
        self.work.notify_all();
    }
}

impl Hosted {
    pub fn new(shared: Arc<Shared>, waker: Waker, threads: Vec<JoinHandle<()>>, report: DeviceReport) -> Hosted {
        Hosted { shared, waker, threads, report }
    }

    pub fn push_thread(&mut self, thread: JoinHandle<()>) {
        self.threads.push(thread);
    }

    fn wake(&self, state: MutexGuard<'_, State>) {
        let asleep = state.asleep;
        drop(state);
        match &self.waker {
            Waker::Condvar => self.shared.work.notify_one(),
            Waker::Event(event) if asleep => {
                // A full counter means a wake-up is pending already.
                let _ = (&mut &*event).write(&1u64.to_ne_bytes());
            }
            Waker::Event(_) => {}
        }
    }
}

impl Device for Hosted {
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected> {
        let mut state = self.shared.lock();
        if let Some(dead) = &state.dead {
            let why = RejectReason::Dead(dead.clone());
            return Err(Rejected { slab, read, why });
        }
        let now_ns = self.shared.now_ns();
        state.schedule.admit(read, slab, now_ns)?;
        self.wake(state);
        Ok(())
    }

    fn reap(&mut self, wait: Wait) -> Result<Option<Completion>, IoError> {
        let mut state = self.shared.lock();
        loop {
            if let Some(done) = state.schedule.take_ready() {
                return Ok(Some(done));
            }
            if let Some(dead) = &state.dead {
                return Err(dead.clone());
            }
            if wait == Wait::No || state.schedule.in_flight() == 0 {
                return Ok(None);
            }
            state = self.shared.ready.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn in_flight(&self) -> usize {
        self.shared.lock().schedule.in_flight()
    }

    fn cancel_lookahead(&mut self) -> usize {
        let now_ns = self.shared.now_ns();
        self.shared.lock().schedule.cancel_lookahead(now_ns)
    }

    fn stats(&self) -> DeviceStats {
        self.shared.lock().schedule.stats()
    }

    fn describe(&self) -> &DeviceReport {
        &self.report
    }
}

impl Drop for Hosted {
    /// The kernel owns the slabs of reads in flight: wait for them before anything is freed.
    fn drop(&mut self) {
        let now_ns = self.shared.now_ns();
        let mut state = self.shared.lock();
        state.stop = true;
        state.schedule.stop(now_ns);
        state.asleep = true;
        self.wake(state);
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            // A thread that panicked has latched its cause and leaked what the kernel may still write to.
            let _ = thread.join();
        }
    }
}

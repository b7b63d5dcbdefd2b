//! The caller's half of a device whose reads are made by threads of its own.
//!
//! One lock guards the schedule. It is held for bookkeeping only, never across a system call that reads, so a
//! submission takes microseconds even while the kernel makes the I/O thread wait.

use std::fs::File;
use std::io::Write;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::device::clock::cpu_ns;
use crate::device::schedule::Schedule;
use crate::device::{Completion, Device, DeviceReport, DeviceStats, Read, RejectReason, Rejected, Wait};
use crate::drive::DriveStats;
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
    /// Reader threads that wait for work.
    pub idle: usize,
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
            state: Mutex::new(State { schedule, dead: None, stop: false, asleep: false, idle: 0 }),
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
        let asked = Instant::now();
        let mut state = self.shared.lock();
        loop {
            if let Some(done) = state.schedule.take_ready() {
                return Ok(Some(done));
            }
            if let Some(dead) = &state.dead {
                return Err(dead.clone());
            }
            if state.schedule.in_flight() == 0 {
                return Ok(None);
            }
            let ready = &self.shared.ready;
            state = match wait {
                Wait::No => return Ok(None),
                Wait::Block => ready.wait(state).unwrap_or_else(PoisonError::into_inner),
                Wait::AtMost(limit) => {
                    let left = limit.saturating_sub(asked.elapsed());
                    if left.is_zero() {
                        return Ok(None);
                    }
                    ready.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    fn in_flight(&self) -> usize {
        self.shared.lock().schedule.in_flight()
    }

    fn cancel_lookahead(&mut self) -> usize {
        let now_ns = self.shared.now_ns();
        self.shared.lock().schedule.cancel_lookahead(now_ns)
    }

    fn promote(&mut self, tag: u64) {
        let mut state = self.shared.lock();
        state.schedule.promote(tag);
        // A demand may use depth that was closed to it before.
        self.wake(state);
    }

    fn stats(&self) -> DeviceStats {
        let state = self.shared.lock();
        // Through the page cache a ring's reads are made by workers of the kernel, and its queue may be polled by one.
        let helped = match self.waker {
            Waker::Condvar => false,
            Waker::Event(_) => self.report.sqpoll || !state.schedule.is_direct(),
        };
        let stats = state.schedule.stats();
        drop(state);
        DeviceStats { cpu_ns: if helped { None } else { self.threads.iter().map(cpu_ns).sum() }, ..stats }
    }

    fn drives(&self) -> Vec<DriveStats> {
        self.shared.lock().schedule.drives()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::IoMode;
    use crate::device::schedule::{Issue, Limits};
    use crate::device::{Priority, leave};
    use crate::file::{FileId, FileSet};
    use crate::plan::{Segment, Segments};
    use crate::pool::SlabPool;
    use std::sync::mpsc;
    use std::time::Duration;

    struct Fixture {
        device: Hosted,
        shared: Arc<Shared>,
        pool: SlabPool,
        read: Read,
        _file: tempfile::NamedTempFile,
    }

    /// A device whose I/O is made by hand, or by `thread`.
    fn fixture(thread: impl FnOnce(Arc<Shared>) + Send + 'static) -> Fixture {
        let file = tempfile::NamedTempFile::new().unwrap();
        let files = Arc::new(FileSet::open(&[file.path().to_owned()], IoMode::Buffered).unwrap());
        let pool = SlabPool::new(4096, 4).unwrap();
        let limits = Limits {
            depth_bytes: 4096,
            chunk_bytes: 4096,
            whole_when_waiting: usize::MAX,
            calls: 4,
            calls_of_drive: usize::MAX,
            reads: 4,
            caps: [None; 8],
        };
        let shared = Shared::new(Schedule::new(files, pool.clone(), limits));
        let there = Arc::clone(&shared);
        let threads = vec![std::thread::spawn(move || thread(there))];
        let device = Hosted::new(Arc::clone(&shared), Waker::Condvar, threads, DeviceReport::default());
        let segment = Segment { file: FileId(0), offset: 0, len: 4096, at: 0, want: 4096 };
        let segments = Segments::from_slice(&[segment]).unwrap();
        let read = Read { tag: 0, priority: Priority::Demand, segments };
        Fixture { device, shared, pool, read, _file: file }
    }

    fn take_issue(shared: &Shared) -> Issue {
        loop {
            if let Some(issue) = shared.lock().schedule.next(0) {
                return issue;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_dead_device_latches_and_keeps_only_what_the_kernel_has() {
        let Fixture { mut device, pool, read, .. } = fixture(|shared| {
            let lost = take_issue(&shared);
            assert_eq!(lost.len, 4096);
            shared.lock().schedule.abandon();
            shared.die("the test says so".to_owned());
        });
        for _ in 0..2 {
            // The second may meet the death already; either way its slab must not be lost.
            drop(device.submit(read, pool.take().unwrap()));
        }
        for wait in [Wait::Block, Wait::No, Wait::AtMost(Duration::from_secs(1000)), Wait::Block] {
            while let Ok(None) = device.reap(wait) {}
            assert_eq!(device.reap(wait).unwrap_err(), IoError::DeviceDied { cause: "the test says so".to_owned() });
        }
        let rejected = device.submit(read, pool.take().unwrap()).unwrap_err();
        assert!(matches!(rejected.why, RejectReason::Dead(_)));
        drop(rejected);
        drop(device);
        assert_eq!(pool.free(), 3, "the one in the kernel is leaked on purpose");
    }

    #[test]
    fn a_bounded_wait_ends_and_leaves_the_read_in_flight() {
        let (go, going) = mpsc::channel::<()>();
        let Fixture { mut device, pool, read, .. } = fixture(move |shared| {
            let issue = take_issue(&shared);
            going.recv().unwrap();
            shared.lock().schedule.complete(issue.op, 4096, 0);
            shared.notify_ready();
        });
        device.submit(read, pool.take().unwrap()).unwrap();
        assert!(device.reap(Wait::AtMost(Duration::from_millis(5))).unwrap().is_none());
        assert_eq!((device.in_flight(), pool.free()), (1, 3));
        go.send(()).unwrap();
        assert!(device.reap(Wait::AtMost(Duration::from_secs(1000))).unwrap().unwrap().result.is_ok());
        assert!(device.reap(Wait::AtMost(Duration::from_secs(1000))).unwrap().is_none(), "nothing to wait for");
    }

    #[test]
    fn a_device_that_is_left_is_not_waited_for() {
        let (go, going) = mpsc::channel::<()>();
        let Fixture { mut device, shared, pool, read, _file } = fixture(move |shared| {
            let issue = take_issue(&shared);
            // The drive answers when the device has long been left.
            let _ = going.recv();
            shared.lock().schedule.complete(issue.op, 4096, 0);
        });
        device.submit(read, pool.take().unwrap()).unwrap();
        assert_eq!((leave(Box::new(device)), pool.free()), (1, 3));
        // The memory is still the read's, and what is left of the device takes the answer.
        go.send(()).unwrap();
        while !shared.lock().schedule.has_ready() {
            std::thread::yield_now();
        }
        drop(shared.lock().schedule.take_ready());
        assert_eq!(pool.free(), 4);
    }

    #[test]
    fn a_device_that_is_left_when_it_is_done_is_dropped() {
        let Fixture { mut device, shared, pool, read, _file } = fixture(|shared| {
            let issue = take_issue(&shared);
            shared.lock().schedule.complete(issue.op, 4096, 0);
            shared.notify_ready();
        });
        device.submit(read, pool.take().unwrap()).unwrap();
        assert_eq!((leave(Box::new(device)), pool.free()), (0, 4));
        assert!(shared.lock().stop);
    }

    #[test]
    fn dropping_the_device_waits_for_a_read_that_completes_late() {
        let Fixture { mut device, shared, pool, read, .. } = fixture(|shared| {
            let issue = take_issue(&shared);
            // The device is being dropped before the kernel answers.
            while !shared.lock().stop {
                std::thread::yield_now();
            }
            assert_eq!(shared.lock().schedule.calls_out(), 1);
            shared.lock().schedule.complete(issue.op, 4096, 0);
        });
        device.submit(read, pool.take().unwrap()).unwrap();
        device.submit(read, pool.take().unwrap()).unwrap();
        while shared.lock().schedule.calls_out() == 0 {
            std::thread::yield_now();
        }
        drop(device);
        while shared.lock().schedule.take_ready().is_some() {}
        assert_eq!(pool.free(), 4);
    }
}

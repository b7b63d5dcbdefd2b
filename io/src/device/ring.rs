//! io_uring on a thread of its own: submission may block for as long as the drive's queue is full, so nobody who
//! computes submits. The thread owns the ring, which makes the life of every buffer provable.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use io_uring::{IoUring, Probe, opcode, squeue, types};

use crate::access::{IoMode, drop_cached};
use crate::arena::Arena;
use crate::device::host::{Hosted, Shared, Waker};
use crate::device::ring_setup::{
    Registered, event_fd, passing, refused, register, register_files, registered_file, set_up, take_event,
    wait_for_event,
};
use crate::device::schedule::{Issue, Limits, Schedule};
use crate::device::{Device, DeviceConfig, DeviceReport, requests_max};
use crate::error::{Errno, ErrnoKind, IoError};
use crate::file::{FileId, FileSet};
use crate::limits::{
    BACKOFF_NS_MAX, BACKOFF_NS_MIN, ENTER_RETRIES_MAX, PROBE_MAX, RING_BUFFERED_WORKERS, RING_CHUNK_BYTES,
};
use crate::pool::SlabPool;

/// `user_data` of the poll that ends the wait; operations count from 0.
const WAKE: u64 = u64::MAX;
/// `user_data` of the read made before the first real one.
const PROBE: u64 = u64::MAX - 1;

/// Probes io_uring and starts its thread.
pub(crate) fn open(cfg: &DeviceConfig, files: Arc<FileSet>, pool: &SlabPool) -> Result<Box<dyn Device>, IoError> {
    if cfg.iopoll
        && let Some(file) = files.entries().find(|file| !files.source(*file).direct)
    {
        let why = format!("{} is not read directly", files.path(file).display());
        return Err(IoError::Refused { what: "iopoll", why });
    }
    let event = event_fd()?;
    let waker = event.try_clone().map_err(|error| IoError::Start { what: "an eventfd", errno: Errno::of(&error) })?;
    let (tell_setup, setup) = mpsc::sync_channel(1);
    let (hand_over, handed_over) = mpsc::sync_channel::<Arc<Shared>>(1);
    let (cfg_there, files_there, pool_there) = (*cfg, Arc::clone(&files), pool.clone());
    // A ring may belong to the one thread that made it, so setup, probe and registration all happen over there.
    let spawned = std::thread::Builder::new().name("ring".to_owned()).spawn(move || {
        match Driver::new(&cfg_there, &files_there, &pool_there, event) {
            Err(error) => drop(tell_setup.send(Err(error))),
            Ok(mut driver) => {
                if tell_setup.send(Ok(driver.facts.clone())).is_ok()
                    && let Ok(shared) = handed_over.recv()
                {
                    driver.serve(&shared);
                }
            }
        }
    });
    let thread = spawned.map_err(|error| IoError::Start { what: "the ring's thread", errno: Errno::of(&error) })?;
    let facts = match setup.recv() {
        Ok(Ok(facts)) => facts,
        Ok(Err(error)) => {
            let _ = thread.join();
            return Err(error);
        }
        Err(_) => {
            let _ = thread.join();
            return Err(IoError::DeviceDied { cause: "the ring's thread ended during setup".to_owned() });
        }
    };
    let limits = limits(cfg, &files, pool, &facts);
    let requests_max = requests_max(&limits.caps[..files.drives()]);
    let shared = Shared::new(Schedule::new(files, pool.clone(), limits));
    let report = DeviceReport {
        name: "io_uring",
        fallback: None,
        registered_bytes: facts.registered_bytes,
        registered_files: facts.registered_files,
        sqpoll: cfg.sqpoll,
        iopoll: cfg.iopoll,
        requests_max,
        notes: facts.notes,
    };
    let _ = hand_over.send(Arc::clone(&shared));
    Ok(Box::new(Hosted::new(shared, Waker::Event(waker), vec![thread], report)))
}

fn limits(cfg: &DeviceConfig, files: &FileSet, pool: &SlabPool, facts: &Facts) -> Limits {
    let whole_slab = (pool.largest_slab_bytes() as u32).next_multiple_of(files.align());
    let default_chunk = if facts.registered_bytes > 0 { RING_CHUNK_BYTES } else { whole_slab };
    Limits {
        depth_bytes: cfg.depth_for(pool.largest_slab_bytes()),
        chunk_bytes: cfg.chunk_for(default_chunk, files),
        whole_when_waiting: usize::MAX,
        // One entry is the wake-up poll's: then neither queue can overflow.
        calls: facts.entries as usize - 1,
        calls_of_drive: usize::MAX,
        reads: cfg.queue,
        caps: cfg.request_caps(files, pool),
    }
}

/// What the setup found.
#[derive(Clone, Debug, Default)]
struct Facts {
    entries: u32,
    registered_bytes: u64,
    registered_files: bool,
    notes: Vec<String>,
}

/// The ring's thread.
struct Driver {
    ring: IoUring,
    event: File,
    armed: bool,
    registered: Registered,
    results: Vec<(u64, i32)>,
    /// Completions are polled for: such a ring takes nothing but reads, so the wake-up is waited for beside it.
    iopoll: bool,
    /// Of each read.
    rw_flags: i32,
    /// What each operation reads, where the page cache is to forget it afterwards; empty otherwise.
    to_drop: Vec<(RawFd, u64)>,
    facts: Facts,
}

impl Drop for Driver {
    /// Takes buffers back: of a ring that is only closed the kernel keeps them for a while after the program's end, and
    /// whoever starts next in its control group finds so much less.
    fn drop(&mut self) {
        // There may be none; and a kernel that keeps them keeps them.
        let _ = self.ring.submitter().unregister_buffers();
    }
}

impl Driver {
    fn new(cfg: &DeviceConfig, files: &FileSet, pool: &SlabPool, event: File) -> Result<Driver, IoError> {
        let ring = set_up(cfg)?;
        let mut facts = Facts { entries: ring.params().sq_entries(), ..Facts::default() };
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe).map_err(|error| refused("register_probe", Errno::of(&error)))?;
        for (code, name) in [
            (opcode::Read::CODE, "support for READ"),
            (opcode::ReadFixed::CODE, "support for READ_FIXED"),
            (opcode::PollAdd::CODE, "support for POLL_ADD"),
        ] {
            if !probe.is_supported(code) {
                return Err(refused(name, Errno(libc::EOPNOTSUPP)));
            }
        }
        // Buffered reads run on kernel workers; without a cap there may be one per request. Advice only.
        let _ = ring.submitter().register_iowq_max_workers(&mut [RING_BUFFERED_WORKERS, 0]);
        let mut driver = Driver {
            ring,
            event,
            armed: false,
            registered: Registered::default(),
            results: Vec::new(),
            iopoll: cfg.iopoll,
            rw_flags: if files.mode() == IoMode::DontCache { libc::RWF_DONTCACHE } else { 0 },
            to_drop: if files.mode() == IoMode::Drop { vec![(-1, 0); facts.entries as usize] } else { Vec::new() },
            facts: Facts::default(),
        };
        driver.results.reserve_exact(driver.ring.params().cq_entries() as usize);
        driver.probe_read(files, PROBE_MAX)?;
        if cfg.register {
            let (registered, note) = register(&driver.ring, pool);
            driver.registered = registered;
            facts.notes.extend(note);
        }
        if cfg.register_files {
            let outcome = register_files(&driver.ring, files);
            facts.registered_files = outcome.is_ok();
            facts.notes.extend(outcome.err().filter(|_| !files.is_empty()));
        }
        facts.registered_bytes = driver.registered.bytes() as u64;
        driver.facts = facts;
        Ok(driver)
    }

    /// Reads one sector of the first file: a filter may let the setup pass and forbid the rest.
    fn probe_read(&mut self, files: &FileSet, patience: Duration) -> Result<(), IoError> {
        if files.is_empty() {
            return Ok(());
        }
        let source = files.source(files.first_direct().unwrap_or(FileId(0)));
        let buffer = Arena::new(files.align() as usize)?;
        // The kernel may write until the result is in: where that never comes, the buffer must never be freed.
        let mut buffer = std::mem::ManuallyDrop::new(buffer);
        let memory = buffer.as_mut_slice();
        let entry =
            opcode::Read::new(types::Fd(source.fd), memory.as_mut_ptr(), memory.len() as u32).build().user_data(PROBE);
        self.push(&entry).map_err(|_| refused("queueing a read", Errno(libc::EBUSY)))?;
        let asked = Instant::now();
        // By time: a polled wait comes back without a result whenever the scheduler wants the core.
        while asked.elapsed() < patience {
            // A drive that hangs must not hold up the readers that could take over. Where the wait cannot be timed, on
            // kernels before 5.11 and where completions are polled for, it does.
            let timed = self.ring.params().is_feature_ext_arg();
            let left = u64::try_from(patience.saturating_sub(asked.elapsed()).as_nanos()).unwrap_or(u64::MAX);
            match self.enter(timed.then_some(left.max(1))) {
                Ok(()) => std::thread::yield_now(),
                Err(errno) if passing(errno) => {}
                Err(errno) => return Err(refused("io_uring_enter", errno)),
            }
            if let Some(done) = self.ring.completion().next() {
                drop(std::mem::ManuallyDrop::into_inner(buffer));
                let errno = Errno(done.result().saturating_neg());
                // Damage at the first byte is for the reader to report; the ring did its part.
                let works = done.result() >= 0 || errno.kind() == ErrnoKind::Damaged;
                return match errno.kind() {
                    _ if works => Ok(()),
                    ErrnoKind::Unsupported if self.iopoll => {
                        let why = format!("the first polled read was refused: {errno}");
                        Err(IoError::Refused { what: "iopoll", why })
                    }
                    _ => Err(refused("the first read", errno)),
                };
            }
        }
        Err(refused("waiting for the first read", Errno(libc::ETIME)))
    }

    /// Serves until the device stops and the kernel has given everything back.
    fn serve(&mut self, shared: &Shared) {
        let watch = DeathWatch { shared };
        match self.run(shared) {
            Ok(()) => std::mem::forget(watch),
            Err(cause) => {
                std::mem::forget(watch);
                shared.lock().schedule.abandon();
                shared.die(cause);
            }
        }
    }

    fn run(&mut self, shared: &Shared) -> Result<(), String> {
        let mut fruitless = 0;
        loop {
            let mut state = shared.lock();
            if state.stop && state.schedule.calls_out() == 0 {
                return Ok(());
            }
            let now_ns = shared.now_ns();
            while !state.stop
                && let Some(issue) = state.schedule.next(now_ns)
            {
                self.push_read(&issue)?;
            }
            let pause_ns = state.schedule.next_retry_ns(now_ns).map(|at| at.saturating_sub(now_ns).max(1));
            let nothing_out = state.schedule.calls_out() == 0;
            state.asleep = true;
            drop(state);

            if !self.armed && !self.iopoll {
                let poll = opcode::PollAdd::new(types::Fd(self.event.as_raw_fd()), libc::POLLIN as u32);
                self.push(&poll.build().user_data(WAKE))?;
                self.armed = true;
            }
            let waited = match self.iopoll {
                true if nothing_out => wait_for_event(&self.event, pause_ns),
                // The kernel polls the drive until something completes; new reads wait for that.
                true => self.enter(None),
                false => self.enter(pause_ns),
            };
            match waited {
                Ok(()) => fruitless = 0,
                Err(errno) if passing(errno) && fruitless < ENTER_RETRIES_MAX => {
                    // EINTR and ETIME are ordinary; the others mean the kernel is short of something.
                    if !matches!(errno.0, libc::EINTR | libc::ETIME) {
                        std::thread::sleep(squeezed_pause(fruitless));
                        fruitless += 1;
                    }
                }
                Err(errno) => return Err(format!("io_uring_enter failed: {errno}")),
            }
            self.collect(shared)?;
        }
    }

    /// Submits what is queued and waits for a result, or for the pause to end.
    fn enter(&self, pause_ns: Option<u64>) -> Result<(), Errno> {
        let outcome = match pause_ns {
            None => self.ring.submit_and_wait(1),
            Some(pause_ns) if self.ring.params().is_feature_ext_arg() => {
                let pause = types::Timespec::from(std::time::Duration::from_nanos(pause_ns));
                let args = types::SubmitArgs::new().timespec(&pause);
                self.ring.submitter().submit_with_args(1, &args)
            }
            // Kernels before 5.11 cannot time the wait.
            Some(pause_ns) => {
                std::thread::sleep(std::time::Duration::from_nanos(pause_ns));
                self.ring.submit()
            }
        };
        outcome.map(drop).map_err(|error| Errno::of(&error))
    }

    /// Takes all results, of which there may be none after a successful wait.
    fn collect(&mut self, shared: &Shared) -> Result<(), String> {
        self.results.clear();
        for done in self.ring.completion() {
            self.results.push((done.user_data(), done.result()));
        }
        // Before the completion is told: what was asked to be dropped is gone when the reader has it.
        for (user_data, result) in self.results.iter().copied() {
            if let Some((fd, offset)) = usize::try_from(user_data).ok().and_then(|op| self.to_drop.get(op))
                && let Ok(len @ 1..) = u32::try_from(result)
            {
                drop_cached(*fd, *offset, u64::from(len));
            }
        }
        let mut state = shared.lock();
        state.asleep = false;
        if self.results.is_empty() {
            return Ok(());
        }
        let now_ns = shared.now_ns();
        for (user_data, result) in self.results.iter().copied() {
            if user_data == WAKE {
                self.armed = false;
                take_event(&self.event);
                if result < 0 && !passing(Errno(-result)) {
                    return Err(format!("polling the eventfd failed: {}", Errno(-result)));
                }
            } else {
                let op = u32::try_from(user_data).map_err(|_| format!("a result for unknown request {user_data}"))?;
                state.schedule.complete(op, result, now_ns);
            }
        }
        if state.schedule.has_ready() {
            shared.notify_ready();
        }
        Ok(())
    }

    fn push_read(&mut self, issue: &Issue) -> Result<(), String> {
        let Issue { op, file, offset, len, .. } = *issue;
        let address = issue.address.as_ptr();
        // A buffered read may sleep in the submission: hand it to a kernel worker at once.
        let mut flags = if issue.direct { squeue::Flags::empty() } else { squeue::Flags::ASYNC };
        let mut fd = types::Fd(issue.fd);
        if self.facts.registered_files {
            flags |= squeue::Flags::FIXED_FILE;
            fd = types::Fd(registered_file(file, issue.direct));
        }
        let rw_flags = self.rw_flags;
        let entry = match self.registered.index_of(address as usize, len as usize) {
            Some(index) => opcode::ReadFixed::new(fd, address, len, index).offset(offset).rw_flags(rw_flags).build(),
            None => opcode::Read::new(fd, address, len).offset(offset).rw_flags(rw_flags).build(),
        };
        if let Some(place) = self.to_drop.get_mut(op as usize) {
            *place = (issue.fd, offset);
        }
        self.push(&entry.flags(flags).user_data(u64::from(op)))
    }

    fn push(&mut self, entry: &squeue::Entry) -> Result<(), String> {
        // SAFETY: a poll has no memory. A read's memory is a slab that `Schedule` keeps in the slot of its operation
        // until the result is in, or leaks (`abandon`), or the probe's buffer, which is leaked likewise; descriptors
        // stay open as long as the `FileSet` that the schedule holds, and the eventfd as long as this driver.
        let pushed = unsafe { self.ring.submission().push(entry) };
        pushed.map_err(|_| "the submission queue overflowed".to_owned())
    }
}

/// How long to wait for a kernel that is short of something, after it was for the last `times` times.
fn squeezed_pause(times: u32) -> Duration {
    let doubled = BACKOFF_NS_MIN.checked_shl(times.min(BACKOFF_NS_MAX.ilog2())).unwrap_or(BACKOFF_NS_MAX);
    Duration::from_nanos(doubled.min(BACKOFF_NS_MAX))
}

/// A panic of the ring's thread: what the kernel has is leaked, and the device is dead.
struct DeathWatch<'a> {
    shared: &'a Shared,
}

impl Drop for DeathWatch<'_> {
    fn drop(&mut self) {
        self.shared.lock().schedule.abandon();
        self.shared.die("the ring's thread panicked".to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::OwnedFd;

    /// A pipe in the place of a file is a drive that does not answer.
    #[test]
    fn a_drive_that_hangs_at_the_first_read_is_not_waited_for_without_end() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (source, sink) = std::io::pipe().unwrap();
        let mut files = FileSet::open(&[file.path().to_owned()], IoMode::Buffered).unwrap();
        let pool = SlabPool::new(4096, 1).unwrap();
        let mut driver = match Driver::new(&DeviceConfig::default(), &files, &pool, event_fd().unwrap()) {
            Ok(driver) => driver,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        if !driver.ring.params().is_feature_ext_arg() {
            return eprintln!("skipped: this kernel cannot time a wait");
        }
        files.force_plain(FileId(0), File::from(OwnedFd::from(source)));
        let error = driver.probe_read(&files, Duration::from_millis(20)).unwrap_err();
        assert!(matches!(error, IoError::RingRefused { errno: Errno(libc::ETIME), .. }), "{error}");
        drop(sink);
    }

    #[test]
    fn a_kernel_short_of_memory_is_given_more_than_a_minute() {
        assert_eq!([0, 1, 2].map(squeezed_pause), [50, 100, 200].map(Duration::from_micros));
        assert_eq!([11, 63, 64, u32::MAX].map(squeezed_pause), [Duration::from_millis(100); 4]);
        let all: Duration = (0..ENTER_RETRIES_MAX).map(squeezed_pause).sum();
        assert!(all > Duration::from_secs(60), "{all:?}");
    }
}

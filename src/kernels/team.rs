//! A fixed team of threads that share numbered tasks.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// The low bits of a ticket count the tasks left to claim, the others count runs.
const LEFT_BITS: u32 = 24;

/// Most tasks of one run.
const MAX_TASKS: usize = (1 << LEFT_BITS) - 1;

/// Polls before a thread sleeps: tens of microseconds, longer than the gap between two matmuls of a layer.
const SPINS: usize = 1500;

/// A borrowed function as the threads of a team see it.
type Tasks<'a> = &'a (dyn Fn(usize) + Sync);

/// Threads that wait for work together with the one that owns it. Dropping the team ends them.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a run. Whoever finds it taken, a task that starts a run among them, runs its tasks alone.
    running: Mutex<()>,
}

struct Shared {
    /// `run << LEFT_BITS | tasks left to claim`. A task belongs to whoever lowers the count by compare-and-swap, which
    /// cannot succeed with a ticket of an earlier run. A thread that is late by any time therefore does no harm, and the
    /// caller need not wait for it.
    ticket: AtomicU64,
    /// Tasks of the run. Like `job`, to be read by those who hold an unfinished task only.
    tasks: AtomicUsize,
    /// Points to the caller's `Tasks` while any task of the run is unfinished.
    job: AtomicPtr<()>,
    /// Tasks finished.
    done: AtomicUsize,
    /// A task of this run panicked: those not begun are skipped.
    panicked: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers asleep on `wake`, counted before they look at the ticket a last time.
    sleepers: AtomicUsize,
    /// The caller is asleep on `finished`.
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    finished: Condvar,
    spins: usize,
}

impl Team {
    /// A team of `threads` in all, the caller of [`Team::run`] among them; 0 counts as 1. Threads that the system refuses
    /// to start are left out.
    pub fn new(threads: usize) -> Team {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            ticket: AtomicU64::new(0),
            tasks: AtomicUsize::new(0),
            job: AtomicPtr::new(std::ptr::null_mut()),
            done: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            payload: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            finished: Condvar::new(),
            // Spinning with more threads than cores would keep the thread that has the work from running.
            spins: if threads <= cores { SPINS } else { 0 },
        });
        let workers = (1..threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new().name(format!("team-{i}")).spawn(move || shared.work()).ok()
            })
            .collect();
        Team { shared, workers, running: Mutex::new(()) }
    }

    /// Threads that take part, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(0)`, ..., `f(tasks - 1)`, each once, in any order and on any thread of the team, and returns when all are
    /// done. Allocates nothing. When a task panics, tasks not begun are skipped and the panic continues here. A run inside
    /// a task, or from a second thread at the same time, is done by its caller alone.
    pub fn run(&self, tasks: usize, f: &(dyn Fn(usize) + Sync)) {
        let alone = tasks <= 1 || self.workers.is_empty() || tasks > MAX_TASKS;
        let guard = if alone { None } else { self.running.try_lock().ok() };
        let Some(guard) = guard else {
            return (0..tasks).for_each(f);
        };
        let shared = &*self.shared;
        let job: Tasks = f;
        shared.done.store(0, Relaxed);
        shared.tasks.store(tasks, Relaxed);
        shared.job.store((&raw const job).cast_mut().cast(), Relaxed);
        let run = (shared.ticket.load(Relaxed) >> LEFT_BITS).wrapping_add(1);
        shared.ticket.store(run << LEFT_BITS | tasks as u64, SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            drop(shared.lock());
            shared.wake.notify_all();
        }
        shared.take_tasks();
        shared.wait_until_done(tasks);
        if shared.panicked.swap(false, Relaxed) {
            let payload = shared.payload.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(guard);
            resume_unwind(payload.unwrap_or_else(|| Box::new("a task panicked")));
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A worker's life.
    fn work(&self) {
        while !self.stop.load(Relaxed) {
            let seen = self.take_tasks();
            let mut spins = 0;
            while self.ticket.load(Relaxed) == seen && !self.stop.load(Relaxed) {
                if spins == self.spins {
                    self.sleep(seen);
                    break;
                }
                spins += 1;
                std::hint::spin_loop();
            }
        }
    }

    /// Sleeps until the ticket is no longer `seen`.
    fn sleep(&self, seen: u64) {
        let mut guard = self.lock();
        self.sleepers.fetch_add(1, SeqCst);
        while self.ticket.load(SeqCst) == seen && !self.stop.load(SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, SeqCst);
    }

    /// Runs tasks until none is left to claim; the ticket that said so.
    fn take_tasks(&self) -> u64 {
        loop {
            let ticket = self.ticket.load(Relaxed);
            let left = (ticket & MAX_TASKS as u64) as usize;
            if left == 0 {
                return ticket;
            }
            if self.ticket.compare_exchange_weak(ticket, ticket - 1, AcqRel, Relaxed).is_err() {
                continue;
            }
            // The claimed task keeps its run unfinished, so these are the ones stored before its ticket.
            let tasks = self.tasks.load(Relaxed);
            let job = self.job.load(Relaxed);
            let task = tasks - left;
            if !self.panicked.load(Relaxed) {
                // SAFETY: the pointer is to the `Tasks` on the stack of the caller of this run, who stays in `run` until
                // every task, the one claimed above included, counts as done.
                let job = unsafe { &*job.cast::<Tasks>() };
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(task))) {
                    self.payload.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
                    self.panicked.store(true, Relaxed);
                }
            }
            // The caller may return as soon as it sees this, so nothing of the job is touched below.
            if self.done.fetch_add(1, SeqCst) + 1 == tasks && self.caller_sleeps.load(SeqCst) {
                drop(self.lock());
                self.finished.notify_one();
            }
        }
    }

    fn wait_until_done(&self, tasks: usize) {
        for _ in 0..self.spins.max(1) {
            if self.done.load(Acquire) == tasks {
                return;
            }
            std::hint::spin_loop();
        }
        let mut guard = self.lock();
        self.caller_sleeps.store(true, SeqCst);
        while self.done.load(SeqCst) != tasks {
            guard = self.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.caller_sleeps.store(false, SeqCst);
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        drop(self.shared.lock());
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks and has none of its own to report.
            let _ = worker.join();
        }
    }
}

impl fmt::Debug for Team {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Team({} threads)", self.threads())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_with_any_number_of_threads() {
        for threads in [0, 1, 2, 3, 9] {
            let team = Team::new(threads);
            assert_eq!(team.threads(), threads.max(1));
            for tasks in [0, 1, 2, 7, 64, 1000] {
                let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                team.run(tasks, &|i| {
                    counts[i].fetch_add(1, Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Relaxed) == 1), "{threads} threads, {tasks} tasks");
            }
        }
    }

    #[test]
    fn short_runs_in_quick_succession_never_mix() {
        // Each run writes its own number; a thread that took a task with an older job would write the wrong one.
        let team = Team::new(4);
        let slots: Vec<AtomicUsize> = (0..5).map(|_| AtomicUsize::new(0)).collect();
        for run in 1..20_000 {
            let tasks = 2 + run % 4;
            team.run(tasks, &|i| {
                slots[i].fetch_add(run, Relaxed);
            });
            for slot in &slots[..tasks] {
                assert_eq!(slot.swap(0, Relaxed), run);
            }
        }
    }

    #[test]
    fn a_sleeping_team_wakes() {
        let team = Team::new(2);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let sum = AtomicUsize::new(0);
            team.run(10, &|i| {
                sum.fetch_add(i, Relaxed);
            });
            assert_eq!(sum.into_inner(), 45);
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_survives() {
        let team = Team::new(3);
        for bad in [0, 5, 49] {
            let caught = catch_unwind(AssertUnwindSafe(|| {
                team.run(50, &|i| assert_ne!(i, bad, "bad task"));
            }));
            let message = *caught.unwrap_err().downcast::<String>().unwrap();
            assert!(message.contains("bad task"), "{message}");
            let sum = AtomicUsize::new(0);
            team.run(50, &|i| {
                sum.fetch_add(i, Relaxed);
            });
            assert_eq!(sum.into_inner(), 1225);
        }
    }

    #[test]
    fn a_run_inside_a_task_and_runs_from_two_threads_are_done_by_their_callers() {
        let team = Team::new(2);
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    team.run(10, &|_| {
                        team.run(10, &|i| {
                            sum.fetch_add(i, Relaxed);
                        });
                    });
                });
            }
        });
        assert_eq!(sum.into_inner(), 2 * 10 * 45);
    }
}

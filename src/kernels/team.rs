//! A fixed team of threads that share numbered tasks.
//!
//! A run ends when its last task does, and no task can be taken from a thread that has begun it. So a worker that another
//! program takes off its core in the middle of a task holds up everybody, and one that wakes on the core of the caller
//! takes the time that it was to save. Such a worker stays away for a while: without it the others are faster.
#![allow(unsafe_code)]

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The low bits of a ticket count the tasks left to claim, the others count runs.
const LEFT_BITS: u32 = 24;

/// Most tasks of one run.
const MAX_TASKS: usize = (1 << LEFT_BITS) - 1;

/// Polls before a thread sleeps: tens of microseconds, longer than the gap between two matmuls of a layer.
const SPINS: usize = 1500;

/// Work that is not worth sharing, in bytes that are read, as often as they are, or products of floats: a core does it in
/// the time that a line of cache takes to go to another core and back a few times.
const SMALL: usize = 48 << 10;

/// How long a worker stays away that held up a run. Twice as long each time it does so again soon after, up to 32 times.
const AWAY: Duration = Duration::from_millis(5);
const AWAY_DOUBLINGS: u32 = 5;

/// A worker held up a run when it was waited for so many times as long as the caller took over its own tasks, the caller's
/// way back to a core included. Of long runs that is never true, and should not be: a worker that comes and goes does more
/// for them than it costs.
const HELD_UP: u32 = 16;
/// And so long at least, which is less than a turn of another program and more than an interrupt.
const HELD_UP_LEAST: Duration = Duration::from_micros(500);

/// Where a worker has stayed away so often for being on the caller's core and was never seen on another, the system does not
/// tell cores apart: they are no longer looked at.
const CORE_STAYS_MAX: u32 = 8;

/// The core of a caller that does not know it.
const NO_CORE: u32 = u32::MAX;

/// A borrowed function as the threads of a team see it.
type Tasks<'a> = &'a (dyn Fn(usize) + Sync);

/// Threads that wait for work together with the one that owns it. Dropping the team ends them.
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held during a run. Whoever finds it taken, a task that starts a run among them, runs its tasks alone.
    running: Mutex<()>,
    /// The caller alone, for small work; `None` where there is nobody else.
    alone: Option<Box<Team>>,
}

/// On lines of cache of its own: what one thread writes while others wait for something else.
#[repr(align(128))]
struct Line<T>(T);

struct Shared {
    /// What a worker needs to begin, so that one line of cache brings it all.
    work: Line<Work>,
    /// What the caller waits for.
    end: Line<End>,
    rest: Rest,
}

struct Work {
    /// `run << LEFT_BITS | tasks left to claim`. A task belongs to whoever lowers the count by compare-and-swap, which
    /// cannot succeed with a ticket of an earlier run. A thread that is late by any time therefore does no harm, and the
    /// caller need not wait for it.
    ticket: AtomicU64,
    /// Tasks of the run. Like `job`, to be read by those who hold an unfinished task only.
    tasks: AtomicUsize,
    /// Points to the caller's `Tasks` while any task of the run is unfinished.
    job: AtomicPtr<()>,
    /// The core that the caller was on when the run began.
    core: AtomicU32,
}

struct End {
    /// Tasks finished.
    done: AtomicUsize,
    /// The caller is asleep on `finished`.
    caller_sleeps: AtomicBool,
    /// The worker that finished last while the caller slept.
    last: AtomicUsize,
}

struct Rest {
    /// A task of this run panicked: those not begun are skipped.
    panicked: AtomicBool,
    payload: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers asleep on `wake`, counted before they look at the ticket a last time. Those that stay away are not.
    sleepers: AtomicUsize,
    /// How often each worker was told to stay away.
    sent_away: Vec<Line<AtomicU32>>,
    lock: Mutex<()>,
    wake: Condvar,
    finished: Condvar,
    spins: usize,
    /// How long a worker stays away the first time.
    away: Duration,
}

impl Team {
    /// A team of `threads` in all, the caller of [`Team::run`] among them; 0 counts as 1. Threads that the system refuses
    /// to start are left out.
    pub fn new(threads: usize) -> Team {
        Team::beginning(threads, |_| {})
    }

    /// The same; each thread but the caller does `begin` with its number, from 1 on, before anything else.
    pub fn beginning(threads: usize, begin: impl Fn(usize) + Clone + Send + 'static) -> Team {
        Team::with(threads, AWAY, begin)
    }

    /// The same with workers that stay away so long the first time.
    fn with(threads: usize, away: Duration, begin: impl Fn(usize) + Clone + Send + 'static) -> Team {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            work: Line(Work {
                ticket: AtomicU64::new(0),
                tasks: AtomicUsize::new(0),
                job: AtomicPtr::new(std::ptr::null_mut()),
                core: AtomicU32::new(NO_CORE),
            }),
            end: Line(End {
                done: AtomicUsize::new(0),
                caller_sleeps: AtomicBool::new(false),
                last: AtomicUsize::new(0),
            }),
            rest: Rest {
                panicked: AtomicBool::new(false),
                payload: Mutex::new(None),
                stop: AtomicBool::new(false),
                sleepers: AtomicUsize::new(0),
                sent_away: (1..threads).map(|_| Line(AtomicU32::new(0))).collect(),
                lock: Mutex::new(()),
                wake: Condvar::new(),
                finished: Condvar::new(),
                // Spinning with more threads than cores would keep the thread that has the work from running.
                spins: if threads <= cores { SPINS } else { 0 },
                away,
            },
        });
        let worker = |i: usize| {
            let (shared, begin) = (Arc::clone(&shared), begin.clone());
            let live = move || {
                begin(i);
                Worker::new(&shared, i - 1).live();
            };
            std::thread::Builder::new().name(format!("team-{i}")).spawn(live).ok()
        };
        let workers = (1..threads).map_while(worker).collect();
        let alone = (threads > 1).then(|| Box::new(Team::new(1)));
        Team { shared, workers, running: Mutex::new(()), alone }
    }

    /// Threads that take part, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Who does about so much `work`, in bytes that are read, as often as they are, or products of floats: this team, or its
    /// caller alone where handing over would take longer.
    pub fn for_work(&self, work: usize) -> &Team {
        self.alone.as_deref().filter(|_| work < SMALL).unwrap_or(self)
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
        let Shared { work: Line(work), end: Line(end), rest } = &*self.shared;
        let job: Tasks = f;
        end.done.store(0, Relaxed);
        work.tasks.store(tasks, Relaxed);
        work.job.store((&raw const job).cast_mut().cast(), Relaxed);
        work.core.store(core().unwrap_or(NO_CORE), Relaxed);
        let run = (work.ticket.load(Relaxed) >> LEFT_BITS).wrapping_add(1);
        work.ticket.store(run << LEFT_BITS | tasks as u64, SeqCst);
        if rest.sleepers.load(SeqCst) > 0 {
            drop(rest.lock());
            rest.wake.notify_all();
        }
        let began = Instant::now();
        let mine = self.shared.take_tasks(None).tasks;
        let part = (mine > 0).then(|| began.elapsed());
        if !self.shared.spin_until_done(tasks) {
            self.shared.wait_until_done(tasks, part);
        }
        if rest.panicked.swap(false, Relaxed) {
            let payload = rest.payload.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(guard);
            resume_unwind(payload.unwrap_or_else(|| Box::new("a task panicked")));
        }
    }
}

/// What a thread found when no task was left.
struct Taken {
    /// The ticket that said so.
    ticket: u64,
    /// Tasks that it had.
    tasks: usize,
}

impl Shared {
    /// Runs tasks until none is left to claim, as the worker of this number or as the caller.
    fn take_tasks(&self, worker: Option<usize>) -> Taken {
        let Shared { work: Line(work), end: Line(end), rest } = self;
        let mut mine = 0;
        loop {
            let ticket = work.ticket.load(Relaxed);
            let left = (ticket & MAX_TASKS as u64) as usize;
            if left == 0 {
                return Taken { ticket, tasks: mine };
            }
            if work.ticket.compare_exchange_weak(ticket, ticket - 1, AcqRel, Relaxed).is_err() {
                continue;
            }
            mine += 1;
            // The claimed task keeps its run unfinished, so these are the ones stored before its ticket.
            let tasks = work.tasks.load(Relaxed);
            let job = work.job.load(Relaxed);
            let task = tasks - left;
            if !rest.panicked.load(Relaxed) {
                // SAFETY: the pointer is to the `Tasks` on the stack of the caller of this run, who stays in `run` until
                // every task, the one claimed above included, counts as done.
                let job = unsafe { &*job.cast::<Tasks>() };
                if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(task))) {
                    rest.payload.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
                    rest.panicked.store(true, Relaxed);
                }
            }
            if let Some(worker) = worker {
                end.last.store(worker, Relaxed);
            }
            // The caller may return as soon as it sees this, so nothing of the job is touched below.
            if end.done.fetch_add(1, SeqCst) + 1 == tasks && end.caller_sleeps.load(SeqCst) {
                drop(rest.lock());
                rest.finished.notify_one();
            }
        }
    }

    /// Whether all tasks were done before it would be better to sleep.
    fn spin_until_done(&self, tasks: usize) -> bool {
        for _ in 0..self.rest.spins.max(1) {
            if self.end.0.done.load(Acquire) == tasks {
                return true;
            }
            std::hint::spin_loop();
        }
        false
    }

    /// Sleeps until all tasks are done, and tells the worker that was waited for to stay away if that took far longer than
    /// the caller's `part`. A caller that had none does not know how long they take.
    fn wait_until_done(&self, tasks: usize, part: Option<Duration>) {
        let Shared { end: Line(end), rest, .. } = self;
        let began = Instant::now();
        let mut guard = rest.lock();
        end.caller_sleeps.store(true, SeqCst);
        while end.done.load(SeqCst) != tasks {
            guard = rest.finished.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        end.caller_sleeps.store(false, SeqCst);
        if part.is_some_and(|part| began.elapsed() > HELD_UP_LEAST.max(part * HELD_UP))
            && let Some(Line(sent)) = rest.sent_away.get(end.last.load(Relaxed))
        {
            sent.fetch_add(1, Relaxed);
        }
    }
}

impl Rest {
    fn lock(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One thread of a team that is not its caller's.
struct Worker<'a> {
    shared: &'a Shared,
    number: usize,
    /// How often it was sent away when it last looked.
    sent_away: u32,
    /// Times it stayed away in quick succession.
    times: u32,
    /// Times that it was on the caller's core, before it was seen on another.
    core_stays: u32,
    /// It was seen on another core than the caller.
    told_apart: bool,
    /// When it came back last.
    back: Instant,
}

impl Worker<'_> {
    fn new(shared: &Shared, number: usize) -> Worker<'_> {
        Worker { shared, number, sent_away: 0, times: 0, core_stays: 0, told_apart: false, back: Instant::now() }
    }

    fn live(&mut self) {
        let Shared { work: Line(work), rest, .. } = self.shared;
        let mut seen = 0;
        while !rest.stop.load(Relaxed) {
            if self.is_in_the_way(seen) {
                self.stay_away();
            }
            seen = self.shared.take_tasks(Some(self.number)).ticket;
            let mut spins = 0;
            while work.ticket.load(Relaxed) == seen && !rest.stop.load(Relaxed) {
                if spins == rest.spins {
                    self.sleep(seen);
                    break;
                }
                spins += 1;
                std::hint::spin_loop();
            }
        }
    }

    /// Whether a run is faster without it. `seen` is the ticket it has waited with.
    fn is_in_the_way(&mut self, seen: u64) -> bool {
        let Shared { work: Line(work), rest, .. } = self.shared;
        let sent = rest.sent_away[self.number].0.load(Relaxed);
        let held_up = std::mem::replace(&mut self.sent_away, sent) != sent;
        // With more threads than cores some must share one.
        let may_look = rest.spins > 0 && work.ticket.load(Relaxed) != seen;
        let same_core = may_look && core().is_some_and(|core| core == work.core.load(Relaxed));
        self.told_apart |= may_look && !same_core;
        self.core_stays += u32::from(same_core && !self.told_apart);
        held_up || same_core && (self.told_apart || self.core_stays <= CORE_STAYS_MAX)
    }

    /// Sleeps for a while, whatever there is to do.
    fn stay_away(&mut self) {
        let rest = &self.shared.rest;
        let before = rest.away * 2u32.pow(self.times);
        self.times = if self.back.elapsed() < 2 * before { (self.times + 1).min(AWAY_DOUBLINGS) } else { 0 };
        let until = Instant::now() + rest.away * 2u32.pow(self.times);
        let mut guard = rest.lock();
        while !rest.stop.load(Relaxed) {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            guard = rest.wake.wait_timeout(guard, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(guard);
        self.back = Instant::now();
    }

    /// Sleeps until the ticket is no longer `seen`.
    fn sleep(&self, seen: u64) {
        let Shared { work: Line(work), rest, .. } = self.shared;
        let mut guard = rest.lock();
        rest.sleepers.fetch_add(1, SeqCst);
        while work.ticket.load(SeqCst) == seen && !rest.stop.load(Relaxed) {
            guard = rest.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        rest.sleepers.fetch_sub(1, SeqCst);
    }
}

/// The core this thread is on, where the system says.
fn core() -> Option<u32> {
    // SAFETY: the call has no argument and no condition.
    unsafe { libc::sched_getcpu() }.try_into().ok()
}

impl Drop for Team {
    fn drop(&mut self) {
        let rest = &self.shared.rest;
        rest.stop.store(true, SeqCst);
        drop(rest.lock());
        rest.wake.notify_all();
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
    fn workers_with_nothing_to_do_leave_their_cores_to_others() {
        // One that spun on for good would keep a thread that reads from running.
        let team = Team::new(3);
        team.run(10, &|_| {});
        let begun = Instant::now();
        while team.shared.rest.sleepers.load(SeqCst) < 2 {
            assert!(begun.elapsed() < Duration::from_secs(60), "a worker never went to sleep");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_team_of_more_threads_than_cores_does_not_spin() {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        assert_eq!(Team::new(cores + 1).shared.rest.spins, 0);
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

    #[test]
    fn work_that_is_over_before_another_core_has_it_is_not_shared() {
        let team = Team::new(4);
        assert_eq!([0, SMALL - 1, SMALL, usize::MAX].map(|work| team.for_work(work).threads()), [1, 1, 4, 4]);
    }

    #[test]
    fn a_worker_that_holds_up_short_runs_stays_away_and_comes_back() {
        let team = Team::new(2);
        let caller = std::thread::current().id();
        // As if the worker had lost its core in the middle of a task; the caller never has more than one at a time.
        let held_up = || {
            team.run(2, &|_| {
                let mine = std::thread::current().id() == caller;
                std::thread::sleep(std::time::Duration::from_millis(if mine { 1 } else { 40 }));
            });
        };
        let sent = |team: &Team| team.shared.rest.sent_away[0].0.load(Relaxed);
        // Of two tasks that sleep each thread has one, unless the worker took longer to wake than the first one took.
        let begun = Instant::now();
        while sent(&team) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "a worker 40 times as slow was never sent away");
            held_up();
        }
        // It comes back: of enough tasks that take a while it has some again.
        let others = AtomicUsize::new(0);
        while others.load(Relaxed) == 0 {
            assert!(begun.elapsed() < Duration::from_secs(60), "a worker that was sent away never came back");
            team.run(20, &|_| {
                std::thread::sleep(Duration::from_millis(1));
                others.fetch_add(usize::from(std::thread::current().id() != caller), Relaxed);
            });
        }
    }

    #[test]
    fn a_team_ends_while_a_worker_stays_away() {
        let team = Team::with(2, Duration::from_secs(600), |_| {});
        team.shared.rest.sent_away[0].0.fetch_add(1, Relaxed);
        // Awake it looks whether it was sent away before it takes a task, so that from then on all are the caller's.
        let caller = std::thread::current().id();
        for _ in 0..50 {
            let others = AtomicUsize::new(0);
            team.run(20, &|_| {
                std::thread::sleep(Duration::from_micros(200));
                others.fetch_add(usize::from(std::thread::current().id() != caller), Relaxed);
            });
            assert_eq!(others.into_inner(), 0, "a worker that was to stay away took a task");
        }
        let begun = Instant::now();
        drop(team);
        assert!(begun.elapsed() < Duration::from_secs(60), "the end of a team waits for who stays away");
    }

    #[test]
    fn a_caller_that_had_no_task_sends_nobody_away() {
        let team = Team::new(3);
        let caller = std::thread::current().id();
        for _ in 0..100 {
            let sent = || team.shared.rest.sent_away.iter().map(|Line(sent)| sent.load(Relaxed)).sum::<u32>();
            let (before, mine) = (sent(), AtomicUsize::new(0));
            std::thread::sleep(Duration::from_millis(2));
            team.run(2, &|_| {
                mine.fetch_add(usize::from(std::thread::current().id() == caller), Relaxed);
                std::thread::sleep(Duration::from_millis(2));
            });
            assert!(mine.into_inner() > 0 || sent() == before);
        }
    }
}

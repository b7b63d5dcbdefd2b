//! A device takes a read with the slab it goes to, and gives the slab back with the result.

mod clock;
mod host;
mod line;
mod map;
mod progress;
mod ring;
mod ring_setup;
mod route;
mod schedule;
pub mod sim;
mod threads;
pub mod throttle;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::access::IoMode;
use crate::arena::PageKind;
use crate::block::BlockQueue;
use crate::device::schedule::RequestCap;
use crate::drive::DriveStats;
use crate::error::IoError;
use crate::file::FileSet;
use crate::limits::{
    CHUNK_BYTES_MIN, DEPTH_BYTES_MIN, DEPTH_SLABS_MIN, DRIVES_MAX, LEAVE_AFTER, QUEUE_READS, QUEUE_READS_MAX,
    READER_THREADS, READER_THREADS_MAX, RING_ENTRIES, RING_ENTRIES_MAX, RING_ENTRIES_MIN, SLAB_BYTES_MAX, STRIPE_BYTES,
};
use crate::plan::Segments;
use crate::pool::{Slab, SlabPool};

/// Who is served first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Somebody waits for the bytes.
    Demand,
    /// A guess; it never delays a demand by more than what the kernel already has.
    Lookahead,
}

/// A read into one slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The caller's name for it; comes back in the completion.
    pub tag: u64,
    /// Who is served first.
    pub priority: Priority,
    /// Aligned file ranges and their places in the slab.
    pub segments: Segments,
}

/// A finished read.
#[derive(Debug)]
pub struct Completion {
    /// Tag of the read.
    pub tag: u64,
    /// The slab, the caller's again. Its contents are the file's only where `result` is `Ok`.
    pub slab: Slab,
    /// Whole, or why not.
    pub result: Result<(), IoError>,
    /// Bytes that came from the files, padding and repeats included.
    pub bytes: u64,
    /// From submit until its first request went to the drive.
    pub queued: Duration,
    /// From there to complete.
    pub service: Duration,
}

impl Completion {
    /// From submit to complete.
    pub fn took(&self) -> Duration {
        self.queued + self.service
    }
}

/// What a device that cannot take a read gives back.
#[derive(Debug)]
pub struct Rejected {
    /// The slab, untouched.
    pub slab: Slab,
    /// The read, as it was.
    pub read: Read,
    /// Why.
    pub why: RejectReason,
}

/// Why a read was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RejectReason {
    /// As many reads are queued, in flight or waiting to be reaped as the device holds. Reap, then submit again.
    Full,
    /// The device died.
    Dead(IoError),
    /// The read cannot be right ([`IoError::BadRequest`]).
    Bad(IoError),
}

/// Whether `reap` may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Return at once.
    No,
    /// Until something completes or nothing is in flight.
    Block,
    /// As `Block`, but not longer than this: for a caller that reports a drive that hangs. The reads stay in flight.
    AtMost(Duration),
}

/// Counters since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceStats {
    /// Reads finished, well or not, cancelled ones excepted.
    pub reads: u64,
    /// Bytes that came from the files, padding and repeats included.
    pub bytes: u64,
    /// Wanted bytes of the reads that succeeded.
    pub useful_bytes: u64,
    /// Time that reads stood in the queue before their first request went to the drive or they were taken back, added up.
    pub queued_ns: u64,
    /// Time from each read's first request to its end, added up; over `busy_ns`, the mean depth. With `queued_ns` never
    /// less than `busy_ns`.
    pub service_ns: u64,
    /// Time during which at least one read was queued or in flight.
    pub busy_ns: u64,
    /// Requests repeated: short reads, `EINTR`, `EAGAIN`, refusals, device errors.
    pub retries: u64,
    /// Processor time of the device's threads; `None` where it has none, or threads of the kernel work for them whose
    /// time nobody can ask for.
    pub cpu_ns: Option<u64>,
}

impl DeviceStats {
    /// What was counted since `before`.
    pub fn since(&self, before: &DeviceStats) -> DeviceStats {
        DeviceStats {
            reads: self.reads - before.reads,
            bytes: self.bytes - before.bytes,
            useful_bytes: self.useful_bytes - before.useful_bytes,
            queued_ns: self.queued_ns - before.queued_ns,
            service_ns: self.service_ns - before.service_ns,
            busy_ns: self.busy_ns - before.busy_ns,
            retries: self.retries - before.retries,
            // A thread that has ended meanwhile took its time along.
            cpu_ns: self.cpu_ns.zip(before.cpu_ns).map(|(now, before)| now.saturating_sub(before)),
        }
    }
}

/// What runs, and why not something better.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceReport {
    /// `io_uring`, `threads`, `mmap`, `sim` or `throttled`.
    pub name: &'static str,
    /// One line with cause and remedy, where the first choice was not possible.
    pub fallback: Option<String>,
    /// Bytes of slabs registered with the kernel.
    pub registered_bytes: u64,
    /// Whether the files are registered with the kernel.
    pub registered_files: bool,
    /// Whether a kernel thread polls for submissions.
    pub sqpoll: bool,
    /// Whether completions are polled for.
    pub iopoll: bool,
    /// Requests of the drive's queue that reads may take at a time, of all drives together; `None` where nothing caps
    /// them.
    pub requests_max: Option<u64>,
    /// Further lines worth printing.
    pub notes: Vec<String>,
}

/// Reads slabs. One owner submits and reaps; dropping a device waits for the reads the kernel has, and every slab
/// goes back to its pool.
pub trait Device: Send {
    /// Queues a read. Never waits and allocates nothing.
    ///
    /// # Errors
    /// [`Rejected`] with the slab and the reason.
    #[allow(clippy::result_large_err, reason = "boxing the rejection would allocate on the path that never allocates")]
    fn submit(&mut self, read: Read, slab: Slab) -> Result<(), Rejected>;

    /// The next finished read; `None` when there is none (with [`Wait::Block`]: and none in flight).
    ///
    /// # Errors
    /// [`IoError::DeviceDied`] once the finished reads are reaped and the device is dead; it stays so.
    fn reap(&mut self, wait: Wait) -> Result<Option<Completion>, IoError>;

    /// Reads submitted and not reaped.
    fn in_flight(&self) -> usize;

    /// Takes back the lookahead reads that are not wholly handed out; they come back as completions with
    /// [`IoError::Cancelled`], one that has begun once the kernel is done with its part, whose bytes it counts. Returns how
    /// many.
    fn cancel_lookahead(&mut self) -> usize;

    /// Makes a demand of the lookahead read called `tag`: somebody waits for it now. No effect where there is none.
    fn promote(&mut self, tag: u64);

    /// Counters.
    fn stats(&self) -> DeviceStats;

    /// What each drive of the files did, in their order; a device that knows no drives has nothing to say.
    fn drives(&self) -> Vec<DriveStats> {
        Vec::new()
    }

    /// What runs.
    fn describe(&self) -> &DeviceReport;
}

/// Which device to open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// io_uring where it works and the files are read directly, else threads.
    #[default]
    Auto,
    /// io_uring or nothing.
    Uring,
    /// Reader threads; makes no io_uring call, so a filter that kills on one does no harm.
    Threads,
    /// Threads that copy from a mapping of each file. Goes with [`IoMode::Mmap`] and nothing else.
    Mmap,
}

impl DeviceKind {
    /// Every kind, `Auto` first.
    pub const ALL: [DeviceKind; 4] = [DeviceKind::Auto, DeviceKind::Uring, DeviceKind::Threads, DeviceKind::Mmap];

    /// The name that is typed.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Auto => "auto",
            DeviceKind::Uring => "uring",
            DeviceKind::Threads => "threads",
            DeviceKind::Mmap => "mmap",
        }
    }
}

/// The mode to open files with and the device to open over them, for what was asked: either of `mmap` settles the
/// other where that is left to choose.
///
/// # Errors
/// [`IoError::Refused`] where one is `mmap` and the other is something else by name.
pub fn settle(mode: IoMode, kind: DeviceKind) -> Result<(IoMode, DeviceKind), IoError> {
    match (mode, kind) {
        (IoMode::Auto | IoMode::Mmap, DeviceKind::Mmap) | (IoMode::Mmap, DeviceKind::Auto) => {
            Ok((IoMode::Mmap, DeviceKind::Mmap))
        }
        (IoMode::Mmap, _) | (_, DeviceKind::Mmap) => {
            let why = format!("the mode {mode} and the device {kind} exclude each other");
            Err(IoError::Refused { what: "mmap", why })
        }
        other => Ok(other),
    }
}

impl FromStr for DeviceKind {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceKind, String> {
        let found = DeviceKind::ALL.into_iter().find(|kind| kind.name() == text);
        found.ok_or_else(|| format!("unknown device '{text}': auto, uring, threads or mmap"))
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `depth_bytes` that stands for the larger of 64 MiB and four slabs.
pub const DEPTH_AUTO: u64 = 0;
/// `chunk_bytes` that reads each slab's segment in one request.
pub const CHUNK_WHOLE: u32 = SLAB_BYTES_MAX as u32;

/// How to open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceConfig {
    /// Which device.
    pub kind: DeviceKind,
    /// Cap on bytes handed to the kernel at a time, for each drive; [`DEPTH_AUTO`] for the default. One request always
    /// passes.
    pub depth_bytes: u64,
    /// Threads of the devices `threads` and `mmap` for each drive, 1 to 64, and no more than 64 in all.
    pub threads: usize,
    /// Most reads queued, in flight and not yet reaped together.
    pub queue: usize,
    /// Largest single request, a multiple of 64 KiB or [`CHUNK_WHOLE`]; `None` lets the device choose.
    pub chunk_bytes: Option<u32>,
    /// Submission entries of the ring, 2 to 32768.
    pub ring_entries: u32,
    /// Whether to register the slabs with the ring. Off is for comparison.
    pub register: bool,
    /// Whether to register the files with the ring. Off is for comparison.
    pub register_files: bool,
    /// Whether a kernel thread polls the ring's queue for submissions: it takes a core.
    pub sqpoll: bool,
    /// Whether the ring polls the drive for completions. Direct reads only, on a driver with poll queues.
    pub iopoll: bool,
    /// Whether to keep direct reads from filling the drive's queue, beyond which a submission sleeps. Where the block
    /// device cannot be found there is no cap.
    pub cap_requests: bool,
}

impl Default for DeviceConfig {
    fn default() -> DeviceConfig {
        DeviceConfig {
            kind: DeviceKind::Auto,
            depth_bytes: DEPTH_AUTO,
            threads: READER_THREADS,
            queue: QUEUE_READS,
            chunk_bytes: None,
            ring_entries: RING_ENTRIES,
            register: true,
            register_files: true,
            sqpoll: false,
            iopoll: false,
            cap_requests: true,
        }
    }
}

impl DeviceConfig {
    pub(crate) fn check(&self) -> Result<(), IoError> {
        let bad = |what: String| Err(IoError::BadRequest { what });
        if self.queue == 0 || self.queue > QUEUE_READS_MAX {
            return bad(format!("a queue of {} reads; 1 to {QUEUE_READS_MAX}", self.queue));
        }
        if self.threads == 0 || self.threads > READER_THREADS_MAX {
            return bad(format!("{} reader threads; 1 to {READER_THREADS_MAX}", self.threads));
        }
        if !(RING_ENTRIES_MIN..=RING_ENTRIES_MAX).contains(&self.ring_entries) {
            let entries = self.ring_entries;
            return bad(format!("a ring of {entries} entries; {RING_ENTRIES_MIN} to {RING_ENTRIES_MAX}"));
        }
        match self.chunk_bytes {
            Some(bytes) if bytes == 0 || !bytes.is_multiple_of(CHUNK_BYTES_MIN) => {
                bad(format!("requests of {bytes} bytes; a multiple of {CHUNK_BYTES_MIN}"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses the ring's switches where there will be none.
    fn check_without_ring(&self, kind: DeviceKind, files: &FileSet) -> Result<(), IoError> {
        let ringless = kind != DeviceKind::Auto || files.first_direct().is_none();
        let asked = [("sqpoll", self.sqpoll), ("iopoll", self.iopoll)].into_iter().find(|(_, on)| *on);
        match asked {
            Some((what, _)) if ringless => {
                let why = format!("the device is {kind}, the mode {}: no io_uring runs", files.mode());
                Err(IoError::Refused { what, why })
            }
            _ => Ok(()),
        }
    }

    /// Most requests of each drive's queue that direct reads may take, and the bytes of one. Where a drive's files lie
    /// on several devices the one that bounds most; `None` where nothing is known or asked for. Drives that share a
    /// device share its queue.
    fn request_caps(&self, files: &FileSet, pool: &SlabPool) -> [Option<RequestCap>; DRIVES_MAX] {
        let mut caps = [None; DRIVES_MAX];
        if !self.cap_requests {
            return caps;
        }
        let huge = pool.report().kind != PageKind::Small;
        let queues: Vec<(usize, BlockQueue)> = files
            .entries()
            .filter(|file| files.source(*file).direct)
            .filter_map(|file| Some((files.drive_of(file), files.block_queue(file)?)))
            .collect();
        for (drive, queue) in &queues {
            let sharing = (0..files.drives())
                .filter(|drive| queues.iter().any(|(other, q)| other == drive && q.name == queue.name));
            let cap = RequestCap {
                // Below the queue's size, so that the last one in does not sleep for its tag.
                requests: (u64::from(queue.nr_requests.saturating_sub(1)) / sharing.count() as u64).max(1),
                request_bytes: queue.request_bytes(huge),
            };
            let bounds = |cap: &RequestCap| cap.requests * cap.request_bytes;
            caps[*drive] = caps[*drive].into_iter().chain([cap]).min_by_key(bounds);
        }
        caps
    }

    /// Threads for the drives of `files` together.
    fn threads_for(&self, files: &FileSet) -> usize {
        (self.threads * files.drives()).min(READER_THREADS_MAX)
    }

    /// Request size: as configured, else `default`, smaller where there are drives to stripe over, and never below what
    /// the files' alignment allows.
    fn chunk_for(&self, default: u32, files: &FileSet) -> u32 {
        let default = if files.drives() > 1 { default.min(STRIPE_BYTES) } else { default };
        self.chunk_bytes.unwrap_or(default).max(files.align())
    }

    fn depth_for(&self, slab_bytes: usize) -> u64 {
        match self.depth_bytes {
            DEPTH_AUTO => DEPTH_BYTES_MIN.max(DEPTH_SLABS_MIN * slab_bytes as u64),
            bytes => bytes,
        }
    }
}

/// Requests that all drives may take together, where each is capped.
fn requests_max(caps: &[Option<RequestCap>]) -> Option<u64> {
    caps.iter().map(|cap| cap.map(|cap| cap.requests)).sum()
}

/// Opens a device over `files` that fills slabs of `pool`.
///
/// # Errors
/// [`IoError::BadRequest`] for a configuration out of range; [`IoError::RingRefused`] where [`DeviceKind::Uring`] was
/// asked for and the kernel refuses; [`IoError::Refused`] for a device that does not go with the files' mode, or a
/// switch that does not go with the device; [`IoError::Start`] where threads cannot be had.
pub fn open_device(cfg: &DeviceConfig, files: Arc<FileSet>, pool: &SlabPool) -> Result<Box<dyn Device>, IoError> {
    cfg.check()?;
    let (mode, kind) = settle(files.mode(), cfg.kind)?;
    if mode != files.mode() {
        let why = format!("the files were opened with the mode {}", files.mode());
        return Err(IoError::Refused { what: "mmap", why });
    }
    if kind != DeviceKind::Uring {
        cfg.check_without_ring(kind, &files)?;
    }
    match kind {
        DeviceKind::Threads => threads::open(cfg, files, pool, None),
        DeviceKind::Mmap => map::open(cfg, files, pool),
        DeviceKind::Uring => ring::open(cfg, files, pool),
        DeviceKind::Auto if files.first_direct().is_none() => {
            let why = "no file is read directly, and through the page cache io_uring is no faster than reader threads; \
                       --device uring overrides";
            threads::open(cfg, files, pool, Some(why.to_owned()))
        }
        DeviceKind::Auto => match ring::open(cfg, Arc::clone(&files), pool) {
            Ok(device) => Ok(device),
            Err(error @ (IoError::BadRequest { .. } | IoError::Refused { .. })) => Err(error),
            Err(error) => {
                let hint = error.hint().map(|hint| format!("; {hint}")).unwrap_or_default();
                threads::open(cfg, files, pool, Some(format!("{error}{hint}")))
            }
        },
    }
}

/// Ends a device whose reads nobody wants any more, however long a drive takes: what is in flight is waited for no longer
/// than [`LEAVE_AFTER`]. The reads then still under way, their slabs and the device are left to the end of the process,
/// since the kernel may write to them; dropping the device would wait. How many reads that are.
pub fn leave(mut device: Box<dyn Device>) -> usize {
    let asked = Instant::now();
    device.cancel_lookahead();
    while device.in_flight() > 0 && asked.elapsed() < LEAVE_AFTER {
        // A device that died answers nothing more.
        if device.reap(Wait::AtMost(LEAVE_AFTER.saturating_sub(asked.elapsed()))).is_err() {
            break;
        }
    }
    let reads = device.in_flight();
    if reads > 0 {
        std::mem::forget(device);
    }
    reads
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::access::{Access, IoMode};
    use crate::file::FileId;
    use crate::plan::Segment;
    use std::io::Write;

    /// The kernel itself refuses a direct read at an odd offset; the check that would stop it is switched off.
    #[test]
    fn a_direct_read_the_kernel_refuses_is_repeated_through_the_page_cache() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let content: Vec<u8> = (0..40_000u32).map(|i| (i % 251) as u8).collect();
        file.write_all(&content).unwrap();
        file.as_file().sync_all().unwrap();
        let pool = SlabPool::new(16384, 2).unwrap();
        for kind in [DeviceKind::Uring, DeviceKind::Threads] {
            for mode in [IoMode::Auto, IoMode::Direct] {
                let mut files = FileSet::open(&[file.path().to_owned()], IoMode::Auto).unwrap();
                if !matches!(files.access(FileId(0)), Access::Direct { offset_align: 2.., .. }) {
                    eprintln!("skipped: no direct reads with an alignment here: {:?}", files.describe());
                    return;
                }
                if mode == IoMode::Direct {
                    files = FileSet::open(&[file.path().to_owned()], mode).unwrap();
                }
                files.force_align(1);
                let files = Arc::new(files);
                let cfg = DeviceConfig { kind, ..DeviceConfig::default() };
                let mut device = match open_device(&cfg, Arc::clone(&files), &pool) {
                    Ok(device) => device,
                    Err(error @ IoError::RingRefused { .. }) => {
                        eprintln!("skipped: {error}");
                        continue;
                    }
                    Err(error) => panic!("{error}"),
                };
                for tag in 0..2 {
                    let segment = Segment { file: FileId(0), offset: 7, len: 16384, at: 0, want: 16384 };
                    let segments = Segments::from_slice(&[segment]).unwrap();
                    let read = Read { tag, priority: Priority::Demand, segments };
                    device.submit(read, pool.take().unwrap()).unwrap();
                    let done = device.reap(Wait::Block).unwrap().unwrap();
                    if mode == IoMode::Direct {
                        assert!(matches!(done.result, Err(IoError::DirectRefused { .. })), "{:?}", done.result);
                    } else {
                        done.result.unwrap();
                        assert_eq!(done.slab.bytes(), &content[7..7 + 16384]);
                    }
                }
                assert_eq!(files.warnings().len(), usize::from(mode == IoMode::Auto));
                assert_eq!(device.stats().retries, u64::from(mode == IoMode::Auto));
            }
        }
    }

    /// A pipe in the place of a file is a drive that does not answer.
    #[test]
    fn a_read_that_hangs_ends_the_wait_and_keeps_its_slab_while_others_go_on() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(&[3; 8192]).unwrap();
        let (source, mut sink) = std::io::pipe().unwrap();
        let source = std::fs::File::from(std::os::fd::OwnedFd::from(source));
        let pool = SlabPool::new(4096, 3).unwrap();
        let paths = [file.path().to_owned(), file.path().to_owned()];
        let mut files = FileSet::open(&paths, IoMode::Buffered).unwrap();
        files.force_plain(FileId(1), source);
        let cfg = DeviceConfig { kind: DeviceKind::Uring, ..DeviceConfig::default() };
        let mut device = match open_device(&cfg, Arc::new(files), &pool) {
            Ok(device) => device,
            Err(error @ IoError::RingRefused { .. }) => return eprintln!("skipped: {error}"),
            Err(error) => panic!("{error}"),
        };
        let read = |tag: u64, file: u32| {
            let segment = Segment { file: FileId(file), offset: 0, len: 4096, at: 0, want: 4096 };
            Read { tag, priority: Priority::Demand, segments: Segments::from_slice(&[segment]).unwrap() }
        };
        let wait = Wait::AtMost(Duration::from_millis(30));
        device.submit(read(1, 1), pool.take().unwrap()).unwrap();
        assert!(device.reap(wait).unwrap().is_none() && device.reap(Wait::No).unwrap().is_none());
        assert_eq!((device.in_flight(), pool.free()), (1, 2));
        // The drive's other reads are served meanwhile.
        device.submit(read(2, 0), pool.take().unwrap()).unwrap();
        let done = device.reap(Wait::Block).unwrap().unwrap();
        assert_eq!((done.tag, done.result), (2, Ok(())));
        assert!(done.slab.bytes().iter().all(|byte| *byte == 3));
        drop(done.slab);
        assert_eq!(device.cancel_lookahead(), 0);
        assert!(device.reap(wait).unwrap().is_none());
        assert_eq!((device.in_flight(), pool.free()), (1, 2), "a hanging read keeps its slab");
        // A part of the bytes is not the read.
        sink.write_all(&[8; 1000]).unwrap();
        assert!(device.reap(wait).unwrap().is_none());
        sink.write_all(&[8; 3096]).unwrap();
        let done = device.reap(Wait::Block).unwrap().unwrap();
        assert_eq!((done.tag, done.result), (1, Ok(())));
        assert!(done.slab.bytes().iter().all(|byte| *byte == 8));
        assert!(device.stats().retries >= 1, "the pipe gave a part first");
        assert!(device.reap(Wait::Block).unwrap().is_none());
    }

    #[test]
    fn configurations_out_of_range_are_refused() {
        let pool = SlabPool::new(4096, 1).unwrap();
        let files = Arc::new(FileSet::open(&[], IoMode::Auto).unwrap());
        let ok = DeviceConfig { kind: DeviceKind::Threads, ..DeviceConfig::default() };
        for bad in [
            DeviceConfig { queue: 0, ..ok },
            DeviceConfig { queue: 65537, ..ok },
            DeviceConfig { threads: 0, ..ok },
            DeviceConfig { threads: 65, ..ok },
            DeviceConfig { ring_entries: 1, ..ok },
            DeviceConfig { ring_entries: 32769, ..ok },
            DeviceConfig { chunk_bytes: Some(0), ..ok },
            DeviceConfig { chunk_bytes: Some(65537), ..ok },
        ] {
            assert!(matches!(open_device(&bad, Arc::clone(&files), &pool), Err(IoError::BadRequest { .. })), "{bad:?}");
        }
        assert!(open_device(&ok, files, &pool).is_ok());
    }

    #[test]
    fn names_of_kinds_are_what_is_typed() {
        for kind in DeviceKind::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        for mode in IoMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("direct".parse::<DeviceKind>().is_err() && "Direct".parse::<IoMode>().is_err());
    }
}

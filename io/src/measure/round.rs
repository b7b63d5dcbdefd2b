//! One round of one candidate: slabs at shuffled places, as many in flight as the candidate says, for so long.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;

use crate::access::IoMode;
use crate::arena::{PageKind, Pages};
use crate::device::{Device, DeviceReport, Priority, Read, RejectReason, Wait, leave, open_device};
use crate::error::IoError;
use crate::file::{FileId, FileSet};
use crate::measure::host;
use crate::measure::plan::{Candidate, Walk};
use crate::measure::summary::{Round, is_cached};
use crate::measure::witness::Witness;
use crate::plan::{FileSpan, layout};
use crate::pool::SlabPool;

/// The caller is asked this often whether to go on.
const ASK: Duration = Duration::from_millis(100);

/// How a round ended.
#[derive(Debug)]
pub enum Outcome {
    /// It was measured.
    Done(Box<Round>),
    /// The caller said no. Reads that the drive does not answer are left to the end of the process, their slabs with
    /// them.
    Stopped,
}

/// Files to measure on, cut into places of one slab.
pub struct Target {
    paths: Vec<PathBuf>,
    /// The same files once more, for looking at their pages.
    witness: Witness,
    places: Vec<FileSpan>,
    slab_bytes: u64,
    slabs: usize,
    /// One pool a kind of pages, made when first needed.
    pools: Vec<(Pages, SlabPool)>,
    /// One set a mode, opened when first needed.
    opened: Vec<(IoMode, Arc<FileSet>)>,
}

impl Target {
    /// The first `bytes_max` bytes of each of `paths` in slabs of `slab_bytes`, rounded up to the files' alignment, with
    /// memory for `slabs` of them. `root` is where /sys and /proc are.
    ///
    /// # Errors
    /// Those of opening the files and of taking the memory; [`IoError::BadRequest`] where no file holds a slab.
    pub fn open(
        paths: &[PathBuf],
        bytes_max: u64,
        slab_bytes: u64,
        slabs: usize,
        root: &Path,
    ) -> Result<Target, IoError> {
        let files = Arc::new(FileSet::open(paths, IoMode::Auto)?);
        let slab_bytes = slab_bytes.next_multiple_of(u64::from(files.align()));
        let mut places = Vec::new();
        for index in 0..paths.len() as u32 {
            let file = FileId(index);
            let usable = files.len_bytes(file).min(bytes_max);
            places.extend((0..usable / slab_bytes).map(|i| FileSpan { file, offset: i * slab_bytes, len: slab_bytes }));
        }
        if places.is_empty() {
            return Err(IoError::BadRequest { what: format!("no file holds a slab of {slab_bytes} bytes") });
        }
        let witness = Witness::open(paths, root)?;
        let pools = vec![(Pages::Auto, SlabPool::new(slab_bytes as usize, slabs)?)];
        Ok(Target {
            paths: paths.to_vec(),
            witness,
            places,
            slab_bytes,
            slabs,
            pools,
            opened: vec![(IoMode::Auto, files)],
        })
    }

    /// Bytes of a slab.
    pub fn slab_bytes(&self) -> u64 {
        self.slab_bytes
    }

    /// Places a slab can be read from.
    pub fn places(&self) -> usize {
        self.places.len()
    }

    /// The slabs on pages of this kind: of those that are only for comparison, no more than the usual depth takes.
    ///
    /// # Errors
    /// Those of taking the memory; [`IoError::Refused`] where reserved pages are asked for and too few are free.
    pub fn pool(&mut self, pages: Pages) -> Result<SlabPool, IoError> {
        if let Some((_, pool)) = self.pools.iter().find(|(known, _)| *known == pages) {
            return Ok(pool.clone());
        }
        let slabs = self.slabs.min(Candidate::RING.depth as usize);
        let pool = SlabPool::with_pages(self.slab_bytes as usize, slabs, pages)?;
        self.pools.push((pages, pool.clone()));
        Ok(pool)
    }

    /// Looks at the files' pages and at the drive under them.
    pub fn witness(&self) -> &Witness {
        &self.witness
    }

    /// The files as `mode` opens them.
    ///
    /// # Errors
    /// Those of [`FileSet::open`].
    pub fn files(&mut self, mode: IoMode) -> Result<Arc<FileSet>, IoError> {
        if let Some((_, files)) = self.opened.iter().find(|(known, _)| *known == mode) {
            return Ok(Arc::clone(files));
        }
        let files = Arc::new(FileSet::open(&self.paths, mode)?);
        self.opened.push((mode, Arc::clone(&files)));
        Ok(files)
    }

    /// Opens the candidate's device and closes it again: what it says of itself.
    ///
    /// # Errors
    /// Why it cannot be had.
    pub fn probe(&mut self, candidate: &Candidate) -> Result<DeviceReport, IoError> {
        let (files, pool) = (self.files(candidate.mode)?, self.pool(candidate.pages)?);
        let device = open_device(&candidate.config(self.slab_bytes), files, &pool)?;
        Ok(device.describe().clone())
    }

    /// Measures for about `seconds`. Through the page cache, every place is read once at most between two drops of the
    /// files' pages; opening the device and dropping pages is not timed. `go_on` is told for how long the drive has
    /// answered nothing, several times a second, and says whether to wait for it.
    ///
    /// # Errors
    /// Those of opening the device, and of any read.
    pub fn round(
        &mut self,
        candidate: &Candidate,
        seconds: f64,
        seed: u64,
        go_on: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<Outcome, IoError> {
        let (files, pool) = (self.files(candidate.mode)?, self.pool(candidate.pages)?);
        let config = candidate.config(self.slab_bytes);
        let page_cache = candidate.uses_page_cache();
        let mut round = Round::new(pool.report().kind)?;
        let mut walk = Walk::new(self.places.len(), seed);
        let mut device: Option<Box<dyn Device>> = None;
        while round.seconds < seconds {
            // Passes over a small file are shorter than the pause between two questions.
            if !go_on(Duration::ZERO) {
                return Ok(Outcome::Stopped);
            }
            // A device that maps the files keeps their pages in memory as long as it lives.
            if page_cache {
                device = None;
            }
            let resident = if page_cache { self.witness.forget() } else { None };
            let mut reader = match device.take() {
                Some(device) => device,
                None => open_device(&config, Arc::clone(&files), &pool)?,
            };
            round.registered_bytes = reader.describe().registered_bytes;
            let reads_max = if page_cache { walk.left() } else { usize::MAX };
            let (before, cpu, start) = (self.witness.counters(), host::cpu_seconds(), Instant::now());
            let until = start + Duration::from_secs_f64(seconds - round.seconds);
            let mut pass =
                Pass { depth: candidate.depth, target: self, files: &files, pool: &pool, round: &mut round, bytes: 0 };
            let went_on = pass.run(&mut *reader, &mut walk, until, reads_max, go_on);
            let bytes = pass.bytes;
            if !matches!(went_on, Ok(true)) {
                leave(reader);
                return went_on.map(|_| Outcome::Stopped);
            }
            device = Some(reader);
            round.seconds += start.elapsed().as_secs_f64();
            round.cpu_seconds += host::cpu_seconds() - cpu;
            round.bytes += bytes;
            let moved = before.and_then(|before| Some(self.witness.counters()?.since(before)));
            round.cached |= is_cached(page_cache, resident, moved.map(|moved| moved.bytes), bytes);
            if let Some(moved) = moved {
                *round.disk_bytes.get_or_insert(0) += moved.bytes;
                *round.disk_requests.get_or_insert(0) += moved.requests;
            }
            if page_cache && walk.left() == 0 {
                walk = Walk::new(self.places.len(), seed.wrapping_add(round.took.len()));
            }
        }
        Ok(Outcome::Done(Box::new(round)))
    }
}

/// Reads between two looks at the clock and the counters.
struct Pass<'a> {
    depth: u32,
    target: &'a Target,
    files: &'a FileSet,
    pool: &'a SlabPool,
    round: &'a mut Round,
    bytes: u64,
}

impl Pass<'_> {
    /// Keeps the depth until the time is up, `reads_max` reads are made or one has failed, then waits for the last.
    /// `false`: the caller said no, and reads may be in flight.
    fn run(
        &mut self,
        device: &mut dyn Device,
        walk: &mut Walk,
        until: Instant,
        reads_max: usize,
        go_on: &mut dyn FnMut(Duration) -> bool,
    ) -> Result<bool, IoError> {
        let (mut submitted, mut asked, mut answered) = (0, Instant::now(), Instant::now());
        let mut failed = None;
        loop {
            // One read at least, however short the time.
            while failed.is_none()
                && submitted < reads_max
                && device.in_flight() < self.depth as usize
                && (submitted == 0 || Instant::now() < until)
            {
                let Some(place) = walk.next() else { break };
                failed = self.submit(device, place).err();
                submitted += 1;
            }
            if let Some(done) = device.reap(Wait::AtMost(ASK))? {
                answered = Instant::now();
                match done.result {
                    Ok(()) => {
                        self.bytes += self.target.slab_bytes;
                        let nanoseconds = u64::try_from(done.took().as_nanos()).unwrap_or(u64::MAX);
                        self.round.took.saturating_record(nanoseconds);
                    }
                    Err(error) => failed = failed.or(Some(error)),
                }
            } else if device.in_flight() == 0 {
                return failed.map_or(Ok(true), Err);
            }
            if asked.elapsed() >= ASK {
                asked = Instant::now();
                if !go_on(answered.elapsed()) {
                    return Ok(false);
                }
            }
        }
    }

    fn submit(&mut self, device: &mut dyn Device, place: usize) -> Result<(), IoError> {
        let plan = layout(&[self.target.places[place]], self.files)?;
        let slab = self.pool.take().ok_or_else(|| IoError::BadRequest {
            what: format!("{} slabs in flight of a pool of {}", self.depth, self.pool.slabs()),
        })?;
        let read = Read { tag: place as u64, priority: Priority::Demand, segments: plan.segments };
        let start = Instant::now();
        let outcome = device.submit(read, slab);
        self.round.submit.saturating_record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        outcome.map_err(|rejected| match rejected.why {
            RejectReason::Full => IoError::BadRequest { what: "the device's queue is full".to_owned() },
            RejectReason::Dead(error) | RejectReason::Bad(error) => error,
        })
    }
}

impl Round {
    /// A round that has measured nothing.
    fn new(pages: PageKind) -> Result<Round, IoError> {
        // Three digits over ten minutes in nanoseconds.
        let histogram = Histogram::new_with_bounds(1, 600_000_000_000, 3);
        let histogram = histogram.map_err(|error| IoError::BadRequest { what: error.to_string() })?;
        Ok(Round {
            seconds: 0.0,
            bytes: 0,
            disk_bytes: None,
            disk_requests: None,
            cpu_seconds: 0.0,
            took: histogram.clone(),
            submit: histogram,
            cached: false,
            registered_bytes: 0,
            pages,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::plan::Sweep;
    use crate::measure::scratch::Scratch;
    use std::fs::File;
    use std::os::fd::OwnedFd;

    const SLAB: u64 = 256 << 10;

    fn target(slabs: usize) -> (Scratch, Target) {
        let mut scratch = Scratch::new(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        scratch.fill(20 * SLAB + 100, &mut |_| true).unwrap();
        let target = Target::open(&[scratch.path()], u64::MAX, SLAB, slabs, Path::new("/")).unwrap();
        (scratch, target)
    }

    #[test]
    fn every_candidate_is_measured_or_refused_by_name() {
        let (_scratch, mut target) = target(16);
        assert_eq!((target.places(), target.slab_bytes()), (20, SLAB));
        for candidate in Sweep::Full.candidates(SLAB, 16) {
            let round = match target.round(&candidate, 0.02, 7, &mut |_| true) {
                Ok(Outcome::Done(round)) => round,
                Ok(Outcome::Stopped) => panic!("stopped"),
                Err(
                    error @ (IoError::RingRefused { .. } | IoError::DirectRefused { .. } | IoError::Refused { .. }),
                ) => {
                    eprintln!("skipped {candidate}: {error}");
                    continue;
                }
                Err(error) => panic!("{candidate}: {error}"),
            };
            assert!(round.bytes > 0 && round.seconds > 0.0, "{candidate}");
            assert_eq!(round.took.len(), round.submit.len(), "{candidate}: what was asked for came");
            assert!(round.registered_bytes == 0 || candidate.register, "{candidate}");
            let together = round.disk_bytes.is_some() == round.disk_requests.is_some();
            assert!(together, "{candidate}: bytes and requests are counted together");
        }
    }

    #[test]
    fn a_caller_that_says_no_ends_the_round_and_a_depth_beyond_the_pool_is_refused() {
        let (_scratch, mut target) = target(2);
        let candidate = Candidate { mode: IoMode::Buffered, depth: 2, ..Candidate::THREADS };
        let outcome = target.round(&candidate, 1e6, 1, &mut |_| false).unwrap();
        assert!(matches!(outcome, Outcome::Stopped));
        let error = target.round(&Candidate { depth: 3, ..candidate }, 1.0, 1, &mut |_| true).unwrap_err();
        assert!(error.to_string().contains("3 slabs"), "{error}");
        assert_eq!(target.pool(Pages::Auto).unwrap().free(), 2, "no slab is lost");
    }

    /// A pipe in the place of a file is a drive that does not answer.
    #[test]
    fn a_round_on_a_drive_that_hangs_tells_for_how_long_and_can_be_left() {
        let (scratch, _) = target(2);
        let (source, sink) = std::io::pipe().unwrap();
        // The ring's own trial reads the first file, which answers.
        let paths = [scratch.path(), scratch.path()];
        let mut target = Target::open(&paths, u64::MAX, SLAB, 2, Path::new("/")).unwrap();
        let mut files = FileSet::open(&paths, IoMode::Buffered).unwrap();
        files.force_plain(FileId(1), File::from(OwnedFd::from(source)));
        target.opened.push((IoMode::Buffered, Arc::new(files)));
        let candidate = Candidate { mode: IoMode::Buffered, depth: 1, ..Candidate::RING };
        match target.round(&candidate, 1e6, 1, &mut |silent| silent < 2 * ASK) {
            Ok(Outcome::Stopped) => {}
            Err(error @ IoError::RingRefused { .. }) => return eprintln!("skipped: {error}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(target.pool(Pages::Auto).unwrap().free(), 1, "the slab is the drive's for good");
        drop(sink);
    }

    #[test]
    fn a_file_smaller_than_a_slab_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), [0; 5000]).unwrap();
        let error = Target::open(&[file.path().to_owned()], u64::MAX, 8192, 1, Path::new("/")).err().unwrap();
        assert!(error.to_string().contains("8192"), "{error}");
    }
}

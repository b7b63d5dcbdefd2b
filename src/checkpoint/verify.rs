//! Checksums of a container: which bytes have one, and whether the file still agrees.
//!
//! A conversion leaves one XXH3-64 for each run: the bytes from the first weight of an expert, or of a dense tensor, to
//! the last of its scales, as they lie in the file. [`Manifest::read`] finds the runs of an opened checkpoint;
//! [`check`] reads them through a device and lists every one that differs.

use super::Checkpoint;
use super::container::{FP8_SCALES_SUFFIX, SCALES_SUFFIX};
use super::error::{CheckpointError, Result};
use super::write::layout::HASHES_KEY;
use crate::limits::{CHECK_SLAB_BYTES_MAX, CHECKED_RUN_GAP_MAX};
use millstream_io::{
    Completion, Device, Errno, FileId, FileSet, FileSpan, IoError, Priority, Read, RejectReason, Slab, SlabPool, Wait,
    layout,
};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::Xxh3;

/// Longest time without a word to the caller, who may want to stop.
const PATIENCE: Duration = Duration::from_millis(200);

/// Bytes that must hash to a known value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HashedRun {
    /// `model.layers.L.mlp.experts.E`, or the name of a dense tensor.
    pub name: String,
    /// The layer, where it belongs to one.
    pub layer: Option<usize>,
    /// The expert, where it is one.
    pub expert: Option<usize>,
    /// The bytes. For an expert exactly from its first weight to its last scale.
    pub span: FileSpan,
    /// How many of them are weights and scales; the others are padding between those.
    pub bytes: u64,
    /// XXH3-64 of all.
    pub hash: u64,
}

/// Every checksum of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Manifest {
    /// In order of files and offsets; empty for a checkpoint that is no container of this program.
    pub runs: Vec<HashedRun>,
    /// Tensors that no checksum covers.
    pub unhashed: usize,
}

impl Manifest {
    /// Collects the checksums in the metadata of every shard.
    ///
    /// # Errors
    /// [`CheckpointError::Header`] for a checksum that is none, that belongs to nothing, or whose tensors lie apart.
    pub fn read(checkpoint: &Checkpoint) -> Result<Manifest> {
        let tensors = &checkpoint.tensors;
        let mut hashes = hashes(checkpoint)?;
        let (mut runs, mut covered) = (Vec::with_capacity(hashes.len()), 0);
        let mut add = |name: String, layer, expert, spans: &[FileSpan], (file, hash)| -> Result<()> {
            let span = joined(spans, file).ok_or_else(|| {
                let expected = format!("the tensors of {name} in one piece");
                fault(checkpoint, file, expected, "tensors that lie apart".to_owned())
            })?;
            covered += spans.len();
            let bytes = spans.iter().map(|span| span.len).sum();
            runs.push(HashedRun { name, layer, expert, span, bytes, hash });
            Ok(())
        };
        for (layer, experts) in checkpoint.experts.layers.iter().enumerate() {
            for (expert, source) in experts.iter().flatten().enumerate() {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}");
                let Some(found) = hashes.remove(&name) else { continue };
                let matrices = source.matrices();
                let scales = matrices.iter().filter_map(|matrix| matrix.scales);
                let spans: Vec<FileSpan> = matrices.iter().map(|matrix| matrix.data).chain(scales).collect();
                add(name, Some(layer), Some(expert), &spans, found)?;
            }
        }
        for (name, found) in hashes {
            let Some(weight) = tensors.get(&name) else {
                let expected = "checksums of tensors that are here".to_owned();
                return Err(fault(checkpoint, found.0, expected, format!("one of {}", name.escape_debug())));
            };
            let scales = [SCALES_SUFFIX, FP8_SCALES_SUFFIX].map(|suffix| tensors.get(&format!("{name}{suffix}")));
            let scales = scales.into_iter().flatten().map(|tensor| tensor.span());
            let spans: Vec<FileSpan> = [weight.span()].into_iter().chain(scales).collect();
            let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
            add(name, layer, None, &spans, found)?;
        }
        runs.sort_by_key(|run| (run.span.file, run.span.offset));
        let unhashed = tensors.len().saturating_sub(covered);
        Ok(Manifest { runs, unhashed })
    }

    /// Whether the model has no checksum.
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// Bytes of all runs.
    pub fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.span.len).sum()
    }
}

/// Shard and value of every checksum, by the name of its run.
fn hashes(checkpoint: &Checkpoint) -> Result<HashMap<String, (FileId, u64)>> {
    let mut found = HashMap::new();
    for file in (0..checkpoint.tensors.paths().len() as u32).map(FileId) {
        let Some(text) = checkpoint.tensors.metadata(file).get(HASHES_KEY) else { continue };
        let expected = || format!("{HASHES_KEY} to map names to 16 hexadecimal digits");
        let map: HashMap<String, String> =
            serde_json::from_str(text).map_err(|e| fault(checkpoint, file, expected(), e.to_string()))?;
        for (name, digits) in map {
            let value = u64::from_str_radix(&digits, 16).ok().filter(|_| digits.len() == 16);
            let Some(value) = value else {
                return Err(fault(checkpoint, file, expected(), format!("{} for {}", digits.escape_debug(), name)));
            };
            if found.insert(name.clone(), (file, value)).is_some() {
                let expected = "one checksum a tensor".to_owned();
                return Err(fault(checkpoint, file, expected, format!("another of {}", name.escape_debug())));
            }
        }
    }
    Ok(found)
}

fn fault(checkpoint: &Checkpoint, file: FileId, expected: String, found: String) -> CheckpointError {
    let file = checkpoint.tensors.path(file).to_owned();
    CheckpointError::Header { file, tensor: None, what: "checksums", expected, found }
}

/// One span over all of `spans`, which must be of `file`, next to each other and not empty.
fn joined(spans: &[FileSpan], file: FileId) -> Option<FileSpan> {
    let begin = spans.iter().map(|span| span.offset).min()?;
    let end = spans.iter().map(|span| span.offset + span.len).max()?;
    let bytes: u64 = spans.iter().map(|span| span.len).sum();
    if bytes == 0 {
        return None;
    }
    let together = spans.iter().all(|span| span.file == file) && end - begin <= bytes + CHECKED_RUN_GAP_MAX;
    together.then_some(FileSpan { file, offset: begin, len: end - begin })
}

/// A run whose bytes are not what was written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}: {} bytes at {} of {}: {fault}", run.title(), run.span.len, run.span.offset, shard.display())]
pub struct Damage {
    /// The shard.
    pub shard: PathBuf,
    /// The run.
    pub run: HashedRun,
    /// What is wrong with it.
    pub fault: Fault,
}

/// What is wrong with a run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The bytes are others.
    #[error("checksum {found:016x}, expected {expected:016x}")]
    Differs {
        /// Of the bytes that were written.
        expected: u64,
        /// Of the bytes that are there.
        found: u64,
    },
    /// The bytes cannot be read.
    #[error("{0}")]
    Unreadable(IoError),
}

impl HashedRun {
    /// `expert 37 of layer 12`, or the tensor's name.
    pub fn title(&self) -> String {
        match (self.layer, self.expert) {
            (Some(layer), Some(expert)) => format!("expert {expert} of layer {layer}"),
            _ => format!("tensor {}", self.name),
        }
    }
}

/// How far a check is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Checked {
    /// Bytes read.
    pub bytes: u64,
    /// Bytes to read in all.
    pub of: u64,
    /// Runs found damaged so far.
    pub damaged: usize,
    /// For how long the device has answered nothing.
    pub silent: Duration,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Runs that were read to their end.
    pub runs: usize,
    /// Bytes of all runs that were read.
    pub bytes: u64,
    /// Every run that differs or cannot be read, in order of files and offsets.
    pub damage: Vec<Damage>,
    /// Whether the caller stopped it before the end.
    pub interrupted: bool,
}

/// A pool for [`check`] of at most `slabs` slabs, smaller where `runs` are.
///
/// # Errors
/// [`IoError::Memory`] where there is none.
pub fn pool_for(runs: &[HashedRun], files: &FileSet, slabs: usize) -> std::result::Result<SlabPool, IoError> {
    let cover = 2 * u64::from(files.align());
    let longest = runs.iter().map(|run| run.span.len).max().unwrap_or(1) + cover;
    let slab_bytes = (longest.next_multiple_of(cover) as usize).min(CHECK_SLAB_BYTES_MAX);
    let parts = runs.iter().map(|run| run.span.len.div_ceil(slab_bytes as u64)).sum::<u64>();
    SlabPool::new(slab_bytes, slabs.min(parts as usize).max(1))
}

/// Reads every run through `device` into slabs of `pool`, which [`pool_for`] made, and hashes it on one of `workers`
/// threads. A run that cannot be read is damage like any other. After an interruption or an error the device may hold
/// reads; dropping it waits for them, [`millstream_io::leave`] does not.
///
/// # Errors
/// [`IoError`] where the device died, or a file changed under the check.
pub fn check(
    runs: &[HashedRun],
    files: &Arc<FileSet>,
    pool: &SlabPool,
    device: &mut dyn Device,
    workers: usize,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(Checked),
) -> std::result::Result<Report, IoError> {
    let (hashed, results) = mpsc::channel();
    let mut state = State::new(runs, files, pool, results);
    let interrupted = std::thread::scope(|scope| {
        for _ in 0..workers.max(1) {
            let (parts, inbox) = mpsc::channel();
            let hashed = hashed.clone();
            match std::thread::Builder::new().spawn_scoped(scope, move || hash_parts(inbox, hashed)) {
                Ok(_) => state.workers.push(parts),
                // Those that could be had do all of it.
                Err(_) if !state.workers.is_empty() => break,
                Err(error) => {
                    let errno = Errno::of(&error);
                    return Err(IoError::Start { what: "a thread that hashes", errno });
                }
            }
        }
        let outcome = state.drive(device, cancel, progress);
        // Without senders the threads end, and with them the results.
        state.workers.clear();
        outcome
    })?;
    drop(hashed);
    state.take_results();
    files.check_unchanged()?;
    Ok(state.report(interrupted))
}

/// Bytes of a run in the order of the file, on their way to the thread that hashes that run.
struct Part {
    run: usize,
    slab: Slab,
    range: Range<usize>,
    first: bool,
    last: bool,
}

/// Hashes the parts of one run after the other; tells of each part, so that its slab is known to be free.
fn hash_parts(parts: Receiver<Part>, hashed: Sender<(usize, Option<u64>)>) {
    let mut hash = Xxh3::new();
    for Part { run, slab, range, first, last } in parts {
        if first {
            hash.reset();
        }
        hash.update(&slab.bytes()[range]);
        drop(slab);
        if hashed.send((run, last.then(|| hash.digest()))).is_err() {
            return;
        }
    }
}

/// A part that is being read, or waits for one before it.
struct Awaited {
    run: usize,
    range: Range<usize>,
    first: bool,
    last: bool,
    done: Option<std::result::Result<Slab, IoError>>,
}

struct State<'a> {
    runs: &'a [HashedRun],
    files: &'a Arc<FileSet>,
    pool: &'a SlabPool,
    part_bytes: u64,
    /// Run and offset in it of the next part to read.
    next: (usize, u64),
    /// Sequence number of the first of `window`.
    base: u64,
    window: VecDeque<Awaited>,
    workers: Vec<Sender<Part>>,
    results: Receiver<(usize, Option<u64>)>,
    found: Vec<Option<std::result::Result<u64, IoError>>>,
    checked: Checked,
}

impl<'a> State<'a> {
    fn new(
        runs: &'a [HashedRun],
        files: &'a Arc<FileSet>,
        pool: &'a SlabPool,
        results: Receiver<(usize, Option<u64>)>,
    ) -> Self {
        let align = u64::from(files.align());
        State {
            runs,
            files,
            pool,
            // Its cover may begin and end inside a sector; parts after the first stay aligned where the run is.
            part_bytes: (pool.slab_bytes() as u64).saturating_sub(2 * align).max(align),
            next: (0, 0),
            base: 0,
            window: VecDeque::new(),
            workers: Vec::new(),
            results,
            found: vec![None; runs.len()],
            checked: Checked { of: runs.iter().map(|run| run.span.len).sum(), ..Checked::default() },
        }
    }

    /// Reads and hands out all parts; `true` where `cancel` ended it.
    fn drive(
        &mut self,
        device: &mut dyn Device,
        cancel: &AtomicBool,
        progress: &mut dyn FnMut(Checked),
    ) -> std::result::Result<bool, IoError> {
        let mut answered = Instant::now();
        loop {
            if cancel.load(Ordering::Relaxed) {
                return Ok(true);
            }
            self.submit(device)?;
            if !self.window.is_empty() {
                if let Some(done) = device.reap(Wait::AtMost(PATIENCE))? {
                    answered = Instant::now();
                    self.take_in(done);
                }
                self.checked.silent = answered.elapsed();
            } else if self.next.0 == self.runs.len() {
                return Ok(false);
            } else if let Ok(result) = self.results.recv_timeout(PATIENCE) {
                // Every slab is being hashed, and the device has nothing to answer.
                answered = Instant::now();
                self.note(result);
            }
            self.take_results();
            progress(self.checked);
        }
    }

    /// Submits the next parts, as far as slabs and the device's queue go.
    fn submit(&mut self, device: &mut dyn Device) -> std::result::Result<(), IoError> {
        while let Some(run) = self.runs.get(self.next.0) {
            let Some(slab) = self.pool.take() else { break };
            let at = self.next.1;
            let len = self.part_bytes.min(run.span.len - at);
            let span = FileSpan { file: run.span.file, offset: run.span.offset + at, len };
            let plan = layout(&[span], self.files)?;
            let tag = self.base + self.window.len() as u64;
            let read = Read { tag, priority: Priority::Demand, segments: plan.segments };
            if let Err(rejected) = device.submit(read, slab) {
                return match rejected.why {
                    RejectReason::Full if !self.window.is_empty() => Ok(()),
                    RejectReason::Full => Err(IoError::DeviceDied { cause: "it takes no read".to_owned() }),
                    RejectReason::Dead(error) | RejectReason::Bad(error) => Err(error),
                };
            }
            let place = plan.places[0];
            let range = place.at as usize..(place.at + place.len) as usize;
            let last = at + len == run.span.len;
            self.window.push_back(Awaited { run: self.next.0, range, first: at == 0, last, done: None });
            self.next = if last { (self.next.0 + 1, 0) } else { (self.next.0, at + len) };
        }
        Ok(())
    }

    /// Parts complete in any order; a hash takes them in the order of the file.
    fn take_in(&mut self, done: Completion) {
        let Completion { tag, slab, result, .. } = done;
        self.window[(tag - self.base) as usize].done = Some(result.map(|()| slab));
        while self.window.front().is_some_and(|front| front.done.is_some()) {
            let Some(front) = self.window.pop_front() else { break };
            self.base += 1;
            self.checked.bytes += front.range.len() as u64;
            let Awaited { run, range, first, last, done } = front;
            match done {
                Some(Ok(slab)) => {
                    let worker = &self.workers[run % self.workers.len()];
                    // A thread that is gone has panicked, which the end of the scope reports.
                    let _ = worker.send(Part { run, slab, range, first, last });
                }
                Some(Err(error)) => self.note_error(run, error),
                None => {}
            }
        }
    }

    fn note_error(&mut self, run: usize, error: IoError) {
        if !matches!(self.found[run], Some(Err(_))) {
            self.checked.damaged += 1;
            self.found[run] = Some(Err(error));
        }
    }

    fn take_results(&mut self) {
        while let Ok(result) = self.results.try_recv() {
            self.note(result);
        }
    }

    fn note(&mut self, (run, hash): (usize, Option<u64>)) {
        if let (None, Some(hash)) = (&self.found[run], hash) {
            self.checked.damaged += usize::from(hash != self.runs[run].hash);
            self.found[run] = Some(Ok(hash));
        }
    }

    fn report(self, interrupted: bool) -> Report {
        let damage = self.runs.iter().zip(&self.found).filter_map(|(run, found)| {
            let fault = match found.as_ref()? {
                Ok(found) if *found == run.hash => return None,
                Ok(found) => Fault::Differs { expected: run.hash, found: *found },
                Err(error) => Fault::Unreadable(error.clone()),
            };
            Some(Damage { shard: self.files.path(run.span.file).to_owned(), run: run.clone(), fault })
        });
        Report {
            runs: self.found.iter().flatten().count(),
            bytes: self.checked.bytes,
            damage: damage.collect(),
            interrupted,
        }
    }
}

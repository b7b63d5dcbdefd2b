//! Fills an arena from files: with bytes as they are stored, read straight into place, and with matrices that are quantized
//! on the way, a few rows at a time, so that what they are stored in is never in memory whole. Where files are read
//! directly only ends, and what is small, pass through the page cache.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use millstream_io::limits::{HUGE_PAGE_BYTES, PAGE_BYTES};
use millstream_io::{Arena, FileSet, FileSpan, IoError, populate};
use thiserror::Error;

use crate::checkpoint::convert::{Rows, rows_of};
use crate::checkpoint::finite::BadNumber;
use crate::checkpoint::{CheckpointError, MatrixSource};
use crate::kernels::{Format, Kernels, MatrixSpec};
use crate::limits::{LOAD_ENCODED_PART_BYTES, LOAD_PART_BYTES, LOAD_WORKERS_MAX, LOAD_WORKERS_MIN};

/// Why weights could not be loaded.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A tensor is not as the architecture needs it.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A quantized weight was to be quantized once more.
    #[error("{file}: tensor {tensor} is {stored} and was to be {asked}: what is quantized is not quantized again")]
    Requantized {
        /// The shard.
        file: String,
        /// Tensor name.
        tensor: String,
        /// How it is stored.
        stored: Format,
        /// What was asked for.
        asked: Format,
    },
    /// A norm or bias has a number that is not finite or too large.
    #[error(transparent)]
    BadNumber(#[from] BadNumber),
    /// Its bytes could not be read.
    #[error("cannot read tensor {tensor}")]
    Read {
        /// Tensor name.
        tensor: String,
        /// What failed.
        #[source]
        source: IoError,
    },
    /// No memory for the weights.
    #[error("cannot hold {bytes} bytes of resident weights")]
    Memory {
        /// Bytes asked for.
        bytes: usize,
        /// What failed.
        #[source]
        source: IoError,
    },
    /// The cancel flag was found up.
    #[error("cancelled while the weights were read")]
    Cancelled,
}

/// How far loading is, for whoever waits for it.
#[derive(Debug, Default)]
pub struct Loaded {
    done: AtomicU64,
    of: AtomicU64,
}

impl Loaded {
    /// Bytes of weights that are in memory, and that will be; nothing before they are loaded.
    pub fn bytes(&self) -> Option<(u64, u64)> {
        match self.of.load(Ordering::Relaxed) {
            0 => None,
            of => Some((self.done.load(Ordering::Relaxed).min(of), of)),
        }
    }

    /// So many bytes are to be loaded.
    pub fn announce(&self, bytes: usize) {
        self.of.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn add(&self, bytes: usize) {
        self.done.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A piece of an arena and what fills it.
pub struct Piece {
    /// What it is, for an error.
    pub tensor: String,
    /// Where in the arena.
    pub at: usize,
    /// What it is filled with.
    pub content: Content,
}

/// What fills a piece.
#[derive(Clone, Copy)]
pub enum Content {
    /// Bytes of a file as they are.
    Stored(FileSpan),
    /// A matrix, quantized.
    Encoded {
        /// Where it lies.
        source: MatrixSource,
        /// What it becomes.
        target: Format,
        /// Where in the arena its scales begin, behind the weights.
        scales_at: usize,
    },
}

/// Threads that fill an arena with `pieces` where `threads` compute: as many where they have something to compute, and never
/// so few that the drive waits for them.
fn workers(pieces: &[Piece], threads: usize) -> usize {
    let encodes = pieces.iter().any(|piece| matches!(piece.content, Content::Encoded { .. }));
    if encodes { threads.clamp(LOAD_WORKERS_MIN, LOAD_WORKERS_MAX) } else { LOAD_WORKERS_MIN }
}

/// Bytes that filling an arena from `files` takes besides the arena.
pub fn scratch_bytes(files: &FileSet, pieces: &[Piece], threads: usize) -> usize {
    let Room { part, cols, scales, jobs } = Room::of(files, pieces);
    // An arena has whole pages.
    let part = part.next_multiple_of(if part < HUGE_PAGE_BYTES { PAGE_BYTES } else { HUGE_PAGE_BYTES });
    // The encoder holds a code for each column.
    let each = part + cols * (size_of::<f32>() + 1) + scales * size_of::<f32>();
    workers(pieces, threads) * each + jobs * size_of::<Job>()
}

/// Allocates an arena and fills it with all pieces, which do not overlap and come in order, from as many threads as can be
/// had. Of several errors it is the one of the first piece.
pub fn fill(
    files: &FileSet,
    pieces: &[Piece],
    bytes: usize,
    threads: usize,
    cancel: &AtomicBool,
    loaded: &Loaded,
) -> Result<Arena, LoadError> {
    let mut arena = Arena::reserved(bytes.max(1)).map_err(|source| LoadError::Memory { bytes, source })?;
    let room = Room::of(files, pieces);
    let jobs = Mutex::new(jobs(pieces, arena.as_mut_slice()).into_iter().enumerate());
    // The error of the first job that has one, by its number. Whoever has an earlier job still ends it.
    let failed: Mutex<Option<(usize, LoadError)>> = Mutex::new(None);
    let stopped = AtomicBool::new(false);
    let next = || match stopped.load(Ordering::Relaxed) {
        true => None,
        false => jobs.lock().unwrap_or_else(PoisonError::into_inner).next(),
    };
    let work = || {
        let mut scratch = None;
        while let Some((number, job)) = next() {
            let bytes = job.bytes();
            let Err(error) = job.run(files, &room, &mut scratch, cancel) else {
                loaded.add(bytes);
                continue;
            };
            stopped.store(true, Ordering::Relaxed);
            let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
            if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                *failed = Some((number, error));
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..workers(pieces, threads) {
            // A thread that cannot be started leaves its jobs to the others; this one takes part and needs no starting.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    // The jobs hold the arena.
    drop(jobs);
    if let Some((_, error)) = failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    Ok(arena)
}

/// A part of a piece, with its own part of the arena.
struct Job<'a> {
    tensor: &'a str,
    work: Work<'a>,
}

enum Work<'a> {
    Read { span: FileSpan, out: &'a mut [u8] },
    Encode { rows: Rows, target: Format, data: &'a mut [u8], scales: &'a mut [u8] },
}

/// Cuts pieces into jobs that take a few milliseconds each: who cancels waits no longer, and threads end together.
fn jobs<'a>(pieces: &'a [Piece], arena: &'a mut [u8]) -> Vec<Job<'a>> {
    let (mut rest, mut end) = (arena, 0);
    let mut take = |at: usize, len: usize| {
        let (own, tail) = std::mem::take(&mut rest)[at - end..].split_at_mut(len);
        (rest, end) = (tail, at + len);
        own
    };
    let mut jobs = Vec::new();
    for Piece { tensor, at, content } in pieces {
        match *content {
            Content::Stored(span) => {
                let (mut rest, mut offset) = (take(*at, span.len as usize), span.offset);
                while !rest.is_empty() {
                    // Every part but the last ends with a sector of the file.
                    let len = LOAD_PART_BYTES - offset as usize % LOAD_PART_BYTES;
                    let (out, others) = rest.split_at_mut(len.min(rest.len()));
                    let span = FileSpan { offset, len: out.len() as u64, ..span };
                    (rest, offset) = (others, offset + span.len);
                    jobs.push(Job { tensor, work: Work::Read { span, out } });
                }
            }
            Content::Encoded { source, target, scales_at } => {
                let MatrixSpec { rows, cols, .. } = source.spec;
                let mut data = take(*at, target.data_bytes(rows, cols));
                let mut scales = take(scales_at, target.scale_bytes(rows, cols));
                for rows in rows_of(&source, LOAD_ENCODED_PART_BYTES) {
                    let count = rows.spec.rows;
                    let (own_data, other_data) = data.split_at_mut(target.data_bytes(count, cols));
                    let (own_scales, other_scales) = scales.split_at_mut(target.scale_bytes(count, cols));
                    (data, scales) = (other_data, other_scales);
                    jobs.push(Job { tensor, work: Work::Encode { rows, target, data: own_data, scales: own_scales } });
                }
            }
        }
    }
    jobs
}

impl Job<'_> {
    /// Bytes of the arena that it fills.
    fn bytes(&self) -> usize {
        match &self.work {
            Work::Read { out, .. } => out.len(),
            Work::Encode { data, scales, .. } => data.len() + scales.len(),
        }
    }

    fn run(
        self,
        files: &FileSet,
        room: &Room,
        scratch: &mut Option<Scratch>,
        cancel: &AtomicBool,
    ) -> Result<(), LoadError> {
        if cancel.load(Ordering::Relaxed) {
            return Err(LoadError::Cancelled);
        }
        let read = |span: &FileSpan, out: &mut [u8]| {
            let failed = |source| LoadError::Read { tensor: self.tensor.to_owned(), source };
            files.read_placed(span.file, span.offset, out).map_err(failed)
        };
        let none = |bytes: usize| move |source| LoadError::Memory { bytes, source };
        let (rows, target, data, scales) = match self.work {
            Work::Read { span, out } => {
                populate(out).map_err(none(out.len()))?;
                return read(&span, out);
            }
            Work::Encode { rows, target, data, scales } => (rows, target, data, scales),
        };
        populate(data).map_err(none(data.len()))?;
        let scratch = match scratch {
            Some(scratch) => scratch,
            empty => empty.insert(room.make().map_err(none(room.part))?),
        };
        let mut stored: [&[u8]; 3] = [&[]; 3];
        let mut free = scratch.part.as_mut_slice();
        for (span, part) in rows.spans.iter().zip(&mut stored) {
            let (cover, before) = sectors(files, span);
            let (own, others) = free.split_at_mut(room_of(&cover, files));
            let own = &mut own[..cover.len as usize];
            read(&cover, own)?;
            (*part, free) = (&own[before..][..span.len as usize], others);
        }
        let encoded = encode(&rows, stored, target, data, scales, &mut scratch.values, &mut scratch.scales);
        encoded.map_err(|(row, col, value)| {
            LoadError::Checkpoint(CheckpointError::NotFinite {
                file: files.path(rows.spans[0].file).to_owned(),
                tensor: self.tensor.to_owned(),
                row: rows.first + row,
                col,
                value,
            })
        })
    }
}

/// Encodes rows as a conversion does; the error is row, column and value of what cannot be stored.
fn encode(
    rows: &Rows,
    [data, scales, factor]: [&[u8]; 3],
    target: Format,
    out: &mut [u8],
    out_scales: &mut [u8],
    values: &mut [f32],
    row_scales: &mut [f32],
) -> Result<(), (usize, usize, f32)> {
    let MatrixSpec { rows: count, cols, .. } = rows.spec;
    let (weights, kernels) = (rows.weights(data, scales, factor), Kernels::best());
    let (values, row_scales) = (&mut values[..cols], &mut row_scales[..target.scale_count(1, cols)]);
    let mut scales_of_rows = out_scales.chunks_mut((4 * row_scales.len()).max(1));
    for (row, out) in (0..count).zip(out.chunks_mut(target.row_bytes(cols))) {
        kernels.decode_row(&weights, row, values);
        kernels.store_row(target, values, out, row_scales).map_err(|(col, value)| (row, col, value))?;
        let places = scales_of_rows.next().unwrap_or_default().as_chunks_mut().0;
        places.iter_mut().zip(&*row_scales).for_each(|(place, scale)| *place = scale.to_le_bytes());
    }
    Ok(())
}

/// The whole sectors that hold a span, as far as the file goes, and how far into them it begins.
fn sectors(files: &FileSet, span: &FileSpan) -> (FileSpan, usize) {
    let align = u64::from(files.align());
    let before = span.offset % align;
    let end = (span.offset + span.len).next_multiple_of(align).min(files.len_bytes(span.file));
    let offset = span.offset - before;
    (FileSpan { file: span.file, offset, len: end.saturating_sub(offset).max(before + span.len) }, before as usize)
}

/// Room for a cover, so that what comes behind it begins a sector too.
fn room_of(cover: &FileSpan, files: &FileSet) -> usize {
    (cover.len as usize).next_multiple_of(files.align() as usize)
}

/// What the encoding of the largest part needs beside the arena.
#[derive(Default)]
struct Room {
    /// Bytes as they are stored.
    part: usize,
    cols: usize,
    /// Scales of a row.
    scales: usize,
    /// Parts that all pieces are cut into, at most.
    jobs: usize,
}

/// What a thread encodes with.
struct Scratch {
    part: Arena,
    values: Vec<f32>,
    scales: Vec<f32>,
}

impl Room {
    fn of(files: &FileSet, pieces: &[Piece]) -> Room {
        let mut room = Room::default();
        for piece in pieces {
            let (source, target) = match piece.content {
                Content::Encoded { source, target, .. } => (source, target),
                Content::Stored(span) => {
                    room.jobs += span.len as usize / LOAD_PART_BYTES + 2;
                    continue;
                }
            };
            let cols = source.spec.cols;
            for rows in rows_of(&source, LOAD_ENCODED_PART_BYTES) {
                let covers = rows.spans.iter().map(|span| room_of(&sectors(files, span).0, files));
                room.part = room.part.max(covers.sum());
                room.jobs += 1;
            }
            room.cols = room.cols.max(cols);
            room.scales = room.scales.max(target.scale_count(1, cols));
        }
        room
    }

    fn make(&self) -> Result<Scratch, IoError> {
        let (values, scales) = (vec![0.0; self.cols], vec![0.0; self.scales]);
        Ok(Scratch { part: Arena::new(self.part.max(1))?, values, scales })
    }
}

//! Fills an arena from files: with bytes as they are stored, read straight into place, and with matrices that are quantized
//! on the way, a few rows at a time, so that what they are stored in is never in memory whole.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use millstream_io::limits::{HUGE_PAGE_BYTES, PAGE_BYTES};
use millstream_io::{Arena, FileSet, FileSpan, IoError};
use thiserror::Error;

use crate::checkpoint::convert::{Rows, encode_row, rows_of};
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

/// Bytes that filling an arena takes besides the arena.
pub fn scratch_bytes(pieces: &[Piece], threads: usize) -> usize {
    let Room { part, cols, scales } = Room::of(pieces);
    // An arena has whole pages.
    let part = part.next_multiple_of(if part < HUGE_PAGE_BYTES { PAGE_BYTES } else { HUGE_PAGE_BYTES });
    // The encoder holds a code for each column.
    workers(pieces, threads) * (part + cols * (size_of::<f32>() + 1) + scales * size_of::<f32>())
}

/// Allocates an arena and fills it with all pieces, which do not overlap and come in order, from as many threads as can be
/// had. Of several errors it is the one of the first piece.
pub fn fill(
    files: &FileSet,
    pieces: &[Piece],
    bytes: usize,
    threads: usize,
    cancel: &AtomicBool,
) -> Result<Arena, LoadError> {
    let mut arena = new_arena(bytes)?;
    let room = Room::of(pieces);
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
            if let Err(error) = job.run(files, &room, &mut scratch, cancel) {
                stopped.store(true, Ordering::Relaxed);
                let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                    *failed = Some((number, error));
                }
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

fn new_arena(bytes: usize) -> Result<Arena, LoadError> {
    Arena::new(bytes.max(1)).map_err(|source| LoadError::Memory { bytes, source })
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
                let parts = take(*at, span.len as usize).chunks_mut(LOAD_PART_BYTES);
                jobs.extend(parts.zip((span.offset..).step_by(LOAD_PART_BYTES)).map(|(out, offset)| {
                    let span = FileSpan { offset, len: out.len() as u64, ..span };
                    Job { tensor, work: Work::Read { span, out } }
                }));
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
            files.read_exact_at(span.file, span.offset, out).map_err(failed)
        };
        let (rows, target, data, scales) = match self.work {
            Work::Read { span, out } => return read(&span, out),
            Work::Encode { rows, target, data, scales } => (rows, target, data, scales),
        };
        let scratch = match scratch {
            Some(scratch) => scratch,
            none => none.insert(room.make()?),
        };
        let mut stored: [&[u8]; 3] = [&[]; 3];
        let mut free = scratch.part.as_mut_slice();
        for (span, part) in rows.spans.iter().zip(&mut stored) {
            let (own, others) = free.split_at_mut(span.len as usize);
            read(span, own)?;
            (*part, free) = (own, others);
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
        encode_row(target, values, out, row_scales).map_err(|(col, value)| (row, col, value))?;
        let places = scales_of_rows.next().unwrap_or_default().as_chunks_mut().0;
        places.iter_mut().zip(&*row_scales).for_each(|(place, scale)| *place = scale.to_le_bytes());
    }
    Ok(())
}

/// What the encoding of the largest part needs beside the arena.
#[derive(Default)]
struct Room {
    /// Bytes as they are stored.
    part: usize,
    cols: usize,
    /// Scales of a row.
    scales: usize,
}

/// What a thread encodes with.
struct Scratch {
    part: Arena,
    values: Vec<f32>,
    scales: Vec<f32>,
}

impl Room {
    fn of(pieces: &[Piece]) -> Room {
        let mut room = Room::default();
        for piece in pieces {
            let Content::Encoded { source, target, .. } = piece.content else { continue };
            let cols = source.spec.cols;
            // The first part of a matrix is the largest.
            let spans = rows_of(&source, LOAD_ENCODED_PART_BYTES).next().map_or(vec![], |rows| rows.spans);
            room.part = room.part.max(spans.iter().map(|span| span.len as usize).sum());
            room.cols = room.cols.max(cols);
            room.scales = room.scales.max(target.scale_count(1, cols));
        }
        room
    }

    fn make(&self) -> Result<Scratch, LoadError> {
        let (values, scales) = (vec![0.0; self.cols], vec![0.0; self.scales]);
        Ok(Scratch { part: new_arena(self.part)?, values, scales })
    }
}

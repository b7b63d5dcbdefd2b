//! Weights of the source in the formats of the container: read ahead, decoded and encoded, a bounded number of rows at a
//! time.

use super::source::Consume;
use super::sums::ReadSums;
use crate::checkpoint::Checkpoint;
use crate::checkpoint::ahead::ReadAhead;
use crate::checkpoint::container::MatrixSource;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::finite::{self, BadNumber};
use crate::checkpoint::tensors::TensorMap;
use crate::checkpoint::write::layout::{Item, ShardPlan};
use crate::checkpoint::write::{self, Proof, Weights};
use crate::kernels::{FP8_BLOCK, Format, Kernels, MatrixSpec, WeightRef};
use crate::limits::CONVERT_PIECE_BYTES;
use millstream_io::{FileId, FileSet, FileSpan, IoMode};
use rayon::ThreadPool;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The weights of a checkpoint, and the buffers between reading and writing them.
pub(crate) struct Encoder<'a> {
    source: &'a TensorMap,
    sums: ReadSums,
    /// What the shard that is being made is made from.
    ahead: Option<ReadAhead>,
    taken: Arc<AtomicU64>,
    /// What an earlier run left, of the source and of the container.
    earlier: Earlier,
    /// Shards that are removed when nothing needs them any more.
    consume: Option<Consume>,
    kernels: &'static Kernels,
    /// Those that encode, where there are any.
    threads: Option<ThreadPool>,
    output: Vec<u8>,
    output_scales: Vec<f32>,
}

/// What an earlier run left, for each shard of the container.
#[derive(Default)]
pub(crate) struct Earlier {
    /// How it is proved where it is finished.
    pub proofs: Vec<Proof>,
    /// Shards of the source that it is made from and that are gone.
    pub gone: Vec<Vec<String>>,
}

/// Rows of a matrix that are read and encoded together.
pub(crate) struct Rows {
    /// Number of the first.
    pub first: usize,
    /// How many there are, and how they are stored.
    pub spec: MatrixSpec,
    /// Their weights and, where the source has them, their scales and the factor of the whole matrix.
    pub spans: Vec<FileSpan>,
}

impl Rows {
    /// The rows over their bytes, as they were read; of what the source does not have there is none.
    pub fn weights<'a>(&self, data: &'a [u8], scales: &'a [u8], factor: &[u8]) -> WeightRef<'a> {
        let weights = WeightRef::new(self.spec, data, scales);
        match factor.as_chunks().0 {
            [factor] => weights.with_factor(f32::from_le_bytes(*factor)),
            _ => weights,
        }
    }
}

impl Weights for Encoder<'_> {
    /// Files are open only while a shard is made from them, so that one that is removed then gives its space back.
    fn begin(&mut self, shard: &ShardPlan) -> Result<()> {
        let mut pieces = Vec::new();
        for item in shard.runs.iter().flat_map(|run| &run.items) {
            pieces.extend(rows_of(&source_of(item, self.source)?, CONVERT_PIECE_BYTES).map(|rows| rows.spans));
        }
        let mut files: BTreeMap<FileId, FileId> =
            pieces.iter().flatten().map(|span: &FileSpan| (span.file, FileId(0))).collect();
        files.values_mut().zip(0..).for_each(|(id, number)| *id = FileId(number));
        let paths: Vec<PathBuf> = files.keys().map(|&file| self.source.path(file).to_owned()).collect();
        pieces.iter_mut().flatten().for_each(|span| span.file = files[&span.file]);
        self.ahead = Some(ReadAhead::begin(FileSet::open(&paths, IoMode::Auto)?, &pieces)?);
        Ok(())
    }

    fn write(&mut self, item: &Item, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<Vec<u8>> {
        let source = source_of(item, self.source)?;
        let mut scales = Vec::with_capacity(4 * item.scale_count() as usize);
        for rows in rows_of(&source, CONVERT_PIECE_BYTES) {
            let Some(ahead) = &mut self.ahead else { unreachable!("a shard is begun before its items are asked for") };
            let piece = ahead.next(&mut || put(&[]))?;
            let (data, data_scales) = (piece.bytes(0), piece.bytes(1));
            for (span, bytes) in rows.spans.iter().zip([data, data_scales]) {
                self.sums.take(self.source, span, bytes)?;
            }
            self.taken.fetch_add((data.len() + data_scales.len()) as u64, Ordering::Relaxed);
            // Whoever encodes integers looks at what they are made of.
            if (item.target == rows.spec.format || !item.target.is_integer())
                && let Some(found) = finite::in_rows(rows.spec, [data, data_scales, piece.bytes(2)])
            {
                let shard = self.source.path(source.data.file).to_owned();
                let row = found.row.map(|row| row + rows.first as u64);
                return Err(BadNumber { shard, tensor: item.name.clone(), row, ..found }.into());
            }
            if item.target == rows.spec.format {
                put(data)?;
                scales.extend_from_slice(data_scales);
                continue;
            }
            let weights = rows.weights(data, data_scales, piece.bytes(2));
            self.encode(item.target, &weights).map_err(|(row, col, value)| CheckpointError::NotFinite {
                file: self.source.path(source.data.file).to_owned(),
                tensor: item.name.clone(),
                row: rows.first + row,
                col,
                value,
            })?;
            put(&self.output)?;
            scales.extend(self.output_scales.iter().flat_map(|scale| scale.to_le_bytes()));
        }
        Ok(scales)
    }

    fn end(&mut self) -> Result<()> {
        self.ahead.take().map_or(Ok(()), |ahead| ahead.check_unchanged())
    }

    fn proof(&self, number: usize) -> Proof {
        self.earlier.proofs.get(number).copied().unwrap_or(Proof::None)
    }

    fn gone(&self, number: usize) -> Vec<String> {
        self.earlier.gone.get(number).cloned().unwrap_or_default()
    }

    fn source(&self) -> &Path {
        self.source.dir()
    }

    fn stored(&mut self, number: usize) -> Result<()> {
        self.consume.as_mut().map_or(Ok(()), |consume| consume.stored(number))
    }

    fn taken(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.taken)
    }
}

impl<'a> Encoder<'a> {
    pub fn new(
        source: &'a Checkpoint,
        earlier: Earlier,
        consume: Option<Consume>,
        kernels: &'static Kernels,
    ) -> Result<Encoder<'a>> {
        let (taken, output, output_scales) = Default::default();
        let (sums, threads, source) = (ReadSums::of(source)?, write::threads(), &source.tensors);
        Ok(Encoder { source, sums, ahead: None, taken, earlier, consume, kernels, threads, output, output_scales })
    }

    /// Shards of the source that were removed, and their bytes.
    pub fn removed(&self) -> (usize, u64) {
        self.consume.as_ref().map_or((0, 0), |consume| consume.removed)
    }

    /// Re-encodes rows into `output` and `output_scales`; the error is row, column and value of what cannot be stored.
    fn encode(&mut self, target: Format, weights: &WeightRef) -> std::result::Result<(), (usize, usize, f32)> {
        let (rows, cols) = (weights.rows(), weights.cols());
        let row_bytes = target.row_bytes(cols);
        let row_scales = target.scale_count(1, cols);
        // Every byte is overwritten, but a row without scales still needs a place to stand for it.
        self.output.resize(rows * row_bytes, 0);
        self.output_scales.resize(rows * row_scales.max(1), 0.0);
        let kernels = self.kernels;
        let scale_chunk = row_scales.max(1);
        let convert = |values: &mut Vec<f32>, (row, (data, scales)): (usize, (&mut [u8], &mut [f32]))| {
            kernels.decode_row(weights, row, values);
            kernels.store_row(target, values, data, scales).err().map(|(col, value)| (row, col, value))
        };
        let (output, output_scales) = (&mut self.output, &mut self.output_scales);
        let encoded = match &self.threads {
            Some(threads) => threads.install(|| {
                let rows = output.par_chunks_mut(row_bytes).zip(output_scales.par_chunks_mut(scale_chunk));
                rows.enumerate().map_init(|| vec![0f32; cols], convert).find_map_first(|fault| fault)
            }),
            None => {
                let mut values = vec![0f32; cols];
                let rows = output.chunks_mut(row_bytes).zip(output_scales.chunks_mut(scale_chunk));
                rows.enumerate().find_map(|row| convert(&mut values, row))
            }
        };
        if row_scales == 0 {
            self.output_scales.clear();
        }
        encoded.map_or(Ok(()), Err)
    }
}

/// Where the weights of an item lie.
pub(crate) fn source_of(item: &Item, tensors: &TensorMap) -> Result<MatrixSource> {
    item.shape.source(&item.name, tensors)
}

/// The rows of a matrix, in pieces of about `piece_bytes`.
pub(crate) fn rows_of(source: &MatrixSource, piece_bytes: usize) -> impl Iterator<Item = Rows> + use<> {
    let MatrixSource { spec: MatrixSpec { format, rows, cols }, data, scales, factor } = *source;
    // FP8 scales cover blocks of rows, so that a piece begins on a block.
    let block = if format == Format::Fp8Block { FP8_BLOCK } else { 1 };
    let count = (piece_bytes / format.row_bytes(cols).max(1) / block * block).max(block);
    (0..rows).step_by(count).map(move |first| {
        let spec = MatrixSpec { format, rows: count.min(rows - first), cols };
        let part = |span: FileSpan, at: usize, len: usize| FileSpan {
            file: span.file,
            offset: span.offset + at as u64,
            len: len as u64,
        };
        let data = part(data, format.data_bytes(first, cols), spec.data_bytes());
        let scales = scales.map(|span| part(span, format.scale_bytes(first, cols), spec.scale_bytes()));
        Rows { first, spec, spans: [Some(data), scales, factor].into_iter().flatten().collect() }
    })
}

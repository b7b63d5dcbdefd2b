//! Weights of the source in the formats of the container: read, decoded and encoded, a bounded number of rows at a time.

use crate::checkpoint::error::{CheckpointError, Result, io_error};
use crate::checkpoint::tensors::TensorMap;
use crate::checkpoint::write::layout::Item;
use crate::checkpoint::write::{self, Weights};
use crate::kernels::{EncodeError, FP8_BLOCK, Format, Kernels, MatrixSpec, WeightRef, encode};
use millstream_io::{FileId, FileSpan};
use rayon::prelude::*;
use std::fs::File;
use std::os::unix::fs::FileExt;

/// Weights decoded at a time: bounds the memory of a conversion, whatever the size of a matrix.
const CHUNK_WEIGHTS: usize = 4 << 20;

/// The weights of a checkpoint, and the buffers between reading and writing them.
pub(crate) struct Encoder<'a> {
    source: &'a TensorMap,
    open: Option<(u32, File)>,
    input: Vec<u8>,
    input_scales: Vec<u8>,
    output: Vec<u8>,
    output_scales: Vec<f32>,
}

impl Weights for Encoder<'_> {
    fn write(&mut self, item: &Item, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<Vec<u8>> {
        let source = item.shape.source(&item.name, self.source)?;
        let MatrixSpec { format, rows, cols } = source.spec;
        let mut scales = Vec::with_capacity(4 * item.scale_count() as usize);
        // FP8 scales cover blocks of rows, so that a chunk begins on a block.
        let chunk_rows = (CHUNK_WEIGHTS / cols.max(1)).next_multiple_of(FP8_BLOCK);
        let mut start = 0;
        while start < rows {
            let count = chunk_rows.min(rows - start);
            let spec = MatrixSpec { format, rows: count, cols };
            let data_at = format.data_bytes(start, cols) as u64;
            let scales_at = 4 * format.scale_count(start, cols) as u64;
            let data = slice(source.data, data_at, spec.data_bytes());
            let buffer = std::mem::take(&mut self.input);
            self.input = self.read(data, buffer)?;
            self.input_scales.clear();
            if let Some(span) = source.scales {
                let span = slice(span, scales_at, spec.scale_bytes());
                let buffer = std::mem::take(&mut self.input_scales);
                self.input_scales = self.read(span, buffer)?;
            }
            if item.target == format {
                put(&self.input)?;
                scales.extend_from_slice(&self.input_scales);
            } else {
                self.encode(item, source.data.file, spec, start)?;
                put(&self.output)?;
                scales.extend(self.output_scales.iter().flat_map(|scale| scale.to_le_bytes()));
            }
            start += count;
        }
        Ok(scales)
    }
}

impl<'a> Encoder<'a> {
    pub fn new(source: &'a TensorMap) -> Self {
        let (input, input_scales, output, output_scales) = Default::default();
        Encoder { source, open: None, input, input_scales, output, output_scales }
    }

    /// Re-encodes the rows of `input` into `output` and `output_scales`.
    fn encode(&mut self, item: &Item, file: FileId, spec: MatrixSpec, first_row: usize) -> Result<()> {
        let (target, cols) = (item.target, spec.cols);
        let weights = WeightRef::new(spec, &self.input, &self.input_scales);
        let row_bytes = target.row_bytes(cols);
        let row_scales = target.scale_count(1, cols);
        // Every byte is overwritten, but a row without scales still needs a place to stand for it.
        self.output.resize(spec.rows * row_bytes, 0);
        self.output_scales.resize(spec.rows * row_scales.max(1), 0.0);
        let kernels = Kernels::best();
        let scale_chunk = row_scales.max(1);
        let convert = |values: &mut Vec<f32>, (row, (data, scales)): (usize, (&mut [u8], &mut [f32]))| {
            kernels.decode_row(&weights, row, values);
            encode_row(target, values, data, scales).err().map(|(col, value)| (row, col, value))
        };
        let (output, output_scales) = (&mut self.output, &mut self.output_scales);
        let encoded = match write::threads() {
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
        match encoded {
            None => Ok(()),
            Some((row, col, value)) => Err(CheckpointError::NotFinite {
                file: self.source.path(file).to_owned(),
                tensor: item.name.clone(),
                row: first_row + row,
                col,
                value,
            }),
        }
    }

    fn read(&mut self, span: FileSpan, mut buffer: Vec<u8>) -> Result<Vec<u8>> {
        let path = self.source.path(span.file);
        let file = match &mut self.open {
            Some((id, file)) if *id == span.file.0 => file,
            other => &mut other.insert((span.file.0, File::open(path).map_err(io_error("open", path))?)).1,
        };
        buffer.resize(span.len as usize, 0);
        file.read_exact_at(&mut buffer, span.offset).map_err(io_error("read", path))?;
        Ok(buffer)
    }
}

fn slice(span: FileSpan, at: u64, len: usize) -> FileSpan {
    FileSpan { file: span.file, offset: span.offset + at, len: len as u64 }
}

/// Encodes one row; the error is the column and value that cannot be stored. F32 takes any value as it is.
fn encode_row(
    target: Format,
    values: &[f32],
    data: &mut [u8],
    scales: &mut [f32],
) -> std::result::Result<(), (usize, f32)> {
    let check = |finite: bool, col: usize, value: f32| if finite { Ok(()) } else { Err((col, value)) };
    match target {
        Format::F32 => {
            data.chunks_exact_mut(4).zip(values).for_each(|(out, value)| out.copy_from_slice(&value.to_le_bytes()));
            Ok(())
        }
        Format::Bf16 => data.chunks_exact_mut(2).zip(values).enumerate().try_for_each(|(col, (out, &value))| {
            let half = half::bf16::from_f32(value);
            out.copy_from_slice(&half.to_le_bytes());
            check(half.is_finite(), col, value)
        }),
        _ => match encode(target, values.len(), values, data, scales) {
            Ok(()) => Ok(()),
            Err(EncodeError::NotFinite { index, value }) => Err((index, value)),
            Err(other) => unreachable!("{other}: a plan holds integer formats, F32, BF16 and formats of the source"),
        },
    }
}

//! Whether the numbers that a model's weights are made of are finite: one that is not spoils every answer it takes part in.
//!
//! Of a weight that is quantized to integers only the scales can be otherwise, so that no more of it is read.

use super::ahead::ReadAhead;
use super::error::Result;
use super::required::{self, Required, Shape};
use super::{Checkpoint, ExpertSource, MatrixSource};
use crate::kernels::{Format, MatrixSpec};
use crate::limits::{CONVERT_PIECE_BYTES, FINITE_SPANS_MAX};
use millstream_io::{DeviceKind, FileSet, FileSpan, IoMode};
use std::path::PathBuf;

/// Numbers of one tensor, side by side in a shard.
#[derive(Clone, Debug)]
pub struct Numbers {
    tensor: String,
    kind: Kind,
    /// Numbers of a row; of scales none are in rows.
    cols: Option<u64>,
    span: FileSpan,
}

/// How a number is stored.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    F32,
    Bf16,
    F16,
    /// E4M3.
    Fp8,
    /// A scale in f32 of codes up to so much: their product must be finite.
    Scale(f32),
}

/// A number that is not finite.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}: tensor {tensor}: {} is {value}{}", shard.display(), self.place(), self.others())]
pub struct NotFinite {
    /// The shard.
    pub shard: PathBuf,
    /// The weight it belongs to.
    pub tensor: String,
    /// Row and column, of a weight that has them.
    pub row: Option<u64>,
    /// Column, or the number of a scale.
    pub index: u64,
    /// What it is; of a scale that is too large, that.
    pub value: f32,
    /// How many others of the tensor are not finite either.
    pub others: u64,
}

impl NotFinite {
    fn place(&self) -> String {
        match self.row {
            Some(row) => format!("row {row}, column {}", self.index),
            None => format!("scale {}", self.index),
        }
    }

    fn others(&self) -> String {
        if self.others == 0 { String::new() } else { format!(", and {} more of it are not finite", self.others) }
    }
}

/// How far a look is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// Bytes looked at.
    pub bytes: u64,
    /// Bytes to look at.
    pub of: u64,
    /// Tensors with a number that is not finite.
    pub bad: usize,
}

/// Norms and biases: few, and read before a model is loaded.
pub fn vectors(checkpoint: &Checkpoint) -> Result<Vec<Numbers>> {
    gather(checkpoint, Checkpoint::resident(&checkpoint.arch).filter(|tensor| matches!(tensor.shape, Shape::Vector(_))))
}

/// All numbers that an answer may take part in, in the order of the files.
pub fn all(checkpoint: &Checkpoint) -> Result<Vec<Numbers>> {
    let mut numbers = gather(checkpoint, Checkpoint::resident(&checkpoint.arch))?;
    for (layer, experts) in checkpoint.experts.layers.iter().enumerate() {
        for (expert, source) in experts.iter().flatten().enumerate() {
            let names = required::expert(&checkpoint.arch, layer, expert);
            for (tensor, matrix) in names.iter().zip(ExpertSource::matrices(source)) {
                add(&mut numbers, &tensor.name, matrix);
            }
        }
    }
    numbers.sort_by_key(|numbers| (numbers.span.file, numbers.span.offset));
    Ok(numbers)
}

/// Numbers of those of `tensors` that are there.
fn gather(checkpoint: &Checkpoint, tensors: impl Iterator<Item = Required>) -> Result<Vec<Numbers>> {
    let mut numbers = Vec::new();
    for tensor in tensors.filter(|tensor| checkpoint.tensors.get(&tensor.name).is_some()) {
        add(&mut numbers, &tensor.name, &tensor.source(&checkpoint.tensors)?);
    }
    Ok(numbers)
}

fn add(numbers: &mut Vec<Numbers>, tensor: &str, source: &MatrixSource) {
    let spans = [Some(source.data), source.scales, source.factor];
    for (at, (kind, span)) in kinds(source.spec.format).into_iter().zip(spans).enumerate() {
        let (Some(kind), Some(span)) = (kind, span) else { continue };
        let cols = (at == 0).then_some(source.spec.cols as u64);
        numbers.push(Numbers { tensor: tensor.to_owned(), kind, cols, span });
    }
}

/// A number that is not finite in rows of a matrix, given as they are stored: weights, scales, the factor of the matrix. Rows
/// are counted from the first of these, and so are scales.
pub(crate) fn in_rows(spec: MatrixSpec, stored: [&[u8]; 3]) -> Option<NotFinite> {
    kinds(spec.format).into_iter().zip(stored).enumerate().find_map(|(at, (kind, bytes))| {
        let kind = kind.filter(|kind| !kind.all_finite(bytes))?;
        let (index, value) = kind.not_finite(bytes).next()?;
        let others = kind.not_finite(bytes).count() as u64 - 1;
        let (row, index) = if at == 0 { (Some(index / spec.cols), index % spec.cols) } else { (None, index) };
        let (shard, tensor) = Default::default();
        Some(NotFinite { shard, tensor, row: row.map(|row| row as u64), index: index as u64, value, others })
    })
}

/// The numbers that weights of a format are made of: the weights themselves, scales, the factor of a matrix.
fn kinds(format: Format) -> [Option<Kind>; 3] {
    match format {
        Format::F32 => [Some(Kind::F32), None, None],
        Format::Bf16 => [Some(Kind::Bf16), None, None],
        Format::F16 => [Some(Kind::F16), None, None],
        Format::Fp8Block => [Some(Kind::Fp8), Some(Kind::Scale(448.0)), None],
        Format::Int8Row => [None, Some(Kind::Scale(128.0)), None],
        Format::Int4Row | Format::Int4Group { .. } => [None, Some(Kind::Scale(8.0)), None],
        Format::Int3Group => [None, Some(Kind::Scale(4.0)), None],
        Format::Int2Row => [None, Some(Kind::Scale(2.0)), None],
        // The largest code is 6, the largest scale of 16 of them 448.
        Format::Nvfp4 => [None, Some(Kind::Fp8), Some(Kind::Scale(6.0 * 448.0))],
    }
}

/// A part of the numbers of `all[which]`, that begins with the one numbered `first`.
struct Part {
    which: usize,
    first: u64,
    span: FileSpan,
}

/// Reads `all`, in the order of the files, and lists the first number of each tensor that is not finite. `go_on` is told how
/// far it is, and for now and then while nothing comes; its error ends the look.
pub fn check(
    checkpoint: &Checkpoint,
    all: &[Numbers],
    (mode, kind): (IoMode, DeviceKind),
    go_on: &mut dyn FnMut(Looked) -> Result<()>,
) -> Result<Vec<NotFinite>> {
    let parts = parts(all);
    let pieces: Vec<Vec<FileSpan>> = parts.iter().map(|piece| piece.iter().map(|part| part.span).collect()).collect();
    let files = FileSet::open(checkpoint.tensors.paths(), mode)?;
    let mut ahead = ReadAhead::begin_through(files, &pieces, kind)?;
    let mut looked = Looked { of: all.iter().map(|numbers| numbers.span.len).sum(), ..Looked::default() };
    let mut found: Vec<(usize, NotFinite)> = Vec::new();
    for piece in parts {
        let bytes = ahead.next(&mut || go_on(looked))?;
        for (at, part) in piece.iter().enumerate() {
            let (numbers, bytes) = (&all[part.which], bytes.bytes(at));
            looked.bytes += bytes.len() as u64;
            if numbers.kind.all_finite(bytes) {
                continue;
            }
            let bad = numbers.kind.not_finite(bytes);
            let (index, value) = bad.clone().next().unwrap_or_default();
            let count = bad.count() as u64;
            match found.last_mut().filter(|(which, _)| *which == part.which) {
                Some((_, first)) => first.others += count,
                None => {
                    let index = part.first + index as u64;
                    let shard = checkpoint.tensors.path(numbers.span.file).to_owned();
                    let (row, index) = numbers.cols.map_or((None, index), |cols| (Some(index / cols), index % cols));
                    let tensor = numbers.tensor.clone();
                    found.push((part.which, NotFinite { shard, tensor, row, index, value, others: count - 1 }));
                    looked.bad += 1;
                }
            }
        }
        go_on(looked)?;
    }
    ahead.check_unchanged()?;
    Ok(found.into_iter().map(|(_, first)| first).collect())
}

/// Cuts numbers into pieces of a few megabytes, each of one tensor or of several that are small.
fn parts(all: &[Numbers]) -> Vec<Vec<Part>> {
    let most = CONVERT_PIECE_BYTES as u64;
    let mut pieces: Vec<Vec<Part>> = Vec::new();
    let mut room = 0;
    for (which, Numbers { span, kind, .. }) in all.iter().enumerate() {
        let mut done = 0;
        while done < span.len {
            let len = most.min(span.len - done);
            let part = Part {
                which,
                first: done / kind.bytes() as u64,
                span: FileSpan { offset: span.offset + done, len, ..*span },
            };
            done += len;
            match pieces.last_mut().filter(|piece| len <= room && piece.len() < FINITE_SPANS_MAX) {
                Some(piece) => piece.push(part),
                None => {
                    room = most;
                    pieces.push(vec![part]);
                }
            }
            room -= len;
        }
    }
    pieces
}

impl Kind {
    /// Bytes of one number.
    fn bytes(self) -> usize {
        match self {
            Kind::F32 | Kind::Scale(_) => 4,
            Kind::Bf16 | Kind::F16 => 2,
            Kind::Fp8 => 1,
        }
    }

    /// Whether all numbers in `bytes` are finite. Without a way out early the loops are done many at a time.
    fn all_finite(self, bytes: &[u8]) -> bool {
        let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let half = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes);
        match self {
            Kind::F32 => bytes.as_chunks().0.iter().fold(true, |all, b| all & (word(b) & 0x7f80_0000 != 0x7f80_0000)),
            Kind::Scale(most) => bytes.as_chunks().0.iter().fold(true, |all, b| all & scales(word(b), most)),
            Kind::Bf16 => bytes.as_chunks().0.iter().fold(true, |all, b| all & (half(b) & 0x7f80 != 0x7f80)),
            Kind::F16 => bytes.as_chunks().0.iter().fold(true, |all, b| all & (half(b) & 0x7c00 != 0x7c00)),
            Kind::Fp8 => bytes.iter().fold(true, |all, b| all & (b & 0x7f != 0x7f)),
        }
    }

    /// Place and value of each number that is not finite.
    fn not_finite(self, bytes: &[u8]) -> impl Iterator<Item = (usize, f32)> + Clone {
        let each = bytes.chunks_exact(self.bytes()).enumerate();
        each.filter(move |(_, number)| !self.all_finite(number)).map(move |(at, number)| (at, self.value(number)))
    }

    fn value(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Kind::F32 | Kind::Scale(_), &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Kind::Bf16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]),
            // Of numbers that are not finite only these are infinite.
            (Kind::F16, &[0, high]) if high & 3 == 0 => f32::INFINITY.copysign(-f32::from(high >> 7) + 0.5),
            _ => f32::NAN,
        }
    }
}

/// Whether codes up to `most` are finite with this scale.
fn scales(bits: u32, most: f32) -> bool {
    (f32::from_bits(bits) * most).is_finite()
}

//! Whether the numbers that a model's weights are made of are finite and smaller than [`WEIGHT_BELOW`]: one that is not may
//! make an answer that it takes part in infinite, or no number at all.
//!
//! Of a weight that is quantized to integers only the scales can be otherwise, so that no more of it is read.

use super::ahead::ReadAhead;
use super::error::{CheckpointError, Result};
use super::required::{self, Required, Shape};
use super::{Checkpoint, ExpertSource, MatrixSource};
use crate::kernels::{Format, MatrixSpec};
use crate::limits::{CONVERT_PIECE_BYTES, FINITE_SPANS_MAX, WEIGHT_BELOW};
use millstream_io::{DeviceKind, FileSet, FileSpan, IoError, IoMode};
use std::fmt;
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
    /// A scale in f32 of codes whose largest is this.
    Scale(f32),
}

/// A number that no weight is.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{}: tensor {tensor}: {} is {}{}{}", shard.display(), self.place(), Shown(*value), self.expected(), self.others())]
pub struct BadNumber {
    /// The shard.
    pub shard: PathBuf,
    /// The weight it belongs to.
    pub tensor: String,
    /// Row and column, of a weight that has them.
    pub row: Option<u64>,
    /// Column, or the number of a scale.
    pub index: u64,
    /// What it is.
    pub value: f32,
    /// What its magnitude was to be below.
    pub below: f32,
    /// How many others of the tensor are not finite or too large.
    pub others: u64,
}

/// A value as a message shows it: one of many digits with its power of ten.
pub(crate) struct Shown(pub f32);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Shown(value) = self;
        if value.is_finite() && value.abs() >= 1e6 { write!(f, "{value:e}") } else { write!(f, "{value}") }
    }
}

/// Whether a weight of this value is one.
pub(crate) fn is_weight(value: f32) -> bool {
    value.abs() < WEIGHT_BELOW
}

impl BadNumber {
    fn place(&self) -> String {
        match self.row {
            Some(row) => format!("row {row}, column {}", self.index),
            None => format!("scale {}", self.index),
        }
    }

    fn expected(&self) -> String {
        match self.row {
            _ if !self.value.is_finite() => String::new(),
            Some(_) => format!(", and weights are below {}", self.below),
            None => format!(", and scales of its codes are below {}", self.below),
        }
    }

    fn others(&self) -> String {
        match self.others {
            0 => String::new(),
            others => format!("; {others} more of it are not finite or too large"),
        }
    }
}

/// How far a look is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Looked {
    /// Bytes looked at.
    pub bytes: u64,
    /// Bytes to look at.
    pub of: u64,
    /// Tensors with a number that no weight is.
    pub bad: usize,
}

/// What a look found, whether or not it came to its end.
#[derive(Debug, Default)]
pub struct Findings {
    /// The first bad number of each tensor that has one.
    pub bad: Vec<BadNumber>,
    /// Parts of files that could not be read.
    pub unread: Vec<Unread>,
}

/// A part of a file, or of a few, that could not be read.
#[derive(Debug, thiserror::Error)]
#[error("{}: {error}", tensors.join(", "))]
pub struct Unread {
    /// The weights that have numbers in it.
    pub tensors: Vec<String>,
    /// Why.
    pub error: IoError,
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

/// A bad number in rows of a matrix, given as they are stored: weights, scales, the factor of the matrix. Rows are counted
/// from the first of these, and so are scales.
pub(crate) fn in_rows(spec: MatrixSpec, stored: [&[u8]; 3]) -> Option<BadNumber> {
    kinds(spec.format).into_iter().zip(stored).enumerate().find_map(|(at, (kind, bytes))| {
        let kind = kind.filter(|kind| !kind.all_good(bytes))?;
        let (index, value) = kind.bad(bytes).next()?;
        let (others, below) = (kind.bad(bytes).count() as u64 - 1, kind.below());
        let (row, index) = if at == 0 { (Some(index / spec.cols), index % spec.cols) } else { (None, index) };
        let (shard, tensor) = Default::default();
        Some(BadNumber { shard, tensor, row: row.map(|row| row as u64), index: index as u64, value, below, others })
    })
}

/// The numbers that weights of a format are made of: the weights themselves, scales, the factor of a matrix. The largest code
/// is what an encoder divides the largest weight by, so that what is made of good weights is good.
fn kinds(format: Format) -> [Option<Kind>; 3] {
    match format {
        Format::F32 => [Some(Kind::F32), None, None],
        Format::Bf16 => [Some(Kind::Bf16), None, None],
        Format::F16 => [Some(Kind::F16), None, None],
        Format::Fp8Block => [Some(Kind::Fp8), Some(Kind::Scale(448.0)), None],
        Format::Int8Row => [None, Some(Kind::Scale(127.0)), None],
        Format::Int4Row | Format::Int4Group { .. } => [None, Some(Kind::Scale(7.0)), None],
        Format::Int3Group => [None, Some(Kind::Scale(4.0)), None],
        Format::Int2Row => [None, Some(Kind::Scale(1.0)), None],
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

/// Reads `all`, in the order of the files, and lists the first bad number of each tensor, and what cannot be read, behind
/// which it goes on. `go_on` is told how far it is, and for now and then while nothing comes; its error ends the look. What
/// was found until then is there whatever the end.
pub fn check(
    checkpoint: &Checkpoint,
    all: &[Numbers],
    how: (IoMode, DeviceKind),
    go_on: &mut dyn FnMut(Looked) -> Result<()>,
) -> (Findings, Result<()>) {
    let mut look = Look { checkpoint, all, found: Findings::default(), last: None, looked: Looked::default() };
    let end = look.at_all(how, go_on);
    (look.found, end)
}

/// A look at numbers.
struct Look<'a> {
    checkpoint: &'a Checkpoint,
    all: &'a [Numbers],
    found: Findings,
    /// Which of `all` the last bad number was of.
    last: Option<usize>,
    looked: Looked,
}

impl Look<'_> {
    fn at_all(
        &mut self,
        (mode, kind): (IoMode, DeviceKind),
        go_on: &mut dyn FnMut(Looked) -> Result<()>,
    ) -> Result<()> {
        let parts = parts(self.all);
        let spans = |piece: &Vec<Part>| piece.iter().map(|part| part.span).collect();
        let pieces: Vec<Vec<FileSpan>> = parts.iter().map(spans).collect();
        let files = FileSet::open(self.checkpoint.tensors.paths(), mode)?;
        let mut ahead = ReadAhead::begin_through(files, &pieces, kind)?;
        self.looked.of = self.all.iter().map(|numbers| numbers.span.len).sum();
        for piece in parts {
            match ahead.next(&mut || go_on(self.looked)) {
                Ok(bytes) => piece.iter().enumerate().for_each(|(at, part)| self.at(part, bytes.bytes(at))),
                Err(CheckpointError::Device(error)) if is_of_a_place(&error) => {
                    let mut tensors: Vec<String> =
                        piece.iter().map(|part| self.all[part.which].tensor.clone()).collect();
                    tensors.dedup();
                    self.found.unread.push(Unread { tensors, error });
                }
                Err(error) => return Err(error),
            }
            go_on(self.looked)?;
        }
        ahead.check_unchanged()
    }

    fn at(&mut self, part: &Part, bytes: &[u8]) {
        let numbers = &self.all[part.which];
        self.looked.bytes += bytes.len() as u64;
        if numbers.kind.all_good(bytes) {
            return;
        }
        let bad = numbers.kind.bad(bytes);
        let (index, value) = bad.clone().next().unwrap_or_default();
        let count = bad.count() as u64;
        if let Some(first) = self.found.bad.last_mut().filter(|_| self.last == Some(part.which)) {
            first.others += count;
            return;
        }
        let (index, below) = (part.first + index as u64, numbers.kind.below());
        let (row, index) = numbers.cols.map_or((None, index), |cols| (Some(index / cols), index % cols));
        let shard = self.checkpoint.tensors.path(numbers.span.file).to_owned();
        let tensor = numbers.tensor.clone();
        self.found.bad.push(BadNumber { shard, tensor, row, index, value, below, others: count - 1 });
        self.last = Some(part.which);
        self.looked.bad += 1;
    }
}

/// Whether only this part of a file cannot be read.
fn is_of_a_place(error: &IoError) -> bool {
    matches!(
        error,
        IoError::Read { .. } | IoError::EndOfFile { .. } | IoError::Stuck { .. } | IoError::OutOfFile { .. }
    )
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

    /// What the magnitude of a number of this kind is below.
    fn below(self) -> f32 {
        match self {
            Kind::Scale(code) => WEIGHT_BELOW / code,
            _ => WEIGHT_BELOW,
        }
    }

    /// Whether no number in `bytes` is bad: as bits and without their sign, infinities and NaN are the largest floats.
    /// Without a way out early the loops are done many at a time.
    fn all_good(self, bytes: &[u8]) -> bool {
        const BF16_BELOW: u16 = (WEIGHT_BELOW.to_bits() >> 16) as u16;
        const F16_BELOW: u16 = half::f16::from_f32_const(WEIGHT_BELOW).to_bits();
        let below = self.below().to_bits();
        let word = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes) & 0x7fff_ffff;
        let half = |bytes: &[u8; 2]| u16::from_le_bytes(*bytes) & 0x7fff;
        match self {
            Kind::F32 | Kind::Scale(_) => bytes.as_chunks().0.iter().fold(true, |all, b| all & (word(b) < below)),
            Kind::Bf16 => bytes.as_chunks().0.iter().fold(true, |all, b| all & (half(b) < BF16_BELOW)),
            Kind::F16 => bytes.as_chunks().0.iter().fold(true, |all, b| all & (half(b) < F16_BELOW)),
            // With scales that are good, a code that is a number makes a good weight.
            Kind::Fp8 => bytes.iter().fold(true, |all, b| all & (b & 0x7f != 0x7f)),
        }
    }

    /// Place and value of each bad number.
    fn bad(self, bytes: &[u8]) -> impl Iterator<Item = (usize, f32)> + Clone {
        let each = bytes.chunks_exact(self.bytes()).enumerate();
        each.filter(move |(_, number)| !self.all_good(number)).map(move |(at, number)| (at, self.value(number)))
    }

    fn value(self, bytes: &[u8]) -> f32 {
        match (self, bytes) {
            (Kind::F32 | Kind::Scale(_), &[a, b, c, d]) => f32::from_le_bytes([a, b, c, d]),
            (Kind::Bf16, &[a, b]) => f32::from_le_bytes([0, 0, a, b]),
            (Kind::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f32(),
            // Of FP8 only what is no number is bad.
            _ => f32::NAN,
        }
    }
}

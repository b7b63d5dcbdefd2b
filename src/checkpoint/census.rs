//! What a model's bytes are for: by part and by format, from headers alone.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use super::container::{FP8_SCALES_SUFFIX, SCALES_SUFFIX};
use super::error::{Result, io_error};
use super::required::{self, Part};
use super::tensors::{Dtype, TensorInfo};
use super::{Checkpoint, MatrixSource};
use crate::kernels::{Format, Kernels, MatrixSpec, WeightRef};
use millstream_io::FileSpan;

/// Tensors of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// How many, a weight with its scales counted once.
    pub tensors: u64,
    /// Values they hold.
    pub weights: u64,
    /// Bytes of weights and scales.
    pub bytes: u64,
}

impl Tally {
    /// Both together.
    pub fn and(self, other: Tally) -> Tally {
        Tally {
            tensors: self.tensors + other.tensors,
            weights: self.weights + other.weights,
            bytes: self.bytes + other.bytes,
        }
    }

    fn add(&mut self, source: &MatrixSource) {
        let parts = [Some(source.data), source.scales, source.factor];
        let bytes = parts.iter().flatten().map(|span| span.len).sum();
        *self = self.and(Tally { tensors: 1, weights: (source.spec.rows * source.spec.cols) as u64, bytes });
    }
}

/// A model's bytes. Kinds, what is not used and what is no tensor add up to the shards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// What the model uses, by part and format.
    pub kinds: BTreeMap<(Part, Format), Tally>,
    /// Bytes of tensors that nothing reads.
    pub unused_bytes: u64,
    /// Headers, and padding between tensors.
    pub other_bytes: u64,
    /// Bytes of all shards.
    pub bytes: u64,
    /// Of the values that are used, those that take part in one token.
    pub weights_per_token: u64,
}

impl Census {
    /// Counts the bytes of `checkpoint`.
    pub fn take(checkpoint: &Checkpoint) -> Result<Census> {
        let Checkpoint { arch, tensors, experts, .. } = checkpoint;
        let mtp_layer = arch.layers.len();
        let mut kinds: BTreeMap<(Part, Format), Tally> = BTreeMap::new();
        let optional = required::mtp_optional(arch).into_iter().filter(|tensor| tensors.get(&tensor.name).is_some());
        for tensor in required::list(arch).into_iter().chain(optional) {
            let source = tensor.source(tensors)?;
            kinds.entry((tensor.part(arch), source.spec.format)).or_default().add(&source);
        }
        for (layer, expert) in
            experts.layers.iter().enumerate().flat_map(|(i, e)| e.iter().flatten().map(move |e| (i, e)))
        {
            let part = if layer == mtp_layer { Part::Mtp } else { Part::Experts };
            for matrix in expert.matrices() {
                kinds.entry((part, matrix.spec.format)).or_default().add(matrix);
            }
        }
        let bytes = tensors.file_bytes();
        let used: u64 = kinds.values().map(|tally| tally.bytes).sum();
        let all: u64 = tensors.iter().map(|(_, tensor)| tensor.bytes).sum();
        let mut census =
            Census { kinds, unused_bytes: all - used, other_bytes: bytes - all, bytes, weights_per_token: 0 };
        let resting = arch.moe.experts - arch.moe.top_k;
        let resting = census.part(Part::Experts).weights / arch.moe.experts as u64 * resting as u64;
        census.weights_per_token = census.used().weights - census.part(Part::Mtp).weights - resting;
        Ok(census)
    }

    /// All of one part.
    pub fn part(&self, part: Part) -> Tally {
        self.sum(|(of, _)| of == part)
    }

    /// All of one format.
    pub fn format(&self, format: Format) -> Tally {
        self.sum(|(_, of)| of == format)
    }

    /// All that the model uses.
    pub fn used(&self) -> Tally {
        self.sum(|_| true)
    }

    /// The formats that there are.
    pub fn formats(&self) -> Vec<Format> {
        let mut formats: Vec<Format> = self.kinds.keys().map(|&(_, format)| format).collect();
        formats.sort_unstable();
        formats.dedup();
        formats
    }

    /// How wide weights are, of routed experts and of everything that each token passes through, the larger part of the bytes
    /// first: `experts int4 / dense int8`. What holds less than a hundredth of its bytes, such as norms, goes without saying.
    pub fn widths(&self) -> String {
        let of = |name: &str, wanted: &dyn Fn(Part) -> bool| {
            let all = self.sum(|(part, _)| wanted(part)).bytes;
            let bytes = |format| self.sum(|(part, of)| wanted(part) && of == format).bytes;
            let mut formats = self.formats();
            formats.retain(|&format| bytes(format) > 0 && 100 * bytes(format) >= all);
            formats.sort_by_key(|&format| std::cmp::Reverse(bytes(format)));
            let formats: Vec<_> = formats.iter().map(Format::to_string).collect();
            format!("{name} {}", formats.join("+"))
        };
        let dense = |part| !matches!(part, Part::Experts | Part::Mtp);
        format!("{} / {}", of("experts", &|part| part == Part::Experts), of("dense", &dense))
    }

    fn sum(&self, wanted: impl Fn((Part, Format)) -> bool) -> Tally {
        let wanted = self.kinds.iter().filter(|&(&kind, _)| wanted(kind));
        wanted.fold(Tally::default(), |sum, (_, &tally)| sum.and(tally))
    }
}

/// The beginning of one tensor, as it is stored and as it is meant.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// Its name.
    pub name: String,
    /// The shard and the place in it.
    pub tensor: TensorInfo,
    /// What it is for; `None` for what no part of the model uses.
    pub part: Option<Part>,
    /// The weight whose scales it holds.
    pub scales_of: Option<String>,
    /// Format and shape, where values can be told.
    pub spec: Option<MatrixSpec>,
    /// Bytes of all its scales.
    pub scale_bytes: u64,
    /// First bytes as they are stored.
    pub packed: Vec<u8>,
    /// First scales.
    pub scales: Vec<f32>,
    /// First values of the first row.
    pub values: Vec<f32>,
}

impl Sample {
    /// Reads the beginning of the tensor `name`: at most `most` bytes, scales and values. `None` where no shard has it.
    pub fn read(checkpoint: &Checkpoint, name: &str, most: usize) -> Result<Option<Sample>> {
        let Some(tensor) = checkpoint.tensors.get(name).cloned() else { return Ok(None) };
        let required = required::find(&checkpoint.arch, name);
        let owner = [SCALES_SUFFIX, FP8_SCALES_SUFFIX].iter().find_map(|suffix| name.strip_suffix(suffix));
        let scaled = owner.and_then(|owner| required::find(&checkpoint.arch, owner));
        let source = match &required {
            Some(required) => Some(required.source(&checkpoint.tensors)?),
            None => plain(&tensor),
        };
        let first = |span: FileSpan, bytes: usize| read_first(checkpoint, span, bytes);
        let (mut scales, mut values) = (vec![], vec![]);
        if let Some(source) = source {
            let MatrixSpec { format, cols, .. } = source.spec;
            let row = MatrixSpec { format, rows: 1, cols };
            let data = first(source.data, row.data_bytes())?;
            let stored = source.scales.map_or(Ok(vec![]), |span| first(span, row.scale_bytes()))?;
            values = vec![0.0; cols];
            let mut weights = WeightRef::new(row, &data, &stored);
            if let Some(span) = source.factor {
                let factor = first(span, 4)?;
                weights = weights.with_factor(f32::from_le_bytes(factor.as_chunks().0[0]));
            }
            Kernels::best().decode_row(&weights, 0, &mut values);
            scales = (0..format.scale_count(1, cols).min(most)).map(|index| weights.scale(index)).collect();
            values.truncate(most);
        }
        Ok(Some(Sample {
            name: name.to_owned(),
            part: required.as_ref().or(scaled.as_ref()).map(|required| required.part(&checkpoint.arch)),
            scales_of: scaled.map(|weight| weight.name),
            spec: source.map(|source| source.spec),
            scale_bytes: source.and_then(|source| source.scales).map_or(0, |span| span.len),
            packed: first(tensor.span(), most)?,
            scales,
            values,
            tensor,
        }))
    }
}

/// A tensor that the model does not use, where its type says what its values are: one row.
fn plain(tensor: &TensorInfo) -> Option<MatrixSource> {
    let format = match tensor.dtype {
        Dtype::F32 => Format::F32,
        Dtype::Bf16 => Format::Bf16,
        Dtype::F16 => Format::F16,
        _ => return None,
    };
    let cols = (tensor.bytes / tensor.dtype.bytes()).min(1 << 10) as usize;
    Some(MatrixSource { spec: MatrixSpec { format, rows: 1, cols }, data: tensor.span(), scales: None, factor: None })
}

fn read_first(checkpoint: &Checkpoint, span: FileSpan, bytes: usize) -> Result<Vec<u8>> {
    let path = checkpoint.tensors.path(span.file);
    let mut first = vec![0; bytes.min(span.len as usize)];
    let shard = std::fs::File::open(path).map_err(io_error("open", path))?;
    shard.read_exact_at(&mut first, span.offset).map_err(io_error("read", path))?;
    Ok(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn widths_are_those_of_most_bytes_and_norms_go_without_saying() {
        let kinds = [
            (Part::Experts, Format::Int4Row, 900),
            (Part::Experts, Format::Int3Group, 100),
            (Part::Attention, Format::Bf16, 40),
            (Part::Head, Format::Int8Row, 350),
            (Part::Norms, Format::F32, 3),
            (Part::Mtp, Format::F16, 5000),
        ];
        let tally = |bytes| Tally { tensors: 1, weights: 1, bytes };
        let kinds = kinds.map(|(part, format, bytes)| ((part, format), tally(bytes))).into();
        let census = Census { kinds, unused_bytes: 0, other_bytes: 0, bytes: 0, weights_per_token: 0 };
        assert_eq!(census.widths(), "experts int4+int3-g64 / dense int8+bf16");
    }
}

//! Where a shard puts its tensors, and the header that says so. Pure arithmetic on names and sizes.
//!
//! A run is what is read at once: an expert's weights and then its scales, or one dense matrix with its scales. Expert
//! runs begin on sectors, the first of a shard on a huge page, so that a direct read of a run moves nothing else.

use crate::checkpoint::container::{FP8_SCALES_SUFFIX, SCALES_SUFFIX, stamp_name};
use crate::checkpoint::header::STAMP_KEY;
use crate::checkpoint::required::Shape;
use crate::checkpoint::tensors::{Dtype, PAD_PREFIX};
use crate::kernels::{Format, MatrixSpec};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Alignment of an expert's run in the file.
pub const RUN_ALIGN: u64 = 4096;
/// Alignment of the first expert of a shard.
pub const EXPERTS_ALIGN: u64 = 2 << 20;
/// Metadata key of the layout's version.
pub(crate) const VERSION_KEY: &str = "millstream.version";
/// Metadata key of what the weights come from; of a conversion, a hash over the source's configuration, headers and some
/// of its weights.
pub(crate) const SOURCE_KEY: &str = "millstream.source";
/// Metadata key of the parameters they were written with.
pub(crate) const PARAMETERS_KEY: &str = "millstream.parameters";
/// Metadata key of the hashes of all runs: a JSON map from a run's name to 16 hexadecimal digits of XXH3-64 over its
/// bytes in the file.
pub const HASHES_KEY: &str = "millstream.xxh3";
/// What is there is held against the header that would be written now, byte by byte: a program that writes another one
/// has to read this one too, or it cannot go on with a source of which shards are gone.
const VERSION: &str = "1";
/// What the names of shards begin with.
pub(crate) const STEM: &str = "out";
/// What those of the MTP layer's begin with.
pub(crate) const MTP_STEM: &str = "out-mtp";

/// One weight to write.
#[derive(Clone, Debug)]
pub(crate) struct Item {
    pub name: String,
    pub shape: Shape,
    /// How it is stored.
    pub target: Format,
}

impl Item {
    /// Shape and format; a vector is a matrix of one row.
    pub fn spec(&self) -> MatrixSpec {
        let (rows, cols) = match self.shape {
            Shape::Vector(len) => (1, len),
            Shape::Matrix { rows, cols } => (rows, cols),
        };
        MatrixSpec { format: self.target, rows, cols }
    }

    pub fn data_bytes(&self) -> u64 {
        self.spec().data_bytes() as u64
    }

    pub fn scale_count(&self) -> u64 {
        self.spec().scale_bytes() as u64 / 4
    }

    fn dimensions(&self) -> Vec<u64> {
        match self.shape {
            Shape::Vector(len) => vec![len as u64],
            Shape::Matrix { rows, cols } => vec![rows as u64, cols as u64],
        }
    }

    fn weight_type(&self) -> (Dtype, Vec<u64>) {
        match self.target {
            Format::F32 => (Dtype::F32, self.dimensions()),
            Format::Bf16 => (Dtype::Bf16, self.dimensions()),
            Format::F16 => (Dtype::F16, self.dimensions()),
            Format::Fp8Block => (Dtype::F8E4M3, self.dimensions()),
            _ => (Dtype::U8, vec![self.data_bytes()]),
        }
    }

    fn scales_type(&self) -> (String, Vec<u64>) {
        if self.target == Format::Fp8Block {
            let MatrixSpec { rows, cols, .. } = self.spec();
            let blocks = vec![rows.div_ceil(128) as u64, cols.div_ceil(128) as u64];
            return (format!("{}{FP8_SCALES_SUFFIX}", self.name), blocks);
        }
        (format!("{}{SCALES_SUFFIX}", self.name), vec![self.scale_count()])
    }
}

/// Weights that lie together: first the weights of all items, then their scales, in the same order.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub name: String,
    pub items: Vec<Item>,
}

/// A shard to be written.
#[derive(Clone, Debug)]
pub(crate) struct ShardPlan {
    pub file_name: String,
    /// Whether its runs are experts, which are aligned for direct reads.
    pub experts: bool,
    /// Whether only the header is written and the rest is a hole, which reads as zeros.
    pub hollow: bool,
    pub runs: Vec<Run>,
}

/// A part of a run in the order of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// So many zero bytes.
    Pad(u64),
    /// The weights of item number so-and-so of the run.
    Weights(usize),
    /// Its scales.
    Scales(usize),
}

/// A run with its place in the file.
#[derive(Clone, Debug)]
pub(crate) struct PlacedRun {
    /// Absolute offset of its first byte.
    pub offset: u64,
    /// Its length, without the padding before it.
    pub bytes: u64,
    /// Its bytes in order, without the padding before it.
    pub parts: Vec<Part>,
}

impl PlacedRun {
    /// Bytes of padding between its weights and scales.
    pub fn padding(&self) -> u64 {
        self.parts.iter().map(|part| if let Part::Pad(bytes) = part { *bytes } else { 0 }).sum()
    }
}

/// A shard with every byte accounted for.
#[derive(Clone, Debug)]
pub(crate) struct ShardLayout {
    /// First byte of the data, a multiple of 4,096.
    pub data_start: u64,
    /// Length of the file, a multiple of 4,096 for experts.
    pub file_bytes: u64,
    pub runs: Vec<PlacedRun>,
    /// Whether all but the first `data_start` bytes are a hole.
    pub hollow: bool,
    entries: Map<String, Value>,
    metadata: BTreeMap<&'static str, String>,
    run_names: Vec<String>,
}

impl ShardLayout {
    /// Places the runs of `plan`. `source` and `parameters` go into the metadata.
    pub fn new(plan: &ShardPlan, source: &str, parameters: &str) -> ShardLayout {
        let mut metadata = BTreeMap::new();
        metadata.insert(VERSION_KEY, VERSION.to_owned());
        metadata.insert(SOURCE_KEY, source.to_owned());
        metadata.insert(PARAMETERS_KEY, parameters.to_owned());
        let items = || plan.runs.iter().flat_map(|run| &run.items);
        let stamps: BTreeMap<&str, &str> = items()
            .filter(|item| item.weight_type().0 == Dtype::U8)
            .map(|item| (item.name.as_str(), stamp_name(item.target)))
            .collect();
        metadata.insert(STAMP_KEY, json!(stamps).to_string());
        let run_names: Vec<String> = plan.runs.iter().map(|run| run.name.clone()).collect();

        // The header's length depends on the offsets in it, and they on its length: grow the room until it fits.
        let mut data_start = RUN_ALIGN;
        loop {
            let mut layout = Placement::new(plan, data_start).finish();
            layout.metadata = metadata.clone();
            layout.run_names = run_names.clone();
            let needed = 8 + layout.json(&vec![0; run_names.len()]).len() as u64;
            if needed <= data_start {
                return layout;
            }
            data_start = needed.next_multiple_of(RUN_ALIGN);
        }
    }

    /// The file's first `data_start` bytes, with the hashes of the runs in order. Their values do not change its length.
    pub fn header(&self, hashes: &[u64]) -> Vec<u8> {
        let json = self.json(hashes);
        let mut bytes = (self.data_start - 8).to_le_bytes().to_vec();
        bytes.extend_from_slice(json.as_bytes());
        bytes.resize(self.data_start as usize, b' ');
        bytes
    }

    /// Bytes of the file that take space.
    pub fn stored_bytes(&self) -> u64 {
        if self.hollow { self.data_start } else { self.file_bytes }
    }

    /// Bytes that are written and read back before the shard has its name.
    pub fn work_bytes(&self) -> u64 {
        self.stored_bytes() + self.checked_bytes()
    }

    /// Bytes that are read back: those with a checksum. A hole has nothing to be read.
    pub fn checked_bytes(&self) -> u64 {
        if self.hollow { 0 } else { self.runs.iter().map(|run| run.bytes).sum() }
    }

    /// Names of the runs, in order.
    pub fn run_names(&self) -> &[String] {
        &self.run_names
    }

    fn json(&self, hashes: &[u64]) -> String {
        let hex: Map<String, Value> = self
            .run_names
            .iter()
            .zip(hashes)
            .map(|(name, hash)| (name.clone(), json!(format!("{hash:016x}"))))
            .collect();
        let mut metadata = self.metadata.clone();
        metadata.insert(HASHES_KEY, Value::Object(hex).to_string());
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!(metadata));
        header.extend(self.entries.clone());
        Value::Object(header).to_string()
    }
}

struct Placement<'a> {
    plan: &'a ShardPlan,
    data_start: u64,
    end: u64,
    pads: usize,
    entries: Map<String, Value>,
}

impl Placement<'_> {
    fn new(plan: &ShardPlan, data_start: u64) -> Placement<'_> {
        Placement { plan, data_start, end: data_start, pads: 0, entries: Map::new() }
    }

    fn finish(mut self) -> ShardLayout {
        let mut runs = Vec::with_capacity(self.plan.runs.len());
        for (number, run) in self.plan.runs.iter().enumerate() {
            let align = match (self.plan.experts, number) {
                (true, 0) => EXPERTS_ALIGN,
                (true, _) => RUN_ALIGN,
                (false, _) => 64,
            };
            self.pad(align);
            let offset = self.end;
            let parts = self.place(run);
            runs.push(PlacedRun { offset, bytes: self.end - offset, parts });
        }
        if self.plan.experts {
            // A direct read of the last run ends on a sector too.
            self.pad(RUN_ALIGN);
        }
        ShardLayout {
            data_start: self.data_start,
            file_bytes: self.end,
            runs,
            hollow: self.plan.hollow,
            entries: self.entries,
            metadata: BTreeMap::new(),
            run_names: Vec::new(),
        }
    }

    fn place(&mut self, run: &Run) -> Vec<Part> {
        let mut parts = Vec::new();
        for (number, item) in run.items.iter().enumerate() {
            let (dtype, shape) = item.weight_type();
            parts.extend(self.pad(dtype.bytes()));
            self.entry(item.name.clone(), dtype, shape, item.data_bytes());
            parts.push(Part::Weights(number));
        }
        for (number, item) in run.items.iter().enumerate().filter(|(_, item)| item.scale_count() > 0) {
            let (name, shape) = item.scales_type();
            parts.extend(self.pad(4));
            self.entry(name, Dtype::F32, shape, 4 * item.scale_count());
            parts.push(Part::Scales(number));
        }
        parts
    }

    /// Fills up to a multiple of `align` with a tensor that nothing reads.
    fn pad(&mut self, align: u64) -> Option<Part> {
        let bytes = self.end.next_multiple_of(align) - self.end;
        if bytes == 0 {
            return None;
        }
        let stem = self.plan.file_name.trim_end_matches(".safetensors");
        self.entry(format!("{PAD_PREFIX}{stem}.{}", self.pads), Dtype::U8, vec![bytes], bytes);
        self.pads += 1;
        Some(Part::Pad(bytes))
    }

    fn entry(&mut self, name: String, dtype: Dtype, shape: Vec<u64>, bytes: u64) {
        let begin = self.end - self.data_start;
        self.end += bytes;
        let entry = json!({"dtype": dtype.name(), "shape": shape, "data_offsets": [begin, begin + bytes]});
        self.entries.insert(name, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    fn item(name: &str, rows: usize, cols: usize, target: Format) -> Item {
        Item { name: name.to_owned(), shape: Shape::Matrix { rows, cols }, target }
    }

    fn experts(count: usize, hidden: usize, width: usize, target: Format) -> ShardPlan {
        let run = |number: usize| Run {
            name: format!("expert.{number}"),
            items: vec![
                item(&format!("{number}.gate"), width, hidden, target),
                item(&format!("{number}.up"), width, hidden, target),
                item(&format!("{number}.down"), hidden, width, target),
            ],
        };
        let runs = (0..count).map(run).collect();
        ShardPlan { file_name: "out.safetensors".to_owned(), experts: true, hollow: false, runs }
    }

    #[test]
    fn glm_5_2_experts_need_no_padding_between_them() {
        let layout = ShardLayout::new(&experts(256, 6144, 2048, Format::Int4Row), "s", "p");
        let offsets: Vec<u64> = layout.runs.iter().map(|run| run.offset).collect();
        let expected: Vec<u64> = (0..256).map(|expert| (2 << 20) + expert * 4618 * 4096).collect();
        assert_eq!(offsets, expected);
        assert_eq!(layout.file_bytes, (2 << 20) + 256 * 4618 * 4096);
    }

    #[test]
    fn odd_shapes_are_padded_to_sectors_and_the_header_fits() {
        let layout = ShardLayout::new(&experts(3, 7, 5, Format::Int4Row), "s", "p");
        assert!(layout.runs.iter().all(|run| run.offset % 4096 == 0));
        // 5 x 4 bytes twice and 7 x 3 bytes of weights are 61; scales begin at the next multiple of 4.
        let parts = &layout.runs[0].parts;
        assert_eq!(parts[..4], [Part::Weights(0), Part::Weights(1), Part::Weights(2), Part::Pad(3)]);
        assert_eq!(parts[4..], [Part::Scales(0), Part::Scales(1), Part::Scales(2)]);
        let header = layout.header(&[1, 2, 3]);
        assert_eq!(header.len() as u64, layout.data_start);
        assert_eq!(header.len(), layout.header(&[u64::MAX; 3]).len());
    }
}

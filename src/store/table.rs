//! Where each expert lies in the files and how it will lie in a slab, worked out once at open.

use millstream_io::{FileSet, FileSpan, IoError, Place, Segments, SlabLayout, layout};
use thiserror::Error;

use super::policy::Layers;
use super::scales::KeptScales;
use super::sizes::{SlabSize, group};
use super::staged::Staged;
use super::{ExpertKey, ExpertWeights};
use crate::checkpoint::{ExpertIndex, ExpertSource, MatrixSource};
use crate::kernels::{MatrixSpec, WeightRef};

/// An expert that cannot be laid out in a slab.
#[derive(Debug, Error)]
#[error("expert {} of layer {} cannot be read in one piece", key.expert, key.layer)]
pub struct TableError {
    /// Which expert.
    pub key: ExpertKey,
    /// Why.
    #[source]
    pub source: IoError,
}

#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub(super) spec: MatrixSpec,
    pub(super) data: Place,
    pub(super) scales: Place,
}

impl Matrix {
    /// Its weights, their scales apart.
    pub(super) fn weights<'a>(&self, data: &'a [u8], scales: &'a [u8]) -> WeightRef<'a> {
        let bytes = |from: &'a [u8], p: Place| &from[p.at as usize..][..p.len as usize];
        WeightRef::new(self.spec, bytes(data, self.data), bytes(scales, self.scales))
    }
}

pub(super) struct Entry {
    segments: Segments,
    useful_bytes: u32,
    /// From the first useful byte that is read to the last, where the expert lies in one piece.
    whole: Option<Place>,
    /// Whether its scales are not in the slab but among those that are kept.
    scales_kept: bool,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
}

impl Entry {
    pub(super) fn matrices(&self) -> [Matrix; 3] {
        [self.gate, self.up, self.down]
    }

    /// The same reads for a slab that holds other matrices.
    pub(super) fn holding(self, [gate, up, down]: [Matrix; 3]) -> Entry {
        Entry { gate, up, down, ..self }
    }
}

/// All experts of a model, by key.
pub struct ExpertTable {
    entries: Vec<Entry>,
    /// Number of entries before each layer.
    first: Vec<u32>,
    widest: usize,
    /// Sizes of slabs, and which of them each layer's experts are read into.
    sizes: Vec<SlabSize>,
    size_of: Vec<Option<u16>>,
    kept: KeptScales,
    /// What is quantized on its way.
    staged: Staged,
}

impl ExpertTable {
    /// Plans the reads of every expert in `index` for which `wanted(layer)` holds. `held(layer, source)` says in which forms
    /// its matrices are held, where those are others than they are stored in: it is quantized on its way. Where
    /// `keep_scales`, scales that lie apart from their weights and are few are not part of the reads of what is not: the
    /// store is to be given them.
    pub fn build(
        index: &ExpertIndex,
        files: &FileSet,
        wanted: impl Fn(usize) -> bool,
        held: impl Fn(usize, &ExpertSource) -> Option<[MatrixSpec; 3]>,
        keep_scales: bool,
    ) -> Result<ExpertTable, TableError> {
        let mut table = ExpertTable {
            entries: vec![],
            first: vec![],
            widest: 0,
            sizes: vec![],
            size_of: vec![],
            kept: KeptScales::default(),
            staged: Staged::default(),
        };
        let mut layers = Vec::with_capacity(index.layers.len());
        for (layer, experts) in index.layers.iter().enumerate() {
            table.first.push(table.entries.len() as u32);
            let experts = experts.as_deref().filter(|_| wanted(layer)).unwrap_or_default();
            table.widest = table.widest.max(experts.len());
            let mut size = SlabSize { slab_bytes: 0, experts: experts.len() };
            for (expert, source) in experts.iter().enumerate() {
                let key = ExpertKey { layer: layer as u16, expert: expert as u16 };
                let held = held(layer, source);
                let kept = Some(&mut table.kept).filter(|_| keep_scales && held.is_none());
                let planned = plan(source, files, kept).map_err(|source| TableError { key, source })?;
                let (entry, slab_bytes) = match held {
                    None => planned,
                    Some(held) => table.staged.quantized(table.entries.len(), source, planned, held, files),
                };
                size.slab_bytes = size.slab_bytes.max(slab_bytes);
                table.entries.push(entry);
            }
            layers.push(size);
        }
        (table.sizes, table.size_of) = group(&layers);
        Ok(table)
    }

    /// The sizes of slabs that hold the experts, the one that would take most memory for all of its own first. A pool for
    /// the table has slabs of these sizes in this order.
    pub fn sizes(&self) -> &[SlabSize] {
        &self.sizes
    }

    /// Which of the sizes the experts of `layer` need; the layer must have some.
    pub(super) fn size_of(&self, layer: usize) -> usize {
        self.size_of[layer].map_or(0, usize::from)
    }

    /// Slabs that are read into besides, as their size and how many there are, where experts are quantized on their way. A
    /// pool for the table has them behind all others.
    pub fn staging(&self) -> Option<(usize, usize)> {
        self.staged.slabs()
    }

    /// What is quantized on its way.
    pub(super) fn staged(&self) -> &Staged {
        &self.staged
    }

    /// Whether the expert is quantized on its way.
    pub(super) fn is_quantized(&self, key: ExpertKey) -> bool {
        self.staged.get(self.index(key)).is_some()
    }

    /// Bytes of memory that the table takes.
    pub fn own_bytes(&self) -> u64 {
        (self.entries.len() * size_of::<Entry>()) as u64 + self.staged.own_bytes()
    }

    /// Scales that are kept, and their places.
    pub fn kept_scales(&self) -> &KeptScales {
        &self.kept
    }

    /// Whether any expert is gathered from several places.
    pub fn is_scattered(&self) -> bool {
        self.entries.iter().any(|entry| entry.segments.len() > 1)
    }

    /// Experts in all.
    pub fn experts(&self) -> usize {
        self.entries.len()
    }

    /// Experts of the layer that has most.
    pub fn widest_layer(&self) -> usize {
        self.widest
    }

    /// Sum of the experts' own bytes.
    pub fn total_useful_bytes(&self) -> u64 {
        self.entries.iter().map(|e| u64::from(e.useful_bytes)).sum()
    }

    /// Experts of each layer that has any, in the order of [`ExpertTable::index`].
    pub(super) fn routed_layers(&self) -> Layers {
        let ends = self.first.iter().skip(1).copied().chain([self.entries.len() as u32]);
        let counts = self.first.iter().zip(ends).map(|(&first, end)| (end - first) as usize);
        Layers::new(counts.filter(|&count| count > 0))
    }

    pub(super) fn index(&self, key: ExpertKey) -> usize {
        self.first[key.layer as usize] as usize + key.expert as usize
    }

    pub(super) fn segments(&self, key: ExpertKey) -> Segments {
        self.entries[self.index(key)].segments
    }

    pub(super) fn useful_bytes(&self, key: ExpertKey) -> u64 {
        u64::from(self.entries[self.index(key)].useful_bytes)
    }

    /// Bytes that a read of the expert takes from the files, alignment included.
    pub(super) fn read_bytes(&self, key: ExpertKey) -> u64 {
        self.entries[self.index(key)].segments.len_bytes()
    }

    /// Where the expert lies, from its first useful byte to its last, in the file and in the slab that it is read into; `None` where it is
    /// gathered from several pieces.
    pub(super) fn whole(&self, key: ExpertKey) -> Option<(FileSpan, Place)> {
        let e = &self.entries[self.index(key)];
        let (place, segment) = (e.whole?, e.segments.first()?);
        let offset = segment.offset + u64::from(place.at - segment.at);
        Some((FileSpan { file: segment.file, offset, len: place.len.into() }, place))
    }

    /// Every expert, in the order of [`ExpertTable::index`].
    pub(super) fn keys(&self) -> impl Iterator<Item = ExpertKey> {
        let ends = self.first.iter().skip(1).copied().chain([self.entries.len() as u32]);
        self.first.iter().zip(ends).enumerate().flat_map(|(layer, (&first, end))| {
            (0..end - first).map(move |expert| ExpertKey { layer: layer as u16, expert: expert as u16 })
        })
    }

    /// Sort key that puts reads in the order of files and offsets.
    pub(super) fn file_order(&self, key: ExpertKey) -> (u32, u64) {
        self.entries[self.index(key)].segments.iter().next().map_or((0, 0), |s| (s.file.0, s.offset))
    }

    /// The matrices of an expert that is in `slab`; `kept` are the scales that are kept.
    pub(super) fn weights<'a>(&self, key: ExpertKey, slab: &'a [u8], kept: &'a [u8]) -> ExpertWeights<'a> {
        let e = &self.entries[self.index(key)];
        let scales = if e.scales_kept { kept } else { slab };
        let matrix = |m: &Matrix| m.weights(slab, scales);
        ExpertWeights { gate: matrix(&e.gate), up: matrix(&e.up), down: matrix(&e.down) }
    }

    /// The matrices of an expert in its slab.
    pub(super) fn matrices(&self, key: ExpertKey) -> [Matrix; 3] {
        self.entries[self.index(key)].matrices()
    }
}

/// Plans one expert, without the scales where they are to be kept and lie apart; also returns the slab bytes it needs.
fn plan(source: &ExpertSource, files: &FileSet, kept: Option<&mut KeptScales>) -> Result<(Entry, usize), IoError> {
    let matrices = source.matrices();
    let weights: Vec<FileSpan> = matrices.iter().map(|m| m.data).collect();
    let scales: Vec<FileSpan> = matrices.iter().filter_map(|m| m.scales).collect();
    let plan = layout(&[&weights[..], &scales].concat(), files)?;
    if let Some(kept) = kept.filter(|_| KeptScales::wants(source)) {
        let alone = layout(&weights, files)?;
        if alone.segments.len() < plan.segments.len()
            && let Some(places) = kept.add(&scales)
        {
            let (entry, slab_bytes) = placed_as(&matrices, &alone, &alone.places, &places);
            return Ok((Entry { whole: None, scales_kept: true, ..entry }, slab_bytes));
        }
    }
    let (weights, scales) = plan.places.split_at(matrices.len());
    Ok(placed_as(&matrices, &plan, weights, scales))
}

/// The entry of an expert that `plan` reads, its weights and scales in these places.
fn placed_as(matrices: &[&MatrixSource; 3], plan: &SlabLayout, data: &[Place], scales: &[Place]) -> (Entry, usize) {
    let begin = plan.places.iter().map(|place| place.at).min().unwrap_or(0);
    let end = plan.places.iter().map(|place| place.at + place.len).max().unwrap_or(0);
    let whole = (plan.segments.len() == 1).then_some(Place { at: begin, len: end - begin });
    let mut scales = scales.iter().copied();
    let [gate, up, down] = std::array::from_fn(|i| placed(matrices[i], data[i], &mut scales));
    let useful_bytes = plan.useful_bytes;
    let entry = Entry { segments: plan.segments, useful_bytes, whole, scales_kept: false, gate, up, down };
    (entry, plan.slab_bytes as usize)
}

fn placed(source: &MatrixSource, data: Place, scales: &mut impl Iterator<Item = Place>) -> Matrix {
    let none = Place { at: 0, len: 0 };
    let scales = source.scales.and_then(|_| scales.next()).unwrap_or(none);
    Matrix { spec: source.spec, data, scales }
}

//! Everything a step writes: scratch buffers, all named and sized at open, and the key-value cache.

use super::attention;
use super::lookahead::Lookahead;
use crate::checkpoint::arch::{Arch, IndexerKind, MlpKind};
use crate::kernels::{Input, Kernels, Quantized, Table, WeightRef, bf16_of};
use crate::ops::Compute;
use crate::ops::room::Room;

/// Scratch of a gated MLP.
pub(crate) struct MlpScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
    quantized: Quantized,
}

impl MlpScratch {
    pub(super) fn new(k: &Kernels, rows: usize, width: usize, room: &mut Room) -> MlpScratch {
        MlpScratch {
            gate: room.floats(rows * width),
            up: room.floats(rows * width),
            quantized: quantized(k, rows, width, room),
        }
    }

    /// `out = down(silu(gate x) * up x)`.
    pub(super) fn gated(
        &mut self,
        c: &Compute,
        gate: &WeightRef,
        up: &WeightRef,
        down: &WeightRef,
        input: &Input,
        out: &mut [f32],
    ) {
        let (rows, width) = (input.rows, gate.rows());
        let (g, u) = (&mut self.gate[..rows * width], &mut self.up[..rows * width]);
        c.matmul(gate, input, g);
        c.matmul(up, input, u);
        c.kernels.silu_mul(g, u);
        let inner = c.input(u, rows, width, &mut self.quantized);
        c.matmul(down, &inner, out);
    }
}

/// Room for quantized rows: a byte a value in each of the layouts that some format reads, rounded up to whole vectors; and
/// in that of tile registers for kernels that have them.
pub(super) fn quantized(k: &Kernels, rows: usize, width: usize, room: &mut Room) -> Quantized {
    const LAYOUTS: usize = 4;
    const VECTOR: usize = 128;
    let layouts = LAYOUTS + usize::from(k.has_tiles());
    room.made(rows * layouts * width.next_multiple_of(VECTOR), || Quantized::for_kernels(k, rows, width))
}

/// Scratch of a step.
pub struct State {
    /// Residual stream, `[rows, hidden]`.
    pub(super) x: Vec<f32>,
    /// Normed input of the current block, `[rows, hidden]`; after a step with logits, the final norm's output.
    pub(super) normed: Vec<f32>,
    /// Output of the current block, `[rows, hidden]`.
    pub(super) branch: Vec<f32>,
    /// Output of the shared expert, `[rows, hidden]`.
    pub(super) shared: Vec<f32>,
    pub(super) attention: attention::Scratch,
    /// Router scores, `[rows, experts]`.
    pub(super) scores: Vec<f32>,
    pub(super) biased: Vec<f32>,
    pub(super) ids: Vec<u16>,
    pub(super) gates: Vec<f32>,
    pub(super) mlp: MlpScratch,
    pub(super) quantized: Quantized,
    pub(super) logits: Vec<f32>,
    /// Guesses of what the next layer asks for.
    pub lookahead: Lookahead,
}

impl State {
    /// Scratch for steps of up to `rows` rows, `answered` of which get logits in a step of an answer, in contexts of up to
    /// `context` positions on `threads` threads, counted in `room`; `explicit` says whether the explicit form of attention will ever be asked for.
    pub fn new(
        k: &Kernels,
        arch: &Arch,
        rows: usize,
        answered: usize,
        context: usize,
        threads: usize,
        explicit: bool,
        room: &mut Room,
    ) -> State {
        let all = arch.layers.iter().chain(&arch.mtp);
        let dense = all.filter_map(|l| match l.mlp {
            MlpKind::Dense { width } => Some(width),
            MlpKind::Sparse => None,
        });
        let width = dense.chain([arch.moe.shared_width]).max().unwrap_or(0);
        // The MTP layer joins two hidden vectors.
        let joined = if arch.mtp.is_some() { 2 * arch.hidden } else { arch.hidden };
        State {
            x: room.floats(rows * arch.hidden),
            normed: room.floats(rows * joined),
            branch: room.floats(rows * arch.hidden),
            shared: room.floats(rows * arch.hidden),
            attention: attention::Scratch::new(k, arch, rows, context, threads, explicit, room),
            scores: room.floats(rows * arch.moe.experts),
            biased: room.floats(arch.moe.experts),
            ids: room.filled(0, rows * arch.moe.top_k),
            gates: room.floats(rows * arch.moe.top_k),
            mlp: MlpScratch::new(k, rows, width, room),
            quantized: quantized(k, rows, joined, room),
            logits: room.empty(answered * arch.vocab),
            lookahead: Lookahead::new(arch, rows, room),
        }
    }

    /// Logits of the last step, `[rows that were asked for, vocab]`.
    pub fn logits(&mut self) -> &mut [f32] {
        &mut self.logits
    }

    /// Hidden states after the final norm, `[rows, hidden]`, of a step that computed the logits of all its rows.
    pub fn final_hidden(&self, rows: usize, hidden: usize) -> &[f32] {
        &self.normed[..rows * hidden]
    }

    /// Output of the last layer, before any final norm, `[rows, hidden]`.
    pub fn residual(&self, rows: usize, hidden: usize) -> &[f32] {
        &self.x[..rows * hidden]
    }
}

/// Precision of what a cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvBits {
    /// F32, as it was computed.
    #[default]
    Bits32,
    /// BF16: latents, keys, values and index keys alike are rounded once, to the nearest and of two as near the even one,
    /// when a position is written. All that reads them, the step that wrote them too, computes with the rounded numbers
    /// in f32: the bits of an answer depend on this setting and on nothing else that they did not depend on before.
    Bits16,
}

impl KvBits {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        match self {
            KvBits::Bits32 => size_of::<f32>(),
            KvBits::Bits16 => size_of::<u16>(),
        }
    }
}

/// Numbers of a cache.
enum Cells {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

impl Cells {
    fn new(bits: KvBits, count: usize) -> Cells {
        match bits {
            KvBits::Bits32 => Cells::F32(committed(count)),
            KvBits::Bits16 => Cells::Bf16(committed(count)),
        }
    }

    fn write(&mut self, start: usize, values: &[f32]) {
        match self {
            Cells::F32(cells) => cells[start..][..values.len()].copy_from_slice(values),
            Cells::Bf16(cells) => {
                let cells = &mut cells[start..][..values.len()];
                cells.iter_mut().zip(values).for_each(|(cell, value)| *cell = bf16_of(*value));
            }
        }
    }

    fn first(&self, count: usize) -> Table<'_> {
        match self {
            Cells::F32(cells) => Table::F32(&cells[..count]),
            Cells::Bf16(cells) => Table::Bf16(&cells[..count]),
        }
    }

    /// Cells from `start` on as little-endian bytes, as many as fill `out`.
    fn export(&self, start: usize, out: &mut [u8]) {
        match self {
            Cells::F32(cells) => {
                let out = out.as_chunks_mut().0;
                out.iter_mut().zip(&cells[start..]).for_each(|(out, cell)| *out = cell.to_le_bytes());
            }
            Cells::Bf16(cells) => {
                let out = out.as_chunks_mut().0;
                out.iter_mut().zip(&cells[start..]).for_each(|(out, cell)| *out = cell.to_le_bytes());
            }
        }
    }

    /// Cells from `start` on out of [`Cells::export`]'s bytes.
    fn import(&mut self, start: usize, bytes: &[u8]) {
        match self {
            Cells::F32(cells) => {
                let bytes = bytes.as_chunks().0;
                cells[start..].iter_mut().zip(bytes).for_each(|(cell, bytes)| *cell = f32::from_le_bytes(*bytes));
            }
            Cells::Bf16(cells) => {
                let bytes = bytes.as_chunks().0;
                cells[start..].iter_mut().zip(bytes).for_each(|(cell, bytes)| *cell = u16::from_le_bytes(*bytes));
            }
        }
    }
}

/// Zeros that are written here and now, so that no page is missing in the middle of an answer.
fn committed<T: Copy + Default>(count: usize) -> Vec<T> {
    let mut cells = Vec::with_capacity(count);
    cells.resize(count, T::default());
    cells
}

/// Cached positions of one layer.
pub(super) struct LayerCache {
    width: usize,
    rows: Cells,
    index_dim: usize,
    index_keys: Cells,
}

impl LayerCache {
    /// Writes `values` into the row of `position`, from its column `column` on.
    pub(super) fn write(&mut self, position: usize, column: usize, values: &[f32]) {
        assert!(column + values.len() <= self.width, "{} values in a row of {}", values.len(), self.width);
        self.rows.write(position * self.width + column, values);
    }

    pub(super) fn rows(&self, positions: usize) -> Table<'_> {
        self.rows.first(positions * self.width)
    }

    pub(super) fn write_index_key(&mut self, position: usize, key: &[f32]) {
        assert_eq!(key.len(), self.index_dim, "the width of an index key");
        self.index_keys.write(position * self.index_dim, key);
    }

    pub(super) fn index_keys(&self, positions: usize) -> Table<'_> {
        self.index_keys.first(positions * self.index_dim)
    }
}

/// The cache of one sequence: for each position and layer a row of what the kind of attention keeps, and an index key
/// where a layer selects positions itself.
pub struct KvCache {
    layers: Vec<LayerCache>,
    bits: KvBits,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// A cache for `capacity` positions of the decoder layers; `sparse` as in [`super::Model`].
    pub fn new(arch: &Arch, capacity: usize, sparse: bool, bits: KvBits) -> KvCache {
        KvCache::over(arch, arch.layers.iter().map(|l| l.indexer), capacity, sparse, bits)
    }

    /// A cache for the MTP layer alone.
    pub fn for_mtp(arch: &Arch, capacity: usize, sparse: bool, bits: KvBits) -> KvCache {
        KvCache::over(arch, arch.mtp.iter().map(|l| l.indexer), capacity, sparse, bits)
    }

    fn over(
        arch: &Arch,
        kinds: impl Iterator<Item = IndexerKind>,
        capacity: usize,
        sparse: bool,
        bits: KvBits,
    ) -> KvCache {
        let width = arch.attention.cached();
        let layers = kinds.map(|kind| {
            let index_dim = match (kind, arch.indexer) {
                (IndexerKind::Full, Some(i)) if sparse => i.dim,
                _ => 0,
            };
            LayerCache {
                width,
                rows: Cells::new(bits, capacity * width),
                index_dim,
                index_keys: Cells::new(bits, capacity * index_dim),
            }
        });
        KvCache { layers: layers.collect(), bits, len: 0, capacity }
    }

    /// Bytes that a cache of this shape takes.
    pub fn bytes(arch: &Arch, capacity: usize, sparse: bool, bits: KvBits) -> u64 {
        KvCache::bytes_over(arch, arch.layers.iter().map(|l| l.indexer), capacity, sparse, bits)
    }

    /// Bytes that one for the MTP layer takes.
    pub fn bytes_for_mtp(arch: &Arch, capacity: usize, sparse: bool, bits: KvBits) -> u64 {
        KvCache::bytes_over(arch, arch.mtp.iter().map(|l| l.indexer), capacity, sparse, bits)
    }

    fn bytes_over(
        arch: &Arch,
        kinds: impl Iterator<Item = IndexerKind>,
        capacity: usize,
        sparse: bool,
        bits: KvBits,
    ) -> u64 {
        let index_dim = arch.indexer.filter(|_| sparse).map_or(0, |indexer| indexer.dim);
        let of_layer = |kind| arch.attention.cached() + if kind == IndexerKind::Full { index_dim } else { 0 };
        (kinds.map(of_layer).sum::<usize>() * capacity * bits.bytes()) as u64
    }

    /// Precision in which they are held.
    pub fn bits(&self) -> KvBits {
        self.bits
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions that fit.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Forgets every position from `len` on.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Numbers that each layer keeps of a position: those of its row, and of its index key.
    pub fn widths(&self) -> impl Iterator<Item = (usize, usize)> {
        self.layers.iter().map(|layer| (layer.width, layer.index_dim))
    }

    /// Bytes of all that is kept of one position.
    pub fn position_bytes(&self) -> usize {
        self.widths().map(|(row, key)| row + key).sum::<usize>() * self.bits.bytes()
    }

    /// All that is kept of `position`, layer after layer, the row before the index key, as little-endian bytes.
    pub fn export(&self, position: usize, mut out: &mut [u8]) {
        assert!(position < self.len, "position {position} of {}", self.len);
        assert_eq!(out.len(), self.position_bytes(), "room for a position");
        for layer in &self.layers {
            for (cells, width) in [(&layer.rows, layer.width), (&layer.index_keys, layer.index_dim)] {
                let (own, rest) = out.split_at_mut(width * self.bits.bytes());
                cells.export(position * width, own);
                out = rest;
            }
        }
    }

    /// Puts what [`KvCache::export`] wrote into the place of `position`, which is part of the sequence once
    /// [`KvCache::advance`] has come to it.
    pub fn import(&mut self, position: usize, mut bytes: &[u8]) {
        assert!(position < self.capacity, "position {position} of {}", self.capacity);
        assert_eq!(bytes.len(), self.position_bytes(), "bytes of a position");
        for layer in &mut self.layers {
            for (cells, width) in [(&mut layer.rows, layer.width), (&mut layer.index_keys, layer.index_dim)] {
                let (own, rest) = bytes.split_at(width * self.bits.bytes());
                cells.import(position * width, own);
                bytes = rest;
            }
        }
    }

    pub(super) fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// So many positions more, whatever their rows hold.
    pub fn advance(&mut self, rows: usize) {
        self.len += rows;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::arch::{IndexerArch, LayerArch};

    #[test]
    fn the_cache_takes_the_bytes_that_the_budget_is_told() {
        let layer = |indexer| LayerArch { mlp: MlpKind::Dense { width: 8 }, indexer };
        let arch = Arch {
            layers: vec![layer(IndexerKind::Full), layer(IndexerKind::Shared), layer(IndexerKind::Full)],
            indexer: Some(IndexerArch { heads: 2, dim: 10, top_k: 3 }),
            ..Arch::small()
        };
        let capacity = |cells: &Cells| match cells {
            Cells::F32(cells) => size_of::<f32>() * cells.capacity(),
            Cells::Bf16(cells) => size_of::<u16>() * cells.capacity(),
        };
        for (sparse, bits) in [false, true].into_iter().flat_map(|s| [(s, KvBits::Bits32), (s, KvBits::Bits16)]) {
            let held = |cache: &LayerCache| capacity(&cache.rows) + capacity(&cache.index_keys);
            let total: usize = KvCache::new(&arch, 7, sparse, bits).layers.iter().map(held).sum();
            assert_eq!(total as u64, KvCache::bytes(&arch, 7, sparse, bits));
        }
        // Three layers of 7 positions of 16 numbers, and two of 7 keys of 10.
        assert_eq!(KvCache::bytes(&arch, 7, true, KvBits::Bits32), 4 * (3 * 7 * 16 + 2 * 7 * 10));
        assert_eq!(KvCache::bytes(&arch, 7, true, KvBits::Bits16), 2 * (3 * 7 * 16 + 2 * 7 * 10));
    }

    #[test]
    fn a_position_is_exported_layer_after_layer_and_imported_to_the_same_bits() {
        let layer = |indexer| LayerArch { mlp: MlpKind::Dense { width: 8 }, indexer };
        let arch = Arch {
            layers: vec![layer(IndexerKind::Full), layer(IndexerKind::Shared)],
            indexer: Some(IndexerArch { heads: 2, dim: 2, top_k: 3 }),
            ..Arch::small()
        };
        let width = arch.attention.cached();
        for bits in [KvBits::Bits32, KvBits::Bits16] {
            let mut kv = KvCache::new(&arch, 3, true, bits);
            assert_eq!(kv.widths().collect::<Vec<_>>(), [(width, 2), (width, 0)]);
            assert_eq!(kv.position_bytes(), (2 * width + 2) * bits.bytes());
            // Numbers that BF16 holds whole: position, layer and column can be told from each.
            let number = |position: usize, layer: usize, column: usize| (64 * position + 32 * layer + column) as f32;
            for (layer, cache) in kv.layers_mut().iter_mut().enumerate() {
                for position in 0..3 {
                    let row: Vec<f32> = (0..width).map(|column| number(position, layer, column)).collect();
                    cache.write(position, 0, &row);
                }
            }
            (0..3).for_each(|position| kv.layers[0].write_index_key(position, &[-1.5 - position as f32, 0.25]));
            kv.advance(3);
            let mut bytes = vec![0; kv.position_bytes()];
            kv.export(1, &mut bytes);
            let row = |layer: usize| (0..width).map(move |column| number(1, layer, column));
            let numbers: Vec<f32> = row(0).chain([-2.5, 0.25]).chain(row(1)).collect();
            let expected: Vec<u8> = match bits {
                KvBits::Bits32 => numbers.iter().flat_map(|number| number.to_le_bytes()).collect(),
                KvBits::Bits16 => numbers.iter().flat_map(|number| bf16_of(*number).to_le_bytes()).collect(),
            };
            assert_eq!(bytes, expected);
            let mut other = KvCache::new(&arch, 2, true, bits);
            other.import(0, &bytes);
            assert!(other.is_empty(), "nothing is part of the sequence yet");
            other.advance(1);
            let mut again = vec![0; bytes.len()];
            other.export(0, &mut again);
            assert_eq!(again, bytes);
        }
    }
}

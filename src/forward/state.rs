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
    /// Scratch for steps of up to `rows` rows, `answered` of which get logits in a step of an answer, in contexts of up to `context` positions on `threads` threads, counted in
    /// `room`; `explicit` says whether the explicit form of attention will ever be asked for.
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
    fn bytes(self) -> usize {
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
        let rows = arch.layers.len() * arch.attention.cached();
        let full = arch.layers.iter().filter(|l| sparse && l.indexer == IndexerKind::Full).count();
        let keys = full * arch.indexer.map_or(0, |i| i.dim);
        ((rows + keys) * capacity * bits.bytes()) as u64
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
}

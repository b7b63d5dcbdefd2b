//! Everything a step writes: scratch buffers, all named and sized at open, and the key-value cache.

use super::attention::IndexScratch;
use crate::checkpoint::arch::{Arch, IndexerKind, MlpKind};
use crate::kernels::{Input, Quantized, WeightRef};
use crate::ops::indexer::Selection;
use crate::ops::{Compute, attention};

/// Scratch of a gated MLP.
pub(crate) struct MlpScratch {
    gate: Vec<f32>,
    up: Vec<f32>,
    quantized: Quantized,
}

impl MlpScratch {
    pub(super) fn new(rows: usize, width: usize) -> MlpScratch {
        MlpScratch {
            gate: vec![0.0; rows * width],
            up: vec![0.0; rows * width],
            quantized: Quantized::with_capacity(rows, width),
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
    pub(super) q_a: Vec<f32>,
    pub(super) q: Vec<f32>,
    pub(super) kv: Vec<f32>,
    /// Heads' outputs, `[rows, heads * value]`.
    pub(super) context: Vec<f32>,
    pub(super) index: IndexScratch,
    pub(super) selection: Selection,
    pub(super) shape: attention::Shape,
    pub(super) attention: attention::Scratch,
    /// Router scores, `[rows, experts]`.
    pub(super) scores: Vec<f32>,
    pub(super) biased: Vec<f32>,
    pub(super) ids: Vec<u16>,
    pub(super) gates: Vec<f32>,
    pub(super) mlp: MlpScratch,
    pub(super) quantized: Quantized,
    pub(super) quantized_inner: Quantized,
    pub(super) logits: Vec<f32>,
    rows: usize,
}

impl State {
    /// Scratch for steps of up to `rows` rows in contexts of up to `context` positions on `threads` threads;
    /// `explicit` says whether the explicit form of attention will ever be asked for.
    pub fn new(arch: &Arch, rows: usize, context: usize, threads: usize, explicit: bool) -> State {
        let a = &arch.attention;
        let shape = attention::Shape { heads: a.heads, nope: a.nope, rope: a.rope, value: a.value, rank: a.kv_rank };
        let all = arch.layers.iter().chain(&arch.mtp);
        let dense = all.filter_map(|l| match l.mlp {
            MlpKind::Dense { width } => Some(width),
            MlpKind::Sparse => None,
        });
        let width = dense.chain([arch.moe.shared_width]).max().unwrap_or(0);
        let (index_heads, index_dim, top_k) = arch.indexer.map_or((0, 0, usize::MAX), |i| (i.heads, i.dim, i.top_k));
        let per_row = |n: usize| vec![0.0; rows * n];
        State {
            x: per_row(arch.hidden),
            // The MTP layer joins two hidden vectors here.
            normed: per_row(if arch.mtp.is_some() { 2 * arch.hidden } else { arch.hidden }),
            branch: per_row(arch.hidden),
            shared: per_row(arch.hidden),
            q_a: per_row(a.q_rank),
            q: per_row(a.heads * (a.nope + a.rope)),
            kv: per_row(shape.cached()),
            context: per_row(a.heads * a.value),
            index: IndexScratch {
                queries: per_row(index_heads * index_dim),
                keys: per_row(index_dim),
                weights: per_row(index_heads),
            },
            selection: Selection::new(rows, context, top_k),
            attention: attention::Scratch::new(&shape, rows, threads, if explicit { context } else { 0 }),
            shape,
            scores: per_row(arch.moe.experts),
            biased: vec![0.0; arch.moe.experts],
            ids: vec![0; rows * arch.moe.top_k],
            gates: per_row(arch.moe.top_k),
            mlp: MlpScratch::new(rows, width),
            quantized: Quantized::with_capacity(rows, if arch.mtp.is_some() { 2 * arch.hidden } else { arch.hidden }),
            quantized_inner: Quantized::with_capacity(rows, a.q_rank.max(a.heads * a.value)),
            logits: Vec::with_capacity(arch.vocab),
            rows,
        }
    }

    /// Rows a step may have.
    pub fn max_rows(&self) -> usize {
        self.rows
    }

    /// Logits of the last step, `[rows that were asked for, vocab]`; the sampler may reorder them.
    pub fn logits(&mut self) -> &mut [f32] {
        &mut self.logits
    }

    /// Hidden states after the final norm, `[rows, hidden]`, of a step that computed the logits of all its rows.
    pub fn final_hidden(&self, rows: usize, hidden: usize) -> &[f32] {
        &self.normed[..rows * hidden]
    }

    /// Experts chosen in the last routed layer, `[rows, top_k]`, and their gates.
    pub fn last_choice(&self, rows: usize, top_k: usize) -> (&[u16], &[f32]) {
        (&self.ids[..rows * top_k], &self.gates[..rows * top_k])
    }
}

/// Cached positions of one layer.
pub(super) struct LayerCache {
    width: usize,
    latents: Vec<f32>,
    index_dim: usize,
    index_keys: Vec<f32>,
}

impl LayerCache {
    pub(super) fn latent_mut(&mut self, position: usize) -> &mut [f32] {
        &mut self.latents[position * self.width..][..self.width]
    }

    pub(super) fn latents(&self, positions: usize) -> &[f32] {
        &self.latents[..positions * self.width]
    }

    pub(super) fn index_key_mut(&mut self, position: usize) -> &mut [f32] {
        &mut self.index_keys[position * self.index_dim..][..self.index_dim]
    }

    pub(super) fn index_keys(&self, positions: usize) -> &[f32] {
        &self.index_keys[..positions * self.index_dim]
    }
}

/// The compressed cache of one sequence: a latent and a rotary key for each position and layer, and index keys where a
/// layer selects positions itself.
pub struct KvCache {
    layers: Vec<LayerCache>,
    len: usize,
    capacity: usize,
}

impl KvCache {
    /// A cache for `capacity` positions of the decoder layers; `sparse` as in [`super::Model`].
    pub fn new(arch: &Arch, capacity: usize, sparse: bool) -> KvCache {
        KvCache::over(arch, arch.layers.iter().map(|l| l.indexer), capacity, sparse)
    }

    /// A cache for the MTP layer alone.
    pub fn for_mtp(arch: &Arch, capacity: usize, sparse: bool) -> KvCache {
        KvCache::over(arch, arch.mtp.iter().map(|l| l.indexer), capacity, sparse)
    }

    fn over(arch: &Arch, kinds: impl Iterator<Item = IndexerKind>, capacity: usize, sparse: bool) -> KvCache {
        let width = arch.attention.kv_rank + arch.attention.rope;
        let layers = kinds.map(|kind| {
            let index_dim = match (kind, arch.indexer) {
                (IndexerKind::Full, Some(i)) if sparse => i.dim,
                _ => 0,
            };
            LayerCache {
                width,
                latents: vec![0.0; capacity * width],
                index_dim,
                index_keys: vec![0.0; capacity * index_dim],
            }
        });
        KvCache { layers: layers.collect(), len: 0, capacity }
    }

    /// Bytes that a cache of this shape takes.
    pub fn bytes(arch: &Arch, capacity: usize, sparse: bool) -> u64 {
        let latents = arch.layers.len() * (arch.attention.kv_rank + arch.attention.rope);
        let full = arch.layers.iter().filter(|l| sparse && l.indexer == IndexerKind::Full).count();
        let keys = full * arch.indexer.map_or(0, |i| i.dim);
        ((latents + keys) * capacity * size_of::<f32>()) as u64
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

    pub(super) fn advance(&mut self, rows: usize) {
        self.len += rows;
    }
}

//! The weights of a layer by what they are for; their bytes lie in one arena.

use std::ops::Range;

use crate::checkpoint::arch::LayerArch;
use crate::kernels::MatrixSpec;

/// A matrix inside the arena of [`super::resident::Resident`].
#[derive(Clone, Debug)]
pub struct Matrix {
    pub(super) spec: MatrixSpec,
    pub(super) data: Range<usize>,
    pub(super) scales: Range<usize>,
}

impl Matrix {
    /// Shape and format.
    pub fn spec(&self) -> MatrixSpec {
        self.spec
    }
}

/// A gated feed-forward: `down(silu(gate x) * up x)`.
pub struct Mlp {
    /// `[width, hidden]`.
    pub gate: Matrix,
    /// `[width, hidden]`.
    pub up: Matrix,
    /// `[hidden, width]`.
    pub down: Matrix,
}

/// Feed-forward of a layer.
pub enum MlpWeights {
    /// Dense layer.
    Dense(Mlp),
    /// Router, bias and shared expert; the routed experts are the store's.
    Sparse {
        /// `[experts, hidden]`.
        router: Matrix,
        /// `[experts]`: zeros where the family has none.
        bias: Vec<f32>,
        /// The expert every token uses, where the model has one.
        shared: Option<Mlp>,
    },
}

/// Weights of a layer's own indexer.
pub struct IndexerWeights {
    /// `[heads * dim, q_rank]`.
    pub wq_b: Matrix,
    /// `[dim, hidden]`.
    pub wk: Matrix,
    /// `[heads, hidden]`.
    pub weights_proj: Matrix,
    /// `[dim]`.
    pub k_norm: Vec<f32>,
    /// `[dim]`.
    pub k_bias: Vec<f32>,
}

/// Attention of a layer.
pub enum AttentionWeights {
    /// Over cached latents.
    Latent(Box<LatentWeights>),
    /// Over cached keys and values.
    Full(Box<FullWeights>),
}

/// Latent attention of a layer.
pub struct LatentWeights {
    /// `[q_rank, hidden]`.
    pub q_a: Matrix,
    /// `[q_rank]`.
    pub q_a_norm: Vec<f32>,
    /// `[heads * (nope + rope), q_rank]`.
    pub q_b: Matrix,
    /// `[kv_rank + rope, hidden]`.
    pub kv_a: Matrix,
    /// `[kv_rank]`.
    pub kv_a_norm: Vec<f32>,
    /// `[heads * (nope + value), kv_rank]`.
    pub kv_b: Matrix,
    /// `[hidden, heads * value]`.
    pub o: Matrix,
    /// Present on layers that score positions themselves.
    pub indexer: Option<IndexerWeights>,
}

/// Full attention of a layer.
pub struct FullWeights {
    /// `[heads * dim, hidden]`.
    pub q: Matrix,
    /// `[heads * dim]`.
    pub q_norm: Vec<f32>,
    /// `[kv_heads * dim, hidden]`.
    pub k: Matrix,
    /// `[kv_heads * dim]`.
    pub k_norm: Vec<f32>,
    /// `[kv_heads * dim, hidden]`.
    pub v: Matrix,
    /// `[hidden, heads * dim]`.
    pub o: Matrix,
}

/// One decoder layer.
pub struct Layer {
    /// What kind of layer it is.
    pub arch: LayerArch,
    /// Index in the checkpoint's names.
    pub index: usize,
    /// `[hidden]`.
    pub input_norm: Vec<f32>,
    /// `[hidden]`.
    pub post_norm: Vec<f32>,
    /// Attention weights.
    pub attention: AttentionWeights,
    /// Feed-forward weights.
    pub mlp: MlpWeights,
}

/// The multi-token-prediction layer.
pub struct Mtp {
    /// `[hidden]`, norm of the next token's embedding.
    pub enorm: Vec<f32>,
    /// `[hidden]`, norm of the main model's hidden state.
    pub hnorm: Vec<f32>,
    /// `[hidden, 2 hidden]`.
    pub eh_proj: Matrix,
    /// The decoder layer itself.
    pub layer: Layer,
    /// `[hidden]`.
    pub head_norm: Vec<f32>,
    /// Own embedding, where the checkpoint carries one.
    pub embed: Option<Matrix>,
    /// Own output head, where the checkpoint carries one.
    pub head: Option<Matrix>,
}

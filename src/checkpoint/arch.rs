//! What a model is: `config.json` parsed once into a shape that nothing after it re-checks.

/// Model family. A family is data: it selects how `config.json` is read and which tensors exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GLM-5, 5.1, 5.2 and 5.3: multi-head latent attention, sparse indexer, sigmoid router.
    GlmMoeDsa,
}

/// Shapes and rules of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Arch {
    /// Which family the checkpoint belongs to.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Token ids are below this.
    pub vocab: usize,
    /// Decoder layers, in order, at least one of them routed; the MTP layer is not among them.
    pub layers: Vec<LayerArch>,
    /// The multi-token-prediction layer (layer index `layers.len()`), where the checkpoint declares one.
    pub mtp: Option<LayerArch>,
    /// Attention shapes.
    pub attention: AttentionArch,
    /// Shapes of the sparse-attention indexer, where any layer has one.
    pub indexer: Option<IndexerArch>,
    /// Routed and shared experts.
    pub moe: MoeArch,
    /// Epsilon of input, post-attention and final norms.
    pub norm_eps: f64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Longest context: what the model declares, at most [`crate::limits::MAX_CONTEXT`].
    pub max_context: usize,
    /// Whether the output head is the embedding matrix.
    pub tied_head: bool,
    /// Union of the end-of-turn ids of config.json and generation_config.json, sorted.
    pub stop_ids: Vec<u32>,
}

/// What differs from layer to layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerArch {
    /// Dense or routed feed-forward.
    pub mlp: MlpKind,
    /// Where the layer's attended positions come from.
    pub indexer: IndexerKind,
}

/// Feed-forward of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlpKind {
    /// One gated MLP of this width.
    Dense {
        /// Intermediate size.
        width: usize,
    },
    /// Router, routed experts and shared experts.
    Sparse,
}

/// Source of a layer's attended positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerKind {
    /// The layer scores positions itself.
    Full,
    /// The layer reuses the selection of the last `Full` layer before it and has no indexer weights.
    Shared,
    /// Attention over every position.
    None,
}

/// Shapes of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionArch {
    /// Query heads.
    pub heads: usize,
    /// Rank of the query's low-rank factor (Rq).
    pub q_rank: usize,
    /// Width of the cached latent (Rkv).
    pub kv_rank: usize,
    /// Part of a head's key without rotation (Dn).
    pub nope: usize,
    /// Rotary part of a head's key (Dr).
    pub rope: usize,
    /// Width of a head's value (Dv).
    pub value: usize,
}

/// Shapes of the sparse-attention indexer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerArch {
    /// Indexer heads.
    pub heads: usize,
    /// Width of an indexer head.
    pub dim: usize,
    /// Positions kept.
    pub top_k: usize,
}

/// Experts and their router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeArch {
    /// Routed experts a layer.
    pub experts: usize,
    /// Experts chosen a token (K).
    pub top_k: usize,
    /// Groups the experts are divided into; 1 is no grouping.
    pub groups: usize,
    /// Groups that stay eligible for a token.
    pub top_groups: usize,
    /// Intermediate size of a routed expert.
    pub width: usize,
    /// Intermediate size of the shared expert; 0 when there is none.
    pub shared_width: usize,
    /// Divide the chosen weights by their sum.
    pub normalize: bool,
    /// Factor on the chosen weights.
    pub scaling: f32,
}

//! What a model is: `config.json` parsed once into a shape that nothing after it re-checks.

/// Model family. A family is data: it selects how `config.json` is read and which tensors exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// GLM-5, 5.1, 5.2 and 5.3: multi-head latent attention, sparse indexer, sigmoid router.
    GlmMoeDsa,
    /// OLMoE: full attention, softmax router, every layer routed.
    Olmoe,
}

impl Family {
    /// All of them.
    pub const ALL: [Family; 2] = [Family::GlmMoeDsa, Family::Olmoe];

    /// What `model_type` of config.json calls it.
    pub fn name(self) -> &'static str {
        match self {
            Family::GlmMoeDsa => "glm_moe_dsa",
            Family::Olmoe => "olmoe",
        }
    }
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
    /// Kind and shapes of attention.
    pub attention: AttentionArch,
    /// Shapes of the sparse-attention indexer, where any layer has one: only beside latent attention.
    pub indexer: Option<IndexerArch>,
    /// Routed and shared experts.
    pub moe: MoeArch,
    /// Epsilon of input, post-attention and final norms.
    pub norm_eps: f64,
    /// Base of the rotary angles.
    pub rope_theta: f64,
    /// Which values turn together.
    pub rope_pairs: RopePairs,
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

/// Which values of a query or a key a rotation turns together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Neighbours.
    Adjacent,
    /// The same place in both halves.
    Halves,
}

/// A kind of attention and its shapes, the same in every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum AttentionArch {
    /// A compressed latent is cached.
    Latent(LatentArch),
    /// Keys and values are cached.
    Full(FullArch),
}

impl AttentionArch {
    /// Values cached of a position in each layer, index keys aside.
    pub fn cached(&self) -> usize {
        match self {
            AttentionArch::Latent(a) => a.kv_rank + a.rope,
            AttentionArch::Full(a) => 2 * a.kv_heads * a.dim,
        }
    }

    /// The shapes in words.
    pub fn describe(&self) -> String {
        match self {
            AttentionArch::Latent(LatentArch { heads, q_rank, kv_rank, nope, rope, value }) => format!(
                "{heads} heads of {nope} + {rope} and {value}, queries from {q_rank}, a latent of {kv_rank} cached"
            ),
            AttentionArch::Full(FullArch { heads, kv_heads, dim, .. }) => {
                format!("{heads} heads of {dim}, {kv_heads} of them cached")
            }
        }
    }

    /// Values of a head's query that are rotated.
    pub fn rotary(&self) -> usize {
        match self {
            AttentionArch::Latent(a) => a.rope,
            AttentionArch::Full(a) => a.dim,
        }
    }
}

/// Shapes of multi-head latent attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentArch {
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

/// Shapes of full attention with norms over all queries, and over all keys, of a position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FullArch {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub dim: usize,
    /// Queries, keys and values are clamped to this distance from zero.
    pub clip: Option<f32>,
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

/// What makes a router's outputs scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The sigmoid of each.
    Sigmoid,
    /// A softmax over all experts.
    Softmax,
}

/// Experts and their router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeArch {
    /// Routed experts a layer.
    pub experts: usize,
    /// What makes the router's outputs scores.
    pub scoring: Scoring,
    /// Whether a bias steers the choice.
    pub router_bias: bool,
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

#[cfg(test)]
impl Arch {
    /// For tests: one dense layer and two routed ones, all of it small.
    pub(crate) fn small() -> Arch {
        let layer = |mlp| LayerArch { mlp, indexer: IndexerKind::None };
        Arch {
            family: Family::GlmMoeDsa,
            hidden: 16,
            vocab: 32,
            layers: vec![layer(MlpKind::Dense { width: 8 }), layer(MlpKind::Sparse), layer(MlpKind::Sparse)],
            mtp: None,
            attention: AttentionArch::Latent(LatentArch {
                heads: 2,
                q_rank: 8,
                kv_rank: 12,
                nope: 4,
                rope: 4,
                value: 6,
            }),
            indexer: None,
            moe: MoeArch {
                experts: 4,
                scoring: Scoring::Sigmoid,
                router_bias: true,
                top_k: 2,
                groups: 1,
                top_groups: 1,
                width: 8,
                shared_width: 8,
                normalize: true,
                scaling: 1.0,
            },
            norm_eps: 1e-5,
            rope_theta: 1e4,
            rope_pairs: RopePairs::Adjacent,
            max_context: 100,
            tied_head: false,
            stop_ids: vec![],
        }
    }
}

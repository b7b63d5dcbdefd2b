//! The tensors a model needs, as data.

use super::arch::{Arch, AttentionArch, FullArch, IndexerKind, LatentArch, LayerArch, MlpKind};
use super::container::MatrixSource;
use super::error::Result;
use super::tensors::{Dtype, TensorMap};
use crate::kernels::{Format, MatrixSpec};

/// Shape of a required tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// So many values, never quantized.
    Vector(usize),
    /// A weight matrix, in any format.
    Matrix {
        /// Output features.
        rows: usize,
        /// Input features.
        cols: usize,
    },
}

impl Shape {
    /// Where the tensor of this name and shape lies and how to read it; a vector is a matrix of one row.
    pub(crate) fn source(self, name: &str, tensors: &TensorMap) -> Result<MatrixSource> {
        let len = match self {
            Shape::Matrix { rows, cols } => return tensors.matrix(name, rows, cols),
            Shape::Vector(len) => len,
        };
        let info = tensors.vector(name, len)?;
        let format = match info.dtype {
            Dtype::Bf16 => Format::Bf16,
            Dtype::F16 => Format::F16,
            _ => Format::F32,
        };
        let spec = MatrixSpec { format, rows: 1, cols: len };
        Ok(MatrixSource { spec, data: info.span(), scales: None, factor: None })
    }
}

/// What a tensor is for, which decides its precision in a container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Embeddings and output head.
    Io,
    /// Norms, biases and the router: kept in full precision.
    Exact,
    /// Attention, dense MLPs and shared experts of the decoder layers.
    Dense,
    /// The sparse-attention indexer.
    Indexer,
    /// Routed experts of the decoder layers.
    Expert,
    /// The MTP layer's own matrices, its experts included.
    Mtp,
}

/// The part of a model that a tensor belongs to, as people count its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// Routed experts of the decoder layers.
    Experts,
    /// Attention, without norms and indexer.
    Attention,
    /// Shared experts.
    Shared,
    /// Feed-forwards of layers without experts.
    Dense,
    /// The embedding matrix.
    Embeddings,
    /// The output head, where it is not the embedding matrix.
    Head,
    /// Everything of the MTP layer.
    Mtp,
    /// The sparse-attention indexer.
    Indexer,
    /// What chooses experts.
    Router,
    /// Norms.
    Norms,
}

impl Part {
    /// All of them.
    pub const ALL: [Part; 10] = [
        Part::Experts,
        Part::Attention,
        Part::Shared,
        Part::Dense,
        Part::Embeddings,
        Part::Head,
        Part::Mtp,
        Part::Indexer,
        Part::Router,
        Part::Norms,
    ];

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Part::Experts => "routed experts",
            Part::Attention => "attention",
            Part::Shared => "shared experts",
            Part::Dense => "dense",
            Part::Embeddings => "embeddings",
            Part::Head => "head",
            Part::Mtp => "MTP layer",
            Part::Indexer => "indexer",
            Part::Router => "router",
            Part::Norms => "norms",
        }
    }
}

/// One required tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Required {
    /// The vendor's name.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// What it is for.
    pub role: Role,
    /// The layer it belongs to; the MTP layer comes after the last decoder layer.
    pub layer: Option<usize>,
}

impl Required {
    /// Checks that the tensor exists with this shape and a format that can be read; returns the format of a matrix.
    pub fn check(&self, tensors: &TensorMap) -> Result<Option<Format>> {
        match self.shape {
            Shape::Vector(_) => self.source(tensors).map(|_| None),
            Shape::Matrix { .. } => self.source(tensors).map(|found| Some(found.spec.format)),
        }
    }

    /// The part it belongs to. A family that names its tensors otherwise adds its names here.
    pub fn part(&self, arch: &Arch) -> Part {
        if self.layer == Some(arch.layers.len()) {
            return Part::Mtp;
        }
        let holds = |path: &str| self.name.contains(path);
        match self.role {
            Role::Io if holds("embed_tokens") => Part::Embeddings,
            Role::Io => Part::Head,
            Role::Expert => Part::Experts,
            Role::Mtp => Part::Mtp,
            Role::Indexer => Part::Indexer,
            Role::Exact if holds(".indexer.") => Part::Indexer,
            Role::Exact if holds(".mlp.gate.") => Part::Router,
            Role::Exact => Part::Norms,
            Role::Dense if holds(".self_attn.") => Part::Attention,
            Role::Dense if holds(".shared_experts.") => Part::Shared,
            Role::Dense => Part::Dense,
        }
    }

    /// Where the tensor lies and how to read it; a vector is a matrix of one row.
    pub(crate) fn source(&self, tensors: &TensorMap) -> Result<MatrixSource> {
        self.shape.source(&self.name, tensors)
    }
}

/// The indexer's tensors in a layer.
const INDEXER: [&str; 5] = [
    "self_attn.indexer.wq_b.weight",
    "self_attn.indexer.wk.weight",
    "self_attn.indexer.k_norm.weight",
    "self_attn.indexer.k_norm.bias",
    "self_attn.indexer.weights_proj.weight",
];

/// Names of the indexer's tensors in a layer.
pub(crate) fn indexer_names(layer: usize) -> [String; 5] {
    INDEXER.map(|tail| format!("model.layers.{layer}.{tail}"))
}

pub(crate) fn list(arch: &Arch) -> Vec<Required> {
    let mut list = List { tensors: Vec::new(), prefix: "model.".to_owned(), layer: None };
    let table = (arch.vocab, arch.hidden);
    list.matrix("embed_tokens.weight", table, Role::Io);
    list.vector("norm.weight", arch.hidden);
    if !arch.tied_head {
        list.prefix.clear();
        list.matrix("lm_head.weight", table, Role::Io);
    }
    for (layer, kind) in arch.layers.iter().enumerate() {
        decoder_layer(&mut list, arch, layer, kind, Role::Dense);
    }
    if let Some(kind) = &arch.mtp {
        let layer = arch.layers.len();
        decoder_layer(&mut list, arch, layer, kind, Role::Mtp);
        list.vector("enorm.weight", arch.hidden);
        list.vector("hnorm.weight", arch.hidden);
        list.matrix("eh_proj.weight", (arch.hidden, 2 * arch.hidden), Role::Mtp);
        list.vector("shared_head.norm.weight", arch.hidden);
    }
    list.tensors
}

/// Embedding and head that a checkpoint may carry again in its MTP layer; without them the main model's are used.
pub(crate) fn mtp_optional(arch: &Arch) -> Vec<Required> {
    if arch.mtp.is_none() {
        return Vec::new();
    }
    let layer = arch.layers.len();
    let prefix = format!("model.layers.{layer}.");
    let mut list = List { tensors: Vec::new(), prefix, layer: Some(layer) };
    list.matrix("embed_tokens.weight", (arch.vocab, arch.hidden), Role::Io);
    list.matrix("shared_head.head.weight", (arch.vocab, arch.hidden), Role::Io);
    list.tensors
}

/// The matrices of a routed expert in the order of a slab: gate, up, down.
pub(crate) fn expert(arch: &Arch, layer: usize, expert: usize) -> [Required; 3] {
    let (hidden, width) = (arch.hidden, arch.moe.width);
    let role = if layer == arch.layers.len() { Role::Mtp } else { Role::Expert };
    [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)].map(|(part, rows, cols)| Required {
        name: expert_name(layer, expert, part),
        shape: Shape::Matrix { rows, cols },
        role,
        layer: Some(layer),
    })
}

/// The name of a matrix of an expert: its `gate`, `up` or `down`.
pub(crate) fn expert_name(layer: usize, expert: usize, part: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight")
}

/// The tensor of this name, if the model uses it.
pub(crate) fn find(arch: &Arch, name: &str) -> Option<Required> {
    let resident = list(arch).into_iter().chain(mtp_optional(arch)).find(|tensor| tensor.name == name);
    resident.or_else(|| {
        let (layer, tail) = name.strip_prefix("model.layers.")?.split_once(".mlp.experts.")?;
        let (layer, expert) = (layer.parse().ok()?, tail.split_once('.')?.0.parse().ok()?);
        let kind = arch.layers.iter().chain(&arch.mtp).nth(layer)?;
        let routed = kind.mlp == MlpKind::Sparse && expert < arch.moe.experts;
        routed.then(|| self::expert(arch, layer, expert))?.into_iter().find(|tensor| tensor.name == name)
    })
}

fn decoder_layer(list: &mut List, arch: &Arch, layer: usize, kind: &LayerArch, role: Role) {
    let hidden = arch.hidden;
    list.layer = Some(layer);
    list.prefix = format!("model.layers.{layer}.");
    list.vector("input_layernorm.weight", hidden);
    list.vector("post_attention_layernorm.weight", hidden);

    match &arch.attention {
        AttentionArch::Latent(a) => latent_attention(list, arch, a, kind, role),
        AttentionArch::Full(a) => full_attention(list, hidden, a, role),
    }
    match kind.mlp {
        MlpKind::Dense { width } => list.gated_mlp("mlp", width, hidden, role),
        MlpKind::Sparse => {
            list.matrix("mlp.gate.weight", (arch.moe.experts, hidden), Role::Exact);
            if arch.moe.router_bias {
                list.vector("mlp.gate.e_score_correction_bias", arch.moe.experts);
            }
            if arch.moe.shared_width > 0 {
                list.gated_mlp("mlp.shared_experts", arch.moe.shared_width, hidden, role);
            }
        }
    }
}

fn latent_attention(list: &mut List, arch: &Arch, a: &LatentArch, kind: &LayerArch, role: Role) {
    let hidden = arch.hidden;
    list.matrix("self_attn.q_a_proj.weight", (a.q_rank, hidden), role);
    list.vector("self_attn.q_a_layernorm.weight", a.q_rank);
    list.matrix("self_attn.q_b_proj.weight", (a.heads * (a.nope + a.rope), a.q_rank), role);
    list.matrix("self_attn.kv_a_proj_with_mqa.weight", (a.kv_rank + a.rope, hidden), role);
    list.vector("self_attn.kv_a_layernorm.weight", a.kv_rank);
    list.matrix("self_attn.kv_b_proj.weight", (a.heads * (a.nope + a.value), a.kv_rank), role);
    list.matrix("self_attn.o_proj.weight", (hidden, a.heads * a.value), role);

    if let (IndexerKind::Full, Some(indexer)) = (kind.indexer, &arch.indexer) {
        let [wq_b, wk, norm_weight, norm_bias, weights_proj] = INDEXER;
        list.matrix(wq_b, (indexer.heads * indexer.dim, a.q_rank), Role::Indexer);
        list.matrix(wk, (indexer.dim, hidden), Role::Indexer);
        list.vector(norm_weight, indexer.dim);
        list.vector(norm_bias, indexer.dim);
        list.matrix(weights_proj, (indexer.heads, hidden), Role::Indexer);
    }
}

fn full_attention(list: &mut List, hidden: usize, a: &FullArch, role: Role) {
    let (queries, keys) = (a.heads * a.dim, a.kv_heads * a.dim);
    list.matrix("self_attn.q_proj.weight", (queries, hidden), role);
    list.vector("self_attn.q_norm.weight", queries);
    list.matrix("self_attn.k_proj.weight", (keys, hidden), role);
    list.vector("self_attn.k_norm.weight", keys);
    list.matrix("self_attn.v_proj.weight", (keys, hidden), role);
    list.matrix("self_attn.o_proj.weight", (hidden, queries), role);
}

struct List {
    tensors: Vec<Required>,
    prefix: String,
    layer: Option<usize>,
}

impl List {
    fn vector(&mut self, tail: &str, len: usize) {
        self.push(tail, Shape::Vector(len), Role::Exact);
    }

    fn matrix(&mut self, tail: &str, (rows, cols): (usize, usize), role: Role) {
        self.push(tail, Shape::Matrix { rows, cols }, role);
    }

    fn gated_mlp(&mut self, path: &str, width: usize, hidden: usize, role: Role) {
        self.matrix(&format!("{path}.gate_proj.weight"), (width, hidden), role);
        self.matrix(&format!("{path}.up_proj.weight"), (width, hidden), role);
        self.matrix(&format!("{path}.down_proj.weight"), (hidden, width), role);
    }

    fn push(&mut self, tail: &str, shape: Shape, role: Role) {
        let name = format!("{}{tail}", self.prefix);
        self.tensors.push(Required { name, shape, role, layer: self.layer });
    }
}

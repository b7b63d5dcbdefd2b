//! The family of OLMoE: full attention with norms over all queries and keys, a softmax router, every layer routed.

use super::fields::Fields;
use super::{check_quantization, max_context, norm_eps, rope_theta};
use crate::checkpoint::arch::{
    Arch, AttentionArch, Family, FullArch, IndexerKind, LayerArch, MlpKind, MoeArch, RopePairs, Scoring,
};
use crate::checkpoint::error::Result;
use crate::limits::{MAX_COLUMNS, MAX_EXPERTS, MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_ROPE, MAX_TOP_K, MAX_VOCAB};
use serde_json::Value;

pub(super) fn parse(config: &Fields) -> Result<Arch> {
    refuse_unsupported(config)?;
    let hidden = config.size("hidden_size", 1..=MAX_HIDDEN)?;
    let layer_count = config.size("num_hidden_layers", 1..=MAX_LAYERS - 1)?;
    let layer = LayerArch { mlp: MlpKind::Sparse, indexer: IndexerKind::None };
    Ok(Arch {
        family: Family::Olmoe,
        hidden,
        vocab: config.size("vocab_size", 1..=MAX_VOCAB)?,
        layers: vec![layer; layer_count],
        mtp: None,
        attention: AttentionArch::Full(parse_attention(config, hidden)?),
        indexer: None,
        moe: parse_moe(config)?,
        norm_eps: norm_eps(config)?,
        rope_theta: rope_theta(config)?,
        rope_pairs: RopePairs::Halves,
        max_context: max_context(config)?,
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        stop_ids: Vec::new(),
    })
}

/// Switches of the family that select arithmetic this engine does not have.
fn refuse_unsupported(config: &Fields) -> Result<()> {
    config.only("hidden_act", &Value::from("silu"))?;
    config.only("attention_bias", &Value::from(false))?;
    check_quantization(config)
}

fn parse_attention(config: &Fields, hidden: usize) -> Result<FullArch> {
    let heads = config.size("num_attention_heads", 1..=MAX_HEADS)?;
    let dim = hidden / heads;
    if dim * heads != hidden || !dim.is_multiple_of(2) || dim > MAX_ROPE {
        let expected = format!("heads of an even width, at most {MAX_ROPE}, out of hidden_size ({hidden})");
        return Err(config.bad("num_attention_heads", &expected, &heads.to_string()));
    }
    // The norms are as wide as hidden_size, so that no other width of a head can be meant.
    config.only("head_dim", &Value::from(dim))?;
    // As many as query heads is what the format means by nothing.
    let kv_heads = config.size_or("num_key_value_heads", 1..=heads, heads)?;
    if !heads.is_multiple_of(kv_heads) {
        let expected = format!("a divisor of num_attention_heads ({heads})");
        return Err(config.bad("num_key_value_heads", &expected, &kv_heads.to_string()));
    }
    let clip = match config.get("clip_qkv") {
        None => None,
        Some(_) => match config.positive("clip_qkv")? as f32 {
            clip if clip.is_normal() => Some(clip),
            clip => return Err(config.bad("clip_qkv", "a float32", &clip.to_string())),
        },
    };
    Ok(FullArch { heads, kv_heads, dim, clip })
}

fn parse_moe(config: &Fields) -> Result<MoeArch> {
    let experts = config.size("num_experts", 1..=MAX_EXPERTS)?;
    Ok(MoeArch {
        experts,
        scoring: Scoring::Softmax,
        router_bias: false,
        top_k: config.size("num_experts_per_tok", 1..=MAX_TOP_K.min(experts))?,
        groups: 1,
        top_groups: 1,
        width: config.size("intermediate_size", 1..=MAX_COLUMNS)?,
        shared_width: 0,
        normalize: config.flag("norm_topk_prob")?,
        scaling: 1.0,
    })
}

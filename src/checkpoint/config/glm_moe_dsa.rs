//! The family of GLM-5: latent attention with a sparse indexer, leading dense layers, a shared expert, an MTP layer.

use super::fields::{Fields, shown};
use super::{check_quantization, max_context, norm_eps, rope_theta};
use crate::checkpoint::arch::{
    Arch, AttentionArch, Family, IndexerArch, IndexerKind, LatentArch, LayerArch, MlpKind, MoeArch, RopePairs, Scoring,
};
use crate::checkpoint::error::Result;
use crate::limits::{
    MAX_COLUMNS, MAX_CONTEXT, MAX_EXPERTS, MAX_GROUPS, MAX_HEADS, MAX_HIDDEN, MAX_KV_RANK, MAX_LAYERS, MAX_ROPE,
    MAX_ROUTED_SCALING, MAX_TOP_K, MAX_VOCAB,
};
use serde_json::Value;

pub(super) fn parse(config: &Fields) -> Result<Arch> {
    refuse_unsupported(config)?;
    let hidden = config.size("hidden_size", 1..=MAX_HIDDEN)?;
    let vocab = config.size("vocab_size", 1..=MAX_VOCAB)?;
    let layer_count = config.size("num_hidden_layers", 1..=MAX_LAYERS - 1)?;
    let mtp_count = config.size_or("num_nextn_predict_layers", 0..=MAX_LAYERS, 0)?;
    let attention = parse_attention(config)?;
    let indexer = parse_indexer(config, &attention)?;
    let moe = parse_moe(config)?;
    let sources = indexer_kinds(config, layer_count, mtp_count)?;
    let mlps = mlp_kinds(config, layer_count, mtp_count)?;
    if !mlps.contains(&MlpKind::Sparse) {
        let field = if config.get("mlp_layer_types").is_some() { "mlp_layer_types" } else { "first_k_dense_replace" };
        return Err(config.bad(field, "at least one layer with routed experts", "dense layers only"));
    }
    let layers = mlps.iter().zip(&sources).map(|(&mlp, &indexer)| LayerArch { mlp, indexer }).collect();
    let mtp = LayerArch { mlp: MlpKind::Sparse, indexer: IndexerKind::Full };
    Ok(Arch {
        family: Family::GlmMoeDsa,
        hidden,
        vocab,
        layers,
        mtp: (mtp_count > 0).then_some(mtp),
        attention: AttentionArch::Latent(attention),
        indexer: Some(indexer),
        moe,
        norm_eps: norm_eps(config)?,
        rope_theta: rope_theta(config)?,
        rope_pairs: RopePairs::Adjacent,
        max_context: max_context(config)?,
        tied_head: config.flag_or("tie_word_embeddings", false)?,
        stop_ids: Vec::new(),
    })
}

/// Switches of the family that select arithmetic this engine does not have.
fn refuse_unsupported(config: &Fields) -> Result<()> {
    config.only("scoring_func", &Value::from("sigmoid"))?;
    config.only("topk_method", &Value::from("noaux_tc"))?;
    config.only("hidden_act", &Value::from("silu"))?;
    config.only("attention_bias", &Value::from(false))?;
    config.only("moe_layer_freq", &Value::from(1))?;
    config.only("rope_interleave", &Value::from(true))?;
    config.only("indexer_rope_interleave", &Value::from(true))?;
    check_quantization(config)
}

fn parse_attention(config: &Fields) -> Result<LatentArch> {
    let attention = LatentArch {
        heads: config.size("num_attention_heads", 1..=MAX_HEADS)?,
        q_rank: config.size("q_lora_rank", 1..=MAX_COLUMNS)?,
        kv_rank: config.size("kv_lora_rank", 1..=MAX_KV_RANK)?,
        nope: config.size("qk_nope_head_dim", 1..=MAX_COLUMNS)?,
        rope: config.size("qk_rope_head_dim", 2..=MAX_ROPE)?,
        value: config.size("v_head_dim", 1..=MAX_COLUMNS)?,
    };
    config.within("num_attention_heads * v_head_dim", attention.heads * attention.value, MAX_COLUMNS)?;
    if !attention.rope.is_multiple_of(2) {
        let found = attention.rope.to_string();
        return Err(config.bad("qk_rope_head_dim", "an even number", &found));
    }
    config.only("num_key_value_heads", &Value::from(attention.heads))?;
    config.only("qk_head_dim", &Value::from(attention.nope + attention.rope))?;
    Ok(attention)
}

fn parse_indexer(config: &Fields, attention: &LatentArch) -> Result<IndexerArch> {
    Ok(IndexerArch {
        heads: config.size("index_n_heads", 1..=MAX_HEADS)?,
        dim: config.size("index_head_dim", attention.rope..=MAX_COLUMNS)?,
        top_k: config.size("index_topk", 1..=MAX_CONTEXT)?,
    })
}

fn parse_moe(config: &Fields) -> Result<MoeArch> {
    let experts = config.size("n_routed_experts", 1..=MAX_EXPERTS)?;
    let groups = config.size_or("n_group", 1..=experts.min(MAX_GROUPS), 1)?;
    if experts % groups != 0 {
        let expected = format!("a divisor of n_routed_experts ({experts})");
        return Err(config.bad("n_group", &expected, &groups.to_string()));
    }
    let group_experts = experts / groups;
    if groups > 1 && group_experts < 2 {
        let expected = "groups of at least two experts";
        return Err(config.bad("n_group", expected, &format!("{groups} for {experts} experts")));
    }
    // With groups, the number kept is a rule of the router; without, there is nothing to choose.
    let top_groups = match groups {
        1 => config.size_or("topk_group", 1..=1, 1)?,
        _ => config.size("topk_group", 1..=groups)?,
    };
    let width = config.size("moe_intermediate_size", 1..=MAX_COLUMNS)?;
    let shared = config.size("n_shared_experts", 0..=MAX_EXPERTS)?;
    config.within("n_shared_experts * moe_intermediate_size", shared * width, MAX_COLUMNS)?;
    let scaling = config.positive("routed_scaling_factor")? as f32;
    if !scaling.is_normal() || scaling > MAX_ROUTED_SCALING {
        let expected = format!("a float32 of at most {MAX_ROUTED_SCALING}");
        return Err(config.bad("routed_scaling_factor", &expected, &scaling.to_string()));
    }
    Ok(MoeArch {
        experts,
        scoring: Scoring::Sigmoid,
        router_bias: true,
        top_k: config.size("num_experts_per_tok", 1..=MAX_TOP_K.min(top_groups * group_experts))?,
        groups,
        top_groups,
        width,
        shared_width: shared * width,
        normalize: config.flag("norm_topk_prob")?,
        scaling,
    })
}

/// The explicit list wins, then the pattern, then the frequency rule.
fn indexer_kinds(config: &Fields, layers: usize, mtp: usize) -> Result<Vec<IndexerKind>> {
    let mut field = "indexer_types";
    let mut kinds: Vec<IndexerKind> = if let Some(list) = config.list("indexer_types")? {
        let kind = |(index, value): (usize, &Value)| match value.as_str() {
            Some("full") => Ok(IndexerKind::Full),
            Some("shared") => Ok(IndexerKind::Shared),
            _ => Err(config.bad(&format!("indexer_types[{index}]"), "\"full\" or \"shared\"", &shown(Some(value)))),
        };
        list.iter().enumerate().map(kind).collect::<Result<_>>()?
    } else if let Some(pattern) = config.text("index_topk_pattern")? {
        field = "index_topk_pattern";
        let kind = |letter| match letter {
            'F' => Ok(IndexerKind::Full),
            'S' => Ok(IndexerKind::Shared),
            _ => Err(config.bad(field, "letters F and S", pattern)),
        };
        pattern.chars().map(kind).collect::<Result<_>>()?
    } else {
        field = "index_topk_freq";
        let frequency = config.size_or("index_topk_freq", 1..=MAX_LAYERS, 1)?;
        let offset = config.size_or("index_skip_topk_offset", 0..=MAX_LAYERS, 2)?;
        let full = |layer: usize| (layer + 1).saturating_sub(offset) % frequency == 0;
        let kind = |layer| {
            if full(layer) { IndexerKind::Full } else { IndexerKind::Shared }
        };
        (0..layers).map(kind).collect()
    };
    check_length(config, field, kinds.len(), layers, mtp)?;
    if kinds[layers..].iter().any(|&kind| kind != IndexerKind::Full) {
        return Err(config.bad(field, "a full indexer in the MTP layer", "a shared one"));
    }
    kinds.truncate(layers);
    if kinds[0] != IndexerKind::Full {
        return Err(config.bad(field, "layer 0 to have a full indexer", "a shared one"));
    }
    Ok(kinds)
}

fn mlp_kinds(config: &Fields, layers: usize, mtp: usize) -> Result<Vec<MlpKind>> {
    let width = config.size("intermediate_size", 1..=MAX_COLUMNS)?;
    let dense = MlpKind::Dense { width };
    let Some(list) = config.list("mlp_layer_types")? else {
        let first_sparse = config.size("first_k_dense_replace", 0..=MAX_LAYERS)?;
        let kind = |layer| {
            if layer < first_sparse { dense } else { MlpKind::Sparse }
        };
        return Ok((0..layers).map(kind).collect());
    };
    let kind = |(index, value): (usize, &Value)| match value.as_str() {
        Some("dense") => Ok(dense),
        Some("sparse") => Ok(MlpKind::Sparse),
        _ => Err(config.bad(&format!("mlp_layer_types[{index}]"), "\"dense\" or \"sparse\"", &shown(Some(value)))),
    };
    let mut kinds: Vec<MlpKind> = list.iter().enumerate().map(kind).collect::<Result<_>>()?;
    check_length(config, "mlp_layer_types", kinds.len(), layers, mtp)?;
    if kinds[layers..].contains(&dense) {
        return Err(config.bad("mlp_layer_types", "a sparse MTP layer", "a dense one"));
    }
    kinds.truncate(layers);
    Ok(kinds)
}

/// A per-layer list has an entry for every layer and may go on through the MTP layers.
fn check_length(config: &Fields, field: &str, found: usize, layers: usize, mtp: usize) -> Result<()> {
    if (layers..=layers + mtp).contains(&found) {
        return Ok(());
    }
    let expected = format!("{layers} entries, one for each of num_hidden_layers");
    Err(config.bad(field, &expected, &format!("{found} entries")))
}

//! `config.json` and `generation_config.json` into an [`Arch`].
//!
//! A value that changes the model is read or refused, never defaulted: a missing rotary base or scaling factor gives
//! fluent nonsense, which nobody notices. What may be absent is what the format itself defines a meaning for.
//!
//! What is accepted can be run: every size is held against [`crate::limits`], also those that are products of others,
//! and no product of two of them comes near 2^63, so sizes need no checked arithmetic later.

use super::arch::{Arch, AttentionArch, Family, IndexerArch, IndexerKind, LayerArch, MlpKind, MoeArch};
use super::error::{CheckpointError, Result, io_error, is_there};
use crate::limits::{
    MAX_COLUMNS, MAX_CONTEXT, MAX_EXPERTS, MAX_GROUPS, MAX_HEADS, MAX_HIDDEN, MAX_KV_RANK, MAX_LAYERS, MAX_ROPE,
    MAX_SMALL_FILE_BYTES, MAX_TOP_K, MAX_VOCAB,
};
use serde_json::{Map, Value};
use std::path::Path;

/// Context of a config that declares none. The declared length bounds a request, it does not shape the model.
const CONTEXT_UNDECLARED: usize = 1 << 20;

const _: () = assert!(CONTEXT_UNDECLARED <= MAX_CONTEXT);

impl Arch {
    /// Reads `config.json` and, where present, `generation_config.json` of a model directory.
    pub fn read(dir: &Path) -> Result<Arch> {
        let config = read_small(&dir.join("config.json"))?;
        let generation_path = dir.join("generation_config.json");
        let generation = match is_there(&generation_path)? {
            true => Some(read_small(&generation_path)?),
            false => None,
        };
        Arch::parse(&config, generation.as_deref()).map_err(|error| match error {
            CheckpointError::Config { file, field, expected, found } => {
                CheckpointError::Config { file: dir.join(file).display().to_string(), field, expected, found }
            }
            other => other,
        })
    }

    /// Parses the bytes of `config.json` and, where there is one, of `generation_config.json`.
    pub fn parse(config_json: &[u8], generation_config: Option<&[u8]>) -> Result<Arch> {
        let root = object("config.json", config_json)?;
        let config = Fields { file: "config.json", path: String::new(), map: &root };
        match config.map.get("model_type") {
            Some(Value::String(name)) if name == "glm_moe_dsa" => {}
            other => return Err(config.bad("model_type", "\"glm_moe_dsa\"", &shown(other))),
        }
        let mut arch = parse_glm(&config)?;
        let mut stop_ids = stop_ids(&config, arch.vocab)?;
        if let Some(bytes) = generation_config {
            let root = object("generation_config.json", bytes)?;
            let fields = Fields { file: "generation_config.json", path: String::new(), map: &root };
            stop_ids.extend(self::stop_ids(&fields, arch.vocab)?);
        }
        stop_ids.sort_unstable();
        stop_ids.dedup();
        arch.stop_ids = stop_ids;
        Ok(arch)
    }
}

/// The ids that end a turn by the small file that names them: file name and ids, for each file that is there. Ids are as
/// [`Arch::read`] takes them; a file it would refuse is an error.
pub(crate) fn stop_sources(dir: &Path, arch: &Arch) -> Result<Vec<(&'static str, Vec<u32>)>> {
    let mut sources = Vec::new();
    for file in ["config.json", "generation_config.json"] {
        let path = dir.join(file);
        if path.exists() {
            let root = object(file, &read_small(&path)?)?;
            let fields = Fields { file, path: String::new(), map: &root };
            sources.push((file, stop_ids(&fields, arch.vocab)?));
        }
    }
    Ok(sources)
}

/// Reads a small file, refusing one of absurd size before allocating.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>> {
    let bytes = std::fs::metadata(path).map_err(io_error("read", path))?.len();
    if bytes > MAX_SMALL_FILE_BYTES {
        return Err(CheckpointError::Config {
            file: path.display().to_string(),
            field: "length".to_owned(),
            expected: format!("at most {MAX_SMALL_FILE_BYTES} bytes"),
            found: format!("{bytes} bytes"),
        });
    }
    std::fs::read(path).map_err(io_error("read", path))
}

fn parse_glm(config: &Fields) -> Result<Arch> {
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
        attention,
        indexer: Some(indexer),
        moe,
        norm_eps: config.positive("rms_norm_eps")?,
        rope_theta: rope_theta(config)?,
        max_context: config.size_or("max_position_embeddings", 1..=usize::MAX, CONTEXT_UNDECLARED)?.min(MAX_CONTEXT),
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
    let Some(quantization) = config.child("quantization_config")? else {
        return Ok(());
    };
    quantization.only("quant_method", &Value::from("fp8"))?;
    quantization.only("fmt", &Value::from("e4m3"))?;
    if quantization.get("weight_block_size").is_none() {
        return Err(quantization.bad("weight_block_size", "[128,128]", "nothing"));
    }
    quantization.only("weight_block_size", &Value::from(vec![128, 128]))
}

fn parse_attention(config: &Fields) -> Result<AttentionArch> {
    let attention = AttentionArch {
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

fn parse_indexer(config: &Fields, attention: &AttentionArch) -> Result<IndexerArch> {
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
    if !scaling.is_normal() {
        return Err(config.bad("routed_scaling_factor", "a float32", &scaling.to_string()));
    }
    Ok(MoeArch {
        experts,
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

fn rope_theta(config: &Fields) -> Result<f64> {
    let parameters = config.child("rope_parameters")?;
    for fields in [parameters.as_ref(), config.child("rope_scaling")?.as_ref()].into_iter().flatten() {
        for kind in ["rope_type", "type"] {
            fields.only(kind, &Value::from("default"))?;
        }
        for factor in ["partial_rotary_factor", "factor", "attention_factor"] {
            if fields.map.get(factor).is_some_and(|value| value.as_f64() != Some(1.0)) {
                return Err(fields.bad(factor, "1 or nothing", &shown(fields.map.get(factor))));
            }
        }
    }
    match parameters {
        Some(fields) if fields.map.contains_key("rope_theta") => fields.positive("rope_theta"),
        _ if config.map.contains_key("rope_theta") => config.positive("rope_theta"),
        _ => Err(config.bad(
            "rope_parameters.rope_theta",
            "a number there, or in the older top-level rope_theta",
            "nothing",
        )),
    }
}

fn stop_ids(fields: &Fields, vocab: usize) -> Result<Vec<u32>> {
    let id = |value: &Value| match value.as_u64() {
        Some(id) if id < vocab as u64 => Ok(id as u32),
        _ => {
            let expected = format!("token ids below vocab_size ({vocab})");
            Err(fields.bad("eos_token_id", &expected, &shown(Some(value))))
        }
    };
    match fields.map.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(list)) => list.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

fn object(file: &'static str, bytes: &[u8]) -> Result<Map<String, Value>> {
    let bad = |field: &str, found: String| CheckpointError::Config {
        file: file.to_owned(),
        field: field.to_owned(),
        expected: "a JSON object".to_owned(),
        found,
    };
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(other) => Err(bad("JSON", shown(Some(&other)))),
        Err(error) => Err(bad("JSON", error.to_string())),
    }
}

/// A value as a message shows it: short, and never the whole of a hostile file.
fn shown(value: Option<&Value>) -> String {
    const SHOWN: usize = 80;
    let Some(value) = value else {
        return "nothing".to_owned();
    };
    let text = value.to_string();
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text,
    }
}

/// One JSON object of a small file, with what an error needs to say where it is.
struct Fields<'a> {
    file: &'static str,
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    fn bad(&self, field: &str, expected: &str, found: &str) -> CheckpointError {
        CheckpointError::Config {
            file: self.file.to_owned(),
            field: format!("{}{field}", self.path),
            expected: expected.to_owned(),
            found: found.to_owned(),
        }
    }

    /// An explicit null means the same as an absent key.
    fn get(&self, field: &str) -> Option<&'a Value> {
        self.map.get(field).filter(|value| !value.is_null())
    }

    fn size(&self, field: &str, range: std::ops::RangeInclusive<usize>) -> Result<usize> {
        let value = self.get(field);
        match value.and_then(Value::as_u64).and_then(|number| usize::try_from(number).ok()) {
            Some(number) if range.contains(&number) => Ok(number),
            _ => {
                let expected = format!("an integer from {} to {}", range.start(), range.end());
                Err(self.bad(field, &expected, &shown(self.map.get(field))))
            }
        }
    }

    fn size_or(&self, field: &str, range: std::ops::RangeInclusive<usize>, absent: usize) -> Result<usize> {
        if self.get(field).is_none() { Ok(absent) } else { self.size(field, range) }
    }

    /// A size that is a product of others.
    fn within(&self, product: &str, value: usize, most: usize) -> Result<()> {
        if value <= most { Ok(()) } else { Err(self.bad(product, &format!("at most {most}"), &value.to_string())) }
    }

    fn positive(&self, field: &str) -> Result<f64> {
        match self.get(field).and_then(Value::as_f64) {
            Some(number) if number.is_finite() && number > 0.0 => Ok(number),
            _ => Err(self.bad(field, "a positive number", &shown(self.map.get(field)))),
        }
    }

    fn flag(&self, field: &str) -> Result<bool> {
        match self.get(field) {
            Some(Value::Bool(flag)) => Ok(*flag),
            _ => Err(self.bad(field, "true or false", &shown(self.map.get(field)))),
        }
    }

    fn flag_or(&self, field: &str, absent: bool) -> Result<bool> {
        if self.get(field).is_none() { Ok(absent) } else { self.flag(field) }
    }

    fn list(&self, field: &str) -> Result<Option<&'a Vec<Value>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            other => Err(self.bad(field, "a list", &shown(other))),
        }
    }

    fn text(&self, field: &str) -> Result<Option<&'a str>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            other => Err(self.bad(field, "a string", &shown(other))),
        }
    }

    fn child(&self, field: &str) -> Result<Option<Fields<'a>>> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(map)) => {
                Ok(Some(Fields { file: self.file, path: format!("{}{field}.", self.path), map }))
            }
            other => Err(self.bad(field, "an object", &shown(other))),
        }
    }

    /// The value may be absent; if it is there it must be the one that is supported.
    fn only(&self, field: &str, supported: &Value) -> Result<()> {
        match self.get(field) {
            Some(value) if value != supported => Err(self.bad(field, &supported.to_string(), &shown(Some(value)))),
            _ => Ok(()),
        }
    }
}

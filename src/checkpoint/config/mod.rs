//! `config.json` and `generation_config.json` into an [`Arch`]: a file a family, and what all families share.
//!
//! A value that changes the model is read or refused, never defaulted: a missing rotary base or scaling factor gives
//! fluent nonsense, which nobody notices. What may be absent is what the format itself defines a meaning for.
//!
//! What is accepted can be run: every size is held against [`crate::limits`], also those that are products of others,
//! and no product of two of them comes near 2^63, so sizes need no checked arithmetic later.

mod fields;
mod glm_moe_dsa;
mod olmoe;

use super::arch::{Arch, Family};
use super::error::{CheckpointError, Result, io_error, is_there};
use crate::limits::{MAX_CONTEXT, MAX_SMALL_FILE_BYTES, MIN_NORM_EPS, MIN_ROPE_THETA};
use fields::{Fields, shown};
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
        let mut arch = match family(&config)? {
            Family::GlmMoeDsa => glm_moe_dsa::parse(&config)?,
            Family::Olmoe => olmoe::parse(&config)?,
        };
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

/// What the vendor calls a model: the classes of its code, or its type where none is named.
pub(crate) fn vendor_name(dir: &Path) -> Result<String> {
    let root = object("config.json", &read_small(&dir.join("config.json"))?)?;
    let classes = root.get("architectures").and_then(Value::as_array).into_iter().flatten();
    let classes: Vec<&str> = classes.filter_map(Value::as_str).collect();
    let kind = root.get("model_type").and_then(Value::as_str).unwrap_or("unknown");
    Ok(if classes.is_empty() { kind.to_owned() } else { format!("{} ({kind})", classes.join(", ")) })
}

/// Reads a small file, refusing one of absurd size before allocating.
pub(crate) fn read_small(path: &Path) -> Result<Vec<u8>> {
    let metadata = std::fs::metadata(path).map_err(io_error("read", path))?;
    let fault = |field: &str, expected: String, found: String| {
        Err(CheckpointError::Config { file: path.display().to_string(), field: field.to_owned(), expected, found })
    };
    // Opening a pipe would wait for a writer.
    if !metadata.is_file() {
        return fault("kind of file", "a regular file".to_owned(), "something else".to_owned());
    }
    let bytes = metadata.len();
    if bytes > MAX_SMALL_FILE_BYTES {
        return fault("length", format!("at most {MAX_SMALL_FILE_BYTES} bytes"), format!("{bytes} bytes"));
    }
    std::fs::read(path).map_err(io_error("read", path))
}

fn family(config: &Fields) -> Result<Family> {
    let asked = config.map.get("model_type");
    let known = Family::ALL.into_iter().find(|family| asked.and_then(Value::as_str) == Some(family.name()));
    let names = || Family::ALL.map(|family| format!("\"{}\"", family.name())).join(" or ");
    known.ok_or_else(|| config.bad("model_type", &names(), &shown(asked)))
}

/// How the publisher quantized the weights, where that is a way this engine reads.
fn check_quantization(config: &Fields) -> Result<()> {
    let Some(quantization) = config.child("quantization_config")? else {
        return Ok(());
    };
    if quantization.text("quant_method")? == Some("modelopt") {
        return quantization.only("quant_algo", &Value::from("NVFP4"));
    }
    quantization.only("quant_method", &Value::from("fp8"))?;
    quantization.only("fmt", &Value::from("e4m3"))?;
    if quantization.get("weight_block_size").is_none() {
        return Err(quantization.bad("weight_block_size", "[128,128]", "nothing"));
    }
    quantization.only("weight_block_size", &Value::from(vec![128, 128]))
}

fn max_context(config: &Fields) -> Result<usize> {
    Ok(config.size_or("max_position_embeddings", 1..=usize::MAX, CONTEXT_UNDECLARED)?.min(MAX_CONTEXT))
}

fn norm_eps(config: &Fields) -> Result<f64> {
    config.at_least("rms_norm_eps", MIN_NORM_EPS)
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
        Some(fields) if fields.map.contains_key("rope_theta") => fields.at_least("rope_theta", MIN_ROPE_THETA),
        _ if config.map.contains_key("rope_theta") => config.at_least("rope_theta", MIN_ROPE_THETA),
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

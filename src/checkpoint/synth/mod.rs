//! Checkpoints of true shapes with drawn weights, for measuring a model that is not at hand.
//!
//! They are written as a conversion writes its container, so that whatever reads one reads the other. The same options
//! give the same bytes on any machine.

mod tokenizer;
mod weights;

use super::arch::Arch;
use super::convert::{ConvertOptions, Width};
use super::error::{CheckpointError, Result, io_error, is_there};
use super::required::{Required, Role, Shape};
use super::write::layout::{Item, PARAMETERS_KEY};
use super::write::{self, Cancel, Contents, Frees, Progress, Report, SmallFile, Writing, plan};
use super::{Checkpoint, UNFINISHED_NAME};
use crate::kernels::Format;
use millstream_io::FileId;
use serde_json::{Map, Value, json};
use std::fmt;
use std::path::Path;
use std::str::FromStr;
use weights::Generator;

/// What the parameters of a drawn model begin with in its metadata, and those of no conversion.
const PRESET: &str = "preset=";

/// Bytes of a publisher's shard, about.
pub const PUBLISHED_SHARD_BYTES: u64 = 5_000_000_000;

/// A model whose shapes are known: its `config.json`, without an MTP layer and without stop tokens, since drawn weights
/// would end an answer anywhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preset {
    /// What it is called.
    pub name: &'static str,
    config: &'static str,
}

impl Preset {
    /// All of them; the first is the default.
    pub const ALL: [Preset; 3] = [
        Preset { name: "glm-5.2", config: include_str!("presets/glm-5.2.json") },
        Preset { name: "medium", config: include_str!("presets/medium.json") },
        Preset { name: "small", config: include_str!("presets/small.json") },
    ];
}

impl FromStr for Preset {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Preset, String> {
        let names = || Preset::ALL.map(|preset| preset.name).join(", ");
        let found = Preset::ALL.into_iter().find(|preset| preset.name == text);
        found.ok_or_else(|| format!("known are {}", names()))
    }
}

/// How weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// As a conversion to a container does by default.
    Int4,
    /// FP8 with block scales, embeddings and head in BF16, as publishers do: a source for conversions.
    Fp8,
    /// BF16, likewise.
    Bf16,
}

impl Precision {
    const NAMES: [(&'static str, Precision); 3] =
        [("int4", Precision::Int4), ("fp8", Precision::Fp8), ("bf16", Precision::Bf16)];
}

impl FromStr for Precision {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Precision, String> {
        let found = Precision::NAMES.iter().find(|(name, _)| *name == text);
        found.map(|(_, precision)| *precision).ok_or_else(|| "known are int4, fp8, bf16".to_owned())
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Precision::NAMES.iter().find(|(_, precision)| precision == self);
        f.write_str(found.map_or("?", |(name, _)| name))
    }
}

/// What to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SynthOptions {
    /// Whose shapes.
    pub preset: Preset,
    /// Decoder layers; `None` for as many as the model has.
    pub layers: Option<usize>,
    /// Leading layers without experts; `None` for as many as the model has, but at most a third of the layers.
    pub dense_layers: Option<usize>,
    /// Routed experts a layer; `None` for as many as the model has.
    pub experts: Option<usize>,
    /// Whether there is an MTP layer.
    pub mtp: bool,
    /// How weights are stored.
    pub precision: Precision,
    /// Width of attention, dense MLPs and shared experts under [`Precision::Int4`].
    pub dense: Width,
    /// Bytes with which a shard ends as publishers lay it out, behind the tensor that reaches them. Few layers in shards
    /// that are small have what a whole model has: layers that share no shard.
    pub shard_bytes: u64,
    /// Decides the weights.
    pub seed: u64,
    /// Leave the experts' shards as holes, which read as zeros: they take no space, and experts that add nothing.
    pub hollow_experts: bool,
    /// Take the destination to have this many bytes free, instead of asking its file system.
    pub free_bytes: Option<u64>,
    /// Ends the writing early; what was written is removed.
    pub cancel: Option<Cancel>,
}

impl SynthOptions {
    /// The whole of `preset` as a container.
    pub fn new(preset: Preset) -> SynthOptions {
        SynthOptions {
            preset,
            layers: None,
            dense_layers: None,
            experts: None,
            mtp: false,
            precision: Precision::Int4,
            dense: ConvertOptions::default().dense,
            shard_bytes: PUBLISHED_SHARD_BYTES,
            seed: 0,
            hollow_experts: false,
            free_bytes: None,
            cancel: None,
        }
    }

    /// `config.json` of the model.
    fn config(&self) -> Result<Map<String, Value>> {
        let mut config: Map<String, Value> =
            serde_json::from_str(self.preset.config).unwrap_or_else(|e| unreachable!("{}: {e}", self.preset.name));
        let preset = |field: &str| config[field].as_u64().unwrap_or(0) as usize;
        let layers = self.layers.unwrap_or(preset("num_hidden_layers"));
        let dense = self.dense_layers.unwrap_or(preset("first_k_dense_replace").min(layers / 3));
        let experts = self.experts.unwrap_or(preset("n_routed_experts"));
        let chosen = preset("num_experts_per_tok");
        let refuse = |what, expected, found: usize| {
            Err(CheckpointError::SynthOptions { what, expected, found: found.to_string() })
        };
        if dense >= layers {
            let expected = format!("fewer than the {layers} layers, so that one has experts");
            return refuse("leading dense layers", expected, dense);
        }
        if experts < chosen {
            return refuse("routed experts a layer", format!("at least the {chosen} that a token chooses"), experts);
        }
        for (field, value) in [
            ("num_hidden_layers", layers),
            ("first_k_dense_replace", dense),
            ("n_routed_experts", experts),
            ("num_nextn_predict_layers", usize::from(self.mtp)),
        ] {
            config.insert(field.to_owned(), json!(value));
        }
        if self.precision == Precision::Fp8 {
            let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]});
            config.insert("quantization_config".to_owned(), blocks);
        }
        Ok(config)
    }

    fn item(&self, tensor: Required) -> Item {
        let Required { name, shape, role, .. } = tensor;
        let target = match (shape, self.precision, role) {
            (Shape::Vector(_), ..) | (_, _, Role::Exact) => Format::F32,
            (Shape::Matrix { cols, .. }, Precision::Int4, _) => {
                ConvertOptions { dense: self.dense, ..ConvertOptions::default() }.target(role, cols, Format::Bf16)
            }
            (_, Precision::Fp8, Role::Io) | (_, Precision::Bf16, _) => Format::Bf16,
            (_, Precision::Fp8, _) => Format::Fp8Block,
        };
        Item { name, shape, target }
    }

    /// Everything that decides the bytes and is not in the shapes; [`Checkpoint::is_drawn`] knows it by its beginning.
    fn parameters(&self) -> String {
        let SynthOptions { preset, precision, dense, shard_bytes, seed, hollow_experts, .. } = self;
        let shards = match *shard_bytes {
            PUBLISHED_SHARD_BYTES => String::new(),
            other => format!(" shards={other}"),
        };
        format!("{PRESET}{} format={precision} dense={dense}{shards} seed={seed} hollow={hollow_experts}", preset.name)
    }
}

impl Checkpoint {
    /// Whether its weights are drawn, so that what its routers choose was never learned.
    pub fn is_drawn(&self) -> bool {
        let mut files = (0..self.tensors.paths().len() as u32).map(FileId);
        let parameters = files.find_map(|file| self.tensors.metadata(file).get(PARAMETERS_KEY));
        parameters.is_some_and(|parameters| parameters.starts_with(PRESET))
    }
}

/// Writes the model that `options` describe into `dst`, which is made if it is not there and must hold nothing.
///
/// Goes on where the same call was killed. When it fails, nothing that it wrote stays.
pub fn synth(dst: &Path, options: &SynthOptions, progress: &mut dyn FnMut(Progress)) -> Result<Report> {
    let config = options.config()?;
    let config = format!("{:#}\n", Value::Object(config)).into_bytes();
    let arch = Arch::parse(&config, None)?;
    let existed = is_there(dst)?;
    if existed {
        refuse_occupied(dst)?;
    }
    let mut shards = plan::shards(&arch, Checkpoint::required(&arch), &|tensor| Ok(options.item(tensor)))?;
    if options.precision != Precision::Int4 && !options.hollow_experts {
        shards = plan::as_published(shards, options.shard_bytes);
    }
    shards.iter_mut().for_each(|shard| shard.hollow = shard.experts && options.hollow_experts);
    let identity = format!("{:016x}", xxhash_rust::xxh3::xxh3_64(&config));
    let small_files = small_files(config);
    let (parameters, frees) = (options.parameters(), Frees::default());
    let contents = Contents { shards, small_files, identity, parameters, frees };
    let result = Writing::prepare(dst, contents, options.free_bytes, progress).and_then(|writing| {
        let mut weights = Generator::new(options.seed, write::threads());
        let written = writing.run(&mut weights, options.cancel.as_ref(), progress);
        written.inspect_err(|_| writing.discard())
    });
    result.inspect_err(|_| {
        if !existed {
            // Where something is in it, it is not this call's, and it stays.
            let _ = std::fs::remove_dir(dst);
        }
    })
}

fn small_files(config: Vec<u8>) -> Vec<SmallFile> {
    let tokenizer = format!("{:#}\n", tokenizer::byte_level());
    vec![
        ("config.json", config),
        ("tokenizer.json", tokenizer.into_bytes()),
        ("chat_template.jinja", tokenizer::CHAT_TEMPLATE.as_bytes().to_vec()),
    ]
}

/// A directory with something in it is somebody's, unless it is marked as unfinished; whose that is shows later.
fn refuse_occupied(dst: &Path) -> Result<()> {
    if is_there(&dst.join(UNFINISHED_NAME))? {
        return Ok(());
    }
    let mut entries = std::fs::read_dir(dst).map_err(io_error("list", dst))?;
    match entries.next() {
        None => Ok(()),
        Some(entry) => {
            let file = entry.map_err(io_error("list", dst))?.path();
            Err(CheckpointError::ConvertOccupied { dir: dst.to_owned(), file })
        }
    }
}

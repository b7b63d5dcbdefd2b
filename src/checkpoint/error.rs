//! What can be wrong with a checkpoint: values, not prose, so that a caller can show them as it likes.

use crate::kernels::Format;
use millstream_io::IoError;
use std::io;
use std::path::PathBuf;

/// Why a checkpoint was refused, or a conversion stopped. Every variant names the file or directory it is about.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The system refused an operation on a file.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb: `read`, `write`, `rename`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Weights could not be read.
    #[error("{0}")]
    Device(#[from] IoError),
    /// The directory lacks the small files that say what the shards are.
    #[error("{} is not a whole model: {} missing, {shards} weight shard{} found", dir.display(), missing.join(" and "), if *shards == 1 { "" } else { "s" })]
    SmallFilesMissing {
        /// Model directory.
        dir: PathBuf,
        /// Names of the files that are not there.
        missing: Vec<String>,
        /// How many `*.safetensors` files are there.
        shards: usize,
    },
    /// The directory holds no weights.
    #[error("{} holds no *.safetensors file", dir.display())]
    NoShards {
        /// Model directory.
        dir: PathBuf,
    },
    /// Writing into this directory has not finished.
    #[error("{} holds a model that was not written to its end", dir.display())]
    Unfinished {
        /// Model directory.
        dir: PathBuf,
    },
    /// A small JSON file has a value that is absent, of the wrong kind, or not supported.
    #[error("{file}: {field}: expected {expected}, found {found}")]
    Config {
        /// The file: its path, where it was read from one.
        file: String,
        /// Dotted path of the value; `JSON` when the text itself is broken.
        field: String,
        /// What is supported.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A shard's header breaks the safetensors format.
    #[error("{}: {}{what}: expected {expected}, found {found}", file.display(), tensor_prefix(tensor))]
    Header {
        /// The shard.
        file: PathBuf,
        /// The tensor at fault, where it is one.
        tensor: Option<String>,
        /// Which rule is broken.
        what: &'static str,
        /// What the rule asks for.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// Two shards hold a tensor of the same name.
    #[error("tensor {tensor} is in two shards: {} and {}", first.display(), second.display())]
    Duplicate {
        /// Name of the tensor.
        tensor: String,
        /// One shard.
        first: PathBuf,
        /// The other shard.
        second: PathBuf,
    },
    /// The index names shards that are not on disk.
    #[error("{} names {} shard{} that {} not there: {}; incomplete download?", index.display(), missing.len(), if missing.len() == 1 { "" } else { "s" }, if missing.len() == 1 { "is" } else { "are" }, shown(missing))]
    ShardsMissing {
        /// The index file.
        index: PathBuf,
        /// Names of the shards, sorted.
        missing: Vec<String>,
    },
    /// The index maps a tensor to a shard whose header lacks it.
    #[error("{} says that tensor {tensor} is in {}, whose header lacks it ({})", index.display(), shard.display(), elsewhere(found))]
    IndexDiffers {
        /// The index file.
        index: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The shard named by the index.
        shard: PathBuf,
        /// The shard that does hold the tensor.
        found: Option<PathBuf>,
    },
    /// A tensor the model needs is in no shard, nor in the index.
    #[error("tensor {tensor} does not exist in this checkpoint: none of the {shards} shard{} of {} holds it (expected {expected})", if *shards == 1 { "" } else { "s" }, dir.display())]
    TensorMissing {
        /// Model directory.
        dir: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its shape.
        expected: String,
        /// How many shards were searched.
        shards: usize,
    },
    /// A tensor has a type, shape or size that the configuration contradicts.
    #[error("{}: tensor {tensor}: {what}: expected {expected}, found {found}", file.display())]
    Tensor {
        /// The shard.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Which property disagrees.
        what: &'static str,
        /// What the configuration asks for.
        expected: String,
        /// What the shard holds.
        found: String,
    },
    /// A weight in a format that can be converted and not computed with.
    #[error("{}: tensor {tensor}: format: expected one that is computed with, found {format}", file.display())]
    OnlySource {
        /// The shard.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its format.
        format: Format,
    },
    /// A quantized weight without the tensor that scales it.
    #[error("{}: tensor {tensor} is {dtype} and needs the scales {scales} ({expected}), which no shard holds", file.display())]
    ScaleMissing {
        /// The shard of the weight.
        file: PathBuf,
        /// Name of the weight.
        tensor: String,
        /// Its type in the file.
        dtype: String,
        /// Name of the missing tensor.
        scales: String,
        /// Type and shape the scales would have.
        expected: String,
    },
    /// A weight that is not a number, or not finite, cannot be quantized.
    #[error("{}: tensor {tensor}: row {row}, column {col} is {value}, which cannot be quantized", file.display())]
    NotFinite {
        /// The source shard.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Row of the value.
        row: usize,
        /// Column of the value.
        col: usize,
        /// The value.
        value: f32,
    },
    /// The options of a conversion contradict each other or the source.
    #[error("cannot convert: {what}: expected {expected}, found {found}")]
    ConvertOptions {
        /// Which option.
        what: String,
        /// What would work.
        expected: String,
        /// What was asked.
        found: String,
    },
    /// The options of a synthetic model contradict each other.
    #[error("cannot make this model: {what}: expected {expected}, found {found}")]
    SynthOptions {
        /// Which option.
        what: &'static str,
        /// What would work.
        expected: String,
        /// What was asked.
        found: String,
    },
    /// The destination was begun with other parameters, or from another source.
    #[error("{} holds {} container made with other parameters: there `{found}`, asked now `{wanted}`", dir.display(), if *finished { "a finished" } else { "an unfinished" })]
    ConvertDiffers {
        /// Destination directory.
        dir: PathBuf,
        /// Those of the parameters asked for now that differ.
        wanted: String,
        /// Those of what is there that differ.
        found: String,
        /// Whether what is there is whole.
        finished: bool,
        /// What can be done about it.
        way: Way,
    },
    /// Shards of the directory were removed as they were converted.
    #[error("{} is no whole model any more: {gone} of its shards {} removed and converted into {}", dir.display(), if *gone == 1 { "was" } else { "were" }, into.display())]
    Consumed {
        /// Model directory.
        dir: PathBuf,
        /// Where the converted model is.
        into: PathBuf,
        /// How many shards are gone.
        gone: usize,
    },
    /// What is to be written needs shards that were removed as they were converted elsewhere.
    #[error("{shard} cannot be made: {} of {}, removed when {} was made from {}", shown(gone), dir.display(), into.display(), if gone.len() == 1 { "it" } else { "them" })]
    SourceGone {
        /// Source directory.
        dir: PathBuf,
        /// The shard to be written.
        shard: String,
        /// Names of the shards it needs and that are gone.
        gone: Vec<String>,
        /// What was made from them.
        into: PathBuf,
    },
    /// The shards of the source cannot be removed, and were to be.
    #[error("cannot remove shards from {}: {source}", dir.display())]
    SourceKept {
        /// Source directory.
        dir: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The writing was asked to end.
    #[error("writing into {} was interrupted", dir.display())]
    Interrupted {
        /// Destination directory.
        dir: PathBuf,
    },
    /// Somebody else is writing into the destination.
    #[error("another process is writing into {}", dir.display())]
    ConvertBusy {
        /// Destination directory.
        dir: PathBuf,
    },
    /// Somebody else removes the source as it is converted.
    #[error("another process removes the shards of {} as it converts them", dir.display())]
    SourceBusy {
        /// Source directory.
        dir: PathBuf,
    },
    /// The destination holds something that is not of this writing.
    #[error("{} already holds {}, which this command did not write", dir.display(), file.display())]
    ConvertOccupied {
        /// Destination directory.
        dir: PathBuf,
        /// The file in the way.
        file: PathBuf,
    },
    /// What was written is not what the drive gives back.
    #[error("{} reads back otherwise than it was written: {damage}", file.display())]
    ReadBack {
        /// The shard.
        file: PathBuf,
        /// The first run that differs, and how many do.
        damage: String,
        /// Whether it has its name: an earlier run had finished it.
        kept: bool,
    },
    /// What an earlier run stored was made from other weights than the source has, and shards of that were to be removed.
    #[error("{} holds other weights of {run} than {} makes", file.display(), dir.display())]
    OtherWeights {
        /// The shard.
        file: PathBuf,
        /// The first run that differs.
        run: String,
        /// Source directory.
        dir: PathBuf,
    },
    /// The FP8 decoder of this machine gives other values than the format's definition.
    #[error("FP8 self test: code {code:#04x} with the block scale {scale} decodes to {found}, expected {expected}")]
    SelfTest {
        /// The byte.
        code: u8,
        /// The scale of its block.
        scale: f32,
        /// By the definition.
        expected: f32,
        /// What came out.
        found: f32,
    },
    /// The destination's file system has too little room.
    #[error("{} has {available} bytes free; {needed} more are needed", dir.display())]
    NoSpace {
        /// Destination directory.
        dir: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
}

/// What whoever meets a container made with other parameters can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Make another: the source is whole.
    Another,
    /// Nothing but keep it: shards of the source are gone, and it is the only copy of the model.
    Keep,
    /// Compare it with what it was made with.
    Check,
}

impl CheckpointError {
    /// One line on what to do about it.
    pub fn hint(&self) -> &'static str {
        match self {
            CheckpointError::Io { action, source, .. } => io_hint(action, source.kind()),
            CheckpointError::SmallFilesMissing { shards: 0, .. } | CheckpointError::NoShards { .. } => {
                "give the directory that holds the *.safetensors files of the model"
            }
            CheckpointError::SmallFilesMissing { .. } => {
                "copy the small JSON files of the same checkpoint beside the shards"
            }
            CheckpointError::Unfinished { .. } => "run the command that wrote it again: it continues where it stopped",
            CheckpointError::Config { field, found, .. } => config_hint(field, found),
            CheckpointError::Header { .. } => {
                "the shard is damaged or incomplete: fetch it again and compare its checksum"
            }
            CheckpointError::Duplicate { .. } => {
                "two checkpoints are mixed in one directory: move the shards that do not belong"
            }
            CheckpointError::ShardsMissing { .. } => "fetch the missing shards",
            CheckpointError::IndexDiffers { .. } => {
                "shard and index come from different uploads: fetch both again, or remove the index if the shards are right"
            }
            CheckpointError::TensorMissing { .. } => "a shard is missing, or config.json belongs to another model",
            CheckpointError::Tensor { what: "format", .. } => {
                "config.json, the map colibri.fmt in the shard's metadata and the tensor's sizes do not agree: fetch config.json and the shard again, or take the entry out of the map if the sizes are right"
            }
            CheckpointError::Tensor { .. } => {
                "config.json and shards belong to different models, or the shard is damaged"
            }
            CheckpointError::ScaleMissing { .. } => {
                "fetch the shard that holds the scales; raw codes without scales are never used as weights"
            }
            CheckpointError::OnlySource { .. } => "make a container of it with millstream convert, and run that",
            CheckpointError::NotFinite { .. } => "the source shard is damaged: fetch it again",
            CheckpointError::ConvertOptions { .. } | CheckpointError::SynthOptions { .. } => {
                "change the option named above"
            }
            CheckpointError::ConvertDiffers { way: Way::Keep, .. } => {
                "shards of the source were removed as they were converted: keep this directory, it may be the only copy of the model; give the parameters it was made with"
            }
            CheckpointError::ConvertDiffers { way: Way::Check, .. } => {
                "a check needs the flags and the source that the container was made with: give those that are there"
            }
            CheckpointError::ConvertDiffers { finished: true, .. } => {
                "give another destination, or, where its own source is still whole, remove this one"
            }
            CheckpointError::ConvertDiffers { .. } => {
                "give the parameters it was begun with to continue it, or another destination"
            }
            CheckpointError::Consumed { .. } => {
                "give the directory that it was converted into; if that is not finished, the same conversion continues"
            }
            CheckpointError::SourceGone { .. } => {
                "continue the conversion that removed them, into its own destination, or fetch them again"
            }
            CheckpointError::SourceKept { .. } => {
                "leave --delete-source out, or make the directory writable for this user"
            }
            CheckpointError::Interrupted { .. } => "the same command continues",
            CheckpointError::ConvertBusy { .. } => "wait for it to end, or give another destination",
            CheckpointError::SourceBusy { .. } => "wait for it to end: what it makes is the model then",
            CheckpointError::ConvertOccupied { .. } => "give an empty or new directory",
            CheckpointError::Device(IoError::Memory { .. }) => "free memory, or allow this process more of it",
            CheckpointError::Device(IoError::Changed { .. }) => {
                "somebody writes into the source: let that end, then run the same command again"
            }
            CheckpointError::Device(_) => "check the drive's health (dmesg); the same command continues",
            CheckpointError::ReadBack { kept: true, .. } => {
                "the drive is at fault (dmesg), and shards of the source that this was made from are gone: fetch them again, remove this shard and give the same command"
            }
            CheckpointError::ReadBack { .. } => {
                "the drive or the memory is at fault (dmesg): nothing of this shard was kept; the same command writes it again"
            }
            CheckpointError::OtherWeights { .. } => {
                "it was made from another model with the same headers: give another destination; nothing was removed for this shard"
            }
            CheckpointError::SelfTest { .. } => {
                "nothing was converted: the processor or this build of the program is at fault"
            }
            CheckpointError::NoSpace { .. } => "free space, or give a destination on a larger drive",
        }
    }
}

/// What to do about a refusal of the system.
fn io_hint(action: &str, kind: io::ErrorKind) -> &'static str {
    use io::ErrorKind::{
        AlreadyExists, NotADirectory, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull,
    };
    let writes = ["create", "write", "rename", "sync", "remove", "lock"].contains(&action);
    match kind {
        StorageFull | QuotaExceeded => "free space and run the same command again",
        ReadOnlyFilesystem => "the file system is mounted read-only: give another destination",
        PermissionDenied if writes => {
            "permission: this user may not write there; give another destination, or change who may"
        }
        PermissionDenied => "permission: this user may not read it, or not enter a directory above it",
        AlreadyExists | NotADirectory => "a file is where a directory should be: check the path",
        NotFound if writes => "check the path of the destination",
        NotFound => "check the path; in a download cache a dangling link means the file was never fetched",
        _ if writes => "check the drive that is written to (dmesg)",
        _ => "check the drive's health (dmesg)",
    }
}

/// What to do about a small file: fetch it again where it is damaged, and never where it is right but unsupported.
fn config_hint(field: &str, found: &str) -> &'static str {
    const VARIANT: [&str; 7] = [
        "scoring_func",
        "topk_method",
        "hidden_act",
        "attention_bias",
        "moe_layer_freq",
        "rope_interleave",
        "indexer_rope_interleave",
    ];
    const ROPE: [&str; 5] = ["rope_type", "type", "partial_rotary_factor", "factor", "attention_factor"];
    let last = field.rsplit('.').next().unwrap_or(field);
    if ["JSON", "weight_map", "length"].contains(&field) {
        "the file is damaged or cut short: fetch it again"
    } else if found == "nothing" {
        "the file lacks a value that decides what the model is: compare it with the one of the model's publisher"
    } else if field == "model_type" {
        "models of this type are not supported: only those of type glm_moe_dsa and olmoe are"
    } else if field.starts_with("quantization_config.") {
        "this quantization is not supported: only FP8 (e4m3) in blocks of 128 by 128, NVFP4 of modelopt, and none, are"
    } else if field.starts_with("rope_") && ROPE.contains(&last) {
        "this kind of rotary position embedding is not supported: only the default, without scaling, is"
    } else if VARIANT.contains(&field) {
        "this variant of the architecture is not supported"
    } else {
        "the value is damaged, or outside what this release supports: compare it with the one of the model's publisher"
    }
}

/// Shorthand of this layer.
pub type Result<T> = std::result::Result<T, CheckpointError>;

/// Whether something is at `path`. That it cannot be looked at is an error, not an absence.
pub(crate) fn is_there(path: &std::path::Path) -> Result<bool> {
    path.try_exists().map_err(io_error("look at", path))
}

pub(crate) fn io_error<'a>(
    action: &'static str,
    path: &'a std::path::Path,
) -> impl FnOnce(io::Error) -> CheckpointError + 'a {
    move |source| CheckpointError::Io { action, path: path.to_owned(), source }
}

fn tensor_prefix(tensor: &Option<String>) -> String {
    tensor.as_ref().map(|name| format!("tensor {name}: ")).unwrap_or_default()
}

fn elsewhere(found: &Option<PathBuf>) -> String {
    match found {
        Some(path) => format!("it is in {}", path.display()),
        None => "nor does any other shard hold it".to_owned(),
    }
}

fn shown(names: &[String]) -> String {
    const SHOWN: usize = 8;
    if names.len() <= SHOWN {
        return names.join(", ");
    }
    format!("{} and {} more", names[..SHOWN].join(", "), names.len() - SHOWN)
}

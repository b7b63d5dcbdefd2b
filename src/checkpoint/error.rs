//! What can be wrong with a checkpoint: values, not prose, so that a caller can show them as it likes.

use super::finite::Shown;
use super::verify::Damage;
use crate::kernels::Format;
use crate::limits::WEIGHT_BELOW;
use crate::size;
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
    #[error("tensor {tensor} does not exist in this checkpoint: none of the {shards} shard{} of {} holds it (expected {expected}){}", if *shards == 1 { "" } else { "s" }, dir.display(), not_there(absent))]
    TensorMissing {
        /// Model directory.
        dir: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its shape.
        expected: String,
        /// How many shards were searched.
        shards: usize,
        /// Names of shards that are not there, by the numbers of those that are.
        absent: Vec<String>,
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
    /// A weight that would be kept as it is, is not finite or too large.
    #[error(transparent)]
    Spoilt(#[from] super::finite::BadNumber),
    /// A weight that is not finite or too large cannot be quantized.
    #[error("{}: tensor {tensor}: row {row}, column {col} is {}, which is not quantized{}", file.display(), Shown(*value), if value.is_finite() { format!(": weights are below {WEIGHT_BELOW}") } else { String::new() })]
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
    /// A weight is quantized already, and was to be quantized again.
    #[error("{}: tensor {tensor}: it is {format} already, and cannot be made {target}", file.display())]
    Quantized {
        /// The source shard.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its format.
        format: Format,
        /// What was asked for.
        target: Format,
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
        /// Whether that is where the shard is to be written, and was, and is not there any more.
        is_here: bool,
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
    /// What was just written is not what the drive gives back.
    #[error("{} reads back otherwise than it was written: {damage}", file.display())]
    ReadBack {
        /// The shard.
        file: PathBuf,
        /// The first run that differs, and how many do.
        damage: String,
    },
    /// What was read of a source is not as its checksums say.
    #[error("the source is damaged: {damage}{}", if *others > 0 { format!("; and {others} more") } else { String::new() })]
    SourceDamaged {
        /// The first run that differs.
        damage: Box<Damage>,
        /// How many others are known to differ.
        others: usize,
        /// Whether no shard of the source is gone.
        is_whole: bool,
    },
    /// A shard of the destination, finished by an earlier run, is not as it was written.
    #[error("{} is damaged: {damage}{}", file.display(), made_from(gone))]
    Damaged {
        /// The shard.
        file: PathBuf,
        /// The first thing that differs.
        damage: String,
        /// Names of the shards of the source that it was made from and that are gone.
        gone: Vec<String>,
    },
    /// The record of a source whose shards were removed cannot be used.
    #[error("{}: expected {expected}, found {found}", file.display())]
    Record {
        /// The record.
        file: PathBuf,
        /// What it has to be.
        expected: String,
        /// What it is.
        found: String,
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
    #[error("{} has {} free and {} are needed: {} too few", dir.display(), size::show(*available), size::show(*needed), size::show(needed.saturating_sub(*available)))]
    NoSpace {
        /// Destination directory.
        dir: PathBuf,
        /// The most bytes that what is still to be written takes at any time.
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

fn not_there(absent: &[String]) -> String {
    let verb = if absent.len() == 1 { "is" } else { "are" };
    if absent.is_empty() { String::new() } else { format!("; {} {verb} not there", shown(absent)) }
}

fn made_from(gone: &[String]) -> String {
    let verb = if gone.len() == 1 { "is" } else { "are" };
    if gone.is_empty() { String::new() } else { format!("; {}, which it was made from, {verb} gone", shown(gone)) }
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

//! From a vendor's checkpoint, or a container, to a container laid out for direct reads.

mod options;
mod plan;
mod selftest;
mod source;
mod weights;
mod widths;

pub use options::{ConvertOptions, Width};
pub(crate) use weights::{Rows, encode_row, rows_of};
pub use widths::Widths;

use super::consumed::{Lock, RECORD_NAME, Record};
use super::error::{CheckpointError, Result, Way, is_there};
use super::write::layout::ShardLayout;
use super::write::{self, Contents, Frees, SmallFile, Weights, Writing};
pub use super::write::{Cancel, Counts, Progress, Report as ConvertReport};
use super::{Checkpoint, config, refuse_unfinished, tensors};
use crate::kernels::Format;
use source::Source;
use std::path::Path;
use weights::Encoder;

/// Files beside the shards that belong to the model and are copied with it.
const COPIED: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "LICENSE",
];

/// Converts the model in `src` into a container in `dst`, which is made if it is not there.
///
/// Continues a conversion of the same source and parameters, also one that removed shards of the source; refuses a
/// directory that holds anything else. On an error the finished shards stay, and the same call goes on from them.
pub fn convert(
    src: &Path,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    options.check()?;
    refuse_unfinished(src)?;
    // Taken before anything is said of which shards are there.
    let _lock = lock(src, options)?;
    let record = Record::read(src)?;
    let remembered = record.as_ref().map(Record::headers).unwrap_or_default();
    let source = Checkpoint::open_remembering(src, &["config.json"], &remembered)?;
    convert_source(&source, record, dst, options, progress)
}

/// As [`convert`], from a checkpoint that is open already.
pub fn convert_opened(
    source: &Checkpoint,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    options.check()?;
    let _lock = lock(&source.dir, options)?;
    convert_source(source, None, dst, options, progress)
}

/// What a source is held with while its shards are removed.
fn lock(src: &Path, options: &ConvertOptions) -> Result<Option<Lock>> {
    options.delete_source.then(|| Lock::take(src)).transpose()
}

/// What a check of a finished conversion found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verified {
    /// Shards of the container.
    pub shards: usize,
    /// Bytes that were read of them.
    pub bytes: u64,
    /// Whether they were read around the page cache.
    pub direct: bool,
    /// Whether every weight was made again from the source and compared; else the source is gone, in part or whole, and
    /// there were only checksums to hold the container against.
    pub from_source: bool,
    /// What differs: one line for each shard that the drive gives back otherwise than it was written, or that holds
    /// other weights than the source makes.
    pub damage: Vec<String>,
}

/// Reads a finished conversion again, compares it with its checksums, and those with what the source, where it is still
/// there, is converted to now. Nothing is written.
pub fn verify(
    src: &Path,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<Verified> {
    options.check()?;
    refuse_unfinished(src)?;
    refuse_unfinished(dst)?;
    let record = Record::read(src)?;
    if record.is_none() && (!is_there(src)? || tensors::shard_paths(src)?.is_empty()) {
        let (shards, run) = write::check_alone(dst, options.cancel.as_ref(), progress)?;
        return Ok(verified(shards, run, false));
    }
    let remembered = record.as_ref().map(Record::headers).unwrap_or_default();
    let checkpoint = Checkpoint::open_remembering(src, &["config.json"], &remembered)?;
    let source = Source::new(&checkpoint, record)?;
    let contents = Contents {
        shards: plan::shards(&checkpoint, options)?,
        small_files: small_files(&checkpoint.dir)?,
        identity: source.identity(),
        parameters: options.parameters(),
        frees: Frees::default(),
    };
    let shards = contents.shards.len();
    let whole = source.is_whole();
    if whole && checkpoint.formats().any(|format| format == Format::Fp8Block) {
        selftest::fp8()?;
    }
    let mut encoder = Encoder::new(&checkpoint.tensors, None);
    let weights: Option<&mut dyn Weights> = if whole { Some(&mut encoder) } else { None };
    let checked = write::check(dst, contents, weights, options.cancel.as_ref(), progress);
    let checked = checked.map_err(|error| other_way(error, Way::Check))?;
    Ok(verified(shards, checked, whole))
}

fn other_way(error: CheckpointError, way: Way) -> CheckpointError {
    match error {
        CheckpointError::ConvertDiffers { dir, wanted, found, finished, .. } => {
            CheckpointError::ConvertDiffers { dir, wanted, found, finished, way }
        }
        other => other,
    }
}

fn verified(shards: usize, checked: write::Checked, from_source: bool) -> Verified {
    let write::Checked { bytes, direct, damage } = checked;
    Verified { shards, bytes, direct, from_source, damage }
}

fn convert_source(
    checkpoint: &Checkpoint,
    record: Option<Record>,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    if checkpoint.formats().any(|format| format == Format::Fp8Block) {
        selftest::fp8()?;
    }
    let shards = plan::shards(checkpoint, options)?;
    let source = Source::new(checkpoint, record)?;
    let needs = source.needs(&shards)?;
    checkpoint.notes().iter().for_each(|note| progress(Progress::Note(note.clone())));
    let consume = if options.delete_source { Some(source.consume(dst, &shards, &needs)?) } else { None };
    // With the record of what it was before, nobody would take the result for a model, nor find all of the other's shards.
    let file = dst.join(RECORD_NAME);
    if is_there(&file)? {
        return Err(CheckpointError::ConvertOccupied { dir: dst.to_owned(), file });
    }
    let kept = consume.as_ref().map(|consume| consume.kept.clone()).unwrap_or_default();
    for (shard, reason) in &kept {
        progress(Progress::Note(format!("{shard} of the source stays: {reason}")));
    }
    let contents = Contents {
        shards,
        small_files: small_files(&checkpoint.dir)?,
        identity: source.identity(),
        parameters: options.parameters(),
        frees: consume.as_ref().map(|consume| consume.frees.clone()).unwrap_or_default(),
    };
    let writing = Writing::prepare(dst, contents, options.free_bytes, progress);
    let writing = writing.map_err(|error| if source.is_whole() { error } else { other_way(error, Way::Keep) })?;
    source.check_whole(&writing, &needs)?;
    if consume.is_some() {
        source.remember(dst)?;
    }
    let mut encoder = Encoder::new(&checkpoint.tensors, consume);
    let report = writing.run(&mut encoder, options.cancel.as_ref(), progress)?;
    let (source_shards_removed, source_bytes_removed) = encoder.removed();
    let source_shards_kept = kept.into_iter().map(|(shard, _)| shard).collect();
    Ok(ConvertReport { source_shards_removed, source_bytes_removed, source_shards_kept, ..report })
}

/// How large a conversion's result would be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Bytes of weights and their scales.
    pub weight_bytes: u64,
    /// Bytes of the shards: headers and padding too.
    pub file_bytes: u64,
}

/// Sums up what a conversion would write. Refuses the weights and widths that it would refuse.
pub fn planned(source: &Checkpoint, options: &ConvertOptions) -> Result<Planned> {
    options.check()?;
    let shards = plan::shards(source, options)?;
    let items = shards.iter().flat_map(|shard| &shard.runs).flat_map(|run| &run.items);
    Ok(Planned {
        weight_bytes: items.map(|item| item.data_bytes() + 4 * item.scale_count()).sum(),
        file_bytes: shards.iter().map(|shard| ShardLayout::new(shard, "", "").file_bytes).sum(),
    })
}

fn small_files(dir: &Path) -> Result<Vec<SmallFile>> {
    let mut files = Vec::new();
    for name in COPIED {
        let path = dir.join(name);
        if is_there(&path)? {
            files.push((name, config::read_small(&path)?));
        }
    }
    Ok(files)
}

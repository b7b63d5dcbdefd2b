//! From a vendor's checkpoint, or a container, to a container laid out for direct reads.

mod options;
mod plan;
mod selftest;
mod source;
mod stamps;
mod sums;
mod weights;
mod widths;

pub use options::{ConvertOptions, Width};
pub(crate) use weights::{Rows, rows_of};
pub use widths::Widths;

use super::consumed::{Lock, RECORD_NAME, Record};
use super::error::{CheckpointError, Result, Way, is_there};
use super::write::layout::{ShardLayout, ShardPlan};
use super::write::{self, Contents, Frees, Proof, SmallFile, Weights, Writing};
pub use super::write::{Cancel, Counts, PlanLine, Progress, Report as ConvertReport};
use super::{Checkpoint, config, refuse_unfinished, tensors};
use crate::kernels::{Format, Kernels};
use millstream_io::FileId;
use source::{Consume, Source};
use stamps::{STAMPS_NAME, Stamps};
use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use weights::{Earlier, Encoder};

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
    let planned = plan::shards(&checkpoint, options)?;
    let context =
        Context { names: names(&planned), gone: source.gone(&source.needs(&planned)?), way: Some(Way::Check) };
    let contents = Contents {
        shards: planned,
        small_files: small_files(&checkpoint.dir)?,
        identity: source.identity(),
        parameters: options.parameters(),
        frees: Frees::default(),
    };
    let shards = contents.shards.len();
    let (whole, kernels) = (source.is_whole(), Kernels::best());
    if whole && checkpoint.formats().any(|format| format == Format::Fp8Block) {
        selftest::fp8(kernels)?;
    }
    let mut encoder = Encoder::new(&checkpoint, Earlier::default(), None, kernels)?;
    let weights: Option<&mut dyn Weights> = if whole { Some(&mut encoder) } else { None };
    let checked = write::check(dst, contents, weights, options.cancel.as_ref(), progress);
    Ok(verified(shards, checked.map_err(|error| context.tell(error))?, whole))
}

/// What an error about the destination cannot know by itself.
struct Context {
    /// File names of the shards of the container.
    names: Vec<String>,
    /// Shards of the source that each is made from and that are gone.
    gone: Vec<Vec<String>>,
    /// What can be done about other parameters, where that is not to make another container.
    way: Option<Way>,
}

impl Context {
    fn tell(&self, error: CheckpointError) -> CheckpointError {
        match (error, self.way) {
            (CheckpointError::ConvertDiffers { dir, wanted, found, finished, .. }, Some(way)) => {
                CheckpointError::ConvertDiffers { dir, wanted, found, finished, way }
            }
            (CheckpointError::Damaged { file, damage, .. }, _) => {
                let number = self.names.iter().position(|name| file.ends_with(name));
                let gone = number.map(|number| self.gone[number].clone()).unwrap_or_default();
                CheckpointError::Damaged { file, damage, gone }
            }
            (other, _) => other,
        }
    }
}

fn names(shards: &[ShardPlan]) -> Vec<String> {
    shards.iter().map(|shard| shard.file_name.clone()).collect()
}

fn verified(shards: usize, checked: write::Checked, from_source: bool) -> Verified {
    let write::Checked { bytes, direct, damage } = checked;
    Verified { shards, bytes, direct, from_source, damage }
}

/// Refuses the source as the destination, before a hint about what stands there tells to remove it.
fn refuse_itself(src: &Path, dst: &Path) -> Result<()> {
    match (std::fs::canonicalize(src), std::fs::canonicalize(dst)) {
        (Ok(here), Ok(there)) if here == there => Err(CheckpointError::ConvertOptions {
            what: "the destination".to_owned(),
            expected: "a directory that is not the source".to_owned(),
            found: format!("{} for both", dst.display()),
        }),
        _ => Ok(()),
    }
}

fn convert_source(
    checkpoint: &Checkpoint,
    record: Option<Record>,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    let was_there = is_there(dst)?;
    let made = make(checkpoint, record, dst, options, progress);
    if made.is_err() && !was_there {
        // Only where it is empty: a directory that nothing came of is no model to be looked at.
        let _ = fs::remove_dir(dst);
    }
    made
}

fn make(
    checkpoint: &Checkpoint,
    record: Option<Record>,
    dst: &Path,
    options: &ConvertOptions,
    progress: &mut dyn FnMut(Progress),
) -> Result<ConvertReport> {
    // What removes the source as it goes says so itself.
    if !options.delete_source {
        refuse_itself(&checkpoint.dir, dst)?;
    }
    let kernels = Kernels::best();
    if checkpoint.formats().any(|format| format == Format::Fp8Block) {
        selftest::fp8(kernels)?;
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
    let stay = consume.as_ref().map(|consume| consume.kept.clone()).unwrap_or_default();
    for (shard, reason) in &stay {
        progress(Progress::Note(format!("{shard} of the source stays: {reason}")));
    }
    if consume.is_some() {
        sums::check(checkpoint, dst, &|file| source.is_gone(file), options.cancel.as_ref(), progress)?;
    }
    let way = if source.is_whole() { None } else { Some(Way::Keep) };
    let context = Context { names: names(&shards), gone: source.gone(&needs), way };
    let contents = Contents {
        shards,
        small_files: small_files(&checkpoint.dir)?,
        identity: source.identity(),
        parameters: options.parameters(),
        frees: consume.as_ref().map(|consume| consume.frees.clone()).unwrap_or_default(),
    };
    let writing = Writing::prepare(dst, contents, options.free_bytes, progress).map_err(|error| context.tell(error))?;
    source.check_whole(&writing, &needs)?;
    // What cannot be removed ends it before anything is left in the destination.
    if consume.is_some() {
        source.remember(dst)?;
    }
    let proofs = stamped_proofs(&source, &writing, &needs, consume.as_ref())?;
    let mut encoder = Encoder::new(checkpoint, Earlier { proofs, gone: context.gone }, consume, kernels)?;
    let report = writing.run(&mut encoder, options.cancel.as_ref(), progress)?;
    if options.delete_source {
        // What it is about has gone.
        writing.destination().remove_small(STAMPS_NAME)?;
    }
    let (source_shards_removed, source_bytes_removed) = encoder.removed();
    let source_shards_kept = stay.into_iter().map(|(shard, _)| shard).collect();
    Ok(ConvertReport { source_shards_removed, source_bytes_removed, source_shards_kept, ..report })
}

/// How what an earlier run finished is proved, and the stamps of the source left beside it while they are those of all
/// that was made from it.
fn stamped_proofs(
    source: &Source,
    writing: &Writing,
    needs: &[BTreeSet<FileId>],
    consume: Option<&Consume>,
) -> Result<Vec<Proof>> {
    let (earlier, now) = (Stamps::read(writing.destination().dir()), source.stamps()?);
    let is_same = |path: &Path| now.agree(&earlier, path);
    let proofs = source.proofs(needs, consume, &is_same);
    if writing.is_new() {
        writing.destination().write_small(STAMPS_NAME, &now.bytes())?;
    } else if !source.all_here(&is_same) {
        // What is written now comes from other files than what is there.
        writing.destination().remove_small(STAMPS_NAME)?;
    }
    Ok(proofs)
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

//! Checksums of a container that is to be repacked.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;

use millstream_io::FileId;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::verify::{HashedRun, Manifest};
use crate::checkpoint::write::Progress;
use crate::checkpoint::write::readback::compare_runs;

/// Compares the shards of a container that are there with their checksums, before anything is made of them: what is copied gets
/// checksums of its own, by which damage would be whole. A raised `cancel` ends it early.
pub fn check(
    checkpoint: &Checkpoint,
    is_gone: &dyn Fn(FileId) -> bool,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let mut shards: BTreeMap<FileId, Vec<HashedRun>> = BTreeMap::new();
    for run in Manifest::read(checkpoint)?.runs {
        if !is_gone(run.span.file) {
            shards.entry(run.span.file).or_default().push(run);
        }
    }
    if !shards.is_empty() {
        let count = shards.len();
        progress(Progress::Note(format!(
            "{count} shards of the source are read first and held against their checksums"
        )));
    }
    for (file, runs) in shards {
        let path = checkpoint.tensors.path(file);
        compare_runs(path, runs, cancel, &mut |_| {}).map_err(|error| match error {
            CheckpointError::ReadBack { file, damage } => CheckpointError::SourceDamaged { file, damage },
            other => other,
        })?;
    }
    Ok(())
}

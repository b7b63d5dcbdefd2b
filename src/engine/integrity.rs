//! What of a container is compared with its checksums, and when.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use millstream_io::{FileId, FileSet, SlabPool};

use super::{EngineConfig, EngineError, OpenDevice, Verify};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::verify::{self, HashedRun, Manifest};
use crate::store::{Checks, ExpertKey, ExpertTable};

/// Slabs of the check of resident weights: enough that one is read while another is hashed, on any budget.
const SLABS: usize = 2;

/// The checks of the reads of the experts in `table`, and a line where an explicit wish cannot be met. Where every read is
/// to be checked, the resident weights are checked here, before they are loaded.
pub(super) fn prepare(
    config: &EngineConfig,
    checkpoint: &Checkpoint,
    files: &Arc<FileSet>,
    table: &ExpertTable,
    device: OpenDevice,
    cancel: &AtomicBool,
) -> Result<(Checks, Option<String>), EngineError> {
    if config.verify == Verify::Off {
        return Ok((Checks::off(), None));
    }
    let manifest = Manifest::read(checkpoint)?;
    if manifest.is_empty() {
        let note = "the model has no checksums, so nothing is verified: millstream convert writes them";
        return Ok((Checks::off(), (config.verify == Verify::All).then(|| note.to_owned())));
    }
    let experts: HashMap<ExpertKey, &HashedRun> =
        manifest.runs.iter().filter_map(|run| Some((key(run)?, run))).collect();
    let expected = |key| experts.get(&key).map(|run| (run.span, run.hash));
    let (checks, unchecked) = Checks::new(table, config.verify, config.verify_seed, files.clone(), expected);
    if config.verify != Verify::All {
        return Ok((checks, None));
    }
    let layers = checkpoint.arch.layers.len();
    let is_loaded = |run: &&HashedRun| run.expert.is_none() && (config.loads_mtp() || run.layer != Some(layers));
    let resident: Vec<HashedRun> = manifest.runs.iter().filter(is_loaded).cloned().collect();
    check_resident(&resident, files, device, cancel)?;
    let note = (unchecked > 0).then(|| format!("{unchecked} of {} experts have no checksum", table.experts()));
    Ok((checks, note))
}

fn key(run: &HashedRun) -> Option<ExpertKey> {
    Some(ExpertKey { layer: u16::try_from(run.layer?).ok()?, expert: u16::try_from(run.expert?).ok()? })
}

/// Checks the model's own files, which is where resident weights are loaded from: a mirror must not vouch for them.
fn check_resident(
    runs: &[HashedRun],
    files: &Arc<FileSet>,
    device: OpenDevice,
    cancel: &AtomicBool,
) -> Result<(), EngineError> {
    if runs.is_empty() {
        return Ok(());
    }
    let paths: Vec<PathBuf> = (0..files.len() as u32).map(|file| files.path(FileId(file)).to_owned()).collect();
    let own = if files.drives() > 1 { Arc::new(FileSet::open(&paths, files.mode())?) } else { files.clone() };
    let files = &own;
    let pool: SlabPool = verify::pool_for(runs, files, SLABS)?;
    let mut device = device(files, &pool)?;
    let report = verify::check(runs, files, &pool, &mut *device, 1, cancel, &mut |_| {})?;
    match report.damage.into_iter().next() {
        Some(damage) => Err(EngineError::Damaged(Box::new(damage))),
        None if report.interrupted => Err(EngineError::Cancelled),
        None => Ok(()),
    }
}

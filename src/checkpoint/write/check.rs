//! A finished container, held against its checksums and against what it was made from.

use super::layout::{HASHES_KEY, ShardLayout, ShardPlan};
use super::{Cancel, Contents, Counts, PROGRESS_BYTES, Progress, Weights, Writing, readback, shard};
use crate::checkpoint::Checkpoint;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::tensors::{TensorInfo, shard_paths};
use crate::checkpoint::verify::{HashedRun, Manifest};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checked {
    /// Bytes read of the container.
    pub bytes: u64,
    /// Whether all of them came around the page cache.
    pub direct: bool,
    /// A line for each shard that is not as it should be.
    pub damage: Vec<String>,
}

/// Reads every shard of the container in `dst`, which must hold all of `contents`, and compares it with its checksums;
/// with `weights`, makes every run again and compares its checksum too.
pub(crate) fn check(
    dst: &Path,
    contents: Contents,
    mut weights: Option<&mut dyn Weights>,
    cancel: Option<&Cancel>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Checked> {
    if !dst.is_dir() {
        return Err(CheckpointError::NoShards { dir: dst.to_owned() });
    }
    let writing = Writing::look(dst, contents, progress)?;
    if writing.missing().next().is_some() {
        return Err(CheckpointError::Unfinished { dir: dst.to_owned() });
    }
    // Everything is read, and with weights everything is made as well.
    let times = 1 + u64::from(weights.is_some());
    let taken = weights.as_ref().map(|weights| weights.taken()).unwrap_or_default();
    let mut pass = Pass::new(dst, times * writing.bytes_stored, taken, cancel, progress);
    for ((shard, layout), kept) in writing.shards.iter().zip(&writing.layouts).zip(&writing.kept) {
        let Some(hashes) = kept else { continue };
        pass.read(&dst.join(&shard.file_name), layout, hashes)?;
        if let Some(weights) = &mut weights {
            pass.make(shard, layout, hashes, &mut **weights)?;
        }
    }
    pass.report();
    Ok(pass.checked)
}

/// Reads every shard of the container in `dst` and compares it with its checksums, which is all there is where the source
/// is gone. Returns how many shards there are too.
pub(crate) fn check_alone(
    dst: &Path,
    cancel: Option<&Cancel>,
    progress: &mut dyn FnMut(Progress),
) -> Result<(usize, Checked)> {
    let container = match Checkpoint::open_with(dst, &["config.json"]) {
        // Nobody fetches again what was made here.
        Err(error @ CheckpointError::Header { .. }) => {
            let checked = Checked { damage: vec![error.to_string()], ..Checked::default() };
            return Ok((shard_paths(dst)?.len(), checked));
        }
        opened => opened?,
    };
    let manifest = Manifest::read(&container)?;
    let paths = container.tensors.paths();
    if manifest.is_empty() {
        return Err(CheckpointError::Header {
            file: paths[0].clone(),
            tensor: None,
            what: "metadata",
            expected: format!("{HASHES_KEY}, the checksums of a conversion"),
            found: "none".to_owned(),
        });
    }
    let mut pass = Pass::new(dst, manifest.bytes(), Arc::default(), cancel, progress);
    for (file, path) in paths.iter().enumerate() {
        let runs: Vec<HashedRun> =
            manifest.runs.iter().filter(|run| run.span.file.0 as usize == file).cloned().collect();
        let uncovered = uncovered(&container, file, &runs);
        if let Some(first) = uncovered.first() {
            let more = if uncovered.len() == 1 { String::new() } else { format!(" and {} more", uncovered.len() - 1) };
            let line = format!("{}: no checksum covers {first}{more}", path.display());
            pass.checked.damage.push(line);
        }
        pass.runs(path, runs)?;
    }
    pass.report();
    Ok((paths.len(), pass.checked))
}

/// Names of the tensors of a file that are in none of these runs of it.
fn uncovered<'a>(container: &'a Checkpoint, file: usize, runs: &[HashedRun]) -> Vec<&'a str> {
    let covered = |tensor: &TensorInfo| {
        let (begin, end) = (tensor.offset, tensor.offset + tensor.bytes);
        let next = runs.partition_point(|run| run.span.offset <= begin);
        runs[..next].last().is_some_and(|run| end <= run.span.offset + run.span.len)
    };
    let tensors = container.tensors.iter().filter(|(_, tensor)| tensor.file.0 as usize == file);
    let mut names: Vec<&str> = tensors.filter(|(_, tensor)| !covered(tensor)).map(|(name, _)| name).collect();
    names.sort_unstable();
    names
}

struct Pass<'a> {
    dst: &'a Path,
    cancel: Arc<AtomicBool>,
    taken: Arc<AtomicU64>,
    counts: Counts,
    reported: u64,
    progress: &'a mut dyn FnMut(Progress),
    checked: Checked,
}

impl<'a> Pass<'a> {
    fn new(
        dst: &'a Path,
        of: u64,
        taken: Arc<AtomicU64>,
        cancel: Option<&Cancel>,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Pass<'a> {
        let counts = Counts { of, left: of, ..Counts::default() };
        let cancel = cancel.map(|cancel| Arc::clone(&cancel.0)).unwrap_or_default();
        Pass {
            dst,
            cancel,
            taken,
            counts,
            reported: 0,
            progress,
            checked: Checked { direct: true, ..Checked::default() },
        }
    }

    fn read(&mut self, path: &Path, layout: &ShardLayout, hashes: &[u64]) -> Result<()> {
        self.runs(path, readback::runs(layout, hashes))
    }

    fn runs(&mut self, path: &Path, runs: Vec<HashedRun>) -> Result<()> {
        let cancel = Arc::clone(&self.cancel);
        match readback::compare_runs(path, runs, &cancel, &mut |bytes| {
            self.counts.checked += bytes;
            self.checked.bytes += bytes;
            self.add(bytes);
        }) {
            Ok(Some(direct)) => self.checked.direct &= direct,
            Ok(None) => return Err(self.interrupted()),
            Err(error @ CheckpointError::ReadBack { .. }) => self.checked.damage.push(error.to_string()),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    fn make(
        &mut self,
        plan: &ShardPlan,
        layout: &ShardLayout,
        hashes: &[u64],
        weights: &mut dyn Weights,
    ) -> Result<()> {
        let cancel = Arc::clone(&self.cancel);
        let made = shard::hashes(plan, layout, weights, &mut |bytes| {
            self.add(bytes);
            if cancel.load(Ordering::Relaxed) { Err(self.interrupted()) } else { Ok(()) }
        })?;
        let differ: Vec<&String> = layout
            .run_names()
            .iter()
            .zip(hashes.iter().zip(&made))
            .filter(|(_, (stored, made))| stored != made)
            .map(|(name, _)| name)
            .collect();
        if let Some(first) = differ.first() {
            let (file, count) = (self.dst.join(&plan.file_name), differ.len());
            let more = if count == 1 { String::new() } else { format!(" and {} more", count - 1) };
            let line = format!("{}: the source makes other weights of {first}{more} than are stored", file.display());
            self.checked.damage.push(line);
        }
        Ok(())
    }

    fn add(&mut self, bytes: u64) {
        self.counts.done += bytes;
        self.counts.left = self.counts.left.saturating_sub(bytes);
        if self.counts.done - self.reported >= PROGRESS_BYTES {
            self.report();
        }
    }

    fn report(&mut self) {
        self.counts.taken = self.taken.load(Ordering::Relaxed);
        self.reported = self.counts.done;
        (self.progress)(Progress::Bytes(self.counts));
    }

    fn interrupted(&self) -> CheckpointError {
        CheckpointError::Interrupted { dir: self.dst.to_owned() }
    }
}

//! What was written, as the drive gives it back.
//!
//! That a write succeeded says that the kernel took the bytes. A shard is therefore read once more before it gets its
//! name, around the page cache where the file system reads directly: then the bytes come from the drive, or its own
//! cache, and not from the memory they were written from.

use super::layout::ShardLayout;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::verify::{self, Damage, Fault, HashedRun};
use crate::limits::{CHECK_SLAB_BYTES_MAX, CHECK_WORKERS_MAX, READ_BACK_SLABS};
use millstream_io::{Access, DeviceConfig, FileId, FileSet, FileSpan, IoError, IoMode, leave, open_device};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use xxhash_rust::xxh3::Xxh3;

/// Reads the runs of the shard at `path` and compares them with `hashes`. Returns whether the reads went around the page
/// cache; `None` when `cancel` ended it. `checked` is told bytes as they are read.
pub(crate) fn compare(
    path: &Path,
    layout: &ShardLayout,
    hashes: &[u64],
    cancel: &AtomicBool,
    checked: &mut dyn FnMut(u64),
) -> Result<Option<bool>> {
    compare_runs(path, runs(layout, hashes), cancel, checked)
}

/// The runs of a shard, as file 0 of a set of one.
pub(crate) fn runs(layout: &ShardLayout, hashes: &[u64]) -> Vec<HashedRun> {
    let placed = layout.runs.iter().zip(layout.run_names()).zip(hashes);
    placed
        .map(|((run, name), &hash)| HashedRun {
            name: name.clone(),
            layer: None,
            expert: None,
            span: FileSpan { file: FileId(0), offset: run.offset, len: run.bytes },
            bytes: run.bytes - run.padding(),
            hash,
        })
        .collect()
}

/// As [`compare`], for runs of the file at `path`, whatever file they say.
pub(crate) fn compare_runs(
    path: &Path,
    runs: Vec<HashedRun>,
    cancel: &AtomicBool,
    checked: &mut dyn FnMut(u64),
) -> Result<Option<bool>> {
    let (direct, damage) = damage_of(path, runs, cancel, checked)?;
    match told_all(&damage) {
        Some(damage) => Err(CheckpointError::ReadBack { file: path.to_owned(), damage }),
        None => Ok(direct),
    }
}

/// As [`compare_runs`], and what differs is no error, but all of it.
pub(crate) fn damage_of(
    path: &Path,
    mut runs: Vec<HashedRun>,
    cancel: &AtomicBool,
    checked: &mut dyn FnMut(u64),
) -> Result<(Option<bool>, Vec<Damage>)> {
    runs.iter_mut().for_each(|run| run.span.file = FileId(0));
    if runs.is_empty() {
        return Ok((Some(true), vec![]));
    }
    let files = Arc::new(FileSet::open(&[PathBuf::from(path)], IoMode::Auto)?);
    let pool = verify::pool_for(&runs, &files, READ_BACK_SLABS)?;
    let mut device = match open_device(&DeviceConfig::default(), Arc::clone(&files), &pool) {
        Err(IoError::Start { .. }) => return damage_alone(path, &runs, &files, cancel, checked),
        opened => opened?,
    };
    let workers = std::thread::available_parallelism().map_or(1, usize::from).min(CHECK_WORKERS_MAX);
    let mut seen = 0;
    let outcome = verify::check(&runs, &files, &pool, &mut *device, workers, cancel, &mut |now| {
        checked(now.bytes - seen);
        seen = now.bytes;
    });
    leave(device);
    let report = outcome?;
    let direct = matches!(files.access(FileId(0)), Access::Direct { .. });
    Ok(((!report.interrupted).then_some(direct), report.damage))
}

/// As [`damage_of`], where not one more thread can be had: by the caller, through the page cache.
fn damage_alone(
    path: &Path,
    runs: &[HashedRun],
    files: &FileSet,
    cancel: &AtomicBool,
    checked: &mut dyn FnMut(u64),
) -> Result<(Option<bool>, Vec<Damage>)> {
    let (mut buffer, mut damage) = (vec![0; CHECK_SLAB_BYTES_MAX], Vec::new());
    for run in runs {
        let mut hash = Xxh3::new();
        let mut done = 0;
        while done < run.span.len {
            if cancel.load(Ordering::Relaxed) {
                return Ok((None, damage));
            }
            let part = (run.span.len - done).min(buffer.len() as u64);
            files.read_exact_at(run.span.file, run.span.offset + done, &mut buffer[..part as usize])?;
            hash.update(&buffer[..part as usize]);
            checked(part);
            done += part;
        }
        let (expected, found) = (run.hash, hash.digest());
        if found != expected {
            let fault = Fault::Differs { expected, found };
            damage.push(Damage { shard: path.to_owned(), run: run.clone(), fault });
        }
    }
    Ok((Some(false), damage))
}

/// The first run that differs, without its file, and how many others do; `None` where none does.
pub(crate) fn told_all(damage: &[Damage]) -> Option<String> {
    let Damage { run, fault, .. } = damage.first()?;
    let more = match damage.len() - 1 {
        0 => String::new(),
        more => format!("; and {more} more"),
    };
    Some(format!("{}: {} bytes at {}: {fault}{more}", run.title(), run.span.len, run.span.offset))
}

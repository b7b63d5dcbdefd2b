//! Whether the bytes of an expert are those that were written: a table of expected hashes and a rule which reads to check.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use millstream_io::{FileSet, FileSpan, Slab};
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{ExpertKey, ExpertStore, ExpertTable, StoreError};
use crate::limits::GONE_CHECKED_MAX;

/// Which reads of experts are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    Off,
    /// The first read of an expert, with a probability of 1 / [`SAMPLE_ONE_IN`]: finds a drive or a copy that is bad in
    /// many places, seldom one bad place, and costs next to nothing. Where there are mirrors the first [`SAMPLE_FIRST`]
    /// are checked, whatever they are: a copy that is no copy is found before it is used. So are the first of each layer, as
    /// many as there are drives: a copy may be bad in one file only. Once something was wrong, every read is. Every read
    /// that is to be quantized is from the start: what it was made from is not there any more to be looked at then, and a
    /// hash costs a tenth of the quantizing.
    #[default]
    Sample,
    /// Every one.
    All,
}

/// Of so many experts the sample takes one.
pub const SAMPLE_ONE_IN: u64 = 64;
/// First reads that the sample takes where there are mirrors: a tenth of a second of hashing for the largest experts.
pub const SAMPLE_FIRST: u32 = 64;

/// An expert whose bytes are not those that were written.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "expert {} of layer {} is damaged: {} bytes at {} of {} have the checksum {found:016x}, expected {expected:016x}",
    key.expert, key.layer, span.len, span.offset, shard.display()
)]
pub struct Damaged {
    /// Which expert.
    pub key: ExpertKey,
    /// The file.
    pub shard: PathBuf,
    /// The bytes that were hashed.
    pub span: FileSpan,
    /// XXH3-64 of the bytes that were written.
    pub expected: u64,
    /// XXH3-64 of the bytes that came.
    pub found: u64,
    /// There are mirrors, and it may be one of them that is wrong.
    pub mirrored: bool,
}

/// Expected hashes and the reads to check by them.
pub struct Checks {
    verify: Verify,
    seed: u64,
    /// XXH3-64 of each expert from its first useful byte to its last, by `ExpertTable::index`.
    expected: Vec<Option<u64>>,
    /// Whether a read of the expert has come in and was not refused.
    seen: Vec<bool>,
    /// Whether one came in unchecked.
    passed: Vec<bool>,
    /// First reads that are still to be checked whatever the seed draws.
    pub(super) first: u32,
    /// The same of each model layer.
    pub(super) first_of: Vec<u32>,
    /// Something was wrong: every read is checked.
    doubt: bool,
    /// Where the experts are, for messages and to read a damaged one again.
    files: Option<Arc<FileSet>>,
}

impl Checks {
    /// Checks of nothing.
    pub fn off() -> Checks {
        Checks {
            verify: Verify::Off,
            seed: 0,
            expected: vec![],
            seen: vec![],
            passed: vec![],
            first: 0,
            first_of: vec![],
            doubt: false,
            files: None,
        }
    }

    /// Checks of the experts in `table` for which `expected` knows the span and the hash. `seed` decides the sample;
    /// `files` are those of the table. Also returns how many experts cannot be checked, having no hash or another span.
    pub fn new(
        table: &ExpertTable,
        verify: Verify,
        seed: u64,
        files: Arc<FileSet>,
        expected: impl Fn(ExpertKey) -> Option<(FileSpan, u64)>,
    ) -> (Checks, usize) {
        let hash = |key: ExpertKey| {
            let (span, hash) = expected(key)?;
            (table.whole(key)?.0 == span).then_some(hash)
        };
        let expected: Vec<Option<u64>> = table.keys().map(hash).collect();
        let unchecked = expected.iter().filter(|hash| hash.is_none()).count();
        let (seen, passed) = (vec![false; expected.len()], vec![false; expected.len()]);
        let (first, of_layer) = if files.drives() > 1 { (SAMPLE_FIRST, files.drives() as u32) } else { (0, 0) };
        let layers = table.keys().map(|key| usize::from(key.layer) + 1).max().unwrap_or(0);
        let first_of = vec![of_layer; layers];
        (Checks { verify, seed, expected, seen, passed, first, first_of, doubt: false, files: Some(files) }, unchecked)
    }

    /// Whether this read of `key` is to be checked.
    fn due(&self, table: &ExpertTable, key: ExpertKey) -> bool {
        let index = table.index(key);
        match self.verify {
            Verify::Off => false,
            Verify::All => self.expected[index].is_some(),
            Verify::Sample => {
                let of_layer = self.first_of.get(usize::from(key.layer)).is_some_and(|first| *first > 0);
                let sampled = !self.seen[index] && (self.first > 0 || of_layer || self.drawn(index));
                self.expected[index].is_some() && (self.doubt || sampled || table.is_quantized(key))
            }
        }
    }

    /// What is wrong with the bytes of `key` in `slab`.
    pub(super) fn wrong(&self, table: &ExpertTable, key: ExpertKey, slab: &[u8]) -> Option<Damaged> {
        let (files, (span, place), expected) =
            (self.files.as_ref()?, table.whole(key)?, self.expected[table.index(key)]?);
        let found = xxh3_64(&slab[place.at as usize..][..place.len as usize]);
        let damaged = || {
            let (shard, mirrored) = (files.path(span.file).to_owned(), files.drives() > 1);
            Damaged { key, shard, span, expected, found, mirrored }
        };
        (found != expected).then(damaged)
    }

    /// Compares the bytes that were read into `slab`; where they are wrong and there are mirrors, puts those of a copy
    /// that is right in their place, and says so. A refused expert stays unseen, so that it is refused again.
    fn check(&self, table: &ExpertTable, key: ExpertKey, slab: &mut [u8]) -> Result<bool, Damaged> {
        let Some(damaged) = self.wrong(table, key, slab) else { return Ok(false) };
        let (Some(files), Some((span, place))) = (&self.files, table.whole(key)) else { return Err(damaged) };
        let bytes = &mut slab[place.at as usize..][..place.len as usize];
        right_copy(files, span, damaged.expected, bytes).then_some(true).ok_or(damaged)
    }

    /// A read of `key` was taken in.
    fn saw(&mut self, table: &ExpertTable, key: ExpertKey, checked: bool) {
        if self.verify == Verify::Sample {
            self.seen[table.index(key)] = true;
            self.passed[table.index(key)] |= !checked;
            let of_layer = self.first_of.get_mut(usize::from(key.layer));
            of_layer.into_iter().chain([&mut self.first]).for_each(|first| *first = first.saturating_sub(1));
        }
    }

    /// Whether this is the first time that something is in doubt. Where every read is checked nothing ever is.
    fn begin_doubt(&mut self) -> bool {
        self.verify == Verify::Sample && !std::mem::replace(&mut self.doubt, true)
    }

    /// A wrong copy of one of the experts that were taken in unchecked and that `gone` says are not there any more. Some are looked
    /// at, from all layers: what is bad in many places is found, in a bounded time.
    pub(super) fn wrong_copy_of_gone(&self, table: &ExpertTable, gone: impl Fn(usize) -> bool) -> Option<Damaged> {
        let gone: Vec<ExpertKey> =
            table.keys().filter(|&key| self.passed[table.index(key)] && gone(table.index(key))).collect();
        let mut some = gone.iter().step_by(gone.len().div_ceil(GONE_CHECKED_MAX).max(1));
        some.find_map(|&key| self.wrong_copy(table, key))
    }

    /// A wrong copy of an expert, on whichever drive it is.
    fn wrong_copy(&self, table: &ExpertTable, key: ExpertKey) -> Option<Damaged> {
        let files = self.files.as_ref()?;
        let ((span, _), expected) = (table.whole(key)?, self.expected[table.index(key)]?);
        (0..files.drives()).find_map(|drive| {
            let mut bytes = vec![0; span.len as usize];
            files.read_copy(span.file, drive, span.offset, &mut bytes)?.ok()?;
            let shard = files.copy_path(span.file, drive)?.to_owned();
            let found = xxh3_64(&bytes);
            let mirrored = files.drives() > 1;
            (found != expected).then_some(Damaged { key, shard, span, expected, found, mirrored })
        })
    }

    fn drawn(&self, index: usize) -> bool {
        xxh3_64_with_seed(&(index as u64).to_le_bytes(), self.seed).is_multiple_of(SAMPLE_ONE_IN)
    }
}

impl ExpertStore {
    /// Compares what was read with its hash, where this read is one to check.
    pub(super) fn checked(&mut self, key: ExpertKey, slab: &mut Slab) -> Result<(), StoreError> {
        let due = self.checks.due(&self.table, key);
        if due {
            let began = Instant::now();
            let outcome = self.checks.check(&self.table, key, slab.bytes_mut());
            self.accounts.stats.checked += 1;
            if outcome != Ok(false) && self.checks.begin_doubt() {
                self.check_what_was_taken_in();
            }
            self.accounts.stats.checking += began.elapsed();
            self.accounts.stats.healed += u64::from(outcome?);
        }
        self.checks.saw(&self.table, key, due);
        Ok(())
    }
}

/// Looks for a copy of `span` that is right, and leaves its bytes in `bytes`. What was read may be of several drives, so
/// each is asked alone: one that is wrong is not trusted any more. Slow, and as rare as damage.
fn right_copy(files: &FileSet, span: FileSpan, expected: u64, bytes: &mut [u8]) -> bool {
    let FileSpan { file, offset, len } = span;
    let mut right = None;
    // The model's own last: as a rule that is the right one, and its bytes then stay.
    for drive in (0..files.drives()).rev().filter(|_| files.drives() > 1) {
        match files.read_copy(file, drive, offset, bytes) {
            Some(Ok(())) => match xxh3_64(bytes) {
                found if found == expected => right = Some(drive),
                found => {
                    let what =
                        format!("{len} bytes at {offset} have the checksum {found:016x}, expected {expected:016x}");
                    files.distrust(file, drive, &what);
                }
            },
            Some(Err(error)) => files.avoid(file, drive, &error),
            None => {}
        }
    }
    let Some(drive) = right else { return false };
    drive == 0 || (matches!(files.read_copy(file, drive, offset, bytes), Some(Ok(()))) && xxh3_64(bytes) == expected)
}

#[cfg(test)]
mod tests {
    use super::*;
    use millstream_io::{FileId, IoMode, Mirror};

    #[test]
    fn a_sample_is_about_one_in_sixty_four_and_another_for_another_seed() {
        let sample = |seed| {
            let checks = Checks { seed, ..Checks::off() };
            (0..64_000).filter(|&index| checks.drawn(index)).collect::<Vec<_>>()
        };
        // 1,000 expected, standard deviation 31.
        for seed in 0..8 {
            assert!((850..1150).contains(&sample(seed).len()), "{}", sample(seed).len());
        }
        assert_eq!(sample(3), sample(3));
        assert_ne!(sample(3), sample(4));
    }

    #[test]
    fn a_copy_that_cannot_be_read_again_is_avoided_and_its_mirror_is_not_called_wrong() {
        let dirs: Vec<_> = (0..3).map(|_| tempfile::tempdir().unwrap()).collect();
        let paths: Vec<PathBuf> = dirs.iter().map(|dir| dir.path().join("shard")).collect();
        let right = [7u8; 8192];
        paths.iter().for_each(|path| std::fs::write(path, right).unwrap());
        std::fs::write(&paths[0], [6u8; 8192]).unwrap();
        let mirrors = [1, 2].map(|drive| Mirror {
            dir: dirs[drive].path().to_owned(),
            copies: vec![Some(paths[drive].clone())],
            seen: vec![],
        });
        let files = FileSet::open_mirrored(&paths[..1], &mirrors, IoMode::Buffered).unwrap();
        std::fs::OpenOptions::new().write(true).open(&paths[1]).unwrap().set_len(100).unwrap();
        let span = FileSpan { file: FileId(0), offset: 1000, len: 3000 };
        let mut bytes = vec![0; 3000];
        assert!(right_copy(&files, span, xxh3_64(&right[..3000]), &mut bytes));
        assert_eq!(bytes, right[..3000]);
        let warnings = files.warnings();
        let about = |drive: usize| {
            let dir = dirs[drive].path().display().to_string();
            warnings.iter().filter(|line| line.starts_with(&dir)).cloned().collect::<Vec<_>>().join("; ")
        };
        assert!(about(1).ends_with("this mirror is not read any more where it failed"), "{warnings:?}");
        assert!(about(0).contains("own directory is damaged") && about(2).is_empty(), "{warnings:?}");
    }
}

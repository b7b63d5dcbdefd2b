//! Whether the bytes of an expert are those that were written: a table of expected hashes and a rule which reads to check.

use std::path::PathBuf;

use millstream_io::FileSpan;
use thiserror::Error;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

use super::{ExpertKey, ExpertTable};

/// Which reads of experts are checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Verify {
    /// None.
    Off,
    /// The first read of an expert, with a probability of 1 / [`SAMPLE_ONE_IN`]: finds a drive or a copy that is bad in
    /// many places, seldom one bad place, and costs next to nothing.
    #[default]
    Sample,
    /// Every one.
    All,
}

/// Of so many experts the sample takes one.
pub const SAMPLE_ONE_IN: u64 = 64;

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
}

/// Expected hashes and the reads to check by them.
pub struct Checks {
    verify: Verify,
    seed: u64,
    /// XXH3-64 of each expert from its first useful byte to its last, by `ExpertTable::index`.
    expected: Vec<Option<u64>>,
    /// Whether a read of the expert has come in and was not refused.
    seen: Vec<bool>,
    shards: Vec<PathBuf>,
}

impl Checks {
    /// Checks of nothing.
    pub fn off() -> Checks {
        Checks { verify: Verify::Off, seed: 0, expected: vec![], seen: vec![], shards: vec![] }
    }

    /// Checks of the experts in `table` for which `expected` knows the span and the hash. `seed` decides the sample;
    /// `shards` are the paths of the files, for messages. Also returns how many experts cannot be checked, having no
    /// hash or another span.
    pub fn new(
        table: &ExpertTable,
        verify: Verify,
        seed: u64,
        shards: Vec<PathBuf>,
        expected: impl Fn(ExpertKey) -> Option<(FileSpan, u64)>,
    ) -> (Checks, usize) {
        let hash = |key: ExpertKey| {
            let (span, hash) = expected(key)?;
            (table.whole(key)?.0 == span).then_some(hash)
        };
        let expected: Vec<Option<u64>> = table.keys().map(hash).collect();
        let unchecked = expected.iter().filter(|hash| hash.is_none()).count();
        (Checks { verify, seed, seen: vec![false; expected.len()], expected, shards }, unchecked)
    }

    /// Whether this read of `key` is to be checked.
    pub(super) fn due(&self, table: &ExpertTable, key: ExpertKey) -> bool {
        let index = table.index(key);
        match self.verify {
            Verify::Off => false,
            Verify::All => self.expected[index].is_some(),
            Verify::Sample => self.expected[index].is_some() && !self.seen[index] && self.drawn(index),
        }
    }

    /// Compares the bytes that were read into `slab`. A refused expert stays unseen, so that it is refused again.
    pub(super) fn check(&self, table: &ExpertTable, key: ExpertKey, slab: &[u8]) -> Result<(), Damaged> {
        let (Some((span, place)), Some(expected)) = (table.whole(key), self.expected[table.index(key)]) else {
            return Ok(());
        };
        let found = xxh3_64(&slab[place.at as usize..][..place.len as usize]);
        if found == expected {
            return Ok(());
        }
        let shard = self.shards.get(span.file.0 as usize).cloned().unwrap_or_default();
        Err(Damaged { key, shard, span, expected, found })
    }

    /// A read of `key` was taken in.
    pub(super) fn saw(&mut self, table: &ExpertTable, key: ExpertKey) {
        if self.verify == Verify::Sample {
            self.seen[table.index(key)] = true;
        }
    }

    fn drawn(&self, index: usize) -> bool {
        xxh3_64_with_seed(&(index as u64).to_le_bytes(), self.seed).is_multiple_of(SAMPLE_ONE_IN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

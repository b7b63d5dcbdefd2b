//! Checksums of the source, held against its bytes as they are read: what is made of them gets checksums of its own, by which
//! damage would be whole.

use millstream_io::FileSpan;
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::Checkpoint;
use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::tensors::TensorMap;
use crate::checkpoint::verify::{Damage, Fault, HashedRun, Manifest};

/// What of the source has a checksum, and the run that is being read.
pub(crate) struct ReadSums {
    /// In order of files and offsets.
    runs: Vec<HashedRun>,
    now: Option<Hashing>,
}

/// A run of which some was read. Its weights come in the order of the file; scales, which lie behind all of them, come
/// between, with the rows they belong to, and wait.
struct Hashing {
    run: usize,
    hash: Xxh3,
    /// Where in the file the hash has come to.
    at: u64,
    waiting: Vec<(u64, Vec<u8>)>,
}

impl ReadSums {
    /// Those of `checkpoint`; a publisher's has none.
    pub fn of(checkpoint: &Checkpoint) -> Result<ReadSums> {
        Ok(ReadSums { runs: Manifest::read(checkpoint)?.runs, now: None })
    }

    /// Weights, or `scales`, were read. Fails where they end a run that is not as its checksum says.
    pub fn take(&mut self, tensors: &TensorMap, span: &FileSpan, bytes: &[u8], scales: bool) -> Result<()> {
        let order = (span.file, span.offset);
        let before = self.runs.partition_point(|run| (run.span.file, run.span.offset) <= order);
        let Some(number) = before.checked_sub(1) else { return Ok(()) };
        let HashedRun { span: whole, hash: expected, .. } = self.runs[number];
        let (end, run_end) = (span.offset + span.len, whole.offset + whole.len);
        if whole.file != span.file || end > run_end {
            return Ok(());
        }
        let mut now = match self.now.take() {
            Some(now) if now.run == number => now,
            _ => Hashing { run: number, hash: Xxh3::new(), at: whole.offset, waiting: vec![] },
        };
        match scales {
            true => now.waiting.push((span.offset, bytes.to_vec())),
            false => now.add(span.offset, bytes),
        }
        if end < run_end {
            self.now = Some(now);
            return Ok(());
        }
        let found = now.end();
        if found == expected {
            return Ok(());
        }
        let run = self.runs[number].clone();
        let fault = Fault::Differs { expected, found };
        Err(CheckpointError::SourceDamaged(Box::new(Damage { shard: tensors.path(span.file).to_owned(), run, fault })))
    }
}

impl Hashing {
    /// The next bytes; before them there may be padding, which is zero.
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        for _ in self.at..offset {
            self.hash.update(&[0]);
        }
        self.hash.update(bytes);
        self.at = offset + bytes.len() as u64;
    }

    fn end(mut self) -> u64 {
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.sort_unstable_by_key(|(offset, _)| *offset);
        waiting.iter().for_each(|(offset, bytes)| self.add(*offset, bytes));
        self.hash.digest()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_64;

    #[test]
    fn padding_is_zero_and_scales_come_in_their_order() {
        // Weights of 5 and 4 bytes, two of padding between them and one behind; scales of 4 and 8.
        let whole: Vec<u8> =
            [1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9, 0, 20, 21, 22, 23, 30, 31, 32, 33, 34, 35, 36, 37].into();
        let mut now = Hashing { run: 0, hash: Xxh3::new(), at: 100, waiting: vec![] };
        now.add(100, &[1, 2]);
        now.waiting.push((116, vec![30, 31, 32, 33, 34, 35, 36, 37]));
        now.add(102, &[3, 4, 5]);
        now.waiting.push((112, vec![20, 21, 22, 23]));
        now.add(107, &[6, 7, 8, 9]);
        assert_eq!(now.end(), xxh3_64(&whole));
    }
}

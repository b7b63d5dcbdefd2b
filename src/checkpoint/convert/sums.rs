//! Checksums of the source, held against its bytes as they are read: what is made of them gets checksums of its own, by which
//! damage would be whole.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use millstream_io::{FileId, FileSpan};
use xxhash_rust::xxh3::Xxh3;

use crate::checkpoint::error::{CheckpointError, Result};
use crate::checkpoint::tensors::TensorMap;
use crate::checkpoint::verify::{Damage, Fault, HashedRun, Manifest};
use crate::checkpoint::write::{Cancel, Progress, readback};
use crate::checkpoint::{Checkpoint, consumed};
use crate::size;

/// Bytes of the smallest tensor, a scale: between two reads that lie nearer to each other there is none.
const SMALLEST_TENSOR_BYTES: u64 = 4;

/// What of the source has a checksum, and the run that is being read.
pub(crate) struct ReadSums {
    /// In order of files and offsets.
    runs: Vec<HashedRun>,
    now: Option<Hashing>,
}

/// A run of which some was read. Its weights come in the order of the file; scales, which lie behind all of them, come
/// between, with the rows they belong to, and wait. Not every matrix has some, so that the last byte may be read long before
/// the last matrix: the run ends with as many bytes as its tensors have.
struct Hashing {
    run: usize,
    hash: Xxh3,
    /// Where in the file the hash has come to.
    at: u64,
    /// Bytes that are not read yet.
    left: u64,
    waiting: Vec<(u64, Vec<u8>)>,
}

impl ReadSums {
    /// Those of `checkpoint`; a publisher's has none.
    pub fn of(checkpoint: &Checkpoint) -> Result<ReadSums> {
        Ok(ReadSums { runs: Manifest::read(checkpoint)?.runs, now: None })
    }

    /// Weights or scales were read. Fails where they end a run that is not as its checksum says.
    pub fn take(&mut self, tensors: &TensorMap, span: &FileSpan, bytes: &[u8]) -> Result<()> {
        let order = (span.file, span.offset);
        let before = self.runs.partition_point(|run| (run.span.file, run.span.offset) <= order);
        let Some(number) = before.checked_sub(1) else { return Ok(()) };
        let run = &self.runs[number];
        if run.span.file != span.file || span.offset + span.len > run.span.offset + run.span.len {
            return Ok(());
        }
        let mut now = match self.now.take() {
            Some(now) if now.run == number => now,
            _ => Hashing::new(number, run),
        };
        let Some(found) = now.take(span.offset, bytes) else {
            self.now = Some(now);
            return Ok(());
        };
        let expected = run.hash;
        if found == expected {
            return Ok(());
        }
        let (shard, run) = (tensors.path(span.file).to_owned(), run.clone());
        let fault = Fault::Differs { expected, found };
        Err(refusal(tensors.dir(), Damage { shard, run, fault }, 0))
    }
}

/// Holds every shard of the source that is there against its checksums, before the first is removed: what is found later
/// leaves the model in two places, half of it in each. Each shard that differs is noted by name, since nothing else looks at
/// a source that is no model any more. A raised `cancel` ends it early.
pub(crate) fn check(
    checkpoint: &Checkpoint,
    dst: &Path,
    is_gone: &dyn Fn(FileId) -> bool,
    cancel: Option<&Cancel>,
    progress: &mut dyn FnMut(Progress),
) -> Result<()> {
    let mut shards: BTreeMap<FileId, Vec<HashedRun>> = BTreeMap::new();
    for run in Manifest::read(checkpoint)?.runs.into_iter().filter(|run| !is_gone(run.span.file)) {
        shards.entry(run.span.file).or_default().push(run);
    }
    if shards.is_empty() {
        return Ok(());
    }
    let bytes: u64 = shards.values().flatten().map(|run| run.span.len).sum();
    let (count, bytes) = (shards.len(), size::show(bytes));
    progress(Progress::Note(format!(
        "{count} shards of the source, {bytes}, are read first and held against their checksums, before any is removed"
    )));
    let cancel = cancel.map(|cancel| Arc::clone(&cancel.0)).unwrap_or_default();
    let mut all = Vec::new();
    for (file, runs) in shards {
        let path = checkpoint.tensors.path(file);
        let (direct, damage) = readback::damage_of(path, runs, &cancel, &mut |_| {})?;
        if direct.is_none() {
            return Err(CheckpointError::Interrupted { dir: dst.to_owned() });
        }
        if let Some(damage) = readback::told_all(&damage) {
            progress(Progress::Note(format!("{} is damaged: {damage}", path.display())));
        }
        all.extend(damage);
    }
    let others = all.len().saturating_sub(1);
    all.into_iter().next().map_or(Ok(()), |first| Err(refusal(&checkpoint.dir, first, others)))
}

/// The error for a source in `dir` of which this is damaged, and so many other runs.
fn refusal(dir: &Path, damage: Damage, others: usize) -> CheckpointError {
    let is_whole = consumed::refuse_consumed(dir).is_ok();
    CheckpointError::SourceDamaged { damage: Box::new(damage), others, is_whole }
}

impl Hashing {
    fn new(number: usize, run: &HashedRun) -> Hashing {
        Hashing { run: number, hash: Xxh3::new(), at: run.span.offset, left: run.bytes, waiting: vec![] }
    }

    /// Takes in some bytes; after the last of the run its hash.
    fn take(&mut self, offset: u64, bytes: &[u8]) -> Option<u64> {
        self.left = self.left.saturating_sub(bytes.len() as u64);
        match (self.at..self.at + SMALLEST_TENSOR_BYTES).contains(&offset) {
            true => self.add(offset, bytes),
            false => self.waiting.push((offset, bytes.to_vec())),
        }
        if self.left > 0 {
            return None;
        }
        let mut waiting = std::mem::take(&mut self.waiting);
        waiting.sort_unstable_by_key(|(offset, _)| *offset);
        waiting.iter().for_each(|(offset, bytes)| self.add(*offset, bytes));
        Some(self.hash.digest())
    }

    /// The next bytes; before them there may be padding, which is zero.
    fn add(&mut self, offset: u64, bytes: &[u8]) {
        for _ in self.at..offset {
            self.hash.update(&[0]);
        }
        self.hash.update(bytes);
        self.at = offset + bytes.len() as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use xxhash_rust::xxh3::xxh3_64;

    /// The hash after the last of `reads` of a run that is as long as `whole`, and none before it.
    fn hashed(whole: &[u8], padding: u64, reads: &[(u64, &[u8])]) -> u64 {
        let len = whole.len() as u64;
        let span = FileSpan { file: FileId(0), offset: 100, len };
        let run = HashedRun { name: String::new(), layer: None, expert: None, span, bytes: len - padding, hash: 0 };
        let mut now = Hashing::new(0, &run);
        let mut found: Vec<Option<u64>> = reads.iter().map(|(offset, bytes)| now.take(*offset, bytes)).collect();
        let last = found.pop().unwrap();
        assert!(found.iter().all(Option::is_none), "{found:?}");
        last.unwrap()
    }

    #[test]
    fn padding_is_zero_and_scales_come_in_their_order() {
        // Weights of 5 and 4 bytes, two of padding between them and one behind; scales of 4 and 8.
        let whole = [1, 2, 3, 4, 5, 0, 0, 6, 7, 8, 9, 0, 20, 21, 22, 23, 30, 31, 32, 33, 34, 35, 36, 37];
        let scales: [&[u8]; 2] = [&[20, 21, 22, 23], &[30, 31, 32, 33, 34, 35, 36, 37]];
        let reads: [(u64, &[u8]); 5] =
            [(100, &[1, 2]), (116, scales[1]), (102, &[3, 4, 5]), (112, scales[0]), (107, &[6, 7, 8, 9])];
        assert_eq!(hashed(&whole, 3, &reads), xxh3_64(&whole));
    }

    #[test]
    fn a_run_does_not_end_with_its_last_byte() {
        // Three weights of 5 bytes; scales of the first two only, so that the file ends with what is read before the third.
        let whole: Vec<u8> = (1..=15).chain([0]).chain(20..28).collect();
        let reads = [(100, 0..5), (116, 16..20), (105, 5..10), (120, 20..24), (110, 10..15)];
        let reads = reads.map(|(offset, range)| (offset, &whole[range]));
        assert_eq!(hashed(&whole, 1, &reads), xxh3_64(&whole));
    }

    #[test]
    fn weights_that_lie_in_another_order_wait_for_those_before_them() {
        let whole: Vec<u8> = (1..=24).collect();
        let reads = [(108, 8..16), (116, 16..24), (100, 0..8)].map(|(offset, range)| (offset, &whole[range]));
        assert_eq!(hashed(&whole, 0, &reads), xxh3_64(&whole));
    }
}

//! Writing one shard: weights as they come, hashed on the way, and a header that tells the hashes.

use super::Weights;
use super::layout::{Part, ShardLayout, ShardPlan};
use crate::checkpoint::error::{Result, io_error};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

const WRITE_BUFFER_BYTES: usize = 1 << 20;
const ZEROS: [u8; 4096] = [0; 4096];

/// Writes the shard to `temporary`, whole and durable. `written` is told the bytes as they are added and may end it.
pub(crate) fn write(
    plan: &ShardPlan,
    layout: &ShardLayout,
    weights: &mut dyn Weights,
    temporary: &Path,
    written: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<()> {
    let file = File::create(temporary).map_err(io_error("create", temporary))?;
    let hashes = match layout.hollow {
        true => hollow(layout, &file, temporary)?,
        false => filled(plan, layout, weights, &file, temporary, written)?,
    };
    file.write_all_at(&layout.header(&hashes), 0).map_err(io_error("write", temporary))?;
    file.sync_all().map_err(io_error("sync", temporary))
}

/// Makes the file as long as it is to be and returns the hashes of runs of zeros. Only their lengths matter, and few
/// lengths differ.
fn hollow(layout: &ShardLayout, file: &File, path: &Path) -> Result<Vec<u64>> {
    file.set_len(layout.file_bytes).map_err(io_error("write", path))?;
    let mut known: BTreeMap<u64, u64> = BTreeMap::new();
    let hashes = layout.runs.iter().map(|run| *known.entry(run.bytes).or_insert_with(|| hash_of_zeros(run.bytes)));
    Ok(hashes.collect())
}

fn hash_of_zeros(bytes: u64) -> u64 {
    let mut hash = Xxh3::new();
    (0..bytes / ZEROS.len() as u64).for_each(|_| hash.update(&ZEROS));
    hash.update(&ZEROS[..(bytes % ZEROS.len() as u64) as usize]);
    hash.digest()
}

/// Writes every byte behind the header and returns the hashes of the runs.
fn filled(
    plan: &ShardPlan,
    layout: &ShardLayout,
    weights: &mut dyn Weights,
    file: &File,
    path: &Path,
    written: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Vec<u64>> {
    let buffer = BufWriter::with_capacity(WRITE_BUFFER_BYTES, file);
    let mut writer = Writer { buffer, path, at: 0, hash: Xxh3::new(), written };
    writer.put(&layout.header(&vec![0; layout.runs.len()]))?;
    let mut hashes = Vec::with_capacity(layout.runs.len());
    for (run, placed) in plan.runs.iter().zip(&layout.runs) {
        writer.zeros(placed.offset - writer.at)?;
        writer.hash.reset();
        let mut scales: Vec<Vec<u8>> = vec![Vec::new(); run.items.len()];
        for part in &placed.parts {
            match *part {
                Part::Pad(bytes) => writer.zeros(bytes)?,
                Part::Weights(number) => {
                    scales[number] = weights.write(&run.items[number], &mut |bytes| writer.put(bytes))?;
                }
                Part::Scales(number) => writer.put(&scales[number])?,
            }
        }
        hashes.push(writer.hash.digest());
    }
    writer.zeros(layout.file_bytes - writer.at)?;
    writer.buffer.flush().map_err(io_error("write", path))?;
    Ok(hashes)
}

struct Writer<'a> {
    buffer: BufWriter<&'a File>,
    path: &'a Path,
    at: u64,
    hash: Xxh3,
    written: &'a mut dyn FnMut(u64) -> Result<()>,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.buffer.write_all(bytes).map_err(io_error("write", self.path))?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        (self.written)(bytes.len() as u64)
    }

    fn zeros(&mut self, mut bytes: u64) -> Result<()> {
        while bytes > 0 {
            let now = bytes.min(ZEROS.len() as u64);
            self.put(&ZEROS[..now as usize])?;
            bytes -= now;
        }
        Ok(())
    }
}

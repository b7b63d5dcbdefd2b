//! Writing one shard: weights as they come, hashed on the way, and a header that tells the hashes.

use super::Weights;
use super::layout::{Part, ShardLayout, ShardPlan};
use crate::checkpoint::error::{Result, io_error};
use millstream_io::{FileWriter, SlabPool};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

const ZEROS: [u8; 4096] = [0; 4096];

/// Writes the shard to `temporary`, whole and durable, and returns the hashes of its runs. `written` is told the bytes as
/// they are added, also when they are none, and may end it.
pub(crate) fn write(
    plan: &ShardPlan,
    layout: &ShardLayout,
    weights: &mut dyn Weights,
    temporary: &Path,
    pool: &SlabPool,
    written: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Vec<u64>> {
    if layout.hollow {
        return hollow(layout, temporary);
    }
    let mut file = FileWriter::create(temporary, pool).map_err(io_error("create", temporary))?;
    let mut put = |bytes: &[u8]| {
        file.write(bytes).map_err(io_error("write", temporary))?;
        written(bytes.len() as u64)
    };
    // It holds the room until the hashes are known.
    put(&layout.header(&vec![0; layout.runs.len()]))?;
    let hashes = runs(plan, layout, weights, &mut put)?;
    file.finish(&layout.header(&hashes)).map_err(io_error("write", temporary))?;
    Ok(hashes)
}

/// The hashes that the runs of the shard have when `weights` are as they should be; nothing is written.
pub(crate) fn hashes(
    plan: &ShardPlan,
    layout: &ShardLayout,
    weights: &mut dyn Weights,
    made: &mut dyn FnMut(u64) -> Result<()>,
) -> Result<Vec<u64>> {
    made(layout.data_start)?;
    runs(plan, layout, weights, &mut |bytes| made(bytes.len() as u64))
}

/// Makes the file as long as it is to be and returns the hashes of runs of zeros. Only their lengths matter, and few
/// lengths differ.
fn hollow(layout: &ShardLayout, path: &Path) -> Result<Vec<u64>> {
    let file = File::create(path).map_err(io_error("create", path))?;
    file.set_len(layout.file_bytes).map_err(io_error("write", path))?;
    let mut known: BTreeMap<u64, u64> = BTreeMap::new();
    let hashes: Vec<u64> =
        layout.runs.iter().map(|run| *known.entry(run.bytes).or_insert_with(|| hash_of_zeros(run.bytes))).collect();
    file.write_all_at(&layout.header(&hashes), 0).map_err(io_error("write", path))?;
    file.sync_all().map_err(io_error("sync", path))?;
    Ok(hashes)
}

fn hash_of_zeros(bytes: u64) -> u64 {
    let mut hash = Xxh3::new();
    (0..bytes / ZEROS.len() as u64).for_each(|_| hash.update(&ZEROS));
    hash.update(&ZEROS[..(bytes % ZEROS.len() as u64) as usize]);
    hash.digest()
}

/// Puts every byte behind the header and returns the hashes of the runs.
fn runs(
    plan: &ShardPlan,
    layout: &ShardLayout,
    weights: &mut dyn Weights,
    put: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<Vec<u64>> {
    let mut writer = Writer { put, at: layout.data_start, hash: Xxh3::new() };
    let mut hashes = Vec::with_capacity(layout.runs.len());
    weights.begin(plan)?;
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
    weights.end()?;
    writer.zeros(layout.file_bytes - writer.at)?;
    Ok(hashes)
}

struct Writer<'a> {
    put: &'a mut dyn FnMut(&[u8]) -> Result<()>,
    at: u64,
    hash: Xxh3,
}

impl Writer<'_> {
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        (self.put)(bytes)?;
        self.hash.update(bytes);
        self.at += bytes.len() as u64;
        Ok(())
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

//! How fast the drive is: a quick look at bursts of reads, beside which nothing is computed.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_io::measure::{median, shuffled};
use millstream_io::{
    Access, Device, DeviceConfig, FileId, FileSet, FileSpan, IoError, Priority, Read, Segments, SlabPool, Wait, layout,
    leave, open_device, settle,
};

use crate::checkpoint::{Checkpoint, ExpertSource};
use crate::engine::EngineConfig;

/// The drive is read for about so long.
const DRIVE_TIME: Duration = Duration::from_millis(400);
/// Layers whose experts are read at most.
const LAYERS_TRIED: usize = 24;
/// A drive that takes longer for the experts of one layer hangs.
const HUNG_AFTER: Duration = Duration::from_secs(20);

/// What a look at the drive came to.
pub struct DriveSpeed {
    /// Billions of bytes a second where all experts of a layer are read at once.
    pub gb_s: f64,
    /// What makes it doubtful.
    pub doubt: Option<String>,
}

/// Reads all experts of a layer at once, as a token that finds none does, wherever they lie. `Err` says why nothing was
/// measured.
pub fn drive(checkpoint: &Checkpoint, engine: &EngineConfig) -> Result<DriveSpeed, String> {
    match holes(checkpoint) {
        Some(why) => Err(why),
        None => measure(checkpoint, engine).map_err(|error| error.to_string()),
    }
}

/// Why nothing that reads of `checkpoint` are timed to take would hold of a model with weights in it.
pub fn holes(checkpoint: &Checkpoint) -> Option<String> {
    let path = checkpoint.tensors.paths().iter().find(|path| has_holes(path))?;
    let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
    Some(format!("{name} has holes, which a drive serves faster than data"))
}

/// Whether less than half of a file is stored: holes, or a file system that compresses well.
fn has_holes(path: &std::path::Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.blocks() * 512 < meta.len() / 2)
}

fn measure(checkpoint: &Checkpoint, engine: &EngineConfig) -> Result<DriveSpeed, IoError> {
    let (mode, kind) = settle(engine.io, engine.device)?;
    let files = Arc::new(FileSet::open(checkpoint.tensors.paths(), mode)?);
    let experts: Vec<&ExpertSource> = checkpoint.routed().flatten().collect();
    let many = checkpoint.arch.moe.top_k;
    let order = shuffled(experts.len(), 1);
    let reads: Vec<Segments> = order
        .iter()
        .cycle()
        .take(LAYERS_TRIED * many)
        .map(|&expert| Ok(layout(&spans(experts[expert]), &files)?.segments))
        .collect::<Result<_, IoError>>()?;
    let slab_bytes = reads.iter().map(Segments::len_bytes).max().unwrap_or(0) as usize;
    let pool = SlabPool::new(slab_bytes.max(1), many)?;
    let config = DeviceConfig {
        kind,
        depth_bytes: engine.depth.bytes(pool.slab_bytes()),
        chunk_bytes: engine.chunk_bytes,
        ..DeviceConfig::default()
    };
    let mut device = open_device(&config, Arc::clone(&files), &pool)?;
    let outcome = layers_read(&mut *device, &pool, &reads, many);
    leave(device);
    let many_s = outcome?;
    let bytes = reads.iter().map(Segments::len_bytes).sum::<u64>() as f64 / reads.len().max(1) as f64;
    Ok(DriveSpeed { gb_s: bytes * many as f64 / many_s.max(1e-9) / 1e9, doubt: doubt(&files) })
}

/// What makes doubtful what was measured of reads of `files`.
pub fn doubt(files: &FileSet) -> Option<String> {
    let direct = (0..files.len() as u32).all(|file| matches!(files.access(FileId(file)), Access::Direct { .. }));
    (!direct).then(|| "it is read through the page cache, which may have served what was measured".to_owned())
}

fn spans(expert: &ExpertSource) -> Vec<FileSpan> {
    expert.matrices().into_iter().flat_map(|matrix| [Some(matrix.data), matrix.scales]).flatten().collect()
}

/// The median of the seconds that `many` took.
fn layers_read(device: &mut dyn Device, pool: &SlabPool, reads: &[Segments], many: usize) -> Result<f64, IoError> {
    let mut took = Vec::new();
    let began = Instant::now();
    for layer in reads.chunks_exact(many) {
        took.push(burst(device, pool, layer)?);
        if began.elapsed() > DRIVE_TIME {
            break;
        }
    }
    Ok(median(&took).unwrap_or(0.0))
}

/// Seconds from asking for all of `reads` to having them.
fn burst(device: &mut dyn Device, pool: &SlabPool, reads: &[Segments]) -> Result<f64, IoError> {
    let began = Instant::now();
    for (tag, &segments) in reads.iter().enumerate() {
        let Some(slab) = pool.take() else { break };
        let read = Read { tag: tag as u64, priority: Priority::Demand, segments };
        if device.submit(read, slab).is_err() {
            return Err(IoError::DeviceDied { cause: "it takes no read".to_owned() });
        }
    }
    for _ in reads {
        match device.reap(Wait::AtMost(HUNG_AFTER.saturating_sub(began.elapsed())))? {
            Some(done) => done.result?,
            None => {
                let cause = format!("{} reads took longer than {} s", reads.len(), HUNG_AFTER.as_secs());
                return Err(IoError::DeviceDied { cause });
            }
        }
    }
    Ok(began.elapsed().as_secs_f64())
}

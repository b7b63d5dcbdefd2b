//! How fast drive and processor are: a quick look at each, about a second for both unless the drive is slow.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_io::measure::{median, shuffled};
use millstream_io::{
    Access, Device, DeviceConfig, FileId, FileSet, FileSpan, IoError, Priority, Read, Segments, SlabPool, Wait, layout,
    leave, open_device, settle,
};

use crate::checkpoint::{Checkpoint, ExpertSource};
use crate::cli::machine::Machine;
use crate::engine::predict::{Drive, Work};
use crate::engine::{Activations, EngineConfig};
use crate::kernels::{Format, Input, Kernels, MatrixSpec, Quantized, Team, WeightRef, matmul};

/// The drive is read for about so long.
const DRIVE_TIME: Duration = Duration::from_millis(400);
/// Layers that are read at most, one expert and all of a token in turn.
const LAYERS_TRIED: usize = 24;
/// A drive that takes longer for the experts of one layer hangs.
const HUNG_AFTER: Duration = Duration::from_secs(20);
/// Bytes of weights that kernels walk through at least, and at most where memory allows no more or caches are huge.
const WALK_BYTES: [u64; 2] = [64 << 20, 1 << 30];
/// One format is multiplied for about so long.
const KERNEL_TIME: Duration = Duration::from_millis(25);

/// What a look at the drive came to.
pub struct DriveSpeed {
    /// How it reads the experts of one layer.
    pub drive: Drive,
    /// Bytes a second where all experts of a layer are read at once.
    pub gb_s: f64,
    /// What makes it doubtful.
    pub doubt: Option<String>,
}

/// Reads experts as a token does, one and all of a layer at once, wherever they lie. `Err` says why nothing was measured.
pub fn drive(checkpoint: &Checkpoint, engine: &EngineConfig) -> Result<DriveSpeed, String> {
    if let Some(path) = checkpoint.tensors.paths().iter().find(|path| has_holes(path)) {
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy();
        return Err(format!("{name} has holes, which a drive serves faster than data"));
    }
    measure(checkpoint, engine).map_err(|error| error.to_string())
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
        .take(LAYERS_TRIED * (many + 1))
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
    let (one_s, many_s) = outcome?;
    let bytes = reads.iter().map(Segments::len_bytes).sum::<u64>() as f64 / reads.len().max(1) as f64;
    let direct = (0..files.len() as u32).all(|file| matches!(files.access(FileId(file)), Access::Direct { .. }));
    let doubt =
        (!direct).then(|| "it is read through the page cache, which may have served what was measured".to_owned());
    Ok(DriveSpeed {
        drive: Drive::fitted(one_s, many as u64, many_s),
        gb_s: bytes * many as f64 / many_s.max(1e-9) / 1e9,
        doubt,
    })
}

fn spans(expert: &ExpertSource) -> Vec<FileSpan> {
    expert.matrices().into_iter().flat_map(|matrix| [Some(matrix.data), matrix.scales]).flatten().collect()
}

/// Medians of the seconds that one expert and that `many` took.
fn layers_read(
    device: &mut dyn Device,
    pool: &SlabPool,
    reads: &[Segments],
    many: usize,
) -> Result<(f64, f64), IoError> {
    let (mut one, mut all) = (Vec::new(), Vec::new());
    let began = Instant::now();
    for layer in reads.chunks_exact(many + 1) {
        let (first, rest) = layer.split_at(1);
        one.push(burst(device, pool, first)?);
        all.push(burst(device, pool, rest)?);
        if began.elapsed() > DRIVE_TIME {
            break;
        }
    }
    Ok((median(&one).unwrap_or(0.0), median(&all).unwrap_or(0.0)))
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

/// Bytes that are more than the caches of `machine` keep: twice the largest, within what is sensible there.
pub fn walk_bytes(machine: &Machine) -> usize {
    let [least, most] = WALK_BYTES;
    // A small part of what is to be had, so that a look takes nothing from others.
    let most = most.min(machine.memory.available / 8).max(least);
    (2 * machine.cache_bytes()).clamp(least, most) as usize
}

/// Bytes of weights of each format of `work` that each of `teams` threads multiply in a second with one row, out of
/// `walk_bytes` of memory and in matrices as an expert has.
pub fn kernels(
    checkpoint: &Checkpoint,
    work: &Work,
    engine: &EngineConfig,
    teams: &[usize],
    walk_bytes: usize,
) -> Vec<BTreeMap<Format, f64>> {
    let (rows, cols) = (checkpoint.arch.moe.width, checkpoint.arch.hidden);
    let kernels = engine.isa.and_then(Kernels::for_isa).unwrap_or_else(Kernels::best);
    // No code of any format stands for something that is not a number.
    let weights = vec![0x11u8; walk_bytes.max(MatrixSpec { format: Format::F32, rows, cols }.data_bytes())];
    let values = vec![0.01f32; cols];
    let mut quantized = Quantized::with_capacity(1, cols);
    quantized.quantize(kernels, &values, 1, cols);
    let as_integers = engine.activations == Activations::Int8;
    let input = Input { rows: 1, cols, values: &values, quantized: as_integers.then_some(&quantized) };
    let mut out = vec![0.0f32; rows];
    let mut speed = |team: &Team, format: Format| {
        let spec = MatrixSpec { format, rows, cols };
        let scales: Vec<u8> = 0.01f32.to_le_bytes().repeat(spec.scale_bytes() / 4);
        let mut matrices = weights.chunks_exact(spec.data_bytes()).cycle();
        let mut rates = Vec::new();
        let began = Instant::now();
        while rates.len() < 2 || began.elapsed() < KERNEL_TIME {
            let (pass, mut bytes) = (Instant::now(), 0);
            // One matrix at least is in memory. Each pass goes on where the last one ended.
            for matrix in matrices.by_ref() {
                matmul(kernels, team, &WeightRef::new(spec, matrix, &scales), &input, &mut out);
                bytes += matrix.len();
                if pass.elapsed() > KERNEL_TIME / 4 {
                    break;
                }
            }
            rates.push(bytes as f64 / pass.elapsed().as_secs_f64().max(1e-9));
        }
        // The first pass finds threads asleep and pages unseen.
        (format, median(&rates[1..]).unwrap_or(1e9))
    };
    let mut of_teams = Vec::with_capacity(teams.len());
    for &threads in teams {
        let team = Team::new(threads);
        of_teams.push(work.formats().into_iter().map(|format| speed(&team, format)).collect());
    }
    of_teams
}

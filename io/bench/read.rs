//! Ring against reader threads: slabs at random places of a scratch file, in one run, alternating.
//!
//! `cargo bench -p millstream-io` writes a 3 GiB file next to the build output, reads it and removes it. As a test
//! (`cargo test --benches`) it does the same with a few megabytes. `MILLSTREAM_BENCH_DIR` names another directory.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use millstream_io::{
    Access, DEPTH_AUTO, Device, DeviceConfig, DeviceKind, FileId, FileSet, FileSpan, IoMode, Priority, Read, SlabPool,
    Wait, layout, open_device,
};

struct Size {
    file_bytes: u64,
    slab_bytes: u64,
    slabs: usize,
    rounds: usize,
    reads: usize,
}

struct Outcome {
    seconds: f64,
    bytes: u64,
    cpu_seconds: f64,
    took: Vec<Duration>,
}

const MIB: u64 = 1 << 20;

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let size = if full {
        Size { file_bytes: 3072 * MIB, slab_bytes: 19 * MIB, slabs: 8, rounds: 5, reads: 120 }
    } else {
        Size { file_bytes: 24 * MIB, slab_bytes: 3 * MIB, slabs: 3, rounds: 1, reads: 4 }
    };
    let dir = std::env::var_os("MILLSTREAM_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let path = dir.join(format!("millstream-read-{}.bin", std::process::id()));
    let outcome = scratch(&path, size.file_bytes).and_then(|()| run(&path, &size));
    let _ = std::fs::remove_file(&path);
    if let Err(error) = outcome {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(path: &Path, size: &Size) -> Result<(), Box<dyn std::error::Error>> {
    let files = Arc::new(FileSet::open(&[path.to_owned()], IoMode::Auto)?);
    let pool = SlabPool::new(size.slab_bytes as usize, size.slabs)?;
    let arena = pool.report();
    println!("{}", files.describe().join("\n"));
    println!("arena {} MiB, {} MiB of it huge ({:?})", arena.bytes >> 20, arena.huge_bytes >> 20, arena.kind);
    if matches!(files.access(FileId(0)), Access::Buffered { .. } | Access::SilentlyBuffered { .. }) {
        println!("NOT DIRECT: these figures are the page cache's");
    }
    let slab = size.slab_bytes;
    let base = DeviceConfig { depth_bytes: DEPTH_AUTO, ..DeviceConfig::default() };
    let ring = DeviceConfig { kind: DeviceKind::Uring, ..base };
    let threads = DeviceConfig { kind: DeviceKind::Threads, ..base };
    let chunks = |bytes: u64, cfg| DeviceConfig { chunk_bytes: Some(bytes as u32), ..cfg };
    let whole = slab.next_multiple_of(65536);
    let all = size.slabs;
    let cases = [
        ("ring", ring, all),
        ("ring, 1 MiB requests", chunks(MIB, ring), all),
        ("ring, 4 MiB requests", chunks(4 * MIB, ring), all),
        ("ring, whole slabs", chunks(whole, ring), all),
        ("ring, not registered", DeviceConfig { register: false, ..ring }, all),
        ("threads", threads, all),
        ("threads, 4 MiB requests", chunks(4 * MIB, threads), all),
        ("threads, whole slabs", chunks(whole, threads), all),
        ("ring, one slab at a time", ring, 1),
        ("ring, one whole slab at a time", chunks(whole, ring), 1),
        ("threads, one slab at a time", threads, 1),
        ("threads, one whole slab at a time", chunks(whole, threads), 1),
    ];
    let mut outcomes: Vec<Vec<Outcome>> = cases.iter().map(|_| Vec::new()).collect();
    for round in 0..size.rounds {
        for (index, (name, cfg, at_once)) in cases.iter().enumerate() {
            match open_device(cfg, Arc::clone(&files), &pool) {
                Ok(mut device) => {
                    outcomes[index].push(read_some(&mut *device, &files, &pool, size, *at_once, round as u64)?)
                }
                Err(error) if round == 0 => println!("{name}: {error}"),
                Err(_) => {}
            }
        }
    }
    println!(
        "{:34} {:>6} {:>6} {:>9} {:>8} {:>8}",
        "median (best) of rounds", "GB/s", "best", "CPU s/GB", "p50 ms", "p99 ms"
    );
    for ((name, ..), rounds) in cases.iter().zip(&outcomes) {
        let speeds = sorted(rounds.iter().map(|o| o.bytes as f64 / 1e9 / o.seconds));
        let cpu = sorted(rounds.iter().map(|o| o.cpu_seconds / (o.bytes as f64 / 1e9)));
        let took = sorted(rounds.iter().flat_map(|o| o.took.iter().map(|d| d.as_secs_f64() * 1e3)));
        let (Some(best), Some(_)) = (speeds.last(), took.last()) else {
            continue;
        };
        let at = |values: &[f64], part: f64| values[((values.len() - 1) as f64 * part) as usize];
        println!(
            "{name:34} {:6.2} {best:6.2} {:9.4} {:8.1} {:8.1}",
            at(&speeds, 0.5),
            at(&cpu, 0.5),
            at(&took, 0.5),
            at(&took, 0.99)
        );
    }
    Ok(())
}

fn read_some(
    device: &mut dyn Device,
    files: &FileSet,
    pool: &SlabPool,
    size: &Size,
    at_once: usize,
    seed: u64,
) -> Result<Outcome, Box<dyn std::error::Error>> {
    let places = size.file_bytes / size.slab_bytes;
    let (mut next, mut took, mut bytes) = (0, Vec::with_capacity(size.reads), 0);
    let (cpu, start) = (cpu_seconds(), Instant::now());
    while took.len() < size.reads {
        while next < size.reads
            && next - took.len() < at_once
            && let Some(slab) = pool.take()
        {
            // An odd multiplier walks the places in a scattered order without repeats.
            let place = (next as u64 * 0x9e37_79b1 + seed * 7) % places;
            let span = FileSpan { file: FileId(0), offset: place * size.slab_bytes, len: size.slab_bytes };
            let plan = layout(&[span], files)?;
            let read = Read { tag: place, priority: Priority::Demand, segments: plan.segments };
            device.submit(read, slab).map_err(|rejected| format!("{:?}", rejected.why))?;
            next += 1;
        }
        let Some(done) = device.reap(Wait::Block)? else {
            break;
        };
        took.push(done.took());
        done.result?;
        // The first bytes of each MiB tell where they are from.
        let told = u64::from_le_bytes(done.slab.bytes()[..8].try_into()?);
        assert_eq!(told, done.tag * size.slab_bytes, "bytes of the wrong place");
        bytes += done.bytes;
    }
    Ok(Outcome { seconds: start.elapsed().as_secs_f64(), bytes, cpu_seconds: cpu_seconds() - cpu, took })
}

/// A file whose bytes tell their offset every MiB, written past the page cache's memory.
fn scratch(path: &Path, bytes: u64) -> Result<(), Box<dyn std::error::Error>> {
    let mut file = File::create(path)?;
    let mut block = vec![0u8; MIB as usize];
    let mut state = 1u64;
    for piece in block.chunks_exact_mut(8) {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        piece.copy_from_slice(&state.to_le_bytes());
    }
    for offset in (0..bytes).step_by(MIB as usize) {
        block[..8].copy_from_slice(&offset.to_le_bytes());
        file.write_all(&block)?;
    }
    file.sync_all()?;
    Ok(())
}

/// Time on a CPU of all threads of this process alive now, the kernel's workers for it included.
fn cpu_seconds() -> f64 {
    let Ok(tasks) = std::fs::read_dir("/proc/self/task") else {
        return 0.0;
    };
    let on_cpu_ns =
        |path: PathBuf| -> Option<u64> { std::fs::read_to_string(path).ok()?.split_whitespace().next()?.parse().ok() };
    tasks.flatten().filter_map(|task| on_cpu_ns(task.path().join("schedstat"))).sum::<u64>() as f64 / 1e9
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

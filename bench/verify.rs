//! What checksums cost: hashing from memory, reading from the drive, and both together as `doctor --deep` does them.
//!
//! `cargo bench --bench verify` writes a 2 GiB scratch file next to the build output, which has no name from the start
//! and so is gone whatever happens to the process. Cases take turns, round after round, and medians are printed. Under
//! `cargo test` it does the same with a few megabytes. `MILLSTREAM_BENCH_DIR` names another directory.

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use millstream::checkpoint::verify::{HashedRun, check, pool_for};
use millstream_io::{
    Access, DeviceConfig, FileId, FileSet, FileSpan, IoMode, Priority, Read, SlabPool, Wait, layout, open_device,
};
use xxhash_rust::xxh3::xxh3_64;

const SLABS: usize = 16;

/// Does it once; the bytes it went through.
type Case<'a> = &'a dyn Fn() -> Result<u64, Box<dyn Error>>;

fn main() -> Result<(), Box<dyn Error>> {
    let measuring = std::env::args().any(|arg| arg == "--bench");
    // An int4 expert of a model of 6144 by 2048, scales included.
    let (run_bytes, runs, rounds) = if measuring { (4618 * 4096, 112, 7) } else { (5 * 4096, 40, 1) };
    let dir = std::env::var_os("MILLSTREAM_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let memory = random(run_bytes * 16);
    let (file, runs) = scratch(&dir, &memory, run_bytes, runs)?;
    let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let files = Arc::new(FileSet::open(&[path], IoMode::Auto)?);
    println!("{}", files.describe().join("\n"));
    if !matches!(files.access(FileId(0)), Access::Direct { .. }) {
        println!("NOT DIRECT: these figures are the page cache's");
    }
    let pool = pool_for(&runs, &files, SLABS)?;
    let cases: [(&str, Case); 4] = [
        ("hash from memory, one thread", &|| Ok(hash_all(&memory, run_bytes))),
        ("read, no hash", &|| read_all(&runs, &files, &pool)),
        ("check, one thread hashes", &|| check_all(&runs, &files, &pool, 1)),
        ("check, two threads hash", &|| check_all(&runs, &files, &pool, 2)),
    ];
    let mut figures = vec![(vec![], vec![]); cases.len()];
    for _ in 0..rounds {
        for ((_, case), (speeds, cpu)) in cases.iter().zip(&mut figures) {
            let (cpu_before, began) = (cpu_seconds(), Instant::now());
            let gigabytes = case()? as f64 / 1e9;
            speeds.push(gigabytes / began.elapsed().as_secs_f64());
            cpu.push((cpu_seconds() - cpu_before) / gigabytes);
        }
    }
    println!("{:32} {:>6} {:>6} {:>6} {:>9}", "median (least, most) of rounds", "GB/s", "least", "most", "CPU s/GB");
    for ((name, _), (speeds, cpu)) in cases.iter().zip(&mut figures) {
        speeds.sort_by(f64::total_cmp);
        cpu.sort_by(f64::total_cmp);
        let middle = speeds.len() / 2;
        let (least, most) = (speeds[0], speeds[speeds.len() - 1]);
        println!("{name:32} {:6.2} {least:6.2} {most:6.2} {:9.4}", speeds[middle], cpu[middle]);
    }
    Ok(())
}

fn random(bytes: usize) -> Vec<u8> {
    let mut state = 1u64;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        out.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// A file without a name, of runs cut from `memory`, and their hashes.
fn scratch(
    dir: &std::path::Path,
    memory: &[u8],
    run_bytes: usize,
    count: usize,
) -> Result<(File, Vec<HashedRun>), Box<dyn Error>> {
    let mut file = tempfile::tempfile_in(dir)?;
    println!("scratch file of {} MiB in {}", (run_bytes * count) >> 20, dir.display());
    let mut runs = Vec::with_capacity(count);
    for (number, bytes) in memory.chunks_exact(run_bytes).cycle().take(count).enumerate() {
        file.write_all(bytes)?;
        let span = FileSpan { file: FileId(0), offset: (number * run_bytes) as u64, len: run_bytes as u64 };
        let name = format!("run {number}");
        runs.push(HashedRun { name, layer: None, expert: None, span, bytes: span.len, hash: xxh3_64(bytes) });
    }
    file.sync_all()?;
    Ok((file, runs))
}

fn hash_all(memory: &[u8], run_bytes: usize) -> u64 {
    memory.chunks_exact(run_bytes).for_each(|bytes| {
        black_box(xxh3_64(black_box(bytes)));
    });
    memory.len() as u64
}

fn check_all(runs: &[HashedRun], files: &Arc<FileSet>, pool: &SlabPool, workers: usize) -> Result<u64, Box<dyn Error>> {
    let mut device = open_device(&DeviceConfig::default(), Arc::clone(files), pool)?;
    let report = check(runs, files, pool, &mut *device, workers, &AtomicBool::new(false), &mut |_| {})?;
    assert!(report.damage.is_empty(), "{:?}", report.damage);
    Ok(report.bytes)
}

/// The same parts in the same order, given back as soon as they are there.
fn read_all(runs: &[HashedRun], files: &Arc<FileSet>, pool: &SlabPool) -> Result<u64, Box<dyn Error>> {
    let mut device = open_device(&DeviceConfig::default(), Arc::clone(files), pool)?;
    let part = pool.slab_bytes() as u64 - 2 * u64::from(files.align());
    let parts = runs.iter().flat_map(|run| {
        (0..run.span.len).step_by(part as usize).map(|at| FileSpan {
            offset: run.span.offset + at,
            len: part.min(run.span.len - at),
            ..run.span
        })
    });
    let mut bytes = 0;
    for (tag, span) in parts.enumerate() {
        let slab = loop {
            match pool.take() {
                Some(slab) => break slab,
                None => device.reap(Wait::Block)?.ok_or("no slab is anywhere")?.result?,
            }
        };
        let read = Read { tag: tag as u64, priority: Priority::Demand, segments: layout(&[span], files)?.segments };
        device.submit(read, slab).map_err(|rejected| format!("{:?}", rejected.why))?;
        bytes += span.len;
    }
    while let Some(done) = device.reap(Wait::Block)? {
        done.result?;
    }
    Ok(bytes)
}

/// Time on a CPU of this process so far, threads that have ended included.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // User and system time are the 12th and 13th field after the name, in hundredths of a second.
    let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ').skip(11).take(2);
    fields.filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() as f64 / 100.0
}

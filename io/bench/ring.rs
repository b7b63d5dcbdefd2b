//! The figures that reading slabs is judged by, in one run: throughput beside fio by pairs in the order A B B A, CPU,
//! latency, a lone slab, submission, amplification.
//!
//! `cargo bench -p millstream-io --bench ring` makes a scratch file without a name next to the build output, in
//! `MILLSTREAM_BENCH_DIR` if that is set. fio reads into reserved huge pages: `sysctl vm.nr_hugepages=200` is enough.
//! All of it takes six minutes; `MILLSTREAM_BENCH_PARTS` names those to run: `ring` and `threads` for the pairs with fio,
//! `figures` for the rest. As a test (`cargo test --benches`) it does the same with a few megabytes and without fio.

#![allow(unsafe_code, reason = "one figure is the kernel's own, from a ring without the device around it")]

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::IoUring;
use io_uring::opcode::ReadFixed;
use io_uring::types::Fd;
use millstream_io::measure::scratch::Scratch;
use millstream_io::measure::{Candidate, Outcome, Round, Target, median, summarize};
use millstream_io::{
    Arena, DEPTH_AUTO, DeviceConfig, DeviceKind, FileId, FileSet, FileSpan, IoMode, Pages, Priority, Read, SlabPool,
    Wait, layout, open_device,
};

type Error = Box<dyn std::error::Error>;

struct Size {
    file_bytes: u64,
    slab_bytes: u64,
    pairs: usize,
    seconds: f64,
    slabs_min: u64,
    bursts: usize,
}

const MIB: u64 = 1 << 20;
const FULL: Size =
    Size { file_bytes: 4096 * MIB, slab_bytes: 19 * MIB, pairs: 12, seconds: 5.0, slabs_min: 1000, bursts: 200 };
const SMALL: Size = Size { file_bytes: 24 * MIB, slab_bytes: MIB, pairs: 1, seconds: 0.05, slabs_min: 1, bursts: 2 };

fn main() {
    let full = std::env::args().any(|arg| arg == "--bench");
    let pairs = std::env::var("MILLSTREAM_BENCH_PAIRS").ok().and_then(|text| text.parse().ok());
    let size = if full { Size { pairs: pairs.unwrap_or(FULL.pairs), ..FULL } } else { SMALL };
    if let Err(error) = run(&size, full) {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

fn run(size: &Size, full: bool) -> Result<(), Error> {
    let dir = std::env::var_os("MILLSTREAM_BENCH_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_TARGET_TMPDIR")), PathBuf::from);
    let mut scratch = Scratch::new(&dir)?;
    scratch.fill(size.file_bytes, &mut |_| true)?;
    let mut target = Target::open(&[scratch.path()], u64::MAX, size.slab_bytes, 8, Path::new("/"))?;
    // As most machines have them: what is reserved is fio's.
    let pages = Pages::Thp;
    let arena = target.pool(pages)?.report();
    println!("{}", target.files(IoMode::Auto)?.access(FileId(0)));
    println!("slabs: {} MiB, {} MiB of them huge ({:?})", arena.bytes >> 20, arena.huge_bytes >> 20, arena.kind);
    let mode = IoMode::Auto;
    let ring = Candidate { mode, pages, ..Candidate::RING };
    let threads = Candidate { mode, pages, ..Candidate::THREADS };

    let parts = std::env::var("MILLSTREAM_BENCH_PARTS").unwrap_or_else(|_| "ring,threads,figures".to_owned());
    let asked = |name: &str| parts.split(',').any(|part| part == name);
    let fio = Fio { path: scratch.path(), size, huge: free_huge_pages() > 8 * size.slab_bytes / (2 * MIB) };
    let paired = asked("ring") || asked("threads");
    let depth = if full && paired { fio.best_depth()? } else { None };
    let ring_rounds = if asked("ring") { pairs(&mut target, &ring, &fio, depth, "ring")? } else { Vec::new() };
    if asked("threads") {
        let rounds = pairs(&mut target, &threads, &fio, depth, "threads")?;
        let all = summarize(threads, &rounds).ok_or("no round")?;
        println!("threads: {:.2} GB/s [{:.2}..{:.2}]", all.gb_s, all.gb_s_min, all.gb_s_max);
        goal("threads: CPU s/GB", all.cpu_s_per_gb, "<= 0.03", all.cpu_s_per_gb <= 0.03);
    }
    if asked("ring") || asked("figures") {
        figures(&mut target, size, &ring, &ring_rounds)?;
    }
    if asked("figures") {
        lone(&mut target, size, &ring)?;
        bursts(&scratch.path(), size)?;
        enters(&scratch.path(), size)?;
    }
    Ok(())
}

/// Ours, fio, fio, ours, and so on; the ratio of each pair.
fn pairs(
    target: &mut Target,
    candidate: &Candidate,
    fio: &Fio,
    depth: Option<u32>,
    name: &str,
) -> Result<Vec<Round>, Error> {
    let mut rounds = Vec::new();
    let mut ratios = Vec::new();
    for pair in 0..fio.size.pairs {
        let mut theirs = None;
        if pair % 2 == 1 {
            theirs = depth.map(|depth| fio.run(depth, fio.size.seconds)).transpose()?;
        }
        let ours = measure(target, candidate, fio.size.seconds, pair as u64)?;
        if pair % 2 == 0 {
            theirs = depth.map(|depth| fio.run(depth, fio.size.seconds)).transpose()?;
        }
        if let Some(theirs) = theirs {
            ratios.push(ours.bytes as f64 / 1e9 / ours.seconds / theirs);
        }
        rounds.push(ours);
    }
    if let Some(middle) = median(&ratios) {
        let (least, most) = ratios.iter().fold((f64::MAX, 0f64), |(a, b), ratio| (a.min(*ratio), b.max(*ratio)));
        println!("{name} / fio: {} pairs, {least:.2} to {most:.2}", ratios.len());
        let wanted = if name == "ring" { 0.95 } else { 0.90 };
        goal(&format!("{name} / fio, median of pairs"), middle, &format!(">= {wanted}"), middle >= wanted);
    }
    Ok(rounds)
}

fn figures(target: &mut Target, size: &Size, ring: &Candidate, rounds: &[Round]) -> Result<(), Error> {
    let mut rounds = rounds.to_vec();
    while rounds.iter().map(|round| round.took.len()).sum::<u64>() < size.slabs_min {
        rounds.push(measure(target, ring, size.seconds, rounds.len() as u64)?);
    }
    let all = summarize(*ring, &rounds).ok_or("no round")?;
    println!(
        "ring: {:.2} GB/s [{:.2}..{:.2}], {} slabs, cached: {}",
        all.gb_s, all.gb_s_min, all.gb_s_max, all.slabs, all.cached
    );
    goal("ring: CPU s/GB", all.cpu_s_per_gb, "<= 0.010", all.cpu_s_per_gb <= 0.010);
    println!("ring: p50 {:.1} ms, p99 {:.1} ms", all.p50_ms, all.p99_ms);
    goal("ring: p99 / p50", all.p99_ms / all.p50_ms, "<= 2.5", all.p99_ms <= 2.5 * all.p50_ms);
    let little = f64::from(ring.depth) * size.slab_bytes as f64 / all.gb_s / 1e6;
    goal("ring: p50 / (depth slab / bandwidth)", all.p50_ms / little, "<= 1.15", all.p50_ms <= 1.15 * little);
    if let Some(factor) = all.amplification {
        goal("ring: amplification", factor, "<= 1.02", factor <= 1.02);
    }
    Ok(())
}

/// One slab at a time beside the full depth, alternating, so that both see the same neighbours.
fn lone(target: &mut Target, size: &Size, ring: &Candidate) -> Result<(), Error> {
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for round in 0..size.pairs as u64 {
        alone.push(measure(target, &Candidate { depth: 1, ..*ring }, size.seconds / 2.0, round)?);
        together.push(measure(target, ring, size.seconds / 2.0, round)?);
    }
    let ratios: Vec<f64> = alone.iter().zip(&together).map(|(a, b)| speed(a) / speed(b)).collect();
    let lone = median(&ratios).unwrap_or(0.0);
    goal("a lone slab / full depth", lone, ">= 0.75", lone >= 0.75);
    Ok(())
}

/// Eight slabs submitted at once to an idle device: how long the caller is held up.
fn bursts(path: &Path, size: &Size) -> Result<(), Error> {
    let files = Arc::new(FileSet::open(&[path.to_owned()], IoMode::Auto)?);
    let pool = SlabPool::new(size.slab_bytes as usize, 8)?;
    let config = DeviceConfig { kind: DeviceKind::Uring, depth_bytes: DEPTH_AUTO, ..DeviceConfig::default() };
    let mut device = match open_device(&config, Arc::clone(&files), &pool) {
        Ok(device) => device,
        Err(error) => {
            println!("no ring: {error}");
            return Ok(());
        }
    };
    let places = size.file_bytes / size.slab_bytes;
    let mut milliseconds = Vec::new();
    for burst in 0..size.bursts as u64 {
        let slabs: Vec<_> = (0..8).filter_map(|_| pool.take()).collect();
        let mut reads = Vec::new();
        for index in 0..slabs.len() as u64 {
            // An odd multiplier scatters the places.
            let offset = (burst * 8 + index) * 0x9e37_79b1 % places * size.slab_bytes;
            let plan = layout(&[FileSpan { file: FileId(0), offset, len: size.slab_bytes }], &files)?;
            reads.push(Read { tag: index, priority: Priority::Demand, segments: plan.segments });
        }
        let start = Instant::now();
        for (read, slab) in reads.into_iter().zip(slabs) {
            device.submit(read, slab).map_err(|rejected| format!("{:?}", rejected.why))?;
        }
        milliseconds.push(start.elapsed().as_secs_f64() * 1e3);
        while let Some(done) = device.reap(Wait::AtMost(Duration::from_secs(30)))? {
            done.result?;
        }
    }
    let (middle, last) = middle_and_last(&mut milliseconds);
    println!("8 slabs submitted: median {middle:.3} ms over {} bursts", milliseconds.len());
    goal("8 slabs submitted: p99 ms", last, "<= 1", last <= 1.0);
    Ok(())
}

/// As many bytes handed to the kernel in one call, in the requests the ring's thread would make: how long that call
/// holds up the thread, which is nobody's wait but shows how full the drive's queue gets.
fn enters(path: &Path, size: &Size) -> Result<(), Error> {
    const CHUNK: usize = 2 << 20;
    let mut arena = Arena::new(8 * size.slab_bytes as usize)?;
    let memory = arena.as_mut_slice();
    let file = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
    let ring: std::io::Result<IoUring> = IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(256);
    let (Ok(file), Ok(mut ring)) = (file, ring) else {
        println!("no direct reads, or no ring of the kind that is measured");
        return Ok(());
    };
    let whole = [libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() }];
    // SAFETY: the arena outlives the ring, which is dropped first.
    unsafe { ring.submitter().register_buffers(&whole) }?;
    let places = size.file_bytes / size.slab_bytes;
    let mut milliseconds = Vec::new();
    for burst in 0..size.bursts as u64 {
        let mut requests = 0;
        for (index, slab) in memory.chunks_exact_mut(size.slab_bytes as usize).enumerate() {
            let offset = (burst * 8 + index as u64) * 0x9e37_79b1 % places * size.slab_bytes;
            for (at, chunk) in (0u64..).step_by(CHUNK).zip(slab.chunks_mut(CHUNK)) {
                let read = ReadFixed::new(Fd(file.as_raw_fd()), chunk.as_mut_ptr(), chunk.len() as u32, 0);
                // SAFETY: nobody touches the memory until the result is in, below.
                unsafe { ring.submission().push(&read.offset(offset + at).build()) }?;
                requests += 1;
            }
        }
        let start = Instant::now();
        ring.submit()?;
        milliseconds.push(start.elapsed().as_secs_f64() * 1e3);
        let mut done = 0;
        while done < requests {
            ring.submit_and_wait(1)?;
            for result in ring.completion() {
                if result.result() < 0 {
                    return Err(std::io::Error::from_raw_os_error(-result.result()).into());
                }
                done += 1;
            }
        }
    }
    let (middle, last) = middle_and_last(&mut milliseconds);
    println!("io_uring_enter of 8 slabs: median {middle:.3} ms, p99 {last:.3} ms, {} times", milliseconds.len());
    Ok(())
}

/// Median and 99th percentile.
fn middle_and_last(values: &mut [f64]) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let at = |part: f64| values[((values.len() - 1) as f64 * part).round() as usize];
    (at(0.5), at(0.99))
}

fn measure(target: &mut Target, candidate: &Candidate, seconds: f64, seed: u64) -> Result<Round, Error> {
    match target.round(candidate, seconds, seed, &mut |_| true)? {
        Outcome::Done(round) => Ok(*round),
        Outcome::Stopped => Err("stopped".into()),
    }
}

fn speed(round: &Round) -> f64 {
    round.bytes as f64 / 1e9 / round.seconds
}

fn goal(name: &str, value: f64, wanted: &str, reached: bool) {
    println!("{:4} {name}: {value:.4} (wanted {wanted})", if reached { "ok" } else { "MISS" });
}

struct Fio<'a> {
    path: PathBuf,
    size: &'a Size,
    huge: bool,
}

impl Fio<'_> {
    /// The fastest of the usual depths; `None` without fio.
    fn best_depth(&self) -> Result<Option<u32>, Error> {
        if Command::new("fio").arg("--version").output().is_err() {
            println!("no fio here: no ratio");
            return Ok(None);
        }
        if !self.huge {
            println!("too few reserved huge pages are free: fio runs on 4 KiB pages and is no ceiling");
        }
        let depths: &[u32] = if self.huge { &[1, 2, 4, 8] } else { &[4, 32] };
        let mut speeds: Vec<Vec<f64>> = depths.iter().map(|_| Vec::new()).collect();
        for _ in 0..3 {
            for (depth, speeds) in depths.iter().zip(&mut speeds) {
                speeds.push(self.run(*depth, self.size.seconds / 2.0)?);
            }
        }
        let medians = depths.iter().zip(&speeds).map(|(depth, speeds)| (*depth, median(speeds).unwrap_or(0.0)));
        let medians: Vec<(u32, f64)> = medians.collect();
        for (depth, speed) in &medians {
            println!("fio, depth {depth}: {speed:.2} GB/s");
        }
        Ok(medians.into_iter().max_by(|a, b| a.1.total_cmp(&b.1)).map(|(depth, _)| depth))
    }

    /// GB/s of one run. Others may take the reserved pages for a moment: then it is tried again.
    fn run(&self, depth: u32, seconds: f64) -> Result<f64, Error> {
        let mut outcome = self.run_once(depth, seconds);
        for _ in 0..10 {
            if outcome.is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_secs(2));
            outcome = self.run_once(depth, seconds);
        }
        outcome
    }

    fn run_once(&self, depth: u32, seconds: f64) -> Result<f64, Error> {
        let memory = if self.huge { "shmhuge" } else { "malloc" };
        let arguments = format!(
            "--name=x --filename={} --size={} --bs={} --iodepth={depth} --iomem={memory} --runtime={}ms --readonly \
             --rw=randread --ioengine=io_uring --direct=1 --fixedbufs=1 --time_based --norandommap --randrepeat=0 \
             --thread --invalidate=0 --output-format=terse --terse-version=3",
            self.path.display(),
            self.size.file_bytes / self.size.slab_bytes * self.size.slab_bytes,
            self.size.slab_bytes,
            (seconds * 1e3) as u64,
        );
        let output = Command::new("fio").args(arguments.split_whitespace()).output()?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        // Version 3: after version, fio's own, name, group and error come KiB read and KiB/s.
        let line = text.lines().find(|line| line.starts_with("3;"));
        let rate: Option<f64> = line.and_then(|line| line.split(';').nth(6)?.parse().ok());
        match rate {
            Some(kib_s) if kib_s > 0.0 => Ok(kib_s * 1024.0 / 1e9),
            _ => Err(format!("fio: {}{text}", String::from_utf8_lossy(&output.stderr)).into()),
        }
    }
}

fn free_huge_pages() -> u64 {
    let text = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

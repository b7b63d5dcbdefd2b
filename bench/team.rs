//! What dividing work among threads costs, and what becomes of it when other programs want the cores.
//!
//! `cargo bench --bench team`. A run of a [`Team`] ends when its last task does, so three things cost: handing tasks over,
//! waking threads that went to sleep since the run before, and waiting for a thread whose core another program took. The
//! first two are measured with tasks that do nothing and with tasks of a known length, back to back and after pauses; the
//! third with a chain of small matmuls, as the layers of a small model are, while processes of this program do nothing but
//! keep cores busy. There "fair" is the speed at which every thread that wants a core has the same share of one. Medians;
//! cases take turns. Under `cargo test` everything is done once, briefly.

use std::error::Error;
use std::hint::{black_box, spin_loop};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use millstream::kernels::{Format, Input, Kernels, MatrixSpec, Quantized, Team, WeightRef, matmul};
use millstream_io::measure::median;

/// The argument that makes this program keep a core busy for as long as its parent, the next argument, lives.
const HOG: &str = "--hog";

/// A task of a wake-up's measurement.
const TASK: Duration = Duration::from_micros(20);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    if let Some(parent) = std::env::args().skip_while(|arg| arg != HOG).nth(1) {
        let parent: u32 = parent.parse()?;
        // Ends with the benchmark, whatever ended that.
        while std::os::unix::process::parent_id() == parent {
            for i in 0..100_000_000u64 {
                black_box(i);
            }
        }
        return Ok(());
    }
    let measuring = std::env::args().any(|arg| arg == "--bench");
    let cores = std::thread::available_parallelism()?.get();
    println!("{cores} cores");
    handing_over(cores, if measuring { 20_000 } else { 10 });
    waking(cores, if measuring { 400 } else { 2 });
    crowded(cores, if measuring { Duration::from_secs(3) } else { Duration::from_millis(5) }, measuring)
}

/// Runs whose tasks do nothing.
fn handing_over(cores: usize, runs: usize) {
    println!("\n{:24} {:>10}", "empty run, back to back", "us");
    for threads in 1..=cores {
        let team = Team::new(threads);
        let mut times = Vec::with_capacity(runs);
        for _ in 0..runs {
            let began = Instant::now();
            team.run(2 * threads, &|task| {
                black_box(task);
            });
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        println!("{:24} {:10.2}", format!("{threads} threads"), middle(&times));
    }
}

/// Runs with one task a thread, after pauses in which the caller is busy with something else.
fn waking(cores: usize, runs: usize) {
    println!("\n{:24} {:>10} {:>10}", "a task of 20 us a thread", "us", "p90");
    let team = Team::new(cores);
    for pause in [0, 5, 20, 50, 100, 1000, 10_000].map(Duration::from_micros) {
        let mut times = Vec::with_capacity(runs);
        for _ in 0..runs {
            busy(pause);
            let began = Instant::now();
            team.run(cores, &|_| busy(TASK));
            times.push(began.elapsed().as_secs_f64() * 1e6);
        }
        times.sort_by(f64::total_cmp);
        let p90 = times[times.len() * 9 / 10];
        println!("{:24} {:10.1} {p90:10.1}", format!("after {} us", pause.as_micros()), middle(&times));
    }
}

/// A chain of small matmuls while other processes want the cores.
fn crowded(cores: usize, time: Duration, measuring: bool) -> Outcome<()> {
    println!("\n{:38} {:>12} {:>7} {:>7}", "chain of matmuls of 512 x 512, int8", "a second", "alone", "fair");
    for threads in 1..=cores {
        let team = Team::new(threads);
        let mut alone = 0.0;
        for hogs in [0, 1, cores, 2 * cores] {
            let crowd = Crowd::new(if measuring { hogs } else { hogs.min(1) })?;
            let speed = chain(&team, time);
            drop(crowd);
            if hogs == 0 {
                alone = speed;
            }
            let fair = (cores as f64 / (threads + hogs) as f64).min(1.0);
            let case = format!("{threads} threads, {hogs} busy processes");
            println!("{case:38} {speed:12.0} {:7.2} {fair:7.2}", speed / alone);
        }
    }
    Ok(())
}

/// Matmuls in a second, each of which takes what the one before gave.
fn chain(team: &Team, time: Duration) -> f64 {
    const SIDE: usize = 512;
    let spec = MatrixSpec { rows: SIDE, cols: SIDE, format: Format::Int8Row };
    let data: Vec<u8> = (0..spec.data_bytes()).map(|i| (i * 37 % 251) as u8).collect();
    let scales: Vec<u8> = (0..SIDE).flat_map(|_| 1e-3f32.to_le_bytes()).collect();
    let (kernels, w) = (Kernels::best(), WeightRef::new(spec, &data, &scales));
    let (mut x, mut out, mut quantized) = (vec![0.5f32; SIDE], vec![0.0f32; SIDE], Quantized::with_capacity(1, SIDE));
    let (mut calls, began) = (0u64, Instant::now());
    while began.elapsed() < time {
        for _ in 0..32 {
            quantized.quantize(kernels, &x, 1, SIDE);
            let input = Input { rows: 1, cols: SIDE, values: &x, quantized: Some(&quantized) };
            matmul(kernels, team, &w, &input, &mut out);
            x.copy_from_slice(&out);
            calls += 1;
        }
    }
    calls as f64 / began.elapsed().as_secs_f64()
}

/// Processes that keep cores busy until this is dropped.
struct Crowd(Vec<Child>);

impl Crowd {
    fn new(processes: usize) -> Outcome<Crowd> {
        let mut crowd = Crowd(Vec::new());
        for _ in 0..processes {
            crowd.0.push(Command::new(std::env::current_exe()?).arg(HOG).arg(std::process::id().to_string()).spawn()?);
        }
        // They are spread over the cores by then.
        std::thread::sleep(Duration::from_millis(if processes > 0 { 200 } else { 0 }));
        Ok(crowd)
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // One that is gone already is what is wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn busy(time: Duration) {
    let began = Instant::now();
    while began.elapsed() < time {
        spin_loop();
    }
}

fn middle(times: &[f64]) -> f64 {
    median(times).unwrap_or(0.0)
}

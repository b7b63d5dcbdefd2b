//! What attention costs at the shapes of GLM-5.2, beside the fastest that this processor multiplies.
//!
//! The canonical run is `cargo bench --bench attention`. Arguments keep the cases whose name contains one of them. A loop of
//! fused multiply-adds that touches no memory takes turns with the cases, round after round, on one thread and on two, and
//! medians are printed: milliseconds a layer, GMAC/s, and the fraction of that loop. Multiplications are those of the
//! definition, `rank + rope` and `rank` a head and position where keys are latents. Under `cargo test` every case runs once
//! at a small size.

#![allow(unsafe_code)]

use std::hint::black_box;
use std::time::Instant;

use millstream::kernels::{Format, Kernels, MatrixSpec, Table, Team, WeightRef, bf16_of};
use millstream::ops::attention::Attended;
use millstream::ops::attention::latent::{self, Scratch, Shape};
use millstream::ops::indexer::{Scored, Selection};
use millstream::ops::room::Room;
use millstream::ops::{Activations, Compute};

const SHAPE: Shape = Shape { heads: 64, nope: 192, rope: 64, value: 256, rank: 512 };
const INDEX_HEADS: usize = 32;
const INDEX_DIM: usize = 128;
const TOP_K: usize = 2048;

#[derive(Clone, Copy)]
enum Work {
    /// Query rows in the latent space, each over all positions up to its own, or over so many of them.
    Absorbed { listed: bool },
    /// Query rows over keys and values that are built again for every position.
    Explicit,
    /// Scores of all positions, and the best of them.
    Select,
}

struct Case {
    name: String,
    work: Work,
    rows: usize,
    positions: usize,
    threads: usize,
    /// Whether the cache is held in halves.
    halves: bool,
}

impl Case {
    fn new(work: Work, rows: usize, positions: usize, threads: usize, halves: bool) -> Case {
        let kind = match work {
            Work::Absorbed { listed: false } => "absorbed",
            Work::Absorbed { listed: true } => "absorbed-2048-of",
            Work::Explicit => "explicit",
            Work::Select => "select",
        };
        let held = if halves { " bf16" } else { "" };
        Case { name: format!("{kind} r{rows} p{positions} t{threads}{held}"), work, rows, positions, threads, halves }
    }

    /// Multiplications of the definition: of the rows with positions, and of what goes before and after.
    fn products(&self) -> f64 {
        let s = SHAPE;
        let first = self.positions - self.rows;
        let pairs: usize = match self.work {
            Work::Absorbed { listed: true } => self.rows * TOP_K,
            Work::Select => self.rows * self.positions,
            _ => (0..self.rows).map(|row| first + row + 1).sum(),
        };
        let (pair, before) = match self.work {
            Work::Absorbed { .. } => (s.heads * (s.cached() + s.rank), self.rows * s.heads * s.rank),
            Work::Explicit => (s.heads * (s.query() + s.value), self.positions * s.heads * s.rank),
            Work::Select => (INDEX_HEADS * INDEX_DIM, 0),
        };
        (pairs * pair + before * (s.nope + s.value)) as f64
    }
}

fn noise(count: usize, mut seed: u64) -> Vec<f32> {
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next() * 0.1).collect()
}

/// Everything that the cases read, as long as the longest needs it.
struct Stock {
    kv_b: Vec<u8>,
    scales: Vec<u8>,
    cache: Vec<f32>,
    cache_halves: Vec<u16>,
    keys: Vec<f32>,
    keys_halves: Vec<u16>,
    queries: Vec<f32>,
}

const KV_B: MatrixSpec =
    MatrixSpec { format: Format::Int8Row, rows: SHAPE.heads * (SHAPE.nope + SHAPE.value), cols: SHAPE.rank };

impl Stock {
    fn new(positions: usize, rows: usize) -> Stock {
        let (cache, keys) = (noise(positions * SHAPE.cached(), 1), noise(positions * INDEX_DIM, 2));
        Stock {
            kv_b: (0..KV_B.data_bytes()).map(|i| (i * 37 % 251) as u8).collect(),
            scales: (0..KV_B.rows).flat_map(|_| 0.001f32.to_le_bytes()).collect(),
            cache_halves: cache.iter().map(|value| bf16_of(*value)).collect(),
            cache,
            keys_halves: keys.iter().map(|value| bf16_of(*value)).collect(),
            keys,
            queries: noise(rows * SHAPE.heads * SHAPE.query(), 3),
        }
    }

    /// Seconds of one layer.
    fn run(&self, case: &Case, compute: &Compute) -> f64 {
        let Case { work, rows, positions, threads, halves, .. } = *case;
        let (s, first) = (SHAPE, positions - rows);
        let queries = &self.queries[..rows * s.heads * s.query()];
        let cache = if halves { Table::Bf16(&self.cache_halves) } else { Table::F32(&self.cache) };
        let kv_b = WeightRef::new(KV_B, &self.kv_b, &self.scales);
        let room = &mut Room::default();
        if let Work::Select = work {
            let mut selection = Selection::new(rows, positions, TOP_K.min(positions / 2), threads, room);
            let (queries, weights) = (&self.queries[..rows * INDEX_HEADS * INDEX_DIM], vec![0.1; rows * INDEX_HEADS]);
            let keys = if halves { Table::Bf16(&self.keys_halves) } else { Table::F32(&self.keys) };
            let of = Scored { heads: INDEX_HEADS, dim: INDEX_DIM, queries, weights: &weights, keys };
            let mut call = || {
                let started = Instant::now();
                selection.select(compute, 0, first, &of);
                started.elapsed().as_secs_f64()
            };
            call();
            return call();
        }
        let explicit = matches!(work, Work::Explicit);
        let mut scratch = Scratch::new(&s, rows, threads, if explicit { positions } else { 0 }, room);
        let mut out = vec![0.0; rows * s.heads * s.value];
        let listed: Vec<u32> = (0..TOP_K).map(|i| (i * positions / TOP_K) as u32).collect();
        let attended = |row: usize| match work {
            Work::Absorbed { listed: true } => Attended::Listed(&listed),
            _ => Attended::Prefix(first + row + 1),
        };
        // Once before it is timed, so that no buffer is touched for the first time.
        let mut call = || match explicit {
            true => latent::explicit(compute, &s, &kv_b, queries, cache, positions, &attended, &mut scratch, &mut out),
            false => latent::absorbed(compute, &s, &kv_b, queries, cache, &attended, &mut scratch, &mut out),
        };
        if rows < 64 {
            call();
        }
        let started = Instant::now();
        call();
        let seconds = started.elapsed().as_secs_f64();
        black_box(&out);
        seconds
    }
}

/// GMAC/s of fused multiply-adds on values in registers, all threads together.
fn peak(team: &Team) -> f64 {
    const LOOPS: usize = 400_000;
    const LANES: usize = 16 * 12;
    let started = Instant::now();
    team.run(team.threads(), &|i| {
        black_box(registers(LOOPS, black_box(i as f32 * 0.1)));
    });
    (LOOPS * LANES * team.threads()) as f64 / started.elapsed().as_secs_f64() / 1e9
}

/// Twelve chains of the widest multiply-adds that this processor has.
fn registers(loops: usize, x: f32) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor was just asked.
        return unsafe { wide(loops, x) };
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the processor was just asked.
        return unsafe { narrow(loops, x) };
    }
    chains(loops, x)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn wide(loops: usize, x: f32) -> f32 {
    use std::arch::x86_64::*;
    let (by, mut sums) = (_mm512_set1_ps(x), [_mm512_set1_ps(x); 12]);
    for _ in 0..loops {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(*sum, by, by);
        }
    }
    sums.into_iter().map(|sum| _mm512_reduce_add_ps(sum)).sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn narrow(loops: usize, x: f32) -> f32 {
    chains(loops, x)
}

#[inline(always)]
fn chains(loops: usize, x: f32) -> f32 {
    let mut sums = [x; 16 * 12];
    for _ in 0..loops {
        sums.iter_mut().for_each(|sum| *sum = sum.mul_add(x, x));
    }
    sums.into_iter().sum()
}

fn cases(measuring: bool) -> Vec<Case> {
    let (absorbed, listed) = (Work::Absorbed { listed: false }, Work::Absorbed { listed: true });
    let mut cases = vec![];
    if !measuring {
        let small = [(absorbed, 1, 40), (listed, 1, 40), (Work::Explicit, 20, 40), (Work::Select, 2, 40)];
        let both = small.into_iter().flat_map(|case| [(case, false), (case, true)]);
        return both.map(|((work, rows, positions), halves)| Case::new(work, rows, positions, 2, halves)).collect();
    }
    for threads in [1, 2] {
        for (work, rows, positions) in [
            (absorbed, 1, 128),
            (absorbed, 1, 512),
            (absorbed, 1, 2048),
            (absorbed, 8, 2048),
            (listed, 1, 32_768),
            (Work::Select, 1, 8192),
            (Work::Select, 1, 32_768),
            (Work::Explicit, 512, 512),
            (absorbed, 64, 512),
        ] {
            cases.extend([false, true].map(|halves| Case::new(work, rows, positions, threads, halves)));
        }
    }
    cases
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let measuring = std::env::args().any(|a| a == "--bench");
    let rounds = if measuring { 7 } else { 1 };
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut cases = cases(measuring);
    cases.retain(|case| filter.is_empty() || filter.iter().any(|part| case.name.contains(part)));
    let longest = cases.iter().map(|case| case.positions).max().unwrap_or(1);
    let stock = Stock::new(longest.max(TOP_K), cases.iter().map(|case| case.rows).max().unwrap_or(1));
    let mut times = vec![vec![]; cases.len()];
    let mut peaks = [vec![], vec![]];
    for _ in 0..rounds {
        for threads in [1, 2] {
            let compute = Compute { kernels: Kernels::best(), team: Team::new(threads), activations: Activations::F32 };
            peaks[threads - 1].push(peak(&compute.team));
            for (case, times) in cases.iter().zip(&mut times).filter(|(case, _)| case.threads == threads) {
                times.push(stock.run(case, &compute));
            }
        }
    }
    println!(
        "multiply-adds in registers: {:.1} GMAC/s on one thread, {:.1} on two",
        median(&peaks[0]),
        median(&peaks[1])
    );
    println!("{:<32} {:>9} {:>8} {:>8}", "case", "ms", "GMAC/s", "of peak");
    for (case, times) in cases.iter().zip(&times).filter(|(_, times)| !times.is_empty()) {
        let (seconds, peak) = (median(times), median(&peaks[case.threads - 1]));
        let rate = case.products() / seconds / 1e9;
        println!("{:<32} {:>9.3} {rate:>8.1} {:>7.0}%", case.name, seconds * 1e3, 100.0 * rate / peak);
    }
}

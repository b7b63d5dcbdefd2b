//! How close each kernel comes to reading its weights at the speed of memory.
//!
//! The canonical run is `cargo bench --bench kernels`. Arguments keep the cases that have all of them among their words: the
//! table, the format, the path, the shape, `b1` to `b32` (the batch), `t1` or `t2` (the threads). Weights are larger
//! than any cache; of a matrix larger than the stock as many rows are multiplied as it holds. Cases take turns with a plain
//! loop that only reads, and with loops that only multiply in registers, round after round, and the medians are printed; GB/s
//! count weights and scales, "of peak" is the fraction of the products that the registers alone make: of bytes on the integer
//! path, of f32 on the exact one. "cpu" divides by the processor time of all threads over their number, instead of time on the clock,
//! which leaves out the turns of other programs. Under `cargo test` a few small matrices pass through every case once.

#![allow(unsafe_code)]

use std::hint::black_box;
use std::time::Instant;

use millstream::kernels::{Format, Input, Isa, Kernels, MatrixSpec, Quantized, Team, WeightRef, matmul};

fn measuring() -> bool {
    std::env::args().any(|a| a == "--bench")
}

/// Bytes that weights are cut from.
fn stock_bytes() -> usize {
    if measuring() { 320 << 20 } else { 64 << 20 }
}

/// One line of the table.
struct Case {
    kernels: &'static Kernels,
    spec: MatrixSpec,
    batch: usize,
    integer: bool,
    team: usize,
}

/// A span on the clock, and the processor time that this program took in it.
#[derive(Clone, Copy)]
struct Seconds {
    wall: f64,
    cpu: f64,
}

struct Started {
    wall: Instant,
    cpu: f64,
}

impl Started {
    fn now() -> Started {
        Started { wall: Instant::now(), cpu: process_seconds() }
    }

    fn elapsed(&self) -> Seconds {
        Seconds { wall: self.wall.elapsed().as_secs_f64(), cpu: process_seconds() - self.cpu }
    }
}

fn process_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes the live struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Bytes that weights and scales are cut from.
struct Stock {
    /// Random bytes.
    integers: Vec<u8>,
    /// Random bytes that are floats of ordinary size in every float format of two bytes or four.
    floats: Vec<u8>,
    /// Scales about 0.01.
    scales: Vec<u8>,
}

/// Room for `bytes`, on 2 MiB pages where the system gives them: slabs lie on such pages.
fn huge_pages(bytes: usize) -> Vec<u8> {
    let mut room = Vec::<u8>::with_capacity(bytes + (4 << 20));
    let start = room.as_mut_ptr().wrapping_byte_add(room.as_ptr().align_offset(4096));
    // SAFETY: whole pages inside a live allocation of this function, of which the advice changes no contents.
    let _ = unsafe { libc::madvise(start.cast(), bytes & !4095, libc::MADV_HUGEPAGE) };
    room
}

impl Stock {
    fn new(bytes: usize) -> Stock {
        let mut state = 1u64;
        let mut integers = huge_pages(bytes);
        while integers.len() < bytes {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            integers.extend_from_slice(&(state ^ (state >> 29)).to_le_bytes());
        }
        let mut floats = huge_pages(bytes);
        floats.extend_from_slice(&integers);
        for byte in floats.iter_mut().skip(1).step_by(2) {
            *byte = *byte & 0x81 | 0x3c;
        }
        let scales = integers[..bytes / 8].iter().flat_map(|b| (f32::from(*b) / 16384.0).to_le_bytes()).collect();
        Stock { integers, floats, scales }
    }

    fn read_all(&self, team: &Team) -> u64 {
        let total = std::sync::atomic::AtomicU64::new(0);
        let chunks = self.integers.as_chunks::<{ 128 << 10 }>().0;
        team.run(chunks.len(), &|i| {
            let mut sums = [0u64; 16];
            for line in chunks[i].as_chunks::<128>().0 {
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum = sum.wrapping_add(u64::from_le_bytes(*word));
                }
            }
            total.fetch_add(sums.into_iter().fold(0, u64::wrapping_add), std::sync::atomic::Ordering::Relaxed);
        });
        total.into_inner()
    }
}

impl Case {
    /// What is multiplied of the matrix.
    fn part(&self) -> MatrixSpec {
        let room = (stock_bytes() - 4096) / self.spec.format.row_bytes(self.spec.cols);
        MatrixSpec { rows: self.spec.rows.min(room), ..self.spec }
    }

    fn bytes(&self) -> usize {
        self.part().data_bytes() + self.part().scale_bytes()
    }

    fn words(&self) -> [String; 6] {
        let MatrixSpec { format, rows, cols } = self.spec;
        let path = if self.integer { "integer" } else { "exact" };
        let (batch, threads) = (format!("b{}", self.batch), format!("t{}", self.team));
        [self.kernels.isa.to_string(), format.to_string(), path.into(), format!("{rows}x{cols}"), batch, threads]
    }

    /// Seconds per matrix, over as many matrices as the stock holds.
    fn run(&self, stock: &Stock, team: &Team, limit: usize) -> Seconds {
        let spec = self.part();
        let MatrixSpec { format, rows, cols } = spec;
        let float = matches!(format, Format::F32 | Format::Bf16 | Format::F16);
        let data = if float { &stock.floats } else { &stock.integers };
        // Slabs begin on a page, and so do the matrices in them.
        let data = &data[data.as_ptr().align_offset(4096)..];
        let x: Vec<f32> = (0..self.batch * cols).map(|i| (i * 37 % 101) as f32 * 0.01 - 0.5).collect();
        let mut quantized = Quantized::with_capacity(self.batch, cols);
        quantized.quantize(self.kernels, &x, self.batch, cols);
        let input = Input { rows: self.batch, cols, values: &x, quantized: self.integer.then_some(&quantized) };
        let mut out = vec![0.0; self.batch * rows];
        let matrices = (data.len() / spec.data_bytes()).min(limit);
        let scale_room = stock.scales.len() - spec.scale_bytes();
        let started = Started::now();
        for i in 0..matrices {
            let data = &data[i * spec.data_bytes()..][..spec.data_bytes()];
            let scales = &stock.scales[i * spec.scale_bytes() % (scale_room + 1)..][..spec.scale_bytes()];
            matmul(self.kernels, team, &WeightRef::new(spec, data, scales), &input, &mut out);
            black_box(&mut out);
        }
        let total = started.elapsed();
        Seconds { wall: total.wall / matrices as f64, cpu: total.cpu / matrices as f64 }
    }
}

/// The shapes of GLM-5.2: of an expert, of attention, and the head.
const SHAPES: [(usize, usize); 6] =
    [(2048, 6144), (6144, 2048), (16384, 2048), (6144, 16384), (28672, 512), (154_880, 6144)];

fn cases(teams: &[usize]) -> Vec<Case> {
    let best = Kernels::best();
    let group = |group| Format::Int4Group { group };
    let lesser = Kernels::for_isa(Isa::Avx2).filter(|k| k.isa != best.isa);
    // Tiles are compared with what stands in for them, where they have their turn.
    let vectors = Kernels::for_isa(Isa::Avx512).filter(|k| k.isa != best.isa);
    let mut cases = Vec::new();
    for &team in teams {
        for batch in [1, 4, 8, 16, 32] {
            // Tables that are compared take their turns one after the other.
            let mut add = |format, (rows, cols), integer| {
                let compared = lesser.filter(|_| batch == 1 && rows * cols == 2048 * 6144);
                let replaced = vectors.filter(|_| batch >= 16 && integer);
                for kernels in [Some(best), compared, replaced].into_iter().flatten() {
                    let spec = MatrixSpec { format, rows, cols };
                    cases.push(Case { kernels, spec, batch, integer, team });
                }
            };
            for format in [Format::Int4Row, group(64), Format::Int8Row, Format::Fp8Block, Format::Bf16] {
                for shape in if batch == 1 { &SHAPES[..] } else { &SHAPES[..4] } {
                    add(format, *shape, format.is_integer());
                }
            }
            for format in [group(128), group(32), Format::Int3Group, Format::Int2Row] {
                add(format, SHAPES[0], true);
            }
            for format in [Format::F32, Format::F16] {
                add(format, SHAPES[0], false);
            }
            for format in [Format::Int4Row, group(64), Format::Int8Row, Format::Int3Group] {
                add(format, SHAPES[0], false);
            }
        }
    }
    cases
}

/// Turns of a loop over registers, and sums that do not wait for one another.
const TURNS: usize = 200_000;
const CHAINS: usize = 12;

/// How many products a core makes of what is in its registers, in 10^9 a second: of bytes, and of f32.
fn peaks(isa: Isa) -> [f64; 2] {
    let rate = |products: usize, run: &dyn Fn()| {
        let started = Started::now();
        run();
        (TURNS * CHAINS * products) as f64 / started.elapsed().cpu / 1e9
    };
    #[cfg(target_arch = "x86_64")]
    {
        use registers::{bytes_512, floats_256, floats_512, tiles};
        // SAFETY: that there are kernels for an instruction set means that this CPU has it.
        let run = |function: unsafe fn()| unsafe { function() };
        match isa {
            Isa::Amx => [rate(16 * 16 * 64, &tiles), rate(16, &|| run(floats_512))],
            Isa::Avx512 => [rate(64, &|| run(bytes_512)), rate(16, &|| run(floats_512))],
            Isa::Avx2 => [f64::NAN, rate(8, &|| run(floats_256))],
            Isa::Scalar => [f64::NAN; 2],
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = (isa, rate(1, &|| ()));
        [f64::NAN; 2]
    }
}

/// Loops of products of what is in registers.
#[cfg(target_arch = "x86_64")]
mod registers {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{CHAINS, TURNS};

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn bytes_512() {
        let mut sums = [_mm512_setzero_si512(); CHAINS];
        let (a, b) = black_box((_mm512_set1_epi8(1), _mm512_set1_epi8(1)));
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm512_dpbusd_epi32(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f")]
    pub fn floats_512() {
        let mut sums = [_mm512_setzero_ps(); CHAINS];
        let (a, b) = black_box((_mm512_set1_ps(1.0), _mm512_set1_ps(1.0)));
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx2,fma")]
    pub fn floats_256() {
        let mut sums = [_mm256_setzero_ps(); CHAINS];
        let (a, b) = black_box((_mm256_set1_ps(1.0), _mm256_set1_ps(1.0)));
        for _ in 0..TURNS {
            for sum in &mut sums {
                *sum = _mm256_fmadd_ps(*sum, a, b);
            }
        }
        black_box(sums);
    }

    /// Four sums of 16 x 16, each of as many products of 64 bytes; all tile registers are of full size and used.
    pub fn tiles() {
        #[repr(C, align(64))]
        struct Config([u8; 64]);
        let mut config = Config([0; 64]);
        config.0[0] = 1;
        for tile in 0..8 {
            (config.0[16 + 2 * tile], config.0[48 + tile]) = (64, 16);
        }
        // SAFETY: that there are AMX kernels means that this CPU has the instructions and the process permission for
        // the registers; the block reads the configuration, and leaves the registers as it found them, without any.
        unsafe {
            std::arch::asm!(
                "ldtilecfg [{config}]",
                "2:",
                "tdpbssd tmm0, tmm4, tmm6",
                "tdpbssd tmm1, tmm4, tmm7",
                "tdpbssd tmm2, tmm5, tmm6",
                "tdpbssd tmm3, tmm5, tmm7",
                "dec {turns}",
                "jnz 2b",
                "tilerelease",
                config = in(reg) &config,
                turns = inout(reg) TURNS * CHAINS / 4 => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Kernels that stay in cache: nanoseconds per element.
fn vectors(rounds: usize) {
    let k = Kernels::best();
    let x: Vec<f32> = (0..6144).map(|i| (i * 37 % 101) as f32 * 0.01 - 0.5).collect();
    let mut y = x.clone();
    let mut quantized = Quantized::with_capacity(1, x.len());
    let spec = MatrixSpec { format: Format::Int4Row, rows: 192, cols: 512 };
    let (data, scales) = (vec![0x5a; spec.data_bytes()], vec![0; spec.scale_bytes()]);
    let w = WeightRef::new(spec, &data, &scales);
    let report = |name: &str, elements: usize, call: &mut dyn FnMut()| {
        let times = (0..rounds).map(|_| {
            let started = Instant::now();
            (0..20).for_each(|_| call());
            started.elapsed().as_secs_f64() / 20.0
        });
        println!("{name:<28} {:>8.3} ns/element", median(times.collect()) * 1e9 / elements as f64);
    };
    report("dot 576", 576, &mut || {
        black_box(k.dot(black_box(&x[..576]), black_box(&y[..576])));
    });
    report("axpy 512", 512, &mut || k.axpy(black_box(0.0), &x[..512], &mut y[..512]));
    report("silu_mul 2048", 2048, &mut || k.silu_mul(&x[..2048], black_box(&mut y[..2048])));
    report("exp_shifted 4096", 4096, &mut || {
        black_box(k.exp_shifted(black_box(&mut y[..4096]), 1.0));
    });
    report("quantize 6144", 6144, &mut || quantized.quantize(k, black_box(&x), 1, x.len()));
    report("decode_row int4 512", 512, &mut || k.decode_row(&w, black_box(7), &mut y[..512]));
    report("add_scaled_rows int4 192x512", 192 * 512, &mut || {
        k.add_scaled_rows(&w, 0..192, black_box(&x[..192]), &mut y[..512]);
    });
}

fn main() {
    let measuring = measuring();
    let (rounds, limit) = if measuring { (15, usize::MAX) } else { (1, 1) };
    let stock = Stock::new(stock_bytes());
    let teams = [1, 2];
    let filter: Vec<String> = std::env::args().skip(1).filter(|a| !a.starts_with('-')).collect();
    let mut cases = cases(&teams);
    cases.retain(|case| filter.iter().all(|word| case.words().contains(word)));
    let mut reads = vec![Vec::new(); teams.len()];
    let mut times = vec![Vec::new(); cases.len()];
    let mut products = [vec![], vec![]];
    for _ in 0..rounds {
        for (rates, rate) in products.iter_mut().zip(peaks(Kernels::best().isa)) {
            rates.push(rate);
        }
        for (t, threads) in teams.iter().enumerate() {
            let team = Team::new(*threads);
            for (case, times) in cases.iter().zip(&mut times).filter(|(case, _)| case.team == *threads) {
                // A batch is limited by arithmetic and slower: fewer matrices tell as much.
                let limit = if case.batch > 1 { limit.min(64 / case.batch) } else { limit };
                times.push(case.run(&stock, &team, limit));
            }
            for _ in 0..5 {
                let started = Started::now();
                black_box(stock.read_all(&team));
                reads[t].push(started.elapsed());
            }
        }
    }
    let rates = |bytes: usize, times: Vec<Seconds>| {
        let rate = |seconds: Vec<f64>| bytes as f64 / median(seconds) / 1e9;
        [rate(times.iter().map(|t| t.wall).collect()), rate(times.iter().map(|t| t.cpu).collect())]
    };
    let reads: Vec<_> = reads.into_iter().map(|times| rates(stock.integers.len(), times)).collect();
    let reads: Vec<_> = reads.iter().zip(&teams).map(|([wall, cpu], threads)| [*wall, cpu * *threads as f64]).collect();
    for (threads, [wall, cpu]) in teams.iter().zip(&reads) {
        println!("plain read, {threads} threads: {wall:.1} GB/s, cpu {cpu:.1}");
    }
    let peaks = products.map(median);
    println!("in registers, 1 core: {:.1} GMAC/s of bytes, {:.1} of f32", peaks[0], peaks[1]);
    println!(
        "{:<8} {:<9} {:<8} {:>11} {:>5} {:>7} {:>6} {:>7} {:>6} {:>7} {:>7} {:>7}",
        "table",
        "format",
        "path",
        "shape",
        "batch",
        "threads",
        "GB/s",
        "of read",
        "cpu",
        "of read",
        "GMAC/s",
        "of peak"
    );
    for (case, times) in cases.iter().zip(times) {
        let read = teams.iter().zip(&reads).find(|(t, _)| **t == case.team).map_or([f64::NAN; 2], |(_, read)| *read);
        let [wall, cpu] = rates(case.bytes(), times);
        let cpu = cpu * case.team as f64;
        let [table, format, path, shape, ..] = case.words();
        let part = case.part();
        let products = (part.rows * part.cols * case.batch) as f64 / case.bytes() as f64;
        println!(
            "{table:<8} {format:<9} {path:<8} {shape:>11} {:>5} {:>7} {wall:>6.1} {:>6.0}% {cpu:>6.1} {:>6.0}% {:>7.1} {:>6.0}%",
            case.batch,
            case.team,
            100.0 * wall / read[0],
            100.0 * cpu / read[1],
            products * wall,
            100.0 * products * cpu / (case.team as f64 * peaks[usize::from(!case.integer)]),
        );
    }
    vectors(if measuring { 101 } else { 1 });
}

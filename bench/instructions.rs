//! How many instructions each kernel takes for a fixed small input, as callgrind counts them.
//!
//! `scripts/callgrind.sh` runs this program under valgrind and compares with `bench/instructions.txt`. What time can't show
//! on a busy machine, such as a loop that a compiler no longer turns into vectors, or a bound that is checked again for every
//! element, a count does. Valgrind knows no AVX-512, so that only the scalar and the AVX2 kernels are counted. Without it the
//! program does the same work and nobody counts.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::hint::black_box;

use millstream::kernels::{Format, Input, Isa, Kernels, MatrixSpec, Quantized, RowsAt, Table, Team, WeightRef, matmul};

/// Requests to callgrind, by the numbers of its header file.
const ZERO_STATS: u64 = 0x4354_0001;
const DUMP_STATS_AT: u64 = 0x4354_0003;

/// Passes a request with one argument to valgrind, if that runs this program.
fn request(number: u64, argument: u64) {
    #[cfg(target_arch = "x86_64")]
    {
        let arguments = [number, argument, 0, 0, 0, 0];
        // SAFETY: the rotations add up to whole turns of `rdi`, and exchanging a register with itself does nothing: valgrind
        // knows the sequence, reads the live array, and answers in `rdx`.
        unsafe {
            std::arch::asm!(
                "rol rdi, 3",
                "rol rdi, 13",
                "rol rdi, 61",
                "rol rdi, 51",
                "xchg rbx, rbx",
                in("rax") arguments.as_ptr(),
                inout("rdx") 0_u64 => _,
                out("rdi") _,
            );
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (number, argument);
}

/// Counts what `run` does under `name`.
fn count(name: String, run: impl FnOnce()) {
    let name = CString::new(name).expect("no zero in a name");
    request(ZERO_STATS, 0);
    run();
    request(DUMP_STATS_AT, name.as_ptr() as u64);
}

const ROWS: usize = 32;
const COLS: usize = 512;

/// Numbers between -0.5 and 0.5.
fn floats(len: usize) -> Vec<f32> {
    (0..len).map(|i| (i * 37 % 101) as f32 * 0.01 - 0.5).collect()
}

/// Bytes that are ordinary numbers in every format.
fn weights(format: Format) -> Vec<u8> {
    let len = MatrixSpec { format, rows: ROWS, cols: COLS }.data_bytes();
    let bytes = (0..len).map(|i| (i * 89 % 251) as u8);
    let float = matches!(format, Format::F32 | Format::Bf16 | Format::F16);
    bytes.enumerate().map(|(i, byte)| if float && i % 2 == 1 { byte & 0x81 | 0x3c } else { byte }).collect()
}

fn matrices(k: &Kernels) {
    let team = Team::new(1);
    let integers = [
        Format::Int8Row,
        Format::Int4Row,
        Format::Int4Group { group: 64 },
        Format::Int4Group { group: 32 },
        Format::Int3Group,
        Format::Int2Row,
    ];
    let floats_too = [Format::F32, Format::Bf16, Format::F16, Format::Fp8Block];
    for format in integers.into_iter().chain(floats_too) {
        let spec = MatrixSpec { format, rows: ROWS, cols: COLS };
        let (data, scales) = (weights(format), 0.01f32.to_le_bytes().repeat(spec.scale_bytes() / 4));
        let w = WeightRef::new(spec, &data, &scales);
        for batch in [1, 8] {
            let x = floats(batch * COLS);
            let mut quantized = Quantized::with_capacity(batch, COLS);
            quantized.quantize(k, &x, batch, COLS);
            let mut out = vec![0.0; batch * ROWS];
            for integer in [false, true] {
                if integer && !format.is_integer() {
                    continue;
                }
                let path = if integer { "integer" } else { "exact" };
                let input = Input { rows: batch, cols: COLS, values: &x, quantized: integer.then_some(&quantized) };
                count(format!("{} matmul-{path} {format} {batch}", k.isa), || {
                    matmul(k, &team, black_box(&w), &input, black_box(&mut out));
                });
            }
        }
        let mut row = vec![0.0; COLS];
        count(format!("{} decode_row {format}", k.isa), || k.decode_row(black_box(&w), 3, black_box(&mut row)));
        let coefficients = floats(ROWS);
        count(format!("{} add_scaled_rows {format}", k.isa), || {
            k.add_scaled_rows(black_box(&w), 0..ROWS, &coefficients, black_box(&mut row));
        });
    }
}

fn vectors(k: &Kernels) {
    let (a, mut b) = (floats(2048), floats(2048));
    let mut quantized = Quantized::with_capacity(1, a.len());
    count(format!("{} dot", k.isa), || {
        black_box(k.dot(black_box(&a), black_box(&b)));
    });
    count(format!("{} axpy", k.isa), || k.axpy(black_box(0.5), &a, black_box(&mut b)));
    count(format!("{} silu_mul", k.isa), || k.silu_mul(black_box(&a), black_box(&mut b)));
    count(format!("{} exp_shifted", k.isa), || {
        black_box(k.exp_shifted(black_box(&mut b), 0.5));
    });
    count(format!("{} quantize", k.isa), || quantized.quantize(k, black_box(&a), 1, a.len()));
    let at: Vec<u32> = (0..16).map(|i| i * 7 % 16).collect();
    let rows = RowsAt::new(Table::F32(&a), 128, 0..128, &at);
    let (vectors, mut products) = (floats(4 * 128), floats(4 * 16));
    count(format!("{} dots", k.isa), || k.dots(black_box(&vectors), &rows, black_box(&mut products)));
    let mut sums = floats(4 * 128);
    count(format!("{} add_weighted", k.isa), || k.add_weighted(black_box(&products), &rows, black_box(&mut sums)));
}

fn main() {
    for k in [Isa::Scalar, Isa::Avx2].into_iter().filter_map(Kernels::for_isa) {
        matrices(k);
        vectors(k);
    }
}

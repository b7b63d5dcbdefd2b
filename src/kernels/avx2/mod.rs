//! AVX2 with FMA and F16C, arranged as the AVX-512 table.
#![allow(unsafe_code)]

mod exact;
mod int3;
mod integer;

use std::arch::x86_64::*;

use super::quantized::QuantRowMut;
use super::rows::{Cell, Table};
use super::{EncodeError, Format, Isa, Kernels, MAX_BATCH, RowsAt, encode, lanes};

pub(super) fn table() -> Option<&'static Kernels> {
    let available =
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    available.then_some(&TABLE)
}

static TABLE: Kernels = Kernels {
    isa: Isa::Avx2,
    dot,
    axpy,
    dots,
    add_weighted,
    decode_row: exact::decode_row,
    add_scaled_rows: exact::add_scaled_rows,
    silu_mul,
    exp_shifted,
    quantize_row,
    encode_row,
    exact: exact::tile,
    integer_batch: MAX_BATCH,
    integer: integer::tile,
    tiles: None,
};

#[target_feature(enable = "avx2,fma,f16c")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    lanes::dot(a, b)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    lanes::axpy(a, x, y);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn dots(vectors: &[f32], rows: &RowsAt, out: &mut [f32]) {
    match rows.table() {
        Table::F32(cells) => lanes::dots_by(vectors, rows, cells, out, |a, b| dot_apart(a, b)),
        Table::Bf16(cells) => lanes::dots_by(vectors, rows, cells, out, |a, b| dot_apart(a, b)),
    }
}

/// In a loop over rows the compiler makes no vectors of what it has inlined.
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
fn dot_apart<C: Cell>(a: &[f32], b: &[C]) -> f32 {
    lanes::dot(a, b)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn add_weighted(weights: &[f32], rows: &RowsAt, out: &mut [f32]) {
    lanes::add_weighted(weights, rows, out);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn silu_mul(gate: &[f32], up: &mut [f32]) {
    lanes::silu_mul(gate, up);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    lanes::exp_shifted(x, shift)
}

#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_row(x: &[f32], row: QuantRowMut) {
    lanes::quantize_row(x, row);
}

#[target_feature(enable = "avx2,fma,f16c")]
fn encode_row(format: Format, row: &[f32], data: &mut [u8], scales: &mut [f32]) -> Result<(), EncodeError> {
    encode::quantized(format, row, data, scales)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_bytes(from: &[u8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes of this unaligned load.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_signed(from: &[i8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes of this unaligned load.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_ints(from: &[i32; 8]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes of this unaligned load.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_half(from: &[u8; 16]) -> __m128i {
    // SAFETY: the reference covers the 16 bytes of this unaligned load.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_floats(from: &[f32; 8]) -> __m256 {
    // SAFETY: the reference covers the 8 floats of this unaligned load.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_floats(to: &mut [f32; 8], v: __m256) {
    // SAFETY: the reference covers the 8 floats of this unaligned store.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_ints(to: &mut [i32; 8], v: __m256i) {
    // SAFETY: the reference covers the 32 bytes of this unaligned store.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), v) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_half_ints(to: &mut [i32; 4], v: __m128i) {
    // SAFETY: the reference covers the 16 bytes of this unaligned store.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), v) }
}

/// The quarters of a chunk of the 32 lanes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_lanes(from: &[f32; lanes::LANES]) -> [__m256; 4] {
    let (quarters, _) = from.as_chunks::<8>();
    std::array::from_fn(|q| load_floats(&quarters[q]))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_lanes(to: &mut [f32; lanes::LANES], v: [__m256; 4]) {
    let (quarters, _) = to.as_chunks_mut::<8>();
    for q in 0..4 {
        store_floats(&mut quarters[q], v[q]);
    }
}

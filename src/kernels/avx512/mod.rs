//! AVX-512 with VNNI.
//!
//! Functions carry their target features, so that intrinsics are safe in them; what is left to prove are loads and stores
//! of whole arrays, which live in this file.
#![allow(unsafe_code)]

mod ahead;
mod broadcast;
mod dots;
mod eights;
mod exact;
mod fp8;
mod int3;
mod integer;
mod panels;
mod rows;
mod single;

use std::arch::x86_64::*;

use super::panel::PACKED_FROM;
use super::quantized::QuantRowMut;
use super::{EncodeError, Format, Isa, Kernels, TileKernel, encode, lanes};

pub(super) fn table() -> Option<&'static Kernels> {
    let available = is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni");
    let table = if is_x86_feature_detected!("avx512vbmi") { &TABLE_WITH_VBMI } else { &TABLE };
    available.then_some(table)
}

/// Whether this CPU can run [`WITH_VBMI`].
pub(super) fn has_vbmi() -> bool {
    table().is_some() && is_x86_feature_detected!("avx512vbmi")
}

/// What every CPU with VNNI has.
pub(super) static TABLE: Kernels = BASE;

static TABLE_WITH_VBMI: Kernels = WITH_VBMI;

/// What the AMX table is made of, too.
pub(super) const WITH_VBMI: Kernels = Kernels { exact: fp8::tile, ..BASE };

const BASE: Kernels = Kernels {
    isa: Isa::Avx512,
    dot,
    axpy,
    dots: rows::dots,
    add_weighted: rows::add_weighted,
    decode_row: exact::decode_row,
    add_scaled_rows: exact::add_scaled_rows,
    silu_mul,
    exp_shifted,
    quantize_row,
    encode_row,
    exact: exact::tile,
    integer_batch: panels::BATCH,
    integer: integer::tile,
    tiles: Some(TILES),
};

/// What takes whole batches.
pub(super) const TILES: TileKernel =
    TileKernel { takes: broadcast::takes, few: PACKED_FROM - 1, product: broadcast::product };

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    lanes::dot(a, b)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn axpy(a: f32, x: &[f32], y: &mut [f32]) {
    lanes::axpy(a, x, y);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn silu_mul(gate: &[f32], up: &mut [f32]) {
    lanes::silu_mul(gate, up);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn exp_shifted(x: &mut [f32], shift: f32) -> f32 {
    lanes::exp_shifted(x, shift)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn quantize_row(x: &[f32], row: QuantRowMut) {
    lanes::quantize_row(x, row);
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn encode_row(format: Format, row: &[f32], data: &mut [u8], scales: &mut [f32]) -> Result<(), EncodeError> {
    encode::quantized(format, row, data, scales)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_bytes(from: &[u8; 64]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes of this unaligned load.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_bytes(to: &mut [u8; 64], v: __m512i) {
    // SAFETY: the reference covers the 64 bytes of this unaligned store.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_signed(from: &[i8; 64]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes of this unaligned load.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_ints(from: &[i32; 16]) -> __m512i {
    // SAFETY: the reference covers the 64 bytes of this unaligned load.
    unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_half(from: &[u8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes of this unaligned load.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_signed_half(from: &[i8; 32]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes of this unaligned load.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_quarter(from: &[u8; 16]) -> __m128i {
    // SAFETY: the reference covers the 16 bytes of this unaligned load.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_floats(from: &[f32; 16]) -> __m512 {
    // SAFETY: the reference covers the 16 floats of this unaligned load.
    unsafe { _mm512_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_floats(to: &mut [f32; 16], v: __m512) {
    // SAFETY: the reference covers the 16 floats of this unaligned store.
    unsafe { _mm512_storeu_ps(to.as_mut_ptr(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_ints(to: &mut [i32; 16], v: __m512i) {
    // SAFETY: the reference covers the 64 bytes of this unaligned store.
    unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_half_ints(to: &mut [i32; 8], v: __m256i) {
    // SAFETY: the reference covers the 32 bytes of this unaligned store.
    unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_half_ints(from: &[i32; 8]) -> __m256i {
    // SAFETY: the reference covers the 32 bytes of this unaligned load.
    unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_quarter_ints(from: &[i32; 4]) -> __m128i {
    // SAFETY: the reference covers the 16 bytes of this unaligned load.
    unsafe { _mm_loadu_si128(from.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_quarter_ints(to: &mut [i32; 4], v: __m128i) {
    // SAFETY: the reference covers the 16 bytes of this unaligned store.
    unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), v) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_half_floats(from: &[f32; 8]) -> __m256 {
    // SAFETY: the reference covers the 8 floats of this unaligned load.
    unsafe { _mm256_loadu_ps(from.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_half_floats(to: &mut [f32; 8], v: __m256) {
    // SAFETY: the reference covers the 8 floats of this unaligned store.
    unsafe { _mm256_storeu_ps(to.as_mut_ptr(), v) }
}

/// Asks for the cache line of `at` to be fetched into the second-level cache.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn fetch(at: *const u8) {
    // The function has become safe in later versions of the standard library.
    #[allow(unused_unsafe)]
    // SAFETY: a prefetch is a hint that reads nothing, and faults at no address.
    unsafe {
        _mm_prefetch::<_MM_HINT_T1>(at.cast());
    }
}

/// Both halves of the 32 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_lanes(from: &[f32; lanes::LANES]) -> [__m512; 2] {
    let (halves, _) = from.as_chunks::<16>();
    [load_floats(&halves[0]), load_floats(&halves[1])]
}

/// The same of numbers that lack their lower halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_halves(from: &[u16; lanes::LANES]) -> [__m512; 2] {
    // SAFETY: the reference covers the 64 bytes of this unaligned load.
    let halves = unsafe { _mm512_loadu_si512(from.as_ptr().cast()) };
    let float = |half: __m256i| _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
    [float(_mm512_castsi512_si256(halves)), float(_mm512_extracti64x4_epi64::<1>(halves))]
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn store_lanes(to: &mut [f32; lanes::LANES], v: [__m512; 2]) {
    let (halves, _) = to.as_chunks_mut::<16>();
    store_floats(&mut halves[0], v[0]);
    store_floats(&mut halves[1], v[1]);
}

/// Words of 16 registers: word `j` of register `r` becomes word `r` of register `j`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn transpose(rows: [__m512i; 16]) -> [__m512i; 16] {
    let mut pairs = rows;
    for k in 0..8 {
        let (a, b) = (rows[2 * k], rows[2 * k + 1]);
        (pairs[2 * k], pairs[2 * k + 1]) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    // Quarter `q` of `fours[4 * k + j]` has word `4 * q + j` of rows `4 * k..4 * k + 4`.
    let mut fours = pairs;
    for k in 0..4 {
        for half in 0..2 {
            let (a, b) = (pairs[4 * k + half], pairs[4 * k + 2 + half]);
            fours[4 * k + 2 * half] = _mm512_unpacklo_epi64(a, b);
            fours[4 * k + 2 * half + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    let mut words = fours;
    for j in 0..4 {
        let [a, b, c, d] = [fours[j], fours[4 + j], fours[8 + j], fours[12 + j]];
        let low = [_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d)];
        let high = [_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d)];
        words[j] = _mm512_shuffle_i32x4::<0x88>(low[0], low[1]);
        words[4 + j] = _mm512_shuffle_i32x4::<0xdd>(low[0], low[1]);
        words[8 + j] = _mm512_shuffle_i32x4::<0x88>(high[0], high[1]);
        words[12 + j] = _mm512_shuffle_i32x4::<0xdd>(high[0], high[1]);
    }
    words
}

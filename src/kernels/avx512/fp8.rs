//! FP8 by tables, for CPUs that look bytes up in 128 of them (AVX-512 VBMI).
//!
//! An E4M3 number is exactly a bf16 one, so that the upper two bytes of its f32 are all there is to find.

use std::arch::x86_64::*;
use std::ops::Range;

use super::ahead::Ahead;
use super::dots::{BLOCK_UNITS, Packed, UNIT, WIDE, stamp_dots};
use super::exact::{self, add_tail, add_unit, load_unit, reduce, reduce_four};
use super::load_bytes;
use crate::kernels::format::{FP8_BLOCK, Format, WeightRef};

/// As [`exact::tile`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[f32], tile: &mut [f32]) {
    if w.format() != Format::Fp8Block || rows.is_empty() || w.cols() == 0 {
        return exact::tile(w, rows, x, tile);
    }
    let tables = Tables::load();
    let tables = &tables;
    if tile.len() == rows.len() {
        return alone(w, rows, x, tile, tables);
    }
    let decode = |row: usize| {
        let units = w.row(row).as_chunks::<UNIT>().0;
        let blocks = w.cols().div_ceil(FP8_BLOCK);
        let scales = &w.scales().as_chunks::<4>().0[row / FP8_BLOCK * blocks..][..blocks];
        move |u: usize| tables.decode(&units[u], f32::from_le_bytes(scales[u * UNIT / FP8_BLOCK]))
    };
    dots(w, rows, x, tile, decode);
}

/// Weight rows that meet one activation row together.
const ALONE: usize = 4;

/// Rows that are looked up before the first of them is multiplied.
const AHEAD: usize = 2;

/// One activation row. What is done to a row waits for what was done to it before, and in the order of rows more instructions
/// wait than the processor has room for; so a row is looked up while an earlier one is multiplied.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn alone(w: &WeightRef, rows: Range<usize>, x: &[f32], out: &mut [f32], tables: &Tables) {
    let units = w.cols() / UNIT;
    let x_units = &x.as_chunks::<UNIT>().0[..units];
    let blocks = w.cols().div_ceil(FP8_BLOCK);
    let mut ahead = Ahead::new(w, rows.start, ALONE);
    for (first, out) in rows.clone().step_by(ALONE).zip(out.chunks_mut(ALONE)) {
        // Rows past the last one repeat it.
        let mut places = [rows.end - 1; ALONE];
        let mut weights: [&[[u8; UNIT]]; ALONE] = [&[]; ALONE];
        let mut scales: [&[[u8; 4]]; ALONE] = [&[]; ALONE];
        for r in 0..ALONE {
            places[r] = (first + r).min(rows.end - 1);
            weights[r] = &w.row(places[r]).as_chunks().0[..units];
            scales[r] = &w.scales().as_chunks().0[places[r] / FP8_BLOCK * blocks..][..blocks];
        }
        let mut lanes = [[_mm512_setzero_ps(); 2]; ALONE];
        for (u, x) in x_units.iter().enumerate() {
            ahead.lines(ALONE * UNIT);
            add_units(&mut lanes, weights.map(|row| &row[u]), scales.map(|row| row[u * UNIT / FP8_BLOCK]), x, tables);
        }
        // A copy: what is lent to a function does not stay in registers.
        let mut sums = lanes;
        if units * UNIT < w.cols() {
            for r in 0..ALONE {
                let mut sum = [sums[r]];
                add_tail(w, places[r], &[x], &mut sum);
                sums[r] = sum[0];
            }
        }
        for (out, sum) in out.iter_mut().zip(reduce_four(sums)) {
            *out = sum;
        }
    }
}

/// As [`add_unit`] for a unit of each row.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn add_units(
    lanes: &mut [[__m512; 2]; ALONE],
    units: [&[u8; UNIT]; ALONE],
    scales: [[u8; 4]; ALONE],
    x: &[f32; UNIT],
    tables: &Tables,
) {
    let x = load_unit(x);
    let mut words = [[_mm512_setzero_si512(); 2]; ALONE];
    for r in 0..ALONE + AHEAD {
        if r < ALONE {
            words[r] = tables.words(_mm512_permutexvar_epi8(tables.order, load_bytes(units[r])));
        }
        if r >= AHEAD {
            let r = r - AHEAD;
            let scale = _mm512_set1_ps(f32::from_le_bytes(scales[r]));
            for half in 0..2 {
                let [even, odd] = floats(words[r][half]);
                lanes[r][0] = _mm512_fmadd_ps(_mm512_mul_ps(even, scale), x[2 * half], lanes[r][0]);
                lanes[r][1] = _mm512_fmadd_ps(_mm512_mul_ps(odd, scale), x[2 * half + 1], lanes[r][1]);
            }
        }
    }
}

stamp_dots!("avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi");

/// What is looked up, in registers.
struct Tables {
    order: __m512i,
    upper: [__m512i; 2],
    lower: [__m512i; 2],
}

impl Tables {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    fn load() -> Tables {
        let halves = |table: &[u8; 128]| {
            let (halves, _) = table.as_chunks::<64>();
            [load_bytes(&halves[0]), load_bytes(&halves[1])]
        };
        Tables { order: load_bytes(&ORDER), upper: halves(&UPPER), lower: halves(&LOWER) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    fn decode(&self, from: &[u8; UNIT], scale: f32) -> [__m512; 4] {
        let [low, high] = self.words(_mm512_permutexvar_epi8(self.order, load_bytes(from)));
        let ([a, b], [c, d]) = (floats(low), floats(high));
        let scale = _mm512_set1_ps(scale);
        [_mm512_mul_ps(a, scale), _mm512_mul_ps(b, scale), _mm512_mul_ps(c, scale), _mm512_mul_ps(d, scale)]
    }

    /// The bf16 numbers of bytes in [`ORDER`]: those of the first two quarters side by side, and of the others.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
    fn words(&self, bytes: __m512i) -> [__m512i; 2] {
        // The lookup takes seven bits and leaves out the sign, which then replaces the top bit, where the tables have 0.
        let upper = _mm512_permutex2var_epi8(self.upper[0], bytes, self.upper[1]);
        let upper = _mm512_ternarylogic_epi64::<OR_OF_AND>(upper, bytes, _mm512_set1_epi8(-128));
        let lower = _mm512_permutex2var_epi8(self.lower[0], bytes, self.lower[1]);
        [_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)]
    }
}

/// What stands in the lower halves of words, and in the upper ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi")]
fn floats(words: __m512i) -> [__m512; 2] {
    let upper = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(words)), _mm512_castsi512_ps(_mm512_and_si512(words, upper))]
}

/// `a | b & c`, as the instruction for any function of three bits wants it.
const OR_OF_AND: i32 = 0xf8;

/// Where each column goes, so that those of a quarter come out in order: unpacking takes 8 bytes of each 128-bit lane into
/// one vector and 8 into another, as pairs of a column of the first quarter and one of the second.
const ORDER: [u8; 64] = {
    let mut order = [0; 64];
    let mut place = 0;
    while place < 64 {
        let (lane, byte) = (place / 16, place % 16);
        let column = 4 * lane + byte % 8 / 2;
        order[place] = (32 * (byte / 8) + 16 * (byte % 2) + column) as u8;
        place += 1;
    }
    order
};

/// The upper byte of each magnitude as bf16.
const UPPER: [u8; 128] = bytes_of_magnitudes(8);
/// The lower one.
const LOWER: [u8; 128] = bytes_of_magnitudes(0);

const fn bytes_of_magnitudes(shift: u32) -> [u8; 128] {
    let mut bytes = [0; 128];
    let mut code = 0;
    while code < 128 {
        bytes[code] = (magnitude(code as u16) >> shift) as u8;
        code += 1;
    }
    bytes
}

/// The bf16 bits of an E4M3 magnitude.
const fn magnitude(code: u16) -> u16 {
    let (exponent, mantissa) = (code >> 3, code & 7);
    match (exponent, mantissa) {
        (15, 7) => 0x7fc0,
        (0, 0) => 0,
        // The leading bit of a subnormal moves to where a normal number does not store it.
        (0, _) => {
            let place = mantissa.ilog2();
            (place as u16 + 127 - 9) << 7 | (mantissa << (7 - place)) & 0x7f
        }
        _ => (exponent + 127 - 7) << 7 | mantissa << 4,
    }
}

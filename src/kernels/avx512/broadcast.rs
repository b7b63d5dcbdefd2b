//! Batches of activation rows against integer weights, with a lane for each of 16 activation rows.
//!
//! A register holds four columns of 16 activation rows, which [`panel`](crate::kernels::panel) laid side by side for the whole
//! matrix, and `vpdpbusd` multiplies it by the same four columns of a weight row, which every lane gets from memory as they
//! are loaded. Each lane is then an output of its own: nothing is transposed for a product, nothing is added across lanes,
//! and a group ends with one conversion, multiplication and addition for 16 outputs. Weights become bytes in the order of
//! columns once for all activations of a pass, in a buffer that stays in the first-level cache.

use std::arch::x86_64::*;
use std::ops::Range;

use super::ahead::Ahead;
use super::{int3, load_bytes, load_floats, load_half, load_ints, load_quarter, load_signed};
use super::{store_bytes, store_floats, store_ints, transpose};
use crate::kernels::format::{Format, INT3_GROUP_BYTES, WeightRef};
use crate::kernels::groups::{row_scales, zero_padded};
use crate::kernels::panel::{HALF_COLS, Panel, Put, TILE_COLS, TILE_ROWS, Tile};

/// Weight rows of a block: as many as outputs are transposed at once.
const ROWS: usize = 16;

/// Weight rows whose sums are in registers together, so that a load of activations serves them all.
const TOGETHER: usize = 8;

/// Columns of a block, where groups do not want more: 8 KiB of weights and as much of 16 activation rows.
const COLUMNS: usize = 512;

/// Most columns of a block.
const MAX_COLUMNS: usize = 1024;

/// Runs of 16 activation rows of a pass. The next pass unpacks the weights again.
const PASS: usize = 8;

/// Weights as bytes that are not negative.
#[repr(align(64))]
struct Fields([[[u8; HALF_COLS]; MAX_COLUMNS / HALF_COLS]; ROWS]);

/// The scales of all rows of a block, group by group.
type Scales = [[f32; ROWS]; MAX_COLUMNS / HALF_COLS];

/// A register for each weight row, with a lane for each activation row: integers, or the bits of floats where groups have
/// been scaled.
type Sums = [[i32; TILE_ROWS]; ROWS];

/// Whether [`product`] multiplies a format: every one of integers, but groups that share no end with halves of tiles or with
/// blocks.
pub(super) fn takes(format: Format) -> bool {
    match format {
        Format::Int4Group { group } => group % HALF_COLS as u16 == 0 && block_columns(group.into()) > 0,
        _ => format.is_integer(),
    }
}

/// Columns of a block that ends where both a group and a tile do; 0 where that would be too many.
fn block_columns(group: usize) -> usize {
    let ends = |columns: &usize| columns.is_multiple_of(group);
    let (short, long) = (TILE_COLS..=COLUMNS, COLUMNS..=MAX_COLUMNS);
    short.rev().step_by(TILE_COLS).find(ends).or_else(|| long.step_by(TILE_COLS).find(ends)).unwrap_or(0)
}

/// Weight rows `rows` times every row of `x`, in integers, for formats that [`takes`] names.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn product(w: &WeightRef, rows: Range<usize>, x: &Panel, put: Put) {
    match w.format() {
        Format::Int8Row => {
            let flip = _mm512_set1_epi8(-128);
            blocks::<64, false, _>(w, rows, x, put, 128, |bytes| _mm512_xor_si512(load_bytes(bytes), flip));
        }
        Format::Int4Row => blocks::<32, false, _>(w, rows, x, put, 8, |bytes| nibbles(bytes)),
        Format::Int2Row => blocks::<16, false, _>(w, rows, x, put, 2, |bytes| pairs_of_bits(bytes)),
        Format::Int4Group { .. } => blocks::<32, true, _>(w, rows, x, put, 8, |bytes| nibbles(bytes)),
        Format::Int3Group => blocks::<INT3_GROUP_BYTES, true, _>(w, rows, x, put, 4, |bytes| int3::fields(bytes)),
        format => unreachable!("{format} is not multiplied in integers"),
    }
}

/// 64 columns as 0..15.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn nibbles(bytes: &[u8; 32]) -> __m512i {
    let pairs = _mm512_cvtepu8_epi16(load_half(bytes));
    _mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi16::<4>(pairs)), _mm512_set1_epi8(15))
}

/// 64 columns as 0..3.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn pairs_of_bits(bytes: &[u8; 16]) -> __m512i {
    let fours = _mm512_cvtepu8_epi32(load_quarter(bytes));
    // Copies of a byte 6 bits apart, so that its four columns stand at the bottom of the four bytes of a word.
    let twice = _mm512_or_si512(fours, _mm512_slli_epi32::<12>(fours));
    _mm512_and_si512(_mm512_or_si512(twice, _mm512_slli_epi32::<6>(twice)), _mm512_set1_epi8(3))
}

/// 64 columns are `B` bytes, which `unpack` makes bytes with `offset` added.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn blocks<const B: usize, const GROUPED: bool, U>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &Panel,
    put: Put,
    offset: i32,
    unpack: U,
) where
    U: Fn(&[u8; B]) -> __m512i,
{
    let (cols, group) = (w.cols(), w.format().group(w.cols()));
    let columns = if GROUPED { block_columns(group) } else { COLUMNS };
    let halves_of_group = if GROUPED { group } else { columns } / HALF_COLS;
    let mut fields = Fields([[[0; HALF_COLS]; MAX_COLUMNS / HALF_COLS]; ROWS]);
    let mut scales: Scales = [[0.0; ROWS]; MAX_COLUMNS / HALF_COLS];
    let mut sums: [Sums; PASS] = [[[0; TILE_ROWS]; ROWS]; PASS];
    for first in rows.clone().step_by(ROWS) {
        let block = first..rows.end.min(first + ROWS);
        let mut ahead = Ahead::new(w, first, ROWS);
        for pass in (0..x.runs()).step_by(PASS) {
            let runs = pass..x.runs().min(pass + PASS);
            let sums = &mut sums[..runs.len()];
            sums.fill([[0; TILE_ROWS]; ROWS]);
            for start in (0..cols).step_by(columns) {
                let tiles = start / TILE_COLS..(start + columns).min(cols).div_ceil(TILE_COLS);
                for (row, fields) in block.clone().zip(&mut fields.0) {
                    let (whole, tail) = w.row(row)[tiles.start * B..].as_chunks();
                    let fields = &mut fields.as_flattened_mut().as_chunks_mut().0[..tiles.len()];
                    for (fields, weights) in fields.iter_mut().zip(whole) {
                        store_bytes(fields, unpack(weights));
                    }
                    if let Some(fields) = fields.get_mut(whole.len()) {
                        store_bytes(fields, unpack(&zero_padded(tail)));
                    }
                }
                if GROUPED {
                    load_scales(w, block.clone(), start / group..(start + columns) / group, &mut scales);
                }
                // The weights of the next block are asked for bit by bit.
                let mut units = if pass == 0 { ROWS / 4 } else { 0 };
                for (run, sums) in runs.clone().zip(&mut *sums) {
                    let tiles = x.tiles(run, tiles.clone());
                    let (upper, lower) = sums.split_at_mut(TOGETHER);
                    for (half, sums) in [upper, lower].into_iter().enumerate() {
                        let fields = fields.0.as_chunks::<TOGETHER>().0;
                        let Some(sums) = sums.first_chunk_mut() else { unreachable!() };
                        multiply::<GROUPED>(
                            &fields[half],
                            tiles,
                            halves_of_group,
                            offset,
                            &scales,
                            half,
                            sums,
                            &mut ahead,
                            units,
                        );
                    }
                    units = 0;
                }
            }
            for (run, sums) in runs.zip(sums) {
                finish::<GROUPED>(w, block.clone(), x, run, sums, put);
            }
        }
    }
}

/// Brings the scales of some groups side by side.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn load_scales(w: &WeightRef, rows: Range<usize>, groups: Range<usize>, to: &mut Scales) {
    let group = w.format().group(w.cols());
    for (r, row) in rows.enumerate() {
        let scales = row_scales(w, row, group);
        let some = &scales[groups.start..scales.len().min(groups.end)];
        for (to, scale) in to.iter_mut().zip(some) {
            to[r] = f32::from_le_bytes(*scale);
        }
    }
}

/// Adds the products of a block's columns of 8 weight rows and 16 activation rows to their sums. What the offset of the
/// fields adds too much is taken away as a group begins, or a block.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply<const GROUPED: bool>(
    fields: &[[[u8; HALF_COLS]; MAX_COLUMNS / HALF_COLS]; TOGETHER],
    tiles: &[Tile],
    halves_of_group: usize,
    offset: i32,
    scales: &Scales,
    half: usize,
    sums: &mut [[i32; TILE_ROWS]; TOGETHER],
    ahead: &mut Ahead,
    units: usize,
) {
    let mut stored = [_mm512_setzero_si512(); TOGETHER];
    for r in 0..TOGETHER {
        stored[r] = load_ints(&sums[r]);
    }
    let halves = 2 * tiles.len();
    for (start, scales) in (0..halves).step_by(halves_of_group).zip(scales) {
        let group = start..halves.min(start + halves_of_group);
        let mut too_much = _mm512_setzero_si512();
        for h in group.clone() {
            too_much = _mm512_add_epi32(too_much, load_ints(&tiles[h / 2].sums[h % 2]));
        }
        too_much = _mm512_mullo_epi32(too_much, _mm512_set1_epi32(offset));
        let mut lanes = [_mm512_setzero_si512(); TOGETHER];
        for r in 0..TOGETHER {
            lanes[r] = _mm512_sub_epi32(if GROUPED { lanes[r] } else { stored[r] }, too_much);
        }
        for h in group {
            ahead.step(units);
            let x = &tiles[h / 2].bytes.0.as_chunks::<{ TILE_ROWS / 2 }>().0[h % 2];
            for j in 0..TILE_ROWS / 2 {
                let x = load_signed(&x[j]);
                for r in 0..TOGETHER {
                    let four = i32::from_le_bytes(fields[r][h].as_chunks::<4>().0[j]);
                    lanes[r] = _mm512_dpbusd_epi32(lanes[r], _mm512_set1_epi32(four), x);
                }
            }
        }
        for r in 0..TOGETHER {
            stored[r] = if GROUPED {
                let scale = _mm512_set1_ps(scales[half * TOGETHER + r]);
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(lanes[r]), scale);
                _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(stored[r]), product))
            } else {
                lanes[r]
            };
        }
    }
    for r in 0..TOGETHER {
        store_ints(&mut sums[r], stored[r]);
    }
}

/// Outputs from the sums of a run.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn finish<const GROUPED: bool>(w: &WeightRef, rows: Range<usize>, x: &Panel, run: usize, sums: &Sums, put: Put) {
    let x_scales = &x.scales[run * TILE_ROWS..];
    let mut padded = [0.0; TILE_ROWS];
    for (to, scale) in padded.iter_mut().zip(x_scales) {
        *to = *scale;
    }
    let scales = load_floats(&padded);
    let mut values = [_mm512_setzero_si512(); ROWS];
    for (r, row) in rows.clone().enumerate() {
        let sums = load_ints(&sums[r]);
        let scaled = if GROUPED {
            _mm512_castsi512_ps(sums)
        } else {
            _mm512_mul_ps(_mm512_cvtepi32_ps(sums), _mm512_set1_ps(w.scale(row)))
        };
        values[r] = _mm512_castps_si512(_mm512_mul_ps(scaled, scales));
    }
    for (i, values) in transpose(values).into_iter().enumerate().take(x_scales.len()) {
        let mut outputs = [0.0; ROWS];
        store_floats(&mut outputs, _mm512_castsi512_ps(values));
        put(run * TILE_ROWS + i, rows.start, &outputs[..rows.len()]);
    }
}

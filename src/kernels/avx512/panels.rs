//! Several activation rows against integer weights, 16 weight rows at a time.
//!
//! A register holds four columns of 16 weight rows, and `vpdpbusd` multiplies it by the same four columns of an activation
//! row, which every lane gets from memory as it is loaded. Each lane is then an output of its own: nothing is added across
//! lanes, and a group ends with one conversion, multiplication and addition for 16 outputs. The price is that weights have
//! to be transposed. The first activation rows of a call do that on the way and leave a panel behind for the others.

use std::arch::x86_64::*;
use std::ops::Range;

use super::ahead::Ahead;
use super::integer::{nibbles, pairs_of_bits};
use super::{int3, load_bytes, load_floats, load_ints, store_bytes, store_floats, store_ints, transpose};
use crate::kernels::MAX_INTEGER_BATCH;
use crate::kernels::format::{Format, INT3_GROUP_BYTES, WeightRef};
use crate::kernels::groups::{row_scales, zero_padded};
use crate::kernels::quantized::QuantRow;

/// Weight rows of a panel: the lanes of a register.
pub(super) const ROWS: usize = 16;

/// Rows of a batch that [`tile`] takes at most. More of them are packed, and meet weights that are not transposed.
pub(super) const BATCH: usize = 32;

const _: () = assert!(BATCH <= MAX_INTEGER_BATCH && BATCH.is_multiple_of(8));

/// Most columns of a panel: 16 KiB, half of the first-level cache.
const COLUMNS: usize = 1024;

/// Columns of 64 bytes of the format that has most of them.
const CHUNK_MAX: usize = 256;

/// Shortest group, in columns.
const GROUP_MIN: usize = 32;

/// Whether [`tile`] multiplies a format: every one of integers, but groups that share no end with runs of 32 columns or with
/// panels.
pub(super) fn takes(format: Format) -> bool {
    match format {
        Format::Int4Group { group } => group % 32 == 0 && panel_columns(group.into()) > 0,
        _ => format.is_integer(),
    }
}

/// Most columns of a panel that ends where both a group and a chunk do; 0 where that would be too many.
fn panel_columns(group: usize) -> usize {
    (CHUNK_MAX..=COLUMNS).rev().step_by(CHUNK_MAX).find(|columns| columns.is_multiple_of(group)).unwrap_or(0)
}

/// `tile[i][r] = W[rows.start + r] . x[i]` in integers, for formats that [`takes`] names.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn tile(w: &WeightRef, rows: Range<usize>, x: &[QuantRow], tile: &mut [f32]) {
    // The sums of a run of columns, with groups, are corrected as they begin.
    let sums64 = |x: &QuantRow, run: usize| x.sums64[run];
    let sums32 = |x: &QuantRow, run: usize| x.sums8.as_chunks::<4>().0[run].iter().sum();
    let none = |_: &QuantRow, _| 0;
    let bytes = |chunk: &[u8; 64]| load_bytes(chunk);
    match w.format() {
        Format::Int8Row => {
            let flip = _mm512_set1_epi8(-128);
            let split = |bytes| [_mm512_xor_si512(bytes, flip)];
            panels::<64, 1, 16, false, _, _, _>(w, rows, x, |x| x.natural, 128, tile, none, bytes, split);
        }
        Format::Int4Row => {
            panels::<64, 2, 16, false, _, _, _>(w, rows, x, |x| x.halves, 8, tile, none, bytes, |b| nibbles(b));
        }
        Format::Int2Row => {
            panels::<64, 4, 16, false, _, _, _>(w, rows, x, |x| x.quarters, 2, tile, none, bytes, |b| pairs_of_bits(b));
        }
        Format::Int4Group { group } if group % 64 == 0 => {
            panels::<64, 2, 8, true, _, _, _>(w, rows, x, |x| x.halves, 0, tile, sums64, bytes, |b| nibbles(b));
        }
        Format::Int4Group { .. } => {
            panels::<64, 2, 4, true, _, _, _>(w, rows, x, |x| x.halves, 0, tile, sums32, bytes, |b| nibbles(b));
        }
        Format::Int3Group => {
            // The offset is 4 here, half of what `sums64` removes.
            let half = |x: &QuantRow, run: usize| x.sums64[run] / 2;
            let fields = |group: &[u8; INT3_GROUP_BYTES]| int3::fields(group);
            panels::<INT3_GROUP_BYTES, 1, 16, true, _, _, _>(w, rows, x, |x| x.natural, 0, tile, half, fields, |f| [f]);
        }
        format => unreachable!("{format} has no panels"),
    }
}

/// The order of activations that a format's fields meet.
type Order = for<'a> fn(&QuantRow<'a>) -> &'a [i8];

/// Fields of 16 weight rows: four columns of all of them, then the next four.
#[repr(align(64))]
struct Panel([[u8; 64]; COLUMNS / 4]);

/// A lane for each weight row: integers, or the bits of floats where groups have been scaled.
type Sums = [[i32; ROWS]; BATCH];

/// The scales of all rows for each group of a panel.
type Scales = [[f32; ROWS]; COLUMNS / GROUP_MIN];

/// The chunks of 16 weight rows that a panel holds.
struct Part<'a> {
    chunks: Range<usize>,
    panel: &'a mut Panel,
    /// Columns that share a scale, in formats that have several for a row.
    group: usize,
    scales: &'a Scales,
    ahead: &'a mut Ahead,
    /// Units of 64 columns to ask for with each chunk.
    units: usize,
}

/// A chunk of `B` bytes is `load`ed as 16 words and transposed with those of the other rows; words then `split` into `P` vectors
/// of fields, which meet `P` consecutive blocks of the activations in `order`. Fields are stored with `offset` added. `GROUPED`
/// formats have scales for runs of columns, and instead of an offset a `correction` for each run of `J` words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn panels<const B: usize, const P: usize, const J: usize, const GROUPED: bool, C, L, S>(
    w: &WeightRef,
    rows: Range<usize>,
    x: &[QuantRow],
    order: Order,
    offset: i32,
    tile: &mut [f32],
    correction: C,
    load: L,
    split: S,
) where
    C: Fn(&QuantRow, usize) -> i32,
    L: Fn(&[u8; B]) -> __m512i,
    S: Fn(__m512i) -> [__m512i; P],
{
    let group = w.format().group(w.cols());
    let chunks = w.cols().div_ceil(64 * P);
    let step = if GROUPED { panel_columns(group) } else { COLUMNS } / (64 * P);
    let mut panel = Panel([[0; 64]; COLUMNS / 4]);
    let mut scales: Scales = [[0.0; ROWS]; COLUMNS / GROUP_MIN];
    for first in rows.clone().step_by(ROWS) {
        // Rows past the last one repeat it.
        let places: [usize; ROWS] = std::array::from_fn(|r| (first + r).min(rows.end - 1));
        let (whole, tails) = whole_and_tails::<B>(w, &places);
        let unpack = |c: usize, words: &mut [[[u8; 64]; P]; 16]| {
            let mut rows = [_mm512_setzero_si512(); ROWS];
            if c < whole[0].len() {
                for r in 0..ROWS {
                    rows[r] = load(&whole[r][c]);
                }
            } else {
                for r in 0..ROWS {
                    rows[r] = load(&tails[r]);
                }
            }
            for (word, row) in words.iter_mut().zip(transpose(rows)) {
                for (to, fields) in word.iter_mut().zip(split(row)) {
                    store_bytes(to, fields);
                }
            }
        };
        let mut ahead = Ahead::new(w, first, ROWS);
        let mut sums: Sums = [[0; ROWS]; BATCH];
        for start in (0..chunks).step_by(step) {
            let end = chunks.min(start + step);
            if GROUPED {
                transpose_scales(w, &places, start * 64 * P / group..(end * 64 * P).div_ceil(group), &mut scales);
            }
            let (panel, scales, ahead) = (&mut panel, &scales, &mut ahead);
            let mut part = Part { chunks: start..end, panel, group, scales, ahead, units: ROWS * P };
            for (turn, (x, sums)) in x.chunks(8).zip(sums.as_chunks_mut().0).enumerate() {
                let (part, c, u) = (&mut part, &correction, &unpack);
                match (turn, x.len()) {
                    (0, 1 | 2) => multiply::<P, J, 2, GROUPED, true, _, _>(part, x, order, sums, c, u),
                    (0, 3 | 4) => multiply::<P, J, 4, GROUPED, true, _, _>(part, x, order, sums, c, u),
                    (0, _) => multiply::<P, J, 8, GROUPED, true, _, _>(part, x, order, sums, c, u),
                    (_, 1 | 2) => multiply::<P, J, 2, GROUPED, false, _, _>(part, x, order, sums, c, u),
                    (_, 3 | 4) => multiply::<P, J, 4, GROUPED, false, _, _>(part, x, order, sums, c, u),
                    _ => multiply::<P, J, 8, GROUPED, false, _, _>(part, x, order, sums, c, u),
                }
            }
        }
        finish::<GROUPED>(w, first..rows.end.min(first + ROWS), rows.start, x, offset, &sums, tile);
    }
}

/// Adds the products of a part and up to `N` activation rows to their sums; rows past the last one repeat it. The first to
/// come finds it `FRESH` and fills the panel: a chunk is multiplied while the next one is transposed.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn multiply<const P: usize, const J: usize, const N: usize, const GROUPED: bool, const FRESH: bool, C, U>(
    part: &mut Part,
    x: &[QuantRow],
    order: Order,
    sums: &mut [[i32; ROWS]; 8],
    correction: &C,
    unpack: &U,
) where
    C: Fn(&QuantRow, usize) -> i32,
    U: Fn(usize, &mut [[[u8; 64]; P]; 16]),
{
    let x: [&QuantRow; N] = std::array::from_fn(|i| &x[i.min(x.len() - 1)]);
    let blocks: [&[[[i8; 64]; P]]; N] =
        x.map(|x| &order(x).as_chunks::<64>().0.as_chunks::<P>().0[part.chunks.clone()]);
    let mut stored = [_mm512_setzero_si512(); N];
    for i in 0..N {
        stored[i] = load_ints(&sums[i]);
    }
    let mut lanes = if GROUPED { [_mm512_setzero_si512(); N] } else { stored };
    let (mut scales, mut columns) = (part.scales.iter(), 0);
    let mut corrections = [[0; N]; COLUMNS / GROUP_MIN];
    if GROUPED {
        let runs = part.chunks.start * (16 / J)..part.chunks.end * (16 / J);
        for (to, run) in corrections.iter_mut().zip(runs) {
            for i in 0..N {
                to[i] = correction(x[i], run);
            }
        }
    }
    let mut corrections = corrections.iter();
    let panel = part.panel.0.as_chunks_mut::<P>().0.as_chunks_mut::<16>().0;
    for ((c, chunk), words) in part.chunks.clone().enumerate().zip(panel) {
        if FRESH {
            part.ahead.step(part.units);
            unpack(chunk, words);
        }
        let blocks: [&[[i8; 64]; P]; N] = blocks.map(|blocks| &blocks[c]);
        for (run, words) in words.as_chunks::<J>().0.iter().enumerate() {
            if let (true, Some(corrections)) = (GROUPED, corrections.next()) {
                for i in 0..N {
                    lanes[i] = _mm512_add_epi32(lanes[i], _mm512_set1_epi32(corrections[i]));
                }
            }
            for (j, word) in (run * J..).zip(words) {
                for p in 0..P {
                    let fields = load_bytes(&word[p]);
                    for i in 0..N {
                        lanes[i] = _mm512_dpbusd_epi32(lanes[i], fields, four_columns(&blocks[i][p], j));
                    }
                }
            }
            columns += 4 * P * J;
            if GROUPED && columns == part.group {
                add_scaled(&mut stored, &mut lanes, scales.next());
                columns = 0;
            }
        }
    }
    if GROUPED && columns > 0 {
        add_scaled(&mut stored, &mut lanes, scales.next());
    }
    for i in 0..N {
        store_ints(&mut sums[i], if GROUPED { stored[i] } else { lanes[i] });
    }
}

/// Ends a group: the floats of `stored` take up the integers of `lanes`, which begin anew.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_scaled<const N: usize>(stored: &mut [__m512i; N], lanes: &mut [__m512i; N], scales: Option<&[f32; ROWS]>) {
    let scales = scales.map_or(_mm512_setzero_ps(), |scales| load_floats(scales));
    for i in 0..N {
        let product = _mm512_mul_ps(_mm512_cvtepi32_ps(lanes[i]), scales);
        stored[i] = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(stored[i]), product));
        lanes[i] = _mm512_setzero_si512();
    }
}

/// Word `j` of a block of activations in every lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn four_columns(block: &[i8; 64], j: usize) -> __m512i {
    _mm512_set1_epi32(i32::from_le_bytes(block.as_chunks::<4>().0[j].map(|column| column as u8)))
}

/// The whole chunks of 16 rows, and what is behind them, with zeros behind that.
#[inline]
fn whole_and_tails<'a, const B: usize>(
    w: &WeightRef<'a>,
    places: &[usize; ROWS],
) -> ([&'a [[u8; B]]; ROWS], [[u8; B]; ROWS]) {
    let rows = places.map(|row| w.row(row).as_chunks::<B>());
    (rows.map(|(whole, _)| whole), rows.map(|(_, tail)| zero_padded(tail)))
}

/// The scales of `groups` of 16 rows, which no row may have all of, group by group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn transpose_scales(w: &WeightRef, places: &[usize; ROWS], groups: Range<usize>, scales: &mut Scales) {
    let group = w.format().group(w.cols());
    for (to, first) in scales.as_chunks_mut::<16>().0.iter_mut().zip(groups.step_by(16)) {
        let mut rows = [_mm512_setzero_si512(); ROWS];
        for r in 0..ROWS {
            let scales = row_scales(w, places[r], group)[first..].as_flattened();
            rows[r] = if let Some(scales) = scales.first_chunk() {
                load_bytes(scales)
            } else {
                load_bytes(&zero_padded(scales))
            };
        }
        for (to, scales) in to.iter_mut().zip(transpose(rows)) {
            store_floats(to, _mm512_castsi512_ps(scales));
        }
    }
}

/// Outputs from sums.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn finish<const GROUPED: bool>(
    w: &WeightRef,
    rows: Range<usize>,
    first: usize,
    x: &[QuantRow],
    offset: i32,
    sums: &Sums,
    tile: &mut [f32],
) {
    let mut scales = [0.0; ROWS];
    if !GROUPED {
        for (scale, row) in scales.iter_mut().zip(rows.clone()) {
            *scale = w.scale(row);
        }
    }
    let scales = load_floats(&scales);
    let count = tile.len() / x.len();
    for ((x, sums), out) in x.iter().zip(sums).zip(tile.chunks_mut(count)) {
        let mut sums = load_ints(sums);
        let scaled = if GROUPED {
            _mm512_castsi512_ps(sums)
        } else {
            sums = _mm512_sub_epi32(sums, _mm512_set1_epi32(offset.wrapping_mul(x.sum)));
            _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scales)
        };
        let values = _mm512_mul_ps(scaled, _mm512_set1_ps(x.scale));
        let out = &mut out[rows.start - first..rows.end - first];
        if let Some(out) = out.first_chunk_mut() {
            store_floats(out, values);
        } else {
            let mut some = [0.0; ROWS];
            store_floats(&mut some, values);
            out.copy_from_slice(&some[..rows.len()]);
        }
    }
}

//! Several vectors against several rows, each of which is loaded once for all of them.

use std::arch::x86_64::*;

use super::{load_halves, load_lanes, store_floats, store_lanes};
use crate::kernels::lanes::{self, LANES};
use crate::kernels::rows::{Cell, RowsAt, Table};

/// Sums that walk the rows together, two registers of columns each.
const SUMS: usize = 8;

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn dots(vectors: &[f32], rows: &RowsAt, out: &mut [f32]) {
    // No published width of a head or a latent has a part of a chunk.
    if rows.is_empty() || rows.width() == 0 || !rows.width().is_multiple_of(LANES) {
        return lanes::dots(vectors, rows, out);
    }
    match rows.table() {
        Table::F32(cells) => dots_of(vectors, rows, cells, |from| load_lanes(from), out),
        Table::Bf16(cells) => dots_of(vectors, rows, cells, |from| load_halves(from), out),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn dots_of<C, L>(vectors: &[f32], rows: &RowsAt, cells: &[C], load: L, out: &mut [f32])
where
    L: Fn(&[C; LANES]) -> [__m512; 2] + Copy,
{
    let (chunks, len) = (rows.width() / LANES, rows.len());
    let vectors = vectors.as_chunks::<LANES>().0;
    let count = vectors.len() / chunks;
    let (whole, rest) = (count / 4 * 4, count % 4);
    // Rows come from afar and stay near while all vectors meet them.
    for first in (0..len).step_by(if whole > 0 { 2 } else { 4 }) {
        for v in (0..whole).step_by(4) {
            tile::<4, 2, _, _>(&vectors[v * chunks..][..4 * chunks], rows, cells, load, first, &mut out[v * len..]);
        }
        let (vectors, out) = (&vectors[whole * chunks..], &mut out[whole * len..]);
        match (rest, whole) {
            (0, _) => {}
            (1, 0) => tile::<1, 4, _, _>(vectors, rows, cells, load, first, out),
            (1, _) => tile::<1, 2, _, _>(vectors, rows, cells, load, first, out),
            (2, 0) => tile::<2, 4, _, _>(vectors, rows, cells, load, first, out),
            (2, _) => tile::<2, 2, _, _>(vectors, rows, cells, load, first, out),
            (_, 0) => {
                tile::<2, 4, _, _>(&vectors[..2 * chunks], rows, cells, load, first, out);
                tile::<1, 4, _, _>(&vectors[2 * chunks..], rows, cells, load, first, &mut out[2 * len..]);
            }
            _ => tile::<3, 2, _, _>(vectors, rows, cells, load, first, out),
        }
    }
}

/// `V` vectors with rows `first..first + R`, where those past the end repeat the last one: eight products at most. A load
/// serves several multiplications. `out[v * rows.len() + r]`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn tile<const V: usize, const R: usize, C, L>(
    vectors: &[[f32; LANES]],
    rows: &RowsAt,
    cells: &[C],
    load: L,
    first: usize,
    out: &mut [f32],
) where
    L: Fn(&[C; LANES]) -> [__m512; 2],
{
    let (chunks, len) = (vectors.len() / V, rows.len());
    let mut tile: [&[[C; LANES]]; R] = [&[]; R];
    for r in 0..R {
        tile[r] = &rows.row(cells, (first + r).min(len - 1)).as_chunks::<LANES>().0[..chunks];
    }
    let mut sums = [[[_mm512_setzero_ps(); 2]; R]; V];
    for c in 0..chunks {
        let mut row = [[_mm512_setzero_ps(); 2]; R];
        for r in 0..R {
            row[r] = load(&tile[r][c]);
        }
        for v in 0..V {
            let vector = load_lanes(&vectors[v * chunks + c]);
            for r in 0..R {
                sums[v][r][0] = _mm512_fmadd_ps(vector[0], row[r][0], sums[v][r][0]);
                sums[v][r][1] = _mm512_fmadd_ps(vector[1], row[r][1], sums[v][r][1]);
            }
        }
    }
    let mut eight = [[_mm512_setzero_ps(); 2]; 8];
    for i in 0..V * R {
        eight[i] = sums[i / R][i % R];
    }
    let products = reduce(eight);
    for v in 0..V {
        for r in 0..R.min(len - first) {
            out[v * len + first + r] = products[v * R + r];
        }
    }
}

/// The lanes of eight products, each added as the tree of [`lanes::reduce`] says, all at once.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn reduce(products: [[__m512; 2]; 8]) -> [f32; 8] {
    let mut sixteen = [_mm512_setzero_ps(); 8];
    for i in 0..8 {
        sixteen[i] = _mm512_add_ps(products[i][0], products[i][1]);
    }
    // Each step brings the upper halves of the lanes of two registers beside the lower ones and adds them.
    let mut eight = [_mm512_setzero_ps(); 4];
    for i in 0..4 {
        let [a, b] = [sixteen[2 * i], sixteen[2 * i + 1]];
        eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x44>(a, b), _mm512_shuffle_f32x4::<0xee>(a, b));
    }
    let mut four = [_mm512_setzero_ps(); 2];
    for i in 0..2 {
        let [a, b] = [eight[2 * i], eight[2 * i + 1]];
        four[i] = _mm512_add_ps(_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
    }
    // Quarter i holds four lanes of product i in the first register, of product 4 + i in the second.
    let two = _mm512_add_ps(_mm512_shuffle_ps::<0x44>(four[0], four[1]), _mm512_shuffle_ps::<0xee>(four[0], four[1]));
    let one = _mm512_add_ps(two, _mm512_movehdup_ps(two));
    let mut out = [0.0f32; 16];
    store_floats(&mut out, one);
    [out[0], out[4], out[8], out[12], out[2], out[6], out[10], out[14]]
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn add_weighted(weights: &[f32], rows: &RowsAt, out: &mut [f32]) {
    if rows.is_empty() || rows.width() == 0 {
        return;
    }
    match rows.table() {
        Table::F32(cells) => add_weighted_of(weights, rows, cells, |from| load_lanes(from), out),
        Table::Bf16(cells) => add_weighted_of(weights, rows, cells, |from| load_halves(from), out),
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn add_weighted_of<C: Cell, L>(weights: &[f32], rows: &RowsAt, cells: &[C], load: L, out: &mut [f32])
where
    L: Fn(&[C; LANES]) -> [__m512; 2] + Copy,
{
    let (width, len) = (rows.width(), rows.len());
    let many = weights.chunks(SUMS * len).zip(out.chunks_mut(SUMS * width));
    for (weights, out) in many {
        match weights.len() / len {
            1 => sums::<1, 4, _, _>(weights, rows, cells, load, out),
            2 => sums::<2, 4, _, _>(weights, rows, cells, load, out),
            3 | 4 => sums::<4, 2, _, _>(weights, rows, cells, load, out),
            _ => sums::<SUMS, 1, _, _>(weights, rows, cells, load, out),
        }
    }
}

/// Up to `V` sums, `COLUMNS` chunks of columns at a time, kept in registers while the rows pass.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn sums<const V: usize, const COLUMNS: usize, C: Cell, L>(
    weights: &[f32],
    rows: &RowsAt,
    cells: &[C],
    load: L,
    out: &mut [f32],
) where
    L: Fn(&[C; LANES]) -> [__m512; 2] + Copy,
{
    let (width, len) = (rows.width(), rows.len());
    let count = weights.len() / len;
    let mut each: [&[f32]; V] = [&[]; V];
    for v in 0..V {
        each[v] = &weights[v.min(count - 1) * len..][..len];
    }
    let chunks = width / LANES;
    let together = chunks / COLUMNS * COLUMNS;
    for first in (0..together).step_by(COLUMNS) {
        walk::<V, COLUMNS, _, _>(&each, rows, cells, load, first, count, out);
    }
    for first in together..chunks {
        walk::<V, 1, _, _>(&each, rows, cells, load, first, count, out);
    }
    let start = chunks * LANES;
    if start < width {
        for (weights, out) in each.iter().zip(out.chunks_mut(width)) {
            weights
                .iter()
                .enumerate()
                .for_each(|(r, weight)| lanes::axpy(*weight, &rows.row(cells, r)[start..], &mut out[start..]));
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
fn walk<const V: usize, const COLUMNS: usize, C, L>(
    weights: &[&[f32]; V],
    rows: &RowsAt,
    cells: &[C],
    load: L,
    first: usize,
    count: usize,
    out: &mut [f32],
) where
    L: Fn(&[C; LANES]) -> [__m512; 2],
{
    let width = rows.width();
    let columns = first * LANES..(first + COLUMNS) * LANES;
    let mut sums = [[[_mm512_setzero_ps(); 2]; COLUMNS]; V];
    for v in 0..V {
        let out = out[v.min(count - 1) * width..][..width][columns.clone()].as_chunks::<LANES>().0;
        for c in 0..COLUMNS {
            sums[v][c] = load_lanes(&out[c]);
        }
    }
    for r in 0..rows.len() {
        let row = rows.row(cells, r)[columns.clone()].as_chunks::<LANES>().0;
        let mut values = [[_mm512_setzero_ps(); 2]; COLUMNS];
        for c in 0..COLUMNS {
            values[c] = load(&row[c]);
        }
        for v in 0..V {
            let weight = _mm512_set1_ps(weights[v][r]);
            for c in 0..COLUMNS {
                sums[v][c][0] = _mm512_fmadd_ps(weight, values[c][0], sums[v][c][0]);
                sums[v][c][1] = _mm512_fmadd_ps(weight, values[c][1], sums[v][c][1]);
            }
        }
    }
    for v in 0..count {
        let out = out[v * width..][..width][columns.clone()].as_chunks_mut::<LANES>().0;
        for c in 0..COLUMNS {
            store_lanes(&mut out[c], sums[v][c]);
        }
    }
}

//! Attention over a cache of one row a position, a kind a file: what a row holds and how queries meet it.
//!
//! All kinds are exact (f32 activations whatever the weights' format), walk positions in ascending order in blocks of
//! [`SCORE_BLOCK`] with a running maximum, and compute each query row alone: a batch of rows gives the bits of one by one.

pub mod full;
pub mod latent;

use std::ops::Range;

use crate::kernels::{Kernels, RowsAt, Table};
use crate::limits::{HEAD_GROUP, SCORE_BLOCK};

/// The positions that one query row attends to, ascending.
#[derive(Clone, Copy, Debug)]
pub enum Attended<'a> {
    /// Positions `0..n`.
    Prefix(usize),
    /// These positions.
    Listed(&'a [u32]),
}

impl Attended<'_> {
    fn len(&self) -> usize {
        match self {
            Attended::Prefix(n) => *n,
            Attended::Listed(p) => p.len(),
        }
    }
}

/// Online softmax over blocks of scores: a running maximum, a running sum, and the factor that earlier terms shrink by.
struct Running {
    max: f32,
    sum: f32,
}

impl Running {
    const START: Running = Running { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Turns a block of scores into weights relative to the new maximum; returns the factor on everything before.
    fn absorb(&mut self, k: &Kernels, scores: &mut [f32]) -> f32 {
        let max = scores.iter().fold(self.max, |m, &s| m.max(s));
        let factor = if self.sum == 0.0 { 0.0 } else { (self.max - max).exp() };
        let sum = k.exp_shifted(scores, max);
        self.sum = self.sum * factor + sum;
        self.max = max;
        factor
    }
}

/// The cache as heads see it that share a key and a value: rows, and which part of a row is which.
struct Cached<'a> {
    rows: Table<'a>,
    width: usize,
    key: Range<usize>,
    value: Range<usize>,
}

/// How many of `heads` heads walk the cache together: as many as divide them, at most `most` and [`HEAD_GROUP`].
fn group_of(heads: usize, most: usize) -> usize {
    (1..=most.clamp(1, HEAD_GROUP)).rev().find(|group| heads.is_multiple_of(*group)).unwrap_or(1)
}

/// The numbers of up to [`SCORE_BLOCK`] attended positions from the `start`th on; `room` holds those that lie nowhere yet.
fn attended_block<'a>(attended: &Attended<'a>, start: usize, room: &'a mut [u32; SCORE_BLOCK]) -> &'a [u32] {
    let count = SCORE_BLOCK.min(attended.len() - start);
    match attended {
        Attended::Listed(positions) => &positions[start..][..count],
        Attended::Prefix(_) => {
            room.iter_mut().zip(start as u32..).for_each(|(to, position)| *to = position);
            &room[..count]
        }
    }
}

/// Softmax-weighted mean of the attended values, for up to [`HEAD_GROUP`] queries that walk the cache together: `queries`
/// is `[n][key width]`, `out` is `[n][value width]`. The first sees what `attended` says and each other one `more` positions
/// more than the one before it: 0 for heads of one row, 1 for rows of one head, which see all up to their own.
fn pool(k: &Kernels, scale: f32, queries: &[f32], cached: &Cached, attended: Attended, more: usize, out: &mut [f32]) {
    out.fill(0.0);
    let (key_width, value_width) = (cached.key.len(), cached.value.len());
    let n = queries.len() / key_width;
    let all = match attended {
        Attended::Prefix(seen) => Attended::Prefix(seen + (n - 1) * more),
        listed => listed,
    };
    let mut running = [const { Running::START }; HEAD_GROUP];
    let (mut scores, mut room) = ([0.0f32; HEAD_GROUP * SCORE_BLOCK], [0; SCORE_BLOCK]);
    for start in (0..all.len()).step_by(SCORE_BLOCK) {
        let block = attended_block(&all, start, &mut room);
        let seen = |query: usize| (attended.len() + query * more).saturating_sub(start).min(block.len());
        let mut first = 0;
        while first < n {
            // Those that see as much of the block as one another: all, but at the end of what they see.
            let at = &block[..seen(first)];
            let count = (first..n).take_while(|query| seen(*query) == at.len()).count();
            if !at.is_empty() {
                let rows = |columns: &Range<usize>| RowsAt::new(cached.rows, cached.width, columns.clone(), at);
                let scores = &mut scores[..count * at.len()];
                let out = &mut out[first * value_width..][..count * value_width];
                k.dots(&queries[first * key_width..][..count * key_width], &rows(&cached.key), scores);
                let each = scores.chunks_exact_mut(at.len()).zip(out.chunks_exact_mut(value_width));
                for ((scores, out), running) in each.zip(&mut running[first..]) {
                    scores.iter_mut().for_each(|score| *score *= scale);
                    let factor = running.absorb(k, scores);
                    if factor != 1.0 {
                        out.iter_mut().for_each(|o| *o *= factor);
                    }
                }
                k.add_weighted(scores, &rows(&cached.value), out);
            }
            first += count;
        }
    }
    for (out, running) in out.chunks_exact_mut(value_width).zip(&running) {
        let inverse = 1.0 / running.sum;
        out.iter_mut().for_each(|o| *o *= inverse);
    }
}

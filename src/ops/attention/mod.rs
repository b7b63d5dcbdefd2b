//! Attention over a cache of one row a position, a kind a file: what a row holds and how queries meet it.
//!
//! All kinds are exact (f32 activations whatever the weights' format), walk positions in ascending order in blocks of
//! [`SCORE_BLOCK`] with a running maximum, and compute each query row alone: a batch of rows gives the bits of one by one.

pub mod full;
pub mod latent;

use std::ops::Range;

use crate::kernels::Kernels;
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

    #[inline]
    fn at(&self, i: usize) -> usize {
        match self {
            Attended::Prefix(_) => i,
            Attended::Listed(p) => p[i] as usize,
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
    rows: &'a [f32],
    width: usize,
    key: Range<usize>,
    value: Range<usize>,
}

impl Cached<'_> {
    #[inline]
    fn key(&self, position: usize) -> &[f32] {
        &self.rows[position * self.width..][..self.width][self.key.clone()]
    }

    #[inline]
    fn value(&self, position: usize) -> &[f32] {
        &self.rows[position * self.width..][..self.width][self.value.clone()]
    }
}

/// How many of `heads` heads walk the cache together: as many as divide them, at most `most` and [`HEAD_GROUP`].
fn group_of(heads: usize, most: usize) -> usize {
    (1..=most.clamp(1, HEAD_GROUP)).rev().find(|group| heads.is_multiple_of(*group)).unwrap_or(1)
}

/// Softmax-weighted mean of the attended values, for up to [`HEAD_GROUP`] heads of one query row: `queries` is
/// `[heads][key width]`, `out` is `[heads][value width]`.
fn pool(k: &Kernels, scale: f32, queries: &[f32], cached: &Cached, attended: Attended, out: &mut [f32]) {
    out.fill(0.0);
    let mut running = [const { Running::START }; HEAD_GROUP];
    let (n, value_width) = (attended.len(), cached.value.len());
    for start in (0..n).step_by(SCORE_BLOCK) {
        let count = SCORE_BLOCK.min(n - start);
        let heads = queries.chunks_exact(cached.key.len()).zip(out.chunks_exact_mut(value_width)).zip(&mut running);
        for ((query, out), running) in heads {
            let mut scores = [0.0f32; SCORE_BLOCK];
            let scores = &mut scores[..count];
            for (i, s) in scores.iter_mut().enumerate() {
                *s = k.dot(query, cached.key(attended.at(start + i))) * scale;
            }
            let factor = running.absorb(k, scores);
            if factor != 1.0 {
                out.iter_mut().for_each(|o| *o *= factor);
            }
            for (i, &weight) in scores.iter().enumerate() {
                k.axpy(weight, cached.value(attended.at(start + i)), out);
            }
        }
    }
    for (out, running) in out.chunks_exact_mut(value_width).zip(&running) {
        let inverse = 1.0 / running.sum;
        out.iter_mut().for_each(|o| *o *= inverse);
    }
}

//! Rotary position embedding, interleaved: pairs `(2j, 2j + 1)` go in, halves come out.

use super::room::Room;
use crate::limits::MAX_ROPE;

/// Cosines and sines for every position of a context.
///
/// Angles are rounded as the reference rounds them: the inverse frequency and its product with the position are f32.
pub struct Rope {
    half: usize,
    /// `[position][half]` pairs of (cosine, sine).
    table: Vec<(f32, f32)>,
}

impl Rope {
    /// Tables for `positions` positions of vectors of `dim` values (even, at most [`MAX_ROPE`]), with base `theta`.
    pub fn new(theta: f64, dim: usize, positions: usize, room: &mut Room) -> Rope {
        let half = dim / 2;
        let inverse: Vec<f32> = (0..half).map(|j| theta.powf(-(2.0 * j as f64) / dim as f64) as f32).collect();
        let table = (0..positions)
            .flat_map(|p| inverse.iter().map(move |&f| p as f32 * f))
            .map(|angle| (f64::from(angle).cos() as f32, f64::from(angle).sin() as f32))
            .collect();
        Rope { half, table: room.counted(table) }
    }

    /// Rotates the first `dim` values of `v` for `position`, in place.
    pub fn rotate(&self, v: &mut [f32], position: usize) {
        let (half, dim) = (self.half, 2 * self.half);
        let mut pairs = [0.0f32; MAX_ROPE];
        let pairs = &mut pairs[..dim];
        pairs.copy_from_slice(&v[..dim]);
        let (low, high) = v[..dim].split_at_mut(half);
        for (j, &(cos, sin)) in self.table[position * half..][..half].iter().enumerate() {
            let (a, b) = (pairs[2 * j], pairs[2 * j + 1]);
            low[j] = a * cos - b * sin;
            high[j] = b * cos + a * sin;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_become_halves() {
        let rope = Rope::new(10000.0, 4, 3, &mut Room::default());
        let mut v = [1.0, 2.0, 3.0, 4.0, 9.0];
        rope.rotate(&mut v, 2);
        // angles 2 and 2 * 10000^(-1/2) = 0.02
        let expect = [
            2f64.cos() - 2.0 * 2f64.sin(),
            3.0 * 0.02f64.cos() - 4.0 * 0.02f64.sin(),
            2.0 * 2f64.cos() + 2f64.sin(),
            4.0 * 0.02f64.cos() + 3.0 * 0.02f64.sin(),
            9.0,
        ];
        for (got, want) in v.iter().zip(expect) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{v:?} {expect:?}");
        }
    }

    #[test]
    fn position_zero_only_reorders() {
        let mut v = [1.0, 2.0, 3.0, 4.0];
        Rope::new(1e6, 4, 1, &mut Room::default()).rotate(&mut v, 0);
        assert_eq!(v, [1.0, 3.0, 2.0, 4.0]);
    }
}

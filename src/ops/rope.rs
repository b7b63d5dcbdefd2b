//! Rotary position embedding: pairs of values turn together, the first of pair j ends at j, the second in the other half.

use super::room::Room;
use crate::limits::MAX_ROPE;

/// Which values of a vector make a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pairs {
    /// Neighbours, `(2j, 2j + 1)`.
    Adjacent,
    /// The same place in both halves, `(j, half + j)`.
    Halves,
}

/// Cosines and sines for every position of a context.
///
/// Angles are rounded as the reference rounds them: the inverse frequency and its product with the position are f32.
pub struct Rope {
    pairs: Pairs,
    half: usize,
    /// `[position][half]` pairs of (cosine, sine).
    table: Vec<(f32, f32)>,
}

impl Rope {
    /// Tables for `positions` positions of vectors of `dim` values (even, at most [`MAX_ROPE`]), with base `theta`.
    pub fn new(pairs: Pairs, theta: f64, dim: usize, positions: usize, room: &mut Room) -> Rope {
        let half = dim / 2;
        let inverse: Vec<f32> = (0..half).map(|j| theta.powf(-(2.0 * j as f64) / dim as f64) as f32).collect();
        let turns = (0..positions)
            .flat_map(|p| inverse.iter().map(move |&f| p as f32 * f))
            .map(|angle| (f64::from(angle).cos() as f32, f64::from(angle).sin() as f32));
        Rope { pairs, half, table: room.collected(positions * half, turns) }
    }

    /// Rotates the first `dim` values of `v` for `position`, in place.
    pub fn rotate(&self, v: &mut [f32], position: usize) {
        let (half, dim) = (self.half, 2 * self.half);
        let mut before = [0.0f32; MAX_ROPE];
        let before = &mut before[..dim];
        before.copy_from_slice(&v[..dim]);
        let (low, high) = v[..dim].split_at_mut(half);
        for (j, &(cos, sin)) in self.table[position * half..][..half].iter().enumerate() {
            let (a, b) = match self.pairs {
                Pairs::Adjacent => (before[2 * j], before[2 * j + 1]),
                Pairs::Halves => (before[j], before[half + j]),
            };
            low[j] = a * cos - b * sin;
            high[j] = b * cos + a * sin;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rotates `v`, which holds the pairs (1, 2) and (3, 4) and a stranger, to position 2.
    fn check_rotated(pairs: Pairs, mut v: [f32; 5]) {
        let rope = Rope::new(pairs, 10000.0, 4, 3, &mut Room::default());
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
    fn adjacent_pairs_become_halves() {
        check_rotated(Pairs::Adjacent, [1.0, 2.0, 3.0, 4.0, 9.0]);
    }

    #[test]
    fn pairs_across_the_halves_stay_where_they_are() {
        check_rotated(Pairs::Halves, [1.0, 3.0, 2.0, 4.0, 9.0]);
    }

    #[test]
    fn position_zero_only_reorders_and_only_neighbours() {
        let mut v = [1.0, 2.0, 3.0, 4.0];
        Rope::new(Pairs::Adjacent, 1e6, 4, 1, &mut Room::default()).rotate(&mut v, 0);
        assert_eq!(v, [1.0, 3.0, 2.0, 4.0]);
        Rope::new(Pairs::Halves, 1e6, 4, 1, &mut Room::default()).rotate(&mut v, 0);
        assert_eq!(v, [1.0, 3.0, 2.0, 4.0]);
    }
}

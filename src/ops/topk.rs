//! Choosing the largest values; equal values go to the lower index, so that runs are reproducible.

/// Indices of the `k` largest of `values`, ascending by index, into `out` (cleared first).
///
/// The least value that is taken is found bit by bit, by counting how many are as large: as many passes as it has bits,
/// each over a list that is as long as `values` and is walked from end to end. Nothing is sorted. `ranks` keeps its
/// capacity between calls.
pub fn largest(values: &[f32], k: usize, ranks: &mut Vec<i32>, out: &mut Vec<u32>) {
    out.clear();
    if k >= values.len() {
        out.extend(0..values.len() as u32);
        return;
    }
    ranks.clear();
    ranks.extend(values.iter().map(|value| rank(*value)));
    let at_least = |least: i32| ranks.iter().map(|rank| i32::from(*rank >= least)).sum::<i32>() as usize;
    // As its bits count upwards from the lowest rank.
    let mut steps = 0u32;
    for bit in (0..u32::BITS).rev() {
        let taken = at_least(rank_after(steps | 1 << bit));
        if taken >= k {
            steps |= 1 << bit;
        }
        if taken == k {
            break;
        }
    }
    let least = rank_after(steps);
    let mut equal = k - ranks.iter().map(|rank| i32::from(*rank > least)).sum::<i32>() as usize;
    for (index, rank) in (0..).zip(ranks.iter()) {
        if *rank > least {
            out.push(index);
        } else if *rank == least && equal > 0 {
            equal -= 1;
            out.push(index);
        }
    }
}

/// An integer that is larger where `value` is larger, as [`f32::total_cmp`] has it.
fn rank(value: f32) -> i32 {
    let bits = value.to_bits() as i32;
    // Of a negative number all bits but the sign count downwards.
    bits ^ ((bits >> 31) as u32 >> 1) as i32
}

/// So many steps above the lowest rank.
fn rank_after(steps: u32) -> i32 {
    (steps ^ 1 << 31) as i32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(values: &[f32], k: usize) -> Vec<u32> {
        let (mut scratch, mut out) = (Vec::new(), vec![99]);
        largest(values, k, &mut scratch, &mut out);
        out
    }

    #[test]
    fn ties_go_to_the_lower_position() {
        assert_eq!(run(&[1.0, 3.0, 3.0, 3.0, 0.0], 2), [1, 2]);
        assert_eq!(run(&[0.0, 0.0, 0.0, 0.0], 3), [0, 1, 2]);
    }

    #[test]
    fn what_is_larger_has_the_larger_rank() {
        let ascending =
            [f32::NEG_INFINITY, f32::MIN, -2.0, -1.0, -f32::MIN_POSITIVE, -1e-45, -0.0, 0.0, 1e-45, 1.0, f32::INFINITY];
        for pair in ascending.windows(2) {
            assert!(rank(pair[0]) < rank(pair[1]), "{pair:?}");
            assert_eq!(run(pair, 1), [1], "{pair:?}");
        }
        assert_eq!((rank_after(0), rank_after(u32::MAX)), (i32::MIN, i32::MAX));
    }

    #[test]
    fn fewer_values_than_k_keeps_all() {
        assert_eq!(run(&[2.0, 1.0], 5), [0, 1]);
    }

    #[test]
    fn equals_a_full_stable_sort() {
        let mut seed = 9u32;
        for n in 1..60usize {
            let values: Vec<f32> = (0..n)
                .map(|_| {
                    seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    ((seed >> 24) % 7) as f32 - 3.0
                })
                .collect();
            for k in 0..=n {
                let mut order: Vec<u32> = (0..n as u32).collect();
                order.sort_by(|a, b| values[*b as usize].partial_cmp(&values[*a as usize]).unwrap());
                let mut want = order[..k].to_vec();
                want.sort_unstable();
                assert_eq!(run(&values, k), want);
            }
        }
    }
}

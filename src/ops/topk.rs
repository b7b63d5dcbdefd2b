//! Choosing the largest values; equal values go to the lower index, so that runs are reproducible.

/// Indices of the `k` largest of `values`, ascending by index, into `out` (cleared first).
///
/// Linear in `values.len()`: a selection, not a sort. `scratch` keeps its capacity between calls.
pub fn largest(values: &[f32], k: usize, scratch: &mut Vec<u32>, out: &mut Vec<u32>) {
    out.clear();
    if k >= values.len() {
        out.extend(0..values.len() as u32);
        return;
    }
    scratch.clear();
    scratch.extend(0..values.len() as u32);
    let better = |a: &u32, b: &u32| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b));
    scratch.select_nth_unstable_by(k, better);
    out.extend_from_slice(&scratch[..k]);
    out.sort_unstable();
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

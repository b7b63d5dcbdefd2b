//! What is read off logits.

/// The first position of the largest value of each row.
pub fn argmaxes(logits: &[f32], vocab: usize) -> Vec<u32> {
    let first_best = |row: &[f32]| (1..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best });
    logits.chunks_exact(vocab).map(|row| first_best(row) as u32).collect()
}

/// Positions where two sequences differ.
pub fn differing(a: &[u32], b: &[u32]) -> Vec<usize> {
    assert_eq!(a.len(), b.len());
    (0..a.len()).filter(|&i| a[i] != b[i]).collect()
}

/// Negative log likelihood of `ids[1..]`, in nats, summed in f64.
pub fn nll(logits: &[f32], ids: &[u32]) -> f64 {
    let vocab = logits.len() / ids.len();
    let of = |(row, &id): (&[f32], &u32)| {
        let max = row.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v));
        let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
        sum.ln() - f64::from(row[id as usize] - max)
    };
    logits.chunks_exact(vocab).zip(&ids[1..]).map(of).sum()
}

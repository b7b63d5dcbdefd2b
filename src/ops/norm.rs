//! RMSNorm and LayerNorm. Sums are f64 and in order of index: nothing else would give the same bits everywhere.

/// `out_i = w_i * x_i / sqrt(mean(x^2) + eps)` for each row of `x` (`[rows, w.len()]`).
pub fn rms_rows(x: &[f32], w: &[f32], eps: f64, out: &mut [f32]) {
    for (x, out) in x.chunks_exact(w.len()).zip(out.chunks_exact_mut(w.len())) {
        let scale = rms_scale(x, eps);
        for ((o, &x), &w) in out.iter_mut().zip(x).zip(w) {
            *o = w * (x * scale);
        }
    }
}

/// As [`rms_rows`] for one vector, in place.
pub fn rms_in_place(x: &mut [f32], w: &[f32], eps: f64) {
    let scale = rms_scale(x, eps);
    for (x, &w) in x.iter_mut().zip(w) {
        *x = w * (*x * scale);
    }
}

fn rms_scale(x: &[f32], eps: f64) -> f32 {
    let sum: f64 = x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
    (1.0 / (sum / x.len() as f64 + eps).sqrt()) as f32
}

/// `x_i = (x_i - mean) / sqrt(variance + eps) * w_i + b_i`, in place.
pub fn layer_norm(x: &mut [f32], w: &[f32], b: &[f32], eps: f64) {
    let n = x.len() as f64;
    let mean = x.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = x.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    let scale = 1.0 / (variance + eps).sqrt();
    for ((x, &w), &b) in x.iter_mut().zip(w).zip(b) {
        *x = ((f64::from(*x) - mean) * scale) as f32 * w + b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rms_by_hand() {
        // mean(9, 16) = 12.5
        let mut out = [0.0; 2];
        rms_rows(&[3.0, 4.0], &[1.0, 2.0], 0.0, &mut out);
        let r = 12.5f32.sqrt();
        assert!((out[0] - 3.0 / r).abs() < 1e-6 && (out[1] - 8.0 / r).abs() < 1e-6);
        let mut x = [3.0, 4.0];
        rms_in_place(&mut x, &[1.0, 2.0], 0.0);
        assert_eq!(x, out);
    }

    #[test]
    fn layer_norm_by_hand() {
        // mean 2, variance 2/3
        let mut x = [1.0, 2.0, 3.0];
        layer_norm(&mut x, &[1.0, 1.0, 2.0], &[0.0, 5.0, 0.0], 0.0);
        let s = 1.0 / (2.0f64 / 3.0).sqrt();
        assert!((f64::from(x[0]) + s).abs() < 1e-6);
        assert_eq!(x[1], 5.0);
        assert!((f64::from(x[2]) - 2.0 * s).abs() < 1e-6);
    }
}

//! AttnRes: what a sub-layer reads is an attention-weighted mix of block snapshots and
//! the running sum, in place of a residual stream.

use half::bf16;

/// Weights of one mix: a norm and a projection to one score, both `[hidden]`.
#[derive(Clone, Copy)]
pub struct Mix<'a> {
    /// Norm weight, `[hidden]`.
    pub norm: &'a [bf16],
    /// Projection to a score, `[hidden]`.
    pub projection: &'a [bf16],
}

/// Most entries a mix can have; a config with more blocks is refused at start.
pub const MAX_ENTRIES: usize = 64;

impl Mix<'_> {
    /// Mixes `entries`, each `[hidden]`, into `out: [hidden]`:
    /// `score_i = (v_i . (norm * projection)) / sqrt(mean(v_i^2) + eps)`, softmax over the
    /// entries, then the weighted sum of the entries as they are.
    ///
    /// Scores lie about 0.02 apart, so sums are kept in f64.
    ///
    /// # Panics
    /// More than [`MAX_ENTRIES`] entries, or none.
    pub fn forward<'v>(
        &self,
        entries: impl Iterator<Item = &'v [f32]> + Clone,
        eps: f32,
        out: &mut [f32],
    ) {
        let mut weights = [0.0f64; MAX_ENTRIES];
        let mut count = 0;
        for v in entries.clone() {
            weights[count] = self.score(v, eps);
            count += 1;
        }
        let weights = &mut weights[..count];
        let max = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        weights.iter_mut().for_each(|w| *w = (*w - max).exp());
        let sum: f64 = weights.iter().sum();
        out.fill(0.0);
        for (v, w) in entries.zip(weights) {
            let w = (*w / sum) as f32;
            out.iter_mut().zip(v).for_each(|(o, x)| *o += w * x);
        }
    }

    fn score(&self, v: &[f32], eps: f32) -> f64 {
        const LANES: usize = 8;
        let (mut dot, mut square) = ([0.0f64; LANES], [0.0f64; LANES]);
        let chunks =
            v.chunks(LANES).zip(self.norm.chunks(LANES)).zip(self.projection.chunks(LANES));
        for ((v, n), p) in chunks {
            for (l, &x) in v.iter().enumerate() {
                let weight = n[l].to_f32() * p[l].to_f32();
                dot[l] += f64::from(x) * f64::from(weight);
                square[l] += f64::from(x) * f64::from(x);
            }
        }
        let (dot, square): (f64, f64) = (dot.iter().sum(), square.iter().sum());
        dot / (square / v.len() as f64 + f64::from(eps)).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mixes_entries_as_they_are() {
        let ones = vec![bf16::ONE; 4];
        let mix = Mix { norm: &ones, projection: &ones };
        let (a, b) = ([1.0, 1.0, 1.0, 1.0], [-3.0, -3.0, -3.0, -3.0]);
        let mut out = [0.0; 4];
        mix.forward([&a[..], &b[..]].into_iter(), 0.0, &mut out);
        // Scores 4 and -4: normalized entries count for the score, plain ones for the sum.
        let w = 1.0 / (1.0 + (-8.0f32).exp());
        assert!((out[0] - (w - 3.0 * (1.0 - w))).abs() < 1e-6, "{out:?}");
    }

    #[test]
    fn one_entry_passes_through() {
        let ones = vec![bf16::ONE; 3];
        let mut out = [0.0; 3];
        let v = [1.0, -2.0, 0.5];
        Mix { norm: &ones, projection: &ones }.forward([&v[..]].into_iter(), 1e-5, &mut out);
        assert_eq!(out, v);
    }
}

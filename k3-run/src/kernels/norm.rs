//! RMSNorm and the AttnRes mix. Sums over a row are kept in f64, in 16 lanes added up in a
//! fixed order: mixing scores lie about 0.02 apart, and a norm's error would reach
//! every product after it.

use half::bf16;

use super::Kernels;
use super::isa::{Isa, Task};

/// Element of a vector of weights: BF16 or f32.
pub trait Weight: Copy + Send + Sync + Default {
    /// The value as f32, exactly.
    fn widen(self) -> f32;
}

impl Weight for bf16 {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_bits(u32::from(self.to_bits()) << 16)
    }
}

impl Weight for f32 {
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

/// Adds 16 lanes up in a fixed order.
#[inline(always)]
fn add_up(mut lanes: [f64; 16]) -> f64 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// `Σ x[i]^2`.
#[inline(always)]
pub(super) fn sum_of_squares(x: &[f32]) -> f64 {
    let mut lanes = [0.0; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for x in chunks {
        for l in 0..16 {
            lanes[l] += f64::from(x[l]) * f64::from(x[l]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(rest) {
        *lane += f64::from(x) * f64::from(x);
    }
    add_up(lanes)
}

/// `Σ x[i] * (a[i] * b[i])`, the inner product rounded to f32.
#[inline(always)]
fn dot(x: &[f32], a: &[bf16], b: &[bf16]) -> f64 {
    let mut lanes = [0.0; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    let (a_chunks, a_rest) = a.as_chunks::<16>();
    let (b_chunks, b_rest) = b.as_chunks::<16>();
    for ((x, a), b) in chunks.iter().zip(a_chunks).zip(b_chunks) {
        for l in 0..16 {
            lanes[l] += f64::from(x[l]) * f64::from(a[l].widen() * b[l].widen());
        }
    }
    for (l, &x) in rest.iter().enumerate() {
        lanes[l] += f64::from(x) * f64::from(a_rest[l].widen() * b_rest[l].widen());
    }
    add_up(lanes)
}

/// `x <- x * w / sqrt(mean(x^2) + eps)`, both `[width]`.
#[inline(always)]
pub(super) fn normalize<W: Weight>(x: &mut [f32], weight: &[W], eps: f32) {
    let mean = sum_of_squares(x) / x.len() as f64;
    let scale = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w.widen();
    }
}

struct RmsNorm<'a, W> {
    x: &'a mut [f32],
    weight: &'a [W],
    eps: f32,
}

impl<W: Weight> Task for RmsNorm<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, _isa: S) {
        for row in self.x.chunks_exact_mut(self.weight.len()) {
            normalize(row, self.weight, self.eps);
        }
    }
}

/// Most entries of an AttnRes mix.
pub const MAX_ENTRIES: usize = 64;

struct Mix<'a, I> {
    entries: I,
    norm: &'a [bf16],
    projection: &'a [bf16],
    eps: f32,
    out: &'a mut [f32],
}

impl<'v, I: Iterator<Item = &'v [f32]> + Clone> Task for Mix<'_, I> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { entries, norm, projection, eps, out } = self;
        let mut scores = [0.0; MAX_ENTRIES];
        let mut count = 0;
        for v in entries.clone() {
            assert!(v.len() == out.len(), "entries as wide as the output");
            let dot = dot(v, norm, projection);
            let mean = sum_of_squares(v) / v.len() as f64;
            scores[count] = dot / (mean + f64::from(eps)).sqrt();
            count += 1;
        }
        let scores = &mut scores[..count];
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        scores.iter_mut().for_each(|score| *score = (*score - max).exp());
        let sum: f64 = scores.iter().sum();
        let mut weights = [0.0; MAX_ENTRIES];
        for (weight, score) in weights.iter_mut().zip(scores) {
            *weight = (*score / sum) as f32;
        }
        out.fill(0.0);
        for (v, weight) in entries.zip(weights) {
            add_scaled(isa, out, v, weight);
        }
    }
}

/// `sum[i] += weight * v[i]`, fused where the set is.
#[inline(always)]
fn add_scaled<S: Isa>(isa: S, sum: &mut [f32], v: &[f32], weight: f32) {
    let weight = isa.splat(weight);
    let ((sums, last_sums), (vs, last_vs)) = (sum.as_chunks_mut::<16>(), v.as_chunks::<16>());
    for (sum, v) in sums.iter_mut().zip(vs) {
        isa.store(isa.mul_add(weight, isa.load(v), isa.load(sum)), sum);
    }
    if !last_vs.is_empty() {
        let (mut sum, mut v) = ([0.0; 16], [0.0; 16]);
        sum[..last_sums.len()].copy_from_slice(last_sums);
        v[..last_vs.len()].copy_from_slice(last_vs);
        isa.store(isa.mul_add(weight, isa.load(&v), isa.load(&sum)), &mut sum);
        last_sums.copy_from_slice(&sum[..last_sums.len()]);
    }
}

struct AddScaled<'a> {
    sum: &'a mut [f32],
    v: &'a [f32],
    weight: f32,
}

impl Task for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        add_scaled(isa, self.sum, self.v, self.weight);
    }
}

impl Kernels {
    /// RMSNorm of each row in place: `x <- x * w / sqrt(mean(x^2) + eps)`; `x: [rows,
    /// width]`, `weight: [width]`.
    ///
    /// # Panics
    /// `x` does not divide into rows.
    pub fn rms_norm<W: Weight>(self, x: &mut [f32], weight: &[W], eps: f32) {
        assert!(x.len().is_multiple_of(weight.len()), "whole rows");
        self.run(RmsNorm { x, weight, eps });
    }

    /// AttnRes: mixes `entries`, each `[hidden]`, into `out: [hidden]`.
    /// `score_i = (v_i · (norm * projection)) / sqrt(mean(v_i^2) + eps)`, softmax over the
    /// entries, then the weighted sum of the entries as they are.
    ///
    /// # Panics
    /// The lengths differ, or there are more than [`MAX_ENTRIES`] entries.
    pub fn attn_res_mix<'v>(
        self,
        entries: impl Iterator<Item = &'v [f32]> + Clone,
        norm: &[bf16],
        projection: &[bf16],
        eps: f32,
        out: &mut [f32],
    ) {
        assert!(norm.len() == out.len() && projection.len() == out.len(), "one width");
        self.run(Mix { entries, norm, projection, eps, out });
    }

    /// `sum[i] += weight * v[i]`.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn add_scaled(self, sum: &mut [f32], v: &[f32], weight: f32) {
        assert_eq!(sum.len(), v.len(), "two vectors of one length");
        self.run(AddScaled { sum, v, weight });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize, rng: &mut fastrand::Rng) -> Vec<f32> {
        (0..len).map(|_| rng.f32() - 0.5).collect()
    }

    fn assert_close(found: f32, exact: f64, ulps: f64, what: &str) {
        let limit = ulps * f64::from(f32::EPSILON) * exact.abs();
        assert!((f64::from(found) - exact).abs() <= limit, "{what}: {found} is not {exact}");
    }

    #[test]
    fn rms_norm_follows_its_formula_on_every_set() {
        let mut rng = fastrand::Rng::with_seed(8);
        for (rows, width) in [(1, 1), (3, 37), (2, 7168)] {
            let x = noise(rows * width, &mut rng);
            let weight: Vec<bf16> =
                noise(width, &mut rng).into_iter().map(bf16::from_f32).collect();
            for kernels in Kernels::available() {
                let mut y = x.clone();
                kernels.rms_norm(&mut y, &weight, 1e-5);
                for (x, y) in x.chunks(width).zip(y.chunks(width)) {
                    let squares: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
                    let root = (squares / width as f64 + f64::from(1e-5_f32)).sqrt();
                    for i in 0..width {
                        let exact = f64::from(x[i]) / root * f64::from(weight[i].to_f32());
                        assert_close(y[i], exact, 2.0, kernels.name());
                    }
                }
            }
        }
    }

    #[test]
    fn mix_follows_its_formula_on_every_set() {
        let mut rng = fastrand::Rng::with_seed(9);
        for (entries, width) in [(1, 16), (2, 5), (9, 7168)] {
            let v: Vec<Vec<f32>> = (0..entries).map(|_| noise(width, &mut rng)).collect();
            let [norm, projection] = [2.0, 0.7].map(|scale| -> Vec<bf16> {
                noise(width, &mut rng).into_iter().map(|x| bf16::from_f32(scale * x)).collect()
            });
            let scores: Vec<f64> = v
                .iter()
                .map(|v| {
                    let (mut dot, mut squares) = (0.0, 0.0);
                    for i in 0..width {
                        let weight = f64::from(norm[i].to_f32() * projection[i].to_f32());
                        dot += f64::from(v[i]) * weight;
                        squares += f64::from(v[i]) * f64::from(v[i]);
                    }
                    dot / (squares / width as f64 + f64::from(1e-5_f32)).sqrt()
                })
                .collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            for kernels in Kernels::available() {
                let mut out = vec![f32::NAN; width];
                let entries = v.iter().map(Vec::as_slice);
                kernels.attn_res_mix(entries, &norm, &projection, 1e-5, &mut out);
                for i in 0..width {
                    let terms = v.iter().zip(&scores).map(|(v, s)| s.exp() / sum * f64::from(v[i]));
                    let exact: f64 = terms.clone().sum();
                    let size: f64 = terms.map(f64::abs).sum();
                    assert!(
                        (f64::from(out[i]) - exact).abs() <= 6e-7 * size,
                        "{} column {i}: {} is not {exact}",
                        kernels.name(),
                        out[i]
                    );
                }
            }
        }
    }

    #[test]
    fn one_entry_passes_through_unchanged() {
        let v = noise(50, &mut fastrand::Rng::with_seed(10));
        let ones = vec![bf16::ONE; 50];
        for kernels in Kernels::available() {
            let mut out = vec![0.0; 50];
            kernels.attn_res_mix([&v[..]].into_iter(), &ones, &ones, 1e-5, &mut out);
            assert_eq!(out, v);
        }
    }
}

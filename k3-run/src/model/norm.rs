//! RMSNorm and the activations of the model, on one row at a time.

use half::bf16;

/// Weights of a norm: BF16 in the checkpoint but for the KDA output norm.
pub trait NormWeight: Copy {
    /// The weight as f32.
    fn widen(self) -> f32;
}

impl NormWeight for bf16 {
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl NormWeight for f32 {
    fn widen(self) -> f32 {
        self
    }
}

/// Sum of squares of `x`, in f64 with a fixed order.
pub fn sum_of_squares(x: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut lanes = [0.0f64; LANES];
    for chunk in x.chunks(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(x) * f64::from(x);
        }
    }
    lanes.iter().sum()
}

/// `x <- x * w / sqrt(mean(x^2) + eps)`, all `[width]`.
pub fn rms_norm<W: NormWeight>(x: &mut [f32], weight: &[W], eps: f32) {
    let mean = sum_of_squares(x) / x.len() as f64;
    let scale = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
    x.iter_mut().zip(weight).for_each(|(x, w)| *x = *x * scale * w.widen());
}

/// Logistic function.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `x * sigmoid(x)`.
pub fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// SiTU-GLU: `gate <- b tanh(gate / b) sigmoid(gate) * c tanh(up / c)`.
pub fn situ_glu(gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
    for (g, &u) in gate.iter_mut().zip(up) {
        *g = beta * (*g / beta).tanh() * sigmoid(*g) * (linear_beta * (u / linear_beta).tanh());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn norm_of_a_constant_row_is_its_weight() {
        let mut x = [3.0f32; 10];
        rms_norm(&mut x, &[0.5f32; 10], 0.0);
        assert!(x.iter().all(|v| (v - 0.5).abs() < 1e-7));
    }

    #[test]
    fn situ_saturates() {
        let mut gate = [100.0];
        situ_glu(&mut gate, &[1e9], 4.0, 25.0);
        assert!((gate[0] - 100.0).abs() < 1e-3);
    }
}

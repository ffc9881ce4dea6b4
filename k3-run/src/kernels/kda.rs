//! Kimi delta attention of one head: short convolutions, norms, decay, the delta rule and
//! the gated read-out, all tokens of a step in order.
//!
//! A head's memory `[key, value]` is 64 KiB at 128 x 128. For each token it is read twice
//! and written once, a block of values at a time: the first pass recalls (and brings the
//! block into the cache), the second updates and reads out.

use super::Kernels;
use super::isa::{Isa, Task};
use super::norm::{normalize, sum_of_squares};
use super::vecmath::{Gate, Map, Sigmoid, apply, exp, sigmoid, silu};
use crate::parallel::Columns;

/// Added to the sum of squares under the root of the q and k norms.
const L2_EPS: f64 = 1e-6;

/// Vectors of values that one pass over the memory takes along.
const WIDTH: usize = 4;

/// Widest convolution that keeps its history in registers; it is also the usual one.
const TAPS: usize = 4;

/// What does not change from token to token; `dim` is the head's width.
#[derive(Debug, Clone, Copy)]
pub struct KdaHeadWeights<'a> {
    /// Taps of q, k and v, each `[dim, conv_width]`, the current token's last.
    pub taps: [&'a [f32]; 3],
    /// `[dim]`.
    pub dt_bias: &'a [f32],
    /// `exp(A_log)` of this head.
    pub rate: f32,
    /// Bound of the logarithm of the decay, -5 in K3.
    pub lower_bound: f32,
    /// `[dim]`.
    pub o_norm: &'a [f32],
    /// eps of the output norm.
    pub eps: f32,
}

/// One head with its inputs, which are overwritten, and its state.
pub struct KdaHead<'a> {
    pub weights: KdaHeadWeights<'a>,
    /// Projections `[rows, dim]`; `q` receives the gated output.
    pub q: Columns<'a>,
    pub k: Columns<'a>,
    pub v: Columns<'a>,
    /// Logits of the decay without their bias, `[rows, dim]`.
    pub decay: Columns<'a>,
    /// Logits of the output gate, `[rows, dim]`.
    pub gate: Columns<'a>,
    /// Logit of the write strength, `[rows, 1]`.
    pub beta: Columns<'a>,
    /// Last inputs of the q, k and v convolutions, oldest first, each `[conv_width - 1, dim]`.
    pub past: [Columns<'a>; 3],
    /// `[dim, dim]`, key by value.
    pub memory: &'a mut [f32],
}

impl Kernels {
    /// Takes in all rows of one head and leaves `norm(read-out) * sigmoid(gate)` in `q`.
    /// For each token, with q and k of unit length (q times `dim^-0.5`) and
    /// `decay = exp(lower_bound * sigmoid(rate * (z + dt_bias)))`:
    /// `S <- diag(decay) S; S <- S + k (sigmoid(beta) (v - S^T k))^T; read-out = S^T q`.
    ///
    /// # Panics
    /// The shapes do not fit each other.
    pub fn kda_head(self, head: KdaHead) {
        let (rows, dim) = (head.q.tokens(), head.q.width());
        for x in [&head.k, &head.v, &head.decay, &head.gate] {
            assert_eq!((x.tokens(), x.width()), (rows, dim), "[rows, dim]");
        }
        assert_eq!((head.beta.tokens(), head.beta.width()), (rows, 1), "[rows, 1]");
        for (past, taps) in head.past.iter().zip(head.weights.taps) {
            assert_eq!(past.width(), dim, "inputs of every channel");
            assert_eq!(taps.len(), dim * (past.tokens() + 1), "taps of every channel");
        }
        assert_eq!(head.memory.len(), dim * dim, "[dim, dim]");
        assert_eq!((head.weights.dt_bias.len(), head.weights.o_norm.len()), (dim, dim), "[dim]");
        self.run(head);
    }
}

impl Task for KdaHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let w = self.weights;
        let [past_q, past_k, past_v] = &mut self.past;
        convolve(isa, &mut self.q, past_q, w.taps[0]);
        convolve(isa, &mut self.k, past_k, w.taps[1]);
        convolve(isa, &mut self.v, past_v, w.taps[2]);
        let dim = self.q.width();
        for t in 0..self.q.tokens() {
            let (q, k, v) = (self.q.row_mut(t), self.k.row_mut(t), self.v.row_mut(t));
            scale_to(q, (dim as f64).powf(-0.5));
            scale_to(k, 1.0);
            let decay = self.decay.row_mut(t);
            apply(isa, Decay { rate: w.rate, bound: w.lower_bound }, decay, w.dt_bias);
            let beta = self.beta.row_mut(t);
            apply(isa, Sigmoid, beta, &[]);
            delta_rule(isa, self.memory, q, k, v, decay, beta[0]);
            normalize(v, w.o_norm, w.eps);
            q.copy_from_slice(v);
            apply(isa, Gate, q, self.gate.row_mut(t));
        }
    }
}

/// `exp(bound * sigmoid(rate * (z + bias)))`.
#[derive(Clone, Copy)]
struct Decay {
    rate: f32,
    bound: f32,
}

impl Map for Decay {
    #[inline(always)]
    fn apply<S: Isa>(self, isa: S, z: S::F, bias: S::F) -> S::F {
        let gate = sigmoid(isa, isa.mul(isa.splat(self.rate), isa.add(z, bias)));
        exp(isa, isa.mul(isa.splat(self.bound), gate))
    }
}

/// `x <- x * scale / sqrt(Σ x^2 + 1e-6)`.
#[inline(always)]
fn scale_to(x: &mut [f32], scale: f64) {
    let factor = (scale / (sum_of_squares(x) + L2_EPS).sqrt()) as f32;
    for x in x {
        *x *= factor;
    }
}

/// Causal depthwise convolution and SiLU in place: `x: [rows, dim]`, `past: [taps - 1,
/// dim]` moves on, `taps: [dim, taps]`. Products are added oldest first.
#[inline(always)]
fn convolve<S: Isa>(isa: S, x: &mut Columns, past: &mut Columns, taps: &[f32]) {
    let older = past.tokens();
    let vectors = if older + 1 == TAPS { x.width() / 16 } else { 0 };
    for (i, taps) in taps.as_chunks::<64>().0.iter().take(vectors).enumerate() {
        let taps = isa.deinterleave(taps);
        let mut inputs = [isa.splat(0.0); TAPS - 1];
        for (j, input) in inputs.iter_mut().enumerate() {
            *input = isa.load(vector(past.row_mut(j), i));
        }
        for t in 0..x.tokens() {
            let x = vector(x.row_mut(t), i);
            let current = isa.load(x);
            let sum = isa.mul(taps[0], inputs[0]);
            let sum = isa.mul_add(taps[1], inputs[1], sum);
            let sum = isa.mul_add(taps[2], inputs[2], sum);
            isa.store(silu(isa, isa.mul_add(taps[3], current, sum)), x);
            inputs = [inputs[1], inputs[2], current];
        }
        for (j, input) in inputs.into_iter().enumerate() {
            isa.store(input, vector(past.row_mut(j), i));
        }
    }
    for c in 16 * vectors..x.width() {
        let taps = &taps[c * (older + 1)..][..older + 1];
        for t in 0..x.tokens() {
            let current = x.row_mut(t)[c];
            let mut lane = [0.0; 16];
            for (j, &tap) in taps.iter().enumerate() {
                let input = if j < older { past.row_mut(j)[c] } else { current };
                let sum = isa.mul_add(isa.splat(tap), isa.splat(input), isa.load(&lane));
                isa.store(sum, &mut lane);
            }
            isa.store(silu(isa, isa.load(&lane)), &mut lane);
            x.row_mut(t)[c] = lane[0];
            for j in 1..older {
                past.row_mut(j - 1)[c] = past.row_mut(j)[c];
            }
            past.row_mut(older - 1)[c] = current;
        }
    }
}

#[inline(always)]
fn vector(row: &mut [f32], i: usize) -> &mut [f32; 16] {
    &mut row.as_chunks_mut::<16>().0[i]
}

/// One token of the delta rule; `v` receives the read-out.
#[inline(always)]
fn delta_rule<S: Isa>(
    isa: S,
    memory: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &mut [f32],
    decay: &[f32],
    beta: f32,
) {
    let dim = v.len();
    let keys = Keys { q: &q[..dim], k: &k[..dim], decay: &decay[..dim], beta };
    let (blocks, rest) = v.as_chunks_mut::<{ 16 * WIDTH }>();
    for (i, v) in blocks.iter_mut().enumerate() {
        keys.update::<S, { 16 * WIDTH }, WIDTH>(isa, memory, 16 * WIDTH * i, v);
    }
    let done = dim - rest.len();
    let (blocks, rest) = rest.as_chunks_mut::<16>();
    for (i, v) in blocks.iter_mut().enumerate() {
        keys.update::<S, 16, 1>(isa, memory, done + 16 * i, v);
    }
    keys.update_last(isa, memory, dim - rest.len(), rest);
}

/// What one token brings to every column of the memory.
struct Keys<'a> {
    q: &'a [f32],
    k: &'a [f32],
    decay: &'a [f32],
    beta: f32,
}

impl Keys<'_> {
    /// Columns `first..first + N` of the memory, `N` being 16 times `V`.
    #[inline(always)]
    fn update<S: Isa, const N: usize, const V: usize>(
        &self,
        isa: S,
        memory: &mut [f32],
        first: usize,
        v: &mut [f32; N],
    ) {
        let dim = self.k.len();
        let mut recalled = [isa.splat(0.0); V];
        for (row, (k, decay)) in memory.chunks_exact(dim).zip(self.k.iter().zip(self.decay)) {
            let (k, decay) = (isa.splat(*k), isa.splat(*decay));
            let row = row[first..][..N].as_chunks::<16>().0;
            for i in 0..V {
                recalled[i] = isa.mul_add(isa.mul(isa.load(&row[i]), decay), k, recalled[i]);
            }
        }
        let (v, _) = v.as_chunks_mut::<16>();
        let mut error = [isa.splat(0.0); V];
        for i in 0..V {
            error[i] = isa.mul(isa.splat(self.beta), isa.sub(isa.load(&v[i]), recalled[i]));
        }
        let mut out = [isa.splat(0.0); V];
        let keys = self.q.iter().zip(self.k).zip(self.decay);
        for (row, ((q, k), decay)) in memory.chunks_exact_mut(dim).zip(keys) {
            let (q, k, decay) = (isa.splat(*q), isa.splat(*k), isa.splat(*decay));
            let (row, _) = row[first..][..N].as_chunks_mut::<16>();
            for i in 0..V {
                let decayed = isa.mul(isa.load(&row[i]), decay);
                let updated = isa.mul_add(k, error[i], decayed);
                isa.store(updated, &mut row[i]);
                out[i] = isa.mul_add(updated, q, out[i]);
            }
        }
        for i in 0..V {
            isa.store(out[i], &mut v[i]);
        }
    }

    /// The columns from `first` on, fewer than 16; their values stand in the first lanes.
    #[inline(always)]
    fn update_last<S: Isa>(&self, isa: S, memory: &mut [f32], first: usize, v: &mut [f32]) {
        let (dim, len) = (self.k.len(), v.len());
        if len == 0 {
            return;
        }
        let mut narrow = [0.0; 16];
        narrow[..len].copy_from_slice(v);
        let v_before = isa.load(&narrow);
        let mut recalled = isa.splat(0.0);
        for (row, (k, decay)) in memory.chunks_exact(dim).zip(self.k.iter().zip(self.decay)) {
            narrow[..len].copy_from_slice(&row[first..]);
            let decayed = isa.mul(isa.load(&narrow), isa.splat(*decay));
            recalled = isa.mul_add(decayed, isa.splat(*k), recalled);
        }
        let error = isa.mul(isa.splat(self.beta), isa.sub(v_before, recalled));
        let mut out = isa.splat(0.0);
        let keys = self.q.iter().zip(self.k).zip(self.decay);
        for (row, ((q, k), decay)) in memory.chunks_exact_mut(dim).zip(keys) {
            narrow[..len].copy_from_slice(&row[first..]);
            let decayed = isa.mul(isa.load(&narrow), isa.splat(*decay));
            let updated = isa.mul_add(isa.splat(*k), error, decayed);
            isa.store(updated, &mut narrow);
            row[first..].copy_from_slice(&narrow[..len]);
            out = isa.mul_add(updated, isa.splat(*q), out);
        }
        isa.store(out, &mut narrow);
        v.copy_from_slice(&narrow[..len]);
    }
}

#[cfg(test)]
mod tests {
    use std::array;

    use super::*;

    /// One head in f64, all of it from the formulas.
    struct Reference {
        dim: usize,
        taps: [Vec<f32>; 3],
        past: [Vec<f32>; 3],
        memory: Vec<f64>,
    }

    fn logistic(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    impl Reference {
        fn convolve(&mut self, which: usize, x: &[f32]) -> Vec<f64> {
            let (dim, past) = (self.dim, &mut self.past[which]);
            past.extend_from_slice(x);
            let width = self.taps[which].len() / dim;
            let y = (0..dim).map(|c| {
                let at = |j: usize| f64::from(past[past.len() - (width - j) * dim + c]);
                let sum: f64 =
                    (0..width).map(|j| f64::from(self.taps[which][c * width + j]) * at(j)).sum();
                sum * logistic(sum)
            });
            y.collect()
        }

        /// The gated output of one token.
        fn step(&mut self, x: [&[f32]; 5], beta: f32, w: &KdaHeadWeights) -> Vec<f64> {
            let [q, k, v, z, gate] = x;
            let (mut q, mut k) = (self.convolve(0, q), self.convolve(1, k));
            let v = self.convolve(2, v);
            let dim = self.dim;
            for (x, scale) in [(&mut q, (dim as f64).powf(-0.5)), (&mut k, 1.0)] {
                let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter_mut().for_each(|x| *x *= scale / length);
            }
            let s = &mut self.memory;
            for i in 0..dim {
                let rated = f64::from(w.rate) * f64::from(z[i] + w.dt_bias[i]);
                let decay = (f64::from(w.lower_bound) * logistic(rated)).exp();
                s[i * dim..][..dim].iter_mut().for_each(|s| *s *= decay);
            }
            for j in 0..dim {
                let recalled: f64 = (0..dim).map(|i| s[i * dim + j] * k[i]).sum();
                let error = logistic(f64::from(beta)) * (v[j] - recalled);
                (0..dim).for_each(|i| s[i * dim + j] += k[i] * error);
            }
            let out: Vec<f64> =
                (0..dim).map(|j| (0..dim).map(|i| s[i * dim + j] * q[i]).sum()).collect();
            let mean = out.iter().map(|o| o * o).sum::<f64>() / dim as f64;
            let root = (mean + f64::from(w.eps)).sqrt();
            (0..dim)
                .map(|j| out[j] / root * f64::from(w.o_norm[j]) * logistic(f64::from(gate[j])))
                .collect()
        }
    }

    /// Inputs `[q, k, v, decay, gate]`, beta, and what is left in `q` and the state.
    struct Case {
        dim: usize,
        rows: usize,
        taps: [Vec<f32>; 3],
        inputs: [Vec<f32>; 5],
        beta: Vec<f32>,
        dt_bias: Vec<f32>,
        o_norm: Vec<f32>,
    }

    impl Case {
        fn random(dim: usize, conv_width: usize, rows: usize) -> Self {
            let mut rng = fastrand::Rng::with_seed(dim as u64);
            let mut noise = |len: usize, scale: f32| -> Vec<f32> {
                (0..len).map(|_| scale * (rng.f32() - 0.5)).collect()
            };
            Self {
                dim,
                rows,
                taps: array::from_fn(|_| noise(dim * conv_width, 1.0)),
                inputs: array::from_fn(|_| noise(dim * rows, 6.0)),
                beta: noise(rows, 4.0),
                dt_bias: noise(dim, 2.0),
                o_norm: noise(dim, 2.0),
            }
        }

        fn weights(&self) -> KdaHeadWeights<'_> {
            KdaHeadWeights {
                taps: array::from_fn(|i| &self.taps[i][..]),
                dt_bias: &self.dt_bias,
                rate: 1.7,
                lower_bound: -5.0,
                o_norm: &self.o_norm,
                eps: 1e-5,
            }
        }

        /// Output `[rows, dim]` and state, in steps of `chunk` rows.
        fn run(&self, kernels: Kernels, chunk: usize) -> (Vec<f32>, Vec<f32>) {
            let (dim, older) = (self.dim, self.taps[0].len() / self.dim - 1);
            let mut past: [Vec<f32>; 3] = array::from_fn(|_| vec![0.0; older * dim]);
            let mut memory = vec![0.0; dim * dim];
            let mut out = Vec::new();
            for first in (0..self.rows).step_by(chunk) {
                let rows = chunk.min(self.rows - first);
                let mut x = self.inputs.each_ref().map(|x| x[first * dim..][..rows * dim].to_vec());
                let mut beta = self.beta[first..][..rows].to_vec();
                let [q, k, v, decay, gate] = x.each_mut().map(|x| Columns::new(x, rows));
                kernels.kda_head(KdaHead {
                    weights: self.weights(),
                    q,
                    k,
                    v,
                    decay,
                    gate,
                    beta: Columns::new(&mut beta, rows),
                    past: past.each_mut().map(|past| Columns::new(past, older)),
                    memory: &mut memory,
                });
                out.extend_from_slice(&x[0]);
            }
            memory.extend(past.concat());
            (out, memory)
        }
    }

    #[test]
    fn a_head_follows_the_formulas_whatever_the_chunk() {
        for (dim, conv_width) in [(128, 4), (64, 4), (80, 3), (24, 4), (5, 2)] {
            let case = Case::random(dim, conv_width, 9);
            let mut reference = Reference {
                dim,
                taps: case.taps.clone(),
                past: array::from_fn(|_| vec![0.0; (conv_width - 1) * dim]),
                memory: vec![0.0; dim * dim],
            };
            let expected: Vec<f64> = (0..case.rows)
                .flat_map(|t| {
                    let x = case.inputs.each_ref().map(|x| &x[t * dim..][..dim]);
                    reference.step(x, case.beta[t], &case.weights())
                })
                .collect();
            let norm = expected.iter().map(|x| x * x).sum::<f64>();
            for kernels in Kernels::available() {
                let (out, state) = case.run(kernels, case.rows);
                let error: f64 =
                    out.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
                let relative = (error / norm).sqrt();
                assert!(relative < 5e-7, "{} dim {dim}: off by {relative:e}", kernels.name());
                for chunk in [1, 2, 5] {
                    let (chunked, chunked_state) = case.run(kernels, chunk);
                    assert!(chunked == out && chunked_state == state, "chunks of {chunk}");
                }
            }
        }
    }
}

//! Products with a transposed matrix, `out = x W`: how queries are moved into the latent
//! space of absorbed attention.
//!
//! Definition: an output adds `x[r] * weight[r, c]`, fused, row after row; with int8 it is
//! `(x[r] * scale[r]) * code[r, c]`. Nothing else enters a sum.

use super::float::{Bf16, Int8, Nibbles, Rows, STEP};
use super::isa::{Isa, Task};
use super::{Kernels, Matrix, Weights};
use crate::parallel::Columns;

/// Tokens that share a decoded piece of a row.
const TOKENS: usize = 4;

impl Kernels {
    /// `out[t, c] = Σ_r x[t, r] * matrix[r, c]`; `x: [tokens, rows]`, `out: [tokens, cols]`.
    /// Inputs are always f32.
    ///
    /// # Panics
    /// The shapes do not fit.
    pub fn matmul_transposed(self, matrix: &Matrix, x: &Columns, out: Columns) {
        assert_eq!(matrix.rows(), x.width(), "rows of the matrix");
        assert_eq!(matrix.cols(), out.width(), "columns of the matrix");
        assert_eq!(x.tokens(), out.tokens(), "as many outputs as inputs");
        self.run(Product { matrix: *matrix, x, out });
    }
}

struct Product<'a> {
    matrix: Matrix<'a>,
    x: &'a Columns<'a>,
    out: Columns<'a>,
}

impl Task for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { matrix, x, out } = self;
        let cols = matrix.cols();
        let multiply = Multiply { x, out };
        match matrix.weights() {
            Weights::Bf16(weights) => multiply.run(isa, Bf16 { weights, cols }),
            Weights::Int8 { codes, scales } => multiply.run(isa, Int8 { codes, scales, cols }),
            Weights::Int4 { packed, scales } => multiply.run(isa, Nibbles { packed, scales, cols }),
            Weights::Int4F16 { packed, scales } => {
                multiply.run(isa, Nibbles { packed, scales, cols })
            }
            Weights::Mxfp4 { packed, scales } => {
                multiply.run(isa, Nibbles { packed, scales, cols })
            }
        }
    }
}

struct Multiply<'a> {
    x: &'a Columns<'a>,
    out: Columns<'a>,
}

impl Multiply<'_> {
    #[inline(always)]
    fn run<S: Isa, W: Rows>(mut self, isa: S, w: W) {
        let tokens = self.x.tokens();
        for step in 0..w.cols().div_ceil(STEP) {
            let mut t = 0;
            while t < tokens {
                if tokens - t >= TOKENS {
                    self.columns::<S, W, TOKENS>(isa, w, step, t);
                    t += TOKENS;
                } else {
                    self.columns::<S, W, 1>(isa, w, step, t);
                    t += 1;
                }
            }
        }
    }

    /// [`STEP`] columns for `T` tokens from `t` on.
    #[inline(always)]
    fn columns<S: Isa, W: Rows, const T: usize>(&mut self, isa: S, w: W, step: usize, t: usize) {
        let is_whole = (step + 1) * STEP <= w.cols();
        let mut inputs = [self.x.row(t); T];
        for j in 1..T {
            inputs[j] = self.x.row(t + j);
        }
        let mut sums = [[isa.splat(0.0); 4]; T];
        for r in 0..self.x.width() {
            let weights = if is_whole {
                W::decode(isa, &w.steps(r, step, 1), 0)
            } else {
                w.decode_tail(isa, r)
            };
            let factor = w.factor(r);
            for j in 0..T {
                let x = isa.splat(inputs[j][r] * factor);
                for i in 0..4 {
                    sums[j][i] = isa.mul_add(x, weights[i], sums[j][i]);
                }
            }
        }
        for j in 0..T {
            let mut lanes = [[0.0; 16]; 4];
            for i in 0..4 {
                isa.store(sums[j][i], &mut lanes[i]);
            }
            let lanes = lanes.as_flattened();
            let out = &mut self.out.row_mut(t + j)[step * STEP..];
            for (c, out) in out.iter_mut().take(STEP).enumerate() {
                let lane = if W::PAIRED { c / 32 * 32 + c % 2 * 16 + c % 32 / 2 } else { c };
                *out = lanes[lane];
            }
        }
    }
}

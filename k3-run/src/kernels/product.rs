//! Which kernel multiplies which format.

use super::activations::{Activations, Pairs, Step};
use super::isa::{Isa, Task};
use super::scratch::Scratch;
use super::{Matrix, Weights, fixed, float};
use crate::parallel::Columns;

/// `out[t, r] = Σ_c matrix[r, c] * x[t, c]`.
pub(super) struct Product<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) x: &'a Activations,
    pub(super) scratch: &'a mut Scratch,
    pub(super) out: Columns<'a>,
}

impl Product<'_> {
    #[inline(always)]
    fn float<S: Isa, W: float::Rows>(self, isa: S, w: W) {
        float::product(isa, w, self.x, self.scratch, self.out);
    }

    #[inline(always)]
    fn fixed<S: Isa, W: fixed::Rows<D>, const D: usize>(self, isa: S, w: W) {
        fixed::product(isa, w, self.x, self.scratch, self.out);
    }

    /// Nibbles with inputs of `D` digits.
    #[inline(always)]
    fn nibbles<S, T, const N: usize, const D: usize>(self, isa: S, packed: &[u8], scales: &[T])
    where
        S: Isa,
        T: fixed::StepScales<N>,
        Pairs<D>: Step,
    {
        let cols = self.matrix.cols();
        self.fixed::<S, _, D>(isa, fixed::Nibbles { packed, scales, cols });
    }
}

/// By [`super::Arithmetic::Exact`].
pub(super) struct Exact<'a>(pub(super) Product<'a>);

impl Task for Exact<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self(product) = self;
        let cols = product.matrix.cols();
        match product.matrix.weights() {
            Weights::Bf16(weights) => product.float(isa, float::Bf16 { weights, cols }),
            Weights::Int8 { codes, scales } => {
                product.float(isa, float::Int8 { codes, scales, cols });
            }
            Weights::Int4 { packed, scales } => product.nibbles::<S, _, _, 3>(isa, packed, scales),
            Weights::Int4F16 { packed, scales } => {
                product.nibbles::<S, _, _, 3>(isa, packed, scales);
            }
            Weights::Mxfp4 { packed, scales } => product.nibbles::<S, _, _, 3>(isa, packed, scales),
        }
    }
}

/// By [`super::Arithmetic::Act8`].
pub(super) struct Act8<'a>(pub(super) Product<'a>);

impl Task for Act8<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self(product) = self;
        let cols = product.matrix.cols();
        match product.matrix.weights() {
            // There is nothing to gain from rounding the inputs of a BF16 matrix.
            Weights::Bf16(weights) => product.float(isa, float::Bf16 { weights, cols }),
            Weights::Int8 { codes, scales } => {
                product.fixed(isa, fixed::Int8 { codes, scales, cols });
            }
            Weights::Int4 { packed, scales } => product.nibbles::<S, _, _, 1>(isa, packed, scales),
            Weights::Int4F16 { packed, scales } => {
                product.nibbles::<S, _, _, 1>(isa, packed, scales);
            }
            Weights::Mxfp4 { packed, scales } => product.nibbles::<S, _, _, 1>(isa, packed, scales),
        }
    }
}

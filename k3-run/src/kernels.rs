//! The arithmetic: matrix products in every stored format, chosen once for the CPU.
//!
//! [`Kernels`] names a set of kernels; [`Kernels::detect`] takes the best one this CPU
//! has. Kernels run on the calling thread and never allocate; [`crate::linear`] spreads
//! them over the pool. Every set computes what its module defines, and no result
//! depends on how many tokens or rows are computed together.

mod activations;
mod fixed;
mod float;
mod isa;
mod kda;
mod matrix;
mod mla;
mod norm;
pub mod peak;
mod product;
mod scratch;
mod transposed;
mod vecmath;

use k3_formats::{Error, Result};

pub use self::activations::{Activations, Forms, INPUT_GROUP};
#[cfg(target_arch = "x86_64")]
use self::isa::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use self::isa::avx512::Avx512;
use self::isa::portable::Portable;
use self::isa::{Isa, Task};
pub use self::kda::{KdaHead, KdaHeadWeights};
pub use self::matrix::{Matrix, Weights};
pub use self::mla::Latents;
pub use self::norm::{MAX_ENTRIES, Weight};
use self::product::{Act8, Exact, Product};
use self::scratch::{SCRATCH_BYTES, Scratch};
pub use self::vecmath::Situ;
use crate::parallel::Columns;

/// Most bytes of working memory that each computing thread keeps for block products.
pub(crate) const THREAD_BYTES: u64 = SCRATCH_BYTES as u64;

/// How activations enter a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Arithmetic {
    /// As f32; with 4-bit weights as fixed-point numbers of 24 bits in groups of
    /// [`INPUT_GROUP`], which is as precise and faster.
    #[default]
    Exact,
    /// Rounded to int8 in groups of [`INPUT_GROUP`], integer products; BF16 matrices stay
    /// exact.
    Act8,
}

/// A set of kernels that this CPU can run.
#[derive(Debug, Clone, Copy)]
pub struct Kernels(Set);

#[derive(Debug, Clone, Copy)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    Avx2Vnni(Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<false>),
    Portable(Portable),
}

impl Kernels {
    /// The fastest set this CPU has.
    pub fn detect() -> Self {
        Self::available().next().unwrap_or(Self(Set::Portable(Portable)))
    }

    /// All sets this CPU has, fastest first.
    pub fn available() -> impl Iterator<Item = Self> {
        [
            #[cfg(target_arch = "x86_64")]
            Avx512::detect().map(Set::Avx512Vnni),
            #[cfg(target_arch = "x86_64")]
            Avx512::detect().map(Set::Avx512),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect().map(Set::Avx2Vnni),
            #[cfg(target_arch = "x86_64")]
            Avx2::detect().map(Set::Avx2),
            Some(Set::Portable(Portable)),
        ]
        .into_iter()
        .flatten()
        .map(Self)
    }

    /// The set called `name`.
    ///
    /// # Errors
    /// There is no such set, or this CPU lacks its instructions.
    pub fn by_name(name: &str) -> Result<Self> {
        Self::available().find(|set| set.name() == name).ok_or_else(|| {
            let names: Vec<_> = Self::available().map(Self::name).collect();
            Error::unsupported(format!("no kernels called {name:?} on this CPU"))
                .hint(format!("use one of: {}", names.join(", ")))
        })
    }

    /// Its name, as [`Kernels::by_name`] takes it.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vnni(_) => "avx512-vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2Vnni(_) => "avx2-vnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            Set::Portable(_) => "portable",
        }
    }

    /// Whether sums are fused (rounded once per step); sets that are give equal bits.
    pub fn is_fused(self) -> bool {
        !matches!(self.0, Set::Portable(_))
    }

    /// `out[t, r] = Σ_c matrix[r, c] * x[t, c]`; `x: [tokens, cols]`, `out: [tokens, rows]`.
    /// A product with some of the rows ([`Matrix::slice_rows`]) gives the same bits.
    ///
    /// # Panics
    /// The shapes do not fit, or `x` was not prepared in the form ([`Forms::of`]) that
    /// this matrix needs.
    pub fn matmul(self, matrix: &Matrix, arithmetic: Arithmetic, x: &Activations, out: Columns) {
        assert_eq!(matrix.cols(), x.cols(), "inputs of the matrix");
        assert_eq!(matrix.rows(), out.width(), "outputs of the matrix");
        assert_eq!(x.tokens(), out.tokens(), "as many outputs as inputs");
        let matrix = *matrix;
        Scratch::with(|scratch| match arithmetic {
            Arithmetic::Exact => self.run(Exact(Product { matrix, x, scratch, out })),
            Arithmetic::Act8 => self.run(Act8(Product { matrix, x, scratch, out })),
        });
    }

    /// Rows to give a product at least, for its kernel to be worth starting.
    pub(crate) fn min_rows(tokens: usize) -> usize {
        if tokens <= 4 { 8 } else { 2 * scratch::ROWS }
    }

    fn run<T: Task>(self, task: T) -> T::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Vnni(isa) => isa.run(task),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(isa) => isa.run(task),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2Vnni(isa) => isa.run(task),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(isa) => isa.run(task),
            Set::Portable(isa) => isa.run(task),
        }
    }
}

#[cfg(test)]
mod tests;

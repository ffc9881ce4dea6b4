//! Inputs of a matrix product, prepared once and shared by every matrix that reads them.
//!
//! A kernel wants its inputs in the order in which it unpacks weights, in blocks that
//! stay in the first-level cache while many rows pass over them. The buffers grow to the
//! largest input seen and are then reused.

use std::ops::BitOr;

use k3_formats::quant::MatrixFormat;

use super::isa::{Isa, Task};
use super::{Arithmetic, Kernels, Matrix, Weights};
use crate::parallel::{Chunks, for_each};

mod steps;

pub use steps::INPUT_GROUP;
pub(super) use steps::{Bytes, Floats, Pairs, Step};

/// Which prepared forms some products need; combine with `|`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    floats: bool,
    bytes: bool,
    pairs8: bool,
    pairs24: bool,
}

impl Forms {
    /// What a product with `matrix` reads.
    pub fn of(matrix: &Matrix, arithmetic: Arithmetic) -> Self {
        match matrix.weights() {
            Weights::Bf16(_) => Self::of_format(MatrixFormat::Bf16, arithmetic),
            Weights::Int8 { .. } => Self::of_format(MatrixFormat::Int8Row, arithmetic),
            // All are packed the same way.
            Weights::Int4 { .. } | Weights::Int4F16 { .. } | Weights::Mxfp4 { .. } => {
                Self::of_format(MatrixFormat::Int4G64, arithmetic)
            }
        }
    }

    /// What a product with a matrix in `format` reads.
    pub fn of_format(format: MatrixFormat, arithmetic: Arithmetic) -> Self {
        let mut forms = Self::default();
        *match (format, arithmetic) {
            (MatrixFormat::Bf16, _) | (MatrixFormat::Int8Row, Arithmetic::Exact) => {
                &mut forms.floats
            }
            (MatrixFormat::Int8Row, Arithmetic::Act8) => &mut forms.bytes,
            (MatrixFormat::Int4G64 | MatrixFormat::Int4G32, Arithmetic::Exact) => {
                &mut forms.pairs24
            }
            (MatrixFormat::Int4G64 | MatrixFormat::Int4G32, Arithmetic::Act8) => &mut forms.pairs8,
        } = true;
        forms
    }
}

impl BitOr for Forms {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            floats: self.floats | other.floats,
            bytes: self.bytes | other.bytes,
            pairs8: self.pairs8 | other.pairs8,
            pairs24: self.pairs24 | other.pairs24,
        }
    }
}

/// Prepared inputs `[tokens, cols]`.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    floats: Blocks<Floats>,
    bytes: Blocks<Bytes>,
    pairs8: Blocks<Pairs<1>>,
    pairs24: Blocks<Pairs<3>>,
}

impl Activations {
    /// Empty, with no memory of its own yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// With room for `tokens` rows of up to `cols` columns, for matrices of any format of
    /// the container; memory is taken when it is first written.
    pub fn with_room(tokens: usize, cols: usize, arithmetic: Arithmetic) -> Self {
        let forms = MatrixFormat::ALL.map(|format| Forms::of_format(format, arithmetic));
        let forms = forms.into_iter().fold(Forms::default(), |all, one| all | one);
        let mut room = Self { tokens, cols, ..Self::default() };
        room.each(forms, |form| form.reserve(tokens, cols));
        room
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let Self { tokens: _, cols: _, floats, bytes, pairs8, pairs24 } = self;
        floats.reserved() + bytes.reserved() + pairs8.reserved() + pairs24.reserved()
    }

    /// Number of rows prepared.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Number of columns prepared.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Takes in `x: [tokens, cols]` in the forms that some matrices need. Allocates only
    /// if it never held as much before. Many rows are spread over the pool this thread
    /// belongs to.
    ///
    /// # Panics
    /// `x` does not divide into `tokens` rows.
    pub fn prepare(&mut self, kernels: Kernels, x: &[f32], tokens: usize, forms: Forms) {
        assert!(tokens > 0 && x.len().is_multiple_of(tokens), "whole rows of inputs");
        (self.tokens, self.cols) = (tokens, x.len() / tokens);
        self.each(forms, |form| form.fill(kernels, x, tokens));
    }

    /// Does `work` on the forms in `forms`; the others hold nothing from here on.
    fn each(&mut self, forms: Forms, work: impl Fn(&mut dyn Form)) {
        let all: [(bool, &mut dyn Form); 4] = [
            (forms.floats, &mut self.floats),
            (forms.bytes, &mut self.bytes),
            (forms.pairs8, &mut self.pairs8),
            (forms.pairs24, &mut self.pairs24),
        ];
        for (wanted, form) in all {
            form.clear();
            if wanted {
                work(form);
            }
        }
    }

    /// Steps of one block in the form `T`: [`Step::BLOCK`], but a single token's row is one
    /// block.
    #[inline(always)]
    pub(super) fn block_steps<T: Step>(&self) -> usize {
        if self.tokens == 1 { self.cols.div_ceil(T::COLUMNS) } else { T::BLOCK }
    }

    /// Block `index` in the form `T`; the last one may be shorter.
    ///
    /// # Panics
    /// That form was not prepared, or there is no such block.
    #[inline(always)]
    pub(super) fn block<T: Step>(&self, index: usize) -> Block<'_, T> {
        let blocks = T::blocks(self);
        let all = self.cols.div_ceil(T::COLUMNS);
        let first = index * self.block_steps::<T>();
        let per_token = (all - first).min(self.block_steps::<T>());
        let steps = &blocks.steps[first * self.tokens..][..per_token * self.tokens];
        Block { steps, per_token }
    }
}

/// Inputs in one form: blocks of columns, in each one token after the other.
#[derive(Debug)]
pub(super) struct Blocks<T> {
    steps: Vec<T>,
}

impl<T> Default for Blocks<T> {
    fn default() -> Self {
        Self { steps: Vec::new() }
    }
}

/// What all forms have in common.
trait Form {
    fn reserve(&mut self, tokens: usize, cols: usize);
    fn reserved(&self) -> u64;
    fn clear(&mut self);
    fn fill(&mut self, kernels: Kernels, x: &[f32], tokens: usize);
}

impl<T: Step> Form for Blocks<T> {
    fn reserve(&mut self, tokens: usize, cols: usize) {
        self.steps.reserve_exact(tokens * cols.div_ceil(T::COLUMNS));
    }

    fn reserved(&self) -> u64 {
        (self.steps.capacity() * size_of::<T>()) as u64
    }

    fn clear(&mut self) {
        self.steps.clear();
    }

    fn fill(&mut self, kernels: Kernels, x: &[f32], tokens: usize) {
        let cols = x.len() / tokens;
        let all = cols.div_ceil(T::COLUMNS);
        self.steps.resize(tokens * all, T::EMPTY);
        let mut rest = &mut self.steps[..];
        for first in (0..all).step_by(T::BLOCK) {
            let width = T::BLOCK.min(all - first);
            let (block, after) = std::mem::take(&mut rest).split_at_mut(tokens * width);
            rest = after;
            for_each(Chunks::new(block, width), TOKENS, |token, part| {
                kernels.run(Fill { x, cols, first, token, width, steps: part.into_slice() });
            });
        }
    }
}

/// Tokens that one thread prepares at a time.
const TOKENS: usize = 8;

/// Some tokens of one block of columns.
struct Fill<'a, T> {
    x: &'a [f32],
    cols: usize,
    /// The block's first step.
    first: usize,
    token: usize,
    /// Steps of each token.
    width: usize,
    steps: &'a mut [T],
}

impl<T: Step> Task for Fill<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        for (i, steps) in self.steps.chunks_exact_mut(self.width).enumerate() {
            let row = &self.x[(self.token + i) * self.cols..][..self.cols];
            let row = &row[self.first * T::COLUMNS..];
            for (x, step) in row.chunks(T::COLUMNS).zip(steps) {
                step.fill(isa, x);
            }
        }
    }
}

/// One block of columns of all tokens, token after token.
#[derive(Clone, Copy)]
pub(super) struct Block<'a, T> {
    steps: &'a [T],
    per_token: usize,
}

impl<'a, T> Block<'a, T> {
    /// The steps of one token.
    #[inline(always)]
    pub(super) fn token(&self, token: usize) -> &'a [T] {
        &self.steps[token * self.per_token..][..self.per_token]
    }

    /// The steps of `N` tokens from `first` on.
    #[inline(always)]
    pub(super) fn several<const N: usize>(&self, first: usize) -> [&'a [T]; N] {
        let mut tokens = [self.token(first); N];
        for t in 1..N {
            tokens[t] = self.token(first + t);
        }
        tokens
    }

    /// Steps that each token has in this block.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.per_token
    }
}

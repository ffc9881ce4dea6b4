//! Matrix products with activations rounded to int8.
//!
//! Inputs are rounded in groups of 32 as by [`k3_formats::quant::encode_int8`]. A step is
//! 128 columns. Definition, for one output: integer dot products of four bytes are exact;
//! each of 16 lanes multiplies its integer by the scale of its group and adds it, fused,
//! to its f32 sum, step after step; then the lanes are added up ([`Isa::sum`]).
//!
//! Int4 and MXFP4: lane l holds the eight columns `8l..8l + 8` of the step, all in group
//! `l / 4`; its scale is the product of weight and activation scale. Int8: lane l first
//! takes columns `4l..4l + 4`, then the same 64 further on, with the activation scale
//! alone; the sum is multiplied by the row's scale at the end.

use std::array;
use std::marker::PhantomData;

use super::activations::{Activations, BLOCK8, Block8, Order, PAD8 as STEP};
use super::isa::{E2M1_OFFSET, Isa, Task};
use super::{Matrix, Weights, exact};
use crate::parallel::Columns;

/// Rows and tokens of one block product, see [`exact`].
const ROWS: usize = 8;
const TOKENS: usize = 32;

pub(super) struct Product<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) x: &'a Activations,
    pub(super) out: Columns<'a>,
}

impl Task for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { matrix, x, out } = self;
        let cols = matrix.cols();
        match matrix.weights() {
            // There is nothing to gain from rounding the inputs of a BF16 matrix.
            Weights::Bf16(_) => exact::Product { matrix, x, out }.run(isa),
            Weights::Int8 { codes, scales } => product(isa, Int8 { codes, scales, cols }, x, out),
            Weights::Int4 { packed, scales } => product(isa, Int4 { packed, scales, cols }, x, out),
            Weights::Mxfp4 { packed, scales } => {
                product(isa, Mxfp4 { packed, scales, cols }, x, out);
            }
        }
    }
}

/// Codes of one step of one row, and the weight scale of each lane.
#[derive(Clone, Copy)]
struct Codes<S: Isa> {
    first: S::B,
    second: S::B,
    scale: S::F,
}

/// One step of one token's inputs.
#[derive(Clone, Copy)]
struct Inputs<S: Isa> {
    first: S::B,
    second: S::B,
    scales: [S::F; 2],
    /// What the integer sums begin with.
    start: [S::I; 2],
}

/// Rows of weights that give their codes [`STEP`] columns at a time.
trait Rows: Copy {
    const ORDER: Order;
    /// Vectors of activation scales in a step.
    const SCALES: usize;
    /// Some whole steps of one row.
    type Steps: Copy;

    fn cols(&self) -> usize;
    /// `count` whole steps of row `row` from step `first` on.
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps;
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S>;
    /// The columns after the last whole step, with zeros after them.
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S>;
    fn start<S: Isa>(isa: S, first: S::B, second: S::B) -> [S::I; 2];
    /// Adds one step to an output's lanes.
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F;
    /// What the sum of a row is multiplied by.
    fn factor(&self, row: usize) -> f32;
}

#[derive(Clone, Copy)]
struct Int8<'a> {
    codes: &'a [i8],
    scales: &'a [f32],
    cols: usize,
}

impl<'a> Rows for Int8<'a> {
    const ORDER: Order = Order::Natural;
    const SCALES: usize = 2;
    type Steps = &'a [[i8; STEP]];

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps {
        exact::steps(&self.codes[row * self.cols..][..self.cols], first, count)
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S> {
        let (halves, _) = steps[i].as_chunks::<64>();
        // The row's one scale comes last, so this one is never read.
        let scale = isa.splat(0.0);
        Codes { first: isa.bytes(&halves[0]), second: isa.bytes(&halves[1]), scale }
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S> {
        let tail = exact::tail(&self.codes[row * self.cols..][..self.cols], 0);
        Int8::decode(isa, &&[tail][..], 0)
    }

    #[inline(always)]
    fn start<S: Isa>(isa: S, first: S::B, second: S::B) -> [S::I; 2] {
        [isa.dot_int8_start(first), isa.dot_int8_start(second)]
    }

    #[inline(always)]
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F {
        let first = isa.dot_int8(x.start[0], codes.first, x.first);
        let second = isa.dot_int8(x.start[1], codes.second, x.second);
        let sum = isa.mul_add(isa.to_f32(first), x.scales[0], sum);
        isa.mul_add(isa.to_f32(second), x.scales[1], sum)
    }

    #[inline(always)]
    fn factor(&self, row: usize) -> f32 {
        self.scales[row]
    }
}

#[derive(Clone, Copy)]
struct Int4<'a> {
    packed: &'a [u8],
    scales: &'a [f32],
    cols: usize,
}

impl<'a> Rows for Int4<'a> {
    const ORDER: Order = Order::Paired;
    const SCALES: usize = 1;
    type Steps = (&'a [[u8; STEP / 2]], &'a [[f32; 2]]);

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps {
        let (half, groups) = (self.cols / 2, self.cols / 64);
        let packed = exact::steps(&self.packed[row * half..][..half], first, count);
        (packed, exact::steps(&self.scales[row * groups..][..groups], first, count))
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S> {
        let (first, second) = isa.nibbles(&steps.0[i]);
        Codes { first, second, scale: isa.halves(&steps.1[i]) }
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S> {
        let (half, groups) = (self.cols / 2, self.cols / 64);
        let packed = exact::tail(&self.packed[row * half..][..half], 0);
        let scales = exact::tail(&self.scales[row * groups..][..groups], 0.0);
        Int4::decode(isa, &(&[packed][..], &[scales][..]), 0)
    }

    #[inline(always)]
    fn start<S: Isa>(isa: S, first: S::B, second: S::B) -> [S::I; 2] {
        [offset(isa, 8, first, second), isa.zero()]
    }

    #[inline(always)]
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F {
        add_nibbles(isa, codes, x, sum)
    }

    #[inline(always)]
    fn factor(&self, _row: usize) -> f32 {
        1.0
    }
}

#[derive(Clone, Copy)]
struct Mxfp4<'a> {
    packed: &'a [u8],
    scales: &'a [u8],
    cols: usize,
}

impl<'a> Rows for Mxfp4<'a> {
    const ORDER: Order = Order::Paired;
    const SCALES: usize = 1;
    type Steps = (&'a [[u8; STEP / 2]], &'a [[u8; 4]]);

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps {
        let (half, groups) = (self.cols / 2, self.cols / 32);
        let packed = exact::steps(&self.packed[row * half..][..half], first, count);
        (packed, exact::steps(&self.scales[row * groups..][..groups], first, count))
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S> {
        let (first, second) = isa.nibbles(&steps.0[i]);
        let scale = isa.e8m0_quarters(&steps.1[i]);
        Codes { first: isa.e2m1(first), second: isa.e2m1(second), scale }
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S> {
        let (half, groups) = (self.cols / 2, self.cols / 32);
        let packed = exact::tail(&self.packed[row * half..][..half], 0);
        let scales = exact::tail(&self.scales[row * groups..][..groups], 0);
        Mxfp4::decode(isa, &(&[packed][..], &[scales][..]), 0)
    }

    #[inline(always)]
    fn start<S: Isa>(isa: S, first: S::B, second: S::B) -> [S::I; 2] {
        [offset(isa, E2M1_OFFSET, first, second), isa.zero()]
    }

    #[inline(always)]
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F {
        add_nibbles(isa, codes, x, sum)
    }

    #[inline(always)]
    fn factor(&self, _row: usize) -> f32 {
        1.0
    }
}

/// What a lane's integer sum must start from when every code is `by` too large.
#[inline(always)]
fn offset<S: Isa>(isa: S, by: u8, first: S::B, second: S::B) -> S::I {
    let by = isa.splat_u8(by);
    isa.sub_i(isa.zero(), isa.dot_small(isa.dot_small(isa.zero(), by, first), by, second))
}

#[inline(always)]
fn add_nibbles<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F {
    let dot = isa.dot_small(x.start[0], codes.first, x.first);
    let dot = isa.dot_small(dot, codes.second, x.second);
    isa.mul_add(isa.to_f32(dot), isa.mul(codes.scale, x.scales[0]), sum)
}

/// The inputs of one token in one block.
#[derive(Clone, Copy)]
struct Token<'a> {
    codes: &'a [[[i8; 64]; 2]],
    scales: &'a [[f32; 16]],
}

impl<'a> Token<'a> {
    #[inline(always)]
    fn new(block: Block8<'a>, token: usize) -> Self {
        let (codes, scales) = block.token(token);
        Self { codes: codes.as_chunks::<2>().0, scales }
    }

    #[inline(always)]
    fn step<S: Isa, W: Rows>(&self, isa: S, i: usize) -> Inputs<S> {
        let first = isa.bytes(&self.codes[i][0]);
        let second = isa.bytes(&self.codes[i][1]);
        let scales = &self.scales[i * W::SCALES..][..W::SCALES];
        let scales = [isa.load(&scales[0]), isa.load(&scales[W::SCALES - 1])];
        Inputs { first, second, scales, start: W::start(isa, first, second) }
    }
}

#[inline(always)]
fn product<S: Isa, W: Rows>(isa: S, w: W, x: &Activations, mut out: Columns) {
    match x.tokens() {
        1 => direct::<S, W, 4, 1>(isa, w, x, &mut out),
        2 => direct::<S, W, 4, 2>(isa, w, x, &mut out),
        3 => direct::<S, W, 2, 3>(isa, w, x, &mut out),
        _ => blocked(isa, w, x, &mut out),
    }
}

/// Few tokens: codes are unpacked in registers and used at once, several rows side by side.
#[inline(always)]
fn direct<S: Isa, W: Rows, const R: usize, const T: usize>(
    isa: S,
    w: W,
    x: &Activations,
    out: &mut Columns,
) {
    let rows = out.width();
    let whole = rows / R * R;
    for row in (0..whole).step_by(R) {
        direct_rows::<S, W, R, T>(isa, w, x, row, out);
    }
    for row in whole..rows {
        direct_rows::<S, W, 1, T>(isa, w, x, row, out);
    }
}

#[inline(always)]
fn direct_rows<S: Isa, W: Rows, const R: usize, const T: usize>(
    isa: S,
    w: W,
    x: &Activations,
    row: usize,
    out: &mut Columns,
) {
    let mut sums = [[isa.splat(0.0); T]; R];
    let whole = w.cols() / STEP;
    let per_block = x.block8_columns() / STEP;
    for (b, first) in (0..w.cols().div_ceil(STEP)).step_by(per_block).enumerate() {
        let count = (whole - first).min(per_block);
        let block = x.block8(W::ORDER, b);
        let steps: [_; R] = array::from_fn(|r| w.steps(row + r, first, count));
        let tokens: [_; T] = array::from_fn(|t| Token::new(block, t));
        for i in 0..count {
            let inputs = tokens.map(|token| token.step::<S, W>(isa, i));
            for r in 0..R {
                let codes = W::decode(isa, &steps[r], i);
                for t in 0..T {
                    sums[r][t] = W::add(isa, &codes, &inputs[t], sums[r][t]);
                }
            }
        }
        if tokens[0].codes.len() > count {
            let inputs = tokens.map(|token| token.step::<S, W>(isa, count));
            for r in 0..R {
                let codes = w.decode_tail(isa, row + r);
                for t in 0..T {
                    sums[r][t] = W::add(isa, &codes, &inputs[t], sums[r][t]);
                }
            }
        }
    }
    for t in 0..T {
        let out = out.row_mut(t);
        for r in 0..R {
            out[row + r] = isa.sum(sums[r][t]) * w.factor(row + r);
        }
    }
}

/// Unpacked codes of [`ROWS`] rows of one block, and their lane scales.
struct Tile {
    codes: [[[i8; 64]; 2]; ROWS * BLOCK8 / STEP],
    scales: [[f32; 16]; ROWS * BLOCK8 / STEP],
}

/// Many tokens: a block of codes is unpacked once into the first-level cache and passes
/// over all tokens.
#[inline(always)]
fn blocked<S: Isa, W: Rows>(isa: S, w: W, x: &Activations, out: &mut Columns) {
    const STEPS: usize = BLOCK8 / STEP;
    let mut tile = Tile { codes: [[[0; 64]; 2]; ROWS * STEPS], scales: [[0.0; 16]; ROWS * STEPS] };
    let (rows, tokens) = (out.width(), out.tokens());
    let whole = w.cols() / STEP;
    for row in (0..rows).step_by(ROWS) {
        let height = ROWS.min(rows - row);
        for token in (0..tokens).step_by(TOKENS) {
            let width = TOKENS.min(tokens - token);
            let mut sums = [[0.0; 16]; ROWS * TOKENS];
            for (b, first) in (0..w.cols().div_ceil(STEP)).step_by(STEPS).enumerate() {
                let count = (whole - first).min(STEPS);
                let len = (w.cols().div_ceil(STEP) - first).min(STEPS);
                for r in 0..height {
                    let steps = w.steps(row + r, first, count);
                    for i in 0..len {
                        let codes = if i < count {
                            W::decode(isa, &steps, i)
                        } else {
                            w.decode_tail(isa, row + r)
                        };
                        let at = r * STEPS + i;
                        isa.store_bytes(codes.first, &mut tile.codes[at][0]);
                        isa.store_bytes(codes.second, &mut tile.codes[at][1]);
                        isa.store(codes.scale, &mut tile.scales[at]);
                    }
                }
                let (tile, sums, block) = (&tile, &mut sums, x.block8(W::ORDER, b));
                let kind = PhantomData::<W>;
                isa.run(Part { tile, block, len, token, height, width, sums, kind });
            }
            for t in 0..width {
                let out = out.row_mut(token + t);
                for r in 0..height {
                    let sum = isa.load(&sums[r * TOKENS + t]);
                    out[row + r] = isa.sum(sum) * w.factor(row + r);
                }
            }
        }
    }
}

/// One block of columns: unpacked codes of `height` rows, inputs of `width` tokens from
/// `token` on, and the sums they add to.
struct Part<'a, W> {
    tile: &'a Tile,
    block: Block8<'a>,
    /// Steps in this block.
    len: usize,
    token: usize,
    height: usize,
    width: usize,
    sums: &'a mut [[f32; 16]; ROWS * TOKENS],
    kind: PhantomData<W>,
}

impl<W: Rows> Task for Part<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let mut t = 0;
        while t < self.width {
            t += match (S::WIDE, self.width - t) {
                (true, 4..) => self.rows::<S, 4>(isa, t),
                (_, 2..) => self.rows::<S, 2>(isa, t),
                _ => self.rows::<S, 1>(isa, t),
            };
        }
    }
}

impl<W: Rows> Part<'_, W> {
    /// All rows with `T` tokens from `t` on; returns `T`.
    #[inline(always)]
    fn rows<S: Isa, const T: usize>(&mut self, isa: S, t: usize) -> usize {
        let mut r = 0;
        while r < self.height {
            r += match (S::WIDE, self.height - r) {
                (true, 4..) => self.cell::<S, 4, T>(isa, r, t),
                (_, 2..) => self.cell::<S, 2, T>(isa, r, t),
                _ => self.cell::<S, 1, T>(isa, r, t),
            };
        }
        T
    }

    /// `R` rows from `r` on with `T` tokens from `t` on; returns `R`.
    #[inline(always)]
    fn cell<S: Isa, const R: usize, const T: usize>(
        &mut self,
        isa: S,
        r: usize,
        t: usize,
    ) -> usize {
        const STEPS: usize = BLOCK8 / STEP;
        let codes: [_; R] = array::from_fn(|i| &self.tile.codes[(r + i) * STEPS..][..self.len]);
        let scales: [_; R] = array::from_fn(|i| &self.tile.scales[(r + i) * STEPS..][..self.len]);
        let tokens: [_; T] = array::from_fn(|j| Token::new(self.block, self.token + t + j));
        let mut sums = [[isa.splat(0.0); T]; R];
        for i in 0..R {
            for j in 0..T {
                sums[i][j] = isa.load(&self.sums[(r + i) * TOKENS + t + j]);
            }
        }
        for k in 0..self.len {
            for j in 0..T {
                let x = tokens[j].step::<S, W>(isa, k);
                for i in 0..R {
                    let codes = Codes {
                        first: isa.bytes(&codes[i][k][0]),
                        second: isa.bytes(&codes[i][k][1]),
                        scale: isa.load(&scales[i][k]),
                    };
                    sums[i][j] = W::add(isa, &codes, &x, sums[i][j]);
                }
            }
        }
        for i in 0..R {
            for j in 0..T {
                isa.store(sums[i][j], &mut self.sums[(r + i) * TOKENS + t + j]);
            }
        }
        R
    }
}

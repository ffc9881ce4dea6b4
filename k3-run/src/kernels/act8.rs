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

use std::marker::PhantomData;

use super::activations::{Activations, Block8, PAD8 as STEP, Token8};
use super::isa::{Isa, Task};
use super::scratch::{Ahead, Area, ROWS, STEPS8 as STEPS, Scratch, TOKENS};
use super::{Matrix, Weights, exact};
use crate::parallel::Columns;

mod rows;

use rows::{Codes, Inputs, Int8, Nibbles, Rows};

pub(super) struct Product<'a> {
    pub(super) matrix: Matrix<'a>,
    pub(super) x: &'a Activations,
    pub(super) scratch: &'a mut Scratch,
    pub(super) out: Columns<'a>,
}

impl Task for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { matrix, x, scratch, out } = self;
        let cols = matrix.cols();
        match matrix.weights() {
            // There is nothing to gain from rounding the inputs of a BF16 matrix.
            Weights::Bf16(_) => exact::Product { matrix, x, scratch, out }.run(isa),
            Weights::Int8 { codes, scales } => {
                product(isa, Int8 { codes, scales, cols }, x, scratch, out)
            }
            Weights::Int4 { packed, scales } => {
                product(isa, Nibbles { packed, scales, cols }, x, scratch, out)
            }
            Weights::Int4F16 { packed, scales } => {
                product(isa, Nibbles { packed, scales, cols }, x, scratch, out)
            }
            Weights::Mxfp4 { packed, scales } => {
                product(isa, Nibbles { packed, scales, cols }, x, scratch, out);
            }
        }
    }
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
        let Token8 { codes, scales } = block.token(token);
        Self { codes: codes.as_chunks::<2>().0, scales }
    }

    /// `T` tokens from `first` on.
    #[inline(always)]
    fn several<const T: usize>(block: Block8<'a>, first: usize) -> [Self; T] {
        let mut tokens = [Self::new(block, first); T];
        for t in 1..T {
            tokens[t] = Self::new(block, first + t);
        }
        tokens
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
fn product<S: Isa, W: Rows>(
    isa: S,
    w: W,
    x: &Activations,
    scratch: &mut Scratch,
    mut out: Columns,
) {
    match x.tokens() {
        1 => direct::<S, W, 4, 1>(isa, w, x, &mut out),
        2 => direct::<S, W, 4, 2>(isa, w, x, &mut out),
        3 => direct::<S, W, 2, 3>(isa, w, x, &mut out),
        _ => blocked(isa, w, x, scratch, &mut out),
    }
}

/// Few tokens: codes are unpacked in registers and used at once, in several rows far apart
/// as by the exact products.
#[inline(always)]
fn direct<S: Isa, W: Rows, const R: usize, const T: usize>(
    isa: S,
    w: W,
    x: &Activations,
    out: &mut Columns,
) {
    let rows = out.width();
    let apart = rows / R;
    for row in 0..apart {
        direct_rows::<S, W, R, T>(isa, w, x, row, apart, out);
    }
    for row in apart * R..rows {
        direct_rows::<S, W, 1, T>(isa, w, x, row, 0, out);
    }
}

/// Rows `row`, `row + apart`, `row + 2 * apart` and so on.
#[inline(always)]
fn direct_rows<S: Isa, W: Rows, const R: usize, const T: usize>(
    isa: S,
    w: W,
    x: &Activations,
    row: usize,
    apart: usize,
    out: &mut Columns,
) {
    let mut sums = [[isa.splat(0.0); T]; R];
    let whole = w.cols() / STEP;
    let per_block = x.block8_columns() / STEP;
    for (b, first) in (0..w.cols().div_ceil(STEP)).step_by(per_block).enumerate() {
        let count = (whole - first).min(per_block);
        let block = x.block8(W::ORDER, b);
        let mut steps = [w.steps(row, first, count); R];
        for r in 1..R {
            steps[r] = w.steps(row + r * apart, first, count);
        }
        let tokens = Token::several::<T>(block, 0);
        for i in 0..count {
            let mut inputs = [tokens[0].step::<S, W>(isa, i); T];
            for t in 1..T {
                inputs[t] = tokens[t].step::<S, W>(isa, i);
            }
            for r in 0..R {
                W::prefetch(isa, &steps[r], i + W::AHEAD);
                let codes = W::decode(isa, &steps[r], i);
                for t in 0..T {
                    sums[r][t] = W::add(isa, &codes, &inputs[t], sums[r][t]);
                }
            }
        }
        if tokens[0].codes.len() > count {
            let mut inputs = [tokens[0].step::<S, W>(isa, count); T];
            for t in 1..T {
                inputs[t] = tokens[t].step::<S, W>(isa, count);
            }
            for r in 0..R {
                let codes = w.decode_tail(isa, row + r * apart);
                for t in 0..T {
                    sums[r][t] = W::add(isa, &codes, &inputs[t], sums[r][t]);
                }
            }
        }
    }
    for t in 0..T {
        let out = out.row_mut(t);
        for r in 0..R {
            let row = row + r * apart;
            out[row] = isa.sum(sums[r][t]) * w.factor(row);
        }
    }
}

/// Many tokens: a block of codes is unpacked once and passes over all tokens.
#[inline(always)]
fn blocked<S: Isa, W: Rows>(
    isa: S,
    w: W,
    x: &Activations,
    scratch: &mut Scratch,
    out: &mut Columns,
) {
    let (codes, scales, sums) = scratch.int8();
    let (rows, tokens) = (out.width(), out.tokens());
    let (whole, all) = (w.cols() / STEP, w.cols().div_ceil(STEP));
    for row in (0..rows).step_by(ROWS) {
        let height = ROWS.min(rows - row);
        let mut factors = [0.0; ROWS];
        for r in 0..height {
            factors[r] = w.factor(row + r);
        }
        for token in (0..tokens).step_by(TOKENS) {
            let width = TOKENS.min(tokens - token);
            for (b, first) in (0..all).step_by(STEPS).enumerate() {
                let (count, len) = ((whole - first).min(STEPS), (all - first).min(STEPS));
                for r in 0..height {
                    let steps = w.steps(row + r, first, count);
                    for i in 0..len {
                        let step = if i < count {
                            W::decode(isa, &steps, i)
                        } else {
                            w.decode_tail(isa, row + r)
                        };
                        let at = r * STEPS + i;
                        isa.store_bytes(step.first, &mut codes[at][0]);
                        isa.store_bytes(step.second, &mut codes[at][1]);
                        isa.store(step.scale, &mut scales[at]);
                    }
                }
                let last = first + STEPS >= all;
                // After the last block come the next rows, or these again for more tokens.
                let ahead = match (last, token + TOKENS < tokens) {
                    (false, _) => w.ahead(row, first + STEPS, STEPS),
                    (true, false) => w.ahead(row + ROWS, 0, STEPS),
                    (true, true) => w.ahead(row, 0, STEPS),
                };
                isa.run(Part {
                    codes,
                    scales,
                    block: x.block8(W::ORDER, b),
                    len,
                    area: Area { row, height, token, width },
                    is_first: first == 0,
                    factors: last.then_some(&factors),
                    ahead,
                    sums,
                    out: out.reborrow(),
                    kind: PhantomData::<W>,
                });
            }
        }
    }
}

/// One block of columns: unpacked codes of some rows, inputs of some tokens, and the sums
/// they add to.
struct Part<'a, W> {
    codes: &'a [[[i8; 64]; 2]],
    scales: &'a [[f32; 16]],
    block: Block8<'a>,
    /// Steps in this block.
    len: usize,
    area: Area,
    /// Whether sums start here.
    is_first: bool,
    /// Whether sums end here: what each row's is multiplied by then.
    factors: Option<&'a [f32; ROWS]>,
    ahead: Ahead,
    sums: &'a mut [[f32; 16]],
    out: Columns<'a>,
    kind: PhantomData<W>,
}

impl<W: Rows> Task for Part<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let mut t = 0;
        while t < self.area.width {
            t += match (S::WIDE, self.area.width - t) {
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
        while r < self.area.height {
            r += match (S::WIDE, self.area.height - r) {
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
        let len = self.len;
        let mut codes = [&self.codes[..len]; R];
        let mut scales = [&self.scales[..len]; R];
        for i in 0..R {
            codes[i] = &self.codes[(r + i) * STEPS..][..len];
            scales[i] = &self.scales[(r + i) * STEPS..][..len];
        }
        let token = self.area.token + t;
        self.ahead.prefetch(isa, r, R, t..t + T, self.area.width);
        let mut tokens = Token::several::<T>(self.block, token);
        for x in &mut tokens {
            *x = Token { codes: &x.codes[..len], scales: &x.scales[..len * W::SCALES] };
        }
        let kept = &mut self.sums[t * ROWS + r * T..][..R * T];
        let mut sums = [[isa.splat(0.0); T]; R];
        if !self.is_first {
            for i in 0..R {
                for j in 0..T {
                    sums[i][j] = isa.load(&kept[i * T + j]);
                }
            }
        }
        for k in 0..len {
            let mut w = [Codes::load(isa, &codes[0][k], &scales[0][k]); R];
            for i in 1..R {
                w[i] = Codes::load(isa, &codes[i][k], &scales[i][k]);
            }
            for j in 0..T {
                let x = tokens[j].step::<S, W>(isa, k);
                for i in 0..R {
                    sums[i][j] = W::add(isa, &w[i], &x, sums[i][j]);
                }
            }
        }
        for i in 0..R {
            for j in 0..T {
                isa.store(sums[i][j], &mut kept[i * T + j]);
            }
        }
        // Read back, because registers whose sums are taken one by one would not stay
        // registers in the loop above.
        if let Some(factors) = self.factors {
            for j in 0..T {
                let out = &mut self.out.row_mut(token + j)[self.area.row + r..][..R];
                for i in 0..R {
                    out[i] = isa.sum(isa.load(&kept[i * T + j])) * factors[r + i];
                }
            }
        }
        R
    }
}

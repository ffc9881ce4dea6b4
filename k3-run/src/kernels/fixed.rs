//! Matrix products with inputs rounded to fixed-point numbers of one or three digits.
//!
//! Inputs are rounded in groups of 32: to int8 as by [`k3_formats::quant::encode_int8`],
//! one digit, or as by [`k3_formats::quant::fixed::encode_fixed24`], three digits, which
//! together err no more than one f32 does. A step is 128 columns. Definition, for one
//! output: integer dot products of neighbouring columns are exact, whatever the number of
//! digits; each of 16 lanes multiplies its integer, as f32, by the scale of its group of
//! inputs, then by that of its weights, and adds it, fused, to its sum, step after step;
//! then the lanes are added up ([`Isa::sum`]).
//!
//! Int4 and MXFP4: lane l holds the eight columns `8l..8l + 8` of the step, all in group
//! `l / 4`. Int8, with one digit only: lane l first takes columns `4l..4l + 4`, then the
//! same 64 further on; the sum is multiplied by the row's scale at the end.

use std::marker::PhantomData;

use super::activations::{Activations, Block, Step};
use super::isa::{Isa, Task};
use super::scratch::{Ahead, Area, ROWS, Scratch, TOKENS, Unpacked};
use crate::parallel::Columns;

mod rows;

use rows::Codes;
pub(super) use rows::{Int8, Nibbles, Rows, StepScales};

/// Columns decoded at a time.
const STEP: usize = 128;

/// `out[t, r] = Σ_c w[r, c] * x[t, c]`.
#[inline(always)]
pub(super) fn product<S: Isa, W: Rows<D>, const D: usize>(
    isa: S,
    w: W,
    x: &Activations,
    scratch: &mut Scratch,
    mut out: Columns,
) {
    match x.tokens() {
        1 => direct::<S, W, D, 4, 1>(isa, w, x, &mut out),
        2 => direct::<S, W, D, 4, 2>(isa, w, x, &mut out),
        3 => direct::<S, W, D, 2, 3>(isa, w, x, &mut out),
        _ => blocked(isa, w, x, scratch, &mut out),
    }
}

/// Few tokens: codes are unpacked in registers and used at once, in several rows far apart
/// as by the exact products.
#[inline(always)]
fn direct<S: Isa, W: Rows<D>, const D: usize, const R: usize, const T: usize>(
    isa: S,
    w: W,
    x: &Activations,
    out: &mut Columns,
) {
    let rows = out.width();
    let apart = rows / R;
    for row in 0..apart {
        direct_rows::<S, W, D, R, T>(isa, w, x, row, apart, out);
    }
    for row in apart * R..rows {
        direct_rows::<S, W, D, 1, T>(isa, w, x, row, 0, out);
    }
}

/// Rows `row`, `row + apart`, `row + 2 * apart` and so on.
#[inline(always)]
fn direct_rows<S: Isa, W: Rows<D>, const D: usize, const R: usize, const T: usize>(
    isa: S,
    w: W,
    x: &Activations,
    row: usize,
    apart: usize,
    out: &mut Columns,
) {
    let mut sums = [[isa.splat(0.0); T]; R];
    let (whole, all) = (w.cols() / STEP, w.cols().div_ceil(STEP));
    let per_block = x.block_steps::<W::Inputs>();
    for (b, first) in (0..all).step_by(per_block).enumerate() {
        let count = (whole - first).min(per_block);
        let mut steps = [w.steps(row, first, count); R];
        for r in 1..R {
            steps[r] = w.steps(row + r * apart, first, count);
        }
        let tokens = x.block(b).several::<T>(0);
        for i in 0..count {
            let inputs = inputs::<S, W, D, T>(isa, &tokens, i);
            for r in 0..R {
                W::prefetch(isa, &steps[r], i + W::AHEAD);
                let codes = W::decode(isa, &steps[r], i);
                for t in 0..T {
                    sums[r][t] = W::add(isa, &codes, &inputs[t], sums[r][t]);
                }
            }
        }
        if tokens[0].len() > count {
            let inputs = inputs::<S, W, D, T>(isa, &tokens, count);
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

/// Step `i` of some tokens.
#[inline(always)]
fn inputs<S: Isa, W: Rows<D>, const D: usize, const T: usize>(
    isa: S,
    tokens: &[&[W::Inputs]; T],
    i: usize,
) -> [W::Loaded<S>; T] {
    let mut inputs = [W::load(isa, &tokens[0][i]); T];
    for t in 1..T {
        inputs[t] = W::load(isa, &tokens[t][i]);
    }
    inputs
}

/// Many tokens: a block of codes is unpacked once and passes over all tokens.
#[inline(always)]
fn blocked<S: Isa, W: Rows<D>, const D: usize>(
    isa: S,
    w: W,
    x: &Activations,
    scratch: &mut Scratch,
    out: &mut Columns,
) {
    let (tile, sums) = scratch.codes();
    let block_steps = W::Inputs::BLOCK;
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
            for (b, first) in (0..all).step_by(block_steps).enumerate() {
                let block = x.block::<W::Inputs>(b);
                let count = (whole - first).min(block_steps);
                for r in 0..height {
                    let steps = w.steps(row + r, first, count);
                    let tile = &mut tile[r * block_steps..][..block_steps];
                    for i in 0..count {
                        W::decode(isa, &steps, i).store(isa, &mut tile[i]);
                    }
                    if block.len() > count {
                        w.decode_tail(isa, row + r).store(isa, &mut tile[count]);
                    }
                }
                let last = first + block_steps >= all;
                // After the last block come the next rows, or these again for more tokens.
                let ahead = match (last, token + TOKENS < tokens) {
                    (false, _) => w.ahead(row, first + block_steps, block_steps),
                    (true, false) => w.ahead(row + ROWS, 0, block_steps),
                    (true, true) => w.ahead(row, 0, block_steps),
                };
                isa.run(Part {
                    codes: tile,
                    block,
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
struct Part<'a, W: Rows<D>, const D: usize> {
    codes: &'a [Unpacked],
    block: Block<'a, W::Inputs>,
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

impl<W: Rows<D>, const D: usize> Task for Part<'_, W, D> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let mut t = 0;
        while t < self.area.width {
            t += match (S::WIDE, self.area.width - t) {
                // Three digits of more tokens than two would not stay in registers.
                (true, 4..) if D == 1 => self.rows::<S, 4>(isa, t),
                (_, 2..) => self.rows::<S, 2>(isa, t),
                _ => self.rows::<S, 1>(isa, t),
            };
        }
    }
}

impl<W: Rows<D>, const D: usize> Part<'_, W, D> {
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
        let len = self.block.len();
        let mut codes = [&self.codes[..len]; R];
        for i in 0..R {
            codes[i] = &self.codes[(r + i) * W::Inputs::BLOCK..][..len];
        }
        let token = self.area.token + t;
        self.ahead.prefetch(isa, r, R, t..t + T, self.area.width);
        let mut tokens = self.block.several::<T>(token);
        for x in &mut tokens {
            *x = &x[..len];
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
            let mut w = [Codes::load(isa, &codes[0][k]); R];
            for i in 1..R {
                w[i] = Codes::load(isa, &codes[i][k]);
            }
            for j in 0..T {
                let x = W::load(isa, &tokens[j][k]);
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

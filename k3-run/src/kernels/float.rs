//! Matrix products with f32 inputs: BF16 and int8 weights.
//!
//! Definition, for one output: lane `c % 16` of 16 adds `weight * input`, fused, over its
//! columns c in ascending order; then the lanes are added up ([`Isa::sum`]) and, for int8,
//! whose codes are not scaled before, the sum is multiplied by the row's scale. Neither
//! the number of tokens nor the split of rows changes an output's sum.

use super::activations::{Activations, Block, Floats, Step};
use super::isa::{Isa, Task};
use super::scratch::{Ahead, Area, ROWS, Scratch, TOKENS};
use crate::parallel::Columns;

mod rows;

pub(super) use rows::{Bf16, Int8, Nibbles, Rows, steps, tail};

/// Columns decoded at a time.
pub(super) const STEP: usize = Floats::COLUMNS;

/// Bytes between reading weights and asking for later ones.
pub(super) const AHEAD: usize = 2048;

/// `out[t, r] = Σ_c w[r, c] * x[t, c]`.
#[inline(always)]
pub(super) fn product<S: Isa, W: Rows>(
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
        4 => direct::<S, W, 4, 4>(isa, w, x, &mut out),
        _ => blocked(isa, w, x, scratch, &mut out),
    }
}

/// Few tokens: each weight is decoded in registers and used at once. `R` rows run side by
/// side, because the additions of one output have to wait for each other. They lie far
/// apart, so that each place is read on and on from one row to the next: that is what
/// memory does fastest.
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
    let (whole, all) = (w.cols() / STEP, w.cols().div_ceil(STEP));
    let per_block = x.block_steps::<Floats>();
    for (b, first) in (0..all).step_by(per_block).enumerate() {
        let count = (whole - first).min(per_block);
        let mut steps = [w.steps(row, first, count); R];
        for r in 1..R {
            steps[r] = w.steps(row + r * apart, first, count);
        }
        let inputs = x.block::<Floats>(b).several::<T>(0);
        let mut whole_inputs = inputs;
        for x in &mut whole_inputs {
            *x = &x[..count];
        }
        for i in 0..count {
            for r in 0..R {
                W::prefetch(isa, &steps[r], i + W::AHEAD);
                let weights = W::decode(isa, &steps[r], i);
                for (j, &weights) in weights.iter().enumerate() {
                    for t in 0..T {
                        let x = isa.load(&whole_inputs[t][i].0[j]);
                        sums[r][t] = isa.mul_add(weights, x, sums[r][t]);
                    }
                }
            }
        }
        if inputs[0].len() > count {
            for r in 0..R {
                let weights = w.decode_tail(isa, row + r * apart);
                for (j, &weights) in weights.iter().enumerate() {
                    for t in 0..T {
                        let x = isa.load(&inputs[t][count].0[j]);
                        sums[r][t] = isa.mul_add(weights, x, sums[r][t]);
                    }
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

/// Steps of a block.
const BLOCK: usize = Floats::BLOCK;

/// Many tokens: a block of weights is decoded once and passes over all tokens, a few rows
/// and tokens at a time with their sums in registers. The inputs of these few tokens stay
/// in the first-level cache while all rows of the block pass.
#[inline(always)]
fn blocked<S: Isa, W: Rows>(
    isa: S,
    w: W,
    x: &Activations,
    scratch: &mut Scratch,
    out: &mut Columns,
) {
    let (tile, sums) = scratch.floats();
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
            for (b, first) in (0..all).step_by(BLOCK).enumerate() {
                let block = x.block(b);
                let count = (whole - first).min(BLOCK);
                for r in 0..height {
                    let steps = w.steps(row + r, first, count);
                    let tile = &mut tile[r * BLOCK..][..BLOCK];
                    for i in 0..count {
                        put(isa, W::decode(isa, &steps, i), &mut tile[i]);
                    }
                    if block.len() > count {
                        put(isa, w.decode_tail(isa, row + r), &mut tile[count]);
                    }
                }
                let last = first + BLOCK >= all;
                // After the last block come the next rows, or these again for more tokens.
                let ahead = match (last, token + TOKENS < tokens) {
                    (false, _) => w.ahead(row, first + BLOCK, BLOCK),
                    (true, false) => w.ahead(row + ROWS, 0, BLOCK),
                    (true, true) => w.ahead(row, 0, BLOCK),
                };
                isa.run(Part {
                    weights: tile,
                    block,
                    area: Area { row, height, token, width },
                    is_first: first == 0,
                    factors: last.then_some(&factors),
                    ahead,
                    sums,
                    out: out.reborrow(),
                });
            }
        }
    }
}

#[inline(always)]
fn put<S: Isa>(isa: S, weights: [S::F; 4], to: &mut Floats) {
    for i in 0..4 {
        isa.store(weights[i], &mut to.0[i]);
    }
}

/// One block of columns: decoded weights of some rows, inputs of some tokens, and the sums
/// they add to.
struct Part<'a> {
    weights: &'a [Floats],
    block: Block<'a, Floats>,
    area: Area,
    /// Whether sums start here.
    is_first: bool,
    /// Whether sums end here: what each row's is multiplied by then.
    factors: Option<&'a [f32; ROWS]>,
    ahead: Ahead,
    sums: &'a mut [[f32; 16]],
    out: Columns<'a>,
}

impl Task for Part<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let mut t = 0;
        while t < self.area.width {
            t += match (S::WIDE, self.area.width - t) {
                // 8 is two fours rather than six and two.
                (true, 6 | 7 | 9..) => self.rows::<S, 6>(isa, t),
                (true, 4..) => self.rows::<S, 4>(isa, t),
                (false, 3..) => self.rows::<S, 3>(isa, t),
                (_, 2..) => self.rows::<S, 2>(isa, t),
                _ => self.rows::<S, 1>(isa, t),
            };
        }
    }
}

impl Part<'_> {
    /// All rows with `T` tokens from `t` on; returns `T`.
    #[inline(always)]
    fn rows<S: Isa, const T: usize>(&mut self, isa: S, t: usize) -> usize {
        let mut r = 0;
        while r < self.area.height {
            r += match (S::WIDE, self.area.height - r) {
                (true, 4..) => self.cell::<S, 4, T>(isa, r, t),
                (false, 2..) => self.cell::<S, 2, T>(isa, r, t),
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
        let mut weights = [&self.weights[..len]; R];
        for i in 0..R {
            weights[i] = &self.weights[(r + i) * BLOCK..][..len];
        }
        let token = self.area.token + t;
        self.ahead.prefetch(isa, r, R, t..t + T, self.area.width);
        let mut inputs = self.block.several::<T>(token);
        for x in &mut inputs {
            *x = &x[..len];
        }
        // A cell's sums lie together, so that finding them costs nothing.
        let kept = &mut self.sums[t * ROWS + r * T..][..R * T];
        let mut sums = [[isa.splat(0.0); T]; R];
        if !self.is_first {
            for i in 0..R {
                for j in 0..T {
                    sums[i][j] = isa.load(&kept[i * T + j]);
                }
            }
        }
        for step in 0..len {
            for k in 0..4 {
                let mut w = [isa.splat(0.0); R];
                for i in 0..R {
                    w[i] = isa.load(&weights[i][step].0[k]);
                }
                for j in 0..T {
                    let x = isa.load(&inputs[j][step].0[k]);
                    for i in 0..R {
                        sums[i][j] = isa.mul_add(w[i], x, sums[i][j]);
                    }
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

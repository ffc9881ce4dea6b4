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

/// Inputs that share one scale when activations are rounded to int8.
pub const INT8_GROUP: usize = 32;

/// Columns of one block of f32 inputs: 2 KiB for each token, so that a few tokens and
/// the decoded weights of a few rows fit a 32 KiB first-level cache.
pub(super) const BLOCK: usize = 512;

/// Columns of one block of int8 inputs, also 2 KiB for each token.
pub(super) const BLOCK8: usize = 2048;

/// Columns are padded with zeros to whole kernel steps.
const PAD: usize = 64;
pub(super) const PAD8: usize = 128;

/// How a row of inputs is ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// As given.
    Natural,
    /// In each step, first the even columns, then the odd ones: the low and then the high
    /// nibbles of a run of packed bytes. A step is 32 columns in f32 and 128 in int8.
    Paired,
}

/// Which prepared forms some products need; combine with `|`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Forms {
    natural: bool,
    paired: bool,
    natural8: bool,
    paired8: bool,
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
                &mut forms.natural
            }
            (MatrixFormat::Int8Row, Arithmetic::Act8) => &mut forms.natural8,
            (MatrixFormat::Int4G64 | MatrixFormat::Int4G32, Arithmetic::Exact) => &mut forms.paired,
            (MatrixFormat::Int4G64 | MatrixFormat::Int4G32, Arithmetic::Act8) => &mut forms.paired8,
        } = true;
        forms
    }
}

impl BitOr for Forms {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self {
            natural: self.natural | other.natural,
            paired: self.paired | other.paired,
            natural8: self.natural8 | other.natural8,
            paired8: self.paired8 | other.paired8,
        }
    }
}

/// Prepared inputs `[tokens, cols]`.
#[derive(Debug, Default)]
pub struct Activations {
    tokens: usize,
    cols: usize,
    forms: Forms,
    natural: Vec<[f32; 16]>,
    paired: Vec<[f32; 16]>,
    natural8: Int8,
    paired8: Int8,
}

/// Inputs rounded to int8, and the scale of each of a kernel's 16 lanes.
#[derive(Debug, Default)]
struct Int8 {
    codes: Vec<[i8; 64]>,
    scales: Vec<[f32; 16]>,
}

/// One block of columns of all tokens, token after token.
#[derive(Clone, Copy)]
pub(super) struct Block<'a> {
    data: &'a [[f32; 16]],
    per_token: usize,
}

impl<'a> Block<'a> {
    /// The columns of one token, 16 at a time.
    #[inline(always)]
    pub(super) fn token(&self, token: usize) -> &'a [[f32; 16]] {
        &self.data[token * self.per_token..][..self.per_token]
    }

    /// Vectors of 16 columns that each token has in this block.
    #[inline(always)]
    pub(super) fn len(&self) -> usize {
        self.per_token
    }
}

/// One block of int8 columns of all tokens, token after token.
#[derive(Clone, Copy)]
pub(super) struct Block8<'a> {
    all: Token8<'a>,
    codes_per_token: usize,
    scales_per_token: usize,
}

/// The int8 columns of one token in a block.
#[derive(Clone, Copy)]
pub(super) struct Token8<'a> {
    pub(super) codes: &'a [[i8; 64]],
    pub(super) scales: &'a [[f32; 16]],
}

impl<'a> Block8<'a> {
    #[inline(always)]
    pub(super) fn token(&self, token: usize) -> Token8<'a> {
        let (codes, scales) = (self.codes_per_token, self.scales_per_token);
        Token8 {
            codes: &self.all.codes[token * codes..][..codes],
            scales: &self.all.scales[token * scales..][..scales],
        }
    }
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
        let floats = |wanted| if wanted { tokens * padded(cols, PAD) / 16 } else { 0 };
        let int8 = |wanted, order| {
            let values = if wanted { tokens * padded(cols, PAD8) } else { 0 };
            let scales = Vec::with_capacity(values / scale_step(order));
            Int8 { codes: Vec::with_capacity(values / 64), scales }
        };
        Self {
            natural: Vec::with_capacity(floats(forms.natural)),
            paired: Vec::with_capacity(floats(forms.paired)),
            natural8: int8(forms.natural8, Order::Natural),
            paired8: int8(forms.paired8, Order::Paired),
            ..Self::default()
        }
    }

    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        let floats = self.natural.capacity() + self.paired.capacity();
        let int8 = |form: &Int8| form.codes.capacity() + form.scales.capacity();
        // All of them are vectors of 64 bytes.
        (64 * (floats + int8(&self.natural8) + int8(&self.paired8))) as u64
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
        self.tokens = tokens;
        self.cols = x.len() / tokens;
        self.forms = forms;
        if forms.natural {
            fill(kernels, &mut self.natural, x, tokens, Order::Natural);
        }
        if forms.paired {
            fill(kernels, &mut self.paired, x, tokens, Order::Paired);
        }
        if forms.natural8 {
            fill8(kernels, &mut self.natural8, x, tokens, Order::Natural);
        }
        if forms.paired8 {
            fill8(kernels, &mut self.paired8, x, tokens, Order::Paired);
        }
    }

    /// Columns of one f32 block: [`BLOCK`], but a single token's row is one block.
    #[inline(always)]
    pub(super) fn block_columns(&self) -> usize {
        if self.tokens == 1 { self.cols.next_multiple_of(PAD) } else { BLOCK }
    }

    /// Columns of one int8 block.
    #[inline(always)]
    pub(super) fn block8_columns(&self) -> usize {
        if self.tokens == 1 { self.cols.next_multiple_of(PAD8) } else { BLOCK8 }
    }

    /// Block `index` of the f32 form in `order`; the last one may be shorter.
    ///
    /// # Panics
    /// That form was not prepared, or there is no such block.
    #[inline(always)]
    pub(super) fn block(&self, order: Order, index: usize) -> Block<'_> {
        let (data, ready) = match order {
            Order::Natural => (&self.natural, self.forms.natural),
            Order::Paired => (&self.paired, self.forms.paired),
        };
        assert!(ready, "inputs were prepared in this form");
        let per_token = block_width(self.cols, PAD, self.block_columns(), index) / 16;
        let start = index * BLOCK / 16 * self.tokens;
        Block { data: &data[start..][..per_token * self.tokens], per_token }
    }

    /// Block `index` of the int8 form in `order`; the last one may be shorter.
    ///
    /// # Panics
    /// That form was not prepared, or there is no such block.
    #[inline(always)]
    pub(super) fn block8(&self, order: Order, index: usize) -> Block8<'_> {
        let (form, ready) = match order {
            Order::Natural => (&self.natural8, self.forms.natural8),
            Order::Paired => (&self.paired8, self.forms.paired8),
        };
        assert!(ready, "inputs were prepared in this form");
        let width = block_width(self.cols, PAD8, self.block8_columns(), index);
        let step = scale_step(order);
        let (codes_per_token, scales_per_token) = (width / 64, width / step);
        let first = index * BLOCK8 * self.tokens;
        let (codes, scales) = (codes_per_token * self.tokens, scales_per_token * self.tokens);
        let all = Token8 {
            codes: &form.codes[first / 64..][..codes],
            scales: &form.scales[first / step..][..scales],
        };
        Block8 { all, codes_per_token, scales_per_token }
    }
}

fn padded(cols: usize, pad: usize) -> usize {
    cols.next_multiple_of(pad)
}

/// Columns that one vector of lane scales covers.
fn scale_step(order: Order) -> usize {
    match order {
        Order::Natural => 64,
        Order::Paired => 128,
    }
}

/// Padded width of block `index` of `cols` columns.
fn block_width(cols: usize, pad: usize, block: usize, index: usize) -> usize {
    (cols.next_multiple_of(pad) - index * block).min(block)
}

/// Tokens that one thread prepares at a time.
const TOKENS: usize = 8;

/// Lays `x: [tokens, cols]` out in zero-padded blocks.
fn fill(kernels: Kernels, to: &mut Vec<[f32; 16]>, x: &[f32], tokens: usize, order: Order) {
    let cols = x.len() / tokens;
    to.resize(tokens * padded(cols, PAD) / 16, [0.0; 16]);
    let mut rest = &mut to[..];
    for (index, column) in (0..cols).step_by(BLOCK).enumerate() {
        let width = block_width(cols, PAD, BLOCK, index) / 16;
        let block = Chunks::new(take(&mut rest, tokens * width), width);
        for_each(block, TOKENS, |token, part| {
            kernels.run(Fill { x, cols, column, token, width, out: part.into_slice(), order });
        });
    }
}

/// Some tokens of one block of f32 columns.
struct Fill<'a> {
    x: &'a [f32],
    cols: usize,
    column: usize,
    token: usize,
    /// Vectors of each token.
    width: usize,
    out: &'a mut [[f32; 16]],
    order: Order,
}

impl Task for Fill<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, _isa: S) {
        let width = BLOCK.min(self.cols - self.column);
        for (i, out) in self.out.chunks_exact_mut(self.width).enumerate() {
            let row = &self.x[(self.token + i) * self.cols + self.column..][..width];
            let (steps, _) = out.as_flattened_mut().as_chunks_mut::<PAD>();
            for (step, out) in row.chunks(PAD).zip(steps) {
                let mut padded = [0.0; PAD];
                padded[..step.len()].copy_from_slice(step);
                match self.order {
                    Order::Natural => *out = padded,
                    Order::Paired => pair_up(&padded, out),
                }
            }
        }
    }
}

/// In each 32 columns the even ones first.
#[inline(always)]
fn pair_up(step: &[f32; PAD], out: &mut [f32; PAD]) {
    let (halves, _) = out.as_chunks_mut::<32>();
    for (step, out) in step.as_chunks::<32>().0.iter().zip(halves) {
        let (even, odd) = out.split_at_mut(16);
        let pairs = step.as_chunks::<2>().0.iter();
        for ((pair, even), odd) in pairs.zip(even).zip(odd) {
            (*even, *odd) = (pair[0], pair[1]);
        }
    }
}

/// Rounds `x: [tokens, cols]` to int8 in groups of [`INT8_GROUP`] and lays it out in
/// zero-padded blocks.
fn fill8(kernels: Kernels, to: &mut Int8, x: &[f32], tokens: usize, order: Order) {
    let cols = x.len() / tokens;
    let vectors = tokens * padded(cols, PAD8);
    to.codes.resize(vectors / 64, [0; 64]);
    to.scales.resize(vectors / scale_step(order), [0.0; 16]);
    let (mut codes, mut scales) = (&mut to.codes[..], &mut to.scales[..]);
    for (index, column) in (0..cols).step_by(BLOCK8).enumerate() {
        let columns = block_width(cols, PAD8, BLOCK8, index);
        let (width, vectors) = (columns / 64, columns / scale_step(order));
        let block = (
            Chunks::new(take(&mut codes, tokens * width), width),
            Chunks::new(take(&mut scales, tokens * vectors), vectors),
        );
        for_each(block, TOKENS, |token, (codes, scales)| {
            let (codes, scales) = (codes.into_slice(), scales.into_slice());
            kernels.run(Fill8 { x, cols, column, token, width, codes, scales, order });
        });
    }
}

/// Cuts the first `len` elements off.
fn take<'a, T>(all: &mut &'a mut [T], len: usize) -> &'a mut [T] {
    let (first, rest) = std::mem::take(all).split_at_mut(len);
    *all = rest;
    first
}

/// Some tokens of one block of int8 columns.
struct Fill8<'a> {
    x: &'a [f32],
    cols: usize,
    column: usize,
    token: usize,
    /// Vectors of codes of each token.
    width: usize,
    codes: &'a mut [[i8; 64]],
    scales: &'a mut [[f32; 16]],
    order: Order,
}

impl Task for Fill8<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        let Self { x, cols, column, token, width, codes, scales, order } = self;
        let (step_codes, _) = codes.as_chunks_mut::<2>();
        let (steps, vectors) = (width / 2, PAD8 / scale_step(order));
        let columns = column..cols.min(column + BLOCK8);
        for (i, codes) in step_codes.iter_mut().enumerate() {
            let (token, step) = (token + i / steps, i % steps);
            let row = &x[token * cols..][..columns.end][columns.start..];
            let row = &row[step * PAD8..row.len().min((step + 1) * PAD8)];
            let mut rounded = [0; PAD8];
            let mut scale = [0.0; PAD8 / INT8_GROUP];
            for (g, group) in row.chunks(INT8_GROUP).enumerate() {
                let codes = &mut rounded[g * INT8_GROUP..][..INT8_GROUP];
                scale[g] = round_group(isa, group, codes.as_chunks_mut().0);
            }
            let scales = &mut scales[i * vectors..][..vectors];
            match order {
                Order::Natural => {
                    let (halves, _) = rounded.as_chunks::<64>();
                    for half in 0..2 {
                        codes[half] = halves[half];
                        scales[half] = std::array::from_fn(|l| scale[2 * half + l / 8]);
                    }
                }
                Order::Paired => {
                    let [even, odd] = codes;
                    let pairs = rounded.as_chunks::<2>().0.iter();
                    for ((pair, even), odd) in pairs.zip(even).zip(odd) {
                        (*even, *odd) = (pair[0], pair[1]);
                    }
                    scales[0] = std::array::from_fn(|l| scale[l / 4]);
                }
            }
        }
    }
}

/// [`k3_formats::quant::encode_int8`] of up to 32 inputs: their scale, and codes with zeros
/// after the last.
#[inline(always)]
fn round_group<S: Isa>(isa: S, group: &[f32], codes: &mut [[i8; 16]]) -> f32 {
    let mut padded = [0.0; INT8_GROUP];
    padded[..group.len()].copy_from_slice(group);
    let (halves, _) = padded.as_chunks::<16>();
    let (low, high) = (isa.load(&halves[0]), isa.load(&halves[1]));
    // In this order a NaN is passed over.
    let max = isa.max(isa.abs(high), isa.max(isa.abs(low), isa.splat(0.0)));
    let scale = (isa.max_lane(max) / 127.0).max(1e-20);
    let inverse = isa.splat(1.0 / scale);
    let (lowest, highest) = (isa.splat(-127.0), isa.splat(127.0));
    for (x, codes) in [low, high].into_iter().zip(codes) {
        let code = isa.round(isa.mul(x, inverse));
        isa.store_codes(isa.max(lowest, isa.min(highest, code)), codes);
    }
    scale
}

//! Rows of a matrix in each stored format, as integer codes a step at a time.

use half::f16;

use super::STEP;
use crate::kernels::activations::Order;
use crate::kernels::exact::{AHEAD, steps, tail};
use crate::kernels::isa::{E2M1_OFFSET, Isa};
use crate::kernels::scratch::Ahead;

/// Codes of one step of one row, and the weight scale of each lane.
#[derive(Clone, Copy)]
pub(super) struct Codes<S: Isa> {
    pub(super) first: S::B,
    pub(super) second: S::B,
    pub(super) scale: S::F,
}

impl<S: Isa> Codes<S> {
    #[inline(always)]
    pub(super) fn load(isa: S, codes: &[[i8; 64]; 2], scale: &[f32; 16]) -> Self {
        let (first, second) = (isa.bytes(&codes[0]), isa.bytes(&codes[1]));
        Self { first, second, scale: isa.load(scale) }
    }
}

/// One step of one token's inputs.
#[derive(Clone, Copy)]
pub(super) struct Inputs<S: Isa> {
    pub(super) first: S::B,
    pub(super) second: S::B,
    pub(super) scales: [S::F; 2],
    /// What the integer sums begin with.
    pub(super) start: [S::I; 2],
}

/// Rows of weights that give their codes [`STEP`] columns at a time.
pub(super) trait Rows: Copy {
    const ORDER: Order;
    /// Steps between reading weights and asking for later ones.
    const AHEAD: usize;
    /// Vectors of activation scales in a step.
    const SCALES: usize;
    /// Some whole steps of one row.
    type Steps: Copy;

    fn cols(&self) -> usize;
    /// `count` whole steps of row `row` from step `first` on.
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps;
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S>;
    /// Asks for step `i`, which may lie in a later row.
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize);
    /// The columns after the last whole step, with zeros after them.
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S>;
    fn start<S: Isa>(isa: S, first: S::B, second: S::B) -> [S::I; 2];
    /// Adds one step to an output's lanes.
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F;
    /// What the sum of a row is multiplied by.
    fn factor(&self, row: usize) -> f32;
    /// The first row's bytes from step `step` on, which may lie in a later row.
    fn ahead(&self, row: usize, step: usize, count: usize) -> Ahead;
}

#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    pub(super) codes: &'a [i8],
    pub(super) scales: &'a [f32],
    pub(super) cols: usize,
}

impl<'a> Rows for Int8<'a> {
    const ORDER: Order = Order::Natural;
    const AHEAD: usize = AHEAD / 128;
    const SCALES: usize = 2;
    type Steps = &'a [[i8; STEP]];

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps {
        steps(&self.codes[row * self.cols..][..self.cols], first, count)
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S> {
        let (halves, _) = steps[i].as_chunks::<64>();
        // The row's one scale comes last, so this one is never read.
        let scale = isa.splat(0.0);
        let first = isa.int8_codes(isa.bytes(&halves[0]));
        let second = isa.int8_codes(isa.bytes(&halves[1]));
        Codes { first, second, scale }
    }

    #[inline(always)]
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize) {
        let at: *const u8 = steps.as_ptr().wrapping_add(i).cast();
        isa.prefetch(at);
        isa.prefetch(at.wrapping_add(64));
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S> {
        let tail = tail(&self.codes[row * self.cols..][..self.cols], 0);
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

    #[inline(always)]
    fn ahead(&self, row: usize, step: usize, count: usize) -> Ahead {
        Ahead::new(self.codes, self.cols, row, step * STEP, count * STEP)
    }
}

/// Nibbles with `N` scales of type `T` in a step.
#[derive(Clone, Copy)]
pub(super) struct Nibbles<'a, T, const N: usize> {
    pub(super) packed: &'a [u8],
    pub(super) scales: &'a [T],
    pub(super) cols: usize,
}

/// Scales of a nibble format, `N` in a step, and what its nibbles stand for.
pub(super) trait StepScales<const N: usize>: Copy {
    const ZERO: Self;
    /// What every code is too large by.
    const OFFSET: u8;
    fn codes<S: Isa>(isa: S, nibbles: S::B) -> S::B;
    /// The scale of each lane.
    fn lanes<S: Isa>(isa: S, scales: &[Self; N]) -> S::F;
}

/// int4-g64.
impl StepScales<2> for f32 {
    const ZERO: Self = 0.0;
    const OFFSET: u8 = 8;

    #[inline(always)]
    fn codes<S: Isa>(_isa: S, nibbles: S::B) -> S::B {
        nibbles
    }

    #[inline(always)]
    fn lanes<S: Isa>(isa: S, scales: &[Self; 2]) -> S::F {
        isa.halves(scales)
    }
}

/// int4-g32.
impl StepScales<4> for f16 {
    const ZERO: Self = Self::ZERO;
    const OFFSET: u8 = 8;

    #[inline(always)]
    fn codes<S: Isa>(_isa: S, nibbles: S::B) -> S::B {
        nibbles
    }

    #[inline(always)]
    fn lanes<S: Isa>(isa: S, scales: &[Self; 4]) -> S::F {
        isa.quarters(scales)
    }
}

/// MXFP4, whose scales are E8M0 bytes.
impl StepScales<4> for u8 {
    const ZERO: Self = 0;
    const OFFSET: Self = E2M1_OFFSET;

    #[inline(always)]
    fn codes<S: Isa>(isa: S, nibbles: S::B) -> S::B {
        isa.e2m1(nibbles)
    }

    #[inline(always)]
    fn lanes<S: Isa>(isa: S, scales: &[Self; 4]) -> S::F {
        isa.e8m0_quarters(scales)
    }
}

impl<'a, T: StepScales<N>, const N: usize> Nibbles<'a, T, N> {
    /// Packed bytes and scales of a row.
    #[inline(always)]
    fn row(&self, row: usize) -> (&'a [u8], &'a [T]) {
        let (half, groups) = (self.cols / 2, self.cols * N / STEP);
        (&self.packed[row * half..][..half], &self.scales[row * groups..][..groups])
    }
}

#[inline(always)]
fn unpack<S: Isa, T: StepScales<N>, const N: usize>(
    isa: S,
    packed: &[u8; STEP / 2],
    scales: &[T; N],
) -> Codes<S> {
    let (first, second) = isa.nibbles(packed);
    let scale = T::lanes(isa, scales);
    Codes { first: T::codes(isa, first), second: T::codes(isa, second), scale }
}

impl<'a, T: StepScales<N>, const N: usize> Rows for Nibbles<'a, T, N> {
    const ORDER: Order = Order::Paired;
    const AHEAD: usize = AHEAD / 64;
    const SCALES: usize = 1;
    type Steps = (&'a [[u8; STEP / 2]], &'a [[T; N]]);

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps {
        let (packed, scales) = self.row(row);
        (steps(packed, first, count), steps(scales, first, count))
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> Codes<S> {
        unpack(isa, &steps.0[i], &steps.1[i])
    }

    #[inline(always)]
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize) {
        isa.prefetch(steps.0.as_ptr().wrapping_add(i).cast());
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S> {
        let (packed, scales) = self.row(row);
        unpack(isa, &tail(packed, 0), &tail(scales, T::ZERO))
    }

    #[inline(always)]
    fn start<S: Isa>(isa: S, first: S::B, second: S::B) -> [S::I; 2] {
        let by = isa.splat_u8(T::OFFSET);
        let sum = isa.dot_small(isa.dot_small(isa.zero(), by, first), by, second);
        [isa.sub_i(isa.zero(), sum), isa.zero()]
    }

    #[inline(always)]
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Inputs<S>, sum: S::F) -> S::F {
        let dot = isa.dot_small(x.start[0], codes.first, x.first);
        let dot = isa.dot_small(dot, codes.second, x.second);
        isa.mul_add(isa.to_f32(dot), isa.mul(codes.scale, x.scales[0]), sum)
    }

    #[inline(always)]
    fn factor(&self, _row: usize) -> f32 {
        1.0
    }

    #[inline(always)]
    fn ahead(&self, row: usize, step: usize, count: usize) -> Ahead {
        Ahead::new(self.packed, self.cols / 2, row, step * STEP / 2, count * STEP / 2)
    }
}

//! Rows of a matrix in each stored format, as integer codes a step at a time, and what one
//! step adds to an output.

use half::f16;

use super::STEP;
use crate::kernels::activations::{Bytes, Pairs, Step};
use crate::kernels::float::{AHEAD, steps, tail};
use crate::kernels::isa::{E2M1_OFFSET, Isa};
use crate::kernels::scratch::{Ahead, Unpacked};

/// Codes of one step of one row, and the weight scale of each lane.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Codes<S: Isa> {
    codes: [S::B; 2],
    scale: S::F,
}

impl<S: Isa> Codes<S> {
    #[inline(always)]
    pub(super) fn load(isa: S, from: &Unpacked) -> Self {
        let codes = [isa.bytes(&from.codes[0]), isa.bytes(&from.codes[1])];
        Self { codes, scale: isa.load(&from.scales) }
    }

    #[inline(always)]
    pub(super) fn store(self, isa: S, to: &mut Unpacked) {
        isa.store_bytes(self.codes[0], &mut to.codes[0]);
        isa.store_bytes(self.codes[1], &mut to.codes[1]);
        isa.store(self.scale, &mut to.scales);
    }
}

/// Rows of weights that give their codes [`STEP`] columns at a time, for inputs of `D`
/// digits.
pub(in crate::kernels) trait Rows<const D: usize>: Copy {
    /// One step of one token's inputs, and the same in registers.
    type Inputs: Step;
    type Loaded<S: Isa>: Copy;
    /// Steps between reading weights and asking for later ones.
    const AHEAD: usize;
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
    fn load<S: Isa>(isa: S, inputs: &Self::Inputs) -> Self::Loaded<S>;
    /// Adds one step to an output's lanes.
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &Self::Loaded<S>, sum: S::F) -> S::F;
    /// What the sum of a row is multiplied by.
    fn factor(&self, row: usize) -> f32;
    /// The first row's bytes from step `step` on, which may lie in a later row.
    fn ahead(&self, row: usize, step: usize, count: usize) -> Ahead;
}

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Int8<'a> {
    pub(in crate::kernels) codes: &'a [i8],
    pub(in crate::kernels) scales: &'a [f32],
    pub(in crate::kernels) cols: usize,
}

/// One step of int8 inputs in registers.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct LoadedBytes<S: Isa> {
    codes: [S::B; 2],
    scales: [S::F; 2],
    /// Where the integer sums begin.
    start: [S::I; 2],
}

impl<'a> Rows<1> for Int8<'a> {
    type Inputs = Bytes;
    type Loaded<S: Isa> = LoadedBytes<S>;
    const AHEAD: usize = AHEAD / 128;
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
        Codes { codes: [first, second], scale }
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
    fn load<S: Isa>(isa: S, inputs: &Bytes) -> LoadedBytes<S> {
        let codes = [isa.bytes(&inputs.codes[0]), isa.bytes(&inputs.codes[1])];
        let scales = [isa.load(&inputs.scales[0]), isa.load(&inputs.scales[1])];
        let start = [isa.dot_int8_start(codes[0]), isa.dot_int8_start(codes[1])];
        LoadedBytes { codes, scales, start }
    }

    #[inline(always)]
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &LoadedBytes<S>, sum: S::F) -> S::F {
        let first = isa.dot_int8(x.start[0], codes.codes[0], x.codes[0]);
        let second = isa.dot_int8(x.start[1], codes.codes[1], x.codes[1]);
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
pub(in crate::kernels) struct Nibbles<'a, T, const N: usize> {
    pub(in crate::kernels) packed: &'a [u8],
    pub(in crate::kernels) scales: &'a [T],
    pub(in crate::kernels) cols: usize,
}

/// Scales of a nibble format, `N` in a step, and what its nibbles stand for.
pub(in crate::kernels) trait StepScales<const N: usize>: Copy {
    const ZERO: Self;
    /// A quarter of what every code is too large by.
    const FOURS: usize;
    fn codes<S: Isa>(isa: S, nibbles: S::B) -> S::B;
    /// The scale of each lane.
    fn lanes<S: Isa>(isa: S, scales: &[Self; N]) -> S::F;
}

/// int4-g64.
impl StepScales<2> for f32 {
    const ZERO: Self = 0.0;
    const FOURS: usize = 2;

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
    const FOURS: usize = 2;

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
    const FOURS: usize = E2M1_OFFSET as usize / 4;

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
    Codes { codes: [T::codes(isa, first), T::codes(isa, second)], scale }
}

/// One step of inputs of `D` digits in registers.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct LoadedPairs<S: Isa, const D: usize> {
    digits: [[S::B; 2]; D],
    scale: S::F,
    /// Where the integer sum begins.
    start: S::I,
}

impl<'a, T: StepScales<N>, const N: usize, const D: usize> Rows<D> for Nibbles<'a, T, N>
where
    Pairs<D>: Step,
{
    type Inputs = Pairs<D>;
    type Loaded<S: Isa> = LoadedPairs<S, D>;
    const AHEAD: usize = AHEAD / 64;
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
        isa.prefetch(steps.1.as_ptr().wrapping_add(i).cast());
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> Codes<S> {
        let (packed, scales) = self.row(row);
        unpack(isa, &tail(packed, 0), &tail(scales, T::ZERO))
    }

    #[inline(always)]
    fn load<S: Isa>(isa: S, inputs: &Pairs<D>) -> LoadedPairs<S, D> {
        let mut digits = [[isa.bytes(&inputs.digits[0][0]); 2]; D];
        for d in 0..D {
            digits[d] = [isa.bytes(&inputs.digits[d][0]), isa.bytes(&inputs.digits[d][1])];
        }
        let offset = isa.load_int(&inputs.offset);
        let mut start = offset;
        for _ in 1..T::FOURS {
            start = isa.add_int(start, offset);
        }
        LoadedPairs { digits, scale: isa.load(&inputs.scales), start }
    }

    #[inline(always)]
    fn add<S: Isa>(isa: S, codes: &Codes<S>, x: &LoadedPairs<S, D>, sum: S::F) -> S::F {
        // From the highest digit down; eight products of 5 and 24 bits stay below 2^31.
        let mut dot = isa.zero();
        for d in (0..D).rev() {
            let start = if d == 0 { x.start } else { isa.zero() };
            let digit = isa.dot_pair(start, codes.codes, x.digits[d]);
            dot = if d + 1 == D { digit } else { isa.add_int(isa.times_256(dot), digit) };
        }
        isa.mul_add(isa.mul(isa.to_f32(dot), x.scale), codes.scale, sum)
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

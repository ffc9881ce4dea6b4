//! Rows of a matrix in each stored format, decoded to f32 a step at a time.

use half::{bf16, f16};

use super::{AHEAD, STEP};
use crate::kernels::isa::Isa;
use crate::kernels::scratch::Ahead;

/// Rows of weights that decode [`STEP`] columns at a time.
pub(in crate::kernels) trait Rows: Copy {
    /// Whether of each 32 columns the even ones come first.
    const PAIRED: bool;
    /// Steps between reading weights and asking for later ones.
    const AHEAD: usize;
    /// Some whole steps of one row.
    type Steps: Copy;

    fn cols(&self) -> usize;
    /// `count` whole steps of row `row` from step `first` on.
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps;
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> [S::F; 4];
    /// Asks for step `i`, which may lie in a later row.
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize);
    /// The columns after the last whole step, with zeros after them.
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> [S::F; 4];
    /// What the sum of a row is multiplied by.
    fn factor(&self, row: usize) -> f32;
    /// The first row's bytes from step `step` on, which may lie in a later row.
    fn ahead(&self, row: usize, step: usize, count: usize) -> Ahead;
}

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Bf16<'a> {
    pub(in crate::kernels) weights: &'a [bf16],
    pub(in crate::kernels) cols: usize,
}

impl<'a> Rows for Bf16<'a> {
    const PAIRED: bool = false;
    const AHEAD: usize = AHEAD / 128;
    type Steps = &'a [[bf16; STEP]];

    #[inline(always)]
    fn cols(&self) -> usize {
        self.cols
    }

    #[inline(always)]
    fn steps(&self, row: usize, first: usize, count: usize) -> Self::Steps {
        steps(&self.weights[row * self.cols..][..self.cols], first, count)
    }

    #[inline(always)]
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> [S::F; 4] {
        isa.bf16(&steps[i])
    }

    #[inline(always)]
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize) {
        let at: *const u8 = steps.as_ptr().wrapping_add(i).cast();
        isa.prefetch(at);
        isa.prefetch(at.wrapping_add(64));
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> [S::F; 4] {
        isa.bf16(&tail(&self.weights[row * self.cols..][..self.cols], bf16::ZERO))
    }

    #[inline(always)]
    fn factor(&self, _row: usize) -> f32 {
        1.0
    }

    #[inline(always)]
    fn ahead(&self, row: usize, step: usize, count: usize) -> Ahead {
        Ahead::new(self.weights, 2 * self.cols, row, 2 * step * STEP, 2 * count * STEP)
    }
}

#[derive(Clone, Copy)]
pub(in crate::kernels) struct Int8<'a> {
    pub(in crate::kernels) codes: &'a [i8],
    pub(in crate::kernels) scales: &'a [f32],
    pub(in crate::kernels) cols: usize,
}

impl<'a> Rows for Int8<'a> {
    const PAIRED: bool = false;
    const AHEAD: usize = AHEAD / 64;
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
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> [S::F; 4] {
        isa.int8(&steps[i])
    }

    #[inline(always)]
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize) {
        isa.prefetch(steps.as_ptr().wrapping_add(i).cast());
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> [S::F; 4] {
        isa.int8(&tail(&self.codes[row * self.cols..][..self.cols], 0))
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

/// Scales of a nibble format, `N` in a step.
pub(in crate::kernels) trait StepScales<const N: usize>: Copy {
    const ZERO: Self;
    fn decode<S: Isa>(isa: S, packed: &[u8; STEP / 2], scales: &[Self; N]) -> [S::F; 4];
}

/// int4-g64.
impl StepScales<1> for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    fn decode<S: Isa>(isa: S, packed: &[u8; STEP / 2], scales: &[Self; 1]) -> [S::F; 4] {
        isa.int4(packed, scales[0])
    }
}

/// int4-g32.
impl StepScales<2> for f16 {
    const ZERO: Self = Self::ZERO;

    #[inline(always)]
    fn decode<S: Isa>(isa: S, packed: &[u8; STEP / 2], scales: &[Self; 2]) -> [S::F; 4] {
        isa.int4_f16(packed, scales)
    }
}

/// MXFP4, whose scales are E8M0 bytes.
impl StepScales<2> for u8 {
    const ZERO: Self = 0;

    #[inline(always)]
    fn decode<S: Isa>(isa: S, packed: &[u8; STEP / 2], scales: &[Self; 2]) -> [S::F; 4] {
        isa.mxfp4(packed, scales)
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

impl<'a, T: StepScales<N>, const N: usize> Rows for Nibbles<'a, T, N> {
    const PAIRED: bool = true;
    const AHEAD: usize = AHEAD / 32;
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
    fn decode<S: Isa>(isa: S, steps: &Self::Steps, i: usize) -> [S::F; 4] {
        T::decode(isa, &steps.0[i], &steps.1[i])
    }

    #[inline(always)]
    fn prefetch<S: Isa>(isa: S, steps: &Self::Steps, i: usize) {
        isa.prefetch(steps.0.as_ptr().wrapping_add(i).cast());
    }

    #[inline(always)]
    fn decode_tail<S: Isa>(&self, isa: S, row: usize) -> [S::F; 4] {
        let (packed, scales) = self.row(row);
        T::decode(isa, &tail(packed, 0), &tail(scales, T::ZERO))
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

/// `count` whole steps of `N` elements of a row, from step `first` on.
#[inline(always)]
pub(in crate::kernels) fn steps<T, const N: usize>(
    row: &[T],
    first: usize,
    count: usize,
) -> &[[T; N]] {
    &row.as_chunks::<N>().0[first..][..count]
}

/// What follows a row's last whole step, filled up.
#[inline(always)]
pub(in crate::kernels) fn tail<T: Copy, const N: usize>(row: &[T], fill: T) -> [T; N] {
    let (_, rest) = row.as_chunks::<N>();
    let mut padded = [fill; N];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}

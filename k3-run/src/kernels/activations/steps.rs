//! One step of one token's inputs in each form that kernels read.

use k3_formats::quant::fixed::{digits, fixed24_scale};

use super::{Activations, Blocks};
use crate::kernels::isa::Isa;

/// Inputs that share one scale when activations are rounded.
pub const INPUT_GROUP: usize = 32;

/// Some columns of inputs, filled up with zeros where the inputs end.
pub(in crate::kernels) trait Step: Copy + Send + Sync + 'static {
    const COLUMNS: usize;
    /// Steps in a block: a few tokens' and the weights of a few rows fit a 32 KiB
    /// first-level cache.
    const BLOCK: usize;
    const EMPTY: Self;

    fn blocks(all: &Activations) -> &Blocks<Self>;
    /// Takes in `x`, at most [`Step::COLUMNS`] inputs.
    fn fill<S: Isa>(&mut self, isa: S, x: &[f32]);
}

/// 64 inputs as they are.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::kernels) struct Floats(pub(in crate::kernels) [[f32; 16]; 4]);

impl Step for Floats {
    const COLUMNS: usize = 64;
    const BLOCK: usize = 8;
    const EMPTY: Self = Self([[0.0; 16]; 4]);

    fn blocks(all: &Activations) -> &Blocks<Self> {
        &all.floats
    }

    #[inline(always)]
    fn fill<S: Isa>(&mut self, _isa: S, x: &[f32]) {
        *self = Self::EMPTY;
        self.0.as_flattened_mut()[..x.len()].copy_from_slice(x);
    }
}

/// 128 inputs rounded to int8, in order, and for each 64 the scale of each lane of four.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::kernels) struct Bytes {
    pub(in crate::kernels) codes: [[i8; 64]; 2],
    pub(in crate::kernels) scales: [[f32; 16]; 2],
}

impl Step for Bytes {
    const COLUMNS: usize = 128;
    const BLOCK: usize = 16;
    const EMPTY: Self = Self { codes: [[0; 64]; 2], scales: [[0.0; 16]; 2] };

    fn blocks(all: &Activations) -> &Blocks<Self> {
        &all.bytes
    }

    #[inline(always)]
    fn fill<S: Isa>(&mut self, isa: S, x: &[f32]) {
        let (codes, scales) = round::<S, 1>(isa, x);
        for (to, code) in self.codes.as_flattened_mut().iter_mut().zip(codes) {
            *to = code as i8;
        }
        for half in 0..2 {
            for (l, scale) in self.scales[half].iter_mut().enumerate() {
                *scale = scales[2 * half + l / 8];
            }
        }
    }
}

/// 128 inputs rounded to `D` signed bytes: int8 for 1, [`k3_formats::quant::fixed`] for 3.
/// Lane l stands for the eight inputs from 8l on.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(in crate::kernels) struct Pairs<const D: usize> {
    /// Of each digit, lowest first, the even columns and then the odd ones: as the low and
    /// the high nibbles of packed bytes.
    pub(in crate::kernels) digits: [[[i8; 64]; 2]; D],
    pub(in crate::kernels) scales: [f32; 16],
    /// Minus four times the sum of the lane's codes: what codes that are too large by a
    /// multiple of four are put right with.
    pub(in crate::kernels) offset: [i32; 16],
}

impl<const D: usize> Pairs<D> {
    const NONE: Self = Self { digits: [[[0; 64]; 2]; D], scales: [0.0; 16], offset: [0; 16] };

    #[inline(always)]
    fn put<S: Isa>(&mut self, isa: S, x: &[f32]) {
        let (codes, scales) = round::<S, D>(isa, x);
        let mut bytes = [[0; 128]; D];
        for (i, code) in codes.into_iter().enumerate() {
            let all = digits(code);
            for d in 0..D {
                bytes[d][i] = all[d];
            }
        }
        for (bytes, [even, odd]) in bytes.iter().zip(&mut self.digits) {
            for ((pair, even), odd) in bytes.as_chunks::<2>().0.iter().zip(even).zip(odd) {
                (*even, *odd) = (pair[0], pair[1]);
            }
        }
        for (l, lane) in codes.as_chunks::<8>().0.iter().enumerate() {
            self.scales[l] = scales[l / 4];
            // Where an input is not finite, so is the scale, and codes may be anything.
            self.offset[l] =
                lane.iter().fold(0_i32, |sum, &x| sum.wrapping_add(x)).wrapping_mul(-4);
        }
    }
}

impl Step for Pairs<1> {
    const COLUMNS: usize = 128;
    const BLOCK: usize = 16;
    const EMPTY: Self = Self::NONE;

    fn blocks(all: &Activations) -> &Blocks<Self> {
        &all.pairs8
    }

    #[inline(always)]
    fn fill<S: Isa>(&mut self, isa: S, x: &[f32]) {
        self.put(isa, x);
    }
}

impl Step for Pairs<3> {
    const COLUMNS: usize = 128;
    const BLOCK: usize = 8;
    const EMPTY: Self = Self::NONE;

    fn blocks(all: &Activations) -> &Blocks<Self> {
        &all.pairs24
    }

    #[inline(always)]
    fn fill<S: Isa>(&mut self, isa: S, x: &[f32]) {
        self.put(isa, x);
    }
}

/// Up to 128 inputs rounded to codes of `D` digits, zeros after the last, and the scale of
/// each group.
#[inline(always)]
fn round<S: Isa, const D: usize>(isa: S, x: &[f32]) -> ([i32; 128], [f32; 4]) {
    let mut padded = [0.0; 128];
    padded[..x.len()].copy_from_slice(x);
    let (groups, _) = padded.as_chunks::<INPUT_GROUP>();
    let (mut codes, mut scales) = ([0; 128], [0.0; 4]);
    for ((group, codes), scale) in groups.iter().zip(codes.as_chunks_mut().0).zip(&mut scales) {
        *scale = if D == 1 { round8(isa, group, codes) } else { round24(isa, group, codes) };
    }
    (codes, scales)
}

/// [`k3_formats::quant::encode_int8`] of a group: its codes and scale.
#[inline(always)]
fn round8<S: Isa>(isa: S, group: &[f32; INPUT_GROUP], codes: &mut [i32; INPUT_GROUP]) -> f32 {
    let scale = (largest(isa, group) / 127.0).max(1e-20);
    let inverse = isa.splat(1.0 / scale);
    let (lowest, highest) = (isa.splat(-127.0), isa.splat(127.0));
    for (x, codes) in group.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        let code = isa.mul(isa.load(x), inverse);
        isa.store_int(isa.max(lowest, isa.min(highest, code)), codes);
        // NaN is now 0 or a number whose last byte is 0; the definition has 0.
        for code in codes {
            *code = i32::from(*code as i8);
        }
    }
    scale
}

/// [`k3_formats::quant::fixed::encode_fixed24`] of a group: its codes and scale.
#[inline(always)]
fn round24<S: Isa>(isa: S, group: &[f32; INPUT_GROUP], codes: &mut [i32; INPUT_GROUP]) -> f32 {
    let (scale, inverse) = fixed24_scale(largest(isa, group));
    let (inverse, zero) = (isa.splat(inverse), isa.splat(0.0));
    // Stays 0 unless an input is infinite or no number.
    let mut taint = zero;
    for (x, codes) in group.as_chunks().0.iter().zip(codes.as_chunks_mut().0) {
        let x = isa.load(x);
        isa.store_int(isa.mul(x, inverse), codes);
        taint = isa.add(taint, isa.mul(x, zero));
    }
    scale + isa.sum(taint)
}

/// Largest magnitude; a NaN is passed over.
#[inline(always)]
fn largest<S: Isa>(isa: S, group: &[f32; INPUT_GROUP]) -> f32 {
    let mut max = isa.splat(0.0);
    for x in group.as_chunks().0 {
        max = isa.max(isa.abs(isa.load(x)), max);
    }
    isa.max_lane(max)
}

//! Instruction sets: what a kernel may ask of one, as methods of a zero-sized token that
//! only detection can make. Holding the token is the proof that the CPU has the
//! instructions, so kernels themselves are safe code.
//!
//! Every set works on vectors of 16 f32 lanes and adds lanes up in one fixed order, so
//! that a kernel written over [`Isa`] gives the same bits on every set that has fused
//! multiply-add. The portable set rounds the product first and may differ in last bits.

use std::array;

use half::{bf16, f16};
use k3_formats::mxfp4;

#[cfg(target_arch = "x86_64")]
pub(super) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
pub(super) mod portable;

/// A kernel with its arguments, to be compiled once for each instruction set.
pub(super) trait Task {
    type Output;
    /// Must be `#[inline(always)]`, so that the body is compiled with the set's features.
    fn run<S: Isa>(self, isa: S) -> Self::Output;
}

/// Lane-wise unless said otherwise. "16 lanes" of i32 and "64 bytes" are as wide.
pub(super) trait Isa: Copy + Send + Sync {
    /// 16 lanes of f32.
    type F: Copy;
    /// 16 lanes of i32.
    type I: Copy;
    /// 64 bytes.
    type B: Copy;

    /// Whether registers hold 24 sums of 16 lanes beside their operands; else about 6.
    const WIDE: bool;

    /// Runs `task` compiled for this set.
    fn run<T: Task>(self, task: T) -> T::Output;

    /// Asks for the cache line of an address, which need not be mapped.
    fn prefetch(self, at: *const u8);
    /// As [`Isa::prefetch`], for later: into the second-level cache only.
    fn prefetch_late(self, at: *const u8);

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32; 16]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32; 16]);
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where it is less, else `b`; so a NaN in `b` stays.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a` where it is greater, else `b`; so a NaN in `b` stays.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, x: Self::F) -> Self::F;
    /// Magnitude of `x`, which is not negative, with the sign of `sign`.
    fn copysign(self, x: Self::F, sign: Self::F) -> Self::F;
    /// `yes` where the sign bit of `x` is set, else `no`.
    fn if_negative(self, x: Self::F, yes: Self::F, no: Self::F) -> Self::F;
    /// Nearest integer, half to even, for magnitudes below 2^22.
    fn round(self, x: Self::F) -> Self::F;
    /// `2^n` for integers -126..=127.
    fn exp2(self, n: Self::F) -> Self::F;
    /// `a * b + c`, rounded once where the set can.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Elements `4l..4l + 4`, one vector for each of the four places.
    fn deinterleave(self, from: &[f32; 64]) -> [Self::F; 4];
    /// Sum of the lanes: lane l with l + 8, then l + 4, l + 2, l + 1.
    fn sum(self, x: Self::F) -> f32;

    /// Largest lane; NaN if there is one.
    fn max_lane(self, x: Self::F) -> f32;
    /// Nearest integers, half to even, of numbers below 2^23 in magnitude. Others, and
    /// NaN, become 0 or -2^31.
    fn store_int(self, x: Self::F, to: &mut [i32; 16]);

    /// 16 BF16 values.
    fn widen(self, from: &[bf16; 16]) -> Self::F;
    /// 64 weights, in order.
    #[inline(always)]
    fn bf16(self, weights: &[bf16; 64]) -> [Self::F; 4] {
        let (w, _) = weights.as_chunks::<16>();
        [self.widen(&w[0]), self.widen(&w[1]), self.widen(&w[2]), self.widen(&w[3])]
    }
    /// 64 codes, in order, not yet scaled.
    fn int8(self, codes: &[i8; 64]) -> [Self::F; 4];
    /// 64 weights: even columns of the first 32, odd ones, then the same of the last 32.
    fn int4(self, packed: &[u8; 32], scale: f32) -> [Self::F; 4];
    /// As [`Isa::int4`], with a scale for each 32 columns.
    #[inline(always)]
    fn int4_f16(self, packed: &[u8; 32], scales: &[f16; 2]) -> [Self::F; 4] {
        // Codes times 1 are exact, so each weight is still rounded once.
        let codes = self.int4(packed, 1.0);
        let scales = scales.map(|scale| self.splat(scale.to_f32()));
        array::from_fn(|i| self.mul(codes[i], scales[i / 2]))
    }
    /// As [`Isa::int4`], with a scale for each 32 columns.
    fn mxfp4(self, packed: &[u8; 32], scales: &[u8; 2]) -> [Self::F; 4];

    fn zero(self) -> Self::I;
    fn load_int(self, from: &[i32; 16]) -> Self::I;
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn times_256(self, a: Self::I) -> Self::I;
    /// Nearest f32.
    fn to_f32(self, x: Self::I) -> Self::F;
    fn splat_u8(self, x: u8) -> Self::B;
    fn bytes(self, from: &[i8; 64]) -> Self::B;
    fn store_bytes(self, x: Self::B, to: &mut [i8; 64]);
    /// Low nibbles and high nibbles of 64 bytes.
    fn nibbles(self, packed: &[u8; 64]) -> (Self::B, Self::B);
    /// Twice the E2M1 value of each nibble plus [`E2M1_OFFSET`].
    fn e2m1(self, nibbles: Self::B) -> Self::B;
    /// Adds `u[4l..4l + 4] · s[4l..4l + 4]` to lane l; `u` at most 32, `s` signed.
    fn dot_small(self, acc: Self::I, u: Self::B, s: Self::B) -> Self::I;
    /// [`Isa::dot_small`] of two.
    #[inline(always)]
    fn dot_pair(self, acc: Self::I, u: [Self::B; 2], s: [Self::B; 2]) -> Self::I {
        self.dot_small(self.dot_small(acc, u[0], s[0]), u[1], s[1])
    }
    /// Signed codes in the form that [`Isa::dot_int8`] takes them in.
    fn int8_codes(self, w: Self::B) -> Self::B;
    /// Where the sum of one [`Isa::dot_int8`] with these inputs starts.
    fn dot_int8_start(self, x: Self::B) -> Self::I;
    /// As [`Isa::dot_small`] for any signed codes `w` that went through
    /// [`Isa::int8_codes`] and inputs `x` above -128, given a sum that began at
    /// [`Isa::dot_int8_start`].
    fn dot_int8(self, start: Self::I, w: Self::B, x: Self::B) -> Self::I;
    /// Lanes 0..8 from the first, the others from the second.
    fn halves(self, scales: &[f32; 2]) -> Self::F;
    /// Four lanes each.
    #[inline(always)]
    fn quarters(self, scales: &[f16; 4]) -> Self::F {
        let scales = scales.map(f16::to_f32);
        self.load(&array::from_fn(|l| scales[l / 4]))
    }
    /// Half the value of four E8M0 scales, four lanes each.
    fn e8m0_quarters(self, scales: &[u8; 4]) -> Self::F;
}

/// What [`Isa::e2m1`] adds to make codes unsigned: the largest doubled E2M1 value.
pub(super) const E2M1_OFFSET: u8 = 12;

/// Doubled E2M1 values plus [`E2M1_OFFSET`].
#[cfg(target_arch = "x86_64")]
const E2M1_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

/// Value of each E8M0 scale.
static E8M0: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut code = 0;
    while code < 256 {
        values[code] = mxfp4::scale(code as u8);
        code += 1;
    }
    values
};

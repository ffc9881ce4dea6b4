//! Plain Rust for any CPU. The compiler vectorizes most of it with what the build's
//! baseline has.

use std::array;

use half::bf16;
use k3_formats::mxfp4;

use super::{E2M1_CODES, Isa, Task};

/// Needs nothing, so anyone may make it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

impl Isa for Portable {
    type F = [f32; 16];
    type I = [i32; 16];
    type B = [u8; 64];

    const WIDE: bool = false;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        task.run(self)
    }

    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

    #[inline(always)]
    fn prefetch_late(self, _at: *const u8) {}

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; 16]
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> Self::F {
        *from
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; 16]) {
        *to = x;
    }

    #[inline(always)]
    fn mul(self, mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..16 {
            a[l] *= b[l];
        }
        a
    }

    #[inline(always)]
    fn add(self, mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..16 {
            a[l] += b[l];
        }
        a
    }

    #[inline(always)]
    fn sub(self, mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..16 {
            a[l] -= b[l];
        }
        a
    }

    #[inline(always)]
    fn div(self, mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..16 {
            a[l] /= b[l];
        }
        a
    }

    #[inline(always)]
    fn min(self, mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..16 {
            a[l] = if a[l] < b[l] { a[l] } else { b[l] };
        }
        a
    }

    #[inline(always)]
    fn max(self, mut a: Self::F, b: Self::F) -> Self::F {
        for l in 0..16 {
            a[l] = if a[l] > b[l] { a[l] } else { b[l] };
        }
        a
    }

    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        x.map(f32::abs)
    }

    #[inline(always)]
    fn copysign(self, mut x: Self::F, sign: Self::F) -> Self::F {
        for l in 0..16 {
            x[l] = x[l].copysign(sign[l]);
        }
        x
    }

    #[inline(always)]
    fn if_negative(self, mut x: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        for l in 0..16 {
            x[l] = if x[l].is_sign_negative() { yes[l] } else { no[l] };
        }
        x
    }

    /// Adding 1.5 * 2^23 leaves no bits for a fraction.
    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        const SHIFT: f32 = 12_582_912.0;
        x.map(|x| x + SHIFT - SHIFT)
    }

    #[inline(always)]
    fn exp2(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32 + 127) as u32) << 23))
    }

    /// Unfused: without the instruction, a fused one is a slow library call.
    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, mut c: Self::F) -> Self::F {
        for l in 0..16 {
            c[l] += a[l] * b[l];
        }
        c
    }

    #[inline(always)]
    fn deinterleave(self, from: &[f32; 64]) -> [Self::F; 4] {
        array::from_fn(|place| array::from_fn(|l| from[4 * l + place]))
    }

    #[inline(always)]
    fn sum(self, mut x: Self::F) -> f32 {
        for half in [8, 4, 2, 1] {
            for l in 0..half {
                x[l] += x[l + half];
            }
        }
        x[0]
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, |max, x| if max > x { max } else { x })
    }

    #[inline(always)]
    fn store_codes(self, x: Self::F, to: &mut [i8; 16]) {
        *to = x.map(|x| x as i8);
    }

    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> Self::F {
        from.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    fn int8(self, codes: &[i8; 64]) -> [Self::F; 4] {
        let mut out = [[0.0; 16]; 4];
        for (out, &code) in out.as_flattened_mut().iter_mut().zip(codes) {
            *out = f32::from(code);
        }
        out
    }

    #[inline(always)]
    fn int4(self, packed: &[u8; 32], scale: f32) -> [Self::F; 4] {
        let mut out = [[0.0; 16]; 4];
        for (j, &byte) in packed.iter().enumerate() {
            let pair = j / 16 * 2;
            out[pair][j % 16] = (f32::from(byte & 15) - 8.0) * scale;
            out[pair + 1][j % 16] = (f32::from(byte >> 4) - 8.0) * scale;
        }
        out
    }

    #[inline(always)]
    fn mxfp4(self, packed: &[u8; 32], scales: &[u8; 2]) -> [Self::F; 4] {
        let mut out = [[0.0; 16]; 4];
        for (j, &byte) in packed.iter().enumerate() {
            let pair = j / 16 * 2;
            let scale = mxfp4::scale(scales[j / 16]);
            out[pair][j % 16] = mxfp4::E2M1[usize::from(byte & 15)] * scale;
            out[pair + 1][j % 16] = mxfp4::E2M1[usize::from(byte >> 4)] * scale;
        }
        out
    }

    #[inline(always)]
    fn zero(self) -> Self::I {
        [0; 16]
    }

    #[inline(always)]
    fn sub_i(self, mut a: Self::I, b: Self::I) -> Self::I {
        for l in 0..16 {
            a[l] -= b[l];
        }
        a
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        x.map(|x| x as f32)
    }

    #[inline(always)]
    fn splat_u8(self, x: u8) -> Self::B {
        [x; 64]
    }

    #[inline(always)]
    fn bytes(self, from: &[i8; 64]) -> Self::B {
        from.map(|x| x as u8)
    }

    #[inline(always)]
    fn store_bytes(self, x: Self::B, to: &mut [i8; 64]) {
        *to = x.map(|x| x as i8);
    }

    #[inline(always)]
    fn nibbles(self, packed: &[u8; 64]) -> (Self::B, Self::B) {
        (packed.map(|byte| byte & 15), packed.map(|byte| byte >> 4))
    }

    #[inline(always)]
    fn e2m1(self, nibbles: Self::B) -> Self::B {
        nibbles.map(|nibble| E2M1_CODES[usize::from(nibble & 15)])
    }

    #[inline(always)]
    fn dot_small(self, mut acc: Self::I, u: Self::B, s: Self::B) -> Self::I {
        for (l, acc) in acc.iter_mut().enumerate() {
            for i in 4 * l..4 * l + 4 {
                *acc += i32::from(u[i]) * i32::from(s[i] as i8);
            }
        }
        acc
    }

    #[inline(always)]
    fn dot_int8_start(self, _x: Self::B) -> Self::I {
        [0; 16]
    }

    #[inline(always)]
    fn dot_int8(self, mut start: Self::I, w: Self::B, x: Self::B) -> Self::I {
        for (l, acc) in start.iter_mut().enumerate() {
            for i in 4 * l..4 * l + 4 {
                *acc += i32::from(w[i] as i8) * i32::from(x[i] as i8);
            }
        }
        start
    }

    #[inline(always)]
    fn halves(self, scales: &[f32; 2]) -> Self::F {
        array::from_fn(|l| scales[l / 8])
    }

    #[inline(always)]
    fn e8m0_quarters(self, scales: &[u8; 4]) -> Self::F {
        array::from_fn(|l| 0.5 * mxfp4::scale(scales[l / 4]))
    }
}

//! Plain Rust for any CPU. The compiler vectorizes most of it with what the build's
//! baseline has.

use std::array;

use half::bf16;
use k3_formats::mxfp4;

use super::{E2M1_OFFSET, E8M0, Isa, Task};

/// Needs nothing, so anyone may make it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

/// Twice an E2M1 value. The compiler has no instruction for a table of bytes, but makes
/// vector comparisons of this.
#[inline(always)]
fn doubled(nibble: u8) -> i8 {
    let code = (nibble & 7) as i8;
    // 0, 1, 2, 3, 4, 6, 8, 12
    let magnitude = code + i8::from(code > 4) + i8::from(code > 5) + 3 * i8::from(code > 6);
    if nibble & 8 == 0 { magnitude } else { -magnitude }
}

/// 16-bit products added in pairs are an instruction even in SSE2.
#[inline(always)]
fn dot(mut acc: [i32; 16], w: &[i16; 64], x: &[u8; 64]) -> [i32; 16] {
    let mut wide = [0; 64];
    for i in 0..64 {
        wide[i] = i16::from(x[i] as i8);
    }
    let mut pairs = [0; 32];
    for i in 0..32 {
        let first = i32::from(w[2 * i]) * i32::from(wide[2 * i]);
        pairs[i] = first + i32::from(w[2 * i + 1]) * i32::from(wide[2 * i + 1]);
    }
    for l in 0..16 {
        acc[l] += pairs[2 * l] + pairs[2 * l + 1];
    }
    acc
}

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
    fn store_int(self, x: Self::F, to: &mut [i32; 16]) {
        // Above 2^23 f32 has no halves.
        const SHIFT: f32 = 8_388_608.0;
        for l in 0..16 {
            let shift = SHIFT.copysign(x[l]);
            to[l] = if x[l].abs() < SHIFT { (x[l] + shift - shift) as i32 } else { 0 };
        }
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
        for (half, packed) in packed.as_chunks::<16>().0.iter().enumerate() {
            for l in 0..16 {
                out[2 * half][l] = (i32::from(packed[l] & 15) - 8) as f32 * scale;
                out[2 * half + 1][l] = (i32::from(packed[l] >> 4) - 8) as f32 * scale;
            }
        }
        out
    }

    #[inline(always)]
    fn mxfp4(self, packed: &[u8; 32], scales: &[u8; 2]) -> [Self::F; 4] {
        let mut out = [[0.0; 16]; 4];
        for (half, packed) in packed.as_chunks::<16>().0.iter().enumerate() {
            // Twice the value is a small integer, half the scale is exact.
            let scale = 0.5 * E8M0[usize::from(scales[half])];
            for l in 0..16 {
                out[2 * half][l] = f32::from(doubled(packed[l] & 15)) * scale;
                out[2 * half + 1][l] = f32::from(doubled(packed[l] >> 4)) * scale;
            }
        }
        out
    }

    #[inline(always)]
    fn zero(self) -> Self::I {
        [0; 16]
    }

    #[inline(always)]
    fn load_int(self, from: &[i32; 16]) -> Self::I {
        *from
    }

    #[inline(always)]
    fn add_int(self, mut a: Self::I, b: Self::I) -> Self::I {
        for l in 0..16 {
            a[l] = a[l].wrapping_add(b[l]);
        }
        a
    }

    #[inline(always)]
    fn times_256(self, a: Self::I) -> Self::I {
        a.map(|a| a.wrapping_mul(256))
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        let mut out = [0.0; 16];
        for l in 0..16 {
            out[l] = x[l] as f32;
        }
        out
    }

    #[inline(always)]
    fn splat_u8(self, x: u8) -> Self::B {
        [x; 64]
    }

    #[inline(always)]
    fn bytes(self, from: &[i8; 64]) -> Self::B {
        bytemuck::cast(*from)
    }

    #[inline(always)]
    fn store_bytes(self, x: Self::B, to: &mut [i8; 64]) {
        *to = bytemuck::cast(x);
    }

    #[inline(always)]
    fn nibbles(self, packed: &[u8; 64]) -> (Self::B, Self::B) {
        let (mut low, mut high) = ([0; 64], [0; 64]);
        for i in 0..64 {
            (low[i], high[i]) = (packed[i] & 15, packed[i] >> 4);
        }
        (low, high)
    }

    #[inline(always)]
    fn e2m1(self, nibbles: Self::B) -> Self::B {
        let mut codes = [0; 64];
        for (code, nibble) in codes.iter_mut().zip(nibbles) {
            *code = (doubled(nibble) + E2M1_OFFSET as i8) as u8;
        }
        codes
    }

    #[inline(always)]
    fn dot_small(self, acc: Self::I, u: Self::B, s: Self::B) -> Self::I {
        let mut wide = [0; 64];
        for i in 0..64 {
            wide[i] = i16::from(u[i]);
        }
        dot(acc, &wide, &s)
    }

    #[inline(always)]
    fn dot_int8_start(self, _x: Self::B) -> Self::I {
        [0; 16]
    }

    #[inline(always)]
    fn int8_codes(self, w: Self::B) -> Self::B {
        w
    }

    #[inline(always)]
    fn dot_int8(self, start: Self::I, w: Self::B, x: Self::B) -> Self::I {
        let mut wide = [0; 64];
        for i in 0..64 {
            wide[i] = i16::from(w[i] as i8);
        }
        dot(start, &wide, &x)
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

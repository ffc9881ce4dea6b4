//! AVX-512: F, BW, VL and DQ, with or without VNNI (Skylake-X and later, Zen 4 and later).
#![allow(unsafe_code)] // intrinsics, whose instructions the token vouches for

use std::arch::x86_64::*;

use half::{bf16, f16};
use k3_formats::mxfp4;

use super::{E2M1_CODES, E8M0, Isa, Task};

/// Proof that this CPU has the instructions; `VNNI` also for its dot products.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512<const VNNI: bool> {
    detected: (),
}

impl<const VNNI: bool> Avx512<VNNI> {
    /// The token, if the CPU has all of it. The list must be that of [`Isa::run`].
    pub(crate) fn detect() -> Option<Self> {
        let base = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq");
        let all = base && (!VNNI || is_x86_feature_detected!("avx512vnni"));
        all.then_some(Self { detected: () })
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
fn run_without<T: Task>(isa: Avx512<false>, task: T) -> T::Output {
    task.run(isa)
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
fn run_with<T: Task>(isa: Avx512<true>, task: T) -> T::Output {
    task.run(isa)
}

/// A lane of a byte shuffle that takes byte `byte` to bits 16..24 and clears the others.
const fn spread(byte: u8) -> i32 {
    i32::from_le_bytes([128, 128, byte, 128])
}

/// Codes of int4 in the order of their nibbles.
const INT4: [f32; 16] =
    [-8.0, -7.0, -6.0, -5.0, -4.0, -3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

// No closures here: one is a function of its own, without the features, and an intrinsic
// that it is not inlined with becomes a call.
impl<const VNNI: bool> Avx512<VNNI> {
    /// 16 signed bytes.
    #[inline(always)]
    fn count(self, codes: &[i8; 16]) -> __m512 {
        // SAFETY: the token proves AVX-512; the load reads the 16 bytes it is given.
        unsafe {
            let codes = _mm_loadu_si128(codes.as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
        }
    }

    #[inline(always)]
    fn splat_f16(self, x: f16) -> __m512 {
        // SAFETY: the token proves AVX-512.
        unsafe { _mm512_cvtph_ps(_mm256_set1_epi16(x.to_bits() as i16)) }
    }

    /// Entries of `table` chosen by the low and then by the high nibbles of 16 bytes.
    #[inline(always)]
    fn look_up(self, packed: &[u8; 16], table: __m512) -> [__m512; 2] {
        // SAFETY: the token proves AVX-512; the load reads the 16 bytes it is given.
        unsafe {
            let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(packed.as_ptr().cast()));
            // The permutation looks at the low four bits of each index only.
            let low = _mm512_permutexvar_ps(bytes, table);
            [low, _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(bytes), table)]
        }
    }
}

// SAFETY of all blocks below: the token proves that the CPU has AVX-512 F, BW, VL and DQ,
// and VNNI where `VNNI` is true; loads and stores go through references to arrays of
// exactly the bytes they touch.
impl<const VNNI: bool> Isa for Avx512<VNNI> {
    type F = __m512;
    type I = __m512i;
    type B = __m512i;

    const WIDE: bool = true;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        let Self { detected } = self;
        if VNNI {
            // SAFETY: the token proves all features of `run_with`.
            unsafe { run_with(Avx512 { detected }, task) }
        } else {
            // SAFETY: the token proves all features of `run_without`.
            unsafe { run_without(Avx512 { detected }, task) }
        }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: every x86-64 CPU has the instruction, and it cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
    }

    #[inline(always)]
    fn prefetch_late(self, at: *const u8) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; 16]) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_abs_ps(x) }
    }

    #[inline(always)]
    fn copysign(self, x: __m512, sign: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_or_ps(x, _mm512_and_ps(sign, _mm512_set1_ps(-0.0))) }
    }

    #[inline(always)]
    fn if_negative(self, x: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), no, yes) }
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x) }
    }

    #[inline(always)]
    fn exp2(self, n: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn deinterleave(self, from: &[f32; 64]) -> [__m512; 4] {
        let (v, _) = from.as_chunks::<16>();
        // SAFETY: see the impl.
        unsafe {
            let v = [self.load(&v[0]), self.load(&v[1]), self.load(&v[2]), self.load(&v[3])];
            // Elements 0 and 4 (mod 8) of a pair, then 1 and 5, and so on.
            let first = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
            let second =
                _mm512_setr_epi32(2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31);
            let (a, b) = (
                _mm512_permutex2var_ps(v[0], first, v[1]),
                _mm512_permutex2var_ps(v[2], first, v[3]),
            );
            let (c, d) = (
                _mm512_permutex2var_ps(v[0], second, v[1]),
                _mm512_permutex2var_ps(v[2], second, v[3]),
            );
            [
                _mm512_shuffle_f32x4::<0x44>(a, b),
                _mm512_shuffle_f32x4::<0xee>(a, b),
                _mm512_shuffle_f32x4::<0x44>(c, d),
                _mm512_shuffle_f32x4::<0xee>(c, d),
            ]
        }
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    fn max_lane(self, x: __m512) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    fn store_int(self, x: __m512, to: &mut [i32; 16]) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), _mm512_cvtps_epi32(x)) }
    }

    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> __m512 {
        // SAFETY: the token proves AVX-512; a `bf16` is its 16 bits, and 32 bytes are read.
        unsafe {
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
        }
    }

    #[inline(always)]
    fn int8(self, codes: &[i8; 64]) -> [__m512; 4] {
        let (codes, _) = codes.as_chunks::<16>();
        [self.count(&codes[0]), self.count(&codes[1]), self.count(&codes[2]), self.count(&codes[3])]
    }

    #[inline(always)]
    fn int4(self, packed: &[u8; 32], scale: f32) -> [__m512; 4] {
        let table = self.mul(self.load(&INT4), self.splat(scale));
        let (halves, _) = packed.as_chunks::<16>();
        let [a, b] = self.look_up(&halves[0], table);
        let [c, d] = self.look_up(&halves[1], table);
        [a, b, c, d]
    }

    #[inline(always)]
    fn int4_f16(self, packed: &[u8; 32], scales: &[f16; 2]) -> [__m512; 4] {
        let table = self.load(&INT4);
        let first = self.mul(table, self.splat_f16(scales[0]));
        let second = self.mul(table, self.splat_f16(scales[1]));
        let (halves, _) = packed.as_chunks::<16>();
        let [a, b] = self.look_up(&halves[0], first);
        let [c, d] = self.look_up(&halves[1], second);
        [a, b, c, d]
    }

    #[inline(always)]
    fn mxfp4(self, packed: &[u8; 32], scales: &[u8; 2]) -> [__m512; 4] {
        let table = self.load(&mxfp4::E2M1);
        let first = self.mul(table, self.splat(E8M0[usize::from(scales[0])]));
        let second = self.mul(table, self.splat(E8M0[usize::from(scales[1])]));
        let (halves, _) = packed.as_chunks::<16>();
        let [a, b] = self.look_up(&halves[0], first);
        let [c, d] = self.look_up(&halves[1], second);
        [a, b, c, d]
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    fn load_int(self, from: &[i32; 16]) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_add_epi32(a, b) }
    }

    #[inline(always)]
    fn times_256(self, a: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_slli_epi32::<8>(a) }
    }

    #[inline(always)]
    fn to_f32(self, x: __m512i) -> __m512 {
        // SAFETY: see the impl.
        unsafe { _mm512_cvtepi32_ps(x) }
    }

    #[inline(always)]
    fn splat_u8(self, x: u8) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_set1_epi8(x as i8) }
    }

    #[inline(always)]
    fn bytes(self, from: &[i8; 64]) -> __m512i {
        // SAFETY: see the impl.
        unsafe { _mm512_loadu_si512(from.as_ptr().cast()) }
    }

    #[inline(always)]
    fn store_bytes(self, x: __m512i, to: &mut [i8; 64]) {
        // SAFETY: see the impl.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), x) }
    }

    #[inline(always)]
    fn nibbles(self, packed: &[u8; 64]) -> (__m512i, __m512i) {
        // SAFETY: see the impl.
        unsafe {
            let (packed, mask) = (_mm512_loadu_si512(packed.as_ptr().cast()), _mm512_set1_epi8(15));
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(packed), mask);
            (_mm512_and_si512(packed, mask), high)
        }
    }

    #[inline(always)]
    fn e2m1(self, nibbles: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe {
            let table = _mm512_broadcast_i32x4(_mm_loadu_si128(E2M1_CODES.as_ptr().cast()));
            _mm512_shuffle_epi8(table, nibbles)
        }
    }

    #[inline(always)]
    fn dot_small(self, acc: __m512i, u: __m512i, s: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe {
            if VNNI {
                return _mm512_dpbusd_epi32(acc, u, s);
            }
            // Two products of at most 32 * 128 cannot saturate 16 bits.
            let pairs = _mm512_maddubs_epi16(u, s);
            _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn dot_pair(self, acc: __m512i, u: [__m512i; 2], s: [__m512i; 2]) -> __m512i {
        // SAFETY: see the impl.
        unsafe {
            if VNNI {
                let acc = _mm512_dpbusd_epi32(acc, u[0], s[0]);
                return _mm512_dpbusd_epi32(acc, u[1], s[1]);
            }
            // Nor can four.
            let first = _mm512_maddubs_epi16(u[0], s[0]);
            let both = _mm512_add_epi16(first, _mm512_maddubs_epi16(u[1], s[1]));
            _mm512_add_epi32(acc, _mm512_madd_epi16(both, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn dot_int8_start(self, x: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe {
            if !VNNI {
                return _mm512_setzero_si512();
            }
            let offset = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(-128), x);
            _mm512_sub_epi32(_mm512_setzero_si512(), offset)
        }
    }

    #[inline(always)]
    fn int8_codes(self, w: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe { if VNNI { _mm512_xor_si512(w, self.splat_u8(128)) } else { w } }
    }

    #[inline(always)]
    fn dot_int8(self, start: __m512i, w: __m512i, x: __m512i) -> __m512i {
        // SAFETY: see the impl.
        unsafe {
            if VNNI {
                // Codes raised by 128 are unsigned; the start has taken that off.
                return _mm512_dpbusd_epi32(start, w, x);
            }
            // |w| times x with w's sign: two products of at most 128 * 127 cannot saturate.
            let negative = _mm512_movepi8_mask(w);
            let x = _mm512_mask_sub_epi8(x, negative, _mm512_setzero_si512(), x);
            let pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
            _mm512_add_epi32(start, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))
        }
    }

    #[inline(always)]
    fn halves(self, scales: &[f32; 2]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(scales[0]), _mm512_set1_ps(scales[1]))
        }
    }

    #[inline(always)]
    fn quarters(self, scales: &[f16; 4]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let all = _mm256_set1_epi64x(i64::from_le_bytes(bytemuck::cast(*scales)));
            let low = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
            let lanes = _mm256_set_m128i(_mm_add_epi8(low, _mm_set1_epi8(4)), low);
            _mm512_cvtph_ps(_mm256_shuffle_epi8(all, lanes))
        }
    }

    #[inline(always)]
    fn e8m0_quarters(self, scales: &[u8; 4]) -> __m512 {
        // SAFETY: see the impl.
        unsafe {
            let (a, b, c, d) = (spread(0), spread(1), spread(2), spread(3));
            let lanes = _mm512_setr_epi32(a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d);
            let all = _mm512_set1_epi32(i32::from_le_bytes(*scales));
            let bits = _mm512_slli_epi32::<7>(_mm512_shuffle_epi8(all, lanes));
            // 0 is the subnormal 2^-127, and 255, here infinity, becomes NaN when half of
            // it is taken off.
            let scale = _mm512_castsi512_ps(_mm512_max_epu32(bits, _mm512_set1_epi32(1 << 22)));
            _mm512_fnmadd_ps(scale, _mm512_set1_ps(0.5), scale)
        }
    }
}

//! AVX2 with FMA and F16C (Haswell and later, all of Zen), with or without AVX-VNNI (Alder
//! Lake and later, Zen 5): 16 lanes are two registers.
#![allow(unsafe_code)] // intrinsics, whose instructions the token vouches for

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{E2M1_CODES, E8M0, Isa, Task};

/// Proof that this CPU has AVX2, FMA and F16C; `VNNI` also for AVX-VNNI's dot products.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2<const VNNI: bool> {
    detected: (),
}

// No closures here: one is a function of its own, without the features, and an intrinsic
// that it is not inlined with becomes a call.
impl<const VNNI: bool> Avx2<VNNI> {
    /// The token, if the CPU has all of it. The list must be that of [`Isa::run`].
    pub(crate) fn detect() -> Option<Self> {
        let base = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        let all = base && (!VNNI || is_x86_feature_detected!("avxvnni"));
        all.then_some(Self { detected: () })
    }

    /// 8 BF16 values.
    #[inline(always)]
    fn widen_half(self, w: &[bf16; 8]) -> __m256 {
        // SAFETY: the token proves AVX2; a `bf16` is its 16 bits, and 16 bytes are read.
        unsafe {
            let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(w.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
        }
    }

    /// 8 signed bytes.
    #[inline(always)]
    fn count(self, codes: &[i8; 8]) -> __m256 {
        // SAFETY: the token proves AVX2; the load reads the 8 bytes it is given.
        unsafe {
            let codes = _mm_loadl_epi64(codes.as_ptr().cast());
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))
        }
    }

    /// 4 x 8 elements, one register for each place in a group of four.
    #[inline(always)]
    fn transpose(self, from: &[[f32; 8]; 4]) -> [__m256; 4] {
        // SAFETY: the token proves AVX2; each load reads the 8 floats it is given.
        unsafe {
            let (v0, v1) = (_mm256_loadu_ps(from[0].as_ptr()), _mm256_loadu_ps(from[1].as_ptr()));
            let (v2, v3) = (_mm256_loadu_ps(from[2].as_ptr()), _mm256_loadu_ps(from[3].as_ptr()));
            let a = _mm256_permute2f128_ps::<0x20>(v0, v2);
            let b = _mm256_permute2f128_ps::<0x31>(v0, v2);
            let c = _mm256_permute2f128_ps::<0x20>(v1, v3);
            let d = _mm256_permute2f128_ps::<0x31>(v1, v3);
            let (low, high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
            let (low2, high2) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
            [
                _mm256_shuffle_ps::<0x44>(low, low2),
                _mm256_shuffle_ps::<0xee>(low, low2),
                _mm256_shuffle_ps::<0x44>(high, high2),
                _mm256_shuffle_ps::<0xee>(high, high2),
            ]
        }
    }

    /// Twice the E2M1 values of 16 nibbles, small integers.
    #[inline(always)]
    fn doubled(self, nibbles: __m128i) -> __m128i {
        // SAFETY: the token proves AVX2; the table is 16 bytes.
        unsafe { _mm_shuffle_epi8(_mm_loadu_si128(E2M1_DOUBLED.as_ptr().cast()), nibbles) }
    }

    #[inline(always)]
    fn widen_f16(self, x: &[f16; 2]) -> [f32; 2] {
        // SAFETY: the token proves F16C.
        unsafe {
            let x = _mm_cvtph_ps(_mm_cvtsi32_si128(bytemuck::cast(*x)));
            [_mm_cvtss_f32(x), _mm_cvtss_f32(_mm_movehdup_ps(x))]
        }
    }

    /// 16 nibbles less 8.
    #[inline(always)]
    fn centred(self, nibbles: __m128i) -> __m128i {
        // SAFETY: the token proves AVX2.
        unsafe { _mm_sub_epi8(nibbles, _mm_set1_epi8(8)) }
    }

    /// Low and high nibbles of 16 bytes.
    #[inline(always)]
    fn split(self, packed: &[u8; 16]) -> (__m128i, __m128i) {
        // SAFETY: the token proves AVX2; the load reads the 16 bytes it is given.
        unsafe {
            let (packed, mask) = (_mm_loadu_si128(packed.as_ptr().cast()), _mm_set1_epi8(15));
            (_mm_and_si128(packed, mask), _mm_and_si128(_mm_srli_epi16::<4>(packed), mask))
        }
    }

    /// 16 signed bytes times `scale`.
    #[inline(always)]
    fn scaled(self, codes: __m128i, scale: f32) -> [__m256; 2] {
        // SAFETY: the token proves AVX2.
        unsafe {
            let (low, high) = (codes, _mm_unpackhi_epi64(codes, codes));
            let scale = _mm256_set1_ps(scale);
            let low = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), scale);
            let high = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high)), scale);
            [low, high]
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn run_without<T: Task>(isa: Avx2<false>, task: T) -> T::Output {
    task.run(isa)
}

#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn run_with<T: Task>(isa: Avx2<true>, task: T) -> T::Output {
    task.run(isa)
}

/// A lane-wise operation on both registers.
macro_rules! both {
    (|$($x:ident),+| $operation:expr) => {
        // SAFETY: see the impl.
        unsafe { [{ $(let $x = $x[0];)+ $operation }, { $(let $x = $x[1];)+ $operation }] }
    };
}

// SAFETY of all blocks below: the token proves that the CPU has AVX2, FMA and F16C, and
// AVX-VNNI where `VNNI` is true; loads and stores go through references to arrays of exactly
// the bytes they touch.
impl<const VNNI: bool> Isa for Avx2<VNNI> {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type B = [__m256i; 2];

    const WIDE: bool = false;

    #[inline(always)]
    fn run<T: Task>(self, task: T) -> T::Output {
        let Self { detected } = self;
        if VNNI {
            // SAFETY: the token proves all features of `run_with`.
            unsafe { run_with(Avx2 { detected }, task) }
        } else {
            // SAFETY: the token proves all features of `run_without`.
            unsafe { run_without(Avx2 { detected }, task) }
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
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(x); 2] }
    }

    #[inline(always)]
    fn load(self, from: &[f32; 16]) -> Self::F {
        let (from, _) = from.as_chunks::<8>();
        // SAFETY: see the impl.
        unsafe { [_mm256_loadu_ps(from[0].as_ptr()), _mm256_loadu_ps(from[1].as_ptr())] }
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32; 16]) {
        let (to, _) = to.as_chunks_mut::<8>();
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_ps(to[0].as_mut_ptr(), x[0]);
            _mm256_storeu_ps(to[1].as_mut_ptr(), x[1]);
        }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(|a, b| _mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        both!(|x| _mm256_andnot_ps(_mm256_set1_ps(-0.0), x))
    }

    #[inline(always)]
    fn copysign(self, x: Self::F, sign: Self::F) -> Self::F {
        both!(|x, sign| _mm256_or_ps(x, _mm256_and_ps(sign, _mm256_set1_ps(-0.0))))
    }

    #[inline(always)]
    fn if_negative(self, x: Self::F, yes: Self::F, no: Self::F) -> Self::F {
        both!(|x, yes, no| _mm256_blendv_ps(no, yes, x))
    }

    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        both!(|x| _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn exp2(self, n: Self::F) -> Self::F {
        both!(|n| {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(|a, b, c| _mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn deinterleave(self, from: &[f32; 64]) -> [Self::F; 4] {
        let (v, _) = from.as_chunks::<8>();
        let a = self.transpose(&[v[0], v[1], v[2], v[3]]);
        let b = self.transpose(&[v[4], v[5], v[6], v[7]]);
        [[a[0], b[0]], [a[1], b[1]], [a[2], b[2]], [a[3], b[3]]]
    }

    #[inline(always)]
    fn sum(self, x: Self::F) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_add_ps(x[0], x[1]);
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        // SAFETY: see the impl.
        unsafe {
            let x = _mm256_max_ps(x[0], x[1]);
            let x = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_max_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)))
        }
    }

    #[inline(always)]
    fn store_int(self, x: Self::F, to: &mut [i32; 16]) {
        let (to, _) = to.as_chunks_mut::<8>();
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_si256(to[0].as_mut_ptr().cast(), _mm256_cvtps_epi32(x[0]));
            _mm256_storeu_si256(to[1].as_mut_ptr().cast(), _mm256_cvtps_epi32(x[1]));
        }
    }

    #[inline(always)]
    fn widen(self, from: &[bf16; 16]) -> Self::F {
        let (from, _) = from.as_chunks::<8>();
        [self.widen_half(&from[0]), self.widen_half(&from[1])]
    }

    #[inline(always)]
    fn int8(self, codes: &[i8; 64]) -> [Self::F; 4] {
        let (codes, _) = codes.as_chunks::<8>();
        [
            [self.count(&codes[0]), self.count(&codes[1])],
            [self.count(&codes[2]), self.count(&codes[3])],
            [self.count(&codes[4]), self.count(&codes[5])],
            [self.count(&codes[6]), self.count(&codes[7])],
        ]
    }

    #[inline(always)]
    fn int4(self, packed: &[u8; 32], scale: f32) -> [Self::F; 4] {
        let (halves, _) = packed.as_chunks::<16>();
        let ((a, b), (c, d)) = (self.split(&halves[0]), self.split(&halves[1]));
        [
            self.scaled(self.centred(a), scale),
            self.scaled(self.centred(b), scale),
            self.scaled(self.centred(c), scale),
            self.scaled(self.centred(d), scale),
        ]
    }

    #[inline(always)]
    fn int4_f16(self, packed: &[u8; 32], scales: &[f16; 2]) -> [Self::F; 4] {
        let (halves, _) = packed.as_chunks::<16>();
        let ((a, b), (c, d)) = (self.split(&halves[0]), self.split(&halves[1]));
        let scales = self.widen_f16(scales);
        [
            self.scaled(self.centred(a), scales[0]),
            self.scaled(self.centred(b), scales[0]),
            self.scaled(self.centred(c), scales[1]),
            self.scaled(self.centred(d), scales[1]),
        ]
    }

    #[inline(always)]
    fn mxfp4(self, packed: &[u8; 32], scales: &[u8; 2]) -> [Self::F; 4] {
        let (halves, _) = packed.as_chunks::<16>();
        let ((a, b), (c, d)) = (self.split(&halves[0]), self.split(&halves[1]));
        // Half the scale is exact, like twice the value.
        let first = 0.5 * E8M0[usize::from(scales[0])];
        let second = 0.5 * E8M0[usize::from(scales[1])];
        [
            self.scaled(self.doubled(a), first),
            self.scaled(self.doubled(b), first),
            self.scaled(self.doubled(c), second),
            self.scaled(self.doubled(d), second),
        ]
    }

    #[inline(always)]
    fn zero(self) -> Self::I {
        // SAFETY: see the impl.
        unsafe { [_mm256_setzero_si256(); 2] }
    }

    #[inline(always)]
    fn load_int(self, from: &[i32; 16]) -> Self::I {
        let (from, _) = from.as_chunks::<8>();
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_loadu_si256(from[0].as_ptr().cast()),
                _mm256_loadu_si256(from[1].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        both!(|a, b| _mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn times_256(self, a: Self::I) -> Self::I {
        both!(|a| _mm256_slli_epi32::<8>(a))
    }

    #[inline(always)]
    fn to_f32(self, x: Self::I) -> Self::F {
        both!(|x| _mm256_cvtepi32_ps(x))
    }

    #[inline(always)]
    fn splat_u8(self, x: u8) -> Self::B {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_epi8(x as i8); 2] }
    }

    #[inline(always)]
    fn bytes(self, from: &[i8; 64]) -> Self::B {
        let (from, _) = from.as_chunks::<32>();
        // SAFETY: see the impl.
        unsafe {
            [
                _mm256_loadu_si256(from[0].as_ptr().cast()),
                _mm256_loadu_si256(from[1].as_ptr().cast()),
            ]
        }
    }

    #[inline(always)]
    fn store_bytes(self, x: Self::B, to: &mut [i8; 64]) {
        let (to, _) = to.as_chunks_mut::<32>();
        // SAFETY: see the impl.
        unsafe {
            _mm256_storeu_si256(to[0].as_mut_ptr().cast(), x[0]);
            _mm256_storeu_si256(to[1].as_mut_ptr().cast(), x[1]);
        }
    }

    #[inline(always)]
    fn nibbles(self, packed: &[u8; 64]) -> (Self::B, Self::B) {
        let packed = self.bytes(bytemuck::cast_ref(packed));
        // SAFETY: see the impl.
        let mask = unsafe { _mm256_set1_epi8(15) };
        let low = both!(|packed| _mm256_and_si256(packed, mask));
        let high = both!(|packed| _mm256_and_si256(_mm256_srli_epi16::<4>(packed), mask));
        (low, high)
    }

    #[inline(always)]
    fn e2m1(self, nibbles: Self::B) -> Self::B {
        both!(|nibbles| {
            let table = _mm_loadu_si128(E2M1_CODES.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), nibbles)
        })
    }

    #[inline(always)]
    fn dot_small(self, acc: Self::I, u: Self::B, s: Self::B) -> Self::I {
        if VNNI {
            return both!(|acc, u, s| _mm256_dpbusd_avx_epi32(acc, u, s));
        }
        // Two products of at most 32 * 128 cannot saturate 16 bits.
        both!(|acc, u, s| {
            let pairs = _mm256_maddubs_epi16(u, s);
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn dot_pair(self, acc: Self::I, u: [Self::B; 2], s: [Self::B; 2]) -> Self::I {
        let ([u, v], [s, t]) = (u, s);
        if VNNI {
            return self.dot_small(self.dot_small(acc, u, s), v, t);
        }
        // Nor can four.
        both!(|acc, u, v, s, t| {
            let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(u, s), _mm256_maddubs_epi16(v, t));
            _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn dot_int8_start(self, x: Self::B) -> Self::I {
        if !VNNI {
            return self.zero();
        }
        both!(|x| {
            let zero = _mm256_setzero_si256();
            _mm256_sub_epi32(zero, _mm256_dpbusd_avx_epi32(zero, _mm256_set1_epi8(-128), x))
        })
    }

    #[inline(always)]
    fn int8_codes(self, w: Self::B) -> Self::B {
        if !VNNI {
            return w;
        }
        both!(|w| _mm256_xor_si256(w, _mm256_set1_epi8(-128)))
    }

    #[inline(always)]
    fn dot_int8(self, start: Self::I, w: Self::B, x: Self::B) -> Self::I {
        if VNNI {
            // Codes raised by 128 are unsigned; the start has taken that off.
            return both!(|start, w, x| _mm256_dpbusd_avx_epi32(start, w, x));
        }
        // |w| times x with w's sign: two products of at most 128 * 127 cannot saturate.
        both!(|start, w, x| {
            let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
            _mm256_add_epi32(start, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        })
    }

    #[inline(always)]
    fn halves(self, scales: &[f32; 2]) -> Self::F {
        // SAFETY: see the impl.
        unsafe { [_mm256_set1_ps(scales[0]), _mm256_set1_ps(scales[1])] }
    }

    #[inline(always)]
    fn quarters(self, scales: &[f16; 4]) -> Self::F {
        // SAFETY: see the impl; the load reads 8 bytes.
        unsafe {
            let all = _mm_cvtph_ps(_mm_loadl_epi64(scales.as_ptr().cast()));
            let all = _mm256_set_m128(all, all);
            let lanes = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
            let more = _mm256_add_epi32(lanes, _mm256_set1_epi32(2));
            [_mm256_permutevar8x32_ps(all, lanes), _mm256_permutevar8x32_ps(all, more)]
        }
    }

    #[inline(always)]
    fn e8m0_quarters(self, scales: &[u8; 4]) -> Self::F {
        // SAFETY: see the impl.
        let bytes = unsafe {
            let all = _mm256_set1_epi32(i32::from_le_bytes(*scales));
            let (a, b) = (spread(0), spread(1));
            let lanes = _mm256_setr_epi32(a, a, a, a, b, b, b, b);
            let more = _mm256_add_epi32(lanes, _mm256_set1_epi32(2 << 16));
            [_mm256_shuffle_epi8(all, lanes), _mm256_shuffle_epi8(all, more)]
        };
        both!(|bytes| {
            // 0 is the subnormal 2^-127, and 255, here infinity, becomes NaN when half of
            // it is taken off.
            let bits = _mm256_slli_epi32::<7>(bytes);
            let bits = _mm256_max_epu32(bits, _mm256_set1_epi32(1 << 22));
            let scale = _mm256_castsi256_ps(bits);
            _mm256_fnmadd_ps(scale, _mm256_set1_ps(0.5), scale)
        })
    }
}

/// A lane of a byte shuffle that takes byte `byte` to bits 16..24 and clears the others.
const fn spread(byte: u8) -> i32 {
    i32::from_le_bytes([128, 128, byte, 128])
}

/// Doubled E2M1 values.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

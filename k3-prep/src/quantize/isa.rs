//! Picks the build of the row quantizer that this CPU runs fastest.
//!
//! This file may hold unsafe code: the compiler cannot know that a CPU was asked for what it
//! has.
#![allow(unsafe_code)]

use k3_formats::quant::MatrixFormat;

use super::Problem;
use super::rows::{self, Row, Seen};

/// [`rows::quantize`], the same bits on every CPU.
pub(super) fn quantize(format: MatrixFormat, row: Row) -> Result<Seen, (usize, Problem)> {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::is_x86_feature_detected as has;
        if has!("avx512f") && has!("avx512bw") && has!("avx512vl") && has!("avx512dq") {
            // SAFETY: this CPU has all four, as was asked just above.
            return unsafe { quantize_avx512(format, row) };
        }
        if has!("avx2") {
            // SAFETY: this CPU has AVX2, as was asked just above.
            return unsafe { quantize_avx2(format, row) };
        }
    }
    rows::quantize(format, row)
}

/// [`rows::quantize`] compiled with AVX2. There is no fused multiply-add in it, since the
/// sources have none.
///
/// # Safety
/// The CPU must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn quantize_avx2(format: MatrixFormat, row: Row) -> Result<Seen, (usize, Problem)> {
    rows::quantize(format, row)
}

/// [`rows::quantize`] compiled with AVX-512, also without fused multiply-add.
///
/// # Safety
/// The CPU must have AVX-512 F, BW, VL and DQ.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn quantize_avx512(format: MatrixFormat, row: Row) -> Result<Seen, (usize, Problem)> {
    rows::quantize(format, row)
}

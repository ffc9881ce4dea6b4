//! MXFP4, the experts' format: E2M1 values in groups of 32 columns, each group with an
//! E8M0 scale (OCP Microscaling Formats 1.0).
//!
//! A row of `cols` columns is `cols / 2` packed bytes, the even column in the low
//! nibble, and `cols / 32` scale bytes. This is the definition the kernels are tested
//! against.

/// Columns that share one scale.
pub const GROUP: usize = 32;

/// Value of each E2M1 code; bit 3 is the sign.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Value of an E8M0 scale: `2^(code - 127)`, exact also for 0 (2^-127, subnormal in
/// f32) and 254 (2^127); 255 is NaN.
pub const fn scale(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => f32::from_bits((code as u32) << 23),
    }
}

/// Decodes one row: `packed: [cols / 2]`, `scales: [cols / 32]`, `out: [cols]`;
/// `out[c] = e2m1(nibble c) * 2^(scales[c / 32] - 127)`, exact unless it leaves f32's range.
///
/// # Panics
/// The lengths do not fit each other.
pub fn decode_row(packed: &[u8], scales: &[u8], out: &mut [f32]) {
    assert_eq!(out.len(), GROUP * scales.len(), "one scale per 32 columns");
    assert_eq!(out.len(), 2 * packed.len(), "two columns per byte");
    let groups = packed.chunks_exact(GROUP / 2).zip(out.chunks_exact_mut(GROUP));
    for ((packed, out), &code) in groups.zip(scales) {
        let scale = scale(code);
        for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
            *pair = [byte & 15, byte >> 4].map(|nibble| E2M1[usize::from(nibble)] * scale);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_scale_is_its_power_of_two() {
        for code in 0..=254_u8 {
            let exact = f64::from(code) - 127.0;
            assert_eq!(f64::from(scale(code)), exact.exp2(), "code {code}");
        }
        assert!(scale(255).is_nan());
    }

    #[test]
    fn codes_follow_sign_exponent_and_mantissa() {
        for code in 0..16_u8 {
            let (exponent, mantissa) = (f32::from(code >> 1 & 3), f32::from(code & 1));
            let magnitude = if exponent == 0.0 {
                mantissa / 2.0
            } else {
                (exponent - 1.0).exp2() * (1.0 + mantissa / 2.0)
            };
            let value = if code & 8 == 0 { magnitude } else { -magnitude };
            assert_eq!(E2M1[usize::from(code)].to_bits(), value.to_bits(), "code {code}");
        }
    }

    #[test]
    fn a_row_takes_the_even_column_from_the_low_nibble() {
        let mut packed = [0; 32];
        packed[0] = 0x27; // columns 0 and 1: 6, 1
        packed[16] = 0xf1; // columns 32 and 33: 0.5, -6
        let mut out = [1.0; 64];
        decode_row(&packed, &[128, 254], &mut out);
        assert_eq!(out[..3], [12.0, 2.0, 0.0]);
        assert_eq!(out[32], 0.5 * 2.0_f32.powi(127));
        assert_eq!(out[33], f32::NEG_INFINITY, "6 * 2^127 leaves f32's range");
        decode_row(&packed, &[255, 0], &mut out);
        assert!(out[..32].iter().all(|w| w.is_nan()));
        assert_eq!(f64::from(out[33]), -6.0 * (-127_f64).exp2());
    }
}

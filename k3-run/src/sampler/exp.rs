//! Exponential and logarithm from additions, multiplications and divisions alone, which
//! IEEE 754 rounds in one way everywhere. Errors stay within a few units of the last place.

use std::f64::consts::{LN_2, LOG2_E};

/// ln 2 rounded to 32 bits, so that its product with a small integer is exact.
const LN_2_HIGH: f64 = 0.693_147_180_369_123_8;
/// The bits of ln 2 that [`LN_2_HIGH`] leaves out.
const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Added to a number of magnitude below 2^51, leaves the nearest integer in the low bits.
const ROUND: f64 = 6_755_399_441_055_744.0;

/// e^x for x ≤ 700; 0 below -700, where a weight is of no account, and for minus infinity.
pub(super) fn exp(x: f64) -> f64 {
    // x = k ln 2 + r with |r| ≤ ln 2 / 2
    let shifted = x * LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = x - k * LN_2_HIGH - k * LN_2_LOW;
    // Taylor to r^13: the rest is below 2^-57 of the sum.
    let mut sum = 1.0 / 6_227_020_800.0;
    for factorial in [
        479_001_600.0,
        39_916_800.0,
        3_628_800.0,
        362_880.0,
        40_320.0,
        5_040.0,
        720.0,
        120.0,
        24.0,
        6.0,
        2.0,
        1.0,
        1.0,
    ] {
        sum = sum * r + 1.0 / factorial;
    }
    // The low bits of `shifted` hold k; moved up they are an exponent, to be added to that of 1.
    let power = f64::from_bits((shifted.to_bits() << 52).wrapping_add(1.0f64.to_bits()));
    if x < -700.0 { 0.0 } else { sum * power }
}

/// Natural logarithm of x, for x from 1 to 1e300: Halley's iteration on [`exp`].
pub(super) fn ln(x: f64) -> f64 {
    let exponent = (x.to_bits() >> 52) as f64 - 1023.0;
    // Off by less than 0.7 to begin with; the error is cubed each time.
    let mut y = exponent * LN_2;
    for _ in 0..4 {
        let e = exp(y);
        y += 2.0 * (x - e) / (x + e);
    }
    y
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(found: f64, expected: f64) {
        let ulps = found.to_bits().abs_diff(expected.to_bits());
        assert!(ulps <= 4, "{found:e} {expected:e}: {ulps} units apart");
    }

    #[test]
    fn agrees_with_the_platform_to_a_few_units() {
        let mut x = 0.0;
        while x > -700.0 {
            close(exp(x), x.exp());
            close(exp(x * 1e-3), (x * 1e-3).exp());
            x -= 0.173;
        }
        let mut x = 1.0;
        while x < 1e7 {
            assert!((ln(x) - f64::ln(x)).abs() <= 4e-16 * f64::ln(x).max(1.0), "{x}");
            x *= 1.07;
        }
    }

    #[test]
    fn edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-700.1), 0.0);
        assert_eq!(exp(-1e9), 0.0);
        assert_eq!(exp(f64::NEG_INFINITY), 0.0);
        assert_eq!(ln(1.0), 0.0);
    }

    /// Bits that must not depend on the machine: the same steps in Python's floats give them.
    #[test]
    fn bits_are_fixed() {
        let sum = (0..1000).map(|i| exp(f64::from(i) * -0.037)).sum::<f64>();
        assert_eq!(
            (sum.to_bits(), ln(sum).to_bits()),
            (0x403b_87b5_4ed6_df17, 0x400a_85b1_b0f2_a427)
        );
    }
}

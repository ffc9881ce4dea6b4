//! Inputs of a product as fixed-point numbers, for exact integer arithmetic.

/// Largest magnitude of [`encode_fixed24`]'s codes: what three signed bytes hold.
pub const FIXED24_LARGEST: i32 = 0x7f_7f_7f;

/// Keeps the largest code below [`FIXED24_LARGEST`]: a little more than its ratio to 2^23.
pub const FIXED24_MARGIN: f32 = 1.004;

/// Smallest exponent of a group's largest value; below it codes become small.
pub const FIXED24_LOWEST: i32 = -100;

/// Rounds a group of inputs to whole multiples of a power of two, which it returns; the
/// codes are below 2^23 in magnitude. An error is at most half the scale, which is less
/// than 2^-22.99 of the largest input (or 2^-123, if that is more): the group as a whole
/// keeps as many bits as one f32. If any input is not finite, the scale is NaN.
///
/// # Panics
/// `codes` has another length.
pub fn encode_fixed24(x: &[f32], codes: &mut [i32]) -> f32 {
    assert_eq!(x.len(), codes.len(), "a code for each input");
    let largest = x.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
    let (scale, inverse) = fixed24_scale(largest);
    for (&x, code) in x.iter().zip(codes) {
        *code = (x * inverse).round_ties_even() as i32;
    }
    if x.iter().all(|x| x.is_finite()) { scale } else { f32::NAN }
}

/// The scale of a group whose largest magnitude is `largest`, and its inverse.
#[inline(always)]
pub fn fixed24_scale(largest: f32) -> (f32, f32) {
    let exponent = ((largest * FIXED24_MARGIN).to_bits() >> 23) as i32 - 127;
    let exponent = exponent.max(FIXED24_LOWEST) - 22;
    let exp2 = |n: i32| f32::from_bits(((n + 127) as u32) << 23);
    (exp2(exponent), exp2(-exponent))
}

/// The signed bytes of a code, lowest first: `code = d[0] + 256 d[1] + 65536 d[2]`.
#[inline(always)]
pub fn digits(code: i32) -> [i8; 3] {
    let [a, b, c, _] = code.wrapping_add(0x80_80_80).to_le_bytes();
    [a, b, c].map(|byte| (byte ^ 0x80) as i8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_near_and_their_digits_are_they() {
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..2000 {
            let magnitude = f32::from_bits(rng.u32(0x0d80_0000..0x7f80_0000));
            let mut x: [f32; 32] = std::array::from_fn(|_| magnitude * (2.0 * rng.f32() - 1.0));
            x[rng.usize(..32)] = magnitude;
            let mut codes = [0; 32];
            let scale = encode_fixed24(&x, &mut codes);
            for (x, code) in x.into_iter().zip(codes) {
                assert!(code.abs() <= FIXED24_LARGEST);
                assert_eq!(code.signum() as f32, if code == 0 { 0.0 } else { x.signum() });
                let error = (f64::from(code) * f64::from(scale) - f64::from(x)).abs();
                assert!(
                    error <= f64::from(magnitude) * 2_f64.powf(-22.99),
                    "{x:e} of {magnitude:e}"
                );
                let [a, b, c] = digits(code).map(i32::from);
                assert_eq!(a + 256 * b + 65536 * c, code);
            }
        }
        for code in [0, 1, 127, 128, -128, -129, 32767, FIXED24_LARGEST, -FIXED24_LARGEST] {
            let [a, b, c] = digits(code).map(i32::from);
            assert_eq!(a + 256 * b + 65536 * c, code);
        }
    }

    #[test]
    fn whole_numbers_stay_and_edges_hold() {
        let mut codes = [0; 3];
        let scale = encode_fixed24(&[1.0, -3.0, 1000.0], &mut codes);
        assert_eq!(codes.map(|code| code as f32 * scale), [1.0, -3.0, 1000.0]);
        for x in [f32::MAX, -f32::MAX, 1.0, 0.9999999, 2.0 / FIXED24_MARGIN, 1e-30, 2.1e-30] {
            let mut code = [0];
            let scale = encode_fixed24(&[x], &mut code);
            assert!(code[0].abs() <= FIXED24_LARGEST && code[0] != 0, "{x:e}");
            let back = f64::from(code[0]) * f64::from(scale);
            assert!((back / f64::from(x) - 1.0).abs() < 1e-6, "{x:e} became {back:e}");
        }
        for x in [0.0, -0.0, 1e-45, 1e-38] {
            let mut code = [9];
            assert!(encode_fixed24(&[x], &mut code) > 0.0);
            assert_eq!(code, [0]);
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(encode_fixed24(&[1.0, x, 2.0], &mut codes).is_nan());
        }
    }
}

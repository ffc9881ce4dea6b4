//! One row in any format, with any choice of scales.

use super::{
    INT4_F16_GROUP, INT4_GROUP, MatrixFormat, encode_int4_group, encode_int8_with, scale_for,
    search,
};

/// Quantizes one row of `[cols]` weights to `codes: [code bytes]` and `scales: [scales]`, f32
/// values that the format's scale type holds. With `importance: [cols]` scales are searched
/// ([`search`]), without they follow from the largest magnitudes.
///
/// # Panics
/// The lengths do not fit each other, or the format is BF16.
pub fn encode_row(
    format: MatrixFormat,
    importance: Option<&[f32]>,
    row: &[f32],
    codes: &mut [u8],
    scales: &mut [f32],
) {
    assert_eq!(scales.len(), format.scales_per_row(row.len()), "scales of a row");
    assert_eq!(codes.len(), format.code_bytes_per_row(row.len()), "codes of a row");
    assert!(importance.is_none_or(|i| i.len() == row.len()), "one importance per weight");
    match format {
        MatrixFormat::Bf16 => panic!("BF16 is not quantized"),
        MatrixFormat::Int8Row => {
            let absmax = scale_for(largest(row), 127.0);
            scales[0] = importance.map_or(absmax, |i| search::int8(row, i, absmax));
            encode_int8_with(row, scales[0], bytemuck::cast_slice_mut(codes));
        }
        MatrixFormat::Int4G64 => {
            groups(INT4_GROUP, importance, row, codes, scales, |scale| scale);
        }
        MatrixFormat::Int4G32 => {
            groups(INT4_F16_GROUP, importance, row, codes, scales, stored_f16);
        }
    }
}

/// The f16 value that a scale is stored as: [`super::f16_scale`], with the sign, and without
/// leaving f32, since a search asks for it often.
#[inline(always)]
pub fn stored_f16(scale: f32) -> f32 {
    const STEP: f32 = 1.0 / 16_777_216.0; // of subnormal f16, and of f32 above 0.5
    let magnitude = scale.abs();
    // A normal f16 has 13 bits less in its fraction.
    let normal = f32::from_bits((magnitude.to_bits() + 0x1fff) & !0x1fff);
    let nearest = magnitude + 0.5 - 0.5;
    let subnormal = if nearest < magnitude { nearest + STEP } else { nearest };
    let above = if magnitude < 1024.0 * STEP { subnormal } else { normal };
    let above = if above < STEP { STEP } else { above };
    let above = if above < 65504.0 { above } else { 65504.0 };
    above.copysign(scale)
}

fn groups(
    group: usize,
    importance: Option<&[f32]>,
    row: &[f32],
    packed: &mut [u8],
    scales: &mut [f32],
    stored: impl Fn(f32) -> f32,
) {
    let each = row.chunks_exact(group).zip(packed.chunks_exact_mut(group / 2)).zip(scales);
    for (g, ((weights, packed), scale)) in each.enumerate() {
        let absmax = scale_for(largest(weights), 7.0);
        *scale = match importance {
            None => stored(absmax),
            Some(all) => search::int4(weights, &all[g * group..][..group], absmax, &stored),
        };
        encode_int4_group(weights, *scale, packed);
    }
}

fn largest(weights: &[f32]) -> f32 {
    weights.iter().fold(0.0, |max, w| max.max(w.abs()))
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;
    use crate::quant::{
        decode_int4_group, decode_int8, encode_int4, encode_int4_f16, encode_int8, f16_scale,
    };

    const FORMATS: [MatrixFormat; 3] =
        [MatrixFormat::Int8Row, MatrixFormat::Int4G64, MatrixFormat::Int4G32];

    /// The weights that `row` becomes.
    fn round_trip(format: MatrixFormat, importance: Option<&[f32]>, row: &[f32]) -> Vec<f32> {
        let mut codes = vec![0; format.code_bytes_per_row(row.len())];
        let mut scales = vec![0.0; format.scales_per_row(row.len())];
        encode_row(format, importance, row, &mut codes, &mut scales);
        let mut out = vec![0.0; row.len()];
        match format.group() {
            None => decode_int8(bytemuck::cast_slice(&codes), scales[0], &mut out),
            Some(group) => {
                for (g, scale) in scales.into_iter().enumerate() {
                    let packed = &codes[g * group / 2..][..group / 2];
                    decode_int4_group(packed, scale, &mut out[g * group..][..group]);
                }
            }
        }
        out
    }

    /// Errors of what shares a scale, weighed.
    fn errors(format: MatrixFormat, importance: &[f32], row: &[f32], found: &[f32]) -> Vec<f64> {
        let group = format.group().unwrap_or(row.len());
        let square =
            |i: usize| f64::from(importance[i]) * (f64::from(row[i]) - f64::from(found[i])).powi(2);
        (0..row.len() / group).map(|g| (g * group..(g + 1) * group).map(square).sum()).collect()
    }

    #[test]
    fn without_a_search_it_is_absmax() {
        let mut rng = fastrand::Rng::with_seed(2);
        let row: Vec<f32> = (0..256).map(|_| rng.f32() - 0.5).collect();
        let mut out = vec![0; 256];
        let mut codes = vec![0; 256];
        let mut scale = [0.0];
        encode_row(MatrixFormat::Int8Row, None, &row, &mut codes, &mut scale);
        assert_eq!(scale[0], encode_int8(&row, &mut out));
        assert_eq!(codes, bytemuck::cast_slice::<i8, u8>(&out));

        let (mut packed, mut expected) = (vec![0; 128], vec![0; 128]);
        let (mut scales, mut wanted) = ([0.0; 4], [0.0; 4]);
        encode_row(MatrixFormat::Int4G64, None, &row, &mut packed, &mut scales);
        encode_int4(&row, &mut expected, &mut wanted);
        assert_eq!((&packed, scales), (&expected, wanted));

        let (mut scales, mut wanted) = ([0.0; 8], [f16::ZERO; 8]);
        encode_row(MatrixFormat::Int4G32, None, &row, &mut packed, &mut scales);
        encode_int4_f16(&row, &mut expected, &mut wanted);
        assert_eq!((packed, scales), (expected, wanted.map(f16::to_f32)));
    }

    #[test]
    fn stored_scales_are_f16_scales() {
        for bits in 0..=f16::MAX.to_bits() {
            let scale = f16::from_bits(bits).to_f32();
            let between = scale + 0.3 * (f16::from_bits(bits + 1).to_f32().min(65520.0) - scale);
            for scale in [scale, scale.next_up(), scale.next_down(), between] {
                let expected = f16_scale(scale.abs()).to_f32();
                assert_eq!(stored_f16(scale), expected.copysign(scale), "{scale:e}");
                assert_eq!(stored_f16(-scale), expected.copysign(-scale), "{scale:e}");
            }
        }
        for scale in [65505.0, 1e30, f32::MAX, f32::INFINITY, 1e-40] {
            assert_eq!(stored_f16(scale), f16_scale(scale).to_f32(), "{scale:e}");
        }
        assert!(stored_f16(f32::NAN).abs() <= 65504.0, "whatever it is, it is finite");
    }

    #[test]
    fn a_normal_distribution_gains_a_quarter_at_int4() {
        let mut rng = fastrand::Rng::with_seed(3);
        // A sum of twelve is close to normal, with tails to 6.
        let mut normal = || (0..12).map(|_| rng.f32() - 0.5).sum::<f32>();
        let row: Vec<f32> = (0..1 << 14).map(|_| 0.02 * normal()).collect();
        let ones = vec![1.0; row.len()];
        let total = |format, importance| {
            errors(format, &ones, &row, &round_trip(format, importance, &row)).iter().sum::<f64>()
        };
        for (format, most) in [(MatrixFormat::Int4G64, 0.75), (MatrixFormat::Int4G32, 0.75)] {
            let part = total(format, Some(&ones)) / total(format, None);
            assert!(part < most, "{format:?}: {part}");
        }
        // At 8 bits a long row has little to gain: at least it loses nothing.
        assert!(total(MatrixFormat::Int8Row, Some(&ones)) <= total(MatrixFormat::Int8Row, None));
    }

    #[test]
    fn absurd_rows_keep_a_usable_scale() {
        for absurd in [0.0, 1e-40, 1e-30, 3e38, f32::NAN, f32::INFINITY] {
            for format in FORMATS {
                let mut row = vec![0.0; 64];
                row[3] = absurd;
                let (mut codes, mut scales) =
                    (vec![0; format.code_bytes_per_row(64)], vec![0.0; format.scales_per_row(64)]);
                encode_row(format, Some(&[1.0; 64]), &row, &mut codes, &mut scales);
                if absurd.is_finite() {
                    assert!(scales.iter().all(|s| s.is_finite() && *s != 0.0), "{absurd:e}");
                }
            }
        }
    }

    proptest! {
        /// In every group, whatever the weights and whatever counts.
        #[test]
        fn a_search_is_never_worse_than_absmax(
            weights in prop::collection::vec((-6f32..4.0, -1f32..1.0), 192),
            importance in prop::collection::vec(prop_oneof![Just(0f32), 1e-6f32..1e6], 192),
        ) {
            let row: Vec<f32> = weights.iter().map(|(e, x)| x * 10f32.powf(*e)).collect();
            for importance in [&importance[..], &[1.0; 192][..]] {
                for format in FORMATS {
                    let found = round_trip(format, Some(importance), &row);
                    let absmax = round_trip(format, None, &row);
                    let found = errors(format, importance, &row, &found);
                    let absmax = errors(format, importance, &row, &absmax);
                    for (found, absmax) in found.iter().zip(&absmax) {
                        prop_assert!(found <= absmax, "{format:?}: {found:e} above {absmax:e}");
                    }
                }
            }
        }
    }
}

use half::f16;
use k3_formats::quant;

use super::*;

/// With scales by absmax.
fn quantize(
    format: MatrixFormat,
    cols: usize,
    weights: &[bf16],
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<Statistics, Refused> {
    Quantizer { format, cols, importance: None }.run(weights, codes, scales)
}

fn bf16s(values: impl IntoIterator<Item = f32>) -> Vec<bf16> {
    values.into_iter().map(bf16::from_f32).collect()
}

/// Rows of many kinds: every magnitude, exact half steps, zeros, subnormals, extremes.
fn hard_rows(cols: usize) -> Vec<bf16> {
    let mut rng = fastrand::Rng::with_seed(7);
    let mut out = Vec::new();
    for exponent in (-133..127).step_by(4) {
        let unit = (f64::from(exponent)).exp2();
        out.extend(bf16s((0..cols).map(|_| ((rng.f64() - 0.5) * unit) as f32)));
    }
    for (absmax, levels) in [(127.0, 60), (7.0, 7)] {
        out.extend(bf16s((0..cols).map(|c| match c % 64 {
            0 => absmax,
            c => (c % levels) as f32 + 0.5 - levels as f32 / 2.0,
        })));
    }
    out.extend(bf16s((0..cols).map(|c| if c % 2 == 0 { f32::MAX / 1.01 } else { -1.0 })));
    out.extend(bf16s((0..cols).map(|c| if c == cols - 1 { 3e38 } else { 1e-3 })));
    out.extend(bf16s((0..cols).map(|c| if c % 3 == 0 { 1.27e-18 } else { 0.5e-20 })));
    out.extend(vec![bf16::ZERO; cols]);
    out.extend(vec![bf16::NEG_ZERO; cols]);
    // Every finite BF16 there is.
    let all = (0..=u16::MAX).map(bf16::from_bits).filter(|w| w.is_finite());
    let mut all: Vec<_> = all.collect();
    rng.shuffle(&mut all);
    all.truncate(all.len() / cols * cols);
    out.extend(all);
    out
}

#[test]
fn every_value_is_the_definitions() {
    for cols in [1, 17, 63, 64, 96, 192, 7168] {
        let weights = hard_rows(cols);
        let rows = weights.len() / cols;
        let mut wide = vec![0.0; cols];
        let (mut codes, mut scales) = (vec![0; rows * cols], vec![0.0; rows]);
        quantize(MatrixFormat::Int8Row, cols, &weights, &mut codes, &mut scales).unwrap();
        for r in 0..rows {
            quant::decode_bf16(&weights[r * cols..][..cols], &mut wide);
            let mut expected = vec![0; cols];
            let scale = quant::encode_int8(&wide, &mut expected);
            assert_eq!(scales[r].to_bits(), scale.to_bits(), "row {r} of {cols}");
            let expected: &[u8] = bytemuck::cast_slice(&expected);
            assert_eq!(&codes[r * cols..][..cols], expected, "row {r} of {cols}");
        }
        if cols % 64 != 0 {
            continue;
        }
        let groups = cols / 64;
        let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0.0; rows * groups]);
        quantize(MatrixFormat::Int4G64, cols, &weights, &mut codes, &mut scales).unwrap();
        for r in 0..rows {
            quant::decode_bf16(&weights[r * cols..][..cols], &mut wide);
            let (mut packed, mut expected) = (vec![0; cols / 2], vec![0.0; groups]);
            quant::encode_int4(&wide, &mut packed, &mut expected);
            let bits = |s: &[f32]| s.iter().map(|s| s.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&scales[r * groups..][..groups]), bits(&expected), "row {r}");
            assert_eq!(&codes[r * cols / 2..][..cols / 2], packed, "row {r} of {cols}");
        }
    }
}

#[test]
fn every_value_with_f16_scales_is_the_definitions() {
    for cols in [32, 96, 7168] {
        let mut weights = hard_rows(cols);
        let largest = bf16::from_f32(quant::INT4_F16_LARGEST / 1.01);
        for w in &mut weights {
            *w = bf16::from_f32(w.to_f32().clamp(-largest.to_f32(), largest.to_f32()));
        }
        let (rows, groups) = (weights.len() / cols, cols / 32);
        let (mut codes, mut scales) = (vec![0; rows * cols / 2], vec![0.0; rows * groups]);
        quantize(MatrixFormat::Int4G32, cols, &weights, &mut codes, &mut scales).unwrap();
        let mut wide = vec![0.0; cols];
        for r in 0..rows {
            quant::decode_bf16(&weights[r * cols..][..cols], &mut wide);
            let (mut packed, mut expected) = (vec![0; cols / 2], vec![f16::ZERO; groups]);
            quant::encode_int4_f16(&wide, &mut packed, &mut expected);
            let expected: Vec<f32> = expected.iter().map(|s| s.to_f32()).collect();
            assert_eq!(scales[r * groups..][..groups], expected, "row {r} of {cols}");
            assert_eq!(&codes[r * cols / 2..][..cols / 2], packed, "row {r} of {cols}");
        }
    }
}

#[test]
fn a_weight_beyond_f16_scales_is_named() {
    let cols = 64;
    let mut weights = vec![bf16::from_f32(4e5); 5 * cols];
    let (mut codes, mut scales) = (vec![0; 5 * cols / 2], vec![0.0; 5 * 2]);
    let format = MatrixFormat::Int4G32;
    assert!(quantize(format, cols, &weights, &mut codes, &mut scales).is_ok());
    weights[3 * cols + 50] = bf16::from_f32(-5e5);
    let found = quantize(format, cols, &weights, &mut codes, &mut scales);
    assert_eq!(found, Err(Refused { row: 3, col: 50, problem: Problem::TooLarge }));
}

#[test]
fn the_first_non_finite_weight_is_named() {
    let cols = 128;
    for format in [MatrixFormat::Int8Row, MatrixFormat::Int4G64, MatrixFormat::Int4G32] {
        let mut weights = vec![bf16::ONE; 3000 * cols];
        for (row, col, bad) in
            [(2999, 1, f32::NAN), (1700, 77, f32::INFINITY), (1700, 99, f32::NEG_INFINITY)]
        {
            weights[row * cols + col] = bf16::from_f32(bad);
        }
        let mut codes = vec![0; 3000 * format.code_bytes_per_row(cols)];
        let mut scales = vec![0.0; 3000 * format.scales_per_row(cols)];
        let found = quantize(format, cols, &weights, &mut codes, &mut scales);
        let problem = Problem::NotFinite;
        assert_eq!(found, Err(Refused { row: 1700, col: 77, problem }));
        assert_eq!(first_non_finite_bf16(&weights), Some(1700 * cols + 77));
        assert_eq!(first_non_finite_bf16(&weights[..1700 * cols]), None);
    }
}

#[test]
fn outliers_are_measured_against_the_rest_of_their_row() {
    let cols = 256;
    let mut weights = bf16s((0..4 * cols).map(|i| if i % 2 == 0 { 0.5 } else { -0.5 }));
    weights[cols + 9] = bf16::from_f32(64.0); // 128 times the rest
    weights[2 * cols + 9] = bf16::from_f32(-3e38);
    weights[3 * cols..].fill(bf16::ZERO);
    weights[3 * cols] = bf16::ONE; // alone in its row: nothing is lost
    for format in [MatrixFormat::Int8Row, MatrixFormat::Int4G64] {
        let mut codes = vec![0; 4 * format.code_bytes_per_row(cols)];
        let mut scales = vec![0.0; 4 * format.scales_per_row(cols)];
        let found = quantize(format, cols, &weights, &mut codes, &mut scales).unwrap();
        assert_eq!(found.outliers.rows, 2);
        let worst = found.outliers.worst.unwrap();
        assert_eq!(worst.row, 2);
        assert!((worst.ratio / 6e38 - 1.0).abs() < 0.01, "{worst:?}");
        let tame = &weights[..2 * cols];
        let half = codes.len() / 2;
        let scale_half = scales.len() / 2;
        let found = quantize(format, cols, tame, &mut codes[..half], &mut scales[..scale_half]);
        let worst = found.unwrap().outliers.worst.unwrap();
        assert_eq!((worst.row, worst.ratio), (1, 128.0));
    }
}

#[test]
fn rows_of_nothing_are_counted() {
    let (cols, rows) = (64, 5000);
    let mut weights = bf16s((0..rows * cols).map(|i| (i % 7) as f32));
    weights[1300 * cols..1301 * cols].fill(bf16::NEG_ZERO);
    weights[4000 * cols..4001 * cols].fill(bf16::from_bits(0x007f)); // subnormal
    weights[4001 * cols..4002 * cols].fill(bf16::ZERO);
    weights[4002 * cols..4003 * cols].fill(bf16::MIN_POSITIVE);
    for format in [MatrixFormat::Int8Row, MatrixFormat::Int4G64] {
        let mut codes = vec![0; rows * format.code_bytes_per_row(cols)];
        let mut scales = vec![0.0; rows * format.scales_per_row(cols)];
        let found = quantize(format, cols, &weights, &mut codes, &mut scales).unwrap();
        assert_eq!(found.empty, EmptyRows { rows: 3, first: Some(1300) });
    }
}

#[test]
fn searched_values_are_the_definitions_and_errors_are_measured() {
    let mut rng = fastrand::Rng::with_seed(8);
    for cols in [64, 192, 7168] {
        let mut weights = hard_rows(cols);
        for w in &mut weights {
            *w = bf16::from_f32(w.to_f32().clamp(-4e5, 4e5));
        }
        weights.extend(bf16s((0..5 * cols).map(|_| rng.f32() * rng.f32() - 0.25)));
        let rows = weights.len() / cols;
        let importance: Vec<f32> = (0..cols).map(|_| rng.f32() * rng.f32()).collect();
        for format in [MatrixFormat::Int8Row, MatrixFormat::Int4G64, MatrixFormat::Int4G32] {
            let (code_bytes, row_scales) =
                (format.code_bytes_per_row(cols), format.scales_per_row(cols));
            let (mut codes, mut scales) =
                (vec![0; rows * code_bytes], vec![0.0; rows * row_scales]);
            for importance in [None, Some(&importance[..])] {
                let quantizer = Quantizer { format, cols, importance };
                quantizer.run(&weights, &mut codes, &mut scales).unwrap();
                let (mut wide, mut expected) = (vec![0.0; cols], vec![0; code_bytes]);
                let mut wanted = vec![0.0; row_scales];
                for r in 0..rows {
                    quant::decode_bf16(&weights[r * cols..][..cols], &mut wide);
                    quant::encode_row(format, importance, &wide, &mut expected, &mut wanted);
                    assert_eq!(scales[r * row_scales..][..row_scales], wanted, "{format:?} {r}");
                    assert_eq!(&codes[r * code_bytes..][..code_bytes], expected, "{format:?} {r}");
                }
            }
            // The last rows have no extremes, so f64 sums can say what the error is.
            let last = &weights[(rows - 5) * cols..];
            let quantizer = Quantizer { format, cols, importance: None };
            let (codes, scales) = (&mut codes[..5 * code_bytes], &mut scales[..5 * row_scales]);
            let seen = quantizer.run(last, codes, scales).unwrap();
            let exact = |i: usize| f64::from(last[i].to_f32());
            let became = |i: usize| {
                let scale =
                    scales[i / cols * row_scales + i % cols / format.group().unwrap_or(cols)];
                let code = match format {
                    MatrixFormat::Int8Row => f32::from(codes[i] as i8),
                    _ => f32::from(codes[i / 2] >> (i % 2 * 4) & 15) - 8.0,
                };
                f64::from(code * scale)
            };
            let error: f64 = (0..last.len()).map(|i| (exact(i) - became(i)).powi(2)).sum();
            let energy: f64 = (0..last.len()).map(|i| exact(i).powi(2)).sum();
            let expected = (error / energy).sqrt();
            assert!((seen.relative_error() / expected - 1.0).abs() < 1e-4, "{format:?} {expected}");
        }
    }
    assert_eq!(Statistics::default().relative_error(), 0.0);
}

//! Every kernel of every set this CPU has against the scalar definition, bit for bit.

use half::{bf16, f16};
use k3_formats::mxfp4;
use k3_formats::quant::fixed::encode_fixed24;
use k3_formats::quant::{self, INT4_F16_GROUP, INT4_GROUP};

use super::*;
use crate::linear::{self, Product};
use crate::parallel::Pool;

/// A matrix that owns its bytes.
struct Owned {
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    bf16s: Vec<bf16>,
    codes: Vec<i8>,
    scales: Vec<f32>,
    f16_scales: Vec<f16>,
    format: Format,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Bf16,
    Int8,
    Int4,
    Int4F16,
    Mxfp4,
}

const FORMATS: [Format; 5] =
    [Format::Bf16, Format::Int8, Format::Int4, Format::Int4F16, Format::Mxfp4];

impl Format {
    fn group(self) -> usize {
        match self {
            Self::Bf16 | Self::Int8 => 1,
            Self::Int4 => INT4_GROUP,
            Self::Int4F16 => INT4_F16_GROUP,
            Self::Mxfp4 => mxfp4::GROUP,
        }
    }
}

impl Owned {
    /// Any bits a file may hold, but for scales and BF16 values, which stay in a range
    /// whose sums are finite; row 1 is zeros, row 2 subnormal.
    fn random(format: Format, rows: usize, cols: usize, rng: &mut fastrand::Rng) -> Self {
        let mut m = Self {
            rows,
            cols,
            bytes: vec![],
            bf16s: vec![],
            codes: vec![],
            scales: vec![],
            f16_scales: vec![],
            format,
        };
        let magnitude = |row: usize| match row % 16 {
            1 => 0.0,
            2 => 1e-39,
            3 => 1e30,
            _ => 0.01,
        };
        for row in 0..rows {
            let mut number = || magnitude(row) * (rng.f32() - 0.5);
            match format {
                Format::Bf16 => m.bf16s.extend((0..cols).map(|_| bf16::from_f32(number()))),
                Format::Int8 => m.scales.push(number()),
                Format::Int4 => m.scales.extend((0..cols / INT4_GROUP).map(|_| number())),
                Format::Int4F16 => {
                    // Of every kind that is finite: zero, subnormal, normal, the largest.
                    let scale = |_| match row % 16 {
                        1 => f16::ZERO,
                        2 => f16::from_bits(rng.u16(..0x400)),
                        3 => f16::MAX,
                        _ => f16::from_f32(0.01 * (rng.f32() - 0.5)),
                    };
                    m.f16_scales.extend((0..cols / INT4_F16_GROUP).map(scale));
                }
                Format::Mxfp4 => {}
            }
        }
        match format {
            Format::Bf16 => {}
            Format::Int8 => m.codes = (0..rows * cols).map(|_| rng.i8(..)).collect(),
            Format::Int4 | Format::Int4F16 => {
                m.bytes = (0..rows * cols / 2).map(|_| rng.u8(..)).collect()
            }
            Format::Mxfp4 => {
                m.bytes = (0..rows * cols / 2).map(|_| rng.u8(..)).collect();
                // Scales go after the packed bytes; 0 and 1 give subnormals.
                for row in 0..rows {
                    let scale = |rng: &mut fastrand::Rng| match row % 16 {
                        1 => 0,
                        2 => 1,
                        3 => rng.u8(200..220),
                        _ => rng.u8(112..124),
                    };
                    let scales: Vec<u8> = (0..cols / mxfp4::GROUP).map(|_| scale(rng)).collect();
                    m.bytes.extend(scales);
                }
            }
        }
        m
    }

    fn weights(&self) -> Weights<'_> {
        match self.format {
            Format::Bf16 => Weights::Bf16(&self.bf16s),
            Format::Int8 => Weights::Int8 { codes: &self.codes, scales: &self.scales },
            Format::Int4 => Weights::Int4 { packed: &self.bytes, scales: &self.scales },
            Format::Int4F16 => Weights::Int4F16 { packed: &self.bytes, scales: &self.f16_scales },
            Format::Mxfp4 => {
                let (packed, scales) = self.bytes.split_at(self.rows * self.cols / 2);
                Weights::Mxfp4 { packed, scales }
            }
        }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(self.rows, self.cols, self.weights()).unwrap()
    }
}

/// The sum of one lane step; fused as the set has it.
fn mul_add(fused: bool, a: f32, b: f32, c: f32) -> f32 {
    if fused { a.mul_add(b, c) } else { a * b + c }
}

fn add_lanes(mut lanes: [f32; 16]) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

/// One output by the definition of [`float`].
fn float_output(weights: Weights, row: usize, x: &[f32], fused: bool) -> f32 {
    let cols = x.len();
    let mut w = vec![0.0; cols];
    let mut factor = 1.0;
    match weights {
        Weights::Bf16(all) => quant::decode_bf16(&all[row * cols..][..cols], &mut w),
        Weights::Int8 { codes, scales } => {
            quant::decode_int8(&codes[row * cols..][..cols], 1.0, &mut w);
            factor = scales[row];
        }
        _ => panic!("nibbles take fixed-point inputs"),
    }
    let mut lanes = [0.0; 16];
    for c in 0..cols {
        lanes[c % 16] = mul_add(fused, w[c], x[c], lanes[c % 16]);
    }
    add_lanes(lanes) * factor
}

/// One output by the definition of [`fixed`].
fn fixed_output(weights: Weights, row: usize, x: &[f32], fused: bool, digits: usize) -> f32 {
    let cols = x.len();
    let mut codes = vec![0; cols];
    let round = |(x, codes): (&[f32], &mut [i32])| match digits {
        1 => {
            let mut bytes = vec![0; x.len()];
            let scale = quant::encode_int8(x, &mut bytes);
            codes.copy_from_slice(&bytes.into_iter().map(i32::from).collect::<Vec<_>>());
            scale
        }
        _ => encode_fixed24(x, codes),
    };
    let scales: Vec<f32> =
        x.chunks(INPUT_GROUP).zip(codes.chunks_mut(INPUT_GROUP)).map(round).collect();
    let mut lanes = [0.0; 16];
    let nibble = |packed: &[u8], c: usize| packed[(row * cols + c) / 2] >> (c % 2 * 4) & 15;
    let sum = |range: std::ops::Range<usize>, weight: &dyn Fn(usize) -> i32| -> f32 {
        range
            .filter(|&c| c < cols)
            .map(|c| weight(c).wrapping_mul(codes[c]))
            .fold(0, i32::wrapping_add) as f32
    };
    // What every eight columns add: their integer, and the scale of their weights.
    let mut add = |weight: &dyn Fn(usize) -> i32, scale: &dyn Fn(usize) -> f32| {
        for start in (0..cols).step_by(8) {
            let dot = sum(start..start + 8, weight) * scales[start / INPUT_GROUP];
            let lane = &mut lanes[start / 8 % 16];
            *lane = mul_add(fused, dot, scale(row * cols + start), *lane);
        }
    };
    match weights {
        Weights::Bf16(_) => return float_output(weights, row, x, fused),
        Weights::Int8 { codes: w, scales: row_scales } => {
            if digits > 1 {
                return float_output(weights, row, x, fused);
            }
            let weight = |c: usize| i32::from(w[row * cols + c]);
            for first in (0..cols).step_by(64) {
                for (l, lane) in lanes.iter_mut().enumerate() {
                    let start = first + 4 * l;
                    if start < cols {
                        let dot = sum(start..start + 4, &weight);
                        *lane = mul_add(fused, dot, scales[start / INPUT_GROUP], *lane);
                    }
                }
            }
            return add_lanes(lanes) * row_scales[row];
        }
        Weights::Int4 { packed, scales: w } => {
            add(&|c| i32::from(nibble(packed, c)) - 8, &|i| w[i / INT4_GROUP]);
        }
        Weights::Int4F16 { packed, scales: w } => {
            add(&|c| i32::from(nibble(packed, c)) - 8, &|i| w[i / INT4_F16_GROUP].to_f32());
        }
        Weights::Mxfp4 { packed, scales: w } => {
            let weight = |c: usize| (2.0 * mxfp4::E2M1[usize::from(nibble(packed, c))]) as i32;
            add(&weight, &|i| 0.5 * mxfp4::scale(w[i / mxfp4::GROUP]));
        }
    }
    add_lanes(lanes)
}

/// Inputs with a few values a real model never has.
fn inputs(tokens: usize, cols: usize, rng: &mut fastrand::Rng) -> Vec<f32> {
    (0..tokens * cols)
        .map(|i| match i % 97 {
            13 => 0.0,
            29 => 1e-40,
            71 => 3000.0,
            _ => rng.f32() - 0.5,
        })
        .collect()
}

fn multiply(
    kernels: Kernels,
    matrix: &Matrix,
    arithmetic: Arithmetic,
    x: &[f32],
    tokens: usize,
) -> Vec<f32> {
    let mut prepared = Activations::new();
    prepared.prepare(kernels, x, tokens, Forms::of(matrix, arithmetic));
    let mut out = vec![f32::NAN; tokens * matrix.rows()];
    kernels.matmul(matrix, arithmetic, &prepared, Columns::new(&mut out, tokens));
    out
}

fn assert_same_bits(found: &[f32], expected: &[f32], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (a, b)) in found.iter().zip(expected).enumerate() {
        // The payload and sign of a NaN are the CPU's business, and so is a zero's sign.
        let same = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan() || *a == 0.0 && *b == 0.0;
        assert!(same, "{what}: output {i} is {a:e}, expected {b:e}");
    }
}

/// Column counts around every step and block the kernels have, where the format allows.
fn widths(format: Format) -> Vec<usize> {
    [1, 5, 32, 63, 64, 96, 128, 160, 192, 500, 512, 544, 1056, 2048, 2112, 4256]
        .into_iter()
        .filter(|cols| cols % format.group() == 0)
        .collect()
}

#[test]
fn products_equal_the_definition() {
    let mut rng = fastrand::Rng::with_seed(3);
    for kernels in Kernels::available() {
        for format in FORMATS {
            for cols in widths(format) {
                let m = Owned::random(format, 19, cols, &mut rng);
                for arithmetic in [Arithmetic::Exact, Arithmetic::Act8] {
                    for tokens in [1, 2, 3, 4, 13, 33] {
                        let x = inputs(tokens, cols, &mut rng);
                        let out = multiply(kernels, &m.matrix(), arithmetic, &x, tokens);
                        let digits = if arithmetic == Arithmetic::Exact { 3 } else { 1 };
                        let expected: Vec<f32> = (0..tokens * m.rows)
                            .map(|i| {
                                let x = &x[i / m.rows * cols..][..cols];
                                fixed_output(m.weights(), i % m.rows, x, kernels.is_fused(), digits)
                            })
                            .collect();
                        let name = kernels.name();
                        let what = format!("{name} {format:?} {arithmetic:?} {tokens}x{cols}");
                        assert_same_bits(&out, &expected, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn neither_block_nor_row_split_nor_threads_change_a_bit() {
    let mut rng = fastrand::Rng::with_seed(4);
    let (rows, cols, tokens) = (300, 1088, 41);
    for kernels in Kernels::available() {
        for format in FORMATS {
            let m = Owned::random(format, rows, cols, &mut rng);
            let x = inputs(tokens, cols, &mut rng);
            for arithmetic in [Arithmetic::Exact, Arithmetic::Act8] {
                let all = multiply(kernels, &m.matrix(), arithmetic, &x, tokens);
                let what = format!("{} {format:?} {arithmetic:?}", kernels.name());
                for (t, x) in x.chunks(cols).enumerate() {
                    let one = multiply(kernels, &m.matrix(), arithmetic, x, 1);
                    assert_same_bits(&one, &all[t * rows..][..rows], &format!("{what} token {t}"));
                }
                let some = m.matrix().slice_rows(37..101);
                let out = multiply(kernels, &some, arithmetic, &x, tokens);
                for (out, all) in out.chunks(64).zip(all.chunks(rows)) {
                    assert_same_bits(out, &all[37..101], &format!("{what} row split"));
                }
                for threads in [1, 2, 5] {
                    let (mut a, mut b) = (vec![0.0; all.len()], vec![0.0; tokens * 64]);
                    let products = &mut [
                        Product::new(m.matrix(), &mut a, tokens),
                        Product::new(some, &mut b, tokens),
                    ];
                    Pool::new(threads).unwrap().install(|| {
                        let mut scratch = Activations::new();
                        linear::multiply(kernels, arithmetic, &x, tokens, products, &mut scratch);
                    });
                    assert_same_bits(&a, &all, &format!("{what} {threads} threads"));
                    assert_same_bits(&b, &out, &format!("{what} {threads} threads, second"));
                }
            }
        }
    }
}

#[test]
fn prepared_inputs_may_shrink_and_grow() {
    let mut rng = fastrand::Rng::with_seed(5);
    let kernels = Kernels::detect();
    let mut prepared = Activations::new();
    for (tokens, cols) in [(9, 1056), (1, 96), (4, 2112), (1, 4256), (2, 32)] {
        for format in [Format::Int8, Format::Mxfp4] {
            let m = Owned::random(format, 3, cols, &mut rng);
            let x = inputs(tokens, cols, &mut rng);
            for arithmetic in [Arithmetic::Exact, Arithmetic::Act8] {
                prepared.prepare(kernels, &x, tokens, Forms::of(&m.matrix(), arithmetic));
                let mut out = vec![0.0; tokens * 3];
                let columns = Columns::new(&mut out, tokens);
                kernels.matmul(&m.matrix(), arithmetic, &prepared, columns);
                let fresh = multiply(kernels, &m.matrix(), arithmetic, &x, tokens);
                assert_same_bits(&out, &fresh, "reused buffers");
            }
        }
    }
}

#[test]
fn every_scale_byte_keeps_its_meaning() {
    // One group, one weight 1.0 and one input 1.0, so the output is the scale.
    for kernels in Kernels::available() {
        for code in 0..=255_u8 {
            let (mut packed, mut x) = ([0; 16], [0.0; 32]);
            (packed[0], x[0]) = (2, 127.0 / 128.0);
            let weights = Weights::Mxfp4 { packed: &packed, scales: &[code] };
            let matrix = Matrix::new(1, 32, weights).unwrap();
            for arithmetic in [Arithmetic::Exact, Arithmetic::Act8] {
                let out = multiply(kernels, &matrix, arithmetic, &x, 1);
                let expected = [mxfp4::scale(code) * x[0]];
                let what = format!("{} {arithmetic:?} scale {code}", kernels.name());
                assert_same_bits(&out, &expected, &what);
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_so() {
    let mut rng = fastrand::Rng::with_seed(6);
    for kernels in Kernels::available() {
        for format in FORMATS {
            let m = Owned::random(format, 19, 320, &mut rng);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                for tokens in [1, 7] {
                    let mut x = inputs(tokens, 320, &mut rng);
                    x[320 * (tokens - 1) + 100] = bad;
                    let out = multiply(kernels, &m.matrix(), Arithmetic::Exact, &x, tokens);
                    let (good, last) = out.split_at(19 * (tokens - 1));
                    let what = format!("{} {format:?} {bad} {tokens}", kernels.name());
                    assert!(good.iter().all(|out| out.is_finite()), "{what}");
                    // A zero weight times infinity is no number either.
                    assert!(last.iter().all(|out| !out.is_finite()), "{what}");
                }
            }
        }
    }
}

#[test]
fn sets_are_found_by_name() {
    for kernels in Kernels::available() {
        assert_eq!(Kernels::by_name(kernels.name()).unwrap().name(), kernels.name());
    }
    let error = Kernels::by_name("abacus").unwrap_err();
    assert_eq!(error.to_string(), "no kernels called \"abacus\" on this CPU");
    assert!(error.hint_text().unwrap().ends_with("portable"));
}

//! Against `tests/fixtures/quant.safetensors`, which numpy made (`quant.py` beside it).

use proptest::prelude::*;
use safetensors::SafeTensors;

use super::*;

const FIXTURE: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/quant.safetensors"));

struct Fixture {
    rows: Vec<Vec<f32>>,
    int8: Vec<i8>,
    int8_scale: Vec<f32>,
    int4: Vec<u8>,
    int4_scale: Vec<f32>,
    int4_f16: Vec<u8>,
    int4_f16_scale: Vec<f16>,
}

fn fixture() -> Fixture {
    let file = SafeTensors::deserialize(FIXTURE).unwrap();
    let bytes = |name: &str| file.tensor(name).unwrap().data().to_vec();
    let f32s = |name: &str| {
        bytes(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect::<Vec<_>>()
    };
    let cols = file.tensor("rows").unwrap().shape()[1];
    let bits = bytes("rows");
    let values: Vec<bf16> =
        bits.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
    let rows = values
        .chunks(cols)
        .map(|row| {
            let mut out = vec![0.0; cols];
            decode_bf16(row, &mut out);
            out
        })
        .collect();
    Fixture {
        rows,
        int8: bytes("int8").iter().map(|&b| b as i8).collect(),
        int8_scale: f32s("int8_scale"),
        int4: bytes("int4"),
        int4_scale: f32s("int4_scale"),
        int4_f16: bytes("int4_f16"),
        int4_f16_scale: bytes("int4_f16_scale")
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| f16::from_le_bytes(*b))
            .collect(),
    }
}

#[test]
fn int8_equals_numpy_bit_for_bit() {
    let f = fixture();
    let cols = f.rows[0].len();
    for (r, row) in f.rows.iter().enumerate() {
        let mut codes = vec![0; cols];
        let scale = encode_int8(row, &mut codes);
        assert_eq!(scale.to_bits(), f.int8_scale[r].to_bits(), "scale of row {r}");
        assert_eq!(codes, f.int8[r * cols..][..cols], "codes of row {r}");
    }
}

#[test]
fn int4_equals_numpy_bit_for_bit() {
    let f = fixture();
    let cols = f.rows[0].len();
    let groups = cols / INT4_GROUP;
    for (r, row) in f.rows.iter().enumerate() {
        let (mut packed, mut scales) = (vec![0; cols / 2], vec![0.0; groups]);
        encode_int4(row, &mut packed, &mut scales);
        let expected = &f.int4_scale[r * groups..][..groups];
        assert!(scales.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "row {r}");
        assert_eq!(packed, f.int4[r * cols / 2..][..cols / 2], "codes of row {r}");
    }
}

#[test]
fn int4_with_f16_scales_equals_numpy_bit_for_bit() {
    let f = fixture();
    let cols = f.rows[0].len();
    let groups = cols / INT4_F16_GROUP;
    for (r, row) in f.rows.iter().enumerate() {
        let (mut packed, mut scales) = (vec![0; cols / 2], vec![f16::ZERO; groups]);
        encode_int4_f16(row, &mut packed, &mut scales);
        let expected = &f.int4_f16_scale[r * groups..][..groups];
        assert!(scales.iter().zip(expected).all(|(a, b)| a.to_bits() == b.to_bits()), "row {r}");
        assert_eq!(packed, f.int4_f16[r * cols / 2..][..cols / 2], "codes of row {r}");
    }
}

#[test]
fn f16_scales_are_never_below_never_zero_and_never_infinite() {
    let smallest = 2_f32.powi(-24);
    for (scale, expected) in [
        (0.0, smallest),
        (1e-30, smallest),
        (1.01 * smallest, 2.0 * smallest),
        (1000.5 * smallest, 1001.0 * smallest), // subnormal
        (1.0, 1.0),
        (1.0001, 1.0 + 2_f32.powi(-10)),
        (65504.0, 65504.0),
        (65505.0, 65504.0),
        (f32::INFINITY, 65504.0),
    ] {
        assert_eq!(f16_scale(scale).to_f32(), expected, "{scale:e}");
    }
    // Every f16 that is a scale stays itself, and what is a little more goes to the next.
    for bits in 1..f16::MAX.to_bits() {
        let scale = f16::from_bits(bits).to_f32();
        assert_eq!(f16_scale(scale).to_bits(), bits);
        assert_eq!(f16_scale(scale.next_up()).to_bits(), bits + 1);
    }
}

#[test]
fn tiny_groups_survive_and_huge_weights_are_found() {
    // A scale below 6.1e-5 is subnormal in f16: weights of such a group are not lost.
    let row: [f32; 32] = std::array::from_fn(|i| (i as f32 - 16.0) * 1e-6);
    let (mut packed, mut scales, mut out) = ([0; 16], [f16::ZERO], [0.0; 32]);
    encode_int4_f16(&row, &mut packed, &mut scales);
    assert!(!scales[0].is_normal());
    decode_int4_f16(&packed, &scales, &mut out);
    let half_a_step = 0.5001 * scales[0].to_f32();
    assert!(row.iter().zip(&out).all(|(w, q)| (w - q).abs() <= half_a_step), "{out:?}");

    let mut row = [1.0; 64];
    row[40] = -INT4_F16_LARGEST;
    assert_eq!(first_beyond_int4_f16(&row), None);
    let (mut packed, mut scales, mut out) = ([0; 32], [f16::ZERO; 2], [0.0; 64]);
    encode_int4_f16(&row, &mut packed, &mut scales);
    decode_int4_f16(&packed, &scales, &mut out);
    assert!((out[0] - 1.0).abs() < 1e-3, "{}", out[0]);
    assert_eq!(out[40], -INT4_F16_LARGEST);
    row[40] = -INT4_F16_LARGEST.next_up();
    assert_eq!(first_beyond_int4_f16(&row), Some(40));
}

#[test]
fn nibbles_are_offset_by_eight_and_the_even_column_is_low() {
    let mut out = [0.0; 4];
    decode_int4_group(&[0xf0, 0x98], 0.5, &mut out);
    assert_eq!(out, [-4.0, 3.5, 0.0, 0.5]);
    let mut packed = [0; 2];
    encode_int4_group(&out, 0.5, &mut packed);
    assert_eq!(packed, [0xf0, 0x98]);
}

#[test]
fn rows_without_whole_groups_fall_back_to_int8() {
    let format = |bits, cols| MatrixFormat::of_bits(bits).unwrap().in_whole_groups(cols);
    assert_eq!(format(4, 7168), MatrixFormat::Int4G64);
    assert_eq!(format(4, 7160), MatrixFormat::Int8Row);
    assert_eq!(format(8, 7168), MatrixFormat::Int8Row);
    assert_eq!(format(16, 7168), MatrixFormat::Bf16);
    let error = MatrixFormat::of_bits(5).unwrap_err();
    assert_eq!(error.to_string(), "expected 4, 8 or 16 bits, found 5");
    let int4 = MatrixFormat::Int4G64;
    assert_eq!((int4.code_bytes_per_row(7168), int4.scales_per_row(7168)), (3584, 112));
    // Half the columns, half the bytes of a scale: the same size.
    assert_eq!((int4.bytes_per_row(7168), MatrixFormat::Int4G32.bytes_per_row(7168)), (4032, 4032));
    assert_eq!(MatrixFormat::Int4G32.in_whole_groups(96), MatrixFormat::Int4G32);
    assert_eq!(MatrixFormat::Int4G32.in_whole_groups(80), MatrixFormat::Int8Row);
    for format in MatrixFormat::ALL {
        assert_eq!(MatrixFormat::from_name(format.name()), Some(format));
    }
}

#[test]
fn non_finite_weights_are_found_and_never_panic() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut row = [1.0; 64];
        assert_eq!(first_non_finite(&row), None);
        row[5] = bad;
        assert_eq!(first_non_finite(&row), Some(5));
        encode_int8(&row, &mut [0; 64]);
        encode_int4(&row, &mut [0; 32], &mut [0.0; 1]);
        encode_int4_f16(&row, &mut [0; 32], &mut [f16::ZERO; 2]);
    }
}

proptest! {
    /// A round trip is off by at most half a step, a little more for the rounding of the
    /// inverse scale.
    #[test]
    fn a_round_trip_stays_within_half_a_step(row in prop::collection::vec(-1e4f32..1e4, 64)) {
        let (mut codes, mut out) = ([0; 64], [0.0; 64]);
        let scale = encode_int8(&row, &mut codes);
        decode_int8(&codes, scale, &mut out);
        for (w, q) in row.iter().zip(&out) {
            prop_assert!((w - q).abs() <= 0.5001 * scale, "{w} became {q} at scale {scale}");
        }
        let (mut packed, mut scales) = ([0; 32], [0.0]);
        encode_int4(&row, &mut packed, &mut scales);
        decode_int4(&packed, &scales, &mut out);
        for (w, q) in row.iter().zip(&out) {
            prop_assert!((w - q).abs() <= 0.5001 * scales[0], "{w} became {q} at {scales:?}");
        }
        let mut scales = [f16::ZERO; 2];
        encode_int4_f16(&row, &mut packed, &mut scales);
        decode_int4_f16(&packed, &scales, &mut out);
        for (i, (w, q)) in row.iter().zip(&out).enumerate() {
            let step = scales[i / 32].to_f32();
            prop_assert!((w - q).abs() <= 0.5001 * step, "{w} became {q} at {step}");
        }
    }
}

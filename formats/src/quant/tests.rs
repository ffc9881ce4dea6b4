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
    let format = |bits, cols| MatrixFormat::for_bits(bits, cols).unwrap();
    assert_eq!(format(4, 7168), MatrixFormat::Int4G64);
    assert_eq!(format(4, 7160), MatrixFormat::Int8Row);
    assert_eq!(format(8, 7168), MatrixFormat::Int8Row);
    assert_eq!(format(16, 7168), MatrixFormat::Bf16);
    let error = MatrixFormat::for_bits(5, 64).unwrap_err();
    assert_eq!(error.to_string(), "expected 4, 8 or 16 bits, found 5");
    let int4 = MatrixFormat::Int4G64;
    assert_eq!((int4.code_bytes_per_row(7168), int4.scales_per_row(7168)), (3584, 112));
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
    }
}

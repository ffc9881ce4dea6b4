//! Number formats of the dense matrices: BF16 as released, int8 with one scale per
//! row, int4 with one f32 scale per group of 64 columns or one f16 scale per 32.
//!
//! This is the definition; every fast kernel is tested against it. All arithmetic is
//! f32, rounding is half to even, and a weight's value is `code * scale`. Functions
//! work on one row or one group, so a caller may spread rows over threads.

use half::{bf16, f16};
use safetensors::Dtype;

use crate::{Error, Result};

pub mod fixed;
mod row;
pub mod search;

pub use row::{encode_row, stored_f16};
pub use search::Scales;

/// Columns that share one f32 scale in [`MatrixFormat::Int4G64`].
pub const INT4_GROUP: usize = 64;

/// Columns that share one f16 scale in [`MatrixFormat::Int4G32`].
pub const INT4_F16_GROUP: usize = 32;

/// Largest magnitude that [`MatrixFormat::Int4G32`] can hold: 7 times the largest f16.
pub const INT4_F16_LARGEST: f32 = 7.0 * 65504.0;

/// Smallest scale, so that an all-zero row has a finite inverse.
const MIN_SCALE: f32 = 1e-20;

/// How the container stores one `[rows, cols]` matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatrixFormat {
    /// As released: two bytes per weight, no scales.
    Bf16,
    /// One signed byte per weight, one f32 scale per row.
    Int8Row,
    /// Two weights per byte, one f32 scale per [`INT4_GROUP`] columns.
    Int4G64,
    /// Two weights per byte, one f16 scale per [`INT4_F16_GROUP`] columns: as many bytes
    /// as [`MatrixFormat::Int4G64`] and half as many weights that share an outlier.
    Int4G32,
}

impl MatrixFormat {
    /// All of them, from most to fewest bytes.
    pub const ALL: [Self; 4] = [Self::Bf16, Self::Int8Row, Self::Int4G64, Self::Int4G32];

    /// The format that `bits` (4, 8 or 16) asks for.
    ///
    /// # Errors
    /// `bits` is none of 4, 8 and 16.
    pub fn of_bits(bits: u32) -> Result<Self> {
        match bits {
            4 => Ok(Self::Int4G64),
            8 => Ok(Self::Int8Row),
            16 => Ok(Self::Bf16),
            _ => Err(Error::unsupported(format!("expected 4, 8 or 16 bits, found {bits}"))),
        }
    }

    /// This format, or int8 where a row of `cols` columns does not divide into its groups.
    #[must_use]
    pub fn in_whole_groups(self, cols: usize) -> Self {
        match self.group() {
            Some(group) if !cols.is_multiple_of(group) => Self::Int8Row,
            _ => self,
        }
    }

    /// Columns that share a scale, where that is less than the row.
    pub fn group(self) -> Option<usize> {
        match self {
            Self::Bf16 | Self::Int8Row => None,
            Self::Int4G64 => Some(INT4_GROUP),
            Self::Int4G32 => Some(INT4_F16_GROUP),
        }
    }

    /// Short name for tables and manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Int8Row => "int8-row",
            Self::Int4G64 => "int4-g64",
            Self::Int4G32 => "int4-g32",
        }
    }

    /// The format with this [`MatrixFormat::name`].
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    /// Bytes of codes in one row of `cols` columns, scales not counted.
    pub fn code_bytes_per_row(self, cols: usize) -> usize {
        match self {
            Self::Bf16 => cols * 2,
            Self::Int8Row => cols,
            Self::Int4G64 | Self::Int4G32 => cols / 2,
        }
    }

    /// Scales that belong to one row of `cols` columns.
    pub fn scales_per_row(self, cols: usize) -> usize {
        match (self, self.group()) {
            (_, Some(group)) => cols / group,
            (Self::Bf16, None) => 0,
            (_, None) => 1,
        }
    }

    /// Type of the scales.
    pub fn scale_dtype(self) -> Dtype {
        match self {
            Self::Int4G32 => Dtype::F16,
            _ => Dtype::F32,
        }
    }

    /// Bytes of scales in one row of `cols` columns.
    pub fn scale_bytes_per_row(self, cols: usize) -> usize {
        self.scales_per_row(cols) * (self.scale_dtype().bitsize() / 8)
    }

    /// Bytes of codes and scales in one row of `cols` columns.
    pub fn bytes_per_row(self, cols: usize) -> usize {
        self.code_bytes_per_row(cols) + self.scale_bytes_per_row(cols)
    }
}

/// Column of the first NaN or infinity in `row: [cols]`. Quantizing such a row never
/// panics, but its codes mean nothing, so ask first.
pub fn first_non_finite(row: &[f32]) -> Option<usize> {
    row.iter().position(|w| !w.is_finite())
}

/// Widens `row: [cols]` from BF16 to f32, exactly.
///
/// # Panics
/// The lengths differ.
pub fn decode_bf16(row: &[bf16], out: &mut [f32]) {
    assert_eq!(row.len(), out.len(), "one f32 per BF16 value");
    for (out, w) in out.iter_mut().zip(row) {
        *out = w.to_f32();
    }
}

/// Quantizes one row of `[cols]` weights to `codes: [cols]` in -127..=127 and returns
/// its scale, `max(absmax / 127, 1e-20)`; a code is `w * (1 / scale)` rounded.
///
/// # Panics
/// The lengths differ.
pub fn encode_int8(row: &[f32], codes: &mut [i8]) -> f32 {
    let scale = scale_of(row, 127.0);
    encode_int8_with(row, scale, codes);
    scale
}

/// As [`encode_int8`], with a scale already chosen.
///
/// # Panics
/// The lengths differ.
pub fn encode_int8_with(row: &[f32], scale: f32, codes: &mut [i8]) {
    assert_eq!(row.len(), codes.len(), "one code per weight");
    let inverse = 1.0 / scale;
    for (code, w) in codes.iter_mut().zip(row) {
        *code = (w * inverse).round_ties_even().clamp(-127.0, 127.0) as i8;
    }
}

/// Inverse of [`encode_int8`]: `out[c] = codes[c] * scale`.
///
/// # Panics
/// The lengths differ.
pub fn decode_int8(codes: &[i8], scale: f32, out: &mut [f32]) {
    assert_eq!(codes.len(), out.len(), "one weight per code");
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = f32::from(code) * scale;
    }
}

/// The int4 scale of one group of weights: `max(absmax / 7, 1e-20)`.
pub fn int4_scale(group: &[f32]) -> f32 {
    scale_of(group, 7.0)
}

/// Quantizes one group of weights with a scale already chosen, so that the group's size
/// and the type its scale is stored in are the caller's. A code is `w * (1 / scale)`
/// rounded and clamped to -8..=7, stored as code + 8, the even column in the low nibble.
///
/// # Panics
/// `packed` is not half as long as `group`.
pub fn encode_int4_group(group: &[f32], scale: f32, packed: &mut [u8]) {
    assert_eq!(group.len(), 2 * packed.len(), "two weights per byte");
    let inverse = 1.0 / scale;
    let nibble = |w: f32| ((w * inverse).round_ties_even().clamp(-8.0, 7.0) as i8 + 8) as u8;
    for (byte, pair) in packed.iter_mut().zip(group.as_chunks::<2>().0) {
        *byte = nibble(pair[0]) | nibble(pair[1]) << 4;
    }
}

/// Inverse of [`encode_int4_group`]: `out[c] = (nibble - 8) * scale`.
///
/// # Panics
/// `packed` is not half as long as `out`.
pub fn decode_int4_group(packed: &[u8], scale: f32, out: &mut [f32]) {
    assert_eq!(out.len(), 2 * packed.len(), "two weights per byte");
    for (pair, &byte) in out.as_chunks_mut::<2>().0.iter_mut().zip(packed) {
        *pair = [byte & 15, byte >> 4].map(|nibble| (f32::from(nibble) - 8.0) * scale);
    }
}

/// Quantizes one row of `[cols]` weights in groups of [`INT4_GROUP`]:
/// `packed: [cols / 2]`, `scales: [cols / 64]`.
///
/// # Panics
/// The lengths do not fit each other, or the row does not divide into whole groups.
pub fn encode_int4(row: &[f32], packed: &mut [u8], scales: &mut [f32]) {
    assert_eq!(row.len(), INT4_GROUP * scales.len(), "one scale per 64 weights");
    assert_eq!(row.len(), 2 * packed.len(), "two weights per byte");
    let groups = row.chunks_exact(INT4_GROUP).zip(packed.chunks_exact_mut(INT4_GROUP / 2));
    for ((group, packed), scale) in groups.zip(scales) {
        *scale = int4_scale(group);
        encode_int4_group(group, *scale, packed);
    }
}

/// Quantizes one row of `[cols]` weights in groups of [`INT4_F16_GROUP`], each with the
/// scale [`f16_scale`]`(absmax / 7)`: `packed: [cols / 2]`, `scales: [cols / 32]`.
/// Weights above [`INT4_F16_LARGEST`] are clamped to it; ask for them first.
///
/// # Panics
/// The lengths do not fit each other, or the row does not divide into whole groups.
pub fn encode_int4_f16(row: &[f32], packed: &mut [u8], scales: &mut [f16]) {
    assert_eq!(row.len(), INT4_F16_GROUP * scales.len(), "one scale per 32 weights");
    assert_eq!(row.len(), 2 * packed.len(), "two weights per byte");
    let groups = row.chunks_exact(INT4_F16_GROUP).zip(packed.chunks_exact_mut(INT4_F16_GROUP / 2));
    for ((group, packed), scale) in groups.zip(scales) {
        *scale = f16_scale(int4_scale(group));
        encode_int4_group(group, scale.to_f32(), packed);
    }
}

/// Inverse of [`encode_int4_f16`]. Subnormal scales keep their value.
///
/// # Panics
/// The lengths do not fit each other.
pub fn decode_int4_f16(packed: &[u8], scales: &[f16], out: &mut [f32]) {
    assert_eq!(out.len(), INT4_F16_GROUP * scales.len(), "one scale per 32 weights");
    assert_eq!(out.len(), 2 * packed.len(), "two weights per byte");
    let groups = packed.chunks_exact(INT4_F16_GROUP / 2).zip(out.chunks_exact_mut(INT4_F16_GROUP));
    for ((packed, out), scale) in groups.zip(scales) {
        decode_int4_group(packed, scale.to_f32(), out);
    }
}

/// The smallest f16 that is not below `scale`, so that no weight is clipped, and never
/// zero: at least 2^-24, the smallest subnormal. At most the largest finite f16.
#[inline]
pub fn f16_scale(scale: f32) -> f16 {
    let nearest = f16::from_f32(scale);
    let above = if nearest.to_f32() < scale { nearest.to_bits() + 1 } else { nearest.to_bits() };
    f16::from_bits(above.clamp(1, f16::MAX.to_bits()))
}

/// Column of the first weight in `row: [cols]` that [`MatrixFormat::Int4G32`] cannot hold.
pub fn first_beyond_int4_f16(row: &[f32]) -> Option<usize> {
    row.iter().position(|w| w.abs() > INT4_F16_LARGEST)
}

/// Inverse of [`encode_int4`].
///
/// # Panics
/// The lengths do not fit each other.
pub fn decode_int4(packed: &[u8], scales: &[f32], out: &mut [f32]) {
    assert_eq!(out.len(), INT4_GROUP * scales.len(), "one scale per 64 weights");
    assert_eq!(out.len(), 2 * packed.len(), "two weights per byte");
    let groups = packed.chunks_exact(INT4_GROUP / 2).zip(out.chunks_exact_mut(INT4_GROUP));
    for ((packed, out), &scale) in groups.zip(scales) {
        decode_int4_group(packed, scale, out);
    }
}

fn scale_of(weights: &[f32], levels: f32) -> f32 {
    scale_for(weights.iter().fold(0.0_f32, |max, w| max.max(w.abs())), levels)
}

/// The scale that maps `absmax` to the code `levels` (127 or 7): `max(absmax / levels, 1e-20)`.
#[inline]
pub fn scale_for(absmax: f32, levels: f32) -> f32 {
    (absmax / levels).max(MIN_SCALE)
}

#[cfg(test)]
mod tests;

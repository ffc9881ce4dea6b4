//! A weight matrix as the kernels see it: borrowed bytes of one of five formats.

use std::ops::Range;

use half::{bf16, f16};
use k3_formats::quant::{INT4_F16_GROUP, INT4_GROUP, MatrixFormat};
use k3_formats::{Error, Result, mxfp4, quant};

/// The weights of a matrix, row after row; formats as in [`k3_formats::quant`] and
/// [`k3_formats::mxfp4`].
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// `[rows, cols]`.
    Bf16(&'a [bf16]),
    /// Codes `[rows, cols]`, scales `[rows]`.
    Int8 { codes: &'a [i8], scales: &'a [f32] },
    /// Packed `[rows, cols / 2]`, scales `[rows, cols / 64]`.
    Int4 { packed: &'a [u8], scales: &'a [f32] },
    /// Packed `[rows, cols / 2]`, scales `[rows, cols / 32]`.
    Int4F16 { packed: &'a [u8], scales: &'a [f16] },
    /// Packed `[rows, cols / 2]`, scales `[rows, cols / 32]`.
    Mxfp4 { packed: &'a [u8], scales: &'a [u8] },
}

/// A matrix `[rows, cols]` that maps `cols` inputs to `rows` outputs; lengths are checked
/// once, here.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    rows: usize,
    cols: usize,
    weights: Weights<'a>,
}

impl<'a> Matrix<'a> {
    /// Checks that `weights` hold exactly `[rows, cols]`.
    ///
    /// # Errors
    /// A slice has another length, or `cols` does not divide into the format's groups.
    pub fn new(rows: usize, cols: usize, weights: Weights<'a>) -> Result<Self> {
        let group = match weights {
            Weights::Bf16(_) | Weights::Int8 { .. } => 1,
            Weights::Int4 { .. } => INT4_GROUP,
            Weights::Int4F16 { .. } => INT4_F16_GROUP,
            Weights::Mxfp4 { .. } => mxfp4::GROUP,
        };
        if cols == 0 || !cols.is_multiple_of(group) {
            let problem = format!("expected whole groups of {group} columns, found {cols} columns");
            return Err(Error::mismatch(problem));
        }
        let check = |what: &str, per_row: usize, found: usize| match rows.checked_mul(per_row) {
            Some(expected) if expected == found => Ok(()),
            _ => Err(Error::mismatch(format!(
                "expected {rows} rows of {per_row} {what}, found {found} {what}"
            ))),
        };
        match weights {
            Weights::Bf16(w) => check("weights", cols, w.len())?,
            Weights::Int8 { codes, scales } => {
                check("codes", cols, codes.len())?;
                check("scales", 1, scales.len())?;
            }
            Weights::Int4 { packed, scales } => {
                check("packed bytes", cols / 2, packed.len())?;
                check("scales", cols / INT4_GROUP, scales.len())?;
            }
            Weights::Int4F16 { packed, scales } => {
                check("packed bytes", cols / 2, packed.len())?;
                check("scales", cols / INT4_F16_GROUP, scales.len())?;
            }
            Weights::Mxfp4 { packed, scales } => {
                check("packed bytes", cols / 2, packed.len())?;
                check("scales", cols / mxfp4::GROUP, scales.len())?;
            }
        }
        Ok(Self { rows, cols, weights })
    }

    /// A view of bytes as they lie in the container: `codes` in `format`, `scales` its
    /// sidecar (empty for BF16).
    ///
    /// # Errors
    /// As [`Matrix::new`]; also when one of them is not aligned for its element type.
    pub fn from_bytes(
        format: MatrixFormat,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [u8],
    ) -> Result<Self> {
        let weights = match format {
            MatrixFormat::Bf16 => {
                let weights = aligned(codes, "BF16 values")?;
                if !scales.is_empty() {
                    let problem = format!("expected no scales in bf16, found {}", scales.len());
                    return Err(Error::mismatch(problem));
                }
                Weights::Bf16(weights)
            }
            MatrixFormat::Int8Row => Weights::Int8 {
                codes: bytemuck::cast_slice(codes),
                scales: aligned(scales, "f32 scales")?,
            },
            MatrixFormat::Int4G64 => {
                Weights::Int4 { packed: codes, scales: aligned(scales, "f32 scales")? }
            }
            MatrixFormat::Int4G32 => {
                Weights::Int4F16 { packed: codes, scales: aligned(scales, "f16 scales")? }
            }
        };
        Self::new(rows, cols, weights)
    }

    /// Number of outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The weights.
    pub fn weights(&self) -> Weights<'a> {
        self.weights
    }

    /// Bytes of codes and scales in one row: what a product reads for each output.
    pub fn bytes_per_row(&self) -> usize {
        match self.weights {
            Weights::Bf16(_) => self.cols * 2,
            Weights::Int8 { .. } => self.cols + 4,
            Weights::Int4 { .. } => self.cols / 2 + self.cols / INT4_GROUP * 4,
            Weights::Int4F16 { .. } => self.cols / 2 + self.cols / INT4_F16_GROUP * 2,
            Weights::Mxfp4 { .. } => self.cols / 2 + self.cols / mxfp4::GROUP,
        }
    }

    /// Row `row` as f32, `out: [cols]`.
    ///
    /// # Panics
    /// There is no such row, or `out` has another length.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "one value per column");
        match self.slice_rows(row..row + 1).weights {
            Weights::Bf16(w) => quant::decode_bf16(w, out),
            Weights::Int8 { codes, scales } => quant::decode_int8(codes, scales[0], out),
            Weights::Int4 { packed, scales } => quant::decode_int4(packed, scales, out),
            Weights::Int4F16 { packed, scales } => quant::decode_int4_f16(packed, scales, out),
            Weights::Mxfp4 { packed, scales } => mxfp4::decode_row(packed, scales, out),
        }
    }

    /// The matrix made of some of the rows, for instance one head's.
    ///
    /// # Panics
    /// The range reaches past the last row.
    #[must_use]
    pub fn slice_rows(&self, rows: Range<usize>) -> Self {
        fn cut<'t, T>(all: &'t [T], per_row: usize, rows: &Range<usize>) -> &'t [T] {
            &all[rows.start * per_row..rows.end * per_row]
        }
        let cols = self.cols;
        let weights = match self.weights {
            Weights::Bf16(w) => Weights::Bf16(cut(w, cols, &rows)),
            Weights::Int8 { codes, scales } => {
                Weights::Int8 { codes: cut(codes, cols, &rows), scales: cut(scales, 1, &rows) }
            }
            Weights::Int4 { packed, scales } => Weights::Int4 {
                packed: cut(packed, cols / 2, &rows),
                scales: cut(scales, cols / INT4_GROUP, &rows),
            },
            Weights::Int4F16 { packed, scales } => Weights::Int4F16 {
                packed: cut(packed, cols / 2, &rows),
                scales: cut(scales, cols / INT4_F16_GROUP, &rows),
            },
            Weights::Mxfp4 { packed, scales } => Weights::Mxfp4 {
                packed: cut(packed, cols / 2, &rows),
                scales: cut(scales, cols / mxfp4::GROUP, &rows),
            },
        };
        Self { rows: rows.len(), cols, weights }
    }
}

fn aligned<'a, T: bytemuck::AnyBitPattern>(bytes: &'a [u8], what: &str) -> Result<&'a [T]> {
    bytemuck::try_cast_slice(bytes)
        .map_err(|problem| Error::malformed(format!("expected aligned {what}: {problem}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_checked() {
        let message = |m: Result<Matrix>| m.unwrap_err().to_string();
        assert_eq!(
            message(Matrix::new(2, 64, Weights::Int8 { codes: &[0; 127], scales: &[0.0; 2] })),
            "expected 2 rows of 64 codes, found 127 codes"
        );
        assert_eq!(
            message(Matrix::new(2, 64, Weights::Int4 { packed: &[0; 64], scales: &[0.0; 1] })),
            "expected 2 rows of 1 scales, found 1 scales"
        );
        assert_eq!(
            message(Matrix::new(1, 32, Weights::Int4 { packed: &[0; 16], scales: &[] })),
            "expected whole groups of 64 columns, found 32 columns"
        );
        assert_eq!(
            message(Matrix::new(usize::MAX, 64, Weights::Bf16(&[]))),
            format!("expected {} rows of 64 weights, found 0 weights", usize::MAX)
        );
        let bytes = [0_u8; 9];
        let odd = 1 - bytes.as_ptr().addr() % 2;
        let odd = &bytes[odd..][..8];
        assert!(message(Matrix::from_bytes(MatrixFormat::Bf16, 1, 4, odd, &[])).contains("align"));
    }

    #[test]
    fn rows_can_be_cut_out() {
        let codes: Vec<u8> = (0..5 * 32).collect();
        let scales: Vec<f32> = (0..5).map(|s| s as f32).collect();
        let scales = bytemuck::cast_slice(&scales);
        let matrix = Matrix::from_bytes(MatrixFormat::Int4G64, 5, 64, &codes, scales).unwrap();
        let cut = matrix.slice_rows(1..4);
        assert_eq!((cut.rows(), cut.cols(), cut.bytes_per_row()), (3, 64, 36));
        let Weights::Int4 { packed, scales } = cut.weights() else { panic!("still int4") };
        assert_eq!((packed, scales), (&codes[32..128], &[1.0, 2.0, 3.0][..]));
    }
}

//! Copies of a matrix, so that a small one is read from memory and not from a cache.

use half::{bf16, f16};

use crate::kernels::{Matrix, Weights};

/// Bytes that are read before any of them is read again: far more than a cache holds.
const ENOUGH: usize = 256 << 20;

/// The weights of a matrix with memory of their own.
enum Owned {
    Bf16(Vec<bf16>),
    Int8(Vec<i8>, Vec<f32>),
    Int4(Vec<u8>, Vec<f32>),
    Int4F16(Vec<u8>, Vec<f16>),
    Mxfp4(Vec<u8>, Vec<u8>),
}

/// A matrix with memory of its own.
pub(super) struct MatrixCopy {
    rows: usize,
    cols: usize,
    weights: Owned,
}

impl MatrixCopy {
    /// As many copies of `matrices` in turn as make [`ENOUGH`] together with them.
    pub(super) fn enough(matrices: &[Matrix]) -> Vec<Self> {
        let bytes = |matrix: &Matrix| matrix.rows() * matrix.bytes_per_row();
        let mut total: usize = matrices.iter().map(bytes).sum();
        let mut copies = Vec::new();
        for matrix in matrices.iter().cycle() {
            if total >= ENOUGH {
                break;
            }
            total += bytes(matrix);
            copies.push(Self::new(matrix));
        }
        copies
    }

    fn new(matrix: &Matrix) -> Self {
        let weights = match matrix.weights() {
            Weights::Bf16(weights) => Owned::Bf16(weights.to_vec()),
            Weights::Int8 { codes, scales } => Owned::Int8(codes.to_vec(), scales.to_vec()),
            Weights::Int4 { packed, scales } => Owned::Int4(packed.to_vec(), scales.to_vec()),
            Weights::Int4F16 { packed, scales } => Owned::Int4F16(packed.to_vec(), scales.to_vec()),
            Weights::Mxfp4 { packed, scales } => Owned::Mxfp4(packed.to_vec(), scales.to_vec()),
        };
        Self { rows: matrix.rows(), cols: matrix.cols(), weights }
    }

    pub(super) fn matrix(&self) -> Matrix<'_> {
        let weights = match &self.weights {
            Owned::Bf16(weights) => Weights::Bf16(weights),
            Owned::Int8(codes, scales) => Weights::Int8 { codes, scales },
            Owned::Int4(packed, scales) => Weights::Int4 { packed, scales },
            Owned::Int4F16(packed, scales) => Weights::Int4F16 { packed, scales },
            Owned::Mxfp4(packed, scales) => Weights::Mxfp4 { packed, scales },
        };
        Matrix::new(self.rows, self.cols, weights).expect("lengths of a matrix that was checked")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_fill_up_and_keep_the_weights() {
        let (packed, scales) = (vec![7; 48 << 20], vec![120; 3 << 20]);
        let weights = Weights::Mxfp4 { packed: &packed, scales: &scales };
        let matrix = Matrix::new(3 << 13, 4096, weights).unwrap();
        let copies = MatrixCopy::enough(&[matrix]);
        assert_eq!(copies.len(), 5);
        let copy = copies[4].matrix();
        let Weights::Mxfp4 { packed, scales } = copy.weights() else { panic!("still mxfp4") };
        assert_eq!((packed[5], scales[5], copy.rows(), copy.cols()), (7, 120, 3 << 13, 4096));
        assert!(MatrixCopy::enough(&[matrix; 6]).is_empty());
        assert!(MatrixCopy::enough(&[]).is_empty());
    }
}

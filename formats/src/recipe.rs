//! Which number format each family of matrices is stored in.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::quant::MatrixFormat;
use crate::tensor_name::{TensorClass, TensorSpec};

/// Bits per weight by family: 4, 8 or 16 (16 keeps BF16 as it is).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recipe {
    /// KDA, latent, shared and dense matrices.
    pub bits: u32,
    /// MLA projections.
    pub mla_bits: u32,
    /// `lm_head`.
    pub head_bits: u32,
}

impl Default for Recipe {
    fn default() -> Self {
        Self { bits: 4, mla_bits: 8, head_bits: 8 }
    }
}

impl Recipe {
    /// The format a tensor is stored in, or `None` if it passes through unchanged.
    ///
    /// # Errors
    /// The recipe asks for a number of bits that does not exist.
    pub fn format_of(&self, spec: &TensorSpec) -> Result<Option<MatrixFormat>> {
        let Some((_, cols)) = spec.matrix_dims() else { return Ok(None) };
        let bits = match spec.class {
            TensorClass::Mla => self.mla_bits,
            TensorClass::Head => self.head_bits,
            _ => self.bits,
        };
        MatrixFormat::for_bits(bits, cols).map(Some)
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bits, mla_bits, head_bits } = self;
        write!(f, "--bits {bits} --mla-bits {mla_bits} --head-bits {head_bits}")
    }
}

#[cfg(test)]
mod tests {
    use safetensors::Dtype;

    use super::*;

    #[test]
    fn classes_and_fallback() {
        let spec = |class, cols| TensorSpec {
            name: String::new(),
            dtype: Dtype::BF16,
            shape: vec![8, cols],
            class,
            layer: None,
        };
        let recipe = Recipe::default();
        let format = |class, cols| recipe.format_of(&spec(class, cols)).unwrap();
        assert_eq!(format(TensorClass::Kda, 128), Some(MatrixFormat::Int4G64));
        assert_eq!(format(TensorClass::Kda, 96), Some(MatrixFormat::Int8Row));
        assert_eq!(format(TensorClass::Mla, 128), Some(MatrixFormat::Int8Row));
        assert_eq!(format(TensorClass::Router, 128), None);
        assert_eq!(format(TensorClass::Embedding, 128), None);
        let odd = Recipe { bits: 5, ..recipe };
        assert!(odd.format_of(&spec(TensorClass::Kda, 128)).is_err());
    }
}

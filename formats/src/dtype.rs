//! Element types by their safetensors names.

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use serde::de::value::Error as NameError;

/// The dtype with this safetensors name, or `None` if this reader does not know it.
pub fn from_name(name: &str) -> Option<Dtype> {
    Dtype::deserialize(IntoDeserializer::<NameError>::into_deserializer(name)).ok()
}

/// Bytes of `elements` values, or `None` where that overflows or is no whole number of bytes.
pub fn bytes_of(dtype: Dtype, elements: u64) -> Option<u64> {
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    (bits % 8 == 0).then_some(bits / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_sizes() {
        assert_eq!(from_name("BF16"), Some(Dtype::BF16));
        assert_eq!(from_name("BF17"), None);
        assert_eq!(bytes_of(Dtype::F4, 3), None);
        assert_eq!(bytes_of(Dtype::F32, u64::MAX), None);
        assert_eq!(bytes_of(Dtype::F32, 3), Some(12));
    }
}

//! The latent cache of one MLA layer: a row for each position, appended and cut only.

use std::collections::TryReserveError;

use half::bf16;

use crate::kernels::Latents;

/// How cached latents are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum KvType {
    /// As computed.
    #[default]
    F32,
    /// Rounded to BF16: half the memory and half the bytes to read for every token, and
    /// slightly other results.
    Bf16,
}

impl KvType {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => size_of::<f32>(),
            Self::Bf16 => size_of::<bf16>(),
        }
    }

    /// Its name as an option's value.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Latent rows [position, kv_lora + rope] of one layer.
#[derive(Debug)]
pub enum LatentRows {
    /// As computed.
    F32(Vec<f32>),
    /// Rounded.
    Bf16(Vec<bf16>),
}

impl LatentRows {
    /// No rows yet.
    pub fn new(kv: KvType) -> Self {
        match kv {
            KvType::F32 => Self::F32(Vec::new()),
            KvType::Bf16 => Self::Bf16(Vec::new()),
        }
    }

    /// Values in all rows.
    pub fn len(&self) -> usize {
        match self {
            Self::F32(rows) => rows.len(),
            Self::Bf16(rows) => rows.len(),
        }
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The first `values` values.
    ///
    /// # Panics
    /// There are fewer.
    pub fn first(&self, values: usize) -> Latents<'_> {
        match self {
            Self::F32(rows) => Latents::F32(&rows[..values]),
            Self::Bf16(rows) => Latents::Bf16(&rows[..values]),
        }
    }

    /// Appends rows.
    pub fn push(&mut self, new: &[f32]) {
        match self {
            Self::F32(rows) => rows.extend_from_slice(new),
            Self::Bf16(rows) => rows.extend(new.iter().map(|&x| bf16::from_f32(x))),
        }
    }

    /// Cuts off what follows the first `values` values, or fills up with zeros.
    pub fn resize(&mut self, values: usize) {
        match self {
            Self::F32(rows) => rows.resize(values, 0.0),
            Self::Bf16(rows) => rows.resize(values, bf16::ZERO),
        }
    }

    /// Takes the memory for `values` values in all.
    ///
    /// # Errors
    /// The system does not give it.
    pub fn reserve(&mut self, values: usize) -> Result<(), TryReserveError> {
        let more = values.saturating_sub(self.len());
        match self {
            Self::F32(rows) => rows.try_reserve_exact(more),
            Self::Bf16(rows) => rows.try_reserve_exact(more),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_appended_rounded_and_cut() {
        for kv in [KvType::F32, KvType::Bf16] {
            let mut rows = LatentRows::new(kv);
            assert!(rows.is_empty());
            rows.reserve(6).unwrap();
            rows.push(&[1.0, 1.003]);
            rows.push(&[-2.0, 0.5]);
            assert_eq!(rows.len(), 4);
            let second = match rows.first(2) {
                Latents::F32(rows) => rows[1],
                Latents::Bf16(rows) => rows[1].to_f32(),
            };
            // BF16 has steps of 1/128 above 1.
            let expected = if kv == KvType::F32 { 1.003 } else { 1.0 };
            assert_eq!(second, expected);
            rows.resize(2);
            rows.resize(3);
            assert_eq!(rows.len(), 3);
        }
    }
}

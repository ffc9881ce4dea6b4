//! Pure layout of one dense file: tensors in order to offsets, fillers and a header.
//!
//! Readers of safetensors refuse holes, so a gap before an aligned tensor becomes a
//! named filler, and the header is padded with spaces until the data starts on a page.

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::{Error, Result};

/// File offset every matrix starts on: a page, so that it can be mapped and read directly.
pub const MATRIX_ALIGN: u64 = 4096;

/// File offset every other tensor starts on: a cache line.
pub const VECTOR_ALIGN: u64 = 64;

/// Name prefix of filler tensors.
pub const FILLER_PREFIX: &str = "__pad__.";

/// A tensor to be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Name in the file.
    pub name: String,
    /// Element type in the file.
    pub dtype: Dtype,
    /// Shape in the file.
    pub shape: Vec<usize>,
    /// Alignment of its file offset, in bytes.
    pub align: u64,
}

/// A tensor with its bytes counted from the start of the data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Span {
    /// Name in the file.
    pub name: String,
    /// First byte.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

/// Where everything goes in one dense file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// Length word and header, a multiple of [`MATRIX_ALIGN`].
    pub head: Vec<u8>,
    /// The tensors in file order; between two of them may lie filler bytes, all zero.
    pub spans: Vec<Span>,
}

impl Layout {
    /// Places `tensors` in their order.
    ///
    /// # Errors
    /// A name twice, or sizes that overflow.
    pub fn new(tensors: &[Placed]) -> Result<Self> {
        let mut infos = Vec::with_capacity(tensors.len() * 2);
        let mut spans = Vec::with_capacity(tensors.len());
        let mut at = 0u64;
        for t in tensors {
            let begin = at.next_multiple_of(t.align);
            if begin > at {
                let name = format!("{FILLER_PREFIX}{}", infos.len());
                let gap = to_usize(begin - at)?;
                infos.push((name, info(Dtype::U8, vec![gap], at, begin)?));
            }
            let elements = t.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d as u64));
            let bytes = elements.and_then(|n| crate::dtype::bytes_of(t.dtype, n));
            let end = bytes.and_then(|n| begin.checked_add(n)).ok_or_else(too_large)?;
            infos.push((t.name.clone(), info(t.dtype, t.shape.clone(), begin, end)?));
            spans.push(Span { name: t.name.clone(), begin, end });
            at = end;
        }
        let metadata = Metadata::new(None, infos)
            .map_err(|e| Error::malformed(format!("impossible layout: {e}")))?;
        let mut json = serde_json::to_vec(&metadata)
            .map_err(|e| Error::malformed(format!("impossible header: {e}")))?;
        let padded = (8 + json.len() as u64).next_multiple_of(MATRIX_ALIGN) - 8;
        json.resize(to_usize(padded)?, b' ');
        let mut head = padded.to_le_bytes().to_vec();
        head.append(&mut json);
        Ok(Self { head, spans })
    }

    /// Size of the whole file in bytes.
    pub fn file_size(&self) -> u64 {
        self.head.len() as u64 + self.spans.last().map_or(0, |s| s.end)
    }
}

fn info(dtype: Dtype, shape: Vec<usize>, begin: u64, end: u64) -> Result<TensorInfo> {
    Ok(TensorInfo { dtype, shape, data_offsets: (to_usize(begin)?, to_usize(end)?) })
}

fn to_usize(n: u64) -> Result<usize> {
    usize::try_from(n).map_err(|_| too_large())
}

fn too_large() -> Error {
    Error::unsupported("tensor is too large for this machine")
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;

    #[test]
    fn reference_reader_opens_it_and_alignment_holds() {
        let place = |name: &str, dtype, shape: &[usize], align| Placed {
            name: name.into(),
            dtype,
            shape: shape.to_vec(),
            align,
        };
        let layout = Layout::new(&[
            place("norm", Dtype::BF16, &[5], VECTOR_ALIGN),
            place("w", Dtype::U8, &[3, 7], MATRIX_ALIGN),
            place("w.qs", Dtype::F32, &[3], VECTOR_ALIGN),
        ])
        .unwrap();
        let starts: Vec<_> = layout.spans.iter().map(|s| s.begin).collect();
        assert_eq!(starts, [0, 4096, 4096 + 64]);
        let mut file = layout.head.clone();
        assert_eq!(file.len() % 4096, 0);
        file.resize(layout.file_size() as usize, 0);
        let read = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.tensor("w").unwrap().shape(), [3, 7]);
        assert_eq!(read.len(), 5);
    }
}

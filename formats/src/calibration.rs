//! What the inputs of each dense matrix look like on some text: the mean square of every
//! column, by which a conversion weighs errors.
//!
//! A plain safetensors file: for each matrix an F32 vector `[cols]` under the matrix's
//! name, and in the metadata `tokens`, how many were seen.

use std::collections::HashMap;
use std::path::Path;

use safetensors::tensor::{Dtype, SafeTensors, TensorView};

use crate::digest::Digest;
use crate::{Error, Result, text_file};

/// Longest calibration file that is read, in bytes: eight times the release's.
const MAX_FILE: u64 = 256 << 20;

/// Key of the number of tokens in the metadata.
const TOKENS: &str = "tokens";

/// Mean squares of the inputs, by matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Calibration {
    /// Tokens seen.
    pub tokens: u64,
    /// `[cols]` for each matrix, by its full name.
    pub squares: HashMap<String, Vec<f32>>,
    /// SHA-256 of the file.
    pub sha256: Digest,
}

impl Calibration {
    /// Reads a calibration file.
    ///
    /// # Errors
    /// It cannot be read, is no such file, or holds what no mean square can be.
    pub fn read(path: &Path) -> Result<Self> {
        Self::parse(&text_file::read_bytes(path, MAX_FILE)?).map_err(|e| e.in_file(path))
    }

    /// Parses the bytes of a calibration file.
    ///
    /// # Errors
    /// As [`Calibration::read`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let hint = "give a file as formats/README.md describes it";
        let wrong = |problem: String| Error::malformed(problem).hint(hint);
        let not = |e| wrong(format!("not a calibration file: {e}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(not)?;
        let tokens = header.metadata().as_ref().and_then(|m| m.get(TOKENS)?.parse().ok());
        let tokens = tokens.ok_or_else(|| wrong("not a calibration file: no tokens".into()))?;
        let file = SafeTensors::deserialize(bytes).map_err(not)?;
        let mut squares = HashMap::new();
        for (name, tensor) in file.iter() {
            let fits = tensor.dtype() == Dtype::F32 && tensor.shape().len() == 1;
            let values = tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
            let values: Vec<f32> = values.collect();
            if !fits || !values.iter().all(|v| v.is_finite() && *v >= 0.0) {
                let problem = "expected a vector of finite F32 values, none below 0";
                return Err(wrong(problem.into()).item(name));
            }
            squares.insert(name.to_owned(), values);
        }
        Ok(Self { tokens, squares, sha256: Digest::of(bytes) })
    }

    /// The bytes of a calibration file with these contents.
    ///
    /// # Errors
    /// A name cannot be written.
    pub fn encode(tokens: u64, squares: &[(String, Vec<f32>)]) -> Result<Vec<u8>> {
        let wrong = |e| Error::unsupported(format!("calibration cannot be written: {e}"));
        let views = squares.iter().map(|(name, values)| {
            let bytes = bytemuck::cast_slice(values);
            Ok((name, TensorView::new(Dtype::F32, vec![values.len()], bytes).map_err(wrong)?))
        });
        let views: Vec<_> = views.collect::<Result<_>>()?;
        let metadata = HashMap::from([(TOKENS.to_owned(), tokens.to_string())]);
        safetensors::serialize(views, Some(metadata)).map_err(wrong)
    }

    /// What each column's error counts in the matrix `name` of `cols` columns, 1 on average.
    ///
    /// # Errors
    /// The matrix is not in the file, or has another width there.
    pub fn importance(&self, name: &str, cols: usize) -> Result<Vec<f32>> {
        let hint = "calibrate with a container of the same model";
        let squares = self
            .squares
            .get(name)
            .ok_or_else(|| Error::missing("not in the calibration file").item(name).hint(hint))?;
        if squares.len() != cols {
            let problem = format!("expected {cols} columns, found {}", squares.len());
            return Err(Error::mismatch(problem).item(name).hint(hint));
        }
        let mean = squares.iter().map(|&s| f64::from(s)).sum::<f64>() / cols as f64;
        if mean == 0.0 {
            return Ok(vec![1.0; cols]);
        }
        Ok(squares.iter().map(|&s| (f64::from(s) / mean) as f32).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_comes_back() {
        let squares = vec![("a.weight".to_owned(), vec![1.0, 0.0, 3.0]), ("b".into(), vec![0.0])];
        let bytes = Calibration::encode(77, &squares).unwrap();
        let read = Calibration::parse(&bytes).unwrap();
        assert_eq!((read.tokens, &read.squares["a.weight"]), (77, &squares[0].1));
        assert_eq!(read.sha256, Digest::of(&bytes));
        assert_eq!(read.importance("a.weight", 3).unwrap(), [0.75, 0.0, 2.25]);
        assert_eq!(read.importance("b", 1).unwrap(), [1.0], "nothing is known of a dead input");
        let message = |e: Result<_>| e.unwrap_err().to_string();
        assert!(message(read.importance("b", 2)).contains("expected 2 columns, found 1"));
        assert!(message(read.importance("c", 2)).contains("not in the calibration file"));
    }

    #[test]
    fn other_files_are_refused() {
        let bad = Calibration::encode(1, &[("a".to_owned(), vec![-1.0])]).unwrap();
        for bytes in [&b""[..], b"\x02\0\0\0\0\0\0\0{}", &bad] {
            let error = Calibration::parse(bytes).unwrap_err();
            assert!(error.hint_text().unwrap().contains("formats/README.md"), "{error}");
        }
    }
}

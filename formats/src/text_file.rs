//! Small text files of a snapshot: bounded, UTF-8, byte order mark dropped.

use std::io::Read;
use std::path::Path;

use crate::{Error, Result};

/// Reads a whole UTF-8 file of at most `limit` bytes; a byte order mark is dropped.
///
/// # Errors
/// The file is absent, longer than `limit`, or not UTF-8.
pub fn read(path: &Path, limit: u64) -> Result<String> {
    let bytes = read_bytes(path, limit)?;
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::malformed(format!("not UTF-8 text at byte {at}")).in_file(path)
    })?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

/// Reads a whole file of at most `limit` bytes.
///
/// # Errors
/// The file is absent, cannot be read, or is longer than `limit`.
pub fn read_bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    // The OS error already names the path once; ours names it first.
    let open = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::missing("no such file").in_file(path),
        _ => Error::io(path, "read", e),
    };
    // Opening a pipe would wait for a writer, perhaps for ever.
    if !fs_err::metadata(path).map_err(open)?.is_file() {
        return Err(Error::unsupported("not a regular file").in_file(path));
    }
    let file = fs_err::File::open(path).map_err(open)?.into_file();
    let mut bytes = Vec::new();
    file.take(limit + 1).read_to_end(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
    if bytes.len() as u64 > limit {
        let problem = format!("expected at most {limit} bytes, found more");
        return Err(Error::unsupported(problem).in_file(path));
    }
    Ok(bytes)
}

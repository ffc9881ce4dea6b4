//! Small text files of a snapshot: bounded, UTF-8, byte order mark dropped.

use std::io::Read;
use std::path::Path;

use crate::{Error, Result};

/// Reads a whole UTF-8 file of at most `limit` bytes; a byte order mark is dropped.
///
/// # Errors
/// The file is absent, longer than `limit`, or not UTF-8.
pub fn read(path: &Path, limit: u64) -> Result<String> {
    text(path, read_bytes(path, limit)?)
}

/// As [`read`], for a file of a download.
///
/// # Errors
/// Also what downloads leave in place of a file: see [`downloaded_bytes`].
pub fn downloaded(path: &Path, limit: u64) -> Result<String> {
    text(path, downloaded_bytes(path, limit)?)
}

fn text(path: &Path, bytes: Vec<u8>) -> Result<String> {
    let mut text = String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::malformed(format!("not UTF-8 text at byte {at}")).in_file(path)
    })?;
    if text.starts_with('\u{feff}') {
        text.drain(..'\u{feff}'.len_utf8());
    }
    Ok(text)
}

/// As [`read_bytes`], for a file of a download.
///
/// # Errors
/// Also a Git LFS pointer or a web page in place of the file.
pub fn downloaded_bytes(path: &Path, limit: u64) -> Result<Vec<u8>> {
    let bytes = read_bytes(path, limit)?;
    match lfs_pointer(&bytes).or_else(|| web_page(&bytes)) {
        Some(error) => Err(error.in_file(path)),
        None => Ok(bytes),
    }
}

/// That a file which begins with `start` is what git keeps in place of a large file.
pub(crate) fn lfs_pointer(start: &[u8]) -> Option<Error> {
    start.starts_with(b"version https://git-lfs").then(|| {
        Error::malformed("this is a Git LFS pointer, not the file itself")
            .hint("run `git lfs pull` in the snapshot, or download the file again")
    })
}

fn web_page(start: &[u8]) -> Option<Error> {
    let text = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start).trim_ascii_start();
    let page = [&b"<!doctype"[..], b"<html", b"<?xml"]
        .iter()
        .any(|tag| text.get(..tag.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(tag)));
    page.then(|| {
        Error::malformed("this is a web page, perhaps an error message, not the file itself")
            .hint("download the file again, and look at what the server says")
    })
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
        return Err(Error::unsupported("not a regular file")
            .in_file(path)
            .hint("give a plain file, not a folder, a pipe or a device"));
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

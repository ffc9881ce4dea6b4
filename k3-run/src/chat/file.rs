//! A chat request in a file.

use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result};
use k3_formats::tokenizer::Tokenizer;

use super::request::{ChatRequest, Defaults};
use super::{MAX_REQUEST_BYTES, xtml};

/// Token ids of the chat request in the JSON file `path`, or on stdin if that is `-`.
///
/// # Errors
/// The file cannot be read, is too large, or its request has a fault; the message names
/// the file and the field.
pub fn encode_file(tokenizer: &Tokenizer, path: &Path, defaults: Defaults) -> Result<Vec<u32>> {
    let mut body = Vec::new();
    // One byte more than allowed is enough for the request to say that it is too large.
    let bound = MAX_REQUEST_BYTES as u64 + 1;
    if path == Path::new("-") {
        std::io::stdin().take(bound).read_to_end(&mut body).context("cannot read stdin")?;
    } else {
        fs_err::File::open(path)?.take(bound).read_to_end(&mut body)?;
    }
    let in_file = || path.display().to_string();
    let request = ChatRequest::from_json(&body, defaults).with_context(in_file)?;
    Ok(xtml::render(&request).with_context(in_file)?.encode(tokenizer))
}

//! `tiktoken.model`: one `BASE64 RANK` per line, the ranks being the token ids.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::vocabulary::{Flaw, MAX_TOKEN_BYTES, Vocabulary, check_size};
use crate::error::{Error, Result};

const HINT: &str = "the file is damaged or cut short: download tiktoken.model again";

/// Reads the ranks of exactly `base_vocab` tokens, in any order, from the bytes of the file.
///
/// # Errors
/// Every line that is no token with its number and text, a rank or a token that two lines
/// have, ranks and single bytes that no line has.
pub(super) fn parse(file: &[u8], base_vocab: usize) -> Result<Vocabulary> {
    check_size(base_vocab)?;
    // Editors on some systems put a byte order mark in front.
    let file = file.strip_prefix(b"\xef\xbb\xbf").unwrap_or(file);
    // Where the token of each rank is in `bytes`, and the line it came from, from 1.
    let mut entries: Vec<Option<Entry>> = vec![None; base_vocab];
    let mut bytes = Vec::with_capacity(file.len() / 2);
    for (line, number) in file.split(|&byte| byte == b'\n').zip(1..) {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.is_empty() {
            continue;
        }
        let start = bytes.len();
        let rank =
            parse_line(line, &mut bytes).map_err(|problem| bad_line(number, line, &problem))?;
        let Some(entry) = entries.get_mut(rank as usize) else {
            let problem =
                format!("expected ranks below {base_vocab}, the base vocabulary of config.json");
            return Err(bad_line(number, line, &problem)
                .hint("tiktoken.model and config.json must come from the same model"));
        };
        if let Some(Entry { line: first, .. }) = entry {
            return Err(bad_line(number, line, &format!("rank {rank} is on line {first} already")));
        }
        *entry = Some(Entry { start, len: bytes.len() - start, line: number });
    }

    let missing = entries.iter().filter(|entry| entry.is_none()).count();
    if let Some(rank) = entries.iter().position(Option::is_none) {
        return Err(Error::missing(format!(
            "no line has rank {rank}: expected {base_vocab} tokens, found {}",
            base_vocab - missing
        ))
        .hint(HINT));
    }

    // In the order of ranks, whatever the order of lines was.
    let mut ordered = Vec::with_capacity(bytes.len());
    let mut ends = Vec::with_capacity(base_vocab);
    for entry in entries.iter().flatten() {
        ordered.extend_from_slice(&bytes[entry.start..entry.start + entry.len]);
        ends.push(ordered.len() as u32);
    }
    let line_of = |rank: u32| entries[rank as usize].map_or(0, |entry| entry.line);
    Vocabulary::new(ordered, ends).map_err(|flaw| match flaw {
        Flaw::Same(a, b) => Error::malformed(format!(
            "lines {} and {} have the same token, as ranks {a} and {b}",
            line_of(a),
            line_of(b)
        ))
        .hint(HINT),
        Flaw::NoByte(byte) => Error::missing(format!(
            "no token is the single byte {byte:#04x}, so not every text could be encoded"
        ))
        .hint(HINT),
    })
}

#[derive(Clone, Copy)]
struct Entry {
    start: usize,
    len: usize,
    line: usize,
}

/// Appends the token of one line to `bytes` and returns its rank.
fn parse_line(line: &[u8], bytes: &mut Vec<u8>) -> Result<u32, String> {
    let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let (Some(token), Some(rank), None) = (fields.next(), fields.next(), fields.next()) else {
        return Err("expected a base64 token and its rank".to_owned());
    };
    let start = bytes.len();
    STANDARD.decode_vec(token, bytes).map_err(|e| format!("the token is not base64: {e}"))?;
    let len = bytes.len() - start;
    if len > MAX_TOKEN_BYTES {
        return Err(format!("the token has {len} bytes, at most {MAX_TOKEN_BYTES} are supported"));
    }
    // `parse` alone would take a plus sign.
    std::str::from_utf8(rank)
        .ok()
        .filter(|rank| rank.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|rank| rank.parse().ok())
        .ok_or_else(|| "the rank is not a number".to_owned())
}

fn bad_line(number: usize, line: &[u8], problem: &str) -> Error {
    const SHOWN: usize = 60;
    let text = String::from_utf8_lossy(&line[..line.len().min(SHOWN)]);
    let more = if line.len() > SHOWN { "..." } else { "" };
    Error::malformed(format!("{problem}, found {text:?}{more}"))
        .item(format!("line {number}"))
        .hint(HINT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(tokens: &[(&[u8], u32)]) -> Vec<String> {
        tokens.iter().map(|(token, rank)| format!("{} {rank}", STANDARD.encode(token))).collect()
    }

    /// 256 single bytes and `more`.
    fn model(more: &[&[u8]]) -> Vec<String> {
        let singles: Vec<[u8; 1]> = (0..=255).map(|byte| [byte]).collect();
        let tokens = singles.iter().map(|token| token.as_slice()).chain(more.iter().copied());
        lines(&tokens.zip(0..).collect::<Vec<_>>())
    }

    fn message(lines: &[String], base_vocab: usize) -> String {
        let Err(error) = parse(lines.join("\n").as_bytes(), base_vocab) else {
            panic!("accepted");
        };
        error.to_string()
    }

    #[test]
    fn any_line_end_and_any_order() {
        let mut lines = model(&[b"ab", b"abc"]);
        let expected = parse((lines.join("\n") + "\n").as_bytes(), 258).unwrap();
        assert_eq!(expected.token(257), Some(b"abc".as_slice()));
        lines.reverse();
        for text in [
            lines.join("\n"),
            lines.join("\r\n"),
            lines.join("\r\n") + "\r\n\r\n",
            "\u{feff}".to_owned() + &lines.join("\n"),
        ] {
            let found = parse(text.as_bytes(), 258).unwrap();
            assert_eq!(found.bytes(), expected.bytes());
            assert_eq!(found.id(b"ab"), Some(256));
        }
    }

    #[test]
    fn every_bad_line_is_named_with_its_text() {
        for (line, problem) in [
            ("YWI=", "expected a base64 token and its rank"),
            ("YWI= 256 7", "expected a base64 token and its rank"),
            ("Y!I= 256", "not base64"),
            ("YWI 256", "not base64"),
            ("YWI= 2x6", "the rank is not a number"),
            ("YWI= +256", "the rank is not a number"),
            ("YWI= -1", "the rank is not a number"),
            ("YWI= 99999999999", "the rank is not a number"),
            ("YWI= 300", "expected ranks below 257"),
        ] {
            let mut lines = model(&[]);
            lines.insert(2, line.to_owned());
            let message = message(&lines, 257);
            assert!(message.starts_with("line 3: "), "{message}");
            assert!(message.contains(problem), "{message}");
            assert!(message.ends_with(&format!("found {line:?}")), "{message}");
        }
        let mut lines = model(&[]);
        lines[4] = "A".repeat(4000) + " 4";
        let message = message(&lines, 256);
        assert!(message.contains("3000 bytes, at most 1024"), "{message}");
        assert!(message.len() < 200, "{message}");
    }

    #[test]
    fn what_is_double_or_missing_is_named() {
        let mut lines = model(&[b"ab"]);
        lines.push("YWM= 256".to_owned());
        assert_eq!(
            message(&lines, 257),
            "line 258: rank 256 is on line 257 already, found \"YWM= 256\""
        );

        let lines = model(&[b"ab", b"cd", b"ab"]);
        assert_eq!(
            message(&lines, 259),
            "lines 257 and 259 have the same token, as ranks 256 and 258"
        );

        let mut lines = model(&[b"ab", b"cd"]);
        lines.remove(256);
        assert_eq!(message(&lines, 258), "no line has rank 256: expected 258 tokens, found 257");
        assert_eq!(
            message(&model(&[]), 300),
            "no line has rank 256: expected 300 tokens, found 256"
        );
        assert_eq!(message(&[], 300), "no line has rank 0: expected 300 tokens, found 0");

        let mut lines = model(&[]);
        lines[0x41] = "YWI= 65".to_owned();
        assert!(message(&lines, 256).starts_with("no token is the single byte 0x41"));
        assert!(message(&lines, usize::MAX).contains("at most 1048575"));
    }

    #[test]
    fn an_empty_token_is_no_token() {
        // Without a first field there is only one field left.
        let mut lines = model(&[]);
        lines.push(" 256".to_owned());
        assert!(message(&lines, 257).contains("expected a base64 token"));
        lines[256] = "==== 256".to_owned();
        assert!(message(&lines, 257).contains("not base64"));
    }
}

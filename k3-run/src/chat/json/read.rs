//! Reading: one pass over the text, bounded depth.

use std::collections::HashMap;
use std::fmt;

use super::Json;
use super::write::float_repr;

/// Deepest nesting of lists and objects; a real schema stays under 20.
pub const MAX_DEPTH: usize = 128;

/// How many members an object may have before repeated keys are found through a map.
const LINEAR_MEMBERS: usize = 16;

/// Which texts count as JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// RFC 8259.
    Strict,
    /// What `json.loads` takes: also `NaN`, `Infinity` and `-Infinity`.
    Python,
}

/// Where a text stops being JSON, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SyntaxError {
    /// Byte offset into the text.
    pub offset: usize,
    /// Lower case, no full stop.
    pub problem: &'static str,
}

impl fmt::Display for SyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at byte {}", self.problem, self.offset)
    }
}

impl std::error::Error for SyntaxError {}

pub(super) fn document(text: &str, dialect: Dialect) -> Result<Json, SyntaxError> {
    let mut reader = Reader { text, at: 0, dialect };
    reader.space();
    let value = reader.value(0)?;
    reader.space();
    if reader.at < text.len() {
        return Err(reader.error("expected the end of the text"));
    }
    Ok(value)
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
    dialect: Dialect,
}

impl Reader<'_> {
    fn error(&self, problem: &'static str) -> SyntaxError {
        SyntaxError { offset: self.at, problem }
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn word(&mut self, word: &str) -> bool {
        let found = self.text.as_bytes()[self.at..].starts_with(word.as_bytes());
        if found {
            self.at += word.len();
        }
        found
    }

    fn value(&mut self, depth: usize) -> Result<Json, SyntaxError> {
        match self.peek() {
            Some(b'"') => Ok(Json::String(self.string()?)),
            Some(b'[') => self.array(depth),
            Some(b'{') => self.object(depth),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ if self.word("null") => Ok(Json::Null),
            _ if self.word("true") => Ok(Json::Bool(true)),
            _ if self.word("false") => Ok(Json::Bool(false)),
            _ => self.non_finite(),
        }
    }

    fn non_finite(&mut self) -> Result<Json, SyntaxError> {
        if self.dialect == Dialect::Python {
            for word in ["NaN", "Infinity", "-Infinity"] {
                if self.word(word) {
                    return Ok(Json::Number(word.to_owned()));
                }
            }
        }
        Err(self.error("expected a JSON value"))
    }

    fn array(&mut self, depth: usize) -> Result<Json, SyntaxError> {
        self.enter(depth)?;
        let mut items = Vec::new();
        self.space();
        if self.take(b']') {
            return Ok(Json::Array(items));
        }
        loop {
            self.space();
            items.push(self.value(depth + 1)?);
            self.space();
            if self.take(b']') {
                return Ok(Json::Array(items));
            }
            if !self.take(b',') {
                return Err(self.error("expected `,` or `]`"));
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, SyntaxError> {
        self.enter(depth)?;
        let mut members = Members::default();
        self.space();
        if self.take(b'}') {
            return Ok(Json::Object(members.list));
        }
        loop {
            self.space();
            if self.peek() != Some(b'"') {
                return Err(self.error("expected a quoted key"));
            }
            let key = self.string()?;
            self.space();
            if !self.take(b':') {
                return Err(self.error("expected `:`"));
            }
            self.space();
            let value = self.value(depth + 1)?;
            members.set(key, value);
            self.space();
            if self.take(b'}') {
                return Ok(Json::Object(members.list));
            }
            if !self.take(b',') {
                return Err(self.error("expected `,` or `}`"));
            }
        }
    }

    /// Steps over the opening bracket.
    fn enter(&mut self, depth: usize) -> Result<(), SyntaxError> {
        if depth == MAX_DEPTH {
            return Err(self.error("nested deeper than 128 levels"));
        }
        self.at += 1;
        Ok(())
    }

    fn string(&mut self) -> Result<String, SyntaxError> {
        self.at += 1;
        let mut out = String::new();
        loop {
            let rest = &self.text.as_bytes()[self.at..];
            let plain = rest
                .iter()
                .position(|&b| b == b'"' || b == b'\\' || b < 0x20)
                .ok_or_else(|| self.error("a string has no end"))?;
            // All three stop bytes are ASCII, so the cut falls on a character boundary.
            out.push_str(&self.text[self.at..self.at + plain]);
            self.at += plain;
            match rest[plain] {
                b'"' => {
                    self.at += 1;
                    return Ok(out);
                }
                b'\\' => out.push(self.escape()?),
                _ => return Err(self.error("a control character inside a string")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, SyntaxError> {
        let start = self.at;
        self.at += 1;
        let c = match self.peek() {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                self.at += 1;
                return self.unicode_escape(start);
            }
            _ => return Err(self.error("an unknown escape")),
        };
        self.at += 1;
        Ok(c)
    }

    /// `\uXXXX`, or a surrogate pair of two. Half a pair is no character: refused.
    fn unicode_escape(&mut self, start: usize) -> Result<char, SyntaxError> {
        let lone = SyntaxError { offset: start, problem: "half of a surrogate pair" };
        let first = self.hex4()?;
        let code = if (0xd800..0xdc00).contains(&first) {
            if !self.word("\\u") {
                return Err(lone);
            }
            let second = self.hex4()?;
            if !(0xdc00..0xe000).contains(&second) {
                return Err(lone);
            }
            0x10000 + ((first - 0xd800) << 10) + (second - 0xdc00)
        } else {
            first
        };
        char::from_u32(code).ok_or(lone)
    }

    fn hex4(&mut self) -> Result<u32, SyntaxError> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4);
        let value = digits.and_then(|digits| {
            digits.iter().try_fold(0, |value, &b| Some(value * 16 + char::from(b).to_digit(16)?))
        });
        let value = value.ok_or_else(|| self.error("expected four hex digits"))?;
        self.at += 4;
        Ok(value)
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - start
    }

    fn number(&mut self) -> Result<Json, SyntaxError> {
        let start = self.at;
        let negative = self.take(b'-');
        if !self.take(b'0') && self.digits() == 0 {
            self.at = start;
            return if negative { self.non_finite() } else { Err(self.error("expected a number")) };
        }
        let integer_end = self.at;
        if self.take(b'.') && self.digits() == 0 {
            return Err(self.error("expected digits after the point"));
        }
        if self.take(b'e') || self.take(b'E') {
            let _ = self.take(b'+') || self.take(b'-');
            if self.digits() == 0 {
                return Err(self.error("expected an exponent"));
            }
        }
        let text = &self.text[start..self.at];
        if self.at == integer_end {
            // Python's integers have no negative zero.
            let text = if text == "-0" { "0" } else { text };
            return Ok(Json::Number(text.to_owned()));
        }
        let value: f64 = text.parse().map_err(|_| self.error("expected a number"))?;
        Ok(Json::Number(float_repr(value)))
    }
}

/// Object members under construction.
#[derive(Default)]
struct Members {
    list: Vec<(String, Json)>,
    /// Key to position, once there are enough members for a scan to be slow.
    index: HashMap<String, usize>,
}

impl Members {
    fn set(&mut self, key: String, value: Json) {
        match self.position(&key) {
            Some(position) => self.list[position].1 = value,
            None => {
                if !self.index.is_empty() {
                    self.index.insert(key.clone(), self.list.len());
                }
                self.list.push((key, value));
            }
        }
    }

    fn position(&mut self, key: &str) -> Option<usize> {
        if self.list.len() < LINEAR_MEMBERS {
            return self.list.iter().position(|(k, _)| k == key);
        }
        if self.index.is_empty() {
            self.index = self.list.iter().enumerate().map(|(i, (k, _))| (k.clone(), i)).collect();
        }
        self.index.get(key).copied()
    }
}

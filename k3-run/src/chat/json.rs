//! JSON the way Python's `json` module reads and writes it.
//!
//! Tool declarations, schemas and tool arguments enter the prompt as text, and the
//! model was trained on what `json.dumps(..., ensure_ascii=False)` prints. A
//! `serde_json::Value` cannot give that: it sorts the keys of arguments, rounds
//! integers beyond 64 bits and writes `1e-7` where Python writes `1e-07`.

mod read;
mod write;

pub use read::{Dialect, MAX_DEPTH, SyntaxError};
pub use write::Separators;

/// A JSON value: object members in the order they were given, numbers as Python prints them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Json {
    Null,
    Bool(bool),
    /// Text of the number in Python's spelling: integers of any length, floats as their `repr`.
    Number(String),
    String(String),
    Array(Vec<Self>),
    /// Members by first appearance; of a repeated key the last value counts, as in a Python dict.
    Object(Vec<(String, Self)>),
}

impl Json {
    /// Reads one JSON document.
    ///
    /// # Errors
    /// Text outside the dialect, or nested deeper than [`MAX_DEPTH`].
    pub fn parse(text: &str, dialect: Dialect) -> Result<Self, SyntaxError> {
        read::document(text, dialect)
    }

    /// The value of `key`, if this is an object that has it.
    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Object(members) => members.iter().find(|(k, _)| k == key).map(|(_, v)| v),
            _ => None,
        }
    }

    /// The text of a JSON string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(text) => Some(text),
            _ => None,
        }
    }

    /// What a reader would call this value in an error message.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::String(_) => "a string",
            Self::Array(_) => "a list",
            Self::Object(_) => "an object",
        }
    }

    /// The same value with the keys of every object in code point order, at every depth.
    #[must_use]
    pub fn sorted(&self) -> Self {
        match self {
            Self::Array(items) => Self::Array(items.iter().map(Self::sorted).collect()),
            Self::Object(members) => {
                let mut members: Vec<_> =
                    members.iter().map(|(k, v)| (k.clone(), v.sorted())).collect();
                // UTF-8 byte order is code point order, which is how Python sorts strings.
                members.sort_unstable_by(|a, b| a.0.cmp(&b.0));
                Self::Object(members)
            }
            other => other.clone(),
        }
    }

    /// Prints the value as `json.dumps` with `ensure_ascii=False` and these separators does.
    pub fn dump(&self, separators: Separators) -> String {
        let mut out = String::new();
        write::value(self, separators, &mut out);
        out
    }
}

/// Appends `text` as a quoted JSON string.
pub(super) fn push_quoted(text: &str, out: &mut String) {
    out.push('"');
    push_escaped(text, out);
    out.push('"');
}

/// Appends `text` as the inside of a JSON string, so that it can be streamed in pieces.
pub(super) fn push_escaped(text: &str, out: &mut String) {
    write::escaped(text, out);
}

#[cfg(test)]
mod tests;

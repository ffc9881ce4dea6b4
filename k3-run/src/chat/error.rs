//! What can be wrong with a request, and where in it.

use std::fmt;

use super::json::Json;

/// What kind of fault, for callers that answer by it (HTTP 400, 413, 422).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChatErrorKind {
    /// The text is not JSON.
    Syntax,
    /// A field has the wrong type or a value outside its set.
    Invalid,
    /// A field that must be there is not.
    Missing,
    /// Well formed, but nothing this model or this runtime does.
    Unsupported,
    /// Beyond a bound of this runtime.
    TooLarge,
}

/// A fault of a chat request: its place (`messages[3].content`), what was expected
/// and what was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatError {
    kind: ChatErrorKind,
    place: String,
    problem: String,
    hint: Option<&'static str>,
}

impl ChatError {
    pub(crate) fn new(kind: ChatErrorKind, place: impl Into<String>, problem: String) -> Self {
        Self { kind, place: place.into(), problem, hint: None }
    }

    /// A value of the wrong type.
    pub(crate) fn expected(place: impl Into<String>, expected: &str, found: &Json) -> Self {
        let problem = format!("expected {expected}, found {}", found.kind());
        Self::new(ChatErrorKind::Invalid, place, problem)
    }

    /// A string outside the set of accepted ones.
    pub(crate) fn unknown(place: impl Into<String>, expected: &str, found: &str) -> Self {
        let found: String = found.chars().take(40).collect();
        let problem = format!("expected {expected}, found {found:?}");
        Self::new(ChatErrorKind::Invalid, place, problem)
    }

    pub(crate) fn missing(place: impl Into<String>, expected: &str) -> Self {
        Self::new(ChatErrorKind::Missing, place, format!("missing, expected {expected}"))
    }

    pub(crate) fn unsupported(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::new(ChatErrorKind::Unsupported, place, problem.into())
    }

    pub(crate) fn too_large(place: impl Into<String>, bound: usize, unit: &str) -> Self {
        Self::new(ChatErrorKind::TooLarge, place, format!("more than {bound} {unit}"))
    }

    #[must_use]
    pub(crate) fn hint(mut self, hint: &'static str) -> Self {
        self.hint = Some(hint);
        self
    }

    /// The kind of fault.
    pub fn kind(&self) -> ChatErrorKind {
        self.kind
    }

    /// The path of the offending field, as the `param` of an OpenAI error; empty for the whole text.
    pub fn place(&self) -> &str {
        &self.place
    }

    /// What to do instead, where something is known to help.
    pub fn hint_text(&self) -> Option<&'static str> {
        self.hint
    }
}

impl fmt::Display for ChatError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        f.write_str(&self.problem)
    }
}

impl std::error::Error for ChatError {}

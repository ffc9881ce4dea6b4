//! One error type for everything that bytes on disk can get wrong.
//!
//! A message names the file, the item in it (a tensor, a line, a key), what was
//! expected and what was found; a hint says what to do next.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What kind of thing went wrong, for callers that decide by it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The operating system said no.
    Io,
    /// The bytes break the format's own rules.
    Malformed,
    /// Well formed, but not what the config, the manifest or a digest says.
    Mismatch,
    /// Something that must be there is not.
    Missing,
    /// Legal, but nothing this tool can work with.
    Unsupported,
}

/// A file-level error: where, what, and what to do about it.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    path: Option<PathBuf>,
    item: Option<String>,
    problem: String,
    hint: Option<String>,
    source: Option<io::Error>,
}

impl Error {
    /// An error with only a problem: lower case, no full stop, expected before found.
    pub fn new(kind: ErrorKind, problem: impl Into<String>) -> Self {
        Self { kind, path: None, item: None, problem: problem.into(), hint: None, source: None }
    }

    /// Bytes that break the format's own rules.
    pub fn malformed(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Malformed, problem)
    }

    /// Well formed, but different from what was declared elsewhere.
    pub fn mismatch(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Mismatch, problem)
    }

    /// Something required that is absent.
    pub fn missing(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Missing, problem)
    }

    /// Something legal that this tool does not do.
    pub fn unsupported(problem: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, problem)
    }

    /// A failed system call on `path`; `doing` says what was tried ("read", "create").
    pub fn io(path: impl AsRef<Path>, doing: &str, source: io::Error) -> Self {
        let mut error = Self::new(ErrorKind::Io, format!("cannot {doing}")).in_file(path);
        error.source = Some(source);
        error
    }

    /// Names the file, unless an inner layer already did.
    #[must_use]
    pub fn in_file(mut self, path: impl AsRef<Path>) -> Self {
        self.path.get_or_insert_with(|| path.as_ref().to_path_buf());
        self
    }

    /// Names the tensor, key or line, unless an inner layer already did.
    #[must_use]
    pub fn item(mut self, item: impl Into<String>) -> Self {
        self.item.get_or_insert_with(|| item.into());
        self
    }

    /// Says what to do next; the innermost hint wins.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// The kind of error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// What to do next, if anything is known to help.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref().or_else(|| self.source.as_ref().map(hint_for))
    }
}

/// What helps where the operating system says no.
fn hint_for(error: &io::Error) -> &'static str {
    use io::ErrorKind as Kind;
    match error.kind() {
        Kind::PermissionDenied | Kind::ReadOnlyFilesystem => {
            "give a place that you may use, or change its permissions"
        }
        Kind::StorageFull | Kind::QuotaExceeded | Kind::FileTooLarge => {
            "make space, or raise the limit, then run this again"
        }
        Kind::OutOfMemory => "free some memory, then run this again",
        Kind::NotFound
        | Kind::NotADirectory
        | Kind::IsADirectory
        | Kind::AlreadyExists
        | Kind::InvalidInput
        | Kind::InvalidFilename => "look at the path: is it what was meant?",
        _ if error.raw_os_error() == Some(5) => {
            "the drive failed to read or write; look at the system's log"
        }
        _ => "look at the path and at what it leads to",
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            // Debug escapes newlines and non-UTF-8 in hostile names; plain names stay plain.
            let shown = path.to_string_lossy();
            if shown.chars().any(|c| c.is_control() || c == char::REPLACEMENT_CHARACTER) {
                write!(f, "{path:?}: ")?;
            } else {
                write!(f, "{shown}: ")?;
            }
        }
        if let Some(item) = &self.item {
            write!(f, "{item}: ")?;
        }
        f.write_str(&self.problem)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_names_file_item_and_problem() {
        let e = Error::mismatch("expected 3 rows, found 2")
            .item("a.weight")
            .in_file("m.safetensors")
            .item("outer")
            .hint("download it again");
        assert_eq!(e.to_string(), "m.safetensors: a.weight: expected 3 rows, found 2");
        assert_eq!(e.hint_text(), Some("download it again"));
        assert_eq!(e.kind(), ErrorKind::Mismatch);
    }

    #[test]
    fn what_the_system_refuses_has_a_hint() {
        let full = Error::io("a", "write", io::ErrorKind::StorageFull.into());
        assert!(full.hint_text().unwrap().starts_with("make space"));
        let broken = Error::io("a", "read", io::Error::from_raw_os_error(5));
        assert!(broken.hint_text().unwrap().contains("the drive failed"));
        let loops = Error::io("a", "read", io::Error::from_raw_os_error(40));
        assert!(loops.hint_text().unwrap().contains("the path"));
        let known = Error::io("a", "read", io::ErrorKind::NotFound.into()).hint("give another");
        assert_eq!(known.hint_text(), Some("give another"));
    }

    #[test]
    fn control_characters_in_names_are_escaped() {
        let e = Error::missing("no such file").in_file("a\nb");
        assert_eq!(e.to_string(), "\"a\\nb\": no such file");
    }
}

//! Findings collected before anything is decided: all problems at once, and a list that
//! stays readable when there are a hundred thousand.

use std::fmt::Write;

use k3_formats::{Error, ErrorKind};

/// Most findings of one kind that are kept and shown.
const SHOWN: usize = 50;

/// Lines of one kind: the first ones, and how many there were.
#[derive(Debug, Clone, Default)]
pub(crate) struct Lines {
    shown: Vec<String>,
    count: usize,
}

impl Lines {
    pub(crate) fn add(&mut self, line: impl FnOnce() -> String) {
        self.count += 1;
        if self.shown.len() < SHOWN {
            self.shown.push(line());
        }
    }

    /// Whether one of the lines shown is this one.
    pub(crate) fn contains(&self, line: &str) -> bool {
        self.shown.iter().any(|shown| shown == line)
    }

    /// The lines, the last one saying how many are not shown.
    pub(crate) fn into_lines(mut self) -> Vec<String> {
        if self.count > self.shown.len() {
            self.shown.push(format!("and {} more like this", self.count - self.shown.len()));
        }
        self.shown
    }
}

/// Everything that is wrong with one thing.
#[derive(Debug, Default)]
pub(crate) struct Problems {
    lines: Lines,
    kind: Option<ErrorKind>,
    hint: Option<String>,
}

impl Problems {
    /// Adds a problem; the first one's hint is given for all.
    pub(crate) fn add(&mut self, error: &Error) {
        self.kind.get_or_insert(error.kind());
        if self.hint.is_none() {
            self.hint = error.hint_text().map(str::to_owned);
        }
        self.lines.add(|| error.to_string());
    }

    pub(crate) fn len(&self) -> usize {
        self.lines.count
    }

    /// One error that lists them all, or nothing if there are none.
    pub(crate) fn into_error(self, what: &str) -> Option<Error> {
        let kind = self.kind?;
        let count = self.lines.count;
        let mut lines = self.lines.into_lines();
        let text = if count == 1 {
            format!("{what}: {}", lines.remove(0))
        } else {
            let mut text = format!("{what}: {count} problems");
            for line in lines {
                let _ = write!(text, "\n  {line}");
            }
            text
        };
        let error = Error::new(kind, text);
        Some(match self.hint {
            Some(hint) => error.hint(hint),
            None => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lists_are_cut_and_counted() {
        let mut problems = Problems::default();
        assert_eq!(problems.len(), 0);
        for i in 0..53 {
            problems.add(&Error::missing(format!("no {i}")).hint(format!("fetch {i}")));
        }
        let error = problems.into_error("cannot").unwrap();
        let text = error.to_string();
        assert!(text.starts_with("cannot: 53 problems\n  no 0\n"), "{text}");
        assert!(text.ends_with("\n  no 49\n  and 3 more like this"), "{text}");
        assert_eq!(error.hint_text(), Some("fetch 0"));
    }
}

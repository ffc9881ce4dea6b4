//! Where lines come from: an editor on a terminal, else standard input as it is.

use std::io::{BufRead, IsTerminal, Read, StdinLock};
use std::path::{Path, PathBuf};

use anyhow::Context;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};

use super::command::WORDS;
use crate::chat::MAX_REQUEST_BYTES;

/// What stands before the line that is typed.
const PROMPT: &str = "> ";

/// Begins and ends a text of several lines.
const FENCE: &str = "\"\"\"";

/// Lines kept in the history file.
const MAX_HISTORY: usize = 10_000;

/// What was entered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    Text(String),
    /// Ctrl-C at the prompt.
    Interrupted,
    End,
}

/// A source of lines.
pub(super) enum Input {
    Terminal { editor: Box<Editor<Editing, FileHistory>>, history: Option<PathBuf> },
    Plain(StdinLock<'static>),
}

impl Input {
    /// An editor if standard input and output are terminals; its lines go to `history`.
    ///
    /// # Errors
    /// The terminal refuses.
    pub(super) fn open(history: Option<&Path>) -> anyhow::Result<Self> {
        if !std::io::stdin().is_terminal() || !std::io::stdout().is_terminal() {
            return Ok(Self::Plain(std::io::stdin().lock()));
        }
        let config = Config::builder().max_history_size(MAX_HISTORY)?.auto_add_history(true);
        let mut editor = Editor::with_config(config.build()).context("cannot use the terminal")?;
        editor.set_helper(Some(Editing));
        if let Some(path) = history {
            if let Some(dir) = path.parent() {
                fs_err::create_dir_all(dir)?;
            }
            // Without a file there is nothing to remember yet.
            if path.is_file() {
                editor
                    .load_history(path)
                    .with_context(|| format!("{}: cannot read the history", path.display()))?;
            }
        }
        let history = history.map(Path::to_owned);
        Ok(Self::Terminal { editor: Box::new(editor), history })
    }

    /// Whether someone types.
    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal { .. })
    }

    /// The next text, of several lines if it says so.
    ///
    /// # Errors
    /// Reading fails, or a text is too long.
    pub(super) fn next(&mut self) -> anyhow::Result<Line> {
        match self {
            Self::Terminal { editor, history } => match editor.readline(PROMPT) {
                Ok(text) => {
                    if let Some(path) = history {
                        editor
                            .append_history(path)
                            .with_context(|| format!("{}: cannot write", path.display()))?;
                    }
                    Ok(Line::Text(unwrap(&text)))
                }
                Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
                Err(ReadlineError::Eof) => Ok(Line::End),
                Err(error) => Err(error).context("cannot read from the terminal"),
            },
            Self::Plain(stdin) => read(stdin),
        }
    }
}

/// Reads lines until they are a whole text, or the input ends.
fn read(input: &mut impl BufRead) -> anyhow::Result<Line> {
    let mut bytes = Vec::new();
    loop {
        let room = (MAX_REQUEST_BYTES - bytes.len()) as u64;
        let read = input.by_ref().take(room).read_until(b'\n', &mut bytes);
        let read = read.context("cannot read standard input")?;
        if bytes.len() == MAX_REQUEST_BYTES {
            anyhow::bail!("a text of more than {MAX_REQUEST_BYTES} bytes");
        }
        if read == 0 && bytes.is_empty() {
            return Ok(Line::End);
        }
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_end_matches(['\n', '\r']);
        if read == 0 || is_whole(text) {
            return Ok(Line::Text(unwrap(text)));
        }
    }
}

/// Whether no further line belongs to `text`.
fn is_whole(text: &str) -> bool {
    match text.trim_start().strip_prefix(FENCE) {
        Some(inner) => inner.trim_end().ends_with(FENCE),
        None => !text.ends_with('\\'),
    }
}

/// The text without what made it one of several lines.
fn unwrap(text: &str) -> String {
    match text.trim_start().strip_prefix(FENCE) {
        Some(inner) => {
            let inner = inner.trim_end();
            inner.strip_suffix(FENCE).unwrap_or(inner).trim_matches('\n').to_owned()
        }
        None => text.replace("\\\r\n", "\n").replace("\\\n", "\n"),
    }
}

/// How lines are edited: commands complete, Enter ends only a whole text.
pub(super) struct Editing;

impl Helper for Editing {}
impl Highlighter for Editing {}

impl Hinter for Editing {
    type Hint = String;
}

impl Validator for Editing {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        let whole = is_whole(context.input());
        Ok(if whole { ValidationResult::Valid(None) } else { ValidationResult::Incomplete })
    }
}

impl Completer for Editing {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        at: usize,
        _: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let begun = &line[..at];
        let words = WORDS.iter().filter(|word| begun.starts_with('/') && word.starts_with(begun));
        Ok((0, words.map(|word| format!("{word} ")).collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut input: &[u8]) -> Vec<String> {
        let mut texts = Vec::new();
        while let Line::Text(text) = read(&mut input).unwrap() {
            texts.push(text);
        }
        texts
    }

    #[test]
    fn texts_of_several_lines_are_put_together() {
        assert_eq!(all(b"one\r\n\ntwo\\\nthree\n"), ["one", "", "two\nthree"]);
        assert_eq!(all(b"\"\"\"a\n\nb \"\" c\nd\"\"\"\ne"), ["a\n\nb \"\" c\nd", "e"]);
        assert_eq!(all(b"\"\"\"one line\"\"\"\n"), ["one line"]);
        // What never ends, ends with the input.
        assert_eq!(all(b"\"\"\"a\nb"), ["a\nb"]);
        assert_eq!(all(b"a\\"), ["a\\"]);
        assert_eq!(all(b"caf\xc3\xa9 \xff"), ["café \u{fffd}"]);
    }
}

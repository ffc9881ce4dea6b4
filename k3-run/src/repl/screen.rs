//! What the chat shows: answers on stdout, everything else on stderr, and on a terminal
//! one live line that is overwritten.

use std::fmt::{Arguments, Display};
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use wrap::Wrap;

mod wrap;

/// The live line is drawn at most this often.
const REDRAW: Duration = Duration::from_millis(100);

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";
/// Back to the start of the line, and clear it.
const CLEAR: &str = "\r\x1b[K";

/// How text is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    Answer,
    Reasoning,
}

/// Standard output and error.
pub(super) struct Screen {
    /// Whether answers go to a terminal, where reasoning is shown too.
    pub(super) on_terminal: bool,
    /// Whether text may be dim.
    colors: bool,
    /// Whether a live line is drawn.
    animated: bool,
    /// When the live line was drawn, if it is there.
    live: Option<Instant>,
    /// Style of the last text, and whether a line is begun.
    style: Style,
    in_line: bool,
    /// Where lines break on a terminal.
    wrap: Option<Wrap>,
}

impl Screen {
    pub(super) fn new() -> Self {
        let no_color = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        let on_terminal = io::stdout().is_terminal();
        Self {
            on_terminal,
            colors: on_terminal && !dumb() && !no_color,
            animated: io::stderr().is_terminal() && !dumb(),
            live: None,
            style: Style::Answer,
            in_line: false,
            wrap: None,
        }
    }

    /// Writes a piece of text as it comes.
    ///
    /// # Errors
    /// Standard output fails or is closed.
    pub(super) fn text(&mut self, text: &str, style: Style) -> io::Result<()> {
        // A paragraph of its own for each.
        let text = if style != self.style { text.trim_start() } else { text };
        if text.is_empty() {
            return Ok(());
        }
        self.clear_live();
        let mut out = io::stdout().lock();
        if self.on_terminal && !dumb() && (self.wrap.is_none() || style != self.style) {
            self.wrap = columns().map(Wrap::new);
        }
        if style != self.style && self.in_line {
            out.write_all(b"\n\n")?;
        }
        self.style = style;
        let dim = self.colors && style == Style::Reasoning;
        if dim {
            out.write_all(DIM.as_bytes())?;
        }
        match &mut self.wrap {
            Some(wrap) => out.write_all(wrap.push(&harmless(text)).as_bytes())?,
            None if self.on_terminal => out.write_all(harmless(text).as_bytes())?,
            None => out.write_all(text.as_bytes())?,
        }
        if dim {
            out.write_all(PLAIN.as_bytes())?;
        }
        self.in_line = !text.ends_with('\n');
        out.flush()
    }

    /// Ends the text of an answer.
    ///
    /// # Errors
    /// Standard output fails or is closed.
    pub(super) fn end_text(&mut self) -> io::Result<()> {
        self.clear_live();
        let mut out = io::stdout().lock();
        if self.in_line || !self.on_terminal {
            out.write_all(b"\n")?;
        }
        (self.in_line, self.style, self.wrap) = (false, Style::Answer, None);
        out.flush()
    }

    /// Says something beside the conversation.
    pub(super) fn note(&mut self, text: Arguments<'_>) {
        self.clear_live();
        let mut err = io::stderr().lock();
        // A closed stderr is nobody's loss.
        let _ = if self.colors && self.animated {
            writeln!(err, "{DIM}{text}{PLAIN}")
        } else {
            writeln!(err, "{text}")
        };
    }

    /// Says what went wrong, and what to do about it.
    pub(super) fn error(&mut self, error: &anyhow::Error) {
        self.clear_live();
        crate::report::tell(error);
    }

    /// Replaces the live line.
    pub(super) fn live(&mut self, text: impl Display) {
        if !self.animated || self.live.is_some_and(|drawn| drawn.elapsed() < REDRAW) {
            return;
        }
        let (dim, plain) = if self.colors { (DIM, PLAIN) } else { ("", "") };
        let mut err = io::stderr().lock();
        let _ = write!(err, "{CLEAR}{dim}{text}{plain}").and_then(|()| err.flush());
        self.live = Some(Instant::now());
    }

    /// Removes the live line.
    pub(super) fn clear_live(&mut self) {
        if self.live.take().is_some() {
            let mut err = io::stderr().lock();
            let _ = write!(err, "{CLEAR}").and_then(|()| err.flush());
        }
    }
}

/// Whether the terminal understands nothing but text.
fn dumb() -> bool {
    std::env::var_os("TERM").is_none_or(|term| term == "dumb")
}

/// Width of the terminal that answers go to.
fn columns() -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(io::stdout()).ok()?;
    Some(usize::from(size.ws_col)).filter(|&columns| columns > 1)
}

/// Text that cannot drive the terminal: control characters but for new lines and tabs are
/// shown as such.
fn harmless(text: &str) -> String {
    let shown = |c: char| match c {
        '\n' | '\t' => c,
        '\0'..'\u{20}' => {
            char::from_u32(0x2400 + u32::from(c)).unwrap_or(char::REPLACEMENT_CHARACTER)
        }
        c if c.is_control() => char::REPLACEMENT_CHARACTER,
        c => c,
    };
    text.chars().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_text_drives_the_terminal() {
        assert_eq!(harmless("a\tb\nc\x1b[2Jd\u{9b}e\x7f\r"), "a\tb\nc␛[2Jd\u{fffd}e\u{fffd}␍");
    }
}

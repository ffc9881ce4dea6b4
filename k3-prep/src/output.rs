//! The only writers to stdout and stderr. A reader that hangs up has seen enough, so a
//! closed pipe is no error.

use std::fmt::Display;
use std::io::{self, BufWriter, ErrorKind, Write};

use anyhow::{Context, Result};

/// Writes a result to stdout through a buffer.
pub(crate) fn result(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(e) if e.kind() == ErrorKind::BrokenPipe => {
            // What is still in the buffer has no reader either.
            let _ = out.into_parts();
            Ok(())
        }
        other => other.context("cannot write to stdout"),
    }
}

/// Writes a result to stdout as indented JSON.
pub(crate) fn json(value: &impl serde::Serialize) -> Result<()> {
    result(|out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        writeln!(out)
    })
}

/// Says something on stderr.
pub(crate) fn say(line: impl Display) {
    // Nobody left to tell: the work goes on.
    let _ = writeln!(io::stderr(), "{line}");
}

/// Warns on stderr.
pub(crate) fn warn(line: impl Display) {
    say(format_args!("warning: {line}"));
}

/// Prints an error with its causes, and the first hint among them.
pub(crate) fn report_error(error: &anyhow::Error) {
    say(format_args!("error: {error:#}"));
    let hint = error
        .chain()
        .filter_map(|e| e.downcast_ref::<k3_formats::Error>())
        .find_map(k3_formats::Error::hint_text);
    if let Some(hint) = hint {
        say(format_args!("hint: {hint}"));
    }
}

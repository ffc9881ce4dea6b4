//! What the program says: results on stdout, everything else on stderr.

use std::fmt::Arguments;
use std::io::{self, Write};
use std::process::ExitCode;

use k3_formats::Error;

use crate::chat::ChatError;

/// One line of talk on stderr; a closed stderr is nobody's loss.
pub(crate) fn say(line: Arguments<'_>) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Most memory this process has had resident so far, in bytes, where the system tells.
pub(crate) fn peak_memory() -> Option<u64> {
    let status = fs_err::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim_end().parse().ok()?;
    Some(kib << 10)
}

/// Prints an error and its hint, and turns it into the exit code: 0 if stdout was closed
/// by its reader, 1 if something is not what was recorded, else 2.
pub(crate) fn fail(error: &anyhow::Error) -> ExitCode {
    if is_closed(error) {
        return ExitCode::SUCCESS;
    }
    tell(error);
    ExitCode::from(2)
}

/// Whether the reader of standard output has gone.
pub(crate) fn is_closed(error: &anyhow::Error) -> bool {
    let closed = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
    error.chain().any(|e| e.downcast_ref::<io::Error>().is_some_and(closed))
}

/// Prints an error and its hint.
pub(crate) fn tell(error: &anyhow::Error) {
    say(format_args!("error: {error:#}"));
    let hint = error.chain().find_map(|e| match e.downcast_ref::<Error>() {
        Some(error) => error.hint_text(),
        None => e.downcast_ref::<ChatError>()?.hint_text(),
    });
    if let Some(hint) = hint {
        say(format_args!("hint: {hint}"));
    }
}

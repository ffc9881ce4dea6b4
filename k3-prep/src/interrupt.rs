//! Ends by Ctrl-C or SIGTERM with a word on what to do next.

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::output;

/// From now on an interruption still ends the process as it would have, but says `hint`
/// before. For work that may be killed at any moment.
///
/// # Errors
/// The system refuses.
pub(crate) fn explain(hint: &'static str) -> Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot listen for Ctrl-C")?;
    let wait = move || {
        if let Some(signal) = signals.forever().next() {
            // A progress bar may stand in the line.
            output::say(format_args!("\nerror: interrupted\nhint: {hint}"));
            let _ = signal_hook::low_level::emulate_default_handler(signal);
        }
    };
    std::thread::Builder::new().name("signals".into()).spawn(wait)?;
    Ok(())
}

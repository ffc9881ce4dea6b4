//! Progress of long work on stderr: a bar on a terminal, a line every tenth elsewhere.

use std::io::IsTerminal;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::output;
use crate::size::{Bytes, Span};

/// Whether long work says how far it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Talk {
    /// A bar on a terminal, lines elsewhere.
    Progress,
    /// Nothing but warnings and errors.
    Quiet,
}

/// Bytes done of a known total; shared by all threads of the work.
pub(crate) struct Progress {
    what: &'static str,
    total: u64,
    done: AtomicU64,
    /// Bytes of `done` that earlier work has done.
    skipped: AtomicU64,
    /// Tenths done and time run at the last line, where there is no bar.
    said: Mutex<(u64, Duration)>,
    bar: Option<ProgressBar>,
    talk: Talk,
    start: Instant,
}

impl Progress {
    /// Begins to show that `what` goes through `total` bytes.
    pub(crate) fn start(what: &'static str, total: u64, talk: Talk) -> Self {
        let bar = (talk == Talk::Progress && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(total);
            let template = "{prefix} {wide_bar} {decimal_bytes} of {decimal_total_bytes}, \
                            {decimal_bytes_per_sec}, {eta} left";
            bar.set_style(
                ProgressStyle::with_template(template).expect("the template is well formed"),
            );
            bar.set_prefix(what);
            bar
        });
        if bar.is_none() && talk == Talk::Progress {
            output::say(format_args!("{what}: {} to go", Bytes(total)));
        }
        Self {
            what,
            total,
            done: AtomicU64::new(0),
            skipped: AtomicU64::new(0),
            said: Mutex::default(),
            bar,
            talk,
            start: Instant::now(),
        }
    }

    /// Counts `bytes` that earlier work has done; they do not count for the rate.
    pub(crate) fn skip(&self, bytes: u64) {
        self.skipped.fetch_add(bytes, Ordering::Relaxed);
        self.done.fetch_add(bytes, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
            bar.reset_eta();
        }
    }

    /// Says that `bytes` more are done.
    pub(crate) fn add(&self, bytes: u64) {
        let done = self.done.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if let Some(bar) = &self.bar {
            bar.set_position(done);
            return;
        }
        let tenth = (u128::from(done) * 10 / u128::from(self.total.max(1))) as u64;
        let seconds = self.start.elapsed();
        if self.is_due(tenth, seconds) {
            let now = done - self.skipped.load(Ordering::Relaxed);
            let rate = now as f64 / seconds.as_secs_f64().max(1e-9);
            let left = self.total.saturating_sub(done) as f64 / rate;
            output::say(format_args!(
                "{}: {}0 %, {} of {}, {}/s, {} left",
                self.what,
                tenth,
                Bytes(done),
                Bytes(self.total),
                Bytes(rate as u64),
                Span(Duration::from_secs_f64(left))
            ));
        }
    }

    /// Whether a tenth has passed since the last line, and a second: short work is not worth
    /// ten lines.
    fn is_due(&self, tenth: u64, seconds: Duration) -> bool {
        let mut said = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let due = self.talk == Talk::Progress
            && tenth < 10
            && tenth > said.0
            && seconds.saturating_sub(said.1) >= Duration::from_secs(1);
        if due {
            *said = (tenth, seconds);
        }
        due
    }

    /// Ends the display and sums up.
    pub(crate) fn finish(self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        if self.talk == Talk::Quiet {
            return;
        }
        let done = self.done.into_inner() - self.skipped.into_inner();
        let seconds = self.start.elapsed();
        let rate = done as f64 / seconds.as_secs_f64().max(1e-9);
        output::say(format_args!(
            "{}: {} in {}, {}/s",
            self.what,
            Bytes(done),
            Span(seconds),
            Bytes(rate as u64)
        ));
    }
}

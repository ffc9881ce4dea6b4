//! How far a prompt is, and what an answer took.

use std::fmt::{self, Display};
use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::experts::ExpertStats;
use crate::session::Advance;

/// Clock and counters of one answer.
pub(super) struct Meter {
    began: Instant,
    /// When the prompt was taken in, and what of it was computed.
    prompt: Option<(Duration, Advance)>,
    experts: ExpertStats,
    dense_read: u64,
    /// Tokens of the answer.
    pub(super) tokens: usize,
}

impl Meter {
    pub(super) fn start(engine: &Engine<'_>) -> Self {
        Self {
            began: Instant::now(),
            prompt: None,
            experts: engine.experts().stats(),
            dense_read: engine.dense().bytes_read(),
            tokens: 0,
        }
    }

    /// The live line while a prompt is taken in.
    pub(super) fn progress(&self, advance: Advance) -> impl Display + use<> {
        let (elapsed, done) = (self.began.elapsed(), advance.done + advance.under_way);
        let computed = done - advance.reused;
        let mut line = format!("reading {done} of {} tokens", advance.total);
        if computed > 0 {
            let rate = computed as f64 / elapsed.as_secs_f64().max(1e-9);
            let left = (advance.total - done) as f64 / rate;
            line += &format!(", {}, {} left", Rate(rate), Span(Duration::from_secs_f64(left)));
        }
        line
    }

    /// The prompt is taken in.
    pub(super) fn prompt_done(&mut self, advance: Advance) {
        self.prompt = Some((self.began.elapsed(), advance));
    }

    /// The live line while reasoning is hidden.
    pub(super) fn thinking(&self) -> impl Display + use<> {
        format!("thinking: {} tokens, {}", self.tokens, Rate(self.decode_rate()))
    }

    fn decode_rate(&self) -> f64 {
        let prompt = self.prompt.map_or(Duration::ZERO, |(took, _)| took);
        let took = self.began.elapsed().saturating_sub(prompt);
        self.tokens as f64 / took.as_secs_f64().max(1e-9)
    }

    /// The line under an answer.
    pub(super) fn summary(&self, engine: &Engine<'_>) -> String {
        let mut line = format!("{} tokens at {}", self.tokens, Rate(self.decode_rate()));
        if let Some((took, advance)) = self.prompt {
            let computed = advance.total - advance.reused;
            let rate = computed as f64 / took.as_secs_f64().max(1e-9);
            line += &format!("; prompt: {} tokens, {} known", advance.total, advance.reused);
            if computed > 0 {
                line += &format!(", {computed} at {}", Rate(rate));
            }
        }
        let experts = engine.experts().stats().since(&self.experts);
        let read = experts.bytes_read + engine.dense().bytes_read() - self.dense_read;
        let asked = (experts.hits + experts.misses).max(1);
        let hits = experts.hits as f64 * 100.0 / asked as f64;
        line + &format!("; experts {hits:.0} % cached, {:.2} GB read", read as f64 / 1e9)
    }
}

/// Tokens per second.
pub(super) struct Rate(pub(super) f64);

impl Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 10.0 { write!(f, "{:.2}/s", self.0) } else { write!(f, "{:.0}/s", self.0) }
    }
}

/// A time to wait, rounded as people do.
struct Span(Duration);

impl Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64().ceil() as u64;
        let (minutes, hours) = (seconds / 60, seconds / 3600);
        match (hours, minutes) {
            (0, 0) => write!(f, "{seconds} s"),
            (0, _) => write!(f, "{minutes} min {} s", seconds % 60),
            _ => write!(f, "{hours} h {} min", minutes % 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_rates_are_short() {
        let span = |seconds: f64| Span(Duration::from_secs_f64(seconds)).to_string();
        assert_eq!(
            [0.2, 59.9, 166.0, 7300.0].map(span),
            ["1 s", "1 min 0 s", "2 min 46 s", "2 h 1 min"]
        );
        assert_eq!([0.125, 9.5, 120.4].map(|r| Rate(r).to_string()), ["0.12/s", "9.50/s", "120/s"]);
    }
}

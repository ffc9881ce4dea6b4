//! What happened when: parts of the computation and single reads, in the trace format of
//! Chrome (`chrome://tracing`, Perfetto).

use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::json;

/// Where a span is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// The thread that walks through the layers.
    Compute,
    /// One reader.
    Disk(usize),
}

impl Lane {
    fn id(self) -> usize {
        match self {
            Self::Compute => 0,
            Self::Disk(reader) => 1 + reader,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Compute => "compute".into(),
            Self::Disk(reader) => format!("disk {reader}"),
        }
    }
}

/// Something that began at `start` and ends when it is recorded.
#[derive(Debug, Clone, Copy)]
pub struct Span {
    /// What it was.
    pub name: &'static str,
    /// Where it is drawn.
    pub lane: Lane,
    /// When it began.
    pub start: Instant,
    /// The layer it belongs to.
    pub layer: usize,
    /// The expert it belongs to.
    pub expert: Option<usize>,
    /// Bytes read.
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Ended {
    span: Span,
    /// From the trace's origin.
    from: Duration,
    to: Duration,
}

/// Spans in the order in which they ended.
#[derive(Debug)]
pub struct Trace {
    origin: Instant,
    spans: Mutex<Vec<Ended>>,
}

impl Default for Trace {
    fn default() -> Self {
        Self::new()
    }
}

impl Trace {
    /// An empty trace that begins now.
    pub fn new() -> Self {
        Self { origin: Instant::now(), spans: Mutex::new(Vec::with_capacity(1 << 14)) }
    }

    fn spans(&self) -> MutexGuard<'_, Vec<Ended>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a span that ends now.
    pub fn add(&self, span: Span) {
        let (from, to) = (span.start.saturating_duration_since(self.origin), self.origin.elapsed());
        self.spans().push(Ended { span, from, to });
    }

    /// How much of the time from `from` to `to` any reader was reading.
    pub fn disk_busy(&self, from: Instant, to: Instant) -> Duration {
        let (from, to) = (from - self.origin, to - self.origin);
        let spans = self.spans();
        let reads = spans.iter().filter(|e| matches!(e.span.lane, Lane::Disk(_)));
        let mut reads: Vec<_> =
            reads.map(|e| (e.from.max(from), e.to.min(to))).filter(|(a, b)| a < b).collect();
        reads.sort_unstable();
        let (mut busy, mut until) = (Duration::ZERO, Duration::ZERO);
        for (start, end) in reads {
            busy += end.saturating_sub(start.max(until));
            until = until.max(end);
        }
        busy
    }

    /// Writes all spans as JSON, one event a line; times in µs.
    ///
    /// # Errors
    /// `out` fails.
    pub fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let spans = self.spans();
        let mut lanes: Vec<_> = spans.iter().map(|e| e.span.lane).collect();
        lanes.sort_unstable();
        lanes.dedup();
        writeln!(out, "{{\"traceEvents\": [")?;
        for lane in lanes {
            let (tid, args) = (lane.id(), json!({"name": lane.name()}));
            let event =
                json!({"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": args});
            writeln!(out, "{event},")?;
        }
        for Ended { span, from, to } in &*spans {
            let micros = |time: Duration| time.as_nanos() as f64 / 1e3;
            let mut args = json!({"layer": span.layer});
            if let Some(expert) = span.expert {
                args["expert"] = expert.into();
                args["bytes"] = span.bytes.into();
            }
            let event = json!({
                "ph": "X",
                "name": span.name,
                "pid": 1,
                "tid": span.lane.id(),
                "ts": micros(*from),
                "dur": micros(*to - *from),
                "args": args,
            });
            writeln!(out, "{event},")?;
        }
        // The last event has no comma after it.
        let end = json!({"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "k3-run"}});
        writeln!(out, "{end}\n]}}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(lane: Lane, start: Instant) -> Span {
        Span { name: "read", lane, start, layer: 3, expert: Some(7), bytes: 5 }
    }

    #[test]
    fn overlapping_reads_count_once() {
        let trace = Trace::new();
        let start = trace.origin;
        let millis = Duration::from_millis;
        for (lane, from, to) in [
            (Lane::Disk(0), 10, 30),
            (Lane::Disk(1), 20, 40),
            (Lane::Compute, 0, 100),
            (Lane::Disk(0), 60, 70),
            (Lane::Disk(0), 62, 65),
        ] {
            let (from, to) = (millis(from), millis(to));
            trace.spans().push(Ended { span: span(lane, start), from, to });
        }
        assert_eq!(trace.disk_busy(start, start + millis(100)), millis(40));
        assert_eq!(trace.disk_busy(start + millis(35), start + millis(61)), millis(6));
    }

    #[test]
    fn what_is_written_is_json() {
        let trace = Trace::new();
        trace.add(span(Lane::Disk(2), Instant::now()));
        trace.add(Span { expert: None, ..span(Lane::Compute, Instant::now()) });
        let mut out = Vec::new();
        trace.write(&mut out).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&out).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        assert_eq!(events.len(), 2 + 2 + 1);
        assert_eq!(events[0]["args"]["name"], "compute");
        assert_eq!((&events[2]["tid"], &events[2]["args"]["bytes"]), (&3.into(), &5.into()));
        assert!(events[3]["args"].get("expert").is_none());
    }
}

//! Counters of the server, for `/metrics` and for guesses at waiting times.

use std::fmt::Write;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::engine::Engine;

/// What has happened since the start.
#[derive(Debug, Default)]
pub(super) struct Stats {
    /// Whether the engine takes jobs.
    pub(super) ready: AtomicBool,
    pub(super) requests: AtomicU64,
    pub(super) finished: AtomicU64,
    pub(super) cancelled: AtomicU64,
    pub(super) failed: AtomicU64,
    /// Refused because the queue was full.
    pub(super) refused: AtomicU64,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
    completion_tokens: AtomicU64,
    busy: AtomicUsize,
    waiting: AtomicUsize,
    steps: Mutex<Steps>,
    engine: Mutex<EngineStats>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Steps {
    count: u64,
    prefill_rows: u64,
    decode_rows: u64,
    /// A step's time is shared out by rows.
    prefill: Duration,
    decode: Duration,
    /// Moving mean of the time a reply takes, in seconds.
    reply_seconds: f64,
}

#[derive(Debug, Default, Clone, Copy)]
struct EngineStats {
    expert_hits: u64,
    expert_misses: u64,
    expert_bytes: u64,
    expert_waited: Duration,
    dense_bytes: u64,
    expert_cache: u64,
}

impl Stats {
    pub(super) fn add_prompt(&self, tokens: usize, cached: usize) {
        self.prompt_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        self.cached_tokens.fetch_add(cached as u64, Ordering::Relaxed);
    }

    pub(super) fn add_reply(&self, tokens: usize, took: Duration) {
        self.finished.fetch_add(1, Ordering::Relaxed);
        self.completion_tokens.fetch_add(tokens as u64, Ordering::Relaxed);
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = took.as_secs_f64();
        steps.reply_seconds = match steps.reply_seconds {
            0.0 => seconds,
            mean => 0.8 * mean + 0.2 * seconds,
        };
    }

    pub(super) fn add_step(&self, decode_rows: usize, prefill_rows: usize, took: Duration) {
        let mut steps = self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let share = took / (decode_rows + prefill_rows).max(1) as u32;
        steps.count += 1;
        steps.prefill_rows += prefill_rows as u64;
        steps.decode_rows += decode_rows as u64;
        steps.prefill += share * prefill_rows as u32;
        steps.decode += share * decode_rows as u32;
    }

    pub(super) fn set_queue(&self, waiting: usize, busy: usize) {
        self.waiting.store(waiting, Ordering::Relaxed);
        self.busy.store(busy, Ordering::Relaxed);
    }

    pub(super) fn set_engine(&self, engine: &Engine<'_>) {
        let experts = engine.experts().stats();
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = EngineStats {
            expert_hits: experts.hits,
            expert_misses: experts.misses,
            expert_bytes: experts.bytes_read,
            expert_waited: experts.waited,
            dense_bytes: engine.dense().bytes_read(),
            expert_cache: engine.experts().size().bytes,
        };
    }

    /// Seconds until a place in the queue is likely free.
    pub(super) fn retry_after(&self, slots: usize) -> u64 {
        let steps = *self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        (steps.reply_seconds / slots as f64).ceil().clamp(1.0, 600.0) as u64
    }

    /// Slots at work.
    pub(super) fn busy(&self) -> usize {
        self.busy.load(Ordering::Relaxed)
    }

    /// Prometheus text; `slot_bytes` is what all slots may take.
    pub(super) fn prometheus(&self, waiting: usize, slots: usize, slot_bytes: u64) -> String {
        let steps = *self.steps.lock().unwrap_or_else(PoisonError::into_inner);
        let engine = *self.engine.lock().unwrap_or_else(PoisonError::into_inner);
        let get = |value: &AtomicU64| value.load(Ordering::Relaxed) as f64;
        let rate = |rows: u64, time: Duration| match time.as_secs_f64() {
            0.0 => 0.0,
            seconds => rows as f64 / seconds,
        };
        let mut text = Metrics::default();
        let counter = "counter";
        text.metric("k3_requests_total", counter, "Completion requests that were understood");
        text.value("", get(&self.requests));
        text.metric("k3_replies_total", counter, "Completion requests by how they ended");
        text.value("{outcome=\"finished\"}", get(&self.finished));
        text.value("{outcome=\"cancelled\"}", get(&self.cancelled));
        text.value("{outcome=\"failed\"}", get(&self.failed));
        text.value("{outcome=\"refused\"}", get(&self.refused));
        text.metric("k3_tokens_total", counter, "Tokens of prompts and of finished replies");
        text.value("{kind=\"prompt\"}", get(&self.prompt_tokens));
        text.value("{kind=\"cached\"}", get(&self.cached_tokens));
        text.value("{kind=\"completion\"}", get(&self.completion_tokens));
        text.metric("k3_rows_total", counter, "Rows that went through the model");
        text.value("{phase=\"prefill\"}", steps.prefill_rows as f64);
        text.value("{phase=\"decode\"}", steps.decode_rows as f64);
        text.metric("k3_seconds_total", counter, "Time in the model, shared out by rows");
        text.value("{phase=\"prefill\"}", steps.prefill.as_secs_f64());
        text.value("{phase=\"decode\"}", steps.decode.as_secs_f64());
        text.metric("k3_steps_total", counter, "Steps of the model");
        text.value("", steps.count as f64);
        text.metric("k3_rows_per_second", "gauge", "Mean rates since the start");
        text.value("{phase=\"prefill\"}", rate(steps.prefill_rows, steps.prefill));
        text.value("{phase=\"decode\"}", rate(steps.decode_rows, steps.decode));
        text.metric("k3_queue_requests", "gauge", "Requests that wait for a slot");
        text.value("", waiting as f64);
        text.metric("k3_slots", "gauge", "Conversations that can run side by side");
        text.value("{state=\"busy\"}", self.busy() as f64);
        text.value("{state=\"all\"}", slots as f64);
        text.metric("k3_experts_total", counter, "Experts asked for, by where they were");
        text.value("{from=\"cache\"}", engine.expert_hits as f64);
        text.value("{from=\"disk\"}", engine.expert_misses as f64);
        text.metric("k3_read_bytes_total", counter, "Bytes of weights read while running");
        text.value("{what=\"experts\"}", engine.expert_bytes as f64);
        text.value("{what=\"dense\"}", engine.dense_bytes as f64);
        text.metric("k3_expert_wait_seconds_total", counter, "Time spent waiting for experts");
        text.value("", engine.expert_waited.as_secs_f64());
        text.metric("k3_memory_bytes", "gauge", "Memory by part; slots and cache at their most");
        text.value("{part=\"slots\"}", slot_bytes as f64);
        text.value("{part=\"expert_cache\"}", engine.expert_cache as f64);
        if let Some(resident) = resident_bytes() {
            text.value("{part=\"resident\"}", resident as f64);
        }
        text.0
    }
}

/// Text in the form that Prometheus reads.
#[derive(Default)]
struct Metrics(String, &'static str);

impl Metrics {
    fn metric(&mut self, name: &'static str, kind: &str, help: &str) {
        self.1 = name;
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, labels: &str, value: f64) {
        let _ = writeln!(self.0, "{}{labels} {value}", self.1);
    }
}

/// Memory of this process that is in RAM, mapped files included.
fn resident_bytes() -> Option<u64> {
    let text = fs_err::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

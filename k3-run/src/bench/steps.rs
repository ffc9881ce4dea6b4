//! Steps of the whole model, with the time of each part.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use crate::clock::PartTimes;
use crate::engine::{Engine, Inputs, Run, Want};
use crate::experts::ExpertStats;
use crate::state::SequenceState;
use crate::trace::Trace;

/// A sequence in the making: text first, then what the model says most likely follows.
pub(super) struct Sequence {
    state: SequenceState,
    next: Vec<u32>,
}

/// Some steps that were measured.
pub(super) struct Steps {
    /// Seconds of each step.
    pub(super) seconds: Vec<f64>,
    /// Time of each part in all steps.
    pub(super) parts: PartTimes,
    /// What the expert store did.
    pub(super) experts: ExpertStats,
    /// Part of the time in which the disk was busy, 0 to 1.
    pub(super) disk_busy: f64,
}

impl Steps {
    /// Seconds of all steps.
    pub(super) fn total(&self) -> f64 {
        self.seconds.iter().sum()
    }
}

impl Sequence {
    /// A sequence that goes on with `prompt` after `depth` positions, all zeros, and has room
    /// for `more` tokens.
    pub(super) fn new(engine: &Engine<'_>, depth: usize, prompt: &[u32], more: usize) -> Self {
        let mut state = engine.new_state(depth + prompt.len() + more);
        state.pretend(depth);
        Self { state, next: prompt.to_vec() }
    }

    /// Takes in what is next, in chunks.
    fn step(&mut self, engine: &mut Engine<'_>) -> anyhow::Result<()> {
        let chunk = engine.max_rows();
        let (last, cancel) = ((self.next.len() - 1) / chunk * chunk, AtomicBool::new(false));
        let mut likely = None;
        for start in (0..self.next.len()).step_by(chunk) {
            let ids = &self.next[start..self.next.len().min(start + chunk)];
            let want = if start == last { Want::Last } else { Want::None };
            let mut run = [Run { state: &mut self.state, rows: ids.len(), want }];
            let logits = engine.step(Inputs::Ids(ids), &mut run, &cancel, None)?;
            likely = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        }
        self.next.clear();
        self.next.push(likely.unwrap_or(0) as u32);
        Ok(())
    }

    /// Measures `count` steps; what happened when goes to `trace`.
    ///
    /// # Errors
    /// A read fails.
    pub(super) fn measure(
        &mut self,
        engine: &mut Engine<'_>,
        count: usize,
        trace: &Arc<Trace>,
    ) -> anyhow::Result<Steps> {
        let before = engine.experts().stats();
        let mut seconds = Vec::with_capacity(count);
        engine.start_clock(Some(Arc::clone(trace)));
        let begin = Instant::now();
        for _ in 0..count {
            let start = Instant::now();
            self.step(engine)?;
            seconds.push(start.elapsed().as_secs_f64());
        }
        let end = Instant::now();
        let parts = engine.stop_clock();
        let experts = engine.experts().stats().since(&before);
        let disk_busy = trace.disk_busy(begin, end).as_secs_f64() / (end - begin).as_secs_f64();
        Ok(Steps { seconds, parts, experts, disk_busy })
    }
}

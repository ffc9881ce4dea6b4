//! One conversation with the model: the tokens taken in and the state they built.

use std::sync::atomic::AtomicBool;

use crate::engine::{Engine, Inputs, Run, Want};
use crate::state::SequenceState;

/// A sequence that grows by prompts and by generated tokens.
pub struct Session {
    state: SequenceState,
    tokens: Vec<u32>,
}

impl Session {
    /// An empty session with room for `context` tokens.
    pub fn new(engine: &Engine<'_>, context: usize) -> Self {
        Self { state: engine.new_state(context), tokens: Vec::with_capacity(context) }
    }

    /// The tokens that built the state.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Takes `ids` in, in chunks the engine can hold, and returns the logits [vocab] after
    /// the last one. `progress` hears how many are done.
    ///
    /// # Errors
    /// See [`Engine::step`].
    ///
    /// # Panics
    /// `ids` is empty.
    pub fn extend<'e>(
        &mut self,
        engine: &'e mut Engine<'_>,
        ids: &[u32],
        cancel: &AtomicBool,
        mut progress: impl FnMut(usize),
    ) -> anyhow::Result<&'e [f32]> {
        assert!(!ids.is_empty(), "something to take in");
        let chunk = engine.max_rows();
        let last = (ids.len() - 1) / chunk * chunk;
        for start in (0..last).step_by(chunk) {
            self.step(engine, &ids[start..start + chunk], Want::None, cancel)?;
            progress(start + chunk);
        }
        self.step(engine, &ids[last..], Want::Last, cancel)
    }

    fn step<'e>(
        &mut self,
        engine: &'e mut Engine<'_>,
        ids: &[u32],
        want: Want,
        cancel: &AtomicBool,
    ) -> anyhow::Result<&'e [f32]> {
        let mut run = [Run { state: &mut self.state, rows: ids.len(), want }];
        let logits = engine.step(Inputs::Ids(ids), &mut run, cancel, None)?;
        self.tokens.extend_from_slice(ids);
        Ok(logits)
    }
}

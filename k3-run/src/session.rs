//! One conversation with the model: the tokens taken in, the state they built, and the
//! ways back to earlier positions.
//!
//! A session knows exactly which tokens built its state. [`Session::advance_to`] brings
//! it to a prompt by computing as little as possible: it goes on in place where the
//! prompt extends those tokens, else it goes back to the deepest position that both have
//! in common and that can be reached, by undoing a few tokens, from a checkpoint, or from
//! the start. A step that was given up half way is undone at once, or, if no undo records
//! are kept, by the next [`Session::advance_to`]. Whatever the way, the logits are those
//! of a fresh prefill, bit for bit.

use std::sync::atomic::AtomicBool;

use anyhow::bail;
use k3_formats::Error;

use crate::engine::{Engine, Inputs, Observer, Run, Want};
use crate::state::SequenceState;

mod checkpoints;
mod file;
mod options;

use checkpoints::Checkpoints;
pub use file::saved_tokens;
pub use options::SessionOptions;

/// A sequence that grows by prompts and by generated tokens.
#[derive(Debug)]
pub struct Session {
    state: SequenceState,
    tokens: Vec<u32>,
    /// Logits after the last of `tokens`, where they are known; else empty.
    logits: Vec<f32>,
    checkpoints: Checkpoints,
    counts: Counts,
}

/// Tokens of all prompts so far, and where they came from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Taken over from the state or a checkpoint.
    pub reused: u64,
    /// Taken through the model, prompts and replies.
    pub computed: u64,
    /// Times that a checkpoint was gone back to.
    pub restored: u64,
}

/// How far a prompt has been taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Advance {
    /// Tokens of the prompt.
    pub total: usize,
    /// Those that were in the state already.
    pub reused: usize,
    /// Those that are in it now.
    pub done: usize,
    /// Tokens of the step under way, counted by the layers they have passed.
    pub under_way: usize,
}

/// Rows of one session in a step.
#[derive(Debug)]
pub struct Part<'s> {
    /// The session.
    pub session: &'s mut Session,
    /// The tokens it takes in; at least one.
    pub ids: &'s [u32],
    /// Which of them give logits.
    pub want: Want,
}

impl Session {
    /// An empty session with room for `context` tokens that keeps no way back.
    pub fn new(engine: &Engine<'_>, context: usize) -> Self {
        let state = engine.new_state(context);
        Self::of(state, Checkpoints::new(0, None))
    }

    /// An empty session.
    ///
    /// # Errors
    /// The context is longer than the model's, or there is no memory for it.
    pub fn with_options(engine: &Engine<'_>, options: &SessionOptions) -> anyhow::Result<Self> {
        let config = engine.model().config;
        let (context, most) = (options.context, config.max_context);
        if context > most {
            let problem = format!("expected a context of at most {most} tokens, found {context}");
            return Err(Error::unsupported(problem).hint("give a smaller --context").into());
        }
        let mut state = engine.new_state(context);
        state.reserve()?;
        if options.undo_rows > 0 {
            state.keep_undo(config, options.undo_rows);
        }
        let dir = options.checkpoint_dir.clone();
        Ok(Self::of(state, Checkpoints::new(options.checkpoints, dir)))
    }

    fn of(state: SequenceState, checkpoints: Checkpoints) -> Self {
        let (tokens, logits) = (Vec::new(), Vec::new());
        Self { state, tokens, logits, checkpoints, counts: Counts::default() }
    }

    /// The tokens that built the state.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Logits `[vocab]` after the last token of the last prompt, as long as nothing followed.
    pub fn logits(&self) -> &[f32] {
        &self.logits
    }

    /// Tokens there is room for.
    pub fn context(&self) -> usize {
        self.state.context()
    }

    /// Tokens that can be taken back one by one.
    pub fn undo_rows(&self) -> usize {
        self.state.undo_rows()
    }

    /// Where tokens came from so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Positions of the checkpoints, shallowest first.
    pub fn checkpoints(&self) -> impl Iterator<Item = usize> {
        self.checkpoints.positions()
    }

    /// Why the last checkpoint could not be taken or read, once. A session without it
    /// gives the same results, later.
    pub fn take_checkpoint_problem(&mut self) -> Option<anyhow::Error> {
        self.checkpoints.take_problem()
    }

    /// How many tokens at the start of `prompt` need not be computed if this session is
    /// to take it in. Of several sessions, the best for a prompt is the one with the most.
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        self.way_to(prompt).position()
    }

    /// Brings the session to exactly `prompt` and leaves the logits after its last token in
    /// [`Session::logits`]. `turns` are positions in the prompt at which messages begin, in
    /// order: good places for checkpoints. `progress` is told at the start and after every
    /// layer of a step.
    ///
    /// # Errors
    /// See [`Engine::step`]; or the prompt is empty or does not fit into the context. After
    /// an error the same or another prompt may be tried.
    pub fn advance_to(
        &mut self,
        engine: &mut Engine<'_>,
        prompt: &[u32],
        turns: &[usize],
        cancel: &AtomicBool,
        mut progress: impl FnMut(Advance) + Send,
    ) -> anyhow::Result<Advance> {
        let reused = self.rewind_to(engine, prompt)?;
        let mut advance = Advance { total: prompt.len(), reused, done: reused, under_way: 0 };
        let layers = engine.model().layers.len();
        progress(advance);
        let stops = self.checkpoints.plan(reused, prompt.len(), turns.iter().copied());
        while advance.done < prompt.len() {
            let from = advance.done;
            if from > reused && stops.contains(&from) {
                self.checkpoint();
            }
            let stop = stops.iter().copied().find(|&s| s > from).unwrap_or(prompt.len());
            let to = stop.min(from + engine.max_rows());
            let want = if to == prompt.len() { Want::Last } else { Want::None };
            let mut parts = [Part { session: self, ids: &prompt[from..to], want }];
            let mut observe = |layer: usize, _: &[f32]| {
                let under_way = (to - from) * layer.min(layers) / layers;
                progress(Advance { under_way, ..advance });
            };
            observed_step(engine, &mut parts, cancel, Some(&mut observe))?;
            advance.done = to;
            progress(advance);
        }
        if reused < prompt.len() {
            self.logits.extend_from_slice(engine.logits());
            self.checkpoint();
        }
        Ok(advance)
    }

    /// Goes back to the deepest position from which `prompt` can be gone on with, and
    /// returns it: the next token to take in is `prompt[position]`. Only if it is the
    /// prompt's length are the logits known already. What lies behind is forgotten; a
    /// checkpoint is taken if a turn begins here.
    ///
    /// # Errors
    /// The prompt is empty or does not fit into the context; the session is as before.
    pub fn rewind_to(&mut self, engine: &mut Engine<'_>, prompt: &[u32]) -> anyhow::Result<usize> {
        let context = self.context();
        if prompt.is_empty() {
            bail!(Error::unsupported("the prompt has no tokens"));
        }
        if prompt.len() > context {
            let problem = format!(
                "the prompt has {} tokens, which do not fit into a context of {context}",
                prompt.len()
            );
            bail!(Error::unsupported(problem).hint("give a larger --context"));
        }
        let position = loop {
            match self.way_to(prompt) {
                Way::Here(position) => {
                    if position > 0 && position < prompt.len() {
                        self.checkpoint();
                    }
                    break position;
                }
                Way::Undo(position) => {
                    engine.roll_back(&mut self.state, position);
                    self.cut_to(position);
                    break position;
                }
                // A checkpoint that cannot be read is dropped, and the next best way tried.
                Way::Checkpoint(position) => {
                    let mut logits = std::mem::take(&mut self.logits);
                    if self.checkpoints.restore(position, &mut self.state, &mut logits) {
                        self.counts.restored += 1;
                        self.cut_to(position);
                        self.logits = logits;
                        break position;
                    }
                }
                Way::Start => {
                    self.state.reset();
                    self.cut_to(0);
                    break 0;
                }
            }
        };
        self.counts.reused += position as u64;
        Ok(position)
    }

    /// The way to the deepest position in common with `prompt` behind which logits are to
    /// be had: one before its end, unless those at the end are known.
    fn way_to(&self, prompt: &[u32]) -> Way {
        let common = self.tokens.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let serves = |position: usize, logits: bool| {
            position <= common && (position < prompt.len() || logits)
        };
        let here = self.tokens.len();
        if !self.state.is_torn() && serves(here, !self.logits.is_empty()) {
            return Way::Here(here);
        }
        let undo = self.state.undo_position(common.min(prompt.len().saturating_sub(1)));
        let checkpoint = self.checkpoints.deepest(serves);
        match (checkpoint, undo) {
            (Some(checkpoint), undo) if undo.is_none_or(|undo| undo <= checkpoint) => {
                Way::Checkpoint(checkpoint)
            }
            (_, Some(undo)) if undo > 0 => Way::Undo(undo),
            _ => Way::Start,
        }
    }

    /// The state has been taken back to `position`.
    fn cut_to(&mut self, position: usize) {
        self.tokens.truncate(position);
        self.logits.clear();
        self.checkpoints.drop_behind(position);
    }

    /// Where to stop for checkpoints on the way from `position` through a prompt of `total`
    /// tokens, for callers that take it in by [`step`]. See [`Session::advance_to`].
    pub(crate) fn stops(&self, position: usize, total: usize, turns: &[usize]) -> Vec<usize> {
        self.checkpoints.plan(position, total, turns.iter().copied())
    }

    /// The prompt has been taken in by [`step`], and these are the logits after its end.
    pub(crate) fn end_prompt(&mut self, logits: &[f32]) {
        self.logits.clear();
        self.logits.extend_from_slice(logits);
        self.checkpoint();
    }

    /// Keeps the present state to come back to, as far as checkpoints are kept.
    pub(crate) fn checkpoint(&mut self) {
        self.checkpoints.take(&self.state, &self.logits);
    }

    /// Takes `ids` in, in chunks the engine can hold, and returns the logits `[vocab]` after
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
        let mut done = 0;
        for ids in ids.chunks(engine.max_rows()) {
            if done > 0 {
                progress(done);
            }
            done += ids.len();
            step(engine, &mut [Part { session: self, ids, want: Want::Last }], cancel)?;
        }
        Ok(engine.logits())
    }

    /// Forgets everything; keeps the memory.
    pub fn reset(&mut self) {
        self.state.reset();
        self.cut_to(0);
    }

    /// Takes back the tokens from `position` on, which must be on record: see
    /// [`SequenceState::undo_position`].
    pub(crate) fn take_back(&mut self, engine: &mut Engine<'_>, position: usize) {
        if position < self.tokens.len() {
            engine.roll_back(&mut self.state, position);
            self.cut_to(position);
        }
    }
}

/// How a session comes to the start of what it has to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Here(usize),
    Undo(usize),
    Checkpoint(usize),
    Start,
}

impl Way {
    fn position(self) -> usize {
        match self {
            Self::Here(position) | Self::Undo(position) | Self::Checkpoint(position) => position,
            Self::Start => 0,
        }
    }
}

/// One step of the model for several sessions. Returns the logits [wanted rows, vocab].
/// After an error the sessions are where they were before, if they keep undo records;
/// else they are torn, and [`Session::advance_to`] mends them.
///
/// # Errors
/// See [`Engine::step`].
pub fn step<'e>(
    engine: &'e mut Engine<'_>,
    parts: &mut [Part<'_>],
    cancel: &AtomicBool,
) -> anyhow::Result<&'e [f32]> {
    observed_step(engine, parts, cancel, None)
}

fn observed_step<'e>(
    engine: &'e mut Engine<'_>,
    parts: &mut [Part<'_>],
    cancel: &AtomicBool,
    observer: Option<&mut Observer<'_>>,
) -> anyhow::Result<&'e [f32]> {
    let joined: Vec<u32>;
    let ids = match parts {
        [part] => part.ids,
        _ => {
            joined = parts.iter().flat_map(|part| part.ids).copied().collect();
            &joined
        }
    };
    let run = |part: &'_ mut Part<'_>| (part.ids.len(), part.want);
    let mut runs: Vec<Run<'_>> = parts
        .iter_mut()
        .map(|part| {
            let (rows, want) = run(part);
            Run { state: &mut part.session.state, rows, want }
        })
        .collect();
    let stepped = engine.step(Inputs::Ids(ids), &mut runs, cancel, observer).map(|_| ());
    for part in parts {
        let session = &mut *part.session;
        if stepped.is_ok() {
            session.logits.clear();
            session.tokens.extend_from_slice(part.ids);
            session.counts.computed += part.ids.len() as u64;
        } else if session.state.is_torn() {
            let position = session.tokens.len();
            if session.state.undo_position(position) == Some(position) {
                engine.roll_back(&mut session.state, position);
            }
        }
    }
    stepped.map(|()| engine.logits())
}

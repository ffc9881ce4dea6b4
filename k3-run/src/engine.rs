//! One step of the model: rows of one or several sequences through all layers at once.
//!
//! Every row's result is the same whatever else is in the step, because a kernel's sums
//! do not depend on the number of rows and attention works on one sequence at a time.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::bail;
use k3_formats::{Error, ModelConfig};

use crate::clock::{Clock, Part, PartTimes};
use crate::dense::{self, Dense, Embedding};
use crate::experts::{ExpertStore, WarmStart};
use crate::kernels::{Activations, Arithmetic, MAX_ENTRIES};
use crate::model::kda::KdaBuffers;
use crate::model::mla::MlaBuffers;
use crate::model::mlp::MlpBuffers;
use crate::model::moe::{self, MoeBuffers, MoeStep};
use crate::model::{AttentionPart, FfnPart, Mix, Model, Numerics};
use crate::parallel::{Chunks, Pool, for_each};
use crate::state::{KdaState, LayerState, MlaState, SequenceState};
use crate::trace::Trace;

/// Which rows of a run give logits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Want {
    /// None of them: more of the prompt follows.
    None,
    /// The last one.
    Last,
    /// All of them.
    All,
}

/// Consecutive rows of one sequence in a step.
pub struct Run<'s> {
    /// The sequence, which the rows are appended to.
    pub state: &'s mut SequenceState,
    /// How many rows.
    pub rows: usize,
    /// Which of them give logits.
    pub want: Want,
}

/// What enters the first layer: the rows of all runs, one run after the other.
#[derive(Clone, Copy)]
pub enum Inputs<'s> {
    /// Token ids.
    Ids(&'s [u32]),
    /// Rows [rows, hidden] in place of embedded ids.
    Rows(&'s [f32]),
}

/// Sees the hidden state [rows, hidden] after each layer, and last the input of the head.
pub type Observer<'s> = dyn FnMut(usize, &[f32]) + Send + 's;

/// The model with its threads, experts and working memory.
pub struct Engine<'a> {
    model: Model<'a>,
    dense: Dense<'a>,
    embedding: Embedding,
    numerics: Numerics,
    pool: Pool,
    experts: ExpertStore,
    buffers: Buffers,
    clock: Clock,
    max_rows: usize,
}

impl<'a> Engine<'a> {
    /// An engine for steps of up to `max_rows` rows; `dense` is what `model` was made of.
    ///
    /// # Errors
    /// The config has more AttnRes blocks than are supported, or the embedding cannot be
    /// opened.
    pub fn new(
        model: Model<'a>,
        dense: Dense<'a>,
        numerics: Numerics,
        pool: Pool,
        experts: ExpertStore,
        max_rows: usize,
    ) -> anyhow::Result<Self> {
        if model.blocks() >= MAX_ENTRIES {
            let problem =
                format!("expected fewer than {MAX_ENTRIES} blocks, found {}", model.blocks());
            return Err(Error::unsupported(problem).item("attn_res_block_size").into());
        }
        let max_rows = max_rows.max(1);
        let buffers = Buffers::new(model.config, model.layers.len(), max_rows, numerics.dense);
        let embedding = Embedding::open(model.container)?;
        let clock = Clock::default();
        Ok(Self { model, dense, embedding, numerics, pool, experts, buffers, clock, max_rows })
    }

    /// Begins to bring weights into memory, in the background: dense ones in the order of
    /// their use; then, if the usage of experts is kept in the folder `usage`, those that
    /// former processes used most. To be called before the first step.
    pub fn prefetch(&mut self, usage: Option<&Path>) {
        let container = self.model.container;
        let warm = usage.and_then(|dir| self.experts.keep_usage(container, dir));
        self.dense.prefetch(move || warm.into_iter().for_each(WarmStart::begin));
    }

    /// The source of the dense weights, for statistics.
    pub fn dense(&self) -> &Dense<'a> {
        &self.dense
    }

    /// The model.
    pub fn model(&self) -> &Model<'a> {
        &self.model
    }

    /// The experts, for statistics.
    pub fn experts(&self) -> &ExpertStore {
        &self.experts
    }

    /// Takes the experts from another store from now on, in exchange for the one before.
    pub fn swap_experts(&mut self, store: &mut ExpertStore) {
        std::mem::swap(&mut self.experts, store);
    }

    /// How numbers are computed.
    pub fn numerics(&self) -> &Numerics {
        &self.numerics
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Measures the parts of every step from now on, from zero; spans and reads go to
    /// `trace` too.
    pub fn start_clock(&mut self, trace: Option<Arc<Trace>>) {
        self.experts.set_trace(trace.clone());
        self.clock.start(trace);
    }

    /// Measures no more, and tells the time of each part since the start.
    pub fn stop_clock(&mut self) -> PartTimes {
        self.experts.set_trace(None);
        self.clock.stop()
    }

    /// The threads, for measurements beside the model.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Most rows in a step.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// An empty sequence with room for `context` tokens.
    pub fn new_state(&self, context: usize) -> SequenceState {
        SequenceState::new(self.model.config, self.model.layers.len(), context, self.numerics.kv)
    }

    /// Appends the rows of `runs` to their sequences and returns the wanted logits,
    /// [wanted rows, vocab]. After an error, or when `cancel` was set, the sequences are
    /// torn and must be rolled back, restored or reset.
    ///
    /// # Errors
    /// An id outside the vocabulary, a full context, a torn sequence, a failed read, or
    /// [`Cancelled`].
    pub fn step(
        &mut self,
        inputs: Inputs<'_>,
        runs: &mut [Run<'_>],
        cancel: &AtomicBool,
        observer: Option<&mut Observer<'_>>,
    ) -> anyhow::Result<&[f32]> {
        let Self { model, dense, embedding, numerics, pool, experts, buffers, clock, max_rows } =
            self;
        let rows: usize = runs.iter().map(|r| r.rows).sum();
        check_step(model, &inputs, runs, rows, *max_rows)?;
        runs.iter_mut().for_each(|r| r.state.begin_step());
        dense.begin_step(runs.iter().any(|r| r.want != Want::None));
        clock.begin();
        let mut step = Step { model, n: numerics, experts, b: buffers, clock, rows, cancel };
        step.embed(inputs, embedding)?;
        pool.install(|| step.forward(runs, observer))?;
        dense.end_step();
        runs.iter_mut().for_each(|r| r.state.end_step(r.rows));
        Ok(&self.buffers.logits)
    }

    /// Logits of the last step, [wanted rows, vocab].
    pub fn logits(&self) -> &[f32] {
        &self.buffers.logits
    }

    /// Takes a sequence back to `position`, also out of a torn step, with the bits it had
    /// there. What [`SequenceState::undo_position`] says is possible.
    ///
    /// # Panics
    /// The sequence keeps no undo record that reaches back to `position`.
    pub fn roll_back(&mut self, state: &mut SequenceState, position: usize) {
        assert_eq!(state.undo_position(position), Some(position), "a position on record");
        let Self { model, numerics, pool, buffers, .. } = self;
        let layers = model.layers.iter().zip(&mut state.layers);
        pool.install(|| {
            for (layer, state) in layers {
                if let (AttentionPart::Kda(part), LayerState::Kda(state)) =
                    (&layer.attention, state)
                {
                    part.roll_back(numerics, position, state, &mut buffers.kda);
                }
            }
        });
        state.cut_to(position);
    }
}

/// The step was given up because its owner asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cancelled;

impl std::fmt::Display for Cancelled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cancelled")
    }
}

impl std::error::Error for Cancelled {}

fn check_step(
    model: &Model,
    inputs: &Inputs<'_>,
    runs: &[Run<'_>],
    rows: usize,
    max_rows: usize,
) -> anyhow::Result<()> {
    let given = match inputs {
        Inputs::Ids(ids) => {
            let vocab = model.config.vocab;
            if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
                bail!("token id {id} is not in the vocabulary of {vocab}");
            }
            ids.len()
        }
        Inputs::Rows(x) => x.len() / model.config.hidden,
    };
    assert!(rows > 0 && given == rows && rows <= max_rows, "rows of a step");
    for run in runs {
        let (position, context) = (run.state.position(), run.state.context());
        if position + run.rows > context {
            let error = Error::unsupported(format!(
                "the context is full: {position} tokens taken in, {} more do not fit into {context}",
                run.rows
            ));
            return Err(error.hint("give a larger --context").into());
        }
        if run.state.is_torn() {
            bail!("the sequence was given up half way and must start again");
        }
    }
    Ok(())
}

/// Bytes of working memory for steps of up to `rows` rows through `layers` layers. The
/// buffers are made for this and dropped again; untouched, they take no memory.
pub(crate) fn working_bytes(
    config: &ModelConfig,
    layers: usize,
    rows: usize,
    arithmetic: Arithmetic,
) -> u64 {
    Buffers::new(config, layers, rows, arithmetic).bytes()
}

/// Working memory of a step, all of it reserved from the config.
struct Buffers {
    /// Running sum, [rows, hidden].
    prefix: Vec<f32>,
    /// Running sums at the starts of blocks.
    blocks: Vec<Vec<f32>>,
    /// Input and output of a layer part.
    x: Vec<f32>,
    out: Vec<f32>,
    shared: Vec<f32>,
    kda: KdaBuffers,
    mla: MlaBuffers,
    mlp: MlpBuffers,
    moe: MoeBuffers,
    head: Activations,
    logits: Vec<f32>,
}

impl Buffers {
    fn new(config: &ModelConfig, layers: usize, rows: usize, arithmetic: Arithmetic) -> Self {
        let wide = || vec![0.0; rows * config.hidden];
        let blocks = layers.div_ceil(config.attn_res_block);
        Self {
            prefix: wide(),
            blocks: (0..blocks).map(|_| wide()).collect(),
            x: wide(),
            out: wide(),
            shared: wide(),
            kda: KdaBuffers::new(rows, config, arithmetic),
            mla: MlaBuffers::new(rows, config, arithmetic),
            mlp: MlpBuffers::new(rows, config, arithmetic),
            moe: MoeBuffers::new(rows, config, arithmetic),
            head: Activations::with_room(rows, config.hidden, arithmetic),
            logits: Vec::with_capacity(rows * config.vocab),
        }
    }

    /// Bytes reserved.
    fn bytes(&self) -> u64 {
        let Self { prefix, blocks, x, out, shared, kda, mla, mlp, moe, head, logits } = self;
        let rows = [prefix, x, out, shared, logits].into_iter().chain(blocks);
        let floats: usize = rows.map(|b| b.capacity() * size_of::<f32>()).sum();
        let parts = kda.bytes() + mla.bytes() + mlp.bytes() + moe.bytes();
        floats as u64 + parts + head.bytes()
    }
}

struct Step<'s, 'a> {
    model: &'s Model<'a>,
    n: &'s Numerics,
    experts: &'s ExpertStore,
    b: &'s mut Buffers,
    clock: &'s mut Clock,
    rows: usize,
    cancel: &'s AtomicBool,
}

impl Step<'_, '_> {
    fn forward(
        &mut self,
        runs: &mut [Run<'_>],
        mut observer: Option<&mut Observer<'_>>,
    ) -> anyhow::Result<()> {
        let (hidden, wide) = (self.model.config.hidden, self.rows * self.model.config.hidden);
        let mut blocks = 0;
        for i in 0..self.model.layers.len() {
            if self.cancel.load(Ordering::Relaxed) {
                bail!(Cancelled);
            }
            let starts_block = i % self.model.config.attn_res_block == 0;
            let layer = &self.model.layers[i];
            if blocks == 0 {
                self.b.x[..wide].copy_from_slice(&self.b.prefix[..wide]);
                for_each(Chunks::new(&mut self.b.x[..wide], hidden), 1, |_, x| {
                    self.n.kernels.rms_norm(x.into_slice(), layer.input_norm, self.n.eps);
                });
            } else {
                self.mix(&layer.attention_mix, layer.input_norm, blocks);
            }
            if starts_block {
                self.b.blocks[blocks][..wide].copy_from_slice(&self.b.prefix[..wide]);
                self.b.prefix[..wide].fill(0.0);
                blocks += 1;
            }
            self.clock.lap(Part::Mix, i);
            self.attention(i, runs)?;
            self.clock.lap(Part::Attention, i);
            self.add_out();
            self.mix(&layer.ffn_mix, layer.ffn_norm, blocks);
            self.clock.lap(Part::Mix, i);
            self.ffn(i)?;
            self.add_out();
            if let Some(observer) = &mut observer {
                observer(i, &self.b.prefix[..wide]);
            }
        }
        self.mix(&self.model.output_mix, self.model.final_norm, blocks);
        if let Some(observer) = &mut observer {
            observer(self.model.layers.len(), &self.b.x[..wide]);
        }
        self.clock.lap(Part::Mix, self.model.layers.len());
        self.head(runs)?;
        self.clock.lap(Part::Head, self.model.layers.len());
        Ok(())
    }

    fn embed(&mut self, inputs: Inputs<'_>, embedding: &mut Embedding) -> anyhow::Result<()> {
        let (hidden, wide) = (self.model.config.hidden, self.rows * self.model.config.hidden);
        match inputs {
            Inputs::Rows(x) => self.b.prefix[..wide].copy_from_slice(x),
            Inputs::Ids(ids) => {
                for (row, &id) in self.b.prefix.chunks_exact_mut(hidden).zip(ids) {
                    embedding.read(id, row)?;
                }
            }
        }
        Ok(())
    }

    /// `x <- norm(mix(blocks, prefix))`, row by row.
    fn mix(&mut self, mix: &Mix, norm: &[half::bf16], blocks: usize) {
        let (hidden, kernels, eps) = (self.model.config.hidden, self.n.kernels, self.n.eps);
        let Buffers { prefix, blocks: all, x, .. } = &mut *self.b;
        let (prefix, all) = (&*prefix, &all[..blocks]);
        let rows = Chunks::new(&mut x[..self.rows * hidden], hidden);
        for_each((rows, 0..self.rows), 1, |row, (x, _)| {
            let (x, span) = (x.into_slice(), row * hidden..(row + 1) * hidden);
            let entries = all.iter().map(|b| &b[span.clone()]);
            let entries = entries.chain(std::iter::once(&prefix[span.clone()]));
            kernels.attn_res_mix(entries, mix.norm, mix.projection, eps, x);
            kernels.rms_norm(x, norm, eps);
        });
    }

    fn attention(&mut self, layer: usize, runs: &mut [Run<'_>]) -> anyhow::Result<()> {
        let wide = self.rows * self.model.config.hidden;
        let Buffers { x, out, kda, mla, .. } = &mut *self.b;
        let (x, out) = (&x[..wide], &mut out[..wide]);
        match &self.model.layers[layer].attention {
            AttentionPart::Kda(part) => part.forward(self.n, x, kda_runs(runs, layer), kda, out),
            AttentionPart::Mla(part) => part.forward(self.n, x, mla_runs(runs, layer), mla, out),
        }
    }

    fn ffn(&mut self, layer: usize) -> anyhow::Result<()> {
        let wide = self.rows * self.model.config.hidden;
        let Buffers { x, out, shared, mlp, moe, .. } = &mut *self.b;
        let (x, out, shared) = (&x[..wide], &mut out[..wide], &mut shared[..wide]);
        let next = match self.model.layers.get(layer + 1).map(|next| &next.ffn) {
            Some(FfnPart::Moe(next)) => Some(next),
            _ => None,
        };
        let step = MoeStep {
            numerics: self.n,
            experts: self.experts,
            container: self.model.container,
            layer,
            next,
            cancel: self.cancel,
        };
        match &self.model.layers[layer].ffn {
            FfnPart::Dense(part) => {
                moe::guess_next(&step, x, self.rows, moe)?;
                self.clock.lap(Part::Router, layer);
                part.forward(self.n, x, self.rows, mlp, out)?;
                self.clock.lap(Part::Dense, layer);
            }
            FfnPart::Moe(part) => part.forward(&step, x, mlp, moe, self.clock, out, shared)?,
        }
        Ok(())
    }

    fn add_out(&mut self) {
        let wide = self.rows * self.model.config.hidden;
        let out = &self.b.out[..wide];
        self.b.prefix[..wide].iter_mut().zip(out).for_each(|(p, o)| *p += o);
    }

    /// Logits of the rows that are wanted, in order.
    fn head(&mut self, runs: &[Run<'_>]) -> anyhow::Result<()> {
        let (hidden, vocab) = (self.model.config.hidden, self.model.config.vocab);
        let mut wanted = 0;
        let mut first = 0;
        for run in runs {
            let rows = match run.want {
                Want::None => 0..0,
                Want::Last => first + run.rows - 1..first + run.rows,
                Want::All => first..first + run.rows,
            };
            first += run.rows;
            for row in rows {
                self.b.x.copy_within(row * hidden..(row + 1) * hidden, wanted * hidden);
                wanted += 1;
            }
        }
        self.b.logits.resize(wanted * vocab, 0.0);
        if wanted > 0 {
            let x = &self.b.x[..wanted * hidden];
            let products = [(&self.model.head, &mut self.b.logits[..])];
            dense::multiply(self.n, x, wanted, products, &mut self.b.head)?;
        }
        Ok(())
    }
}

/// Rows of each run in the step.
fn ranges<'r, 's>(
    runs: &'r mut [Run<'s>],
) -> impl Iterator<Item = (Range<usize>, &'r mut SequenceState)> {
    let mut at = 0;
    runs.iter_mut().map(move |run| {
        let range = at..at + run.rows;
        at = range.end;
        (range, &mut *run.state)
    })
}

fn kda_runs<'r>(
    runs: &'r mut [Run<'_>],
    layer: usize,
) -> impl Iterator<Item = (Range<usize>, &'r mut KdaState)> {
    ranges(runs).map(move |(range, state)| match &mut state.layers[layer] {
        LayerState::Kda(kda) => (range, kda),
        LayerState::Mla(_) => unreachable!("states are made from the same config"),
    })
}

fn mla_runs<'r>(
    runs: &'r mut [Run<'_>],
    layer: usize,
) -> impl Iterator<Item = (Range<usize>, &'r mut MlaState)> {
    ranges(runs).map(move |(range, state)| match &mut state.layers[layer] {
        LayerState::Mla(mla) => (range, mla),
        LayerState::Kda(_) => unreachable!("states are made from the same config"),
    })
}

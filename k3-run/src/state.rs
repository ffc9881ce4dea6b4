//! What one sequence carries from token to token: KDA states, MLA latents, its length.
//!
//! MLA rows are only ever appended, so an earlier position is a prefix of them. A KDA
//! state has no earlier positions in it: going back takes a copy made there (see
//! [`SequenceState::restore`]), or the undo record of the last few tokens.

use k3_formats::config::{Attention, ModelConfig};
use k3_formats::{Error, Result};

mod latents;
mod undo;

pub use latents::{KvType, LatentRows};
pub use undo::{KdaInputs, KdaUndo};

/// State of one KDA layer.
#[derive(Debug)]
pub struct KdaState {
    /// Last `conv_width - 1` inputs of the q, k and v convolutions, oldest first:
    /// 3 x [conv_width - 1, width].
    pub conv: [Vec<f32>; 3],
    /// Associative memory [heads, key, value].
    pub memory: Vec<f32>,
    /// The way back over the last tokens, if it is kept.
    pub undo: Option<Box<KdaUndo>>,
}

impl KdaState {
    /// Everything but the undo record, in a fixed order.
    fn parts(&self) -> [&[f32]; 4] {
        let [q, k, v] = &self.conv;
        [q, k, v, &self.memory]
    }

    fn parts_mut(&mut self) -> [&mut [f32]; 4] {
        let [q, k, v] = &mut self.conv;
        [q, k, v, &mut self.memory]
    }
}

/// Latent cache of one MLA layer: [position, kv_lora + rope].
#[derive(Debug)]
pub struct MlaState {
    /// Rows of all positions so far.
    pub rows: LatentRows,
}

/// State of one layer.
#[derive(Debug)]
pub enum LayerState {
    /// Linear attention: constant in size.
    Kda(KdaState),
    /// Latent attention: one row per position.
    Mla(MlaState),
}

impl LayerState {
    fn kda(&self) -> Option<&KdaState> {
        match self {
            Self::Kda(kda) => Some(kda),
            Self::Mla(_) => None,
        }
    }

    fn kda_mut(&mut self) -> Option<&mut KdaState> {
        match self {
            Self::Kda(kda) => Some(kda),
            Self::Mla(_) => None,
        }
    }

    fn mla(&self) -> Option<&MlaState> {
        match self {
            Self::Kda(_) => None,
            Self::Mla(mla) => Some(mla),
        }
    }

    fn mla_mut(&mut self) -> Option<&mut MlaState> {
        match self {
            Self::Kda(_) => None,
            Self::Mla(mla) => Some(mla),
        }
    }
}

/// State of one sequence over all layers.
#[derive(Debug)]
pub struct SequenceState {
    position: usize,
    context: usize,
    torn: bool,
    undo_rows: usize,
    /// Values in a latent row.
    cache_width: usize,
    pub(crate) layers: Vec<LayerState>,
}

impl SequenceState {
    /// An empty sequence that may grow to `context` tokens, in its first `layers` layers,
    /// with its latents kept as `kv`.
    pub fn new(config: &ModelConfig, layers: usize, context: usize, kv: KvType) -> Self {
        let layer = |kind: &Attention| match kind {
            Attention::Kda => {
                let past = (config.kda.conv_width - 1) * config.kda.width();
                LayerState::Kda(KdaState {
                    conv: std::array::from_fn(|_| vec![0.0; past]),
                    memory: vec![0.0; config.kda.width() * config.kda.head_dim],
                    undo: None,
                })
            }
            Attention::Mla => LayerState::Mla(MlaState { rows: LatentRows::new(kv) }),
        };
        let layers = config.attention[..layers].iter().map(layer).collect();
        let cache_width = config.mla.cache_width();
        Self { position: 0, context, torn: false, undo_rows: 0, cache_width, layers }
    }

    /// Reserves the latent cache of the whole context, so that it never moves. Its pages
    /// are taken as positions are filled.
    ///
    /// # Errors
    /// The system does not give that much memory.
    pub fn reserve(&mut self) -> Result<()> {
        let (context, wanted) = (self.context, self.context.saturating_mul(self.cache_width));
        for rows in self.latents_mut() {
            rows.reserve(wanted).map_err(|_| {
                Error::unsupported(format!("no memory for a context of {context} tokens"))
                    .hint("give a smaller --context")
            })?;
        }
        Ok(())
    }

    /// Keeps what it takes to go back over the last `rows` tokens or one longer step.
    pub fn keep_undo(&mut self, config: &ModelConfig, rows: usize) {
        let position = self.position;
        self.undo_rows = rows;
        for kda in self.kda_mut() {
            kda.undo = Some(Box::new(KdaUndo::new(&config.kda, rows, position)));
        }
    }

    /// Tokens that undo records are kept of, 0 if there are none.
    pub fn undo_rows(&self) -> usize {
        self.undo_rows
    }

    /// Tokens taken in so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Tokens there is room for.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether a step was given up half way, so that the layers disagree.
    pub fn is_torn(&self) -> bool {
        self.torn
    }

    pub(crate) fn begin_step(&mut self) {
        self.torn = true;
    }

    pub(crate) fn end_step(&mut self, tokens: usize) {
        self.torn = false;
        self.position += tokens;
    }

    /// The deepest position up to `limit` that the undo records lead back to; none if
    /// they are not kept. A torn step is undone by going to [`SequenceState::position`].
    pub fn undo_position(&self, limit: usize) -> Option<usize> {
        let mut undos = self.layers.iter().filter_map(LayerState::kda).map(|kda| &kda.undo);
        let start = limit.min(self.position);
        let deepest = undos.clone().try_fold(start, |p, undo| undo.as_ref()?.reach(p))?;
        // Layers that a torn step went through may keep nothing older than that step.
        undos
            .all(|undo| undo.as_ref().is_some_and(|undo| undo.reach(deepest) == Some(deepest)))
            .then_some(deepest)
    }

    /// Declares the layers to be at `position`, to which the KDA layers have been taken,
    /// and drops the latents behind it.
    pub(crate) fn cut_to(&mut self, position: usize) {
        let rows = position * self.cache_width;
        self.latents_mut().for_each(|latents| latents.resize(rows));
        (self.position, self.torn) = (position, false);
    }

    /// Forgets everything; keeps the memory.
    pub fn reset(&mut self) {
        self.kda_values_mut().for_each(|values| values.fill(0.0));
        self.replaced(0);
    }

    /// Goes back to `position`, where the KDA states were what `copy` writes into the
    /// slices it is given one after the other (those of [`SequenceState::kda_values`]).
    ///
    /// # Errors
    /// That of `copy`; the sequence is torn then.
    ///
    /// # Panics
    /// The sequence has never been at that position.
    pub fn restore<E>(
        &mut self,
        position: usize,
        copy: impl FnMut(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let rows = position * self.cache_width;
        assert!(self.latents_mut().all(|latents| latents.len() >= rows), "a position passed");
        self.torn = true;
        self.forget_undo(usize::MAX);
        self.kda_values_mut().try_for_each(copy)?;
        self.replaced(position);
        Ok(())
    }

    /// Makes room for the latents of positions up to `position`, to be filled in.
    pub(crate) fn grow_latents(&mut self, position: usize) {
        let values = position * self.cache_width;
        self.latents_mut().for_each(|latents| latents.resize(values));
    }

    /// Goes on from `position` with zeros behind it: for measurements, where only their number
    /// counts.
    pub(crate) fn pretend(&mut self, position: usize) {
        self.grow_latents(position);
        self.cut_to(position);
    }

    fn replaced(&mut self, position: usize) {
        self.forget_undo(position);
        self.cut_to(position);
    }

    fn forget_undo(&mut self, position: usize) {
        let undos = self.kda_mut().filter_map(|kda| kda.undo.as_deref_mut());
        undos.for_each(|undo| undo.forget(position));
    }

    /// Convolution inputs and memories of the KDA layers, layer after layer.
    pub fn kda_values(&self) -> impl Iterator<Item = &[f32]> {
        self.layers.iter().filter_map(LayerState::kda).flat_map(KdaState::parts)
    }

    fn kda_values_mut(&mut self) -> impl Iterator<Item = &mut [f32]> {
        self.kda_mut().flat_map(KdaState::parts_mut)
    }

    fn kda_mut(&mut self) -> impl Iterator<Item = &mut KdaState> {
        self.layers.iter_mut().filter_map(LayerState::kda_mut)
    }

    /// Latent rows of the MLA layers, layer after layer, each [position, kv_lora + rope].
    pub fn latents(&self) -> impl Iterator<Item = &LatentRows> {
        self.layers.iter().filter_map(LayerState::mla).map(|mla| &mla.rows)
    }

    pub(crate) fn latents_mut(&mut self) -> impl Iterator<Item = &mut LatentRows> {
        self.layers.iter_mut().filter_map(LayerState::mla_mut).map(|mla| &mut mla.rows)
    }
}

/// Bytes of the KDA states of the first `layers` layers, which is also what a copy of
/// them takes.
pub fn kda_bytes(config: &ModelConfig, layers: usize) -> u64 {
    let kda = &config.kda;
    let layer = (3 * (kda.conv_width - 1) + kda.head_dim) * kda.width() * size_of::<f32>();
    (count(config, layers, Attention::Kda) * layer) as u64
}

/// Values in the latents of `context` tokens in the first `layers` layers.
pub fn latent_values(config: &ModelConfig, layers: usize, context: usize) -> u64 {
    let token = count(config, layers, Attention::Mla) * config.mla.cache_width();
    token as u64 * context as u64
}

/// Bytes of the latents of `context` tokens in the first `layers` layers.
pub fn latent_bytes(config: &ModelConfig, layers: usize, context: usize, kv: KvType) -> u64 {
    latent_values(config, layers, context) * kv.bytes() as u64
}

/// Bytes of the undo records of `rows` tokens in the first `layers` layers.
pub fn undo_bytes(config: &ModelConfig, layers: usize, rows: usize) -> u64 {
    let row = (KdaUndo::row_values(&config.kda) * size_of::<f32>()) as u64;
    let layer = row * rows as u64;
    kda_bytes(config, layers) + count(config, layers, Attention::Kda) as u64 * layer
}

fn count(config: &ModelConfig, layers: usize, kind: Attention) -> usize {
    let layers = layers.min(config.attention.len());
    config.attention[..layers].iter().filter(|&&a| a == kind).count()
}

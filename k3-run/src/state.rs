//! What one sequence carries from token to token: KDA states, MLA latents, its length.

use k3_formats::config::{Attention, ModelConfig};

/// State of one KDA layer.
#[derive(Debug, Clone)]
pub struct KdaState {
    /// Last `conv_width - 1` inputs of the q, k and v convolutions, oldest first:
    /// 3 x [conv_width - 1, width].
    pub conv: [Vec<f32>; 3],
    /// Associative memory [heads, key, value].
    pub memory: Vec<f32>,
}

/// Latent cache of one MLA layer: [position, kv_lora + rope].
#[derive(Debug, Clone)]
pub struct MlaState {
    /// Rows of all positions so far.
    pub rows: Vec<f32>,
}

/// State of one layer.
#[derive(Debug, Clone)]
pub enum LayerState {
    /// Linear attention: constant in size.
    Kda(KdaState),
    /// Latent attention: one row per position.
    Mla(MlaState),
}

/// State of one sequence over all layers.
#[derive(Debug, Clone)]
pub struct SequenceState {
    position: usize,
    context: usize,
    torn: bool,
    pub(crate) layers: Vec<LayerState>,
}

impl SequenceState {
    /// An empty sequence with room for `context` tokens in its first `layers` layers.
    /// Pages of the latent cache are taken as positions are filled.
    pub fn new(config: &ModelConfig, layers: usize, context: usize) -> Self {
        let layer = |kind: &Attention| match kind {
            Attention::Kda => {
                let past = (config.kda.conv_width - 1) * config.kda.width();
                LayerState::Kda(KdaState {
                    conv: std::array::from_fn(|_| vec![0.0; past]),
                    memory: vec![0.0; config.kda.width() * config.kda.head_dim],
                })
            }
            Attention::Mla => LayerState::Mla(MlaState {
                rows: Vec::with_capacity(context * config.mla.cache_width()),
            }),
        };
        let layers = config.attention[..layers].iter().map(layer).collect();
        Self { position: 0, context, torn: false, layers }
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

    /// Forgets everything; keeps the memory.
    pub fn reset(&mut self) {
        (self.position, self.torn) = (0, false);
        for layer in &mut self.layers {
            match layer {
                LayerState::Kda(kda) => {
                    kda.conv.iter_mut().for_each(|c| c.fill(0.0));
                    kda.memory.fill(0.0);
                }
                LayerState::Mla(mla) => mla.rows.clear(),
            }
        }
    }
}

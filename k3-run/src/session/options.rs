//! What a session keeps, and what that takes.

use std::path::PathBuf;

use k3_formats::config::ModelConfig;

use crate::state::{KvType, kda_bytes, latent_bytes, undo_bytes};

/// Tokens that can be undone one by one. A renewal of the older state costs one copy of
/// the KDA states; spread over this many tokens it is well under a hundredth of the bytes
/// a token moves anyway.
const UNDO_ROWS: usize = 8;

/// What a session keeps.
#[derive(Debug, Clone, Default)]
pub struct SessionOptions {
    /// Tokens there is room for.
    pub context: usize,
    /// Copies of the KDA states at turn boundaries.
    pub checkpoints: usize,
    /// Folder for the copies; in memory if there is none.
    pub checkpoint_dir: Option<PathBuf>,
    /// Tokens that can be undone; 0 keeps no undo records, and a step that is given up
    /// costs what lies behind the last checkpoint.
    pub undo_rows: usize,
}

impl SessionOptions {
    /// No way back but the start.
    pub fn plain(context: usize) -> Self {
        Self { context, ..Self::default() }
    }

    /// For conversations: steps can be given up at no loss, and up to `speculate` guessed
    /// tokens taken back.
    pub fn conversation(
        context: usize,
        checkpoints: usize,
        checkpoint_dir: Option<PathBuf>,
        speculate: usize,
    ) -> Self {
        let undo_rows = UNDO_ROWS.max(speculate + 1);
        Self { context, checkpoints, checkpoint_dir, undo_rows }
    }

    /// Memory that a session takes once its context is full, in bytes, for a model of
    /// `layers` layers that keeps its latents as `kv`.
    pub fn memory_bytes(&self, config: &ModelConfig, layers: usize, kv: KvType) -> u64 {
        let state = kda_bytes(config, layers) + latent_bytes(config, layers, self.context, kv);
        state + self.kept_bytes(config, layers)
    }

    /// What of [`SessionOptions::memory_bytes`] is not the state itself: undo records,
    /// checkpoints, tokens and logits.
    pub fn kept_bytes(&self, config: &ModelConfig, layers: usize) -> u64 {
        let logits = (config.vocab * size_of::<f32>()) as u64;
        let undo = match self.undo_rows {
            0 => 0,
            rows => undo_bytes(config, layers, rows),
        };
        // Taking a checkpoint frees an older one first.
        let checkpoint = match self.checkpoint_dir {
            Some(_) => logits,
            None => kda_bytes(config, layers) + logits,
        };
        let tokens = (self.context * size_of::<u32>()) as u64;
        undo + checkpoint * self.checkpoints as u64 + logits + tokens
    }
}

//! Bytes that a model needs, from its dimensions alone: what a runtime reads and keeps.

use k3_formats::config::{Attention, ModelConfig};
use k3_formats::tensor_name::{ExpertPart, expert_bytes};
use serde::Serialize;

/// Bytes and weights of the parts of a model, all derived from its config.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Footprint {
    /// Weights of one routed expert.
    pub expert_params: u64,
    /// Bytes of one routed expert as stored.
    pub expert_bytes: u64,
    /// Bytes of the routed experts of one layer.
    pub layer_experts_bytes: u64,
    /// Routed experts of all layers.
    pub experts: u64,
    /// Bytes of all routed experts.
    pub all_experts_bytes: u64,
    /// Bytes of the experts that one token chooses in one layer.
    pub token_layer_bytes: u64,
    /// Bytes of the experts that one token chooses in all layers.
    pub token_bytes: u64,
    /// Bytes of one row of the embedding.
    pub embedding_row_bytes: u64,
    /// Bytes of the recurrent state of one KDA layer, f32.
    pub kda_state_layer_bytes: u64,
    /// Bytes of the recurrent state of all KDA layers, f32.
    pub kda_state_bytes: u64,
    /// Bytes of the convolution state of all KDA layers, f32.
    pub conv_state_bytes: u64,
    /// Values that the MLA layers keep per token of context.
    pub cache_values_per_token: u64,
    /// Bytes of those as f32.
    pub cache_bytes_per_token: u64,
    /// Bytes of AttnRes vectors per position in flight, f32.
    pub attn_res_bytes: u64,
    /// Bytes of one position's logits, f32.
    pub logits_bytes: u64,
}

impl Footprint {
    /// The footprint of a model.
    pub fn of(config: &ModelConfig) -> Self {
        const F32: u64 = 4;
        let count = |kind| config.attention.iter().filter(|&&a| a == kind).count() as u64;
        let (kda_layers, mla_layers) = (count(Attention::Kda), count(Attention::Mla));
        let moe_layers = config.moe_layers().len() as u64;
        let kda = &config.kda;
        let kda_state = (kda.heads * kda.head_dim * kda.head_dim) as u64 * F32;
        // Queries, keys and values each keep all taps but the current one.
        let conv_state = 3 * (kda.conv_width - 1) as u64 * kda.width() as u64 * F32;
        let expert = expert_bytes(config);
        let packed = |part| ExpertPart::bytes(part, config);
        let codes = packed(ExpertPart::GatePacked)
            + packed(ExpertPart::DownPacked)
            + packed(ExpertPart::UpPacked);
        let per_layer = config.moe.experts as u64;
        let token_layer = config.moe.top_k as u64 * expert;
        let cache_values = mla_layers * config.mla.cache_width() as u64;
        // One vector per finished block, and the sum since the last one.
        let attn_res = config.layers().div_ceil(config.attn_res_block) + 1;
        Self {
            expert_params: 2 * codes,
            expert_bytes: expert,
            layer_experts_bytes: per_layer * expert,
            experts: moe_layers * per_layer,
            all_experts_bytes: moe_layers * per_layer * expert,
            token_layer_bytes: token_layer,
            token_bytes: moe_layers * token_layer,
            embedding_row_bytes: 2 * config.hidden as u64,
            kda_state_layer_bytes: kda_state,
            kda_state_bytes: kda_layers * kda_state,
            conv_state_bytes: kda_layers * conv_state,
            cache_values_per_token: cache_values,
            cache_bytes_per_token: cache_values * F32,
            attn_res_bytes: attn_res as u64 * config.hidden as u64 * F32,
            logits_bytes: config.vocab as u64 * F32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::{Preset, model_config};

    #[test]
    fn the_release_has_its_known_sizes() {
        let config = model_config(&Preset::Full.dims()).unwrap();
        let f = Footprint::of(&config);
        for (found, known) in [
            (f.expert_params, 33_030_144),
            (f.expert_bytes, 17_547_264),
            (f.layer_experts_bytes, 15_722_348_544),
            (f.experts, 82_432),
            (f.all_experts_bytes, 1_446_456_066_048),
            (f.token_layer_bytes, 280_756_224),
            (f.token_bytes, 25_829_572_608),
            (f.kda_state_layer_bytes, 6_291_456),
            (f.kda_state_bytes, 434_110_464),
            (f.conv_state_bytes, 30_523_392),
            (f.cache_values_per_token, 13_824),
            (f.cache_bytes_per_token, 55_296),
            (f.attn_res_bytes, 258_048),
        ] {
            assert_eq!(found, known);
        }
    }
}

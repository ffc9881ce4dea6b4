//! The model: views over a container's tensors, one struct per layer part.
//!
//! Nothing is copied or converted; a `Model` borrows the container and is checked once,
//! when it is made.

use half::bf16;
use k3_formats::config::{Attention, ModelConfig};
use k3_formats::container::Container;
use k3_formats::tensor_name::{TEXT_PREFIX, head_name, layer_prefix};

use crate::dense::{Dense, Weight};
use crate::kernels::{Arithmetic, Kernels};
use crate::state::KvType;

pub mod kda;
pub mod mla;
pub mod mlp;
pub mod moe;

use kda::Kda;
use mla::Mla;
use mlp::Mlp;
use moe::Moe;

/// Weights of one AttnRes mix, an attention over block snapshots and the running sum in
/// place of a residual stream ([`Kernels::attn_res_mix`]).
#[derive(Clone, Copy)]
pub struct Mix<'a> {
    /// Norm weight, `[hidden]`.
    pub norm: &'a [bf16],
    /// Projection to a score, `[hidden]`.
    pub projection: &'a [bf16],
}

/// Bytes reserved by these buffers.
fn f32_bytes<const N: usize>(buffers: [&Vec<f32>; N]) -> u64 {
    buffers.iter().map(|b| (b.capacity() * size_of::<f32>()) as u64).sum()
}

/// How numbers are computed: the kernels, their precision, and the config's constants.
#[derive(Debug, Clone, Copy)]
pub struct Numerics {
    /// Instruction set.
    pub kernels: Kernels,
    /// Activations of dense matrices.
    pub dense: Arithmetic,
    /// Activations of routed experts.
    pub experts: Arithmetic,
    /// Part of a token's expert weight at which the rest of its experts is dropped; changes
    /// results.
    pub expert_top_p: Option<f32>,
    /// How MLA latents are kept.
    pub kv: KvType,
    /// eps of every RMSNorm but MLA's two low-rank ones.
    pub eps: f32,
    /// See [`ModelConfig::situ_beta`].
    pub situ_beta: f32,
    /// See [`ModelConfig::situ_linear_beta`].
    pub situ_linear_beta: f32,
    /// See [`k3_formats::config::KdaConfig::gate_lower_bound`].
    pub gate_lower_bound: f32,
}

impl Numerics {
    /// The config's constants with these kernels.
    pub fn new(
        config: &ModelConfig,
        kernels: Kernels,
        dense: Arithmetic,
        experts: Arithmetic,
    ) -> Self {
        Self {
            kernels,
            dense,
            experts,
            expert_top_p: None,
            kv: KvType::default(),
            eps: config.rms_eps,
            situ_beta: config.situ_beta,
            situ_linear_beta: config.situ_linear_beta,
            gate_lower_bound: config.kda.gate_lower_bound,
        }
    }
}

/// Attention of a layer.
pub enum AttentionPart<'a> {
    /// Linear attention.
    Kda(Kda<'a>),
    /// Latent attention.
    Mla(Mla<'a>),
}

/// Feed-forward part of a layer.
#[expect(clippy::large_enum_variant, reason = "one per layer, and nearly all are the large one")]
pub enum FfnPart<'a> {
    /// One dense FFN.
    Dense(Mlp<'a>),
    /// Routed and shared experts.
    Moe(Moe<'a>),
}

/// One decoder layer.
pub struct Layer<'a> {
    /// What the attention reads: a mix of the blocks and the running sum.
    pub attention_mix: Mix<'a>,
    /// Norm before the attention, `[hidden]`.
    pub input_norm: &'a [bf16],
    /// The attention.
    pub attention: AttentionPart<'a>,
    /// What the FFN reads.
    pub ffn_mix: Mix<'a>,
    /// Norm before the FFN, `[hidden]`.
    pub ffn_norm: &'a [bf16],
    /// The FFN.
    pub ffn: FfnPart<'a>,
}

/// The text model.
pub struct Model<'a> {
    /// Dimensions.
    pub config: &'a ModelConfig,
    /// Where the tensors and the expert places are.
    pub container: &'a Container,
    /// Decoder layers.
    pub layers: Vec<Layer<'a>>,
    /// Mix of all blocks before the final norm.
    pub output_mix: Mix<'a>,
    /// Final norm, `[hidden]`.
    pub final_norm: &'a [bf16],
    /// Output matrix [vocab, hidden].
    pub head: Weight<'a>,
}

impl<'a> Model<'a> {
    /// Builds the views of the first `layers` layers, for which `dense` was made.
    ///
    /// # Errors
    /// A tensor does not have the shape the config implies.
    pub fn new(container: &'a Container, dense: &Dense<'a>, layers: usize) -> anyhow::Result<Self> {
        let config = &container.config;
        let views = Views { container, dense };
        let model = format!("{TEXT_PREFIX}model");
        Ok(Self {
            config,
            container,
            layers: (0..layers).map(|i| views.layer(i)).collect::<anyhow::Result<_>>()?,
            output_mix: views.mix(&format!("{model}.output_attn_res"))?,
            final_norm: container.bf16s(&format!("{model}.norm.weight"))?,
            head: views.matrix(&head_name())?,
        })
    }

    /// Most blocks that AttnRes mixes: one starts every `attn_res_block` layers.
    pub fn blocks(&self) -> usize {
        self.layers.len().div_ceil(self.config.attn_res_block)
    }
}

/// Builds the parts of a model by tensor name.
#[derive(Clone, Copy)]
pub(crate) struct Views<'a, 'd> {
    container: &'a Container,
    dense: &'d Dense<'a>,
}

impl<'a> Views<'a, '_> {
    pub(crate) fn matrix(&self, name: &str) -> anyhow::Result<Weight<'a>> {
        self.dense.weight(name)
    }

    pub(crate) fn config(&self) -> &'a ModelConfig {
        &self.container.config
    }

    pub(crate) fn bf16s(&self, name: &str) -> anyhow::Result<&'a [bf16]> {
        Ok(self.container.bf16s(name)?)
    }

    pub(crate) fn f32s(&self, name: &str) -> anyhow::Result<&'a [f32]> {
        Ok(self.container.f32s(name)?)
    }

    fn mix(&self, prefix: &str) -> anyhow::Result<Mix<'a>> {
        Ok(Mix {
            norm: self.bf16s(&format!("{prefix}_norm.weight"))?,
            projection: self.bf16s(&format!("{prefix}_proj.weight"))?,
        })
    }

    fn layer(&self, i: usize) -> anyhow::Result<Layer<'a>> {
        let (p, config) = (layer_prefix(i), &self.container.config);
        let attention = format!("{p}.self_attn");
        Ok(Layer {
            attention_mix: self.mix(&format!("{p}.self_attention_res"))?,
            input_norm: self.bf16s(&format!("{p}.input_layernorm.weight"))?,
            attention: match config.attention[i] {
                Attention::Kda => AttentionPart::Kda(Kda::new(self, &attention)?),
                Attention::Mla => AttentionPart::Mla(Mla::new(self, &attention)?),
            },
            ffn_mix: self.mix(&format!("{p}.mlp_res"))?,
            ffn_norm: self.bf16s(&format!("{p}.post_attention_layernorm.weight"))?,
            ffn: if config.is_moe(i) {
                FfnPart::Moe(Moe::new(self, &format!("{p}.block_sparse_moe"))?)
            } else {
                FfnPart::Dense(Mlp::new(self, &format!("{p}.mlp"))?)
            },
        })
    }
}

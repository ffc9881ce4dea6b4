//! The tensors a config implies: names, dtypes, shapes and what each is for.
//!
//! Dense tensors come in the order a forward pass uses them. Expert tensors are
//! named by (layer, expert, part); their order in a shard is the file's business.

use safetensors::Dtype;

use crate::config::{Attention, ModelConfig};

/// Prefix of every tensor of the text model.
pub const TEXT_PREFIX: &str = "language_model.";

/// Prefixes of the vision tensors, which a text runtime leaves out.
pub const VISION_PREFIXES: [&str; 2] = ["vision_tower.", "mm_projector."];

/// Families of tensors, as totals and recipes count them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TensorClass {
    /// `embed_tokens`, read by row.
    Embedding,
    /// q, k, v, gate and output projections of KDA.
    Kda,
    /// All projections of MLA.
    Mla,
    /// Projections into and out of the latent the experts work in.
    Latent,
    /// The fused shared experts.
    Shared,
    /// The dense FFN of the first layers.
    DenseMlp,
    /// `lm_head`.
    Head,
    /// Router matrix and bias.
    Router,
    /// Low-rank decay gate and beta of KDA.
    KdaGate,
    /// Norms, convolution taps, AttnRes vectors, A_log, dt_bias.
    Small,
}

impl TensorClass {
    /// All classes, in the order tables show them.
    pub const ALL: [Self; 10] = [
        Self::Kda,
        Self::Shared,
        Self::Mla,
        Self::Latent,
        Self::Head,
        Self::Embedding,
        Self::DenseMlp,
        Self::Router,
        Self::KdaGate,
        Self::Small,
    ];

    /// Name in tables and manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Kda => "kda",
            Self::Mla => "mla",
            Self::Latent => "latent",
            Self::Shared => "shared",
            Self::DenseMlp => "dense",
            Self::Head => "head",
            Self::Router => "router",
            Self::KdaGate => "kda_gate",
            Self::Small => "small",
        }
    }

    /// Whether a recipe may store the class in fewer bits.
    pub fn is_quantizable(self) -> bool {
        !matches!(self, Self::Embedding | Self::Router | Self::KdaGate | Self::Small)
    }
}

/// One dense tensor that must be in the snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Full name.
    pub name: String,
    /// Type of the elements in the snapshot.
    pub dtype: Dtype,
    /// Shape, outermost first; a matrix is [outputs, inputs].
    pub shape: Vec<usize>,
    /// Family.
    pub class: TensorClass,
    /// Layer, or `None` for embeddings, final norm and head.
    pub layer: Option<usize>,
}

impl TensorSpec {
    /// Whether `shape` holds the same elements in the same order: sizes of 1 do not count.
    pub fn accepts_shape(&self, shape: &[usize]) -> bool {
        let significant = |s: &[usize]| s.iter().copied().filter(|&n| n != 1).collect::<Vec<_>>();
        significant(&self.shape) == significant(shape)
    }

    /// Elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&n| n as u64).product()
    }

    /// Bytes in the snapshot.
    pub fn bytes(&self) -> u64 {
        self.elements() * self.dtype.bitsize() as u64 / 8
    }

    /// (outputs, inputs) of a matrix that a recipe may quantize.
    pub fn matrix_dims(&self) -> Option<(usize, usize)> {
        match self.shape[..] {
            [rows, cols] if self.class.is_quantizable() => Some((rows, cols)),
            _ => None,
        }
    }
}

/// The names of a forward pass. `layer_prefix(3)` is `language_model.model.layers.3`.
pub fn layer_prefix(layer: usize) -> String {
    format!("{TEXT_PREFIX}model.layers.{layer}")
}

/// Name of the embedding matrix [vocab, hidden].
pub fn embedding_name() -> String {
    format!("{TEXT_PREFIX}model.embed_tokens.weight")
}

/// Name of the output matrix [vocab, hidden].
pub fn head_name() -> String {
    format!("{TEXT_PREFIX}lm_head.weight")
}

/// The six tensors of a routed expert, in the order the release stores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ExpertPart {
    /// Gate projection, codes [inter, latent / 2].
    GatePacked,
    /// Gate projection, scales [inter, latent / 32].
    GateScale,
    /// Down projection, codes [latent, inter / 2].
    DownPacked,
    /// Down projection, scales [latent, inter / 32].
    DownScale,
    /// Up projection, codes [inter, latent / 2].
    UpPacked,
    /// Up projection, scales [inter, latent / 32].
    UpScale,
}

impl ExpertPart {
    /// All parts, in stored order: w1 is the gate, w2 the down, w3 the up projection.
    pub const ALL: [Self; 6] = [
        Self::GatePacked,
        Self::GateScale,
        Self::DownPacked,
        Self::DownScale,
        Self::UpPacked,
        Self::UpScale,
    ];

    /// End of the tensor's name.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::GatePacked => "w1.weight_packed",
            Self::GateScale => "w1.weight_scale",
            Self::DownPacked => "w2.weight_packed",
            Self::DownScale => "w2.weight_scale",
            Self::UpPacked => "w3.weight_packed",
            Self::UpScale => "w3.weight_scale",
        }
    }

    /// Shape of the U8 tensor.
    pub fn shape(self, config: &ModelConfig) -> [usize; 2] {
        let (latent, inter) = (config.moe.latent, config.moe.inter);
        match self {
            Self::GatePacked | Self::UpPacked => [inter, latent / 2],
            Self::GateScale | Self::UpScale => [inter, latent / 32],
            Self::DownPacked => [latent, inter / 2],
            Self::DownScale => [latent, inter / 32],
        }
    }

    /// Bytes of the tensor.
    pub fn bytes(self, config: &ModelConfig) -> u64 {
        let [rows, cols] = self.shape(config);
        rows as u64 * cols as u64
    }
}

/// Bytes of one routed expert: its six tensors back to back.
pub fn expert_bytes(config: &ModelConfig) -> u64 {
    ExpertPart::ALL.iter().map(|part| part.bytes(config)).sum()
}

/// Name of one tensor of a routed expert.
pub fn expert_tensor_name(layer: usize, expert: usize, part: ExpertPart) -> String {
    format!("{}.block_sparse_moe.experts.{expert}.{}", layer_prefix(layer), part.suffix())
}

/// (layer, expert, part) of a routed expert's tensor, or `None` for any other name.
pub fn parse_expert_name(name: &str) -> Option<(usize, usize, ExpertPart)> {
    let rest = name.strip_prefix(TEXT_PREFIX)?.strip_prefix("model.layers.")?;
    let (layer, rest) = rest.split_once('.')?;
    let rest = rest.strip_prefix("block_sparse_moe.experts.")?;
    let (expert, suffix) = rest.split_once('.')?;
    let part = ExpertPart::ALL.into_iter().find(|p| p.suffix() == suffix)?;
    Some((canonical_number(layer)?, canonical_number(expert)?, part))
}

/// Decimal digits without a sign or leading zeros, so that one tensor has one name.
fn canonical_number(digits: &str) -> Option<usize> {
    let plain =
        digits.bytes().all(|b| b.is_ascii_digit()) && (digits == "0" || !digits.starts_with('0'));
    if plain { digits.parse().ok() } else { None }
}

/// Whether the tensor belongs to the vision tower or its projector.
pub fn is_vision(name: &str) -> bool {
    VISION_PREFIXES.iter().any(|p| name.starts_with(p))
}

/// Every dense tensor of the text model, in the order a forward pass uses them.
pub fn dense_tensors(config: &ModelConfig) -> Vec<TensorSpec> {
    let mut list = List { config, layer: None, out: Vec::new() };
    list.matrix(&embedding_name(), config.vocab, config.hidden, TensorClass::Embedding);
    for layer in 0..config.layers() {
        list.layer = Some(layer);
        list.decoder_layer(layer);
    }
    list.layer = None;
    let model = format!("{TEXT_PREFIX}model");
    list.mix(&format!("{model}.output_attn_res"));
    list.vector(&format!("{model}.norm.weight"), config.hidden);
    list.matrix(&head_name(), config.vocab, config.hidden, TensorClass::Head);
    list.out
}

struct List<'a> {
    config: &'a ModelConfig,
    layer: Option<usize>,
    out: Vec<TensorSpec>,
}

impl List<'_> {
    fn add(&mut self, name: &str, dtype: Dtype, shape: &[usize], class: TensorClass) {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.out.push(TensorSpec { name, dtype, shape, class, layer: self.layer });
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize, class: TensorClass) {
        self.add(name, Dtype::BF16, &[rows, cols], class);
    }

    fn vector(&mut self, name: &str, width: usize) {
        self.add(name, Dtype::BF16, &[width], TensorClass::Small);
    }

    fn f32s(&mut self, name: &str, shape: &[usize]) {
        self.add(name, Dtype::F32, shape, TensorClass::Small);
    }

    /// The two vectors of an AttnRes mix.
    fn mix(&mut self, prefix: &str) {
        self.vector(&format!("{prefix}_norm.weight"), self.config.hidden);
        self.matrix(&format!("{prefix}_proj.weight"), 1, self.config.hidden, TensorClass::Small);
    }

    fn decoder_layer(&mut self, layer: usize) {
        let (p, hidden) = (layer_prefix(layer), self.config.hidden);
        self.mix(&format!("{p}.self_attention_res"));
        self.vector(&format!("{p}.input_layernorm.weight"), hidden);
        match self.config.attention[layer] {
            Attention::Kda => self.kda(&format!("{p}.self_attn")),
            Attention::Mla => self.mla(&format!("{p}.self_attn")),
        }
        self.mix(&format!("{p}.mlp_res"));
        self.vector(&format!("{p}.post_attention_layernorm.weight"), hidden);
        if self.config.is_moe(layer) {
            self.moe(&format!("{p}.block_sparse_moe"));
        } else {
            let inter = self.config.dense_inter;
            self.mlp(&format!("{p}.mlp"), inter, TensorClass::DenseMlp);
        }
    }

    fn kda(&mut self, p: &str) {
        let (kda, hidden) = (self.config.kda.clone(), self.config.hidden);
        let width = kda.width();
        for x in ["q", "k", "v", "g"] {
            self.matrix(&format!("{p}.{x}_proj.weight"), width, hidden, TensorClass::Kda);
        }
        self.matrix(&format!("{p}.f_a_proj.weight"), kda.head_dim, hidden, TensorClass::KdaGate);
        self.matrix(&format!("{p}.b_proj.weight"), kda.heads, hidden, TensorClass::KdaGate);
        self.matrix(&format!("{p}.f_b_proj.weight"), width, kda.head_dim, TensorClass::KdaGate);
        for x in ["q", "k", "v"] {
            self.f32s(&format!("{p}.{x}_conv1d.weight"), &[width, 1, kda.conv_width]);
        }
        self.f32s(&format!("{p}.dt_bias"), &[width]);
        self.f32s(&format!("{p}.A_log"), &[kda.head_dim]);
        self.f32s(&format!("{p}.o_norm.weight"), &[kda.head_dim]);
        self.matrix(&format!("{p}.o_proj.weight"), hidden, width, TensorClass::Kda);
    }

    fn mla(&mut self, p: &str) {
        let (mla, hidden) = (self.config.mla.clone(), self.config.hidden);
        let class = TensorClass::Mla;
        self.matrix(&format!("{p}.q_a_proj.weight"), mla.q_lora, hidden, class);
        self.matrix(&format!("{p}.kv_a_proj_with_mqa.weight"), mla.cache_width(), hidden, class);
        self.matrix(&format!("{p}.g_proj.weight"), mla.width(), hidden, class);
        self.vector(&format!("{p}.q_a_layernorm.weight"), mla.q_lora);
        self.vector(&format!("{p}.kv_a_layernorm.weight"), mla.kv_lora);
        let q = mla.heads * (mla.nope + mla.rope);
        self.matrix(&format!("{p}.q_b_proj.weight"), q, mla.q_lora, class);
        let kv = mla.heads * (mla.nope + mla.v_head);
        self.matrix(&format!("{p}.kv_b_proj.weight"), kv, mla.kv_lora, class);
        self.matrix(&format!("{p}.o_proj.weight"), hidden, mla.width(), class);
    }

    fn mlp(&mut self, p: &str, inter: usize, class: TensorClass) {
        let hidden = self.config.hidden;
        self.matrix(&format!("{p}.gate_proj.weight"), inter, hidden, class);
        self.matrix(&format!("{p}.up_proj.weight"), inter, hidden, class);
        self.matrix(&format!("{p}.down_proj.weight"), hidden, inter, class);
    }

    fn moe(&mut self, p: &str) {
        let (moe, hidden) = (self.config.moe.clone(), self.config.hidden);
        self.matrix(&format!("{p}.gate.weight"), moe.experts, hidden, TensorClass::Router);
        let bias = format!("{p}.gate.e_score_correction_bias");
        self.add(&bias, Dtype::F32, &[moe.experts], TensorClass::Router);
        let class = TensorClass::Latent;
        self.matrix(&format!("{p}.routed_expert_down_proj.weight"), moe.latent, hidden, class);
        self.mlp(&format!("{p}.shared_experts"), moe.shared_inter, TensorClass::Shared);
        self.vector(&format!("{p}.routed_expert_norm.weight"), moe.latent);
        self.matrix(&format!("{p}.routed_expert_up_proj.weight"), hidden, moe.latent, class);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expert_names_round_trip_and_have_one_spelling() {
        for part in ExpertPart::ALL {
            let name = expert_tensor_name(17, 895, part);
            assert_eq!(parse_expert_name(&name), Some((17, 895, part)));
        }
        for bad in [
            "language_model.model.layers.01.block_sparse_moe.experts.0.w1.weight_packed",
            "language_model.model.layers.1.block_sparse_moe.experts.+1.w1.weight_packed",
            "language_model.model.layers.1.block_sparse_moe.experts.1.w4.weight_packed",
            "model.layers.1.block_sparse_moe.experts.1.w1.weight_packed",
        ] {
            assert_eq!(parse_expert_name(bad), None, "{bad}");
        }
    }

    #[test]
    fn shapes_differ_only_by_ones() {
        let spec = TensorSpec {
            name: "taps".into(),
            dtype: Dtype::F32,
            shape: vec![8, 1, 4],
            class: TensorClass::Small,
            layer: Some(0),
        };
        assert!(spec.accepts_shape(&[8, 4]));
        assert!(!spec.accepts_shape(&[4, 8]));
        assert!(!spec.accepts_shape(&[8, 4, 2]));
    }
}

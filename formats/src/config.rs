//! `config.json`: the model's dimensions, each bounded before anything uses it.
//!
//! The outer object is `kimi_k3`; the text model sits in `text_config`
//! (`kimi_linear`). Unknown keys are ignored, keys that would change the
//! arithmetic are checked, and layer lists count from 1 as in the file.

use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, Result, json, text_file};

/// Ids of the control slots that follow the base vocabulary.
pub const SPECIAL_SLOTS: usize = 256;

/// Columns that share one scale in MXFP4.
const MXFP4_GROUP: usize = 32;

/// The attention of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attention {
    /// Kimi delta attention: linear, with a state of fixed size.
    Kda,
    /// Gated multi-head latent attention without positions.
    Mla,
}

/// Dimensions of the KDA layers.
#[derive(Debug, Clone, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub heads: usize,
    /// Key and value width of a head.
    pub head_dim: usize,
    /// Taps of the causal depthwise convolution; the last one is the current token.
    pub conv_width: usize,
    /// Factor of the decay gate: the logarithm of the decay lies in (this, 0).
    pub gate_lower_bound: f32,
}

impl KdaConfig {
    /// Width of q, k, v and the gate: heads x head_dim.
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }
}

/// Dimensions of the MLA layers.
#[derive(Debug, Clone, PartialEq)]
pub struct MlaConfig {
    /// Heads.
    pub heads: usize,
    /// Per-head key width that comes out of the latent.
    pub nope: usize,
    /// Key width shared by all heads (never rotated in this model).
    pub rope: usize,
    /// Per-head value width.
    pub v_head: usize,
    /// Rank of the query projection.
    pub q_lora: usize,
    /// Width of the cached latent.
    pub kv_lora: usize,
}

impl MlaConfig {
    /// Values cached per token and layer: latent and shared key.
    pub fn cache_width(&self) -> usize {
        self.kv_lora + self.rope
    }

    /// Width of the attention output: heads x v_head.
    pub fn width(&self) -> usize {
        self.heads * self.v_head
    }
}

/// Dimensions of the mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Routed experts per layer.
    pub experts: usize,
    /// Experts chosen per token.
    pub top_k: usize,
    /// Width of the latent the routed experts work in.
    pub latent: usize,
    /// Inner width of a routed expert.
    pub inter: usize,
    /// Inner width of the fused shared experts.
    pub shared_inter: usize,
    /// Factor on the normalized routing weights.
    pub scaling: f32,
}

/// Everything the text model's arithmetic and memory depend on.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of `embed_tokens` and `lm_head`.
    pub vocab: usize,
    /// Longest context the model was made for, in tokens.
    pub max_context: usize,
    /// Leading layers with a dense FFN instead of experts.
    pub dense_layers: usize,
    /// Inner width of the dense FFN.
    pub dense_inter: usize,
    /// Layers per AttnRes block.
    pub attn_res_block: usize,
    /// eps of every RMSNorm but the two MLA low-rank ones.
    pub rms_eps: f32,
    /// beta of SiTU's gate.
    pub situ_beta: f32,
    /// beta of SiTU's linear branch.
    pub situ_linear_beta: f32,
    /// Token that ends a message.
    pub eos: u32,
    /// KDA dimensions.
    pub kda: KdaConfig,
    /// MLA dimensions.
    pub mla: MlaConfig,
    /// Expert dimensions.
    pub moe: MoeConfig,
    /// The attention of each layer, counted from 0.
    pub attention: Vec<Attention>,
}

impl ModelConfig {
    /// Reads `config.json` (a byte order mark and CRLF are accepted).
    ///
    /// # Errors
    /// Names the key, the value and what is allowed.
    pub fn read(path: &Path) -> Result<Self> {
        let text = text_file::downloaded(path, 4 << 20);
        let again = "config.json is damaged or of another model; download it again";
        text.and_then(|text| Self::parse(&text)).map_err(|e| e.in_file(path).hint(again))
    }

    /// Parses the text of `config.json`.
    ///
    /// # Errors
    /// Names the key, the value and what is allowed.
    pub fn parse(text: &str) -> Result<Self> {
        let value = json::parse(text.as_bytes())
            .map_err(|e| Error::malformed(format!("not valid JSON: {e}")))?;
        let outer = Keys::root(&value)?;
        let found = outer.string("model_type")?;
        let text = match found {
            "kimi_k3" => outer.object("text_config")?,
            other => {
                return Err(Error::unsupported(format!("expected \"kimi_k3\", found \"{other}\""))
                    .item("model_type")
                    .hint("point at a Kimi K3 snapshot; no other architecture is supported"));
            }
        };
        text.refuse_other_models()?;
        text.parse_model()
    }

    /// Decoder layers.
    pub fn layers(&self) -> usize {
        self.attention.len()
    }

    /// Ids below this are ordinary tokens.
    pub fn base_vocab(&self) -> usize {
        self.vocab - SPECIAL_SLOTS
    }

    /// Whether `layer` routes to experts.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.dense_layers && layer < self.layers()
    }

    /// Layers that route to experts.
    pub fn moe_layers(&self) -> std::ops::Range<usize> {
        self.dense_layers.min(self.layers())..self.layers()
    }
}

/// An object of the config with its path, so that errors can name `text_config.hidden_size`.
struct Keys<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn root(value: &'a Value) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| Error::malformed("not a JSON object"))?;
        Ok(Self { path: String::new(), map })
    }

    fn name(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    fn get(&self, key: &str) -> Result<&'a Value> {
        self.map.get(key).ok_or_else(|| {
            Error::missing("key is missing")
                .item(self.name(key))
                .hint("the config does not describe a complete Kimi K3; download config.json again")
        })
    }

    fn wrong(&self, key: &str, wanted: &str) -> Error {
        let mut found = self.map.get(key).map_or_else(|| "nothing".to_owned(), Value::to_string);
        if let Some((cut, _)) = found.char_indices().nth(80) {
            found.truncate(cut);
            found.push('…');
        }
        Error::unsupported(format!("expected {wanted}, found {found}")).item(self.name(key))
    }

    fn object(&self, key: &str) -> Result<Self> {
        let map = self.get(key)?.as_object().ok_or_else(|| self.wrong(key, "an object"))?;
        Ok(Self { path: format!("{}{key}.", self.path), map })
    }

    fn string(&self, key: &str) -> Result<&'a str> {
        self.get(key)?.as_str().ok_or_else(|| self.wrong(key, "a string"))
    }

    fn size(&self, key: &str, min: usize, max: usize) -> Result<usize> {
        let wanted = || self.wrong(key, &format!("a whole number from {min} to {max}"));
        let n = self.get(key)?.as_u64().ok_or_else(wanted)?;
        usize::try_from(n).ok().filter(|n| (min..=max).contains(n)).ok_or_else(wanted)
    }

    fn number(&self, key: &str, min: f64, max: f64) -> Result<f32> {
        let wanted = || self.wrong(key, &format!("a number from {min} to {max}"));
        let x = self.get(key)?.as_f64().ok_or_else(wanted)?;
        if (min..=max).contains(&x) { Ok(x as f32) } else { Err(wanted()) }
    }

    /// A key that may be absent, but if present must hold this value.
    fn only(&self, key: &str, wanted: Value) -> Result<()> {
        match self.map.get(key) {
            Some(found) if *found != wanted => Err(self.wrong(key, &wanted.to_string())),
            _ => Ok(()),
        }
    }

    fn layer_list(&self, key: &str, layers: usize) -> Result<Vec<usize>> {
        let wanted = || self.wrong(key, &format!("a list of layers from 1 to {layers}"));
        self.get(key)?
            .as_array()
            .ok_or_else(wanted)?
            .iter()
            .map(|v| {
                let n = v.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(wanted)?;
                if (1..=layers).contains(&n) { Ok(n - 1) } else { Err(wanted()) }
            })
            .collect()
    }

    /// Keys whose value would change the arithmetic: another value is another model.
    fn refuse_other_models(&self) -> Result<()> {
        if let Some(key) = self.map.keys().find(|k| k.starts_with("index_")) {
            return Err(Error::unsupported("a sparse-attention indexer, which no Kimi K3 has")
                .item(self.name(key))
                .hint("this is a later model than K3 and needs a tool made for it"));
        }
        for (key, value) in [
            ("model_type", Value::from("kimi_linear")),
            ("hidden_act", "situ".into()),
            ("mla_use_nope", true.into()),
            ("mla_use_output_gate", true.into()),
            ("latent_moe_use_norm", true.into()),
            ("moe_renormalize", true.into()),
            ("moe_router_activation_func", "sigmoid".into()),
            ("topk_method", "noaux_tc".into()),
            ("moe_layer_freq", 1.into()),
            ("num_expert_group", 1.into()),
            ("topk_group", 1.into()),
            ("num_nextn_predict_layers", 0.into()),
            ("tie_word_embeddings", false.into()),
        ] {
            self.only(key, value)?;
        }
        self.object("linear_attn_config")?.only("use_full_rank_gate", true.into())?;
        if self.map.get("quantization_config").is_some_and(|v| !v.is_null()) {
            let quant = self.object("quantization_config")?;
            quant.only("format", "mxfp4-pack-quantized".into())?;
        }
        Ok(())
    }

    fn parse_model(&self) -> Result<ModelConfig> {
        const WIDE: usize = 1 << 20;
        let layers = self.size("num_hidden_layers", 1, 4096)?;
        let linear = self.object("linear_attn_config")?;
        let inter = self.size("moe_intermediate_size", MXFP4_GROUP, WIDE)?;
        let shared = self.size("num_shared_experts", 1, 64)?;
        let config = ModelConfig {
            hidden: self.size("hidden_size", 1, WIDE)?,
            vocab: self.size("vocab_size", 256 + SPECIAL_SLOTS, 1 << 24)?,
            max_context: self.size("max_position_embeddings", 1, 1 << 30)?,
            dense_layers: self.size("first_k_dense_replace", 0, layers)?,
            dense_inter: self.size("intermediate_size", 1, WIDE)?,
            attn_res_block: self.size("attn_res_block_size", 1, 4096)?,
            rms_eps: self.number("rms_norm_eps", 0.0, 1.0)?,
            situ_beta: self.number("activation_situ_beta", 1e-6, 1e6)?,
            situ_linear_beta: self.number("activation_situ_linear_beta", 1e-6, 1e6)?,
            eos: u32::try_from(self.size("eos_token_id", 0, (1 << 24) - 1)?).expect("bounded"),
            kda: KdaConfig {
                heads: linear.size("num_heads", 1, 4096)?,
                head_dim: linear.size("head_dim", 1, 4096)?,
                conv_width: linear.size("short_conv_kernel_size", 2, 64)?,
                gate_lower_bound: linear.number("gate_lower_bound", -80.0, 0.0)?,
            },
            mla: MlaConfig {
                heads: self.size("num_attention_heads", 1, 4096)?,
                nope: self.size("qk_nope_head_dim", 1, 4096)?,
                rope: self.size("qk_rope_head_dim", 0, 4096)?,
                v_head: self.size("v_head_dim", 1, 4096)?,
                q_lora: self.size("q_lora_rank", 1, WIDE)?,
                kv_lora: self.size("kv_lora_rank", 1, WIDE)?,
            },
            moe: MoeConfig {
                experts: self.size("num_experts", 1, 1 << 16)?,
                top_k: self.size("num_experts_per_token", 1, 1024)?,
                latent: self.size("routed_expert_hidden_size", MXFP4_GROUP, WIDE)?,
                inter,
                shared_inter: inter * shared,
                scaling: self.number("routed_scaling_factor", 0.0, 1e6)?,
            },
            attention: linear.attention(layers)?,
        };
        self.check_relations(&config)?;
        Ok(config)
    }

    fn check_relations(&self, c: &ModelConfig) -> Result<()> {
        for (key, n) in
            [("moe_intermediate_size", c.moe.inter), ("routed_expert_hidden_size", c.moe.latent)]
        {
            if n % MXFP4_GROUP != 0 {
                return Err(self.wrong(key, &format!("a multiple of {MXFP4_GROUP}")));
            }
        }
        if c.moe.top_k > c.moe.experts {
            return Err(self.wrong("num_experts_per_token", "at most num_experts"));
        }
        if c.kda.heads > c.kda.head_dim {
            // A_log holds one value per head, padded to head_dim.
            let linear = self.object("linear_attn_config")?;
            return Err(linear.wrong("num_heads", "at most head_dim"));
        }
        if c.eos as usize >= c.vocab {
            return Err(self.wrong("eos_token_id", "an id below vocab_size"));
        }
        if let Some(v) = self.map.get("num_key_value_heads")
            && v.as_u64() != Some(c.mla.heads as u64)
        {
            return Err(self.wrong("num_key_value_heads", "the same as num_attention_heads"));
        }
        Ok(())
    }

    /// `kda_layers` and `full_attn_layers` must share out the layers 1..=N.
    fn attention(&self, layers: usize) -> Result<Vec<Attention>> {
        let mut kinds = vec![None; layers];
        for (key, kind) in [("kda_layers", Attention::Kda), ("full_attn_layers", Attention::Mla)] {
            for layer in self.layer_list(key, layers)? {
                if kinds[layer].replace(kind).is_some() {
                    let what = format!("layer {} once in the two lists", layer + 1);
                    return Err(self.wrong(key, &what));
                }
            }
        }
        kinds
            .iter()
            .enumerate()
            .map(|(i, kind)| {
                kind.ok_or_else(|| {
                    let what = format!("layer {} in one of the two lists", i + 1);
                    self.wrong("kda_layers", &what)
                })
            })
            .collect()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::ErrorKind;

    pub(crate) fn small() -> Value {
        serde_json::json!({
            "model_type": "kimi_k3",
            "text_config": {
                "model_type": "kimi_linear", "hidden_size": 192, "num_hidden_layers": 4,
                "vocab_size": 1024, "max_position_embeddings": 4096, "first_k_dense_replace": 1,
                "intermediate_size": 320, "attn_res_block_size": 3, "rms_norm_eps": 1e-5,
                "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
                "eos_token_id": 770, "num_attention_heads": 4, "num_key_value_heads": 4,
                "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
                "q_lora_rank": 160, "kv_lora_rank": 112, "num_experts": 12,
                "num_experts_per_token": 3, "routed_expert_hidden_size": 96,
                "moe_intermediate_size": 64, "num_shared_experts": 2,
                "routed_scaling_factor": 1.0,
                "linear_attn_config": {
                    "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4,
                    "gate_lower_bound": -5.0, "kda_layers": [1, 2, 3], "full_attn_layers": [4]
                }
            }
        })
    }

    fn error_after(change: impl Fn(&mut Value)) -> Error {
        let mut value = small();
        change(&mut value);
        ModelConfig::parse(&value.to_string()).unwrap_err()
    }

    #[test]
    fn layer_lists_count_from_one() {
        let c = ModelConfig::parse(&small().to_string()).unwrap();
        assert_eq!(c.attention[2], Attention::Kda);
        assert_eq!(c.attention[3], Attention::Mla);
        assert_eq!(c.moe_layers(), 1..4);
        assert_eq!(c.moe.shared_inter, 128);
    }

    #[test]
    fn hostile_numbers_name_key_and_value() {
        for (bad, shown) in [
            (Value::from(0), "found 0"),
            (Value::from(-1), "found -1"),
            (Value::from(1u64 << 31), "found 2147483648"),
            (Value::from("7168"), "found \"7168\""),
            (Value::from(1.5), "found 1.5"),
        ] {
            let e = error_after(|v| v["text_config"]["hidden_size"] = bad.clone()).to_string();
            assert!(e.starts_with("text_config.hidden_size: expected a whole number"), "{e}");
            assert!(e.contains(shown), "{e}");
        }
    }

    #[test]
    fn other_models_are_refused() {
        let e = error_after(|v| v["model_type"] = "llama".into());
        assert!(e.to_string().contains("expected \"kimi_k3\", found \"llama\""), "{e}");
        let e = error_after(|v| v["text_config"]["index_hd"] = 128.into());
        assert_eq!(e.kind(), ErrorKind::Unsupported);
        assert!(e.to_string().contains("text_config.index_hd"), "{e}");
        let e = error_after(|v| v["text_config"]["mla_use_nope"] = false.into());
        assert!(e.to_string().contains("mla_use_nope: expected true, found false"), "{e}");
    }

    #[test]
    fn layer_lists_must_be_a_partition() {
        let e = error_after(|v| {
            v["text_config"]["linear_attn_config"]["kda_layers"] = vec![1, 2].into()
        });
        assert!(e.to_string().contains("layer 3 in one of the two lists"), "{e}");
        let e = error_after(|v| {
            v["text_config"]["linear_attn_config"]["full_attn_layers"] = vec![3, 4].into();
        });
        assert!(e.to_string().contains("layer 3 once"), "{e}");
    }
}

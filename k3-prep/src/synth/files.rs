//! The JSON files of a snapshot.

use std::io::Write;

use anyhow::Result;
use serde::ser::{Serialize, SerializeMap, Serializer};
use serde_json::{Map, Value, json};

use super::dims::Dims;
use super::draw::mix;
use super::shard::Layout;

/// Named control tokens, by their distance from the first control id. The other slots
/// are called `<|reserved_token_ID|>`.
const CONTROL_TOKENS: [(usize, &str); 16] = [
    (BOS, "[BOS]"),
    (EOS, "[EOS]"),
    (END_OF_MSG, "<|end_of_msg|>"),
    (3, "<|open|>"),
    (4, "<|close|>"),
    (5, "<|sep|>"),
    (6, "[start_header_id]"),
    (7, "[end_header_id]"),
    (9, "[EOT]"),
    (18, "<|media_begin|>"),
    (19, "<|media_content|>"),
    (20, "<|media_end|>"),
    (MEDIA_PAD, "<|media_pad|>"),
    (65, "<osagent_mode>"),
    (UNK, "[UNK]"),
    (PAD, "[PAD]"),
];
const BOS: usize = 0;
const EOS: usize = 1;
const END_OF_MSG: usize = 2;
const MEDIA_PAD: usize = 21;
const UNK: usize = 254;
const PAD: usize = 255;

/// Markup tokens carry text structure, so the release does not flag them as special.
fn is_markup(slot: usize) -> bool {
    (3..=5).contains(&slot)
}

/// `config.json`.
pub(super) fn config(dims: &Dims) -> Value {
    let ids = json!({
        "bos_token_id": dims.base_vocab() + BOS,
        "eos_token_id": dims.base_vocab() + END_OF_MSG,
        "pad_token_id": dims.base_vocab() + PAD,
    });
    let text = merged([
        model(dims),
        attention(dims),
        experts(dims),
        quantization_config(),
        library_defaults(),
        ids.clone(),
    ]);
    let outer = json!({
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k3.KimiK3Config",
            "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        },
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": dims.base_vocab() + MEDIA_PAD,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": false,
        "vision_config": vision_config(dims),
    });
    merged([outer, ids])
}

/// One object with the keys of all.
fn merged<const N: usize>(objects: [Value; N]) -> Value {
    let all: Map<String, Value> = objects
        .into_iter()
        .filter_map(|object| match object {
            Value::Object(map) => Some(map),
            _ => None,
        })
        .flatten()
        .collect();
    Value::Object(all)
}

fn model(dims: &Dims) -> Value {
    json!({
        "activation_situ_beta": dims.situ_beta,
        "activation_situ_linear_beta": dims.situ_linear_beta,
        "architectures": ["KimiLinearForCausalLM"],
        "attn_res_block_size": dims.block,
        "dtype": "bfloat16",
        "hidden_act": "situ",
        "hidden_size": dims.hidden,
        "initializer_range": 0.02,
        "intermediate_size": dims.dense_inter,
        "max_position_embeddings": 1 << 20,
        "model_type": "kimi_linear",
        "num_hidden_layers": dims.layers,
        "num_nextn_predict_layers": 0,
        "rms_norm_eps": dims.rms_eps,
        "tie_word_embeddings": false,
        "use_cache": true,
        "vocab_size": dims.vocab,
    })
}

fn attention(dims: &Dims) -> Value {
    json!({
        "kv_lora_rank": dims.kv_lora,
        "linear_attn_config": {
            "full_attn_layers": dims.mla_layers(),
            "gate_lower_bound": dims.gate_lower_bound,
            "head_dim": dims.kda_dim,
            "kda_layers": dims.kda_layers(),
            "num_heads": dims.kda_heads,
            "short_conv_kernel_size": dims.conv,
            "use_full_rank_gate": true,
        },
        "mla_use_nope": true,
        "mla_use_output_gate": true,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.heads,
        "q_lora_rank": dims.q_lora,
        "qk_nope_head_dim": dims.nope,
        "qk_rope_head_dim": dims.rope,
        "v_head_dim": dims.v_head,
    })
}

fn experts(dims: &Dims) -> Value {
    json!({
        "first_k_dense_replace": dims.first_dense,
        "latent_moe_use_norm": true,
        "moe_intermediate_size": dims.moe_inter,
        "moe_layer_freq": 1,
        "moe_renormalize": true,
        "moe_router_activation_func": "sigmoid",
        "num_expert_group": 1,
        "num_experts": dims.experts,
        "num_experts_per_token": dims.topk,
        "num_shared_experts": dims.shared,
        "routed_expert_hidden_size": dims.latent,
        "routed_scaling_factor": 1.0,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "use_grouped_topk": true,
    })
}

fn quantization_config() -> Value {
    const FORMAT: &str = "mxfp4-pack-quantized";
    json!({ "quantization_config": {
        "config_groups": { "group_0": {
            "format": FORMAT,
            "input_activations": null,
            "output_activations": null,
            "targets": ["Linear"],
            "weights": {
                "actorder": null, "block_structure": null, "dynamic": false, "group_size": 32,
                "num_bits": 4, "observer": "minmax", "observer_kwargs": {},
                "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": true,
                "type": "float", "zp_dtype": null,
            },
        }},
        "format": FORMAT,
        "global_compression_ratio": null,
        // As in the release, this names less than what is really left unquantized.
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }})
}

/// Generation defaults of the library that saved the config. None describes the model;
/// `top_k` in particular is not the router's.
fn library_defaults() -> Value {
    json!({
        "do_sample": false, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
        "num_beams": 1, "num_return_sequences": 1, "output_attentions": false,
        "output_hidden_states": false, "repetition_penalty": 1.0, "return_dict": true,
        "temperature": 1.0, "top_k": 50, "top_p": 1.0, "transformers_version": "4.56.2",
        "typical_p": 1.0,
    })
}

fn vision_config(dims: &Dims) -> Value {
    json!({
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": false,
        "init_pos_emb_height": dims.vt_grid,
        "init_pos_emb_time": 4,
        "init_pos_emb_width": dims.vt_grid,
        "linear_bias": false,
        "merge_kernel_size": [2, 2],
        "merge_type": "sd2_tpool",
        "mlp_type": "mlp2",
        "mm_hidden_size": dims.vt_hidden,
        "mm_projector_type": "patchmergerv2",
        "norm_type": "rmsnorm",
        "patch_embed_proj_bias": false,
        "patch_size": 14,
        "pos_emb_interpolation_mode": "bilinear",
        "pos_emb_type": "divided_fixed",
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "qkv_hidden_size": dims.vt_qkv,
        "text_hidden_size": dims.hidden,
        "vt_hidden_size": dims.vt_hidden,
        "vt_intermediate_size": dims.vt_inter,
        "vt_num_attention_heads": dims.vt_heads,
        "vt_num_hidden_layers": dims.vt_layers,
    })
}

/// `generation_config.json`.
pub(super) fn generation_config(dims: &Dims) -> Value {
    json!({ "max_length": 1 << 20, "eos_token_id": dims.base_vocab() + END_OF_MSG })
}

/// `preprocessor_config.json`.
pub(super) fn preprocessor_config() -> Value {
    json!({ "media_proc_cfg": {
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "in_patch_limit": 65536,
        "merge_kernel_size": 2,
        "patch_limit_on_one_side": 512,
        "patch_size": 14,
    }})
}

/// `tokenizer_config.json`: the named control tokens.
pub(super) fn tokenizer_config(dims: &Dims) -> Value {
    let decoder: Map<String, Value> = CONTROL_TOKENS
        .iter()
        .map(|&(slot, content)| {
            let token = json!({
                "content": content, "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": !is_markup(slot),
            });
            ((dims.base_vocab() + slot).to_string(), token)
        })
        .collect();
    let is_additional = |slot: usize| !is_markup(slot) && ![BOS, EOS, UNK, PAD].contains(&slot);
    let additional: Vec<&str> = CONTROL_TOKENS
        .iter()
        .filter(|&&(slot, _)| is_additional(slot))
        .map(|&(_, content)| content)
        .collect();
    json!({
        "added_tokens_decoder": decoder,
        "additional_special_tokens": additional,
        "auto_map": { "AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null] },
        "bos_token": "[BOS]",
        "clean_up_tokenization_spaces": false,
        "eos_token": "[EOS]",
        "extra_special_tokens": {},
        // The integer 1000000000000000019884624838656, which the library uses for "no limit".
        "model_max_length": 1e30,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    })
}

/// Writes `model.safetensors.index.json`. As in the release the files come in no useful
/// order, with descending names inside.
///
/// # Errors
/// The writer's.
pub(super) fn write_index(layout: &Layout<'_>, out: impl Write) -> Result<()> {
    let total_size: u64 = layout.shards().map(|shard| shard.data_bytes()).sum();
    let mut json = serde_json::Serializer::pretty(out);
    let mut index = json.serialize_map(Some(2))?;
    index.serialize_entry("metadata", &json!({ "total_size": total_size }))?;
    index.serialize_entry("weight_map", &WeightMap(layout))?;
    SerializeMap::end(index)?;
    Ok(())
}

/// Tensor names and their files, made on the way: the release has half a million.
struct WeightMap<'a>(&'a Layout<'a>);

impl Serialize for WeightMap<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut order: Vec<usize> = (0..self.0.len()).collect();
        order.sort_by_key(|&i| mix(i as u64));
        let mut map = serializer.serialize_map(None)?;
        for shard in order.into_iter().map(|i| self.0.shard(i)) {
            let mut names: Vec<&str> = shard.tensors.iter().map(|t| t.name.as_str()).collect();
            names.sort_unstable_by(|a, b| b.cmp(a));
            for name in names {
                map.serialize_entry(name, &shard.file)?;
            }
        }
        map.end()
    }
}

#[cfg(test)]
mod tests {
    use k3_formats::ModelConfig;

    use super::super::dims::Preset;
    use super::*;

    #[test]
    fn config_describes_the_dims() {
        for preset in [Preset::Tiny, Preset::Small, Preset::Full] {
            let dims = preset.dims();
            let config = ModelConfig::parse(&config(&dims).to_string()).unwrap();
            assert_eq!(config.layers(), dims.layers);
            assert_eq!(config.hidden, dims.hidden);
            assert_eq!(config.base_vocab(), dims.base_vocab());
            assert_eq!(config.moe.shared_inter, dims.moe_inter * dims.shared);
            assert_eq!(config.eos as usize, dims.base_vocab() + END_OF_MSG);
        }
    }

    #[test]
    fn the_index_of_the_full_preset_has_the_published_size() {
        let dims = Preset::Full.dims();
        let config = ModelConfig::parse(&config(&dims).to_string()).unwrap();
        let mut index = Vec::new();
        write_index(&Layout::new(&dims, &config), &mut index).unwrap();
        assert_eq!(index.len(), 59_764_096);
        let start =
            b"{\n  \"metadata\": {\n    \"total_size\": 1560860324864\n  },\n  \"weight_map\": {\n";
        assert!(index.starts_with(start));
    }

    #[test]
    fn control_tokens_follow_the_base_vocabulary() {
        let config = tokenizer_config(&Preset::Full.dims());
        let decoder = config["added_tokens_decoder"].as_object().unwrap();
        assert_eq!(decoder.len(), 16);
        assert_eq!(decoder["163605"]["content"], "<|media_pad|>");
        assert_eq!(decoder.values().filter(|t| t["special"] == json!(false)).count(), 3);
        assert_eq!(config["additional_special_tokens"].as_array().unwrap().len(), 9);
    }
}

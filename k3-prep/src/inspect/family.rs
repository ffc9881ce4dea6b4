//! Tensors of one kind: the same name but for numbers, the same class, type and shape.

use std::collections::{HashMap, HashSet};

use k3_formats::config::{Attention, ModelConfig};
use k3_formats::container::SCALES_SUFFIX;
use k3_formats::container::layout::FILLER_PREFIX;
use k3_formats::quant::INT4_GROUP;
use k3_formats::safetensors_header::{Header, TensorInfo};
use k3_formats::tensor_name::{TEXT_PREFIX, TensorClass, is_vision, parse_expert_name};
use serde::Serialize;

/// Class of everything that is not a dense text tensor.
pub(super) const EXPERTS: &str = "experts";
pub(super) const VISION: &str = "vision";
pub(super) const PADDING: &str = "padding";
pub(super) const OTHER: &str = "other";

/// Tensors of one kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Family {
    /// Name with `{L}` for a layer, `{E}` for an expert, `{B}` for a vision block.
    pub name: String,
    /// Class, as totals count it.
    pub class: &'static str,
    /// Element type.
    pub dtype: String,
    /// Shape.
    pub shape: Vec<usize>,
    /// How many there are.
    pub count: u64,
    /// Bytes of all of them.
    pub bytes: u64,
}

impl Family {
    /// Weights of all of them; a byte of packed codes holds two.
    pub(super) fn params(&self) -> u64 {
        let elements = self.shape.iter().map(|&n| n as u64).product::<u64>() * self.count;
        match self.class {
            PADDING => 0,
            EXPERTS if self.name.ends_with("_packed") => 2 * elements,
            EXPERTS => 0,
            _ if self.name.ends_with(SCALES_SUFFIX) => 0,
            _ => elements,
        }
    }

    /// Bytes if its matrices were quantized to int8 or int4; what is never quantized, and
    /// what already is, counts as it is.
    pub(super) fn quantized_bytes(&self, bits: u64) -> u64 {
        let dense = TensorClass::ALL.into_iter().find(|c| c.name() == self.class);
        let is_matrix = dense.is_some_and(|c| c.is_quantizable() || c == TensorClass::Embedding);
        match self.shape[..] {
            [rows, cols] if is_matrix && self.dtype == "BF16" => {
                let (rows, cols) = (rows as u64, cols as u64);
                let row = match bits {
                    4 if cols.is_multiple_of(INT4_GROUP as u64) => {
                        cols / 2 + 4 * cols / INT4_GROUP as u64
                    }
                    _ => cols + 4,
                };
                self.count * rows * row
            }
            _ => self.bytes,
        }
    }
}

/// The families of all tensors seen so far, in the order they came.
#[derive(Default)]
pub(super) struct Families {
    list: Vec<Family>,
    by_key: HashMap<String, usize>,
    key: String,
}

impl Families {
    pub(super) fn add(&mut self, tensor: &TensorInfo, class: &'static str) {
        use std::fmt::Write;
        self.key.clear();
        write_pattern(&tensor.name, &mut self.key);
        let name_end = self.key.len();
        let _ = write!(self.key, "|{class}|{}|{:?}", tensor.dtype, tensor.shape);
        let number = match self.by_key.get(&self.key) {
            Some(&number) => number,
            None => {
                self.by_key.insert(self.key.clone(), self.list.len());
                self.list.push(Family {
                    name: self.key[..name_end].to_owned(),
                    class,
                    dtype: tensor.dtype.to_string(),
                    shape: tensor.shape.clone(),
                    count: 0,
                    bytes: 0,
                });
                self.list.len() - 1
            }
        };
        self.list[number].count += 1;
        self.list[number].bytes += tensor.bytes();
    }

    pub(super) fn into_list(self) -> Vec<Family> {
        self.list
    }
}

fn write_pattern(name: &str, out: &mut String) {
    let mut before = "";
    for part in name.split('.') {
        if !out.is_empty() {
            out.push('.');
        }
        let numeric = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        out.push_str(match before {
            "layers" if numeric => "{L}",
            "experts" if numeric => "{E}",
            "blocks" if numeric => "{B}",
            _ if name.starts_with(FILLER_PREFIX) && numeric => "{N}",
            _ => part,
        });
        before = part;
    }
}

/// Which layers are MLA: the same projection names occur in both kinds.
pub(super) struct MlaLayers(HashSet<usize>);

impl MlaLayers {
    pub(super) fn of_config(config: &ModelConfig) -> Self {
        let layers = config.attention.iter().enumerate();
        Self(layers.filter(|(_, kind)| **kind == Attention::Mla).map(|(layer, _)| layer).collect())
    }

    /// Without a config, a projection that only MLA has gives a layer away.
    pub(super) fn of_header(header: &Header) -> Self {
        let only_mla = ".self_attn.kv_b_proj.weight";
        let layers = header.tensors.iter().filter(|t| t.name.ends_with(only_mla));
        Self(layers.filter_map(|t| layer_of(&t.name)).collect())
    }

    /// The class of a tensor by its name.
    pub(super) fn class(&self, name: &str) -> &'static str {
        if parse_expert_name(name).is_some() {
            return EXPERTS;
        }
        if is_vision(name) {
            return VISION;
        }
        if name.starts_with(FILLER_PREFIX) {
            return PADDING;
        }
        let name = name.strip_suffix(SCALES_SUFFIX).unwrap_or(name);
        self.dense_class(name).map_or(OTHER, TensorClass::name)
    }

    fn dense_class(&self, name: &str) -> Option<TensorClass> {
        let rest = name.strip_prefix(TEXT_PREFIX)?;
        match rest {
            "model.embed_tokens.weight" => return Some(TensorClass::Embedding),
            "lm_head.weight" => return Some(TensorClass::Head),
            _ => {}
        }
        let rest = rest.strip_prefix("model.")?;
        let Some(layer) = layer_of(name) else { return Some(TensorClass::Small) };
        let part = rest.splitn(3, '.').nth(2)?;
        let projection = part.strip_suffix("_proj.weight");
        Some(match part.split('.').next()? {
            "self_attn" if projection.is_none() => {
                let mla = part == "self_attn.kv_a_proj_with_mqa.weight";
                if mla { TensorClass::Mla } else { TensorClass::Small }
            }
            "self_attn" if self.0.contains(&layer) => TensorClass::Mla,
            "self_attn" => match projection? {
                "self_attn.f_a" | "self_attn.f_b" | "self_attn.b" => TensorClass::KdaGate,
                _ => TensorClass::Kda,
            },
            "mlp" => TensorClass::DenseMlp,
            "block_sparse_moe" => match part.split('.').nth(1)? {
                "gate" => TensorClass::Router,
                "shared_experts" => TensorClass::Shared,
                _ if projection.is_some() => TensorClass::Latent,
                _ => TensorClass::Small,
            },
            _ => TensorClass::Small,
        })
    }
}

fn layer_of(name: &str) -> Option<usize> {
    let rest = name.strip_prefix(TEXT_PREFIX)?.strip_prefix("model.layers.")?;
    rest.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use k3_formats::tensor_name::dense_tensors;

    use super::*;
    use crate::synth::{Preset, model_config};

    #[test]
    fn names_alone_give_the_classes_of_the_config() {
        let config = model_config(&Preset::Full.dims()).unwrap();
        let layers = MlaLayers::of_config(&config);
        for spec in dense_tensors(&config) {
            assert_eq!(layers.class(&spec.name), spec.class.name(), "{}", spec.name);
            let scales = format!("{}.qs", spec.name);
            assert_eq!(layers.class(&scales), spec.class.name());
        }
        assert_eq!(layers.class("vision_tower.patch_embed.proj.weight"), VISION);
        assert_eq!(layers.class("__pad__.7"), PADDING);
        assert_eq!(layers.class("rotary.inv_freq"), OTHER);
    }

    #[test]
    fn numbers_in_names_become_letters() {
        let mut out = String::new();
        write_pattern("language_model.model.layers.12.x.experts.3.w1.weight_packed", &mut out);
        assert_eq!(out, "language_model.model.layers.{L}.x.experts.{E}.w1.weight_packed");
    }
}

//! How the values of each tensor are distributed.
//!
//! Scales are chosen so that every sub-layer adds roughly unit size to the residual
//! stream and logits have a deviation of about 3: differences between tokens are then
//! far above rounding. Control tokens have small rows in `lm_head`, so that greedy
//! decoding does not end by chance.

use k3_formats::config::ModelConfig;
use k3_formats::tensor_name::{ExpertPart, embedding_name, head_name, parse_expert_name};
use safetensors::Dtype;

use super::draw::Draw;
use super::shard::Tensor;

/// Which experts a synthetic router prefers, and how steadily.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Routing {
    /// Near the release: no expert is a favourite of its router by much.
    #[default]
    Flat,
    /// A few experts of each layer are chosen often, and the hidden state drifts slowly
    /// from layer to layer, so that one layer's state foretells the next layer's choice.
    ///
    /// Sub-layers add an eighth of what they do otherwise, and the correction bias of
    /// most experts is near 0, of few near 0.8. On 14 layers of 448 experts, 16 chosen,
    /// random tokens: a tenth of the experts gets 83 % of the choices (flat: 56 %), 29 %
    /// of a token's experts served the token before it (17 %), and the next layer's
    /// router on this layer's hidden state finds 84 % of its experts (66 %): 98 % at
    /// rank 4, 90 % at rank 8, 47 % at rank 16 (83, 63 and 37 %).
    Skewed,
}

/// A run of equally distributed values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Run {
    pub(super) elements: u64,
    pub(super) draw: Draw,
}

/// Gains of matrices by the end of their name: unit-size inputs give outputs of this
/// size. All others have gain 1.
const GAINS: [(&str, f64); 8] = [
    ("_res_proj.weight", 0.4),
    ("block_sparse_moe.gate.weight", 1.5),
    ("q_b_proj.weight", 1.2),
    ("gate_proj.weight", 1.2),
    ("up_proj.weight", 1.2),
    ("w1", 1.5),
    ("w3", 1.5),
    ("w2", 1.0),
];

/// The values of `tensor`, run by run.
pub(super) fn recipe(tensor: &Tensor, config: &ModelConfig, routing: Routing) -> Vec<Run> {
    let all = tensor.elements();
    let one = |draw| vec![Run { elements: all, draw }];
    let name = tensor.name.as_str();
    if let Some((_, _, part)) = parse_expert_name(name) {
        return one(expert(part, config));
    }
    if name == head_name() {
        let deviation = 3.0 / (config.hidden as f64).sqrt();
        let ordinary = (config.base_vocab() * config.hidden) as u64;
        return vec![
            Run { elements: ordinary, draw: Draw::Normal { deviation } },
            Run { elements: all - ordinary, draw: Draw::Normal { deviation: 0.1 * deviation } },
        ];
    }
    let last = name.strip_suffix(".weight").unwrap_or(name).rsplit('.').next().unwrap_or(name);
    match last {
        "A_log" => {
            // One value per head, padded to the head's width.
            let heads = config.kda.heads as u64;
            vec![
                Run { elements: heads, draw: Draw::UniformF32 { low: -1.0, high: 1.0 } },
                Run { elements: all - heads, draw: Draw::Zero { width: 4 } },
            ]
        }
        "dt_bias" => one(Draw::UniformF32 { low: -5.0, high: 0.5 }),
        "e_score_correction_bias" => one(match routing {
            Routing::Flat => Draw::UniformF32 { low: -0.2, high: 0.2 },
            Routing::Skewed => Draw::SkewedF32 { low: 0.0, high: FAVOURITE },
        }),
        "q_conv1d" | "k_conv1d" | "v_conv1d" => one(Draw::Taps { width: config.kda.conv_width }),
        "norm" | "norm0" | "norm1" => one(norm(tensor.dtype)),
        _ if last.ends_with("_norm") || last.ends_with("layernorm") => one(norm(tensor.dtype)),
        "pos_emb" => one(Draw::Normal { deviation: 0.1 }),
        _ if name == embedding_name() => one(Draw::Normal { deviation: 1.5 }),
        _ => one(matrix(tensor, routing)),
    }
}

fn norm(dtype: Dtype) -> Draw {
    match dtype {
        Dtype::F32 => Draw::UniformF32 { low: 0.8, high: 1.2 },
        _ => Draw::Uniform { low: 0.8, high: 1.2 },
    }
}

/// A sub-layer's last matrix, which decides how far the residual stream moves.
fn output_gain(name: &str) -> Option<f64> {
    let gains = [
        (".self_attn.o_proj.weight", 2.0),
        (".down_proj.weight", 1.2),
        (".routed_expert_up_proj.weight", 0.6),
    ];
    gains.into_iter().find(|(end, _)| name.ends_with(end)).map(|(_, gain)| gain)
}

/// How much of their output sub-layers keep under [`Routing::Skewed`].
const DRIFT: f64 = 0.125;
/// The largest correction bias under [`Routing::Skewed`]; scores lie between 0 and 1.
const FAVOURITE: f64 = 0.8;

fn matrix(tensor: &Tensor, routing: Routing) -> Draw {
    let inputs: usize = tensor.shape.iter().skip(1).product();
    let gain = match output_gain(&tensor.name) {
        Some(gain) if routing == Routing::Skewed => DRIFT * gain,
        Some(gain) => gain,
        None => gain_of(&tensor.name),
    };
    Draw::Normal { deviation: gain / (inputs as f64).sqrt() }
}

fn gain_of(end: &str) -> f64 {
    GAINS.into_iter().find(|(suffix, _)| end.ends_with(suffix)).map_or(1.0, |(_, gain)| gain)
}

fn expert(part: ExpertPart, config: &ModelConfig) -> Draw {
    let (inputs, matrix) = match part {
        ExpertPart::GatePacked | ExpertPart::DownPacked | ExpertPart::UpPacked => {
            return Draw::Codes;
        }
        ExpertPart::GateScale => (config.moe.latent, "w1"),
        ExpertPart::UpScale => (config.moe.latent, "w3"),
        ExpertPart::DownScale => (config.moe.inter, "w2"),
    };
    Draw::Scales { deviation: gain_of(matrix) / (inputs as f64).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::super::dims::Preset;
    use super::super::draw::Table;
    use super::super::files;
    use super::super::shard::Layout;
    use super::*;

    #[test]
    fn runs_fill_each_tensor_exactly() {
        let dims = Preset::Tiny.dims();
        let config = ModelConfig::parse(&files::config(&dims).to_string()).unwrap();
        for tensor in Layout::new(&dims, &config).shards().flat_map(|shard| shard.tensors) {
            let runs = recipe(&tensor, &config, Routing::Flat);
            assert_eq!(runs.iter().map(|r| r.elements).sum::<u64>(), tensor.elements());
            for run in runs {
                let width = Table::new(run.draw).width();
                assert_eq!(width * 8, tensor.dtype.bitsize(), "{}", tensor.name);
            }
        }
    }

    #[test]
    fn padding_is_zero_and_control_rows_are_small() {
        let dims = Preset::Tiny.dims();
        let config = ModelConfig::parse(&files::config(&dims).to_string()).unwrap();
        let runs = |name: String, dtype, shape: &[usize]| {
            recipe(&Tensor { name, dtype, shape: shape.to_vec() }, &config, Routing::Flat)
        };
        let a_log = runs("language_model.model.layers.0.self_attn.A_log".into(), Dtype::F32, &[64]);
        assert_eq!(a_log[1], Run { elements: 60, draw: Draw::Zero { width: 4 } });
        let head = runs(head_name(), Dtype::BF16, &[1024, 192]);
        assert_eq!((head[0].elements, head[1].elements), (768 * 192, 256 * 192));
        let deviation = |run: Run| match run.draw {
            Draw::Normal { deviation } => deviation,
            other => panic!("{other:?}"),
        };
        assert!(deviation(head[1]) < 0.2 * deviation(head[0]));
    }
}

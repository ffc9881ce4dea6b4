//! The vision tensors. A text runtime leaves them out, but a snapshot has them.

use super::dims::Dims;
use super::shard::Tensor;

const PATCH: usize = 14;
/// Tower positions that are merged into one row for the projector.
const MERGED: usize = 4;

/// Tensors of the projector into the text model's width.
pub(super) fn projector(dims: &Dims) -> Vec<Tensor> {
    let merged = MERGED * dims.vt_hidden;
    vec![
        bf16("mm_projector.proj.0.weight", &[merged, merged]),
        bf16("mm_projector.proj.2.weight", &[dims.hidden, merged]),
        bf16("mm_projector.post_norm.weight", &[dims.hidden]),
    ]
}

/// Tensors of the vision tower.
pub(super) fn tower(dims: &Dims) -> Vec<Tensor> {
    let (hidden, qkv, inter, grid) = (dims.vt_hidden, dims.vt_qkv, dims.vt_inter, dims.vt_grid);
    let mut tensors = vec![
        bf16("vision_tower.patch_embed.proj.weight", &[hidden, 3, PATCH, PATCH]),
        bf16("vision_tower.patch_embed.pos_emb.weight", &[grid, grid, hidden]),
        bf16("vision_tower.encoder.final_layernorm.weight", &[hidden]),
    ];
    for block in 0..dims.vt_layers {
        for (name, shape) in [
            ("norm0", &[hidden][..]),
            ("norm1", &[hidden]),
            ("wqkv", &[3 * qkv, hidden]),
            ("wo", &[hidden, qkv]),
            ("mlp.fc0", &[inter, hidden]),
            ("mlp.fc1", &[hidden, inter]),
        ] {
            let name = format!("vision_tower.encoder.blocks.{block}.{name}.weight");
            tensors.push(bf16(&name, shape));
        }
    }
    tensors
}

fn bf16(name: &str, shape: &[usize]) -> Tensor {
    Tensor { name: name.to_owned(), dtype: safetensors::Dtype::BF16, shape: shape.to_vec() }
}

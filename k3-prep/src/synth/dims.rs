//! Dimensions of a synthetic model: presets, overrides, bounds.

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Ids after the base vocabulary, all of them control tokens.
pub(super) const SPECIAL_SLOTS: usize = 256;

/// A named set of dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Preset {
    /// 7 layers, 12 experts, about 5 MB: written in a moment.
    Tiny,
    /// 8 layers, 24 experts, about 350 MB.
    Small,
    /// The widths of the release; cut it down with --layers and --experts.
    Real,
    /// The whole release; only with --sparse.
    Full,
}

/// Every dimension that shapes a snapshot. The JSON of `--dims` uses these names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Dims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// MLA layers, counted from 1 as in the config; the others are KDA.
    pub full_attn: Vec<usize>,
    /// Layers per AttnRes block.
    pub block: usize,
    /// MLA heads.
    pub heads: usize,
    /// MLA key width per head that comes out of the latent.
    pub nope: usize,
    /// MLA key width shared by all heads.
    pub rope: usize,
    /// MLA value width per head.
    pub v_head: usize,
    /// Rank of the MLA query projection.
    pub q_lora: usize,
    /// Width of the MLA latent.
    pub kv_lora: usize,
    /// KDA heads.
    pub kda_heads: usize,
    /// KDA key and value width per head.
    pub kda_dim: usize,
    /// Taps of the KDA convolutions.
    pub conv: usize,
    /// Leading layers with a dense FFN.
    pub first_dense: usize,
    /// Inner width of the dense FFN.
    pub dense_inter: usize,
    /// Routed experts per layer.
    pub experts: usize,
    /// Experts chosen per token.
    pub topk: usize,
    /// Width of the latent the routed experts work in.
    pub latent: usize,
    /// Inner width of a routed expert.
    pub moe_inter: usize,
    /// Shared experts, stored fused.
    pub shared: usize,
    /// Rows of the embedding and the head, control tokens included.
    pub vocab: usize,
    /// Factor of the KDA decay gate.
    pub gate_lower_bound: f64,
    /// beta of SiTU's gate.
    pub situ_beta: f64,
    /// beta of SiTU's linear branch.
    pub situ_linear_beta: f64,
    /// eps of the norms.
    pub rms_eps: f64,
    /// Blocks of the vision tower.
    pub vt_layers: usize,
    /// Width of the vision tower.
    pub vt_hidden: usize,
    /// Width of q, k and v in the vision tower.
    pub vt_qkv: usize,
    /// Heads of the vision tower.
    pub vt_heads: usize,
    /// Inner width of the vision tower's FFN.
    pub vt_inter: usize,
    /// Side of the position grid.
    pub vt_grid: usize,
}

impl Preset {
    /// The preset's dimensions.
    pub fn dims(self) -> Dims {
        match self {
            Self::Tiny => tiny(),
            Self::Small => small(),
            Self::Real | Self::Full => release(),
        }
    }
}

impl Dims {
    /// Replaces the fields that `json`, an object with the names of this struct, holds.
    ///
    /// # Errors
    /// Not an object, an unknown field, or a value of another type.
    pub fn with_json(&self, json: &str) -> Result<Self> {
        let changes: Map<String, Value> =
            serde_json::from_str(json).context("expected a JSON object of dimensions")?;
        let mut value = serde_json::to_value(self)?;
        value.as_object_mut().context("dimensions are an object")?.extend(changes);
        Ok(serde_json::from_value(value)?)
    }

    /// Checks what the text config's own rules leave open: the vision tower, and the
    /// size of the whole.
    ///
    /// # Errors
    /// Names the field and what is allowed.
    pub(super) fn check(&self) -> Result<()> {
        let vision = [
            ("vt_layers", self.vt_layers),
            ("vt_hidden", self.vt_hidden),
            ("vt_qkv", self.vt_qkv),
            ("vt_heads", self.vt_heads),
            ("vt_inter", self.vt_inter),
            ("vt_grid", self.vt_grid),
        ];
        for (name, n) in vision {
            ensure!((1..=1 << 14).contains(&n), "{name}: expected 1 to 16384, found {n}");
        }
        ensure!(
            self.vocab >= 256 + SPECIAL_SLOTS,
            "vocab: expected at least {} (the single bytes and the control tokens), found {}",
            256 + SPECIAL_SLOTS,
            self.vocab
        );
        // Keeps names and headers of the plan within memory: the release has 82,432.
        let experts = self.layers.saturating_mul(self.experts);
        ensure!(
            experts <= 1 << 20,
            "layers x experts: expected at most {}, found {experts}",
            1 << 20
        );
        Ok(())
    }

    /// MLA layers that the stack really has, counted from 1.
    pub(super) fn mla_layers(&self) -> Vec<usize> {
        self.full_attn.iter().copied().filter(|&n| n <= self.layers).collect()
    }

    /// KDA layers, counted from 1.
    pub(super) fn kda_layers(&self) -> Vec<usize> {
        (1..=self.layers).filter(|n| !self.full_attn.contains(n)).collect()
    }

    /// Ids below this are ordinary tokens.
    pub(super) fn base_vocab(&self) -> usize {
        self.vocab.saturating_sub(SPECIAL_SLOTS)
    }
}

fn release() -> Dims {
    Dims {
        hidden: 7168,
        layers: 93,
        full_attn: (4..93).step_by(4).chain([93]).collect(),
        block: 12,
        heads: 96,
        nope: 128,
        rope: 64,
        v_head: 128,
        q_lora: 1536,
        kv_lora: 512,
        kda_heads: 96,
        kda_dim: 128,
        conv: 4,
        first_dense: 1,
        dense_inter: 33792,
        experts: 896,
        topk: 16,
        latent: 3584,
        moe_inter: 3072,
        shared: 2,
        vocab: 163_840,
        gate_lower_bound: -5.0,
        situ_beta: 4.0,
        situ_linear_beta: 25.0,
        rms_eps: 1e-5,
        vt_layers: 27,
        vt_hidden: 1024,
        vt_qkv: 1536,
        vt_heads: 12,
        vt_inter: 4096,
        vt_grid: 64,
    }
}

fn small() -> Dims {
    Dims {
        hidden: 768,
        layers: 8,
        full_attn: vec![4, 8],
        block: 3,
        heads: 8,
        q_lora: 320,
        kv_lora: 192,
        kda_heads: 8,
        dense_inter: 2112,
        experts: 24,
        topk: 6,
        latent: 384,
        moe_inter: 320,
        vocab: 4096,
        vt_layers: 2,
        vt_hidden: 64,
        vt_qkv: 96,
        vt_heads: 2,
        vt_inter: 128,
        vt_grid: 8,
        ..release()
    }
}

/// Widths that the release keeps apart are all different here, and `latent` is no
/// multiple of 64, so the latent up-projection must fall back from int4 to int8.
fn tiny() -> Dims {
    Dims {
        hidden: 192,
        layers: 7,
        full_attn: vec![4, 7],
        heads: 4,
        nope: 64,
        rope: 32,
        v_head: 64,
        q_lora: 160,
        kv_lora: 112,
        kda_heads: 4,
        kda_dim: 64,
        dense_inter: 320,
        experts: 12,
        topk: 3,
        latent: 96,
        moe_inter: 64,
        vocab: 1024,
        vt_hidden: 16,
        vt_qkv: 24,
        vt_inter: 32,
        vt_grid: 4,
        ..small()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_replaces_named_fields_only() {
        let dims = Preset::Tiny.dims().with_json(r#"{"hidden": 256, "full_attn": [2]}"#).unwrap();
        assert_eq!(dims, Dims { hidden: 256, full_attn: vec![2], ..tiny() });
    }

    #[test]
    fn bad_json_is_refused_by_name() {
        let tiny = tiny();
        for (json, part) in [
            ("[1]", "expected a JSON object"),
            (r#"{"hiden": 3}"#, "unknown field `hiden`"),
            (r#"{"hidden": -3}"#, "-3"),
            (r#"{"hidden": "3"}"#, "invalid type"),
        ] {
            let error = format!("{:#}", tiny.with_json(json).unwrap_err());
            assert!(error.contains(part), "{json}: {error}");
        }
    }

    #[test]
    fn a_shorter_stack_keeps_the_pattern() {
        let dims = Dims { layers: 5, ..release() };
        assert_eq!(dims.mla_layers(), [4]);
        assert_eq!(dims.kda_layers(), [1, 2, 3, 5]);
        assert_eq!(release().mla_layers().len(), 24);
        assert_eq!(release().kda_layers().len(), 69);
    }

    #[test]
    fn sizes_are_bounded() {
        for bad in [
            Dims { vt_hidden: 0, ..tiny() },
            Dims { vt_grid: 1 << 30, ..tiny() },
            Dims { vocab: 511, ..tiny() },
            Dims { layers: usize::MAX, ..tiny() },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
        for preset in [Preset::Tiny, Preset::Small, Preset::Real, Preset::Full] {
            preset.dims().check().unwrap();
        }
    }
}

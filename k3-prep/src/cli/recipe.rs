//! The options that choose formats and scales, for `convert` and `plan`.

use std::path::{Path, PathBuf};

use clap::Args;
use k3_formats::calibration::Calibration;
use k3_formats::quant::Scales;
use k3_formats::recipe::Recipe;
use k3_formats::{ErrorKind, Result};

/// In which format each matrix is stored, and how its scales are chosen.
#[derive(Debug, Clone, Args)]
pub struct RecipeArgs {
    /// Formats and scales by a recipe: seed, fast, balanced, faithful, or a file
    #[arg(long, value_name = "NAME|FILE", conflicts_with_all = ["bits", "mla_bits", "head_bits"])]
    pub recipe: Option<String>,
    /// KDA, latent, shared and dense matrices: 4, 8, or 16 to keep BF16 [default: 4]
    #[arg(long, value_name = "BITS", env = "K3_BITS", value_parser = bits)]
    pub bits: Option<u32>,
    /// MLA matrices: 4, 8 or 16 [default: 8]
    #[arg(long, value_name = "BITS", env = "K3_MLA_BITS", value_parser = bits)]
    pub mla_bits: Option<u32>,
    /// lm_head: 4, 8 or 16 [default: 8]
    #[arg(long, value_name = "BITS", env = "K3_HEAD_BITS", value_parser = bits)]
    pub head_bits: Option<u32>,
    /// How scales are chosen [default: the recipe's; absmax without one]
    #[arg(long, value_name = "HOW", value_parser = ["absmax", "mse", "hessian"])]
    pub scales: Option<String>,
    /// Mean squares of the inputs of every matrix, a safetensors file as formats/README.md
    /// describes it; scales are then hessian unless said otherwise
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
}

impl RecipeArgs {
    /// The recipe they ask for, and the statistics it weighs errors by.
    ///
    /// # Errors
    /// There is no such recipe, or a file cannot be read.
    pub fn recipe(&self) -> Result<(Recipe, Option<Calibration>)> {
        let recipe = match self.recipe.as_deref() {
            None => Recipe::of_bits(
                self.bits.unwrap_or(4),
                self.mla_bits.unwrap_or(8),
                self.head_bits.unwrap_or(8),
            )?,
            Some(name) => match Recipe::named(name) {
                Some(recipe) => recipe,
                None => Recipe::read(Path::new(name)).map_err(|e| match e.kind() {
                    ErrorKind::Missing => e.hint(format!(
                        "give a recipe file, or a name: {}",
                        Recipe::NAMES.map(|(name, _)| name).join(", ")
                    )),
                    _ => e,
                })?,
            },
        };
        let calibration = self.calibration.as_deref().map(Calibration::read).transpose()?;
        let scales = match (&self.scales, &calibration) {
            (Some(name), _) => Scales::from_name(name)?,
            (None, Some(_)) => Scales::Hessian,
            (None, None) => recipe.scales(),
        };
        let weighed = calibration.as_ref().filter(|_| scales == Scales::Hessian);
        let recorded = weighed.map(|calibration| calibration.sha256);
        Ok((recipe.with_scales(scales).with_calibration(recorded), calibration))
    }
}

fn bits(text: &str) -> std::result::Result<u32, String> {
    match text {
        "4" => Ok(4),
        "8" => Ok(8),
        "16" => Ok(16),
        _ => Err("expected 4, 8 or 16".into()),
    }
}

//! Command-line types; no logic.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use k3_formats::recipe::Recipe;

/// Offline checkpoint toolkit for Kimi K3: convert, verify, inspect.
#[derive(Debug, Parser)]
#[command(name = "k3-prep", version, about, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Convert a Hugging Face snapshot into a container for k3-run
    Convert(ConvertArgs),
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Snapshot: a plain folder, a cache repository or revision, or a --local-dir download
    pub snapshot: PathBuf,
    /// Container to write; OUT.partial holds the work until it is complete
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Bits per weight, by family.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Threads to quantize with [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Check everything and print the plan, but write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Replace OUT, and start over whatever OUT.partial holds
    #[arg(long)]
    pub force: bool,
    /// Print the plan or the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Bits per weight, by family of matrices.
#[derive(Debug, Clone, Args)]
pub struct RecipeArgs {
    /// KDA, latent, shared and dense matrices: 4, 8, or 16 to keep BF16
    #[arg(long, value_name = "BITS", default_value_t = 4, env = "K3_BITS", value_parser = bits)]
    pub bits: u32,
    /// MLA matrices: 4, 8 or 16
    #[arg(long, value_name = "BITS", default_value_t = 8, env = "K3_MLA_BITS", value_parser = bits)]
    pub mla_bits: u32,
    /// lm_head: 4, 8 or 16
    #[arg(long, value_name = "BITS", default_value_t = 8, env = "K3_HEAD_BITS", value_parser = bits)]
    pub head_bits: u32,
}

impl RecipeArgs {
    /// The recipe they ask for.
    pub fn recipe(&self) -> Recipe {
        Recipe { bits: self.bits, mla_bits: self.mla_bits, head_bits: self.head_bits }
    }
}

fn bits(text: &str) -> Result<u32, String> {
    match text {
        "4" => Ok(4),
        "8" => Ok(8),
        "16" => Ok(16),
        _ => Err("expected 4, 8 or 16".into()),
    }
}

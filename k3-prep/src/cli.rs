//! Command-line types; no logic.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::part::ShardRange;
use crate::synth::{Preset, Routing};

mod recipe;

pub use recipe::RecipeArgs;

/// Offline checkpoint toolkit for Kimi K3: convert, verify, inspect.
#[derive(Debug, Parser)]
#[command(name = "k3-prep", version, about, max_term_width = 100)]
pub struct Cli {
    /// Say nothing but results, warnings and errors
    #[arg(short, long, global = true)]
    pub quiet: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The verbs.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Convert a Hugging Face snapshot into a container for k3-run
    Convert(ConvertArgs),
    /// Check a container: structure, digests, and that the shards are still what they were
    Verify(VerifyArgs),
    /// Say whether a snapshot or a container is whole, what this machine is, how fast its
    /// drive is, and what that comes to
    Doctor(DoctorArgs),
    /// Show what a snapshot, a container or a safetensors file holds
    Inspect(InspectArgs),
    /// Show what convert would write, how long that takes here, and what k3-run will need
    Plan(PlanArgs),
    /// Write the tokenizer.json that other programs read
    Tokenizer(TokenizerArgs),
    /// Write a synthetic snapshot with true names, dtypes and shapes, to try the tools on
    Synth(SynthArgs),
}

/// Arguments of `convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// Snapshot: a plain folder, a cache repository or revision, or a --local-dir download
    pub snapshot: PathBuf,
    /// Container to write; OUT.partial holds the work until it is complete
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Formats and scales.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Threads to quantize with [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Read all experts once, 1.45 TB of the release, and record a checksum of each, which
    /// `k3-run --verify-experts` and `verify --experts` compare
    #[arg(long)]
    pub hash_experts: bool,
    /// Also copy the experts, as they are, into one page-aligned bank file a layer in DIR, for a
    /// faster drive, or to delete the snapshot afterwards; `k3-run --snapshot DIR` reads them
    /// there. Needs 1.45 TB for the release. A copy that was interrupted goes on where it
    /// stopped; with --hash-experts, experts are still read only once
    #[arg(long, num_args = 2, value_names = ["pack", "DIR"], conflicts_with = "shards")]
    pub experts: Vec<PathBuf>,
    /// Take NaN and infinite weights as 0 instead of refusing them; each tensor is named
    #[arg(long)]
    pub allow_nonfinite: bool,
    /// Convert only the dense files that end in these shards, numbered from 1, so that several
    /// processes, also of several machines, work on one OUT; complete it with --finish
    #[arg(long, value_name = "A-B", conflicts_with_all = ["finish", "follow", "force", "hash_experts", "dry_run"])]
    pub shards: Option<ShardRange>,
    /// Complete what processes with --shards have converted, and refuse if anything is missing
    #[arg(long, conflicts_with_all = ["follow", "force", "dry_run"])]
    pub finish: bool,
    /// Begin while the download runs: convert each shard once it is complete, wait for the
    /// others, end when all are there
    #[arg(long, conflicts_with_all = ["force", "dry_run"])]
    pub follow: bool,
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

/// Arguments of `verify`.
#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// Container to check
    pub container: PathBuf,
    /// The snapshot, if it is not where the manifest says; several for shards on several drives.
    /// A folder with banks of `convert --experts pack` is checked in place of the shards
    #[arg(long, value_name = "DIR")]
    pub snapshot: Vec<PathBuf>,
    /// Also hash the whole shards and compare with the digests their publisher gave
    #[arg(long)]
    pub source: bool,
    /// Also read all experts, look at their scales, and compare with the checksums that
    /// `convert --hash-experts` recorded; of banks, compare all bytes with their digests
    #[arg(long)]
    pub experts: bool,
    /// Also quantize sampled rows of every matrix again and compare
    #[arg(long)]
    pub rederive: bool,
    /// The calibration file of a container with hessian scales, for --rederive
    #[arg(long, value_name = "FILE")]
    pub calibration: Option<PathBuf>,
    /// Rows of each matrix that --rederive samples
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    pub rows: u32,
    /// Seed of the sample
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Threads to hash with [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `doctor`.
#[derive(Debug, Args)]
pub struct DoctorArgs {
    /// Snapshot or container
    #[arg(value_name = "SNAPSHOT|CONTAINER")]
    pub path: PathBuf,
    /// The snapshot of a container, if it is not where the manifest says; several for shards on
    /// several drives
    #[arg(long, value_name = "DIR")]
    pub snapshot: Vec<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `inspect`.
#[derive(Debug, Args)]
pub struct InspectArgs {
    /// Snapshot, container or safetensors file
    pub path: PathBuf,
    /// List every tensor
    #[arg(long)]
    pub tensors: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    /// Snapshot: a plain folder, a cache repository or revision, or a --local-dir download
    pub snapshot: PathBuf,
    /// Formats and scales.
    #[command(flatten)]
    pub recipe: RecipeArgs,
    /// Context to plan memory for, in tokens
    #[arg(long, value_name = "N", default_value_t = 32768)]
    pub context: u64,
    /// Threads to quantize with [default: all that this process may use]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub jobs: Option<u16>,
    /// Do not measure the speed of this machine
    #[arg(long)]
    pub no_measure: bool,
    /// Print as JSON
    #[arg(long)]
    pub json: bool,
}

/// Arguments of `tokenizer`.
#[derive(Debug, Args)]
pub struct TokenizerArgs {
    /// Snapshot with tiktoken.model, tokenizer_config.json and config.json
    pub snapshot: PathBuf,
    /// File to write [default: stdout]
    #[arg(short, long, value_name = "FILE")]
    pub output: Option<PathBuf>,
}

/// Arguments of `synth`.
#[derive(Debug, Args)]
pub struct SynthArgs {
    /// Folder to write, new or empty
    #[arg(value_name = "OUT")]
    pub out: PathBuf,
    /// Dimensions to begin with
    #[arg(long, value_enum, default_value = "tiny")]
    pub preset: Preset,
    /// Decoder layers; fewer than the preset's keep the first part of its pattern
    #[arg(long, value_name = "N")]
    pub layers: Option<usize>,
    /// Experts per layer
    #[arg(long, value_name = "N")]
    pub experts: Option<usize>,
    /// Vocabulary, the 256 control tokens included
    #[arg(long, value_name = "N")]
    pub vocab: Option<usize>,
    /// JSON file with dimensions to replace
    #[arg(long, value_name = "FILE")]
    pub dims: Option<PathBuf>,
    /// How the routers choose
    #[arg(long, value_enum, default_value = "flat")]
    pub routing: Routing,
    /// Seed of all values
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// True headers and sizes, but holes for data
    #[arg(long)]
    pub sparse: bool,
    /// Write a container of that kind into OUT, and its snapshot into OUT.snapshot
    #[arg(long, requires = "sparse")]
    pub container: bool,
}

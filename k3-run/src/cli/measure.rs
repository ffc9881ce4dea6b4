//! `k3-run logits`, `eval` and `bench`: what measures the model or the machine.

use std::path::PathBuf;

use clap::Args;

use super::EngineArgs;
use super::values::{Ids, ids, positive, window};

/// `k3-run logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Token ids separated by commas or spaces.
    #[arg(long, value_name = "IDS", value_parser = ids, required_unless_present = "x0")]
    pub ids: Option<Ids>,

    /// f32 rows [positions, hidden] that enter the first layer in place of embedded ids.
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    pub x0: Option<PathBuf>,

    /// Where to write the logits: little-endian f32 [positions, vocab].
    #[arg(long, value_name = "FILE", env = "K3_LOGITS")]
    pub out: PathBuf,

    /// Where to write the hidden state after every layer, and last the input of lm_head:
    /// little-endian f32 [positions, layers + 1, hidden].
    #[arg(long, value_name = "FILE", env = "K3_TRACE")]
    pub trace: Option<PathBuf>,
}

/// `k3-run eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Text to predict, UTF-8; names of control tokens in it are plain text.
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,

    /// Container to compare with, for example one of --bits 16; it is run without --act8,
    /// --kv-type and --top-p-experts. The two share --ram.
    #[arg(long, value_name = "CONTAINER")]
    pub against: Option<PathBuf>,

    /// Tokens of a window; each is read from an empty state, and all but its first token
    /// are predicted.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = window)]
    pub window: usize,

    /// Read only so many tokens of the text.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub tokens: Option<usize>,

    /// Worst tokens to list.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub worst: usize,

    /// Keep finished windows here, and go on with what is there.
    #[arg(long, value_name = "FILE")]
    pub progress: Option<PathBuf>,

    /// Write the natural logarithm of each predicted token's probability: little-endian f64.
    #[arg(long, value_name = "FILE", conflicts_with = "progress")]
    pub log_probs: Option<PathBuf>,

    /// Print as JSON.
    #[arg(long)]
    pub json: bool,
}

/// `k3-run bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Rounds of measurements, all of them interleaved.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = positive)]
    pub rounds: usize,

    /// Begin no further round that would end after this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub seconds: u64,

    /// Tokens decoded in each round, with the expert cache as given and with none.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 8, value_parser = positive)]
    pub tokens: usize,

    /// Lengths of prompts, separated by commas.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "128", value_parser = positive)]
    pub prompt: Vec<usize>,

    /// Positions that the context holds before anything is measured (zeros, which cost as
    /// much as any), to see what long contexts cost.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub depth: usize,

    /// A UTF-8 file that is taken in and continued, in place of a paragraph of ours.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// Where to write what happened when in the last round, for chrome://tracing or Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

//! `k3-run generate`, and what `chat` shares with it.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::values::{Ids, guesses, ids, positive};
use super::{EngineArgs, SamplingArgs};

/// `k3-run generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    #[command(flatten)]
    pub prompt: PromptArgs,

    #[command(flatten)]
    pub session: SessionArgs,

    /// Most tokens to generate.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub tokens: usize,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// Print text, or the ids one per line.
    #[arg(long, value_enum, default_value_t = Print::Text)]
    pub print: Print,
}

/// What `generate` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Print {
    /// Text as it comes.
    Text,
    /// Ids, one per line.
    Ids,
}

/// Where tokens come from.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// The prompt; control tokens in it count as such. Behind a session that was loaded it
    /// may be left out.
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["ids", "load"])]
    pub prompt: Option<String>,

    /// Token ids separated by commas or spaces.
    #[arg(long, value_name = "IDS", value_parser = ids)]
    pub ids: Option<Ids>,
}

/// How a sequence grows, and where it comes from and goes to.
#[derive(Debug, Args)]
pub struct SessionArgs {
    /// Most tokens guessed per step from what was said before. Never changes a result;
    /// pays where text repeats itself and bytes are the bound, else it is slower.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = guesses)]
    pub speculate: usize,

    /// Begin with the session in this file.
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,

    /// Leave the session in this file at the end.
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

//! `k3-run chat`

use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};

use super::values::{copies, positive};
use super::{EngineArgs, SamplingArgs, SessionArgs};

/// `k3-run chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Instructions that the conversation begins with.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// How hard the model is told to think; `none` does not tell it.
    #[arg(long, value_enum, default_value_t = EffortWord::Max)]
    pub effort: EffortWord,

    /// Let the model answer without thinking first.
    #[arg(long)]
    no_think: bool,

    /// Twin of --no-think, the other way round.
    #[arg(long = "think", hide = true, env = "K3_THINK", value_parser = FalseyValueParser::new(), default_value_t = true, action = clap::ArgAction::Set)]
    think: bool,

    /// Do not show what the model thinks; /think changes it.
    #[arg(long)]
    pub hide_reasoning: bool,

    /// Most tokens of an answer. Default: what fits into the context.
    #[arg(short = 'n', long, value_name = "N", value_parser = positive)]
    pub tokens: Option<usize>,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    /// Copies of the state kept at turn boundaries, to go back to for /retry and after an
    /// interruption.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = copies)]
    pub checkpoints: usize,

    /// Folder for the copies. Default: memory.
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,

    #[command(flatten)]
    pub session: SessionArgs,

    /// File with the lines typed before. Default: k3-run/history in the folder for state.
    #[arg(long, value_name = "FILE", env = "K3_HISTORY")]
    pub history: Option<PathBuf>,

    /// Keep no lines.
    #[arg(long)]
    pub no_history: bool,
}

impl ChatArgs {
    /// Whether the model thinks before it answers.
    pub fn thinking(&self) -> bool {
        self.think && !self.no_think
    }
}

/// How hard the model is told to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EffortWord {
    Low,
    High,
    Max,
    /// It is not told.
    None,
}

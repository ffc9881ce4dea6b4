//! The command line: types only.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

mod chat;
mod engine;
mod generate;
mod measure;
mod sampling;
mod serve;
mod values;

pub use chat::{ChatArgs, EffortWord};
pub use engine::{Act8, EngineArgs};
pub use generate::{GenerateArgs, Print, PromptArgs, SessionArgs};
pub use measure::{BenchArgs, EvalArgs, LogitsArgs};
pub use sampling::SamplingArgs;
pub use serve::ServeArgs;
pub use values::Ids;
use values::ids;

/// Run Kimi K3 on this machine.
///
/// k3-run maps a container that `k3-prep convert` wrote, uses its weights in place, and
/// streams the experts from the original shards.
#[derive(Debug, Parser)]
#[command(name = "k3-run", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// One verb each.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Talk in the terminal.
    Chat(ChatArgs),
    /// Continue a prompt and print the text as it comes.
    Generate(GenerateArgs),
    /// Serve the model over HTTP in OpenAI's shape, with a chat page at /.
    Serve(ServeArgs),
    /// Write the logits of every position of given tokens, for comparisons.
    Logits(LogitsArgs),
    /// Print the token ids of a text as JSON.
    Tokenize(TokenizeArgs),
    /// Print the text of token ids.
    Detokenize(DetokenizeArgs),
    /// Measure memory, drive and cores, and how near to them the model runs.
    Bench(BenchArgs),
    /// Say how well a container predicts a text, and how far it is from another container.
    Eval(EvalArgs),
    /// Say what is in a container, where its experts are, and how this machine would run it.
    Info(InfoArgs),
    /// Say where memory would go and what a token would cost, without taking or running it.
    Plan(PlanArgs),
}

/// `k3-run tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The folder that `k3-prep convert` wrote.
    pub container: PathBuf,

    #[command(flatten)]
    pub source: TextArgs,

    /// Let control tokens in the text count as such.
    #[arg(long)]
    pub specials: bool,
}

/// Where text comes from.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TextArgs {
    /// The text.
    #[arg(long, value_name = "TEXT")]
    pub text: Option<String>,

    /// A UTF-8 file; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// A chat request in OpenAI's shape (JSON; `-` is stdin): the ids of its whole prompt.
    #[arg(long, value_name = "FILE")]
    pub chat: Option<PathBuf>,
}

/// `k3-run detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// The folder that `k3-prep convert` wrote.
    pub container: PathBuf,

    /// Token ids separated by commas or spaces; a JSON list is fine too.
    #[arg(value_name = "IDS", value_parser = ids)]
    pub ids: Ids,
}

/// `k3-run info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Start in full, tokenizer included, and say how long it took and what it needs.
    #[arg(long)]
    pub ready: bool,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `k3-run plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::experts::DirectIo;
    use crate::memory::MemoryMode;

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_have_twins() {
        let parse = |args: &[&str]| match Cli::parse_from([&["k3-run", "info", "c"], args].concat())
            .command
        {
            Command::Info(info) => info.engine,
            _ => unreachable!("info was asked for"),
        };
        let args = parse(&["--expert-gb", "1.5", "--mmap", "--snapshot-list", "/a:/b c"]);
        assert_eq!(args.expert_cache_bytes(), Some(3 << 29));
        assert_eq!(args.memory_mode(), MemoryMode::Mmap);
        assert_eq!(args.snapshot_dirs(), [PathBuf::from("/a"), PathBuf::from("/b c")]);
        let args = parse(&["--snapshot", "/x:y", "--direct-io", "0", "--snapshot-list", "/a"]);
        assert_eq!(args.snapshot_dirs(), [PathBuf::from("/x:y")]);
        assert_eq!(args.direct_io, DirectIo::Off);
    }
}

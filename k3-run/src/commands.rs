//! One verb each: resolve options, call the library, print.

mod bench;
mod chat;
mod eval;
mod generate;
mod info;
mod logits;
mod plan;
mod serve;
mod tokenize;

use crate::cli::{Cli, Command};

/// Runs the command.
///
/// # Errors
/// Whatever went wrong, with its hint.
pub(crate) fn run(cli: &Cli) -> anyhow::Result<()> {
    match &cli.command {
        Command::Chat(args) => chat::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Tokenize(args) => tokenize::tokenize(args),
        Command::Detokenize(args) => tokenize::detokenize(args),
        Command::Bench(args) => bench::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Info(args) => info::run(args),
        Command::Plan(args) => plan::run(args),
    }
}

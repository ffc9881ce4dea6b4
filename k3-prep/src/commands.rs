//! One module per verb: resolve options, call the library, print.

use anyhow::Result;

use crate::Outcome;
use crate::cli::{Cli, Command};
use crate::progress::Talk;

mod convert;
mod doctor;
mod inspect;
mod plan;
mod synth;
mod tokenizer;
mod verify;

pub(crate) fn run(cli: Cli) -> Result<Outcome> {
    let talk = if cli.quiet { Talk::Quiet } else { Talk::Progress };
    match cli.command {
        Command::Convert(args) => convert::run(&args, talk),
        Command::Verify(args) => verify::run(&args, talk),
        Command::Doctor(args) => doctor::run(&args),
        Command::Inspect(args) => inspect::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Tokenizer(args) => tokenizer::run(&args),
        Command::Synth(args) => synth::run(&args, talk),
    }
}

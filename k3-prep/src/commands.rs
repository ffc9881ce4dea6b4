//! One module per verb: resolve options, call the library, print.

use anyhow::Result;

use crate::Outcome;
use crate::cli::{Cli, Command};

mod convert;
mod synth;
mod verify;

pub(crate) fn run(cli: Cli) -> Result<Outcome> {
    match cli.command {
        Command::Convert(args) => convert::run(&args),
        Command::Verify(args) => verify::run(&args),
        Command::Synth(args) => synth::run(&args),
    }
}

//! One module per verb: resolve options, call the library, print.

use anyhow::Result;

use crate::cli::{Cli, Command};

mod convert;

pub(crate) fn run(cli: Cli) -> Result<()> {
    match cli.command {
        Command::Convert(args) => convert::run(&args),
    }
}

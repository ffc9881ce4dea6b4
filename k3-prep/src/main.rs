//! Offline checkpoint toolkit for Kimi K3.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    k3_prep::run(k3_prep::Cli::parse())
}

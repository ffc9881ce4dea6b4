//! Lean CPU runtime for Kimi K3.
//!
//! Data flows one way: container -> model -> session -> sampler -> text. The container's
//! dense weights are mapped and used in place; routed experts are streamed from the
//! original shards.

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Parser;

pub mod bench;
pub mod chat;
pub mod cli;
pub mod clock;
mod commands;
pub mod dense;
pub mod engine;
pub mod eval;
pub mod experts;
pub mod kernels;
pub mod linear;
pub mod memory;
pub mod model;
pub mod open;
pub mod parallel;
pub mod repl;
mod report;
pub mod sampler;
pub mod server;
pub mod session;
mod sigbus;
pub mod speculate;
pub mod state;
pub mod stop;
pub mod trace;

/// Runs the program with these arguments (the first is its name) and returns its exit code.
pub fn run(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    sigbus::install();
    let cli = match cli::Cli::try_parse_from(args) {
        Ok(cli) => cli,
        Err(usage) => {
            // Help and version go to stdout and succeed.
            let code = usage.exit_code();
            return if usage.print().is_ok() {
                ExitCode::from(code as u8)
            } else {
                ExitCode::from(2)
            };
        }
    };
    match commands::run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => report::fail(&error),
    }
}

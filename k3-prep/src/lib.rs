//! The toolkit as a library: snapshots in, containers out.
//!
//! Data goes one way: snapshot, plan, quantize, container. A plan is a value that can be
//! printed, tested and executed; executing decides nothing.

use std::process::ExitCode;

mod cli;
mod commands;
pub mod conversion;
mod folder;
mod inventory;
mod journal;
mod output;
mod pipeline;
pub mod plan;
mod problems;
mod progress;
pub mod quantize;
mod shard_reader;
mod size;
mod survey;
pub mod synth;

pub use cli::{Cli, Command, ConvertArgs, RecipeArgs};

/// Name and version in manifests and journals.
pub const TOOL: &str = concat!("k3-prep ", env!("CARGO_PKG_VERSION"));

/// Exit code of a command that could not do its work.
const FAILED: u8 = 2;

/// Runs one command: results on stdout, everything else on stderr.
/// Exit codes: 0 success, 2 could not run.
pub fn run(cli: Cli) -> ExitCode {
    match commands::run(cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::report_error(&error);
            ExitCode::from(FAILED)
        }
    }
}

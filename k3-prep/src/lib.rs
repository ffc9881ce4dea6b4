//! The toolkit as a library: snapshots in, containers out.
//!
//! Data goes one way: snapshot, plan, quantize, container. A plan is a value that can be
//! printed, tested and executed; executing decides nothing.

use std::process::ExitCode;

mod block_reader;
mod cli;
mod commands;
pub mod conversion;
pub mod doctor;
mod expert_scales;
pub mod expert_sums;
mod folder;
pub mod follow;
pub mod footprint;
mod identity;
pub mod inspect;
mod interrupt;
mod inventory;
mod journal;
mod output;
pub mod pack;
pub mod part;
mod pipeline;
pub mod plan;
mod problems;
mod progress;
pub mod quantize;
mod release;
mod size;
mod speed;
mod survey;
pub mod synth;
pub mod threads;
pub mod tokenizer_check;
pub mod tokenizer_json;
pub mod verify;

pub use cli::{
    Cli, Command, ConvertArgs, DoctorArgs, InspectArgs, PlanArgs, RecipeArgs, SynthArgs,
    TokenizerArgs, VerifyArgs,
};
pub use progress::Talk;

/// Name and version in manifests and journals.
pub const TOOL: &str = concat!("k3-prep ", env!("CARGO_PKG_VERSION"));

/// Exit code of a verification that found a difference.
const DIFFERENT: u8 = 1;
/// Exit code of a command that could not do its work.
const FAILED: u8 = 2;

/// What a command concluded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// All is well.
    Good,
    /// The command worked, and what it looked at is not as it should be.
    Different,
}

/// Runs one command: results on stdout, everything else on stderr.
/// Exit codes: 0 success, 1 a verification found a difference, 2 could not run.
pub fn run(cli: Cli) -> ExitCode {
    match commands::run(cli) {
        Ok(Outcome::Good) => ExitCode::SUCCESS,
        Ok(Outcome::Different) => ExitCode::from(DIFFERENT),
        Err(error) => {
            output::report_error(&error);
            ExitCode::from(FAILED)
        }
    }
}

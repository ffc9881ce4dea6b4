//! `k3-run serve`

use std::net::IpAddr;
use std::path::PathBuf;

use clap::Args;

use super::EngineArgs;
use super::values::{copies, slots};

/// `k3-run serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Address to listen at. Others than this machine need an API key.
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", env = "K3_HOST")]
    pub host: IpAddr,

    /// Port to listen at; 0 takes any.
    #[arg(long, value_name = "PORT", default_value_t = 8080, env = "K3_PORT")]
    pub port: u16,

    /// File with API keys, one per line; a client must give one of them.
    #[arg(long, value_name = "FILE", env = "K3_API_KEY_FILE")]
    pub api_key_file: Option<PathBuf>,

    /// Let everyone who can reach the address use the model, without a key.
    #[arg(long)]
    pub no_auth: bool,

    /// Origin of web pages that may use the server, for example http://localhost:3000;
    /// `*` for all. Can be given several times. Default: only the server's own page.
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,

    /// Conversations that run side by side. One step of the model serves all of them;
    /// each takes memory for its context. Never changes a result.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = slots)]
    pub slots: usize,

    /// Copies of the state that each slot keeps at turn boundaries, to go back to when a
    /// conversation takes another turn.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = copies)]
    pub checkpoints: usize,

    /// Folder for the copies. Default: memory.
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,

    /// Requests that may wait for a slot; more are told to come back later.
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub queue: usize,

    /// Seconds of silence after which a waiting client is told of progress.
    #[arg(long, value_name = "SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub keep_alive: u64,

    /// Seconds that replies have to finish when the server ends.
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,

    /// Folder in which the conversations in the slots are kept when the server ends, and
    /// taken up when it starts again.
    #[arg(long, value_name = "DIR")]
    pub save_dir: Option<PathBuf>,

    /// Name of the model in replies.
    #[arg(long, value_name = "NAME", default_value = "kimi-k3")]
    pub model_name: String,
}

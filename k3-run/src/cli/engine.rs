//! What every command that runs the model takes.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, ValueEnum};

use super::values::{fraction, gibibytes, look_ahead, positive, size, threads};
use crate::experts::{DirectIo, LookAhead, cache_dir};
use crate::memory::MemoryMode;
use crate::state::KvType;

/// What every command that runs the model takes.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// The folder that `k3-prep convert` wrote.
    pub container: PathBuf,

    /// Folder with the original shards, or with the banks of `k3-prep convert --experts pack`;
    /// give it several times if they are spread over drives. Banks are used where there are
    /// both. Default: where the snapshot was at conversion.
    #[arg(long, value_name = "DIR")]
    pub snapshot: Vec<PathBuf>,

    /// Start although shards are missing or short; the first expert that is needed from one
    /// of them is an error then. Without it, they are an error at the start.
    #[arg(long)]
    pub allow_missing: bool,

    /// Twin of --snapshot: a list as in PATH.
    #[arg(long = "snapshot-list", hide = true, env = "K3_DIRS")]
    snapshot_list: Option<OsString>,

    /// Threads that compute. Default: the physical cores this process may use.
    #[arg(long, value_name = "N", value_parser = threads)]
    pub threads: Option<usize>,

    /// Prompt tokens taken through the layers together; more need more memory and read
    /// each expert less often. Never changes a result.
    #[arg(long, value_name = "N", default_value_t = 32, env = "K3_CHUNK", value_parser = positive)]
    pub chunk: usize,

    /// Memory for everything, for example 24G; more than this is never taken. Default: what
    /// is free now and allowed by the cgroup, less a reserve for others.
    #[arg(long, value_name = "SIZE", env = "K3_RAM", value_parser = size)]
    pub ram: Option<u64>,

    /// Where the dense weights are: `mmap` maps them from the container, `resident` copies
    /// them into private memory, `stream` keeps what the budget allows and reads the rest
    /// again for every token. Never changes a result.
    #[arg(long, value_enum, default_value_t, value_name = "MODE")]
    memory: MemoryMode,

    /// Twin of --memory mmap.
    #[arg(long = "mmap", hide = true, env = "K3_MMAP", value_parser = FalseyValueParser::new())]
    mmap: bool,

    /// Lock the weights that are kept in memory, so that they are never swapped out.
    #[arg(long)]
    pub pin: bool,

    /// Tokens to have room for, prompt included. Default: what is asked for, or 4096 where
    /// that is not known.
    #[arg(long, value_name = "N", env = "K3_MAXT", value_parser = positive)]
    pub context: Option<usize>,

    /// How the MLA cache is kept: `bf16` takes half the memory of `f32` and half the
    /// bytes to read. Changes results a little.
    #[arg(long, value_enum, default_value_t, env = "K3_KV_TYPE")]
    pub kv_type: KvType,

    /// Memory for cached experts, for example 24G. One expert is always kept. Never
    /// changes a result. Default: what the dense weights leave of --ram.
    #[arg(long, value_name = "SIZE", value_parser = size)]
    expert_cache: Option<u64>,

    /// Twin of --expert-cache, in units of 1 GiB.
    #[arg(long = "expert-gb", hide = true, env = "K3_EXPERT_GB", value_parser = gibibytes)]
    expert_gb: Option<u64>,

    /// Compare every expert that is read with the checksum that `k3-prep convert
    /// --hash-experts` recorded, and stop at the first that differs.
    #[arg(long)]
    pub verify_experts: bool,

    /// Whether expert reads go around the page cache.
    #[arg(long, value_enum, default_value_t, env = "K3_DIRECT")]
    pub direct_io: DirectIo,

    /// Expert reads in flight.
    #[arg(long, value_name = "N", default_value_t = 4, env = "K3_LOAD_THREADS", value_parser = threads)]
    pub readers: usize,

    /// Experts of the next layer to read before it asks, while the disk would be idle.
    /// Never changes a result.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = look_ahead)]
    pub look_ahead: LookAhead,

    /// Neither keep which experts were used, nor read those early that former conversations
    /// used most. They are kept in a small file for each container in $XDG_CACHE_HOME/k3, or
    /// ~/.cache/k3, by generate, chat and serve. Never changes a result.
    #[arg(long, env = "K3_NO_USAGE", value_parser = FalseyValueParser::new())]
    pub no_usage: bool,

    /// Keep only a token's weightiest routed experts that together have this part of the
    /// weight, for example 0.9. Changes results.
    #[arg(long, value_name = "F", env = "K3_TOPP", value_parser = fraction)]
    pub top_p_experts: Option<f32>,

    /// Force a set of kernels; `k3-run info` lists what this CPU has.
    #[arg(long, value_name = "NAME")]
    pub kernels: Option<String>,

    /// Round activations to int8 before they meet weights: `experts` (the default) for
    /// routed experts only, `on` for all quantized matrices, `off` for none. Changes
    /// results a little.
    #[arg(long, value_enum, env = "K3_IDOT")]
    pub act8: Option<Act8>,

    /// Stop after this many layers, for comparisons with other engines.
    #[arg(long, value_name = "N", env = "K3_LAYERS", value_parser = positive)]
    pub layers: Option<usize>,
}

impl EngineArgs {
    /// Folders with the shards, in the order they are searched.
    pub fn snapshot_dirs(&self) -> Vec<PathBuf> {
        match &self.snapshot_list {
            Some(list) if self.snapshot.is_empty() => std::env::split_paths(list).collect(),
            _ => self.snapshot.clone(),
        }
    }

    /// Where the dense weights are to be.
    pub fn memory_mode(&self) -> MemoryMode {
        match self.memory {
            MemoryMode::Auto if self.mmap => MemoryMode::Mmap,
            mode => mode,
        }
    }

    /// Memory for cached experts in bytes, if the user said.
    pub fn expert_cache_bytes(&self) -> Option<u64> {
        self.expert_cache.or(self.expert_gb)
    }

    /// Folder in which the usage of experts is kept, if it is.
    pub fn usage_dir(&self) -> Option<PathBuf> {
        if self.no_usage { None } else { cache_dir() }
    }

    /// The same with room for `tokens`, unless the user said how many.
    #[must_use]
    pub fn with_context(&self, tokens: usize) -> Self {
        Self { context: self.context.or(Some(tokens)), ..self.clone() }
    }
}

/// Where activations are rounded to int8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Act8 {
    /// Nowhere.
    #[value(alias = "0")]
    Off,
    /// In routed experts.
    Experts,
    /// In every quantized matrix.
    #[value(alias = "1")]
    On,
}

//! The command line: types only.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;

use clap::builder::FalseyValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::experts::{DirectIo, LookAhead};
use crate::memory::MemoryMode;
use crate::state::KvType;

/// Run Kimi K3 on this machine.
///
/// k3-run maps a container that `k3-prep convert` wrote, uses its weights in place, and
/// streams the experts from the original shards.
#[derive(Debug, Parser)]
#[command(name = "k3-run", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// One verb each.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Talk in the terminal.
    Chat(ChatArgs),
    /// Continue a prompt and print the text as it comes.
    Generate(GenerateArgs),
    /// Serve the model over HTTP in OpenAI's shape, with a chat page at /.
    Serve(ServeArgs),
    /// Write the logits of every position of given tokens, for comparisons.
    Logits(LogitsArgs),
    /// Print the token ids of a text as JSON.
    Tokenize(TokenizeArgs),
    /// Print the text of token ids.
    Detokenize(DetokenizeArgs),
    /// Measure memory, drive and cores, and how near to them the model runs.
    Bench(BenchArgs),
    /// Say how well a container predicts a text, and how far it is from another container.
    Eval(EvalArgs),
    /// Say what is in a container, where its experts are, and how this machine would run it.
    Info(InfoArgs),
    /// Say where memory would go and what a token would cost, without taking or running it.
    Plan(PlanArgs),
}

/// What every command that runs the model takes.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// The folder that `k3-prep convert` wrote.
    pub container: PathBuf,

    /// Folder with the original shards; give it several times if they are spread over
    /// drives. Default: where the snapshot was at conversion.
    #[arg(long, value_name = "DIR")]
    pub snapshot: Vec<PathBuf>,

    /// Twin of --snapshot: a list as in PATH.
    #[arg(long = "snapshot-list", hide = true, env = "K3_DIRS")]
    snapshot_list: Option<OsString>,

    /// Threads that compute. Default: the physical cores this process may use.
    #[arg(long, value_name = "N")]
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

    /// How the MLA cache is kept: `bf16` takes half the memory of `f32` and is read twice as
    /// fast in long contexts. Changes results a little.
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
    #[arg(long, value_name = "N", default_value_t = 4, env = "K3_LOAD_THREADS", value_parser = positive)]
    pub readers: usize,

    /// Experts of the next layer to read before it asks, while the disk would be idle.
    /// Never changes a result.
    #[arg(long, value_name = "N|auto", default_value = "auto", value_parser = look_ahead)]
    pub look_ahead: LookAhead,

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

/// `k3-run chat`.
#[derive(Debug, Args)]
pub struct ChatArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Instructions that the conversation begins with.
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,

    /// How hard the model is told to think; `none` does not tell it.
    #[arg(long, value_enum, default_value_t = EffortWord::Max)]
    pub effort: EffortWord,

    /// Let the model answer without thinking first.
    #[arg(long)]
    no_think: bool,

    /// Twin of --no-think, the other way round.
    #[arg(long = "think", hide = true, env = "K3_THINK", value_parser = FalseyValueParser::new(), default_value_t = true, action = clap::ArgAction::Set)]
    think: bool,

    /// Do not show what the model thinks; /think changes it.
    #[arg(long)]
    pub hide_reasoning: bool,

    /// Most tokens of an answer. Default: what fits into the context.
    #[arg(short = 'n', long, value_name = "N", value_parser = positive)]
    pub tokens: Option<usize>,

    /// 0 takes the most likely token, 1 samples as the model says.
    #[arg(long, value_name = "T", default_value_t = 1.0, env = "COLI_TEMP")]
    pub temperature: f64,

    /// Keep the likeliest tokens whose probabilities add up to this.
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    pub top_p: f64,

    /// Keep this many of the likeliest tokens (0: all).
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,

    /// Keep tokens at least this likely compared with the likeliest.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f64,

    /// Makes the whole chat repeatable. Default: different every time.
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,

    /// Copies of the state kept at turn boundaries, to go back to for /retry and after an
    /// interruption.
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub checkpoints: usize,

    /// Folder for the copies. Default: memory.
    #[arg(long, value_name = "DIR")]
    pub checkpoint_dir: Option<PathBuf>,

    #[command(flatten)]
    pub session: SessionArgs,

    /// File with the lines typed before. Default: k3-run/history in the folder for state.
    #[arg(long, value_name = "FILE", env = "K3_HISTORY")]
    pub history: Option<PathBuf>,

    /// Keep no lines.
    #[arg(long)]
    pub no_history: bool,
}

impl ChatArgs {
    /// Whether the model thinks before it answers.
    pub fn thinking(&self) -> bool {
        self.think && !self.no_think
    }
}

/// How hard the model is told to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EffortWord {
    Low,
    High,
    Max,
    /// It is not told.
    None,
}

/// How a sequence grows, and where it comes from and goes to.
#[derive(Debug, Args)]
pub struct SessionArgs {
    /// Most tokens guessed per step from what was said before. Never changes a result;
    /// pays where text repeats itself and bytes are the bound, else it is slower.
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = guesses)]
    pub speculate: usize,

    /// Begin with the session in this file.
    #[arg(long, value_name = "FILE")]
    pub load: Option<PathBuf>,

    /// Leave the session in this file at the end.
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
}

/// `k3-run generate`.
#[derive(Debug, Args)]
pub struct GenerateArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    #[command(flatten)]
    pub prompt: PromptArgs,

    #[command(flatten)]
    pub session: SessionArgs,

    /// Most tokens to generate.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256, value_parser = positive)]
    pub tokens: usize,

    /// 0 takes the most likely token, 1 samples as the model says.
    #[arg(long, value_name = "T", default_value_t = 0.0, env = "COLI_TEMP")]
    pub temperature: f64,

    /// Keep the likeliest tokens whose probabilities add up to this.
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    pub top_p: f64,

    /// Keep this many of the likeliest tokens (0: all).
    #[arg(long, value_name = "K", default_value_t = 0)]
    pub top_k: usize,

    /// Keep tokens at least this likely compared with the likeliest.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    pub min_p: f64,

    /// Makes sampling repeatable. Default: different every time.
    #[arg(long, value_name = "S")]
    pub seed: Option<u64>,

    /// Print text, or the ids one per line.
    #[arg(long, value_enum, default_value_t = Print::Text)]
    pub print: Print,
}

/// What `generate` prints.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Print {
    /// Text as it comes.
    Text,
    /// Ids, one per line.
    Ids,
}

/// Where tokens come from.
#[derive(Debug, Args)]
#[group(multiple = false)]
pub struct PromptArgs {
    /// The prompt; control tokens in it count as such. Behind a session that was loaded it
    /// may be left out.
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["ids", "load"])]
    pub prompt: Option<String>,

    /// Token ids separated by commas or spaces.
    #[arg(long, value_name = "IDS", value_parser = ids)]
    pub ids: Option<Ids>,
}

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
    #[arg(long, value_name = "N", default_value_t = 2)]
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

/// `k3-run logits`.
#[derive(Debug, Args)]
pub struct LogitsArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Token ids separated by commas or spaces.
    #[arg(long, value_name = "IDS", value_parser = ids, required_unless_present = "x0")]
    pub ids: Option<Ids>,

    /// f32 rows [positions, hidden] that enter the first layer in place of embedded ids.
    #[arg(long, value_name = "FILE", conflicts_with = "ids")]
    pub x0: Option<PathBuf>,

    /// Where to write the logits: little-endian f32 [positions, vocab].
    #[arg(long, value_name = "FILE", env = "K3_LOGITS")]
    pub out: PathBuf,

    /// Where to write the hidden state after every layer, and last the input of lm_head:
    /// little-endian f32 [positions, layers + 1, hidden].
    #[arg(long, value_name = "FILE", env = "K3_TRACE")]
    pub trace: Option<PathBuf>,
}

/// `k3-run eval`.
#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Text to predict, UTF-8; names of control tokens in it are plain text.
    #[arg(long, value_name = "FILE")]
    pub text: PathBuf,

    /// Container to compare with, for example one of --bits 16; it is run without --act8
    /// and --top-p-experts. The two share --ram.
    #[arg(long, value_name = "CONTAINER")]
    pub against: Option<PathBuf>,

    /// Tokens of a window; each is read from an empty state, and all but its first token
    /// are predicted.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = window)]
    pub window: usize,

    /// Read only so many tokens of the text.
    #[arg(long, value_name = "N", value_parser = positive)]
    pub tokens: Option<usize>,

    /// Worst tokens to list.
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub worst: usize,

    /// Keep finished windows here, and go on with what is there.
    #[arg(long, value_name = "FILE")]
    pub progress: Option<PathBuf>,

    /// Write the natural logarithm of each predicted token's probability: little-endian f64.
    #[arg(long, value_name = "FILE", conflicts_with = "progress")]
    pub log_probs: Option<PathBuf>,

    /// Print as JSON.
    #[arg(long)]
    pub json: bool,
}

/// `k3-run bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Rounds of measurements, all of them interleaved.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = positive)]
    pub rounds: usize,

    /// Begin no further round that would end after this time.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    pub seconds: u64,

    /// Tokens decoded in each round, with the expert cache as given and with none.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 8, value_parser = positive)]
    pub tokens: usize,

    /// Lengths of prompts, separated by commas.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "128", value_parser = positive)]
    pub prompt: Vec<usize>,

    /// Positions that the context holds before anything is measured (zeros, which cost as
    /// much as any), to see what long contexts cost.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub depth: usize,

    /// A UTF-8 file that is taken in and continued, in place of a paragraph of ours.
    #[arg(long, value_name = "FILE")]
    pub text: Option<PathBuf>,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,

    /// Where to write what happened when in the last round, for chrome://tracing or Perfetto.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

/// `k3-run tokenize`.
#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// The folder that `k3-prep convert` wrote.
    pub container: PathBuf,

    #[command(flatten)]
    pub source: TextArgs,

    /// Let control tokens in the text count as such.
    #[arg(long)]
    pub specials: bool,
}

/// Where text comes from.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct TextArgs {
    /// The text.
    #[arg(long, value_name = "TEXT")]
    pub text: Option<String>,

    /// A UTF-8 file; `-` is stdin.
    #[arg(long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// A chat request in OpenAI's shape (JSON; `-` is stdin): the ids of its whole prompt.
    #[arg(long, value_name = "FILE")]
    pub chat: Option<PathBuf>,
}

/// `k3-run detokenize`.
#[derive(Debug, Args)]
pub struct DetokenizeArgs {
    /// The folder that `k3-prep convert` wrote.
    pub container: PathBuf,

    /// Token ids separated by commas or spaces; a JSON list is fine too.
    #[arg(value_name = "IDS", value_parser = ids)]
    pub ids: Ids,
}

/// `k3-run info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Start in full, tokenizer included, and say how long it took and what it needs.
    #[arg(long)]
    pub ready: bool,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// `k3-run plan`.
#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub engine: EngineArgs,

    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// A list of token ids.
#[derive(Debug, Clone)]
pub struct Ids(pub Vec<u32>);

fn ids(text: &str) -> Result<Ids, String> {
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    let words = inner.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    let ids: Result<Vec<u32>, String> =
        words.map(|w| w.parse().map_err(|_| format!("expected a token id, found {w:?}"))).collect();
    match ids {
        Ok(ids) if ids.is_empty() => Err("expected at least one token id".into()),
        ids => ids.map(Ids),
    }
}

fn look_ahead(text: &str) -> Result<LookAhead, String> {
    match text.parse() {
        _ if text == "auto" => Ok(LookAhead::Auto),
        Ok(width) if width <= 64 => Ok(LookAhead::Width(width)),
        _ => Err(format!("expected auto or a number up to 64, found {text:?}")),
    }
}

fn fraction(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(part) if part > 0.0 && part <= 1.0 => Ok(part),
        _ => Err(format!("expected a number above 0 and up to 1, found {text:?}")),
    }
}

/// Guessing further ahead than this is never worth it.
const MAX_GUESSES: usize = 64;

fn guesses(text: &str) -> Result<usize, String> {
    let guesses = text.parse().ok().filter(|n| *n <= MAX_GUESSES);
    guesses.ok_or_else(|| format!("expected a whole number up to {MAX_GUESSES}, found {text:?}"))
}

/// More rows than this in a step are a prompt's, not conversations'.
const MAX_SLOTS: usize = 256;

fn slots(text: &str) -> Result<usize, String> {
    let slots = text.parse().ok().filter(|n| (1..=MAX_SLOTS).contains(n));
    slots.ok_or_else(|| format!("expected a whole number from 1 to {MAX_SLOTS}, found {text:?}"))
}

fn window(text: &str) -> Result<usize, String> {
    match positive(text)? {
        1 => Err("expected 2 or more: the first token of a window is not predicted".into()),
        n => Ok(n),
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=1 << 30).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from 1 on, found {text:?}")),
    }
}

/// Bytes of a plain number of GiB.
fn gibibytes(text: &str) -> Result<u64, String> {
    size(&format!("{}G", text.trim()))
}

/// Bytes from `512M`, `24G`, `1.5T` (powers of 1024), or plain bytes.
fn size(text: &str) -> Result<u64, String> {
    let wanted = || format!("expected a size like 512M or 24G, found {text:?}");
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB") {
        "" | "B" => 1u64,
        "K" | "KB" => 1 << 10,
        "M" | "MB" => 1 << 20,
        "G" | "GB" => 1 << 30,
        "T" | "TB" => 1 << 40,
        _ => return Err(wanted()),
    };
    let number: f64 = digits.parse().map_err(|_| wanted())?;
    let bytes = number * unit as f64;
    if (0.0..9e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wanted()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn definitions_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn options_have_twins() {
        let parse = |args: &[&str]| match Cli::parse_from([&["k3-run", "info", "c"], args].concat())
            .command
        {
            Command::Info(info) => info.engine,
            _ => unreachable!("info was asked for"),
        };
        let args = parse(&["--expert-gb", "1.5", "--mmap", "--snapshot-list", "/a:/b c"]);
        assert_eq!(args.expert_cache_bytes(), Some(3 << 29));
        assert_eq!(args.memory_mode(), MemoryMode::Mmap);
        assert_eq!(args.snapshot_dirs(), [PathBuf::from("/a"), PathBuf::from("/b c")]);
        let args = parse(&["--snapshot", "/x:y", "--direct-io", "0", "--snapshot-list", "/a"]);
        assert_eq!(args.snapshot_dirs(), [PathBuf::from("/x:y")]);
        assert_eq!(args.direct_io, DirectIo::Off);
    }

    #[test]
    fn sizes_and_ids() {
        assert_eq!(size("1.5G"), Ok(3 << 29));
        assert_eq!(size("64GiB"), Ok(64 << 30));
        assert_eq!(size("0"), Ok(0));
        assert!(size("-1").is_err() && size("x").is_err() && size("G").is_err());
        assert_eq!(ids("[1, 2 3]").unwrap().0, [1, 2, 3]);
        assert!(ids("1,-2").is_err() && ids("").is_err());
    }
}

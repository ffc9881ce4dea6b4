//! From the command line's options to a running engine.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use k3_formats::container::{Container, TOKENIZER_FILE};
use k3_formats::snapshot::weights_dir;
use k3_formats::tokenizer::Tokenizer;
use k3_formats::{Error, text_file};

use crate::cli::{Act8, EngineArgs};
use crate::dense::Dense;
use crate::engine::Engine;
use crate::experts::{ExpertOptions, ExpertStore, OpenShard, READ_BYTES, ShardFiles};
use crate::kernels::{Arithmetic, Kernels};
use crate::memory::{self, MemoryMode, MemoryPlan, Request};
use crate::model::{Model, Numerics};
use crate::parallel::{Pool, default_threads};
use crate::report::say;

/// Tokens of context unless told otherwise.
pub const DEFAULT_CONTEXT: usize = 4096;

/// Opens the tokenizer of a container.
///
/// # Errors
/// The file is absent or damaged.
pub fn tokenizer(container: &Path) -> k3_formats::Result<Tokenizer> {
    let path = container.join(TOKENIZER_FILE);
    if !path.is_file() {
        return Err(Error::missing("no such file")
            .in_file(path)
            .hint("give the folder that `k3-prep convert` wrote"));
    }
    Tokenizer::open_prepared(&path)
}

/// A tokenizer that is being opened beside the container.
pub struct TokenizerThread {
    container: PathBuf,
    thread: Option<JoinHandle<k3_formats::Result<Tokenizer>>>,
}

impl TokenizerThread {
    /// Begins to open the tokenizer of a container.
    pub fn start(container: &Path) -> Self {
        let container = container.to_owned();
        let work = {
            let container = container.clone();
            move || tokenizer(&container)
        };
        // Where no thread can be started, it is opened when it is needed.
        let thread = std::thread::Builder::new().name("k3-tokenizer".into()).spawn(work).ok();
        Self { container, thread }
    }

    /// Waits until it is there.
    ///
    /// # Errors
    /// As [`tokenizer`].
    pub fn wait(self) -> k3_formats::Result<Tokenizer> {
        match self.thread {
            Some(thread) => thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
            None => tokenizer(&self.container),
        }
    }
}

/// Ids that end a reply: what the config, `generation_config.json` and the tokenizer each
/// call the end, since they do not agree in every download.
///
/// # Errors
/// `generation_config.json` is there and not valid.
pub fn stop_ids(container: &Container, tokenizer: &Tokenizer) -> k3_formats::Result<Vec<u32>> {
    let mut ids = vec![container.config.eos];
    ids.extend_from_slice(tokenizer.eos_ids());
    let path = container.dir.join("generation_config.json");
    if path.is_file() {
        let text = text_file::read(&path, 1 << 20)?;
        let value: serde_json::Value = serde_json::from_str(&text)
            .map_err(|e| Error::malformed(format!("not valid JSON: {e}")).in_file(&path))?;
        let eos = &value["eos_token_id"];
        let listed = eos.as_array().map_or(std::slice::from_ref(eos), Vec::as_slice);
        ids.extend(listed.iter().filter_map(|v| u32::try_from(v.as_u64()?).ok()));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

/// Sequences that are open at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sequences {
    /// How many.
    pub count: usize,
    /// Memory that all of them take besides their states, in bytes: undo records,
    /// checkpoints, samplers.
    pub kept_bytes: u64,
}

impl Sequences {
    /// One that keeps nothing.
    pub const ONE: Self = Self { count: 1, kept_bytes: 0 };
}

/// Builds the engine for `container`; `act8` is what the user's silence means.
///
/// # Errors
/// Shards are missing or changed, kernels are unknown, threads cannot be started.
pub fn engine<'a>(
    container: &'a Container,
    args: &EngineArgs,
    act8: Act8,
) -> anyhow::Result<Engine<'a>> {
    engine_for(container, args, act8, Sequences::ONE)
}

/// [`engine`] for more than one sequence at a time.
///
/// # Errors
/// As there.
pub fn engine_for<'a>(
    container: &'a Container,
    args: &EngineArgs,
    act8: Act8,
    sequences: Sequences,
) -> anyhow::Result<Engine<'a>> {
    engine_reading(container, args, act8, sequences, Arc::new(ShardFiles))
}

/// [`engine_for`] with `files` in place of the file system, for shards and for weights that
/// are not mapped.
///
/// # Errors
/// As there.
pub fn engine_reading<'a>(
    container: &'a Container,
    args: &EngineArgs,
    act8: Act8,
    sequences: Sequences,
    files: Arc<dyn OpenShard>,
) -> anyhow::Result<Engine<'a>> {
    let kernels = match &args.kernels {
        Some(name) => Kernels::by_name(name)?,
        None => Kernels::detect(),
    };
    let plan = memory_plan_for(container, args, act8, sequences)?;
    let mut notes = Vec::new();
    let mut options = expert_options(container, args, plan.cache_bytes)?;
    options.files = Arc::clone(&files);
    let experts = ExpertStore::open(container, &options, &mut notes)?;
    notes.iter().for_each(|note| say(format_args!("note: {note}")));
    if args.memory_mode() == MemoryMode::Auto {
        say(format_args!("memory: {}", plan.summary()));
    }
    let act8 = args.act8.unwrap_or(act8);
    let (dense, routed) = (arithmetic(act8 == Act8::On), arithmetic(act8 != Act8::Off));
    let mut numerics = Numerics::new(&container.config, kernels, dense, routed);
    numerics.expert_top_p = args.top_p_experts.filter(|&top_p| top_p < 1.0);
    numerics.kv = args.kv_type;
    if let Some(top_p) = numerics.expert_top_p {
        say(format_args!(
            "note: --top-p-experts {top_p} drops the lightest experts of each token: \
             results differ from the model's"
        ));
    }
    let pool = Pool::new(args.threads.unwrap_or_else(default_threads))?;
    let layers = layers(container, args);
    let dense = Dense::new(container, layers, &plan.placement, files)?;
    let model = Model::new(container, &dense, layers)?;
    Engine::new(model, dense, numerics, pool, experts, args.chunk)
}

/// The experts of `container` with the smallest cache there is.
///
/// # Errors
/// As [`engine`].
pub fn uncached_experts(container: &Container, args: &EngineArgs) -> anyhow::Result<ExpertStore> {
    ExpertStore::open(container, &expert_options(container, args, 0)?, &mut Vec::new())
}

/// Plans the memory of an engine for `container`; `act8` is what the user's silence means.
///
/// # Errors
/// The budget is too small.
pub fn memory_plan(
    container: &Container,
    args: &EngineArgs,
    act8: Act8,
) -> anyhow::Result<MemoryPlan> {
    memory_plan_for(container, args, act8, Sequences::ONE)
}

fn memory_plan_for(
    container: &Container,
    args: &EngineArgs,
    act8: Act8,
    sequences: Sequences,
) -> anyhow::Result<MemoryPlan> {
    let threads = args.threads.unwrap_or_else(default_threads);
    MemoryPlan::new(
        container,
        &Request {
            ram: args.ram.unwrap_or_else(|| memory::spare().bytes()),
            mode: args.memory_mode(),
            layers: layers(container, args),
            context: args.context.unwrap_or(DEFAULT_CONTEXT).min(container.config.max_context),
            kv: args.kv_type,
            sequences: sequences.count,
            kept_bytes: sequences.kept_bytes,
            rows: args.chunk,
            arithmetic: arithmetic(args.act8.unwrap_or(act8) == Act8::On),
            expert_cache: args.expert_cache_bytes(),
            threads,
            readers: args.readers,
            lock: args.pin,
        },
    )
}

fn layers(container: &Container, args: &EngineArgs) -> usize {
    args.layers.unwrap_or(usize::MAX).clamp(1, container.config.layers())
}

fn arithmetic(act8: bool) -> Arithmetic {
    if act8 { Arithmetic::Act8 } else { Arithmetic::Exact }
}

/// How experts are kept and read, with `cache_bytes` of memory for those that are kept.
///
/// # Errors
/// Nothing says where the shards are.
pub fn expert_options(
    container: &Container,
    args: &EngineArgs,
    cache_bytes: u64,
) -> anyhow::Result<ExpertOptions> {
    let given = args.snapshot_dirs();
    let dirs = if given.is_empty() {
        let recorded = &container.manifest.snapshot;
        if recorded.is_empty() {
            let error = Error::missing("the container does not say where its snapshot is")
                .in_file(&container.dir)
                .hint("give the snapshot's folder with --snapshot");
            return Err(error.into());
        }
        vec![PathBuf::from(recorded)]
    } else {
        // As `k3-prep convert` takes it: perhaps a cache repository.
        given.iter().map(|dir| weights_dir(dir)).collect::<k3_formats::Result<_>>()?
    };
    Ok(ExpertOptions {
        dirs,
        allow_missing: args.allow_missing,
        cache_bytes,
        direct_io: args.direct_io,
        readers: args.readers,
        read_bytes: READ_BYTES,
        verify: args.verify_experts,
        look_ahead: args.look_ahead,
        files: Arc::new(ShardFiles),
    })
}

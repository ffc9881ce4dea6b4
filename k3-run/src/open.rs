//! From the command line's options to a running engine.

use std::path::{Path, PathBuf};

use anyhow::Context;
use k3_formats::container::Container;
use k3_formats::tokenizer::Tokenizer;
use k3_formats::{Error, text_file};

use crate::cli::{Act8, EngineArgs};
use crate::dense::{Dense, Placement};
use crate::engine::Engine;
use crate::experts::{ExpertOptions, ExpertStore};
use crate::kernels::{Arithmetic, Kernels};
use crate::model::{Model, Numerics};
use crate::parallel::{Pool, default_threads};
use crate::report::say;

/// File name of the prepared tokenizer in a container.
const TOKENIZER_FILE: &str = "tokenizer.bin";

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

/// Builds the engine for `container`; `act8` is what the user's silence means.
///
/// # Errors
/// Shards are missing or changed, kernels are unknown, threads cannot be started.
pub fn engine<'a>(
    container: &'a Container,
    args: &EngineArgs,
    act8: Act8,
) -> anyhow::Result<Engine<'a>> {
    let kernels = match &args.kernels {
        Some(name) => Kernels::by_name(name)?,
        None => Kernels::detect(),
    };
    let mut notes = Vec::new();
    let experts = ExpertStore::open(container, &expert_options(container, args)?, &mut notes)?;
    notes.iter().for_each(|note| say(format_args!("note: {note}")));
    let act8 = args.act8.unwrap_or(act8);
    let arithmetic = |on: bool| if on { Arithmetic::Act8 } else { Arithmetic::Exact };
    let (dense, routed) = (arithmetic(act8 == Act8::On), arithmetic(act8 != Act8::Off));
    let numerics = Numerics::new(&container.config, kernels, dense, routed);
    let pool = Pool::new(args.threads.unwrap_or_else(default_threads))?;
    let layers = args.layers.unwrap_or(usize::MAX).clamp(1, container.config.layers());
    let dense = Dense::new(container, layers, &Placement::MAPPED)?;
    let model = Model::new(container, &dense, layers)?;
    Engine::new(model, dense, numerics, pool, experts, args.chunk)
}

fn expert_options(container: &Container, args: &EngineArgs) -> anyhow::Result<ExpertOptions> {
    let dirs = if args.snapshot.is_empty() {
        let recorded = &container.manifest.snapshot;
        if recorded.is_empty() {
            let error = Error::missing("the container does not say where its snapshot is")
                .in_file(&container.dir)
                .hint("give the snapshot's folder with --snapshot");
            return Err(error.into());
        }
        vec![PathBuf::from(recorded)]
    } else {
        args.snapshot.clone()
    };
    let cache_bytes = match args.expert_cache {
        Some(bytes) => bytes,
        None => available_memory().context("cannot tell how much memory is free")? / 2,
    };
    Ok(ExpertOptions { dirs, cache_bytes, direct_io: args.direct_io, readers: args.readers })
}

/// Memory that can be taken without pushing anything out, in bytes.
fn available_memory() -> anyhow::Result<u64> {
    let text = fs_err::read_to_string("/proc/meminfo")?;
    let line =
        text.lines().find_map(|l| l.strip_prefix("MemAvailable:")).context("no MemAvailable")?;
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib << 10)
}

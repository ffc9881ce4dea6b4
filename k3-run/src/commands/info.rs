//! What is in a container, where its experts are, and how this machine would run it.

use std::io::Write;
use std::time::Instant;

use k3_formats::container::Container;
use serde_json::json;

use crate::cli::{Act8, InfoArgs};
use crate::kernels::Kernels;
use crate::{open, report};

pub(super) fn run(args: &InfoArgs) -> anyhow::Result<()> {
    if args.ready {
        return ready(args);
    }
    let container = Container::open(&args.engine.container)?;
    let engine = open::engine(&container, &args.engine, Act8::Experts)?;
    let (config, manifest) = (&container.config, &container.manifest);
    let experts = engine.experts();
    let kernels: Vec<_> = Kernels::available().map(Kernels::name).collect();
    let count = config.moe_layers().len() * config.moe.experts;
    let facts = json!({
        "container": container.dir,
        "tool": manifest.tool,
        "recipe": manifest.recipe,
        "source": manifest.source,
        "layers": config.layers(),
        "hidden": config.hidden,
        "vocab": config.vocab,
        "dense_bytes": container.dense_bytes(),
        "experts": count,
        "expert_files": experts.files().0,
        "expert_files_are": experts.files().1,
        "expert_bytes": experts.expert_bytes(),
        "shards": manifest.shards.len(),
        "snapshot": manifest.snapshot,
        "expert_cache_slots": experts.size().experts,
        "expert_cache_bytes": experts.size().bytes,
        "direct_io": experts.is_direct(),
        "kernels": engine.numerics().kernels.name(),
        "kernels_available": kernels,
        "threads": engine.threads(),
    });
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{facts:#}")?;
        return Ok(());
    }
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let (files, what) = experts.files();
    let given: Vec<_> =
        args.engine.snapshot_dirs().iter().map(|d| d.display().to_string()).collect();
    let place = if given.is_empty() { manifest.snapshot.clone() } else { given.join(", ") };
    let source = &manifest.source;
    let from = source.repo.as_deref().unwrap_or("an unnamed snapshot");
    let revision = source.revision.as_deref().map(|r| format!(" at {r}")).unwrap_or_default();
    writeln!(out, "container   {} by {}", container.dir.display(), manifest.tool)?;
    writeln!(out, "source      {from}{revision}")?;
    writeln!(
        out,
        "model       {} layers, hidden {}, {} experts a layer ({} a token), vocabulary {}",
        config.layers(),
        config.hidden,
        config.moe.experts,
        config.moe.top_k,
        config.vocab
    )?;
    writeln!(out, "dense       {:.2} GB mapped in place", gb(container.dense_bytes()))?;
    writeln!(
        out,
        "experts     {count} of {:.2} MB in {files} {what} at {place}",
        experts.expert_bytes() as f64 / 1e6,
    )?;
    writeln!(
        out,
        "cache       {} experts, {:.2} GB; reads go {} the page cache",
        experts.size().experts,
        gb(experts.size().bytes),
        if experts.is_direct() { "around" } else { "through" }
    )?;
    writeln!(
        out,
        "kernels     {} (available: {})",
        engine.numerics().kernels.name(),
        kernels.join(", ")
    )?;
    writeln!(out, "threads     {}", engine.threads())?;
    Ok(())
}

/// Everything that comes before the first token, and how long each part took.
fn ready(args: &InfoArgs) -> anyhow::Result<()> {
    let start = Instant::now();
    let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
    let dir = &args.engine.container;
    let (opened, tokenizer) = std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| (open::tokenizer(dir), ms(start)));
        let opened = Container::open(dir).map(|container| (container, ms(start)));
        (opened, tokenizer.join().expect("it does not panic"))
    });
    let (container, container_ms) = opened?;
    let (tokenizer, tokenizer_ms) = (tokenizer.0?, tokenizer.1);
    let since = Instant::now();
    let engine = open::engine(&container, &args.engine, Act8::Experts)?;
    let facts = json!({
        "ready_ms": ms(start),
        "container_ms": container_ms,
        "engine_ms": ms(since),
        "tokenizer_ms": tokenizer_ms,
        "peak_bytes": report::peak_memory(),
        "layers": engine.model().layers.len(),
        "vocab": tokenizer.vocab_size(),
    });
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{facts:#}")?;
        return Ok(());
    }
    let peak = report::peak_memory().map_or_else(String::new, |peak| {
        format!(", at most {:.1} MiB taken", peak as f64 / f64::from(1 << 20))
    });
    writeln!(
        out,
        "ready in {:.1} ms (container {container_ms:.1}, engine {:.1}, beside them the tokenizer \
         {tokenizer_ms:.1}){peak}",
        ms(start),
        ms(since)
    )?;
    Ok(())
}

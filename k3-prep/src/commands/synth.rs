//! `k3-prep synth`

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Context, Result};
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_formats::{Error, text_file};

use crate::Outcome;
use crate::cli::SynthArgs;
use crate::output;
use crate::plan::ConversionPlan;
use crate::progress::{Progress, Talk};
use crate::size::{Bytes, Thousands};
use crate::synth::{self, Dims, Preset, SynthOptions, write_snapshot};

/// Longest file of dimensions, in bytes; all fields take a few hundred.
const MAX_DIMS: u64 = 1 << 16;

pub(super) fn run(args: &SynthArgs, talk: Talk) -> Result<Outcome> {
    if args.preset == Preset::Full && !args.sparse {
        let error = Error::unsupported("the full preset has 1.56 TB of weights")
            .hint("add --sparse, or use --preset real with --layers and --experts");
        return Err(error.into());
    }
    let options = SynthOptions {
        dims: dims(args)?,
        seed: args.seed,
        routing: args.routing,
        sparse: args.sparse,
    };
    if !args.container {
        return snapshot(&args.out, &options, talk);
    }
    let beside = snapshot_beside(&args.out)?;
    // Before there is a snapshot that nobody wants alone.
    synth::refuse_used_folder(&args.out)?;
    snapshot(&beside, &options, talk)?;
    container(&args.out, &beside, talk)
}

fn snapshot(out: &Path, options: &SynthOptions, talk: Talk) -> Result<Outcome> {
    let total = synth::data_bytes(&options.dims)?;
    // Begun by the first bytes: an error before them is all there is to say.
    let progress = OnceLock::new();
    let summary = write_snapshot(out, options, &|bytes| {
        progress.get_or_init(|| Progress::start("synth", total, talk)).add(bytes);
    })?;
    if let Some(progress) = progress.into_inner() {
        progress.finish();
    }
    let what = if options.sparse { "holes for data" } else { "data" };
    output::result(|w| {
        writeln!(
            w,
            "{}: {} tensors in {} shards, {} of {what}",
            out.display(),
            Thousands(summary.tensors as u64),
            summary.shards,
            Bytes(summary.data_bytes)
        )
    })?;
    Ok(Outcome::Good)
}

/// `OUT.snapshot`.
fn snapshot_beside(out: &Path) -> Result<PathBuf> {
    let Some(name) = out.file_name() else {
        return Err(Error::unsupported("not a name for a new folder").in_file(out).into());
    };
    let mut name = name.to_owned();
    name.push(".snapshot");
    Ok(out.with_file_name(name))
}

fn container(out: &Path, snapshot: &Path, talk: Talk) -> Result<Outcome> {
    let plan = ConversionPlan::new(&Snapshot::open(snapshot)?, &Recipe::default())?;
    let total = plan.dense.iter().map(|f| f.layout.file_size()).sum();
    let progress = Progress::start("hash", total, talk);
    let manifest = synth::write_sparse_container(out, &plan, &|bytes| progress.add(bytes))?;
    progress.finish();
    output::result(|w| {
        let (files, bytes) = (manifest.files.len() + 2, Bytes(plan.output_bytes()));
        writeln!(w, "{}: {bytes} in {files} files, tensors as holes", out.display())
    })?;
    Ok(Outcome::Good)
}

/// The preset, then the options, then the file: each overrides what came before.
fn dims(args: &SynthArgs) -> Result<Dims> {
    let mut dims = args.preset.dims();
    if args.preset == Preset::Real && args.layers.is_some() {
        // A model that is cut down needs no full vision tower.
        dims.vt_layers = 1;
    }
    dims.layers = args.layers.unwrap_or(dims.layers);
    dims.experts = args.experts.unwrap_or(dims.experts);
    dims.vocab = args.vocab.unwrap_or(dims.vocab);
    match &args.dims {
        Some(path) => {
            let json = text_file::read(path, MAX_DIMS)?;
            dims.with_json(&json).with_context(|| path.display().to_string())
        }
        None => Ok(dims),
    }
}

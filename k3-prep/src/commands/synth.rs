//! `k3-prep synth`

use std::sync::OnceLock;

use anyhow::{Context, Result};
use k3_formats::{Error, text_file};

use crate::Outcome;
use crate::cli::SynthArgs;
use crate::output;
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
    let total = synth::data_bytes(&options.dims)?;
    // Begun by the first bytes: an error before them is all there is to say.
    let progress = OnceLock::new();
    let summary = write_snapshot(&args.out, &options, &|bytes| {
        progress.get_or_init(|| Progress::start("synth", total, talk)).add(bytes);
    })?;
    if let Some(progress) = progress.into_inner() {
        progress.finish();
    }
    let what = if args.sparse { "holes for data" } else { "data" };
    output::result(|out| {
        writeln!(
            out,
            "{}: {} tensors in {} shards, {} of {what}",
            args.out.display(),
            Thousands(summary.tensors as u64),
            summary.shards,
            Bytes(summary.data_bytes)
        )
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

//! Fixtures that more than one test file uses.

use std::path::{Path, PathBuf};

use clap::Parser;
use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_prep::Talk;
use k3_prep::conversion::Conversion;
use k3_prep::plan::ConversionPlan;
use k3_prep::synth::{Dims, Preset, Routing, SynthOptions, write_snapshot};
use tempfile::TempDir;

/// A seeded synthetic snapshot with the structure of Kimi K3, in a folder of its own
/// that goes with it. Seven layers, twelve experts, 7 MB: made in some 50 ms.
pub(crate) struct TinyK3 {
    dir: TempDir,
}

impl TinyK3 {
    /// The tiny preset.
    pub(crate) fn new(seed: u64) -> Self {
        Self::build(&SynthOptions {
            dims: Preset::Tiny.dims(),
            seed,
            routing: Routing::Flat,
            sparse: false,
        })
    }

    /// The tiny preset with the fields of `json` (see [`Dims`]) in place of its own.
    pub(crate) fn with_dims(json: &str, seed: u64) -> Self {
        Self::build(&SynthOptions {
            dims: tiny_with(json),
            seed,
            routing: Routing::Flat,
            sparse: false,
        })
    }

    /// Any snapshot.
    pub(crate) fn build(options: &SynthOptions) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        write_snapshot(&dir.path().join("snapshot"), options, &|_| {}).expect("a valid snapshot");
        Self { dir }
    }

    /// The snapshot.
    pub(crate) fn snapshot(&self) -> PathBuf {
        self.path("snapshot")
    }

    /// A place beside the snapshot, for what is made from it.
    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Dimensions of the tiny preset with the fields of `json` in place of its own.
pub(crate) fn tiny_with(json: &str) -> Dims {
    Preset::Tiny.dims().with_json(json).expect("fields of Dims")
}

/// Converts a snapshot as `k3-prep convert` does.
pub(crate) fn convert(snapshot: &Path, out: &Path, recipe: &Recipe) {
    let snapshot = Snapshot::open(snapshot).expect("a good snapshot");
    let plan = ConversionPlan::new(&snapshot, recipe).expect("a complete snapshot");
    let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().expect("threads");
    let on_file = &mut |_: &_| Ok(());
    Conversion { force: false, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&plan, out)
        .expect("a conversion");
}

/// Bits for all families alike.
pub(crate) fn recipe(bits: u32, mla_bits: u32, head_bits: u32) -> Recipe {
    Recipe::of_bits(bits, mla_bits, head_bits).expect("4, 8 or 16")
}

/// The trained demo snapshot.
pub(crate) fn demo_snapshot() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/demo/snapshot")
}

/// The demo model, converted to `container` in a folder for files.
pub(crate) fn demo_container() -> TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    convert(&demo_snapshot(), &dir.path().join("container"), &Recipe::default());
    dir
}

/// The `k3-run` beside this test, which is target/PROFILE/deps/it-HASH.
pub(crate) fn program() -> PathBuf {
    let here = std::env::current_exe().expect("a path");
    let program = here.ancestors().nth(2).expect("two folders up").join("k3-run");
    assert!(program.is_file(), "build it first: cargo build -p k3-run");
    program
}

/// Options of the engine as the command line gives them.
pub(crate) fn engine_args(container: &Path, options: &[&str]) -> k3_run::cli::EngineArgs {
    let container = container.to_str().expect("a UTF-8 path");
    // Nothing that a test does may depend on, or leave something in, the user's home.
    let fixed = ["k3-run", "info", container, "--no-usage"];
    let args = fixed.iter().chain(options);
    match k3_run::cli::Cli::parse_from(args).command {
        k3_run::cli::Command::Info(info) => info.engine,
        _ => unreachable!("info was asked for"),
    }
}

/// An engine as the command line makes it, with f32 activations unless asked otherwise.
pub(crate) fn engine<'a>(container: &'a Container, options: &[&str]) -> k3_run::engine::Engine<'a> {
    let args = engine_args(&container.dir, options);
    k3_run::open::engine(container, &args, k3_run::cli::Act8::Off).expect("an engine")
}

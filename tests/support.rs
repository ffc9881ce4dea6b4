//! Fixtures that more than one test file uses.

use std::path::{Path, PathBuf};

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

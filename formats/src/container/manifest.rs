//! `manifest.json`: what a container holds, where it came from, and every digest.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::recipe::Recipe;
use crate::snapshot::{Source, check_plain_name};
use crate::{Error, Result, text_file};

/// Name of the manifest in a container.
pub const MANIFEST_FILE: &str = "manifest.json";

/// Name of the `sha256sum -c` list of every other file.
pub const SUMS_FILE: &str = "SHA256SUMS";

/// Version of the container format this code reads and writes.
pub const FORMAT_VERSION: u32 = 1;

/// Longest manifest that is read, in bytes: thirty times the release's.
const MAX_MANIFEST: u64 = 32 << 20;

/// The whole manifest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT_VERSION`] of the writer.
    pub format_version: u32,
    /// Program and version that wrote it.
    pub tool: String,
    /// How the matrices were quantized.
    pub recipe: Recipe,
    /// Repository and revision of the snapshot.
    pub source: Source,
    /// Absolute path of the snapshot at conversion; empty if it is not UTF-8.
    pub snapshot: String,
    /// The source shards in name order; the expert table numbers them by this order.
    pub shards: Vec<ShardRecord>,
    /// Every file of the container but the manifest and the sums.
    pub files: Vec<FileRecord>,
    /// Tensors of the snapshot that a text runtime does not need.
    pub left_out: Vec<String>,
}

/// What a source shard was when it was converted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShardRecord {
    /// Name inside the snapshot.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub modified_ns: u64,
    /// SHA-256 of its header's JSON bytes.
    pub header_sha256: Digest,
}

/// One file of the container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Name inside the container.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// SHA-256 of the whole file.
    pub sha256: Digest,
    /// For a dense file: its tensors in file order, fillers left out.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub tensors: Vec<TensorRecord>,
}

/// One tensor of a dense file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorRecord {
    /// Name in the file.
    pub name: String,
    /// Number format of a quantized matrix; absent for what passed through unchanged.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub format: Option<String>,
    /// Root mean square error of a quantized matrix over its root mean square weight, in
    /// millionths: a whole number, so that it is the same after any number of readings.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub error_ppm: Option<u64>,
    /// SHA-256 of its bytes.
    pub sha256: Digest,
}

impl Manifest {
    /// Reads the manifest of the container in `dir`.
    ///
    /// # Errors
    /// No manifest (with what the folder looks like), not JSON, another version, names
    /// that leave the folder.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST_FILE);
        if !path.is_file() {
            let problem =
                if dir.is_dir() { "no manifest.json in this folder" } else { "no such folder" };
            return Err(Error::missing(problem).in_file(dir).hint(
                "give the folder that `k3-prep convert` wrote; run it if there is none yet",
            ));
        }
        let text = text_file::read(&path, MAX_MANIFEST)?;
        Self::parse(&text).map_err(|e| e.in_file(&path))
    }

    /// Parses the text of a manifest.
    ///
    /// # Errors
    /// As [`Manifest::read`].
    pub fn parse(text: &str) -> Result<Self> {
        #[derive(Deserialize)]
        struct Version {
            format_version: u32,
        }
        let malformed = |e| {
            Error::malformed(format!("not a valid manifest: {e}"))
                .hint("the container is damaged; convert the snapshot again")
        };
        // The version first: another version may have other keys.
        let version: Version = serde_json::from_str(text).map_err(malformed)?;
        if version.format_version != FORMAT_VERSION {
            return Err(Error::unsupported(format!(
                "expected container format {FORMAT_VERSION}, found {}",
                version.format_version
            ))
            .hint("convert the snapshot again, or use the k3-run that belongs to this container"));
        }
        let manifest: Self = serde_json::from_str(text).map_err(malformed)?;
        let names = manifest.files.iter().map(|f| &f.name);
        names
            .chain(manifest.shards.iter().map(|s| &s.name))
            .try_for_each(|n| check_plain_name(n))?;
        Ok(manifest)
    }

    /// The manifest's text, the same for the same content.
    ///
    /// # Panics
    /// Never: every field has a JSON form.
    pub fn to_text(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("plain data serializes");
        text.push('\n');
        text
    }

    /// The text of `SHA256SUMS`: every file and the manifest, as `sha256sum -c` reads it.
    pub fn sums(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for file in &self.files {
            let _ = writeln!(text, "{}  {}", file.sha256, file.name);
        }
        let _ = writeln!(text, "{}  {MANIFEST_FILE}", Digest::of(self.to_text().as_bytes()));
        text
    }

    /// The record of a file.
    pub fn file(&self, name: &str) -> Option<&FileRecord> {
        self.files.iter().find(|f| f.name == name)
    }
}

//! Which experts were used lately, kept from one process to the next.
//!
//! One small file for each container, named after the digest of its manifest. It is a hint and
//! nothing more: a file that is damaged, or of another container, is as good as none, and what
//! it says decides what is read early, never what is computed.
//!
//! ```text
//! 0   "K3USAGE1"                 8 bytes
//! 8   SHA-256 of the manifest    32 bytes
//! 40  steps                      u32, little-endian: how many the worths come from
//! 44  worths                     u16 each, by layer then expert; 0: not used
//! ... CRC-32 of all before       u32
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};

use k3_formats::container::Container;
use k3_formats::digest::Digest;
use k3_formats::{Error, Result, text_file};

const MAGIC: &[u8; 8] = b"K3USAGE1";
const HEADER: usize = 44;

/// Steps from which a history says anything.
const ENOUGH: u32 = 64;

/// What is known of former processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Usage {
    /// Steps it comes from.
    pub(super) steps: u32,
    /// Worth of each expert by its key, see [`super::cache::Cache::worths`].
    pub(super) worths: Vec<u16>,
}

impl Usage {
    /// Whether it comes from enough steps to go by.
    pub(super) fn tells(&self) -> bool {
        self.steps >= ENOUGH
    }

    fn encode(&self, manifest: Digest) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEADER + 2 * self.worths.len() + 4);
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&manifest.to_bytes());
        bytes.extend_from_slice(&self.steps.to_le_bytes());
        bytes.extend(self.worths.iter().flat_map(|worth| worth.to_le_bytes()));
        let sum = crc32fast::hash(&bytes);
        bytes.extend_from_slice(&sum.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8], manifest: Digest, experts: usize) -> Option<Self> {
        let (body, sum) = bytes.split_last_chunk::<4>()?;
        let (header, worths) = body.split_at_checked(HEADER)?;
        let known = header.starts_with(MAGIC)
            && header[8..40] == manifest.to_bytes()
            && worths.len() == 2 * experts
            && crc32fast::hash(body) == u32::from_le_bytes(*sum);
        let worth = |pair: &[u8]| u16::from_le_bytes([pair[0], pair[1]]);
        known.then(|| Self {
            steps: u32::from_le_bytes(header[40..44].try_into().expect("four bytes")),
            worths: worths.chunks_exact(2).map(worth).collect(),
        })
    }
}

/// Where the history of a container is kept.
#[derive(Debug)]
pub(super) struct UsageFile {
    path: PathBuf,
    manifest: Digest,
    experts: usize,
}

impl UsageFile {
    /// The file of `container` in the folder `dir`.
    pub(super) fn new(container: &Container, dir: &Path) -> Self {
        let manifest = Digest::of(container.manifest.to_text().as_bytes());
        let config = &container.config;
        let experts = config.moe_layers().len() * config.moe.experts;
        let name = format!("usage-{:.16}", manifest.to_string());
        Self { path: dir.join(name), manifest, experts }
    }

    /// What was saved, if it is of this container and whole.
    pub(super) fn load(&self) -> Option<Usage> {
        let longest = HEADER + 2 * self.experts + 4;
        let bytes = text_file::read_bytes(&self.path, longest as u64).ok()?;
        Usage::decode(&bytes, self.manifest, self.experts)
    }

    /// Takes the place of what was saved before, at once or not at all. Only its owner may
    /// read it: it tells a little of what was talked about.
    pub(super) fn save(&self, usage: &Usage) -> Result<()> {
        let dir = self.path.parent().unwrap_or(Path::new("."));
        fs_err::create_dir_all(dir).map_err(|e| Error::io(dir, "create", e))?;
        let write = |e| Error::io(&self.path, "write", e);
        let mut file =
            tempfile::Builder::new().prefix(".usage-").tempfile_in(dir).map_err(write)?;
        file.write_all(&usage.encode(self.manifest)).map_err(write)?;
        file.persist(&self.path).map(drop).map_err(|e| write(e.error))
    }
}

/// The folder for files that may be lost: `$XDG_CACHE_HOME/k3`, else `~/.cache/k3`.
pub(crate) fn cache_dir() -> Option<PathBuf> {
    let given = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = given.filter(|path| path.is_absolute());
    Some(cache.or_else(|| Some(std::env::home_dir()?.join(".cache")))?.join("k3"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_very_bytes_come_back() {
        let (ours, other) = (Digest::of(b"a"), Digest::of(b"b"));
        let usage = Usage { steps: 70, worths: vec![0, 1, 1472, u16::MAX] };
        let bytes = usage.encode(ours);
        assert_eq!(Usage::decode(&bytes, ours, 4), Some(usage));
        assert_eq!(Usage::decode(&bytes, other, 4), None);
        assert_eq!(Usage::decode(&bytes, ours, 5), None);
        for len in 0..bytes.len() {
            assert_eq!(Usage::decode(&bytes[..len], ours, 4), None);
        }
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert_eq!(Usage::decode(&bad, ours, 4), None, "byte {at}");
        }
    }
}

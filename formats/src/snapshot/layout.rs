//! The three ways a download lies on disk, and what each knows about its files.

use std::path::{Path, PathBuf};

use super::Source;
use crate::digest::Digest;
use crate::{Error, Result, text_file};

/// Who laid the folder out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Layout {
    /// `models--ORG--NAME/snapshots/REVISION`, links into `blobs/`.
    HfCache {
        /// `ORG/NAME`.
        repo: String,
        /// Commit hash.
        revision: String,
    },
    /// A `--local-dir` download: real files, metadata in `.cache/huggingface`.
    LocalDir {
        /// Commit hash, where the metadata of `config.json` has one.
        revision: Option<String>,
    },
    /// Any other folder.
    Plain,
}

/// The SHA-256 the publisher gave a file, and who says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PublishedDigest {
    /// The digest.
    pub digest: Digest,
    /// Where it is written down, for messages.
    pub from: &'static str,
}

impl Layout {
    /// The layout of a folder, told by its name and its neighbours.
    pub fn of(dir: &Path) -> Self {
        // `..` in the path given would hide the names the layout shows in.
        let full = fs_err::canonicalize(dir).unwrap_or_else(|_| dir.to_path_buf());
        let name = |p: Option<&Path>| p?.file_name()?.to_str().map(str::to_owned);
        let parent = full.parent();
        if name(parent).as_deref() == Some("snapshots")
            && let Some(repo) = name(parent.and_then(Path::parent))
            && let Some(repo) = repo.strip_prefix("models--")
            && let Some(revision) = name(Some(&full))
        {
            return Self::HfCache { repo: repo.replacen("--", "/", 1), revision };
        }
        if full.join(".cache/huggingface/download").is_dir() {
            let metadata = download_metadata(&full, "config.json");
            let revision = metadata.and_then(|m| m.lines().next().map(|l| l.trim().to_owned()));
            return Self::LocalDir { revision };
        }
        Self::Plain
    }

    /// Repository and revision.
    pub fn source(&self) -> Source {
        match self {
            Self::HfCache { repo, revision } => {
                Source { repo: Some(repo.clone()), revision: Some(revision.clone()) }
            }
            Self::LocalDir { revision } => Source { repo: None, revision: revision.clone() },
            Self::Plain => Source::default(),
        }
    }

    /// The digest this layout records for a file: the name of its blob, or its metadata.
    pub fn published_digest(&self, dir: &Path, name: &str) -> Option<PublishedDigest> {
        match self {
            Self::HfCache { .. } => {
                let blob = fs_err::read_link(dir.join(name)).ok()?;
                let digest = blob.file_name()?.to_str()?.parse().ok()?;
                Some(PublishedDigest { digest, from: "name of its blob" })
            }
            Self::LocalDir { .. } => {
                let metadata = download_metadata(dir, name)?;
                let digest = metadata.lines().nth(1)?.trim().parse().ok()?;
                Some(PublishedDigest { digest, from: "download metadata" })
            }
            Self::Plain => None,
        }
    }

    /// Why a shard is not there: absent, or a download that never ended.
    pub(super) fn describe_missing(&self, dir: &Path, name: &str) -> String {
        let link = fs_err::read_link(dir.join(name)).ok();
        let unfinished = match self {
            Self::HfCache { .. } => link.is_some(),
            Self::LocalDir { .. } => download_metadata(dir, name).is_some(),
            Self::Plain => false,
        };
        match link {
            _ if unfinished => "its download is incomplete".to_owned(),
            Some(target) => format!("a link to {target:?}, which is not there"),
            None => "no such file".to_owned(),
        }
    }
}

fn download_metadata(dir: &Path, name: &str) -> Option<String> {
    let path = dir.join(".cache/huggingface/download").join(format!("{name}.metadata"));
    text_file::read(&path, 4096).ok()
}

/// The folder that holds `config.json`, and its layout.
pub(super) fn resolve(path: &Path) -> Result<(PathBuf, Layout)> {
    if !path.is_dir() {
        let problem = if path.exists() { "not a folder" } else { "no such folder" };
        return Err(Error::missing(problem)
            .in_file(path)
            .hint("give the folder of the download: the one with config.json in it"));
    }
    let dir = revision_dir(path)?;
    if dir.join("config.json").symlink_metadata().is_err() {
        return Err(Error::missing("no config.json in this folder")
            .in_file(&dir)
            .hint("give the folder of the download: the one with config.json in it"));
    }
    let layout = Layout::of(&dir);
    Ok((dir, layout))
}

/// The folder of the revision, if `path` is a cache repository; else `path` itself.
pub(super) fn revision_dir(path: &Path) -> Result<PathBuf> {
    if path.join("snapshots").is_dir() && !path.join("config.json").exists() {
        return cached_revision(path);
    }
    Ok(path.to_path_buf())
}

/// The snapshot that `refs/main` names, else the only one there is.
fn cached_revision(repo: &Path) -> Result<PathBuf> {
    let snapshots = repo.join("snapshots");
    if let Ok(revision) = text_file::read(&repo.join("refs/main"), 4096) {
        let revision = revision.trim();
        super::check_plain_name(revision).map_err(|e| e.in_file(repo.join("refs/main")))?;
        let dir = snapshots.join(revision);
        if dir.is_dir() {
            return Ok(dir);
        }
    }
    let mut found = Vec::new();
    for entry in fs_err::read_dir(&snapshots).map_err(|e| Error::io(&snapshots, "list", e))? {
        let path = entry.map_err(|e| Error::io(&snapshots, "list", e))?.path();
        if path.is_dir() {
            found.push(path);
        }
    }
    match found.len() {
        1 => Ok(found.remove(0)),
        n => Err(Error::missing(format!(
            "refs/main names no snapshot, and there are {n} to choose from"
        ))
        .in_file(repo)
        .hint("give one of the folders under snapshots/")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_repository_resolves_through_refs() {
        let tmp = tempfile::tempdir().unwrap();
        let repo = tmp.path().join("models--moonshotai--Kimi-K3");
        for rev in ["aaaa", "bbbb"] {
            fs_err::create_dir_all(repo.join("snapshots").join(rev)).unwrap();
            fs_err::write(repo.join("snapshots").join(rev).join("config.json"), "{}").unwrap();
        }
        assert!(resolve(&repo).unwrap_err().to_string().contains("2 to choose from"));
        fs_err::create_dir_all(repo.join("refs")).unwrap();
        fs_err::write(repo.join("refs/main"), "bbbb\n").unwrap();
        let (dir, layout) = resolve(&repo).unwrap();
        assert!(dir.ends_with("snapshots/bbbb"));
        let source = layout.source();
        assert_eq!(source.repo.as_deref(), Some("moonshotai/Kimi-K3"));
        assert_eq!(source.revision.as_deref(), Some("bbbb"));
        fs_err::write(repo.join("refs/main"), "../..").unwrap();
        assert!(resolve(&repo).unwrap_err().to_string().contains("leads out"));
    }

    #[test]
    fn local_dir_knows_digests() {
        let tmp = tempfile::tempdir().unwrap();
        let download = tmp.path().join(".cache/huggingface/download");
        fs_err::create_dir_all(&download).unwrap();
        fs_err::write(tmp.path().join("config.json"), "{}").unwrap();
        let etag = "ab".repeat(32);
        for name in ["config.json", "m.safetensors"] {
            let text = format!("cccc\n{etag}\n1.5\n");
            fs_err::write(download.join(format!("{name}.metadata")), text).unwrap();
        }
        let (dir, layout) = resolve(tmp.path()).unwrap();
        assert_eq!(layout, Layout::LocalDir { revision: Some("cccc".into()) });
        let published = layout.published_digest(&dir, "m.safetensors").unwrap();
        assert_eq!(published.digest.to_string(), etag);
    }
}

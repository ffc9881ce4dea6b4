//! A Hugging Face snapshot on disk: where its files are, what they are called, and
//! which repository and revision they came from. Opens nothing it does not need.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::config::ModelConfig;
use crate::safetensors_header::Header;
use crate::{Error, Result};

mod index;
mod layout;

pub use index::WeightIndex;
pub use layout::{Layout, PublishedDigest};

/// Name of the index file, which a snapshot may lack.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Where the weights came from, as far as the folder's layout tells.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Repository, for example `moonshotai/Kimi-K3`.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub repo: Option<String>,
    /// Commit hash.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub revision: Option<String>,
}

/// One weight file that the snapshot should have.
#[derive(Debug, Clone)]
pub struct Shard {
    /// Name inside the snapshot.
    pub name: String,
    /// Where it is: the snapshot's folder and the name, links not followed.
    pub path: PathBuf,
    /// What the file system says of it, or why it cannot be used.
    pub found: Result<ShardFile, String>,
}

/// What the file system says of a weight file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShardFile {
    /// Size in bytes.
    pub size: u64,
    /// Time of the last change, in nanoseconds since 1970.
    pub modified_ns: u64,
}

impl ShardFile {
    /// Asks the file system.
    ///
    /// # Errors
    /// There is no such file, or it is not a regular file.
    pub fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs_err::metadata(path)?;
        if !metadata.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        let since = metadata.modified()?.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let modified_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        Ok(Self { size: metadata.len(), modified_ns })
    }
}

/// A snapshot folder with its config read and its shards found.
#[derive(Debug)]
pub struct Snapshot {
    /// The folder that holds `config.json`.
    pub dir: PathBuf,
    /// Which tool laid the folder out.
    pub layout: Layout,
    /// The model.
    pub config: ModelConfig,
    /// Tensor name to shard, where the snapshot has an index.
    pub index: Option<WeightIndex>,
    /// Weight files in name order, those that are not there included; a tensor's shard
    /// number is its place here.
    pub shards: Vec<Shard>,
}

impl Snapshot {
    /// Opens a snapshot folder, a cache repository (`models--org--name`) or a
    /// `--local-dir` download.
    ///
    /// # Errors
    /// No `config.json`, another model's config, an index that leaves the folder, or no
    /// weight file at all. A shard that is not there is no error here: see [`Shard::found`].
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_spread(path, &[])
    }

    /// Opens a snapshot whose shards lie in several folders: those that are not in the
    /// first one are looked for in `others`.
    ///
    /// # Errors
    /// As [`Snapshot::open`].
    pub fn open_spread(path: &Path, others: &[PathBuf]) -> Result<Self> {
        let (dir, layout) = layout::resolve(path)?;
        let config = ModelConfig::read(&dir.join("config.json"))?;
        let index_path = dir.join(INDEX_FILE);
        let index = match index_path.symlink_metadata() {
            Ok(_) => Some(WeightIndex::read(&index_path)?),
            Err(_) => None,
        };
        let names = match &index {
            Some(index) => index.files().to_vec(),
            None => all_of_the_series(weight_files(&dir)?),
        };
        let find = |name: String| {
            let shard = find_shard(&dir, &layout, name);
            let elsewhere = |dir: &PathBuf| {
                let found = find_shard(dir, &Layout::of(dir), shard.name.clone());
                found.found.is_ok().then_some(found)
            };
            match shard.found {
                Ok(_) => shard,
                Err(_) => others.iter().find_map(elsewhere).unwrap_or(shard),
            }
        };
        let shards = names.into_iter().map(find).collect();
        Ok(Self { dir, layout, config, index, shards })
    }

    /// The model of a snapshot, without a look at its weights.
    ///
    /// # Errors
    /// No `config.json`, or another model's.
    pub fn config_of(path: &Path) -> Result<ModelConfig> {
        let (dir, _) = layout::resolve(path)?;
        ModelConfig::read(&dir.join("config.json"))
    }

    /// Repository and revision, where the layout tells.
    pub fn source(&self) -> Source {
        self.layout.source()
    }

    /// Path of a file of the snapshot.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Reads and checks the header of shard number `shard`.
    ///
    /// # Errors
    /// See [`Header::read`].
    pub fn header(&self, shard: usize) -> Result<Header> {
        Header::read(&self.shards[shard].path)
    }
}

/// Refuses names that lead out of the snapshot: a shard is a plain file beside the config.
///
/// # Errors
/// Names the offending file name.
pub fn check_plain_name(name: &str) -> Result<()> {
    let mut parts = Path::new(name).components();
    let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    if plain && !name.contains(['/', '\\', '\0']) {
        return Ok(());
    }
    Err(Error::unsupported(format!("file name {name:?} leads out of the snapshot"))
        .hint("do not use this snapshot; its index was tampered with or damaged"))
}

fn weight_files(dir: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs_err::read_dir(dir).map_err(|e| Error::io(dir, "list", e))? {
        let name = entry.map_err(|e| Error::io(dir, "list", e))?.file_name();
        match name.into_string() {
            Ok(name) if name.ends_with(".safetensors") => names.push(name),
            _ => {}
        }
    }
    names.sort_unstable();
    if names.is_empty() {
        return Err(Error::missing("no *.safetensors files")
            .in_file(dir)
            .hint("point at the folder that holds config.json and the model-*.safetensors files"));
    }
    Ok(names)
}

fn find_shard(dir: &Path, layout: &Layout, name: String) -> Shard {
    let path = dir.join(&name);
    let found = match (ShardFile::of(&path), mark_of_download(&path)) {
        (Err(e), _) if e.kind() == io::ErrorKind::NotFound => {
            Err(layout.describe_missing(dir, &name))
        }
        (Err(e), _) => Err(e.to_string()),
        (Ok(_), Some(mark)) => Err(format!("{mark} beside it says that its download goes on")),
        (Ok(found), None) => Ok(found),
    };
    Shard { name, path, found }
}

/// The file that a downloader keeps beside one that is not whole yet, though it may have its
/// full size already.
fn mark_of_download(shard: &Path) -> Option<String> {
    let name = shard.file_name()?.to_str()?;
    let mut marks = [".aria2", ".part", ".incomplete"].iter().map(|end| format!("{name}{end}"));
    marks.find(|mark| shard.with_file_name(mark).exists())
}

/// Completes `model-00001-of-000096.safetensors` and its like: without an index, the names
/// themselves say how many there should be.
fn all_of_the_series(names: Vec<String>) -> Vec<String> {
    const MOST: usize = 4096;
    let series = |name: &str| {
        let (head, total) = name.strip_suffix(".safetensors")?.rsplit_once("-of-")?;
        let (stem, number) = head.rsplit_once('-')?;
        let count: usize = total.parse().ok()?;
        (number.parse::<usize>().is_ok() && (1..=MOST).contains(&count))
            .then(|| (stem.to_owned(), number.len(), total.to_owned(), count))
    };
    let Some((stem, width, total, count)) = names.first().and_then(|n| series(n)) else {
        return names;
    };
    let name = |i: usize| format!("{stem}-{i:0width$}-of-{total}.safetensors");
    let mut all: BTreeSet<String> = (1..=count).map(name).collect();
    all.extend(names);
    all.into_iter().collect()
}

/// The folder that the weights are in: `path` itself, or where a cache repository keeps
/// the revision that `refs/main` names.
///
/// # Errors
/// A cache repository with several revisions and no `refs/main`.
pub fn weights_dir(path: &Path) -> Result<PathBuf> {
    layout::revision_dir(path)
}

/// Shard names to their numbers.
pub(crate) fn numbers(names: &[String]) -> HashMap<&str, usize> {
    names.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_names_its_missing_members() {
        let all = all_of_the_series(vec![
            "model-00002-of-000003.safetensors".into(),
            "other.safetensors".into(),
        ]);
        assert_eq!(all[0], "model-00001-of-000003.safetensors");
        assert_eq!(all.len(), 4);
        let alone = vec!["model.safetensors".to_owned()];
        assert_eq!(all_of_the_series(alone.clone()), alone);
        let hostile = vec!["m-1-of-99999999999.safetensors".to_owned()];
        assert_eq!(all_of_the_series(hostile.clone()), hostile);
    }

    #[test]
    fn what_is_no_file_is_not_a_shard() {
        let tmp = tempfile::tempdir().unwrap();
        let shard = find_shard(tmp.path(), &Layout::Plain, ".".into());
        assert_eq!(shard.found, Err("not a regular file".into()));
        let shard = find_shard(tmp.path(), &Layout::Plain, "a.safetensors".into());
        assert_eq!(shard.found, Err("no such file".into()));
        fs_err::write(tmp.path().join("a.safetensors"), [0; 16]).unwrap();
        assert!(find_shard(tmp.path(), &Layout::Plain, "a.safetensors".into()).found.is_ok());
        fs_err::write(tmp.path().join("a.safetensors.aria2"), "").unwrap();
        let shard = find_shard(tmp.path(), &Layout::Plain, "a.safetensors".into());
        assert!(shard.found.unwrap_err().contains("a.safetensors.aria2 beside it"));
    }
}

//! A Hugging Face snapshot on disk: where its files are, what they are called, and
//! which repository and revision they came from. Opens nothing it does not need.

use std::collections::HashMap;
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

/// One weight file.
#[derive(Debug, Clone)]
pub struct Shard {
    /// Name inside the snapshot.
    pub name: String,
    /// Where it is: the snapshot's folder and the name, links not followed.
    pub path: PathBuf,
    /// Size in bytes.
    pub size: u64,
    /// Time of the last change.
    pub modified: SystemTime,
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
    /// Weight files in name order; a tensor's shard number is its place here.
    pub shards: Vec<Shard>,
}

impl Snapshot {
    /// Opens a snapshot folder, a cache repository (`models--org--name`) or a
    /// `--local-dir` download.
    ///
    /// # Errors
    /// No `config.json`, another model's config, an index that leaves the folder, or
    /// missing shards: all of them are listed.
    pub fn open(path: &Path) -> Result<Self> {
        let (dir, layout) = layout::resolve(path)?;
        let config = ModelConfig::read(&dir.join("config.json"))?;
        let index_path = dir.join(INDEX_FILE);
        let index = match index_path.symlink_metadata() {
            Ok(_) => Some(WeightIndex::read(&index_path)?),
            Err(_) => None,
        };
        let names = match &index {
            Some(index) => index.files().to_vec(),
            None => weight_files(&dir)?,
        };
        let shards = find_shards(&dir, &layout, &names)?;
        Ok(Self { dir, layout, config, index, shards })
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

fn find_shards(dir: &Path, layout: &Layout, names: &[String]) -> Result<Vec<Shard>> {
    let mut shards = Vec::with_capacity(names.len());
    let mut missing = Vec::new();
    for name in names {
        let path = dir.join(name);
        match fs_err::metadata(&path) {
            Ok(m) if m.is_file() => shards.push(Shard {
                name: name.clone(),
                path,
                size: m.len(),
                modified: m.modified().map_err(|e| Error::io(dir, "read the times of", e))?,
            }),
            Ok(_) => return Err(Error::unsupported("not a regular file").in_file(path)),
            Err(_) => missing.push(layout.describe_missing(dir, name)),
        }
    }
    if missing.is_empty() {
        return Ok(shards);
    }
    let list = missing.join("\n  ");
    let problem = format!("{} of {} shards are missing:\n  {list}", missing.len(), names.len());
    Err(Error::missing(problem).in_file(dir).hint("finish the download, then run this again"))
}

/// Shard names to their numbers.
pub(crate) fn numbers(names: &[String]) -> HashMap<&str, usize> {
    names.iter().enumerate().map(|(i, n)| (n.as_str(), i)).collect()
}

//! What is in a snapshot, a container or one safetensors file.

use std::path::Path;

use k3_formats::container::Container;
use k3_formats::container::manifest::MANIFEST_FILE;
use k3_formats::safetensors_header::{Header, TensorInfo};
use k3_formats::snapshot::{Snapshot, Source};
use k3_formats::{Error, Result};
use serde::Serialize;

use crate::footprint::Footprint;
use crate::problems::Lines;
use crate::release;
use crate::survey::for_each_header;

mod family;
mod report;

pub use family::Family;
use family::{Families, MlaLayers};
pub use report::ClassRow;

/// What was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A Hugging Face snapshot.
    Snapshot,
    /// A container of this tool.
    Container,
    /// One safetensors file.
    File,
}

/// Everything that the headers tell.
#[derive(Debug, Serialize)]
pub struct Inspection {
    /// What was looked at.
    pub kind: Kind,
    /// Repository and revision, where they are known.
    pub source: Source,
    /// Whether every weight file has the size and header of the release.
    pub release: bool,
    /// Safetensors files.
    pub files: u64,
    /// Bytes of those files.
    pub file_bytes: u64,
    /// Tensors in them.
    pub tensors: u64,
    /// Bytes of the tensors.
    pub tensor_bytes: u64,
    /// Totals by class.
    pub classes: Vec<ClassRow>,
    /// Tensors of one kind, in file order.
    pub families: Vec<Family>,
    /// Sizes that follow from the config.
    pub footprint: Option<Footprint>,
    /// Files whose header could not be read, and why.
    pub problems: Vec<String>,
}

/// Looks at `path` and calls `each` with every file's name and tensor, in file order.
///
/// # Errors
/// There is nothing of the three kinds, or the one file's header is damaged. Damaged
/// shards of a snapshot are listed in [`Inspection::problems`].
pub fn inspect(path: &Path, each: &mut dyn FnMut(&str, &TensorInfo)) -> Result<Inspection> {
    if path.is_file() {
        return inspect_file(path, each);
    }
    if path.join(MANIFEST_FILE).is_file() {
        return inspect_container(path, each);
    }
    inspect_snapshot(&Snapshot::open(path)?, each)
}

/// Counts the tensors of one file after the other.
struct Tally<'e> {
    each: &'e mut dyn FnMut(&str, &TensorInfo),
    families: Families,
    files: u64,
    file_bytes: u64,
    tensors: u64,
    tensor_bytes: u64,
}

impl<'e> Tally<'e> {
    fn new(each: &'e mut dyn FnMut(&str, &TensorInfo)) -> Self {
        let families = Families::default();
        Self { each, families, files: 0, file_bytes: 0, tensors: 0, tensor_bytes: 0 }
    }

    fn file(&mut self, name: &str, header: &Header, layers: &MlaLayers) {
        self.files += 1;
        self.file_bytes += header.file_size;
        for tensor in &header.tensors {
            self.tensors += 1;
            self.tensor_bytes += tensor.bytes();
            self.families.add(tensor, layers.class(&tensor.name));
            (self.each)(name, tensor);
        }
    }

    fn finish(self, kind: Kind) -> Inspection {
        let families = self.families.into_list();
        Inspection {
            kind,
            source: Source::default(),
            release: false,
            files: self.files,
            file_bytes: self.file_bytes,
            tensors: self.tensors,
            tensor_bytes: self.tensor_bytes,
            classes: report::classes(&families),
            families,
            footprint: None,
            problems: Vec::new(),
        }
    }
}

fn inspect_file(path: &Path, each: &mut dyn FnMut(&str, &TensorInfo)) -> Result<Inspection> {
    let header = Header::read(path)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut tally = Tally::new(each);
    tally.file(&name, &header, &MlaLayers::of_header(&header));
    Ok(tally.finish(Kind::File))
}

fn inspect_snapshot(
    snapshot: &Snapshot,
    each: &mut dyn FnMut(&str, &TensorInfo),
) -> Result<Inspection> {
    let layers = MlaLayers::of_config(&snapshot.config);
    let mut tally = Tally::new(each);
    let mut problems = Lines::default();
    let mut release = true;
    for_each_header(snapshot, |_, shard, header| match header {
        Ok(header) => {
            let known = release::shard(&snapshot.config, &shard.name, header.file_size);
            release &= known.is_some_and(|known| known.header_sha256 == header.digest);
            tally.file(&shard.name, &header, &layers);
        }
        Err(error) => {
            release = false;
            problems.add(|| error.to_string());
        }
    });
    Ok(Inspection {
        source: snapshot.source(),
        release,
        footprint: Some(Footprint::of(&snapshot.config)),
        problems: problems.into_lines(),
        ..tally.finish(Kind::Snapshot)
    })
}

fn inspect_container(dir: &Path, each: &mut dyn FnMut(&str, &TensorInfo)) -> Result<Inspection> {
    let container = Container::open(dir)?;
    let layers = MlaLayers::of_config(&container.config);
    let mut tally = Tally::new(each);
    for file in container.manifest.files.iter().filter(|f| !f.tensors.is_empty()) {
        let path = dir.join(&file.name);
        let header = Header::read(&path).map_err(|e: Error| e.in_file(&path))?;
        tally.file(&file.name, &header, &layers);
    }
    Ok(Inspection {
        source: container.manifest.source.clone(),
        footprint: Some(Footprint::of(&container.config)),
        ..tally.finish(Kind::Container)
    })
}

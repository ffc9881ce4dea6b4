//! Synthetic snapshots and containers: the true names, dtypes, shapes and file layout, made-up values.
//!
//! With the full preset every shard header equals the release's byte for byte. Values
//! depend on the seed, the tensor's name and the position in it, never on the machine,
//! the number of threads or the other tensors.

mod container;
mod dims;
mod draw;
mod files;
mod recipe;
mod shard;
mod vision;
mod vocabulary;
mod writer;

use std::path::Path;

use anyhow::{Context, Result};
use k3_formats::ModelConfig;

pub use container::write_sparse_container;
pub use dims::{Dims, Preset};
pub use recipe::Routing;
pub(crate) use writer::refuse_used_folder;

use shard::Layout;
use vocabulary::Vocabulary;
use writer::Writer;

/// What to write.
#[derive(Debug, Clone)]
pub struct SynthOptions {
    /// Dimensions of the model.
    pub dims: Dims,
    /// Seed of all values.
    pub seed: u64,
    /// How the routers choose.
    pub routing: Routing,
    /// True headers and sizes, but holes for data: all zero, and no space taken.
    pub sparse: bool,
}

/// What was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Summary {
    /// Weight files.
    pub shards: usize,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of all tensors.
    pub data_bytes: u64,
}

/// Bytes of all tensors of a snapshot with these dimensions.
///
/// # Errors
/// Dimensions that no model can have.
pub fn data_bytes(dims: &Dims) -> Result<u64> {
    let config = model_config(dims)?;
    Ok(Layout::new(dims, &config).shards().map(|shard| shard.data_bytes()).sum())
}

/// Writes a snapshot into `out`, a new or empty folder, and calls `wrote` with the bytes
/// of data each time some are on the way to the disk, from any thread. Holes do not count.
///
/// # Errors
/// Impossible dimensions, a folder with something in it, too little space (found out
/// before anything is written), or what the disk answers. Whatever was written by then
/// is removed.
pub fn write_snapshot(
    out: &Path,
    options: &SynthOptions,
    wrote: &(dyn Fn(u64) + Sync),
) -> Result<Summary> {
    let dims = &options.dims;
    let config = model_config(dims)?;
    let layout = Layout::new(dims, &config);
    let mut writer = Writer::new(out)?;
    let mut summary = Summary { shards: 0, tensors: 0, data_bytes: 0 };
    if !options.sparse {
        writer.check_space(layout.shards().map(|shard| shard.data_bytes()).sum())?;
    }
    for shard in layout.shards() {
        summary.shards += 1;
        summary.tensors += shard.tensors.len();
        summary.data_bytes += shard.data_bytes();
        if options.sparse {
            writer.sparse_shard(&shard)?;
        } else {
            let values = |tensor: &_| recipe::recipe(tensor, &config, options.routing);
            writer.shard(&shard, options.seed, &values, wrote)?;
        }
    }
    writer.file("model.safetensors.index.json", |out| files::write_index(&layout, out))?;
    writer.file("tiktoken.model", |mut out| {
        Ok(Vocabulary::train(config.base_vocab()).write(&mut out)?)
    })?;
    for (name, json) in [
        ("generation_config.json", files::generation_config(dims)),
        ("preprocessor_config.json", files::preprocessor_config()),
        ("tokenizer_config.json", files::tokenizer_config(dims)),
        // Last, so that a folder without it is no snapshot.
        ("config.json", files::config(dims)),
    ] {
        writer.file(name, |out| Ok(serde_json::to_writer_pretty(out, &json)?))?;
    }
    writer.finish();
    Ok(summary)
}

/// The text config of the dimensions, with all the bounds it has when read from a file.
pub(crate) fn model_config(dims: &Dims) -> Result<ModelConfig> {
    dims.check()?;
    let config = ModelConfig::parse(&files::config(dims).to_string())
        .context("these dimensions describe no Kimi K3 model")?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::os::unix::fs::MetadataExt;

    use k3_formats::snapshot::Snapshot;
    use k3_formats::tensor_name::{dense_tensors, parse_expert_name};
    use k3_formats::tokenizer::{Specials, Tokenizer};

    use super::*;

    fn tiny() -> SynthOptions {
        SynthOptions { dims: Preset::Tiny.dims(), seed: 3, routing: Routing::Flat, sparse: false }
    }

    fn files(options: &SynthOptions) -> BTreeMap<String, Vec<u8>> {
        let dir = tempfile::tempdir().unwrap();
        write_snapshot(dir.path(), options, &|_| {}).unwrap();
        let read = |entry: std::fs::DirEntry| {
            let name = entry.file_name().into_string().unwrap();
            (name, fs_err::read(entry.path()).unwrap())
        };
        std::fs::read_dir(dir.path()).unwrap().map(|entry| read(entry.unwrap())).collect()
    }

    #[test]
    fn bytes_depend_on_the_seed_and_not_on_the_threads() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let first = pool.install(|| files(&tiny()));
        assert!(files(&tiny()) == first);
        let other = files(&SynthOptions { seed: 4, ..tiny() });
        let changed = |name: &&String| first[*name] != other[*name];
        assert_eq!(first.keys().filter(changed).count(), 10, "weights change, other files do not");
    }

    #[test]
    fn the_library_reads_it_as_a_complete_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let summary = write_snapshot(dir.path(), &tiny(), &|_| {}).unwrap();
        let snapshot = Snapshot::open(dir.path()).unwrap();
        assert_eq!(snapshot.shards.len(), summary.shards);
        assert_eq!(snapshot.index.as_ref().unwrap().len(), summary.tensors);
        let mut found = BTreeMap::new();
        for shard in 0..summary.shards {
            for tensor in snapshot.header(shard).unwrap().tensors {
                found.insert(tensor.name.clone(), tensor);
            }
        }
        assert_eq!(found.len(), summary.tensors);
        for spec in dense_tensors(&snapshot.config) {
            let tensor = found.remove(&spec.name).unwrap();
            assert_eq!((tensor.dtype, tensor.shape), (spec.dtype, spec.shape));
        }
        found.retain(|name, _| parse_expert_name(name).is_none());
        assert_eq!(found.len(), 3 + 3 + 6 * 2, "the rest is vision");
    }

    #[test]
    fn its_tokenizer_loads_and_round_trips() {
        let dir = tempfile::tempdir().unwrap();
        write_snapshot(dir.path(), &tiny(), &|_| {}).unwrap();
        let file = |name| dir.path().join(name);
        let tokenizer = Tokenizer::from_snapshot_files(
            &file("tiktoken.model"),
            &file("tokenizer_config.json"),
            768,
        )
        .unwrap();
        let text = "The keeper of the lighthouse, 灯塔, wrote: \"nine ships\".\n";
        let ids = tokenizer.encode(text, Specials::Text);
        assert_eq!(tokenizer.decode(&ids), text);
        assert!(ids.len() < 40, "{} bytes became {ids:?}", text.len());
    }

    #[test]
    fn sparse_files_have_true_headers_and_take_no_room() {
        let dir = tempfile::tempdir().unwrap();
        write_snapshot(dir.path(), &SynthOptions { sparse: true, ..tiny() }, &|_| {}).unwrap();
        let dense = files(&tiny());
        let mut room = 0;
        for (name, bytes) in dense.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            let path = dir.path().join(name);
            let meta = fs_err::metadata(&path).unwrap();
            assert_eq!(meta.len(), bytes.len() as u64);
            // A stricter umask may take more away.
            assert_eq!(meta.mode() & 0o777 & !0o644, 0);
            room += meta.blocks() * 512;
            let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
            let sparse = fs_err::read(&path).unwrap();
            assert!(sparse[..header] == bytes[..header]);
            assert!(sparse[header..].iter().all(|&b| b == 0));
        }
        assert!(room < 400_000, "{room} bytes on disk");
    }

    #[test]
    fn what_is_there_stays_and_what_fails_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, options: &SynthOptions| {
            let error = write_snapshot(&dir.path().join(name), options, &|_| {}).unwrap_err();
            format!("{error:#}")
        };
        fs_err::write(dir.path().join("mine"), "x").unwrap();
        let error = write("", &tiny());
        assert!(error.ends_with("expected an empty folder, found files in it"), "{error}");
        let odd = Dims { latent: 100, ..tiny().dims };
        let error = write("odd", &SynthOptions { dims: odd, ..tiny() });
        assert!(error.contains("expected a multiple of 32, found 100"), "{error}");
        let error = write("full", &SynthOptions { dims: Preset::Full.dims(), ..tiny() });
        assert!(error.contains("expected 1560860324864 bytes of free space"), "{error}");
        let left: Vec<_> = fs_err::read_dir(dir.path()).unwrap().collect();
        assert_eq!(left.len(), 1, "only the file that was there");
    }
}

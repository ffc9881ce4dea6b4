//! Containers with holes for data: the structure of any size on a small disk.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Result;
use k3_formats::container::manifest::{FileRecord, MANIFEST_FILE, Manifest, SUMS_FILE};
use k3_formats::container::stored_tensors;
use k3_formats::container::writer::{DenseWriter, write_file};
use k3_formats::digest::{Digest, Hasher};
use rayon::prelude::*;

use super::writer::Writer;
use crate::plan::{ConversionPlan, DenseFile};

/// Writes the container of a plan into `out`, a new or empty folder: everything as a
/// conversion writes it, but zeros for the tensors, left as holes. The digests are those
/// of the files, so it passes every check but the comparison with the snapshot's values.
/// Calls `hashed` with the bytes of dense files done, from any thread.
///
/// # Errors
/// A folder with something in it, or what the disk answers. Whatever was written by then
/// is removed.
pub fn write_sparse_container(
    out: &Path,
    plan: &ConversionPlan,
    hashed: &(dyn Fn(u64) + Sync),
) -> Result<Manifest> {
    let mut writer = Writer::new(out)?;
    let dense = plan.dense.iter().map(|f| f.name.as_str());
    let small = plan.small.iter().map(|f| f.name);
    for name in dense.chain(small).chain([MANIFEST_FILE, SUMS_FILE]) {
        writer.will_create(name);
        writer.will_create(&format!("{name}.part"));
    }
    let digests = digests_of_zeros(&plan.dense);
    let write = |file: &DenseFile| {
        let record = holes(file, &out.join(&file.name), &digests)?;
        hashed(record.size);
        Ok(record)
    };
    let mut files = plan.dense.par_iter().map(write).collect::<Result<Vec<FileRecord>>>()?;
    for file in &plan.small {
        files.push(write_file(&out.join(file.name), &file.bytes)?);
    }
    let manifest = plan.manifest(files);
    // Last, so that a folder without it is no container.
    write_file(&out.join(SUMS_FILE), manifest.sums().as_bytes())?;
    write_file(&out.join(MANIFEST_FILE), manifest.to_text().as_bytes())?;
    writer.finish();
    Ok(manifest)
}

fn holes(file: &DenseFile, path: &Path, digests: &HashMap<u64, Digest>) -> Result<FileRecord> {
    let mut lengths = file.layout.spans.iter().map(|span| span.end - span.begin);
    let mut writer = DenseWriter::create(path, file.layout.clone())?;
    for tensor in &file.tensors {
        for stored in stored_tensors(&tensor.spec, tensor.format) {
            // A sidecar of scales has no format of its own.
            let format = tensor.format.filter(|_| stored.name == tensor.spec.name);
            let digest = lengths.next().and_then(|n| digests.get(&n));
            let digest = digest.expect("the layout places every stored tensor");
            writer.hole(format.map(|f| f.name()), *digest)?;
        }
    }
    Ok(writer.finish()?)
}

/// Few sizes, many tensors: each size is hashed once.
fn digests_of_zeros(files: &[DenseFile]) -> HashMap<u64, Digest> {
    let mut lengths: Vec<u64> =
        files.iter().flat_map(|f| &f.layout.spans).map(|span| span.end - span.begin).collect();
    lengths.sort_unstable();
    lengths.dedup();
    let digest = |n: u64| {
        let mut hasher = Hasher::new();
        hasher.update_zeros(n);
        (n, hasher.finish())
    };
    lengths.into_par_iter().map(digest).collect()
}

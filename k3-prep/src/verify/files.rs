//! Every file of the container against its record: size, digest, the digest of each tensor.

use std::collections::HashSet;

use k3_formats::container::layout::FILLER_PREFIX;
use k3_formats::container::manifest::{FileRecord, MANIFEST_FILE, Manifest, SUMS_FILE};
use k3_formats::digest::{Digest, Hasher};
use k3_formats::safetensors_header::Header;
use k3_formats::{Error, Result};
use rayon::prelude::*;

use super::{Findings, Report, Verification, path_of};
use crate::block_reader::{BlockReader, Pages};
use crate::progress::Progress;

/// Lists the folder and hashes every recorded file, several at once.
pub(super) fn check(
    verification: &Verification<'_>,
    manifest: &Manifest,
    found: &mut Findings,
    report: &mut Report,
) -> Result<()> {
    let dir = verification.dir;
    let known: HashSet<&str> =
        manifest.files.iter().map(|f| f.name.as_str()).chain([MANIFEST_FILE, SUMS_FILE]).collect();
    let mut strangers = Vec::new();
    for entry in fs_err::read_dir(dir).map_err(|e| Error::io(dir, "list", e))? {
        let name = entry.map_err(|e| Error::io(dir, "list", e))?.file_name();
        if !name.to_str().is_some_and(|name| known.contains(name)) {
            strangers.push(dir.join(name));
        }
    }
    strangers.sort();
    for path in strangers {
        found.differs(&Error::mismatch("no record of this file").in_file(path));
    }
    let progress =
        Progress::start("verify", manifest.files.iter().map(|f| f.size).sum(), verification.talk);
    let checked: Vec<_> = verification.pool.install(|| {
        let file = |record| check_file(verification, record, &progress);
        manifest.files.par_iter().map(file).collect()
    });
    progress.finish();
    for (record, errors) in manifest.files.iter().zip(checked) {
        report.files += 1;
        report.bytes += record.size;
        report.tensors += record.tensors.len();
        errors.iter().for_each(|error| found.differs(error));
    }
    Ok(())
}

/// One stretch of a file with a digest of its own.
struct Stretch {
    name: String,
    begin: u64,
    end: u64,
    hasher: Hasher,
}

fn check_file(
    verification: &Verification<'_>,
    record: &FileRecord,
    progress: &Progress,
) -> Vec<Error> {
    let path = path_of(verification.dir, record);
    let mut errors = Vec::new();
    let mut stretches = Vec::new();
    let mut hasher = Hasher::new();
    let size = BlockReader::open(&path, Pages::Keep).and_then(|reader| {
        let size = reader.size()?;
        if size != record.size {
            let problem = format!("expected {} bytes, found {size}", record.size);
            return Err(Error::mismatch(problem));
        }
        if !record.tensors.is_empty() {
            match Header::read(&path) {
                Ok(header) => stretches = stretches_of(&header),
                Err(error) => errors.push(error),
            }
        }
        reader.for_each_block(|at, block| {
            hasher.update(block);
            hash_stretches(&mut stretches, at, block);
            progress.add(block.len() as u64);
        })?;
        Ok(size)
    });
    if let Err(error) = size {
        errors.push(error);
        return errors.into_iter().map(|e| e.in_file(&path)).collect();
    }
    let before = errors.len();
    if !stretches.is_empty() {
        compare_tensors(record, stretches, &mut errors);
    }
    let digest = hasher.finish();
    if digest != record.sha256 {
        let where_else = match (record.tensors.is_empty(), errors.len() > before) {
            (false, false) => " (not in a tensor: in the header or the padding)",
            _ => "",
        };
        errors.push(digest_error(record.sha256, digest, where_else));
    }
    errors.into_iter().map(|e| e.in_file(&path)).collect()
}

fn stretches_of(header: &Header) -> Vec<Stretch> {
    let tensors = header.tensors.iter().filter(|t| !t.name.starts_with(FILLER_PREFIX));
    let stretch = |t: &k3_formats::safetensors_header::TensorInfo| Stretch {
        name: t.name.clone(),
        begin: header.data_start + t.begin,
        end: header.data_start + t.end,
        hasher: Hasher::new(),
    };
    tensors.map(stretch).collect()
}

/// Gives every stretch its part of the block that begins at `at`.
fn hash_stretches(stretches: &mut [Stretch], at: u64, block: &[u8]) {
    let first = stretches.partition_point(|s| s.end <= at);
    let block_end = at + block.len() as u64;
    for s in stretches[first..].iter_mut().take_while(|s| s.begin < block_end) {
        let from = s.begin.max(at) - at;
        let to = s.end.min(block_end) - at;
        s.hasher.update(&block[from as usize..to as usize]);
    }
}

fn compare_tensors(record: &FileRecord, stretches: Vec<Stretch>, errors: &mut Vec<Error>) {
    let recorded = record.tensors.iter().map(|t| t.name.as_str());
    if !recorded.eq(stretches.iter().map(|s| s.name.as_str())) {
        errors.push(Error::mismatch("its tensors are not the recorded ones"));
        return;
    }
    for (tensor, stretch) in record.tensors.iter().zip(stretches) {
        let digest = stretch.hasher.finish();
        if digest != tensor.sha256 {
            errors.push(digest_error(tensor.sha256, digest, "").item(stretch.name));
        }
    }
}

fn digest_error(expected: Digest, found: Digest, more: &str) -> Error {
    Error::mismatch(format!("expected SHA-256 {expected}, found {found}{more}"))
}

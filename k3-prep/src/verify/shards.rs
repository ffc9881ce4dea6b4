//! Are the source shards still what they were: size and header, with the time said?

use std::path::PathBuf;

use k3_formats::Error;
use k3_formats::container::manifest::{Manifest, ShardRecord};
use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::ShardFile;
use rayon::prelude::*;

use super::{Findings, Report, Verification};

/// The place of a shard, or bank: the first of the folders that has it with this size, else
/// the first that has it.
pub(crate) fn find(name: &str, size: u64, snapshots: &[PathBuf]) -> Option<PathBuf> {
    let there = || snapshots.iter().map(|dir| dir.join(name)).filter(|path| path.is_file());
    let whole = |path: &PathBuf| fs_err::metadata(path).is_ok_and(|meta| meta.len() == size);
    there().find(whole).or_else(|| there().next())
}

/// Compares size and header of every shard.
pub(super) fn check(
    verification: &Verification<'_>,
    manifest: &Manifest,
    snapshots: &[PathBuf],
    found: &mut Findings,
    report: &mut Report,
) {
    let outcomes: Vec<_> = verification.pool.install(|| {
        let shard = |record| check_shard(record, snapshots);
        manifest.shards.par_iter().map(shard).collect()
    });
    let mut touched = Vec::new();
    for (record, outcome) in manifest.shards.iter().zip(outcomes) {
        match outcome {
            Ok(same_time) => {
                report.shards += 1;
                if !same_time {
                    touched.push(record.name.as_str());
                }
            }
            Err(error) => found.differs(&error),
        }
    }
    if touched.is_empty() {
        return;
    }
    // One line, so that all of them are named however many there are.
    found.note(format!(
        "modified since the conversion, size and header the same: {}",
        touched.join(", ")
    ));
    if !verification.source && !verification.experts {
        found.note(
            "whether their data changed, only hashing them (--source) can tell, or --experts if they \
             were converted with --hash-experts",
        );
    }
}

/// Whether the shard has the recorded time as well.
pub(crate) fn check_shard(record: &ShardRecord, snapshots: &[PathBuf]) -> Result<bool, Error> {
    let Some(path) = find(&record.name, record.size, snapshots) else {
        let path = match snapshots.first() {
            Some(dir) => dir.join(&record.name),
            None => PathBuf::from(&record.name),
        };
        return Err(Error::missing("the shard is not there")
            .in_file(path)
            .hint("give the folder of the snapshot with --snapshot"));
    };
    let file = ShardFile::of(&path).map_err(|e| Error::io(&path, "look at", e))?;
    if file.size != record.size {
        let problem =
            format!("expected {} bytes as at the conversion, found {}", record.size, file.size);
        return Err(Error::mismatch(problem).in_file(path));
    }
    let header = Header::read(&path)?;
    if header.digest != record.header_sha256 {
        let problem = format!(
            "expected a header with SHA-256 {} as at the conversion, found {}",
            record.header_sha256, header.digest
        );
        return Err(Error::mismatch(problem).in_file(path));
    }
    Ok(file.modified_ns == record.modified_ns)
}

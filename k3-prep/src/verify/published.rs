//! Whole shards against the SHA-256 their publisher gave them.

use std::path::{Path, PathBuf};

use k3_formats::Error;
use k3_formats::config::ModelConfig;
use k3_formats::container::manifest::{Manifest, ShardRecord};
use k3_formats::digest::{Digest, Hasher};
use k3_formats::snapshot::{Layout, PublishedDigest};
use rayon::prelude::*;

use super::shards::find;
use super::{Findings, SourceReport, Verification};
use crate::block_reader::{BlockReader, Pages};
use crate::progress::Progress;
use crate::release;

/// A shard with a digest to be compared with.
struct Published {
    path: PathBuf,
    size: u64,
    digest: PublishedDigest,
}

/// Hashes every shard that has a published digest, several at once.
pub(super) fn check(
    verification: &Verification<'_>,
    manifest: &Manifest,
    snapshots: &[PathBuf],
    config: Option<&ModelConfig>,
    found: &mut Findings,
) -> SourceReport {
    let mut report = SourceReport::default();
    let mut todo = Vec::new();
    for record in &manifest.shards {
        // A shard that is not there was named before.
        let Some(path) = find(&record.name, record.size, snapshots) else { continue };
        match published(&path, record, config) {
            Some(digest) => todo.push(Published { path, size: record.size, digest }),
            None => report.unpublished += 1,
        }
    }
    if report.unpublished > 0 {
        found.note(format!(
            "{} of {} shards have no published digest to be compared with",
            report.unpublished,
            manifest.shards.len()
        ));
    }
    if todo.is_empty() {
        return report;
    }
    let progress = Progress::start("source", todo.iter().map(|p| p.size).sum(), verification.talk);
    let outcomes: Vec<_> = verification
        .pool
        .install(|| todo.par_iter().map(|shard| shard_digest(&shard.path, &progress)).collect());
    progress.finish();
    for (shard, outcome) in todo.iter().zip(outcomes) {
        let from = shard.digest.from;
        *report.by.entry(from).or_default() += 1;
        match outcome {
            Ok(digest) => {
                report.bytes += shard.size;
                if digest == shard.digest.digest {
                    report.equal += 1;
                    continue;
                }
                let problem =
                    format!("expected SHA-256 {} ({from}), found {digest}", shard.digest.digest);
                found.differs(&Error::mismatch(problem).in_file(&shard.path));
            }
            Err(error) => found.differs(&error),
        }
    }
    report
}

/// What the folder's layout says, else what the release is known to be.
fn published(
    path: &Path,
    record: &ShardRecord,
    config: Option<&ModelConfig>,
) -> Option<PublishedDigest> {
    let dir = path.parent()?;
    let by_layout = Layout::of(dir).published_digest(dir, &record.name);
    by_layout.or_else(|| {
        let shard = release::shard(config?, &record.name, record.size)?;
        Some(PublishedDigest { digest: shard.file_sha256, from: "table of the release" })
    })
}

fn shard_digest(path: &Path, progress: &Progress) -> Result<Digest, Error> {
    let mut hasher = Hasher::new();
    BlockReader::open(path, Pages::Drop)?.for_each_block(|_, block| {
        hasher.update(block);
        progress.add(block.len() as u64);
    })?;
    Ok(hasher.finish())
}

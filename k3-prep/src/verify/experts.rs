//! Are the experts in the shards still what they were, byte by byte?

use std::path::PathBuf;

use k3_formats::Error;
use k3_formats::container::Container;
use k3_formats::container::manifest::ShardRecord;
use k3_formats::tensor_name::expert_bytes;

use super::{ExpertsReport, Findings, Verification, shards};
use crate::block_reader::{BlockReader, Pages};
use crate::expert_sums::{Experts, Sum};
use crate::progress::Progress;

/// Reads every expert and compares its checksum, where the table has one.
pub(super) fn check(
    verification: &Verification<'_>,
    container: &Container,
    snapshots: &[PathBuf],
    found: &mut Findings,
) -> ExpertsReport {
    let open = |shard: &ShardRecord| {
        let place = shards::find(&shard.name, shard.size, snapshots);
        let path = place.unwrap_or_else(|| PathBuf::from(&shard.name));
        BlockReader::open(&path, Pages::Drop)
    };
    let experts = Experts {
        config: &container.config,
        table: &container.experts,
        shards: container.manifest.shards.iter().map(open).collect(),
    };
    let mut report = ExpertsReport::default();
    let all = experts.count();
    let bytes = all as u64 * expert_bytes(&container.config);
    let progress = Progress::start("read experts", bytes, verification.talk);
    let sums = verification.pool.install(|| experts.sums(0..all, &progress));
    progress.finish();
    for (i, sum) in sums.into_iter().enumerate() {
        report.read += 1;
        let (layer, expert) = experts.place(i);
        let recorded = container.experts.checksum(layer, expert);
        let sum = sum.map(|Sum { crc32, nan }| {
            nan.iter().for_each(|nan| found.differs(nan));
            crc32
        });
        match (sum, recorded) {
            (Err(error), _) => found.differs(&error),
            (Ok(sum), Some(recorded)) if sum == recorded => report.equal += 1,
            (Ok(_), None) => {}
            (Ok(sum), Some(recorded)) => {
                let part = k3_formats::tensor_name::ExpertPart::GatePacked;
                let (shard, offset) = container.experts.entry(layer, expert).part(part);
                let problem = format!(
                    "expected CRC-32 {recorded:08x} as at the conversion, found {sum:08x} at byte {offset}"
                );
                let name = &container.manifest.shards[shard].name;
                let item = format!("layer {layer} expert {expert}");
                found.differs(&Error::mismatch(problem).item(item).in_file(name));
            }
        }
    }
    if !container.experts.has_checksums() {
        found.note("the expert table has no checksums; `convert --hash-experts` records them");
    }
    report
}

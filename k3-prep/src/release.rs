//! What is known of the released weight files: sizes and digests.

use std::sync::LazyLock;

use k3_formats::config::ModelConfig;
use k3_formats::digest::Digest;

/// One weight file of the release.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReleasedShard {
    /// Name.
    pub(crate) name: &'static str,
    /// Size in bytes.
    pub(crate) size: u64,
    /// SHA-256 of the header's JSON bytes.
    pub(crate) header_sha256: Digest,
    /// SHA-256 of the file, as the publisher gives it.
    pub(crate) file_sha256: Digest,
}

static SHARDS: LazyLock<Vec<ReleasedShard>> = LazyLock::new(|| {
    let table = include_str!("../data/release-shards.tsv");
    table.lines().filter(|line| !line.starts_with('#')).filter_map(parse).collect()
});

fn parse(line: &'static str) -> Option<ReleasedShard> {
    let mut fields = line.split('\t');
    Some(ReleasedShard {
        name: fields.next()?,
        size: fields.next()?.parse().ok()?,
        header_sha256: fields.next()?.parse().ok()?,
        file_sha256: fields.next()?.parse().ok()?,
    })
}

/// The released file with this name and size, if the model has the release's dimensions.
pub(crate) fn shard(config: &ModelConfig, name: &str, size: u64) -> Option<&'static ReleasedShard> {
    let dims = (config.layers(), config.hidden, config.moe.experts, config.vocab);
    if dims != (93, 7168, 896, 163_840) {
        return None;
    }
    SHARDS.iter().find(|shard| shard.name == name && shard.size == size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_whole() {
        assert_eq!(SHARDS.len(), 96);
        // The size of all files that every list of the repository gives.
        assert_eq!(SHARDS.iter().map(|s| s.size).sum::<u64>(), 1_560_936_091_448);
        assert!(SHARDS.is_sorted_by_key(|s| s.name));
    }
}

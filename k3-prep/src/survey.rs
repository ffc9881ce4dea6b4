//! All shard headers of a snapshot, a few at a time: half a million tensors are seen
//! without being held.

use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::{Shard, Snapshot};
use k3_formats::{Error, Result};
use rayon::prelude::*;

/// Calls `visit` with every shard in order and its header, or why there is none.
pub(crate) fn for_each_header(
    snapshot: &Snapshot,
    mut visit: impl FnMut(usize, &Shard, Result<Header>),
) {
    let at_once = 2 * rayon::current_num_threads();
    for (group, shards) in snapshot.shards.chunks(at_once).enumerate() {
        let headers: Vec<_> = shards.par_iter().map(header_of).collect();
        for (i, (shard, header)) in shards.iter().zip(headers).enumerate() {
            visit(group * at_once + i, shard, header);
        }
    }
}

fn header_of(shard: &Shard) -> Result<Header> {
    match &shard.found {
        Ok(_) => Header::read(&shard.path),
        Err(why) => Err(Error::missing(format!("the shard is missing: {why}"))
            .in_file(&shard.path)
            .hint("finish the download, then run this again")),
    }
}

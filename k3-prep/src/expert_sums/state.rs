//! What hashing has found so far, so that a killed run does not read a terabyte again: one
//! line for each run of experts, with the shards they were read from as these were then.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use k3_formats::container::manifest::ShardRecord;
use k3_formats::{Error, Result};
use serde::{Deserialize, Serialize};

/// Name of the file in a work folder.
pub(crate) const SUMS_STATE_FILE: &str = "expert-sums.jsonl";

/// Longest file that is read, in bytes: thirty times the release's.
const MAX_STATE: u64 = 64 << 20;

/// Checksums of consecutive experts.
#[derive(Debug, Serialize, Deserialize)]
struct Line {
    /// Number of the first, counted through all layers.
    first: usize,
    sums: Vec<u32>,
    /// CRC-32 of `sums`: a checksum that was damaged here would accuse a good expert.
    crc32: u32,
    from: Vec<ShardRecord>,
}

/// The open file. Whoever writes it holds the lock of the work folder.
pub(super) struct SumsState {
    file: fs_err::File,
    path: PathBuf,
}

impl SumsState {
    /// Opens the file of the work folder `dir`; it is made if there is none.
    pub(super) fn open(dir: &Path) -> Result<Self> {
        let path = dir.join(SUMS_STATE_FILE);
        let mut options = fs_err::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(|e| Error::io(&path, "open", e))?;
        Ok(Self { file, path })
    }

    /// Puts what is known into `sums`, one place for each expert, if it was read from shards
    /// that are still as they were; what cannot be made sense of is left out, and read again.
    pub(super) fn restore(
        &mut self,
        sums: &mut [Option<u32>],
        shards: &[ShardRecord],
    ) -> Result<()> {
        let read = |e| Error::io(&self.path, "read", e);
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(0)).map_err(read)?;
        (&self.file).take(MAX_STATE).read_to_end(&mut bytes).map_err(read)?;
        // A killed run may have left half a line.
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        for line in bytes[..whole].split(|&b| b == b'\n') {
            let Ok(line) = serde_json::from_slice::<Line>(line) else { continue };
            let end = line.first.saturating_add(line.sums.len());
            let Some(places) = sums.get_mut(line.first..end) else { continue };
            if crc32(&line.sums) == line.crc32 && line.from.iter().all(|s| shards.contains(s)) {
                places.iter_mut().zip(line.sums).for_each(|(place, sum)| *place = Some(sum));
            }
        }
        let write = |e| Error::io(&self.path, "write", e);
        self.file.set_len(whole as u64).map_err(write)?;
        self.file.seek(SeekFrom::Start(whole as u64)).map_err(write)?;
        Ok(())
    }

    /// Adds the checksums of experts from number `first` on, which were read from `from`.
    pub(super) fn add(&mut self, first: usize, sums: &[u32], from: Vec<ShardRecord>) -> Result<()> {
        let line = Line { first, sums: sums.to_vec(), crc32: crc32(sums), from };
        let mut text = serde_json::to_vec(&line).expect("plain data serializes");
        text.push(b'\n');
        let write = |e| Error::io(&self.path, "write", e);
        self.file.write_all(&text).map_err(write)?;
        self.file.sync_data().map_err(write)
    }
}

fn crc32(sums: &[u32]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    sums.iter().for_each(|sum| hasher.update(&sum.to_le_bytes()));
    hasher.finalize()
}

#[cfg(test)]
mod tests {
    use k3_formats::digest::Digest;

    use super::*;

    #[test]
    fn only_what_is_whole_and_of_the_same_shards_is_restored() {
        let shard = |name: &str, modified_ns| ShardRecord {
            name: name.to_owned(),
            size: 9,
            modified_ns,
            header_sha256: Digest::of(b""),
        };
        let (a, b) = (shard("a", 1), shard("b", 1));
        let dir = tempfile::tempdir().unwrap();
        let mut state = SumsState::open(dir.path()).unwrap();
        state.restore(&mut [], &[]).unwrap();
        state.add(0, &[10, 11], vec![a.clone()]).unwrap();
        state.add(2, &[12], vec![a.clone(), b.clone()]).unwrap();
        state.add(4, &[14], vec![b]).unwrap();
        state.add(7, &[1; 9], vec![]).unwrap(); // more than there are
        state.add(usize::MAX, &[1], vec![]).unwrap();
        let path = dir.path().join(SUMS_STATE_FILE);
        let mut text = fs_err::read_to_string(&path).unwrap();
        text += "nonsense\n\n{\"first\":5,\"sums\":[1],\"crc32\":0,\"from\":[]}\n{\"first\":6";
        fs_err::write(&path, &text).unwrap();

        let mut sums = [None; 8];
        let mut state = SumsState::open(dir.path()).unwrap();
        state.restore(&mut sums, &[a.clone(), shard("b", 2)]).unwrap();
        assert_eq!(sums, [Some(10), Some(11), None, None, None, None, None, None]);
        // Half a line is cut off before anything is added.
        state.add(3, &[13], vec![a.clone()]).unwrap();
        drop(state);
        let mut sums = [None; 8];
        SumsState::open(dir.path()).unwrap().restore(&mut sums, &[a]).unwrap();
        assert_eq!(sums[3], Some(13));
    }
}

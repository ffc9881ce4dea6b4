//! Where every routed expert lies in the original shards.
//!
//! A binary file of fixed stride, mapped as it is: a runtime never parses a shard
//! header. Little-endian throughout.
//!
//! ```text
//! 0   "K3EXPERT"                     8 bytes
//! 8   version                        u32, 1
//! 12  flags                          u32; bit 0: checksums follow the entries
//! 16  first MoE layer, MoE layers    2 x u32
//! 24  experts per layer, stride      2 x u32, stride 64
//! 32  bytes of one expert            u64
//! 40  shards                         u32
//! 44  zero                           20 bytes
//! 64  entries, by layer then expert: six file offsets (u64), six shard numbers
//!     (u16), flags (u32; bit 0: the six parts are one run in stored order)
//! ... with checksums: one u32 per expert in the same order, the CRC-32 (of zlib) of its
//!     six parts in stored order
//! ```

use bytemuck::{Pod, Zeroable};

use crate::config::ModelConfig;
use crate::tensor_name::{ExpertPart, expert_bytes, expert_tensor_name};
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"K3EXPERT";
const VERSION: u32 = 1;
const HEADER: usize = size_of::<TableHeader>();
const STRIDE: usize = size_of::<ExpertEntry>();
const CONTIGUOUS: u32 = 1;
const CHECKSUMS: u32 = 1;
/// Where the header has its flags.
const FLAGS_AT: usize = 12;
const UNSET: u16 = u16::MAX;

/// Most shards a table can number.
pub const MAX_SHARDS: usize = UNSET as usize;

#[derive(Clone, Copy, Pod, Zeroable, PartialEq, Eq)]
#[repr(C)]
struct TableHeader {
    magic: [u8; 8],
    version: u32,
    flags: u32,
    first_layer: u32,
    layers: u32,
    experts: u32,
    stride: u32,
    expert_bytes: u64,
    shards: u32,
    zero: [u32; 5],
}

/// One expert: for each of its six parts the shard and the absolute file offset.
#[derive(Debug, Clone, Copy, Pod, Zeroable, PartialEq, Eq)]
#[repr(C)]
pub struct ExpertEntry {
    offsets: [u64; 6],
    shards: [u16; 6],
    flags: u32,
}

impl ExpertEntry {
    const EMPTY: Self = Self { offsets: [0; 6], shards: [UNSET; 6], flags: 0 };

    /// The entry of an expert whose parts are one run in a file numbered `shard`.
    ///
    /// # Panics
    /// `shard` is not below [`MAX_SHARDS`].
    pub fn in_run(config: &ModelConfig, shard: usize, offset: u64) -> Self {
        assert!(shard < MAX_SHARDS, "too many shards");
        let mut entry = Self { shards: [shard as u16; 6], flags: CONTIGUOUS, ..Self::EMPTY };
        let mut at = offset;
        for part in ExpertPart::ALL {
            entry.offsets[part as usize] = at;
            at += part.bytes(config);
        }
        entry
    }

    /// Shard number and absolute file offset of one part.
    pub fn part(&self, part: ExpertPart) -> (usize, u64) {
        (usize::from(self.shards[part as usize]), self.offsets[part as usize])
    }

    /// Shard number and file offset of the whole expert, if its parts are one run.
    pub fn run(&self) -> Option<(usize, u64)> {
        (self.flags & CONTIGUOUS != 0).then(|| self.part(ExpertPart::GatePacked))
    }

    fn is_one_run(&self, config: &ModelConfig) -> bool {
        let (shard, mut at) = self.part(ExpertPart::GatePacked);
        ExpertPart::ALL.into_iter().all(|part| {
            let here = self.part(part) == (shard, at);
            at = at.saturating_add(part.bytes(config));
            here
        })
    }
}

fn header(config: &ModelConfig, shards: usize) -> TableHeader {
    let u32 = |n: usize| u32::try_from(n).expect("config bounds it");
    let layers = config.moe_layers();
    TableHeader {
        magic: MAGIC,
        version: VERSION,
        flags: 0,
        first_layer: u32(layers.start),
        layers: u32(layers.len()),
        experts: u32(config.moe.experts),
        stride: u32(STRIDE),
        expert_bytes: expert_bytes(config),
        shards: u32(shards),
        zero: [0; 5],
    }
}

/// A table in the making.
#[derive(Debug)]
pub struct ExpertTableBuilder<'a> {
    config: &'a ModelConfig,
    entries: Vec<ExpertEntry>,
}

impl<'a> ExpertTableBuilder<'a> {
    /// A table with every place still unknown.
    pub fn new(config: &'a ModelConfig) -> Self {
        let entries = config.moe_layers().len() * config.moe.experts;
        Self { config, entries: vec![ExpertEntry::EMPTY; entries] }
    }

    /// Records a part; returns `false` if the config has no such expert.
    ///
    /// # Panics
    /// `shard` is not below [`MAX_SHARDS`].
    pub fn set(&mut self, layer: usize, expert: usize, part: ExpertPart, at: (usize, u64)) -> bool {
        let layers = self.config.moe_layers();
        if !layers.contains(&layer) || expert >= self.config.moe.experts {
            return false;
        }
        assert!(at.0 < MAX_SHARDS, "too many shards");
        let entry = &mut self.entries[(layer - layers.start) * self.config.moe.experts + expert];
        entry.shards[part as usize] = at.0 as u16;
        entry.offsets[part as usize] = at.1;
        true
    }

    /// Where a part was recorded, if it was.
    pub fn place(&self, layer: usize, expert: usize, part: ExpertPart) -> Option<(usize, u64)> {
        let layers = self.config.moe_layers();
        if !layers.contains(&layer) || expert >= self.config.moe.experts {
            return None;
        }
        let entry = &self.entries[(layer - layers.start) * self.config.moe.experts + expert];
        (entry.shards[part as usize] != UNSET).then(|| entry.part(part))
    }

    /// Names of the expert tensors that were never recorded, in order.
    pub fn missing(&self) -> Vec<String> {
        let first = self.config.moe_layers().start;
        let per_layer = self.config.moe.experts;
        let mut names = Vec::new();
        for (i, entry) in self.entries.iter().enumerate() {
            for part in ExpertPart::ALL {
                if entry.shards[part as usize] == UNSET {
                    names.push(expert_tensor_name(first + i / per_layer, i % per_layer, part));
                }
            }
        }
        names
    }

    /// How many experts are not one contiguous run.
    pub fn scattered(&self) -> usize {
        self.entries.iter().filter(|e| !e.is_one_run(self.config)).count()
    }

    /// The file's bytes.
    pub fn encode(mut self, shards: usize) -> Vec<u8> {
        for entry in &mut self.entries {
            entry.flags = if entry.is_one_run(self.config) { CONTIGUOUS } else { 0 };
        }
        let mut bytes = bytemuck::bytes_of(&header(self.config, shards)).to_vec();
        bytes.extend_from_slice(bytemuck::cast_slice(&self.entries));
        bytes
    }
}

/// The table with a checksum for each of its experts, in the order of the entries.
///
/// # Panics
/// `table` was not encoded, has checksums already, or there is another number of them.
pub fn with_checksums(mut table: Vec<u8>, checksums: &[u32]) -> Vec<u8> {
    assert_eq!(table.len(), HEADER + checksums.len() * STRIDE, "one checksum for each expert");
    table[FLAGS_AT..FLAGS_AT + 4].copy_from_slice(&CHECKSUMS.to_le_bytes());
    table.extend(checksums.iter().flat_map(|sum| sum.to_le_bytes()));
    table
}

/// The table as it was before it got checksums.
pub fn without_checksums(table: &[u8]) -> Vec<u8> {
    let mut table = table.to_vec();
    if table.get(FLAGS_AT..FLAGS_AT + 4) == Some(&CHECKSUMS.to_le_bytes()[..]) {
        let entries = (table.len() - HEADER.min(table.len())) / (STRIDE + 4);
        table.truncate(HEADER + entries * STRIDE);
        table[FLAGS_AT..FLAGS_AT + 4].fill(0);
    }
    table
}

/// A checked table over borrowed bytes, usually a mapping.
#[derive(Debug)]
pub struct ExpertTable<B> {
    bytes: B,
    first_layer: usize,
    experts: usize,
    entries: usize,
    has_checksums: bool,
}

impl<B: AsRef<[u8]>> ExpertTable<B> {
    /// Checks the header against the config and every place against the shard sizes.
    ///
    /// # Errors
    /// Another version or model, a wrong length, or a place outside its shard.
    pub fn new(bytes: B, config: &ModelConfig, shard_sizes: &[u64]) -> Result<Self> {
        let all = bytes.as_ref();
        if !all.as_ptr().cast::<ExpertEntry>().is_aligned() {
            return Err(Error::unsupported(
                "expected the table on a multiple of 8 bytes in memory",
            ));
        }
        let mut wanted = header(config, shard_sizes.len());
        let entries = config.moe_layers().len() * config.moe.experts;
        let has_checksums = all.get(FLAGS_AT..FLAGS_AT + 4) == Some(&CHECKSUMS.to_le_bytes()[..]);
        wanted.flags = if has_checksums { CHECKSUMS } else { 0 };
        let expected = HEADER + entries * (STRIDE + if has_checksums { 4 } else { 0 });
        if all.len() != expected {
            let problem = format!("expected {expected} bytes, found {}", all.len());
            return Err(Error::mismatch(problem).hint("convert the snapshot again"));
        }
        if all[..HEADER] != *bytemuck::bytes_of(&wanted) {
            return Err(Error::mismatch("expected the table of this model, version 1")
                .hint("convert the snapshot again"));
        }
        let (first_layer, experts) = (config.moe_layers().start, config.moe.experts);
        let table = Self { bytes, first_layer, experts, entries, has_checksums };
        table.check_places(config, shard_sizes)?;
        Ok(table)
    }

    fn check_places(&self, config: &ModelConfig, shard_sizes: &[u64]) -> Result<()> {
        let sizes = ExpertPart::ALL.map(|part| part.bytes(config));
        for (i, entry) in self.entries().iter().enumerate() {
            let fits = ExpertPart::ALL.iter().zip(sizes).all(|(&part, bytes)| {
                let (shard, offset) = entry.part(part);
                let end = offset.checked_add(bytes);
                shard_sizes.get(shard).is_some_and(|&size| end.is_some_and(|end| end <= size))
            });
            let flags_hold = entry.flags == u32::from(entry.is_one_run(config));
            if !fits || !flags_hold {
                let (layer, expert) = (self.first_layer + i / self.experts, i % self.experts);
                return Err(Error::malformed("its place is outside its shard")
                    .item(format!("layer {layer} expert {expert}"))
                    .hint("convert the snapshot again"));
            }
        }
        Ok(())
    }

    fn entries(&self) -> &[ExpertEntry] {
        bytemuck::cast_slice(&self.bytes.as_ref()[HEADER..][..self.entries * STRIDE])
    }

    /// Whether there is a checksum for each expert.
    pub fn has_checksums(&self) -> bool {
        self.has_checksums
    }

    /// The CRC-32 of an expert's six parts in stored order, if it was recorded.
    ///
    /// # Panics
    /// As [`ExpertTable::entry`].
    pub fn checksum(&self, layer: usize, expert: usize) -> Option<u32> {
        assert!(expert < self.experts, "expert {expert} of {}", self.experts);
        let number = (layer - self.first_layer) * self.experts + expert;
        let at = HEADER + self.entries * STRIDE + 4 * number;
        let bytes = self.bytes.as_ref().get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().expect("four bytes")))
    }

    /// The place of an expert.
    ///
    /// # Panics
    /// `layer` has no experts, or not that many.
    pub fn entry(&self, layer: usize, expert: usize) -> &ExpertEntry {
        assert!(expert < self.experts, "expert {expert} of {}", self.experts);
        &self.entries()[(layer - self.first_layer) * self.experts + expert]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::small;

    fn filled(config: &ModelConfig) -> ExpertTableBuilder<'_> {
        let mut table = ExpertTableBuilder::new(config);
        for layer in config.moe_layers() {
            let mut at = 100;
            for expert in 0..config.moe.experts {
                for part in ExpertPart::ALL {
                    assert!(table.set(layer, expert, part, (layer, at)));
                    at += part.bytes(config);
                }
            }
        }
        table
    }

    #[test]
    fn round_trip_and_contiguity() {
        let config = ModelConfig::parse(&small().to_string()).unwrap();
        let mut table = filled(&config);
        assert!(table.missing().is_empty());
        assert_eq!(table.scattered(), 0);
        table.set(2, 5, ExpertPart::UpScale, (0, 7));
        assert_eq!(table.scattered(), 1);
        let sizes = vec![1 << 20; 4];
        let read = ExpertTable::new(table.encode(4), &config, &sizes).unwrap();
        assert_eq!(read.entry(3, 1).run(), Some((3, 100 + expert_bytes(&config))));
        assert_eq!(*read.entry(3, 1), ExpertEntry::in_run(&config, 3, 100 + expert_bytes(&config)));
        assert_eq!(read.entry(2, 5).run(), None);
        assert_eq!(read.entry(2, 5).part(ExpertPart::UpScale), (0, 7));
    }

    #[test]
    fn checksums_come_and_go() {
        let config = ModelConfig::parse(&small().to_string()).unwrap();
        let sizes = vec![1 << 20; 4];
        let plain = filled(&config).encode(4);
        let sums: Vec<u32> = (0..36).map(|i| 7 * i).collect();
        let hashed = with_checksums(plain.clone(), &sums);
        let read = ExpertTable::new(hashed.clone(), &config, &sizes).unwrap();
        assert_eq!(read.checksum(1, 0), Some(0));
        assert_eq!(read.checksum(3, 11), Some(7 * 35));
        assert_eq!(read.entry(3, 1).run(), Some((3, 100 + expert_bytes(&config))));
        assert_eq!(without_checksums(&hashed), plain);
        assert_eq!(without_checksums(&plain), plain);
        let read = ExpertTable::new(plain.clone(), &config, &sizes).unwrap();
        assert!(!read.has_checksums() && read.checksum(3, 11).is_none());
        assert!(ExpertTable::new(&hashed[..plain.len()], &config, &sizes).is_err());
    }

    #[test]
    fn damage_is_found() {
        let config = ModelConfig::parse(&small().to_string()).unwrap();
        let sizes = vec![1 << 20; 4];
        let good = filled(&config).encode(4);
        let small_shards = vec![1 << 10; 4];
        let e = ExpertTable::new(good.clone(), &config, &small_shards).unwrap_err();
        assert!(e.to_string().starts_with("layer 1 expert 0: its place is outside"), "{e}");
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x80;
            // An offset may move within its shard unseen here: digests are for that.
            if at < HEADER || at % STRIDE >= 48 {
                assert!(ExpertTable::new(bad, &config, &sizes).is_err(), "byte {at}");
            }
        }
        assert!(ExpertTable::new(&good[..good.len() - 1], &config, &sizes).is_err());
    }

    #[test]
    fn unknown_experts_are_not_recorded() {
        let config = ModelConfig::parse(&small().to_string()).unwrap();
        let mut table = ExpertTableBuilder::new(&config);
        assert!(!table.set(0, 0, ExpertPart::GatePacked, (0, 0)));
        assert!(!table.set(1, 12, ExpertPart::GatePacked, (0, 0)));
        assert_eq!(table.missing().len(), 3 * 12 * 6);
    }
}

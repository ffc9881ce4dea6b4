//! A pack: the routed experts copied out of the shards, one bank file for each layer.
//!
//! In a bank expert `e` begins at byte `e * stride`, its six parts as they are stored, and
//! zeros fill up to the stride, which is whole pages. `pack.jsonl` says what the experts are
//! a copy of in its first line, and in one further line for each bank that is complete: so
//! the same file lets a killed copy go on and tells a reader that all is there.

use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::config::ModelConfig;
use crate::container::manifest::ShardRecord;
use crate::digest::Digest;
use crate::snapshot::Source;
use crate::tensor_name::expert_bytes;
use crate::{Error, Result, text_file};

/// Name of the list of banks in a pack.
pub const PACK_FILE: &str = "pack.jsonl";

/// Version of the pack format this code reads and writes.
pub const PACK_VERSION: u32 = 1;

/// Experts begin on multiples of this many bytes.
pub const PAGE: u64 = 4096;

/// Longest list that is read, in bytes: a hundred times the release's.
pub const MAX_PACK: u64 = 64 << 20;

/// Most layers with experts: forty times the release's.
const MAX_LAYERS: usize = 4096;

/// Name of the bank with the experts of `layer`.
pub fn bank_name(layer: usize) -> String {
    format!("experts-layer-{layer:03}.bank")
}

/// What the experts of a pack are a copy of, and how they lie in its banks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PackHeader {
    /// [`PACK_VERSION`] of the writer.
    pub pack_version: u32,
    /// Repository and revision of the snapshot.
    pub source: Source,
    /// First layer with experts.
    pub first_layer: usize,
    /// Layers with experts, and banks.
    pub layers: usize,
    /// Experts in a bank.
    pub experts: usize,
    /// Bytes of an expert.
    pub expert_bytes: u64,
    /// Bytes from the beginning of one expert to that of the next.
    pub stride: u64,
    /// The shards the experts came from, in name order.
    pub shards: Vec<ShardRecord>,
}

impl PackHeader {
    /// The pack of a model's experts from these shards.
    pub fn new(config: &ModelConfig, source: &Source, shards: &[ShardRecord]) -> Self {
        let bytes = expert_bytes(config);
        Self {
            pack_version: PACK_VERSION,
            source: source.clone(),
            first_layer: config.moe_layers().start,
            layers: config.moe_layers().len(),
            experts: config.moe.experts,
            expert_bytes: bytes,
            stride: bytes.next_multiple_of(PAGE),
            shards: shards.to_vec(),
        }
    }

    /// Bytes of a bank.
    pub fn bank_bytes(&self) -> u64 {
        self.experts as u64 * self.stride
    }

    /// Layers with experts.
    pub fn layer_range(&self) -> std::ops::Range<usize> {
        self.first_layer..self.first_layer + self.layers
    }

    /// How this pack differs from that of another model or other shards. Times of change are
    /// left out: they may be another copy's.
    pub fn difference(&self, wanted: &Self) -> Option<String> {
        if self.pack_version != wanted.pack_version {
            let (want, found) = (wanted.pack_version, self.pack_version);
            return Some(format!("expected version {want}, found {found}"));
        }
        let shape = |h: &Self| (h.first_layer, h.layers, h.experts, h.expert_bytes, h.stride);
        if shape(self) != shape(wanted) {
            return Some("the experts of another model".to_owned());
        }
        let same = |a: &ShardRecord, b: &ShardRecord| {
            (&a.name, a.size, a.header_sha256) == (&b.name, b.size, b.header_sha256)
        };
        let (old, new) = (&self.shards, &wanted.shards);
        if let Some((shard, _)) = old.iter().zip(new).find(|(old, new)| !same(old, new)) {
            return Some(format!("copied from another {}", shard.name));
        }
        (old.len() != new.len())
            .then(|| format!("copied from {} shards, expected {}", old.len(), new.len()))
    }

    /// Whether the shards had the times of change that `wanted` has.
    pub fn same_times(&self, wanted: &Self) -> bool {
        let times = |h: &Self| h.shards.iter().map(|s| s.modified_ns).collect::<Vec<_>>();
        times(self) == times(wanted)
    }
}

/// A bank that is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BankRecord {
    /// Layer of its experts.
    pub layer: usize,
    /// Its name, [`bank_name`] of the layer.
    pub name: String,
    /// Size in bytes.
    pub size: u64,
    /// SHA-256 of the whole file.
    pub sha256: Digest,
    /// CRC-32 (of zlib) of every expert, fillers left out.
    pub crc32: Checksums,
}

/// A CRC-32 for each expert of a bank; eight lower-case hex digits each in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checksums(pub Vec<u32>);

impl Serialize for Checksums {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        use std::fmt::Write;
        let mut hex = String::with_capacity(8 * self.0.len());
        for sum in &self.0 {
            let _ = write!(hex, "{sum:08x}");
        }
        s.serialize_str(&hex)
    }
}

impl<'de> Deserialize<'de> for Checksums {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let hex = std::borrow::Cow::<str>::deserialize(d)?;
        let digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if !hex.bytes().all(digit) || !hex.len().is_multiple_of(8) {
            return Err(serde::de::Error::custom("expected eight lower-case hex digits a sum"));
        }
        let sum = |at: usize| u32::from_str_radix(&hex[at..at + 8], 16).expect("hex digits");
        Ok(Self((0..hex.len()).step_by(8).map(sum).collect()))
    }
}

/// A pack, as far as it is complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pack {
    /// What it is a copy of.
    pub header: PackHeader,
    /// The banks that are complete, each layer at most once, in the order they were written.
    pub banks: Vec<BankRecord>,
}

impl Pack {
    /// Reads the list in the folder `dir`, if there is one; half a line at its end, which a
    /// killed copy leaves, is not read.
    ///
    /// # Errors
    /// It is no such list, it is of another version, or a bank is not what the header says.
    pub fn read(dir: &Path) -> Result<Option<Self>> {
        let path = dir.join(PACK_FILE);
        if fs_err::symlink_metadata(&path).is_err() {
            return Ok(None);
        }
        let text = text_file::read_bytes(&path, MAX_PACK)?;
        let (_, pack) = Self::parse(&text).map_err(|e| e.in_file(&path))?;
        pack.map(Some).ok_or_else(|| Error::missing("no whole line").in_file(&path))
    }

    /// Parses a list: the length of its whole lines, and what they say if there are any.
    ///
    /// # Errors
    /// As [`Pack::read`].
    pub fn parse(text: &[u8]) -> Result<(u64, Option<Self>)> {
        #[derive(Deserialize)]
        struct Version {
            pack_version: u32,
        }
        let whole = text.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        let mut lines = text[..whole].split_inclusive(|&b| b == b'\n').enumerate();
        let Some((_, first)) = lines.next() else { return Ok((whole as u64, None)) };
        let damaged = |line: usize, why: &dyn std::fmt::Display| {
            Error::malformed(format!("the list of banks is damaged: {why}"))
                .item(format!("line {}", line + 1))
                .hint("remove it, and `k3-prep convert --experts pack` copies all experts again")
        };
        let version: Version = serde_json::from_slice(first).map_err(|e| damaged(0, &e))?;
        if version.pack_version != PACK_VERSION {
            let found = version.pack_version;
            return Err(Error::unsupported(format!(
                "expected version {PACK_VERSION}, found {found}"
            ))
            .hint("use the k3 that wrote this pack, or copy the experts again"));
        }
        let header: PackHeader = serde_json::from_slice(first).map_err(|e| damaged(0, &e))?;
        let end = header.first_layer.checked_add(header.layers);
        let bank_bytes = (header.experts as u64).checked_mul(header.stride);
        let (Some(_), Some(bank_bytes), true) = (end, bank_bytes, header.layers <= MAX_LAYERS)
        else {
            return Err(damaged(0, &"its sizes are out of bounds"));
        };
        let mut pack = Self { header, banks: Vec::new() };
        for (number, line) in lines {
            let bank: BankRecord = serde_json::from_slice(line).map_err(|e| damaged(number, &e))?;
            let known = pack.header.layer_range().contains(&bank.layer)
                && bank.name == bank_name(bank.layer)
                && bank.size == bank_bytes
                && bank.crc32.0.len() == pack.header.experts;
            if !known || pack.bank(bank.layer).is_some() {
                return Err(damaged(number, &"not a bank of this pack, or one that was before"));
            }
            pack.banks.push(bank);
        }
        Ok((whole as u64, Some(pack)))
    }

    /// The bank of a layer.
    pub fn bank(&self, layer: usize) -> Option<&BankRecord> {
        self.banks.iter().find(|bank| bank.layer == layer)
    }

    /// The banks by layer, if all are there.
    ///
    /// # Errors
    /// Some are not complete: says how many.
    pub fn complete(&self) -> Result<Vec<&BankRecord>> {
        let banks: Vec<_> =
            self.header.layer_range().filter_map(|layer| self.bank(layer)).collect();
        if banks.len() == self.header.layers {
            return Ok(banks);
        }
        let problem = format!("expected {} banks, found {}", self.header.layers, banks.len());
        Err(Error::missing(problem).item(PACK_FILE).hint(
            "run the same `k3-prep convert --experts pack` again; it goes on where it stopped",
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::tests::small;

    fn header() -> PackHeader {
        let config = ModelConfig::parse(&small().to_string()).unwrap();
        let shard = ShardRecord {
            name: "a.safetensors".into(),
            size: 7,
            modified_ns: 1,
            header_sha256: Digest::of(b"a"),
        };
        PackHeader::new(&config, &Source::default(), &[shard])
    }

    fn text(header: &PackHeader, layers: std::ops::Range<usize>) -> Vec<u8> {
        let mut text = serde_json::to_vec(header).unwrap();
        text.push(b'\n');
        for layer in layers {
            let crc32 = Checksums((0..header.experts as u32).map(|i| i << 20 | 3).collect());
            let (name, size) = (bank_name(layer), header.bank_bytes());
            let bank = BankRecord { layer, name, size, sha256: Digest::of(b"b"), crc32 };
            text.extend(serde_json::to_vec(&bank).unwrap());
            text.push(b'\n');
        }
        text
    }

    #[test]
    fn half_a_line_is_left_out_and_a_part_is_said_to_be_one() {
        let header = header();
        let whole = text(&header, 1..4);
        let (len, pack) = Pack::parse(&whole).unwrap();
        let pack = pack.unwrap();
        assert_eq!((len, pack.complete().unwrap().len()), (whole.len() as u64, 3));
        assert_eq!(pack.header, header);
        assert_eq!(pack.bank(2).unwrap().crc32.0[5], 5 << 20 | 3);
        let (len, pack) = Pack::parse(&whole[..whole.len() - 1]).unwrap();
        assert_eq!(len, text(&header, 1..3).len() as u64);
        let e = pack.unwrap().complete().unwrap_err();
        assert_eq!(e.to_string(), "pack.jsonl: expected 3 banks, found 2");
        assert_eq!(Pack::parse(b"{\"pack").unwrap(), (0, None));
    }

    #[test]
    fn what_does_not_belong_is_refused() {
        let header = header();
        for layers in [0..1, 4..5] {
            assert!(Pack::parse(&text(&header, layers)).is_err());
        }
        let mut twice = text(&header, 1..2);
        let bank = text(&header, 1..2).split_off(text(&header, 0..0).len());
        twice.extend(&bank);
        assert!(Pack::parse(&twice).is_err());
        for change in ["\"size\"", "\"crc32\":\"", "\"layer\""] {
            let text = String::from_utf8(text(&header, 1..2)).unwrap();
            let broken = text.replacen(change, &format!("{change}9"), 1);
            assert!(Pack::parse(broken.as_bytes()).is_err(), "{change}");
        }
        let mut other = header.clone();
        other.pack_version = 2;
        let e = Pack::parse(&text(&other, 1..2)).unwrap_err();
        assert_eq!(e.to_string(), "expected version 1, found 2");
        other = header.clone();
        other.experts = usize::MAX;
        assert!(Pack::parse(&text(&other, 0..0)).is_err());
        other = header.clone();
        other.layers = usize::MAX >> 1;
        assert!(Pack::parse(&text(&other, 0..0)).is_err(), "nobody counts that far");
    }

    #[test]
    fn a_pack_of_other_shards_is_told_apart() {
        let header = header();
        let mut other = header.clone();
        other.shards[0].modified_ns = 2;
        assert!(header.difference(&other).is_none() && !header.same_times(&other));
        other.shards[0].header_sha256 = Digest::of(b"x");
        assert_eq!(header.difference(&other).unwrap(), "copied from another a.safetensors");
        other.shards.clear();
        assert_eq!(header.difference(&other).unwrap(), "copied from 1 shards, expected 0");
        other.experts += 1;
        assert_eq!(header.difference(&other).unwrap(), "the experts of another model");
    }
}

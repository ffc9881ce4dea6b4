//! The base vocabulary: token bytes by id, and ids by bytes.

use std::hash::Hasher;

use rustc_hash::FxHasher;

use crate::error::{Error, Result};

/// Longest token accepted, in bytes; the released vocabulary's longest has 256.
pub(super) const MAX_TOKEN_BYTES: usize = 1024;
/// Most base tokens accepted; the released vocabulary has 163,584.
pub(super) const MAX_TOKENS: usize = (1 << ID_BITS) - 1;

/// Tokens in one buffer, found by bytes through one open-addressed table: a map would
/// need an allocation for each of 163,584 keys every time the program starts.
pub(super) struct Vocabulary {
    bytes: Vec<u8>,
    /// `ends[id]` is where token `id` ends in `bytes`, and the next one starts.
    ends: Vec<u32>,
    /// Linear probing, a power of two, at most two thirds full; `EMPTY` or hash bits
    /// above an id. Small, because filling it is mostly page faults and cache misses.
    slots: Vec<u32>,
    byte_ids: [u32; 256],
    longest: usize,
}

const ID_BITS: u32 = 20;
const ID_MASK: u32 = (1 << ID_BITS) - 1;
/// No slot in use: its id would be above the last possible one.
const EMPTY: u32 = u32::MAX;

/// Refuses a number of base tokens that ids have no room for.
pub(super) fn check_size(base_vocab: usize) -> Result<()> {
    if base_vocab > MAX_TOKENS {
        return Err(Error::unsupported(format!(
            "a base vocabulary of {base_vocab} tokens, at most {MAX_TOKENS} are supported"
        )));
    }
    Ok(())
}

/// Why a list of tokens is no vocabulary.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Flaw {
    /// Two ids, ascending, have the same bytes.
    Same(u32, u32),
    /// No token is this byte alone, so some text could not be encoded.
    NoByte(u8),
}

impl Vocabulary {
    /// Tokens of `bytes`, ending at `ends`: ascending, the last at the end of `bytes`,
    /// none empty. The callers have checked that and the limits above.
    pub(super) fn new(bytes: Vec<u8>, ends: Vec<u32>) -> Result<Self, Flaw> {
        let capacity = (ends.len() * 3 / 2 + 1).next_power_of_two();
        let mut vocabulary =
            Self { bytes, ends, slots: vec![EMPTY; capacity], byte_ids: [0; 256], longest: 0 };
        for id in 0..vocabulary.ends.len() as u32 {
            let token = vocabulary.token(id).unwrap_or_default();
            let (hash, len) = (hash(token), token.len());
            match vocabulary.probe(token, hash) {
                Ok(first) => return Err(Flaw::Same(first, id)),
                Err(slot) => vocabulary.slots[slot] = tag(hash) | id,
            }
            vocabulary.longest = vocabulary.longest.max(len);
        }
        for byte in 0..=255 {
            vocabulary.byte_ids[byte as usize] =
                vocabulary.id(&[byte]).ok_or(Flaw::NoByte(byte))?;
        }
        Ok(vocabulary)
    }

    /// Number of base tokens.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The bytes of base token `id`.
    pub(super) fn token(&self, id: u32) -> Option<&[u8]> {
        let end = *self.ends.get(id as usize)? as usize;
        let start = match id.checked_sub(1) {
            Some(before) => self.ends[before as usize] as usize,
            None => 0,
        };
        Some(&self.bytes[start..end])
    }

    /// The base token that is exactly `bytes`.
    pub(super) fn id(&self, bytes: &[u8]) -> Option<u32> {
        if bytes.len() > self.longest {
            return None;
        }
        self.probe(bytes, hash(bytes)).ok()
    }

    /// The token of one byte; there is one for each.
    pub(super) fn byte_id(&self, byte: u8) -> u32 {
        self.byte_ids[byte as usize]
    }

    /// All token bytes, in the order of their ids.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The id of `token`, or the free slot where it belongs.
    fn probe(&self, token: &[u8], hash: u64) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        loop {
            let slot = self.slots[at];
            if slot == EMPTY {
                return Err(at);
            }
            let id = slot & ID_MASK;
            if slot & !ID_MASK == tag(hash) && self.token(id) == Some(token) {
                return Ok(id);
            }
            at = (at + 1) & mask;
        }
    }
}

/// The hash bits that are kept beside an id, so that most slots of other tokens are
/// passed over without looking at their bytes.
fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32 & !ID_MASK
}

fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = FxHasher::default();
    hasher.write(bytes);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn build(tokens: &[&[u8]]) -> Result<Vocabulary, Flaw> {
        let mut bytes = Vec::new();
        let mut ends = Vec::new();
        for token in tokens {
            bytes.extend_from_slice(token);
            ends.push(bytes.len() as u32);
        }
        Vocabulary::new(bytes, ends)
    }

    fn single_bytes() -> Vec<Vec<u8>> {
        (0..=255u8).rev().map(|b| vec![b]).collect()
    }

    #[test]
    fn finds_what_it_holds_and_nothing_else() {
        let mut tokens = single_bytes();
        tokens.extend((0..2000u32).map(|n| format!("t{n}").into_bytes()));
        let views: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        let vocabulary = build(&views).unwrap();
        assert_eq!(vocabulary.len(), tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            assert_eq!(vocabulary.id(token), Some(id as u32));
            assert_eq!(vocabulary.token(id as u32), Some(token.as_slice()));
        }
        assert_eq!(vocabulary.byte_id(b'A'), 255 - u32::from(b'A'));
        assert_eq!(vocabulary.id(b"t2000"), None);
        assert_eq!(vocabulary.id(b""), None);
        assert_eq!(vocabulary.id(&[b't'; 5000]), None);
        assert_eq!(vocabulary.token(tokens.len() as u32), None);
        assert_eq!(vocabulary.token(u32::MAX), None);
    }

    #[test]
    fn names_what_is_wrong() {
        let mut tokens = single_bytes();
        tokens.remove(255 - 0x41);
        let views: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        assert_eq!(build(&views).err(), Some(Flaw::NoByte(0x41)));

        tokens = single_bytes();
        tokens.extend([b"ab".to_vec(), b"bc".to_vec(), b"ab".to_vec()]);
        let views: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        assert_eq!(build(&views).err(), Some(Flaw::Same(256, 258)));
    }
}

//! The prepared form of a tokenizer: `tokenizer.bin`, version 1.
//!
//! It holds what `tiktoken.model` and `tokenizer_config.json` say, without base64, decimal
//! numbers or JSON. All integers are little-endian; `n` is the number of base tokens.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 8 | the ASCII letters `K3TOKENS` |
//! | 8 | 4 | u32: version, 1 |
//! | 12 | 4 | u32: `n`, at most 1,048,575 |
//! | 16 | 4 | u32: `b`, the bytes of all texts together |
//! | 20 | 12 | three u32: the ids of the bos, eos and pad token, 0xFFFFFFFF for none |
//! | 32 | 2(n + 256) | u16 each: length of the text of every id in bytes, 1 to 1024 |
//! | 32 + 2(n + 256) | 256 | u8 each: 1 if the special id `n + i` is flagged `special`, else 0 |
//! | 288 + 2(n + 256) | b | the texts in the order of their ids, without separators |
//! | 288 + 2(n + 256) + b | 32 | SHA-256 of all bytes before |
//!
//! Nothing else follows. The texts of the first `n` ids are bytes, all different, among
//! them each single byte; those of the 256 special ids are UTF-8, and none starts with
//! another. The split pattern and the merge rule are fixed by the version.

use sha2::{Digest, Sha256};

use super::special::{Roles, SPECIAL_SLOTS, Slot, SpecialTokens};
use super::vocabulary::{Flaw, MAX_TOKEN_BYTES, MAX_TOKENS, Vocabulary, check_size};
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"K3TOKENS";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 32;
const DIGEST_BYTES: usize = 32;
const NO_ID: u32 = u32::MAX;
const HINT: &str = "convert the snapshot again";

/// Most bytes that a prepared tokenizer within the limits can have.
pub(super) const MAX_FILE_BYTES: u64 =
    file_bytes(MAX_TOKENS, MAX_TOKEN_BYTES * (MAX_TOKENS + SPECIAL_SLOTS)) as u64;

/// The file's bytes.
pub(super) fn write(vocabulary: &Vocabulary, specials: &SpecialTokens, roles: Roles) -> Vec<u8> {
    let slots = specials.slots();
    let names: usize = slots.iter().map(|slot| slot.name.len()).sum();
    let text_bytes = vocabulary.bytes().len() + names;

    let mut file = Vec::with_capacity(file_bytes(vocabulary.len(), text_bytes));
    file.extend_from_slice(MAGIC);
    let ids = [roles.bos, roles.eos, roles.pad].map(|id| id.unwrap_or(NO_ID));
    for value in [VERSION, vocabulary.len() as u32, text_bytes as u32].into_iter().chain(ids) {
        file.extend_from_slice(&value.to_le_bytes());
    }
    let tokens = (0..vocabulary.len() as u32).filter_map(|id| vocabulary.token(id));
    for text in tokens.chain(slots.iter().map(|slot| slot.name.as_bytes())) {
        file.extend_from_slice(&(text.len() as u16).to_le_bytes());
    }
    file.extend(slots.iter().map(|slot| u8::from(slot.special)));
    file.extend_from_slice(vocabulary.bytes());
    for slot in slots {
        file.extend_from_slice(slot.name.as_bytes());
    }
    let digest = Sha256::digest(&file);
    file.extend_from_slice(&digest);
    file
}

/// Reads what [`write`] wrote.
///
/// # Errors
/// Any byte that differs from the layout above; nothing is allocated that the length of
/// `file` does not bound.
pub(super) fn read(file: &[u8]) -> Result<(Vocabulary, SpecialTokens, Roles)> {
    let Some((header, rest)) = file.split_at_checked(HEADER_BYTES) else {
        return Err(damaged(format!(
            "expected at least {HEADER_BYTES} bytes, found {}",
            file.len()
        )));
    };
    if !header.starts_with(MAGIC) {
        return Err(Error::malformed("not a prepared tokenizer").hint(HINT));
    }
    let field = |at: usize| u32::from_le(bytemuck::pod_read_unaligned(&header[at..at + 4]));
    let (version, base_vocab, text_bytes) = (field(8), field(12) as usize, field(16) as usize);
    let roles = [20, 24, 28].map(field);
    if version != VERSION {
        return Err(Error::unsupported(format!("expected version {VERSION}, found {version}"))
            .hint("convert the snapshot with the k3-prep that belongs to this program"));
    }
    check_size(base_vocab)?;
    let expected = file_bytes(base_vocab, text_bytes);
    if file.len() != expected {
        return Err(damaged(format!("expected {expected} bytes, found {}", file.len())));
    }
    let (body, digest) = file.split_at(file.len() - DIGEST_BYTES);
    if Sha256::digest(body).as_slice() != digest {
        return Err(damaged("the SHA-256 at the end is not that of the bytes before".to_owned()));
    }

    let (lengths, rest) = rest.split_at(2 * (base_vocab + SPECIAL_SLOTS));
    let (flags, rest) = rest.split_at(SPECIAL_SLOTS);
    let texts = &rest[..text_bytes];
    let mut ends = Vec::with_capacity(base_vocab + SPECIAL_SLOTS);
    let mut end = 0usize;
    for (id, length) in lengths.chunks_exact(2).enumerate() {
        let length = usize::from(u16::from_le_bytes([length[0], length[1]]));
        if !(1..=MAX_TOKEN_BYTES).contains(&length) {
            return Err(damaged(format!(
                "id {id}: expected a text of 1 to {MAX_TOKEN_BYTES} bytes, found {length}"
            )));
        }
        end += length;
        ends.push(end as u32);
    }
    if end != text_bytes {
        return Err(damaged(format!("expected {text_bytes} bytes of texts, found {end}")));
    }

    let name_ends = ends.split_off(base_vocab);
    let names_start = ends.last().map_or(0, |&end| end as usize);
    let specials = read_specials(base_vocab as u32, texts, names_start, &name_ends, flags)?;
    let vocabulary = Vocabulary::new(texts[..names_start].to_vec(), ends).map_err(|flaw| {
        damaged(match flaw {
            Flaw::Same(a, b) => format!("ids {a} and {b} have the same bytes"),
            Flaw::NoByte(byte) => format!("no token is the single byte {byte:#04x}"),
        })
    })?;
    let [bos, eos, pad] = roles.map(|id| (id != NO_ID).then_some(id));
    for (role, id) in [("bos", bos), ("eos", eos), ("pad", pad)] {
        if let Some(id) = id.filter(|&id| specials.slot(id).is_none()) {
            return Err(damaged(format!("the {role} token {id} is not a special id")));
        }
    }
    Ok((vocabulary, specials, Roles { bos, eos, pad }))
}

fn read_specials(
    first_id: u32,
    texts: &[u8],
    mut start: usize,
    ends: &[u32],
    flags: &[u8],
) -> Result<SpecialTokens> {
    let mut slots = Vec::with_capacity(SPECIAL_SLOTS);
    for ((&end, &flag), id) in ends.iter().zip(flags).zip(first_id..) {
        let name = std::str::from_utf8(&texts[start..end as usize])
            .map_err(|_| damaged(format!("the name of special id {id} is not UTF-8")))?;
        if flag > 1 {
            return Err(damaged(format!("special id {id}: expected flag 0 or 1, found {flag}")));
        }
        slots.push(Slot { name: name.to_owned(), special: flag == 1 });
        start = end as usize;
    }
    SpecialTokens::new(first_id, slots)
}

/// Length of the file for `base_vocab` tokens and `text_bytes` of texts.
const fn file_bytes(base_vocab: usize, text_bytes: usize) -> usize {
    HEADER_BYTES + 2 * (base_vocab + SPECIAL_SLOTS) + SPECIAL_SLOTS + text_bytes + DIGEST_BYTES
}

fn damaged(problem: String) -> Error {
    Error::malformed(problem).hint(HINT)
}

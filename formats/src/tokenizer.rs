//! Text ↔ token ids, by the rules of Kimi's `TikTokenTokenizer`.
//!
//! [`Tokenizer::encode`] cuts the text into windows (400,000 code points, runs of 25,000),
//! finds special tokens if asked to, splits the rest by the pattern and turns each piece
//! into ids by rank BPE. It cannot fail and takes time proportional to the text, but for
//! a logarithm within one piece.
//!
//! # Why the merge loop is our own
//! The crate tiktoken-rs implements the same rules and is the judge of this module:
//! `k3-prep` compares both on every vocabulary it converts, and so do the tests. It is not
//! used at run time, because its `CoreBPE::new` takes 92 ms and 45 MB for this
//! vocabulary, which is as much as the whole cold start may take; because its regular
//! expressions backtrack, and so panic on long runs of white space; and because it offers
//! no way to share a vocabulary that is already in memory. What is needed here is one
//! hash table over the tokens' bytes, filled in milliseconds, and the loop of `merge.rs`.

mod merge;
mod prepared;
mod ranks;
mod special;
mod split;
mod stream;
mod vocabulary;

use std::path::Path;

use crate::error::Result;
use crate::text_file;
use merge::Merger;
use special::{Roles, SpecialTokens};
use vocabulary::Vocabulary;

pub use special::SPECIAL_SLOTS;

/// Special tokens without which there is no chat format: the end of a message, and what tags
/// are made of.
pub const CHAT_TOKENS: [&str; 4] = ["<|end_of_msg|>", "<|open|>", "<|close|>", "<|sep|>"];
pub use split::{PATTERN, Pieces, pieces};
pub use stream::StreamDecoder;

/// Longest `tiktoken.model` read, in bytes; the released one has 2,795,286.
const MAX_MODEL_BYTES: u64 = 1 << 28;
/// Longest `tokenizer_config.json` read, in bytes; the released one has 3,478.
const MAX_CONFIG_BYTES: u64 = 1 << 22;

/// What a special token's name in a text means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// The special token: for text that its writer may control the model with.
    Recognize,
    /// Ordinary text: for everything a user or a tool has written.
    Text,
}

/// A base vocabulary with its 256 special tokens; immutable, to be shared by reference.
pub struct Tokenizer {
    vocabulary: Vocabulary,
    specials: SpecialTokens,
    roles: Roles,
    eos_ids: Vec<u32>,
}

impl Tokenizer {
    /// Reads a snapshot's `tiktoken.model` and `tokenizer_config.json`; `base_vocab` is
    /// the `vocab_size` of its `config.json` less [`SPECIAL_SLOTS`].
    ///
    /// # Errors
    /// A file that is missing, too large or malformed, and a vocabulary that is not
    /// exactly the ranks `0..base_vocab` with every single byte among them.
    pub fn from_snapshot_files(
        tiktoken_model: &Path,
        tokenizer_config: &Path,
        base_vocab: usize,
    ) -> Result<Self> {
        let model = text_file::downloaded_bytes(tiktoken_model, MAX_MODEL_BYTES)?;
        let config = text_file::downloaded_bytes(tokenizer_config, MAX_CONFIG_BYTES)?;
        let vocabulary = ranks::parse(&model, base_vocab).map_err(|e| e.in_file(tiktoken_model))?;
        let (specials, roles) =
            special::parse_config(&config, base_vocab).map_err(|e| e.in_file(tokenizer_config))?;
        Ok(Self::new(vocabulary, specials, roles))
    }

    /// [`from_snapshot_files`](Self::from_snapshot_files) on the contents of the files.
    ///
    /// # Errors
    /// As there; the messages name no file.
    pub fn from_snapshot_bytes(
        tiktoken_model: &[u8],
        tokenizer_config: &[u8],
        base_vocab: usize,
    ) -> Result<Self> {
        let vocabulary = ranks::parse(tiktoken_model, base_vocab)?;
        let (specials, roles) = special::parse_config(tokenizer_config, base_vocab)?;
        Ok(Self::new(vocabulary, specials, roles))
    }

    /// Opens a tokenizer that [`write_prepared`](Self::write_prepared) made, in a few
    /// milliseconds. Its SHA-256 is checked.
    ///
    /// # Errors
    /// A file that is missing or not exactly of the prepared form.
    pub fn open_prepared(path: &Path) -> Result<Self> {
        let file = text_file::read_bytes(path, prepared::MAX_FILE_BYTES)?;
        Self::from_prepared_bytes(&file).map_err(|e| e.in_file(path))
    }

    /// [`open_prepared`](Self::open_prepared) on the contents of the file.
    ///
    /// # Errors
    /// As there; the message names no file.
    pub fn from_prepared_bytes(file: &[u8]) -> Result<Self> {
        let (vocabulary, specials, roles) = prepared::read(file)?;
        Ok(Self::new(vocabulary, specials, roles))
    }

    /// The prepared form, as bytes of a file. Equal tokenizers give equal bytes.
    pub fn write_prepared(&self) -> Vec<u8> {
        prepared::write(&self.vocabulary, &self.specials, self.roles)
    }

    fn new(vocabulary: Vocabulary, specials: SpecialTokens, roles: Roles) -> Self {
        split::warm_up();
        Self { vocabulary, specials, roles, eos_ids: roles.eos.into_iter().collect() }
    }

    /// The ids of `text`. No id is added in front or behind.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 4);
        let mut merger = Merger::default();
        for window in split::windows(text) {
            let mut at = 0;
            if specials == Specials::Recognize {
                while let Some((start, end, id)) = self.specials.find(window, at) {
                    self.encode_ordinary(&window[at..start], &mut merger, &mut ids);
                    ids.push(id);
                    at = end;
                }
            }
            self.encode_ordinary(&window[at..], &mut merger, &mut ids);
        }
        ids
    }

    /// Encodes text without special tokens that no window boundary lies in.
    fn encode_ordinary(&self, text: &str, merger: &mut Merger, ids: &mut Vec<u32>) {
        for piece in split::pieces(text) {
            match self.vocabulary.id(piece.as_bytes()) {
                Some(id) => ids.push(id),
                None => merger.encode(&self.vocabulary, piece.as_bytes(), ids),
            }
        }
    }

    /// The text of `ids`: their bytes joined, U+FFFD for each maximal ill-formed part of
    /// them, and for each id outside the vocabulary. Special tokens appear by name.
    pub fn decode(&self, ids: &[u32]) -> String {
        // FF is in no character, so it becomes one U+FFFD of its own.
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| self.token_bytes(id).unwrap_or(b"\xff")).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes of one token, which need not be whole characters; for a special token
    /// the UTF-8 of its name.
    pub fn token_bytes(&self, id: u32) -> Option<&[u8]> {
        self.vocabulary.token(id).or_else(|| self.special_name(id).map(str::as_bytes))
    }

    /// The id of the base token with exactly these bytes.
    pub fn token_id(&self, bytes: &[u8]) -> Option<u32> {
        self.vocabulary.id(bytes)
    }

    /// The id of the special token with this name.
    pub fn special_id(&self, name: &str) -> Option<u32> {
        self.specials.id(name)
    }

    /// The name of a special token; `None` for base tokens.
    pub fn special_name(&self, id: u32) -> Option<&str> {
        self.specials.slot(id).map(|slot| slot.name.as_str())
    }

    /// Whether the token is flagged `special` in `tokenizer_config.json`, or reserved:
    /// such tokens are left out of text for people.
    pub fn is_special_flag(&self, id: u32) -> bool {
        self.specials.slot(id).is_some_and(|slot| slot.special)
    }

    /// Number of ids: base tokens and special ones.
    pub fn vocab_size(&self) -> usize {
        self.base_vocab() + SPECIAL_SLOTS
    }

    /// Number of base tokens, which is the first special id.
    pub fn base_vocab(&self) -> usize {
        self.vocabulary.len()
    }

    /// The token that starts a document; nothing adds it by itself.
    pub fn bos_id(&self) -> Option<u32> {
        self.roles.bos
    }

    /// The token that fills up a batch.
    pub fn pad_id(&self) -> Option<u32> {
        self.roles.pad
    }

    /// The end of text that `tokenizer_config.json` names. A model ends its messages with
    /// another id, that of `config.json`.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }
}

#[cfg(test)]
mod tests;

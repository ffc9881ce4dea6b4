//! The 256 special slots behind the base vocabulary, and `tokenizer_config.json` which
//! names some of them.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::vocabulary::{MAX_TOKEN_BYTES, check_size};
use crate::error::{Error, Result};
use crate::json;

/// Special ids that follow the base vocabulary.
pub const SPECIAL_SLOTS: usize = 256;

/// One special slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) name: String,
    /// Left out of text that is decoded without special tokens.
    pub(super) special: bool,
}

/// Ids that the snapshot gives a role.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Roles {
    pub(super) bos: Option<u32>,
    pub(super) eos: Option<u32>,
    pub(super) pad: Option<u32>,
}

/// The names of all slots, and a way to find them in text.
#[derive(Debug)]
pub(super) struct SpecialTokens {
    first_id: u32,
    slots: Vec<Slot>,
    /// Slot numbers in the order of their names.
    by_name: Vec<u16>,
    /// Whether some name starts with this byte.
    starts: [bool; 256],
}

impl SpecialTokens {
    /// `slots` are all 256, in the order of their ids, which start at `first_id`.
    ///
    /// # Errors
    /// A name that is empty or too long, or that another name starts with: then which of
    /// the two is found in a text would be an accident.
    pub(super) fn new(first_id: u32, slots: Vec<Slot>) -> Result<Self> {
        let mut by_name: Vec<u16> = (0..slots.len() as u16).collect();
        by_name.sort_unstable_by_key(|&slot| slots[slot as usize].name.as_bytes());
        let mut starts = [false; 256];
        for (slot, Slot { name, .. }) in slots.iter().enumerate() {
            let id = first_id + slot as u32;
            match name.as_bytes() {
                [] => return Err(Error::malformed(format!("special token {id} has no name"))),
                bytes if bytes.len() > MAX_TOKEN_BYTES => {
                    return Err(Error::malformed(format!(
                        "the name of special token {id} has {} bytes, at most {MAX_TOKEN_BYTES} are supported",
                        bytes.len()
                    )));
                }
                bytes => starts[bytes[0] as usize] = true,
            }
        }
        // Names that start with another follow it directly in sorted order.
        for pair in by_name.windows(2) {
            let [a, b] = [pair[0], pair[1]].map(|slot| &slots[slot as usize].name);
            if b.starts_with(a.as_str()) {
                let [a_id, b_id] = [pair[0], pair[1]].map(|slot| first_id + u32::from(slot));
                return Err(Error::malformed(format!(
                    "special tokens {a_id} {a:?} and {b_id} {b:?}: one name starts with the other"
                )));
            }
        }
        Ok(Self { first_id, slots, by_name, starts })
    }

    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }

    pub(super) fn slot(&self, id: u32) -> Option<&Slot> {
        self.slots.get(id.checked_sub(self.first_id)? as usize)
    }

    pub(super) fn id(&self, name: &str) -> Option<u32> {
        self.match_at(name.as_bytes()).filter(|&(_, len)| len == name.len()).map(|(id, _)| id)
    }

    /// The first name in `text` at or after byte `from`: where it starts and ends, its id.
    pub(super) fn find(&self, text: &str, from: usize) -> Option<(usize, usize, u32)> {
        let bytes = text.as_bytes();
        (from..bytes.len()).filter(|&at| self.starts[bytes[at] as usize]).find_map(|at| {
            let (id, len) = self.match_at(&bytes[at..])?;
            Some((at, at + len, id))
        })
    }

    /// The id and length of the name that `bytes` start with. Such a name is the greatest
    /// one not above `bytes`: anything between the two would start with it as well.
    fn match_at(&self, bytes: &[u8]) -> Option<(u32, usize)> {
        let name = |slot: u16| self.slots[slot as usize].name.as_bytes();
        let above = self.by_name.partition_point(|&slot| name(slot) <= bytes);
        let slot = *self.by_name.get(above.checked_sub(1)?)?;
        bytes.starts_with(name(slot)).then(|| (self.first_id + u32::from(slot), name(slot).len()))
    }
}

/// What is read from `tokenizer_config.json`; unknown keys are ignored.
#[derive(Deserialize)]
struct TokenizerConfig {
    added_tokens_decoder: BTreeMap<String, AddedToken>,
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    pad_token: Option<TokenName>,
}

#[derive(Deserialize)]
struct AddedToken {
    content: String,
    #[serde(default)]
    special: bool,
}

/// A token is referred to by its text, alone or inside an object.
#[derive(Deserialize)]
#[serde(untagged)]
enum TokenName {
    Plain(String),
    Object { content: String },
}

/// Reads `tokenizer_config.json`: the slots that `added_tokens_decoder` names, the others
/// as `<|reserved_token_ID|>`, and the ids of the tokens with a role.
pub(super) fn parse_config(text: &[u8], base_vocab: usize) -> Result<(SpecialTokens, Roles)> {
    check_size(base_vocab)?;
    // Editors on some systems put a byte order mark in front; JSON does not allow it.
    let text = text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text);
    let config: TokenizerConfig = json::parse(text)
        .and_then(serde_json::from_value)
        .map_err(|e| Error::malformed(format!("not a tokenizer configuration: {e}")))?;

    let first_id = base_vocab as u32;
    let mut slots: Vec<Option<Slot>> = vec![None; SPECIAL_SLOTS];
    for (key, AddedToken { content, special }) in config.added_tokens_decoder {
        let item = || format!("added_tokens_decoder[{key:?}]");
        let slot = key
            .parse::<u32>()
            .ok()
            .and_then(|id| id.checked_sub(first_id))
            .and_then(|slot| slots.get_mut(slot as usize))
            .ok_or_else(|| {
                Error::mismatch(format!(
                    "expected an id in {}..={}, the {SPECIAL_SLOTS} slots after the base vocabulary",
                    first_id,
                    base_vocab + SPECIAL_SLOTS - 1
                ))
                .item(item())
                .hint("tokenizer_config.json and config.json must come from the same model")
            })?;
        if let Some(before) = slot {
            return Err(Error::malformed(format!(
                "the id is listed twice, as {:?} and as {content:?}",
                before.name
            ))
            .item(item()));
        }
        *slot = Some(Slot { name: content, special });
    }
    let slots = slots.into_iter().zip(first_id..).map(|(slot, id)| {
        slot.unwrap_or_else(|| Slot { name: format!("<|reserved_token_{id}|>"), special: true })
    });
    let tokens = SpecialTokens::new(first_id, slots.collect())?;

    let role = |key: &str, name: Option<TokenName>| match name {
        None => Ok(None),
        Some(TokenName::Plain(name) | TokenName::Object { content: name }) => {
            tokens.id(&name).map(Some).ok_or_else(|| {
                Error::mismatch(format!("{name:?} is not one of the special tokens")).item(key)
            })
        }
    };
    let roles = Roles {
        bos: role("bos_token", config.bos_token)?,
        eos: role("eos_token", config.eos_token)?,
        pad: role("pad_token", config.pad_token)?,
    };
    Ok((tokens, roles))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIRST: u32 = 768;

    fn config(added: &str, rest: &str) -> Result<(SpecialTokens, Roles)> {
        let json = format!("{{\"added_tokens_decoder\": {{{added}}}{rest}}}");
        parse_config(json.as_bytes(), FIRST as usize)
    }

    fn message(added: &str, rest: &str) -> String {
        config(added, rest).unwrap_err().to_string()
    }

    #[test]
    fn named_slots_and_reserved_ones() {
        let (tokens, roles) = config(
            r#""768": {"content": "[BOS]", "special": true}, "771": {"content": "<|open|>"}"#,
            r#", "bos_token": "[BOS]", "pad_token": {"content": "<|reserved_token_1023|>", "lstrip": false}, "eos_token": null"#,
        )
        .unwrap();
        assert_eq!(roles, Roles { bos: Some(768), eos: None, pad: Some(1023) });
        assert_eq!(tokens.slots().len(), SPECIAL_SLOTS);
        assert_eq!(tokens.id("[BOS]"), Some(768));
        assert_eq!(tokens.id("<|open|>"), Some(771));
        assert_eq!(tokens.id("<|reserved_token_769|>"), Some(769));
        // A named slot has no reserved spelling.
        assert_eq!(tokens.id("<|reserved_token_768|>"), None);
        assert_eq!(tokens.id("[BOS] "), None);
        assert_eq!(tokens.id(""), None);
        assert!(!tokens.slot(771).unwrap().special);
        assert!(tokens.slot(772).unwrap().special);
        assert_eq!(tokens.slot(767), None);
        assert_eq!(tokens.slot(1024), None);
    }

    #[test]
    fn finds_the_leftmost_name() {
        let (tokens, _) =
            config(r#""768": {"content": "<|é|>"}, "769": {"content": "[x]"}"#, "").unwrap();
        assert_eq!(tokens.find("a<|<|é|>[x]", 0), Some((3, 9, 768)));
        assert_eq!(tokens.find("a<|<|é|>[x]", 4), Some((9, 12, 769)));
        assert_eq!(tokens.find("<|é|", 0), None);
        assert_eq!(tokens.find("<|reserved_token_770|>", 0), Some((0, 22, 770)));
        assert_eq!(tokens.find("", 0), None);
    }

    #[test]
    fn byte_order_mark_is_accepted() {
        let json = "\u{feff}{\"added_tokens_decoder\": {}}";
        assert!(parse_config(json.as_bytes(), 300).is_ok());
    }

    #[test]
    fn refuses_what_cannot_be_meant() {
        let outside = message(r#""767": {"content": "a"}"#, "");
        assert_eq!(
            outside,
            "added_tokens_decoder[\"767\"]: expected an id in 768..=1023, the 256 slots after the base vocabulary"
        );
        assert!(
            message(r#""770": {"content": "a"}, "770": {"content": "b"}"#, "")
                .contains("the key \"770\" is there twice")
        );
        assert!(message(r#""1024": {"content": "a"}"#, "").contains("768..=1023"));
        assert!(message(r#""x": {"content": "a"}"#, "").contains("[\"x\"]"));
        assert!(
            message(r#""770": {"content": "a"}, "0770": {"content": "b"}"#, "").contains("twice")
        );
        assert!(message(r#""770": {"content": ""}"#, "").contains("770 has no name"));
        let prefix = message(r#""770": {"content": "<|a"}, "772": {"content": "<|a|>"}"#, "");
        assert_eq!(
            prefix,
            "special tokens 770 \"<|a\" and 772 \"<|a|>\": one name starts with the other"
        );
        assert!(message(r#""770": {"content": "a"}, "772": {"content": "a"}"#, "").contains("770"));
        assert!(message("", r#", "eos_token": "[EOS]""#).starts_with("eos_token: \"[EOS]\""));
        assert!(parse_config(b"{}", 300).unwrap_err().to_string().contains("added_tokens_decoder"));
        assert!(parse_config(b"\xff", 300).is_err());
        let json = br#"{"added_tokens_decoder": {"5": {"content": "a"}}}"#;
        for base_vocab in [1 << 20, u32::MAX as usize, usize::MAX] {
            let error = parse_config(json, base_vocab).unwrap_err().to_string();
            assert!(error.contains("at most 1048575"), "{error}");
        }
    }
}

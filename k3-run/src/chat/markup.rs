//! The few tokens that structure a reply.

use k3_formats::tokenizer::{CHAT_TOKENS, Tokenizer};
use k3_formats::{Error, Result};

/// What one token of a reply is. Decided by its id: text that merely looks like a marker is text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// `<|open|>`: a tag follows.
    Open,
    /// `<|close|>`: the name of the tag that ends follows.
    Close,
    /// `<|sep|>`: the tag is complete.
    Sep,
    /// The reply is complete.
    End,
    /// A control token without a meaning here, or an id outside the vocabulary.
    Hidden,
    /// Bytes of text, not always whole characters.
    Text(&'a [u8]),
}

/// Ids of the structuring tokens of one vocabulary.
#[derive(Debug, Clone)]
pub struct Markup {
    open: u32,
    close: u32,
    sep: u32,
    ends: Vec<u32>,
}

impl Markup {
    /// Looks the tokens up by name.
    ///
    /// # Errors
    /// A vocabulary without one of them cannot hold a conversation.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self> {
        let id = |name: &str| {
            tokenizer.special_id(name).ok_or_else(|| {
                Error::missing("no such token, which the chat format needs")
                    .item(name)
                    .in_file("tokenizer_config.json")
                    .hint("use the tokenizer files of a Kimi K3 snapshot")
            })
        };
        let [end_of_msg, open, close, sep] = CHAT_TOKENS.map(id);
        let end_of_msg = end_of_msg?;
        let mut ends = vec![end_of_msg];
        ends.extend(tokenizer.eos_ids().iter().filter(|&&eos| eos != end_of_msg));
        Ok(Self { open: open?, close: close?, sep: sep?, ends })
    }

    /// Ids that end a reply.
    pub fn ends(&self) -> &[u32] {
        &self.ends
    }

    /// What the token `id` is in a reply.
    pub fn piece<'t>(&self, tokenizer: &'t Tokenizer, id: u32) -> Piece<'t> {
        match id {
            _ if id == self.open => Piece::Open,
            _ if id == self.close => Piece::Close,
            _ if id == self.sep => Piece::Sep,
            _ if self.ends.contains(&id) => Piece::End,
            _ if tokenizer.is_special_flag(id) => Piece::Hidden,
            _ => tokenizer.token_bytes(id).map_or(Piece::Hidden, Piece::Text),
        }
    }
}

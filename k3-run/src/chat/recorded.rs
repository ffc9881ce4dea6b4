//! A reply as it goes back into the next prompt: in the tokens that the model chose.
//!
//! Encoding the reply's text again could give other tokens for the same letters, and the
//! state that was built from the sampled ones would be of no use. So they are kept, and
//! if the reply was cut, what is open is closed.

use k3_formats::tokenizer::{Specials, Tokenizer};

use super::markup::{Markup, Piece};
use super::parse::Start;
use super::xtml::{Segment, encode};

/// Longest tag in bytes that is taken for one; what is longer is text.
const LONGEST_TAG: usize = 256;

/// The ids of a reply that began at `start`, up to the token that ends the message: the
/// `sampled` ones, without half a tag, and then whatever closes what they left open.
pub fn closed_reply(
    tokenizer: &Tokenizer,
    markup: &Markup,
    start: Start,
    sampled: &[u32],
) -> Vec<u32> {
    let end_of_message = markup.ends()[0];
    let mut open = Elements::new(start);
    let mut tag: Option<(Side, Vec<u8>)> = None;
    let mut whole = 0;
    for (i, &id) in sampled.iter().enumerate() {
        match markup.piece(tokenizer, id) {
            Piece::Open => tag = Some((Side::Open, Vec::new())),
            Piece::Close => tag = Some((Side::Close, Vec::new())),
            Piece::Sep => {
                if let Some((side, text)) = tag.take() {
                    open.tag(side, &String::from_utf8_lossy(&text));
                }
            }
            Piece::Text(bytes) => {
                if let Some((_, text)) = &mut tag {
                    text.extend_from_slice(bytes);
                    tag = tag.filter(|(_, text)| text.len() <= LONGEST_TAG);
                }
            }
            Piece::End if id == end_of_message => return sampled[..=i].to_vec(),
            Piece::End => break,
            Piece::Hidden => {}
        }
        if tag.is_none() {
            whole = i + 1;
        }
    }
    let mut ids = sampled[..whole].to_vec();
    ids.extend(encode(tokenizer, &open.close()));
    ids
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Open,
    Close,
}

/// The elements that are open, outermost first.
struct Elements {
    names: Vec<String>,
    /// Whether there has been a response, without which a message is not complete.
    answered: bool,
}

impl Elements {
    fn new(start: Start) -> Self {
        let answered = start == Start::Answer;
        let first = if answered { "response" } else { "think" };
        Self { names: vec!["message".into(), first.into()], answered }
    }

    fn tag(&mut self, side: Side, text: &str) {
        let name = text.split(' ').next().unwrap_or_default();
        if side == Side::Open {
            self.answered |= name == "response";
            self.names.push(name.to_owned());
        } else if let Some(at) = self.names.iter().rposition(|n| n == name) {
            self.names.truncate(at);
        }
    }

    fn close(self) -> Vec<Segment<'static>> {
        let mut out = Vec::new();
        for name in self.names.into_iter().rev() {
            if name == "message" && !self.answered {
                out.extend(whole_tag("<|open|>", "response".into()));
                out.extend(whole_tag("<|close|>", "response".into()));
            }
            out.extend(whole_tag("<|close|>", name));
        }
        out.push(marker("<|end_of_msg|>"));
        out
    }
}

fn whole_tag(side: &'static str, name: String) -> [Segment<'static>; 3] {
    let name = Segment { text: name.into(), specials: Specials::Text };
    [marker(side), name, marker("<|sep|>")]
}

fn marker(text: &'static str) -> Segment<'static> {
    Segment { text: text.into(), specials: Specials::Recognize }
}

//! When a reply is over: an ending token, a stop string, or its length.
//!
//! A stop string may begin in one token and end in a later one. Text that may still
//! become one is held back, so nothing of a stop string is ever shown. Where text is cut
//! into pieces does not matter: of several matches the one that ends first counts, and
//! of those that end together the longest.

use std::fmt;

/// Most stop strings of one reply.
pub const MAX_STRINGS: usize = 16;
/// Longest stop string in bytes, which bounds how much text is held back.
pub const MAX_STRING_BYTES: usize = 256;

/// Why a reply is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// The model gave this ending token.
    Token(u32),
    /// The stop string at this position of the list appeared.
    String(usize),
    /// As many tokens as allowed.
    Length,
}

impl StopReason {
    /// OpenAI's `finish_reason`, for a reply without tool calls.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Token(_) | Self::String(_) => "stop",
            Self::Length => "length",
        }
    }
}

/// A stop string that cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InvalidStop {
    /// More than [`MAX_STRINGS`].
    TooMany,
    /// The one at this position is empty or longer than [`MAX_STRING_BYTES`].
    Length(usize),
}

impl fmt::Display for InvalidStop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany => write!(f, "stop: more than {MAX_STRINGS} strings"),
            Self::Length(at) => write!(f, "stop[{at}]: expected 1 to {MAX_STRING_BYTES} bytes"),
        }
    }
}

impl std::error::Error for InvalidStop {}

/// The rules of one reply and how far it is.
#[derive(Debug, Clone)]
pub struct Stop {
    tokens: Vec<u32>,
    strings: Vec<String>,
    max_tokens: usize,
    count: usize,
    /// Text that may be the start of a stop string.
    held: String,
}

impl Stop {
    /// Ends at one of the `tokens`, at one of the `strings`, or after `max_tokens`.
    ///
    /// # Errors
    /// Too many stop strings, or one that is empty or too long.
    pub fn new(
        tokens: Vec<u32>,
        strings: Vec<String>,
        max_tokens: usize,
    ) -> Result<Self, InvalidStop> {
        if strings.len() > MAX_STRINGS {
            return Err(InvalidStop::TooMany);
        }
        if let Some(at) = strings.iter().position(|s| !(1..=MAX_STRING_BYTES).contains(&s.len())) {
            return Err(InvalidStop::Length(at));
        }
        Ok(Self { tokens, strings, max_tokens, count: 0, held: String::new() })
    }

    /// Tokens taken so far, the ending one included.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Takes a token and the text that it made certain, which is empty where stop strings
    /// do not apply. Appends to `shown` what may be shown; after a stop string nothing more
    /// comes, else [`Self::finish`] gives the rest.
    pub fn push(&mut self, id: u32, text: &str, shown: &mut String) -> Option<StopReason> {
        self.count += 1;
        if let Some(at) = self.text(text, shown) {
            return Some(StopReason::String(at));
        }
        if self.tokens.contains(&id) {
            return Some(StopReason::Token(id));
        }
        (self.count >= self.max_tokens).then_some(StopReason::Length)
    }

    /// Appends what was held back to `shown`, when no more text comes. `text` is what the
    /// decoder still had, in which a stop string may end.
    pub fn finish(&mut self, text: &str, shown: &mut String) -> Option<StopReason> {
        let found = self.text(text, shown);
        shown.push_str(&std::mem::take(&mut self.held));
        found.map(StopReason::String)
    }

    /// The position of the stop string that is now complete; nothing stays held back then.
    fn text(&mut self, text: &str, shown: &mut String) -> Option<usize> {
        if text.is_empty() {
            return None;
        }
        self.held.push_str(text);
        let matches = self.strings.iter().enumerate().filter_map(|(at, string)| {
            let start = self.held.find(string.as_str())?;
            Some((start + string.len(), start, at))
        });
        if let Some((_, start, at)) = matches.min() {
            shown.push_str(&self.held[..start]);
            self.held.clear();
            return Some(at);
        }
        let keep = self.strings.iter().map(|string| overlap(&self.held, string)).max().unwrap_or(0);
        shown.extend(self.held.drain(..self.held.len() - keep));
        None
    }
}

/// Length of the longest end of `text` with which `string` starts. Both are UTF-8, so it
/// falls on a character boundary of both.
fn overlap(text: &str, string: &str) -> usize {
    let (text, string) = (text.as_bytes(), string.as_bytes());
    let longest = text.len().min(string.len() - 1);
    (1..=longest).rev().find(|&n| text.ends_with(&string[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn stop(strings: &[&str]) -> Stop {
        let strings = strings.iter().map(|&s| s.to_owned()).collect();
        Stop::new(vec![99], strings, 1000).unwrap()
    }

    /// What each piece shows, then what the end shows, and why it ended.
    fn run(strings: &[&str], pieces: &[&str]) -> (Vec<String>, Option<StopReason>) {
        let mut stop = stop(strings);
        let mut all = Vec::new();
        for piece in pieces {
            let mut shown = String::new();
            let reason = stop.push(0, piece, &mut shown);
            all.push(shown);
            if reason.is_some() {
                return (all, reason);
            }
        }
        let mut shown = String::new();
        let reason = stop.finish("", &mut shown);
        all.push(shown);
        (all, reason)
    }

    #[test]
    fn strings_are_found_across_tokens_and_never_shown() {
        let (shown, reason) = run(&["STOP"], &["go S", "T", "AR S", "TO", "P more"]);
        assert_eq!(shown, ["go ", "", "STAR ", "", ""]);
        assert_eq!(reason, Some(StopReason::String(0)));
        let (shown, reason) = run(&["\n\n"], &["a\n", "b\n", "\nc"]);
        assert_eq!(shown, ["a", "\nb", ""]);
        assert_eq!(reason, Some(StopReason::String(0)));
        let (shown, reason) = run(&["aab"], &["aa", "aa", "b"]);
        assert_eq!(shown, ["", "aa", ""]);
        assert_eq!(reason, Some(StopReason::String(0)));
    }

    #[test]
    fn what_was_held_back_comes_at_the_end() {
        assert_eq!(run(&["STOP"], &["a STO"]), (vec!["a ".into(), "STO".into()], None));
        let mut stop = stop(&["é!"]);
        let mut shown = String::new();
        assert_eq!(stop.push(0, "é", &mut shown), None);
        assert_eq!(shown, "");
        assert_eq!(stop.finish("!", &mut shown), Some(StopReason::String(0)));
        assert_eq!(shown, "");
    }

    #[test]
    fn the_match_that_ends_first_counts_and_of_those_the_longest() {
        let (shown, reason) = run(&["bcd", "cd", "b"], &["abcd"]);
        assert_eq!((shown, reason), (vec!["a".into()], Some(StopReason::String(2))));
        let (shown, reason) = run(&["d", "bcd", "cd"], &["abcd"]);
        assert_eq!((shown, reason), (vec!["a".into()], Some(StopReason::String(1))));
    }

    #[test]
    fn the_ending_token_and_the_length_are_told_apart() {
        let mut stop = Stop::new(vec![5], vec![], 3).unwrap();
        let mut shown = String::new();
        assert_eq!(stop.push(1, "a", &mut shown), None);
        assert_eq!(stop.push(2, "b", &mut shown), None);
        assert_eq!(stop.clone().push(5, "", &mut shown), Some(StopReason::Token(5)));
        assert_eq!(stop.push(3, "c", &mut shown), Some(StopReason::Length));
        assert_eq!((shown.as_str(), stop.count()), ("abc", 3));
        assert_eq!(StopReason::Length.as_str(), "length");
        assert_eq!(StopReason::Token(5).as_str(), "stop");
    }

    #[test]
    fn unusable_strings_are_refused() {
        let new = |strings: Vec<String>| Stop::new(vec![], strings, 1).unwrap_err().to_string();
        assert_eq!(new(vec!["a".into(), String::new()]), "stop[1]: expected 1 to 256 bytes");
        assert_eq!(new(vec!["a".repeat(257)]), "stop[0]: expected 1 to 256 bytes");
        assert_eq!(new(vec!["a".into(); 17]), "stop: more than 16 strings");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn pieces_of_any_size_give_the_same(
            pieces in prop::collection::vec("[abé]{0,4}", 0..12),
            strings in prop::collection::vec("[abé]{1,4}", 0..4),
        ) {
            let strings: Vec<&str> = strings.iter().map(String::as_str).collect();
            let text = pieces.concat();
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let result = |pieces: &[String]| {
                let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
                let (shown, reason) = run(&strings, &pieces);
                (shown.concat(), reason)
            };
            let whole = result(std::slice::from_ref(&text));
            prop_assert_eq!(&result(&pieces), &whole);
            prop_assert_eq!(&result(&letters), &whole);
            prop_assert!(text.starts_with(&whole.0));
            prop_assert!(strings.iter().all(|s| !whole.0.contains(s)));
            prop_assert_eq!(whole.1.is_none(), whole.0 == text);
        }
    }
}

//! Bytes of a text in pieces of any size → whole characters.

/// Decodes UTF-8 that arrives in parts, and never shows half a character: bytes that may
/// yet become one are held back. Bytes that cannot become U+FFFD, one for each maximal
/// ill-formed part, so that the parts joined are what decoding all bytes at once gives.
#[derive(Debug, Default, Clone)]
pub struct StreamDecoder {
    /// At most three bytes: the start of a character.
    held: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes more bytes and returns all text that is now certain.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.held.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.held.len());
        let mut done = 0;
        for chunk in self.held.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty()
                || is_start_of_char(invalid) && done + invalid.len() == self.held.len()
            {
                break;
            }
            text.push(char::REPLACEMENT_CHARACTER);
            done += invalid.len();
        }
        self.held.drain(..done);
        text
    }

    /// The text of what was held back (U+FFFD, if anything), after the last byte. The
    /// decoder is then as new.
    pub fn finish(&mut self) -> String {
        let rest = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        rest
    }
}

/// Whether more bytes could make `bytes`, which are no character, one.
fn is_start_of_char(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn holds_back_what_may_become_a_character() {
        let mut decoder = StreamDecoder::new();
        assert_eq!(decoder.push(b"a\xf0"), "a");
        assert_eq!(decoder.push(b"\x9f\x99"), "");
        assert_eq!(decoder.push(b"\x82b"), "🙂b");
        assert_eq!(decoder.push(b"\xe4\xbd"), "");
        assert_eq!(decoder.finish(), "\u{fffd}");
        assert_eq!(decoder.finish(), "");
    }

    #[test]
    fn does_not_hold_back_what_cannot() {
        let mut decoder = StreamDecoder::new();
        // C0, FF and surrogates (ED A0) are never part of a character.
        assert_eq!(decoder.push(b"\xc0"), "\u{fffd}");
        assert_eq!(decoder.push(b"\xff"), "\u{fffd}");
        assert_eq!(decoder.push(b"\xed\xa0"), "\u{fffd}\u{fffd}");
        assert_eq!(decoder.push(b"\xe4x"), "\u{fffd}x");
        assert_eq!(decoder.push(b"\xe4\xe4"), "\u{fffd}");
        assert_eq!(decoder.push(b"\xbd\xa0"), "你");
    }

    proptest! {
        #[test]
        fn parts_join_to_the_whole(
            parts in prop::collection::vec(
                prop_oneof![
                    prop::collection::vec(any::<u8>(), 0..6),
                    "\\PC{0,4}".prop_map(String::into_bytes),
                    prop::collection::vec(prop::sample::select(vec![0xe4u8, 0xbd, 0xf0, 0x9f, 0x99, 0x82, b'a']), 0..4),
                ],
                0..12,
            )
        ) {
            let mut decoder = StreamDecoder::new();
            let mut text = String::new();
            for part in &parts {
                text.push_str(&decoder.push(part));
                prop_assert!(decoder.held.len() <= 3);
            }
            text.push_str(&decoder.finish());
            let whole = parts.concat();
            prop_assert_eq!(text, String::from_utf8_lossy(&whole).into_owned());
        }
    }
}

//! Cutting text: first into windows by length, then into pieces by the pattern.

use std::sync::LazyLock;

use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::nfa::thompson::{self, WhichCaptures};
use regex_automata::util::pool::{Pool, PoolGuard};
use regex_automata::{Anchored, Input};

/// Code points after which the text is cut, wherever that falls.
const WINDOW_CHARS: usize = 400_000;
/// Longest run of code points that are all white space, or all not.
const RUN_CHARS: usize = 25_000;

/// The split pattern of the vocabulary, as published: for tools that want it as text.
///
/// Alternatives are tried in order. `&&` is class intersection; `\p{Han}` is the
/// script, not the script extensions.
pub const PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

const LOOKAHEAD: &str = r"|\s+(?!\S)";

/// [`PATTERN`] without its lookahead, which [`Pieces`] applies by hand. What is left is a
/// regular language: matched in linear time, without a stack to run out of, and only
/// forwards, as every piece starts where the last one ended. A `regex::Regex` would also
/// build and run the reverse automaton, which unusual text makes a hundred times slower.
static FORWARD: LazyLock<DFA> = LazyLock::new(|| {
    DFA::builder()
        .thompson(thompson::Config::new().which_captures(WhichCaptures::None))
        .build(&PATTERN.replacen(LOOKAHEAD, "", 1))
        .expect("the pattern is a constant that compiles")
});

/// The states that texts so far have led to: at most 2 MiB for each thread that encodes,
/// less than a tenth of that for ordinary text.
static STATES: LazyLock<Pool<Cache, fn() -> Cache>> =
    LazyLock::new(|| Pool::new(|| FORWARD.create_cache()));

/// Compiles the pattern now (about 1 ms), so that the first text does not wait for it.
pub(super) fn warm_up() {
    LazyLock::force(&FORWARD);
}

/// The pieces that the pattern splits `text` into; joined they are the text. Encoding never
/// joins bytes of two pieces.
pub fn pieces(text: &str) -> Pieces<'_> {
    Pieces { text, states: STATES.get() }
}

/// See [`pieces`].
pub struct Pieces<'a> {
    text: &'a str,
    states: PoolGuard<'static, Cache, fn() -> Cache>,
}

impl<'a> Iterator for Pieces<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        if self.text.is_empty() {
            return None;
        }
        let (piece, rest) = self.text.split_at(self.piece_end());
        self.text = rest;
        Some(piece)
    }
}

impl Pieces<'_> {
    fn piece_end(&mut self) -> usize {
        let input = Input::new(self.text).anchored(Anchored::Yes);
        // Every code point starts some alternative; and an automaton that has no bytes to
        // quit at and was not told when to give up returns no error.
        let Ok(Some(found)) = FORWARD.try_search_fwd(&mut self.states, &input) else {
            return self.text.len();
        };
        let end = found.offset();
        // Only `\s+` ends in white space that is no line break. It took the whole run; with
        // more text behind it, the lookahead leaves the run's last character to the next
        // piece, unless it is the only one.
        match self.text[..end].chars().next_back() {
            Some(last)
                if last.is_whitespace()
                    && !matches!(last, '\r' | '\n')
                    && end < self.text.len()
                    && end > last.len_utf8() =>
            {
                end - last.len_utf8()
            }
            _ => end,
        }
    }
}

/// Windows of `text`: cut after every 400,000 code points, and inside those before the
/// 25,001st of a run of white space or of anything else. The cuts are part of the
/// tokenizer's definition: no piece crosses one.
pub(super) fn windows(text: &str) -> Windows<'_> {
    Windows { rest: text, chars: 0, run: 0, in_space: false }
}

pub(super) struct Windows<'a> {
    rest: &'a str,
    /// Code points since the last cut at `WINDOW_CHARS`.
    chars: usize,
    /// Length so far of the run that `in_space` describes.
    run: usize,
    in_space: bool,
}

impl<'a> Iterator for Windows<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        let end = self.next_cut();
        let (window, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!window.is_empty()).then_some(window)
    }
}

impl Windows<'_> {
    /// Bytes up to the next cut, or all that is left.
    fn next_cut(&mut self) -> usize {
        if self.chars == 0 && self.rest.len() <= RUN_CHARS {
            return self.rest.len();
        }
        for (at, c) in self.rest.char_indices() {
            if self.chars == WINDOW_CHARS {
                (self.chars, self.run) = (0, 0);
                return at;
            }
            let space = is_space(c);
            if space != self.in_space {
                (self.in_space, self.run) = (space, 0);
            }
            if self.run == RUN_CHARS {
                self.run = 0;
                return at;
            }
            self.run += 1;
            self.chars += 1;
        }
        self.rest.len()
    }
}

/// White space as Python's `str.isspace` has it: Unicode's, and the four separators
/// U+001C to U+001F.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(text: &str) -> Vec<&str> {
        super::pieces(text).collect()
    }

    #[test]
    fn han_is_its_own_class_in_all_four_intersections() {
        assert_eq!(pieces("AB你好c"), ["AB", "你好", "c"]);
        assert_eq!(pieces("你好Abc世界"), ["你好", "Abc", "世界"]);
        assert_eq!(pieces("ABc你"), ["ABc", "你"]);
        assert_eq!(pieces("abＣ你"), ["ab", "Ｃ", "你"]);
    }

    #[test]
    fn han_is_the_script_not_its_extensions() {
        assert_eq!(pieces("々〇"), ["々〇"]);
        assert_eq!(pieces("中、中"), ["中", "、", "中"]);
        // Radicals are symbols by category and Han by script.
        assert_eq!(pieces("⺀⻂⼀"), ["⺀⻂⼀"]);
        assert_eq!(pieces("㈱㊀"), ["㈱", "㊀"]);
    }

    #[test]
    fn zero_ideograph_is_a_number_and_han() {
        // U+3007: digits take it in a group of three, otherwise Han comes first.
        assert_eq!(pieces("12〇34"), ["12〇", "34"]);
        assert_eq!(pieces("a〇b"), ["a", "〇", "b"]);
        assert_eq!(pieces("二〇二六"), ["二〇二六"]);
    }

    #[test]
    fn contractions_ignore_case_and_know_the_long_s() {
        assert_eq!(pieces("I'LL we'Ve"), ["I'LL", " we'Ve"]);
        assert_eq!(pieces("x'ſ y'S"), ["x'ſ", " y'S"]);
        assert_eq!(pieces("a'K"), ["a", "'K"]);
        assert_eq!(pieces("don’t"), ["don", "’t"]);
        assert_eq!(pieces("世界's"), ["世界", "'s"]);
    }

    #[test]
    fn white_space_leaves_its_last_character_to_a_word() {
        assert_eq!(pieces("    x"), ["   ", " x"]);
        assert_eq!(pieces("\t\tx"), ["\t", "\tx"]);
        assert_eq!(pieces("a  \n  b"), ["a", "  \n", " ", " b"]);
        assert_eq!(pieces("a \u{3000}1"), ["a", " ", "\u{3000}", "1"]);
        assert_eq!(pieces("x   "), ["x", "   "]);
        assert_eq!(pieces(" \r\n\t"), [" \r\n", "\t"]);
    }

    #[test]
    fn no_slash_behind_punctuation() {
        assert_eq!(pieces("}\n///"), ["}\n", "///"]);
    }

    #[test]
    fn every_code_point_starts_a_piece() {
        let mut text = [0; 4];
        let mut states = FORWARD.create_cache();
        for c in '\0'..=char::MAX {
            let text: &str = c.encode_utf8(&mut text);
            let found =
                FORWARD.try_search_fwd(&mut states, &Input::new(text).anchored(Anchored::Yes));
            assert_eq!(found.unwrap().unwrap().offset(), text.len(), "{c:?}");
        }
    }

    #[test]
    fn texts_may_be_split_side_by_side() {
        let mut one = super::pieces("AB你好c");
        let mut two = super::pieces("don't stop");
        assert_eq!((one.next(), two.next()), (Some("AB"), Some("don't")));
        assert_eq!((one.next(), two.next()), (Some("你好"), Some(" stop")));
        assert_eq!((one.next(), two.next()), (Some("c"), None));
    }

    #[test]
    fn runs_are_cut_before_the_25001st() {
        let lens = |text: &str| windows(text).map(|w| w.chars().count()).collect::<Vec<_>>();
        assert_eq!(lens(""), [0; 0]);
        assert_eq!(lens(&"a".repeat(25_000)), [25_000]);
        assert_eq!(lens(&"a".repeat(25_001)), [25_000, 1]);
        assert_eq!(lens(&"é".repeat(50_001)), [25_000, 25_000, 1]);
        assert_eq!(lens(&" ".repeat(60_000)), [25_000, 25_000, 10_000]);
        // A change of class starts a new run, not a new window.
        let text = format!("{} {}", "a".repeat(25_000), "b".repeat(25_001));
        assert_eq!(lens(&text), [50_001, 1]);
    }

    #[test]
    fn the_four_separators_count_as_space() {
        for c in '\u{1c}'..='\u{1f}' {
            let text = format!("{}{c}{}", "a".repeat(20_000), "a".repeat(20_000));
            assert_eq!(windows(&text).count(), 1, "{c:?}");
        }
        let text = format!("{}\u{1b}{}", "a".repeat(20_000), "a".repeat(20_000));
        assert_eq!(windows(&text).count(), 2);
    }

    #[test]
    fn windows_are_cut_at_400000_and_runs_start_anew_there() {
        let text = "x".repeat(24_999) + " ";
        let text = text.repeat(17);
        let lens: Vec<_> = windows(&text).map(str::len).collect();
        assert_eq!(lens, [400_000, 25_000]);

        // The cut falls inside a run of 20,000 + 20,000: neither half is cut again.
        let text = "ab ".repeat(126_666) + "  " + &"x".repeat(40_000);
        let lens: Vec<_> = windows(&text).map(str::len).collect();
        assert_eq!(lens, [400_000, 20_000]);
        assert_eq!(windows(&text).collect::<String>(), text);
    }
}

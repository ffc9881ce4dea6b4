//! Line breaks between words for text that comes in pieces.
//!
//! Nothing is held back: a word that turns out to be too long for its line is taken back
//! and begun again on the next.

use unicode_width::UnicodeWidthChar;

/// Columns to the next tab stop are counted by this.
const TAB: usize = 8;

/// Where the cursor is, and the word it is in.
#[derive(Debug)]
pub(super) struct Wrap {
    /// Columns in use; the last stays free, for terminals differ in what it does.
    width: usize,
    column: usize,
    word: String,
    word_width: usize,
}

impl Wrap {
    /// At the start of a line of a terminal of `columns`.
    pub(super) fn new(columns: usize) -> Self {
        let width = columns.saturating_sub(1).max(1);
        Self { width, column: 0, word: String::new(), word_width: 0 }
    }

    /// What to write so that `text` appears.
    pub(super) fn push(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len() + 8);
        for c in text.chars() {
            match c {
                '\n' => self.new_line(&mut out),
                '\t' => self.space(c, TAB - self.column % TAB, &mut out),
                c if c.is_whitespace() => self.space(c, c.width().unwrap_or(0), &mut out),
                c => self.letter(c, &mut out),
            }
        }
        out
    }

    fn new_line(&mut self, out: &mut String) {
        out.push('\n');
        self.column = 0;
        self.end_word();
    }

    fn end_word(&mut self) {
        self.word.clear();
        self.word_width = 0;
    }

    /// A space at the end of a line becomes its end.
    fn space(&mut self, c: char, width: usize, out: &mut String) {
        if self.column + width > self.width {
            self.new_line(out);
        } else {
            out.push(c);
            self.column += width;
            self.end_word();
        }
    }

    fn letter(&mut self, c: char, out: &mut String) {
        let width = c.width().unwrap_or(0);
        if self.column + width > self.width {
            let (word, word_width) = (std::mem::take(&mut self.word), self.word_width);
            let fits =
                word_width > 0 && word_width < self.column && word_width + width <= self.width;
            if fits {
                out.push_str(&format!("\x1b[{word_width}D\x1b[K"));
            }
            self.new_line(out);
            if fits {
                out.push_str(&word);
                (self.column, self.word, self.word_width) = (word_width, word, word_width);
            }
        }
        out.push(c);
        self.column += width;
        self.word.push(c);
        self.word_width += width;
        // Wide characters are words of their own.
        if width > 1 {
            self.end_word();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines that a terminal would show.
    fn shown(columns: usize, pieces: &[&str]) -> Vec<String> {
        let mut wrap = Wrap::new(columns);
        let mut lines = vec![String::new()];
        let written: String = pieces.iter().map(|piece| wrap.push(piece)).collect();
        let mut rest = written.chars();
        while let Some(c) = rest.next() {
            match c {
                '\n' => lines.push(String::new()),
                '\x1b' => {
                    let code: String = rest.by_ref().skip(1).take_while(|c| *c != 'K').collect();
                    let back: usize = code.trim_end_matches(['\x1b', '[', 'D']).parse().unwrap();
                    let line = lines.last_mut().unwrap();
                    let kept = line.chars().count() - back;
                    *line = line.chars().take(kept).collect();
                }
                c => lines.last_mut().unwrap().push(c),
            }
        }
        lines
    }

    #[test]
    fn words_move_to_the_next_line_whole() {
        assert_eq!(
            shown(11, &["one two th", "ree fo", "ur\nfive"]),
            ["one two ", "three four", "five"]
        );
        assert_eq!(shown(6, &["abcdefgh ij"]), ["abcde", "fgh ", "ij"]);
        assert_eq!(shown(6, &["abcde fg"]), ["abcde", "fg"]);
        assert_eq!(shown(6, &["日本語"]), ["日本", "語"]);
        assert_eq!(shown(12, &["a\tb c d"]), ["a\tb c", "d"]);
        assert_eq!(shown(1, &["ab"]), ["a", "b"]);
    }
}

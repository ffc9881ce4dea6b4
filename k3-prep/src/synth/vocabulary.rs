//! A byte-level BPE vocabulary of any size, trained on a small built-in text.
//!
//! The first 256 ranks are the single bytes in GPT-2's order, printable ones first.
//! Every later token is one that rank BPE itself builds, in a last step from exactly
//! two earlier tokens, so that merges can be derived from the ranks.

use std::collections::{HashMap, HashSet};
use std::io::{self, Write};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use k3_formats::tokenizer::pieces;

const CORPUS: &str = include_str!("corpus.txt");
/// Pairs seen fewer times than this are no use as tokens.
const MIN_COUNT: u64 = 2;
/// Bytes of the longest filler token.
const MAX_FILLER: usize = 64;

/// Tokens in rank order.
pub(super) struct Vocabulary {
    tokens: Vec<Box<[u8]>>,
    ranks: HashMap<Box<[u8]>, u32>,
}

impl Vocabulary {
    /// `size` tokens, at least 256: the bytes, trained merges, then filler merges of
    /// trained tokens, which are valid but not needed by the text.
    pub(super) fn train(size: usize) -> Self {
        let mut vocabulary = Self { tokens: Vec::new(), ranks: HashMap::with_capacity(size) };
        let printable = |b: &u8| matches!(b, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let (first, then): (Vec<u8>, Vec<u8>) = (0..=255u8).partition(printable);
        for byte in first.into_iter().chain(then) {
            vocabulary.push(&[byte]);
        }
        vocabulary.learn(CORPUS, size);
        vocabulary.fill(size);
        vocabulary
    }

    /// Writes `tiktoken.model`: a line `base64 rank` for each token.
    ///
    /// # Errors
    /// The writer's.
    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut line = String::new();
        for (rank, token) in self.tokens.iter().enumerate() {
            line.clear();
            STANDARD.encode_string(token, &mut line);
            writeln!(out, "{line} {rank}")?;
        }
        Ok(())
    }

    fn push(&mut self, token: &[u8]) -> u32 {
        let rank = u32::try_from(self.tokens.len()).expect("fewer than 2^32 tokens");
        self.tokens.push(token.into());
        self.ranks.insert(token.into(), rank);
        rank
    }

    /// Merges the most frequent pair of neighbours, the lower ranks first on a tie, until
    /// there are `size` tokens or nothing is frequent any more.
    fn learn(&mut self, text: &str, size: usize) {
        let mut counts: HashMap<&str, u64> = HashMap::new();
        for piece in pieces(text) {
            *counts.entry(piece).or_default() += 1;
        }
        let mut words: Vec<Word> = counts
            .into_iter()
            .map(|(piece, count)| Word {
                ranks: piece.bytes().map(|b| self.ranks[&[b][..]]).collect(),
                count,
            })
            .collect();
        let mut pairs: HashMap<(u32, u32), u64> = HashMap::new();
        for word in &words {
            for pair in word.pairs() {
                *pairs.entry(pair).or_default() += word.count;
            }
        }
        let mut unusable = HashSet::new();
        while self.tokens.len() < size {
            let usable = pairs.iter().filter(|(pair, _)| !unusable.contains(*pair));
            let best = usable.max_by_key(|&(&(a, b), &count)| (count, !a, !b));
            let Some((&pair, _)) = best.filter(|&(_, &count)| count >= MIN_COUNT) else { break };
            let token = self.joined(pair.0, pair.1);
            let rank = match self.ranks.get(&token[..]) {
                // The same bytes may come about by another pair.
                Some(&rank) => rank,
                None if self.splits_into(&token, pair) => self.push(&token),
                None => {
                    unusable.insert(pair);
                    continue;
                }
            };
            for word in words.iter_mut().filter(|w| w.pairs().any(|p| p == pair)) {
                for old in word.pairs() {
                    *pairs.entry(old).or_default() -= word.count;
                }
                word.merge(pair, rank);
                for new in word.pairs() {
                    *pairs.entry(new).or_default() += word.count;
                }
            }
            pairs.retain(|_, count| *count > 0);
        }
    }

    /// Appends pairs of trained ASCII tokens, early ones first, up to `size` tokens; when
    /// there is nothing left to pair, pairs of what was appended.
    fn fill(&mut self, size: usize) {
        let mut stems: Vec<u32> = Vec::new();
        let mut merges = 256;
        // Diagonals of the table of pairs: stem i with stem d - i.
        let mut d = 0;
        while self.tokens.len() < size {
            while stems.len() <= d {
                let token = &self.tokens[merges];
                if token.iter().all(|b| matches!(b, b' '..=b'~')) {
                    stems.push(merges as u32);
                }
                merges += 1;
            }
            for i in 0..=d {
                if self.tokens.len() == size {
                    break;
                }
                let pair = (stems[i], stems[d - i]);
                let token = self.joined(pair.0, pair.1);
                let is_new = !self.ranks.contains_key(&token[..]);
                if is_new && token.len() <= MAX_FILLER && self.splits_into(&token, pair) {
                    self.push(&token);
                }
            }
            d += 1;
        }
    }

    fn joined(&self, a: u32, b: u32) -> Vec<u8> {
        [&self.tokens[a as usize][..], &self.tokens[b as usize]].concat()
    }

    /// Whether rank BPE takes `bytes` apart into exactly `pair`.
    fn splits_into(&self, bytes: &[u8], pair: (u32, u32)) -> bool {
        let mut ends: Vec<usize> = (1..=bytes.len()).collect();
        loop {
            let start = |i: usize| if i == 0 { 0 } else { ends[i - 1] };
            let rank = |i: usize| self.ranks.get(&bytes[start(i)..ends[i + 1]]);
            let lowest = (0..ends.len() - 1).filter_map(|i| Some((*rank(i)?, i))).min();
            match lowest {
                Some((_, i)) => ends.remove(i),
                None => break,
            };
        }
        let first = self.tokens[pair.0 as usize].len();
        ends == [first, bytes.len()]
    }
}

/// A piece of text in its present tokens, and how often it occurs.
struct Word {
    ranks: Vec<u32>,
    count: u64,
}

impl Word {
    fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.ranks.windows(2).map(|w| (w[0], w[1]))
    }

    fn merge(&mut self, pair: (u32, u32), rank: u32) {
        let mut merged = Vec::with_capacity(self.ranks.len());
        let mut rest = &self.ranks[..];
        while let [first, tail @ ..] = rest {
            let pairs = tail.first().is_some_and(|&second| (*first, second) == pair);
            merged.push(if pairs { rank } else { *first });
            rest = if pairs { &tail[1..] } else { tail };
        }
        self.ranks = merged;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_made_of_two_earlier_ones_by_rank_bpe() {
        let vocabulary = Vocabulary::train(6000);
        assert_eq!(vocabulary.tokens.len(), 6000);
        assert_eq!(vocabulary.ranks.len(), 6000, "no token twice");
        let mut earlier =
            Vocabulary { tokens: vocabulary.tokens[..256].to_vec(), ranks: HashMap::new() };
        for (rank, token) in vocabulary.tokens.iter().enumerate() {
            if rank >= 256 {
                let made = (1..token.len()).any(|cut| {
                    let part = |bytes: &[u8]| earlier.ranks.get(bytes).copied();
                    let pair = part(&token[..cut]).zip(part(&token[cut..]));
                    pair.is_some_and(|pair| earlier.splits_into(token, pair))
                });
                assert!(made, "{rank}: {:?}", String::from_utf8_lossy(token));
                earlier.tokens.push(token.clone());
            }
            earlier.ranks.insert(token.clone(), rank as u32);
        }
    }

    #[test]
    fn bytes_come_first_in_gpt2_order_and_words_follow() {
        let vocabulary = Vocabulary::train(1000);
        assert_eq!(&*vocabulary.tokens[0], b"!");
        assert_eq!(&*vocabulary.tokens[220], b" ");
        assert_eq!(&*vocabulary.tokens[188], b"\0");
        for word in [" the", " that", "ing"] {
            assert!(vocabulary.ranks.contains_key(word.as_bytes()), "{word:?}");
        }
        let mut file = Vec::new();
        vocabulary.write(&mut file).unwrap();
        assert!(file.starts_with(b"IQ== 0\nIg== 1\n"));
        assert_eq!(file.iter().filter(|&&b| b == b'\n').count(), 1000);
    }

    #[test]
    fn a_smaller_vocabulary_is_a_prefix_of_a_larger_one() {
        let (small, large) = (Vocabulary::train(256), Vocabulary::train(900));
        assert_eq!(small.tokens.len(), 256);
        assert_eq!(small.tokens[..], large.tokens[..256]);
    }
}

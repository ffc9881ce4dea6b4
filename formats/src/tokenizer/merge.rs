//! Rank BPE of one piece: repeatedly join the adjacent pair whose bytes have the lowest
//! rank, the leftmost on a tie, until no pair is a token.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::vocabulary::Vocabulary;

/// Not a rank: this part and its right neighbour are no token together.
const NO_PAIR: u32 = u32::MAX;

/// The working memory of [`Merger::encode`], kept between pieces.
#[derive(Default)]
pub(super) struct Merger {
    /// Indexed by the byte where a part starts; other entries are dead.
    parts: Vec<Part>,
    /// (rank, start) of every pair that was possible at some time.
    candidates: BinaryHeap<Reverse<(u32, u32)>>,
}

struct Part {
    /// Start of the part to the left.
    left: u32,
    /// Where this part ends and the next starts.
    end: u32,
    /// Token id of this part.
    id: u32,
    /// Rank of this part joined with the next.
    pair: u32,
}

impl Merger {
    /// Appends the ids of `piece`, in O(n log n) of its bytes: a piece can be 25,000
    /// characters of one kind, where looking through all pairs after each merge would take minutes.
    pub(super) fn encode(&mut self, vocabulary: &Vocabulary, piece: &[u8], ids: &mut Vec<u32>) {
        self.start(vocabulary, piece);
        while let Some(Reverse((rank, start))) = self.candidates.pop() {
            let left = start as usize;
            // A pair that has changed since it was pushed has another rank, or is dead.
            if self.parts[left].pair == rank {
                self.join(vocabulary, piece, left, rank);
            }
        }
        let mut at = 0;
        while at < piece.len() {
            ids.push(self.parts[at].id);
            at = self.parts[at].end as usize;
        }
    }

    fn start(&mut self, vocabulary: &Vocabulary, piece: &[u8]) {
        self.parts.clear();
        self.candidates.clear();
        for at in 0..piece.len() {
            let pair = piece.get(at..at + 2).and_then(|pair| vocabulary.id(pair));
            if let Some(rank) = pair {
                self.candidates.push(Reverse((rank, at as u32)));
            }
            self.parts.push(Part {
                left: at.saturating_sub(1) as u32,
                end: at as u32 + 1,
                id: vocabulary.byte_id(piece[at]),
                pair: pair.unwrap_or(NO_PAIR),
            });
        }
    }

    /// Joins the part at `left` with its right neighbour into token `id`.
    fn join(&mut self, vocabulary: &Vocabulary, piece: &[u8], left: usize, id: u32) {
        let right = self.parts[left].end as usize;
        let end = self.parts[right].end as usize;
        self.parts[right].pair = NO_PAIR;
        self.parts[left].end = end as u32;
        self.parts[left].id = id;
        if end < piece.len() {
            self.parts[end].left = left as u32;
        }
        self.renew(vocabulary, piece, left);
        if left > 0 {
            self.renew(vocabulary, piece, self.parts[left].left as usize);
        }
    }

    /// Looks up the pair of the part at `start` and its right neighbour again.
    fn renew(&mut self, vocabulary: &Vocabulary, piece: &[u8], start: usize) {
        let middle = self.parts[start].end as usize;
        let pair = match self.parts.get(middle) {
            Some(next) => vocabulary.id(&piece[start..next.end as usize]),
            None => None,
        };
        self.parts[start].pair = pair.unwrap_or(NO_PAIR);
        if let Some(rank) = pair {
            self.candidates.push(Reverse((rank, start as u32)));
        }
    }
}

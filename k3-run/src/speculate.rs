//! Prompt-lookup speculation: guess that the text goes on as it did before.
//!
//! The tokens that followed the last earlier occurrence of the newest few are taken in
//! together with the next token, in one step, and each is compared with what is chosen
//! from the logits before it. Those after the first that differs are undone. Since the
//! choice is made by the same sampler from the same logits in the same order, the reply
//! is that of plain decoding, token for token, greedy or with a seed; a guess only
//! decides how many tokens a step yields. (This is the rejection rule for a guess of
//! probability one: a token drawn from the model's distribution keeps the guess with the
//! guess's probability, and is distributed as the rest of it otherwise.)
//!
//! A step over more rows reads the dense weights once but more experts, so wrong guesses
//! cost time: the number of guesses follows how well they do, down to a pause.

use std::sync::atomic::AtomicBool;

use crate::engine::{Engine, Want};
use crate::session::{Part, Session, step};

/// Longest and shortest run of newest tokens that is looked up. One token alone says too
/// little.
const LOOKUP: [usize; 3] = [4, 3, 2];

/// How far back is searched, in tokens: a tenth of a millisecond.
const HORIZON: usize = 1 << 16;

/// Longest pause after wrong guesses, in steps.
const LONGEST_PAUSE: usize = 16;

/// Guesses tokens, as many as its luck allows.
#[derive(Debug, Clone)]
pub struct Drafter {
    most: usize,
    /// Guesses to make now, up to `most`.
    length: usize,
    /// Steps to let pass without a guess, and how many the next failure costs.
    pause: usize,
    penalty: usize,
    stats: DraftStats,
}

/// What guessing has brought.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Steps of the model.
    pub steps: u64,
    /// Tokens guessed.
    pub guessed: u64,
    /// Guesses that were right.
    pub right: u64,
}

impl Drafter {
    /// Up to `most` guesses a step; 0 is plain decoding.
    pub fn new(most: usize) -> Self {
        let stats = DraftStats::default();
        Self { most, length: most.min(4), pause: 0, penalty: 1, stats }
    }

    /// What guessing has brought so far.
    pub fn stats(&self) -> DraftStats {
        self.stats
    }

    /// Appends guesses of what follows `tokens` and then `next`, at most `room`, to `ids`.
    pub fn guess(&mut self, tokens: &[u32], next: u32, room: usize, ids: &mut Vec<u32>) {
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        let from = tokens.len().saturating_sub(HORIZON);
        let found = continuation(&tokens[from..], next);
        ids.extend_from_slice(&found[..found.len().min(self.length).min(room)]);
    }

    /// Notes how many of the guesses of a step were right.
    pub fn judge(&mut self, guessed: usize, right: usize) {
        self.stats.steps += 1;
        self.stats.guessed += guessed as u64;
        self.stats.right += right as u64;
        if guessed == 0 {
            return;
        }
        if right == guessed {
            self.length = (2 * self.length).clamp(1, self.most);
            self.penalty = 1;
        } else {
            self.length = (right + 1).min(self.most);
            if right == 0 {
                self.pause = self.penalty;
                self.penalty = (2 * self.penalty).min(LONGEST_PAUSE);
            }
        }
    }
}

/// What followed the last earlier occurrence of the longest run of newest tokens, of
/// which `next` is the newest.
fn continuation(tokens: &[u32], next: u32) -> &[u32] {
    for run in LOOKUP {
        let Some(start) = (tokens.len() + 1).checked_sub(run) else { continue };
        let before = &tokens[start..];
        // The position of `next` in an earlier occurrence; something must follow it.
        let at = (run - 1..tokens.len().saturating_sub(1))
            .rev()
            .find(|&at| tokens[at] == next && tokens[at + 1 - run..at] == *before);
        if let Some(at) = at {
            return &tokens[at + 1..];
        }
    }
    &[]
}

/// Takes `next` in, with guesses of what follows, and lets `choose` pick the token after
/// it, and after each guess that was right, from the logits `[vocab]`. Returns the last
/// choice, which is not taken in yet; `None` if `choose` had enough. The session then
/// holds `next` and the right guesses that `choose` has seen.
///
/// The session must keep undo records of one token more than there are guesses, or
/// nothing is guessed.
///
/// # Errors
/// See [`Engine::step`]; or that of `choose`.
pub fn decode(
    session: &mut Session,
    engine: &mut Engine<'_>,
    next: u32,
    drafter: &mut Drafter,
    cancel: &AtomicBool,
    mut choose: impl FnMut(&[f32]) -> anyhow::Result<Option<u32>>,
) -> anyhow::Result<Option<u32>> {
    let start = session.tokens().len();
    let mut ids = vec![next];
    let room = session.context().saturating_sub(start + 1);
    let room = room.min(engine.max_rows() - 1).min(session.undo_rows().saturating_sub(1));
    drafter.guess(session.tokens(), next, room, &mut ids);
    step(engine, &mut [Part { session, ids: &ids, want: Want::All }], cancel)?;
    let vocab = engine.model().config.vocab;
    let mut right = 0;
    let chosen = loop {
        let chosen = choose(&engine.logits()[right * vocab..][..vocab]);
        match (&chosen, ids.get(right + 1)) {
            (Ok(Some(chosen)), Some(guess)) if chosen == guess => right += 1,
            _ => break chosen,
        }
    };
    drafter.judge(ids.len() - 1, right);
    session.take_back(engine, start + 1 + right);
    chosen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_run_and_its_last_occurrence_count() {
        let tokens = [1, 2, 3, 4, 9, 3, 4, 7, 8, 2, 3];
        assert_eq!(continuation(&tokens, 4), &[9, 3, 4, 7, 8, 2, 3], "2 3 4 beats 3 4");
        assert_eq!(continuation(&tokens[5..], 4), &[7, 8, 2, 3]);
        assert_eq!(continuation(&tokens, 5), &[0; 0]);
        assert_eq!(continuation(&[], 5), &[0; 0]);
        assert_eq!(continuation(&[5, 5, 5], 5), &[5], "an occurrence may overlap itself");
    }

    #[test]
    fn guesses_follow_their_luck() {
        let mut drafter = Drafter::new(8);
        let tokens: Vec<u32> = (0..40).chain(0..2).collect();
        let count = |drafter: &mut Drafter, room| {
            let mut ids = Vec::new();
            drafter.guess(&tokens, 2, room, &mut ids);
            ids.len()
        };
        assert_eq!((count(&mut drafter, 3), count(&mut drafter, 9)), (3, 4));
        drafter.judge(4, 4);
        assert_eq!(count(&mut drafter, 9), 8);
        drafter.judge(8, 2);
        assert_eq!(count(&mut drafter, 9), 3);
        drafter.judge(3, 0);
        assert_eq!([0; 3].map(|_| count(&mut drafter, 9)), [0, 1, 1]);
        drafter.judge(1, 0);
        assert_eq!([0; 4].map(|_| count(&mut drafter, 9)), [0, 0, 1, 1]);
        assert_eq!(drafter.stats(), DraftStats { steps: 4, guessed: 16, right: 6 });
        let mut none = Drafter::new(0);
        assert_eq!(count(&mut none, 9), 0);
    }
}

//! Which half-life suits the routing: small copies of the policy, without any memory,
//! replay a sample of the experts, each with its own, and the one that hits most is
//! followed.
//!
//! Where routing repeats the last token, only a short half-life keeps what comes back;
//! where some experts are liked for long, a long one does. Both can be off by half.

use super::cache::{Cache, Key};

/// One in this many experts is replayed.
const SAMPLE: u32 = 8;

/// A copy that would keep fewer experts than this tells nothing.
const LEAST: usize = 4;

/// Steps over which hits are counted before the best is chosen, and again each so many.
const ROUND: u32 = 32;

/// The first candidate follows until there is something to go by: the best of the three
/// where liking drifts with the text.
const MIDDLE: f32 = 8.0;

/// See the module.
#[derive(Debug)]
pub(super) struct Duel {
    candidates: Vec<Candidate>,
    followed: usize,
    steps: u32,
}

#[derive(Debug)]
struct Candidate {
    half_life: f32,
    cache: Cache,
    /// Hits, those of former rounds fading.
    hits: usize,
}

impl Duel {
    /// For a cache that keeps `capacity` of `keys` experts, of which a step of one token
    /// uses `per_step`.
    pub(super) fn new(keys: usize, capacity: usize, per_step: usize) -> Self {
        let sampled = capacity / SAMPLE as usize;
        let used = per_step.div_ceil(SAMPLE as usize);
        let half_lives = [MIDDLE, recency(capacity as f32 / per_step.max(1) as f32), 64.0];
        let candidate = |half_life: f32| Candidate {
            half_life,
            cache: Cache::new(keys.div_ceil(SAMPLE as usize), sampled, sampled + used, half_life),
            hits: 0,
        };
        let tells = sampled >= LEAST && capacity < keys;
        let half_lives = if tells { &half_lives[..] } else { &half_lives[..1] };
        let candidates = half_lives.iter().map(|&h| candidate(h)).collect();
        Self { candidates, followed: 0, steps: 0 }
    }

    /// The half-life to follow now.
    pub(super) fn half_life(&self) -> f32 {
        self.candidates[self.followed].half_life
    }

    /// One layer's use of `keys`.
    pub(super) fn replay(&mut self, keys: impl Iterator<Item = Key> + Clone) {
        if self.candidates.len() > 1 {
            let sample = keys.filter(|key| key % SAMPLE == 0).map(|key| key / SAMPLE);
            for candidate in &mut self.candidates {
                candidate.hits += candidate.cache.replay(sample.clone());
            }
        }
    }

    /// Begins the next step; returns another half-life when it is time for one.
    pub(super) fn tick(&mut self) -> Option<f32> {
        for candidate in &mut self.candidates {
            candidate.cache.tick();
        }
        self.steps += 1;
        if !self.steps.is_multiple_of(ROUND) {
            return None;
        }
        let hits = |i: usize| self.candidates[i].hits;
        let best = (0..self.candidates.len()).max_by_key(|&i| hits(i))?;
        // A little better is not worth the change.
        let better = hits(best) > hits(self.followed) + hits(self.followed) / 64;
        for candidate in &mut self.candidates {
            candidate.hits -= candidate.hits / 4;
        }
        if !better {
            return None;
        }
        self.followed = best;
        Some(self.half_life())
    }
}

/// About the longest half-life, in steps, that still keeps what the last step used, for a
/// cache of `steps` times what one step uses; fitted to replays of routing that repeats
/// 29 % of the last token and is flat otherwise.
fn recency(steps: f32) -> f32 {
    1.2 * steps - 1.3
}

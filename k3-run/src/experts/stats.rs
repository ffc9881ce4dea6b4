//! What the expert store has done.

use std::time::Duration;

/// Ranks of the router's guess that are counted one by one.
pub const RANKS: usize = 16;

/// What the store has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExpertStats {
    /// Experts that were in the cache when a layer asked.
    pub hits: u64,
    /// Experts that had to be read, those begun early among them.
    pub misses: u64,
    /// Experts that were read, or begun, because former processes used them most.
    pub warmed: u64,
    /// Bytes of experts read, wasted ones and those of the warm start among them.
    pub bytes_read: u64,
    /// Experts that left the cache, or were not worth keeping after use.
    pub evictions: u64,
    /// Time the computation stood still for want of an expert.
    pub waited: Duration,
    /// Experts read before a layer asked.
    pub look_ahead: LookAheadStats,
}

/// What the router look-ahead was good for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LookAheadStats {
    /// Experts whose read was begun early.
    pub begun: u64,
    /// Those that the layer then asked for.
    pub used: u64,
    /// Bytes read of the others.
    pub wasted_bytes: u64,
    /// How good the guesses were, best rank first, read early or not.
    pub ranks: [Rank; RANKS],
}

/// One rank of the guess.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rank {
    /// Layers guessed.
    pub guessed: u64,
    /// Layers that then asked for the expert of this rank.
    pub right: u64,
}

impl ExpertStats {
    /// What was done since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let (new, old) = (&self.look_ahead, &earlier.look_ahead);
        Self {
            hits: self.hits - earlier.hits,
            misses: self.misses - earlier.misses,
            warmed: self.warmed - earlier.warmed,
            bytes_read: self.bytes_read - earlier.bytes_read,
            evictions: self.evictions - earlier.evictions,
            waited: self.waited.saturating_sub(earlier.waited),
            look_ahead: LookAheadStats {
                begun: new.begun - old.begun,
                used: new.used - old.used,
                wasted_bytes: new.wasted_bytes - old.wasted_bytes,
                ranks: std::array::from_fn(|r| Rank {
                    guessed: new.ranks[r].guessed - old.ranks[r].guessed,
                    right: new.ranks[r].right - old.ranks[r].right,
                }),
            },
        }
    }

    /// Part of the experts asked for that were in the cache, 0 to 1.
    pub fn hit_rate(&self) -> f64 {
        self.hits as f64 / (self.hits + self.misses).max(1) as f64
    }
}

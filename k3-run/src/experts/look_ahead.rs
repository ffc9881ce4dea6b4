//! How many experts of the next layer to read before it asks.
//!
//! The next layer's router, applied to this layer's input, guesses well at its first
//! ranks. A guess costs nothing while the disk would be idle: from the last read of one
//! layer to the first of the next.

use std::time::{Duration, Instant};

use super::stats::{LookAheadStats, RANKS};

/// Width of the look-ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LookAhead {
    /// As many experts as the disk can read while it would be idle.
    #[default]
    Auto,
    /// So many, or none at all for 0.
    Width(usize),
}

/// How far to look ahead for one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Width {
    /// Reads to begin.
    pub(super) experts: usize,
    /// Ranks of the guess among which they may be.
    pub(super) ranks: usize,
}

impl Width {
    /// Whether there is nothing to guess.
    pub fn is_none(self) -> bool {
        self.experts == 0 || self.ranks == 0
    }
}

/// Guesses of a rank before its hit rate counts.
const ENOUGH: u64 = 32;

/// Misses of a layer below which the next router's weights cost more time than they save.
const FEW_MISSES: f32 = 0.5;

/// Measures what the choice depends on.
#[derive(Debug)]
pub(super) struct Pace {
    wanted: LookAhead,
    /// Seconds from the last read of a layer to the first of the next, averaged.
    idle: Option<f32>,
    /// Seconds for one expert while the disk is busy, averaged.
    read: Option<f32>,
    /// Misses of a layer, averaged.
    misses: Option<f32>,
    /// When the layer asked for its reads, and for how many experts.
    asked: Option<(Instant, usize)>,
    idle_since: Option<Instant>,
    /// A guess was asked for since the last layer, so this is a step of few rows.
    decoding: bool,
}

fn average(of: &mut Option<f32>, sample: f32) {
    let old = of.unwrap_or(sample);
    *of = Some(old + (sample - old) / 8.0);
}

fn seconds(time: Duration) -> f32 {
    time.as_secs_f32()
}

impl Pace {
    pub(super) fn new(wanted: LookAhead) -> Self {
        Self {
            wanted,
            idle: None,
            read: None,
            misses: None,
            asked: None,
            idle_since: None,
            decoding: false,
        }
    }

    /// A layer asks; `misses` of its experts were not cached, and `reads` of them are
    /// still to be begun.
    pub(super) fn layer_asks(&mut self, misses: usize, reads: usize) {
        let now = Instant::now();
        if std::mem::take(&mut self.decoding) {
            average(&mut self.misses, misses as f32);
            if let Some(since) = self.idle_since {
                average(&mut self.idle, seconds(now - since));
            }
        }
        self.asked = (reads > 0).then_some((now, reads));
        self.idle_since = (reads == 0).then_some(now);
    }

    /// The last read that a layer asked for has ended.
    pub(super) fn reads_end(&mut self) {
        let now = Instant::now();
        if let Some((asked, reads)) = self.asked.take() {
            average(&mut self.read, seconds(now - asked) / reads as f32);
        }
        self.idle_since = Some(now);
    }

    /// How far to look ahead from a layer of a step of few rows.
    pub(super) fn width(&mut self, stats: &LookAheadStats) -> Width {
        self.decoding = true;
        let experts = match self.wanted {
            LookAhead::Width(width) => return Width { experts: width, ranks: width },
            LookAhead::Auto => match (self.idle, self.read) {
                _ if self.misses.is_none_or(|misses| misses < FEW_MISSES) => 0,
                (Some(idle), Some(read)) if read > 0.0 => (idle / read).ceil() as usize,
                _ => 0,
            },
        };
        // A wrong guess holds the disk up for a moment; worse than one in four is not worth it.
        let bad = |r: &usize| {
            let rank = stats.ranks[*r];
            rank.guessed >= ENOUGH && rank.right * 4 < rank.guessed
        };
        Width { experts, ranks: (0..RANKS).find(bad).unwrap_or(RANKS) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::stats::Rank;
    use super::*;

    fn pace(idle: f32, read: f32, misses: f32) -> Pace {
        let mut pace = Pace::new(LookAhead::Auto);
        (pace.idle, pace.read, pace.misses) = (Some(idle), Some(read), Some(misses));
        pace
    }

    #[test]
    fn as_many_as_fit_the_idle_time() {
        let stats = LookAheadStats::default();
        assert_eq!(pace(0.020, 0.013, 16.0).width(&stats).experts, 2);
        assert_eq!(pace(0.020, 0.002, 16.0).width(&stats).experts, 10);
        assert!(pace(0.020, 0.002, 0.1).width(&stats).is_none(), "nearly all cached");
        assert!(Pace::new(LookAhead::Auto).width(&stats).is_none(), "nothing measured");
        let fixed = Pace::new(LookAhead::Width(3)).width(&stats);
        assert_eq!(fixed, Width { experts: 3, ranks: 3 });
    }

    #[test]
    fn ranks_that_are_mostly_wrong_are_left_out() {
        let rank = |r: usize| Rank { guessed: 100, right: 95 - 10 * r.min(9) as u64 };
        let stats = LookAheadStats { ranks: std::array::from_fn(rank), ..Default::default() };
        assert_eq!(pace(1.0, 0.001, 16.0).width(&stats).ranks, 8, "25 % at rank 7, 15 % at rank 8");
    }

    #[test]
    fn only_steps_of_few_rows_are_measured() {
        let mut pace = Pace::new(LookAhead::Auto);
        pace.layer_asks(3, 3);
        pace.reads_end();
        pace.layer_asks(3, 3);
        assert_eq!((pace.misses, pace.idle), (None, None));
        assert!(pace.read.is_some());
        pace.reads_end();
        pace.width(&LookAheadStats::default());
        pace.layer_asks(3, 3);
        assert_eq!(pace.misses, Some(3.0));
        assert!(pace.idle.is_some());
    }
}

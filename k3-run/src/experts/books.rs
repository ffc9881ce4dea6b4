//! Who holds which slot and what is still to be read, all under one mutex.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use k3_formats::expert_table::ExpertEntry;

use super::buffer::{ExpertBuffer, PieceSum};
use super::cache::{Cache, Key};
use super::duel::Duel;
use super::look_ahead::Pace;
use super::source::{Job, Source};
use super::stats::ExpertStats;
use crate::trace::Trace;

/// How urgent a read is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    /// A layer waits for it.
    Demand,
    /// It is for a guess.
    Early,
    /// It is for the warm start.
    Warm,
}

/// Early and warm reads in flight: when the layer asks for others, they wait for no more than these.
const EARLY_READS: usize = 2;

/// What a slot is kept for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Holder {
    /// It is free, or cached and up to the cache.
    Cache,
    /// A layer that computes.
    Layer,
    /// A guess about the next layer.
    Guess,
    /// The cache, once it is read: what former processes used most.
    Warm,
    /// Nobody any more, but reads are under way.
    GivenUp,
}

#[derive(Debug)]
pub(super) struct Slot {
    /// Reserved when first needed.
    pub(super) buffer: Option<Arc<ExpertBuffer>>,
    pub(super) holder: Holder,
    /// Reads of this slot that wait or are under way.
    pub(super) left: usize,
    /// The first read that failed.
    pub(super) error: Option<io::Error>,
    /// Checksums of the pieces that were read, if experts are checked.
    sums: Vec<PieceSum>,
    /// Nobody has asked for it yet, and how many bytes were read so.
    guess: bool,
    bytes: u64,
}

/// See the module.
pub(super) struct Books {
    pub(super) cache: Cache,
    duel: Duel,
    pub(super) slots: Vec<Slot>,
    /// Reads that a layer waits for, and those for guesses, which come second.
    demand: VecDeque<Job>,
    early: VecDeque<Job>,
    /// Reads of the one expert that the warm start has begun, and those that follow, best
    /// last. They come third.
    warm: VecDeque<Job>,
    warm_next: Vec<(Key, ExpertEntry)>,
    early_reading: usize,
    /// Reads in `demand` or taken from it and not ended.
    demand_left: usize,
    pub(super) pace: Pace,
    pub(super) stats: ExpertStats,
    pub(super) trace: Option<Arc<Trace>>,
    pub(super) closing: bool,
    /// Steps that were begun.
    pub(super) steps: u32,
    /// The layer that asked last; an earlier one begins a step.
    layer: usize,
    /// Slots that hold guesses.
    guesses: Vec<usize>,
    /// The guess about a layer, best first.
    ranked: (usize, Vec<usize>),
}

impl Books {
    pub(super) fn new(cache: Cache, duel: Duel, slots: usize, pace: Pace) -> Self {
        let slot = || Slot {
            buffer: None,
            holder: Holder::Cache,
            left: 0,
            error: None,
            sums: Vec::new(),
            guess: false,
            bytes: 0,
        };
        Self {
            cache,
            duel,
            slots: (0..slots).map(|_| slot()).collect(),
            demand: VecDeque::with_capacity(256),
            early: VecDeque::with_capacity(64),
            warm: VecDeque::new(),
            warm_next: Vec::new(),
            early_reading: 0,
            demand_left: 0,
            pace,
            stats: ExpertStats::default(),
            trace: None,
            closing: false,
            steps: 0,
            layer: usize::MAX,
            guesses: Vec::with_capacity(super::stats::RANKS),
            ranked: (usize::MAX, Vec::with_capacity(super::stats::RANKS)),
        }
    }

    /// A layer asks for experts: tells the policy.
    pub(super) fn layer_asks(&mut self, layer: usize, keys: impl Iterator<Item = Key> + Clone) {
        if layer <= self.layer {
            if let Some(half_life) = self.duel.tick() {
                self.cache.set_half_life(half_life);
            }
            self.cache.tick();
            self.steps = self.steps.saturating_add(1);
        }
        self.layer = layer;
        self.duel.replay(keys);
    }

    /// Keeps the guess about a layer, best first, to see how good it was.
    pub(super) fn remember_guess(&mut self, layer: usize, ranked: impl Iterator<Item = usize>) {
        self.ranked.0 = layer;
        self.ranked.1.clear();
        self.ranked.1.extend(ranked.take(super::stats::RANKS));
    }

    /// Compares the guess about a layer, if there was one, with what it asks for.
    pub(super) fn count_ranks(&mut self, layer: usize, asked: &[usize]) {
        let (guessed, ranked) = &mut self.ranked;
        if *guessed == layer {
            for (rank, expert) in self.stats.look_ahead.ranks.iter_mut().zip(ranked) {
                rank.guessed += 1;
                rank.right += u64::from(asked.contains(expert));
            }
        }
        *guessed = usize::MAX;
    }

    /// The next read to do, and how urgent it is.
    pub(super) fn next_job(&mut self, source: &Source) -> Option<(Job, Urgency)> {
        if let Some(job) = self.demand.pop_front() {
            return Some((job, Urgency::Demand));
        }
        if self.early_reading >= EARLY_READS {
            return None;
        }
        let early = self.early.pop_front().map(|job| (job, Urgency::Early));
        let next = early.or_else(|| Some((self.next_warm(source)?, Urgency::Warm)))?;
        self.early_reading += 1;
        Some(next)
    }

    /// From now on, reads what is idle time's work: the experts of `wanted`, best last.
    pub(super) fn warm(&mut self, wanted: Vec<(Key, ExpertEntry)>) {
        self.warm_next = wanted;
    }

    fn next_warm(&mut self, source: &Source) -> Option<Job> {
        while self.warm.is_empty() {
            let (key, entry) = self.warm_next.pop()?;
            if !self.cache.is_half_free() {
                // What is used now is worth more than what was used then.
                self.warm_next = Vec::new();
                return None;
            }
            if self.cache.slot_of(key).is_none()
                && let Some(slot) = self.cache.take(key)
            {
                self.begin_reads(source, slot, key, &entry, Holder::Warm);
                self.stats.warmed += 1;
                if self.slots[slot].left == 0 {
                    // No memory for it: the slot goes back, and the warm start ends.
                    self.slots[slot].error = None;
                    self.slots[slot].holder = Holder::Cache;
                    self.cache.forget(slot);
                    self.warm_next = Vec::new();
                }
            }
        }
        self.warm.pop_front()
    }

    /// Lists the reads of a slot that was just taken.
    pub(super) fn begin_reads(
        &mut self,
        source: &Source,
        slot: usize,
        key: Key,
        entry: &ExpertEntry,
        holder: Holder,
    ) {
        let Self { slots, demand, early, warm, demand_left, guesses, .. } = self;
        let (taken, guess) = (&mut slots[slot], holder == Holder::Guess);
        taken.sums.clear(); // of reads that were given up
        (taken.holder, taken.guess, taken.bytes) = (holder, guess, 0);
        if guess {
            guesses.push(slot);
        }
        if taken.buffer.is_none() {
            match ExpertBuffer::new(source.shape) {
                Ok(buffer) => taken.buffer = Some(Arc::new(buffer)),
                Err(e) => return taken.error = Some(e),
            }
        }
        let buffer = taken.buffer.as_mut().expect("reserved above");
        source.jobs((slot, key), entry, source.read_bytes, buffer, |job| {
            taken.left += 1;
            match holder {
                Holder::Guess => early.push_back(job),
                Holder::Warm => warm.push_back(job),
                _ => demand.push_back(job),
            }
        });
        if holder == Holder::Layer {
            *demand_left += taken.left;
        }
    }

    /// A read has ended; returns whether that was the last one of its slot.
    pub(super) fn end_read(
        &mut self,
        slot: usize,
        bytes: usize,
        urgency: Urgency,
        result: io::Result<()>,
        checksum: Option<(PieceSum, u32)>,
    ) -> bool {
        let entry = &mut self.slots[slot];
        entry.left -= 1;
        let (ended, given_up) = (entry.left == 0, entry.holder == Holder::GivenUp);
        match result {
            Ok(()) => {
                entry.bytes += bytes as u64;
                self.stats.bytes_read += bytes as u64;
                if entry.guess && given_up {
                    self.stats.look_ahead.wasted_bytes += bytes as u64;
                }
            }
            Err(e) => {
                entry.error.get_or_insert(e);
            }
        }
        if let Some((piece, recorded)) = checksum {
            entry.sums.push(piece);
            if ended {
                let found = PieceSum::whole(std::mem::take(&mut entry.sums));
                if found != recorded {
                    let problem =
                        format!("expected CRC-32 {recorded:08x} as converted, found {found:08x}");
                    entry.error.get_or_insert(io::Error::new(io::ErrorKind::InvalidData, problem));
                }
            }
        }
        if ended && given_up {
            entry.error = None;
            entry.holder = Holder::Cache;
            self.cache.free(slot);
        } else if ended && self.slots[slot].holder == Holder::Warm {
            self.end_warm(slot);
        }
        match urgency {
            Urgency::Demand => self.end_demand(1),
            Urgency::Early | Urgency::Warm => self.early_reading -= 1,
        }
        ended
    }

    /// An expert of the warm start that nobody asked for meanwhile is there, or is not.
    fn end_warm(&mut self, slot: usize) {
        if self.slots[slot].error.take().is_some() {
            // Whoever needs it tries again, and is told.
            self.slots[slot].holder = Holder::Cache;
            self.cache.forget(slot);
        } else {
            self.release(slot);
        }
    }

    /// A layer asks for an expert that is being read, or was, as early as it could be.
    pub(super) fn claim(&mut self, slot: usize) {
        let entry = &mut self.slots[slot];
        let warm = entry.holder == Holder::Warm;
        (entry.holder, entry.guess) = (Holder::Layer, false);
        // What is not yet being read goes before all the rest.
        let queue = if warm { &mut self.warm } else { &mut self.early };
        while let Some(at) = queue.iter().rposition(|job| job.slot == slot) {
            self.demand.extend(queue.remove(at));
            self.demand.rotate_right(1);
            self.demand_left += 1;
        }
    }

    /// Takes the guesses that a layer asks for as its own and gives up the others.
    pub(super) fn settle_guesses(&mut self, wanted: impl Fn(Key) -> bool) {
        for i in (0..self.guesses.len()).rev() {
            let slot = self.guesses[i];
            if !wanted(self.cache.key_of(slot)) {
                self.give_up(slot);
                continue;
            }
            self.stats.look_ahead.used += 1;
            self.claim(slot);
        }
        self.guesses.clear();
    }

    /// Lets go of a slot that was asked for and will not be used: reads that have not begun
    /// are taken back, and it stays in the cache only if there were none.
    pub(super) fn give_up(&mut self, slot: usize) {
        let (demand, early) = (self.demand.len(), self.early.len());
        self.demand.retain(|job| job.slot != slot);
        self.early.retain(|job| job.slot != slot);
        let (demand, early) = (demand - self.demand.len(), early - self.early.len());
        let entry = &mut self.slots[slot];
        entry.left -= demand + early;
        if entry.guess {
            self.stats.look_ahead.wasted_bytes += entry.bytes;
        }
        if entry.left > 0 {
            entry.holder = Holder::GivenUp;
            self.cache.detach(slot);
        } else if entry.error.take().is_some() | (demand + early > 0) {
            entry.holder = Holder::Cache;
            self.cache.forget(slot);
        } else {
            self.release(slot);
        }
        if demand > 0 {
            self.end_demand(demand);
        }
    }

    /// Gives a whole slot to the cache.
    pub(super) fn release(&mut self, slot: usize) {
        self.slots[slot].holder = Holder::Cache;
        self.stats.evictions += u64::from(self.cache.unpin(slot));
    }

    fn end_demand(&mut self, reads: usize) {
        self.demand_left -= reads;
        if self.demand_left == 0 {
            self.pace.reads_end();
        }
    }
}

//! Which experts stay: those used most, where a use counts less the longer ago it was.
//!
//! Routing was trained flat, so a cache below one token's working set keeps nothing under
//! plain LRU. Here an expert's worth is the sum of its uses, each halved for every
//! half-life that passed since (Lee et al., LRFU): a short half-life is LRU, a long one
//! LFU. An expert that was read has a slot beyond the capacity while it is used, and
//! stays only if something else is worth less.
//!
//! All worths fade alike, so an expert's place among the others changes only when it is
//! used, and nothing is ever updated for those that are not. Every operation is O(1):
//! slots hang in one list per quarter of an octave of worth, and a bitmask tells the
//! lowest list that is not empty.

/// A routed expert: layer-major number among all experts of the model.
pub(super) type Key = u32;

const NONE: u32 = u32::MAX;

/// Worths are kept as logarithms to base 2 in units of 1/64.
const OCTAVE: u32 = 64;

/// Units of one list.
const LIST: u32 = OCTAVE / 4;

/// Lists, as many as bits in the mask.
const LISTS: u32 = u64::BITS;

/// Lists above that of one use just now: enough for an expert used in every step at the
/// longest half-life.
const ABOVE: u32 = 28;

/// What a worth that is kept for another process is counted from: this far below one use
/// just now, an expert is worth nothing.
const NOTHING: u32 = LISTS * LIST;

/// Steps after which a use may count half.
pub(super) const HALF_LIVES: std::ops::RangeInclusive<f32> = 0.125..=64.0;

#[derive(Debug, Clone, Copy)]
struct Slot {
    key: Key,
    linked: bool,
    next: u32,
    prev: u32,
}

/// The policy alone: keys and slot numbers, no memory and no I/O.
#[derive(Debug)]
pub(super) struct Cache {
    /// Worth of every expert, resident or not; grows with time like `now`.
    worths: Vec<u32>,
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Ring of (first to go, last to go); the list of `worth` is `worth / LIST % LISTS`.
    lists: [(u32, u32); LISTS as usize],
    occupied: u64,
    /// Slots in the lists, and how many may be.
    linked: usize,
    capacity: usize,
    /// Worth of one use in this step, and what it grows by from step to step.
    now: u32,
    pace: u32,
}

impl Cache {
    /// A cache that keeps `capacity` of `keys` experts, in `slots` places; uses count half
    /// after `half_life` steps.
    pub(super) fn new(keys: usize, capacity: usize, slots: usize, half_life: f32) -> Self {
        let slots_u32 = u32::try_from(slots).expect("slots fit the expert table");
        let empty = Slot { key: NONE, linked: false, next: NONE, prev: NONE };
        let mut cache = Self {
            worths: vec![0; keys],
            slot_of: vec![NONE; keys],
            slots: vec![empty; slots],
            free: (0..slots_u32).rev().collect(),
            lists: [(NONE, NONE); LISTS as usize],
            occupied: 0,
            linked: 0,
            capacity,
            // Far enough from zero for a key never used to be worth nothing.
            now: NOTHING,
            pace: 0,
        };
        cache.set_half_life(half_life);
        cache
    }

    /// Uses from now on count half after `steps`; what was used keeps its order.
    pub(super) fn set_half_life(&mut self, steps: f32) {
        let steps = steps.clamp(*HALF_LIVES.start(), *HALF_LIVES.end());
        self.pace = (OCTAVE as f32 / steps).round() as u32;
    }

    /// Begins the next step.
    pub(super) fn tick(&mut self) {
        let before = self.lowest();
        // At the fastest pace this lasts for eight million steps; then time stands still,
        // and the least used goes first for ever.
        self.now = self.now.saturating_add(self.pace).min(u32::MAX - ABOVE * LIST);
        // Lists that fall off the ring's end are worth next to nothing: their slots go
        // first in the lowest list that is left.
        let lowest = self.lowest();
        for list in (before..lowest).rev() {
            self.prepend(list % LISTS, lowest % LISTS);
        }
    }

    /// The slot that holds `key`.
    pub(super) fn slot_of(&self, key: Key) -> Option<usize> {
        let slot = self.slot_of[key as usize];
        (slot != NONE).then_some(slot as usize)
    }

    /// Counts one use of `key`, resident or not, and pins the slot that holds it.
    pub(super) fn use_key(&mut self, key: Key) -> Option<usize> {
        let slot = self.slot_of(key);
        if let Some(slot) = slot.filter(|&slot| self.slots[slot].linked) {
            self.unlink(slot as u32);
        }
        let worth = &mut self.worths[key as usize];
        *worth = add_worths(self.now, *worth).min(self.now + ABOVE * LIST - 1);
        slot
    }

    /// Takes a free slot for `key`, if there is one; it starts pinned.
    pub(super) fn take(&mut self, key: Key) -> Option<usize> {
        debug_assert!(self.slot_of(key).is_none(), "taken once");
        let slot = self.free.pop()?;
        self.slots[slot as usize].key = key;
        self.slot_of[key as usize] = slot;
        Some(slot as usize)
    }

    /// Lets a pinned slot go: it is the last to go among its equals, and if that is one
    /// more than may stay, the one worth least of all makes room. Returns whether one did.
    pub(super) fn unpin(&mut self, slot: usize) -> bool {
        debug_assert!(self.slots[slot].key != NONE && !self.slots[slot].linked, "pinned");
        self.link(slot as u32);
        let full = self.linked > self.capacity;
        if full {
            let lowest = self.lowest();
            let list = lowest + self.occupied.rotate_right(lowest % LISTS).trailing_zeros();
            let victim = self.lists[(list % LISTS) as usize].0;
            self.unlink(victim);
            self.forget(victim as usize);
        }
        full
    }

    /// The expert that a slot in use holds.
    pub(super) fn key_of(&self, slot: usize) -> Key {
        self.slots[slot].key
    }

    /// Empties a pinned slot, for instance after a failed read.
    pub(super) fn forget(&mut self, slot: usize) {
        self.detach(slot);
        self.free(slot);
    }

    /// Empties a pinned slot that cannot be taken yet; [`Cache::free`] follows.
    pub(super) fn detach(&mut self, slot: usize) {
        let key = std::mem::replace(&mut self.slots[slot].key, NONE);
        self.slot_of[key as usize] = NONE;
    }

    /// Lets a detached slot be taken.
    pub(super) fn free(&mut self, slot: usize) {
        self.free.push(slot as u32);
    }

    /// One layer's use of `keys` by the policy alone; returns how many were resident.
    pub(super) fn replay(&mut self, keys: impl Iterator<Item = Key> + Clone) -> usize {
        let mut hits = 0;
        for key in keys.clone() {
            hits += usize::from(self.use_key(key).is_some());
        }
        for key in keys {
            if let Some(slot) = self.slot_of(key).or_else(|| self.take(key)) {
                self.unpin(slot);
            }
        }
        hits
    }

    /// What every expert is worth against one use just now, 0 for nothing.
    pub(super) fn worths(&self) -> Vec<u16> {
        let worth = |&worth: &u32| (worth + NOTHING).saturating_sub(self.now) as u16;
        self.worths.iter().map(worth).collect()
    }

    /// Takes the worths of another process for those of this one, which has used nothing yet.
    /// Whatever they are, they count no more than the most that uses can.
    ///
    /// # Panics
    /// An expert was used, or there is another number of them.
    pub(super) fn remember(&mut self, worths: &[u16]) {
        assert!(self.worths.len() == worths.len() && self.worths.iter().all(|&worth| worth == 0));
        let most = NOTHING + ABOVE * LIST - 1;
        for (worth, &kept) in self.worths.iter_mut().zip(worths) {
            *worth = (self.now + u32::from(kept).min(most)).saturating_sub(NOTHING);
        }
    }

    /// Whether more than half of the slots are free.
    pub(super) fn is_half_free(&self) -> bool {
        2 * self.free.len() > self.slots.len()
    }

    /// Most experts that stay.
    pub(super) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The lowest list of the ring.
    fn lowest(&self) -> u32 {
        self.now / LIST + ABOVE + 1 - LISTS
    }

    fn list_of(&self, slot: u32) -> usize {
        let lowest = self.lowest();
        let worth = self.worths[self.slots[slot as usize].key as usize];
        ((worth / LIST).max(lowest) % LISTS) as usize
    }

    fn link(&mut self, slot: u32) {
        let list = self.list_of(slot);
        let (_, last) = self.lists[list];
        let entry = &mut self.slots[slot as usize];
        (entry.linked, entry.prev, entry.next) = (true, last, NONE);
        match last {
            NONE => self.lists[list].0 = slot,
            last => self.slots[last as usize].next = slot,
        }
        self.lists[list].1 = slot;
        self.occupied |= 1 << list;
        self.linked += 1;
    }

    fn unlink(&mut self, slot: u32) {
        let list = self.list_of(slot);
        let Slot { next, prev, .. } = self.slots[slot as usize];
        match prev {
            NONE => self.lists[list].0 = next,
            prev => self.slots[prev as usize].next = next,
        }
        match next {
            NONE => self.lists[list].1 = prev,
            next => self.slots[next as usize].prev = prev,
        }
        if self.lists[list].0 == NONE {
            self.occupied &= !(1 << list);
        }
        self.slots[slot as usize].linked = false;
        self.linked -= 1;
    }

    /// Hangs all of list `from` before the first of list `to`.
    fn prepend(&mut self, from: u32, to: u32) {
        let (from, to) = (from as usize, to as usize);
        let (first, last) = std::mem::replace(&mut self.lists[from], (NONE, NONE));
        if first == NONE {
            return;
        }
        self.occupied = self.occupied & !(1 << from) | 1 << to;
        match self.lists[to].0 {
            NONE => self.lists[to].1 = last,
            old => {
                self.slots[last as usize].next = old;
                self.slots[old as usize].prev = last;
            }
        }
        self.lists[to].0 = first;
    }
}

/// Logarithm of the sum of two worths given as logarithms.
fn add_worths(a: u32, b: u32) -> u32 {
    let apart = a.abs_diff(b) as f32 / OCTAVE as f32;
    a.max(b) + ((1.0 + (-apart).exp2()).log2() * OCTAVE as f32).round() as u32
}

#[cfg(test)]
mod tests;

//! Which experts stay: least frequently used goes first, oldest among equals.
//!
//! Routing was trained flat, so a cache below one token's working set keeps nothing
//! under plain LRU; counting uses keeps what comes back. Every operation is O(1): slots
//! hang in one list per use count, and a bitmask tells the lowest list that is not empty.

/// Use counts are kept below this; reaching it halves all of them, so old habits fade.
const MAX_COUNT: u8 = 63;

const NONE: u32 = u32::MAX;

/// A routed expert: layer-major number among all experts of the model.
pub(super) type Key = u32;

#[derive(Debug, Clone, Copy)]
struct Slot {
    key: Key,
    /// Which list the slot hangs in, or `NONE` while it is pinned or empty.
    list: u32,
    next: u32,
    prev: u32,
}

/// The policy alone: keys and slot numbers, no memory and no I/O.
#[derive(Debug)]
pub(super) struct Cache {
    /// Uses of every expert, resident or not.
    counts: Vec<u8>,
    slot_of: Vec<u32>,
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Per count: (oldest, newest) slot of the list.
    lists: Vec<(u32, u32)>,
    occupied: u64,
}

impl Cache {
    /// A cache of `slots` places for `keys` experts.
    pub(super) fn new(keys: usize, slots: usize) -> Self {
        let slots_u32 = u32::try_from(slots).expect("slots fit the expert table");
        let empty = Slot { key: NONE, list: NONE, next: NONE, prev: NONE };
        Self {
            counts: vec![0; keys],
            slot_of: vec![NONE; keys],
            slots: vec![empty; slots],
            free: (0..slots_u32).rev().collect(),
            lists: vec![(NONE, NONE); usize::from(MAX_COUNT) + 1],
            occupied: 0,
        }
    }

    /// The slot that holds `key`.
    pub(super) fn slot_of(&self, key: Key) -> Option<usize> {
        let slot = self.slot_of[key as usize];
        (slot != NONE).then_some(slot as usize)
    }

    /// Counts one use of `key`, resident or not.
    pub(super) fn count_use(&mut self, key: Key) {
        let count = &mut self.counts[key as usize];
        *count += 1;
        if *count >= MAX_COUNT {
            self.age();
        }
    }

    /// Takes a slot for `key`: a free one, else the least used that is not pinned. The new
    /// holder starts pinned. Returns `None` when every slot is pinned.
    pub(super) fn take(&mut self, key: Key) -> Option<(usize, Option<Key>)> {
        debug_assert!(self.slot_of(key).is_none(), "taken once");
        let (slot, evicted) = match self.free.pop() {
            Some(slot) => (slot, None),
            None => {
                let slot = self.victim()?;
                self.unlink(slot);
                let old = self.slots[slot as usize].key;
                self.slot_of[old as usize] = NONE;
                (slot, Some(old))
            }
        };
        self.slots[slot as usize].key = key;
        self.slot_of[key as usize] = slot;
        Some((slot as usize, evicted))
    }

    /// Keeps the slot from being taken.
    pub(super) fn pin(&mut self, slot: usize) {
        if self.slots[slot].list != NONE {
            self.unlink(slot as u32);
        }
    }

    /// Lets the slot be taken again; it becomes the newest among its equals.
    pub(super) fn unpin(&mut self, slot: usize) {
        let entry = self.slots[slot];
        if entry.key != NONE && entry.list == NONE {
            self.link(slot as u32, u32::from(self.counts[entry.key as usize]));
        }
    }

    /// Empties a pinned slot, for instance after a failed read.
    pub(super) fn forget(&mut self, slot: usize) {
        let key = std::mem::replace(&mut self.slots[slot].key, NONE);
        if key != NONE {
            self.slot_of[key as usize] = NONE;
            self.free.push(slot as u32);
        }
    }

    fn victim(&self) -> Option<u32> {
        (self.occupied != 0).then(|| self.lists[self.occupied.trailing_zeros() as usize].0)
    }

    fn link(&mut self, slot: u32, list: u32) {
        let (_, newest) = self.lists[list as usize];
        let entry = &mut self.slots[slot as usize];
        (entry.list, entry.prev, entry.next) = (list, newest, NONE);
        match newest {
            NONE => self.lists[list as usize].0 = slot,
            newest => self.slots[newest as usize].next = slot,
        }
        self.lists[list as usize].1 = slot;
        self.occupied |= 1 << list;
    }

    fn unlink(&mut self, slot: u32) {
        let Slot { list, next, prev, .. } = self.slots[slot as usize];
        match prev {
            NONE => self.lists[list as usize].0 = next,
            prev => self.slots[prev as usize].next = next,
        }
        match next {
            NONE => self.lists[list as usize].1 = prev,
            next => self.slots[next as usize].prev = prev,
        }
        if self.lists[list as usize].0 == NONE {
            self.occupied &= !(1 << list);
        }
        self.slots[slot as usize].list = NONE;
    }

    /// Halves every count; lists are merged two by two, the less used half first.
    fn age(&mut self) {
        for count in &mut self.counts {
            *count /= 2;
        }
        let linked: Vec<u32> = self.in_order().collect();
        for &slot in &linked {
            self.unlink(slot);
        }
        for slot in linked {
            let key = self.slots[slot as usize].key;
            self.link(slot, u32::from(self.counts[key as usize]));
        }
    }

    /// Unpinned slots from the first to go to the last.
    fn in_order(&self) -> impl Iterator<Item = u32> {
        let slot = |n: u32| (n != NONE).then_some(n);
        self.lists.iter().flat_map(move |&(oldest, _)| {
            std::iter::successors(slot(oldest), move |&n| slot(self.slots[n as usize].next))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One use as the store does it; `true` on a hit.
    fn touch(cache: &mut Cache, key: Key) -> bool {
        cache.count_use(key);
        let hit = cache.slot_of(key);
        match hit {
            Some(slot) => cache.pin(slot),
            None => {
                cache.take(key).expect("nothing is pinned for long");
            }
        }
        cache.unpin(cache.slot_of(key).unwrap());
        hit.is_some()
    }

    #[test]
    fn least_used_then_oldest_goes_first() {
        let mut cache = Cache::new(10, 3);
        for key in [0, 1, 2, 0, 2, 2] {
            touch(&mut cache, key);
        }
        touch(&mut cache, 3); // 1 was used once
        assert_eq!(cache.slot_of(1), None);
        touch(&mut cache, 4); // 3 was used once
        assert_eq!(cache.slot_of(3), None);
        assert!(cache.slot_of(0).is_some() && cache.slot_of(2).is_some());
    }

    #[test]
    fn pinned_slots_are_never_taken() {
        let mut cache = Cache::new(10, 2);
        let (a, _) = cache.take(0).unwrap();
        let (b, _) = cache.take(1).unwrap();
        assert_eq!(cache.take(2), None);
        cache.unpin(b);
        assert_eq!(cache.take(2), Some((b, Some(1))));
        cache.forget(b);
        assert_eq!(cache.slot_of(2), None);
        assert_eq!(cache.take(3), Some((b, None)));
        assert_eq!(cache.slot_of(0), Some(a));
    }

    #[test]
    fn a_cyclic_scan_larger_than_the_cache_still_hits() {
        // LRU would never hit here; keys 0..4 come twice as often as the rest.
        let mut cache = Cache::new(40, 8);
        let mut hits = 0;
        for round in 0..200 {
            for key in (0..4).chain((4..40).filter(|k| k % 2 == round % 2)) {
                hits += u32::from(touch(&mut cache, key));
            }
        }
        assert!(hits > 700, "{hits} hits");
    }

    #[test]
    fn random_use_keeps_the_books() {
        let mut cache = Cache::new(50, 7);
        let mut rng = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            touch(&mut cache, rng.u32(0..50).min(rng.u32(0..50)));
            let resident: Vec<_> = (0..50).filter_map(|k| cache.slot_of(k)).collect();
            assert!(resident.len() <= 7);
            assert_eq!(cache.in_order().count(), resident.len());
            let unique: std::collections::HashSet<_> = resident.iter().collect();
            assert_eq!(unique.len(), resident.len());
        }
    }
}

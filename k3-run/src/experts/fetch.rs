//! The experts of one layer on their way to the computation.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use anyhow::anyhow;
use k3_formats::Error;
use k3_formats::container::Container;
use k3_formats::tensor_name::ExpertPart;

use super::ExpertStore;
use super::books::{Books, Holder};
use super::buffer::ExpertBuffer;
use super::look_ahead::Width;

/// What to do about an expert whose file was missing at the start.
const FETCH_IT: &str = "download the file again, or give its folder with --snapshot, and start \
     again; --allow-missing let it be missing until an expert of it was needed";

/// Memory of a [`Fetch`], reused from layer to layer.
#[derive(Debug, Default)]
pub struct FetchLists {
    /// (expert, slot): in the cache or being read, and not yet taken. Cached ones first.
    pending: Vec<(usize, usize)>,
    /// Not yet given to a reader; the next one last.
    missing: Vec<usize>,
}

/// The experts of one layer on their way.
pub struct Fetch<'a> {
    store: &'a ExpertStore,
    container: &'a Container,
    layer: usize,
    lists: &'a mut FetchLists,
}

/// One expert in memory, kept there until it is given back.
pub struct Loaded {
    /// Number of the expert in its layer.
    pub expert: usize,
    /// Its weights.
    pub weights: Arc<ExpertBuffer>,
    slot: usize,
}

impl ExpertStore {
    /// Asks for the `experts` of a layer, all different; each must be taken from the result
    /// once.
    pub fn fetch<'a>(
        &'a self,
        container: &'a Container,
        layer: usize,
        experts: &[usize],
        lists: &'a mut FetchLists,
    ) -> Fetch<'a> {
        lists.pending.clear();
        lists.missing.clear();
        let mut books = self.shared.lock();
        let keys = experts.iter().map(|&expert| self.shared.key(layer, expert));
        books.layer_asks(layer, keys.clone());
        books.count_ranks(layer, experts);
        books.settle_guesses(|key| keys.clone().any(|wanted| wanted == key));
        let hits = books.stats.hits;
        for (key, &expert) in keys.zip(experts) {
            match books.cache.use_key(key) {
                None => lists.missing.push(expert),
                Some(slot) => {
                    // A guess that came true was read for this layer.
                    let cached = books.slots[slot].holder == Holder::Cache;
                    books.stats.hits += u64::from(cached);
                    books.claim(slot);
                    lists.pending.push((expert, slot));
                }
            }
        }
        let misses = experts.len() as u64 - (books.stats.hits - hits);
        books.stats.misses += misses;
        books.pace.layer_asks(misses as usize, lists.missing.len());
        // Taken from the end: first in the file, first read.
        lists.missing.sort_unstable_by_key(|&e| {
            let entry = self.shared.source.places.entry(container, layer, e);
            std::cmp::Reverse(entry.part(ExpertPart::GatePacked))
        });
        let mut fetch = Fetch { store: self, container, layer, lists };
        fetch.admit(&mut books);
        drop(books);
        fetch
    }

    /// How many experts of `layer`, the next one of a step of few rows, are worth reading
    /// before it asks; none if guessing is not worth its time.
    pub fn look_ahead(&self, layer: usize) -> Width {
        let shared = &*self.shared;
        let mut books = shared.lock();
        let Books { pace, stats, cache, .. } = &mut *books;
        let width = pace.width(&stats.look_ahead);
        let mut keys = (0..self.per_layer).map(|expert| shared.key(layer, expert));
        let all_there = width.is_none() || keys.all(|key| cache.slot_of(key).is_some());
        if all_there { Width::default() } else { width }
    }

    /// Begins to read those of the `ranked` experts of a layer that are missing, best
    /// first, within `width` and while there is room. `ranked` goes through the ranks of
    /// `rows` rows, all rows of a rank together.
    pub fn read_early(
        &self,
        container: &Container,
        layer: usize,
        ranked: impl Iterator<Item = usize> + Clone,
        rows: usize,
        width: Width,
    ) {
        let shared = &*self.shared;
        let mut books = shared.lock();
        books.settle_guesses(|_| false);
        if rows == 1 {
            books.remember_guess(layer, ranked.clone());
        }
        let mut left = width.experts;
        for expert in ranked.take(width.ranks * rows) {
            let key = shared.key(layer, expert);
            if left == 0 || books.cache.slot_of(key).is_some() {
                continue;
            }
            let Some(slot) = books.cache.take(key) else { break };
            let entry = shared.source.places.entry(container, layer, expert);
            books.begin_reads(&shared.source, slot, key, &entry, Holder::Guess);
            books.stats.look_ahead.begun += 1;
            left -= 1;
        }
        drop(books);
        shared.jobs.notify_all();
    }
}

impl Fetch<'_> {
    /// Puts up to `most` experts that are there into `ready`, which must come empty; if
    /// none is, waits for one, unless `wait` is false. Leaves it empty when every expert
    /// was taken.
    ///
    /// # Errors
    /// A read failed: names shard, layer and expert.
    pub fn ready(
        &mut self,
        ready: &mut Vec<Loaded>,
        most: usize,
        wait: bool,
    ) -> anyhow::Result<()> {
        debug_assert!(ready.is_empty(), "given back first");
        let shared = &*self.store.shared;
        let mut books = shared.lock();
        let mut since = None;
        while !(self.lists.pending.is_empty() && self.lists.missing.is_empty()) {
            self.admit(&mut books);
            // From the end: what was read before what was cached, so that slots come free.
            for i in (0..self.lists.pending.len()).rev() {
                let (expert, slot) = self.lists.pending[i];
                let entry = &books.slots[slot];
                if entry.left > 0 || ready.len() == most {
                    continue;
                }
                self.lists.pending.remove(i);
                if entry.error.is_some() {
                    ready.drain(..).for_each(|loaded| books.release(loaded.slot));
                    return Err(self.failure(&mut books, expert, slot));
                }
                let weights = entry.buffer.clone().expect("reserved when its reads began");
                ready.push(Loaded { expert, weights, slot });
            }
            if !ready.is_empty() || !wait {
                break;
            }
            since.get_or_insert_with(Instant::now);
            books = shared.landed.wait(books).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(since) = since {
            books.stats.waited += since.elapsed();
        }
        Ok(())
    }

    /// Gives experts back, so that others may take their places.
    pub fn give_back(&mut self, ready: &mut Vec<Loaded>) {
        let mut books = self.store.shared.lock();
        for Loaded { slot, weights, .. } in ready.drain(..) {
            drop(weights);
            books.release(slot);
        }
        self.admit(&mut books);
    }

    /// Hands missing experts to the readers while there is room.
    fn admit(&mut self, books: &mut Books) {
        let shared = &*self.store.shared;
        let mut admitted = false;
        while let Some(&expert) = self.lists.missing.last() {
            let key = shared.key(self.layer, expert);
            let Some(slot) = books.cache.take(key) else { break };
            let entry = shared.source.places.entry(self.container, self.layer, expert);
            books.begin_reads(&shared.source, slot, key, &entry, Holder::Layer);
            self.lists.missing.pop();
            self.lists.pending.push((expert, slot));
            admitted = true;
        }
        if admitted {
            shared.jobs.notify_all();
        }
    }

    fn failure(&self, books: &mut Books, expert: usize, slot: usize) -> anyhow::Error {
        let error = books.slots[slot].error.take().expect("the caller saw an error");
        books.slots[slot].holder = Holder::Cache;
        books.cache.forget(slot);
        let source = &self.store.shared.source;
        let entry = source.places.entry(self.container, self.layer, expert);
        let (shard, offset) = entry.part(ExpertPart::GatePacked);
        let (shards, layer) = (&source.shards, self.layer);
        let dir = shards.dir(shard).map(|d| d.display().to_string()).unwrap_or_default();
        let name = shards.name(shard);
        let what = format!("cannot read layer {layer} expert {expert} at byte {offset} of {name}");
        match shards.trouble(shard) {
            Some(trouble) => Error::missing(format!("{what}: {trouble}")).hint(FETCH_IT).into(),
            None => anyhow!(error).context(format!("{what} in {dir}")),
        }
    }
}

impl Drop for Fetch<'_> {
    /// Gives up what was asked for and not taken, after an error or a cancelled step.
    fn drop(&mut self) {
        if !self.lists.pending.is_empty() {
            let mut books = self.store.shared.lock();
            self.lists.pending.drain(..).for_each(|(_, slot)| books.give_up(slot));
        }
    }
}

//! Routed experts: a cache of slots, filled from the original shards by reader threads.
//!
//! A layer asks for its experts with [`ExpertStore::fetch`], which lists the misses for
//! the readers in disk order, and takes them as they land with [`Fetch::ready`]. Which
//! ones were cached and in which order they land changes when work is done, never what
//! is computed.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use k3_formats::container::Container;
use k3_formats::expert_table::ExpertEntry;
use k3_formats::tensor_name::ExpertPart;

mod buffer;
mod cache;
mod shards;

pub use buffer::{ExpertBuffer, ExpertShape};
pub use shards::{DirectIo, ReadAt};

use cache::{Cache, Key};
use shards::Shards;
pub(crate) use shards::{DIRECT_ALIGN, fill, open_direct};

/// How experts are kept and read.
#[derive(Debug, Clone)]
pub struct ExpertOptions {
    /// Folders with the shards, searched in this order.
    pub dirs: Vec<PathBuf>,
    /// Memory for cached experts, in bytes; at least one expert is always kept.
    pub cache_bytes: u64,
    /// Whether to read around the page cache.
    pub direct_io: DirectIo,
    /// Reads in flight.
    pub readers: usize,
}

/// What the store has done so far.
#[derive(Debug, Clone, Copy, Default)]
pub struct ExpertStats {
    /// Experts that were in the cache when a layer asked.
    pub hits: u64,
    /// Experts that were read.
    pub misses: u64,
    /// Bytes of experts read.
    pub bytes_read: u64,
    /// Experts that made room for others.
    pub evictions: u64,
    /// Time the computation stood still for want of an expert.
    pub waited: Duration,
}

struct Job {
    slot: usize,
    entry: ExpertEntry,
    buffer: ExpertBuffer,
}

enum Slot {
    Unused,
    Loading,
    Ready(Arc<ExpertBuffer>),
    Failed(std::io::Error),
}

struct State {
    cache: Cache,
    slots: Vec<Slot>,
    queue: VecDeque<Job>,
    /// Slots being read that nobody waits for any more.
    orphans: Vec<usize>,
    closing: bool,
    stats: ExpertStats,
}

struct Shared {
    state: Mutex<State>,
    /// Readers wait here for jobs.
    jobs: Condvar,
    /// The computation waits here for experts.
    landed: Condvar,
    shards: Shards,
    shape: ExpertShape,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere is already on its way up; the books are still consistent.
        self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// The experts of a model.
pub struct ExpertStore {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
    first_layer: usize,
    per_layer: usize,
    slots: usize,
}

impl ExpertStore {
    /// Finds the shards and starts the readers; what the user should know goes to `notes`.
    ///
    /// # Errors
    /// Shards are missing or changed, or direct reads were demanded and do not work.
    pub fn open(
        container: &Container,
        options: &ExpertOptions,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Self> {
        let config = &container.config;
        let mut shards = Shards::find(&container.manifest.shards, &options.dirs, notes)?;
        shards.choose_io(options.direct_io)?;
        let shape = ExpertShape::new(config);
        let experts = config.moe_layers().len() * config.moe.experts;
        let wanted = options.cache_bytes / shape.slot_bytes() as u64;
        let slots = usize::try_from(wanted).unwrap_or(usize::MAX).min(experts).max(1);
        let state = State {
            cache: Cache::new(experts, slots),
            slots: (0..slots).map(|_| Slot::Unused).collect(),
            queue: VecDeque::new(),
            orphans: Vec::new(),
            closing: false,
            stats: ExpertStats::default(),
        };
        let shared = Arc::new(Shared {
            state: Mutex::new(state),
            jobs: Condvar::new(),
            landed: Condvar::new(),
            shards,
            shape,
        });
        let readers = (0..options.readers.clamp(1, slots))
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("k3-read-{i}"))
                    .spawn(move || read_jobs(&shared))
                    .context("cannot start a reader thread")
            })
            .collect::<anyhow::Result<_>>()?;
        let (first_layer, per_layer) = (config.moe_layers().start, config.moe.experts);
        Ok(Self { shared, readers, first_layer, per_layer, slots })
    }

    /// Experts the cache can hold.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Memory of the cache when full, in bytes.
    pub fn cache_bytes(&self) -> u64 {
        self.slots as u64 * self.shared.shape.slot_bytes() as u64
    }

    /// Bytes of one expert as stored.
    pub fn expert_bytes(&self) -> usize {
        self.shared.shape.bytes()
    }

    /// Whether reads go around the page cache.
    pub fn is_direct(&self) -> bool {
        self.shared.shards.is_direct()
    }

    /// What was done so far.
    pub fn stats(&self) -> ExpertStats {
        self.shared.lock().stats
    }

    /// Asks for the `experts` of a layer; each must be taken from the result once.
    pub fn fetch<'a>(
        &'a self,
        container: &'a Container,
        layer: usize,
        experts: &[usize],
    ) -> Fetch<'a> {
        let mut fetch =
            Fetch { store: self, container, layer, resident: Vec::new(), missing: Vec::new() };
        let mut state = self.shared.lock();
        for &expert in experts {
            let key = self.key(layer, expert);
            state.cache.count_use(key);
            match state.cache.slot_of(key) {
                Some(slot) => {
                    state.cache.pin(slot);
                    state.orphans.retain(|&orphan| orphan != slot);
                    state.stats.hits += 1;
                    fetch.resident.push((expert, slot));
                }
                None => fetch.missing.push(expert),
            }
        }
        state.stats.misses += fetch.missing.len() as u64;
        // Popped from the end: first in the file, first read.
        fetch.missing.sort_by_key(|&e| {
            let part = container.experts.entry(layer, e).part(ExpertPart::GatePacked);
            std::cmp::Reverse(part)
        });
        fetch.admit(&mut state);
        drop(state);
        fetch
    }

    fn key(&self, layer: usize, expert: usize) -> Key {
        ((layer - self.first_layer) * self.per_layer + expert) as Key
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.jobs.notify_all();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

/// The experts of one layer on their way.
pub struct Fetch<'a> {
    store: &'a ExpertStore,
    container: &'a Container,
    layer: usize,
    /// (expert, slot): in the cache or being read, pinned, not yet taken.
    resident: Vec<(usize, usize)>,
    /// Not yet given to a reader; the next one last.
    missing: Vec<usize>,
}

/// One expert in memory, kept there until it is given back.
pub struct Loaded {
    /// Number of the expert in its layer.
    pub expert: usize,
    /// Its weights.
    pub weights: Arc<ExpertBuffer>,
    slot: usize,
}

impl Fetch<'_> {
    /// Waits until at least one expert is there and puts all that are into `ready`, which
    /// must come empty. Leaves it empty when every expert was taken.
    ///
    /// # Errors
    /// A read failed: names shard, layer and expert.
    pub fn ready(&mut self, ready: &mut Vec<Loaded>) -> anyhow::Result<()> {
        debug_assert!(ready.is_empty(), "given back first");
        let shared = &self.store.shared;
        let mut state = shared.lock();
        let mut since = None;
        while ready.is_empty() && !(self.resident.is_empty() && self.missing.is_empty()) {
            self.admit(&mut state);
            let mut i = 0;
            while i < self.resident.len() {
                let (expert, slot) = self.resident[i];
                match &state.slots[slot] {
                    Slot::Ready(weights) => {
                        ready.push(Loaded { expert, weights: Arc::clone(weights), slot });
                        self.resident.swap_remove(i);
                    }
                    Slot::Failed(_) => return Err(self.failure(&mut state, i)),
                    Slot::Loading | Slot::Unused => i += 1,
                }
            }
            if ready.is_empty() {
                since.get_or_insert_with(Instant::now);
                state =
                    shared.landed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            }
        }
        if let Some(since) = since {
            state.stats.waited += since.elapsed();
        }
        Ok(())
    }

    /// Gives experts back, so that others may take their places.
    pub fn give_back(&mut self, ready: &mut Vec<Loaded>) {
        let mut state = self.store.shared.lock();
        for Loaded { slot, weights, .. } in ready.drain(..) {
            drop(weights);
            state.cache.unpin(slot);
        }
        self.admit(&mut state);
    }

    /// Hands missing experts to the readers while there is room.
    fn admit(&mut self, state: &mut State) {
        while let Some(&expert) = self.missing.last() {
            let key = self.store.key(self.layer, expert);
            let Some((slot, evicted)) = state.cache.take(key) else { return };
            state.stats.evictions += u64::from(evicted.is_some());
            let old = std::mem::replace(&mut state.slots[slot], Slot::Loading);
            let reused = match old {
                // Unpinned, so no `Loaded` holds it any more.
                Slot::Ready(buffer) => Arc::try_unwrap(buffer).ok(),
                _ => None,
            };
            match reused.map_or_else(|| ExpertBuffer::new(self.store.shared.shape), Ok) {
                Ok(buffer) => {
                    let entry = *self.container.experts.entry(self.layer, expert);
                    state.stats.bytes_read += self.store.expert_bytes() as u64;
                    state.queue.push_back(Job { slot, entry, buffer });
                    self.store.shared.jobs.notify_one();
                }
                Err(e) => state.slots[slot] = Slot::Failed(e),
            }
            self.missing.pop();
            self.resident.push((expert, slot));
        }
    }

    fn failure(&mut self, state: &mut State, i: usize) -> anyhow::Error {
        let (expert, slot) = self.resident.swap_remove(i);
        let old = std::mem::replace(&mut state.slots[slot], Slot::Unused);
        state.cache.forget(slot);
        let Slot::Failed(error) = old else { unreachable!("the caller saw a failure") };
        let (shard, offset) =
            self.container.experts.entry(self.layer, expert).part(ExpertPart::GatePacked);
        let shards = &self.store.shared.shards;
        let dir = shards.dir(shard).map(|d| d.display().to_string()).unwrap_or_default();
        anyhow!(error).context(format!(
            "cannot read layer {} expert {expert} at byte {offset} of {} in {dir}",
            self.layer,
            shards.name(shard),
        ))
    }
}

impl Drop for Fetch<'_> {
    /// Gives up what was asked for and not taken, after an error or a cancelled step.
    fn drop(&mut self) {
        let mut state = self.store.shared.lock();
        for (_, slot) in self.resident.drain(..) {
            // A read under way keeps its pin; its reader lets go of it.
            if matches!(state.slots[slot], Slot::Ready(_)) {
                state.cache.unpin(slot);
            } else if matches!(state.slots[slot], Slot::Failed(_)) {
                state.slots[slot] = Slot::Unused;
                state.cache.forget(slot);
            } else {
                state.orphan(slot);
            }
        }
    }
}

impl State {
    /// Takes a read back that nobody waits for, unless a reader already has it.
    fn orphan(&mut self, slot: usize) {
        if let Some(at) = self.queue.iter().position(|job| job.slot == slot) {
            self.queue.remove(at);
            self.slots[slot] = Slot::Unused;
            self.cache.forget(slot);
        } else {
            self.orphans.push(slot);
        }
    }

    /// A read that nobody waits for has ended: its slot is free to be taken.
    fn settle_orphan(&mut self, slot: usize) {
        let Some(at) = self.orphans.iter().position(|&o| o == slot) else { return };
        self.orphans.swap_remove(at);
        if matches!(self.slots[slot], Slot::Ready(_)) {
            self.cache.unpin(slot);
        } else {
            self.slots[slot] = Slot::Unused;
            self.cache.forget(slot);
        }
    }
}

fn read_jobs(shared: &Shared) {
    let mut state = shared.lock();
    loop {
        if state.closing {
            return;
        }
        let Some(mut job) = state.queue.pop_front() else {
            state = shared.jobs.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner);
            continue;
        };
        drop(state);
        let result = read_expert(shared, &job.entry, &mut job.buffer);
        state = shared.lock();
        state.slots[job.slot] = match result {
            Ok(()) => Slot::Ready(Arc::new(job.buffer)),
            Err(e) => Slot::Failed(e),
        };
        state.settle_orphan(job.slot);
        shared.landed.notify_all();
    }
}

/// Reads one expert with one positioned read, or part by part where its parts are apart.
fn read_expert(
    shared: &Shared,
    entry: &ExpertEntry,
    buffer: &mut ExpertBuffer,
) -> std::io::Result<()> {
    let (shape, shards) = (&shared.shape, &shared.shards);
    if let Some((shard, offset)) = entry.run() {
        if shards.is_direct() {
            let start = (offset % DIRECT_ALIGN as u64) as usize;
            let needed = start + shape.bytes();
            let window = &mut buffer.window(start)[..needed.next_multiple_of(DIRECT_ALIGN)];
            match fill(shards.direct(shard)?, window, offset - start as u64, needed) {
                // A short read may leave the next one unaligned, which the kernel refuses.
                Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => {}
                done => return done,
            }
        }
        return fill(shards.buffered(shard)?, buffer.exact(), offset, shape.bytes());
    }
    for part in ExpertPart::ALL {
        let (shard, offset) = entry.part(part);
        let range = shape.range(part);
        let bytes = range.len();
        fill(shards.buffered(shard)?, &mut buffer.exact()[range], offset, bytes)?;
    }
    Ok(())
}

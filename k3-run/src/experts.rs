//! Routed experts: a cache of slots, filled from the original shards by reader threads.
//!
//! A layer asks for its experts with [`ExpertStore::fetch`], which lists the misses for
//! the readers in disk order, and takes them as they land with [`Fetch::ready`]. Between
//! two layers the disk reads guesses ([`ExpertStore::read_early`]). What was cached, what
//! was guessed and in which order experts land changes when work is done, never what is
//! computed.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use anyhow::Context;
use k3_formats::config::ModelConfig;
use k3_formats::container::Container;
use k3_formats::expert_table::ExpertEntry;

mod books;
mod buffer;
mod cache;
mod duel;
mod fetch;
mod look_ahead;
mod places;
mod raw;
mod shards;
mod source;
mod stats;
mod usage;

pub use buffer::{ExpertBuffer, ExpertShape};
pub use fetch::{Fetch, FetchLists, Loaded};
pub use look_ahead::{LookAhead, Width};
pub use shards::{DirectIo, OpenShard, ReadAt, ShardFiles};
pub use stats::{ExpertStats, LookAheadStats, RANKS, Rank};
pub(crate) use usage::cache_dir;

use crate::report::say;
use crate::trace::Trace;
use books::Books;
use cache::{Cache, Key};
use duel::Duel;
use look_ahead::Pace;
use places::Places;
use shards::Search;
pub(crate) use shards::{DIRECT_ALIGN, fill, open_direct};
use source::{Source, read_jobs};
use usage::{Usage, UsageFile};

/// Bytes of one read, see [`ExpertOptions::read_bytes`]. Four in flight saturate the
/// drives we know of.
pub const READ_BYTES: usize = 4 << 20;

/// Slots beyond those of the cache, for experts on their way and for guesses: enough to
/// read while the computation lags.
pub const IN_FLIGHT: usize = 8;

/// How experts are kept and read.
#[derive(Debug, Clone)]
pub struct ExpertOptions {
    /// Folders with the shards, or with the banks of a pack, searched in this order.
    pub dirs: Vec<PathBuf>,
    /// Whether files that are missing, or have another size, are an error only when an
    /// expert of them is needed.
    pub allow_missing: bool,
    /// Memory for experts, in bytes; see [`CacheSize`].
    pub cache_bytes: u64,
    /// Whether to read around the page cache.
    pub direct_io: DirectIo,
    /// Reads in flight.
    pub readers: usize,
    /// Longest read, in bytes.
    pub read_bytes: usize,
    /// Whether to compare each expert with its checksum as it lands.
    pub verify: bool,
    /// Experts to read before their layer asks.
    pub look_ahead: LookAhead,
    /// Opens the shards.
    pub files: Arc<dyn OpenShard>,
}

/// What a budget for experts buys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheSize {
    /// Experts that are kept, at least one.
    pub experts: usize,
    /// Slots: those experts, and up to eight on their way unless all are kept.
    pub slots: usize,
    /// Memory of all slots, in bytes. Above the budget only if that is too small for one
    /// expert that is kept and those on their way.
    pub bytes: u64,
}

impl CacheSize {
    /// The largest that fits `budget` bytes.
    pub fn new(config: &ModelConfig, budget: u64) -> Self {
        let slot_bytes = ExpertShape::new(config).slot_bytes() as u64;
        let all = config.moe_layers().len() * config.moe.experts;
        let fit = usize::try_from(budget / slot_bytes).unwrap_or(usize::MAX).min(all);
        let experts = if fit == all { all } else { fit.saturating_sub(IN_FLIGHT).max(1) };
        let slots = experts + IN_FLIGHT.min(all - experts);
        Self { experts, slots, bytes: slots as u64 * slot_bytes }
    }
}

struct Shared {
    books: Mutex<Books>,
    /// Readers wait here for jobs.
    jobs: Condvar,
    /// The computation waits here for experts.
    landed: Condvar,
    source: Source,
    first_layer: usize,
    per_layer: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Books> {
        // A panic elsewhere is already on its way up; the books are still consistent.
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn key(&self, layer: usize, expert: usize) -> Key {
        ((layer - self.first_layer) * self.per_layer + expert) as Key
    }

    /// Layer and expert of a key.
    fn place(&self, key: Key) -> (usize, usize) {
        let key = key as usize;
        (self.first_layer + key / self.per_layer, key % self.per_layer)
    }
}

/// The experts of a model.
pub struct ExpertStore {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
    per_layer: usize,
    size: CacheSize,
    /// Where this process's usage goes at its end, and the steps that came before it.
    usage: Option<(UsageFile, u32)>,
}

/// Begins the warm start of a store.
pub struct WarmStart {
    shared: Arc<Shared>,
    wanted: Vec<(Key, ExpertEntry)>,
}

impl WarmStart {
    /// From now on experts that former processes used most are read whenever the drive has
    /// nothing better to do.
    pub fn begin(self) {
        self.shared.lock().warm(self.wanted);
        self.shared.jobs.notify_all();
    }
}

impl ExpertStore {
    /// Finds the shards and starts the readers; what the user should know goes to `notes`.
    ///
    /// # Errors
    /// Shards or banks are missing or changed, or direct reads were demanded and do not work.
    pub fn open(
        container: &Container,
        options: &ExpertOptions,
        notes: &mut Vec<String>,
    ) -> anyhow::Result<Self> {
        let config = &container.config;
        let files = Arc::clone(&options.files);
        let places = Places::find(container, &options.dirs, notes)?;
        let search = Search {
            what: places.what(),
            dirs: &options.dirs,
            allow_missing: options.allow_missing,
        };
        let (wanted, mut touched) = (places.files(container), Vec::new());
        let mut shards = search.find(&wanted, files, &mut touched, notes)?;
        if !touched.is_empty() {
            notes.push(touched_note(&touched, container));
        }
        shards.choose_io(options.direct_io)?;
        let (layers, per_layer) = (config.moe_layers(), config.moe.experts);
        let all = layers.len() * per_layer;
        let size = CacheSize::new(config, options.cache_bytes);
        let duel = Duel::new(all, size.experts, layers.len() * config.moe.top_k);
        let cache = Cache::new(all, size.experts, size.slots, duel.half_life());
        let books = Books::new(cache, duel, size.slots, Pace::new(options.look_ahead));
        let checksums = options.verify.then(|| checksums(container, &places)).transpose()?;
        let read_bytes = options.read_bytes.max(1);
        let shared = Arc::new(Shared {
            books: Mutex::new(books),
            jobs: Condvar::new(),
            landed: Condvar::new(),
            source: Source {
                shards,
                places,
                shape: ExpertShape::new(config),
                read_bytes,
                checksums,
            },
            first_layer: layers.start,
            per_layer,
        });
        let readers = (0..options.readers.clamp(1, 256))
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("k3-read-{i}"))
                    .spawn(move || read_jobs(&shared, i))
                    .context("cannot start a reader thread")
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { shared, readers, per_layer, size, usage: None })
    }

    /// Goes on with the usage that former processes left in the folder `dir`, and leaves it
    /// there at the end. Where it tells enough, there is a warm start to begin, of at most half
    /// of what is kept.
    ///
    /// # Panics
    /// A step was made already.
    pub fn keep_usage(&mut self, container: &Container, dir: &Path) -> Option<WarmStart> {
        let file = UsageFile::new(container, dir);
        let former = file.load();
        self.usage = Some((file, former.as_ref().map_or(0, |usage| usage.steps)));
        let former = former.filter(Usage::tells)?;
        let mut books = self.shared.lock();
        books.cache.remember(&former.worths);
        let most = books.cache.capacity() / 2;
        drop(books);
        let mut best: Vec<(u16, Key)> =
            former.worths.iter().zip(0..).map(|(&worth, key)| (worth, key)).collect();
        best.retain(|&(worth, _)| worth > 0);
        best.sort_unstable_by_key(|&(worth, key)| (std::cmp::Reverse(worth), key));
        best.truncate(most);
        let wanted = best.into_iter().rev().map(|(_, key)| {
            let (layer, expert) = self.shared.place(key);
            (key, self.shared.source.places.entry(container, layer, expert))
        });
        Some(WarmStart { shared: Arc::clone(&self.shared), wanted: wanted.collect() })
    }

    fn save_usage(&self) {
        let Some((file, before)) = &self.usage else { return };
        let books = self.shared.lock();
        if books.steps == 0 {
            return;
        }
        let steps = before.saturating_add(books.steps);
        let usage = Usage { steps, worths: books.cache.worths() };
        drop(books);
        if let Err(error) = file.save(&usage) {
            say(format_args!("warning: the usage of experts is not kept: {error}"));
        }
    }

    /// What is kept, and the memory that takes when full.
    pub fn size(&self) -> CacheSize {
        self.size
    }

    /// Bytes of one expert as stored.
    pub fn expert_bytes(&self) -> usize {
        self.shared.source.shape.bytes()
    }

    /// How many files the experts are in, and what they are.
    pub fn files(&self) -> (usize, &'static str) {
        let source = &self.shared.source;
        (source.shards.count(), source.places.what())
    }

    /// Whether reads go around the page cache.
    pub fn is_direct(&self) -> bool {
        self.shared.source.shards.all_direct()
    }

    /// What was done so far.
    pub fn stats(&self) -> ExpertStats {
        self.shared.lock().stats
    }

    /// Records every read from now on, or no more.
    pub fn set_trace(&self, trace: Option<Arc<Trace>>) {
        self.shared.lock().trace = trace;
    }
}

/// What to know about shards that were written to, or copied, after the conversion.
fn touched_note(touched: &[&str], container: &Container) -> String {
    const NAMED: usize = 4;
    let named = touched[..touched.len().min(NAMED)].join(", ");
    let more = if touched.len() > NAMED { ", ..." } else { "" };
    let dir = container.dir.display();
    let tell = if container.experts.has_checksums() {
        format!("`k3-prep verify {dir} --experts` tells")
    } else {
        format!(
            "`k3-prep verify {dir} --source` tells for downloads that keep published digests; if \
             in doubt, convert again"
        )
    };
    format!(
        "{} of {} shards have another modification time than when they were converted \
         ({named}{more}); whether their data is the same, {tell}",
        touched.len(),
        container.manifest.shards.len(),
    )
}

/// The checksums of all experts by key.
fn checksums(container: &Container, places: &Places) -> anyhow::Result<Box<[u32]>> {
    let (layers, per_layer) = (container.config.moe_layers(), container.config.moe.experts);
    let all = layers.flat_map(|layer| (0..per_layer).map(move |expert| (layer, expert)));
    let sums: Option<_> = all.map(|(l, e)| places.checksum(container, l, e)).collect();
    Ok(sums.ok_or_else(|| {
        k3_formats::Error::missing("the expert table has no checksums")
            .in_file(container.dir.join(k3_formats::container::EXPERT_TABLE_FILE))
            .hint("convert with --hash-experts, or leave out --verify-experts")
    })?)
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.jobs.notify_all();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        self.save_usage();
    }
}

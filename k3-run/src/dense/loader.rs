//! Weights in private memory: kept for good, or streamed through a ring of buffers.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;

use anyhow::{Context, anyhow};
use k3_formats::container::Container;
use memmap2::{Advice, MmapMut};

use super::cut::Cut;
use super::files::Files;
use super::placement::{Pieces, RING_SLOTS};
use super::ring::{Kind, Next, Ring, Ticket};
use super::{DenseMatrix, Home, file_name};
use crate::experts::OpenShard;
use crate::kernels::Matrix;

/// Threads that read pieces: two requests in flight keep most drives busy.
const READERS: usize = 2;

struct Entry {
    name: String,
    cut: Cut,
    kind: Kind,
    /// Where a kept matrix goes.
    kept: OnceLock<MmapMut>,
}

impl Entry {
    fn failure(&self, files: &Files, error: io::Error) -> anyhow::Error {
        let file = file_name(files.path(self.cut.file));
        anyhow!(error).context(format!("cannot read {} in {file}", self.name))
    }
}

/// Handed in by readers.
type Landed = io::Result<MmapMut>;

struct State {
    ring: Ring<Landed>,
    free: Vec<MmapMut>,
    /// Buffers of the ring that exist.
    buffers: usize,
    /// A kept matrix that could not be read in this step.
    failed: Option<(usize, io::Error)>,
    started: bool,
    closing: bool,
}

/// What readers and the computation share.
pub(crate) struct Shared {
    files: Files,
    script: Vec<Entry>,
    slot_bytes: usize,
    lock_kept: bool,
    unlocked: OnceLock<String>,
    bytes_read: AtomicU64,
    state: Mutex<State>,
    /// Readers wait here for work.
    work: Condvar,
    /// The computation waits here for weights.
    landed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic elsewhere is already on its way up; the books are still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The piece of `entry`, which must be the next one in execution order.
    ///
    /// # Errors
    /// It cannot be read.
    pub(super) fn take(&self, entry: usize) -> anyhow::Result<Piece<'_>> {
        let mut state = self.lock();
        loop {
            match state.ring.take(entry) {
                Some(Ok(buffer)) => {
                    return Ok(Piece { shared: self, entry, buffer: Some(buffer) });
                }
                Some(Err(e)) => return Err(self.script[entry].failure(&self.files, e)),
                None => {
                    state = self.landed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }

    fn read(&self, cut: &Cut, buffer: &mut [u8]) -> io::Result<()> {
        for window in &cut.windows {
            self.files.read(cut.file, window, buffer)?;
            self.bytes_read.fetch_add(window.at.len() as u64, Ordering::Relaxed);
        }
        Ok(())
    }

    fn keep(&self, entry: &Entry) -> io::Result<()> {
        let mut buffer = MmapMut::map_anon(entry.cut.buffer_bytes())?;
        #[cfg(target_os = "linux")]
        // Fewer page table walks; a kernel without huge pages loses nothing.
        let _ = buffer.advise(Advice::HugePage);
        self.read(&entry.cut, &mut buffer)?;
        if self.lock_kept
            && let Err(e) = buffer.lock()
        {
            let _ = self.unlocked.set(format!(
                "cannot lock weights into memory ({e}); raise the limit with `ulimit -l` or \
                 leave out --pin"
            ));
        }
        // A second copy can only come after a failed step, and is as good.
        let _ = entry.kept.set(buffer);
        Ok(())
    }

    fn run_reader(&self) {
        let mut state = self.lock();
        while !state.closing {
            let free = !state.free.is_empty() || state.buffers < RING_SLOTS;
            match if state.started { state.ring.next(free) } else { Next::Wait } {
                Next::Wait => {
                    state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Next::Keep(number, step) => {
                    drop(state);
                    let kept = self.keep(&self.script[number]);
                    state = self.lock();
                    if let Err(e) = kept
                        && state.ring.keep_failed(number, step)
                    {
                        state.failed = Some((number, e));
                    }
                    self.landed.notify_all();
                }
                Next::Read(number, ticket) => {
                    let old = state.free.pop();
                    state.buffers += usize::from(old.is_none());
                    drop(state);
                    let (read, spare) = self.read_piece(&self.script[number], old);
                    state = self.lock();
                    state.land(ticket, read);
                    state.give_back(spare);
                    self.landed.notify_all();
                }
            }
        }
    }

    /// Reads a piece; with an error comes the buffer, if there was one.
    fn read_piece(&self, entry: &Entry, old: Option<MmapMut>) -> (Landed, Option<MmapMut>) {
        let buffer = match old {
            Some(buffer) => Ok(buffer),
            None => MmapMut::map_anon(self.slot_bytes),
        };
        match buffer {
            Ok(mut buffer) => match self.read(&entry.cut, &mut buffer) {
                Ok(()) => (Ok(buffer), None),
                Err(e) => (Err(e), Some(buffer)),
            },
            Err(e) => (Err(e), None),
        }
    }
}

impl State {
    fn land(&mut self, ticket: Ticket, read: Landed) {
        let failed = read.is_err();
        if let Some(Ok(unwanted)) = self.ring.land(ticket, read) {
            self.free.push(unwanted);
        } else if failed {
            // `give_back` follows with the buffer, or there never was one.
            self.buffers -= 1;
        }
    }

    fn give_back(&mut self, buffer: Option<MmapMut>) {
        if let Some(buffer) = buffer {
            self.free.push(buffer);
            self.buffers += 1;
        }
    }
}

/// A kept matrix.
pub(crate) struct Kept {
    shared: Arc<Shared>,
    entry: usize,
}

impl Kept {
    /// The matrix, if it was read by now.
    pub(super) fn get(&self) -> Option<Matrix<'_>> {
        let entry = &self.shared.script[self.entry];
        entry.kept.get().map(|buffer| entry.cut.view(buffer))
    }

    /// Waits until it was read.
    ///
    /// # Errors
    /// It, or another kept matrix, cannot be read.
    pub(super) fn wait(&self) -> anyhow::Result<Matrix<'_>> {
        let shared = &*self.shared;
        let mut state = shared.lock();
        loop {
            if let Some(matrix) = self.get() {
                return Ok(matrix);
            }
            if let Some((entry, error)) = state.failed.take() {
                return Err(shared.script[entry].failure(&shared.files, error));
            }
            state = shared.landed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Some rows in a buffer of the ring, which goes back when this is dropped.
pub struct Piece<'s> {
    shared: &'s Shared,
    entry: usize,
    buffer: Option<MmapMut>,
}

impl Piece<'_> {
    /// The rows.
    pub(super) fn matrix(&self) -> Matrix<'_> {
        let buffer = self.buffer.as_ref().expect("taken in drop only");
        self.shared.script[self.entry].cut.view(buffer)
    }
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        self.shared.lock().free.extend(self.buffer.take());
        self.shared.work.notify_one();
    }
}

/// The readers and what they read.
pub(super) struct Loader {
    shared: Arc<Shared>,
    readers: Vec<JoinHandle<()>>,
    /// Entries of each matrix.
    entries: Vec<std::ops::Range<usize>>,
}

impl Loader {
    /// Plans the reads of `matrices`; `keep` tells which of them stay.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(super) fn new(
        container: &Container,
        matrices: &[DenseMatrix],
        keep: &[bool],
        lock_kept: bool,
        files: Arc<dyn OpenShard>,
    ) -> anyhow::Result<Self> {
        assert_eq!(matrices.len(), keep.len(), "a placement of this model");
        let pieces = Pieces::new(matrices);
        let mut script = Vec::new();
        let mut entries = Vec::with_capacity(matrices.len());
        for (matrix, &keep) in matrices.iter().zip(keep) {
            let first = script.len();
            let entry =
                |cut, kind| Entry { name: matrix.name.clone(), cut, kind, kept: OnceLock::new() };
            let streamed = if matrix.is_head() { Kind::Head } else { Kind::Streamed };
            if keep {
                script.push(entry(Cut::new(&matrix.place, 0..matrix.place.rows), Kind::Kept));
            } else {
                script.extend(pieces.of(matrix).map(|cut| entry(cut, streamed)));
            }
            entries.push(first..script.len());
        }
        let state = State {
            ring: Ring::new(script.iter().map(|entry| entry.kind).collect()),
            free: Vec::new(),
            buffers: 0,
            failed: None,
            started: false,
            closing: false,
        };
        let shared = Arc::new(Shared {
            files: Files::new(container, files),
            script,
            slot_bytes: pieces.largest(matrices, keep),
            lock_kept,
            unlocked: OnceLock::new(),
            bytes_read: AtomicU64::new(0),
            state: Mutex::new(state),
            work: Condvar::new(),
            landed: Condvar::new(),
        });
        let readers = (0..READERS)
            .map(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("k3-dense-{i}"))
                    .spawn(move || shared.run_reader())
                    .context("cannot start a reader thread")
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { shared, readers, entries })
    }

    /// Where a matrix is to be found.
    pub(super) fn home<'a>(&self, number: usize) -> Home<'a> {
        let (shared, entries) = (Arc::clone(&self.shared), self.entries[number].clone());
        match self.shared.script[entries.start].kind {
            Kind::Kept => Home::Kept(Kept { shared, entry: entries.start }),
            Kind::Streamed | Kind::Head => Home::Streamed(shared, entries),
        }
    }

    pub(super) fn start(&self) {
        self.shared.lock().started = true;
        self.shared.work.notify_all();
    }

    pub(super) fn begin_step(&self, head: bool) {
        let mut state = self.shared.lock();
        state.started = true;
        state.failed = None;
        let unused = state.ring.begin_step(head);
        state.free.extend(unused.into_iter().flatten());
        drop(state);
        self.shared.work.notify_all();
    }

    pub(super) fn end_step(&self) {
        self.shared.lock().ring.end_step();
    }

    pub(super) fn bytes_read(&self) -> u64 {
        self.shared.bytes_read.load(Ordering::Relaxed)
    }

    pub(super) fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.shared.unlocked.get().cloned().into_iter().collect();
        if self.shared.files.is_buffered() {
            notes.push(
                "this file system has no direct reads; weights go through the page cache".into(),
            );
        }
        notes
    }
}

impl Drop for Loader {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_all();
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}

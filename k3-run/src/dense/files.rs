//! The dense files, read by position around the page cache where that works.

use std::io;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use k3_formats::container::Container;
use rustix::fs::Advice;

use super::cut::Window;
use crate::experts::{fill, open_direct};

struct DenseFile {
    path: PathBuf,
    direct: OnceLock<fs_err::File>,
    buffered: OnceLock<fs_err::File>,
}

/// The files of a container, opened when they are first read.
pub(super) struct Files {
    files: Vec<DenseFile>,
    buffered: AtomicBool,
}

impl Files {
    pub(super) fn new(container: &Container) -> Self {
        let file = |path: &PathBuf| DenseFile {
            path: path.clone(),
            direct: OnceLock::new(),
            buffered: OnceLock::new(),
        };
        let files = container.dense_files().iter().map(|f| file(&f.path)).collect();
        Self { files, buffered: AtomicBool::new(false) }
    }

    /// Path of a file, for messages.
    pub(super) fn path(&self, file: usize) -> &PathBuf {
        &self.files[file].path
    }

    /// Whether direct reads were refused and the page cache is read through.
    pub(super) fn is_buffered(&self) -> bool {
        self.buffered.load(Ordering::Relaxed)
    }

    /// Fills a window of `buffer`.
    ///
    /// # Errors
    /// The file cannot be opened or read, or ends too early.
    pub(super) fn read(&self, file: usize, window: &Window, buffer: &mut [u8]) -> io::Result<()> {
        let file = &self.files[file];
        let to = &mut buffer[window.at.clone()];
        if !self.is_buffered() {
            let read = open_once(&file.direct, || open_direct(&file.path))
                .and_then(|f| fill(f, to, window.offset, window.needed));
            match read {
                // Some file systems refuse at open, some at the first transfer; a short
                // read may leave the next one unaligned.
                Err(e) if is_refusal(&e) => self.buffered.store(true, Ordering::Relaxed),
                done => return done,
            }
        }
        let source = open_once(&file.buffered, || fs_err::File::open(&file.path))?;
        fill(source, &mut to[..window.needed], window.offset, window.needed)?;
        // Read again next step, long after it would have pushed other things out. A
        // refusal leaves only the cache less tidy.
        let length = std::num::NonZero::new(window.needed as u64);
        let _ = rustix::fs::fadvise(source.file(), window.offset, length, Advice::DontNeed);
        Ok(())
    }
}

fn is_refusal(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

/// Two threads may open at once; one of the two handles is dropped again.
fn open_once(
    cell: &OnceLock<fs_err::File>,
    open: impl FnOnce() -> io::Result<fs_err::File>,
) -> io::Result<&fs_err::File> {
    if cell.get().is_none() {
        let _ = cell.set(open()?);
    }
    Ok(cell.get().expect("just set"))
}

//! The dense files, read by position around the page cache where that works.

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use k3_formats::container::Container;

use super::cut::Window;
use crate::experts::{OpenShard, ReadAt, fill};

struct DenseFile {
    path: PathBuf,
    direct: OnceLock<Box<dyn ReadAt>>,
    buffered: OnceLock<Box<dyn ReadAt>>,
}

/// The files of a container, opened when they are first read.
pub(super) struct Files {
    files: Vec<DenseFile>,
    opener: Arc<dyn OpenShard>,
    buffered: AtomicBool,
}

impl Files {
    pub(super) fn new(container: &Container, opener: Arc<dyn OpenShard>) -> Self {
        let file = |path: &PathBuf| DenseFile {
            path: path.clone(),
            direct: OnceLock::new(),
            buffered: OnceLock::new(),
        };
        let files = container.dense_files().iter().map(|f| file(&f.path)).collect();
        Self { files, opener, buffered: AtomicBool::new(false) }
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
            let read = open_once(&file.direct, || self.opener.open(&file.path, true))
                .and_then(|f| fill(f, to, window.offset, window.needed));
            match read {
                // Some file systems refuse at open, some at the first transfer; a short
                // read may leave the next one unaligned.
                Err(e) if is_refusal(&e) => self.buffered.store(true, Ordering::Relaxed),
                done => return done,
            }
        }
        let source = open_once(&file.buffered, || self.opener.open(&file.path, false))?;
        fill(source, &mut to[..window.needed], window.offset, window.needed)?;
        // Read again next step, long after it would have pushed other things out.
        source.forget(window.offset, window.needed as u64);
        Ok(())
    }
}

fn is_refusal(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported)
}

/// Two threads may open at once; one of the two handles is dropped again.
fn open_once(
    cell: &OnceLock<Box<dyn ReadAt>>,
    open: impl FnOnce() -> io::Result<Box<dyn ReadAt>>,
) -> io::Result<&dyn ReadAt> {
    if cell.get().is_none() {
        let _ = cell.set(open()?);
    }
    Ok(&**cell.get().expect("just set"))
}

//! Read-only file mappings: the one place that trusts a file not to shrink.
#![allow(unsafe_code)] // memory mapping is unsafe by nature; see `Mapping::open`

use std::fs::Metadata;
use std::ops::Deref;
use std::path::Path;

use memmap2::{Advice, Mmap};

use crate::{Error, Result};

/// A whole file, mapped read-only and shared.
#[derive(Debug)]
pub struct Mapping {
    map: Mmap,
    metadata: Metadata,
}

impl Mapping {
    /// Maps all of `path`.
    ///
    /// The file must not be truncated while the mapping lives: touching a page that is
    /// gone raises SIGBUS. A container is written once and renamed into place, so only a
    /// deliberate change under a running process can do that.
    ///
    /// # Errors
    /// The file is absent or cannot be mapped.
    pub fn open(path: &Path) -> Result<Self> {
        // Opening a pipe would wait for a writer, perhaps for ever.
        if fs_err::metadata(path).is_ok_and(|m| !m.is_file()) {
            return Err(Error::unsupported("not a regular file").in_file(path));
        }
        let file = fs_err::File::open(path)
            .map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Error::missing("no such file").in_file(path),
                _ => Error::io(path, "open", e),
            })?
            .into_file();
        let metadata = file.metadata().map_err(|e| Error::io(path, "read the size of", e))?;
        // SAFETY: the mapping is private to this process and never written through; the
        // bytes are only ever read as plain integers and floats, for which every bit
        // pattern is valid. Truncation by others is the documented contract above.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "map", e))?;
        Ok(Self { map, metadata })
    }

    /// What the file system said about the file when it was mapped.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// Brings a range of bytes into memory and maps it, with reads as large as the kernel
    /// likes. A kernel that cannot leaves it to page faults.
    pub fn populate(&self, range: std::ops::Range<usize>) {
        #[cfg(target_os = "linux")]
        if self.map.advise_range(Advice::PopulateRead, range.start, range.len()).is_ok() {
            return;
        }
        let _ = self.map.advise_range(Advice::WillNeed, range.start, range.len());
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map
    }
}

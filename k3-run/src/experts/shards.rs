//! The original shards: found at start, opened on first use, read by position.

use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::UNIX_EPOCH;

use anyhow::Context;
use k3_formats::container::manifest::ShardRecord;
use k3_formats::{Error, Result};
use rustix::fs::OFlags;

/// Alignment that direct reads keep in offset, length and memory, in bytes.
pub(crate) const DIRECT_ALIGN: usize = 4096;

/// Whether reads go around the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DirectIo {
    /// Around it where the file system can, else through it.
    #[default]
    Auto,
    /// Around it, or refuse to start.
    On,
    /// Through it.
    Off,
}

/// Reads bytes at a position; what a test can make fail.
pub trait ReadAt: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`, as `pread` does.
    ///
    /// # Errors
    /// As `pread`.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for fs_err::File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self.file(), buf, offset)
    }
}

/// Fills at least `needed` bytes of `buf` from `offset` on, through short reads and
/// interruptions. Direct reads ask for whole blocks, so the buffer may be longer.
///
/// # Errors
/// The read fails, or the file ends before `needed` bytes.
pub(crate) fn fill(
    file: &dyn ReadAt,
    buf: &mut [u8],
    offset: u64,
    needed: usize,
) -> io::Result<()> {
    let mut done = 0;
    while done < needed {
        match file.read_at(&mut buf[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

struct Shard {
    name: String,
    path: PathBuf,
    buffered: OnceLock<fs_err::File>,
    direct: OnceLock<fs_err::File>,
}

/// All shards of the snapshot, by the numbers the expert table uses.
pub(super) struct Shards {
    shards: Vec<Shard>,
    direct: bool,
}

impl Shards {
    /// Finds every shard in one of `dirs` and compares it with what was converted. Sizes
    /// must be equal; other modification times are put into `notes`.
    ///
    /// # Errors
    /// Shards that are missing or have another size: all of them are listed.
    pub(super) fn find(
        records: &[ShardRecord],
        dirs: &[PathBuf],
        notes: &mut Vec<String>,
    ) -> Result<Self> {
        let mut shards = Vec::with_capacity(records.len());
        let (mut wrong, mut touched) = (Vec::new(), 0);
        for record in records {
            let found = dirs.iter().find_map(|dir| {
                let path = dir.join(&record.name);
                let meta = fs_err::metadata(&path).ok()?;
                Some((path, meta))
            });
            let Some((path, meta)) = found else {
                wrong.push(format!("{}: missing", record.name));
                continue;
            };
            if meta.len() != record.size {
                let (name, size) = (&record.name, record.size);
                wrong.push(format!("{name}: expected {size} bytes, found {}", meta.len()));
            }
            let modified = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
            touched +=
                usize::from(modified.map(|t| t.as_nanos()) != Some(record.modified_ns.into()));
            let (buffered, direct) = (OnceLock::new(), OnceLock::new());
            shards.push(Shard { name: record.name.clone(), path, buffered, direct });
        }
        if !wrong.is_empty() {
            let places: Vec<_> = dirs.iter().map(|d| d.display().to_string()).collect();
            let problem = format!(
                "{} of {} shards are not what was converted:\n  {}",
                wrong.len(),
                records.len(),
                wrong.join("\n  ")
            );
            return Err(Error::missing(problem).item(places.join(", ")).hint(
                "give the snapshot's folder with --snapshot (once per drive), or convert it again",
            ));
        }
        if touched > 0 {
            notes.push(format!(
                "{touched} of {} shards have another modification time than when they were \
                 converted; `k3-prep verify` tells whether they are the same",
                records.len()
            ));
        }
        Ok(Self { shards, direct: false })
    }

    /// Chooses how to read, by one real aligned read: some file systems accept direct I/O
    /// at open and refuse it at the first transfer.
    ///
    /// # Errors
    /// `On`, and direct reads do not work here.
    pub(super) fn choose_io(&mut self, wanted: DirectIo) -> anyhow::Result<()> {
        let Some(shard) = self.shards.first() else { return Ok(()) };
        if wanted == DirectIo::Off {
            return Ok(());
        }
        match probe(&shard.path) {
            Ok(()) => self.direct = true,
            Err(e) if wanted == DirectIo::On => {
                return Err(e).context(
                    "direct reads do not work on this file system (hint: leave out --direct-io on)",
                );
            }
            Err(_) => {}
        }
        Ok(())
    }

    /// Whether reads go around the page cache.
    pub(super) fn is_direct(&self) -> bool {
        self.direct
    }

    /// Name of a shard, for messages.
    pub(super) fn name(&self, shard: usize) -> &str {
        &self.shards[shard].name
    }

    /// Folder of a shard, for messages.
    pub(super) fn dir(&self, shard: usize) -> Option<&Path> {
        self.shards[shard].path.parent()
    }

    /// The shard opened through the page cache.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn buffered(&self, shard: usize) -> io::Result<&fs_err::File> {
        let shard = &self.shards[shard];
        open_once(&shard.buffered, || fs_err::File::open(&shard.path))
    }

    /// The shard opened around the page cache.
    ///
    /// # Errors
    /// It cannot be opened so.
    pub(super) fn direct(&self, shard: usize) -> io::Result<&fs_err::File> {
        let shard = &self.shards[shard];
        open_once(&shard.direct, || open_direct(&shard.path))
    }
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

#[cfg(target_os = "linux")]
pub(crate) fn open_direct(path: &Path) -> io::Result<fs_err::File> {
    use fs_err::os::unix::fs::OpenOptionsExt;
    let flags = OFlags::DIRECT.bits().cast_signed();
    fs_err::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn open_direct(_: &Path) -> io::Result<fs_err::File> {
    Err(io::ErrorKind::Unsupported.into())
}

fn probe(path: &Path) -> io::Result<()> {
    let mut block = memmap2::MmapMut::map_anon(DIRECT_ALIGN)?;
    let file = open_direct(path)?;
    fill(&file, &mut block, 0, 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives one byte at a time and is interrupted before each.
    struct Trickle(Vec<u8>, std::sync::atomic::AtomicBool);

    impl ReadAt for Trickle {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            if !self.1.fetch_xor(true, std::sync::atomic::Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let rest = &self.0[self.0.len().min(offset as usize)..];
            let n = rest.len().min(1).min(buf.len());
            buf[..n].copy_from_slice(&rest[..n]);
            Ok(n)
        }
    }

    #[test]
    fn short_and_interrupted_reads_are_completed() {
        let file = Trickle((0..10).collect(), false.into());
        let mut buf = [0; 8];
        fill(&file, &mut buf, 2, 8).unwrap();
        assert_eq!(buf, [2, 3, 4, 5, 6, 7, 8, 9]);
        let e = fill(&file, &mut buf, 5, 8).unwrap_err();
        assert_eq!(e.kind(), io::ErrorKind::UnexpectedEof);
    }
}

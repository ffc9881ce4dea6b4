//! The original shards, or banks: found at start, opened on first use, read by position.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::UNIX_EPOCH;

use anyhow::Context;
use k3_formats::{Error, Result};
use rustix::fs::OFlags;

use super::places::Wanted;

/// Alignment that direct reads keep in offset, length and memory, in bytes.
pub(crate) const DIRECT_ALIGN: usize = 4096;

/// Whether reads go around the page cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DirectIo {
    /// Around it where the file system can, else through it.
    #[default]
    Auto,
    /// Around it, or refuse to start.
    #[value(alias = "1")]
    On,
    /// Through it.
    #[value(alias = "0")]
    Off,
}

/// Reads bytes at a position.
pub trait ReadAt: Send + Sync {
    /// Reads up to `buf.len()` bytes at `offset`, as `pread` does.
    ///
    /// # Errors
    /// As `pread`.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Lets the page cache forget a range that will not be read soon.
    fn forget(&self, _offset: u64, _len: u64) {}
}

impl ReadAt for fs_err::File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self.file(), buf, offset)
    }

    fn forget(&self, offset: u64, len: u64) {
        // A hint: a refusal leaves only the cache less tidy.
        #[cfg(target_os = "linux")]
        let _ = rustix::fs::fadvise(
            self.file(),
            offset,
            std::num::NonZero::new(len),
            rustix::fs::Advice::DontNeed,
        );
    }
}

/// Opens shards; a test can put something slow or broken in between.
pub trait OpenShard: std::fmt::Debug + Send + Sync {
    /// Opens `path`, around the page cache if `direct`.
    ///
    /// # Errors
    /// As `open`.
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn ReadAt>>;
}

/// Shards as plain files.
#[derive(Debug, Clone, Copy)]
pub struct ShardFiles;

impl OpenShard for ShardFiles {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Box<dyn ReadAt>> {
        let file = if direct { open_direct(path)? } else { fs_err::File::open(path)? };
        Ok(Box::new(file))
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
    /// Why it cannot be used.
    trouble: Option<String>,
    /// Whether its folder allows direct reads.
    direct: bool,
    /// Handles through and around the page cache, opened when first needed.
    handles: [OnceLock<Box<dyn ReadAt>>; 2],
}

/// All shards of the snapshot, by the numbers the expert table uses.
pub(super) struct Shards {
    shards: Vec<Shard>,
    files: Arc<dyn OpenShard>,
}

/// How the files with experts are searched for.
pub(super) struct Search<'a> {
    /// What they are, in the plural.
    pub(super) what: &'static str,
    /// Folders, in this order.
    pub(super) dirs: &'a [PathBuf],
    /// Whether files that are missing, or have another size, are an error only when they
    /// are read.
    pub(super) allow_missing: bool,
}

impl Search<'_> {
    /// Finds every file in one of the folders: where it has the right size, if it has that
    /// anywhere. What is allowed to be missing goes to `notes`, other modification times to
    /// `touched`.
    ///
    /// # Errors
    /// Files that are missing or have another size: all of them are listed.
    pub(super) fn find<'r>(
        &self,
        files: &'r [Wanted],
        open: Arc<dyn OpenShard>,
        touched: &mut Vec<&'r str>,
        notes: &mut Vec<String>,
    ) -> Result<Shards> {
        let mut shards = Vec::with_capacity(files.len());
        let mut wrong = Vec::new();
        for wanted in files {
            let Wanted { name, size, modified_ns } = wanted;
            let there = self.dirs.iter().filter_map(|dir| {
                let path = dir.join(name);
                let meta = fs_err::metadata(&path).ok().filter(std::fs::Metadata::is_file)?;
                Some((path, meta))
            });
            let mut first = None;
            let mut there = there.inspect(|(path, meta)| {
                first.get_or_insert_with(|| (path.clone(), meta.len()));
            });
            let whole = there.find(|(_, meta)| meta.len() == *size);
            let trouble = match (&whole, &first) {
                (Some((_, meta)), _) => {
                    let modified = meta.modified().ok();
                    let modified = modified.and_then(|t| t.duration_since(UNIX_EPOCH).ok());
                    let modified = modified.map(|t| t.as_nanos());
                    if modified_ns.is_some_and(|ns| modified != Some(ns.into())) {
                        touched.push(name.as_str());
                    }
                    None
                }
                (None, Some((path, found))) => {
                    let dir = path.parent().unwrap_or(Path::new("")).display();
                    Some(format!("expected {size} bytes, found {found} in {dir}"))
                }
                (None, None) => Some(format!("missing, expected {size} bytes")),
            };
            if let Some(trouble) = &trouble {
                wrong.push(format!("{name}: {trouble}"));
            }
            let path = whole.map(|(path, _)| path).or(first.map(|(path, _)| path));
            let path = path.unwrap_or_else(|| PathBuf::from(name));
            let handles = [OnceLock::new(), OnceLock::new()];
            shards.push(Shard { name: name.clone(), path, trouble, direct: false, handles });
        }
        if !wrong.is_empty() {
            let problem = self.problem(&wrong, files.len());
            if !self.allow_missing {
                return Err(problem.hint(
                    "give the folder of the snapshot, or of its pack, with --snapshot (once per \
                     drive), or convert it again; --allow-missing starts all the same and fails \
                     at the first expert that is needed from them",
                ));
            }
            notes.push(format!("{problem}\nthe first expert that is needed from them is an error"));
        }
        Ok(Shards { shards, files: open })
    }

    fn problem(&self, wrong: &[String], all: usize) -> Error {
        let places: Vec<_> = self.dirs.iter().map(|d| d.display().to_string()).collect();
        let (count, lines) = (wrong.len(), wrong.join("\n  "));
        Error::missing(format!("{count} of {all} {} are not what they were:\n  {lines}", self.what))
            .item(places.join(", "))
    }
}

impl Shards {
    /// Chooses how to read, by one real aligned read in each folder: some file systems
    /// accept direct I/O at open and refuse it at the first transfer.
    ///
    /// # Errors
    /// `On`, and direct reads do not work somewhere.
    pub(super) fn choose_io(&mut self, wanted: DirectIo) -> anyhow::Result<()> {
        if wanted == DirectIo::Off {
            return Ok(());
        }
        let mut works: HashMap<PathBuf, bool> = HashMap::new();
        for shard in self.shards.iter_mut().filter(|shard| shard.trouble.is_none()) {
            let dir = shard.path.parent().unwrap_or(Path::new("")).to_owned();
            if let Some(&direct) = works.get(&dir) {
                shard.direct = direct;
                continue;
            }
            match probe(&*self.files, &shard.path) {
                Ok(()) => shard.direct = true,
                Err(e) if wanted == DirectIo::On => {
                    return Err(e).with_context(|| {
                        let dir = dir.display();
                        format!(
                            "direct reads do not work in {dir} (hint: leave out --direct-io on)"
                        )
                    });
                }
                Err(_) => {}
            }
            works.insert(dir, shard.direct);
        }
        Ok(())
    }

    /// Whether all reads go around the page cache.
    pub(super) fn all_direct(&self) -> bool {
        self.shards.iter().all(|shard| shard.direct || shard.trouble.is_some())
    }

    /// Whether reads of this shard go around the page cache.
    pub(super) fn is_direct(&self, shard: usize) -> bool {
        self.shards[shard].direct
    }

    /// How many files there are.
    pub(super) fn count(&self) -> usize {
        self.shards.len()
    }

    /// Why a shard cannot be used, if that was found at the start.
    pub(super) fn trouble(&self, shard: usize) -> Option<&str> {
        self.shards[shard].trouble.as_deref()
    }

    /// Name of a shard, for messages.
    pub(super) fn name(&self, shard: usize) -> &str {
        &self.shards[shard].name
    }

    /// Folder of a shard, for messages.
    pub(super) fn dir(&self, shard: usize) -> Option<&Path> {
        self.shards[shard].path.parent()
    }

    /// Fills at least `needed` bytes of `buf` from `offset` of a shard on. Around the page
    /// cache if `direct`, when offset, buffer and its length are whole blocks; where the
    /// kernel refuses that half way, because a short read left the next one unaligned,
    /// through it.
    ///
    /// # Errors
    /// It cannot be opened, the read fails, or the shard ends too early.
    pub(super) fn read(
        &self,
        shard: usize,
        direct: bool,
        buf: &mut [u8],
        offset: u64,
        needed: usize,
    ) -> io::Result<()> {
        if direct {
            match fill(self.open(shard, true)?, buf, offset, needed) {
                Err(e) if e.kind() == io::ErrorKind::InvalidInput => {}
                done => return done,
            }
        }
        fill(self.open(shard, false)?, &mut buf[..needed], offset, needed)
    }

    /// The handle; when two threads open at once, one of the two is dropped again.
    fn open(&self, shard: usize, direct: bool) -> io::Result<&dyn ReadAt> {
        let shard = &self.shards[shard];
        if let Some(trouble) = &shard.trouble {
            return Err(io::Error::new(io::ErrorKind::NotFound, trouble.clone()));
        }
        let cell = &shard.handles[usize::from(direct)];
        if cell.get().is_none() {
            let _ = cell.set(self.files.open(&shard.path, direct)?);
        }
        Ok(&**cell.get().expect("just set"))
    }
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

fn probe(files: &dyn OpenShard, path: &Path) -> io::Result<()> {
    let mut block = memmap2::MmapMut::map_anon(DIRECT_ALIGN)?;
    fill(&*files.open(path, true)?, &mut block, 0, 1)
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

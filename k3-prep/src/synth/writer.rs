//! Writes the files of a snapshot; a failed run leaves nothing behind.

use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use fs_err::File;
use fs_err::os::unix::fs::{FileExt, OpenOptionsExt};
use k3_formats::Error;
use rayon::prelude::*;

use super::draw::{self, Draw, Table};
use super::recipe::Run;
use super::shard::{Shard, Tensor};

/// Values made in one go: a multiple of everything that [`Table::fill`] asks of a start.
const CHUNK: u64 = 1 << 19;
/// Bytes a thread makes before it writes them.
const BATCH: u64 = 4 << 20;
/// Room to leave beside the tensors, for headers and the other files.
const SPARE: u64 = 128 << 20;

/// Creates files in one folder and removes them again unless all are finished.
pub(super) struct Writer {
    out: PathBuf,
    made_folder: bool,
    created: Vec<PathBuf>,
    tables: Vec<(Draw, Table)>,
}

/// # Errors
/// `out` is there and not an empty folder.
pub(crate) fn refuse_used_folder(out: &Path) -> Result<()> {
    if out.exists() && fs_err::read_dir(out)?.next().is_some() {
        let error = Error::unsupported("expected an empty folder, found files in it");
        return Err(error.in_file(out).hint("give a new folder, or empty this one").into());
    }
    Ok(())
}

/// A stretch of one tensor's values, all of one distribution.
struct Part<'a> {
    table: &'a Table,
    key: u64,
    first: u64,
    bytes: usize,
}

/// Consecutive parts that one thread makes and writes.
struct Batch<'a> {
    offset: u64,
    bytes: usize,
    parts: Vec<Part<'a>>,
}

impl Writer {
    /// # Errors
    /// `out` is there and not an empty folder, or cannot be made.
    pub(super) fn new(out: &Path) -> Result<Self> {
        refuse_used_folder(out)?;
        let made_folder = !out.exists();
        fs_err::create_dir_all(out)?;
        Ok(Self { out: out.to_owned(), made_folder, created: Vec::new(), tables: Vec::new() })
    }

    /// # Errors
    /// The file system has less than `bytes` and some spare room.
    pub(super) fn check_space(&self, bytes: u64) -> Result<()> {
        let stat = rustix::fs::statvfs(&self.out)
            .with_context(|| format!("cannot ask {} for its free space", self.out.display()))?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        if free < bytes.saturating_add(SPARE) {
            let problem = format!("expected {bytes} bytes of free space, found {free}");
            let hint = "lower --layers, --experts or --vocab, or give --sparse";
            return Err(Error::unsupported(problem).in_file(&self.out).hint(hint).into());
        }
        Ok(())
    }

    /// Keeps everything.
    pub(super) fn finish(mut self) {
        self.created.clear();
        self.made_folder = false;
    }

    /// Notes a file that something else creates in the folder from now on.
    pub(super) fn will_create(&mut self, name: &str) {
        self.created.push(self.out.join(name));
    }

    fn create(&mut self, name: &str) -> Result<File> {
        let path = self.out.join(name);
        let mut options = fs_err::OpenOptions::new();
        let file = options.write(true).create_new(true).mode(0o644).open(&path)?;
        self.created.push(path);
        Ok(file)
    }

    /// Writes a file through a buffer.
    ///
    /// # Errors
    /// Those of `content` and of the disk.
    pub(super) fn file(
        &mut self,
        name: &str,
        content: impl FnOnce(&mut BufWriter<File>) -> Result<()>,
    ) -> Result<()> {
        let mut out = BufWriter::new(self.create(name)?);
        content(&mut out)?;
        Ok(out.flush()?)
    }

    /// Writes the header, then a hole of the data's size.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn sparse_shard(&mut self, shard: &Shard) -> Result<()> {
        let (file, start) = self.begin(shard)?;
        Ok(file.set_len(start + shard.data_bytes())?)
    }

    /// Writes the header and all values, with all threads.
    ///
    /// # Errors
    /// The disk's.
    pub(super) fn shard(
        &mut self,
        shard: &Shard,
        seed: u64,
        values: &dyn Fn(&Tensor) -> Vec<Run>,
        wrote: &(dyn Fn(u64) + Sync),
    ) -> Result<()> {
        let (file, start) = self.begin(shard)?;
        let runs: Vec<_> = shard.tensors.iter().map(values).collect();
        for run in runs.iter().flatten() {
            if !self.tables.iter().any(|(draw, _)| *draw == run.draw) {
                self.tables.push((run.draw, Table::new(run.draw)));
            }
        }
        let batches = self.batches(shard, seed, &runs);
        batches.par_iter().try_for_each_init(Vec::new, |buffer, batch| {
            buffer.resize(batch.bytes, 0);
            let mut rest = &mut buffer[..];
            for part in &batch.parts {
                let (out, tail) = rest.split_at_mut(part.bytes);
                part.table.fill(part.key, part.first, out);
                rest = tail;
            }
            file.write_all_at(buffer, start + batch.offset)?;
            wrote(batch.bytes as u64);
            Ok(())
        })
    }

    /// Length word and header; returns the file and where its data starts.
    fn begin(&mut self, shard: &Shard) -> Result<(File, u64)> {
        let mut file = self.create(&shard.file)?;
        let header = shard.header()?;
        let length = header.len() as u64;
        file.write_all(&length.to_le_bytes())?;
        file.write_all(&header)?;
        Ok((file, 8 + length))
    }

    fn table(&self, draw: Draw) -> &Table {
        let found = self.tables.iter().find(|(known, _)| *known == draw);
        &found.expect("made before the batches").1
    }

    fn batches(&self, shard: &Shard, seed: u64, runs: &[Vec<Run>]) -> Vec<Batch<'_>> {
        let mut batches: Vec<Batch<'_>> = Vec::new();
        let mut offset = 0;
        for (tensor, runs) in shard.tensors.iter().zip(runs) {
            for (i, run) in runs.iter().enumerate() {
                let table = self.table(run.draw);
                let key = draw::key(seed, &tensor.name).wrapping_add(draw::mix(i as u64));
                for first in (0..run.elements).step_by(CHUNK as usize) {
                    let bytes = (run.elements - first).min(CHUNK) * table.width() as u64;
                    let part = Part { table, key, first, bytes: bytes as usize };
                    match batches.last_mut().filter(|b| b.bytes as u64 + bytes <= BATCH) {
                        Some(batch) => {
                            batch.bytes += part.bytes;
                            batch.parts.push(part);
                        }
                        None => {
                            batches.push(Batch { offset, bytes: part.bytes, parts: vec![part] })
                        }
                    }
                    offset += bytes;
                }
            }
        }
        batches
    }
}

impl Drop for Writer {
    /// Removes what an unfinished run made; the error that ended it matters more than
    /// one here.
    fn drop(&mut self) {
        for path in &self.created {
            let _ = fs_err::remove_file(path);
        }
        if self.made_folder {
            let _ = fs_err::remove_dir(&self.out);
        }
    }
}

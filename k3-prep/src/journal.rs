//! What a conversion has finished, so that a killed one goes on where it stopped.
//!
//! The first line says what is being converted and how; every further line is the record of
//! a file that is complete under its final name. A line is written and synced after the
//! file's rename, so a record never promises more than there is. The open journal is also
//! the lock: two conversions cannot work on one folder, unless each does a part of it. A part
//! has a journal of its own, locked alone, and shares the lock of the whole one; its records
//! say which shards a file came from, because the others may not be there yet.

use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use k3_formats::container::manifest::{FileRecord, ShardRecord};
use k3_formats::{Error, Result};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::identity::Identity;

/// Name of the journal in a work folder.
pub(crate) const JOURNAL_FILE: &str = "journal.jsonl";

/// Longest journal that is read, in bytes: sixty times the release's.
const MAX_JOURNAL: u64 = 64 << 20;

/// A file that is complete.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Done {
    #[serde(flatten)]
    pub(crate) file: FileRecord,
    /// The shards it came from; empty in the journal of a whole conversion, which begins with
    /// all of them.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub(crate) from: Vec<ShardRecord>,
}

/// The open journal of a work folder, locked.
#[derive(Debug)]
pub(crate) struct Journal {
    file: fs_err::File,
    path: PathBuf,
    /// A part's share of the lock of the whole.
    _whole: Option<fs_err::File>,
}

impl Journal {
    /// Locks the journal of the work folder `dir`, which is made if there is none.
    pub(crate) fn lock(dir: &Path) -> Result<Self> {
        let (file, path) = open(dir, JOURNAL_FILE, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { file, path, _whole: None })
    }

    /// Locks the journal `name` of a part, beside those of other parts.
    pub(crate) fn lock_part(dir: &Path, name: &str) -> Result<Self> {
        let (whole, _) = open(dir, JOURNAL_FILE, FlockOperation::NonBlockingLockShared)?;
        let (file, path) = open(dir, name, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { file, path, _whole: Some(whole) })
    }

    /// Goes on with what the journal records: the files that are done. An empty or torn
    /// journal begins anew.
    ///
    /// # Errors
    /// It was begun with another recipe, another tool or another snapshot.
    pub(crate) fn resume(&mut self, now: &Identity) -> Result<Vec<Done>> {
        let (whole, done) = read(&mut self.file, &self.path, now)?;
        self.cut(whole)?;
        match done {
            Some(done) => Ok(done),
            None => {
                self.append(now)?;
                Ok(Vec::new())
            }
        }
    }

    /// Forgets everything.
    pub(crate) fn start_over(&mut self) -> Result<()> {
        self.cut(0)
    }

    /// Records a file that is complete and durable.
    pub(crate) fn record(&mut self, file: &FileRecord, from: Vec<ShardRecord>) -> Result<()> {
        self.append(&Done { file: file.clone(), from })
    }

    fn cut(&mut self, len: u64) -> Result<()> {
        let write = |e| Error::io(&self.path, "write", e);
        self.file.set_len(len).map_err(write)?;
        self.file.seek(SeekFrom::Start(len)).map_err(write)?;
        Ok(())
    }

    fn append(&mut self, line: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_vec(line).expect("plain data serializes");
        text.push(b'\n');
        let write = |e| Error::io(&self.path, "write", e);
        self.file.write_all(&text).map_err(write)?;
        self.file.sync_all().map_err(write)
    }
}

/// Name of the journal of a part.
pub(crate) fn part_name(part: &str) -> String {
    format!("journal-{part}.jsonl")
}

/// The part that a journal of this name is of.
pub(crate) fn part_of(name: &str) -> Option<&str> {
    name.strip_prefix("journal-")?.strip_suffix(".jsonl")
}

/// Names of the journals of parts in a work folder.
pub(crate) fn part_journals(dir: &Path) -> Result<Vec<String>> {
    let list = |e| Error::io(dir, "list", e);
    let mut names = Vec::new();
    for entry in fs_err::read_dir(dir).map_err(list)? {
        let name = entry.map_err(list)?.file_name().into_string();
        names.extend(name.ok().filter(|name| part_of(name).is_some()));
    }
    names.sort_unstable();
    Ok(names)
}

/// What the journals of all parts record.
///
/// # Errors
/// One of them was begun with another recipe or another tool.
pub(crate) fn done_in_parts(dir: &Path, now: &Identity) -> Result<Vec<Done>> {
    let mut done = Vec::new();
    for name in part_journals(dir)? {
        let path = dir.join(name);
        let mut file = fs_err::File::open(&path).map_err(|e| Error::io(&path, "open", e))?;
        done.extend(read(&mut file, &path, now)?.1.unwrap_or_default());
    }
    Ok(done)
}

/// Whether some process holds the journal `name` now.
pub(crate) fn is_held(dir: &Path, name: &str) -> bool {
    let Ok(file) = fs_err::File::open(dir.join(name)) else { return false };
    let probe = rustix::fs::flock(file.file(), FlockOperation::NonBlockingLockShared);
    probe == Err(rustix::io::Errno::WOULDBLOCK)
}

/// That another process works on the same files.
pub(crate) fn busy(dir: &Path) -> Error {
    Error::unsupported("another conversion is working in this folder")
        .in_file(dir)
        .hint("wait for it to end, or give another output")
}

/// Opens the file `name` in `dir`, made if there is none, and locks it.
pub(crate) fn open(
    dir: &Path,
    name: &str,
    lock: FlockOperation,
) -> Result<(fs_err::File, PathBuf)> {
    let path = dir.join(name);
    let mut options = fs_err::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    let file = options.open(&path).map_err(|e| Error::io(&path, "open", e))?;
    match rustix::fs::flock(file.file(), lock) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Err(busy(dir)),
        Err(e) => return Err(Error::io(&path, "lock", e.into())),
    }
    // The one that held the lock may just have ended and moved the folder away.
    let locked = file.metadata().map_err(|e| Error::io(&path, "look at", e))?;
    let there = fs_err::metadata(&path).map_err(|_| busy(dir))?;
    if (locked.dev(), locked.ino()) != (there.dev(), there.ino()) {
        return Err(busy(dir));
    }
    Ok((file, path))
}

/// The length of the whole lines, and what they record if there are any.
fn read(file: &mut fs_err::File, path: &Path, now: &Identity) -> Result<(u64, Option<Vec<Done>>)> {
    let read = |e| Error::io(path, "read", e);
    let size = file.metadata().map_err(read)?.len();
    if size > MAX_JOURNAL {
        return Err(damaged(path, "it is too long"));
    }
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0)).map_err(read)?;
    file.read_to_end(&mut bytes).map_err(read)?;
    // A killed run may have left half a line: the file it was for is done again.
    let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
    bytes.truncate(whole);
    let mut lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty());
    let Some(first) = lines.next() else { return Ok((whole as u64, None)) };
    let begun: Identity =
        serde_json::from_slice(first).map_err(|e| damaged(path, &e.to_string()))?;
    if let Some(difference) = begun.difference(now) {
        return Err(Error::mismatch(format!("cannot go on with this work: {difference}"))
            .in_file(path.parent().unwrap_or(path))
            .hint("use --force to start over, or give the options it was begun with"));
    }
    let record = |line| serde_json::from_slice(line).map_err(|e| damaged(path, &e.to_string()));
    Ok((whole as u64, Some(lines.map(record).collect::<Result<_>>()?)))
}

fn damaged(path: &Path, why: &str) -> Error {
    Error::malformed(format!("the journal is damaged: {why}"))
        .in_file(path)
        .hint("use --force to start over")
}

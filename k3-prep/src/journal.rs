//! What a conversion has finished, so that a killed one goes on where it stopped.
//!
//! The first line says what is being converted and how; every further line is the record of
//! a file that is complete under its final name. A line is written and synced after the
//! file's rename, so a record never promises more than there is. The open journal is also
//! the lock: two conversions cannot work on one folder.

use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use k3_formats::container::manifest::FileRecord;
use k3_formats::{Error, Result};
use rustix::fs::FlockOperation;
use serde::Serialize;

use crate::identity::Identity;
use crate::plan::ConversionPlan;

/// Name of the journal in a work folder.
pub(crate) const JOURNAL_FILE: &str = "journal.jsonl";

/// Longest journal that is read, in bytes: sixty times the release's.
const MAX_JOURNAL: u64 = 64 << 20;

/// The open journal of a work folder, locked.
#[derive(Debug)]
pub(crate) struct Journal {
    file: fs_err::File,
    path: PathBuf,
}

impl Journal {
    /// Locks the journal of the work folder `dir`, which is made if there is none.
    pub(crate) fn lock(dir: &Path) -> Result<Self> {
        let path = dir.join(JOURNAL_FILE);
        let mut options = fs_err::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let file = options.open(&path).map_err(|e| Error::io(&path, "open", e))?;
        let busy = || {
            Error::unsupported("another conversion is working in this folder")
                .in_file(dir)
                .hint("wait for it to end, or give another output")
        };
        match rustix::fs::flock(file.file(), FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(busy()),
            Err(e) => return Err(Error::io(&path, "lock", e.into())),
        }
        // The one that held the lock may just have ended and moved the folder away.
        let locked = file.metadata().map_err(|e| Error::io(&path, "look at", e))?;
        let there = fs_err::metadata(&path).map_err(|_| busy())?;
        if (locked.dev(), locked.ino()) != (there.dev(), there.ino()) {
            return Err(busy());
        }
        Ok(Self { file, path })
    }

    /// Goes on with what the journal records: the files that are done. An empty or torn
    /// journal begins anew.
    ///
    /// # Errors
    /// It was begun with another recipe, another tool or another snapshot.
    pub(crate) fn resume(&mut self, plan: &ConversionPlan) -> Result<Vec<FileRecord>> {
        let read = |e| Error::io(&self.path, "read", e);
        let size = self.file.metadata().map_err(read)?.len();
        if size > MAX_JOURNAL {
            return Err(self.damaged("it is too long"));
        }
        let mut bytes = Vec::new();
        self.file.seek(SeekFrom::Start(0)).map_err(read)?;
        self.file.read_to_end(&mut bytes).map_err(read)?;
        // A killed run may have left half a line: the file it was for is done again.
        let whole = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |end| end + 1);
        bytes.truncate(whole);
        self.cut(whole as u64)?;
        let mut lines = bytes.split(|&b| b == b'\n').filter(|line| !line.is_empty());
        let now = Identity::of(plan);
        let Some(first) = lines.next() else {
            self.append(&now)?;
            return Ok(Vec::new());
        };
        let begun: Identity =
            serde_json::from_slice(first).map_err(|e| self.damaged(&e.to_string()))?;
        if let Some(difference) = begun.difference(&now) {
            return Err(Error::mismatch(format!("cannot go on with this work: {difference}"))
                .in_file(self.path.parent().unwrap_or(&self.path))
                .hint("use --force to start over, or give the options it was begun with"));
        }
        lines
            .map(|line| serde_json::from_slice(line).map_err(|e| self.damaged(&e.to_string())))
            .collect()
    }

    /// Forgets everything.
    pub(crate) fn start_over(&mut self) -> Result<()> {
        self.cut(0)
    }

    /// Records a file that is complete and durable.
    pub(crate) fn record(&mut self, file: &FileRecord) -> Result<()> {
        self.append(file)
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

    fn damaged(&self, why: &str) -> Error {
        Error::malformed(format!("the journal is damaged: {why}"))
            .in_file(&self.path)
            .hint("use --force to start over")
    }
}

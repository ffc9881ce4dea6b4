//! The output folder: work goes on in `OUT.partial`, and `OUT` appears complete or not at
//! all.

use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Component, Path, PathBuf};

use k3_formats::container::manifest::{MANIFEST_FILE, Manifest, SUMS_FILE};
use k3_formats::container::writer::sync_dir;
use k3_formats::{Error, Result};

use crate::expert_sums::SUMS_STATE_FILE;
use crate::journal::{self, JOURNAL_FILE};

/// What to do about a container that is in the way.
pub(crate) const REPLACE: &str =
    "use --force to replace it once the new one is complete, or give another output";

/// Where a container is made, and where it will be.
#[derive(Debug, Clone)]
pub(crate) struct OutputFolder {
    out: PathBuf,
    work: PathBuf,
    replace: bool,
}

impl OutputFolder {
    /// Checks that a container may be made at `out`; makes nothing yet. `replace` allows a
    /// container to be there already.
    pub(crate) fn check(out: &Path, snapshot: &Path, replace: bool) -> Result<Self> {
        let out = resolve(out)?;
        let Some(name) = out.file_name() else {
            return Err(Error::unsupported("not a name for a new folder").in_file(&out));
        };
        let mut work = OsString::from(name);
        work.push(".partial");
        let folder = Self { work: out.with_file_name(work), out, replace };
        folder.keep_apart_from(snapshot)?;
        folder.check_what_is_there()?;
        Ok(folder)
    }

    /// The folder the work is done in.
    pub(crate) fn work(&self) -> &Path {
        &self.work
    }

    fn keep_apart_from(&self, snapshot: &Path) -> Result<()> {
        let inside = self.out.starts_with(snapshot);
        let around = snapshot.starts_with(&self.out) || snapshot.starts_with(&self.work);
        if !inside && !around {
            return Ok(());
        }
        let what = if self.out == snapshot {
            "the output is the snapshot itself"
        } else if inside {
            "the output lies inside the snapshot"
        } else {
            "the snapshot lies inside the output"
        };
        Err(Error::unsupported(what)
            .in_file(&self.out)
            .hint("give a folder outside the snapshot; nothing in a snapshot is ever changed"))
    }

    fn check_what_is_there(&self) -> Result<()> {
        let there = match self.out.symlink_metadata() {
            Ok(there) => there,
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(()),
            Err(e) => return Err(Error::io(&self.out, "look at", e)),
        };
        if there.is_dir() && is_empty(&self.out)? {
            return Ok(());
        }
        let container = there.is_dir() && self.out.join(MANIFEST_FILE).is_file();
        if container {
            return Ok(());
        }
        Err(Error::unsupported("exists already and is not a container, so it is left alone")
            .in_file(&self.out)
            .hint("give another output"))
    }

    /// What the container says that is there already, unless it is to be replaced.
    pub(crate) fn existing(&self) -> Result<Option<Manifest>> {
        if self.replace || !self.out.join(MANIFEST_FILE).is_file() {
            return Ok(None);
        }
        Manifest::read(&self.out).map(Some).map_err(|e| e.hint(REPLACE))
    }

    /// The folder that the container will be.
    pub(crate) fn out(&self) -> &Path {
        &self.out
    }

    /// Makes the work folder.
    pub(crate) fn create(&self) -> Result<()> {
        fs_err::create_dir_all(&self.work).map_err(|e| Error::io(&self.work, "create", e))
    }

    /// Bytes that the file system has free for the work; `None` where it does not tell.
    pub(crate) fn free_bytes(&self) -> Option<u64> {
        free_bytes(&self.work)
    }

    /// Removes what earlier work left, but for the journal, checksums of experts (which only
    /// depend on the shards) and the files in `keep`.
    ///
    /// # Errors
    /// There is something that no conversion makes.
    pub(crate) fn clear(&self, keep: impl Fn(&str) -> bool) -> Result<()> {
        let list = |e| Error::io(&self.work, "list", e);
        for entry in fs_err::read_dir(&self.work).map_err(list)? {
            let entry = entry.map_err(list)?;
            let path = entry.path();
            let name = entry.file_name();
            let name = name.to_str().unwrap_or_default();
            if [JOURNAL_FILE, SUMS_STATE_FILE].contains(&name) || keep(name) {
                continue;
            }
            let regular = entry.file_type().is_ok_and(|t| t.is_file());
            if !regular || !is_ours(name) {
                return Err(Error::unsupported(
                    "did not come from a conversion, so it is left alone",
                )
                .in_file(path)
                .hint("move it away, then run this again"));
            }
            fs_err::remove_file(&path).map_err(|e| Error::io(&path, "remove", e))?;
        }
        Ok(())
    }

    /// Gives the finished work its name.
    pub(crate) fn publish(&self) -> Result<()> {
        let mut journals = journal::part_journals(&self.work)?;
        journals.push(JOURNAL_FILE.to_owned());
        for name in journals {
            let path = self.work.join(name);
            fs_err::remove_file(&path).map_err(|e| Error::io(&path, "remove", e))?;
        }
        let sums = self.work.join(SUMS_STATE_FILE);
        match fs_err::remove_file(&sums) {
            Err(e) if e.kind() != ErrorKind::NotFound => return Err(Error::io(&sums, "remove", e)),
            _ => {}
        }
        sync_dir(&self.work)?;
        let parent = self.out.parent().unwrap_or(Path::new("/"));
        if self.replace && self.out.join(MANIFEST_FILE).is_file() {
            self.swap()?;
        } else {
            fs_err::rename(&self.work, &self.out)
                .map_err(|e| Error::io(&self.out, "rename into place", e))?;
        }
        sync_dir(parent)
    }

    /// Puts the new container in the place of the old one, and removes the old one.
    fn swap(&self) -> Result<()> {
        let rename = |e| Error::io(&self.out, "replace", e);
        if !exchange(&self.work, &self.out) {
            // Two steps where the file system cannot exchange: the old one stays whole.
            let mut old = self.out.clone().into_os_string();
            old.push(".old");
            let old = PathBuf::from(old);
            fs_err::rename(&self.out, &old).map_err(rename)?;
            fs_err::rename(&self.work, &self.out).map_err(rename)?;
            fs_err::rename(&old, &self.work).map_err(rename)?;
        }
        self.clear(|_| false)?;
        fs_err::remove_dir(&self.work).map_err(|e| Error::io(&self.work, "remove", e))
    }
}

/// Bytes that the file system of `path`, which need not exist yet, has free; `None` where it
/// does not tell.
pub(crate) fn free_bytes(path: &Path) -> Option<u64> {
    let there = path.ancestors().find(|p| p.exists())?;
    let stat = rustix::fs::statvfs(there).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Refuses a folder that is the snapshot or lies in it.
pub(crate) fn keep_out_of(dir: &Path, snapshot: &Path) -> Result<()> {
    if !resolve(dir)?.starts_with(snapshot) {
        return Ok(());
    }
    Err(Error::unsupported("the folder lies inside the snapshot")
        .in_file(dir)
        .hint("give a folder outside the snapshot; nothing in a snapshot is ever changed"))
}

#[cfg(target_os = "linux")]
fn exchange(a: &Path, b: &Path) -> bool {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    renameat_with(CWD, a, CWD, b, RenameFlags::EXCHANGE).is_ok()
}

#[cfg(not(target_os = "linux"))]
fn exchange(_: &Path, _: &Path) -> bool {
    false
}

/// Names that a conversion gives.
fn is_ours(name: &str) -> bool {
    let name = name.strip_suffix(".part").unwrap_or(name);
    let known = [MANIFEST_FILE, SUMS_FILE, JOURNAL_FILE, SUMS_STATE_FILE];
    known.contains(&name)
        || journal::part_of(name).is_some()
        || crate::plan::is_small_file(name)
        || (name.starts_with("dense-") && name.ends_with(".safetensors"))
}

fn is_empty(dir: &Path) -> Result<bool> {
    let mut entries = fs_err::read_dir(dir).map_err(|e| Error::io(dir, "list", e))?;
    Ok(entries.next().is_none())
}

/// The path from the root, links resolved as far as it exists, so that paths can be compared.
fn resolve(path: &Path) -> Result<PathBuf> {
    let full = std::path::absolute(path).map_err(|e| Error::io(path, "resolve", e))?;
    for there in full.ancestors() {
        if let Ok(resolved) = fs_err::canonicalize(there) {
            let rest = full.strip_prefix(there).expect("an ancestor is a prefix");
            if rest.components().any(|c| c == Component::ParentDir) {
                break;
            }
            // Joining an empty path would leave a slash at the end.
            return Ok(if rest.as_os_str().is_empty() { resolved } else { resolved.join(rest) });
        }
    }
    Err(Error::unsupported("leads through a folder that does not exist").in_file(path))
}

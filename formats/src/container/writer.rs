//! Streaming writer of one dense file: fillers, digests, fsync, rename.

use std::fs::Permissions;
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use fs_err::File;

use super::layout::{Layout, Span};
use super::manifest::{FileRecord, TensorRecord};
use crate::digest::{Digest, Hasher};
use crate::{Error, Result};

/// A dense file being written beside its final name.
///
/// The tensors of the layout are written in order, each in as many pieces as the caller
/// likes. Nothing appears under the final name before [`DenseWriter::finish`].
#[derive(Debug)]
pub struct DenseWriter {
    file: File,
    part: PathBuf,
    path: PathBuf,
    layout: Layout,
    head: u64,
    data_at: u64,
    file_hash: Hasher,
    tensors: Vec<TensorRecord>,
}

impl DenseWriter {
    /// Creates the file and writes its header; what a killed run left is overwritten.
    ///
    /// # Errors
    /// The file cannot be created or written.
    pub fn create(path: &Path, layout: Layout) -> Result<Self> {
        let part = part_name(path);
        let file = create(&part)?;
        let mut writer = Self {
            file,
            part,
            path: path.to_path_buf(),
            head: layout.head.len() as u64,
            data_at: 0,
            file_hash: Hasher::new(),
            tensors: Vec::with_capacity(layout.spans.len()),
            layout,
        };
        let head = std::mem::take(&mut writer.layout.head);
        writer.put(&head)?;
        Ok(writer)
    }

    /// Writes the next tensor of the layout. `fill` is handed a sink and must give it
    /// exactly the tensor's bytes; `format` is recorded with it.
    ///
    /// # Errors
    /// The write fails, or `fill` fails or gives another number of bytes.
    ///
    /// # Panics
    /// The layout has no further tensor.
    pub fn tensor<E: From<Error>>(
        &mut self,
        format: Option<&str>,
        fill: impl FnOnce(&mut TensorSink<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        let span = self.fill_gap()?;
        let mut sink = TensorSink { writer: self, hash: Hasher::new(), end: span.end };
        fill(&mut sink)?;
        let sha256 = sink.hash.finish();
        if self.data_at != span.end {
            let problem = format!(
                "expected {} bytes, found {}",
                span.end - span.begin,
                self.data_at - span.begin
            );
            return Err(Error::mismatch(problem).item(span.name).in_file(&self.path).into());
        }
        self.tensors.push(TensorRecord {
            name: span.name,
            format: format.map(str::to_owned),
            error_ppm: None,
            sha256,
        });
        Ok(())
    }

    /// Records the relative error of the matrix that was written last.
    ///
    /// # Panics
    /// There is none.
    pub fn relative_error(&mut self, error: f64) {
        let ppm = (1e6 * error).round() as u64;
        self.tensors.last_mut().expect("a tensor was written").error_ppm = Some(ppm);
    }

    /// Leaves the next tensor of the layout as a hole, which reads as zeros and takes no
    /// room on the disk; `sha256` is the digest of that many zeros.
    ///
    /// # Errors
    /// The file system refuses.
    ///
    /// # Panics
    /// The layout has no further tensor.
    pub fn hole(&mut self, format: Option<&str>, sha256: Digest) -> Result<()> {
        let span = self.fill_gap()?;
        self.file_hash.update_zeros(span.end - span.begin);
        let end = SeekFrom::End(0);
        self.file
            .set_len(self.head + span.end)
            .and_then(|()| self.file.seek(end))
            .map_err(|e| Error::io(&self.part, "extend", e))?;
        self.data_at = span.end;
        self.tensors.push(TensorRecord {
            name: span.name,
            format: format.map(str::to_owned),
            error_ppm: None,
            sha256,
        });
        Ok(())
    }

    /// Writes the filler before the next tensor, whose place it returns.
    fn fill_gap(&mut self) -> Result<Span> {
        let span = self.layout.spans[self.tensors.len()].clone();
        let gap = usize::try_from(span.begin - self.data_at).expect("less than an alignment");
        self.put(&vec![0; gap])?;
        self.data_at = span.begin;
        Ok(span)
    }

    /// Makes the file durable and gives it its name.
    ///
    /// # Errors
    /// The disk refuses, or tensors are missing.
    pub fn finish(self) -> Result<FileRecord> {
        if let Some(span) = self.layout.spans.get(self.tensors.len()) {
            return Err(Error::missing("never written")
                .item(span.name.clone())
                .in_file(&self.path));
        }
        self.file.sync_all().map_err(|e| Error::io(&self.part, "write", e))?;
        let size = self.file.metadata().map_err(|e| Error::io(&self.part, "write", e))?.len();
        publish(&self.part, &self.path)?;
        let name = self.path.file_name().expect("a file path").to_string_lossy().into_owned();
        Ok(FileRecord { name, size, sha256: self.file_hash.finish(), tensors: self.tensors })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.file_hash.update(bytes);
        self.file.write_all(bytes).map_err(|e| Error::io(&self.part, "write", e))
    }
}

/// Takes the bytes of one tensor.
#[derive(Debug)]
pub struct TensorSink<'a> {
    writer: &'a mut DenseWriter,
    hash: Hasher,
    end: u64,
}

impl TensorSink<'_> {
    /// Appends bytes of the tensor.
    ///
    /// # Errors
    /// The write fails, or the tensor has no room for them.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let at = self.writer.data_at + bytes.len() as u64;
        if at > self.end {
            return Err(Error::mismatch(format!("{} bytes too many", at - self.end))
                .in_file(&self.writer.path));
        }
        self.hash.update(bytes);
        self.writer.put(bytes)?;
        self.writer.data_at = at;
        Ok(())
    }
}

/// Writes a whole small file durably under its name: beside it first, then renamed.
///
/// # Errors
/// The disk refuses.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<FileRecord> {
    let part = part_name(path);
    let io = |e| Error::io(&part, "write", e);
    let mut file = create(&part)?;
    file.write_all(bytes).map_err(io)?;
    file.sync_all().map_err(io)?;
    publish(&part, path)?;
    Ok(FileRecord {
        name: path.file_name().expect("a file path").to_string_lossy().into_owned(),
        size: bytes.len() as u64,
        sha256: Digest::of(bytes),
        tensors: Vec::new(),
    })
}

/// A new file that everyone may read, whatever the umask: a container is made by one user
/// and served by another.
fn create(path: &Path) -> Result<File> {
    let create = |e| Error::io(path, "create", e);
    let file = File::create(path).map_err(create)?;
    file.set_permissions(Permissions::from_mode(0o644)).map_err(create)?;
    Ok(file)
}

/// Renames a finished file into place and makes the rename durable.
fn publish(part: &Path, path: &Path) -> Result<()> {
    fs_err::rename(part, path).map_err(|e| Error::io(path, "rename into place", e))?;
    sync_dir(path.parent().unwrap_or(Path::new(".")))
}

/// Makes the names in a folder durable.
///
/// # Errors
/// The disk refuses.
pub fn sync_dir(dir: &Path) -> Result<()> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    let file = File::open(dir).map_err(|e| Error::io(dir, "open", e))?;
    file.sync_all().map_err(|e| Error::io(dir, "sync", e))
}

fn part_name(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".part");
    PathBuf::from(name)
}

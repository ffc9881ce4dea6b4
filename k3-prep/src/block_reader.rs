//! Positioned reads of large files in blocks: short reads and interruptions are handled,
//! and what is read only once does not push other files out of the page cache.

use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use k3_formats::{Error, Result};

/// Reads at an offset; may return less than asked, as `pread` does.
pub(crate) trait ReadAt {
    /// Fills the start of `buf` from `offset` and returns how many bytes that were.
    ///
    /// # Errors
    /// As the operating system says.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
}

impl ReadAt for fs_err::File {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.file().read_at(buf, offset)
    }
}

/// Fills all of `buf` from `offset`.
///
/// # Errors
/// The operating system's, or `UnexpectedEof` where the file ends too early.
pub(crate) fn read_exact_at(
    file: &(impl ReadAt + ?Sized),
    mut buf: &mut [u8],
    mut offset: u64,
) -> io::Result<()> {
    while !buf.is_empty() {
        match file.read_at(buf, offset) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => {
                buf = &mut buf[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Bytes read at a time: long enough for a disk, short enough to stay in a cache.
pub(crate) const BLOCK: usize = 4 << 20;

/// What becomes of the pages that were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pages {
    /// They stay in the page cache as long as there is room.
    Keep,
    /// The kernel may forget them at once.
    Drop,
}

/// A file, open for reading from front to back.
pub(crate) struct BlockReader {
    file: fs_err::File,
    path: PathBuf,
    pages: Pages,
}

impl BlockReader {
    pub(crate) fn open(path: &Path, pages: Pages) -> Result<Self> {
        let file = fs_err::File::open(path).map_err(|e| match e.kind() {
            ErrorKind::NotFound => Error::missing("no such file").in_file(path),
            _ => Error::io(path, "open", e),
        })?;
        advise(&file, 0, 0, Use::Sequential);
        Ok(Self { file, path: path.to_path_buf(), pages })
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Size of the file in bytes.
    pub(crate) fn size(&self) -> Result<u64> {
        Ok(self.file.metadata().map_err(|e| Error::io(&self.path, "read the size of", e))?.len())
    }

    /// Calls `each` with all bytes of the file in order, a block at a time.
    pub(crate) fn for_each_block(&self, mut each: impl FnMut(u64, &[u8])) -> Result<()> {
        let size = self.size()?;
        let mut block = vec![0; BLOCK.min(usize::try_from(size).unwrap_or(BLOCK))];
        let mut at = 0;
        while at < size {
            let n = (block.len() as u64).min(size - at);
            let block = &mut block[..n as usize];
            self.read(block, at)?;
            self.soon(at + n, BLOCK as u64);
            each(at, block);
            at += n;
        }
        Ok(())
    }

    /// Fills `buf` from `offset`.
    pub(crate) fn read(&self, buf: &mut [u8], offset: u64) -> Result<()> {
        read_exact_at(&self.file, buf, offset).map_err(|e| match e.kind() {
            ErrorKind::UnexpectedEof => Error::mismatch(format!(
                "the file became shorter: nothing to read between {offset} and {}",
                offset + buf.len() as u64
            ))
            .in_file(&self.path)
            .hint("something else writes to it; wait for that to end, then run this again"),
            _ => Error::io(&self.path, &format!("read {} bytes at {offset}", buf.len()), e),
        })?;
        if self.pages == Pages::Drop {
            advise(&self.file, offset, buf.len() as u64, Use::Over);
        }
        Ok(())
    }

    /// Drops a range from the page cache, so that reading it is reading the disk.
    pub(crate) fn forget(&self, offset: u64, len: u64) {
        advise(&self.file, offset, len, Use::Over);
    }

    /// Asks the kernel to read ahead.
    pub(crate) fn soon(&self, offset: u64, len: u64) {
        advise(&self.file, offset, len, Use::Soon);
    }
}

enum Use {
    Sequential,
    Soon,
    Over,
}

#[cfg(target_os = "linux")]
fn advise(file: &fs_err::File, offset: u64, len: u64, how: Use) {
    use rustix::fs::Advice;
    let advice = match how {
        Use::Sequential => Advice::Sequential,
        Use::Soon => Advice::WillNeed,
        Use::Over => Advice::DontNeed,
    };
    // A hint: where it is refused, reading works all the same.
    let _ = rustix::fs::fadvise(file.file(), offset, std::num::NonZeroU64::new(len), advice);
}

#[cfg(not(target_os = "linux"))]
fn advise(_: &fs_err::File, _: u64, _: u64, _: Use) {}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Gives at most three bytes a call and is interrupted every other time.
    struct Stuttering<'a>(&'a [u8], Cell<u32>);

    impl ReadAt for Stuttering<'_> {
        fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
            self.1.set(self.1.get() + 1);
            if self.1.get() % 2 == 1 {
                return Err(ErrorKind::Interrupted.into());
            }
            let rest = &self.0[usize::try_from(offset).unwrap().min(self.0.len())..];
            let n = buf.len().min(rest.len()).min(3);
            buf[..n].copy_from_slice(&rest[..n]);
            Ok(n)
        }
    }

    struct Broken;

    impl ReadAt for Broken {
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
            Err(io::Error::from_raw_os_error(5))
        }
    }

    #[test]
    fn short_and_interrupted_reads_are_completed() {
        let data: Vec<u8> = (0..40).collect();
        let file = Stuttering(&data, Cell::new(0));
        let mut buf = [0; 30];
        read_exact_at(&file, &mut buf, 7).unwrap();
        assert_eq!(buf, data[7..37]);
        let e = read_exact_at(&file, &mut buf, 11).unwrap_err();
        assert_eq!(e.kind(), ErrorKind::UnexpectedEof);
        assert_eq!(read_exact_at(&Broken, &mut buf, 0).unwrap_err().raw_os_error(), Some(5));
    }

    #[test]
    fn a_file_that_shrank_is_named() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("a.safetensors");
        fs_err::write(&path, [1; 10]).unwrap();
        let reader = BlockReader::open(&path, Pages::Drop).unwrap();
        let e = reader.read(&mut [0; 8], 4).unwrap_err().to_string();
        assert!(e.contains("a.safetensors: the file became shorter"), "{e}");
    }
}

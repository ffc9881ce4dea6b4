//! The sections of a session file: numbers to bytes and back, hashed on the way.

use std::io::{self, Read, Write};

use fs_err::File;
use k3_formats::digest::Hasher;
use k3_formats::{Error, Result};

/// Bytes read or written at a time.
const BLOCK: usize = 1 << 16;

/// Writes sections one after the other.
pub(super) struct SectionWriter<W> {
    file: W,
    block: Vec<u8>,
    hash: Hasher,
}

impl<W: Write> SectionWriter<W> {
    pub(super) fn new(file: W) -> Self {
        Self { file, block: Vec::with_capacity(BLOCK), hash: Hasher::new() }
    }

    pub(super) fn put<T: Copy, const N: usize>(
        &mut self,
        values: &[T],
        to_bytes: impl Fn(T) -> [u8; N],
    ) -> io::Result<()> {
        for values in values.chunks(BLOCK / N) {
            self.block.clear();
            self.block.extend(values.iter().flat_map(|&value| to_bytes(value)));
            self.hash.update(&self.block);
            self.file.write_all(&self.block)?;
        }
        Ok(())
    }

    /// Ends a section and returns its digest.
    pub(super) fn end(&mut self) -> [u8; 32] {
        std::mem::take(&mut self.hash).finish().to_bytes()
    }
}

/// Reads sections one after the other.
pub(super) struct SectionReader<'f> {
    file: &'f mut File,
    block: Vec<u8>,
    hash: Hasher,
}

impl<'f> SectionReader<'f> {
    pub(super) fn new(file: &'f mut File) -> Self {
        Self { file, block: vec![0; BLOCK], hash: Hasher::new() }
    }

    /// The next `bytes` bytes, no more than a block.
    fn next(&mut self, bytes: usize) -> Result<&[u8]> {
        let block = &mut self.block[..bytes];
        self.file.read_exact(block).map_err(|e| Error::io(self.file.path(), "read", e))?;
        self.hash.update(block);
        Ok(block)
    }

    pub(super) fn skip(&mut self, mut bytes: u64) -> Result<()> {
        while bytes > 0 {
            let part = bytes.min(BLOCK as u64);
            self.next(part as usize)?;
            bytes -= part;
        }
        Ok(())
    }

    pub(super) fn fill<T, const N: usize>(
        &mut self,
        values: &mut [T],
        from_bytes: impl Fn([u8; N]) -> T,
    ) -> Result<()> {
        for values in values.chunks_mut(BLOCK / N) {
            let bytes = self.next(values.len() * N)?;
            for (value, bytes) in values.iter_mut().zip(bytes.as_chunks().0) {
                *value = from_bytes(*bytes);
            }
        }
        Ok(())
    }

    /// Ends a section, whose digest should be `digest`.
    pub(super) fn end(&mut self, digest: &[u8; 32]) -> Result<()> {
        if std::mem::take(&mut self.hash).finish().to_bytes() == *digest {
            Ok(())
        } else {
            Err(super::header::damaged("a section is not what its digest says"))
        }
    }
}

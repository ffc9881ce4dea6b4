//! The embedding: one row is read for each token, and none is kept.

use std::os::unix::fs::FileExt;

use half::bf16;
use k3_formats::container::Container;
use k3_formats::tensor_name::embedding_name;
use rustix::fs::Advice;

/// `embed_tokens` [vocab, hidden] in its file.
pub(crate) struct Embedding {
    file: fs_err::File,
    start: u64,
    row: Vec<bf16>,
}

impl Embedding {
    /// Finds the matrix and opens its file.
    ///
    /// # Errors
    /// The container lacks it, or its file cannot be opened.
    pub(crate) fn open(container: &Container) -> anyhow::Result<Self> {
        let (file, bytes) = container.tensor_place(&embedding_name())?;
        let file = fs_err::File::open(&container.dense_files()[file].path)?;
        // Rows are far apart; a kernel that cannot be told so only reads more than needed.
        let _ = rustix::fs::fadvise(file.file(), 0, None, Advice::Random);
        Ok(Self { file, start: bytes.start, row: vec![bf16::ZERO; container.config.hidden] })
    }

    /// Reads the row of token `id`, which is in the vocabulary, as f32: `out: [hidden]`.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read(&mut self, id: u32, out: &mut [f32]) -> anyhow::Result<()> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut self.row);
        let at = self.start + u64::from(id) * bytes.len() as u64;
        self.file
            .file()
            .read_exact_at(bytes, at)
            .map_err(|e| k3_formats::Error::io(self.file.path(), "read an embedding from", e))?;
        out.iter_mut().zip(&self.row).for_each(|(x, e)| *x = e.to_f32());
        Ok(())
    }
}

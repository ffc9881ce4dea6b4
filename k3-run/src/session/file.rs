//! A whole session in a file: tokens, state and conversation.
//!
//! Little-endian, without gaps:
//!
//! | offset | bytes | what |
//! |---:|---:|---|
//! | 0 | 8 | `k3sessn` and a zero byte |
//! | 8 | 4 | version, 1 |
//! | 12 | 1 | activations of dense matrices: 0 exact, 1 rounded to int8 |
//! | 13 | 1 | activations of routed experts, likewise |
//! | 14 | 1 | latents: 0 f32, 1 BF16 |
//! | 15 | 1 | zero |
//! | 16 | 32 | SHA-256 of the container's manifest |
//! | 48 | 8 | layers run |
//! | 56 | 8 | N, tokens |
//! | 64 | 8 | C, bytes of the conversation |
//! | 72 | 8 | L, logits: 0 or the vocabulary |
//! | 80 | 8 | K, values of the KDA states |
//! | 88 | 8 | M, values of the latents of all tokens |
//! | 96 | 4 | part of the weight that routed experts must have, f32; 1 for all experts |
//! | 100 | 4 | zero |
//! | 104 | 5 x 32 | SHA-256 of each section |
//! | 264 | 32 | SHA-256 of bytes 0 to 264 |
//! | 296 | 4 N | tokens, u32 |
//! | | C | conversation, UTF-8, opaque here |
//! | | 4 L | logits after the last token, f32 |
//! | | 4 K | f32, KDA layer after layer: inputs of the q, k and v convolutions, each [conv_width - 1, width], and memory [heads, key, value] |
//! | | 4 M or 2 M | f32 or BF16, MLA layer after layer: [N, kv_lora + rope] |
//!
//! Nothing follows. The sizes K and M are what the container's config implies for N
//! tokens; a file is refused unless all sizes, its own size and all digests agree. It is
//! only readable for its owner, as it holds what was said.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use fs_err::File;
use half::bf16;
use k3_formats::container::writer::sync_dir;
use k3_formats::{Error, Result};
use tempfile::NamedTempFile;

use super::Session;
use crate::engine::Engine;
use crate::state::LatentRows;

mod header;
mod sections;

use header::{HEADER, Header};
use sections::{SectionReader, SectionWriter};

/// Tokens of the session in the file `path`, to plan a context for it.
///
/// # Errors
/// There is no such file, or it is no session.
pub fn saved_tokens(path: &Path) -> Result<usize> {
    let header = open(path).and_then(|mut file| Header::peek(&mut file));
    let tokens = header.map_err(|e| e.in_file(path))?.tokens;
    Ok(usize::try_from(tokens).unwrap_or(usize::MAX))
}

fn open(path: &Path) -> Result<File> {
    let open = |e: std::io::Error| match e.kind() {
        std::io::ErrorKind::NotFound => Error::missing("no such file"),
        _ => Error::io(path, "open", e),
    };
    // Opening a pipe would wait for a writer, perhaps for ever.
    if !fs_err::metadata(path).map_err(open)?.is_file() {
        return Err(Error::unsupported("not a regular file")
            .hint("give a file that --save or /save has written"));
    }
    File::open(path).map_err(open)
}

impl Session {
    /// Writes the session to `path`, beside it first and then renamed. `conversation` comes
    /// back from [`Session::load`].
    ///
    /// # Errors
    /// The disk refuses, or the state was left half way by a step that was given up.
    pub fn save(&self, engine: &Engine<'_>, path: &Path, conversation: &str) -> Result<()> {
        if self.state.is_torn() {
            return Err(Error::unsupported("the last step was given up half way")
                .hint("let the model finish a step, then save"));
        }
        let dir = match path.parent() {
            Some(dir) if dir != Path::new("") => dir,
            _ => Path::new("."),
        };
        let write = |e| Error::io(path, "write", e);
        let mut temp = NamedTempFile::new_in(dir).map_err(|e| Error::io(path, "create", e))?;
        let mut header = Header::of(engine, self.tokens.len());
        header.conversation = conversation.len() as u64;
        header.logits = self.logits.len() as u64;
        header.digests = self.write(temp.as_file_mut(), conversation).map_err(write)?;
        let file = temp.as_file_mut();
        file.rewind().and_then(|()| file.write_all(&header.to_bytes())).map_err(write)?;
        file.sync_all().map_err(write)?;
        temp.persist(path).map_err(|e| Error::io(path, "rename into place", e.error))?;
        sync_dir(dir)
    }

    fn write(
        &self,
        mut file: impl Write + Seek,
        conversation: &str,
    ) -> std::io::Result<[[u8; 32]; 5]> {
        file.seek(SeekFrom::Start(HEADER as u64))?;
        let mut out = SectionWriter::new(file);
        out.put(&self.tokens, u32::to_le_bytes)?;
        let tokens = out.end();
        out.put(conversation.as_bytes(), u8::to_le_bytes)?;
        let conversation = out.end();
        out.put(&self.logits, f32::to_le_bytes)?;
        let logits = out.end();
        self.state.kda_values().try_for_each(|values| out.put(values, f32::to_le_bytes))?;
        let kda = out.end();
        self.state.latents().try_for_each(|latents| match latents {
            LatentRows::F32(values) => out.put(values, f32::to_le_bytes),
            LatentRows::Bf16(values) => out.put(values, bf16::to_le_bytes),
        })?;
        Ok([tokens, conversation, logits, kda, out.end()])
    }

    /// Replaces the session by the one in `path` and returns its conversation.
    ///
    /// # Errors
    /// The file is damaged, does not belong to this container and its settings, or does
    /// not fit into the context; the session is as before. If the file changes while it
    /// is read, the session is empty.
    pub fn load(&mut self, engine: &Engine<'_>, path: &Path) -> Result<String> {
        self.read(engine, path).map_err(|e| e.in_file(path))
    }

    fn read(&mut self, engine: &Engine<'_>, path: &Path) -> Result<String> {
        let mut file = open(path)?;
        let header = Header::read(&mut file, engine, self.context())?;
        // All digests before anything is replaced.
        let mut sections = SectionReader::new(&mut file);
        for (bytes, digest) in header.section_bytes().into_iter().zip(&header.digests) {
            sections.skip(bytes)?;
            sections.end(digest)?;
        }
        file.seek(SeekFrom::Start(HEADER as u64)).map_err(|e| Error::io(path, "read", e))?;
        self.reset();
        let loaded = self.replace(&mut SectionReader::new(&mut file), &header, engine);
        if loaded.is_err() {
            self.reset();
        }
        loaded
    }

    fn replace(
        &mut self,
        sections: &mut SectionReader<'_>,
        header: &Header,
        engine: &Engine<'_>,
    ) -> Result<String> {
        let mut tokens = vec![0; header.tokens as usize];
        sections.fill(&mut tokens, u32::from_le_bytes)?;
        sections.end(&header.digests[0])?;
        let vocab = engine.model().config.vocab;
        if let Some(id) = tokens.iter().find(|&&id| id as usize >= vocab) {
            let problem = format!("token id {id} is not in the vocabulary of {vocab}");
            return Err(Error::malformed(problem));
        }
        let mut conversation = vec![0; header.conversation as usize];
        sections.fill(&mut conversation, u8::from_le_bytes)?;
        sections.end(&header.digests[1])?;
        let conversation = String::from_utf8(conversation)
            .map_err(|_| Error::malformed("the conversation is not UTF-8"))?;
        let mut logits = vec![0.0; header.logits as usize];
        sections.fill(&mut logits, f32::from_le_bytes)?;
        sections.end(&header.digests[2])?;
        self.state.grow_latents(tokens.len());
        self.state.restore(tokens.len(), |part| sections.fill(part, f32::from_le_bytes))?;
        sections.end(&header.digests[3])?;
        for latents in self.state.latents_mut() {
            match latents {
                LatentRows::F32(values) => sections.fill(values, f32::from_le_bytes)?,
                LatentRows::Bf16(values) => sections.fill(values, bf16::from_le_bytes)?,
            }
        }
        sections.end(&header.digests[4])?;
        (self.tokens, self.logits) = (tokens, logits);
        Ok(conversation)
    }
}

//! The first bytes of a session file.

use std::io::Read;

use fs_err::File;
use k3_formats::digest::Digest;
use k3_formats::{Error, Result};

use crate::engine::Engine;
use crate::kernels::Arithmetic;
use crate::state::{KvType, kda_bytes, latent_values};

/// Bytes of the header.
pub(super) const HEADER: usize = 296;

const MAGIC: [u8; 8] = *b"k3sessn\0";
const VERSION: u32 = 1;
/// Bytes that the header's own digest covers.
const COVERED: usize = HEADER - 32;

/// Longest conversation in bytes: four times what fills the longest context.
const MAX_CONVERSATION: u64 = 64 << 20;

/// What the header says. Counts are of elements, not of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Header {
    /// Dense, experts.
    arithmetic: [u8; 2],
    kv: KvType,
    container: [u8; 32],
    layers: u64,
    pub(super) tokens: u64,
    pub(super) conversation: u64,
    pub(super) logits: u64,
    kda: u64,
    latents: u64,
    /// Bits of the f32.
    expert_top_p: u32,
    pub(super) digests: [[u8; 32]; 5],
}

impl Header {
    /// The header of a session of `tokens` tokens with this engine, without logits and
    /// conversation.
    pub(super) fn of(engine: &Engine<'_>, tokens: usize) -> Self {
        let (model, numerics) = (engine.model(), engine.numerics());
        let layers = model.layers.len();
        let manifest = model.container.manifest.to_text();
        let value = size_of::<f32>() as u64;
        Self {
            arithmetic: [numerics.dense, numerics.experts].map(|a| match a {
                Arithmetic::Exact => 0,
                Arithmetic::Act8 => 1,
            }),
            kv: numerics.kv,
            container: Digest::of(manifest.as_bytes()).to_bytes(),
            layers: layers as u64,
            tokens: tokens as u64,
            conversation: 0,
            logits: 0,
            kda: kda_bytes(model.config, layers) / value,
            latents: latent_values(model.config, layers, tokens),
            expert_top_p: numerics.expert_top_p.unwrap_or(1.0).to_bits(),
            digests: [[0; 32]; 5],
        }
    }

    /// Bytes of the sections, in their order.
    pub(super) fn section_bytes(&self) -> [u64; 5] {
        let latents = self.kv.bytes() as u64 * self.latents;
        [4 * self.tokens, self.conversation, 4 * self.logits, 4 * self.kda, latents]
    }

    pub(super) fn to_bytes(&self) -> [u8; HEADER] {
        let mut bytes = Vec::with_capacity(HEADER);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(self.arithmetic);
        bytes.extend([matches!(self.kv, KvType::Bf16) as u8, 0]);
        bytes.extend(self.container);
        let counts =
            [self.layers, self.tokens, self.conversation, self.logits, self.kda, self.latents];
        bytes.extend(counts.map(u64::to_le_bytes).as_flattened());
        bytes.extend(self.expert_top_p.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.digests.as_flattened());
        let own = Digest::of(&bytes).to_bytes();
        bytes.extend(own);
        bytes.try_into().expect("the fields fill the header")
    }

    fn from_bytes(bytes: &[u8; HEADER]) -> Result<Self> {
        let mut rest = &bytes[..];
        if take::<8>(&mut rest) != MAGIC {
            return Err(no_session());
        }
        let version = u32::from_le_bytes(take(&mut rest));
        if version != VERSION {
            let problem = format!("expected session format {VERSION}, found {version}");
            return Err(Error::unsupported(problem).hint("load it with the k3-run that saved it"));
        }
        if Digest::of(&bytes[..COVERED]).to_bytes() != bytes[COVERED..] {
            return Err(damaged("the header is not what its digest says"));
        }
        let arithmetic = take(&mut rest);
        let kv = match take(&mut rest) {
            [0, 0] => KvType::F32,
            [1, 0] => KvType::Bf16,
            [kind, _] => return Err(damaged(&format!("latents of unknown kind {kind}"))),
        };
        let container = take(&mut rest);
        let [layers, tokens, conversation, logits, kda, latents] =
            [(); 6].map(|()| u64::from_le_bytes(take(&mut rest)));
        let expert_top_p = u32::from_le_bytes(take(&mut rest));
        if take(&mut rest) != [0; 4] {
            return Err(damaged("bytes that should be zero are not"));
        }
        let digests = [(); 5].map(|()| take(&mut rest));
        Ok(Self {
            arithmetic,
            kv,
            container,
            layers,
            tokens,
            conversation,
            logits,
            kda,
            latents,
            expert_top_p,
            digests,
        })
    }

    /// Reads the header of `file` and checks that the whole file fits to it, and it to
    /// the engine and to a context of `context` tokens.
    pub(super) fn read(file: &mut File, engine: &Engine<'_>, context: usize) -> Result<Self> {
        let found = Self::peek(file)?;
        let size = file.metadata().map_err(|e| Error::io(file.path(), "look at", e))?.len();
        found.check(engine, context)?;
        let expected = HEADER as u64 + found.section_bytes().iter().sum::<u64>();
        if size != expected {
            return Err(damaged(&format!("expected {expected} bytes, found {size}")));
        }
        Ok(found)
    }

    /// Reads the header of `file`, which may belong to any model.
    pub(super) fn peek(file: &mut File) -> Result<Self> {
        let mut bytes = Vec::with_capacity(HEADER);
        let read = file.by_ref().take(HEADER as u64).read_to_end(&mut bytes);
        read.map_err(|e| Error::io(file.path(), "read", e))?;
        let bytes = bytes.try_into().map_err(|_| no_session())?;
        Self::from_bytes(&bytes)
    }

    fn check(&self, engine: &Engine<'_>, context: usize) -> Result<()> {
        let ours = Self::of(engine, self.tokens.min(context as u64) as usize);
        if self.container != ours.container {
            return Err(Error::mismatch("the session was made with another container")
                .hint("give the container it was made with, or begin a new session"));
        }
        if self.arithmetic != ours.arithmetic {
            return Err(Error::mismatch(format!(
                "the session was made with {}, this is {}",
                act8(self.arithmetic),
                act8(ours.arithmetic)
            ))
            .hint("give the same --act8"));
        }
        if self.kv != ours.kv {
            let (theirs, ours) = (self.kv.name(), ours.kv.name());
            let problem = format!("the session was made with --kv-type {theirs}, this is {ours}");
            return Err(Error::mismatch(problem).hint("give the same --kv-type"));
        }
        if self.expert_top_p != ours.expert_top_p {
            let [theirs, ours] = [self, &ours].map(|header| f32::from_bits(header.expert_top_p));
            return Err(Error::mismatch(format!(
                "the session was made with --top-p-experts {theirs}, this is {ours}"
            ))
            .hint("give the same --top-p-experts"));
        }
        if self.layers != ours.layers {
            let (theirs, ours) = (self.layers, ours.layers);
            let problem = format!("the session was made with {theirs} layers, these are {ours}");
            return Err(Error::mismatch(problem).hint("give the same --layers"));
        }
        if self.tokens > context as u64 {
            let problem = format!(
                "the session has {} tokens, which do not fit into a context of {context}",
                self.tokens
            );
            return Err(Error::unsupported(problem).hint("give a larger --context"));
        }
        let vocab = engine.model().config.vocab as u64;
        let sizes = (self.kda, self.latents) == (ours.kda, ours.latents);
        if !sizes || ![0, vocab].contains(&self.logits) || self.conversation > MAX_CONVERSATION {
            return Err(damaged("its sizes are not those of the model"));
        }
        Ok(())
    }
}

fn act8(arithmetic: [u8; 2]) -> &'static str {
    match arithmetic {
        [0, 0] => "--act8 off",
        [0, _] => "--act8 experts",
        _ => "--act8 on",
    }
}

fn no_session() -> Error {
    Error::malformed("not a session file").hint("give a file that --save or /save has written")
}

/// An error about bytes that were changed after they were written.
pub(super) fn damaged(problem: &str) -> Error {
    Error::malformed(problem).hint("the session file is damaged; begin a new session")
}

fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let (first, behind) = rest.split_first_chunk().expect("fields of a whole header");
    *rest = behind;
    *first
}

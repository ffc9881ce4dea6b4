//! The memory of one expert: page-aligned, so that direct reads land in place.

use std::io;

use k3_formats::config::ModelConfig;
use k3_formats::tensor_name::{ExpertPart, expert_bytes};

use super::shards::DIRECT_ALIGN;
use crate::kernels::{Matrix, Weights};

/// Sizes of an expert's parts, the same for all experts of a model.
#[derive(Debug, Clone, Copy)]
pub struct ExpertShape {
    latent: usize,
    inter: usize,
    starts: [usize; 6],
    bytes: usize,
}

impl ExpertShape {
    /// The shape a config implies.
    pub fn new(config: &ModelConfig) -> Self {
        let mut starts = [0; 6];
        let mut at = 0;
        for part in ExpertPart::ALL {
            starts[part as usize] = at;
            at += part.bytes(config) as usize;
        }
        debug_assert_eq!(at as u64, expert_bytes(config));
        Self { latent: config.moe.latent, inter: config.moe.inter, starts, bytes: at }
    }

    /// Bytes of an expert as stored.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a slot: an expert that may begin anywhere in a block, in whole blocks.
    pub fn slot_bytes(&self) -> usize {
        self.bytes.next_multiple_of(DIRECT_ALIGN) + DIRECT_ALIGN
    }

    /// Where a part lies in an expert.
    pub fn range(&self, part: ExpertPart) -> std::ops::Range<usize> {
        let i = part as usize;
        self.starts[i]..self.starts.get(i + 1).copied().unwrap_or(self.bytes)
    }
}

/// One slot: an expert's bytes, starting up to a block into page-aligned memory.
#[derive(Debug)]
pub struct ExpertBuffer {
    memory: memmap2::MmapMut,
    start: usize,
    shape: ExpertShape,
}

impl ExpertBuffer {
    /// Reserves the memory; pages are taken when they are first written.
    ///
    /// # Errors
    /// The system has no room.
    pub fn new(shape: ExpertShape) -> io::Result<Self> {
        Ok(Self { memory: memmap2::MmapMut::map_anon(shape.slot_bytes())?, start: 0, shape })
    }

    /// All of the slot, for a read of whole blocks; the expert will begin at `start`.
    pub fn window(&mut self, start: usize) -> &mut [u8] {
        self.start = start;
        &mut self.memory
    }

    /// The expert's bytes, for reads of exact ranges.
    pub fn exact(&mut self) -> &mut [u8] {
        self.start = 0;
        &mut self.memory[..self.shape.bytes]
    }

    fn part(&self, part: ExpertPart) -> &[u8] {
        let range = self.shape.range(part);
        &self.memory[self.start + range.start..self.start + range.end]
    }

    fn matrix(
        &self,
        rows: usize,
        cols: usize,
        codes: ExpertPart,
        scales: ExpertPart,
    ) -> Matrix<'_> {
        let weights = Weights::Mxfp4 { packed: self.part(codes), scales: self.part(scales) };
        Matrix::new(rows, cols, weights).expect("the config was checked")
    }

    /// Gate projection [inter, latent].
    pub fn gate(&self) -> Matrix<'_> {
        let (inter, latent) = (self.shape.inter, self.shape.latent);
        self.matrix(inter, latent, ExpertPart::GatePacked, ExpertPart::GateScale)
    }

    /// Up projection [inter, latent].
    pub fn up(&self) -> Matrix<'_> {
        let (inter, latent) = (self.shape.inter, self.shape.latent);
        self.matrix(inter, latent, ExpertPart::UpPacked, ExpertPart::UpScale)
    }

    /// Down projection [latent, inter].
    pub fn down(&self) -> Matrix<'_> {
        let (inter, latent) = (self.shape.inter, self.shape.latent);
        self.matrix(latent, inter, ExpertPart::DownPacked, ExpertPart::DownScale)
    }
}

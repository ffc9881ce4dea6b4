//! The memory of one expert: page-aligned, so that direct reads land in place, and filled
//! by several readers at once, each its own piece.
#![allow(unsafe_code)] // readers fill disjoint pieces of memory that others will share

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use k3_formats::config::ModelConfig;
use k3_formats::tensor_name::{ExpertPart, expert_bytes};
use memmap2::{MmapMut, MmapRaw};

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
    pub fn range(&self, part: ExpertPart) -> Range<usize> {
        let i = part as usize;
        self.starts[i]..self.starts.get(i + 1).copied().unwrap_or(self.bytes)
    }
}

/// One slot: an expert's bytes, starting up to a block into page-aligned memory.
///
/// It is either being filled, through `Piece`s, or read. Filling begins with
/// `ExpertBuffer::cut`, which needs the only handle; reading is refused while a piece
/// is alive.
#[derive(Debug)]
pub struct ExpertBuffer {
    memory: MmapRaw,
    /// Pieces that are alive.
    pieces: AtomicUsize,
    start: usize,
    shape: ExpertShape,
}

impl ExpertBuffer {
    /// Reserves the memory; pages are taken when they are first written.
    ///
    /// # Errors
    /// The system has no room.
    pub(super) fn new(shape: ExpertShape) -> io::Result<Self> {
        let memory = MmapMut::map_anon(shape.slot_bytes())?;
        // Fewer pages to pin for a direct read, fewer TLB misses in a product; where the
        // system has none, small pages do.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        Ok(Self { memory: memory.into(), pieces: AtomicUsize::new(0), start: 0, shape })
    }

    /// Cuts the slot into consecutive pieces to be filled, which end at `ends` (ascending,
    /// in bytes); the expert will begin at `start`.
    ///
    /// # Panics
    /// There is another handle or a piece, or an end lies before the one before it or
    /// outside the slot.
    pub(super) fn cut(
        this: &mut Arc<Self>,
        start: usize,
        ends: impl Iterator<Item = usize>,
        mut take: impl FnMut(Piece),
    ) {
        let buffer = Arc::get_mut(this).expect("nobody else uses a slot that is to be filled");
        buffer.start = start;
        let (len, mut from) = (buffer.memory.len(), 0);
        for end in ends {
            assert!(from <= end && end <= len, "pieces follow one another inside the slot");
            this.pieces.fetch_add(1, Ordering::Relaxed);
            take(Piece { buffer: Arc::clone(this), range: from..end });
            from = end;
        }
    }

    /// The expert's bytes.
    ///
    /// # Panics
    /// The slot is being filled.
    fn bytes(&self) -> &[u8] {
        assert_eq!(self.pieces.load(Ordering::Acquire), 0, "the slot is filled before it is read");
        // SAFETY: the mapping is `len` initialized (zeroed) bytes and lives as long as
        // `self`. Only pieces write to it; none is alive (what they wrote is visible, as
        // dropping one releases and the load above acquires), and a new one needs `cut`,
        // which needs the only handle, while `&self` keeps one alive.
        let all = unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.len()) };
        &all[self.start..][..self.shape.bytes]
    }

    fn matrix(
        &self,
        rows: usize,
        cols: usize,
        codes: ExpertPart,
        scales: ExpertPart,
    ) -> Matrix<'_> {
        let part = |part| &self.bytes()[self.shape.range(part)];
        let weights = Weights::Mxfp4 { packed: part(codes), scales: part(scales) };
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

/// CRC-32 of a piece of an expert, to be put together with those of the others.
#[derive(Debug)]
pub(super) struct PieceSum {
    begin: usize,
    sum: crc32fast::Hasher,
}

impl PieceSum {
    /// CRC-32 of the whole expert.
    pub(super) fn whole(mut pieces: Vec<Self>) -> u32 {
        pieces.sort_unstable_by_key(|piece| piece.begin);
        let mut whole = crc32fast::Hasher::new();
        pieces.iter().for_each(|piece| whole.combine(&piece.sum));
        whole.finalize()
    }
}

/// A part of a slot that one reader fills; the only way to write to it.
#[derive(Debug)]
pub(super) struct Piece {
    buffer: Arc<ExpertBuffer>,
    range: Range<usize>,
}

impl Piece {
    /// Where it lies in the slot.
    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    /// Where its part of the expert lies in the slot, and the CRC-32 of that.
    pub(super) fn checksum(&mut self) -> PieceSum {
        let expert = self.buffer.start..self.buffer.start + self.buffer.shape.bytes;
        let begin = self.range.start.max(expert.start);
        let end = self.range.end.min(expert.end).max(begin);
        let from = self.range.start;
        let mut sum = crc32fast::Hasher::new();
        sum.update(&self.bytes_mut()[begin - from..end - from]);
        PieceSum { begin, sum }
    }

    /// Its bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        let (start, len) = (self.range.start, self.range.len());
        // SAFETY: `cut` checked that the range lies inside the mapping, which is
        // initialized and lives as long as the handle in `self`. Pieces of one cut are
        // disjoint and the next cut needs the only handle, so no other piece reaches these
        // bytes; `ExpertBuffer::bytes` refuses while `self` is alive; `&mut self` keeps the
        // slice the only one.
        unsafe { std::slice::from_raw_parts_mut(self.buffer.memory.as_mut_ptr().add(start), len) }
    }
}

impl Drop for Piece {
    fn drop(&mut self) {
        self.buffer.pieces.fetch_sub(1, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer() -> Arc<ExpertBuffer> {
        let mut starts = [0; 6];
        (1..6).for_each(|i| starts[i] = i * 100);
        let shape = ExpertShape { latent: 32, inter: 32, starts, bytes: 600 };
        Arc::new(ExpertBuffer::new(shape).unwrap())
    }

    fn cut(buffer: &mut Arc<ExpertBuffer>, start: usize, ends: &[usize]) -> Vec<Piece> {
        let mut pieces = Vec::new();
        ExpertBuffer::cut(buffer, start, ends.iter().copied(), |piece| pieces.push(piece));
        pieces
    }

    #[test]
    fn pieces_filled_by_threads_make_the_expert() {
        let mut buffer = buffer();
        for round in 0..3 {
            let pieces = cut(&mut buffer, 40, &[300, 300, 301, 700]);
            std::thread::scope(|scope| {
                for mut piece in pieces {
                    scope.spawn(move || {
                        let at = piece.range().start;
                        for (i, byte) in piece.bytes_mut().iter_mut().enumerate() {
                            *byte = ((at + i) % 251) as u8 + round;
                        }
                    });
                }
            });
            let want: Vec<_> = (40..640).map(|i| (i % 251) as u8 + round).collect();
            assert_eq!(buffer.bytes(), want);
        }
    }

    #[test]
    #[should_panic(expected = "filled before it is read")]
    fn a_slot_being_filled_cannot_be_read() {
        let mut buffer = buffer();
        let _pieces = cut(&mut buffer, 0, &[600]);
        buffer.bytes();
    }

    #[test]
    #[should_panic(expected = "nobody else uses a slot")]
    fn a_slot_in_use_cannot_be_filled() {
        let mut buffer = buffer();
        let _reader = Arc::clone(&buffer);
        cut(&mut buffer, 0, &[600]);
    }

    #[test]
    #[should_panic(expected = "inside the slot")]
    fn pieces_stay_inside() {
        cut(&mut buffer(), 0, &[9000]);
    }
}

//! Memory of a block product, one per thread and kept for its life: allocating or even
//! clearing it each time would cost more than a small product.

use std::cell::RefCell;

use super::activations::{Floats, Pairs, Step};
use super::isa::Isa;

/// Rows whose decoded weights one block product takes along. With f32 weights that is
/// 64 KiB, which the second-level cache has room for; more rows would not reduce the
/// traffic of the inputs any further, fewer would let it dominate.
pub(super) const ROWS: usize = 32;

/// Tokens of one block product. Its sums take 128 KiB.
pub(super) const TOKENS: usize = 64;

/// Steps of the longest block of fixed-point inputs.
const STEPS: usize = Pairs::<1>::BLOCK;

/// Unpacked codes of one step of a row, and the weight scale of each lane.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Unpacked {
    pub(super) codes: [[i8; 64]; 2],
    pub(super) scales: [f32; 16],
}

/// Decoded weights and sums of one block product.
#[derive(Default)]
pub(super) struct Scratch {
    /// `[ROWS, Floats::BLOCK]`.
    floats: Vec<Floats>,
    /// `[ROWS, STEPS]`.
    codes: Vec<Unpacked>,
    /// 16 lanes for each of `ROWS * TOKENS` outputs.
    sums: Vec<[f32; 16]>,
}

/// Most bytes that one thread keeps.
pub(super) const SCRATCH_BYTES: usize = ROWS * Floats::BLOCK * size_of::<Floats>()
    + ROWS * STEPS * size_of::<Unpacked>()
    + ROWS * TOKENS * size_of::<[f32; 16]>();

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

impl Scratch {
    /// Lends this thread's scratch to a kernel, which must not ask for it again.
    pub(super) fn with<R>(work: impl FnOnce(&mut Self) -> R) -> R {
        SCRATCH.with_borrow_mut(work)
    }

    /// Memory for f32 weights, then for sums.
    #[inline(always)]
    pub(super) fn floats(&mut self) -> (&mut [Floats], &mut [[f32; 16]]) {
        self.floats.resize(ROWS * Floats::BLOCK, Floats::EMPTY);
        self.sums.resize(ROWS * TOKENS, [0.0; 16]);
        (&mut self.floats, &mut self.sums)
    }

    /// Memory for codes, then for sums.
    #[inline(always)]
    pub(super) fn codes(&mut self) -> (&mut [Unpacked], &mut [[f32; 16]]) {
        self.codes.resize(ROWS * STEPS, Unpacked { codes: [[0; 64]; 2], scales: [0.0; 16] });
        self.sums.resize(ROWS * TOKENS, [0.0; 16]);
        (&mut self.codes, &mut self.sums)
    }
}

/// Rows and tokens that one block product covers, as places in the output.
#[derive(Clone, Copy)]
pub(super) struct Area {
    pub(super) row: usize,
    pub(super) height: usize,
    pub(super) token: usize,
    pub(super) width: usize,
}

/// The weights that the next block product will read, to be asked for bit by bit while
/// this one computes: each row's part is too short for the CPU to see it coming.
#[derive(Clone, Copy)]
pub(super) struct Ahead {
    /// First byte of the first row's part.
    pub(super) start: *const u8,
    /// Bytes from one row to the next.
    pub(super) stride: usize,
    /// Bytes of each row's part.
    pub(super) len: usize,
}

impl Ahead {
    /// `len` bytes from byte `from` of row `row` on, of rows `stride` bytes apart; all of it
    /// may lie behind the end of `all`, since it is only asked for.
    #[inline(always)]
    pub(super) fn new<T>(all: &[T], stride: usize, row: usize, from: usize, len: usize) -> Self {
        let start: *const u8 = all.as_ptr().cast();
        Self { start: start.wrapping_add(row * stride + from), stride, len }
    }

    /// Asks for the share of rows `r..r + rows` that belongs to `tokens` out of `all`.
    #[inline(always)]
    pub(super) fn prefetch<S: Isa>(
        &self,
        isa: S,
        r: usize,
        rows: usize,
        tokens: std::ops::Range<usize>,
        all: usize,
    ) {
        let lines = self.len.div_ceil(64);
        let (first, end) = (tokens.start * lines / all, tokens.end * lines / all);
        for row in r..r + rows {
            for line in first..end {
                isa.prefetch_late(self.start.wrapping_add(row * self.stride + line * 64));
            }
        }
    }
}

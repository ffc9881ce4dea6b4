//! Which matrices stay in memory when not all of them can.

use super::cut::Cut;
use super::{DenseMatrix, MatrixPlace};
use crate::experts::DIRECT_ALIGN;
use crate::model::mla::LATENT_UP;

/// Buffers of the ring that streamed pieces are read into: one in use, one for each
/// reader, and a few ahead of the computation.
pub const RING_SLOTS: usize = 6;

/// Where the dense weights are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// In the page cache, mapped.
    Mapped {
        /// Bytes to bring in before they are asked for.
        populate: u64,
    },
    /// In private memory, or read again every step.
    Loaded {
        /// For each matrix of [`DenseMatrix::all`], whether it stays.
        keep: Vec<bool>,
        /// Whether what stays is locked into memory.
        lock: bool,
    },
}

impl Placement {
    /// All matrices mapped, and all of them brought in.
    pub const MAPPED: Self = Self::Mapped { populate: u64::MAX };
}

/// Bytes of memory that a matrix takes when it is kept.
pub fn kept_bytes(place: &MatrixPlace) -> u64 {
    Cut::new(place, 0..place.rows).buffer_bytes() as u64
}

/// How matrices are cut into the pieces they are streamed in.
#[derive(Debug, Clone, Copy)]
pub struct Pieces {
    bytes: usize,
}

impl Pieces {
    /// For a model of these matrices: pieces long enough for a disk to be at its best, but
    /// so short that the ring is a small part of the model.
    pub fn new(matrices: &[DenseMatrix]) -> Self {
        let total: u64 = matrices.iter().map(DenseMatrix::bytes).sum();
        Self { bytes: (total / 64).clamp(64 << 10, 8 << 20) as usize }
    }

    /// The pieces of a matrix. The up-projection of MLA's latent is used by all heads at
    /// once and stays whole.
    pub(super) fn of(self, matrix: &DenseMatrix) -> impl Iterator<Item = Cut> {
        let (place, rows) = (&matrix.place, matrix.place.rows);
        let per_row = place.format.code_bytes_per_row(place.cols).max(1);
        // Pieces that begin on blocks need no bytes of their neighbours.
        let aligned = DIRECT_ALIGN >> per_row.trailing_zeros().min(DIRECT_ALIGN.trailing_zeros());
        let step = match matrix.name.ends_with(LATENT_UP) {
            true => rows.max(1),
            false => (self.bytes / per_row / aligned * aligned).max(aligned),
        };
        (0..rows).step_by(step).map(move |first| Cut::new(place, first..rows.min(first + step)))
    }

    /// Bytes read for a matrix in every step that uses it.
    pub fn read_bytes(self, matrix: &DenseMatrix) -> u64 {
        self.of(matrix).map(|cut| cut.buffer_bytes() as u64).sum()
    }

    /// Bytes of one buffer of the ring: the largest piece among the matrices that are
    /// streamed; none if all are kept.
    pub fn largest(self, matrices: &[DenseMatrix], keep: &[bool]) -> usize {
        let streamed = matrices.iter().zip(keep).filter(|(_, keep)| !**keep);
        let pieces = streamed.flat_map(|(matrix, _)| self.of(matrix));
        pieces.map(|cut| cut.buffer_bytes()).max().unwrap_or(0)
    }
}

/// Chooses matrices to keep in `budget` bytes, so that as many bytes as possible need not
/// be read again each step: every kept byte saves one, but in the head only one for each
/// token that is sampled. Small matrices come first, then the layers' share and share
/// alike, so that reads and computation stay interleaved, then the head.
pub fn choose(matrices: &[DenseMatrix], budget: u64) -> Vec<bool> {
    let sizes: Vec<u64> = matrices.iter().map(|m| kept_bytes(&m.place)).collect();
    let mut keep = vec![false; matrices.len()];
    let mut left = budget;
    // Reading one costs a request, whatever its size.
    let small = Pieces::new(matrices).bytes as u64 / 2;
    for i in (0..matrices.len()).filter(|&i| sizes[i] < small) {
        keep[i] = take(&mut left, sizes[i]);
    }
    let layers = |keep: &[bool]| -> Vec<usize> {
        (0..matrices.len()).filter(|&i| !keep[i] && !matrices[i].is_head()).collect()
    };
    let open = layers(&keep);
    let total: u64 = open.iter().map(|&i| sizes[i]).sum();
    let share = left.min(total);
    let (mut seen, mut kept) = (0u128, 0u128);
    for i in open {
        seen += u128::from(sizes[i]);
        if (kept + u128::from(sizes[i])) * u128::from(total) <= seen * u128::from(share) {
            keep[i] = take(&mut left, sizes[i]);
            kept += u128::from(if keep[i] { sizes[i] } else { 0 });
        }
    }
    // What the even shares left over, the largest first.
    let mut open = layers(&keep);
    open.sort_by_key(|&i| std::cmp::Reverse(sizes[i]));
    open.extend((0..matrices.len()).filter(|&i| matrices[i].is_head()));
    for i in open {
        keep[i] = take(&mut left, sizes[i]);
    }
    keep
}

fn take(left: &mut u64, size: u64) -> bool {
    let fits = size <= *left;
    *left -= if fits { size } else { 0 };
    fits
}

#[cfg(test)]
mod tests {
    use k3_formats::quant::MatrixFormat;
    use k3_formats::tensor_name::TensorClass;

    use super::*;

    fn matrix(class: TensorClass, rows: usize) -> DenseMatrix {
        let codes = 4096..4096 + rows as u64 * 4096;
        let place = MatrixPlace {
            file: 0,
            rows,
            cols: 4096,
            format: MatrixFormat::Int8Row,
            scales: codes.end..codes.end + rows as u64 * 4,
            codes,
        };
        DenseMatrix { name: String::new(), class, place }
    }

    fn model() -> Vec<DenseMatrix> {
        let layer = [(TensorClass::Kda, 12_000), (TensorClass::KdaGate, 96)];
        let layers = (0..40).flat_map(|_| layer).map(|(class, rows)| matrix(class, rows));
        layers.chain([matrix(TensorClass::Head, 100_000)]).collect()
    }

    #[test]
    fn budgets_are_used_and_kept() {
        let matrices = model();
        let size = |i: usize| kept_bytes(&matrices[i].place);
        let all: u64 = (0..matrices.len()).map(size).sum();
        for percent in [0, 1, 10, 33, 50, 77, 99, 100] {
            let budget = all * percent / 100;
            let keep = choose(&matrices, budget);
            let kept: u64 = (0..matrices.len()).filter(|&i| keep[i]).map(size).sum();
            assert!(kept <= budget, "{percent} %");
            let unused = budget - kept;
            let fits = (0..matrices.len()).any(|i| !keep[i] && size(i) <= unused);
            assert!(!fits, "{percent} %: {unused} bytes are left");
        }
    }

    #[test]
    fn half_a_model_is_kept_evenly_and_the_head_last() {
        let matrices = model();
        let layers: u64 = matrices[..80].iter().map(|m| kept_bytes(&m.place)).sum();
        let keep = choose(&matrices, layers / 2);
        assert!(!keep[80], "the head");
        let large = |range: std::ops::Range<usize>| range.step_by(2).filter(|&i| keep[i]).count();
        assert!(large(0..40).abs_diff(large(40..80)) <= 1, "{keep:?}");
        assert!((1..80).step_by(2).all(|i| keep[i]), "small ones");
    }

    #[test]
    fn pieces_cover_a_matrix_and_cost_little_more_than_it() {
        let head = matrix(TensorClass::Head, 100_000);
        let matrices = [head.clone(), matrix(TensorClass::Kda, 200_000)];
        let pieces = Pieces::new(&matrices);
        let rows = pieces.of(&head).map(|cut| cut.view(&vec![0; cut.buffer_bytes()]).rows());
        assert_eq!(rows.sum::<usize>(), 100_000);
        let extra = pieces.read_bytes(&head) - head.bytes();
        assert!(extra < head.bytes() / 500, "{extra}");
        let slot = pieces.largest(&matrices, &[false, true]);
        assert!((8 << 20..9 << 20).contains(&slot), "{slot}");
        assert_eq!(pieces.largest(&matrices, &[true, true]), 0);
        let whole = DenseMatrix { name: format!("x{LATENT_UP}"), ..head };
        assert_eq!(pieces.of(&whole).count(), 1);
    }
}

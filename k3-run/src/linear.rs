//! Matrix products that read the same inputs, spread over the pool as one region.

use crate::kernels::{Activations, Arithmetic, Forms, Kernels, Matrix};
use crate::parallel::{Columns, Split, current_threads, join};

/// Weight bytes of the smallest part: some 5 to 10 µs of one thread, so that handing
/// parts out costs little.
const MIN_GRAIN: usize = 96 << 10;

/// Weight bytes of the largest part. A thread reads several places of its part at once,
/// and memory is fastest where each of them goes on for long.
const MAX_GRAIN: usize = 1 << 20;

/// Parts that each thread gets at least where they are not the smallest, so that none
/// waits long for the last one.
const PARTS: usize = 8;

/// One product: `out[t, r] = Σ_c matrix[r, c] * x[t, c]`.
pub struct Product<'a> {
    matrix: Matrix<'a>,
    out: Columns<'a>,
}

impl<'a> Product<'a> {
    /// `matrix: [rows, cols]`, `out: [tokens, rows]`.
    ///
    /// # Panics
    /// `out` has another length.
    pub fn new(matrix: Matrix<'a>, out: &'a mut [f32], tokens: usize) -> Self {
        assert_eq!(out.len(), tokens * matrix.rows(), "outputs of the matrix");
        Self { matrix, out: Columns::new(out, tokens) }
    }

    /// `out: [tokens, rows]` as columns, for instance some of a larger matrix.
    ///
    /// # Panics
    /// `out` has another width.
    pub(crate) fn of_columns(matrix: Matrix<'a>, out: Columns<'a>) -> Self {
        assert_eq!(out.width(), matrix.rows(), "outputs of the matrix");
        Self { matrix, out }
    }

    fn bytes(&self) -> usize {
        self.matrix.rows() * self.matrix.bytes_per_row()
    }
}

/// Computes `products` with the inputs `x: [tokens, cols]`, on all threads of the pool it
/// is called in. `scratch` is reused from call to call.
///
/// # Panics
/// The shapes do not fit.
pub fn multiply(
    kernels: Kernels,
    arithmetic: Arithmetic,
    x: &[f32],
    tokens: usize,
    products: &mut [Product],
    scratch: &mut Activations,
) {
    let forms = products
        .iter()
        .map(|product| Forms::of(&product.matrix, arithmetic))
        .fold(Forms::default(), |all, one| all | one);
    scratch.prepare(kernels, x, tokens, forms);
    multiply_prepared(kernels, arithmetic, products, scratch);
}

/// Computes `products` with inputs that were prepared in all forms they need.
///
/// # Panics
/// The shapes do not fit, or a form is missing.
pub(crate) fn multiply_prepared(
    kernels: Kernels,
    arithmetic: Arithmetic,
    products: &mut [Product],
    scratch: &Activations,
) {
    let matmul = |matrix: &Matrix, out: Columns| kernels.matmul(matrix, arithmetic, scratch, out);
    let bytes: usize = products.iter().map(Product::bytes).sum();
    let grain = (bytes / (PARTS * current_threads())).clamp(MIN_GRAIN, MAX_GRAIN);
    let limits = Limits { grain, min_rows: Kernels::min_rows(scratch.tokens()) };
    spread(products, limits, &matmul);
}

/// When a part is small enough.
#[derive(Clone, Copy)]
struct Limits {
    /// Bytes that are not worth halving.
    grain: usize,
    min_rows: usize,
}

/// Halves the work by bytes until the parts are small.
fn spread(products: &mut [Product], limits: Limits, matmul: &(impl Fn(&Matrix, Columns) + Sync)) {
    let bytes: usize = products.iter().map(Product::bytes).sum();
    let Limits { grain, min_rows } = limits;
    match products {
        [] => {}
        [one] => {
            let rows = one.matrix.rows();
            if bytes <= grain || rows < 2 * min_rows {
                return matmul(&one.matrix, one.out.reborrow());
            }
            let mid = (rows / 2).next_multiple_of(min_rows);
            let (left, right) = one.out.reborrow().split_at(mid);
            let mut left = [Product { matrix: one.matrix.slice_rows(0..mid), out: left }];
            let mut right = [Product { matrix: one.matrix.slice_rows(mid..rows), out: right }];
            join(|| spread(&mut left, limits, matmul), || spread(&mut right, limits, matmul));
        }
        _ if bytes <= grain => {
            for product in products {
                matmul(&product.matrix, product.out.reborrow());
            }
        }
        _ => {
            let mut before = 0;
            let half = products.iter().position(|product| {
                before += product.bytes();
                2 * before >= bytes
            });
            let mid = half.map_or(1, |i| i + 1).min(products.len() - 1);
            let (left, right) = products.split_at_mut(mid);
            join(|| spread(left, limits, matmul), || spread(right, limits, matmul));
        }
    }
}

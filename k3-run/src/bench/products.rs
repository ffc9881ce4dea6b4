//! Matrix products at the model's own shapes, one row and a chunk of rows.

use std::time::{Duration, Instant};

use k3_formats::quant::MatrixFormat;
use serde::Serialize;

use super::copies::MatrixCopy;
use crate::dense::Weight;
use crate::engine::Engine;
use crate::experts::Loaded;
use crate::kernels::{Activations, Arithmetic, Matrix, Weights};
use crate::linear::{Product, multiply};
use crate::model::Numerics;
use crate::parallel::Pool;

/// Time one measurement takes at least.
const LONG_ENOUGH: Duration = Duration::from_millis(40);

/// Weights of the smallest matrix that is measured; smaller ones are no part of the time.
const LARGE: usize = 1 << 20;

/// One shape of the model's matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Shape {
    pub(super) format: &'static str,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Whether activations are rounded to int8.
    pub(super) act8: bool,
    /// Bytes of one matrix.
    pub(super) bytes: usize,
    /// How many there are.
    pub(super) matrices: usize,
}

/// Seconds of one product.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductSeconds {
    /// With one row of inputs.
    pub(super) one: f64,
    /// The same on one thread.
    pub(super) one_thread: f64,
    /// With as many rows as a step can have.
    pub(super) chunk: f64,
}

/// All matrices of one shape.
pub(super) struct Group<'m> {
    pub(super) shape: Shape,
    matrices: Vec<Matrix<'m>>,
}

/// The large ones of the dense matrices that are in memory and of some experts, by shape.
pub(super) fn group<'m>(
    numerics: &Numerics,
    dense: &'m [Weight<'_>],
    experts: &'m [Loaded],
) -> Vec<Group<'m>> {
    let dense = dense.iter().filter_map(Weight::here).map(|matrix| (matrix, numerics.dense));
    let experts = experts.iter().flat_map(|Loaded { weights, .. }| {
        [weights.gate(), weights.up(), weights.down()].map(|matrix| (matrix, numerics.experts))
    });
    let mut groups: Vec<Group<'m>> = Vec::new();
    for (matrix, arithmetic) in dense.chain(experts) {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let format = format_name(&matrix);
        let act8 = arithmetic == Arithmetic::Act8 && format != MatrixFormat::Bf16.name();
        let shape =
            Shape { format, rows, cols, act8, bytes: rows * matrix.bytes_per_row(), matrices: 0 };
        match groups.iter_mut().find(|g| Shape { matrices: 0, ..g.shape } == shape) {
            Some(group) => group.matrices.push(matrix),
            None if rows * cols < LARGE => {}
            None => groups.push(Group { shape, matrices: vec![matrix] }),
        }
    }
    groups.iter_mut().for_each(|group| group.shape.matrices = group.matrices.len());
    groups
}

impl Group<'_> {
    /// Times products on the engine's threads and on `single`, a pool of one.
    pub(super) fn seconds(&self, engine: &Engine<'_>, single: &Pool) -> ProductSeconds {
        let copies = MatrixCopy::enough(&self.matrices);
        let mut matrices = self.matrices.clone();
        matrices.extend(copies.iter().map(MatrixCopy::matrix));
        let seconds = |pool: &Pool, tokens| pool.install(|| self.best(&matrices, engine, tokens));
        ProductSeconds {
            one: seconds(engine.pool(), 1),
            one_thread: seconds(single, 1),
            chunk: seconds(engine.pool(), engine.max_rows()),
        }
    }

    /// The best of many, the matrices one after another so that none stays in a cache.
    fn best(&self, matrices: &[Matrix], engine: &Engine<'_>, tokens: usize) -> f64 {
        let Shape { rows, cols, act8, .. } = self.shape;
        let arithmetic = if act8 { Arithmetic::Act8 } else { Arithmetic::Exact };
        let x: Vec<f32> = (0..tokens * cols).map(|i| ((i % 97) as f32 - 48.0) / 50.0).collect();
        let mut out = vec![0.0; tokens * rows];
        let (mut scratch, kernels) = (Activations::new(), engine.numerics().kernels);
        let mut run = |matrix: Matrix| {
            let mut products = [Product::new(matrix, &mut out, tokens)];
            multiply(kernels, arithmetic, &x, tokens, &mut products, &mut scratch);
        };
        // The last one first, so that the first is not warmer than the others.
        matrices.last().copied().into_iter().for_each(&mut run);
        let (begin, mut best) = (Instant::now(), f64::INFINITY);
        while begin.elapsed() < LONG_ENOUGH {
            for &matrix in matrices {
                let start = Instant::now();
                run(matrix);
                best = best.min(start.elapsed().as_secs_f64());
            }
        }
        best
    }
}

fn format_name(matrix: &Matrix) -> &'static str {
    match matrix.weights() {
        Weights::Bf16(_) => MatrixFormat::Bf16.name(),
        Weights::Int8 { .. } => MatrixFormat::Int8Row.name(),
        Weights::Int4 { .. } => MatrixFormat::Int4G64.name(),
        Weights::Int4F16 { .. } => MatrixFormat::Int4G32.name(),
        Weights::Mxfp4 { .. } => "mxfp4",
    }
}

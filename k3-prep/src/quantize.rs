//! Rows of BF16 weights to codes and scales, spread over threads.
//!
//! `k3_formats::quant` defines every value; `rows.rs` computes the same values faster, and
//! what they cost.

use half::bf16;
use k3_formats::quant::MatrixFormat;
use rayon::prelude::*;

use self::rows::Row;

mod isa;
mod rows;

/// Weights that one thread quantizes at a time: long enough to be worth a hand-over.
const WEIGHTS_AT_ONCE: usize = 1 << 17;

/// A row whose largest weight exceeds the root mean square of its others by more than
/// this is reported: at 8 bits all but that one weight become almost zero.
pub const OUTLIER_RATIO: f64 = 100.0;

/// A weight that cannot be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused {
    /// Row, counted from the start of the block.
    pub row: usize,
    /// Column.
    pub col: usize,
    /// Why.
    pub problem: Problem,
}

/// Why a weight cannot be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Problem {
    /// It is NaN or infinite.
    NotFinite,
    /// It is beyond what an f16 scale can reach.
    TooLarge,
}

/// A row whose largest weight dwarfs the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Outlier {
    /// Row, counted from the start of the block.
    pub row: usize,
    /// Largest magnitude over the root mean square of the other weights.
    pub ratio: f64,
}

/// Outliers of a block or of a matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Outliers {
    /// Rows with one.
    pub rows: usize,
    /// The worst of them; the first one, where several are equal.
    pub worst: Option<Outlier>,
}

impl Outliers {
    /// Adds the outliers of a block that begins at row `first_row`.
    pub fn add(&mut self, other: Self, first_row: usize) {
        self.rows += other.rows;
        let Some(new) = other.worst else { return };
        if self.worst.is_none_or(|old| new.ratio > old.ratio) {
            self.worst = Some(Outlier { row: new.row + first_row, ..new });
        }
    }
}

/// Rows without a single normal number: zeros, or so small that they are as good as that.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EmptyRows {
    /// How many.
    pub rows: usize,
    /// The first of them.
    pub first: Option<usize>,
}

impl EmptyRows {
    /// Adds those of a block that begins at row `first_row`.
    pub fn add(&mut self, other: Self, first_row: usize) {
        self.rows += other.rows;
        self.first = self.first.or(other.first.map(|row| row + first_row));
    }
}

/// What quantizing some rows did.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Statistics {
    /// Rows whose largest weight dwarfs the others.
    pub outliers: Outliers,
    /// Rows of zeros.
    pub empty: EmptyRows,
    /// `Σ (w - code * scale)²`.
    pub error: f64,
    /// `Σ w²`.
    pub energy: f64,
}

impl Statistics {
    /// Adds those of a block that begins at row `first_row`.
    pub fn add(&mut self, other: Self, first_row: usize) {
        self.outliers.add(other.outliers, first_row);
        self.empty.add(other.empty, first_row);
        self.error += other.error;
        self.energy += other.energy;
    }

    /// Root mean square error over root mean square weight; 0 for a matrix of zeros.
    pub fn relative_error(&self) -> f64 {
        if self.energy > 0.0 { (self.error / self.energy).sqrt() } else { 0.0 }
    }
}

/// How the rows of one matrix are quantized.
#[derive(Debug, Clone, Copy)]
pub struct Quantizer<'a> {
    /// Not BF16.
    pub format: MatrixFormat,
    /// Columns.
    pub cols: usize,
    /// `[cols]`: what each column's error counts, if scales are to be searched.
    pub importance: Option<&'a [f32]>,
}

impl Quantizer<'_> {
    /// Quantizes `weights: [rows, cols]` to `codes: [rows, code bytes]` and
    /// `scales: [rows, scales per row]`, on the threads of the current rayon pool. Scales that
    /// will be stored as f16 are f16 values.
    ///
    /// # Errors
    /// The first weight that cannot be stored; codes and scales then mean nothing.
    ///
    /// # Panics
    /// The lengths do not fit each other, or the format is BF16.
    pub fn run(
        &self,
        weights: &[bf16],
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<Statistics, Refused> {
        let (format, cols) = (self.format, self.cols);
        let (code_bytes, row_scales) =
            (format.code_bytes_per_row(cols), format.scales_per_row(cols));
        let rows = weights.len() / cols;
        assert_eq!(weights.len(), rows * cols, "whole rows");
        assert_eq!(codes.len(), rows * code_bytes, "codes of every row");
        assert_eq!(scales.len(), rows * row_scales, "scales of every row");
        assert!(self.importance.is_none_or(|i| i.len() == cols), "one importance per column");
        let at_once = (WEIGHTS_AT_ONCE / cols).max(1);
        let parts = weights
            .par_chunks(at_once * cols)
            .zip(codes.par_chunks_mut(at_once * code_bytes))
            .zip(scales.par_chunks_mut(at_once * row_scales))
            .enumerate();
        let outcomes: Vec<_> = parts
            .map(|(part, ((weights, codes), scales))| {
                self.rows(part * at_once, weights, codes, scales)
            })
            .collect();
        // In order, so that sums do not depend on threads.
        let mut all = Statistics::default();
        for outcome in outcomes {
            all.add(outcome?, 0);
        }
        Ok(all)
    }

    /// Some rows on this thread, the first of them number `first`.
    fn rows(
        &self,
        first: usize,
        weights: &[bf16],
        codes: &mut [u8],
        scales: &mut [f32],
    ) -> Result<Statistics, Refused> {
        let Self { format, cols, importance } = *self;
        let mut wide = vec![0.0; if importance.is_some() { cols } else { 0 }];
        let mut statistics = Statistics::default();
        let each = weights
            .chunks_exact(cols)
            .zip(codes.chunks_exact_mut(format.code_bytes_per_row(cols)))
            .zip(scales.chunks_exact_mut(format.scales_per_row(cols)));
        for (i, ((weights, codes), scales)) in each.enumerate() {
            let row = first + i;
            let on_its_way = Row { weights, importance, codes, scales, wide: &mut wide };
            let seen = isa::quantize(format, on_its_way).map_err(|(col, problem)| Refused {
                row,
                col,
                problem,
            })?;
            statistics.error += seen.error;
            statistics.energy += seen.energy;
            if seen.empty {
                statistics.empty.add(EmptyRows { rows: 1, first: Some(row) }, 0);
            }
            if let Some(ratio) = seen.outlier {
                let worst = Some(Outlier { row, ratio });
                statistics.outliers.add(Outliers { rows: 1, worst }, 0);
            }
        }
        Ok(statistics)
    }
}

/// Index of the first NaN or infinity among BF16 values.
pub fn first_non_finite_bf16(values: &[bf16]) -> Option<usize> {
    rows::first_non_finite(values)
}

/// Index of the first NaN or infinity among F32 values.
pub fn first_non_finite_f32(values: &[f32]) -> Option<usize> {
    k3_formats::quant::first_non_finite(values)
}

#[cfg(test)]
mod tests;

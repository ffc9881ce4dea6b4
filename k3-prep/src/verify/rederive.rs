//! Does the container follow from the snapshot? Sampled rows are quantized again by the
//! definition, not by the fast path that wrote them, and everything small is made again.

use std::path::PathBuf;

use half::{bf16, f16};
use k3_formats::calibration::Calibration;
use k3_formats::container::manifest::MANIFEST_FILE;
use k3_formats::container::{Container, EXPERT_TABLE_FILE};
use k3_formats::expert_table::without_checksums;
use k3_formats::quant::{self, MatrixFormat};
use k3_formats::snapshot::Snapshot;
use k3_formats::{Error, Result, text_file};
use rayon::ThreadPool;
use rayon::prelude::*;
use safetensors::Dtype;

use super::{Findings, MAX_TEXT, RederiveReport};
use crate::block_reader::{BlockReader, Pages};
use crate::plan::{ConversionPlan, DenseFile, PlannedTensor};

/// Which rows are looked at.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Rows of each matrix.
    pub rows: usize,
    /// Seed of the choice.
    pub seed: u64,
}

/// The container and where its snapshot is.
pub(super) struct Rederivation<'a> {
    pub(super) container: &'a Container,
    pub(super) snapshots: &'a [PathBuf],
    pub(super) calibration: Option<&'a Calibration>,
    pub(super) sample: Sample,
}

impl Rederivation<'_> {
    /// Plans the conversion anew and compares its results with what is stored.
    pub(super) fn run(&self, pool: &ThreadPool, found: &mut Findings) -> RederiveReport {
        let mut report = RederiveReport::default();
        let plan = match pool.install(|| self.plan()) {
            Ok(plan) => plan,
            Err(error) => {
                found.differs(&error);
                return report;
            }
        };
        self.small_files(&plan, found);
        if plan.left_out != self.container.manifest.left_out {
            let path = self.container.dir.join(MANIFEST_FILE);
            let error = Error::mismatch("the snapshot has other vision tensors than it lists");
            found.differs(&error.in_file(path));
        }
        let outcomes: Vec<_> = pool
            .install(|| plan.dense.par_iter().map(|file| self.dense_file(&plan, file)).collect());
        for (rows, errors) in outcomes {
            report.rows += rows;
            errors.iter().for_each(|error| found.differs(error));
        }
        report.tensors = plan.dense.iter().map(|f| f.tensors.len()).sum();
        report
    }

    fn plan(&self) -> Result<ConversionPlan> {
        let (first, others) = self
            .snapshots
            .split_first()
            .ok_or_else(|| Error::missing("no snapshot to convert again"))?;
        let snapshot = Snapshot::open_spread(first, others)?;
        ConversionPlan::calibrated(&snapshot, &self.container.manifest.recipe, self.calibration)
    }

    fn small_files(&self, plan: &ConversionPlan, found: &mut Findings) {
        for file in &plan.small {
            let path = self.container.dir.join(file.name);
            match text_file::read_bytes(&path, MAX_TEXT) {
                Ok(stored) if stored == file.bytes => {}
                // Checksums of experts are compared by reading experts.
                Ok(stored)
                    if file.name == EXPERT_TABLE_FILE
                        && without_checksums(&stored) == file.bytes => {}
                Ok(_) => {
                    let error = Error::mismatch("the snapshot gives another file");
                    found.differs(&error.in_file(path));
                }
                Err(error) => found.differs(&error),
            }
        }
    }

    /// Rows compared, and what differs.
    fn dense_file(&self, plan: &ConversionPlan, file: &DenseFile) -> (u64, Vec<Error>) {
        let mut errors = Vec::new();
        let mut rows = 0;
        for tensor in &file.tensors {
            match self.tensor(plan, tensor) {
                Ok(n) => rows += n,
                Err(error) => {
                    let item = error.item(tensor.spec.name.clone());
                    errors.push(item.in_file(self.container.dir.join(&file.name)));
                }
            }
        }
        (rows, errors)
    }

    fn tensor(&self, plan: &ConversionPlan, tensor: &PlannedTensor) -> Result<u64> {
        let spec = &tensor.spec;
        let path = &plan.shard_paths[tensor.shard];
        let reader = BlockReader::open(path, Pages::Keep)?;
        // A vector is one row.
        let cols = spec.shape.last().copied().unwrap_or(1);
        let rows = spec.elements() as usize / cols.max(1);
        let row_bytes = cols * spec.dtype.bitsize() / 8;
        let mut source = vec![0; row_bytes];
        let chosen = self.choose(rows, &spec.name);
        for &row in &chosen {
            reader.read(&mut source, tensor.offset + (row * row_bytes) as u64)?;
            make_finite(spec.dtype, &mut source);
            let same = match tensor.format {
                Some(format) => self.quantized_row(tensor, format, row, &source)?,
                None => {
                    let stored = self.container.stored_bytes(&spec.name)?;
                    stored.get(row * row_bytes..(row + 1) * row_bytes) == Some(&source[..])
                }
            };
            if !same {
                return Err(Error::mismatch(format!("row {row} is not what the snapshot gives")));
            }
        }
        Ok(chosen.len() as u64)
    }

    /// The first and the last row and as many between as asked for, by seed and name.
    fn choose(&self, rows: usize, name: &str) -> Vec<usize> {
        if rows <= self.sample.rows {
            return (0..rows).collect();
        }
        let salt = name.bytes().fold(self.sample.seed, |h, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3) // the prime of FNV-1a
        });
        let mut rng = fastrand::Rng::with_seed(salt);
        let mut chosen = vec![0, rows - 1];
        chosen.extend((2..self.sample.rows).map(|_| rng.usize(0..rows)));
        chosen.sort_unstable();
        chosen.dedup();
        chosen
    }

    fn quantized_row(
        &self,
        tensor: &PlannedTensor,
        format: MatrixFormat,
        row: usize,
        source: &[u8],
    ) -> Result<bool> {
        let matrix = self.container.matrix(&tensor.spec.name)?;
        let cols = matrix.cols;
        let weights: Vec<bf16> =
            source.as_chunks::<2>().0.iter().map(|b| bf16::from_le_bytes(*b)).collect();
        let mut wide = vec![0.0; cols];
        quant::decode_bf16(&weights, &mut wide);
        let mut codes = vec![0; format.code_bytes_per_row(cols)];
        let mut scales = vec![0.0; format.scales_per_row(cols)];
        let importance = tensor.importance.as_deref();
        quant::encode_row(format, importance, &wide, &mut codes, &mut scales);
        let scales: Vec<u8> = match format.scale_dtype() {
            Dtype::F16 => scales.iter().flat_map(|&s| f16::from_f32(s).to_le_bytes()).collect(),
            _ => scales.iter().flat_map(|s| s.to_le_bytes()).collect(),
        };
        Ok(matrix.scales[row * scales.len()..][..scales.len()] == scales
            && matrix.codes[row * codes.len()..][..codes.len()] == codes)
    }
}

/// NaN and infinities as a conversion that allows them takes them: as 0.
fn make_finite(dtype: Dtype, bytes: &mut [u8]) {
    match dtype {
        Dtype::F32 => {
            let values = bytes.as_chunks_mut::<4>().0.iter_mut();
            values.filter(|v| !f32::from_le_bytes(**v).is_finite()).for_each(|v| *v = [0; 4]);
        }
        _ => {
            let values = bytes.as_chunks_mut::<2>().0.iter_mut();
            values.filter(|v| !bf16::from_le_bytes(**v).is_finite()).for_each(|v| *v = [0; 2]);
        }
    }
}

//! Dense tensors from the shards to the files of a container, in bounded memory.
//!
//! Several files are written at once, each by a thread that reads a block of rows, has it
//! quantized by the pool, hashes and writes it. While one thread waits for the disk or
//! hashes, the pool works for another. Memory is a few blocks per thread, and the scales of
//! one matrix; the bytes written do not depend on the number of threads.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use half::{bf16, f16};
use k3_formats::container::manifest::FileRecord;
use k3_formats::container::writer::DenseWriter;
use k3_formats::quant::{self, MatrixFormat};
use k3_formats::{Error, Result};
use rayon::ThreadPool;
use safetensors::Dtype;

use crate::block_reader::{BLOCK, BlockReader, Pages};
use crate::expert_scales::NOT_FINITE;
use crate::output;
use crate::plan::{ConversionPlan, DenseFile, PlannedTensor};
use crate::problems::Lines;
use crate::progress::Progress;
use crate::quantize::{self, Problem, Quantizer, Refused, Statistics};

/// Most files written at once: more would only take memory.
const MOST_WRITERS: usize = 16;

/// Scales that are made f16 at a time, to bound the copy.
const SCALES_AT_ONCE: usize = 1 << 20;

/// The dense part of a conversion.
pub(crate) struct Pipeline<'a> {
    pub(crate) plan: &'a ConversionPlan,
    /// Folder to write to.
    pub(crate) dir: &'a Path,
    /// Quantizes.
    pub(crate) pool: &'a ThreadPool,
    pub(crate) progress: &'a Progress,
    /// Whether NaN and infinite weights count as 0.
    pub(crate) allow_nonfinite: bool,
}

impl Pipeline<'_> {
    /// Writes the dense files numbered in `todo` and calls `finished` with each one's record
    /// as it is complete. Stops at the first error.
    pub(crate) fn run(
        &self,
        mut todo: Vec<usize>,
        finished: impl FnMut(FileRecord) -> Result<()> + Send,
    ) -> Result<()> {
        // The longest first, so that none is left alone at the end.
        todo.sort_by_key(|&i| std::cmp::Reverse(self.plan.dense[i].source_bytes()));
        let state = State {
            next: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            error: Mutex::new(None),
            finished: Mutex::new(finished),
            oddities: Mutex::new(Lines::default()),
        };
        let writers = self.pool.current_num_threads().min(MOST_WRITERS).min(todo.len());
        thread::scope(|scope| {
            for _ in 1..writers {
                // A system that gives no more threads makes it slower, nothing else.
                let _ = thread::Builder::new().spawn_scoped(scope, || self.work(&todo, &state));
            }
            self.work(&todo, &state);
        });
        for line in lock(&state.oddities).clone().into_lines() {
            output::warn(line);
        }
        match lock(&state.error).take() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    fn work<F: FnMut(FileRecord) -> Result<()>>(&self, todo: &[usize], state: &State<F>) {
        while !state.stop.load(Ordering::Relaxed) {
            let Some(&file) = todo.get(state.next.fetch_add(1, Ordering::Relaxed)) else { return };
            let written = FileWork { pipeline: self, stop: &state.stop, oddities: &state.oddities }
                .write(&self.plan.dense[file]);
            let outcome = match written {
                Ok(record) => lock(&state.finished)(record),
                Err(Halt::Stopped) => return,
                Err(Halt::Failed(error)) => Err(error),
            };
            if let Err(error) = outcome {
                state.stop.store(true, Ordering::Relaxed);
                lock(&state.error).get_or_insert(error);
            }
        }
    }
}

struct State<F> {
    next: AtomicUsize,
    stop: AtomicBool,
    error: Mutex<Option<Error>>,
    finished: Mutex<F>,
    oddities: Mutex<Lines>,
}

/// Why a file was not written to its end.
enum Halt {
    /// Another thread has failed.
    Stopped,
    Failed(Error),
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// A panic in another thread ends the scope anyway.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// One thread's work on one file.
struct FileWork<'a> {
    pipeline: &'a Pipeline<'a>,
    stop: &'a AtomicBool,
    oddities: &'a Mutex<Lines>,
}

impl FileWork<'_> {
    fn write(&self, file: &DenseFile) -> Result<FileRecord, Halt> {
        let path = self.pipeline.dir.join(&file.name);
        let mut writer = DenseWriter::create(&path, file.layout.clone())?;
        let mut source: Option<(usize, BlockReader)> = None;
        for tensor in &file.tensors {
            let reader = match source.take() {
                Some((shard, reader)) if shard == tensor.shard => reader,
                _ => BlockReader::open(self.shard_path(tensor), Pages::Drop)?,
            };
            match tensor.format {
                Some(format) => self.quantized(tensor, format, &reader, &mut writer)?,
                None => self.unchanged(tensor, &reader, &mut writer)?,
            }
            source = Some((tensor.shard, reader));
        }
        Ok(writer.finish()?)
    }

    fn shard_path(&self, tensor: &PlannedTensor) -> &Path {
        &self.pipeline.plan.shard_paths[tensor.shard]
    }

    fn quantized(
        &self,
        tensor: &PlannedTensor,
        format: MatrixFormat,
        reader: &BlockReader,
        writer: &mut DenseWriter,
    ) -> Result<(), Halt> {
        let (rows, cols) = tensor.spec.matrix_dims().expect("only matrices are quantized");
        let (code_bytes, row_scales) =
            (format.code_bytes_per_row(cols), format.scales_per_row(cols));
        let at_once = (BLOCK / (2 * cols)).clamp(1, rows);
        let mut weights = vec![bf16::ZERO; at_once * cols];
        let mut codes = vec![0; at_once * code_bytes];
        let mut scales = vec![0.0; rows * row_scales];
        let mut statistics = Statistics::default();
        let quantizer = Quantizer { format, cols, importance: tensor.importance.as_deref() };
        writer.tensor(Some(format.name()), |sink| {
            for row in (0..rows).step_by(at_once) {
                let n = at_once.min(rows - row);
                let weights = &mut weights[..n * cols];
                let codes = &mut codes[..n * code_bytes];
                let scales = &mut scales[row * row_scales..][..n * row_scales];
                self.read(tensor, reader, 2 * row * cols, bytemuck::cast_slice_mut(weights))?;
                let mut quantize = |weights: &[bf16]| {
                    self.pipeline.pool.install(|| quantizer.run(weights, codes, scales))
                };
                let element = |at: Refused| (row + at.row) * cols + at.col;
                let found = match quantize(weights) {
                    Err(at @ Refused { problem: Problem::NotFinite, .. }) => {
                        let bad = weights.iter_mut().filter(|w| !w.is_finite());
                        self.forgive(self.not_finite(tensor, element(at)), bad, bf16::ZERO)?;
                        quantize(weights)
                    }
                    found => found,
                };
                let found = found.map_err(|at| match at.problem {
                    Problem::NotFinite => self.not_finite(tensor, element(at)),
                    Problem::TooLarge => self.too_large(tensor, row + at.row, at.col),
                })?;
                statistics.add(found, row);
                sink.write(codes)?;
            }
            Ok::<_, Halt>(())
        })?;
        writer.relative_error(statistics.relative_error());
        self.report(tensor, &statistics);
        writer.tensor(None, |sink| match format.scale_dtype() {
            Dtype::F16 => scales.chunks(SCALES_AT_ONCE).try_for_each(|scales| {
                let halves: Vec<f16> = scales.iter().map(|&s| f16::from_f32(s)).collect();
                sink.write(bytemuck::cast_slice(&halves))
            }),
            _ => sink.write(bytemuck::cast_slice(&scales)),
        })?;
        Ok(())
    }

    fn unchanged(
        &self,
        tensor: &PlannedTensor,
        reader: &BlockReader,
        writer: &mut DenseWriter,
    ) -> Result<(), Halt> {
        let bytes = usize::try_from(tensor.spec.bytes()).expect("it fits the layout");
        // f32s are a valid home for both types, alignment included.
        let mut block = vec![0.0_f32; BLOCK.min(bytes).div_ceil(4)];
        writer.tensor(None, |sink| {
            for at in (0..bytes).step_by(BLOCK) {
                let block = bytemuck::cast_slice_mut(&mut block);
                let block = &mut block[..BLOCK.min(bytes - at)];
                self.read(tensor, reader, at, block)?;
                if tensor.spec.dtype == Dtype::F32 {
                    let values: &mut [f32] = bytemuck::cast_slice_mut(block);
                    if let Some(i) = quantize::first_non_finite_f32(values) {
                        let first = self.not_finite(tensor, at / 4 + i);
                        self.forgive(first, values.iter_mut().filter(|v| !v.is_finite()), 0.0)?;
                    }
                } else {
                    let values: &mut [bf16] = bytemuck::cast_slice_mut(block);
                    if let Some(i) = quantize::first_non_finite_bf16(values) {
                        let first = self.not_finite(tensor, at / 2 + i);
                        let bad = values.iter_mut().filter(|v| !v.is_finite());
                        self.forgive(first, bad, bf16::ZERO)?;
                    }
                }
                sink.write(block)?;
            }
            Ok(())
        })
    }

    /// Reads the part of a tensor that begins at byte `at`, and asks for the next one.
    fn read(
        &self,
        tensor: &PlannedTensor,
        reader: &BlockReader,
        at: usize,
        block: &mut [u8],
    ) -> Result<(), Halt> {
        if self.stop.load(Ordering::Relaxed) {
            return Err(Halt::Stopped);
        }
        let offset = tensor.offset + at as u64;
        let next = offset + block.len() as u64;
        reader.read(block, offset).map_err(|e| e.item(tensor.spec.name.clone()))?;
        reader.soon(next, BLOCK as u64);
        self.pipeline.progress.add(block.len() as u64);
        Ok(())
    }

    /// Sets `bad` weights to zero and warns of the first of them, if that is allowed.
    ///
    /// # Errors
    /// It is not: `first`.
    fn forgive<'w, T: Copy + 'w>(
        &self,
        first: Error,
        bad: impl Iterator<Item = &'w mut T>,
        zero: T,
    ) -> Result<()> {
        if !self.pipeline.allow_nonfinite {
            return Err(first);
        }
        let count = bad.map(|w| *w = zero).count();
        output::warn(format_args!("{first}; {count} such weights near it count as 0"));
        Ok(())
    }

    fn not_finite(&self, tensor: &PlannedTensor, element: usize) -> Error {
        let cols = tensor.spec.shape.last().copied().unwrap_or(1).max(1);
        let (row, col) = (element / cols, element % cols);
        Error::malformed(format!("the weight in row {row}, column {col} is NaN or infinite"))
            .item(tensor.spec.name.clone())
            .in_file(self.shard_path(tensor))
            .hint(NOT_FINITE)
    }

    fn too_large(&self, tensor: &PlannedTensor, row: usize, col: usize) -> Error {
        let largest = quant::INT4_F16_LARGEST;
        Error::unsupported(format!(
            "the weight in row {row}, column {col} is above {largest}, the most int4-g32 holds"
        ))
        .item(tensor.spec.name.clone())
        .in_file(self.shard_path(tensor))
        .hint("store this tensor as int4-g64, int8-row or bf16")
    }

    fn report(&self, tensor: &PlannedTensor, statistics: &Statistics) {
        let (name, outliers, empty) = (&tensor.spec.name, statistics.outliers, statistics.empty);
        if let Some(worst) = outliers.worst {
            lock(self.oddities).add(|| {
                format!(
                    "{name}: {} rows have an outlier; the largest weight of row {} is {:.3e} times the rest",
                    outliers.rows, worst.row, worst.ratio
                )
            });
        }
        if let Some(first) = empty.first {
            lock(self.oddities)
                .add(|| format!("{name}: {} rows are all zero, row {first} first", empty.rows));
        }
    }
}

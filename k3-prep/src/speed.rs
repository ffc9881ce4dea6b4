//! How fast this machine reads a snapshot and quantizes, measured briefly.

use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use half::bf16;
use k3_formats::Result;
use k3_formats::digest::Hasher;
use k3_formats::quant::MatrixFormat;
use serde::Serialize;

use crate::block_reader::{BLOCK, BlockReader, Pages};
use crate::plan::ConversionPlan;
use crate::quantize::Quantizer;

/// Longest time that reading is measured.
const READ_FOR: Duration = Duration::from_millis(1500);

/// Weights of the sample that is quantized.
const SAMPLE: usize = 8 << 20;

/// Bytes per second of this machine.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct Speed {
    /// Reading dense tensors past the page cache; `None` if their data are holes, which
    /// say nothing of a disk.
    pub(crate) read: Option<f64>,
    /// Bytes that were read to find out.
    pub(crate) bytes_read: u64,
    /// Dense BF16 bytes through quantizing and hashing, on all threads together.
    pub(crate) compute: f64,
}

impl Speed {
    /// Measures for about two seconds.
    pub(crate) fn measure(plan: &ConversionPlan, pool: &rayon::ThreadPool) -> Result<Self> {
        let (read, bytes_read) = read_speed(plan)?;
        Ok(Self { read, bytes_read, compute: compute_speed(pool) })
    }
}

/// Reads the largest dense tensors from their shards, each block dropped from the page
/// cache before.
fn read_speed(plan: &ConversionPlan) -> Result<(Option<f64>, u64)> {
    let mut tensors: Vec<_> = plan.dense.iter().flat_map(|f| &f.tensors).collect();
    tensors.sort_by_key(|t| std::cmp::Reverse(t.spec.bytes()));
    let (mut bytes, mut seconds) = (0, Duration::ZERO);
    let mut block = vec![0; BLOCK];
    'tensors: for tensor in tensors {
        let path = &plan.shard_paths[tensor.shard];
        if fs_err::metadata(path).is_ok_and(|m| m.blocks() * 512 < m.len() / 2) {
            continue;
        }
        let reader = BlockReader::open(path, Pages::Drop)?;
        reader.forget(tensor.offset, tensor.spec.bytes());
        for at in (0..tensor.spec.bytes()).step_by(BLOCK) {
            let n = (tensor.spec.bytes() - at).min(BLOCK as u64);
            let begin = Instant::now();
            reader.read(&mut block[..n as usize], tensor.offset + at)?;
            seconds += begin.elapsed();
            bytes += n;
            if seconds >= READ_FOR {
                break 'tensors;
            }
        }
    }
    let speed = (bytes > 0).then(|| bytes as f64 / seconds.as_secs_f64().max(1e-9));
    Ok((speed, bytes))
}

/// Quantizes a sample to int4 and hashes the result twice, as a conversion does.
fn compute_speed(pool: &rayon::ThreadPool) -> f64 {
    const COLS: usize = 4096;
    let mut rng = fastrand::Rng::with_seed(1);
    let weights: Vec<bf16> = (0..SAMPLE).map(|_| bf16::from_f32(rng.f32() - 0.5)).collect();
    let format = MatrixFormat::Int4G64;
    let rows = SAMPLE / COLS;
    let mut codes = vec![0; rows * format.code_bytes_per_row(COLS)];
    let mut scales = vec![0.0; rows * format.scales_per_row(COLS)];
    let begin = Instant::now();
    let quantizer = Quantizer { format, cols: COLS, importance: None };
    let _ = pool.install(|| quantizer.run(&weights, &mut codes, &mut scales));
    let quantized = begin.elapsed().as_secs_f64();
    let begin = Instant::now();
    let mut hasher = Hasher::new();
    hasher.update(&codes);
    hasher.update(&codes);
    let _ = hasher.finish();
    // Files are hashed by as many threads as quantize.
    let hashed = begin.elapsed().as_secs_f64() / pool.current_num_threads() as f64;
    2.0 * SAMPLE as f64 / (quantized + hashed).max(1e-9)
}

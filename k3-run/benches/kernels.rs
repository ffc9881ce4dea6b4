//! Kernels at the model's shapes, as fractions of what the machine can do.
//!
//!     cargo bench -p k3-run --bench kernels [-- PART OF A LINE...]
//!
//! Single vectors are measured against reading the same bytes, blocks of 32 and 512 tokens
//! against a register-only loop; both in turn with the kernel, because a shared machine's
//! speed wanders. Each figure is the median of the rounds. Blocks of 512 tokens are left to
//! the fastest set.
//!
//! `KERNELS_CPU_TIME=1` counts processor time in place of the clock, `KERNELS_BEST=1` takes
//! the best round in place of the median: both for tuning on a machine that others use.
#![expect(clippy::print_stdout, reason = "the table is the result")]

use std::time::Instant;

use half::bf16;
use k3_run::kernels::peak::{Peak, read_bandwidth};
use k3_run::kernels::{Activations, Arithmetic, Kernels, Matrix, Weights};
use k3_run::linear::{Product, multiply};
use k3_run::parallel::{Pool, default_threads};

const SHAPES: [(usize, usize); 5] =
    [(12288, 7168), (7168, 12288), (3072, 3584), (3584, 3072), (163_840, 7168)];

/// Bytes that several copies of a matrix take together, so that no cache holds them; room
/// for the largest in int8.
const FOOTPRINT: usize = 1152 << 20;

/// Bytes read to know the memory's speed.
const READ: usize = 256 << 20;

/// Multiply-adds of the largest block product that is measured.
const LARGEST_BLOCK: usize = 64_000_000_000;

#[derive(Clone, Copy)]
enum Format {
    Bf16,
    Int8,
    Int4,
    Mxfp4,
}

const FORMATS: [(&str, Format); 4] = [
    ("int8", Format::Int8),
    ("int4", Format::Int4),
    ("mxfp4", Format::Mxfp4),
    ("bf16", Format::Bf16),
];

fn main() {
    let filters: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with("--")).collect();
    let memory = Memory::new();
    let mut threads = vec![default_threads(), 1];
    threads.dedup();
    for threads in threads {
        let pool = Pool::new(threads).expect("threads");
        for (rank, kernels) in Kernels::available().enumerate() {
            let bench = Bench { kernels, pool: &pool, memory: &memory, filters: &filters };
            bench.peaks();
            for (name, format) in FORMATS {
                for arithmetic in [Arithmetic::Exact, Arithmetic::Act8] {
                    bench.cached(name, format, arithmetic);
                }
            }
            for (rows, cols) in SHAPES {
                for (name, format) in FORMATS {
                    for arithmetic in [Arithmetic::Exact, Arithmetic::Act8] {
                        bench.decode(name, format, arithmetic, rows, cols);
                        bench.prefill(name, format, arithmetic, rows, cols, 32);
                        if rank == 0 {
                            bench.prefill(name, format, arithmetic, rows, cols, 512);
                        }
                    }
                }
            }
        }
    }
}

/// Any bytes will do as codes; scales and BF16 values are small numbers.
struct Memory {
    bytes: Vec<u8>,
    scales: Vec<f32>,
    scale_bytes: Vec<u8>,
    bf16s: Vec<bf16>,
}

impl Memory {
    fn new() -> Self {
        let mut rng = fastrand::Rng::with_seed(1);
        let noise: Vec<u8> = (0..1 << 20).map(|_| rng.u8(..)).collect();
        let mut bytes = Vec::with_capacity(FOOTPRINT);
        while bytes.len() < FOOTPRINT {
            bytes.extend_from_slice(&noise);
        }
        Self {
            bytes,
            scales: (0..FOOTPRINT / 32).map(|i| 1e-3 + i as f32 * 1e-12).collect(),
            scale_bytes: (0..FOOTPRINT / 16).map(|i| 0x70 + (i % 11) as u8).collect(),
            bf16s: (0..FOOTPRINT / 2)
                .map(|i| bf16::from_f32((i % 97) as f32 * 1e-3 - 0.05))
                .collect(),
        }
    }

    /// As many matrices of this kind as fit, one after the other.
    fn matrices(&self, format: Format, rows: usize, cols: usize) -> Vec<Matrix<'_>> {
        fn part<T>(all: &[T], len: usize, i: usize) -> &[T] {
            &all[i * len..][..len]
        }
        let weights = rows * cols;
        let bytes = match format {
            Format::Bf16 => 2 * weights,
            Format::Int8 => weights,
            Format::Int4 | Format::Mxfp4 => weights / 2,
        };
        let matrix = |i| match format {
            Format::Bf16 => Weights::Bf16(part(&self.bf16s, weights, i)),
            Format::Int8 => Weights::Int8 {
                codes: bytemuck::cast_slice(part(&self.bytes, weights, i)),
                scales: part(&self.scales, rows, i),
            },
            Format::Int4 => Weights::Int4 {
                packed: part(&self.bytes, weights / 2, i),
                scales: part(&self.scales, weights / 64, i),
            },
            Format::Mxfp4 => Weights::Mxfp4 {
                packed: part(&self.bytes, weights / 2, i),
                scales: part(&self.scale_bytes, weights / 32, i),
            },
        };
        (0..FOOTPRINT / bytes)
            .map(|i| Matrix::new(rows, cols, matrix(i)).expect("lengths fit"))
            .collect()
    }
}

struct Bench<'a> {
    kernels: Kernels,
    pool: &'a Pool,
    memory: &'a Memory,
    filters: &'a [String],
}

impl Bench<'_> {
    fn label(&self, what: &str) -> Option<String> {
        let label = format!("{} threads={} {what}", self.kernels.name(), self.pool.threads());
        self.filters.iter().all(|f| label.contains(f)).then_some(label)
    }

    fn peaks(&self) {
        if let Some(label) = self.label("peak") {
            let peak = Peak::measure(self.kernels, self.pool);
            let read = median((0..5).map(|_| self.read()));
            println!(
                "{label:68} f32 {:6.1} G/s, int8 {:7.1} G/s multiply-adds, read {:5.1} GB/s",
                peak.f32 / 1e9,
                peak.int8 / 1e9,
                read / 1e9
            );
        }
    }

    fn read(&self) -> f64 {
        let bytes = &self.memory.bytes[..READ];
        let start = seconds();
        read_bandwidth(self.kernels, self.pool, bytes);
        bytes.len() as f64 / (seconds() - start)
    }

    /// Runs every matrix on `tokens` inputs and returns the seconds of one.
    fn run(&self, matrices: &[Matrix], arithmetic: Arithmetic, tokens: usize) -> f64 {
        let (rows, cols) = (matrices[0].rows(), matrices[0].cols());
        let x: Vec<f32> = (0..tokens * cols).map(|i| (i % 13) as f32 - 6.0).collect();
        let mut out = vec![0.0; tokens * rows];
        let mut scratch = Activations::new();
        self.pool.install(|| {
            let mut once = |matrix: &Matrix| {
                let products = &mut [Product::new(*matrix, &mut out, tokens)];
                multiply(self.kernels, arithmetic, &x, tokens, products, &mut scratch);
            };
            once(&matrices[matrices.len() - 1]); // grows the buffers
            let start = seconds();
            matrices.iter().for_each(once);
            (seconds() - start) / matrices.len() as f64
        })
    }

    /// A matrix that stays in the second-level cache: what arithmetic alone would allow.
    fn cached(&self, name: &str, format: Format, a: Arithmetic) {
        let (rows, cols) = (64, 7168);
        let Some(label) = self.label(&format!("cached {name} {a:?} {rows}x{cols}")) else { return };
        let matrix = self.memory.matrices(format, rows, cols)[0];
        let bytes = (rows * matrix.bytes_per_row()) as f64;
        let speed = median((0..5).map(|_| bytes / self.run(&[matrix; 400], a, 1)));
        println!("{label:68} {:6.1} GB/s", speed / 1e9);
    }

    fn decode(&self, name: &str, format: Format, a: Arithmetic, rows: usize, cols: usize) {
        let Some(label) = self.label(&format!("decode {name} {a:?} {rows}x{cols}")) else { return };
        let matrices = self.memory.matrices(format, rows, cols);
        if matrices.is_empty() {
            return;
        }
        let bytes = (rows * matrices[0].bytes_per_row()) as f64;
        let rounds: Vec<(f64, f64)> = (0..5)
            .map(|_| {
                let read = self.read();
                let speed = bytes / self.run(&matrices, a, 1);
                (speed, speed / read)
            })
            .collect();
        let speed = median(rounds.iter().map(|r| r.0));
        let fraction = median(rounds.iter().map(|r| r.1));
        println!("{label:68} {:6.1} GB/s {:5.1} % of reading", speed / 1e9, fraction * 100.0);
    }

    fn prefill(
        &self,
        name: &str,
        format: Format,
        a: Arithmetic,
        rows: usize,
        cols: usize,
        t: usize,
    ) {
        let what = format!("prefill{t} {name} {a:?} {rows}x{cols}");
        let Some(label) = self.label(&what) else { return };
        if rows * cols * t > LARGEST_BLOCK {
            return;
        }
        let matrices = self.memory.matrices(format, rows, cols);
        let count = (20_000_000_000 / (rows * cols * t)).clamp(1, 8).min(matrices.len());
        if count == 0 {
            return;
        }
        let work = (rows * cols * t) as f64;
        let rounds: Vec<(f64, f64)> = (0..5)
            .map(|_| {
                let peak = Peak::measure(self.kernels, self.pool);
                let speed = work / self.run(&matrices[..count], a, t);
                let peak = if a == Arithmetic::Exact { peak.f32 } else { peak.int8 };
                (speed, speed / peak)
            })
            .collect();
        let speed = median(rounds.iter().map(|r| r.0));
        let fraction = median(rounds.iter().map(|r| r.1));
        println!("{label:68} {:6.1} G/s  {:5.1} % of peak", speed / 1e9, fraction * 100.0);
    }
}

/// Seconds since the first call, or processor seconds of all threads.
fn seconds() -> f64 {
    static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
    if std::env::var_os("KERNELS_CPU_TIME").is_none() {
        return START.get_or_init(Instant::now).elapsed().as_secs_f64();
    }
    let tasks = std::fs::read_dir("/proc/self/task").expect("procfs");
    let nanoseconds = tasks.map(|task| {
        let stat = task.expect("thread").path().join("schedstat");
        let stat = std::fs::read_to_string(stat).expect("schedstat");
        stat.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).expect("a number")
    });
    nanoseconds.sum::<u64>() as f64 * 1e-9
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let best = std::env::var_os("KERNELS_BEST").is_some();
    values[if best { values.len() - 1 } else { values.len() / 2 }]
}

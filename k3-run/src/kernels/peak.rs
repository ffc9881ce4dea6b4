//! What this machine could do at best: register-only arithmetic and reading memory. The
//! kernels are judged by fractions of these.

use std::hint::black_box;
use std::time::Instant;

use super::Kernels;
use super::isa::{Isa, Task};
use crate::parallel::{Pool, for_each};

/// Rounds of a register-only loop: about half a millisecond, so that the best of some is
/// rarely disturbed.
const ROUNDS: usize = 1 << 18;

/// Independent sums: enough to hide the latency of two units, few enough for 16 registers
/// of half the width.
const SUMS: usize = 6;

/// Multiply-adds per second of all threads.
#[derive(Debug, Clone, Copy)]
pub struct Peak {
    /// f32, fused where the set is.
    pub f32: f64,
    /// int8 into i32.
    pub int8: f64,
}

impl Peak {
    /// Measures with these kernels on all threads of `pool`.
    pub fn measure(kernels: Kernels, pool: &Pool) -> Self {
        let rate = |per_round: usize, work: &(dyn Fn() + Sync)| {
            let start = Instant::now();
            pool.install(|| for_each(0..pool.threads(), 1, |_, _| work()));
            (ROUNDS * per_round * pool.threads()) as f64 / start.elapsed().as_secs_f64()
        };
        let best = |per_round: usize, work: &(dyn Fn() + Sync)| {
            (0..9).map(|_| rate(per_round, work)).fold(0.0, f64::max)
        };
        Self {
            f32: best(2 * SUMS * 16, &|| _ = black_box(kernels.run(F32))),
            int8: best(2 * SUMS * 64, &|| _ = black_box(kernels.run(Int8))),
        }
    }
}

struct F32;

impl Task for F32 {
    type Output = f32;

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) -> f32 {
        let factor = isa.splat(black_box(0.5));
        let mut sums = [isa.splat(0.0); 2 * SUMS];
        for sum in &mut sums {
            *sum = isa.splat(black_box(1.0)); // or equal chains would become one
        }
        for _ in 0..ROUNDS {
            for sum in &mut sums {
                *sum = isa.mul_add(*sum, factor, factor);
            }
        }
        let mut all = isa.splat(0.0);
        for sum in sums {
            all = isa.add(all, sum);
        }
        isa.sum(all)
    }
}

struct Int8;

impl Task for Int8 {
    type Output = f32;

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) -> f32 {
        let s = isa.splat_u8(black_box(5));
        let mut sums = [isa.zero(); 2 * SUMS];
        for sum in &mut sums {
            *sum = black_box(*sum);
        }
        for _ in 0..ROUNDS {
            // Opaque in each round, or a set without one instruction for a dot product
            // would compute it once.
            let u = black_box(isa.splat_u8(3));
            for sum in &mut sums {
                *sum = isa.dot_small(*sum, u, s);
            }
        }
        let mut all = isa.splat(0.0);
        for sum in sums {
            all = isa.add(all, isa.to_f32(sum));
        }
        isa.sum(all)
    }
}

/// Bytes per second at which all threads of `pool` read `bytes` once, each its own part.
/// Give it much more than the last-level cache holds.
pub fn read_bandwidth(kernels: Kernels, pool: &Pool, bytes: &[u8]) -> f64 {
    let part = bytes.len().div_ceil(pool.threads());
    let start = Instant::now();
    pool.install(|| {
        for_each(0..pool.threads(), 1, |thread, _| {
            let first = (thread * part).min(bytes.len());
            let bytes = &bytes[first..(first + part).min(bytes.len())];
            black_box(kernels.run(Read { bytes }));
        });
    });
    bytes.len() as f64 / start.elapsed().as_secs_f64()
}

/// Places that one thread reads from at once, and bytes between reading a place and asking
/// for what follows: these read fastest.
const STREAMS: usize = 4;
const AHEAD: usize = 1024;

struct Read<'a> {
    bytes: &'a [u8],
}

impl Task for Read<'_> {
    type Output = u64;

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) -> u64 {
        let (lines, rest) = self.bytes.as_chunks::<128>();
        let length = lines.len() / STREAMS;
        let (lines, more) = lines.split_at(length * STREAMS);
        let mut sums = [0_u64; 16];
        for i in 0..length {
            for stream in 0..STREAMS {
                let line = &lines[stream * length + i];
                isa.prefetch(line.as_ptr().wrapping_add(AHEAD));
                isa.prefetch(line.as_ptr().wrapping_add(AHEAD + 64));
                for (sum, word) in sums.iter_mut().zip(line.as_chunks::<8>().0) {
                    *sum ^= u64::from_ne_bytes(*word);
                }
            }
        }
        let last = more.as_flattened().iter().chain(rest);
        sums.iter().fold(0, |all, sum| all ^ sum) ^ last.fold(0, |all, &byte| all ^ u64::from(byte))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_read() {
        let mut bytes = vec![0_u8; 4099];
        let sum = |bytes: &[u8]| Kernels::detect().run(Read { bytes });
        assert_eq!(sum(&bytes), 0);
        for i in [0, 511, 512, 1024, 4095, 4098] {
            bytes[i] = 1;
            assert_ne!(sum(&bytes), 0, "byte {i}");
            bytes[i] = 0;
        }
    }

    #[test]
    fn peaks_are_positive_and_int8_is_no_slower_than_it_should_be() {
        let pool = Pool::new(2).unwrap();
        for kernels in Kernels::available() {
            let peak = Peak::measure(kernels, &pool);
            assert!(peak.f32 > 1e6 && peak.int8 > 1e6, "{} {peak:?}", kernels.name());
        }
        let bytes = vec![1; 1 << 20];
        assert!(read_bandwidth(Kernels::detect(), &pool, &bytes) > 1e6);
    }
}

//! Attention over a latent cache: every head's query against the same cached rows, and the
//! weighted sum of their latents.
//!
//! Definition, for one head: a score is a 16-lane dot product ([`Isa::sum`]) times `scale`.
//! Positions are taken in blocks of [`POSITIONS`]. After each block the running maximum
//! grows to the block's, what was summed so far shrinks by `e^(old - new)`, and each
//! position's `e^(score - new)` joins the total (16 lanes, four vectors in order) and,
//! fused and in order of position, the sum of latents. At the end the sum is divided by
//! the total.

use half::bf16;

use super::Kernels;
use super::isa::{Isa, Task};
use super::vecmath::exp;
use crate::parallel::Columns;

/// Positions scored before the softmax is carried on.
const POSITIONS: usize = 64;

/// Heads that pass over a block of positions while it is in the cache.
const HEADS: usize = 32;

/// Heads computed side by side.
const GROUP: usize = 4;

/// Cached rows `[positions, width]`: a latent, then a key part shared by all heads.
#[derive(Debug, Clone, Copy)]
pub enum Latents<'a> {
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
}

impl Kernels {
    /// Softmax attention of one token: `queries: [heads, width]` over `cache: [positions,
    /// width]`, the first `out.width()` columns of which are summed into `out: [heads,
    /// latent]`.
    ///
    /// # Panics
    /// The shapes do not fit, or there is no position.
    pub fn attend(self, queries: &Columns, cache: Latents, scale: f32, out: &mut Columns) {
        assert_eq!(queries.tokens(), out.tokens(), "an output for each head");
        assert!(out.width() <= queries.width(), "latents lie within the cached row");
        let len = match cache {
            Latents::F32(rows) => rows.len(),
            Latents::Bf16(rows) => rows.len(),
        };
        assert!(len > 0 && len.is_multiple_of(queries.width()), "whole cached rows");
        let out = out.reborrow();
        match cache {
            Latents::F32(cache) => self.run(Attend { queries, cache, scale, out }),
            Latents::Bf16(cache) => self.run(Attend { queries, cache, scale, out }),
        }
    }
}

/// Element of a cached row.
trait Element: Copy + Default {
    fn load<S: Isa>(isa: S, from: &[Self; 16]) -> S::F;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; 16]) -> S::F {
        isa.load(from)
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<S: Isa>(isa: S, from: &[Self; 16]) -> S::F {
        isa.widen(from)
    }
}

/// Up to 16 elements, zeros after them.
#[inline(always)]
fn load<S: Isa, C: Element>(isa: S, from: &[C]) -> S::F {
    if let Ok(from) = from.try_into() {
        return C::load(isa, from);
    }
    let mut padded = [C::default(); 16];
    padded[..from.len()].copy_from_slice(from);
    C::load(isa, &padded)
}

/// The first lanes, up to 16.
#[inline(always)]
fn store<S: Isa>(isa: S, x: S::F, to: &mut [f32]) {
    if let Ok(to) = to.try_into() {
        return isa.store(x, to);
    }
    let mut lanes = [0.0; 16];
    isa.store(x, &mut lanes);
    to.copy_from_slice(&lanes[..to.len()]);
}

struct Attend<'a, C> {
    queries: &'a Columns<'a>,
    cache: &'a [C],
    scale: f32,
    out: Columns<'a>,
}

/// Running softmax of the heads that compute side by side.
#[derive(Clone, Copy)]
struct Softmax {
    max: [f32; GROUP],
    total: [f32; GROUP],
}

impl<C: Element> Task for Attend<'_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(mut self, isa: S) {
        let (all, width) = (self.queries.tokens(), self.queries.width());
        for first in (0..all).step_by(HEADS) {
            let heads = first..all.min(first + HEADS);
            let start = Softmax { max: [f32::NEG_INFINITY; GROUP], total: [0.0; GROUP] };
            let mut softmax = [start; HEADS / GROUP];
            for head in heads.clone() {
                self.out.row_mut(head).fill(0.0);
            }
            for block in self.cache.chunks(POSITIONS * width) {
                for (head, softmax) in heads.clone().step_by(GROUP).zip(&mut softmax) {
                    let count = GROUP.min(heads.end - head);
                    self.block(isa, block, head, count, softmax);
                }
            }
            for head in heads.clone() {
                let place = head - first;
                let total = isa.splat(softmax[place / GROUP].total[place % GROUP]);
                for chunk in self.out.row_mut(head).chunks_mut(16) {
                    store(isa, isa.div(load(isa, chunk), total), chunk);
                }
            }
        }
    }
}

impl<C: Element> Attend<'_, C> {
    /// One block of positions for `count` heads from `head` on.
    #[inline(always)]
    fn block<S: Isa>(
        &mut self,
        isa: S,
        block: &[C],
        head: usize,
        count: usize,
        softmax: &mut Softmax,
    ) {
        // Places without a position keep -infinity, which weighs 0.
        let mut weights = [[f32::NEG_INFINITY; POSITIONS]; GROUP];
        self.score(isa, block, head, count, &mut weights);
        for i in 0..count {
            let (vectors, _) = weights[i].as_chunks_mut::<16>();
            let old = isa.splat(softmax.max[i]);
            let mut max = old;
            for scores in &*vectors {
                max = isa.max(isa.load(scores), max);
            }
            softmax.max[i] = isa.max_lane(max);
            let max = isa.splat(softmax.max[i]);
            let mut sum = isa.splat(0.0);
            for scores in vectors {
                let weight = exp(isa, isa.sub(isa.load(scores), max));
                sum = isa.add(sum, weight);
                isa.store(weight, scores);
            }
            let shrink = isa.max_lane(exp(isa, isa.sub(old, max)));
            softmax.total[i] = softmax.total[i] * shrink + isa.sum(sum);
            if shrink != 1.0 {
                for chunk in self.out.row_mut(head + i).chunks_mut(16) {
                    store(isa, isa.mul(load(isa, chunk), isa.splat(shrink)), chunk);
                }
            }
        }
        self.accumulate(isa, block, head, count, &weights);
    }

    /// Scores of a block, four positions at a time. Heads and positions past the last are
    /// the last once more, for nobody.
    #[inline(always)]
    fn score<S: Isa>(
        &self,
        isa: S,
        block: &[C],
        head: usize,
        count: usize,
        scores: &mut [[f32; POSITIONS]; GROUP],
    ) {
        let width = self.queries.width();
        let positions = block.len() / width;
        let mut queries = [self.queries.row(head).as_chunks::<16>(); GROUP];
        for i in 1..GROUP {
            queries[i] = self.queries.row(head + i.min(count - 1)).as_chunks::<16>();
        }
        let vectors = width / 16;
        for query in &mut queries {
            query.0 = &query.0[..vectors];
        }
        for position in (0..positions).step_by(4) {
            let mut rows = [block[position * width..][..width].as_chunks::<16>(); 4];
            for j in 0..4 {
                let position = (position + j).min(positions - 1);
                rows[j] = block[position * width..][..width].as_chunks::<16>();
                rows[j].0 = &rows[j].0[..vectors];
            }
            let mut sums = [[isa.splat(0.0); 4]; GROUP];
            for k in 0..vectors {
                let mut row = [isa.splat(0.0); 4];
                for j in 0..4 {
                    row[j] = C::load(isa, &rows[j].0[k]);
                }
                for i in 0..GROUP {
                    let query = isa.load(&queries[i].0[k]);
                    for j in 0..4 {
                        sums[i][j] = isa.mul_add(query, row[j], sums[i][j]);
                    }
                }
            }
            if !width.is_multiple_of(16) {
                for i in 0..GROUP {
                    for j in 0..4 {
                        let (query, row) = (load(isa, queries[i].1), load(isa, rows[j].1));
                        sums[i][j] = isa.mul_add(query, row, sums[i][j]);
                    }
                }
            }
            let mut lanes = [[0.0; 16]; 4 * GROUP];
            for i in 0..GROUP {
                for j in 0..4 {
                    isa.store(sums[i][j], &mut lanes[4 * i + j]);
                }
            }
            for i in 0..GROUP {
                for j in 0..4.min(positions - position) {
                    scores[i][position + j] = isa.sum(isa.load(&lanes[4 * i + j])) * self.scale;
                }
            }
        }
    }

    /// Adds a block's weighted latents to `count` heads from `head` on.
    #[inline(always)]
    fn accumulate<S: Isa>(
        &mut self,
        isa: S,
        block: &[C],
        head: usize,
        count: usize,
        weights: &[[f32; POSITIONS]; GROUP],
    ) {
        /// Vectors of latents taken along at once.
        const WIDTH: usize = 4;
        let (width, latent) = (self.queries.width(), self.out.width());
        let whole = latent / (16 * WIDTH) * 16 * WIDTH;
        for column in (0..whole).step_by(16 * WIDTH) {
            let mut sums = [[isa.splat(0.0); WIDTH]; GROUP];
            for i in 0..count {
                let out = self.out.row_mut(head + i)[column..].as_chunks::<16>().0;
                for v in 0..WIDTH {
                    sums[i][v] = isa.load(&out[v]);
                }
            }
            for (position, row) in block.chunks_exact(width).enumerate() {
                let row = row[column..].as_chunks::<16>().0;
                let mut latents = [isa.splat(0.0); WIDTH];
                for v in 0..WIDTH {
                    latents[v] = C::load(isa, &row[v]);
                }
                for i in 0..GROUP {
                    let weight = isa.splat(weights[i][position % POSITIONS]);
                    for v in 0..WIDTH {
                        sums[i][v] = isa.mul_add(weight, latents[v], sums[i][v]);
                    }
                }
            }
            for i in 0..count {
                let out = self.out.row_mut(head + i)[column..].as_chunks_mut::<16>().0;
                for v in 0..WIDTH {
                    isa.store(sums[i][v], &mut out[v]);
                }
            }
        }
        for column in (whole..latent).step_by(16) {
            let end = latent.min(column + 16);
            for i in 0..count {
                let mut sum = load(isa, &self.out.row_mut(head + i)[column..end]);
                for (position, row) in block.chunks_exact(width).enumerate() {
                    let weight = isa.splat(weights[i][position]);
                    sum = isa.mul_add(weight, load(isa, &row[column..end]), sum);
                }
                store(isa, sum, &mut self.out.row_mut(head + i)[column..end]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Case {
        heads: usize,
        width: usize,
        latent: usize,
        queries: Vec<f32>,
        cache: Vec<f32>,
        scale: f32,
    }

    impl Case {
        fn random(heads: usize, width: usize, latent: usize, positions: usize) -> Self {
            let mut rng = fastrand::Rng::with_seed(heads as u64);
            let mut noise = |len: usize| (0..len).map(|_| rng.f32() - 0.5).collect::<Vec<_>>();
            let (queries, mut cache) = (noise(heads * width), noise(positions * width));
            // BF16 values, so that both kinds of cache hold the same; growing, so that the
            // maximum moves from block to block.
            for (i, x) in cache.iter_mut().enumerate() {
                *x = bf16::from_f32(*x * (1.0 + (i / width) as f32 / 40.0)).to_f32();
            }
            Self { heads, width, latent, queries, cache, scale: 0.4 }
        }

        fn run(&self, kernels: Kernels, cache: Latents) -> Vec<f32> {
            let mut queries = self.queries.clone();
            let mut out = vec![f32::NAN; self.heads * self.latent];
            let queries = Columns::new(&mut queries, self.heads);
            kernels.attend(&queries, cache, self.scale, &mut Columns::new(&mut out, self.heads));
            out
        }

        /// One head in f64.
        fn expected(&self, head: usize) -> Vec<f64> {
            let query = &self.queries[head * self.width..][..self.width];
            let rows = self.cache.chunks(self.width);
            let scores: Vec<f64> = rows
                .clone()
                .map(|row| {
                    let dot = query.iter().zip(row).map(|(q, c)| f64::from(*q) * f64::from(*c));
                    dot.sum::<f64>() * f64::from(self.scale)
                })
                .collect();
            let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
            let mut out = vec![0.0; self.latent];
            for (row, score) in rows.zip(scores) {
                for (out, c) in out.iter_mut().zip(row) {
                    *out += (score - max).exp() / total * f64::from(*c);
                }
            }
            out
        }
    }

    #[test]
    fn attention_follows_its_formula_for_both_caches() {
        for (heads, width, latent, positions) in [
            (1, 576, 512, 200),
            (5, 144, 112, 65),
            (35, 80, 64, 64),
            (2, 21, 9, 131),
            (3, 16, 16, 1),
        ] {
            let case = Case::random(heads, width, latent, positions);
            let narrow: Vec<bf16> = case.cache.iter().map(|&x| bf16::from_f32(x)).collect();
            for kernels in Kernels::available() {
                let out = case.run(kernels, Latents::F32(&case.cache));
                for head in 0..heads {
                    let expected = case.expected(head);
                    let norm = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
                    let out = &out[head * latent..][..latent];
                    let error: f64 =
                        out.iter().zip(&expected).map(|(a, b)| (f64::from(*a) - b).powi(2)).sum();
                    let relative = error.sqrt() / norm;
                    assert!(relative < 2e-6, "{} head {head}: off by {relative:e}", kernels.name());
                }
                assert!(out == case.run(kernels, Latents::Bf16(&narrow)), "same values in BF16");
            }
        }
    }

    #[test]
    fn a_head_does_not_depend_on_the_others() {
        let case = Case::random(37, 96, 64, 150);
        for kernels in Kernels::available() {
            let all = case.run(kernels, Latents::F32(&case.cache));
            for head in 0..case.heads {
                let one = Case {
                    heads: 1,
                    queries: case.queries[head * case.width..][..case.width].to_vec(),
                    cache: case.cache.clone(),
                    ..case
                };
                let out = one.run(kernels, Latents::F32(&one.cache));
                assert!(out == all[head * case.latent..][..case.latent], "head {head}");
            }
        }
    }
}

//! One row at a time, written so that the compiler makes vector code of it on any machine;
//! what is `#[inline(always)]` is compiled for each instruction set of `isa.rs`.
//!
//! Three things make it the same as the definition and several times faster. Magnitudes
//! of BF16 compare like integers, so the largest is an integer maximum, which also shows
//! a NaN or an infinity. Adding 1.5 * 2^23 rounds a small f32 to an integer, half to even,
//! and leaves that integer in the low bits. And sums run in independent lanes.

use half::bf16;
use k3_formats::quant::{
    INT4_F16_GROUP, INT4_F16_LARGEST, INT4_GROUP, MatrixFormat, scale_for, search, stored_f16,
};

use super::{OUTLIER_RATIO, Problem};

/// 1.5 * 2^23: above it, f32 has a step of 1.
const ROUND: f32 = 12_582_912.0;

/// Independent sums: as many as the widest registers have lanes.
const LANES: usize = 16;

/// Magnitude of infinity.
const INFINITE: u16 = 0x7f80;
/// Bits of the smallest normal magnitude.
const SMALLEST_NORMAL: u16 = 0x0080;

/// Index of the first NaN or infinity.
pub(super) fn first_non_finite(values: &[bf16]) -> Option<usize> {
    if largest(values) < INFINITE {
        return None;
    }
    values.iter().position(|w| !w.is_finite())
}

/// One row on its way: `weights: [cols]`, `codes` and `scales` to be filled, and room to widen
/// the weights.
pub(super) struct Row<'a> {
    pub(super) weights: &'a [bf16],
    /// What each column's error counts, if scales are to be searched.
    pub(super) importance: Option<&'a [f32]>,
    pub(super) codes: &'a mut [u8],
    pub(super) scales: &'a mut [f32],
    pub(super) wide: &'a mut [f32],
}

/// What was seen of a row.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Seen {
    /// Ratio of its outlier, if it has one.
    pub(super) outlier: Option<f64>,
    /// Whether all weights are zero or subnormal.
    pub(super) empty: bool,
    /// `Σ (w - code * scale)²`.
    pub(super) error: f64,
    /// `Σ w²`.
    pub(super) energy: f64,
}

/// Quantizes one row as [`k3_formats::quant::encode_row`] does, or names a column and why
/// its weight cannot be stored.
#[inline(always)]
pub(super) fn quantize(format: MatrixFormat, row: Row) -> Result<Seen, (usize, Problem)> {
    match format {
        MatrixFormat::Int8Row => int8(row),
        MatrixFormat::Int4G64 => groups::<INT4_GROUP, { INT4_GROUP / 2 }>(row, |scale| scale),
        MatrixFormat::Int4G32 => {
            // A row may be all large weights, so it is not enough to look at outliers.
            let beyond = |w: &bf16| w.is_finite() && w.to_f32().abs() > INT4_F16_LARGEST;
            if widen(largest(row.weights)) > INT4_F16_LARGEST
                && let Some(col) = row.weights.iter().position(beyond)
            {
                return Err((col, Problem::TooLarge));
            }
            groups::<INT4_F16_GROUP, { INT4_F16_GROUP / 2 }>(row, stored_f16)
        }
        MatrixFormat::Bf16 => panic!("BF16 is not quantized"),
    }
}

#[inline(always)]
fn int8(row: Row) -> Result<Seen, (usize, Problem)> {
    let Row { weights, importance, codes, scales, wide } = row;
    let largest = match largest(weights) {
        INFINITE.. => return Err(not_finite(weights)),
        largest => largest,
    };
    let absmax = scale_for(widen(largest), 127.0);
    let scale = match importance {
        None => absmax,
        Some(importance) => {
            widen_all(weights, wide);
            search::int8(wide, importance, absmax)
        }
    };
    scales[0] = scale;
    let inverse = 1.0 / scale;
    for (code, w) in codes.iter_mut().zip(weights) {
        *code = rounded(widen(w.to_bits()) * inverse).clamp(-127, 127) as u8;
    }
    let mut squares = Squares::new(largest);
    for (codes, weights) in codes.chunks(LANES).zip(weights.chunks(LANES)) {
        squares.add(weights, |i| f32::from(codes[i] as i8) * scale);
    }
    Ok(squares.finish(weights, largest))
}

/// One row in groups of `GROUP` columns, `HALF` bytes each; `stored` makes a scale one that
/// can be stored.
#[inline(always)]
fn groups<const GROUP: usize, const HALF: usize>(
    row: Row,
    stored: impl Fn(f32) -> f32,
) -> Result<Seen, (usize, Problem)> {
    let Row { weights, importance, codes, scales, wide } = row;
    let row_largest = match largest(weights) {
        INFINITE.. => return Err(not_finite(weights)),
        largest => largest,
    };
    let mut squares = Squares::new(row_largest);
    let (groups, _) = weights.as_chunks::<GROUP>();
    let (codes, _) = codes.as_chunks_mut::<HALF>();
    for (g, ((group, packed), scale)) in groups.iter().zip(codes).zip(scales).enumerate() {
        let absmax = scale_for(widen(largest(group)), 7.0);
        *scale = match importance {
            None => stored(absmax),
            Some(importance) => {
                let wide = &mut wide[..GROUP];
                widen_all(group, wide);
                search::int4(wide, &importance[g * GROUP..][..GROUP], absmax, &stored)
            }
        };
        let inverse = 1.0 / *scale;
        let mut nibbles = [0; GROUP];
        for (nibble, w) in nibbles.iter_mut().zip(group) {
            *nibble = (rounded(widen(w.to_bits()) * inverse).clamp(-8, 7) + 8) as u8;
        }
        for (byte, pair) in packed.iter_mut().zip(nibbles.as_chunks::<2>().0) {
            *byte = pair[0] | pair[1] << 4;
        }
        for (nibbles, weights) in nibbles.chunks_exact(LANES).zip(group.chunks_exact(LANES)) {
            squares.add(weights, |i| (f32::from(nibbles[i]) - 8.0) * *scale);
        }
    }
    Ok(squares.finish(weights, row_largest))
}

/// Sums of squares relative to the row's largest weight, so that nothing overflows.
struct Squares {
    inverse: f32,
    error: [f32; LANES],
    energy: [f32; LANES],
}

impl Squares {
    #[inline(always)]
    fn new(largest: u16) -> Self {
        let inverse = 1.0 / widen(largest).max(f32::MIN_POSITIVE);
        Self { inverse, error: [0.0; LANES], energy: [0.0; LANES] }
    }

    /// Adds up to [`LANES`] weights; `became(i)` is what weight i became.
    #[inline(always)]
    fn add(&mut self, weights: &[bf16], became: impl Fn(usize) -> f32) {
        let lanes = self.error.iter_mut().zip(&mut self.energy);
        for (i, ((error, energy), w)) in lanes.zip(weights).enumerate() {
            let w = widen(w.to_bits());
            let off = (w - became(i)) * self.inverse;
            *error += off * off;
            let w = w * self.inverse;
            *energy += w * w;
        }
    }

    fn finish(&self, row: &[bf16], largest: u16) -> Seen {
        let unit = f64::from(widen(largest)).powi(2);
        let energy: f32 = self.energy.iter().sum();
        Seen {
            outlier: outlier(row, largest, energy),
            empty: largest < SMALLEST_NORMAL,
            error: f64::from(self.error.iter().sum::<f32>()) * unit,
            energy: f64::from(energy) * unit,
        }
    }
}

#[inline(always)]
fn widen_all(weights: &[bf16], wide: &mut [f32]) {
    for (wide, w) in wide.iter_mut().zip(weights) {
        *wide = widen(w.to_bits());
    }
}

/// Largest magnitude, as bits: infinity and NaN are above all others.
#[inline(always)]
fn largest(values: &[bf16]) -> u16 {
    values.iter().fold(0, |max, w| max.max(w.to_bits() & 0x7fff))
}

/// The first weight of a row that is not finite.
fn not_finite(row: &[bf16]) -> (usize, Problem) {
    (row.iter().position(|w| !w.is_finite()).unwrap_or(0), Problem::NotFinite)
}

#[inline(always)]
fn widen(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// `x` rounded half to even; right for magnitudes below 2^22, any number for others.
#[inline(always)]
fn rounded(x: f32) -> i32 {
    ((x + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32)
}

/// The ratio of the largest magnitude to the root mean square of the others, if it is
/// above [`OUTLIER_RATIO`] and there is anything else than zeros. `energy` is the sum of the
/// squares relative to the largest; what it has lost is too small to matter for the
/// question whether to look closer.
fn outlier(row: &[bf16], largest: u16, energy: f32) -> Option<f64> {
    if largest == 0 || row.len() < 2 {
        return None;
    }
    let others = (row.len() - 1) as f32;
    let tame = 2.0 * others / (OUTLIER_RATIO * OUTLIER_RATIO) as f32;
    if energy - 1.0 > tame {
        return None;
    }
    exact_ratio(row, largest).filter(|&ratio| ratio > OUTLIER_RATIO)
}

#[cold]
fn exact_ratio(row: &[bf16], largest: u16) -> Option<f64> {
    let at = row.iter().position(|w| w.to_bits() & 0x7fff == largest)?;
    let others = row.iter().enumerate().filter(|&(i, _)| i != at);
    let squares: f64 = others.map(|(_, w)| f64::from(w.to_f32()).powi(2)).sum();
    let rms = (squares / (row.len() - 1) as f64).sqrt();
    (rms > 0.0).then(|| f64::from(widen(largest)) / rms)
}

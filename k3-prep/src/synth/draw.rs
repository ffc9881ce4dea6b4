//! Numbers that depend on a key and a position only, so that any part of a tensor
//! can be made at any time, in any order, by any thread.
//!
//! Position `i` of a run owns 16 uniform bits: lane `i % 4` of the splitmix64 output
//! number `i / 4`. Those bits look its bytes up in a table of 65,536 equally likely
//! values. Only exact IEEE operations go into a table, so that every platform writes
//! the same bytes.

use std::sync::{Arc, LazyLock};

use half::bf16;
use k3_formats::mxfp4::{E2M1, GROUP};

/// Values of one table: all that 16 bits can choose.
const CHOICES: usize = 1 << 16;
/// Bytes of packed MXFP4 codes under one scale.
const GROUP_BYTES: usize = GROUP / 2;
/// Deviation of the codes before rounding, in units of the scale: one group of 32 in
/// fifty then lacks a code of magnitude 4 or more and has one put in.
const CODE_DEVIATION: f64 = 2.2;
/// Weight of the current token in a convolution, on top of the random part.
const CURRENT_TAP: f32 = 0.8;

/// A distribution, with the type its values are stored as.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Draw {
    /// Zero bytes of this width.
    Zero { width: usize },
    /// BF16, normal around 0.
    Normal { deviation: f64 },
    /// BF16, uniform.
    Uniform { low: f64, high: f64 },
    /// F32, uniform.
    UniformF32 { low: f64, high: f64 },
    /// F32, most values near `low` and few near `high`: the fourth power of a uniform
    /// number, stretched.
    SkewedF32 { low: f64, high: f64 },
    /// F32 depthwise taps, oldest first, most weight on the last.
    Taps { width: usize },
    /// Two normal E2M1 codes a byte, the earlier column in the low nibble; every 32
    /// columns reach magnitude 4, as they do when a scale comes from its largest value.
    Codes,
    /// E8M0 scales that give [`Draw::Codes`] this deviation on the whole.
    Scales { deviation: f64 },
}

/// A distribution made ready to be drawn from.
#[derive(Clone)]
pub(super) struct Table {
    draw: Draw,
    entries: Entries,
}

#[derive(Clone)]
enum Entries {
    Zero(usize),
    One(Arc<[[u8; 1]]>),
    Two(Arc<[[u8; 2]]>),
    Four(Arc<[[u8; 4]]>),
}

impl Table {
    pub(super) fn new(draw: Draw) -> Self {
        let uniform = |low: f64, high: f64, i: usize| {
            low + (high - low) * ((i as f64 + 0.5) / CHOICES as f64)
        };
        let entries = match draw {
            Draw::Zero { width } => Entries::Zero(width),
            Draw::Normal { deviation } => bf16s(|i| deviation * QUANTILES[i]),
            Draw::Uniform { low, high } => bf16s(|i| uniform(low, high, i)),
            Draw::UniformF32 { low, high } => f32s(|i| uniform(low, high, i)),
            Draw::SkewedF32 { low, high } => f32s(|i| {
                let u = uniform(0.0, 1.0, i);
                low + (high - low) * (u * u) * (u * u)
            }),
            Draw::Taps { .. } => f32s(|i| 0.35 * QUANTILES[i]),
            Draw::Codes => {
                let (codes, _) = codes();
                bytes(|i| codes[i & 255] | codes[i >> 8] << 4)
            }
            Draw::Scales { deviation } => {
                let middle = middle_scale(deviation);
                bytes(|i| [middle - 1, middle, middle, middle + 1][i >> 14])
            }
        };
        Self { draw, entries }
    }

    /// Bytes of one stored value.
    pub(super) fn width(&self) -> usize {
        match self.entries {
            Entries::Zero(width) => width,
            Entries::One(_) => 1,
            Entries::Two(_) => 2,
            Entries::Four(_) => 4,
        }
    }

    /// Writes the values from position `first` on, a multiple of 16, as bytes.
    pub(super) fn fill(&self, key: u64, first: u64, out: &mut [u8]) {
        match &self.entries {
            Entries::Zero(_) => out.fill(0),
            Entries::One(table) => look_up(table, key, first, out),
            Entries::Two(table) => look_up(table, key, first, out),
            Entries::Four(table) => look_up(table, key, first, out),
        }
        match self.draw {
            Draw::Codes => out.chunks_exact_mut(GROUP_BYTES).for_each(reach_four),
            Draw::Taps { width } => lift_current_tap(width as u64, first, out),
            _ => {}
        }
    }
}

/// The generator's key for a named tensor: FNV-1a over the name, mixed with the seed.
pub(super) fn key(seed: u64, name: &str) -> u64 {
    let fnv = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mix(fnv ^ mix(seed))
}

/// The finalizer of splitmix64 (Steele, Lea, Flood 2014).
pub(super) fn mix(z: u64) -> u64 {
    let z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn look_up<const N: usize>(table: &[[u8; N]], key: u64, first: u64, out: &mut [u8]) {
    const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;
    // A table of known length needs no bounds check per value.
    let table: &[[u8; N]; CHOICES] = table.try_into().expect("tables hold CHOICES entries");
    let mut counter = key.wrapping_add((first / 4).wrapping_mul(GOLDEN));
    for values in out.chunks_mut(4 * N) {
        counter = counter.wrapping_add(GOLDEN);
        let word = mix(counter);
        for (lane, value) in values.chunks_exact_mut(N).enumerate() {
            value.copy_from_slice(&table[usize::from((word >> (16 * lane)) as u16)]);
        }
    }
}

/// A code of magnitude 4 or 6 has the two upper bits of its three set.
fn reach_four(group: &mut [u8]) {
    const LOW_BITS: u128 = 0x1111_1111_1111_1111_1111_1111_1111_1111;
    let codes = u128::from_le_bytes((&*group).try_into().expect("one group"));
    if codes >> 1 & codes >> 2 & LOW_BITS == 0 {
        group[0] |= 6;
    }
}

fn lift_current_tap(width: u64, first: u64, out: &mut [u8]) {
    for (i, tap) in out.chunks_exact_mut(4).enumerate() {
        if (first + i as u64) % width == width - 1 {
            let bytes: [u8; 4] = (&*tap).try_into().expect("four bytes");
            tap.copy_from_slice(&(f32::from_le_bytes(bytes) + CURRENT_TAP).to_le_bytes());
        }
    }
}

fn bytes(value: impl Fn(usize) -> u8) -> Entries {
    Entries::One((0..CHOICES).map(|i| [value(i)]).collect())
}

fn bf16s(value: impl Fn(usize) -> f64) -> Entries {
    Entries::Two((0..CHOICES).map(|i| bf16::from_f32(value(i) as f32).to_le_bytes()).collect())
}

fn f32s(value: impl Fn(usize) -> f64) -> Entries {
    Entries::Four((0..CHOICES).map(|i| (value(i) as f32).to_le_bytes()).collect())
}

/// 256 equally likely E2M1 codes, and the root mean square of their values.
fn codes() -> ([u8; 256], f64) {
    let code = std::array::from_fn(|i| {
        let x = CODE_DEVIATION * QUANTILES[i * 256 + 128];
        let distance = |code: &u8| (x.abs() - magnitude(*code)).abs();
        let nearest = (0..8).min_by(|a, b| distance(a).total_cmp(&distance(b))).expect("8 codes");
        // There is no use for a negative zero.
        if x < 0.0 && nearest > 0 { nearest | 8 } else { nearest }
    });
    let squares: f64 = code.iter().map(|&c: &u8| magnitude(c).powi(2)).sum();
    (code, (squares / 256.0).sqrt())
}

/// Magnitude of a code in units of the scale.
fn magnitude(code: u8) -> f64 {
    f64::from(E2M1[usize::from(code & 7)])
}

/// The scale byte around which a quarter of the scales is one lower and a quarter one
/// higher, which together multiply the deviation by 1.25.
fn middle_scale(deviation: f64) -> u8 {
    let (_, rms) = codes();
    let exponent = (deviation / rms / 1.25).log2().round();
    (127.0 + exponent).clamp(1.0, 253.0) as u8
}

/// Normal quantiles at (i + 1/2) / 65,536. The quantile function z(p) has
/// z' = sqrt(2 pi) exp(z^2 / 2), hence z'' = z z'^2, which Runge-Kutta steps solve from
/// the median with additions and multiplications only.
static QUANTILES: LazyLock<Box<[f64]>> = LazyLock::new(|| {
    const STEPS: usize = 8;
    let slope = |(z, dz): (f64, f64)| (dz, z * dz * dz);
    let ahead = |(z, dz): (f64, f64), h: f64, (a, b): (f64, f64)| (z + h * a, dz + h * b);
    let mut quantiles = vec![0.0; CHOICES].into_boxed_slice();
    let mut at = (0.0, (2.0 * std::f64::consts::PI).sqrt());
    for i in 0..CHOICES / 2 {
        // The first value lies half a spacing from the median.
        let h = if i == 0 { 0.5 } else { 1.0 } / (CHOICES * STEPS) as f64;
        for _ in 0..STEPS {
            let k1 = slope(at);
            let k2 = slope(ahead(at, h / 2.0, k1));
            let k3 = slope(ahead(at, h / 2.0, k2));
            let k4 = slope(ahead(at, h, k3));
            at.0 += h / 6.0 * (k1.0 + 2.0 * (k2.0 + k3.0) + k4.0);
            at.1 += h / 6.0 * (k1.1 + 2.0 * (k2.1 + k3.1) + k4.1);
        }
        quantiles[CHOICES / 2 + i] = at.0;
        quantiles[CHOICES / 2 - 1 - i] = -at.0;
    }
    quantiles
});

#[cfg(test)]
mod tests {
    use k3_formats::mxfp4;

    use super::*;

    fn filled(draw: Draw, values: usize) -> Vec<u8> {
        let table = Table::new(draw);
        let mut out = vec![0; values * table.width()];
        table.fill(key(1, "x"), 0, &mut out);
        out
    }

    fn floats(draw: Draw, values: usize) -> Vec<f64> {
        let narrow = |b: &[u8]| f64::from(bf16::from_le_bytes([b[0], b[1]]).to_f32());
        let wide = |b: &[u8]| f64::from(f32::from_le_bytes(b.try_into().unwrap()));
        let bytes = filled(draw, values);
        match Table::new(draw).width() {
            2 => bytes.chunks(2).map(narrow).collect(),
            _ => bytes.chunks(4).map(wide).collect(),
        }
    }

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        // Between two neighbours lies a multiple of 1/65,536, to within their curvature.
        let at = |p: f64| {
            let i = (p * 65_536.0) as usize;
            (QUANTILES[i - 1] + QUANTILES[i]) / 2.0
        };
        for (p, z) in [
            (0.5, 0.0),
            (0.75, 0.674_489_750_196_082),
            (0.9375, 1.534_120_544_352_546),
            (0.984_375, 2.153_874_694_061_456),
        ] {
            assert!((at(p) - z).abs() < 1e-7, "{p}: {}", at(p));
        }
        // The outermost: p = 1 - 2^-17.
        assert!((QUANTILES[65_535] - 4.324_906_0).abs() < 1e-5, "{}", QUANTILES[65_535]);
        assert!(QUANTILES.windows(2).all(|w| w[0] < w[1]));
    }

    #[test]
    fn parts_are_the_same_as_the_whole() {
        for draw in [
            Draw::Normal { deviation: 1.0 },
            Draw::Taps { width: 3 },
            Draw::Codes,
            Draw::Scales { deviation: 0.02 },
            Draw::UniformF32 { low: -1.0, high: 1.0 },
        ] {
            let whole = filled(draw, 1021);
            let table = Table::new(draw);
            let mut part = vec![0; (1021 - 496) * table.width()];
            table.fill(key(1, "x"), 496, &mut part);
            assert_eq!(part, whole[496 * table.width()..], "{draw:?}");
        }
    }

    #[test]
    fn moments_are_as_asked() {
        let x = floats(Draw::Normal { deviation: 0.5 }, 1 << 18);
        let n = x.len() as f64;
        let mean = x.iter().sum::<f64>() / n;
        let deviation = (x.iter().map(|v| v * v).sum::<f64>() / n).sqrt();
        assert!(mean.abs() < 0.004 && (deviation - 0.5).abs() < 0.003, "{mean} {deviation}");
        let x = floats(Draw::UniformF32 { low: -5.0, high: 0.5 }, 1 << 16);
        assert!(x.iter().all(|v| (-5.0..=0.5).contains(v)));
        assert!((x.iter().sum::<f64>() / x.len() as f64 + 2.25).abs() < 0.03);
        let taps = floats(Draw::Taps { width: 4 }, 1 << 16);
        let last = taps.iter().skip(3).step_by(4).sum::<f64>() / f64::from(1 << 14);
        assert!((last - 0.8).abs() < 0.02, "{last}");
    }

    #[test]
    fn every_group_of_codes_reaches_four_and_scales_give_the_deviation() {
        let codes = filled(Draw::Codes, 1 << 18);
        let scales = filled(Draw::Scales { deviation: 0.02 }, 1 << 14);
        let (mut squares, mut count) = (0.0, 0.0);
        for (group, scale) in codes.chunks(GROUP_BYTES).zip(scales) {
            let values = group.iter().flat_map(|b| [magnitude(b & 7), magnitude(b >> 4)]);
            assert!(values.clone().fold(0.0, f64::max) >= 4.0);
            assert!((0x70..=0x7a).contains(&scale), "{scale:#x}");
            let scale = f64::from(mxfp4::scale(scale));
            squares += values.map(|m| (m * scale).powi(2)).sum::<f64>();
            count += 32.0;
        }
        let deviation = f64::sqrt(squares / count);
        // The exponent is a whole number: at most half a step off.
        assert!((0.7..1.42).contains(&(deviation / 0.02)), "{deviation}");
    }

    #[test]
    fn the_generator_is_splitmix64_from_an_fnv_key() {
        // Fixed for good: a seed must name the same snapshot in every version.
        let identity: Vec<[u8; 2]> = (0..=u16::MAX).map(u16::to_le_bytes).collect();
        let mut out = [0; 16];
        look_up(&identity, 0, 0, &mut out);
        assert_eq!(u64::from_le_bytes(out[..8].try_into().unwrap()), 0xe220_a839_7b1d_cdaf);
        assert_eq!(u64::from_le_bytes(out[8..].try_into().unwrap()), 0x6e78_9e6a_a1b9_65f4);
        assert_eq!(key(0, "a"), mix(0xaf63_dc4c_8601_ec8c));
        assert_ne!(key(0, "a"), key(1, "a"));
    }
}

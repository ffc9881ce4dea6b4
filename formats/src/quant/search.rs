//! Scales that lose less than absmax: tried one by one, the best kept.
//!
//! The error of a scale is `Σ importance * (w - code * scale)²` over the weights that share
//! it. Another scale is taken only if its error is less by more than f32 sums may be wrong,
//! so the result is never worse than absmax. A scale may be negative: int4 has one code
//! more below zero than above, and then the largest magnitude gets it.

/// Sums run in so many independent lanes, element i in lane `i % 16`, so that any machine's
/// vectors give the same bits; then lane l is added to l + 8, l + 4, l + 2 and l + 1.
const LANES: usize = 16;

/// 1.5 * 2^23: above it, f32 has a step of 1.
const ROUND: f32 = 12_582_912.0;

/// What the largest magnitude is divided by: 8 gives it the last code, less clips nothing
/// and wastes codes, more clips it.
const INT4_DIVISORS: [f32; 8] = [8.1, 7.6, 7.1, 8.6, 6.6, 6.1, 9.1, 5.6];

/// What the largest magnitude of a row is multiplied by before it gets code 127.
const INT8_CLIPS: [f32; 6] = [0.97, 0.94, 0.9, 0.85, 0.8, 0.7];

/// Times that a scale is fitted to the codes it gave.
const REFINEMENTS: usize = 2;

/// A new error must be below this part of the old one.
const BETTER: f32 = 0.9999;

/// A fitted scale below this part of the absmax scale would clip too much to be of use.
const SMALLEST_PART: f32 = 0.25;

/// How the scales of a matrix are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scales {
    /// The largest magnitude gets the largest code.
    #[default]
    Absmax,
    /// Least squared error.
    Mse,
    /// Least squared error, each column weighed by the mean square of its input.
    Hessian,
}

impl Scales {
    const ALL: [Self; 3] = [Self::Absmax, Self::Mse, Self::Hessian];

    /// Name in options and manifests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Absmax => "absmax",
            Self::Mse => "mse",
            Self::Hessian => "hessian",
        }
    }

    /// The scales with this [`Scales::name`].
    ///
    /// # Errors
    /// There are none.
    pub fn from_name(name: &str) -> crate::Result<Self> {
        Self::ALL.into_iter().find(|s| s.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            crate::Error::unsupported(format!("no scales called {name:?}; there are {names}"))
        })
    }
}

/// A better scale for an int4 group of weights than `absmax`, its own by
/// [`super::int4_scale`]; `stored` makes a scale one that can be stored.
/// `weights`, `importance`: `[group]`.
#[inline(always)]
pub fn int4(weights: &[f32], importance: &[f32], absmax: f32, stored: impl Fn(f32) -> f32) -> f32 {
    let (mut lowest, mut highest) = ([0.0_f32; LANES], [0.0_f32; LANES]);
    each_lanes(weights, importance, |weights, _| {
        for l in 0..LANES {
            lowest[l] = if weights[l] < lowest[l] { weights[l] } else { lowest[l] };
            highest[l] = if weights[l] > highest[l] { weights[l] } else { highest[l] };
        }
    });
    let (mut low, mut high) = (0.0, 0.0);
    for lane in 0..LANES {
        low = if lowest[lane] < low { lowest[lane] } else { low };
        high = if highest[lane] > high { highest[lane] } else { high };
    }
    // The largest weight gets a negative code.
    let largest = if -low > high { low } else { high };
    let mut tried = INT4_DIVISORS;
    for divisor in &mut tried {
        *divisor = -largest / *divisor;
    }
    let codes = Codes { low: -8.0, high: 7.0 };
    best(weights, importance, absmax, tried, codes, stored)
}

/// A better scale for an int8 row of weights than `absmax`; `weights`, `importance`: `[cols]`.
#[inline(always)]
pub fn int8(weights: &[f32], importance: &[f32], absmax: f32) -> f32 {
    let mut tried = INT8_CLIPS;
    for clip in &mut tried {
        *clip *= absmax;
    }
    best(weights, importance, absmax, tried, Codes { low: -127.0, high: 127.0 }, |scale| scale)
}

#[derive(Clone, Copy)]
struct Codes {
    low: f32,
    high: f32,
}

impl Codes {
    /// The code of a weight, given the inverse of its scale.
    #[inline(always)]
    fn of(self, weight: f32, inverse: f32) -> f32 {
        let x = weight * inverse;
        let x = if x > self.low { x } else { self.low };
        let x = if x < self.high { x } else { self.high };
        x + ROUND - ROUND
    }
}

#[inline(always)]
fn best<const N: usize>(
    weights: &[f32],
    importance: &[f32],
    absmax: f32,
    tried: [f32; N],
    codes: Codes,
    stored: impl Fn(f32) -> f32,
) -> f32 {
    let mut scale = stored(absmax);
    let mut least = error(weights, importance, scale, codes);
    let smallest = SMALLEST_PART * scale;
    // All errors first: they do not wait for each other, and which one wins is not for a
    // processor to guess.
    let (mut errors, mut scales) = ([0.0; N], [0.0; N]);
    for i in 0..N {
        scales[i] = stored(tried[i]);
        errors[i] = error(weights, importance, scales[i], codes);
    }
    for (new, found) in scales.into_iter().zip(errors) {
        // Also false for NaN.
        let better = (new.abs() >= smallest) & (found < BETTER * least);
        scale = if better { new } else { scale };
        least = if better { found } else { least };
    }
    for _ in 0..REFINEMENTS {
        let new = stored(fitted(weights, importance, scale, codes));
        let found = error(weights, importance, new, codes);
        if !(new.abs() >= smallest && found < BETTER * least) {
            break;
        }
        (scale, least) = (new, found);
    }
    scale
}

/// `Σ importance * (w - code * scale)²`.
#[inline(always)]
fn error(weights: &[f32], importance: &[f32], scale: f32, codes: Codes) -> f32 {
    let inverse = 1.0 / scale;
    let mut sums = [0.0; LANES];
    each_lanes(weights, importance, |weights, importance| {
        // One step a loop: that is what becomes vectors of all lanes.
        let (mut code, mut off) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            code[l] = codes.of(weights[l], inverse);
        }
        for l in 0..LANES {
            off[l] = weights[l] - code[l] * scale;
        }
        for l in 0..LANES {
            sums[l] += importance[l] * (off[l] * off[l]);
        }
    });
    total(sums)
}

/// The scale with the least error for the codes that `scale` gives.
#[inline(always)]
fn fitted(weights: &[f32], importance: &[f32], scale: f32, codes: Codes) -> f32 {
    let inverse = 1.0 / scale;
    let (mut products, mut squares) = ([0.0; LANES], [0.0; LANES]);
    each_lanes(weights, importance, |weights, importance| {
        let (mut code, mut weighed) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            code[l] = codes.of(weights[l], inverse);
        }
        for l in 0..LANES {
            weighed[l] = importance[l] * code[l];
        }
        for l in 0..LANES {
            products[l] += weighed[l] * weights[l];
        }
        for l in 0..LANES {
            squares[l] += weighed[l] * code[l];
        }
    });
    total(products) / total(squares)
}

/// Written out, because a loop over the widths is not unrolled and then is most of a search.
#[inline(always)]
fn total(lanes: [f32; LANES]) -> f32 {
    let (mut eight, mut four) = ([0.0; 8], [0.0; 4]);
    for l in 0..8 {
        eight[l] = lanes[l] + lanes[l + 8];
    }
    for l in 0..4 {
        four[l] = eight[l] + eight[l + 4];
    }
    (four[0] + four[2]) + (four[1] + four[3])
}

/// Hands out [`LANES`] weights and importances at a time, zeros after the last.
#[inline(always)]
fn each_lanes(
    weights: &[f32],
    importance: &[f32],
    mut each: impl FnMut(&[f32; LANES], &[f32; LANES]),
) {
    let (whole, rest) = weights.as_chunks::<LANES>();
    let (whole_importance, rest_importance) = importance.as_chunks::<LANES>();
    let mut i = 0;
    while i < whole.len() {
        each(&whole[i], &whole_importance[i]);
        i += 1;
    }
    if !rest.is_empty() {
        let (mut weights, mut importance) = ([0.0; LANES], [0.0; LANES]);
        weights[..rest.len()].copy_from_slice(rest);
        importance[..rest.len()].copy_from_slice(rest_importance);
        each(&weights, &importance);
    }
}

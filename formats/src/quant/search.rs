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
    let largest = weights.iter().fold(0.0_f32, |max, w| if w.abs() > max.abs() { *w } else { max });
    // The largest weight gets a negative code.
    let tried = INT4_DIVISORS.map(|divisor| -largest / divisor);
    let codes = Codes { low: -8.0, high: 7.0 };
    best(weights, importance, absmax, &tried, codes, stored)
}

/// A better scale for an int8 row of weights than `absmax`; `weights`, `importance`: `[cols]`.
#[inline(always)]
pub fn int8(weights: &[f32], importance: &[f32], absmax: f32) -> f32 {
    let tried = INT8_CLIPS.map(|clip| absmax * clip);
    best(weights, importance, absmax, &tried, Codes { low: -127.0, high: 127.0 }, |scale| scale)
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
fn best(
    weights: &[f32],
    importance: &[f32],
    absmax: f32,
    tried: &[f32],
    codes: Codes,
    stored: impl Fn(f32) -> f32,
) -> f32 {
    let mut scale = stored(absmax);
    let mut least = error(weights, importance, scale, codes);
    let smallest = SMALLEST_PART * scale;
    let mut consider = |new: f32, scale: &mut f32| {
        let new = stored(new);
        // Also false for NaN.
        if new.abs() >= smallest {
            let found = error(weights, importance, new, codes);
            if found < BETTER * least {
                (*scale, least) = (new, found);
                return true;
            }
        }
        false
    };
    for &new in tried {
        consider(new, &mut scale);
    }
    for _ in 0..REFINEMENTS {
        if !consider(fitted(weights, importance, scale, codes), &mut scale) {
            break;
        }
    }
    scale
}

/// `Σ importance * (w - code * scale)²`.
#[inline(always)]
fn error(weights: &[f32], importance: &[f32], scale: f32, codes: Codes) -> f32 {
    let inverse = 1.0 / scale;
    let mut sums = [0.0; LANES];
    lanes(weights, importance, |lane, w, importance| {
        let off = w - codes.of(w, inverse) * scale;
        sums[lane] += importance * (off * off);
    });
    total(sums)
}

/// The scale with the least error for the codes that `scale` gives.
#[inline(always)]
fn fitted(weights: &[f32], importance: &[f32], scale: f32, codes: Codes) -> f32 {
    let inverse = 1.0 / scale;
    let (mut products, mut squares) = ([0.0; LANES], [0.0; LANES]);
    lanes(weights, importance, |lane, w, importance| {
        let code = codes.of(w, inverse);
        let weighed = importance * code;
        products[lane] += weighed * w;
        squares[lane] += weighed * code;
    });
    total(products) / total(squares)
}

#[inline(always)]
fn total(mut lanes: [f32; LANES]) -> f32 {
    for half in [8, 4, 2, 1] {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
    }
    lanes[0]
}

#[inline(always)]
fn lanes(weights: &[f32], importance: &[f32], mut each: impl FnMut(usize, f32, f32)) {
    let (whole, rest) = weights.as_chunks::<LANES>();
    let (whole_importance, rest_importance) = importance.as_chunks::<LANES>();
    for (weights, importance) in whole.iter().zip(whole_importance) {
        for lane in 0..LANES {
            each(lane, weights[lane], importance[lane]);
        }
    }
    for (lane, (&w, &importance)) in rest.iter().zip(rest_importance).enumerate() {
        each(lane, w, importance);
    }
}

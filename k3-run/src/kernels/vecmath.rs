//! Exponential, sigmoid, tanh and the element-wise functions of the model, over vectors.
//!
//! Errors, over all finite inputs: [`exp`] 2 ulp, [`sigmoid`] 3 ulp, [`tanh`] 3 ulp
//! (tested); SiTU is the product of three of them.

use super::Kernels;
use super::isa::{Isa, Task};

/// `e^x`; 0 below about -104, infinity above about 88.7.
///
/// `x = n ln 2 + r`, then a polynomial in r (coefficients of Cephes' `expf`) times 2^n.
#[inline(always)]
pub(super) fn exp<S: Isa>(isa: S, x: S::F) -> S::F {
    // Wide enough for the result to round to zero or overflow, with n well inside i32.
    let x = isa.max(isa.splat(-105.0), isa.min(isa.splat(90.0), x));
    let (n, small) = exp_parts(isa, x);
    // 2^n in two factors, because n reaches from -151 to 130.
    let half = isa.round(isa.mul(n, isa.splat(0.5)));
    let result = isa.add(small, isa.splat(1.0));
    isa.mul(isa.mul(result, isa.exp2(half)), isa.exp2(isa.sub(n, half)))
}

/// `n` and `e^r - 1` with `x = n ln 2 + r` and `|r| <= ln 2 / 2`.
#[inline(always)]
fn exp_parts<S: Isa>(isa: S, x: S::F) -> (S::F, S::F) {
    let n = isa.round(isa.mul(x, isa.splat(std::f32::consts::LOG2_E)));
    // ln 2 in two parts; the first has so few bits that its multiples are exact.
    let r = isa.mul_add(n, isa.splat(-0.693_359_4), x);
    let r = isa.mul_add(n, isa.splat(2.121_944_4e-4), r);
    let mut p = isa.splat(1.987_569_1e-4);
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = isa.mul_add(p, r, isa.splat(c));
    }
    (n, isa.mul_add(isa.mul(r, r), p, r))
}

/// `1 / (1 + e^-x)`, from `e^-|x|` so that nothing overflows.
#[inline(always)]
pub(super) fn sigmoid<S: Isa>(isa: S, x: S::F) -> S::F {
    let e = exp(isa, isa.sub(isa.splat(0.0), isa.abs(x)));
    let one = isa.splat(1.0);
    isa.div(isa.if_negative(x, e, one), isa.add(one, e))
}

/// `tanh x = E / (E + 2)` with `E = e^(2|x|) - 1 = 2^n (e^r - 1) + (2^n - 1)`, which loses
/// nothing near zero.
#[inline(always)]
pub(super) fn tanh<S: Isa>(isa: S, x: S::F) -> S::F {
    let magnitude = isa.abs(x);
    // tanh 15 is 1 in f32.
    let (n, small) = exp_parts(isa, isa.min(isa.splat(30.0), isa.add(magnitude, magnitude)));
    let power = isa.exp2(n);
    let e = isa.mul_add(small, power, isa.sub(power, isa.splat(1.0)));
    isa.copysign(isa.div(e, isa.add(e, isa.splat(2.0))), x)
}

/// `x sigmoid(x)`.
#[inline(always)]
pub(super) fn silu<S: Isa>(isa: S, x: S::F) -> S::F {
    isa.mul(x, sigmoid(isa, x))
}

/// A function of one or two vectors, as a type so that it is always inlined.
pub(super) trait Map: Copy {
    fn apply<S: Isa>(self, isa: S, x: S::F, y: S::F) -> S::F;
}

/// See [`apply`].
struct InPlace<'a, M> {
    map: M,
    x: &'a mut [f32],
    y: &'a [f32],
}

impl<M: Map> Task for InPlace<'_, M> {
    type Output = ();

    #[inline(always)]
    fn run<S: Isa>(self, isa: S) {
        apply(isa, self.map, self.x, self.y);
    }
}

/// `x[i] = map(x[i], y[i])`; `y` may be empty for a function of one vector.
#[inline(always)]
pub(super) fn apply<S: Isa>(isa: S, map: impl Map, x: &mut [f32], y: &[f32]) {
    let (x, x_rest) = x.as_chunks_mut::<16>();
    let (y, y_rest) = y.as_chunks::<16>();
    if y.is_empty() {
        for x in x {
            isa.store(map.apply(isa, isa.load(x), isa.splat(0.0)), x);
        }
    } else {
        for (x, y) in x.iter_mut().zip(y) {
            isa.store(map.apply(isa, isa.load(x), isa.load(y)), x);
        }
    }
    if !x_rest.is_empty() {
        let (mut last_x, mut last_y) = ([0.0; 16], [0.0; 16]);
        last_x[..x_rest.len()].copy_from_slice(x_rest);
        last_y[..y_rest.len()].copy_from_slice(y_rest);
        isa.store(map.apply(isa, isa.load(&last_x), isa.load(&last_y)), &mut last_x);
        x_rest.copy_from_slice(&last_x[..x_rest.len()]);
    }
}

#[derive(Clone, Copy)]
struct Exp;

impl Map for Exp {
    #[inline(always)]
    fn apply<S: Isa>(self, isa: S, x: S::F, _: S::F) -> S::F {
        exp(isa, x)
    }
}

#[derive(Clone, Copy)]
pub(super) struct Sigmoid;

impl Map for Sigmoid {
    #[inline(always)]
    fn apply<S: Isa>(self, isa: S, x: S::F, _: S::F) -> S::F {
        sigmoid(isa, x)
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl Map for Silu {
    #[inline(always)]
    fn apply<S: Isa>(self, isa: S, x: S::F, _: S::F) -> S::F {
        silu(isa, x)
    }
}

/// `x * sigmoid(gate)`.
#[derive(Clone, Copy)]
pub(super) struct Gate;

impl Map for Gate {
    #[inline(always)]
    fn apply<S: Isa>(self, isa: S, x: S::F, gate: S::F) -> S::F {
        isa.mul(x, sigmoid(isa, gate))
    }
}

/// The two betas of SiTU-GLU.
#[derive(Debug, Clone, Copy)]
pub struct Situ {
    /// `activation_situ_beta`: bound of the gate.
    pub beta: f32,
    /// `activation_situ_linear_beta`: bound of the linear part.
    pub linear_beta: f32,
}

impl Map for Situ {
    #[inline(always)]
    fn apply<S: Isa>(self, isa: S, gate: S::F, up: S::F) -> S::F {
        let gated = isa.mul(bounded(isa, self.beta, gate), sigmoid(isa, gate));
        isa.mul(gated, bounded(isa, self.linear_beta, up))
    }
}

/// `beta tanh(x / beta)`.
#[inline(always)]
fn bounded<S: Isa>(isa: S, beta: f32, x: S::F) -> S::F {
    let beta = isa.splat(beta);
    isa.mul(beta, tanh(isa, isa.div(x, beta)))
}

impl Kernels {
    fn map(self, map: impl Map, x: &mut [f32], y: &[f32]) {
        assert!(y.is_empty() || x.len() == y.len(), "two vectors of one length");
        self.run(InPlace { map, x, y });
    }

    /// `x[i] = e^x[i]`.
    pub fn exp(self, x: &mut [f32]) {
        self.map(Exp, x, &[]);
    }

    /// `x[i] = 1 / (1 + e^-x[i])`.
    pub fn sigmoid(self, x: &mut [f32]) {
        self.map(Sigmoid, x, &[]);
    }

    /// `x[i] = x[i] * sigmoid(x[i])`.
    pub fn silu(self, x: &mut [f32]) {
        self.map(Silu, x, &[]);
    }

    /// `x[i] = x[i] * sigmoid(gate[i])`.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn gate(self, x: &mut [f32], gate: &[f32]) {
        assert_eq!(x.len(), gate.len(), "one gate per value");
        self.map(Gate, x, gate);
    }

    /// SiTU-GLU: `gate[i] = b tanh(gate[i] / b) * sigmoid(gate[i]) * l tanh(up[i] / l)` with
    /// the two betas b and l.
    ///
    /// # Panics
    /// The lengths differ.
    pub fn situ_glu(self, situ: Situ, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len(), "as many gates as values");
        self.map(situ, gate, up);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Distance in units of the last place of `exact` rounded to f32.
    fn ulps(found: f32, exact: f64) -> f64 {
        let rounded = exact as f32;
        if found == rounded {
            return 0.0;
        }
        let ulp = (rounded.abs().next_up() - rounded.abs()).min(f32::MAX);
        (f64::from(found) - exact).abs() / f64::from(ulp)
    }

    /// Every 997th f32 bit pattern, both signs, all exponents, and both infinities.
    fn all_magnitudes() -> Vec<f32> {
        let mut x: Vec<f32> = (0..0x7f80_0000_u32).step_by(997).map(f32::from_bits).collect();
        x.extend([f32::INFINITY, f32::MAX, 88.722_84, 88.722_83, 103.972_08, 103.9]);
        let negative: Vec<f32> = x.iter().map(|x| -x).collect();
        x.extend(negative);
        x
    }

    fn assert_close(
        name: &str,
        f: impl Fn(Kernels, &mut [f32]),
        exact: impl Fn(f64) -> f64,
        limit: f64,
    ) {
        let inputs = all_magnitudes();
        for kernels in Kernels::available() {
            let mut out = inputs.clone();
            f(kernels, &mut out);
            let mut worst = (0.0, 0.0);
            for (&x, &y) in inputs.iter().zip(&out) {
                let error = ulps(y, exact(f64::from(x)));
                if error.is_nan() || error > worst.0 {
                    worst = (error, x);
                }
            }
            let set = kernels.name();
            assert!(worst.0 <= limit, "{set} {name}({}) is off by {} ulp", worst.1, worst.0);
            let mut nan = [f32::NAN; 3];
            f(kernels, &mut nan);
            assert!(nan.iter().all(|x| x.is_nan()), "{set} {name}(NaN) is NaN");
        }
    }

    #[test]
    fn exp_is_within_2_ulp() {
        assert_close("exp", Kernels::exp, f64::exp, 2.0);
    }

    #[test]
    fn sigmoid_is_within_3_ulp() {
        let exact =
            |x: f64| if x < 0.0 { x.exp() / (1.0 + x.exp()) } else { 1.0 / (1.0 + (-x).exp()) };
        assert_close("sigmoid", Kernels::sigmoid, exact, 3.0);
    }

    #[test]
    fn tanh_is_within_3_ulp() {
        #[derive(Clone, Copy)]
        struct Tanh;
        impl Map for Tanh {
            #[inline(always)]
            fn apply<S: Isa>(self, isa: S, x: S::F, _: S::F) -> S::F {
                tanh(isa, x)
            }
        }
        assert_close("tanh", |kernels, x| kernels.map(Tanh, x, &[]), f64::tanh, 3.0);
    }

    #[test]
    fn silu_gate_and_situ_follow_their_formulas() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let situ = Situ { beta: 4.0, linear_beta: 25.0 };
        for kernels in Kernels::available() {
            // 37 is no multiple of a vector's length.
            let gate: Vec<f32> = (0..37).map(|i| (i as f32 - 18.0) * 0.7).collect();
            let up: Vec<f32> = (0..37).map(|i| (20.0 - i as f32) * 3.1).collect();
            let (mut a, mut b, mut c) = (gate.clone(), up.clone(), gate.clone());
            kernels.silu(&mut a);
            kernels.gate(&mut b, &gate);
            kernels.situ_glu(situ, &mut c, &up);
            for i in 0..37 {
                let (g, u) = (f64::from(gate[i]), f64::from(up[i]));
                assert!(ulps(a[i], g * sigmoid(g)) <= 4.0, "silu({g})");
                assert!(ulps(b[i], u * sigmoid(g)) <= 4.0, "{u} gated by {g}");
                let exact = 4.0 * (g / 4.0).tanh() * sigmoid(g) * 25.0 * (u / 25.0).tanh();
                assert!(ulps(c[i], exact) <= 12.0, "situ({g}, {u})");
            }
        }
    }
}

//! One position's probabilities, from its logits.

/// Logits `[vocab]` and what normalizes them.
pub(super) struct Distribution<'l> {
    logits: &'l [f32],
    /// Logarithm of the sum of all exponentials.
    log_sum: f64,
    top: u32,
}

impl<'l> Distribution<'l> {
    /// `None` if a logit is not finite.
    pub(super) fn new(logits: &'l [f32]) -> Option<Self> {
        let mut top = 0;
        for (i, x) in logits.iter().enumerate() {
            if !x.is_finite() {
                return None;
            }
            // The first of equals, as greedy decoding takes it.
            if *x > logits[top] {
                top = i;
            }
        }
        let largest = f64::from(*logits.get(top)?);
        let sum: f64 = logits.iter().map(|&x| (f64::from(x) - largest).exp()).sum();
        Some(Self { logits, log_sum: largest + sum.ln(), top: top as u32 })
    }

    /// Negative logarithm of a token's probability.
    pub(super) fn loss(&self, token: u32) -> f64 {
        self.log_sum - f64::from(self.logits[token as usize])
    }

    /// The most likely token.
    pub(super) fn top(&self) -> u32 {
        self.top
    }

    /// `Σ p ln(p / q)`: what is lost by taking `other` (q) for this one (p). Never below 0
    /// but by rounding, which is cut off.
    pub(super) fn divergence_to(&self, other: &Distribution<'_>) -> f64 {
        let both = self.logits.iter().zip(other.logits);
        let sum: f64 = both
            .map(|(&p, &q)| {
                let (p, q) = (f64::from(p) - self.log_sum, f64::from(q) - other.log_sum);
                p.exp() * (p - q)
            })
            .sum();
        sum.max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_divergences_are_those_of_the_probabilities() {
        // Probabilities 1/2, 1/4, 1/4 and 1/4, 1/4, 1/2, shifted by anything.
        let ln2 = std::f32::consts::LN_2;
        let (p, q) = ([ln2 + 90.0, 90.0, 90.0], [-90.0, -90.0, ln2 - 90.0]);
        let (p, q) = (Distribution::new(&p).unwrap(), Distribution::new(&q).unwrap());
        assert!((p.loss(0) - 2_f64.ln()).abs() < 1e-5);
        assert!((q.loss(0) - 4_f64.ln()).abs() < 1e-5);
        // 1/2 ln 2 + 1/4 ln 1 + 1/4 ln 1/2
        assert!((p.divergence_to(&q) - 0.25 * 2_f64.ln()).abs() < 1e-5);
        assert!(p.divergence_to(&p) == 0.0);
        assert_eq!((p.top(), q.top()), (0, 2));
    }

    #[test]
    fn extremes_stay_finite_and_nan_is_told() {
        let p = Distribution::new(&[f32::MAX, f32::MIN, 0.0]).unwrap();
        assert_eq!((p.top(), p.loss(0)), (0, 0.0));
        assert!(p.loss(1).is_finite());
        assert_eq!(Distribution::new(&[1.0, 1.0]).unwrap().top(), 0);
        for bad in [f32::NAN, f32::INFINITY] {
            assert!(Distribution::new(&[0.0, bad]).is_none());
        }
        assert!(Distribution::new(&[]).is_none());
    }
}

//! What all windows say together, and how sure that is.

use serde::Serialize;

use super::{Surprise, Window, keep_worst};

/// A mean and the interval that holds the true one in 95 of 100 texts.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Estimate {
    /// The mean.
    pub value: f64,
    /// The interval; absent with fewer than two windows.
    pub interval: Option<(f64, f64)>,
}

impl Estimate {
    fn map(self, f: impl Fn(f64) -> f64) -> Self {
        let interval = self.interval.map(|(low, high)| (f(low), f(high)));
        Self { value: f(self.value), interval }
    }
}

/// Comparison with the other container.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Divergence {
    /// Its perplexity.
    pub perplexity: Estimate,
    /// This perplexity over its, on the same tokens: much surer than either.
    pub ratio: Estimate,
    /// Mean divergence from its distributions to these, in nats.
    pub kl: Estimate,
    /// Part of the tokens where both hold the same token most likely.
    pub same_top: Estimate,
}

/// The result of an evaluation.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Windows read.
    pub windows: usize,
    /// Tokens predicted.
    pub tokens: usize,
    /// Exponential of the mean loss.
    pub perplexity: Estimate,
    /// Present if there was another container.
    pub against: Option<Divergence>,
    /// The worst tokens, worst first: by divergence, or by loss where there is none.
    pub worst: Vec<Surprise>,
}

impl Summary {
    /// Of `windows`, which were compared with another container or not; with the `most`
    /// worst tokens.
    pub fn new(windows: &[Window], compared: bool, most: usize) -> Self {
        let mut worst = Vec::new();
        for surprise in windows.iter().flat_map(|w| &w.worst) {
            keep_worst(&mut worst, surprise.clone(), most);
        }
        let against = compared.then(|| Divergence {
            perplexity: mean(windows, |w| w.other_loss).map(f64::exp),
            ratio: mean(windows, |w| w.loss - w.other_loss).map(f64::exp),
            kl: mean(windows, |w| w.kl),
            same_top: mean(windows, |w| w.same_top as f64),
        });
        Self {
            windows: windows.len(),
            tokens: windows.iter().map(|w| w.tokens).sum(),
            perplexity: mean(windows, |w| w.loss).map(f64::exp),
            against,
            worst,
        }
    }
}

/// Mean over tokens of what `sum` adds up per window. Tokens of one window depend on each
/// other, so windows are the samples: the error of a ratio of sums.
fn mean(windows: &[Window], sum: impl Fn(&Window) -> f64) -> Estimate {
    let tokens: f64 = windows.iter().map(|w| w.tokens as f64).sum();
    let value = windows.iter().map(&sum).sum::<f64>() / tokens.max(1.0);
    let n = windows.len() as f64;
    let interval = (windows.len() > 1).then(|| {
        let off = |w: &Window| (sum(w) - value * w.tokens as f64).powi(2);
        let variance = windows.iter().map(off).sum::<f64>() * n / (n - 1.0);
        let half = 1.96 * variance.sqrt() / tokens.max(1.0);
        (value - half, value + half)
    });
    Estimate { value, interval }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_the_samples() {
        let window = |loss: f64| Window { tokens: 4, loss, ..Window::default() };
        let one = Summary::new(&[window(4.0)], false, 0);
        assert_eq!(one.perplexity, Estimate { value: 1_f64.exp(), interval: None });
        assert_eq!(one.against, None);
        // Means 1 and 2: standard error 1/2, by hand.
        let two = Summary::new(&[window(4.0), window(8.0)], false, 0);
        let (low, high) = two.perplexity.interval.unwrap();
        assert!((low.ln() - (1.5 - 1.96 * 0.5)).abs() < 1e-12, "{low}");
        assert!((high.ln() - (1.5 + 1.96 * 0.5)).abs() < 1e-12, "{high}");
    }

    #[test]
    fn the_worst_of_all_windows_come_first() {
        let surprise = |at, loss| Surprise { at, token: 0, loss, top: 0, against: None };
        let windows: Vec<_> = [[1.0, 5.0], [3.0, 2.0]]
            .iter()
            .enumerate()
            .map(|(i, losses)| {
                let mut window = Window::default();
                for (j, &loss) in losses.iter().enumerate() {
                    window.add(surprise(2 * i + j, loss), 2);
                }
                window
            })
            .collect();
        let summary = Summary::new(&windows, false, 3);
        let at: Vec<_> = summary.worst.iter().map(|s| s.at).collect();
        assert_eq!((at, summary.tokens), (vec![1, 2, 3], 4));
    }
}

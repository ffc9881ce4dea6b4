//! How well a container predicts a text, and how far it is from another one.
//!
//! The text is cut into windows of equal length, each read from an empty state, so that
//! windows are samples and can be done in any number of runs. Every token of a window but
//! the first is predicted. Logits are f32 as the engine gives them; what is made of them
//! here is f64.

use std::sync::atomic::AtomicBool;

use anyhow::bail;

use crate::engine::{Engine, Inputs, Run, Want};

mod distribution;
mod progress;
mod summary;

use distribution::Distribution;
pub use progress::Progress;
pub use summary::{Divergence, Estimate, Summary};

use serde::{Deserialize, Serialize};

/// A token the two containers disagree on, or the one predicted badly.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Surprise {
    /// Place in the text, in tokens.
    pub at: usize,
    /// The token there.
    pub token: u32,
    /// Negative natural logarithm of its probability.
    pub loss: f64,
    /// The token held most likely.
    pub top: u32,
    /// The same in the other container.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub against: Option<Against>,
}

impl Surprise {
    /// What makes it worse than others.
    fn badness(&self) -> f64 {
        self.against.as_ref().map_or(self.loss, |against| against.kl)
    }
}

/// One token by the other container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Against {
    /// Negative natural logarithm of the token's probability.
    pub loss: f64,
    /// Kullback-Leibler divergence from the other's distribution to this one's, in nats.
    pub kl: f64,
    /// The token held most likely.
    pub top: u32,
}

/// Sums over the predicted tokens of one window.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Window {
    /// Predicted tokens.
    pub tokens: usize,
    /// Sum of their losses.
    pub loss: f64,
    /// Sum of the other container's losses.
    pub other_loss: f64,
    /// Sum of divergences.
    pub kl: f64,
    /// Tokens where both hold the same token most likely.
    pub same_top: usize,
    /// The worst tokens, worst first.
    pub worst: Vec<Surprise>,
}

/// Reads windows with one container, or with two.
pub struct Evaluation<'e, 'a> {
    /// What is judged.
    pub engine: &'e mut Engine<'a>,
    /// What it is compared with.
    pub other: Option<&'e mut Engine<'a>>,
    /// Worst tokens to keep.
    pub worst: usize,
}

impl Evaluation<'_, '_> {
    /// Reads one window, whose first token is number `start` of the text. `each` is told the
    /// loss of every predicted token.
    ///
    /// # Errors
    /// A step fails, or logits are not finite.
    pub fn window(
        &mut self,
        ids: &[u32],
        start: usize,
        mut each: impl FnMut(f64) -> anyhow::Result<()>,
    ) -> anyhow::Result<Window> {
        let mut window = Window::default();
        // The last token is only predicted.
        let inputs = &ids[..ids.len().saturating_sub(1)];
        let mut state = self.engine.new_state(inputs.len());
        let mut other_state = self.other.as_ref().map(|other| other.new_state(inputs.len()));
        let chunk = self.other.as_ref().map_or(usize::MAX, |other| other.max_rows());
        let chunk = chunk.min(self.engine.max_rows());
        let cancel = AtomicBool::new(false);
        for (c, part) in inputs.chunks(chunk).enumerate() {
            let step = |engine: &mut Engine<'_>, state| -> anyhow::Result<Vec<f32>> {
                let mut run = [Run { state, rows: part.len(), want: Want::All }];
                Ok(engine.step(Inputs::Ids(part), &mut run, &cancel, None)?.to_vec())
            };
            let logits = step(self.engine, &mut state)?;
            let other = match (&mut self.other, &mut other_state) {
                (Some(other), Some(state)) => step(other, state)?,
                _ => Vec::new(),
            };
            let vocab = logits.len() / part.len();
            for row in 0..part.len() {
                let place = c * chunk + row + 1;
                let row = row * vocab..(row + 1) * vocab;
                let other = (!other.is_empty()).then(|| &other[row.clone()]);
                let surprise = judge(&logits[row], other, ids[place], start + place)?;
                each(surprise.loss)?;
                window.add(surprise, self.worst);
            }
        }
        Ok(window)
    }
}

fn judge(logits: &[f32], other: Option<&[f32]>, token: u32, at: usize) -> anyhow::Result<Surprise> {
    let of = |logits| match Distribution::new(logits) {
        Some(distribution) => Ok(distribution),
        None => bail!("the logits that predict token {at} of the text are not finite"),
    };
    let this = of(logits)?;
    let against = match other {
        None => None,
        Some(logits) => {
            let other = of(logits)?;
            let kl = other.divergence_to(&this);
            Some(Against { loss: other.loss(token), kl, top: other.top() })
        }
    };
    Ok(Surprise { at, token, loss: this.loss(token), top: this.top(), against })
}

impl Window {
    fn add(&mut self, surprise: Surprise, worst: usize) {
        self.tokens += 1;
        self.loss += surprise.loss;
        if let Some(against) = &surprise.against {
            self.other_loss += against.loss;
            self.kl += against.kl;
            self.same_top += usize::from(against.top == surprise.top);
        }
        keep_worst(&mut self.worst, surprise, worst);
    }
}

/// Puts `surprise` in its place in a list of at most `most`, worst first.
fn keep_worst(list: &mut Vec<Surprise>, surprise: Surprise, most: usize) {
    let place = list.partition_point(|kept| kept.badness() >= surprise.badness());
    if place < most {
        list.insert(place, surprise);
        list.truncate(most);
    }
}

//! From logits to the next token.
//!
//! The same logits, parameters and seed give the same tokens on every machine: sums run
//! in one fixed order in f64, and the exponential is our own, since those of the
//! platforms differ in the last bit. Steps, in this order:
//!
//! 1. repetition penalty (tokens of the prompt and of the reply), then frequency and
//!    presence penalties (tokens of the reply), then logit bias
//! 2. temperature; at 0 the highest logit wins, of equal ones the lowest id
//! 3. top-k, then top-p on what that leaves, then min-p
//! 4. one draw by the inverse of the cumulated weights
//!
//! A NaN counts as minus infinity. A step allocates nothing.

mod exp;
mod history;
mod params;
mod select;

use std::fmt;

use exp::{exp, ln};
use history::History;

pub use params::{InvalidParameter, MAX_TOP_LOGPROBS, SamplingParams};

/// Samples the tokens of one reply.
#[derive(Debug, Clone)]
pub struct Sampler {
    params: SamplingParams,
    vocab: usize,
    seed: u64,
    rng: fastrand::Rng,
    history: History,
    /// `[vocab]`: logits of this step after penalties and bias.
    logits: Vec<f32>,
    /// `[vocab]`: weights of this step, 1 for the highest logit.
    weights: Vec<f64>,
    /// Ids that may be drawn, or ids by log-probability.
    ids: Vec<u32>,
    top: Vec<TokenLogprob>,
}

/// A token and the natural logarithm of its probability.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogprob {
    pub id: u32,
    pub logprob: f64,
}

/// A step whose logits leave nothing to choose from: all are NaN or minus infinity.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NoCandidates;

impl fmt::Display for NoCandidates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no token can be chosen: every logit is NaN or minus infinity")
    }
}

impl std::error::Error for NoCandidates {}

impl Sampler {
    /// A sampler for logits of `vocab` tokens. Without a seed in `params` it picks one.
    ///
    /// # Errors
    /// A parameter outside its range, or a bias for a token outside the vocabulary.
    pub fn new(params: SamplingParams, vocab: usize) -> Result<Self, InvalidParameter> {
        params.check(vocab)?;
        let seed = params.seed.unwrap_or_else(|| fastrand::u64(..));
        Ok(Self {
            history: History::new(&params, vocab),
            params,
            vocab,
            seed,
            rng: fastrand::Rng::with_seed(seed),
            logits: Vec::with_capacity(vocab),
            weights: Vec::with_capacity(vocab),
            ids: Vec::with_capacity(vocab),
            top: Vec::with_capacity(MAX_TOP_LOGPROBS),
        })
    }

    /// The seed in use, to repeat the reply.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Counts the prompt's tokens for the repetition penalty.
    pub fn prompt(&mut self, ids: &[u32]) {
        ids.iter().for_each(|&id| self.history.add_prompt(id));
    }

    /// Counts a token of the reply for the penalties.
    pub fn accept(&mut self, id: u32) {
        self.history.add_reply(id);
    }

    /// Chooses the next token from `logits: [vocab]`. It is not counted: see [`Self::accept`].
    ///
    /// # Errors
    /// No logit is a number above minus infinity.
    ///
    /// # Panics
    /// `logits` has another length than the vocabulary: a mistake of the caller, not of data.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, NoCandidates> {
        assert_eq!(logits.len(), self.vocab, "one logit per token");
        self.logits.clear();
        self.logits.extend(logits.iter().copied().map(clean));
        self.history.apply(&self.params, &mut self.logits);
        for &(id, bias) in &self.params.logit_bias {
            self.logits[id as usize] += bias;
        }
        let best = best(&self.logits)?;
        if self.params.temperature == 0.0 {
            return Ok(best);
        }
        let highest = self.logits[best as usize];
        weigh(&self.logits, highest, self.params.temperature, &mut self.weights);
        let weights = &self.weights;
        let weight = |id: u32| (id, weights[id as usize]);
        let u = self.rng.f64();
        let drawn = if self.params.top_k > 0 || self.params.top_p < 1.0 {
            select::candidates(&self.params, &self.logits, weights, &mut self.ids);
            draw(u, self.ids.iter().map(|&id| weight(id)))
        } else {
            let min_p = self.params.min_p;
            draw(u, (0..self.vocab as u32).map(weight).filter(|&(_, weight)| weight >= min_p))
        };
        Ok(drawn.unwrap_or(best))
    }

    /// Log-probabilities of `chosen` and of the most probable tokens, as many as the
    /// parameters ask for, best first. They are of the model's own distribution: before
    /// penalties, bias and temperature. Minus infinity stands for a probability of 0.
    ///
    /// # Errors
    /// No logit is a number above minus infinity.
    ///
    /// # Panics
    /// As [`Self::sample`], or `chosen` is outside the vocabulary.
    pub fn logprobs(
        &mut self,
        logits: &[f32],
        chosen: u32,
    ) -> Result<(f64, &[TokenLogprob]), NoCandidates> {
        assert_eq!(logits.len(), self.vocab, "one logit per token");
        self.logits.clear();
        self.logits.extend(logits.iter().copied().map(clean));
        let logits = &self.logits;
        let highest = logits[best(logits)? as usize];
        weigh(logits, highest, 1.0, &mut self.weights);
        let log_sum = ln(self.weights.iter().sum());
        let logprob = |id: u32| f64::from(logits[id as usize]) - f64::from(highest) - log_sum;
        self.top.clear();
        if self.params.top_logprobs > 0 {
            select::best_of_all(self.params.top_logprobs, logits, &mut self.ids);
            self.top.extend(self.ids.iter().map(|&id| TokenLogprob { id, logprob: logprob(id) }));
        }
        Ok((logprob(chosen), &self.top))
    }
}

/// A logit that can be compared and subtracted: no NaN, no plus infinity.
fn clean(logit: f32) -> f32 {
    if logit.is_nan() { f32::NEG_INFINITY } else { logit.min(f32::MAX) }
}

/// Lowest id among those with the highest logit.
fn best(logits: &[f32]) -> Result<u32, NoCandidates> {
    let mut best = None;
    let mut highest = f32::NEG_INFINITY;
    for (id, &logit) in (0..).zip(logits) {
        if logit > highest {
            (best, highest) = (Some(id), logit);
        }
    }
    best.ok_or(NoCandidates)
}

/// `weights[i]` = e^((logits[i] - highest) / temperature).
fn weigh(logits: &[f32], highest: f32, temperature: f64, weights: &mut Vec<f64>) {
    let highest = f64::from(highest);
    weights.clear();
    weights.extend(logits.iter().map(|&logit| exp((f64::from(logit) - highest) / temperature)));
}

/// The first id at which the cumulated weights exceed the fraction `u` of their sum.
fn draw(u: f64, weights: impl Iterator<Item = (u32, f64)> + Clone) -> Option<u32> {
    let target = u * weights.clone().map(|(_, weight)| weight).sum::<f64>();
    let mut sum = 0.0;
    let mut last = None;
    for (id, weight) in weights {
        sum += weight;
        if sum > target {
            return Some(id);
        }
        if weight > 0.0 {
            last = Some(id);
        }
    }
    // Only when `u * sum` rounds up to the sum itself.
    last
}

#[cfg(test)]
mod tests;

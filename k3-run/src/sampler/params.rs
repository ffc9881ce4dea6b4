//! How to sample, and within which bounds.

use std::fmt;
use std::ops::RangeInclusive;

/// Most alternatives a log-probability request may ask for, as in OpenAI's API.
pub const MAX_TOP_LOGPROBS: usize = 20;

/// Parameters of sampling. At the values of [`SamplingParams::PLAIN`] each does nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct SamplingParams {
    /// 0 takes the best token, 1 samples the model's own distribution, more flattens it.
    pub temperature: f64,
    /// Only this many best tokens; 0 for all.
    pub top_k: usize,
    /// Only the best tokens that together reach this probability.
    pub top_p: f64,
    /// Only tokens with at least this fraction of the best one's probability.
    pub min_p: f64,
    /// Positive logits of tokens seen (prompt or reply) are divided by it, others multiplied.
    pub repetition_penalty: f64,
    /// Subtracted once from the logits of tokens in the reply.
    pub presence_penalty: f64,
    /// Subtracted for each time a token is in the reply.
    pub frequency_penalty: f64,
    /// Added to the logits of these tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Same seed, same choices; `None` for another one each time.
    pub seed: Option<u64>,
    /// How many alternatives [`super::Sampler::logprobs`] lists.
    pub top_logprobs: usize,
}

impl SamplingParams {
    /// The model's own distribution.
    pub const PLAIN: Self = Self {
        temperature: 1.0,
        top_k: 0,
        top_p: 1.0,
        min_p: 0.0,
        repetition_penalty: 1.0,
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        logit_bias: Vec::new(),
        seed: None,
        top_logprobs: 0,
    };

    /// Always the best token.
    pub const GREEDY: Self = {
        let mut params = Self::PLAIN;
        params.temperature = 0.0;
        params
    };

    /// What the vendor's own service fixes for this model: temperature 1, top-p 0.95.
    pub const RECOMMENDED: Self = {
        let mut params = Self::PLAIN;
        params.top_p = 0.95;
        params
    };

    pub(super) fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks the ranges, which are those of OpenAI's API where it has the parameter.
    ///
    /// # Errors
    /// The first parameter outside its range, or a bias for a token outside the vocabulary.
    pub fn check(&self, vocab: usize) -> Result<(), InvalidParameter> {
        within("temperature", self.temperature, 0.0..=2.0)?;
        within("top_p", self.top_p, 0.0..=1.0)?;
        within("min_p", self.min_p, 0.0..=1.0)?;
        within("repetition_penalty", self.repetition_penalty, 0.1..=10.0)?;
        within("presence_penalty", self.presence_penalty, -2.0..=2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0..=2.0)?;
        for &(id, bias) in &self.logit_bias {
            if id as usize >= vocab {
                return Err(InvalidParameter {
                    name: "logit_bias",
                    expected: format!("token ids below {vocab}"),
                    found: id.to_string(),
                });
            }
            within("logit_bias", f64::from(bias), -100.0..=100.0)?;
        }
        if self.top_logprobs > MAX_TOP_LOGPROBS {
            return Err(InvalidParameter {
                name: "top_logprobs",
                expected: format!("at most {MAX_TOP_LOGPROBS}"),
                found: self.top_logprobs.to_string(),
            });
        }
        Ok(())
    }
}

fn within(
    name: &'static str,
    value: f64,
    range: RangeInclusive<f64>,
) -> Result<(), InvalidParameter> {
    if range.contains(&value) {
        return Ok(());
    }
    let expected = format!("a number from {} to {}", range.start(), range.end());
    Err(InvalidParameter { name, expected, found: value.to_string() })
}

/// A sampling parameter outside its range.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidParameter {
    name: &'static str,
    expected: String,
    found: String,
}

impl InvalidParameter {
    /// The parameter, as OpenAI's API spells it.
    pub fn name(&self) -> &'static str {
        self.name
    }
}

impl fmt::Display for InvalidParameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: expected {}, found {}", self.name, self.expected, self.found)
    }
}

impl std::error::Error for InvalidParameter {}

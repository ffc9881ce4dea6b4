//! Which tokens were there before, for the penalties.

use super::params::SamplingParams;

/// Tokens of the prompt and of the reply.
#[derive(Debug, Clone)]
pub(super) struct History {
    /// `[vocab]`, or empty where no penalty asks: 0 for a token not seen, else 1 and how
    /// often it is in the reply.
    counts: Vec<u32>,
    /// Ids that were seen, each once.
    seen: Vec<u32>,
}

impl History {
    pub(super) fn new(params: &SamplingParams, vocab: usize) -> Self {
        let size = if params.has_penalties() { vocab } else { 0 };
        Self { counts: vec![0; size], seen: Vec::with_capacity(size) }
    }

    pub(super) fn add_prompt(&mut self, id: u32) {
        if let Some(count) = self.counts.get_mut(id as usize)
            && *count == 0
        {
            *count = 1;
            self.seen.push(id);
        }
    }

    pub(super) fn add_reply(&mut self, id: u32) {
        self.add_prompt(id);
        if let Some(count) = self.counts.get_mut(id as usize) {
            *count = count.saturating_add(1);
        }
    }

    /// Changes the logits of the tokens seen.
    pub(super) fn apply(&self, params: &SamplingParams, logits: &mut [f32]) {
        for &id in &self.seen {
            let logit = &mut logits[id as usize];
            let mut value = f64::from(*logit);
            if value > 0.0 {
                value /= params.repetition_penalty;
            } else {
                value *= params.repetition_penalty;
            }
            let in_reply = f64::from(self.counts[id as usize] - 1);
            if in_reply > 0.0 {
                value -= in_reply * params.frequency_penalty + params.presence_penalty;
            }
            *logit = (value as f32).min(f32::MAX);
        }
    }

    /// The buffer that grows with the reply, for the test that it does not.
    #[cfg(test)]
    pub(super) fn seen(&self) -> &[u32] {
        &self.seen
    }
}

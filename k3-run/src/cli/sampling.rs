//! How tokens are chosen.

use clap::Args;

use crate::sampler::SamplingParams;

/// How tokens are chosen.
#[derive(Debug, Args)]
pub struct SamplingArgs {
    /// 0 takes the most likely token, 1 samples as the model says. Default: 1 to chat, else 0.
    #[arg(long, value_name = "T", env = "COLI_TEMP")]
    temperature: Option<f64>,

    /// Keep the likeliest tokens whose probabilities add up to this. Default: 0.95 to chat,
    /// else 1.
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,

    /// Keep this many of the likeliest tokens (0: all).
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,

    /// Keep tokens at least this likely compared with the likeliest.
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f64,

    /// Makes all that is sampled repeatable. Default: different every time.
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// `usual` but for what the user said.
    pub fn params(&self, usual: SamplingParams) -> SamplingParams {
        SamplingParams {
            temperature: self.temperature.unwrap_or(usual.temperature),
            top_p: self.top_p.unwrap_or(usual.top_p),
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            ..usual
        }
    }
}

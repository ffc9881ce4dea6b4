//! JSON that several endpoints share.

use std::time::{SystemTime, UNIX_EPOCH};

use k3_formats::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::error::ApiError;
use super::generation::Finish;
use super::mailbox::Logprob;
use crate::chat::json::{Dialect, Json};
use crate::sampler::TokenLogprob;

/// Reads a request's body.
pub(super) fn parse(body: &[u8]) -> Result<Json, ApiError> {
    let text = std::str::from_utf8(body)
        .map_err(|e| ApiError::invalid("", format!("not UTF-8 at byte {}", e.valid_up_to())))?;
    Json::parse(text, Dialect::Strict).map_err(|e| ApiError::invalid("", e.to_string()))
}

/// Seconds since 1970.
#[expect(clippy::disallowed_methods, reason = "replies say when they were made")]
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// What every object of one reply begins with.
#[derive(Debug)]
pub(super) struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    /// Of request `number` of the process that chose `nonce`; `kind` is in front of the id.
    pub(super) fn new(kind: &str, nonce: u32, number: u64, model: &str) -> Self {
        let id = format!("{kind}-{nonce:08x}{number:08x}");
        Self { id, created: now(), model: model.to_owned() }
    }

    /// The part of the id that is this request's alone.
    pub(super) fn id_tail(&self) -> &str {
        self.id.rsplit('-').next().unwrap_or_default()
    }

    /// An object without choices.
    pub(super) fn object(&self, kind: &str) -> Value {
        json!({
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": concat!("k3-", env!("CARGO_PKG_VERSION")),
        })
    }
}

/// Token counts of a reply.
pub(super) fn usage(finish: &Finish) -> Value {
    json!({
        "prompt_tokens": finish.prompt_tokens,
        "completion_tokens": finish.completion_tokens,
        "total_tokens": finish.prompt_tokens + finish.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": finish.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finish.reasoning_tokens},
    })
}

/// JSON has no infinity; OpenAI writes -9999 for what cannot happen.
pub(super) fn finite(logprob: f64) -> f64 {
    logprob.max(-9999.0)
}

/// A token of the answer with its log-probability and those of others.
pub(super) fn logprob(tokenizer: &Tokenizer, token: &Logprob) -> Value {
    let value = |token: &TokenLogprob| {
        let bytes = tokenizer.token_bytes(token.id).unwrap_or_default();
        json!({
            "token": String::from_utf8_lossy(bytes), "bytes": bytes,
            "logprob": finite(token.logprob),
        })
    };
    let mut object = value(&token.token);
    object["top_logprobs"] = token.top.iter().map(value).collect();
    object
}

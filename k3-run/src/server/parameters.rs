//! What chat and text requests have in common.

use super::error::ApiError;
use super::generation::{Form, ReplyOptions};
use crate::chat::json::Json;
use crate::chat::{ChatError, Fields};
use crate::sampler::SamplingParams;

/// Most entries of a logit bias.
const MAX_BIASES: usize = 1024;

/// How the reply is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Delivery {
    /// As it comes, in events.
    pub(super) stream: bool,
    /// Whether a stream ends with token counts.
    pub(super) usage: bool,
}

impl Delivery {
    /// # Errors
    /// A field of the wrong type.
    pub(super) fn read(fields: &Fields<'_>) -> Result<Self, ApiError> {
        let options = fields.object("stream_options")?;
        let usage = options.map(|o| o.boolean("include_usage")).transpose()?.flatten();
        Ok(Self {
            stream: fields.boolean("stream")?.unwrap_or(false),
            usage: usage.unwrap_or(false),
        })
    }
}

/// Reads what a request says about its reply, which takes the form `form`. Where
/// log-probabilities are asked for differs: see the callers.
///
/// # Errors
/// A field of the wrong type, or something this server does not do.
pub(super) fn reply_options(fields: &Fields<'_>, form: Form) -> Result<ReplyOptions, ApiError> {
    for key in ["n", "best_of"] {
        if fields.integer(key)?.is_some_and(|n| n != 1) {
            let message = format!("{key}: only 1 is supported; send the request several times");
            return Err(ApiError::invalid(key, message));
        }
    }
    let number = |key: &str, default: f64| fields.number(key).map(|n| n.unwrap_or(default));
    let default = SamplingParams::RECOMMENDED;
    let sampling = SamplingParams {
        temperature: number("temperature", default.temperature)?,
        top_k: count(fields, "top_k")?.unwrap_or(default.top_k),
        top_p: number("top_p", default.top_p)?,
        min_p: number("min_p", default.min_p)?,
        repetition_penalty: number("repetition_penalty", default.repetition_penalty)?,
        presence_penalty: number("presence_penalty", default.presence_penalty)?,
        frequency_penalty: number("frequency_penalty", default.frequency_penalty)?,
        logit_bias: logit_bias(fields)?,
        seed: fields.integer("seed")?.map(i64::cast_unsigned),
        top_logprobs: 0,
    };
    let max_tokens = match count(fields, "max_completion_tokens")? {
        None => count(fields, "max_tokens")?,
        limit => limit,
    };
    if max_tokens == Some(0) {
        return Err(ApiError::invalid("max_tokens", "max_tokens: expected at least 1"));
    }
    Ok(ReplyOptions {
        sampling,
        stop: stop(fields)?,
        max_tokens,
        logprobs: false,
        parallel_calls: fields.boolean("parallel_tool_calls")?.unwrap_or(true),
        form,
    })
}

/// A whole number from 0 on.
pub(super) fn count(fields: &Fields<'_>, key: &str) -> Result<Option<usize>, ApiError> {
    let Some(number) = fields.integer(key)? else { return Ok(None) };
    // Some clients write -1 for "no limit".
    if number == -1 && key != "top_logprobs" {
        return Ok(None);
    }
    let count = usize::try_from(number).map_err(|_| {
        ApiError::invalid(key, format!("{key}: expected a whole number from 0 on, found {number}"))
    })?;
    Ok(Some(count))
}

fn stop(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    match fields.get("stop") {
        None => Ok(Vec::new()),
        Some(Json::String(text)) => Ok(vec![text.clone()]),
        Some(_) => {
            let items = fields.list("stop", crate::stop::MAX_STRINGS)?.unwrap_or_default();
            let text = |item: &Json| match item {
                Json::String(text) => Ok(text.clone()),
                other => Err(ChatError::expected("stop", "strings", other).into()),
            };
            items.iter().map(text).collect()
        }
    }
}

fn logit_bias(fields: &Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(biases) = fields.object("logit_bias")? else { return Ok(Vec::new()) };
    let Json::Object(members) = biases.value() else { return Ok(Vec::new()) };
    if members.len() > MAX_BIASES {
        return Err(ChatError::too_large("logit_bias", MAX_BIASES, "tokens").into());
    }
    let bias = |(key, _): &(String, Json)| {
        let id = key.parse().map_err(|_| {
            ApiError::invalid(
                "logit_bias",
                format!("logit_bias: expected a token id, found {key:?}"),
            )
        })?;
        Ok((id, biases.number(key)?.unwrap_or(0.0) as f32))
    };
    members.iter().map(bias).collect()
}

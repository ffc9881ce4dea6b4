//! `POST /v1/completions`: text goes on as the model would.

use axum::response::Response;
use k3_formats::tokenizer::{Specials, Tokenizer};
use serde_json::{Map, Value, json};

use super::App;
use super::error::ApiError;
use super::generation::{Finish, Form, ReplyOptions};
use super::mailbox::{Logprob, Update};
use super::parameters::{Delivery, count, reply_options};
use super::stream::Wire;
use super::wire::{Head, finite, usage};
use crate::chat::json::Json;
use crate::chat::{ChatError, Event, Fields};
use crate::sampler::TokenLogprob;

pub(super) async fn handle(app: App, body: axum::body::Bytes) -> Result<Response, ApiError> {
    let reader = app.clone();
    let (prompt, options, delivery) = tokio::task::spawn_blocking(move || {
        let value = super::wire::parse(&body)?;
        let fields = Fields::of(&value, "")?;
        let ids = prompt(&fields, reader.tokenizer())?;
        Ok::<_, ApiError>((ids, options(&fields)?, Delivery::read(&fields)?))
    })
    .await
    .map_err(|_| ApiError::internal())??;
    let logprobs = options.logprobs;
    let (number, reply) = app.submit(prompt, Vec::new(), options)?;
    let wire = TextWire {
        head: app.head("cmpl", number),
        app: app.clone(),
        usage: delivery.usage,
        logprobs: logprobs.then(Logprobs::default),
        text: String::new(),
        finish: None,
    };
    app.respond(reply, wire, delivery.stream).await
}

fn options(fields: &Fields<'_>) -> Result<ReplyOptions, ApiError> {
    for key in ["echo", "suffix"] {
        if fields.get(key).is_some_and(|v| *v != Json::Bool(false)) {
            return Err(ApiError::invalid(key, format!("{key}: not supported")));
        }
    }
    let mut options = reply_options(fields, Form::Text)?;
    // As in OpenAI's service: not all that fits.
    options.max_tokens = options.max_tokens.or(Some(16));
    if let Some(top) = count(fields, "logprobs")? {
        options.logprobs = true;
        options.sampling.top_logprobs = top;
    }
    Ok(options)
}

/// Text, in which control tokens count as such, or token ids; a list may hold one of them.
fn prompt(fields: &Fields<'_>, tokenizer: &Tokenizer) -> Result<Vec<u32>, ApiError> {
    let prompt = fields.get("prompt").ok_or_else(|| ChatError::missing("prompt", "text or ids"))?;
    let ids = match prompt {
        Json::Array(items) => match items.as_slice() {
            [Json::String(text)] => tokenizer.encode(text, Specials::Recognize),
            [Json::Array(ids)] => token_ids(ids, "prompt", tokenizer)?,
            [Json::String(_) | Json::Array(_), ..] => {
                return Err(ApiError::invalid("prompt", "prompt: only one is supported"));
            }
            ids => token_ids(ids, "prompt", tokenizer)?,
        },
        Json::String(text) => tokenizer.encode(text, Specials::Recognize),
        other => return Err(ChatError::expected("prompt", "text or token ids", other).into()),
    };
    if ids.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt: expected at least one token"));
    }
    Ok(ids)
}

/// Ids of the vocabulary.
pub(super) fn token_ids(
    items: &[Json],
    param: &str,
    tokenizer: &Tokenizer,
) -> Result<Vec<u32>, ApiError> {
    let vocab = tokenizer.vocab_size();
    let id = |item: &Json| {
        let id = match item {
            Json::Number(text) => text.parse().ok().filter(|&id: &u32| (id as usize) < vocab),
            _ => None,
        };
        id.ok_or_else(|| {
            ApiError::invalid(param, format!("{param}: expected token ids below {vocab}"))
        })
    };
    items.iter().map(id).collect()
}

/// OpenAI's older form of log-probabilities.
#[derive(Default)]
struct Logprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<f64>,
    top_logprobs: Vec<Value>,
    text_offset: Vec<usize>,
    offset: usize,
}

impl Logprobs {
    fn add(&mut self, tokenizer: &Tokenizer, token: &Logprob) {
        let text = |token: &TokenLogprob| tokenizer.decode(&[token.id]);
        let top: Map<String, Value> =
            token.top.iter().map(|t| (text(t), finite(t.logprob).into())).collect();
        let word = text(&token.token);
        self.text_offset.push(self.offset);
        self.offset += word.chars().count();
        self.tokens.push(word);
        self.token_logprobs.push(finite(token.token.logprob));
        self.top_logprobs.push(top.into());
    }

    fn take(&mut self) -> Value {
        if self.tokens.is_empty() {
            return Value::Null;
        }
        json!({
            "tokens": std::mem::take(&mut self.tokens),
            "token_logprobs": std::mem::take(&mut self.token_logprobs),
            "top_logprobs": std::mem::take(&mut self.top_logprobs),
            "text_offset": std::mem::take(&mut self.text_offset),
        })
    }
}

struct TextWire {
    app: App,
    head: Head,
    usage: bool,
    logprobs: Option<Logprobs>,
    text: String,
    finish: Option<Finish>,
}

impl TextWire {
    fn choice(&mut self, text: String, finish: Option<Finish>) -> Value {
        let mut object = self.head.object("text_completion");
        object["choices"] = json!([{
            "index": 0, "text": text,
            "logprobs": self.logprobs.as_mut().map_or(Value::Null, Logprobs::take),
            "finish_reason": finish.map(|f| f.reason.as_str()),
        }]);
        object
    }

    fn logprob(&mut self, token: &Logprob) {
        if let Some(logprobs) = &mut self.logprobs {
            logprobs.add(self.app.tokenizer(), token);
        }
    }
}

impl Wire for TextWire {
    fn chunks(&mut self, update: Update, chunks: &mut Vec<Value>) {
        match update {
            Update::Event(Event::Answer(text)) => chunks.push(self.choice(text, None)),
            Update::Logprob(token) => self.logprob(&token),
            Update::Finish(finish) => {
                let mut last = self.choice(String::new(), Some(finish));
                if self.usage {
                    last["usage"] = usage(&finish);
                }
                chunks.push(last);
            }
            Update::Event(_) | Update::Failed(_) => {}
        }
    }

    fn add(&mut self, update: Update) {
        match update {
            Update::Event(Event::Answer(text)) => self.text.push_str(&text),
            Update::Logprob(token) => self.logprob(&token),
            Update::Finish(finish) => self.finish = Some(finish),
            Update::Event(_) | Update::Failed(_) => {}
        }
    }

    fn body(&mut self) -> Value {
        let (text, finish) = (std::mem::take(&mut self.text), self.finish);
        let mut body = self.choice(text, finish);
        body["usage"] = finish.as_ref().map_or(Value::Null, usage);
        body
    }
}

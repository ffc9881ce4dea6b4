//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::response::Response;
use k3_formats::tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::generation::{Finish, Form, ReplyOptions};
use super::mailbox::{Logprob, Update};
use super::parameters::{Delivery, count, reply_options};
use super::stream::Wire;
use super::wire::{Head, logprob, usage};
use crate::chat::json::Json;
use crate::chat::xtml::{self, Prompt};
use crate::chat::{ChatRequest, Defaults, Event, Fields, Reply, Start};

pub(super) async fn handle(app: App, body: axum::body::Bytes) -> Result<Response, ApiError> {
    let reader = app.clone();
    let (prompt, turns, options, delivery) = tokio::task::spawn_blocking(move || {
        let value = super::wire::parse(&body)?;
        let fields = Fields::of(&value, "")?;
        let request = ChatRequest::from_value(&value, Defaults::PUBLISHED)?;
        let options = options(&fields, Start::of(request.thinking))?;
        let (ids, turns) = encode(reader.tokenizer(), &xtml::render(&request)?);
        Ok::<_, ApiError>((ids, turns, options, Delivery::read(&fields)?))
    })
    .await
    .map_err(|_| ApiError::internal())??;
    let logprobs = options.logprobs;
    let (number, reply) = app.submit(prompt, turns, options)?;
    let head = app.head("chatcmpl", number);
    let wire = ChatWire::new(head, app.tokenizer().clone(), delivery.usage, logprobs);
    app.respond(reply, wire, delivery.stream).await
}

fn options(fields: &Fields<'_>, start: Start) -> Result<ReplyOptions, ApiError> {
    let mut options = reply_options(fields, Form::Chat(start))?;
    options.logprobs = fields.boolean("logprobs")?.unwrap_or(false);
    if let Some(top) = count(fields, "top_logprobs")? {
        if !options.logprobs {
            let message = "top_logprobs: needs logprobs to be true";
            return Err(ApiError::invalid("top_logprobs", message));
        }
        options.sampling.top_logprobs = top;
    }
    Ok(options)
}

/// The prompt's ids, and the positions at which messages begin.
fn encode(tokenizer: &Tokenizer, prompt: &Prompt<'_>) -> (Vec<u32>, Vec<usize>) {
    let mut ids = Vec::new();
    let mut turns = Vec::new();
    let starts = prompt.turns().iter().map(|turn| turn.segments.start);
    let end = prompt.turns().last().map(|turn| turn.segments.end);
    let mut starts = starts.chain(end).peekable();
    for (i, segment) in prompt.segments().iter().enumerate() {
        if starts.next_if_eq(&i).is_some() {
            turns.push(ids.len());
        }
        ids.extend(tokenizer.encode(&segment.text, segment.specials));
    }
    (ids, turns)
}

/// The ids of a chat request, for `/v1/tokenize`.
pub(super) fn ids(tokenizer: &Tokenizer, value: &Json) -> Result<Vec<u32>, ApiError> {
    let request = ChatRequest::from_value(value, Defaults::PUBLISHED)?;
    Ok(xtml::render(&request)?.encode(tokenizer))
}

struct ChatWire {
    tokenizer: Arc<Tokenizer>,
    head: Head,
    usage: bool,
    /// Log-probabilities that no chunk has carried yet, if they are asked for.
    logprobs: Option<Vec<Value>>,
    begun: bool,
    reply: Reply,
    finish: Option<Finish>,
}

impl ChatWire {
    fn new(head: Head, tokenizer: Arc<Tokenizer>, usage: bool, logprobs: bool) -> Self {
        let logprobs = logprobs.then(Vec::new);
        Self {
            tokenizer,
            head,
            usage,
            logprobs,
            begun: false,
            reply: Reply::default(),
            finish: None,
        }
    }

    fn chunk(&mut self, delta: Value, finish: Option<Finish>) -> Value {
        let carries = finish.is_some() || delta.get("content").is_some_and(|c| c != "");
        let logprobs = match &mut self.logprobs {
            Some(tokens) if carries && !tokens.is_empty() => {
                json!({"content": std::mem::take(tokens), "refusal": null})
            }
            _ => Value::Null,
        };
        let choice = json!({
            "index": 0, "delta": delta, "logprobs": logprobs,
            "finish_reason": finish.map(|f| f.reason.as_str()),
        });
        let mut chunk = self.head.object("chat.completion.chunk");
        chunk["choices"] = json!([choice]);
        if self.usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }

    fn call_id(&self, index: usize) -> String {
        format!("call_{}_{index}", self.head.id_tail())
    }

    fn delta(&self, event: Event) -> Option<Value> {
        let call = |call: Value| Some(json!({"tool_calls": [call]}));
        match event {
            Event::Reasoning(text) => Some(json!({"reasoning_content": text})),
            Event::Answer(text) => Some(json!({"content": text})),
            Event::Call { index, name } => call(json!({
                "index": index, "id": self.call_id(index), "type": "function",
                "function": {"name": name, "arguments": ""},
            })),
            Event::Arguments { index, json } => {
                call(json!({"index": index, "function": {"arguments": json}}))
            }
            Event::CallEnd { .. } | Event::End => None,
        }
    }

    fn logprob(&mut self, token: &Logprob) {
        let value = logprob(&self.tokenizer, token);
        if let Some(tokens) = &mut self.logprobs {
            tokens.push(value);
        }
    }
}

impl Wire for ChatWire {
    fn chunks(&mut self, update: Update, chunks: &mut Vec<Value>) {
        if !self.begun {
            self.begun = true;
            chunks.push(self.chunk(json!({"role": "assistant", "content": ""}), None));
        }
        match update {
            Update::Event(event) => {
                if let Some(delta) = self.delta(event) {
                    chunks.push(self.chunk(delta, None));
                }
            }
            Update::Logprob(token) => self.logprob(&token),
            Update::Finish(finish) => {
                chunks.push(self.chunk(json!({}), Some(finish)));
                if self.usage {
                    let mut chunk = self.head.object("chat.completion.chunk");
                    chunk["choices"] = json!([]);
                    chunk["usage"] = usage(&finish);
                    chunks.push(chunk);
                }
            }
            Update::Failed(_) => {}
        }
    }

    fn add(&mut self, update: Update) {
        match update {
            Update::Event(event) => self.reply.add(&event),
            Update::Logprob(token) => self.logprob(&token),
            Update::Finish(finish) => self.finish = Some(finish),
            Update::Failed(_) => {}
        }
    }

    fn body(&mut self) -> Value {
        let reply = std::mem::take(&mut self.reply);
        let content = match reply.content {
            text if text.is_empty() && !reply.calls.is_empty() => Value::Null,
            text => text.into(),
        };
        let mut message = json!({"role": "assistant", "content": content, "refusal": null});
        if !reply.reasoning.is_empty() {
            message["reasoning_content"] = reply.reasoning.into();
        }
        if !reply.calls.is_empty() {
            let call = |(i, call): (usize, crate::chat::ReplyCall)| {
                let function = json!({"name": call.name, "arguments": call.arguments});
                json!({"id": self.call_id(i), "type": "function", "function": function})
            };
            message["tool_calls"] = reply.calls.into_iter().enumerate().map(call).collect();
        }
        let logprobs = match self.logprobs.take() {
            Some(tokens) => json!({"content": tokens, "refusal": null}),
            None => Value::Null,
        };
        let mut body = self.head.object("chat.completion");
        body["choices"] = json!([{
            "index": 0, "message": message, "logprobs": logprobs,
            "finish_reason": self.finish.map(|f| f.reason.as_str()),
        }]);
        body["usage"] = self.finish.as_ref().map_or(Value::Null, usage);
        body
    }
}

#[cfg(test)]
mod tests;

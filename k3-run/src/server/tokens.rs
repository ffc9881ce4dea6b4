//! `POST /v1/tokenize` and `/v1/detokenize`.

use axum::Json as Body;
use axum::body::Bytes;
use k3_formats::tokenizer::Specials;
use serde_json::{Value, json};

use super::App;
use super::error::ApiError;
use super::{chat_completions, completions, wire};
use crate::chat::{ChatError, Fields};

/// The ids of `text` (or `prompt`, or `content`), in which control tokens count as such
/// if `specials` is true; or of a chat request with `messages`.
pub(super) async fn tokenize(app: App, body: Bytes) -> Result<Body<Value>, ApiError> {
    let work = move || {
        let value = wire::parse(&body)?;
        let fields = Fields::of(&value, "")?;
        let ids = if fields.get("messages").is_some() {
            chat_completions::ids(app.tokenizer(), &value)?
        } else {
            let mut text = None;
            for key in ["text", "prompt", "content"] {
                text = text.or(fields.string(key)?);
            }
            let text = text.ok_or_else(|| ChatError::missing("text", "a string"))?;
            let specials = match fields.boolean("specials")? {
                Some(true) => Specials::Recognize,
                _ => Specials::Text,
            };
            app.tokenizer().encode(text, specials)
        };
        let (count, context) = (ids.len(), app.context());
        Ok(Body(json!({"tokens": ids, "count": count, "max_model_len": context})))
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal())?
}

/// The text of `tokens`.
pub(super) async fn detokenize(app: App, body: Bytes) -> Result<Body<Value>, ApiError> {
    let work = move || {
        let value = wire::parse(&body)?;
        let fields = Fields::of(&value, "")?;
        let bound = crate::chat::MAX_REQUEST_BYTES;
        let items = fields.list("tokens", bound)?;
        let items = items.ok_or_else(|| ChatError::missing("tokens", "a list of ids"))?;
        let ids = completions::token_ids(items, "tokens", app.tokenizer())?;
        let text = app.tokenizer().decode(&ids);
        Ok(Body(json!({"text": text, "prompt": text})))
    };
    tokio::task::spawn_blocking(work).await.map_err(|_| ApiError::internal())?
}

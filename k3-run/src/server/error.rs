//! What can go wrong with a request, in OpenAI's shape.

use axum::body::Body;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::chat::{ChatError, ChatErrorKind};
use crate::sampler::InvalidParameter;

/// An error as the client sees it. It never holds a file's path or a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ApiError {
    status: StatusCode,
    kind: &'static str,
    code: Option<&'static str>,
    param: Option<String>,
    message: String,
    /// Seconds after which to try again.
    retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, kind, code: None, param: None, message, retry_after: None }
    }

    /// Something about the request that the client can change.
    pub(super) fn invalid(param: &str, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message);
        Self { param: (!param.is_empty()).then(|| param.to_owned()), ..error }
    }

    /// A prompt that the context does not hold.
    pub(super) fn too_long(tokens: usize, context: usize) -> Self {
        let message = format!(
            "the prompt has {tokens} tokens, and a context of {context} must hold it and the reply"
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid("", message) }
    }

    /// A body over the bound.
    pub(super) fn too_large(bound: usize) -> Self {
        let message = format!("the request is longer than {bound} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message)
    }

    /// No key, or a wrong one.
    pub(super) fn unauthorized() -> Self {
        let message = "give the API key of this server: Authorization: Bearer KEY";
        let error = Self::new(StatusCode::UNAUTHORIZED, "invalid_request_error", message);
        Self { code: Some("invalid_api_key"), ..error }
    }

    /// A page or a host name that may not use this server.
    pub(super) fn forbidden(message: &str) -> Self {
        Self::new(StatusCode::FORBIDDEN, "invalid_request_error", message)
    }

    pub(super) fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", message)
    }

    pub(super) fn wrong_method() -> Self {
        let message = "this path does not take this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message)
    }

    /// The queue is full; a place may be free in so many seconds.
    pub(super) fn busy(retry_after: u64) -> Self {
        let message = "the queue is full, try again later";
        let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
        Self { code: Some("queue_full"), retry_after: Some(retry_after), ..error }
    }

    /// The server is about to end.
    pub(super) fn stopping() -> Self {
        let message = "the server is shutting down";
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message);
        Self { retry_after: Some(60), ..error }
    }

    /// Our own fault; what it was is on the server's stderr.
    pub(super) fn internal() -> Self {
        let message = "the model could not go on, the server's log says why";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// A step failed: our own fault, or that of the model's files.
    pub(super) fn step_failed(error: &anyhow::Error) -> Self {
        let missing = |e: &k3_formats::Error| e.kind() == k3_formats::ErrorKind::Missing;
        if !error.chain().any(|e| e.downcast_ref().is_some_and(missing)) {
            return Self::internal();
        }
        let message = "a file of the model is missing that this needs, the server's log says which";
        let error = Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message);
        Self { code: Some("model_incomplete"), ..error }
    }

    /// The body, also inside a stream.
    pub(super) fn body(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
        }})
    }
}

impl From<ChatError> for ApiError {
    fn from(error: ChatError) -> Self {
        let mut message = error.to_string();
        if let Some(hint) = error.hint_text() {
            message = format!("{message} ({hint})");
        }
        let invalid = Self::invalid(error.place(), message);
        if error.kind() == ChatErrorKind::TooLarge && error.place().is_empty() {
            return Self { status: StatusCode::PAYLOAD_TOO_LARGE, ..invalid };
        }
        invalid
    }
}

impl From<InvalidParameter> for ApiError {
    fn from(error: InvalidParameter) -> Self {
        Self::invalid(error.name(), error.to_string())
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = Response::builder()
            .status(self.status)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(seconds) = self.retry_after {
            response = response.header(header::RETRY_AFTER, seconds);
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response = response.header(header::WWW_AUTHENTICATE, "Bearer");
        }
        let body = Body::from(self.body().to_string());
        response.body(body).unwrap_or_else(|_| self.status.into_response())
    }
}

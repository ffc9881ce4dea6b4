//! Conversations: what a chat request is, how it becomes token ids, and how the model's
//! token ids become a message again.
//!
//! The way of the data: [`ChatRequest::from_json`] → [`xtml::render`] → [`xtml::encode`]
//! → the model → [`ReplyParser`] → [`Reply`]. All of it is a pure function of its input;
//! nothing here knows a terminal, a socket or a model.

mod arguments;
mod error;
mod file;
mod header;
pub mod json;
mod markup;
mod message;
mod parse;
mod recorded;
mod reply;
mod request;
mod tool_results;
pub mod xtml;

pub use error::{ChatError, ChatErrorKind};
pub use file::encode_file;
pub use json::Json;
pub use markup::{Markup, Piece};
pub use message::{Arguments, Content, Message, ToolCall};
pub use parse::{Channel, ReplyParser, Start};
pub use recorded::closed_reply;
pub use reply::{Event, Reply, ReplyCall};
pub(crate) use request::fields::Fields;
pub use request::{ChatRequest, Defaults, Effort, ResponseFormat, ToolChoice};

/// Longest request text in bytes: four times what fills the context of 1,048,576 tokens
/// with plain English.
pub const MAX_REQUEST_BYTES: usize = 16 << 20;
/// Most messages in one request.
pub const MAX_MESSAGES: usize = 1 << 16;
/// Most tools in one declaration, and most tool calls in one message.
pub const MAX_TOOLS: usize = 1024;
/// Longest name of a tool or a speaker in bytes.
pub const MAX_NAME_BYTES: usize = 256;

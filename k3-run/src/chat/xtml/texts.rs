//! The words of the protocol. The model was trained on these bytes.

use std::borrow::Cow;

use crate::chat::json::{Json, Separators};
use crate::chat::request::Effort;

pub(super) const OPEN: &str = "<|open|>";
pub(super) const CLOSE: &str = "<|close|>";
pub(super) const SEP: &str = "<|sep|>";
pub(super) const END_OF_MSG: &str = "<|end_of_msg|>";

pub(super) const TOOLS: &str =
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n";

pub(super) const NEW_TOOLS: &str = "## New Tools Available\n\
    The system dynamically extends the toolset via lazy-loading.\n\
    You have access to all existing and extended tools.\n\
    Here are the specs for the extended tools.\n\n";

pub(super) const CHOICE_REQUIRED: &str = "The system is invoked with `tool_choice=required`.\n\
    You MUST call tools in the next message.";

pub(super) const CHOICE_NONE: &str = "The system is invoked with `tool_choice=none`.\n\
    You MUST NOT call any tools in the next message.";

pub(super) const FORMAT_OBJECT: &str = "The system is invoked with `response_format=json_object`.\n\
    Your response must be raw JSON data without markdown code blocks (```json) or any \
    additional formatting.";

const FORMAT_SCHEMA: &str = "The system is invoked with `response_format=json_schema`.\n\
    Your response must be raw JSON data without markdown code blocks (```json) or any \
    additional formatting.\n\
    The JSON data must match the following schema:\n";

/// The thinking-effort notice.
pub(super) fn effort(effort: Effort) -> Cow<'static, str> {
    format!(
        "`thinking_effort` guides on how much to think in your thinking channel \
         (not including the response channel), supported values include \
         `low`, `medium`, `high`, and `max`.\n\
         Now the system is invoked with `thinking_effort={}`.",
        effort.as_str()
    )
    .into()
}

/// The response-format notice for a schema.
pub(super) fn format_schema(schema: &Json) -> Cow<'static, str> {
    format!("{FORMAT_SCHEMA}{}", fenced(&schema.sorted())).into()
}

/// A value as a fenced block of compact JSON.
pub(super) fn fenced(value: &Json) -> String {
    format!("```json\n{}\n```", value.dump(Separators::COMPACT))
}

/// An attribute value as it stands between quotes; `<` and `>` stay as they are.
pub(super) fn escaped(value: Cow<'_, str>) -> Cow<'_, str> {
    if value.contains(['&', '"']) {
        return value.replace('&', "&amp;").replace('"', "&quot;").into();
    }
    value
}

/// The `type` attribute of an argument.
pub(super) fn json_type(value: &Json) -> &'static str {
    match value {
        Json::Null => "null",
        Json::Bool(_) => "boolean",
        Json::Number(_) => "number",
        Json::String(_) => "string",
        Json::Array(_) => "array",
        Json::Object(_) => "object",
    }
}

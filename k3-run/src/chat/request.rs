//! A chat request in OpenAI's shape, checked once and typed from there on.

pub(crate) mod fields;
mod message;
mod thinking;

use super::error::{ChatError, ChatErrorKind};
use super::json::{Dialect, Json};
use super::message::Message;
use super::{MAX_MESSAGES, MAX_NAME_BYTES, MAX_REQUEST_BYTES, MAX_TOOLS};
use fields::Fields;

/// How hard the model is told to think.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effort {
    Low,
    High,
    Max,
}

impl Effort {
    /// The word the model was trained on.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Max => "max",
        }
    }

    /// Reads `low`, `high` or `max`.
    ///
    /// # Errors
    /// Any other word; `medium` is in the model's own text but not accepted by its encoder.
    pub fn parse(word: &str, place: &str) -> Result<Self, ChatError> {
        match word {
            "low" => Ok(Self::Low),
            "high" => Ok(Self::High),
            "max" => Ok(Self::Max),
            "medium" => {
                let problem =
                    "`medium` is not accepted by the encoder this model was released with";
                Err(ChatError::unsupported(place, problem).hint("use low, high, max or none"))
            }
            _ => Err(ChatError::unknown(place, "low, high, max or none", word)),
        }
    }
}

/// Which tools the next message must, may or must not call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls.
    None,
    /// At least one call.
    Required,
    /// A call of this tool. The protocol has no words for it: only this tool is declared,
    /// and a call is required.
    Named(String),
}

/// What the answer's text must be.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ResponseFormat {
    #[default]
    Text,
    JsonObject,
    /// JSON that matches this schema.
    JsonSchema(Json),
}

/// What holds when a request does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Defaults {
    /// Whether the model thinks before it answers.
    pub thinking: bool,
    /// The effort it is told of; `None` leaves the message out.
    pub effort: Option<Effort>,
}

impl Defaults {
    /// As the release's `apply_chat_template`: thinking with the highest effort.
    pub const PUBLISHED: Self = Self { thinking: true, effort: Some(Effort::Max) };
    /// As the release's encoder called alone: thinking, no word about effort.
    pub const ENCODER: Self = Self { thinking: true, effort: None };
}

/// A conversation and how to go on with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatRequest {
    /// The conversation so far.
    pub messages: Vec<Message>,
    /// Tools declared before the first message, in OpenAI's shape.
    pub tools: Vec<Json>,
    pub tool_choice: ToolChoice,
    pub response_format: ResponseFormat,
    /// Off drops the reasoning of all turns, past ones too.
    pub thinking: bool,
    /// Only said to the model while it thinks.
    pub effort: Option<Effort>,
    /// Whether the prompt ends inside a new assistant message.
    pub generation_prompt: bool,
}

impl ChatRequest {
    /// A plain conversation under `defaults`.
    pub fn new(messages: Vec<Message>, defaults: Defaults) -> Self {
        Self {
            messages,
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            thinking: defaults.thinking,
            effort: defaults.effort,
            generation_prompt: true,
        }
    }

    /// Reads a request body. Fields this runtime does not know are ignored; `null` counts as absent.
    ///
    /// Besides OpenAI's fields: `thinking` (a boolean, or `{"type": "enabled" | "disabled"}`),
    /// `effort` (`low`, `high`, `max`, or `none` for no effort message), `generation_prompt`,
    /// and `chat_template_kwargs` with `thinking`, `enable_thinking`, `thinking_effort`.
    /// `reasoning_effort: "none"` is OpenAI's word for no reasoning and turns thinking off.
    ///
    /// # Errors
    /// The first fault, with the path of its field.
    pub fn from_json(body: &[u8], defaults: Defaults) -> Result<Self, ChatError> {
        if body.len() > MAX_REQUEST_BYTES {
            return Err(ChatError::too_large("", MAX_REQUEST_BYTES, "bytes"));
        }
        let syntax = |problem: String| ChatError::new(ChatErrorKind::Syntax, "", problem);
        let text = std::str::from_utf8(body)
            .map_err(|e| syntax(format!("not UTF-8 at byte {}", e.valid_up_to())))?;
        let value = Json::parse(text, Dialect::Strict).map_err(|e| syntax(e.to_string()))?;
        Self::from_value(&value, defaults)
    }

    /// [`Self::from_json`] on a document that was read already.
    ///
    /// # Errors
    /// The first fault, with the path of its field.
    pub fn from_value(value: &Json, defaults: Defaults) -> Result<Self, ChatError> {
        let fields = Fields::of(value, "")?;
        let messages = fields.list("messages", MAX_MESSAGES)?.unwrap_or_default();
        if messages.is_empty() {
            return Err(ChatError::missing("messages", "at least one message"));
        }
        let messages = messages
            .iter()
            .enumerate()
            .map(|(i, message)| message::read(message, &format!("messages[{i}]")))
            .collect::<Result<Vec<_>, _>>()?;
        let tools = tools(&fields)?;
        let tool_choice = tool_choice(&fields)?;
        check_choice(&tool_choice, &tools, &messages)?;
        let (thinking, effort) = thinking::read(&fields, defaults)?;
        Ok(Self {
            messages,
            tools,
            tool_choice,
            response_format: response_format(&fields)?,
            thinking,
            effort,
            generation_prompt: fields.boolean("generation_prompt")?.unwrap_or(true),
        })
    }
}

/// Name of a declared tool, in OpenAI's shape or flat.
pub(super) fn tool_name(tool: &Json) -> Option<&str> {
    tool.get("function").unwrap_or(tool).get("name")?.as_str()
}

fn tools(fields: &Fields<'_>) -> Result<Vec<Json>, ChatError> {
    let tools = fields.list("tools", MAX_TOOLS)?.unwrap_or_default();
    for (i, tool) in tools.iter().enumerate() {
        let place = format!("{}[{i}]", fields.path("tools"));
        let tool = Fields::of(tool, &place)?;
        let function = tool.object("function")?.unwrap_or(tool);
        function.required_string("name", MAX_NAME_BYTES)?;
    }
    Ok(tools.to_vec())
}

fn tool_choice(fields: &Fields<'_>) -> Result<ToolChoice, ChatError> {
    const EXPECTED: &str = "auto, none, required or a function";
    let place = fields.path("tool_choice");
    match fields.get("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Json::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(ChatError::unknown(place, EXPECTED, word)),
        },
        Some(value @ Json::Object(_)) => {
            let choice = Fields::of(value, &place)?;
            if let Some(kind) = choice.string("type")?
                && kind != "function"
            {
                let problem = format!("tool choice of type {kind:?}");
                return Err(ChatError::unsupported(choice.path("type"), problem)
                    .hint("name one function, or use auto, none or required"));
            }
            let function = choice.object("function")?.unwrap_or(choice);
            Ok(ToolChoice::Named(function.required_string("name", MAX_NAME_BYTES)?.to_owned()))
        }
        Some(other) => Err(ChatError::expected(place, EXPECTED, other)),
    }
}

/// A call cannot be required of tools that are not there.
fn check_choice(
    choice: &ToolChoice,
    tools: &[Json],
    messages: &[Message],
) -> Result<(), ChatError> {
    let later = messages.iter().filter_map(|message| match message {
        Message::NewTools(tools) => Some(tools.as_slice()),
        _ => None,
    });
    let mut declared = tools.iter().chain(later.flatten()).filter_map(tool_name);
    let (found, problem) = match choice {
        ToolChoice::Auto | ToolChoice::None => return Ok(()),
        ToolChoice::Required => {
            (declared.next().is_some(), "a call is required but no tool declared".into())
        }
        ToolChoice::Named(name) => {
            (declared.any(|tool| tool == name), format!("no tool named {name:?} is declared"))
        }
    };
    if found { Ok(()) } else { Err(ChatError::new(ChatErrorKind::Invalid, "tool_choice", problem)) }
}

fn response_format(fields: &Fields<'_>) -> Result<ResponseFormat, ChatError> {
    let place = fields.path("response_format");
    let (kind, format) = match fields.get("response_format") {
        None => return Ok(ResponseFormat::Text),
        Some(Json::String(kind)) => (kind.as_str(), None),
        Some(value) => {
            let format = Fields::of(value, &place)?;
            (format.required_string("type", MAX_NAME_BYTES)?, Some(format))
        }
    };
    match kind {
        "text" => Ok(ResponseFormat::Text),
        "json_object" => Ok(ResponseFormat::JsonObject),
        "json_schema" => {
            let missing = || ChatError::missing(format!("{place}.json_schema"), "an object");
            let outer = format.ok_or_else(missing)?.object("json_schema")?.ok_or_else(missing)?;
            // The release's encoder looks for the schema at these three places.
            let schema =
                outer.get("schema").or_else(|| outer.get("json_schema")).unwrap_or(outer.value());
            Ok(ResponseFormat::JsonSchema(schema.clone()))
        }
        _ => Err(ChatError::unknown(
            format!("{place}.type"),
            "text, json_object or json_schema",
            kind,
        )),
    }
}

#[cfg(test)]
mod tests;

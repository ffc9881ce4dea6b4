//! One message of a request.

use super::fields::Fields;
use crate::chat::error::{ChatError, ChatErrorKind};
use crate::chat::json::Json;
use crate::chat::message::{Arguments, Content, Message, ToolCall};
use crate::chat::{MAX_MESSAGES, MAX_NAME_BYTES, MAX_TOOLS};

/// Longest `tool_call_id`; the ids are opaque and usually under 40 bytes.
const MAX_ID_BYTES: usize = 1024;

pub(super) fn read(message: &Json, place: &str) -> Result<Message, ChatError> {
    let fields = Fields::of(message, place)?;
    let name = || Ok(fields.name("name", MAX_NAME_BYTES)?.map(str::to_owned));
    match fields.required_string("role", MAX_NAME_BYTES)? {
        // `developer` is OpenAI's newer word for the same role.
        "system" | "developer" => {
            let (content, tools) = (content(&fields)?, super::tools(&fields)?);
            if tools.is_empty() {
                return Ok(Message::System { content, name: name()? });
            }
            if !content.is_empty() {
                // The release's encoder would drop the text without a word.
                let problem = "a system message that declares tools has no text of its own";
                return Err(ChatError::unsupported(fields.path("content"), problem)
                    .hint("put the text into a system message without tools"));
            }
            Ok(Message::NewTools(tools))
        }
        "user" => Ok(Message::User { content: content(&fields)?, name: name()? }),
        "assistant" => Ok(Message::Assistant {
            content: content(&fields)?,
            reasoning: reasoning(&fields)?.to_owned(),
            tool_calls: tool_calls(&fields)?,
            name: name()?,
        }),
        "tool" => {
            let call_id = match fields.name("tool_call_id", MAX_ID_BYTES)? {
                None => fields.name("id", MAX_ID_BYTES)?,
                given => given,
            };
            let name = match fields.name("tool", MAX_NAME_BYTES)? {
                None => fields.name("name", MAX_NAME_BYTES)?,
                given => given,
            };
            Ok(Message::ToolResult {
                content: content(&fields)?,
                call_id: call_id.map(str::to_owned),
                name: name.map(str::to_owned),
            })
        }
        role => Err(ChatError::unknown(
            fields.path("role"),
            "system, developer, user, assistant or tool",
            role,
        )),
    }
}

/// `reasoning_content`, or `reasoning` where that is empty.
fn reasoning<'a>(fields: &Fields<'a>) -> Result<&'a str, ChatError> {
    let first = fields.string("reasoning_content")?.unwrap_or_default();
    let second = fields.string("reasoning")?.unwrap_or_default();
    Ok(if first.is_empty() { second } else { first })
}

/// A string, or a list of parts of which each is text.
fn content(fields: &Fields<'_>) -> Result<Content, ChatError> {
    let place = fields.path("content");
    let parts = match fields.get("content") {
        None => return Ok(Content::default()),
        Some(Json::String(text)) => return Ok(text.as_str().into()),
        Some(Json::Array(_)) => fields.list("content", MAX_MESSAGES)?.unwrap_or_default(),
        Some(other) => {
            return Err(ChatError::expected(place, "a string or a list of parts", other));
        }
    };
    let parts = parts.iter().enumerate().map(|(i, part)| {
        let part = Fields::of(part, &format!("{place}[{i}]"))?;
        match part.required_string("type", MAX_NAME_BYTES)? {
            "text" => {
                let text = part.string("text")?;
                let text = text.ok_or_else(|| ChatError::missing(part.path("text"), "a string"))?;
                Ok(text.to_owned())
            }
            "image_url" | "image" | "input_image" => {
                let problem = "images are not supported: the vision tower is not converted";
                Err(ChatError::unsupported(part.path("type"), problem).hint("send text parts only"))
            }
            kind => {
                let kind: String = kind.chars().take(40).collect();
                let problem = format!("content parts of type {kind:?} are not supported");
                Err(ChatError::unsupported(part.path("type"), problem).hint("send text parts only"))
            }
        }
    });
    Ok(Content(parts.collect::<Result<_, _>>()?))
}

fn tool_calls(fields: &Fields<'_>) -> Result<Vec<ToolCall>, ChatError> {
    if fields.get("function_call").is_some() {
        let problem = "the old form of a tool call";
        return Err(ChatError::unsupported(fields.path("function_call"), problem)
            .hint("send tool_calls instead"));
    }
    let calls = fields.list("tool_calls", MAX_TOOLS)?.unwrap_or_default();
    let read = |(i, call)| {
        let call = Fields::of(call, &format!("{}[{i}]", fields.path("tool_calls")))?;
        let id = call.name("id", MAX_ID_BYTES)?.map(str::to_owned);
        let function = call.object("function")?.unwrap_or(call);
        Ok(ToolCall {
            id,
            name: function.required_string("name", MAX_NAME_BYTES)?.to_owned(),
            arguments: arguments(&function)?,
        })
    };
    calls.iter().enumerate().map(read).collect()
}

fn arguments(function: &Fields<'_>) -> Result<Arguments, ChatError> {
    const EXPECTED: &str = "an object or the text of one";
    let place = function.path("arguments");
    match function.get("arguments") {
        None => Ok(Arguments::Object(Vec::new())),
        Some(Json::Object(members)) => Ok(Arguments::Object(members.clone())),
        Some(Json::String(text)) => Arguments::parse(text).map_err(|found| {
            let problem = format!("expected the text of a JSON object, found {}", found.kind());
            ChatError::new(ChatErrorKind::Invalid, place, problem)
        }),
        Some(other) => Err(ChatError::expected(place, EXPECTED, other)),
    }
}

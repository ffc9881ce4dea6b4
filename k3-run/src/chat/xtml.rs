//! The release's prompt format: a conversation as a list of segments.
//!
//! Every segment is encoded on its own, and only the markers that this module writes are
//! looked at for control tokens. So text from outside can never open or end a message,
//! and ids depend on where segments are cut: joining two of them gives another prompt.

mod texts;

use std::borrow::Cow;
use std::ops::Range;

use k3_formats::tokenizer::{Specials, Tokenizer};

use super::error::ChatError;
use super::json::{Json, Separators};
use super::message::{Arguments, Content, Message, ToolCall, is_blank};
use super::request::{ChatRequest, ResponseFormat, ToolChoice, tool_name};
use super::tool_results::{self, Placed};

/// Text that is encoded on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment<'a> {
    pub text: Cow<'a, str>,
    pub specials: Specials,
}

/// A rendered conversation.
#[derive(Debug, Clone)]
pub struct Prompt<'a> {
    segments: Vec<Segment<'a>>,
    turns: Vec<Turn>,
}

/// Where a message of the request stands in the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// Position of the message in the request; tool results may be out of order.
    pub message: usize,
    /// Its segments, from the marker that opens it to the one that ends it.
    pub segments: Range<usize>,
}

impl Prompt<'_> {
    /// All segments in order.
    pub fn segments(&self) -> &[Segment<'_>] {
        &self.segments
    }

    /// The messages of the request in the order of the prompt. What lies between and around
    /// them declares tools, effort, tool choice or format, or opens the answer.
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// The prompt's token ids.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        encode(tokenizer, &self.segments)
    }

    /// The prompt's token ids, with `recorded(message)` in place of a message's own encoding.
    ///
    /// A model may spell its answer in other tokens than the encoder would. A session that
    /// keeps the ids it sampled gives them back here, and its state stays a prefix.
    pub fn encode_with<'r>(
        &self,
        tokenizer: &Tokenizer,
        mut recorded: impl FnMut(usize) -> Option<&'r [u32]>,
    ) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut at = 0;
        for turn in &self.turns {
            if let Some(known) = recorded(turn.message) {
                ids.extend(encode(tokenizer, &self.segments[at..turn.segments.start]));
                ids.extend_from_slice(known);
                at = turn.segments.end;
            }
        }
        ids.extend(encode(tokenizer, &self.segments[at..]));
        ids
    }
}

/// Token ids of segments, each encoded on its own.
pub fn encode(tokenizer: &Tokenizer, segments: &[Segment<'_>]) -> Vec<u32> {
    segments.iter().flat_map(|s| tokenizer.encode(&s.text, s.specials)).collect()
}

/// Renders a request: tools, effort, messages, tool choice, format, and the open answer.
///
/// # Errors
/// A tool result whose tool cannot be told.
pub fn render(request: &ChatRequest) -> Result<Prompt<'_>, ChatError> {
    let mut writer = Writer::default();
    writer.declaration(texts::TOOLS, &request.tools, &request.tool_choice);
    if let Some(effort) = request.effort
        && request.thinking
    {
        writer.notice("thinking-effort", texts::effort(effort));
    }
    let mut turns = Vec::with_capacity(request.messages.len());
    for placed in tool_results::place(&request.messages)? {
        let start = writer.segments.len();
        writer.message(request, &placed);
        turns.push(Turn { message: placed.message, segments: start..writer.segments.len() });
    }
    match request.tool_choice {
        ToolChoice::Auto => {}
        ToolChoice::None => writer.notice("tool-choice", texts::CHOICE_NONE.into()),
        ToolChoice::Required | ToolChoice::Named(_) => {
            writer.notice("tool-choice", texts::CHOICE_REQUIRED.into());
        }
    }
    match &request.response_format {
        ResponseFormat::Text => {}
        ResponseFormat::JsonObject => writer.notice("response-format", texts::FORMAT_OBJECT.into()),
        ResponseFormat::JsonSchema(schema) => {
            writer.notice("response-format", texts::format_schema(schema));
        }
    }
    if request.generation_prompt {
        writer.open_message("assistant", None);
        writer.open(if request.thinking { "think" } else { "response" });
    }
    Ok(Prompt { segments: writer.segments, turns })
}

#[derive(Default)]
struct Writer<'a> {
    segments: Vec<Segment<'a>>,
}

impl<'a> Writer<'a> {
    fn push(&mut self, text: impl Into<Cow<'a, str>>, specials: Specials) {
        let text = text.into();
        if !text.is_empty() {
            self.segments.push(Segment { text, specials });
        }
    }

    fn text(&mut self, text: impl Into<Cow<'a, str>>) {
        self.push(text, Specials::Text);
    }

    fn marker(&mut self, marker: &'static str) {
        self.push(marker, Specials::Recognize);
    }

    /// A tag without attributes.
    fn open(&mut self, tag: &'static str) {
        self.begin(tag);
        self.marker(texts::SEP);
    }

    /// Begins a tag; attributes and then the separator follow.
    fn begin(&mut self, tag: &'static str) {
        self.marker(texts::OPEN);
        self.text(tag);
    }

    fn attribute(&mut self, key: &'static str, value: impl Into<Cow<'a, str>>) {
        self.text(key);
        self.text("=\"");
        self.text(texts::escaped(value.into()));
        self.text("\"");
    }

    fn close(&mut self, tag: &'static str) {
        self.marker(texts::CLOSE);
        self.text(tag);
        self.marker(texts::SEP);
    }

    fn end_message(&mut self) {
        self.close("message");
        self.marker(texts::END_OF_MSG);
    }

    /// A system message of the protocol itself.
    fn notice(&mut self, kind: &'static str, text: Cow<'a, str>) {
        self.begin("message");
        self.attribute(" role", "system");
        self.attribute(" type", kind);
        self.marker(texts::SEP);
        self.text(text);
        self.end_message();
    }

    /// Declares tools under `heading`: all, or only the one that must be called.
    fn declaration(&mut self, heading: &str, tools: &[Json], choice: &ToolChoice) {
        let wanted = |tool: &&Json| match choice {
            ToolChoice::Named(name) => tool_name(tool) == Some(name),
            _ => true,
        };
        let tools: Vec<Json> = tools.iter().filter(wanted).map(Json::sorted).collect();
        if !tools.is_empty() {
            let block = texts::fenced(&Json::Array(tools));
            self.notice("tool-declare", format!("{heading}{block}").into());
        }
    }

    fn message(&mut self, request: &'a ChatRequest, placed: &Placed<'a>) {
        match &request.messages[placed.message] {
            Message::System { content, name } => self.plain("system", name.as_deref(), content),
            Message::User { content, name } => self.plain("user", name.as_deref(), content),
            Message::NewTools(tools) => {
                self.declaration(texts::NEW_TOOLS, tools, &request.tool_choice);
            }
            Message::ToolResult { content, .. } => {
                if let Some((name, number)) = placed.result {
                    self.tool_result(name, number, content);
                }
            }
            Message::Assistant { content, reasoning, tool_calls, name } => {
                self.open_message("assistant", name.as_deref());
                if request.thinking {
                    self.open("think");
                    if !is_blank(reasoning) {
                        self.text(reasoning);
                    }
                    self.close("think");
                }
                self.open("response");
                self.content(content);
                self.close("response");
                self.tool_calls(tool_calls);
                self.end_message();
            }
        }
    }

    fn open_message(&mut self, role: &'static str, name: Option<&'a str>) {
        self.begin("message");
        self.attribute(" role", role);
        if let Some(name) = name {
            self.attribute(" name", name);
        }
        self.marker(texts::SEP);
    }

    fn plain(&mut self, role: &'static str, name: Option<&'a str>, content: &'a Content) {
        self.open_message(role, name);
        self.content(content);
        self.end_message();
    }

    fn content(&mut self, content: &'a Content) {
        for part in &content.0 {
            self.text(part);
        }
    }

    fn tool_result(&mut self, name: &'a str, number: usize, content: &'a Content) {
        self.begin("message");
        self.attribute(" role", "tool");
        self.attribute(" tool", name);
        self.attribute(" index", number.to_string());
        self.marker(texts::SEP);
        self.content(content);
        self.end_message();
    }

    fn tool_calls(&mut self, calls: &'a [ToolCall]) {
        if calls.is_empty() {
            return;
        }
        self.open("tools");
        for (i, call) in calls.iter().enumerate() {
            self.begin("call");
            self.attribute(" tool", &call.name);
            self.attribute(" index", (i + 1).to_string());
            self.marker(texts::SEP);
            match &call.arguments {
                Arguments::Object(members) => {
                    for (key, value) in members {
                        self.begin("argument");
                        self.attribute(" key", key);
                        self.attribute(" type", texts::json_type(value));
                        self.marker(texts::SEP);
                        match value {
                            Json::String(text) => self.text(text),
                            other => self.text(other.dump(Separators::SPACED)),
                        }
                        self.close("argument");
                    }
                }
                Arguments::Raw(text) => {
                    self.begin("json");
                    self.attribute(" type", "object");
                    self.marker(texts::SEP);
                    self.text(text);
                    self.close("json");
                }
            }
            self.close("call");
        }
        self.close("tools");
    }
}

#[cfg(test)]
mod tests;

//! What a reply says, in pieces and as a whole.

use super::message::{Arguments, Content, Message, ToolCall};

/// Something a reply said, as soon as it is certain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// More of the reasoning.
    Reasoning(String),
    /// More of the answer.
    Answer(String),
    /// A tool call begins. Calls are numbered from 0 and never overlap.
    Call { index: usize, name: String },
    /// More of a call's arguments: the pieces joined are the text of a JSON object.
    Arguments { index: usize, json: String },
    /// The call is complete. A call without this event was cut off and must not be run.
    CallEnd { index: usize },
    /// The reply ended by itself.
    End,
}

/// A whole reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    pub reasoning: String,
    pub content: String,
    pub calls: Vec<ReplyCall>,
    /// Whether the model ended it, rather than a limit.
    pub ended: bool,
}

/// A tool call of a reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReplyCall {
    pub name: String,
    /// OpenAI's arguments text.
    pub arguments: String,
    /// Whether it is all there. Half a call must not be run.
    pub complete: bool,
}

impl Reply {
    /// Adds one event.
    pub fn add(&mut self, event: &Event) {
        match event {
            Event::Reasoning(text) => self.reasoning.push_str(text),
            Event::Answer(text) => self.content.push_str(text),
            Event::Call { name, .. } => {
                self.calls.push(ReplyCall { name: name.clone(), ..ReplyCall::default() });
            }
            Event::Arguments { index, json } => {
                if let Some(call) = self.calls.get_mut(*index) {
                    call.arguments.push_str(json);
                }
            }
            Event::CallEnd { index } => {
                if let Some(call) = self.calls.get_mut(*index) {
                    call.complete = true;
                }
            }
            Event::End => self.ended = true,
        }
    }

    /// The message for the next request; `id` gives each call its id.
    pub fn into_message(self, mut id: impl FnMut(usize) -> String) -> Message {
        let call = |(i, call): (usize, ReplyCall)| ToolCall {
            id: Some(id(i)),
            name: call.name,
            // JSON that is no object can only have come from a `json` element; it goes back as one.
            arguments: Arguments::parse(&call.arguments).unwrap_or(Arguments::Raw(call.arguments)),
        };
        Message::Assistant {
            content: Content::from(self.content),
            reasoning: self.reasoning,
            tool_calls: self.calls.into_iter().enumerate().map(call).collect(),
            name: None,
        }
    }
}

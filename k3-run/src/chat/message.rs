//! The messages of a conversation.

use super::json::{Dialect, Json, Separators};

/// Text of a message as its list of parts.
///
/// Parts stay apart: each is encoded on its own, so `["One. ", "Two."]` and
/// `["One. Two."]` are different prompts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Content(pub Vec<String>);

impl Content {
    /// All parts joined, as a reader sees them.
    pub fn text(&self) -> String {
        self.0.concat()
    }

    /// Whether there is nothing to encode.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(String::is_empty)
    }
}

impl From<String> for Content {
    fn from(text: String) -> Self {
        Self(vec![text])
    }
}

impl From<&str> for Content {
    fn from(text: &str) -> Self {
        Self(vec![text.to_owned()])
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Instructions.
    System { content: Content, name: Option<String> },
    /// Tools that join the conversation here.
    NewTools(Vec<Json>),
    /// What a person says.
    User { content: Content, name: Option<String> },
    /// What the model said. `reasoning` is empty where there was none.
    Assistant {
        content: Content,
        reasoning: String,
        tool_calls: Vec<ToolCall>,
        name: Option<String>,
    },
    /// What a tool answered. Without `name` the call it answers gives the name.
    ToolResult { content: Content, call_id: Option<String>, name: Option<String> },
}

impl Message {
    /// A system message without a name.
    pub fn system(content: impl Into<Content>) -> Self {
        Self::System { content: content.into(), name: None }
    }

    /// A user message without a name.
    pub fn user(content: impl Into<Content>) -> Self {
        Self::User { content: content.into(), name: None }
    }

    /// The result of the tool call with this id.
    pub fn tool_result(call_id: impl Into<String>, content: impl Into<Content>) -> Self {
        Self::ToolResult { content: content.into(), call_id: Some(call_id.into()), name: None }
    }
}

/// A call of a tool by the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The opaque id that the result refers to.
    pub id: Option<String>,
    /// Name of the tool.
    pub name: String,
    /// What it is called with.
    pub arguments: Arguments,
}

/// Arguments of a tool call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arguments {
    /// Members of a JSON object in their given order.
    Object(Vec<(String, Json)>),
    /// Text that should have been a JSON object and is no JSON; it goes through unchanged.
    Raw(String),
}

impl Arguments {
    /// Reads OpenAI's arguments string. Blank text means no arguments.
    ///
    /// # Errors
    /// Valid JSON that is not an object, which no tool can be called with.
    pub fn parse(text: &str) -> Result<Self, Json> {
        if is_blank(text) {
            return Ok(Self::Object(Vec::new()));
        }
        match Json::parse(text, Dialect::Python) {
            Ok(Json::Object(members)) => Ok(Self::Object(members)),
            Ok(other) => Err(other),
            Err(_) => Ok(Self::Raw(text.to_owned())),
        }
    }

    /// The text for OpenAI's `arguments` field.
    pub fn to_text(&self) -> String {
        match self {
            Self::Object(members) => Json::Object(members.clone()).dump(Separators::SPACED),
            Self::Raw(text) => text.clone(),
        }
    }
}

/// Whether Python's `text.strip()` leaves nothing: Unicode white space, and U+001C..U+001F.
pub(super) fn is_blank(text: &str) -> bool {
    text.chars().all(|c| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_follow_what_pythons_json_reads() {
        let object = |text: &str| Arguments::parse(text).map(|arguments| arguments.to_text());
        assert_eq!(object(" \n\u{1c}").as_deref(), Ok("{}"));
        assert_eq!(
            object(r#"{"b":1,"a":[1.0,1e-7]}"#).as_deref(),
            Ok(r#"{"b": 1, "a": [1.0, 1e-07]}"#)
        );
        assert_eq!(object("{oops"), Ok("{oops".into()));
        assert_eq!(Arguments::parse("{oops"), Ok(Arguments::Raw("{oops".into())));
        assert_eq!(object("null"), Err(Json::Null));
        assert_eq!(object("[1]"), Err(Json::Array(vec![Json::Number("1".into())])));
    }
}

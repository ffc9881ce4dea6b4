use super::super::message::{Arguments, Content};
use super::*;

fn read(body: &str) -> Result<ChatRequest, ChatError> {
    ChatRequest::from_json(body.as_bytes(), Defaults::PUBLISHED)
}

/// A request with one user message and these further fields.
fn with(fields: &str) -> Result<ChatRequest, ChatError> {
    read(&format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], {fields}}}"#))
}

/// A request whose second message this is.
fn second(message: &str) -> Result<ChatRequest, ChatError> {
    read(&format!(r#"{{"messages": [{{"role": "user", "content": "x"}}, {message}]}}"#))
}

fn text<T: std::fmt::Debug>(result: Result<T, ChatError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn every_message_becomes_its_type() {
    let body = r#"{"unknown": 1, "messages": [
        {"role": "developer", "content": "a", "name": "n"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": null, "reasoning_content": "", "reasoning": "r",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{oops"}},
                {"name": "g", "arguments": {"b": 1, "a": null}}]},
        {"role": "tool", "id": "1", "tool": "t", "name": "ignored", "content": "c"},
        {"role": "system", "content": "", "tools": [{"name": "h"}]}
    ]}"#;
    let tool = Json::parse(r#"{"name": "h"}"#, Dialect::Strict).unwrap();
    let call = |id: Option<&str>, name: &str, arguments| super::super::message::ToolCall {
        id: id.map(str::to_owned),
        name: name.to_owned(),
        arguments,
    };
    let members = vec![("b".into(), Json::Number("1".into())), ("a".into(), Json::Null)];
    let expected = vec![
        Message::System { content: "a".into(), name: Some("n".into()) },
        Message::User { content: Content(vec!["b".into(), String::new()]), name: None },
        Message::Assistant {
            content: Content::default(),
            reasoning: "r".into(),
            tool_calls: vec![
                call(Some("1"), "f", Arguments::Raw("{oops".into())),
                call(None, "g", Arguments::Object(members)),
            ],
            name: None,
        },
        Message::ToolResult {
            content: "c".into(),
            call_id: Some("1".into()),
            name: Some("t".into()),
        },
        Message::NewTools(vec![tool]),
    ];
    assert_eq!(read(body), Ok(ChatRequest::new(expected, Defaults::PUBLISHED)));
}

#[test]
fn errors_name_the_message_and_the_field() {
    for (message, expected) in [
        ("3", "messages[1]: expected an object, found a number"),
        ("{}", "messages[1].role: missing, expected a string"),
        (r#"{"role": ["user"]}"#, "messages[1].role: expected a string, found a list"),
        (
            r#"{"role": "critic"}"#,
            "messages[1].role: expected system, developer, user, assistant or tool, found \"critic\"",
        ),
        (
            r#"{"role": "user", "content": 1}"#,
            "messages[1].content: expected a string or a list of parts, found a number",
        ),
        (
            r#"{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text"}]}"#,
            "messages[1].content[1].text: missing, expected a string",
        ),
        (
            r#"{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}"#,
            "messages[1].content[0].type: images are not supported: the vision tower is not converted",
        ),
        (
            r#"{"role": "user", "content": [{"type": "input_audio"}]}"#,
            "messages[1].content[0].type: content parts of type \"input_audio\" are not supported",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}"#,
            "messages[1].tool_calls[0].function.name: missing, expected a string",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}"#,
            "messages[1].tool_calls[0].function.arguments: expected the text of a JSON object, found a list",
        ),
        (
            r#"{"role": "assistant", "tool_calls": [{"name": "f", "arguments": 1}]}"#,
            "messages[1].tool_calls[0].arguments: expected an object or the text of one, found a number",
        ),
        (
            r#"{"role": "assistant", "reasoning_content": {}}"#,
            "messages[1].reasoning_content: expected a string, found an object",
        ),
        (
            r#"{"role": "assistant", "function_call": {"name": "f"}}"#,
            "messages[1].function_call: the old form of a tool call",
        ),
        (
            r#"{"role": "system", "content": "a", "tools": [{"name": "f"}]}"#,
            "messages[1].content: a system message that declares tools has no text of its own",
        ),
        (
            r#"{"role": "system", "tools": [{"function": {}}]}"#,
            "messages[1].tools[0].function.name: missing, expected a string",
        ),
    ] {
        assert_eq!(text(second(message)), expected, "{message}");
    }
    let name = "n".repeat(MAX_NAME_BYTES + 1);
    let error = text(second(&format!(r#"{{"role": "user", "name": "{name}"}}"#)));
    assert_eq!(error, "messages[1].name: more than 256 bytes");
}

#[test]
fn errors_outside_of_messages_name_the_field() {
    for (fields, expected) in [
        (r#""tools": {}"#, "tools: expected a list, found an object"),
        (r#""tools": ["f"]"#, "tools[0]: expected an object, found a string"),
        (
            r#""tools": [{"function": {"name": 1}}]"#,
            "tools[0].function.name: expected a string, found a number",
        ),
        (
            r#""tool_choice": "any""#,
            "tool_choice: expected auto, none, required or a function, found \"any\"",
        ),
        (r#""tool_choice": "required""#, "tool_choice: a call is required but no tool declared"),
        (
            r#""tool_choice": {"type": "custom"}"#,
            "tool_choice.type: tool choice of type \"custom\"",
        ),
        (
            r#""tools": [{"name": "f"}], "tool_choice": {"type": "function", "function": {"name": "g"}}"#,
            "tool_choice: no tool named \"g\" is declared",
        ),
        (
            r#""response_format": {"type": "xml"}"#,
            "response_format.type: expected text, json_object or json_schema, found \"xml\"",
        ),
        (
            r#""response_format": {"type": "json_schema"}"#,
            "response_format.json_schema: missing, expected an object",
        ),
        (r#""thinking": "yes""#, "thinking: expected true or false, found a string"),
        (
            r#""thinking": {"type": "on"}"#,
            "thinking.type: expected enabled or disabled, found \"on\"",
        ),
        (
            r#""effort": "medium""#,
            "effort: `medium` is not accepted by the encoder this model was released with",
        ),
        (
            r#""reasoning_effort": "minimal""#,
            "reasoning_effort: expected low, high, max or none, found \"minimal\"",
        ),
        (r#""effort": "low", "reasoning_effort": "max""#, "reasoning_effort: contradicts effort"),
        (
            r#""thinking": true, "chat_template_kwargs": {"enable_thinking": false}"#,
            "chat_template_kwargs.enable_thinking: contradicts thinking",
        ),
    ] {
        assert_eq!(text(with(fields)), expected, "{fields}");
    }
}

#[test]
fn what_is_no_request_at_all_is_refused() {
    for (body, expected) in [
        ("", "expected a JSON value at byte 0"),
        ("{\"messages\": NaN}", "expected a JSON value at byte 13"),
        ("[]", "expected an object, found a list"),
        ("{}", "messages: missing, expected at least one message"),
        (r#"{"messages": []}"#, "messages: missing, expected at least one message"),
        (r#"{"messages": null}"#, "messages: missing, expected at least one message"),
        (r#"{"messages": {}}"#, "messages: expected a list, found an object"),
    ] {
        assert_eq!(text(read(body)), expected, "{body}");
    }
    let error = ChatRequest::from_json(b"{\"a\": \"\xff\"}", Defaults::PUBLISHED);
    assert_eq!(text(error), "not UTF-8 at byte 7");
    let many = "0,".repeat(MAX_MESSAGES) + "0";
    assert_eq!(
        text(read(&format!("{{\"messages\": [{many}]}}"))),
        "messages: more than 65536 items"
    );
}

#[test]
fn refusals_say_what_to_do() {
    let hint = |result: Result<ChatRequest, ChatError>| result.unwrap_err().hint_text();
    assert_eq!(hint(with(r#""effort": "medium""#)), Some("use low, high, max or none"));
    let image = r#"{"role": "user", "content": [{"type": "image_url"}]}"#;
    assert_eq!(hint(second(image)), Some("send text parts only"));
}

#[test]
fn thinking_and_effort_have_several_names() {
    use Effort::{High, Low, Max};

    for (fields, thinking, effort) in [
        (r#""n": 1"#, true, Some(Max)),
        (r#""thinking": false"#, false, Some(Max)),
        (r#""thinking": {"type": "disabled"}"#, false, Some(Max)),
        (r#""thinking": {"type": "enabled"}, "effort": "low""#, true, Some(Low)),
        (r#""enable_thinking": false"#, false, Some(Max)),
        (r#""chat_template_kwargs": {"enable_thinking": false}"#, false, Some(Max)),
        (
            r#""chat_template_kwargs": {"thinking": true, "thinking_effort": "high"}"#,
            true,
            Some(High),
        ),
        (r#""effort": "none""#, true, None),
        (r#""effort": null"#, true, Some(Max)),
        (r#""reasoning_effort": "high""#, true, Some(High)),
        (r#""reasoning_effort": "none""#, false, Some(Max)),
    ] {
        let request = with(fields).unwrap();
        assert_eq!((request.thinking, request.effort), (thinking, effort), "{fields}");
    }
}

#[test]
fn choices_and_formats_are_read() {
    let tools = r#""tools": [{"type": "function", "function": {"name": "f"}}, {"name": "g"}]"#;
    for (choice, expected) in [
        (r#""auto""#, ToolChoice::Auto),
        (r#""none""#, ToolChoice::None),
        (r#""required""#, ToolChoice::Required),
        (r#"{"type": "function", "function": {"name": "f"}}"#, ToolChoice::Named("f".into())),
        (r#"{"name": "g"}"#, ToolChoice::Named("g".into())),
    ] {
        let request = with(&format!("{tools}, \"tool_choice\": {choice}")).unwrap();
        assert_eq!(request.tool_choice, expected);
    }
    let schema = Json::parse(r#"{"b": 1, "a": 2}"#, Dialect::Strict).unwrap();
    for (format, expected) in [
        ("null", ResponseFormat::Text),
        (r#"{"type": "text"}"#, ResponseFormat::Text),
        (r#""json_object""#, ResponseFormat::JsonObject),
        (
            r#"{"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": 2}}}"#,
            ResponseFormat::JsonSchema(schema.clone()),
        ),
        (
            r#"{"type": "json_schema", "json_schema": {"b": 1, "a": 2}}"#,
            ResponseFormat::JsonSchema(schema),
        ),
    ] {
        let request = with(&format!("\"response_format\": {format}")).unwrap();
        assert_eq!(request.response_format, expected, "{format}");
    }
}

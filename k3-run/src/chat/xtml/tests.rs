use super::super::request::{Defaults, Effort};
use super::*;

/// Segments joined by `|`, control segments without their `<|` and `|>`.
fn shown(segments: &[Segment<'_>]) -> String {
    let segment = |s: &Segment<'_>| match s.specials {
        Specials::Recognize => s.text.trim_matches(['<', '|', '>']).to_uppercase(),
        Specials::Text => s.text.clone().into_owned(),
    };
    segments.iter().map(segment).collect::<Vec<_>>().join("|")
}

fn rendered(body: &str) -> String {
    let request = ChatRequest::from_json(body.as_bytes(), Defaults::ENCODER).unwrap();
    shown(render(&request).unwrap().segments())
}

const PROMPT: &str = "OPEN|message| role|=\"|assistant|\"|SEP|OPEN|think|SEP";

#[test]
fn segments_are_cut_as_the_release_cuts_them() {
    let body = r#"{"messages": [{"role": "user", "content": ["#.to_owned()
        + r#"{"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": "b"}],"#
        + r#""name": "x&\"<>"}]}"#;
    let expected = "OPEN|message| role|=\"|user|\"| name|=\"|x&amp;&quot;<>|\"|SEP|a|b|\
        CLOSE|message|SEP|END_OF_MSG|";
    assert_eq!(rendered(&body), format!("{expected}{PROMPT}"));
}

#[test]
fn calls_and_results_are_numbered() {
    let body = r#"{"messages": [{"role": "assistant", "reasoning": "r", "tool_calls": [
        {"id": "1", "name": "f", "arguments": {"": "", "b": [1, {"y": "é", "x": 1e-7}]}},
        {"name": "g", "arguments": "{x"}]}, {"role": "tool", "name": "h", "content": "c"}],
        "generation_prompt": false}"#;
    let expected = "OPEN|message| role|=\"|assistant|\"|SEP|OPEN|think|SEP|r|CLOSE|think|SEP|\
        OPEN|response|SEP|CLOSE|response|SEP|OPEN|tools|SEP|\
        OPEN|call| tool|=\"|f|\"| index|=\"|1|\"|SEP|\
        OPEN|argument| key|=\"|\"| type|=\"|string|\"|SEP|CLOSE|argument|SEP|\
        OPEN|argument| key|=\"|b|\"| type|=\"|array|\"|SEP|[1, {\"y\": \"é\", \"x\": 1e-07}]|\
        CLOSE|argument|SEP|CLOSE|call|SEP|\
        OPEN|call| tool|=\"|g|\"| index|=\"|2|\"|SEP|OPEN|json| type|=\"|object|\"|SEP|{x|\
        CLOSE|json|SEP|CLOSE|call|SEP|CLOSE|tools|SEP|CLOSE|message|SEP|END_OF_MSG|\
        OPEN|message| role|=\"|tool|\"| tool|=\"|h|\"| index|=\"|1|\"|SEP|c|\
        CLOSE|message|SEP|END_OF_MSG";
    assert_eq!(rendered(body), expected);
}

fn notice(kind: &str, text: &str) -> String {
    format!(
        "OPEN|message| role|=\"|system|\"| type|=\"|{kind}|\"|SEP|{text}|CLOSE|message|SEP|END_OF_MSG|"
    )
}

const USER: &str = "OPEN|message| role|=\"|user|\"|SEP|x|CLOSE|message|SEP|END_OF_MSG|";

#[test]
fn notices_stand_around_the_messages() {
    let body = r#"{"messages": [{"role": "user", "content": "x"}], "effort": "low",
        "tools": [{"type": "function", "function": {"name": "f", "a": {"z": 1, "é": 2, "B": [{"b": 1, "a": 0}]}}}],
        "tool_choice": "none",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"b": 1e-5, "a": 10000000000000000000000}}}}"#;
    let tools = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n\
        [{\"function\":{\"a\":{\"B\":[{\"a\":0,\"b\":1}],\"z\":1,\"é\":2},\"name\":\"f\"},\"type\":\"function\"}]\n```";
    let effort = "`thinking_effort` guides on how much to think in your thinking channel (not including \
        the response channel), supported values include `low`, `medium`, `high`, and `max`.\n\
        Now the system is invoked with `thinking_effort=low`.";
    let choice = "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.";
    let format = "The system is invoked with `response_format=json_schema`.\nYour response must be raw JSON data \
        without markdown code blocks (```json) or any additional formatting.\n\
        The JSON data must match the following schema:\n```json\n{\"a\":10000000000000000000000,\"b\":1e-05}\n```";
    let expected = [
        notice("tool-declare", tools),
        notice("thinking-effort", effort),
        USER.into(),
        notice("tool-choice", choice),
        notice("response-format", format),
        PROMPT.into(),
    ];
    assert_eq!(rendered(body), expected.concat());
}

#[test]
fn a_named_choice_declares_that_tool_alone() {
    let body = r#"{"messages": [{"role": "system", "tools": [{"name": "f"}]}, {"role": "user", "content": "x"},
        {"role": "system", "tools": [{"name": "h"}, {"name": "g"}]}],
        "tools": [{"name": "f"}, {"name": "g"}], "tool_choice": {"name": "g"}}"#;
    let expected = [
        notice("tool-declare", &format!("{}```json\n[{{\"name\":\"g\"}}]\n```", texts::TOOLS)),
        USER.into(),
        notice("tool-declare", &format!("{}```json\n[{{\"name\":\"g\"}}]\n```", texts::NEW_TOOLS)),
        notice("tool-choice", texts::CHOICE_REQUIRED),
        PROMPT.into(),
    ];
    assert_eq!(rendered(body), expected.concat());
}

#[test]
fn without_thinking_there_is_neither_reasoning_nor_effort() {
    let mut request = ChatRequest::new(vec![Message::user("x")], Defaults::PUBLISHED);
    assert_eq!(request.effort, Some(Effort::Max));
    request.thinking = false;
    request.messages.push(Message::Assistant {
        content: "y".into(),
        reasoning: "r".into(),
        tool_calls: Vec::new(),
        name: Some("n".into()),
    });
    let expected = USER.to_owned()
        + "OPEN|message| role|=\"|assistant|\"| name|=\"|n|\"|SEP|OPEN|response|SEP|y|CLOSE|response|SEP|\
        CLOSE|message|SEP|END_OF_MSG|OPEN|message| role|=\"|assistant|\"|SEP|OPEN|response|SEP";
    assert_eq!(shown(render(&request).unwrap().segments()), expected);
}

#[test]
fn turns_cover_the_messages_in_prompt_order() {
    let body = r#"{"messages": [{"role": "user", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "a", "name": "f"}, {"id": "b", "name": "g"}]},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "1"}]}"#;
    let request = ChatRequest::from_json(body.as_bytes(), Defaults::PUBLISHED).unwrap();
    let prompt = render(&request).unwrap();
    let order: Vec<_> = prompt.turns().iter().map(|turn| turn.message).collect();
    assert_eq!(order, [0, 1, 3, 2]);
    for pair in prompt.turns().windows(2) {
        assert_eq!(pair[0].segments.end, pair[1].segments.start);
    }
    for turn in prompt.turns() {
        let segments = &prompt.segments()[turn.segments.clone()];
        assert_eq!((&*segments[0].text, &*segments[1].text), (texts::OPEN, "message"));
        assert_eq!(segments.last().map(|s| &*s.text), Some(texts::END_OF_MSG));
    }
}

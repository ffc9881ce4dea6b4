use proptest::prelude::*;

use super::super::json::{Dialect, Json};
use super::super::reply::Reply;
use super::*;

/// Pieces of a reply written with the markers' names; text in pieces of `size` bytes.
fn pieces(mut text: &str, size: usize) -> Vec<Piece<'_>> {
    const MARKERS: [(&str, Piece<'_>); 5] = [
        ("<|open|>", Piece::Open),
        ("<|close|>", Piece::Close),
        ("<|sep|>", Piece::Sep),
        ("<|end|>", Piece::End),
        ("<|hidden|>", Piece::Hidden),
    ];
    let mut pieces = Vec::new();
    while !text.is_empty() {
        let next = MARKERS.iter().filter_map(|m| Some((text.find(m.0)?, m))).min_by_key(|m| m.0);
        let (at, marker) = next.map_or((text.len(), None), |(at, marker)| (at, Some(marker)));
        pieces.extend(text.as_bytes()[..at].chunks(size).map(Piece::Text));
        text = &text[at..];
        if let Some((name, piece)) = marker {
            pieces.push(*piece);
            text = &text[name.len()..];
        }
    }
    pieces
}

fn events(pieces: &[Piece<'_>], start: Start) -> Vec<Event> {
    let mut state = State::new(start);
    let mut events = Vec::new();
    for piece in pieces {
        state.push(*piece, &mut events);
    }
    state.cut(&mut events);
    events
}

fn reply_from(text: &str, start: Start) -> Reply {
    let read = |size: usize| {
        let mut reply = Reply::default();
        for event in events(&pieces(text, size), start) {
            reply.add(&event);
        }
        reply
    };
    let reply = read(usize::MAX);
    for size in 1..4 {
        assert_eq!(read(size), reply, "{size} bytes a token: {text}");
    }
    reply
}

/// reasoning | answer | NAME(arguments) of each call, `…` after one that was cut.
fn read(text: &str) -> String {
    let reply = reply_from(text, Start::Reasoning);
    let calls = reply.calls.iter().map(|call| {
        let rest = if call.complete { "" } else { "…" };
        format!(" | {}({}){rest}", call.name, call.arguments)
    });
    let end = if reply.ended { " ." } else { "" };
    format!("{} | {}{}{end}", reply.reasoning, reply.content, calls.collect::<String>())
}

const CALL: &str =
    "<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|>";

#[test]
fn a_reply_that_follows_the_format() {
    let text = "think<|close|>think<|sep|><|open|>response<|sep|>answer<|close|>response<|sep|>\
        <|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|>\
        <|open|>argument key=\"s\" type=\"string\"<|sep|>a \"b\"\n<|close|>argument<|sep|>\
        <|open|>argument key=\"n\" type=\"number\"<|sep|> 1.50 <|close|>argument<|sep|>\
        <|close|>call<|sep|><|open|>call tool=\"g\" index=\"2\"<|sep|><|close|>call<|sep|>\
        <|close|>tools<|sep|><|close|>message<|sep|><|end|>ignored";
    let expected = r#"think | answer | f({"s": "a \"b\"\n", "n": 1.50}) | g({}) ."#;
    assert_eq!(read(text), expected);
}

#[test]
fn events_come_as_soon_as_they_are_certain() {
    let text = "<|close|>think<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|>\
        <|open|>argument key=\"s\" type=\"string\"<|sep|>ab<|close|>argument<|sep|>\
        <|open|>argument key=\"n\" type=\"number\"<|sep|>12<|close|>argument<|sep|><|close|>call<|sep|>";
    let json = |json: &str| Event::Arguments { index: 0, json: json.into() };
    let expected = [
        Event::Call { index: 0, name: "f".into() },
        json("{\"s\": \""),
        json("a"),
        json("b"),
        json("\""),
        json(", \"n\": "),
        json("12"),
        json("}"),
        Event::CallEnd { index: 0 },
    ];
    assert_eq!(events(&pieces(text, 1), Start::Answer), expected);
}

#[test]
fn without_thinking_the_reply_starts_with_the_answer() {
    let reply =
        reply_from("hi<|close|>response<|sep|><|close|>message<|sep|><|end|>", Start::Answer);
    assert_eq!(reply, Reply { content: "hi".into(), ended: true, ..Reply::default() });
}

#[test]
fn only_tokens_are_markers_never_text() {
    let text = b"<|close|>think<|sep|><|open|>response<|sep|><|end_of_msg|>";
    let expected = [Event::Reasoning(String::from_utf8_lossy(text).into())];
    assert_eq!(events(&[Piece::Text(text)], Start::Reasoning), expected);
}

#[test]
fn a_cut_keeps_the_text_and_drops_half_a_tag() {
    for (text, expected) in [
        ("", " | "),
        ("why", "why | "),
        ("why<|close|>", "why | "),
        ("why<|close|>thi", "why | "),
        ("why<|close|>think", "why | "),
        ("why<|close|>think<|sep|>", "why | "),
        ("why<|close|>think<|sep|><|open|>response<|sep|>be", "why | be"),
        ("<|close|>think<|sep|><|open|>call tool=\"f", " | "),
    ] {
        assert_eq!(read(text), expected, "{text}");
    }
}

#[test]
fn a_call_that_is_cut_stays_incomplete() {
    for (rest, expected) in [
        ("", "f()…"),
        ("<|open|>argument key=\"a\" type=\"string\"<|sep|>rm -r", "f({\"a\": \"rm -r)…"),
        ("<|open|>argument key=\"a\" type=\"number\"<|sep|>12", "f({\"a\": 12)…"),
        ("<|open|>argument key=\"a\" type=\"number\"<|sep|>12<|close|>argument", "f({\"a\": 12)…"),
        ("<|open|>json type=\"object\"<|sep|>{\"a", "f({\"a)…"),
        (
            "<|open|>argument key=\"a\" type=\"null\"<|sep|>null<|close|>argument<|sep|><|close|>call",
            "f({\"a\": null})",
        ),
    ] {
        assert_eq!(read(&format!("{CALL}{rest}")), format!(" |  | {expected}"), "{rest}");
    }
}

#[test]
fn missing_closes_are_implied() {
    for (text, expected) in [
        ("why<|open|>response<|sep|>because<|end|>", "why | because ."),
        ("why<|open|>tools<|sep|><|open|>call tool=\"f\"<|sep|><|end|>", "why |  | f({}) ."),
        ("why<|open|>call tool=\"f\"<|sep|><|end|>", "why |  | f({}) ."),
        ("why<|close|>message<|sep|>x<|end|>", "why | x ."),
    ] {
        assert_eq!(read(text), expected, "{text}");
    }
    let argument =
        |key: &str| format!("<|open|>argument key=\"{key}\" type=\"string\"<|sep|>{key}");
    let (a, b) = (argument("a"), argument("b"));
    for (rest, expected) in [
        (format!("{a}<|end|>"), "f({\"a\": \"a\"}) ."),
        (format!("{a}{b}<|end|>"), "f({\"a\": \"a\", \"b\": \"b\"}) ."),
        (format!("{a}<|close|>call<|sep|>"), "f({\"a\": \"a\"})"),
        (format!("{a}<|close|>tools<|sep|>"), "f({\"a\": \"a\"})"),
        (format!("{a}<|close|>json<|sep|>{b}<|end|>"), "f({\"a\": \"a\", \"b\": \"b\"}) ."),
        (
            format!("{a}<|open|>call tool=\"g\"<|sep|>{b}<|end|>"),
            "f({\"a\": \"a\"}) | g({\"b\": \"b\"}) .",
        ),
    ] {
        assert_eq!(read(&format!("{CALL}{rest}")), format!(" |  | {expected}"), "{rest}");
    }
    let text = format!("{CALL}{a}<|open|>response<|sep|>done<|end|>");
    assert_eq!(read(&text), " | done | f({\"a\": \"a\"}) .");
}

#[test]
fn missing_separators_are_implied_before_the_next_marker() {
    let text = "why<|close|>think<|open|>response<|sep|>so<|close|>response<|close|>message<|end|>";
    assert_eq!(read(text), "why | so .");
}

#[test]
fn closing_what_is_not_open_does_nothing() {
    for tag in ["response", "tools", "call", "argument", "json"] {
        assert_eq!(read(&format!("a<|close|>{tag}<|sep|>b")), "ab | ", "{tag}");
    }
    let text = "a<|close|>think<|sep|>b<|close|>think<|sep|>c";
    assert_eq!(read(text), "a | bc");
    let text = format!("{CALL}<|open|>argument key=\"a\"<|sep|>x<|close|>think<|sep|>y<|end|>");
    assert_eq!(read(&text), " |  | f({\"a\": \"xy\"}) .");
}

#[test]
fn tags_that_cannot_stand_are_text() {
    for text in [
        "a<|open|>x<|sep|>b",
        "a<|close|>x<|sep|>b",
        "a<|open|><|sep|>b",
        "a<|open|>thinking about it",
        "a<|open|>think about it<|sep|>",
        "a<|close|>think about it<|sep|>",
        "a<|open|>thi<|open|>x",
        "a<|sep|>b",
        "a<|open|>call<|sep|>b",
        "a<|open|>call tool=\"\"<|sep|>b",
        "a<|open|>call tool=\"f<|sep|>b",
        "a<|open|>argument key=\"k\" type=\"string\"<|sep|>b",
        "a<|open|>json type=\"object\"<|sep|>b",
        "a<|open|>message role=\"user\"<|sep|>b",
    ] {
        assert_eq!(read(text), format!("{text} | "), "{text}");
        let call = format!("{CALL}<|open|>json type=\"object\"<|sep|>{text}");
        let in_call = read(&call);
        // A tag that a call can hold starts or ends something there; all others stay text.
        if !text.contains("argument") && !text.contains("json") {
            assert_eq!(in_call, format!(" |  | f({text})…"), "{text}");
        }
    }
}

#[test]
fn a_json_element_and_arguments_do_not_mix() {
    let raw = "<|open|>json type=\"object\"<|sep|>{oops<|close|>json<|sep|>";
    let argument = "<|open|>argument key=\"a\"<|sep|>x<|close|>argument<|sep|>";
    assert_eq!(read(&format!("{CALL}{raw}<|end|>")), " |  | f({oops) .");
    let text = format!("{CALL}{raw}{argument}<|end|>");
    assert_eq!(read(&text), " | <|open|>argument key=\"a\"<|sep|>x | f({oops) .");
    let text = format!("{CALL}{argument}{raw}<|end|>");
    assert_eq!(read(&text), " | <|open|>json type=\"object\"<|sep|>{oops | f({\"a\": \"x\"}) .");
    let text = format!("{CALL}<|open|>json type=\"object\"<|sep|> \n<|close|>json<|sep|><|end|>");
    assert_eq!(read(&text), " |  | f( \n{}) .");
}

#[test]
fn typed_arguments_are_json_or_become_strings() {
    for (kind, value, expected) in [
        ("number", "12", "12"),
        ("number", " 1e-07\n", "1e-07"),
        ("number", "twelve", "\"twelve\""),
        ("number", "NaN", "\"NaN\""),
        ("number", "", "\"\""),
        ("boolean", "true", "true"),
        ("boolean", "True", "\"True\""),
        ("null", "null", "null"),
        ("object", "{\"b\": [1, 2]}", "{\"b\": [1, 2]}"),
        ("object", "{\"b\"", "\"{\\\"b\\\"\""),
        ("integer", "3", "3"),
        ("string", "3", "\"3\""),
        ("string", " é\u{1}\"\\ ", "\" é\\u0001\\\"\\\\ \""),
    ] {
        let text = format!("{CALL}<|open|>argument key=\"k\" type=\"{kind}\"<|sep|>{value}<|end|>");
        assert_eq!(read(&text), format!(" |  | f({{\"k\": {expected}}}) ."), "{kind} {value}");
    }
}

#[test]
fn control_tokens_without_a_meaning_are_left_out() {
    assert_eq!(read("a<|hidden|>b<|close|><|hidden|>think<|sep|>c"), "ab | c");
}

#[test]
fn characters_are_never_cut() {
    let text = "wé<|close|>think<|sep|><|open|>response<|sep|>日本🌤️";
    for event in events(&pieces(text, 1), Start::Reasoning) {
        if let Event::Reasoning(text) | Event::Answer(text) = event {
            assert!(!text.contains('\u{fffd}'), "{text}");
        }
    }
    // Half a character before a marker will not be completed.
    let pieces = [
        Piece::Text(b"a\xe6\x97"),
        Piece::Close,
        Piece::Text(b"think"),
        Piece::Sep,
        Piece::Text(b"\xa5"),
    ];
    let expected = [
        Event::Reasoning("a".into()),
        Event::Reasoning("\u{fffd}".into()),
        Event::Answer("\u{fffd}".into()),
    ];
    assert_eq!(events(&pieces, Start::Reasoning), expected);
}

#[test]
fn each_token_is_told_its_channel() {
    let text = "a<|close|>b<|close|>think<|sep|>c<|open|>call tool=\"f\"<|sep|><|open|>argument key=\"k\"<|sep|>d";
    let mut state = State::new(Start::Reasoning);
    let channels: Vec<_> = pieces(text, usize::MAX)
        .iter()
        .filter_map(|piece| {
            let channel = state.push(*piece, &mut Vec::new());
            matches!(piece, Piece::Text(b"a" | b"c" | b"d")).then_some(channel)
        })
        .collect();
    assert_eq!(channels, [Channel::Reasoning, Channel::Answer, Channel::Call]);
}

/// Replies of all kinds: mostly markers and tags, in no order.
fn any_reply() -> impl Strategy<Value = Vec<&'static str>> {
    let part = prop::sample::select(vec![
        "<|open|>",
        "<|close|>",
        "<|sep|>",
        "<|hidden|>",
        "think",
        "response",
        "tools",
        "call",
        " tool=\"f\"",
        "call tool=\"g\" index=\"1\"",
        "argument",
        " key=\"k\"",
        " type=\"number\"",
        "argument key=\"k\" type=\"string\"",
        "json type=\"object\"",
        "message",
        "z",
        " ",
        "\"",
        "12",
        "é",
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        "<|open|>tools<|sep|>",
        "<|open|>call tool=\"f\" index=\"1\"<|sep|>",
        "<|close|>call<|sep|>",
        "<|open|>argument key=\"k\" type=\"object\"<|sep|>",
        "<|close|>argument<|sep|>",
    ]);
    prop::collection::vec(part, 0..40)
}

proptest! {
    #[test]
    fn any_reply_has_a_reading_that_keeps_its_words(parts in any_reply(), end: bool) {
        let words = |text: &str| text.matches(['z', 'é']).count();
        let text = parts.concat() + if end { "<|end|>" } else { "" };
        let reply = reply_from(&text, Start::Reasoning);
        let found = words(&reply.reasoning) + words(&reply.content)
            + reply.calls.iter().map(|call| words(&call.arguments)).sum::<usize>();
        // Neither letter can be in a tag that counts; a tag that is cut may hold one and is dropped.
        let kept = if end { text.len() } else { text.rfind("<|open|>").unwrap_or(text.len()) };
        prop_assert!(found <= words(&text));
        prop_assert!(found >= words(&text[..kept]), "{text} {reply:?}");
        prop_assert_eq!(reply.ended, end);
    }

    #[test]
    fn complete_calls_are_objects_unless_the_model_wrote_a_json_element(parts in any_reply()) {
        let text = parts.concat() + "<|end|>";
        let raw = text.contains("json type");
        for call in reply_from(&text, Start::Answer).calls {
            prop_assert!(call.complete);
            let json = Json::parse(&call.arguments, Dialect::Strict);
            prop_assert!(raw || matches!(json, Ok(Json::Object(_))), "{}", call.arguments);
        }
    }

    #[test]
    fn bytes_of_any_kind_do_no_harm(
        stream in prop::collection::vec((0..6usize, prop::collection::vec(any::<u8>(), 0..4)), 0..60)
    ) {
        let pieces: Vec<_> = stream.iter().map(|(kind, bytes)| match kind {
            0 => Piece::Open,
            1 => Piece::Close,
            2 => Piece::Sep,
            3 => Piece::Hidden,
            _ => Piece::Text(bytes),
        }).collect();
        events(&pieces, Start::Reasoning);
    }
}

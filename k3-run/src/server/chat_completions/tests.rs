//! Replies that a script dictates, token by token, as streams and as wholes.

use std::path::Path;

use k3_formats::tokenizer::{SPECIAL_SLOTS, Specials};

use super::super::generation::{FinishReason, Generation};
use super::*;
use crate::chat::Markup;

fn tokenizer() -> Arc<Tokenizer> {
    let snapshot = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/demo/snapshot");
    let config = std::fs::read_to_string(snapshot.join("config.json")).unwrap();
    let config: Value = serde_json::from_str(&config).unwrap();
    let vocab = config["vocab_size"].as_u64().or(config["text_config"]["vocab_size"].as_u64());
    let base = vocab.unwrap() as usize - SPECIAL_SLOTS;
    let file = |name: &str| snapshot.join(name);
    let (ranks, names) = (file("tiktoken.model"), file("tokenizer_config.json"));
    Arc::new(Tokenizer::from_snapshot_files(&ranks, &names, base).unwrap())
}

/// What the client gets for a reply whose tokens are those of `text`: the stream's deltas
/// put together, after a check that they make the same as the whole.
fn reply(text: &str, request: &str) -> Value {
    let tokenizer = tokenizer();
    let request = Json::parse(request, crate::chat::json::Dialect::Strict).unwrap();
    let options = options(&Fields::of(&request, "").unwrap(), Start::Reasoning).unwrap();
    let logprobs = options.logprobs;
    let markup = Markup::of(&tokenizer).unwrap();
    let new = || ChatWire::new(Head::new("chatcmpl", 1, 2, "m"), tokenizer.clone(), true, logprobs);
    let ids = tokenizer.encode(text, Specials::Recognize);
    let updates = || {
        let mut generation =
            Generation::new(&tokenizer, &markup, &[], options.clone(), &[1, 2], 1000).unwrap();
        let mut updates = Vec::new();
        for &id in &ids {
            let mut logits = vec![-100.0; tokenizer.vocab_size()];
            logits[id as usize] = 100.0;
            let (next, reason) = generation.next(&tokenizer, &logits, &mut updates).unwrap();
            assert_eq!(next, id);
            if let Some(reason) = reason {
                updates.push(Update::Finish(finish(reason, &generation)));
                return updates;
            }
        }
        panic!("the reply has no end: {text}");
    };
    let mut whole = new();
    updates().into_iter().for_each(|update| whole.add(update));
    let whole = whole.body();
    let (mut stream, mut chunks) = (new(), Vec::new());
    updates().into_iter().for_each(|update| stream.chunks(update, &mut chunks));
    let streamed = put_together(&chunks);
    assert_eq!(streamed["message"], whole["choices"][0]["message"], "{text}");
    assert_eq!(streamed["finish_reason"], whole["choices"][0]["finish_reason"]);
    assert_eq!(streamed["usage"], whole["usage"]);
    assert_eq!(streamed["logprobs"], whole["choices"][0]["logprobs"]);
    streamed
}

fn finish(reason: FinishReason, generation: &Generation) -> Finish {
    Finish {
        reason,
        prompt_tokens: 2,
        cached_tokens: 1,
        completion_tokens: generation.tokens(),
        reasoning_tokens: generation.reasoning_tokens(),
    }
}

/// As a client does it.
fn put_together(chunks: &[Value]) -> Value {
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    let mut message = json!({"role": "assistant", "content": null, "refusal": null});
    let (mut finish_reason, mut logprobs) = (Value::Null, Value::Null);
    let add = |to: &mut Value, more: &Value| {
        let text = [to.as_str().unwrap_or(""), more.as_str().unwrap()].concat();
        *to = text.into();
    };
    for chunk in &chunks[..chunks.len() - 1] {
        let choice = &chunk["choices"][0];
        assert_eq!(finish_reason, Value::Null, "nothing after the end");
        finish_reason = choice["finish_reason"].clone();
        if let Some(tokens) = choice["logprobs"]["content"].as_array() {
            if logprobs.is_null() {
                logprobs = json!({"content": [], "refusal": null});
            }
            logprobs["content"].as_array_mut().unwrap().extend(tokens.iter().cloned());
        }
        for (key, value) in choice["delta"].as_object().unwrap() {
            match key.as_str() {
                "role" => {}
                "tool_calls" => {
                    let (call, index) = (&value[0], value[0]["index"].as_u64().unwrap() as usize);
                    if let Some(id) = call.get("id") {
                        let mut calls =
                            message["tool_calls"].as_array().cloned().unwrap_or_default();
                        assert_eq!(calls.len(), index, "calls come in order");
                        let function = call["function"].clone();
                        calls.push(json!({"id": id, "type": "function", "function": function}));
                        message["tool_calls"] = calls.into();
                    } else {
                        let all = &mut message["tool_calls"][index]["function"]["arguments"];
                        add(all, &call["function"]["arguments"]);
                    }
                }
                key => add(&mut message[key], value),
            }
        }
    }
    if message.get("tool_calls").is_some() && message["content"] == "" {
        message["content"] = Value::Null;
    }
    let usage = chunks.last().unwrap()["usage"].clone();
    assert_eq!(chunks.last().unwrap()["choices"], json!([]));
    json!({"message": message, "finish_reason": finish_reason, "usage": usage, "logprobs": logprobs})
}

const ANSWER: &str = "I think<|close|>think<|sep|><|open|>response<|sep|>";
const CALLS: &str = concat!(
    "hm<|close|>think<|sep|><|open|>response<|sep|>Let me look.<|close|>response<|sep|>",
    "<|open|>tools<|sep|>",
    "<|open|>call tool=\"weather\" index=\"1\"<|sep|>",
    "<|open|>argument key=\"city\" type=\"string\"<|sep|>Bath \"Spa\"<|close|>argument<|sep|>",
    "<|open|>argument key=\"days\" type=\"number\"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>",
    "<|open|>call tool=\"time\" index=\"2\"<|sep|><|close|>call<|sep|>",
    "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
);

#[test]
fn reasoning_and_answer_come_apart() {
    let text =
        format!("{ANSWER}It is so.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>");
    let got = reply(&text, "{}");
    assert_eq!(got["message"]["reasoning_content"], "I think");
    assert_eq!(got["message"]["content"], "It is so.");
    assert_eq!((&got["finish_reason"], &got["logprobs"]), (&json!("stop"), &Value::Null));
    let thought = got["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    let all = got["usage"]["completion_tokens"].as_u64().unwrap();
    assert!(thought > 0 && thought < all);
    assert_eq!(got["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
}

#[test]
fn tool_calls_are_streamed_with_typed_arguments() {
    let got = reply(CALLS, "{}");
    assert_eq!(got["finish_reason"], "tool_calls");
    assert_eq!(got["message"]["content"], "Let me look.");
    let calls = got["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 2);
    assert_eq!(calls[0]["function"]["name"], "weather");
    let arguments: Value =
        serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
    assert_eq!(arguments, json!({"city": "Bath \"Spa\"", "days": 3}));
    assert_eq!(calls[1]["function"]["arguments"], "{}");
    assert_ne!(calls[0]["id"], calls[1]["id"]);
}

#[test]
fn one_call_is_enough_if_the_request_says_so() {
    let got = reply(CALLS, r#"{"parallel_tool_calls": false}"#);
    assert_eq!(got["finish_reason"], "tool_calls");
    assert_eq!(got["message"]["tool_calls"].as_array().unwrap().len(), 1);
}

#[test]
fn a_stop_string_ends_the_answer_and_is_not_in_it() {
    let text = format!("{ANSWER}one two three four");
    let got = reply(&text, r#"{"stop": ["ee fo", "I think"]}"#);
    assert_eq!(got["message"]["content"], "one two thr");
    assert_eq!(got["message"]["reasoning_content"], "I think", "it ends answers only");
    assert_eq!(got["finish_reason"], "stop");
}

#[test]
fn what_might_have_been_a_stop_string_is_not_lost() {
    let got = reply(&CALLS.replace("Let me look.", "Let me lo"), r#"{"stop": "look"}"#);
    assert_eq!(got["message"]["content"], "Let me lo");
    assert_eq!(got["finish_reason"], "tool_calls");
}

#[test]
fn the_length_cuts_and_says_so() {
    let got = reply(&format!("{ANSWER}one two three four"), r#"{"max_completion_tokens": 3}"#);
    assert_eq!(got["finish_reason"], "length");
    assert_eq!(got["usage"]["completion_tokens"], 3);
}

#[test]
fn logprobs_are_of_the_answer_only() {
    let text = format!("{ANSWER}so.<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>");
    let got = reply(&text, r#"{"logprobs": true, "top_logprobs": 2}"#);
    let tokens = got["logprobs"]["content"].as_array().unwrap();
    let joined: String = tokens.iter().map(|t| t["token"].as_str().unwrap()).collect();
    assert_eq!(joined, "so.");
    for token in tokens {
        assert!(token["logprob"].as_f64().unwrap() > -1e-6);
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
    }
}

#[test]
fn what_is_not_done_is_refused_by_name() {
    for (request, param) in [
        (r#"{"n": 2}"#, "n: only 1"),
        (r#"{"temperature": "hot"}"#, "temperature: expected a number, found a string"),
        (r#"{"stop": [1]}"#, "stop: expected strings, found a number"),
        (r#"{"top_logprobs": 2}"#, "top_logprobs: needs logprobs"),
        (r#"{"max_tokens": 0}"#, "max_tokens: expected at least 1"),
        (r#"{"logit_bias": {"x": 1}}"#, "logit_bias: expected a token id"),
        (r#"{"seed": 1.5}"#, "seed: expected a whole number"),
    ] {
        let request = Json::parse(request, crate::chat::json::Dialect::Strict).unwrap();
        let error = options(&Fields::of(&request, "").unwrap(), Start::Answer).unwrap_err();
        let message = error.body()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.starts_with(param), "{message}");
    }
}

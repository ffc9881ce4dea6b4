//! Which tool call each tool result answers, and the order they are shown in.

use std::collections::HashMap;

use super::error::{ChatError, ChatErrorKind};
use super::message::{Message, ToolCall};

/// A message in the order of the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Placed<'a> {
    /// Position in the request.
    pub(super) message: usize,
    /// For a tool result: the tool's name, and its number since the last assistant message, from 1.
    pub(super) result: Option<(&'a str, usize)>,
}

/// Puts every run of tool results into the order of the calls it answers.
///
/// A run in which every id is that of a call is sorted by call and takes the calls' names,
/// whatever the results say themselves. Any other run stays as it is: a result's own name
/// counts, else the call at the same position.
///
/// # Errors
/// A result whose tool cannot be told.
pub(super) fn place(messages: &[Message]) -> Result<Vec<Placed<'_>>, ChatError> {
    let mut placed = Vec::with_capacity(messages.len());
    let mut calls: &[ToolCall] = &[];
    let mut results = 0;
    let mut at = 0;
    while at < messages.len() {
        if let Message::Assistant { tool_calls, .. } = &messages[at] {
            (calls, results) = (tool_calls, 0);
        }
        let run = messages[at..].iter().take_while(|m| is_result(m)).count();
        if run == 0 {
            placed.push(Placed { message: at, result: None });
            at += 1;
            continue;
        }
        let matched = match_run(&messages[at..at + run], calls);
        for offset in 0..run {
            results += 1;
            let (message, name) = match &matched {
                Some(matched) => {
                    (at + matched[offset].1, Some(calls[matched[offset].0].name.as_str()))
                }
                None => (at + offset, own_name(&messages[at + offset])),
            };
            let by_position = || calls.get(results - 1).map(|call| call.name.as_str());
            let name = name.or_else(by_position).ok_or_else(|| no_name(message))?;
            placed.push(Placed { message, result: Some((name, results)) });
        }
        at += run;
    }
    Ok(placed)
}

fn is_result(message: &Message) -> bool {
    matches!(message, Message::ToolResult { .. })
}

fn own_name(message: &Message) -> Option<&str> {
    match message {
        Message::ToolResult { name, .. } => name.as_deref(),
        _ => None,
    }
}

/// (call, offset in the run) of each result in call order, if every one has its call.
fn match_run(run: &[Message], calls: &[ToolCall]) -> Option<Vec<(usize, usize)>> {
    let mut by_id: HashMap<&str, usize> = HashMap::new();
    for (position, call) in calls.iter().enumerate() {
        if let Some(id) = &call.id {
            // Of two calls with one id the first counts.
            by_id.entry(id).or_insert(position);
        }
    }
    let call_of = |message: &Message| match message {
        Message::ToolResult { call_id: Some(id), .. } => by_id.get(id.as_str()).copied(),
        _ => None,
    };
    let mut matched = run
        .iter()
        .enumerate()
        .map(|(offset, message)| Some((call_of(message)?, offset)))
        .collect::<Option<Vec<_>>>()?;
    matched.sort_unstable();
    Some(matched)
}

fn no_name(message: usize) -> ChatError {
    let place = format!("messages[{message}].tool_call_id");
    let problem = "no call before it has this id, nor one at its position".to_owned();
    ChatError::new(ChatErrorKind::Invalid, place, problem)
        .hint("send the assistant message with its tool_calls, or give the result a `name`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::message::{Arguments, Content};

    fn assistant(calls: &[(&str, &str)]) -> Message {
        let call = |&(id, name): &(&str, &str)| ToolCall {
            id: (!id.is_empty()).then(|| id.to_owned()),
            name: name.to_owned(),
            arguments: Arguments::Object(Vec::new()),
        };
        Message::Assistant {
            content: Content::default(),
            reasoning: String::new(),
            tool_calls: calls.iter().map(call).collect(),
            name: None,
        }
    }

    fn result(id: &str, name: Option<&str>) -> Message {
        let call_id = (!id.is_empty()).then(|| id.to_owned());
        Message::ToolResult { content: "r".into(), call_id, name: name.map(str::to_owned) }
    }

    fn order(messages: &[Message]) -> Vec<(usize, Option<(&str, usize)>)> {
        place(messages).unwrap().into_iter().map(|p| (p.message, p.result)).collect()
    }

    #[test]
    fn a_matched_run_takes_call_order_and_call_names() {
        let messages = [
            assistant(&[("a", "f"), ("b", "g")]),
            result("b", Some("stale")),
            result("a", None),
            result("b", None),
        ];
        let expected = [(0, None), (2, Some(("f", 1))), (1, Some(("g", 2))), (3, Some(("g", 3)))];
        assert_eq!(order(&messages), expected);
    }

    #[test]
    fn an_unmatched_run_stays_and_is_named_by_itself_or_by_position() {
        let messages = [
            assistant(&[("a", "f"), ("b", "g"), ("", "h")]),
            result("b", None),
            result("?", Some("own")),
            result("", None),
        ];
        let expected = [(0, None), (1, Some(("f", 1))), (2, Some(("own", 2))), (3, Some(("h", 3)))];
        assert_eq!(order(&messages), expected);
    }

    #[test]
    fn numbers_go_on_over_other_messages_and_start_again_after_the_assistant() {
        let messages = [
            assistant(&[("a", "f"), ("b", "g")]),
            result("a", None),
            Message::user("wait"),
            result("b", None),
            assistant(&[("a", "k")]),
            result("a", None),
        ];
        let expected = [
            (0, None),
            (1, Some(("f", 1))),
            (2, None),
            (3, Some(("g", 2))),
            (4, None),
            (5, Some(("k", 1))),
        ];
        assert_eq!(order(&messages), expected);
    }

    #[test]
    fn a_result_of_nothing_is_an_error_that_names_it() {
        let messages = [Message::user("x"), result("a", None)];
        let error = place(&messages).unwrap_err();
        assert_eq!(error.place(), "messages[1].tool_call_id");
        let messages = [assistant(&[("a", "f")]), result("a", None), result("z", None)];
        assert_eq!(place(&messages).unwrap_err().place(), "messages[2].tool_call_id");
    }
}

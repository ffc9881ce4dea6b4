//! What was said, and how it becomes the next prompt.

use std::fmt;

use k3_formats::tokenizer::Tokenizer;
use k3_formats::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::chat::{ChatError, ChatRequest, Defaults, Effort, Message, Reply, xtml};

/// Version of the form in which conversations are saved.
const VERSION: u32 = 1;

/// Messages so far, the last perhaps unanswered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conversation {
    system: Option<String>,
    turns: Vec<Turn>,
    /// Whether the model thinks before it answers.
    pub thinking: bool,
    /// How hard it is told to think.
    pub effort: Option<Effort>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Turn {
    user: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    answer: Option<Answer>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Answer {
    reasoning: String,
    content: String,
    /// Whether the model thought; the ids are of use only in prompts that say the same.
    thinking: bool,
    /// The whole message in the model's own tokens.
    ids: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
struct Saved {
    version: u32,
    system: Option<String>,
    thinking: bool,
    effort: Option<String>,
    turns: Vec<Turn>,
}

/// A prompt in ids.
#[derive(Debug, Clone)]
pub(super) struct Prompt {
    pub(super) ids: Vec<u32>,
    /// Where messages begin.
    pub(super) turns: Vec<usize>,
    /// The last ids: those that open the answer.
    pub(super) opening: Vec<u32>,
}

impl Conversation {
    /// An empty one.
    pub fn new(system: Option<String>, thinking: bool, effort: Option<Effort>) -> Self {
        Self { system: system.filter(|s| !s.is_empty()), turns: Vec::new(), thinking, effort }
    }

    /// Adds a message of the user. It takes the place of one that was not answered.
    pub(super) fn ask(&mut self, text: String) {
        self.turns.pop_if(|turn| turn.answer.is_none());
        self.turns.push(Turn { user: text, answer: None });
    }

    /// Drops the last answer; false if nothing was asked.
    pub(super) fn ask_again(&mut self) -> bool {
        self.turns.last_mut().map(|turn| turn.answer = None).is_some()
    }

    /// The answer to the last message; `ids` are the whole message.
    pub(super) fn answered(&mut self, reply: Reply, ids: Vec<u32>) {
        let thinking = self.thinking;
        if let Some(turn) = self.turns.last_mut() {
            let Reply { reasoning, content, .. } = reply;
            turn.answer = Some(Answer { reasoning, content, thinking, ids });
        }
    }

    /// Forgets the messages, but for that of the system.
    pub(super) fn clear(&mut self) {
        self.turns.clear();
    }

    /// Messages of the user so far.
    pub(super) fn turns(&self) -> usize {
        self.turns.len()
    }

    pub(super) fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Sets the system message, or removes it if `text` is empty.
    pub(super) fn set_system(&mut self, text: String) {
        self.system = Some(text).filter(|s| !s.is_empty());
    }

    /// How the model is told to think, in words.
    pub(super) fn mode(&self) -> impl fmt::Display + use<> {
        match (self.thinking, self.effort) {
            (false, _) => "no thinking".to_owned(),
            (true, None) => "thinking".to_owned(),
            (true, Some(effort)) => format!("thinking, effort {}", effort.as_str()),
        }
    }

    /// The prompt for an answer to the last message.
    pub(super) fn prompt(&self, tokenizer: &Tokenizer) -> Result<Prompt, ChatError> {
        let mut messages = Vec::new();
        let mut recorded = Vec::new();
        if let Some(system) = &self.system {
            messages.push(Message::system(system.as_str()));
            recorded.push(None);
        }
        for turn in &self.turns {
            messages.push(Message::user(turn.user.as_str()));
            recorded.push(None);
            if let Some(answer) = &turn.answer {
                messages.push(Message::Assistant {
                    content: answer.content.as_str().into(),
                    reasoning: answer.reasoning.clone(),
                    tool_calls: Vec::new(),
                    name: None,
                });
                recorded.push((answer.thinking == self.thinking).then_some(&answer.ids[..]));
            }
        }
        let defaults = Defaults { thinking: self.thinking, effort: self.effort };
        let request = ChatRequest::new(messages, defaults);
        let rendered = xtml::render(&request)?;
        let ids = rendered.encode_with(tokenizer, |message| recorded[message]);
        let behind = rendered.turns().last().map_or(0, |turn| turn.segments.end);
        let opening = xtml::encode(tokenizer, &rendered.segments()[behind..]);
        let end = tokenizer.special_id("<|end_of_msg|>");
        let turns = (1..ids.len()).filter(|&i| Some(ids[i - 1]) == end).collect();
        Ok(Prompt { ids, turns, opening })
    }

    /// The text that [`Conversation::from_json`] reads.
    pub fn to_json(&self) -> String {
        let saved = Saved {
            version: VERSION,
            system: self.system.clone(),
            thinking: self.thinking,
            effort: self.effort.map(|effort| effort.as_str().to_owned()),
            turns: self.turns.clone(),
        };
        serde_json::to_string(&saved).expect("plain data serializes")
    }

    /// Reads a saved conversation for a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    /// It is none, of another version, or has ids outside the vocabulary.
    pub fn from_json(text: &str, vocab: usize) -> Result<Self> {
        if text.is_empty() {
            return Err(Error::missing("there is no conversation in it")
                .hint("load a session that `k3-run chat` saved"));
        }
        let malformed = |problem: String| {
            Error::malformed(format!("not a saved conversation: {problem}"))
                .hint("load a session that `k3-run chat` saved")
        };
        let saved: Saved = serde_json::from_str(text).map_err(|e| malformed(e.to_string()))?;
        if saved.version != VERSION {
            let problem = format!("expected version {VERSION}, found {}", saved.version);
            return Err(Error::unsupported(problem).item("conversation"));
        }
        let mut ids =
            saved.turns.iter().filter_map(|turn| turn.answer.as_ref()).flat_map(|a| &a.ids);
        if let Some(id) = ids.find(|&&id| id as usize >= vocab) {
            return Err(malformed(format!("token id {id} is not in the vocabulary of {vocab}")));
        }
        let effort = saved.effort.map(|word| Effort::parse(&word, "effort")).transpose();
        let effort = effort.map_err(|e| malformed(e.to_string()))?;
        Ok(Self { turns: saved.turns, ..Self::new(saved.system, saved.thinking, effort) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Conversation {
        let mut talk = Conversation::new(Some("Be brief.".into()), true, Some(Effort::Low));
        talk.ask("One?".into());
        let reply = Reply { content: "Two.".into(), ..Reply::default() };
        talk.answered(reply, vec![7, 8]);
        talk.ask("Three?".into());
        talk
    }

    #[test]
    fn what_was_not_answered_is_replaced() {
        let mut talk = example();
        talk.ask("Four?".into());
        assert_eq!(talk.turns(), 2);
        assert!(talk.ask_again());
        assert_eq!(talk.turns[1].user, "Four?");
        talk.clear();
        assert!(!talk.ask_again());
        assert_eq!(talk.system(), Some("Be brief."));
    }

    #[test]
    fn saved_conversations_come_back_and_nothing_else_does() {
        let talk = example();
        let json = talk.to_json();
        assert_eq!(Conversation::from_json(&json, 9).unwrap(), talk);
        let refuse = |text: &str| Conversation::from_json(text, 9).unwrap_err().to_string();
        assert_eq!(refuse(""), "there is no conversation in it");
        assert!(refuse("{").starts_with("not a saved conversation: "));
        assert!(refuse(&json.replace("\"low\"", "\"much\"")).contains("expected low, high"));
        assert!(refuse(&json.replace("[7,8]", "[7,9]")).ends_with("vocabulary of 9"));
        let other = json.replace("\"version\":1", "\"version\":2");
        assert_eq!(refuse(&other), "conversation: expected version 1, found 2");
    }
}

//! What a typed line means.

use std::path::PathBuf;

use anyhow::bail;

use crate::chat::Effort;

/// What can be typed.
pub(super) const HELP: &str = "\
/retry                     answer the last message again
/reset                     begin a new conversation; the system message stays
/system TEXT               set the system message; without TEXT show it, with - remove it
/think show|hide|on|off    show or hide reasoning (alone: the other); let the model think or not
/effort low|high|max|none  how hard the model is told to think
/save FILE, /load FILE     the conversation with its state, to go on later
/stats                     tokens, speed, cache
/quit                      leave, as does Ctrl-D
A line that ends in \\ goes on in the next; \"\"\" begins and ends a text of several lines;
// begins a message with a slash. Ctrl-C stops an answer and keeps what is there.";

/// Words that begin a command, for completion.
pub(super) const WORDS: [&str; 11] = [
    "/effort", "/exit", "/help", "/load", "/quit", "/reset", "/retry", "/save", "/stats",
    "/system", "/think",
];

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    Say(String),
    Retry,
    Reset,
    System(Option<String>),
    Effort(Option<Effort>),
    Thinking(bool),
    ShowReasoning(Show),
    Stats,
    Save(PathBuf),
    Load(PathBuf),
    Help,
    Quit,
}

/// Whether to show something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Show {
    Yes,
    No,
    /// What it was not before.
    Other,
}

impl Command {
    /// What `text` asks for; nothing if it is blank.
    ///
    /// # Errors
    /// It begins with a slash and is no command, or a command lacks its word.
    pub(super) fn parse(text: &str) -> anyhow::Result<Option<Self>> {
        let trimmed = text.trim();
        if trimmed.is_empty() {
            return Ok(None);
        }
        if let Some(message) = trimmed.strip_prefix("//") {
            return Ok(Some(Self::Say(format!("/{message}"))));
        }
        if !trimmed.starts_with('/') {
            return Ok(Some(Self::Say(text.to_owned())));
        }
        let (word, rest) = match trimmed.split_once(char::is_whitespace) {
            Some((word, rest)) => (word, rest.trim()),
            None => (trimmed, ""),
        };
        let path = || match rest {
            "" => bail!("{word} needs a file name"),
            rest => Ok(home(rest)),
        };
        Ok(Some(match (word, rest) {
            ("/retry", "") => Self::Retry,
            ("/reset", "") => Self::Reset,
            ("/system", "") => Self::System(None),
            ("/system", "-") => Self::System(Some(String::new())),
            ("/system", text) => Self::System(Some(text.to_owned())),
            ("/effort", "none") => Self::Effort(None),
            ("/effort", word) => Self::Effort(Some(Effort::parse(word, "/effort")?)),
            ("/think", "") => Self::ShowReasoning(Show::Other),
            ("/think", "show") => Self::ShowReasoning(Show::Yes),
            ("/think", "hide") => Self::ShowReasoning(Show::No),
            ("/think", "on") => Self::Thinking(true),
            ("/think", "off") => Self::Thinking(false),
            ("/think", _) => bail!("/think takes show, hide, on or off"),
            ("/stats", "") => Self::Stats,
            ("/save", _) => Self::Save(path()?),
            ("/load", _) => Self::Load(path()?),
            ("/help", _) => Self::Help,
            ("/quit" | "/exit", "") => Self::Quit,
            (word, _) if WORDS.contains(&word) => bail!("{word} stands alone"),
            (word, _) => bail!("there is no command {word}; /help lists them"),
        }))
    }
}

/// A path in which `~/` is the user's home.
fn home(path: &str) -> PathBuf {
    match (path.strip_prefix("~/"), std::env::home_dir()) {
        (Some(rest), Some(home)) => home.join(rest),
        _ => path.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_the_help_says() {
        let parse = |text: &str| Command::parse(text).map_err(|e| format!("{e:#}"));
        let say = |text: &str| Ok(Some(Command::Say(text.into())));
        assert_eq!(parse(" \n"), Ok(None));
        assert_eq!(parse("  two\nlines "), say("  two\nlines "));
        assert_eq!(parse("//etc is a folder"), say("/etc is a folder"));
        assert_eq!(parse("/save a b.k3 "), Ok(Some(Command::Save("a b.k3".into()))));
        assert_eq!(parse("/system  Be brief."), {
            Ok(Some(Command::System(Some("Be brief.".into()))))
        });
        assert_eq!(parse("/effort none"), Ok(Some(Command::Effort(None))));
        assert_eq!(parse("/effort low"), Ok(Some(Command::Effort(Some(Effort::Low)))));
        assert_eq!(parse("/think off"), Ok(Some(Command::Thinking(false))));
        assert_eq!(parse("/load"), Err("/load needs a file name".into()));
        assert_eq!(parse("/reset all"), Err("/reset stands alone".into()));
        assert_eq!(parse("/fly"), Err("there is no command /fly; /help lists them".into()));
        assert!(parse("/effort huge").is_err() && parse("/think hard").is_err());
        for word in WORDS.iter().filter(|word| !["/exit", "/help"].contains(word)) {
            assert!(HELP.contains(word), "{word}");
        }
    }
}

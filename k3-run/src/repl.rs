//! The terminal chat: reads a line, answers it, and remembers.
//!
//! On a terminal lines can be edited, Ctrl-C stops an answer and keeps the conversation,
//! and a live line tells how far a prompt is. Where standard input or output is no
//! terminal it is line in, answer out: answers alone on stdout, nothing animated.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::Context;
use k3_formats::tokenizer::Tokenizer;

use crate::chat::Markup;
use crate::engine::Engine;
use crate::sampler::SamplingParams;
use crate::session::Session;
use crate::speculate::Drafter;

mod answer;
mod command;
mod conversation;
mod input;
mod meter;
mod screen;
mod stats;

use command::{Command, HELP, Show};
pub use conversation::Conversation;
use input::{Input, Line};
use screen::Screen;

/// What a chat is told once.
#[derive(Debug, Clone)]
pub struct ChatOptions {
    /// How answers are sampled. The seed counts for the first one; later ones count on.
    pub sampling: SamplingParams,
    /// Most tokens of an answer; as many as fit if there is none.
    pub max_tokens: Option<usize>,
    /// Most tokens guessed per step.
    pub speculate: usize,
    /// Whether reasoning is shown.
    pub show_reasoning: bool,
    /// Where typed lines are kept.
    pub history: Option<PathBuf>,
    /// Session to begin with.
    pub load: Option<PathBuf>,
    /// Where the session goes at the end.
    pub save: Option<PathBuf>,
}

/// A running chat.
pub struct Repl<'a> {
    engine: Engine<'a>,
    tokenizer: Tokenizer,
    markup: Markup,
    stop_ids: Vec<u32>,
    session: Session,
    conversation: Conversation,
    drafter: Drafter,
    options: ChatOptions,
    /// Answers begun so far.
    answers: u64,
    screen: Screen,
    /// Set by Ctrl-C.
    interrupt: Arc<AtomicBool>,
}

/// Whether to go on reading lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Leave,
}

impl<'a> Repl<'a> {
    /// A chat that has not begun.
    ///
    /// # Errors
    /// The vocabulary has no chat format.
    pub fn new(
        engine: Engine<'a>,
        tokenizer: Tokenizer,
        stop_ids: Vec<u32>,
        session: Session,
        conversation: Conversation,
        options: ChatOptions,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            markup: Markup::of(&tokenizer)?,
            drafter: Drafter::new(options.speculate),
            engine,
            tokenizer,
            stop_ids,
            session,
            conversation,
            options,
            answers: 0,
            screen: Screen::new(),
            interrupt: Arc::new(AtomicBool::new(false)),
        })
    }

    /// Reads and answers until the input ends.
    ///
    /// # Errors
    /// Input or output fails; or, without a terminal, anything does.
    pub fn run(mut self) -> anyhow::Result<()> {
        let mut input = Input::open(self.options.history.as_deref())?;
        if let Some(path) = self.options.load.clone() {
            self.load(&path)?;
        }
        if input.is_terminal() {
            signal_hook::flag::register(signal_hook::consts::SIGINT, self.interrupt.clone())
                .context("cannot listen for Ctrl-C")?;
            self.greet();
        }
        loop {
            let text = match input.next()? {
                Line::Text(text) => text,
                Line::Interrupted => {
                    self.screen.note(format_args!("Ctrl-D or /quit leaves"));
                    continue;
                }
                Line::End => break,
            };
            match self.act(&text) {
                Ok(Flow::On) => {}
                Ok(Flow::Leave) => break,
                Err(error) if input.is_terminal() && !crate::report::is_closed(&error) => {
                    self.screen.error(&error);
                }
                Err(error) => return Err(error),
            }
        }
        match self.options.save.clone() {
            Some(path) => self.save(&path),
            None => Ok(()),
        }
    }

    fn greet(&mut self) {
        let (used, context) = (self.session.tokens().len(), self.session.context());
        let mode = self.conversation.mode();
        self.screen.note(format_args!(
            "{used} of {context} tokens of context in use; {mode}; /help lists commands"
        ));
    }

    /// Does what a line asks for.
    fn act(&mut self, text: &str) -> anyhow::Result<Flow> {
        let Some(command) = Command::parse(text)? else { return Ok(Flow::On) };
        match command {
            Command::Say(text) => {
                self.conversation.ask(text);
                self.answer()?;
            }
            Command::Retry => {
                if !self.conversation.ask_again() {
                    anyhow::bail!("nothing was asked yet");
                }
                self.answer()?;
            }
            Command::Reset => {
                self.conversation.clear();
                self.screen.note(format_args!("a new conversation"));
            }
            Command::System(None) => {
                let system = self.conversation.system().unwrap_or("there is no system message");
                let system = system.to_owned();
                self.screen.note(format_args!("{system}"));
            }
            Command::System(Some(text)) => {
                self.conversation.set_system(text);
                self.read_anew();
            }
            Command::Effort(effort) => {
                self.conversation.effort = effort;
                self.read_anew();
            }
            Command::Thinking(on) => {
                self.conversation.thinking = on;
                self.read_anew();
            }
            Command::ShowReasoning(show) => {
                self.options.show_reasoning = match show {
                    Show::Yes => true,
                    Show::No => false,
                    Show::Other => !self.options.show_reasoning,
                };
                let shown = if self.options.show_reasoning { "shown" } else { "hidden" };
                self.screen.note(format_args!("reasoning is {shown}"));
            }
            Command::Stats => {
                let stats = self.stats();
                self.screen.note(format_args!("{stats}"));
            }
            Command::Save(path) => self.save(&path)?,
            Command::Load(path) => self.load(&path)?,
            Command::Help => self.screen.note(format_args!("{HELP}")),
            Command::Quit => return Ok(Flow::Leave),
        }
        Ok(Flow::On)
    }

    /// Says what a change of the beginning of the prompt costs.
    fn read_anew(&mut self) {
        let mode = self.conversation.mode();
        let used = self.session.tokens().len();
        if used == 0 {
            self.screen.note(format_args!("{mode}"));
        } else {
            self.screen.note(format_args!(
                "{mode}; the conversation of {used} tokens is read anew with the next message"
            ));
        }
    }

    fn save(&mut self, path: &Path) -> anyhow::Result<()> {
        self.session.save(&self.engine, path, &self.conversation.to_json())?;
        let tokens = self.session.tokens().len();
        self.screen.note(format_args!("saved {tokens} tokens to {}", path.display()));
        Ok(())
    }

    fn load(&mut self, path: &Path) -> anyhow::Result<()> {
        let json = self.session.load(&self.engine, path)?;
        let vocab = self.engine.model().config.vocab;
        self.conversation = Conversation::from_json(&json, vocab).map_err(|e| e.in_file(path))?;
        let (turns, tokens) = (self.conversation.turns(), self.session.tokens().len());
        self.screen.note(format_args!("loaded {turns} turns, {tokens} tokens"));
        Ok(())
    }
}

//! One answer: the prompt is taken in, and tokens are chosen and shown as they come.

use std::sync::atomic::Ordering;

use k3_formats::tokenizer::Tokenizer;

use super::Repl;
use super::meter::Meter;
use super::screen::{Screen, Style};
use crate::chat::{Channel, Event, Reply, ReplyParser, Start, closed_reply};
use crate::engine::Cancelled;
use crate::sampler::{Sampler, SamplingParams};
use crate::speculate::decode;

/// Why no more tokens come, other than by the model's own choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cut {
    Stopped,
    Length,
    Full,
}

impl Repl<'_> {
    /// Answers the last message. An answer that is stopped is kept as far as it came.
    ///
    /// # Errors
    /// The prompt does not fit, reading fails, standard output is closed. What there is of
    /// the answer is kept.
    pub(super) fn answer(&mut self) -> anyhow::Result<()> {
        self.interrupt.store(false, Ordering::Relaxed);
        let prompt = self.conversation.prompt(&self.tokenizer)?;
        let mut meter = Meter::start(&self.engine);
        let screen = &mut self.screen;
        let advanced = self.session.advance_to(
            &mut self.engine,
            &prompt.ids,
            &prompt.turns,
            &self.interrupt,
            |advance| screen.live(meter.progress(advance)),
        );
        self.screen.clear_live();
        match advanced {
            Ok(advance) => meter.prompt_done(advance),
            Err(error) if error.is::<Cancelled>() => {
                let (read, total) = (self.session.tokens().len(), prompt.ids.len());
                self.screen.note(format_args!(
                    "stopped at {read} of {total} tokens; /retry goes on, a new message takes its place"
                ));
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        if let Some(problem) = self.session.take_checkpoint_problem() {
            self.screen.note(format_args!("note: {problem:#}"));
        }
        let start = Start::of(self.conversation.thinking);
        let sampler = self.sampler(&prompt.ids)?;
        let mut writing = Writing {
            tokenizer: &self.tokenizer,
            stop_ids: &self.stop_ids,
            sampler,
            parser: ReplyParser::new(self.markup.clone(), start),
            ids: Vec::new(),
            reply: Reply::default(),
            most: self.options.max_tokens.unwrap_or(usize::MAX),
            show_reasoning: self.options.show_reasoning && self.screen.on_terminal,
            screen: &mut self.screen,
            meter: &mut meter,
        };
        let mut next = writing.choose(self.session.logits());
        let result = loop {
            let id = match next {
                Ok(Some(id)) => id,
                Ok(None) => break Ok(None),
                Err(error) => break Err(error),
            };
            if writing.ids.len() >= writing.most {
                break Ok(Some(Cut::Length));
            }
            if self.session.tokens().len() == self.session.context() {
                break Ok(Some(Cut::Full));
            }
            next = decode(
                &mut self.session,
                &mut self.engine,
                id,
                &mut self.drafter,
                &self.interrupt,
                |logits| writing.choose(logits),
            );
            if next.as_ref().is_err_and(|error| error.is::<Cancelled>()) {
                break Ok(Some(Cut::Stopped));
            }
        };
        let ended = writing.end();
        let (ids, reply) = (writing.ids, writing.reply);
        let whole = closed_reply(&self.tokenizer, &self.markup, start, &ids);
        self.conversation.answered(reply, [prompt.opening, whole].concat());
        ended?;
        let note = match result? {
            None => "",
            Some(Cut::Stopped) => "stopped; ",
            Some(Cut::Length) => "cut at -n; ",
            Some(Cut::Full) => "the context is full: /reset begins anew; ",
        };
        self.screen.note(format_args!("{note}{}", meter.summary(&self.engine)));
        Ok(())
    }

    /// A sampler for an answer to `prompt`: the same seed gives the same chat.
    fn sampler(&mut self, prompt: &[u32]) -> anyhow::Result<Sampler> {
        let seed = self.options.sampling.seed.map(|seed| seed.wrapping_add(self.answers));
        let params = SamplingParams { seed, ..self.options.sampling.clone() };
        self.answers += 1;
        let mut sampler = Sampler::new(params, self.engine.model().config.vocab)?;
        sampler.prompt(prompt);
        Ok(sampler)
    }
}

/// An answer that grows.
struct Writing<'r> {
    tokenizer: &'r Tokenizer,
    stop_ids: &'r [u32],
    sampler: Sampler,
    parser: ReplyParser,
    ids: Vec<u32>,
    reply: Reply,
    most: usize,
    show_reasoning: bool,
    screen: &'r mut Screen,
    meter: &'r mut Meter,
}

impl Writing<'_> {
    /// Chooses a token and shows what it says; nothing is to follow after `None`.
    fn choose(&mut self, logits: &[f32]) -> anyhow::Result<Option<u32>> {
        let id = self.sampler.sample(logits)?;
        self.sampler.accept(id);
        self.ids.push(id);
        self.meter.tokens += 1;
        let mut events = Vec::new();
        let channel = self.parser.push(self.tokenizer, id, &mut events);
        self.show(&events)?;
        if channel == Channel::Reasoning && !self.show_reasoning {
            self.screen.live(self.meter.thinking());
        }
        let over = self.parser.ended() || self.stop_ids.contains(&id);
        Ok((!over).then_some(id))
    }

    fn show(&mut self, events: &[Event]) -> anyhow::Result<()> {
        for event in events {
            self.reply.add(event);
            match event {
                Event::Answer(text) => self.screen.text(text, Style::Answer)?,
                Event::Reasoning(text) if self.show_reasoning => {
                    self.screen.text(text, Style::Reasoning)?;
                }
                // No tools are offered; a model that calls one all the same is told apart.
                Event::Call { name, .. } => {
                    self.screen.text(&format!("[call of {name}] "), Style::Answer)?;
                }
                Event::Arguments { json, .. } => self.screen.text(json, Style::Answer)?,
                Event::Reasoning(_) | Event::CallEnd { .. } | Event::End => {}
            }
        }
        Ok(())
    }

    /// Shows what was held back.
    fn end(&mut self) -> anyhow::Result<()> {
        let mut events = Vec::new();
        self.parser.finish(&mut events);
        self.show(&events)?;
        Ok(self.screen.end_text()?)
    }
}

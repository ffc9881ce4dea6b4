//! One reply, token by token: sampled, taken apart, and checked for its end.

use k3_formats::tokenizer::{StreamDecoder, Tokenizer};

use super::error::ApiError;
use super::mailbox::{Logprob, Update};
use crate::chat::{Channel, Event, Markup, ReplyParser, Start};
use crate::sampler::{NoCandidates, Sampler, SamplingParams};
use crate::stop::{Stop, StopReason};

/// What a request says about its reply.
#[derive(Debug, Clone)]
pub(super) struct ReplyOptions {
    pub(super) sampling: SamplingParams,
    pub(super) stop: Vec<String>,
    /// Most tokens; as many as fit into the context if it does not say.
    pub(super) max_tokens: Option<usize>,
    pub(super) logprobs: bool,
    /// Whether the reply may call more than one tool.
    pub(super) parallel_calls: bool,
    pub(super) form: Form,
}

/// How the tokens are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// As a message of a chat.
    Chat(Start),
    /// As text.
    Text,
}

/// Why a reply is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

impl FinishReason {
    /// OpenAI's word.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// The end of a reply, and how many tokens all of it took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Finish {
    pub(super) reason: FinishReason,
    pub(super) prompt_tokens: usize,
    /// Of the prompt, those that a slot had taken in before.
    pub(super) cached_tokens: usize,
    /// All sampled tokens, the ending one included.
    pub(super) completion_tokens: usize,
    /// Those of them that are reasoning.
    pub(super) reasoning_tokens: usize,
}

/// A reply that grows.
#[derive(Debug)]
pub(super) struct Generation {
    sampler: Sampler,
    stop: Stop,
    reader: TokenReader,
    logprobs: bool,
    parallel_calls: bool,
    reasoning_tokens: usize,
    complete_calls: usize,
    events: Vec<Event>,
}

#[derive(Debug)]
enum TokenReader {
    Chat(ReplyParser),
    Text(StreamDecoder),
}

impl Generation {
    /// A reply to `prompt` for which the context has `room` more tokens.
    ///
    /// # Errors
    /// A parameter outside its range.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        markup: &Markup,
        stop_ids: &[u32],
        options: ReplyOptions,
        prompt: &[u32],
        room: usize,
    ) -> Result<Self, ApiError> {
        let mut sampler = Sampler::new(options.sampling, tokenizer.vocab_size())?;
        sampler.prompt(prompt);
        let max_tokens = options.max_tokens.unwrap_or(room).min(room);
        let mut ends = stop_ids.to_vec();
        let reader = match options.form {
            Form::Chat(start) => {
                ends.extend_from_slice(markup.ends());
                TokenReader::Chat(ReplyParser::new(markup.clone(), start))
            }
            Form::Text => TokenReader::Text(StreamDecoder::new()),
        };
        let stop = Stop::new(ends, options.stop, max_tokens)
            .map_err(|e| ApiError::invalid("stop", e.to_string()))?;
        Ok(Self {
            sampler,
            stop,
            reader,
            logprobs: options.logprobs,
            parallel_calls: options.parallel_calls,
            reasoning_tokens: 0,
            complete_calls: 0,
            events: Vec::new(),
        })
    }

    /// Tokens sampled so far.
    pub(super) fn tokens(&self) -> usize {
        self.stop.count()
    }

    /// Tokens of reasoning so far.
    pub(super) fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    /// Samples the next token from `logits: [vocab]` and adds to `updates` what it says.
    /// Also returns why the reply is over, if it is.
    ///
    /// # Errors
    /// The logits leave nothing to choose from.
    pub(super) fn next(
        &mut self,
        tokenizer: &Tokenizer,
        logits: &[f32],
        updates: &mut Vec<Update>,
    ) -> Result<(u32, Option<FinishReason>), NoCandidates> {
        let id = self.sampler.sample(logits)?;
        self.sampler.accept(id);
        self.events.clear();
        let channel = match &mut self.reader {
            TokenReader::Chat(parser) => parser.push(tokenizer, id, &mut self.events),
            TokenReader::Text(decoder) => text(tokenizer, decoder, id, &mut self.events),
        };
        self.reasoning_tokens += usize::from(channel == Channel::Reasoning);
        if self.logprobs && channel == Channel::Answer {
            let (logprob, top) = self.sampler.logprobs(logits, id)?;
            let token = crate::sampler::TokenLogprob { id, logprob };
            updates.push(Update::Logprob(Logprob { token, top: top.to_vec() }));
        }
        let answer = self.answer();
        let mut shown = String::new();
        let reason = self.stop.push(id, &answer, &mut shown);
        if matches!(reason, Some(StopReason::String(_))) {
            push_answer(shown, updates);
            return Ok((id, Some(FinishReason::Stop)));
        }
        // No stop string reaches over a call.
        if self.events.iter().any(|e| matches!(e, Event::Call { .. })) {
            self.stop.finish("", &mut shown);
        }
        push_answer(shown, updates);
        let last_call = self.push_events(updates);
        let reason = match reason {
            None if last_call => Some(FinishReason::ToolCalls),
            None => None,
            Some(StopReason::Length) => Some(self.finish(FinishReason::Length, updates)),
            Some(_) => Some(self.finish(FinishReason::Stop, updates)),
        };
        Ok((id, reason))
    }

    /// The answer's text in the events of this token.
    fn answer(&self) -> String {
        let text = |event: &Event| match event {
            Event::Answer(text) => Some(text.clone()),
            _ => None,
        };
        self.events.iter().filter_map(text).collect()
    }

    /// Passes on the events that are no text of the answer; true after the last call that
    /// the request allows.
    fn push_events(&mut self, updates: &mut Vec<Update>) -> bool {
        for event in self.events.drain(..) {
            match event {
                Event::Answer(_) | Event::End => continue,
                Event::CallEnd { .. } => self.complete_calls += 1,
                _ => {}
            }
            updates.push(Update::Event(event));
            if self.complete_calls > 0 && !self.parallel_calls {
                return true;
            }
        }
        false
    }

    /// Passes on what was held back.
    fn finish(&mut self, reason: FinishReason, updates: &mut Vec<Update>) -> FinishReason {
        match &mut self.reader {
            TokenReader::Chat(parser) => parser.finish(&mut self.events),
            TokenReader::Text(decoder) => self.events.push(Event::Answer(decoder.finish())),
        }
        let answer = self.answer();
        let mut shown = String::new();
        let found = self.stop.finish(&answer, &mut shown);
        push_answer(shown, updates);
        if found.is_some() {
            return FinishReason::Stop;
        }
        self.push_events(updates);
        match reason {
            FinishReason::Stop if self.complete_calls > 0 => FinishReason::ToolCalls,
            reason => reason,
        }
    }
}

fn text(
    tokenizer: &Tokenizer,
    decoder: &mut StreamDecoder,
    id: u32,
    events: &mut Vec<Event>,
) -> Channel {
    if tokenizer.is_special_flag(id) {
        return Channel::Markup;
    }
    events.push(Event::Answer(decoder.push(tokenizer.token_bytes(id).unwrap_or_default())));
    Channel::Answer
}

fn push_answer(text: String, updates: &mut Vec<Update>) {
    if !text.is_empty() {
        updates.push(Update::Event(Event::Answer(text)));
    }
}

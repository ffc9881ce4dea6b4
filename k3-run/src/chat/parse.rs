//! The model's reply, token by token, into reasoning, answer and tool calls.
//!
//! A reply that follows the format reads
//!
//! ```text
//! REASONING <|close|>think<|sep|>
//! <|open|>response<|sep|> ANSWER <|close|>response<|sep|>
//! <|open|>tools<|sep|>
//!   <|open|>call tool="NAME" index="1"<|sep|>
//!     <|open|>argument key="KEY" type="TYPE"<|sep|> VALUE <|close|>argument<|sep|> …
//!   <|close|>call<|sep|> …
//! <|close|>tools<|sep|>
//! <|close|>message<|sep|> <|end_of_msg|>
//! ```
//!
//! and one that does not still has a defined reading, in which no text is lost:
//!
//! * Text belongs to the open argument, else to the reasoning or to the answer, whichever
//!   came last; after the reasoning is closed, and after a call, that is the answer.
//! * Opening an element closes whatever cannot contain it. Closing an element closes what
//!   is open inside; closing one that is not open does nothing.
//! * A tag that another marker interrupts counts if it is complete.
//! * A tag that is unknown, malformed or cannot stand where it stands (an argument outside
//!   a call, a call without a name, a new message) is text, markers included.
//! * Control tokens without a meaning in a reply are left out.
//! * When the model ends the reply, open elements are closed. When a limit cuts it, a call
//!   stays incomplete and half a tag is dropped.

use k3_formats::tokenizer::{StreamDecoder, Tokenizer};

use super::arguments::CallArguments;
use super::header::{Header, Parsed, Side, Tag};
use super::markup::{Markup, Piece};
use super::reply::Event;

/// Where the prompt left the reply: inside the reasoning, or inside the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Reasoning,
    Answer,
}

impl Start {
    /// Where the generation prompt of a request leaves off.
    pub fn of(thinking: bool) -> Self {
        if thinking { Self::Reasoning } else { Self::Answer }
    }
}

/// What a token of the reply belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    Reasoning,
    Answer,
    /// An argument of a tool call.
    Call,
    /// Markers, tags and control tokens.
    Markup,
}

/// Incremental parser of one reply. Never panics, whatever the ids.
#[derive(Debug)]
pub struct ReplyParser {
    markup: Markup,
    state: State,
}

impl ReplyParser {
    /// A parser at the start of a reply.
    pub fn new(markup: Markup, start: Start) -> Self {
        Self { markup, state: State::new(start) }
    }

    /// Takes the next token and appends what is now certain to `events`. Tokens after the
    /// end of the reply are ignored.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32, events: &mut Vec<Event>) -> Channel {
        self.state.push(self.markup.piece(tokenizer, id), events)
    }

    /// Appends what was held back, when no more tokens come. After an ending token there is nothing.
    pub fn finish(&mut self, events: &mut Vec<Event>) {
        self.state.cut(events);
    }

    /// Whether the model has ended the reply.
    pub fn ended(&self) -> bool {
        self.state.ended
    }
}

#[derive(Debug)]
struct State {
    /// A tag that has begun.
    header: Option<Header>,
    /// Bytes of the current text that are no whole character yet.
    decoder: StreamDecoder,
    /// Where text outside of arguments goes.
    thinking: bool,
    call: Option<CallArguments>,
    /// Calls begun so far.
    calls: usize,
    ended: bool,
}

impl State {
    fn new(start: Start) -> Self {
        Self {
            header: None,
            decoder: StreamDecoder::new(),
            thinking: start == Start::Reasoning,
            call: None,
            calls: 0,
            ended: false,
        }
    }

    fn push(&mut self, piece: Piece<'_>, events: &mut Vec<Event>) -> Channel {
        if self.ended {
            return Channel::Markup;
        }
        match piece {
            Piece::Open => self.begin(Side::Open, events),
            Piece::Close => self.begin(Side::Close, events),
            Piece::Sep => match self.header.take() {
                Some(header) => self.resolve(&header, true, events),
                None => self.text(b"<|sep|>", events),
            },
            Piece::End => {
                self.interrupt(events);
                self.flush(events);
                self.close_call(events);
                self.ended = true;
                events.push(Event::End);
            }
            Piece::Hidden => {}
            Piece::Text(bytes) => {
                let Some(header) = &mut self.header else {
                    self.text(bytes, events);
                    return self.channel();
                };
                header.bytes.extend_from_slice(bytes);
                if !header.plausible() {
                    self.interrupt(events);
                }
            }
        }
        Channel::Markup
    }

    /// The reply was cut off.
    fn cut(&mut self, events: &mut Vec<Event>) {
        if self.ended {
            return;
        }
        if let Some(header) = self.header.take() {
            self.apply(&header, events);
        }
        self.flush(events);
        if let Some(call) = &mut self.call {
            let mut json = String::new();
            call.cut(&mut json);
            self.arguments(json, events);
        }
        self.call = None;
        self.ended = true;
    }

    fn channel(&self) -> Channel {
        match &self.call {
            Some(call) if call.is_open() => Channel::Call,
            _ if self.thinking => Channel::Reasoning,
            _ => Channel::Answer,
        }
    }

    fn begin(&mut self, side: Side, events: &mut Vec<Event>) {
        self.interrupt(events);
        self.header = Some(Header::new(side));
    }

    /// Ends a tag whose separator is missing.
    fn interrupt(&mut self, events: &mut Vec<Event>) {
        if let Some(header) = self.header.take() {
            self.resolve(&header, false, events);
        }
    }

    /// Does what a tag says; false if it says nothing or cannot stand here.
    fn apply(&mut self, header: &Header, events: &mut Vec<Event>) -> bool {
        header.parse().is_some_and(|parsed| match parsed.side {
            Side::Open => self.open(&parsed, events),
            Side::Close => {
                self.close(parsed.tag, events);
                true
            }
        })
    }

    /// Does what a tag says, or takes it as text.
    fn resolve(&mut self, header: &Header, separated: bool, events: &mut Vec<Event>) {
        if !self.apply(header, events) {
            self.text(header.side.marker(), events);
            self.text(&header.bytes, events);
            if separated {
                self.text(b"<|sep|>", events);
            }
        }
    }

    /// Opens an element; false if it cannot stand here.
    fn open(&mut self, parsed: &Parsed, events: &mut Vec<Event>) -> bool {
        match parsed.tag {
            Tag::Message => return false,
            Tag::Think | Tag::Response | Tag::Tools => {
                self.flush(events);
                self.close_call(events);
                self.thinking = parsed.tag == Tag::Think;
            }
            Tag::Call => {
                let Some(name) = parsed.attribute("tool").filter(|name| !name.is_empty()) else {
                    return false;
                };
                self.flush(events);
                self.close_call(events);
                self.thinking = false;
                events.push(Event::Call { index: self.calls, name: name.to_owned() });
                self.calls += 1;
                self.call = Some(CallArguments::default());
            }
            Tag::Argument => {
                let key = parsed.attribute("key");
                let (Some(key), Some(true)) =
                    (key, self.call.as_ref().map(CallArguments::takes_argument))
                else {
                    return false;
                };
                self.flush(events);
                self.in_call(events, |call, json| call.open(key, parsed.attribute("type"), json));
            }
            Tag::Json => {
                if !self.call.as_ref().is_some_and(CallArguments::takes_raw) {
                    return false;
                }
                self.flush(events);
                self.in_call(events, |call, _| call.open_raw());
            }
        }
        true
    }

    fn close(&mut self, tag: Tag, events: &mut Vec<Event>) {
        match tag {
            // Inside a call neither can be open.
            Tag::Think | Tag::Response if self.call.is_some() => {}
            Tag::Think => {
                self.flush(events);
                self.thinking = false;
            }
            Tag::Response => {}
            Tag::Argument | Tag::Json => {
                self.flush(events);
                self.in_call(events, CallArguments::close_element);
            }
            Tag::Call | Tag::Tools | Tag::Message => {
                self.flush(events);
                self.close_call(events);
                self.thinking &= tag != Tag::Message;
            }
        }
    }

    fn close_call(&mut self, events: &mut Vec<Event>) {
        self.in_call(events, CallArguments::close);
        if self.call.take().is_some() {
            events.push(Event::CallEnd { index: self.calls - 1 });
        }
    }

    /// Changes the open call, if there is one, and reports the JSON text that this gives.
    fn in_call(
        &mut self,
        events: &mut Vec<Event>,
        change: impl FnOnce(&mut CallArguments, &mut String),
    ) {
        if let Some(call) = &mut self.call {
            let mut json = String::new();
            change(call, &mut json);
            self.arguments(json, events);
        }
    }

    fn arguments(&self, json: String, events: &mut Vec<Event>) {
        if !json.is_empty() {
            events.push(Event::Arguments { index: self.calls - 1, json });
        }
    }

    fn text(&mut self, bytes: &[u8], events: &mut Vec<Event>) {
        let text = self.decoder.push(bytes);
        self.emit(text, events);
    }

    /// Ends the text so far: what is no whole character by now will not become one.
    fn flush(&mut self, events: &mut Vec<Event>) {
        let text = self.decoder.finish();
        self.emit(text, events);
    }

    fn emit(&mut self, text: String, events: &mut Vec<Event>) {
        if text.is_empty() {
            return;
        }
        match self.channel() {
            Channel::Call => self.in_call(events, |call, json| call.text(&text, json)),
            Channel::Reasoning => events.push(Event::Reasoning(text)),
            _ => events.push(Event::Answer(text)),
        }
    }
}

#[cfg(test)]
mod tests;

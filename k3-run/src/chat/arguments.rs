//! The arguments of one tool call, turned into OpenAI's JSON text while they arrive.
//!
//! Strings are escaped and passed on at once. Other types are held back until they are
//! complete: if they are JSON they are passed on as they are written, whatever type was
//! announced, and if not they become a string of that text. A `json` element, which is
//! how the format carries arguments that are no JSON object, is passed on unchanged.

use super::json::{self, Dialect, Json};
use super::message::is_blank;

/// The JSON text of one call, given out in pieces.
#[derive(Debug, Default)]
pub(super) struct CallArguments {
    form: Form,
    element: Option<Element>,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Form {
    /// Nothing was given out yet.
    #[default]
    Empty,
    /// An object with at least one member, not closed.
    Object,
    /// The text of a `json` element.
    Raw,
}

#[derive(Debug)]
enum Element {
    String,
    /// A value of another type, complete only at its end.
    Held(String),
    /// A `json` element, and whether it had anything but white space.
    Raw {
        blank: bool,
    },
}

impl CallArguments {
    /// Whether an argument is open, to which text belongs.
    pub(super) fn is_open(&self) -> bool {
        self.element.is_some()
    }

    /// Whether a named argument may be opened.
    pub(super) fn takes_argument(&self) -> bool {
        self.form != Form::Raw
    }

    /// Whether a `json` element may be opened.
    pub(super) fn takes_raw(&self) -> bool {
        self.form == Form::Empty
    }

    /// Opens an argument; without a type it is a string.
    pub(super) fn open(&mut self, key: &str, kind: Option<&str>, out: &mut String) {
        self.close_element(out);
        out.push_str(if self.form == Form::Empty { "{" } else { ", " });
        self.form = Form::Object;
        json::push_quoted(key, out);
        out.push_str(": ");
        self.element = Some(match kind {
            None | Some("string") => {
                out.push('"');
                Element::String
            }
            Some(_) => Element::Held(String::new()),
        });
    }

    /// Opens a `json` element.
    pub(super) fn open_raw(&mut self) {
        self.form = Form::Raw;
        self.element = Some(Element::Raw { blank: true });
    }

    /// Takes text of the open argument.
    pub(super) fn text(&mut self, text: &str, out: &mut String) {
        match &mut self.element {
            Some(Element::String) => json::push_escaped(text, out),
            Some(Element::Held(held)) => held.push_str(text),
            Some(Element::Raw { blank }) => {
                *blank &= is_blank(text);
                out.push_str(text);
            }
            None => {}
        }
    }

    /// Completes the open argument, if there is one.
    pub(super) fn close_element(&mut self, out: &mut String) {
        match self.element.take() {
            Some(Element::String) => out.push('"'),
            Some(Element::Held(held)) => match Json::parse(&held, Dialect::Strict) {
                Ok(_) => out.push_str(held.trim()),
                Err(_) => json::push_quoted(&held, out),
            },
            Some(Element::Raw { blank: true }) => out.push_str("{}"),
            Some(Element::Raw { blank: false }) | None => {}
        }
    }

    /// Completes the call.
    pub(super) fn close(&mut self, out: &mut String) {
        self.close_element(out);
        match self.form {
            Form::Empty => out.push_str("{}"),
            Form::Object => out.push('}'),
            Form::Raw => {}
        }
    }

    /// Gives out what was held back of a call that ends in the middle. The text stays
    /// broken JSON on purpose: nobody shall run half a command.
    pub(super) fn cut(&mut self, out: &mut String) {
        if let Some(Element::Held(held)) = self.element.take() {
            out.push_str(&held);
        }
    }
}

//! Thinking and effort, under the several names that clients use for them.

use super::fields::Fields;
use super::{Defaults, Effort};
use crate::chat::error::{ChatError, ChatErrorKind};
use crate::chat::json::Json;

/// A setting that several fields may give, which must then agree.
struct Setting<T> {
    value: Option<T>,
    place: String,
}

impl<T: Copy + PartialEq> Setting<T> {
    fn new() -> Self {
        Self { value: None, place: String::new() }
    }

    fn set(&mut self, value: T, place: String) -> Result<(), ChatError> {
        if self.value.is_some_and(|earlier| earlier != value) {
            let problem = format!("contradicts {}", self.place);
            return Err(ChatError::new(ChatErrorKind::Invalid, place, problem));
        }
        *self = Self { value: Some(value), place };
        Ok(())
    }
}

/// Whether to think, and the effort to tell the model of.
pub(super) fn read(
    fields: &Fields<'_>,
    defaults: Defaults,
) -> Result<(bool, Option<Effort>), ChatError> {
    let mut thinking = Setting::new();
    let mut effort = Setting::new();
    let template = fields.object("chat_template_kwargs")?;
    for fields in std::iter::once(fields).chain(&template) {
        for key in ["thinking", "enable_thinking"] {
            if let Some(on) = switch(fields, key)? {
                thinking.set(on, fields.path(key))?;
            }
        }
        for key in ["effort", "thinking_effort", "reasoning_effort"] {
            match fields.string(key)? {
                None => {}
                Some("none") if key == "reasoning_effort" => {
                    thinking.set(false, fields.path(key))?;
                }
                Some("none") => effort.set(None, fields.path(key))?,
                Some(word) => {
                    let place = fields.path(key);
                    effort.set(Some(Effort::parse(word, &place)?), place)?;
                }
            }
        }
    }
    Ok((thinking.value.unwrap_or(defaults.thinking), effort.value.unwrap_or(defaults.effort)))
}

/// A boolean, or Moonshot's `{"type": "enabled" | "disabled"}`.
fn switch(fields: &Fields<'_>, key: &str) -> Result<Option<bool>, ChatError> {
    let Some(value @ Json::Object(_)) = fields.get(key) else { return fields.boolean(key) };
    let place = fields.path(key);
    match Fields::of(value, &place)?.required_string("type", 64)? {
        "enabled" => Ok(Some(true)),
        "disabled" => Ok(Some(false)),
        other => Err(ChatError::unknown(format!("{place}.type"), "enabled or disabled", other)),
    }
}

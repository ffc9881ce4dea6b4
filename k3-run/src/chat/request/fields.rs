//! Typed access to the members of one JSON object, with errors that name the path.

use crate::chat::error::ChatError;
use crate::chat::json::Json;

/// An object of the request and where it stands in it.
#[derive(Debug, Clone)]
pub(super) struct Fields<'a> {
    value: &'a Json,
    place: String,
}

impl<'a> Fields<'a> {
    pub(super) fn of(value: &'a Json, place: &str) -> Result<Self, ChatError> {
        match value {
            Json::Object(_) => Ok(Self { value, place: place.to_owned() }),
            other => Err(ChatError::expected(place, "an object", other)),
        }
    }

    pub(super) fn value(&self) -> &'a Json {
        self.value
    }

    /// Where `key` stands in the request.
    pub(super) fn path(&self, key: &str) -> String {
        if self.place.is_empty() { key.to_owned() } else { format!("{}.{key}", self.place) }
    }

    /// The value of `key`; `null` counts as absent.
    pub(super) fn get(&self, key: &str) -> Option<&'a Json> {
        self.value.get(key).filter(|value| **value != Json::Null)
    }

    pub(super) fn string(&self, key: &str) -> Result<Option<&'a str>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(other) => Err(ChatError::expected(self.path(key), "a string", other)),
        }
    }

    /// A string of at most `bound` bytes; an empty one counts as absent.
    pub(super) fn name(&self, key: &str, bound: usize) -> Result<Option<&'a str>, ChatError> {
        let text = self.string(key)?.filter(|text| !text.is_empty());
        match text {
            Some(text) if text.len() > bound => {
                Err(ChatError::too_large(self.path(key), bound, "bytes"))
            }
            _ => Ok(text),
        }
    }

    pub(super) fn required_string(&self, key: &str, bound: usize) -> Result<&'a str, ChatError> {
        self.name(key, bound)?.ok_or_else(|| ChatError::missing(self.path(key), "a string"))
    }

    pub(super) fn boolean(&self, key: &str) -> Result<Option<bool>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(ChatError::expected(self.path(key), "true or false", other)),
        }
    }

    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, ChatError> {
        self.get(key).map(|value| Self::of(value, &self.path(key))).transpose()
    }

    /// A list of at most `bound` items.
    pub(super) fn list(&self, key: &str, bound: usize) -> Result<Option<&'a [Json]>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Array(items)) if items.len() > bound => {
                Err(ChatError::too_large(self.path(key), bound, "items"))
            }
            Some(Json::Array(items)) => Ok(Some(items)),
            Some(other) => Err(ChatError::expected(self.path(key), "a list", other)),
        }
    }
}

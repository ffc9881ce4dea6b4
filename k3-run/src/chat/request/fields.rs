//! Typed access to the members of one JSON object, with errors that name the path.

use crate::chat::error::ChatError;
use crate::chat::json::Json;

/// An object of the request and where it stands in it.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    value: &'a Json,
    place: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn of(value: &'a Json, place: &str) -> Result<Self, ChatError> {
        match value {
            Json::Object(_) => Ok(Self { value, place: place.to_owned() }),
            other => Err(ChatError::expected(place, "an object", other)),
        }
    }

    pub(crate) fn value(&self) -> &'a Json {
        self.value
    }

    /// Where `key` stands in the request.
    pub(crate) fn path(&self, key: &str) -> String {
        if self.place.is_empty() { key.to_owned() } else { format!("{}.{key}", self.place) }
    }

    /// The value of `key`; `null` counts as absent.
    pub(crate) fn get(&self, key: &str) -> Option<&'a Json> {
        self.value.get(key).filter(|value| **value != Json::Null)
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::String(text)) => Ok(Some(text)),
            Some(other) => Err(ChatError::expected(self.path(key), "a string", other)),
        }
    }

    /// A string of at most `bound` bytes; an empty one counts as absent.
    pub(crate) fn name(&self, key: &str, bound: usize) -> Result<Option<&'a str>, ChatError> {
        let text = self.string(key)?.filter(|text| !text.is_empty());
        match text {
            Some(text) if text.len() > bound => {
                Err(ChatError::too_large(self.path(key), bound, "bytes"))
            }
            _ => Ok(text),
        }
    }

    pub(crate) fn required_string(&self, key: &str, bound: usize) -> Result<&'a str, ChatError> {
        self.name(key, bound)?.ok_or_else(|| ChatError::missing(self.path(key), "a string"))
    }

    pub(crate) fn boolean(&self, key: &str) -> Result<Option<bool>, ChatError> {
        match self.get(key) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(ChatError::expected(self.path(key), "true or false", other)),
        }
    }

    /// A finite number.
    pub(crate) fn number(&self, key: &str) -> Result<Option<f64>, ChatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value {
            Json::Number(text) => text.parse().ok().filter(|n: &f64| n.is_finite()),
            _ => None,
        };
        number.map(Some).ok_or_else(|| ChatError::expected(self.path(key), "a number", value))
    }

    /// A whole number of 64 bits.
    pub(crate) fn integer(&self, key: &str) -> Result<Option<i64>, ChatError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = match value {
            Json::Number(text) => text.parse().ok(),
            _ => None,
        };
        number.map(Some).ok_or_else(|| ChatError::expected(self.path(key), "a whole number", value))
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, ChatError> {
        self.get(key).map(|value| Self::of(value, &self.path(key))).transpose()
    }

    /// A list of at most `bound` items.
    pub(crate) fn list(&self, key: &str, bound: usize) -> Result<Option<&'a [Json]>, ChatError> {
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

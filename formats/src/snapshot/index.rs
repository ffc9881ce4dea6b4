//! `model.safetensors.index.json`: which shard each tensor is in.
//!
//! The release's index is 60 MB and in no useful order, so it is read in one
//! borrowed pass and kept as names with shard numbers.

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::path::Path;

use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{check_plain_name, numbers};
use crate::{Error, Result, text_file};

/// Longest index that is read, in bytes: ten times the release's.
const MAX_INDEX: u64 = 600 << 20;

/// Tensor names and the shard that holds each.
#[derive(Debug)]
pub struct WeightIndex {
    files: Vec<String>,
    shard_of: HashMap<Box<str>, u32>,
}

impl WeightIndex {
    /// Reads the index.
    ///
    /// # Errors
    /// Not JSON, no weight map, a name listed twice, a file name that leaves the folder.
    pub fn read(path: &Path) -> Result<Self> {
        let text = text_file::downloaded(path, MAX_INDEX);
        text.and_then(|text| Self::parse(&text))
            .map_err(|e| e.in_file(path).hint("the index is damaged; download it again"))
    }

    /// Parses the text of an index.
    ///
    /// # Errors
    /// As [`WeightIndex::read`].
    pub fn parse(text: &str) -> Result<Self> {
        let raw: RawIndex<'_> = serde_json::from_str(text).map_err(|e| {
            Error::malformed(format!("not a valid index: {e}"))
                .hint("delete the index (it is optional) or download it again")
        })?;
        let entries = raw.weight_map.0;
        let files: BTreeSet<&str> = entries.iter().map(|(_, file)| file.as_ref()).collect();
        let files: Vec<String> = files.into_iter().map(str::to_owned).collect();
        files.iter().try_for_each(|f| check_plain_name(f))?;
        let number = numbers(&files);
        let mut shard_of = HashMap::with_capacity(entries.len());
        for (name, file) in &entries {
            let shard = u32::try_from(number[file.as_ref()]).expect("bounded by MAX_INDEX");
            if shard_of.insert(Box::from(name.as_ref()), shard).is_some() {
                return Err(Error::malformed("listed twice").item(name.clone().into_owned()));
            }
        }
        Ok(Self { files, shard_of })
    }

    /// Shard files in name order.
    pub fn files(&self) -> &[String] {
        &self.files
    }

    /// Number of the shard, a place in [`WeightIndex::files`], that holds `tensor`.
    pub fn shard_of(&self, tensor: &str) -> Option<usize> {
        self.shard_of.get(tensor).map(|&n| n as usize)
    }

    /// Tensors with their shard numbers, in no order.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, usize)> {
        self.shard_of.iter().map(|(name, &n)| (name.as_ref(), n as usize))
    }

    /// How many tensors the index lists.
    pub fn len(&self) -> usize {
        self.shard_of.len()
    }

    /// Whether the index lists nothing.
    pub fn is_empty(&self) -> bool {
        self.shard_of.is_empty()
    }
}

#[derive(Deserialize)]
struct RawIndex<'a> {
    #[serde(borrow)]
    weight_map: Pairs<'a>,
}

#[derive(Deserialize)]
struct Text<'a>(#[serde(borrow)] Cow<'a, str>);

struct Pairs<'a>(Vec<(Cow<'a, str>, Cow<'a, str>)>);

impl<'de: 'a, 'a> Deserialize<'de> for Pairs<'a> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Pairs<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensor names and file names")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let mut pairs = Vec::new();
                while let Some((Text(name), Text(file))) = map.next_entry()? {
                    pairs.push((name, file));
                }
                Ok(Pairs(pairs))
            }
        }
        d.deserialize_map(InOrder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_follow_file_names() {
        let text = r#"{"metadata":{"total_size":1},"weight_map":{"x":"b.safetensors","y":"a.safetensors"}}"#;
        let index = WeightIndex::parse(text).unwrap();
        assert_eq!(index.files(), ["a.safetensors", "b.safetensors"]);
        assert_eq!(index.shard_of("x"), Some(1));
        assert_eq!(index.shard_of("z"), None);
    }

    #[test]
    fn paths_and_repeats_are_refused() {
        for file in ["../x", "/etc/passwd", "a/b", "..", "", "a\\\\b", "a/../b"] {
            let text = format!(r#"{{"weight_map":{{"x":"{file}"}}}}"#);
            let e = WeightIndex::parse(&text).unwrap_err().to_string();
            assert!(e.contains("leads out of the snapshot"), "{e}");
        }
        let e = WeightIndex::parse(r#"{"weight_map":{"x":"a","x":"b"}}"#).unwrap_err();
        assert_eq!(e.to_string(), "x: listed twice");
    }
}

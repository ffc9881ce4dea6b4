//! The header of one safetensors file: read, bounded and checked without the data.
//!
//! The `safetensors` crate wants the whole buffer, keeps the last of two equal
//! names and does not say which tensor is wrong, so the few rules are checked here
//! one by one; its dtype table stays the authority.

use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::io::Read;
use std::path::Path;

use safetensors::Dtype;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::digest::Digest;
use crate::{Error, Result, dtype, text_file};

/// Longest header that readers of the format accept, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;

/// One tensor of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, unique in the file.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape, outermost first.
    pub shape: Vec<usize>,
    /// First byte, counted from the start of the data.
    pub begin: u64,
    /// One past the last byte.
    pub end: u64,
}

impl TensorInfo {
    /// Bytes of data.
    pub fn bytes(&self) -> u64 {
        self.end - self.begin
    }
}

/// A checked header: its tensors cover the data of the file without holes or overlaps.
#[derive(Debug, Clone)]
pub struct Header {
    /// File offset of the first data byte: 8 + header length.
    pub data_start: u64,
    /// Size of the whole file in bytes.
    pub file_size: u64,
    /// SHA-256 of the header's JSON bytes, padding included.
    pub digest: Digest,
    /// Tensors in data order.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Reads and checks the header of a file.
    ///
    /// # Errors
    /// Names the file and, where there is one, the tensor: not a safetensors file (with
    /// what it looks like), truncated, trailing bytes, holes, overlaps, unknown dtypes,
    /// shapes that do not fit their bytes, repeated names.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_checked(path).map_err(|e| e.in_file(path))
    }

    fn read_checked(path: &Path) -> Result<Self> {
        let io = |doing| move |e| Error::io(path, doing, e);
        let mut file = fs_err::File::open(path).map_err(io("open"))?.into_file();
        let file_size = file.metadata().map_err(io("read the size"))?.len();
        let mut start = Vec::with_capacity(64);
        file.by_ref().take(64).read_to_end(&mut start).map_err(io("read"))?;
        let length = header_length(&start, file_size)?;
        let mut json = start.split_off(8);
        if json.len() as u64 > length {
            json.truncate(usize::try_from(length).expect("shorter than the buffer"));
        }
        let rest = length - json.len() as u64;
        json.reserve_exact(usize::try_from(rest).expect("bounded by MAX_HEADER"));
        file.take(rest).read_to_end(&mut json).map_err(io("read the header"))?;
        Self::parse(&json, file_size)
    }

    /// Checks the JSON bytes of a header against the size of its file.
    ///
    /// # Errors
    /// As [`Header::read`], without the file's name.
    pub fn parse(json: &[u8], file_size: u64) -> Result<Self> {
        Self::parse_checked(json, file_size).map_err(|e| e.hint(REFETCH))
    }

    fn parse_checked(json: &[u8], file_size: u64) -> Result<Self> {
        let entries: Entries<'_> = serde_json::from_slice(json)
            .map_err(|e| Error::malformed(format!("header is not valid: {e}")).hint(REFETCH))?;
        let mut tensors = Vec::with_capacity(entries.0.len());
        for (name, entry) in entries.0 {
            tensors.push(entry.check(&name).map_err(|e| e.item(name.into_owned()))?);
        }
        tensors.sort_by_key(|t| (t.begin, t.end));
        let header = Self {
            data_start: 8 + json.len() as u64,
            file_size,
            digest: Digest::of(json),
            tensors,
        };
        header.check_names()?;
        header.check_coverage()?;
        Ok(header)
    }

    fn check_names(&self) -> Result<()> {
        let mut seen = HashSet::with_capacity(self.tensors.len());
        match self.tensors.iter().find(|t| !seen.insert(t.name.as_str())) {
            Some(t) => {
                Err(Error::malformed("the header lists this tensor twice").item(t.name.clone()))
            }
            None => Ok(()),
        }
    }

    fn check_coverage(&self) -> Result<()> {
        let Some(data) = self.file_size.checked_sub(self.data_start) else {
            let problem = format!(
                "expected a header within {} bytes, found one that ends at {}",
                self.file_size, self.data_start
            );
            return Err(Error::malformed(problem).hint(REFETCH));
        };
        let mut at = 0;
        for t in &self.tensors {
            if t.begin > at {
                let problem =
                    format!("expected data at byte {at}, found a gap of {} bytes", t.begin - at);
                return Err(Error::malformed(problem).item(t.name.clone()));
            }
            if t.begin < at {
                let problem = format!("overlaps the tensor before it by {} bytes", at - t.begin);
                return Err(Error::malformed(problem).item(t.name.clone()));
            }
            if t.end > data {
                let end = self.tensors.last().map_or(0, |last| last.end);
                let problem = format!(
                    "file is truncated: expected {} bytes, found {}",
                    self.data_start.saturating_add(end),
                    self.file_size
                );
                return Err(Error::mismatch(problem).item(t.name.clone()).hint(REFETCH));
            }
            at = t.end;
        }
        if at < data {
            let problem = format!("{} bytes after the last tensor belong to nothing", data - at);
            return Err(Error::malformed(problem).hint(REFETCH));
        }
        Ok(())
    }
}

const REFETCH: &str = "the file is damaged or incomplete; download it again";

/// The header length in the first 8 bytes, bounded; says what else the file looks like.
fn header_length(start: &[u8], file_size: u64) -> Result<u64> {
    if let Some(error) = text_file::lfs_pointer(start) {
        return Err(error);
    }
    let Some(word) = start.first_chunk::<8>() else {
        return Err(Error::malformed(format!(
            "not a safetensors file: expected at least 8 bytes, found {file_size}"
        ))
        .hint(REFETCH));
    };
    let looks_like_markup = start.trim_ascii_start().first() == Some(&b'<');
    let length = u64::from_le_bytes(*word);
    if length > MAX_HEADER || length > file_size - 8 {
        let what = if looks_like_markup { " (it looks like a web page)" } else { "" };
        let limit = MAX_HEADER.min(file_size - 8);
        return Err(Error::malformed(format!(
            "not a safetensors file{what}: expected a header length of at most {limit} bytes, found {length}"
        ))
        .hint(REFETCH));
    }
    Ok(length)
}

#[derive(Deserialize)]
struct Entry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

impl Entry<'_> {
    fn check(self, name: &str) -> Result<TensorInfo> {
        let dtype = dtype::from_name(&self.dtype)
            .ok_or_else(|| Error::unsupported(format!("unknown dtype {:?}", self.dtype)))?;
        let (begin, end) = self.data_offsets;
        if end < begin {
            return Err(Error::malformed(format!(
                "data ends at {end}, before it begins at {begin}"
            )));
        }
        let elements = self.shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d));
        let expected = elements.and_then(|n| dtype::bytes_of(dtype, n));
        if expected != Some(end - begin) {
            let expected =
                expected.map_or_else(|| "an impossible size".into(), |n| format!("{n} bytes"));
            return Err(Error::malformed(format!(
                "{dtype} {:?} takes {expected}, found {} bytes",
                self.shape,
                end - begin
            )));
        }
        let shape = self
            .shape
            .iter()
            .map(|&d| usize::try_from(d))
            .collect::<Result<_, _>>()
            .map_err(|_| Error::unsupported("shape does not fit this machine"))?;
        Ok(TensorInfo { name: name.to_owned(), dtype, shape, begin, end })
    }
}

/// The header as a list in file order, so that repeated names stay visible.
struct Entries<'a>(Vec<(Cow<'a, str>, Entry<'a>)>);

impl<'de> Deserialize<'de> for Entries<'de> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct InOrder;
        impl<'de> Visitor<'de> for InOrder {
            type Value = Entries<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
                let (mut entries, mut metadata) = (Vec::new(), false);
                while let Some(Name(name)) = map.next_key()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut metadata, true) {
                            return Err(M::Error::custom("it has \"__metadata__\" twice"));
                        }
                        map.next_value::<serde::de::IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        d.deserialize_map(InOrder)
    }
}

/// `Cow<str>` that borrows: serde alone always copies a bare one.
#[derive(Deserialize)]
struct Name<'a>(#[serde(borrow)] Cow<'a, str>);

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str, data: u64) -> Result<Header> {
        Header::parse(json.as_bytes(), 8 + json.len() as u64 + data)
    }

    #[test]
    fn good_header_comes_out_in_data_order() {
        let json = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"F32","shape":[2],"data_offsets":[3,11]},
            "a":{"dtype":"U8","shape":[3],"data_offsets":[0,3],"extra":1},
            "z":{"dtype":"BF16","shape":[0],"data_offsets":[11,11]}}   "#;
        let h = parse(json, 11).unwrap();
        let names: Vec<_> = h.tensors.iter().map(|t| t.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "z"]);
        assert_eq!(h.tensors[1].bytes(), 8);
    }

    #[test]
    fn every_damage_is_named() {
        let entry = |name: &str, dtype: &str, shape: &str, a: u64, b: u64| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{a},{b}]}}"#)
        };
        let one = entry("a", "U8", "[4]", 0, 4);
        for (json, data, expected) in [
            (format!("{{{one},{one}}}"), 4, "a: the header lists this tensor twice"),
            (
                format!("{{{one},{}}}", entry("b", "U8", "[4]", 6, 10)),
                10,
                "b: expected data at byte 4, found a gap of 2 bytes",
            ),
            (
                format!("{{{one},{}}}", entry("b", "U8", "[4]", 2, 6)),
                6,
                "b: overlaps the tensor before it by 2 bytes",
            ),
            (format!("{{{one}}}"), 3, "a: file is truncated"),
            (format!("{{{one}}}"), 9, "5 bytes after the last tensor"),
            (format!("{{{}}}", entry("a", "Q5", "[4]", 0, 4)), 4, "a: unknown dtype \"Q5\""),
            (
                format!("{{{}}}", entry("a", "F32", "[4]", 0, 4)),
                4,
                "a: F32 [4] takes 16 bytes, found 4 bytes",
            ),
            (
                format!("{{{}}}", entry("a", "F32", "[4294967296,4294967296]", 0, 4)),
                4,
                "an impossible size",
            ),
            (format!("{{{}}}", entry("a", "U8", "[4]", 4, 0)), 4, "before it begins"),
            ("[]".into(), 0, "header is not valid"),
            (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, "\"__metadata__\" twice"),
        ] {
            let e = parse(&json, data).unwrap_err().to_string();
            assert!(e.contains(expected), "{e:?} lacks {expected:?}");
        }
    }

    #[test]
    fn files_that_are_something_else() {
        for (bytes, size, expected) in [
            (&b"version https://git-lfs.github.com/spec/v1"[..], 134, "Git LFS pointer"),
            (b"", 0, "found 0"),
            (b"<!DOCTYPE html><html>", 21, "web page"),
            (b"\xff\xff\xff\xff\xff\xff\xff\x7f{}", 10, "found 9223372036854775807"),
        ] {
            let e = header_length(bytes, size).unwrap_err().to_string();
            assert!(e.contains(expected), "{e:?} lacks {expected:?}");
        }
    }
}

//! The inside of a tag: `call tool="NAME" index="1"`.

/// Longest tag that is waited for, in bytes. A tool's name and an argument's key fit many times.
const MAX_BYTES: usize = 8192;

/// The elements of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tag {
    Message,
    Think,
    Response,
    Tools,
    Call,
    Argument,
    Json,
}

const TAGS: [(&str, Tag); 7] = [
    ("message", Tag::Message),
    ("think", Tag::Think),
    ("response", Tag::Response),
    ("tools", Tag::Tools),
    ("call", Tag::Call),
    ("argument", Tag::Argument),
    ("json", Tag::Json),
];

impl Tag {
    fn takes_attributes(self) -> bool {
        matches!(self, Self::Message | Self::Call | Self::Argument | Self::Json)
    }
}

/// Whether a tag is being opened or closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Open,
    Close,
}

impl Side {
    /// The marker in front of the tag, as text.
    pub(super) fn marker(self) -> &'static [u8] {
        match self {
            Self::Open => b"<|open|>",
            Self::Close => b"<|close|>",
        }
    }
}

/// A tag that is still arriving.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) side: Side,
    pub(super) bytes: Vec<u8>,
}

/// A complete tag.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Parsed {
    pub(super) side: Side,
    pub(super) tag: Tag,
    attributes: Vec<(String, String)>,
}

impl Parsed {
    /// The value of an attribute, of which the first of a name counts.
    pub(super) fn attribute(&self, key: &str) -> Option<&str> {
        self.attributes.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }
}

impl Header {
    pub(super) fn new(side: Side) -> Self {
        Self { side, bytes: Vec::new() }
    }

    /// Whether this is a known tag, or may become one with more bytes.
    pub(super) fn plausible(&self) -> bool {
        if self.bytes.len() > MAX_BYTES {
            return false;
        }
        match self.split() {
            None => TAGS.iter().any(|(name, _)| name.as_bytes().starts_with(&self.bytes)),
            Some((name, _)) => {
                self.side == Side::Open && find(name).is_some_and(Tag::takes_attributes)
            }
        }
    }

    /// The tag, if it is complete and well formed.
    pub(super) fn parse(&self) -> Option<Parsed> {
        let (name, rest) = self.split().unwrap_or((&self.bytes, b""));
        let tag = find(name)?;
        let may_have_attributes = self.side == Side::Open && tag.takes_attributes();
        if !rest.is_empty() && !may_have_attributes {
            return None;
        }
        let attributes = attributes(&String::from_utf8_lossy(rest))?;
        Some(Parsed { side: self.side, tag, attributes })
    }

    /// The name, and from the first space on the attributes.
    fn split(&self) -> Option<(&[u8], &[u8])> {
        let space = self.bytes.iter().position(|&b| b == b' ')?;
        Some(self.bytes.split_at(space))
    }
}

fn find(name: &[u8]) -> Option<Tag> {
    TAGS.iter().find(|(known, _)| known.as_bytes() == name).map(|(_, tag)| *tag)
}

/// Reads ` key="value"` any number of times.
fn attributes(mut rest: &str) -> Option<Vec<(String, String)>> {
    let mut attributes = Vec::new();
    while !rest.is_empty() {
        let (key, after) = rest.strip_prefix(' ')?.split_once("=\"")?;
        let (value, after) = after.split_once('"')?;
        if key.is_empty() || !key.bytes().all(|b| b.is_ascii_lowercase()) {
            return None;
        }
        // The encoder escapes `&` first, so it is the last to come back.
        let value = value.replace("&quot;", "\"").replace("&amp;", "&");
        attributes.push((key.to_owned(), value));
        rest = after;
    }
    Some(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(side: Side, text: &str) -> Header {
        Header { side, bytes: text.as_bytes().to_vec() }
    }

    #[test]
    fn attributes_are_unescaped() {
        let parsed = header(Side::Open, r#"call tool="a &quot;b&quot; &amp;quot; <c>" index="1""#);
        let parsed = parsed.parse().unwrap();
        assert_eq!(parsed.tag, Tag::Call);
        assert_eq!(parsed.attribute("tool"), Some(r#"a "b" &quot; <c>"#));
        assert_eq!(parsed.attribute("index"), Some("1"));
        assert_eq!(parsed.attribute("x"), None);
    }

    #[test]
    fn what_is_no_tag_does_not_parse() {
        for text in [
            "",
            "thin",
            "thinks",
            "think ",
            "Think",
            r#"call tool="a"#,
            r#"call tool="a"b"#,
            "call  ",
            r#"call a b="c""#,
            r#"call ="c""#,
        ] {
            assert_eq!(header(Side::Open, text).parse(), None, "{text:?}");
        }
        assert_eq!(header(Side::Close, r#"call tool="a""#).parse(), None);
    }

    #[test]
    fn a_tag_is_waited_for_only_while_it_may_come() {
        for text in ["", "t", "think", "call", "call too", r#"argument key="a b c"#] {
            assert!(header(Side::Open, text).plausible(), "{text:?}");
        }
        for text in ["x", "thinking", "think ", "tools a", "message\n"] {
            assert!(!header(Side::Open, text).plausible(), "{text:?}");
        }
        assert!(!header(Side::Close, "call ").plausible());
        let long = format!("argument key=\"{}", "a".repeat(MAX_BYTES));
        assert!(!header(Side::Open, &long).plausible());
    }
}

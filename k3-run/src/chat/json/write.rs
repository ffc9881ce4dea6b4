//! Printing, byte for byte what `json.dumps(..., ensure_ascii=False)` gives.

use std::fmt::Write;

use super::Json;

/// Text between the items of a list or object, and between a key and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Separators {
    item: &'static str,
    key: &'static str,
}

impl Separators {
    /// `json.dumps` by default: tool arguments.
    pub const SPACED: Self = Self { item: ", ", key: ": " };
    /// No spaces: tool declarations and schemas.
    pub const COMPACT: Self = Self { item: ",", key: ":" };
}

pub(super) fn value(value: &Json, separators: Separators, out: &mut String) {
    match value {
        Json::Null => out.push_str("null"),
        Json::Bool(true) => out.push_str("true"),
        Json::Bool(false) => out.push_str("false"),
        Json::Number(text) => out.push_str(text),
        Json::String(text) => super::push_quoted(text, out),
        Json::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push_str(separators.item);
                }
                self::value(item, separators, out);
            }
            out.push(']');
        }
        Json::Object(members) => {
            out.push('{');
            for (i, (key, member)) in members.iter().enumerate() {
                if i > 0 {
                    out.push_str(separators.item);
                }
                super::push_quoted(key, out);
                out.push_str(separators.key);
                self::value(member, separators, out);
            }
            out.push('}');
        }
    }
}

pub(super) fn escaped(text: &str, out: &mut String) {
    let mut plain_from = 0;
    for (i, byte) in text.bytes().enumerate() {
        if byte >= 0x20 && byte != b'"' && byte != b'\\' {
            continue;
        }
        out.push_str(&text[plain_from..i]);
        plain_from = i + 1;
        match byte {
            b'"' => out.push_str("\\\""),
            b'\\' => out.push_str("\\\\"),
            b'\n' => out.push_str("\\n"),
            b'\r' => out.push_str("\\r"),
            b'\t' => out.push_str("\\t"),
            8 => out.push_str("\\b"),
            12 => out.push_str("\\f"),
            _ => {
                // Writing to a String cannot fail.
                let _ = write!(out, "\\u{byte:04x}");
            }
        }
    }
    out.push_str(&text[plain_from..]);
}

/// Python's `repr` of a float: the shortest digits that read back the same, an
/// exponent of at least two digits from 1e16 up and below 1e-4, else a plain decimal.
pub(super) fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "NaN".to_owned();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{x:e}");
    let exponent: i32 =
        scientific.split_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0);
    if (-4..16).contains(&exponent) {
        // Display never uses an exponent, and leaves out the ".0" of whole numbers.
        let plain = x.to_string();
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let digits = scientific.split('e').next().unwrap_or_default();
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_python_prints_them() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1.0 / 3.0, "0.3333333333333333"),
            (1e-4, "0.0001"),
            (9.999_999_999_999_999e-5, "9.999999999999999e-05"),
            (1e-10, "1e-10"),
            (1e-100, "1e-100"),
            (123_456_789_012_345.6, "123456789012345.6"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (1.234_567_890_123_456_8e17, "1.2345678901234568e+17"),
            (f64::MAX, "1.7976931348623157e+308"),
            (f64::MIN_POSITIVE, "2.2250738585072014e-308"),
        ];
        for (x, expected) in cases {
            assert_eq!(float_repr(x), expected);
        }
    }
}

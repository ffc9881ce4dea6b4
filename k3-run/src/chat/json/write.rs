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
    let (digits, exponent) = shortest_digits(x.abs());
    let sign = if x.is_sign_negative() { "-" } else { "" };
    let (first, rest) = digits.split_at(1);
    match exponent {
        16.. | ..-4 => {
            let point = if rest.is_empty() { "" } else { "." };
            let exponent_sign = if exponent < 0 { '-' } else { '+' };
            format!("{sign}{first}{point}{rest}e{exponent_sign}{:02}", exponent.unsigned_abs())
        }
        0.. => {
            // Digits up to the point, and at least one behind it.
            let whole = exponent as usize + 1;
            let padded = format!("{digits:0<width$}", width = whole + 1);
            format!("{sign}{}.{}", &padded[..whole], &padded[whole..])
        }
        _ => format!("{sign}0.{}{digits}", "0".repeat(exponent.unsigned_abs() as usize - 1)),
    }
}

/// The shortest digits that read back as `x` (finite, not negative), and the power of ten
/// of the first. Where two are as short and as near, the even one, as in Python; the
/// standard library rounds those up, so the digits are taken from serde_json.
fn shortest_digits(x: f64) -> (String, i32) {
    let text = serde_json::Number::from_f64(x).map_or_else(String::new, |n| n.to_string());
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = format!("{whole}{fraction}");
    let zeros = all.len() - all.trim_start_matches('0').len();
    let digits = all.trim_matches('0');
    if digits.is_empty() {
        return ("0".to_owned(), 0);
    }
    (digits.to_owned(), exponent + whole.len() as i32 - 1 - zeros as i32)
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
            (10.0, "10.0"),
            (1e15, "1000000000000000.0"),
            (-1.5, "-1.5"),
            // Halfway between two shortest spellings.
            (907_572_309_377_116.0 + 0.25, "907572309377116.2"),
            (834_738_198_524_618.0 + 0.25, "834738198524618.2"),
            (5e-324, "5e-324"),
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

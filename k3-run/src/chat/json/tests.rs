use super::*;

fn python(text: &str) -> Result<String, SyntaxError> {
    Json::parse(text, Dialect::Python).map(|value| value.dump(Separators::SPACED))
}

/// Right column: CPython's `json.dumps(json.loads(left), ensure_ascii=False)`.
#[test]
fn values_read_and_print_as_python_does() {
    let cases = [
        (r#"{"b":1,"a":2}"#, r#"{"b": 1, "a": 2}"#),
        (r#"{"a":1,"b":2,"a":3}"#, r#"{"a": 3, "b": 2}"#),
        (r#" [ 1 , -0 , -0.0 , 1.0 , 100e0 ] "#, "[1, 0, -0.0, 1.0, 100.0]"),
        ("[1e-7, 1e-5, 0.0001, 12345.678]", "[1e-07, 1e-05, 0.0001, 12345.678]"),
        ("[1e15, 1e16, 1E22, 1.5e300]", "[1000000000000000.0, 1e+16, 1e+22, 1.5e+300]"),
        ("[9007199254740993.0, 5e-324]", "[9007199254740992.0, 5e-324]"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        (
            "[1e400, -1e400, NaN, Infinity, -Infinity]",
            "[Infinity, -Infinity, NaN, Infinity, -Infinity]",
        ),
        (
            r#""\u00e9\ud83d\ude00\/\b\f\n\r\t\u0001\u007f\\\"""#,
            "\"é😀/\\b\\f\\n\\r\\t\\u0001\u{7f}\\\\\\\"\"",
        ),
        (r#"["\u2028<&>'"]"#, "[\"\u{2028}<&>'\"]"),
        ("[[],{}, [ ] ,{ }]", "[[], {}, [], {}]"),
        ("[null,true,false]", "[null, true, false]"),
    ];
    for (text, expected) in cases {
        assert_eq!(python(text).as_deref(), Ok(expected), "{text}");
    }
}

#[test]
fn what_python_refuses_is_refused() {
    let cases = [
        "",
        " ",
        "{",
        "[1,]",
        "{\"a\":1,}",
        "{a:1}",
        "01",
        "1.",
        ".5",
        "+1",
        "1e",
        "-",
        "tru",
        "\"a",
        "\"\\x\"",
        "\"\\u12\"",
        "\"\\u12g4\"",
        "\"a\nb\"",
        "1 2",
        "[1 2]",
        "{\"a\" 1}",
        "nan",
        "-NaN",
        "\u{feff}1",
    ];
    for text in cases {
        assert!(python(text).is_err(), "{text:?}");
    }
}

#[test]
fn half_a_surrogate_pair_is_refused() {
    for text in [r#""\ud800""#, r#""\ud800\u0041""#, r#""\udc00""#, r#""\ud800x""#] {
        let error = python(text).unwrap_err();
        assert_eq!(error.to_string(), "half of a surrogate pair at byte 1", "{text}");
    }
}

#[test]
fn the_strict_dialect_has_no_nan() {
    for text in ["NaN", "Infinity", "-Infinity"] {
        assert!(Json::parse(text, Dialect::Strict).is_err());
    }
}

#[test]
fn nesting_is_bounded() {
    let nested = |depth: usize| "[".repeat(depth) + &"]".repeat(depth);
    assert!(python(&nested(MAX_DEPTH)).is_ok());
    assert!(python(&nested(MAX_DEPTH + 1)).is_err());
    assert!(python(&"[".repeat(1_000_000)).is_err());
}

#[test]
fn repeated_keys_are_found_in_large_objects_too() {
    let mut text = String::from("{");
    for i in 0..100 {
        text += &format!("\"k{}\":{i},", i % 40);
    }
    text += "\"k0\":\"last\"}";
    let Json::Object(members) = Json::parse(&text, Dialect::Strict).unwrap() else {
        panic!("an object stays one");
    };
    assert_eq!(members.len(), 40);
    assert_eq!(members[0], ("k0".into(), Json::String("last".into())));
    assert_eq!(members[39], ("k39".into(), Json::Number("79".into())));
}

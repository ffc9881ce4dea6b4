//! The whole tokenizer on the synthetic vocabulary of the test fixtures, and against
//! tiktoken-rs.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustc_hash::FxHashMap;
use serde::Deserialize;
use tiktoken_rs::CoreBPE;

use super::*;

const BASE: usize = 768;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizer").join(name)
}

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let (model, config) = (fixture("tiktoken.model"), fixture("tokenizer_config.json"));
        Tokenizer::from_snapshot_files(&model, &config, BASE).unwrap()
    })
}

/// tiktoken-rs on the same vocabulary, with the published pattern.
fn judge() -> &'static CoreBPE {
    static JUDGE: OnceLock<CoreBPE> = OnceLock::new();
    JUDGE.get_or_init(|| {
        let ours = tokenizer();
        let base: FxHashMap<Vec<u8>, u32> =
            (0..BASE as u32).map(|id| (ours.token_bytes(id).unwrap().to_vec(), id)).collect();
        let specials: FxHashMap<String, u32> = (BASE..ours.vocab_size())
            .map(|id| (ours.special_name(id as u32).unwrap().to_owned(), id as u32))
            .collect();
        CoreBPE::new(base, specials, PATTERN).unwrap()
    })
}

fn assert_as_tiktoken(text: &str) {
    let (ours, judge) = (tokenizer(), judge());
    let text_ids = judge.encode(text, &HashSet::new()).unwrap().0;
    assert_eq!(ours.encode(text, Specials::Text), text_ids, "{text:?}");
    let special_ids = judge.encode_with_special_tokens(text);
    assert_eq!(ours.encode(text, Specials::Recognize), special_ids, "{text:?}");
    assert_eq!(ours.decode(&text_ids), text);
    assert_eq!(ours.decode(&special_ids), text);
}

#[test]
fn fixture_cases() {
    #[derive(Deserialize)]
    struct Case {
        text: String,
        plain: Vec<u32>,
        special: Vec<u32>,
    }
    let json = std::fs::read(fixture("tokenizer_cases.json")).unwrap();
    let cases: Vec<Case> = serde_json::from_slice(&json).unwrap();
    assert_eq!(cases.len(), 49);
    for Case { text, plain, special } in cases {
        assert_eq!(tokenizer().encode(&text, Specials::Text), plain, "{text:?}");
        assert_eq!(tokenizer().encode(&text, Specials::Recognize), special, "{text:?}");
        assert_as_tiktoken(&text);
    }
}

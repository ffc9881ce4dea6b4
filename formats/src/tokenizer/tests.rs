//! The whole tokenizer on the synthetic vocabulary of the test fixtures, and against
//! tiktoken-rs.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use proptest::prelude::*;
use rustc_hash::FxHashMap;
use serde::Deserialize;
use sha2::{Digest, Sha256};
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

/// Characters of every class the pattern tells apart, and of those it might confuse.
const ALPHABET: &str = "abcdXYZßſÀÉñ'’sStTreVEllmMd0123½²Ⅷ٣३〇々二世界中、。⺀㈱㊀ǅʰªあカー한ไà\u{301}\u{200d}\u{fe0f}🙂👩\
    \u{200b}\u{feff} \u{a0}\u{3000}\u{2028}\u{2029}\u{85}\t\r\n\u{b}\u{c}\u{1c}\u{1d}\u{1e}\u{1f}\0.,!?/-_<|>[]&^\u{fffd}\u{323b0}";

/// Text that is likely to meet the borders between alternatives, with names of special
/// tokens, whole and cut short.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        8 => prop::sample::select(ALPHABET.chars().collect::<Vec<_>>()).prop_map(String::from),
        2 => any::<char>().prop_map(String::from),
        2 => prop::sample::select(vec![" ", "  ", "\n", "\r\n", "the", "ing", "'ll", "世界", "2026"])
            .prop_map(String::from),
        1 => (BASE as u32..BASE as u32 + 256, 0..3usize).prop_map(|(id, cut)| {
            let name = tokenizer().special_name(id).unwrap();
            name[..name.len() - cut].to_owned()
        }),
        1 => (prop::sample::select(vec!['a', ' ', '\n', '世', '9', '!']), 1..200usize)
            .prop_map(|(c, n)| c.to_string().repeat(n)),
    ];
    prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn any_text_as_tiktoken(text in text()) {
        assert_as_tiktoken(&text);
    }

    #[test]
    fn long_pieces_as_tiktoken(text in "[ab]{90,400}", han in "[世界中]{30,150}") {
        assert_as_tiktoken(&text);
        assert_as_tiktoken(&han);
    }
}

#[test]
fn longest_pieces_as_tiktoken() {
    // Just below the cut: one piece of 25,000 characters.
    for c in ["a", "the", "^", "世", "🙂", "e\u{301}", "Ａ"] {
        assert_as_tiktoken(&c.repeat(25_000 / c.chars().count()));
    }
    let spaces = " ".repeat(25_000);
    for text in [spaces.clone(), spaces.clone() + "x", "\n".repeat(25_000), spaces + "\n"] {
        assert_as_tiktoken(&text);
    }
}

#[test]
fn cuts_are_borders_that_no_piece_crosses() {
    let encode = |text: &str| tokenizer().encode(text, Specials::Text);
    let a = "a".repeat(60_000);
    let parts = [encode(&a[..25_000]), encode(&a[..25_000]), encode(&a[..10_000])];
    assert_eq!(encode(&a), parts.concat());
    // A backtracking engine runs out of stack at a million; this one does not see so many.
    for text in ["^", " ", "A", "世"].map(|c| c.repeat(1_000_000)) {
        assert_eq!(tokenizer().decode(&encode(&text)), text);
    }

    // A special token that a cut goes through is not seen, elsewhere it is.
    let sep = tokenizer().special_id("<|sep|>").unwrap();
    let count = |text: &str| {
        let ids = tokenizer().encode(text, Specials::Recognize);
        ids.iter().filter(|&&id| id == sep).count()
    };
    assert_eq!(count(&("x".repeat(24_993) + "<|sep|>")), 1);
    assert_eq!(count(&("x".repeat(24_994) + "<|sep|>")), 0);
    assert_eq!(count(&("x".repeat(25_000) + "<|sep|>")), 1);
    // The text before a special token ends there: its last space stays with the run.
    let ids = tokenizer().encode("a   <|sep|>x", Specials::Recognize);
    let mut expected = tokenizer().encode("a   ", Specials::Text);
    expected.push(sep);
    expected.extend(encode("x"));
    assert_eq!(ids, expected);
}

#[test]
fn ids_and_names() {
    let t = tokenizer();
    assert_eq!((t.base_vocab(), t.vocab_size()), (BASE, BASE + SPECIAL_SLOTS));
    assert_eq!(t.token_bytes(0), Some(b"!".as_slice()));
    assert_eq!(t.token_id(b" "), Some(220));
    assert_eq!(t.token_bytes(768), Some(b"[BOS]".as_slice()));
    assert_eq!(t.token_bytes(1024), None);
    assert_eq!((t.special_id("[EOS]"), t.special_name(769)), (Some(769), Some("[EOS]")));
    assert_eq!(t.special_name(767), None);
    assert_eq!((t.bos_id(), t.eos_ids(), t.pad_id()), (Some(768), [769].as_slice(), Some(1023)));
    let plain: Vec<u32> = (768..1024).filter(|&id| !t.is_special_flag(id)).collect();
    assert_eq!(plain, ["<|open|>", "<|close|>", "<|sep|>"].map(|name| t.special_id(name).unwrap()));
    assert!(!t.is_special_flag(0));
}

#[test]
fn decode_shows_ill_formed_parts() {
    let t = tokenizer();
    let byte = |b: u8| t.token_id(&[b]).unwrap();
    assert_eq!(t.decode(&[byte(0xe4), byte(0xbd), byte(b'a')]), "\u{fffd}a");
    assert_eq!(t.decode(&[byte(0xe4), byte(0xbd), byte(0xa0)]), "你");
    assert_eq!(t.decode(&[byte(b'a'), 1024, u32::MAX, 768]), "a\u{fffd}\u{fffd}[BOS]");
    assert_eq!(t.decode(&[]), "");
}

#[test]
fn files_are_named() {
    let config = fixture("tokenizer_config.json");
    let error = |model: &Path, config: &Path| {
        Tokenizer::from_snapshot_files(model, config, BASE).err().unwrap().to_string()
    };
    let folder = tempfile::tempdir().unwrap();
    let absent = folder.path().join("tiktoken.model");
    assert_eq!(error(&absent, &config), format!("{}: no such file", absent.display()));
    let model = fixture("tiktoken.model");
    assert!(error(&model, &absent).contains("tiktoken.model: no such file"));
    assert!(error(&model, &model).contains("tiktoken.model: not a tokenizer configuration"));
    assert!(error(&config, &config).contains("tokenizer_config.json: line 1: expected a base64"));
    let other = Tokenizer::from_snapshot_files(&model, &config, 767).err().unwrap().to_string();
    assert!(other.contains("line 768: expected ranks below 767"), "{other}");

    let prepared = folder.path().join("tokenizer.bin");
    let mut bytes = tokenizer().write_prepared();
    bytes.pop();
    std::fs::write(&prepared, bytes).unwrap();
    let message = Tokenizer::open_prepared(&prepared).err().unwrap().to_string();
    assert!(message.starts_with(&format!("{}: expected", prepared.display())), "{message}");
}

#[test]
fn prepared_form_is_the_same_tokenizer() {
    let bytes = tokenizer().write_prepared();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.bin");
    std::fs::write(&path, &bytes).unwrap();
    let opened = Tokenizer::open_prepared(&path).unwrap();
    for id in 0..=1024 {
        assert_eq!(opened.token_bytes(id), tokenizer().token_bytes(id));
        assert_eq!(opened.special_name(id), tokenizer().special_name(id));
        assert_eq!(opened.is_special_flag(id), tokenizer().is_special_flag(id));
    }
    assert_eq!(opened.eos_ids(), tokenizer().eos_ids());
    assert_eq!((opened.bos_id(), opened.pad_id()), (tokenizer().bos_id(), tokenizer().pad_id()));
    assert_eq!(opened.write_prepared(), bytes);
}

#[test]
fn prepared_form_as_documented() {
    let bytes = tokenizer().write_prepared();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(&bytes[..8], b"K3TOKENS");
    assert_eq!([8, 12].map(u32_at), [1, 768]);
    assert_eq!([20, 24, 28].map(u32_at), [768, 769, 1023]);
    let texts = 288 + 2 * (768 + 256);
    assert_eq!(bytes.len(), texts + u32_at(16) as usize + 32);
    assert_eq!(bytes[32..34], [1, 0]);
    assert_eq!(bytes[texts], b'!');
    // Slots 3, 4 and 5 are `<|open|>`, `<|close|>` and `<|sep|>`.
    let flags = &bytes[32 + 2 * (768 + 256)..texts];
    assert_eq!(flags[..7], [1, 1, 1, 0, 0, 0, 1]);
    assert!(bytes[..bytes.len() - 32].ends_with(b"<|reserved_token_1021|>[UNK][PAD]"));
}

#[test]
fn every_flipped_byte_of_the_prepared_form_is_found() {
    let mut bytes = tokenizer().write_prepared();
    for at in 0..bytes.len() {
        bytes[at] ^= 0x11;
        assert!(Tokenizer::from_prepared_bytes(&bytes).is_err(), "byte {at}");
        bytes[at] ^= 0x11;
    }
    for len in 0..bytes.len() {
        assert!(Tokenizer::from_prepared_bytes(&bytes[..len]).is_err(), "{len} bytes");
    }
    assert!(Tokenizer::from_prepared_bytes(&bytes).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    /// With the digest made right again, so that the checks behind it are reached.
    #[test]
    fn hostile_prepared_form(
        edits in prop::collection::vec((0..6000usize, any::<u8>()), 1..4),
        cut in prop::option::of(0..6000usize),
    ) {
        let mut bytes = tokenizer().write_prepared();
        bytes.truncate(bytes.len() - 32);
        for (at, value) in edits {
            let at = at % bytes.len();
            bytes[at] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut);
        }
        let digest = Sha256::digest(&bytes);
        bytes.extend_from_slice(&digest);
        if let Ok(t) = Tokenizer::from_prepared_bytes(&bytes) {
            let ids = t.encode(ALPHABET, Specials::Recognize);
            prop_assert_eq!(t.decode(&ids), ALPHABET);
            prop_assert_eq!(t.write_prepared(), bytes);
        }
    }

    #[test]
    fn hostile_ranks(
        edits in prop::collection::vec((0..8000usize, any::<u8>()), 0..4),
        lines in prop::collection::vec("[A-Za-z0-9+/=]{0,8} ?[0-9]{0,12}\r?", 0..3),
        base_vocab in prop_oneof![Just(BASE), 0..1000usize, any::<usize>()],
    ) {
        static MODEL: OnceLock<Vec<u8>> = OnceLock::new();
        let mut model =
            MODEL.get_or_init(|| std::fs::read(fixture("tiktoken.model")).unwrap()).clone();
        for (at, value) in edits {
            let at = at % model.len();
            model[at] = value;
        }
        model.extend_from_slice(lines.join("\n").as_bytes());
        if let Ok(vocabulary) = ranks::parse(&model, base_vocab) {
            prop_assert_eq!(vocabulary.len(), base_vocab);
        }
    }

    #[test]
    fn hostile_bytes(bytes in prop::collection::vec(any::<u8>(), 0..400), base in any::<u32>()) {
        prop_assert!(Tokenizer::from_prepared_bytes(&bytes).is_err());
        prop_assert!(ranks::parse(&bytes, base as usize).is_err());
        prop_assert!(special::parse_config(&bytes, base as usize).is_err());
    }

    #[test]
    fn hostile_config(
        edits in prop::collection::vec((0..4000usize, any::<u8>()), 1..4),
        base in prop_oneof![Just(BASE), any::<usize>()],
    ) {
        static CONFIG: OnceLock<Vec<u8>> = OnceLock::new();
        let mut config =
            CONFIG.get_or_init(|| std::fs::read(fixture("tokenizer_config.json")).unwrap()).clone();
        for (at, value) in edits {
            let at = at % config.len();
            config[at] = value;
        }
        if let Ok((specials, _)) = special::parse_config(&config, base) {
            prop_assert_eq!(specials.slots().len(), SPECIAL_SLOTS);
        }
    }
}

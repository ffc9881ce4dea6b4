//! The release's vocabulary: our encoder, tiktoken-rs, the crate tiktoken and Hugging Face
//! `tokenizers` on the synthesized `tokenizer.json`, against one another.

use std::collections::HashSet;
use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k3_formats::tokenizer::{PATTERN, SPECIAL_SLOTS, Specials, Tokenizer, pieces};
use k3_prep::tokenizer_check::check_with_tiktoken;
use k3_prep::tokenizer_json::tokenizer_json;
use rustc_hash::FxHashMap;
use serde::Deserialize;
use tiktoken_rs::CoreBPE;

use crate::real_vocab::{BASE_VOCAB, tokenizer};

/// A line of `tok_strings.jsonl`: a text or an expression for one, and what the published
/// pattern splits it into.
#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    expr: Option<String>,
    pieces: Option<Vec<String>>,
    why: String,
}

impl Line {
    fn all() -> Vec<Self> {
        let lines: Vec<Self> = include_str!("fixtures/tokenizer/tok_strings.jsonl")
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(lines.len(), 56);
        lines
    }

    fn text(&self) -> String {
        match self.expr.as_deref() {
            None => self.text.clone().unwrap(),
            Some("'^'*1000000") => "^".repeat(1_000_000),
            Some("'A'*1000000") => "A".repeat(1_000_000),
            Some("'a'*25000") => "a".repeat(25_000),
            Some("' '*25001") => " ".repeat(25_001),
            Some("('x'*24999+' ')*17") => ("x".repeat(24_999) + " ").repeat(17),
            Some("'\\n'*300000") => "\n".repeat(300_000),
            Some("'a.'*8000") => "a.".repeat(8_000),
            Some(expr) => panic!("unknown expression {expr}"),
        }
    }
}

/// The cuts of long texts, told again in the plainest way.
fn windows(text: &str) -> Vec<String> {
    let space = |c: char| c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c);
    let chars: Vec<char> = text.chars().collect();
    let mut windows = Vec::new();
    for block in chars.chunks(400_000) {
        let mut window = String::new();
        let mut run = 0;
        for (at, &c) in block.iter().enumerate() {
            run = if at > 0 && space(c) == space(block[at - 1]) { run + 1 } else { 1 };
            if run > 25_000 {
                windows.push(std::mem::take(&mut window));
                run = 1;
            }
            window.push(c);
        }
        windows.push(window);
    }
    windows
}

fn tiktoken_rs() -> &'static CoreBPE {
    static JUDGE: OnceLock<CoreBPE> = OnceLock::new();
    JUDGE.get_or_init(|| {
        let t = tokenizer();
        let base = 0..BASE_VOCAB as u32;
        let special = BASE_VOCAB as u32..t.vocab_size() as u32;
        CoreBPE::new(
            base.map(|id| (t.token_bytes(id).unwrap().to_vec(), id)).collect::<FxHashMap<_, _>>(),
            special
                .map(|id| (t.special_name(id).unwrap().to_owned(), id))
                .collect::<FxHashMap<_, _>>(),
            PATTERN,
        )
        .unwrap()
    })
}

/// `tokenizer.json` in `tokenizers`: as it is, and without its special tokens.
fn hugging_face(specials: Specials) -> &'static tokenizers::Tokenizer {
    static BOTH: OnceLock<[tokenizers::Tokenizer; 2]> = OnceLock::new();
    let [recognize, text] = BOTH.get_or_init(|| {
        let json = tokenizer_json(tokenizer());
        let recognize = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        let mut value: serde_json::Value = serde_json::from_slice(&json).unwrap();
        value["added_tokens"] = serde_json::json!([]);
        let text = tokenizers::Tokenizer::from_bytes(value.to_string()).unwrap();
        [recognize, text]
    });
    match specials {
        Specials::Recognize => recognize,
        Specials::Text => text,
    }
}

fn hugging_face_ids(text: &str, specials: Specials) -> Vec<u32> {
    hugging_face(specials).encode(text, false).unwrap().get_ids().to_vec()
}

#[test]
fn published_strings_split_as_published() {
    for line in Line::all() {
        let Some(expected) = &line.pieces else { continue };
        let text = line.text();
        assert_eq!(&pieces(&text).collect::<Vec<_>>(), expected, "{}", line.why);
    }
}

#[test]
fn published_strings_encode_as_tiktoken_does() {
    let (ours, judge) = (tokenizer(), tiktoken_rs());
    let third = tiktoken::get_encoding("kimi_k2").unwrap();
    let names: HashSet<&str> =
        (BASE_VOCAB..ours.vocab_size()).map(|id| ours.special_name(id as u32).unwrap()).collect();
    for line in Line::all() {
        let text = line.text();
        let mut recognized = Vec::new();
        let mut as_text = Vec::new();
        let mut by_third = Vec::new();
        for window in windows(&text) {
            recognized.extend(judge.encode(&window, &names).unwrap().0);
            as_text.extend(judge.encode(&window, &HashSet::new()).unwrap().0);
            by_third.extend(third.encode(&window));
        }
        assert!(ours.encode(&text, Specials::Recognize) == recognized, "{}", line.why);
        assert!(ours.encode(&text, Specials::Text) == as_text, "{}", line.why);
        assert!(by_third == as_text, "{}", line.why);
        assert_eq!(ours.decode(&as_text), text, "{}", line.why);
        assert_eq!(ours.decode(&recognized), text, "{}", line.why);
    }
}

#[test]
fn published_strings_encode_alike_through_tokenizer_json() {
    let mut differ = Vec::new();
    for line in Line::all() {
        let text = line.text();
        for specials in [Specials::Recognize, Specials::Text] {
            let ids = tokenizer().encode(&text, specials);
            let cut = windows(&text);
            let by_window: Vec<u32> =
                cut.iter().flat_map(|window| hugging_face_ids(window, specials)).collect();
            assert!(by_window == ids, "{}", line.why);
            if cut.len() > 1 && hugging_face_ids(&text, specials) != ids {
                differ.push((line.expr.clone().unwrap(), specials));
            }
        }
    }
    // What the format cannot say is the cuts of long texts: these ids change with them.
    let cut = ["'^'*1000000", "' '*25001", "('x'*24999+' ')*17", "'\\n'*300000"];
    let both = [Specials::Recognize, Specials::Text];
    let expected: Vec<_> =
        cut.iter().flat_map(|expr| both.map(|specials| ((*expr).to_owned(), specials))).collect();
    assert_eq!(differ, expected);
}

#[test]
fn tokenizer_json_has_every_special_token_where_it_belongs() {
    let (ours, theirs) = (tokenizer(), hugging_face(Specials::Recognize));
    assert_eq!(theirs.get_vocab_size(true), ours.vocab_size());
    assert_eq!(theirs.get_vocab_size(false), BASE_VOCAB);
    let added = theirs.get_added_tokens_decoder();
    assert_eq!(added.len(), SPECIAL_SLOTS);
    for id in BASE_VOCAB as u32..ours.vocab_size() as u32 {
        let name = ours.special_name(id).unwrap();
        assert_eq!(added[&id].content, name);
        assert_eq!(added[&id].special, ours.is_special_flag(id), "{name}");
        let text = format!("a{name} {name}");
        assert_eq!(
            hugging_face_ids(&text, Specials::Recognize),
            ours.encode(&text, Specials::Recognize)
        );
        assert_eq!(theirs.decode(&[id], false).unwrap(), ours.decode(&[id]));
    }
}

#[test]
fn random_text_encodes_alike_through_tokenizer_json() {
    let ours = tokenizer();
    let mut rng = fastrand::Rng::with_seed(7);
    let mut compared = 0;
    while compared < 5_000 {
        // Random tokens meet at borders that no text in the training corpus had.
        let ids: Vec<u32> =
            (0..rng.usize(1..12)).map(|_| rng.u32(0..ours.vocab_size() as u32)).collect();
        let bytes: Vec<u8> =
            ids.iter().flat_map(|&id| ours.token_bytes(id).unwrap()).copied().collect();
        let Ok(text) = String::from_utf8(bytes) else { continue };
        for specials in [Specials::Recognize, Specials::Text] {
            let encoded = ours.encode(&text, specials);
            assert_eq!(hugging_face_ids(&text, specials), encoded, "{text:?}");
            assert_eq!(ours.decode(&encoded), text);
        }
        compared += 1;
    }
}

/// Vocabularies that no training would give, where tokens have lower ranks than their
/// parts, can be made in several ways, or in none: one derived merge per token still suffices.
#[test]
fn any_ranks_encode_alike_through_tokenizer_json() {
    let mut rng = fastrand::Rng::with_seed(3);
    for round in 0..150 {
        let letters: &[u8] = if round % 2 == 0 { b"ab" } else { b"abc" };
        let mut word = |longest: usize| -> Vec<u8> {
            (0..rng.usize(2..=longest)).map(|_| letters[rng.usize(..letters.len())]).collect()
        };
        let mut tokens: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
        let longest = 3 + round % 7;
        for _ in 0..10 + round {
            let token = word(longest);
            if !tokens.contains(&token) {
                tokens.push(token);
            }
        }
        let texts: Vec<String> = (0..60).map(|_| String::from_utf8(word(60)).unwrap()).collect();
        rng.shuffle(&mut tokens);

        let lines: Vec<String> = (0..)
            .zip(&tokens)
            .map(|(rank, token)| format!("{} {rank}\n", STANDARD.encode(token)))
            .collect();
        let config = br#"{"added_tokens_decoder": {}}"#;
        let ours = Tokenizer::from_snapshot_bytes(lines.concat().as_bytes(), config, tokens.len())
            .unwrap();
        let theirs = tokenizers::Tokenizer::from_bytes(tokenizer_json(&ours)).unwrap();
        for text in texts {
            let ids = ours.encode(&text, Specials::Text);
            let encoding = theirs.encode(text.as_str(), false).unwrap();
            assert_eq!(encoding.get_ids(), ids, "{text} with {tokens:?}");
        }
    }
}

#[test]
fn conversion_check_accepts_the_vocabulary() {
    let texts = check_with_tiktoken(tokenizer()).unwrap();
    assert!(texts > 10_000, "{texts}");
}

#[test]
fn prepared_form_of_the_vocabulary() {
    let ours = tokenizer();
    let bytes = ours.write_prepared();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.bin");
    std::fs::write(&path, &bytes).unwrap();
    let opened = Tokenizer::open_prepared(&path).unwrap();
    assert_eq!(opened.vocab_size(), 163_840);
    for id in 0..=opened.vocab_size() as u32 {
        assert_eq!(opened.token_bytes(id), ours.token_bytes(id));
        assert_eq!(opened.is_special_flag(id), ours.is_special_flag(id));
    }
    assert_eq!((opened.bos_id(), opened.pad_id()), (Some(163_584), Some(163_839)));
    assert_eq!(opened.eos_ids(), [163_585]);
    assert!(opened.write_prepared() == bytes);
    for line in Line::all() {
        let text = line.text();
        for specials in [Specials::Recognize, Specials::Text] {
            assert!(opened.encode(&text, specials) == ours.encode(&text, specials), "{}", line.why);
        }
    }
}

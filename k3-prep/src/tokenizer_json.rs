//! `tokenizer.json`: the vocabulary in the form that Hugging Face `tokenizers` loads.
//!
//! That form wants a list of merges, which rank BPE does not have: it joins any two
//! neighbours that are a token together. Still one merge per token is enough. When rank
//! BPE makes a token, no join has crossed the token's borders before, so what happened
//! inside is what happens when the token's bytes are encoded alone; the last join of that
//! run is the only one that ever makes this token. (All pairs that spell a token would be
//! 296,461 merges for the release in place of 163,328, and say no more.) A token that such
//! a run does not end in is found only as a whole piece, which `ignore_merges` is for.
//!
//! What the format cannot say: the cuts of long texts, and text in which the names of
//! special tokens mean nothing.

use k3_formats::tokenizer::{PATTERN, Tokenizer};
use serde::{Serialize, Serializer};

/// The bytes of `tokenizer.json` for this vocabulary; equal vocabularies give equal bytes.
///
/// # Panics
/// Never: a `Tokenizer` has only texts that JSON can hold.
pub fn tokenizer_json(tokenizer: &Tokenizer) -> Vec<u8> {
    let file = File {
        version: "1.0",
        truncation: None,
        padding: None,
        added_tokens: added_tokens(tokenizer),
        normalizer: None,
        pre_tokenizer: Sequence {
            kind: "Sequence",
            pretokenizers: (
                Split {
                    kind: "Split",
                    pattern: Pattern { regex: PATTERN },
                    behavior: "Isolated",
                    invert: false,
                },
                BYTE_LEVEL,
            ),
        },
        post_processor: None,
        decoder: BYTE_LEVEL,
        model: Bpe {
            kind: "BPE",
            dropout: None,
            unk_token: None,
            continuing_subword_prefix: None,
            end_of_word_suffix: None,
            fuse_unk: false,
            byte_fallback: false,
            // A piece that is a token is that token, merges or not.
            ignore_merges: true,
            vocab: Vocab(tokenizer),
            merges: Merges(tokenizer),
        },
    };
    let mut json = serde_json::to_vec(&file).expect("strings and numbers are JSON");
    json.push(b'\n');
    json
}

/// All 256 slots in ascending order: the loader ignores their `id` and numbers them as
/// listed, after the vocabulary, so a gap would shift all that follow.
fn added_tokens(tokenizer: &Tokenizer) -> Vec<AddedToken<'_>> {
    (tokenizer.base_vocab() as u32..tokenizer.vocab_size() as u32)
        .filter_map(|id| {
            Some(AddedToken {
                id,
                content: tokenizer.special_name(id)?,
                single_word: false,
                lstrip: false,
                rstrip: false,
                normalized: false,
                special: tokenizer.is_special_flag(id),
            })
        })
        .collect()
}

#[derive(Serialize)]
struct File<'a> {
    version: &'static str,
    truncation: Option<()>,
    padding: Option<()>,
    added_tokens: Vec<AddedToken<'a>>,
    normalizer: Option<()>,
    pre_tokenizer: Sequence,
    post_processor: Option<()>,
    decoder: ByteLevel,
    model: Bpe<'a>,
}

#[derive(Serialize)]
struct AddedToken<'a> {
    id: u32,
    content: &'a str,
    single_word: bool,
    lstrip: bool,
    rstrip: bool,
    normalized: bool,
    special: bool,
}

#[derive(Serialize)]
struct Sequence {
    #[serde(rename = "type")]
    kind: &'static str,
    pretokenizers: (Split, ByteLevel),
}

#[derive(Serialize)]
struct Split {
    #[serde(rename = "type")]
    kind: &'static str,
    pattern: Pattern,
    behavior: &'static str,
    invert: bool,
}

#[derive(Serialize)]
struct Pattern {
    #[serde(rename = "Regex")]
    regex: &'static str,
}

#[derive(Serialize)]
struct ByteLevel {
    #[serde(rename = "type")]
    kind: &'static str,
    add_prefix_space: bool,
    trim_offsets: bool,
    use_regex: bool,
}

const BYTE_LEVEL: ByteLevel =
    ByteLevel { kind: "ByteLevel", add_prefix_space: false, trim_offsets: false, use_regex: false };

#[derive(Serialize)]
struct Bpe<'a> {
    #[serde(rename = "type")]
    kind: &'static str,
    dropout: Option<f32>,
    unk_token: Option<&'static str>,
    continuing_subword_prefix: Option<&'static str>,
    end_of_word_suffix: Option<&'static str>,
    fuse_unk: bool,
    byte_fallback: bool,
    ignore_merges: bool,
    vocab: Vocab<'a>,
    merges: Merges<'a>,
}

/// Token → id, in the order of ids.
struct Vocab<'a>(&'a Tokenizer);

impl Serialize for Vocab<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let letters = byte_letters();
        serializer.collect_map(base_tokens(self.0).map(|(id, token)| (spell(&letters, token), id)))
    }
}

/// `LEFT RIGHT`, in the order of the ranks of what they make. No letter is a space.
struct Merges<'a>(&'a Tokenizer);

impl Serialize for Merges<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let letters = byte_letters();
        serializer.collect_seq(
            base_tokens(self.0)
                .filter_map(|(_, token)| last_merge(self.0, token))
                .map(|(left, right)| spell(&letters, left) + " " + &spell(&letters, right)),
        )
    }
}

/// The two parts that rank BPE joins into `token` when it starts from the token's bytes;
/// `None` for single bytes and for tokens it does not arrive at.
fn last_merge<'a>(tokenizer: &Tokenizer, token: &'a [u8]) -> Option<(&'a [u8], &'a [u8])> {
    // Ends of the parts but the last; part `i` starts at `ends[i - 1]`.
    let mut ends: Vec<usize> = (1..token.len()).collect();
    while ends.len() > 1 {
        let joined = |i: usize| {
            let start = if i == 0 { 0 } else { ends[i - 1] };
            let end = ends.get(i + 1).copied().unwrap_or(token.len());
            tokenizer.token_id(&token[start..end])
        };
        let (_, lowest) = (0..ends.len()).filter_map(|i| Some((joined(i)?, i))).min()?;
        ends.remove(lowest);
    }
    Some(token.split_at(*ends.first()?))
}

fn base_tokens(tokenizer: &Tokenizer) -> impl Iterator<Item = (u32, &[u8])> {
    (0..tokenizer.base_vocab() as u32).filter_map(|id| Some((id, tokenizer.token_bytes(id)?)))
}

/// The letter that stands for each byte, as GPT-2 chose them: Latin-1 as it is where it is
/// printable, and the code points from 256 on, in order, for all other bytes.
fn byte_letters() -> [char; 256] {
    let mut others = (256..).filter_map(char::from_u32);
    std::array::from_fn(|byte| match byte as u8 {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(byte as u8),
        _ => others.next().unwrap_or(char::REPLACEMENT_CHARACTER),
    })
}

fn spell(letters: &[char; 256], token: &[u8]) -> String {
    token.iter().map(|&byte| letters[byte as usize]).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::{Value, json};

    use super::*;

    fn tiny() -> Tokenizer {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tokenizer");
        Tokenizer::from_snapshot_files(
            &fixtures.join("tiktoken.model"),
            &fixtures.join("tokenizer_config.json"),
            768,
        )
        .unwrap()
    }

    #[test]
    fn what_the_loader_reads() {
        let bytes = tokenizer_json(&tiny());
        assert_eq!(bytes, tokenizer_json(&tiny()));
        let json: Value = serde_json::from_slice(&bytes).unwrap();

        let ids: Vec<u64> = json["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["id"].as_u64().unwrap())
            .collect();
        assert_eq!(ids, (768..1024).collect::<Vec<_>>());
        let sep = json!({
            "id": 773, "content": "<|sep|>", "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": false,
        });
        assert_eq!(json["added_tokens"][5], sep);
        assert_eq!(json["added_tokens"][8]["content"], "<|reserved_token_776|>");

        let [split, byte_level] = [0, 1].map(|i| &json["pre_tokenizer"]["pretokenizers"][i]);
        assert_eq!(split["pattern"]["Regex"], PATTERN);
        assert_eq!(split["behavior"], "Isolated");
        assert_eq!(byte_level["use_regex"], false);
        assert_eq!(json["model"]["ignore_merges"], true);
        let vocab = json["model"]["vocab"].as_object().unwrap();
        assert_eq!(vocab.len(), 768);
        assert_eq!([&vocab["!"], &vocab["Ġ"], &vocab["Ċ"]], [0, 220, 198]);
        // Every token but the single bytes is made from two.
        assert_eq!(json["model"]["merges"].as_array().unwrap().len(), 768 - 256);
    }

    #[test]
    fn bytes_are_spelled_as_gpt2_does() {
        let letters = byte_letters();
        assert_eq!(spell(&letters, b"a \n\0\x7f\x80\xa0\xad\xff"), "aĠĊĀġĢłŃÿ");
        let mut sorted = letters.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), 256);
    }

    #[test]
    fn the_last_merge_of_a_token() {
        // Ranks: 256 bytes, then ab, bc, abc, bcd, xyz.
        let lines: Vec<String> = ["YWI=", "YmM=", "YWJj", "YmNk", "eHl6"]
            .iter()
            .zip(256..)
            .map(|(token, rank)| format!("{token} {rank}\n"))
            .collect();
        let fixture = include_str!("../../tests/fixtures/tokenizer/tiktoken.model");
        let model: String = fixture.split_inclusive('\n').take(256).collect();
        let config = br#"{"added_tokens_decoder": {}}"#;
        let model = model + &lines.concat();
        let t = Tokenizer::from_snapshot_bytes(model.as_bytes(), config, 261).unwrap();
        let halves = |token: &'static [u8]| last_merge(&t, token);
        assert_eq!(halves(b"abc"), Some((b"ab".as_slice(), b"c".as_slice())));
        assert_eq!(halves(b"bcd"), Some((b"bc".as_slice(), b"d".as_slice())));
        assert_eq!(halves(b"ab"), Some((b"a".as_slice(), b"b".as_slice())));
        assert_eq!(halves(b"a"), None);
        // Neither half of `xyz` is a token.
        assert_eq!(halves(b"xyz"), None);
    }
}

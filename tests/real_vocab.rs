//! The release's vocabulary, rebuilt from a published package: its file is not ours to ship.

use std::fmt::Write;
use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use k3_formats::digest::Digest;
use k3_formats::tokenizer::Tokenizer;

/// Tokens of the release that are not special.
pub(crate) const BASE_VOCAB: usize = 163_584;

/// SHA-256 of the release's `tiktoken.model`.
const MODEL_SHA256: &str = "b6c497a7469b33ced9c38afb1ad6e47f03f5e5dc05f15930799210ec050c5103";

/// The named special tokens: offset from the first special id, name, `special` flag.
const NAMED: [(usize, &str, bool); 16] = [
    (0, "[BOS]", true),
    (1, "[EOS]", true),
    (2, "<|end_of_msg|>", true),
    (3, "<|open|>", false),
    (4, "<|close|>", false),
    (5, "<|sep|>", false),
    (6, "[start_header_id]", true),
    (7, "[end_header_id]", true),
    (9, "[EOT]", true),
    (18, "<|media_begin|>", true),
    (19, "<|media_content|>", true),
    (20, "<|media_end|>", true),
    (21, "<|media_pad|>", true),
    (65, "<osagent_mode>", true),
    (254, "[UNK]", true),
    (255, "[PAD]", true),
];

/// The bytes of the release's `tiktoken.model`.
pub(crate) fn tiktoken_model() -> &'static [u8] {
    static MODEL: OnceLock<Vec<u8>> = OnceLock::new();
    MODEL.get_or_init(|| {
        let encoding = tiktoken::get_encoding("kimi_k2").unwrap();
        let mut model = String::new();
        for rank in 0..BASE_VOCAB as u32 {
            writeln!(model, "{} {rank}", STANDARD.encode(encoding.decode(&[rank]))).unwrap();
        }
        assert_eq!(Digest::of(model.as_bytes()).to_string(), MODEL_SHA256);
        model.into_bytes()
    })
}

/// A `tokenizer_config.json` with the release's special tokens.
pub(crate) fn tokenizer_config() -> String {
    let added: serde_json::Map<_, _> = NAMED
        .iter()
        .map(|&(offset, content, special)| {
            let token = serde_json::json!({
                "content": content, "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": special,
            });
            ((BASE_VOCAB + offset).to_string(), token)
        })
        .collect();
    serde_json::json!({
        "added_tokens_decoder": added,
        "bos_token": "[BOS]", "eos_token": "[EOS]", "pad_token": "[PAD]", "unk_token": "[UNK]",
        "tokenizer_class": "TikTokenTokenizer",
    })
    .to_string()
}

/// The release's tokenizer.
pub(crate) fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: OnceLock<Tokenizer> = OnceLock::new();
    TOKENIZER.get_or_init(|| {
        let config = tokenizer_config();
        Tokenizer::from_snapshot_bytes(tiktoken_model(), config.as_bytes(), BASE_VOCAB).unwrap()
    })
}

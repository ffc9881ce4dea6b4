//! The tokenizer that goes into a container against tiktoken-rs, an implementation that
//! shares no code with it: the vocabulary was read and the text is encoded twice.

use std::collections::HashSet;

use k3_formats::tokenizer::{PATTERN, Specials, Tokenizer};
use k3_formats::{Error, Result};
use rustc_hash::FxHashMap;
use tiktoken_rs::CoreBPE;

/// Tokens joined into one text: few enough that none is long enough to be cut, which
/// tiktoken-rs does not do, and that its backtracking has a bounded depth.
const TOKENS_PER_TEXT: usize = 16;

/// Texts on the borders between the pattern's alternatives.
const PROBES: [&str; 8] = [
    "AB你好c 々〇 12〇34 a〇b ⺀⻂ ㈱㊀ 中、中",
    "I'LL we'Ve x'ſ a'K 's 't don’t 世界's",
    "    return x\n\n\n   indented\t\tand\u{b}\u{c}  \r\n  x  ",
    "}\n/// a&&b [&] ^[&&] !!! ??? **bold** `code`\r\n",
    "XMLHttpRequest ǅabc ﬁn ß ẞ İ ı q\u{301}x naïve",
    "1 12 123 1234 ½ ²³ Ⅷ ३४५६ 𝟘𝟙𝟚𝟛 3.14159",
    "\u{85}x \u{200b}x \u{feff}abc a\u{200d}b \u{2028}x\u{3000}\u{a0}y a\u{1c}b\0",
    "ไทย カタカナ漢字ひらがな 한국어 Русский 🙂\u{200d}↕\u{fe0f} 👩\u{200d}👧 \u{fffd}\u{ffff}",
];

/// Encodes every token that is text, special names and probes with both encoders, with
/// special tokens recognized and as text. Returns the number of texts that were equal.
///
/// # Errors
/// The first text that the two encode differently, with both lists of ids.
pub fn check_with_tiktoken(tokenizer: &Tokenizer) -> Result<usize> {
    let base = 0..tokenizer.base_vocab() as u32;
    let special = base.end..tokenizer.vocab_size() as u32;
    let names: Vec<&str> = special.clone().filter_map(|id| tokenizer.special_name(id)).collect();

    // A `Tokenizer` has what tiktoken-rs takes for granted and panics without: dense
    // ranks, every single byte, some special token, no name that starts with another.
    let judge = CoreBPE::new(
        base.clone()
            .filter_map(|id| Some((tokenizer.token_bytes(id)?.to_vec(), id)))
            .collect::<FxHashMap<_, _>>(),
        names.iter().map(|&name| name.to_owned()).zip(special).collect::<FxHashMap<_, _>>(),
        PATTERN,
    )
    .map_err(|e| Error::unsupported(format!("tiktoken-rs refuses the vocabulary: {e}")))?;

    // Shuffled, so that tokens meet others than their neighbours in rank.
    let mut texts: Vec<&str> = base
        .filter_map(|id| tokenizer.token_bytes(id))
        .filter_map(|token| std::str::from_utf8(token).ok())
        .collect();
    fastrand::Rng::with_seed(0).shuffle(&mut texts);
    let joined = texts.chunks(TOKENS_PER_TEXT).map(|chunk| chunk.concat());
    let with_names = names.iter().zip(PROBES.iter().cycle()).map(|(name, probe)| {
        // The name twice, between words, and cut short.
        format!(
            "{name}{name} {probe}{name}\n{}{probe}",
            &name[..name.floor_char_boundary(name.len() - 1)]
        )
    });

    let allowed: HashSet<&str> = names.iter().copied().collect();
    let mut checked = 0;
    for text in joined.chain(with_names).chain(PROBES.map(str::to_owned)) {
        let (recognized, _) = judge
            .encode(&text, &allowed)
            .map_err(|e| Error::unsupported(format!("tiktoken-rs cannot encode {text:?}: {e}")))?;
        compare(&text, "recognized", &tokenizer.encode(&text, Specials::Recognize), &recognized)?;
        let ordinary = judge.encode_ordinary(&text);
        compare(&text, "as text", &tokenizer.encode(&text, Specials::Text), &ordinary)?;
        checked += 1;
    }
    Ok(checked)
}

fn compare(text: &str, specials: &str, ours: &[u32], judge: &[u32]) -> Result<()> {
    if ours == judge {
        return Ok(());
    }
    Err(Error::mismatch(format!(
        "with special tokens {specials}, {text:?} becomes {ours:?}, but tiktoken-rs makes it {judge:?}"
    ))
    .hint("this is a bug in k3-prep, or in tiktoken-rs: please report it with the text"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_shown_with_its_text() {
        compare("a", "as text", &[1, 2], &[1, 2]).unwrap();
        let error = compare("a\n", "as text", &[1, 2], &[3]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "with special tokens as text, \"a\\n\" becomes [1, 2], but tiktoken-rs makes it [3]"
        );
    }
}

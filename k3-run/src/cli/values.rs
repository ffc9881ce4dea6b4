//! Values of options from their text; errors say what was expected.

use crate::experts::LookAhead;

/// A list of token ids.
#[derive(Debug, Clone)]
pub struct Ids(pub Vec<u32>);

pub(super) fn ids(text: &str) -> Result<Ids, String> {
    let inner = text.trim().trim_start_matches('[').trim_end_matches(']');
    let words = inner.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    let ids: Result<Vec<u32>, String> =
        words.map(|w| w.parse().map_err(|_| format!("expected a token id, found {w:?}"))).collect();
    match ids {
        Ok(ids) if ids.is_empty() => Err("expected at least one token id".into()),
        ids => ids.map(Ids),
    }
}

pub(super) fn look_ahead(text: &str) -> Result<LookAhead, String> {
    match text.parse() {
        _ if text == "auto" => Ok(LookAhead::Auto),
        Ok(width) if width <= 64 => Ok(LookAhead::Width(width)),
        _ => Err(format!("expected auto or a number up to 64, found {text:?}")),
    }
}

pub(super) fn fraction(text: &str) -> Result<f32, String> {
    match text.parse() {
        Ok(part) if part > 0.0 && part <= 1.0 => Ok(part),
        _ => Err(format!("expected a number above 0 and up to 1, found {text:?}")),
    }
}

/// Guessing further ahead than this is never worth it.
const MAX_GUESSES: usize = 64;

pub(super) fn guesses(text: &str) -> Result<usize, String> {
    let guesses = text.parse().ok().filter(|n| *n <= MAX_GUESSES);
    guesses.ok_or_else(|| format!("expected a whole number up to {MAX_GUESSES}, found {text:?}"))
}

/// Copies of states that a conversation may keep.
const MAX_COPIES: usize = 4096;

pub(super) fn copies(text: &str) -> Result<usize, String> {
    let copies = text.parse().ok().filter(|n| *n <= MAX_COPIES);
    copies.ok_or_else(|| format!("expected a whole number up to {MAX_COPIES}, found {text:?}"))
}

/// No machine that this is made for has more cores.
const MAX_THREADS: usize = 4096;

pub(super) fn threads(text: &str) -> Result<usize, String> {
    let threads = text.parse().ok().filter(|n| (1..=MAX_THREADS).contains(n));
    threads
        .ok_or_else(|| format!("expected a whole number from 1 to {MAX_THREADS}, found {text:?}"))
}

/// More rows than this in a step are a prompt's, not conversations'.
const MAX_SLOTS: usize = 256;

pub(super) fn slots(text: &str) -> Result<usize, String> {
    let slots = text.parse().ok().filter(|n| (1..=MAX_SLOTS).contains(n));
    slots.ok_or_else(|| format!("expected a whole number from 1 to {MAX_SLOTS}, found {text:?}"))
}

pub(super) fn window(text: &str) -> Result<usize, String> {
    match positive(text)? {
        1 => Err("expected 2 or more: the first token of a window is not predicted".into()),
        n => Ok(n),
    }
}

pub(super) fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n) if (1..=1 << 30).contains(&n) => Ok(n),
        _ => Err(format!("expected a whole number from 1 on, found {text:?}")),
    }
}

/// Bytes of a plain number of GiB.
pub(super) fn gibibytes(text: &str) -> Result<u64, String> {
    size(&format!("{}G", text.trim()))
}

/// Bytes from `512M`, `24G`, `1.5T` (powers of 1024), or plain bytes.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let wanted = || format!("expected a size like 512M or 24G, found {text:?}");
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().trim_end_matches("IB") {
        "" | "B" => 1u64,
        "K" | "KB" => 1 << 10,
        "M" | "MB" => 1 << 20,
        "G" | "GB" => 1 << 30,
        "T" | "TB" => 1 << 40,
        _ => return Err(wanted()),
    };
    let number: f64 = digits.parse().map_err(|_| wanted())?;
    let bytes = number * unit as f64;
    if (0.0..9e18).contains(&bytes) { Ok(bytes as u64) } else { Err(wanted()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_ids() {
        assert_eq!(size("1.5G"), Ok(3 << 29));
        assert_eq!(size("64GiB"), Ok(64 << 30));
        assert_eq!(size("0"), Ok(0));
        assert!(size("-1").is_err() && size("x").is_err() && size("G").is_err());
        assert_eq!(ids("[1, 2 3]").unwrap().0, [1, 2, 3]);
        assert!(ids("1,-2").is_err() && ids("").is_err());
    }

    #[test]
    fn counts_are_bounded() {
        assert_eq!((threads("1"), threads("4096"), copies("0")), (Ok(1), Ok(4096), Ok(0)));
        for bad in ["-1", "18446744073709551615", "99999999999999999999", "1.5", "", "NaN"] {
            assert!(threads(bad).is_err() && copies(bad).is_err(), "{bad}");
        }
        assert!(threads("0").is_err());
    }
}

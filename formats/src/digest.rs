//! SHA-256 digests as the manifest and the hub write them: 64 lower-case hex digits.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest as _, Sha256};

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest([u8; 32]);

impl Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }

    /// The digest as bytes.
    pub fn to_bytes(self) -> [u8; 32] {
        self.0
    }
}

/// A digest in the making.
#[derive(Debug, Clone, Default)]
pub struct Hasher(Sha256);

impl Hasher {
    /// A hasher that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `bytes`.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Appends `count` zero bytes.
    pub fn update_zeros(&mut self, mut count: u64) {
        const ZEROS: [u8; 1 << 14] = [0; 1 << 14];
        while count > 0 {
            let n = count.min(ZEROS.len() as u64);
            self.update(&ZEROS[..n as usize]);
            count -= n;
        }
    }

    /// The digest of everything appended.
    pub fn finish(self) -> Digest {
        Digest(self.0.finalize().into())
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Digest {
    type Err = String;

    fn from_str(hex: &str) -> Result<Self, String> {
        let digits = hex.as_bytes();
        let mut out = [0; 32];
        if digits.len() != 64 {
            return Err(format!("expected 64 hex digits, found {} bytes", digits.len()));
        }
        for (byte, pair) in out.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| match c {
                b'0'..=b'9' => Some(c - b'0'),
                b'a'..=b'f' => Some(c - b'a' + 10),
                _ => None,
            };
            let (hi, lo) = digit(pair[0]).zip(digit(pair[1])).ok_or("not lower-case hex digits")?;
            *byte = hi << 4 | lo;
        }
        Ok(Self(out))
    }
}

impl Serialize for Digest {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let hex = std::borrow::Cow::<str>::deserialize(d)?;
        hex.parse().map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_form_round_trips() {
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let digest = Digest::of(b"abc");
        assert_eq!(digest.to_string(), text);
        assert_eq!(text.parse(), Ok(digest));
        assert!("BA".repeat(32).parse::<Digest>().is_err());
        assert!("ba".parse::<Digest>().is_err());
    }

    #[test]
    fn zeros_count_like_bytes() {
        for count in [0, 1, 16_384, 40_000] {
            let mut hasher = Hasher::new();
            hasher.update_zeros(count);
            assert_eq!(hasher.finish(), Digest::of(&vec![0; count as usize]));
        }
    }
}

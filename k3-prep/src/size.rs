//! Sizes and times for people.

use std::fmt;
use std::time::Duration;

/// Bytes with a decimal unit, as disks are sold: `33.13 GB`.
pub(crate) struct Bytes(pub u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
        if self.0 < 1000 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1e3;
        let mut unit = 0;
        while value >= 999.995 && unit + 1 < UNITS.len() {
            value /= 1e3;
            unit += 1;
        }
        write!(f, "{value:.2} {}", UNITS[unit])
    }
}

/// A number with its thousands apart: `33,127,506,944`.
pub(crate) struct Thousands(pub u64);

impl fmt::Display for Thousands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.0.to_string();
        let mut text = String::with_capacity(digits.len() * 4 / 3);
        for (i, digit) in digits.chars().enumerate() {
            if i > 0 && (digits.len() - i).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        f.pad_integral(true, "", &text)
    }
}

/// A duration in the unit that fits: `4 h 05 min`, `3 min 20 s`, `2.4 s`.
pub(crate) struct Span(pub Duration);

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        let whole = seconds.round() as u64;
        match whole {
            0..100 => write!(f, "{seconds:.1} s"),
            100..3600 => write!(f, "{} min {:02} s", whole / 60, whole % 60),
            _ => write!(f, "{} h {:02} min", whole / 3600, whole % 3600 / 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_change_where_they_should() {
        for (bytes, text) in [
            (999, "999 B"),
            (1000, "1.00 kB"),
            (999_994, "999.99 kB"),
            (999_996, "1.00 MB"),
            (33_127_506_944, "33.13 GB"),
            (u64::MAX, "18446.74 PB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        assert_eq!(Thousands(1_560_860_324_864).to_string(), "1,560,860,324,864");
        assert_eq!(format!("{:>8}", Thousands(1234)), "   1,234");
        assert_eq!(Thousands(7).to_string(), "7");
        for (seconds, text) in [(2.44, "2.4 s"), (200.0, "3 min 20 s"), (14_700.0, "4 h 05 min")] {
            assert_eq!(Span(Duration::from_secs_f64(seconds)).to_string(), text);
        }
    }
}

//! Sets of layers, written `0-3,7`.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;

use crate::{Error, Result};

/// Highest number of a layer that a set may name.
const MAX_LAYER: usize = 9999;

/// Some layers, counted from 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layers(Vec<RangeInclusive<usize>>);

impl Layers {
    /// Whether `layer` is among them.
    pub fn contains(&self, layer: usize) -> bool {
        self.0.iter().any(|range| range.contains(&layer))
    }
}

impl FromIterator<usize> for Layers {
    /// The layers of an ascending list.
    fn from_iter<I: IntoIterator<Item = usize>>(layers: I) -> Self {
        let mut ranges: Vec<RangeInclusive<usize>> = Vec::new();
        for layer in layers {
            match ranges.last_mut() {
                Some(last) if *last.end() + 1 == layer => *last = *last.start()..=layer,
                _ => ranges.push(layer..=layer),
            }
        }
        Self(ranges)
    }
}

impl FromStr for Layers {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::malformed(format!("expected layers as in 0-3,7, found {text:?}"))
                .hint(format!("layers count from 0, at most {MAX_LAYER}"))
        };
        let number = |text: &str| match text.trim().parse() {
            Ok(layer) if layer <= MAX_LAYER => Ok(layer),
            _ => Err(wrong()),
        };
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = number(first)?..=number(last)?;
            if range.is_empty() { Err(wrong()) } else { Ok(range) }
        };
        text.split(',').map(range).collect::<Result<_>>().map(Self)
    }
}

impl fmt::Display for Layers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { "," };
            if range.start() == range.end() {
                write!(f, "{comma}{}", range.start())?;
            } else {
                write!(f, "{comma}{}-{}", range.start(), range.end())?;
            }
        }
        Ok(())
    }
}

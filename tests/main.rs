//! One test binary for what crosses crates.

mod support;
mod synth;

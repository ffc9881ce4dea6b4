//! One test binary for what crosses crates.

mod chat;
mod real_vocab;
mod support;
mod synth;

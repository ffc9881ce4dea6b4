//! One test binary for what crosses crates.

mod chat;
mod convert;
mod experts;
mod faults;
mod hostile;
mod inspect;
mod memory;
mod quality;
mod real_vocab;
mod repl;
mod run;
mod server;
mod session;
mod support;
mod synth;
mod tokenizer;
mod verify;

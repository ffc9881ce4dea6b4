#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("chat"), |bytes: &[u8]| common::run("chat", bytes));

#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("recipe"), |bytes: &[u8]| common::run("recipe", bytes));

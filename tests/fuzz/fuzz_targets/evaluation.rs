#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("evaluation"), |bytes: &[u8]| common::run("evaluation", bytes));

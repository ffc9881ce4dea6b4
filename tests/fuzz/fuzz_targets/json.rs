#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("json"), |bytes: &[u8]| common::run("json", bytes));

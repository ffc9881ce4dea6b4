#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("manifest"), |bytes: &[u8]| common::run("manifest", bytes));

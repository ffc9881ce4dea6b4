#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("conversation"), |bytes: &[u8]| common::run("conversation", bytes));

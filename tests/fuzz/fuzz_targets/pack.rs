#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("pack"), |bytes: &[u8]| common::run("pack", bytes));

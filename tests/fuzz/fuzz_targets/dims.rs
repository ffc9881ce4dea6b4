#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("dims"), |bytes: &[u8]| common::run("dims", bytes));

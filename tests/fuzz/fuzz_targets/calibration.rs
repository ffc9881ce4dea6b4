#![no_main]

#[path = "common.rs"]
mod common;

libfuzzer_sys::fuzz_target!(init: common::init("calibration"), |bytes: &[u8]| common::run("calibration", bytes));

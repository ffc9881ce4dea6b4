//! No bytes make a parser panic, hang or ask for memory that the bytes do not justify:
//! seeds and everything that fuzzing found, as they are and damaged in many ways.

use std::path::Path;
use std::time::{Duration, Instant};

use fs_err as fs;
use k3_formats::recipe::Recipe;

use crate::support::{TinyK3, convert};

mod parsers;

use parsers::{PARSERS, World};

/// Damaged copies of each seed.
const COPIES: usize = 400;

/// What hostile writers put where a number or a text is expected.
const WORDS: [&str; 22] = [
    "0",
    "-1",
    "-0",
    "1e999",
    "NaN",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "null",
    "true",
    "\"\"",
    "{}",
    "[]",
    "\"\\ud800\"",
    "\"../../etc/passwd\"",
    "\"\u{0}\"",
    "[[[[[[[[",
    "{\"a\":",
    "\u{feff}",
];

/// One copy of `seed` with a few kinds of damage.
fn damaged(seed: &[u8], rng: &mut fastrand::Rng) -> Vec<u8> {
    let mut bytes = seed.to_vec();
    for _ in 0..rng.usize(1..4) {
        let at = rng.usize(0..=bytes.len());
        match rng.u8(0..8) {
            0 => bytes.truncate(at),
            1 | 2 if at < bytes.len() => bytes[at] ^= 1 << rng.u8(0..8),
            3 if at < bytes.len() => {
                bytes[at] = *rng.choice(&[0, 1, 0x7f, 0x80, 0xff]).expect("five")
            }
            4 => {
                let word = WORDS[rng.usize(0..WORDS.len())];
                bytes.splice(at..at, word.bytes());
            }
            5 => {
                // In place of a number or a text, where there is one.
                let digits = |b: &u8| b.is_ascii_digit();
                let start = bytes[at..].iter().position(digits).map_or(at, |n| at + n);
                let end =
                    bytes[start..].iter().position(|b| !digits(b)).map_or(start, |n| start + n);
                bytes.splice(start..end, WORDS[rng.usize(0..WORDS.len())].bytes());
            }
            6 => {
                let end = (at + rng.usize(0..64)).min(bytes.len());
                let piece = bytes[at..end].to_vec();
                let to = rng.usize(0..=bytes.len());
                bytes.splice(to..to, piece);
            }
            _ => {
                let end = (at + rng.usize(0..64)).min(bytes.len());
                bytes.drain(at..end);
            }
        }
    }
    bytes
}

#[test]
fn no_bytes_stop_a_parser() {
    let tiny = TinyK3::new(50);
    let out = tiny.path("out");
    convert(&tiny.snapshot(), &out, &Recipe::default());
    let scratch = tiny.path("scratch");
    fs::create_dir(&scratch).unwrap();
    let world = World::new(&out, &scratch);
    let found = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/found");
    for (name, parse) in PARSERS {
        let mut seeds = world.seeds(name, &tiny.snapshot());
        if let Ok(folder) = fs::read_dir(found.join(name)) {
            seeds.extend(folder.map(|entry| fs::read(entry.unwrap().path()).unwrap()));
        }
        seeds.extend([Vec::new(), vec![0; 64], vec![0xff; 64], b"[".repeat(100_000)]);
        let mut rng = fastrand::Rng::with_seed(7);
        for seed in &seeds {
            parse(&world, seed);
            for _ in 0..COPIES / seeds.len().min(8) {
                let bytes = damaged(seed, &mut rng);
                let start = Instant::now();
                parse(&world, &bytes);
                assert!(start.elapsed() < Duration::from_secs(20), "{name} hangs");
            }
        }
    }
}

/// Every fuzz target has a parser of its name, and the other way round.
#[test]
fn every_parser_is_fuzzed() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let mut targets: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned())
        .filter(|name| name != "common")
        .collect();
    targets.sort_unstable();
    let mut parsers = PARSERS.map(|(name, _)| name.to_owned()).to_vec();
    parsers.sort_unstable();
    assert_eq!(targets, parsers);
}

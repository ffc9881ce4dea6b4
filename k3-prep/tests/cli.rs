//! Help, versions and exit codes of the program itself.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use assert_cmd::Command;
use k3_prep::synth::{Preset, Routing, SynthOptions, write_snapshot};

const PROGRAM: &str = env!("CARGO_BIN_EXE_k3-prep");

fn k3_prep(args: &[&str]) -> std::process::Output {
    Command::new(PROGRAM).args(args).output().unwrap()
}

#[test]
fn help_and_version_are_results() {
    let help = k3_prep(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    for verb in ["convert", "verify", "doctor", "inspect", "plan", "tokenizer", "synth"] {
        assert!(text.contains(&format!("  {verb} ")), "{text}");
    }
    let version = k3_prep(&["--version"]);
    let text = String::from_utf8(version.stdout).unwrap();
    assert_eq!(text, concat!("k3-prep ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn what_cannot_run_exits_with_2_and_says_why_and_what_next() {
    let output = k3_prep(&["convert", "/nonexistent/snapshot", "/nonexistent/out"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        text,
        "error: /nonexistent/snapshot: no such folder\n\
         hint: give the folder of the download: the one with config.json in it\n"
    );
    assert_eq!(k3_prep(&["convert", "a", "b", "--bits", "5"]).status.code(), Some(2));
}

/// A seeded snapshot in a folder of its own.
fn tiny(dir: &Path, seed: u64) -> std::path::PathBuf {
    let snapshot = dir.join("snapshot");
    let dims = Preset::Tiny.dims();
    let options = SynthOptions { dims, seed, routing: Routing::Flat, sparse: false };
    write_snapshot(&snapshot, &options, &|_| {}).unwrap();
    snapshot
}

fn contents(dir: &Path) -> BTreeMap<std::ffi::OsString, Vec<u8>> {
    let entries = fs_err::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    entries.map(|e| (e.file_name(), fs_err::read(e.path()).unwrap())).collect()
}

#[test]
fn a_killed_process_leaves_what_another_one_completes() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = tiny(dir.path(), 5);
    let convert = |out: &Path| {
        let mut command = std::process::Command::new(PROGRAM);
        command.arg("convert").args([&snapshot, out]);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let (clean, out) = (dir.path().join("clean"), dir.path().join("killed"));
    assert!(convert(&clean).status().unwrap().success());
    let mut kills = 0;
    for millis in (0..12).map(|n| 3 * n * n) {
        let mut child = convert(&out).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(millis));
        child.kill().unwrap();
        if child.wait().unwrap().success() {
            break;
        }
        kills += 1;
    }
    assert!(kills > 0);
    assert!(convert(&out).status().unwrap().success());
    assert!(contents(&out) == contents(&clean));
    assert!(!dir.path().join("killed.partial").exists());
}

#[test]
fn exit_codes_tell_good_different_and_impossible_apart() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = tiny(dir.path(), 6);
    let (snapshot, out) = (snapshot.to_str().unwrap(), dir.path().join("out"));
    let container = out.to_str().unwrap();
    let converted = k3_prep(&["--quiet", "convert", snapshot, container, "--bits", "8"]);
    assert!(converted.status.success());
    assert_eq!(String::from_utf8(converted.stderr).unwrap(), "");
    let verified = k3_prep(&["verify", "-q", container, "--rederive"]);
    assert_eq!(verified.status.code(), Some(0));
    assert!(String::from_utf8(verified.stdout).unwrap().ends_with("no difference\n"));
    let path = out.join("dense-head.safetensors");
    let mut bytes = fs_err::read(&path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs_err::write(&path, bytes).unwrap();
    let verified = k3_prep(&["verify", "-q", container]);
    assert_eq!(verified.status.code(), Some(1));
    let text = String::from_utf8(verified.stdout).unwrap();
    assert!(text.contains("dense-head.safetensors: language_model.lm_head.weight.qs: "), "{text}");
    assert_eq!(k3_prep(&["verify", snapshot]).status.code(), Some(2));
}

#[test]
fn a_reader_that_hangs_up_is_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let snapshot = tiny(dir.path(), 7);
    let out = dir.path().join("out");
    let mut child = std::process::Command::new(PROGRAM)
        .args(["convert", "--dry-run"])
        .args([&snapshot, &out])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(!out.exists() && !dir.path().join("out.partial").exists());
}

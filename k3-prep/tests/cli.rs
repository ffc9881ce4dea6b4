//! Help, versions and exit codes of the program itself.

use assert_cmd::Command;

fn k3_prep(args: &[&str]) -> std::process::Output {
    Command::new(env!("CARGO_BIN_EXE_k3-prep")).args(args).output().unwrap()
}

#[test]
fn help_and_version_are_results() {
    let help = k3_prep(&["--help"]);
    assert!(help.status.success());
    let text = String::from_utf8(help.stdout).unwrap();
    for verb in ["convert", "verify", "synth"] {
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

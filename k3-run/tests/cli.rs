//! The program as a user meets it. That this file is here also makes cargo build the
//! program for the tests of the whole workspace.

use assert_cmd::Command;

#[test]
fn help_and_version_succeed_and_nonsense_does_not() {
    let run = |args: &[&str]| Command::cargo_bin("k3-run").unwrap().args(args).assert();
    run(&["--help"]).success();
    run(&["--version"]).success().stdout(concat!("k3-run ", env!("CARGO_PKG_VERSION"), "\n"));
    run(&["plan"]).code(2);
    run(&["info", "/nowhere"]).code(2);
}

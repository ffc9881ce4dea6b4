//! What a system refuses, on purpose: file systems that are full or read-only, and system
//! calls that fail at their n-th use, one n after the other.

use std::ffi::OsStr;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use fs_err as fs;

use super::programs::{Bench, Outcome, same_or_said};

/// A small file system of its own, unmounted when it is dropped.
struct Mount<'a>(&'a Path);

impl<'a> Mount<'a> {
    /// None where this user may not mount.
    fn new(at: &'a Path, options: &str) -> Option<Self> {
        fs::create_dir_all(at).ok()?;
        let mount = ["-t", "tmpfs", "-o", options, "none"];
        let done = Command::new("mount").args(mount).arg(at).output().ok()?;
        done.status.success().then_some(Self(at))
    }
}

impl Drop for Mount<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0).status();
    }
}

fn skipped(what: &str) {
    #[expect(clippy::print_stdout, reason = "`make faults` says what it leaves out")]
    {
        println!("left out: {what}");
    }
}

/// Converts and packs onto file systems that have no room, or are read-only.
pub(super) fn full_and_read_only(bench: &mut Bench) {
    const FULL: &str = "file systems that are full or read-only";
    let at = bench.tiny.path("small");
    let needed: usize = bench.clean.values().map(Vec::len).sum();
    let snapshot = bench.tiny.snapshot();
    let (clean, pack) = (bench.tiny.path("clean"), at.join("pack"));
    for kib in [4, 64, needed / 2048, needed / 1024, needed / 1024 + 64] {
        let Some(mount) = Mount::new(&at, &format!("size={kib}k")) else {
            return skipped("full file systems, which this user may not mount");
        };
        let out = at.join("c");
        let output = bench.convert(&snapshot, &out);
        // What fits is right; what does not is refused, and nothing has the final name.
        let right = if output.status.success() { bench.is_clean(&out) } else { !out.exists() };
        let outcome = if right { same_or_said(&output, true) } else { Outcome::Wrong };
        bench.table.add(FULL, &format!("convert into {kib} KiB"), &output, outcome);
        let _ = fs::remove_dir_all(&out);
        let mut partial = out.into_os_string();
        partial.push(".partial");
        let _ = fs::remove_dir_all(partial);
        let args = [
            OsStr::new("convert"),
            snapshot.as_os_str(),
            clean.as_os_str(),
            OsStr::new("--experts"),
            OsStr::new("pack"),
            pack.as_os_str(),
        ];
        let output = bench.prep(&args);
        let outcome = same_or_said(&output, true);
        bench.table.add(FULL, &format!("pack into {kib} KiB"), &output, outcome);
        drop(mount);
    }
    let Some(_mount) = Mount::new(&at, "ro,size=64m") else { return };
    let output = bench.convert(&snapshot, &at.join("c"));
    bench.table.refused(FULL, "convert into a read-only file system", &output, 2, "hint: ");
    let save = at.join("session");
    let saved = ["--save", save.to_str().expect("UTF-8")];
    let output = bench.generate(&clean, &saved, "true");
    bench.table.refused(FULL, "save a session into it", &output, 2, "hint: ");
}

/// Fails system calls of conversions and of generation, and looks at what comes of it.
pub(super) fn failing_calls(bench: &mut Bench) {
    const KIND: &str = "system calls that fail at their n-th use";
    let probe = Command::new("strace").args(["-f", "-qq", "-o", "/dev/null", "true"]).output();
    if !probe.is_ok_and(|output| output.status.success()) {
        return skipped("failing system calls, which need strace");
    }
    let (clean, snapshot) = (bench.tiny.path("clean"), bench.tiny.snapshot());
    let generate = |bench: &Bench, fault: Option<(&str, &str, usize)>| {
        let setup = fault.map_or("true".to_owned(), |(call, error, n)| inject(call, error, n));
        let options = ["--memory", "stream", "--expert-cache", "0", "--threads", "1"];
        bench.generate(&clean, &options, &setup)
    };
    let good = generate(bench, None);
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    let numbers = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233];
    for (call, error) in [
        ("pread64", "EIO"),
        ("pread64", "EINTR"),
        ("pread64", "EINVAL"),
        ("read", "EIO"),
        ("openat", "EMFILE"),
        ("openat", "EACCES"),
        ("madvise", "EINVAL"),
        ("fadvise64", "EINVAL"),
        ("clone3", "EAGAIN"),
        ("statx", "EIO"),
        ("sched_getaffinity", "EPERM"),
    ] {
        for n in numbers {
            let what = format!("generate: {call} number {n} gives {error}");
            let output = generate(bench, Some((call, error, n)));
            let before_main = died_before_main(&output);
            let same = output.stdout == good.stdout;
            let outcome = if before_main { Outcome::Right } else { same_or_said(&output, same) };
            bench.table.add(KIND, &what, &output, outcome);
        }
    }
    let out = bench.tiny.path("failing");
    for (call, error) in [
        ("pread64", "EIO"),
        ("pread64", "EINTR"),
        ("write", "ENOSPC"),
        ("write", "EINTR"),
        ("fsync", "EIO"),
        ("fdatasync", "EIO"),
        ("ftruncate", "EIO"),
        ("rename", "EIO"),
        ("renameat2", "EINVAL"),
        ("openat", "EMFILE"),
        ("flock", "ENOLCK"),
        ("clone3", "EAGAIN"),
    ] {
        for n in numbers {
            let what = format!("convert: {call} number {n} gives {error}");
            let args = ["-q", "convert", "--jobs", "1", "--force"].map(OsStr::new);
            let args = [&args[..], &[snapshot.as_os_str(), out.as_os_str()]].concat();
            let output = bench.limited(&inject(call, error, n), "k3-prep", &args);
            let right = if output.status.success() { bench.is_clean(&out) } else { !out.exists() };
            // The message itself may be what could not be written.
            let silent = call == "write" && output.status.code() == Some(2);
            let outcome = match right {
                true if silent || died_before_main(&output) => Outcome::Right,
                true => same_or_said(&output, true),
                false => Outcome::Wrong,
            };
            bench.table.add(KIND, &what, &output, outcome);
            let again = bench.convert(&snapshot, &out);
            let clean = bench.is_clean(&out);
            let outcome = if clean { Outcome::Right } else { Outcome::Wrong };
            bench.table.add(KIND, &format!("{what}, again"), &again, outcome);
            fs::remove_dir_all(&out).unwrap();
        }
    }
}

/// What to put before a program in a shell so that a call of it fails.
fn inject(call: &str, error: &str, n: usize) -> String {
    format!("set -- strace -f -qq -o /dev/null -e inject={call}:error={error}:when={n} \"$@\"")
}

/// Whether the loader, or the start of the runtime, was what the fault met.
fn died_before_main(output: &Output) -> bool {
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.signal().is_none()
        && (said.contains("error while loading shared libraries")
            || said.contains("cannot open shared object")
            || said.contains("strace: "))
}

//! Faults of machines, tried on the built programs: `make faults` runs this and prints a
//! table. Every try ends well, or with an exit code of 1 or 2 and a message; never by a
//! signal, a panic or with another result.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;

use super::{contents, system};
use crate::support::TinyK3;

/// Longest time a try may take.
const PATIENCE: Duration = Duration::from_secs(120);

#[derive(Default)]
struct Row {
    tried: usize,
    right: usize,
    panics: usize,
    wrong: usize,
}

/// What was tried and how it ended.
#[derive(Default)]
pub(super) struct Table(BTreeMap<&'static str, Row>, Vec<String>);

impl Table {
    pub(super) fn add(
        &mut self,
        kind: &'static str,
        what: &str,
        output: &Output,
        outcome: Outcome,
    ) {
        let row = self.0.entry(kind).or_default();
        row.tried += 1;
        let err = String::from_utf8_lossy(&output.stderr);
        let panicked = err.contains("panicked") || output.status.signal().is_some();
        row.panics += usize::from(panicked);
        row.wrong += usize::from(outcome == Outcome::Wrong);
        if outcome == Outcome::Right && !panicked {
            row.right += 1;
        } else {
            self.1.push(format!("{kind}: {what}: {} {err}", output.status));
        }
    }

    /// It must end with `code` and a message that contains `word`.
    pub(super) fn refused(
        &mut self,
        kind: &'static str,
        what: &str,
        output: &Output,
        code: i32,
        word: &str,
    ) {
        let said = String::from_utf8_lossy(&output.stderr).into_owned()
            + &String::from_utf8_lossy(&output.stdout);
        let right = output.status.code() == Some(code) && said.contains(word);
        let wrong = output.status.success();
        let bad = if wrong { Outcome::Wrong } else { Outcome::Unclear };
        self.add(kind, what, output, if right { Outcome::Right } else { bad });
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    Right,
    /// No wrong result, but not what should have been said.
    Unclear,
    Wrong,
}

/// A result equal to the good one, or a refusal with a message.
pub(super) fn same_or_said(output: &Output, same: bool) -> Outcome {
    match output.status.code() {
        Some(0) if same => Outcome::Right,
        Some(0) => Outcome::Wrong,
        Some(1 | 2) if !output.stderr.is_empty() => Outcome::Right,
        _ => Outcome::Unclear,
    }
}

pub(super) struct Bench {
    bin: PathBuf,
    pub(super) tiny: TinyK3,
    pub(super) clean: BTreeMap<String, Vec<u8>>,
    pub(super) table: Table,
}

impl Bench {
    fn program(&self, name: &str) -> OsString {
        self.bin.join(name).into_os_string()
    }

    pub(super) fn prep<S: AsRef<OsStr>>(&self, args: &[S]) -> Output {
        wait(Command::new(self.program("k3-prep")).arg("-q").args(args))
    }

    /// Runs one of the programs in a shell that has set limits first.
    pub(super) fn limited(&self, setup: &str, program: &str, args: &[&OsStr]) -> Output {
        let script = format!("{setup}; exec \"$@\"");
        let mut command = Command::new("bash");
        command.arg("-c").arg(script).arg("bash").arg(self.program(program)).args(args);
        command.env("K3_NO_USAGE", "1");
        wait(&mut command)
    }

    pub(super) fn convert(&self, snapshot: &Path, out: &Path) -> Output {
        self.prep(&[OsStr::new("convert"), snapshot.as_os_str(), out.as_os_str()])
    }

    pub(super) fn generate(&self, container: &Path, more: &[&str], setup: &str) -> Output {
        generate(self, container, more, setup)
    }

    pub(super) fn is_clean(&self, out: &Path) -> bool {
        out.is_dir() && contents(out) == self.clean
    }
}

fn wait(command: &mut Command) -> Output {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = child.spawn().expect("a program");
    let id = child.id().to_string();
    let start = Instant::now();
    let (done, is_done) = std::sync::mpsc::channel();
    let watch = std::thread::spawn(move || {
        if is_done.recv_timeout(PATIENCE).is_err() {
            let _ = Command::new("kill").args(["-9", &id]).status();
        }
    });
    let output = child.wait_with_output().expect("its output");
    let _ = done.send(());
    let _ = watch.join();
    assert!(start.elapsed() < PATIENCE, "it hangs");
    output
}

#[test]
#[ignore = "needs the built programs in K3_BIN: run `make faults`"]
fn faults_of_machines() {
    let bin = PathBuf::from(std::env::var_os("K3_BIN").expect("K3_BIN: folder of the programs"));
    let bin = fs::canonicalize(bin).unwrap();
    let kills = std::env::var("K3_KILLS").map_or(40, |n| n.parse().unwrap());
    let tiny = TinyK3::new(70);
    let mut bench = Bench { bin, tiny, clean: BTreeMap::new(), table: Table::default() };
    let snapshot = bench.tiny.snapshot();
    let before = stamps(&snapshot);
    let clean = bench.tiny.path("clean");
    let start = Instant::now();
    assert!(bench.convert(&snapshot, &clean).status.success());
    let took = start.elapsed();
    bench.clean = contents(&clean);

    killed(&mut bench, kills, took);
    killed_hashing(&mut bench, kills.div_ceil(4));
    full_disk(&mut bench);
    two_at_once(&mut bench);
    odd_paths(&mut bench);
    flipped_bits(&mut bench);
    small_machines(&mut bench);
    while_running(&mut bench);
    system::full_and_read_only(&mut bench);
    system::failing_calls(&mut bench);

    assert!(stamps(&snapshot) == before, "the snapshot is untouched");
    let mut sum = Row::default();
    let mut text = format!(
        "{:<44}{:>7}{:>7}{:>8}{:>15}\n",
        "fault", "tried", "right", "panics", "wrong answers"
    );
    let line = |name: &str, r: &Row| {
        format!("{name:<44}{:>7}{:>7}{:>8}{:>15}\n", r.tried, r.right, r.panics, r.wrong)
    };
    for (kind, row) in &bench.table.0 {
        text += &line(kind, row);
        sum.tried += row.tried;
        sum.right += row.right;
        sum.panics += row.panics;
        sum.wrong += row.wrong;
    }
    text += &line("all", &sum);
    #[expect(clippy::print_stdout, reason = "the table is what `make faults` is for")]
    {
        println!("{text}");
    }
    assert!(bench.table.1.is_empty(), "{}", bench.table.1.join("\n"));
}

/// Contents and times of all files.
fn stamps(dir: &Path) -> Vec<(PathBuf, Vec<u8>, std::time::SystemTime)> {
    let mut all: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            let time = fs::metadata(&path).unwrap().modified().unwrap();
            (path.clone(), fs::read(&path).unwrap(), time)
        })
        .collect();
    all.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Killed at random moments and resumed: the same bytes, and nothing half made passes.
fn killed(bench: &mut Bench, kills: usize, took: Duration) {
    kill_and_resume(bench, "conversion killed, then run again", kills, took, &[]);
}

/// The same while experts are hashed, in small steps on one thread.
fn killed_hashing(bench: &mut Bench, kills: usize) {
    let options = ["--hash-experts", "--jobs", "1"];
    let hashed = bench.tiny.path("hashed");
    let start = Instant::now();
    assert!(convert_with(bench, &hashed, &options).status.success());
    let took = start.elapsed();
    let plain = std::mem::replace(&mut bench.clean, contents(&hashed));
    kill_and_resume(bench, "hashing of experts killed, then run again", kills, took, &options);
    bench.clean = plain;
}

fn convert_with(bench: &Bench, out: &Path, options: &[&str]) -> Output {
    let snapshot = bench.tiny.snapshot();
    let mut args = vec![OsStr::new("convert"), snapshot.as_os_str(), out.as_os_str()];
    args.extend(options.iter().map(OsStr::new));
    bench.prep(&args)
}

fn kill_and_resume(
    bench: &mut Bench,
    kind: &'static str,
    kills: usize,
    took: Duration,
    options: &[&str],
) {
    let mut rng = fastrand::Rng::with_seed(11);
    for i in 0..kills {
        let out = bench.tiny.path("killed");
        let mut child = Command::new(bench.program("k3-prep"))
            .arg("-q")
            .arg("convert")
            .args([bench.tiny.snapshot(), out.clone()])
            .args(options)
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(took.mul_f64(rng.f64() * 1.1));
        child.kill().unwrap();
        child.wait().unwrap();
        let whole = out.exists();
        let verified = bench.prep(&[OsStr::new("verify"), out.as_os_str()]);
        let again = convert_with(bench, &out, options);
        let right = verified.status.success() == whole && bench.is_clean(&out);
        let outcome = if right { Outcome::Right } else { Outcome::Wrong };
        bench.table.add(kind, &format!("kill {i}"), &again, outcome);
        fs::remove_dir_all(&out).unwrap();
    }
}

/// No file may grow beyond a size, which fails writes at every place; then there is room.
fn full_disk(bench: &mut Bench) {
    const KIND: &str = "writes fail from some byte on, then room";
    let largest = bench.clean.values().map(Vec::len).max().unwrap() / 1024;
    let sizes: Vec<usize> = (0..16).chain((16..largest).step_by((largest / 24).max(1))).collect();
    for kib in sizes {
        let out = bench.tiny.path("full");
        let snapshot = bench.tiny.snapshot();
        let args = [OsStr::new("-q"), OsStr::new("convert"), snapshot.as_os_str(), out.as_os_str()];
        let output = bench.limited(&format!("trap '' XFSZ; ulimit -f {kib}"), "k3-prep", &args);
        let refused = output.status.code() == Some(2) && !out.exists();
        bench.table.refused(KIND, &format!("{kib} KiB"), &output, 2, "full.partial");
        let again = bench.convert(&snapshot, &out);
        let right = refused && bench.is_clean(&out);
        let outcome = if right { Outcome::Right } else { Outcome::Wrong };
        bench.table.add(KIND, &format!("{kib} KiB, again"), &again, outcome);
        fs::remove_dir_all(&out).unwrap();
    }
}

fn two_at_once(bench: &mut Bench) {
    for i in 0..10 {
        let out = bench.tiny.path("two");
        let (one, other) = std::thread::scope(|scope| {
            let run = || bench.convert(&bench.tiny.snapshot(), &out);
            let other = scope.spawn(run);
            (run(), other.join().unwrap())
        });
        let same = bench.is_clean(&out) && (one.status.success() || other.status.success());
        for output in [one, other] {
            let outcome = if same { same_or_said(&output, true) } else { Outcome::Wrong };
            bench.table.add(
                "two conversions into one folder",
                &format!("pair {i}"),
                &output,
                outcome,
            );
        }
        fs::remove_dir_all(&out).unwrap();
    }
}

fn odd_paths(bench: &mut Bench) {
    const KIND: &str = "odd names and places";
    let names: [&[u8]; 8] = [
        b"a b",
        b"it's \"so\"",
        b"new\nline",
        b"\xff\xfe",
        "模型".as_bytes(),
        b"-q",
        b"%s%n",
        b"#;&|",
    ];
    for name in names {
        let dir = bench.tiny.path(OsStr::from_bytes(name));
        fs::create_dir(&dir).unwrap();
        for entry in fs::read_dir(bench.tiny.snapshot()).unwrap() {
            let entry = entry.unwrap();
            fs::hard_link(entry.path(), dir.join(entry.file_name())).unwrap();
        }
        let out = dir.with_extension("out");
        let output = bench.convert(&dir, &out);
        // The manifest names another snapshot; the weights are the same.
        let same = output.status.success()
            && contents(&out).iter().all(|(n, b)| !n.starts_with("dense-") || *b == bench.clean[n]);
        let outcome = if same { Outcome::Right } else { Outcome::Wrong };
        bench.table.add(KIND, &String::from_utf8_lossy(name), &output, outcome);
    }
    let lasso = bench.tiny.path("lasso");
    symlink("lasso", &lasso).unwrap();
    let snapshot = bench.tiny.snapshot();
    let file = bench.tiny.path("file");
    fs::write(&file, "mine").unwrap();
    for (from, to) in [
        (lasso.clone(), bench.tiny.path("x")),
        (snapshot.clone(), lasso.join("x")),
        (snapshot.clone(), file.clone()),
        (snapshot.clone(), file.join("x")),
        (snapshot.clone(), PathBuf::from("/proc/k3")),
        (snapshot.clone(), snapshot.join("x")),
        (snapshot.clone(), snapshot.clone()),
        (file.clone(), bench.tiny.path("x")),
        (PathBuf::from("/dev/null"), bench.tiny.path("x")),
        (PathBuf::new(), bench.tiny.path("x")),
    ] {
        let output = bench.convert(&from, &to);
        let what = format!("{} to {}", from.display(), to.display());
        bench.table.refused(KIND, &what, &output, 2, "error: ");
    }
    assert_eq!(fs::read(&file).unwrap(), b"mine");
}

/// One bit of each file of a container: verify names the file, and k3-run says so or goes on.
fn flipped_bits(bench: &mut Bench) {
    let mut rng = fastrand::Rng::with_seed(12);
    let names: Vec<String> = bench.clean.keys().cloned().collect();
    for name in names {
        let out = bench.tiny.path("flipped");
        fs::create_dir(&out).unwrap();
        for (other, bytes) in &bench.clean {
            fs::write(out.join(other), bytes).unwrap();
        }
        let mut bytes = bench.clean[&name].clone();
        let at = rng.usize(0..bytes.len());
        bytes[at] ^= 1 << rng.u8(0..8);
        fs::write(out.join(&name), bytes).unwrap();
        let output = bench.prep(&[OsStr::new("verify"), out.as_os_str()]);
        let what = format!("byte {at} of {name}");
        bench.table.refused("one bit flipped in a container: verify", &what, &output, 1, &name);
        let output = generate(bench, &out, &[], "true");
        // Weights are not hashed when a container is opened: that is what verify is for.
        let outcome = same_or_said(&output, true);
        bench.table.add("one bit flipped in a container: k3-run", &what, &output, outcome);
        fs::remove_dir_all(&out).unwrap();
    }
}

fn generate(bench: &Bench, container: &Path, more: &[&str], setup: &str) -> Output {
    let snapshot = bench.tiny.snapshot();
    let mut args = vec![OsStr::new("generate"), container.as_os_str()];
    args.extend([OsStr::new("--snapshot"), snapshot.as_os_str()]);
    args.extend(["-n", "8", "--prompt", "The keeper", "--temperature", "0"].map(OsStr::new));
    args.extend(more.iter().map(OsStr::new));
    bench.limited(setup, "k3-run", &args)
}

/// Limits of processes and of control groups.
fn small_machines(bench: &mut Bench) {
    const KIND: &str = "limits of the process";
    let clean = bench.tiny.path("clean");
    let good = generate(bench, &clean, &[], "true");
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    for setup in [
        "ulimit -n 64",
        "ulimit -n 16",
        "ulimit -l 0",
        "ulimit -v 4194304",
        "ulimit -v 400000",
        "ulimit -v 100000",
        "ulimit -u 20",
        "exec 0<&-",
        "exec 1>&-",
        "exec 2>&-",
        "exec 1>/dev/full",
        "export TMPDIR=/nonexistent",
        "export LC_ALL=C",
        "export K3_BITS=3 K3_CHUNK=7",
        "unset HOME PATH",
        "cd /; umask 777",
    ] {
        let output = generate(bench, &clean, &[], setup);
        let silent = ["exec 2>&-", "exec 1>&-"].contains(&setup);
        let same = silent || output.stdout == good.stdout;
        let outcome = if silent && output.status.code().is_some() {
            Outcome::Right
        } else {
            same_or_said(&output, same)
        };
        bench.table.add(KIND, setup, &output, outcome);
    }
    let hung_up = Command::new("bash")
        .args(["-c", "set -o pipefail; \"$0\" generate \"$1\" --snapshot \"$2\" -n 64 --prompt The | head -c 1"])
        .arg(bench.program("k3-run"))
        .args([clean.clone(), bench.tiny.snapshot()])
        .env("K3_NO_USAGE", "1")
        .output()
        .unwrap();
    let outcome = same_or_said(&hung_up, true);
    bench.table.add(KIND, "the reader hangs up", &hung_up, outcome);
    // Version 2 of control groups, then version 1; what is not there is not tried.
    let root = Path::new("/sys/fs/cgroup");
    for (controller, file, limit) in [
        ("", "memory.max", "64M"),
        ("", "memory.max", "24M"),
        ("", "cpu.max", "50000 100000"),
        ("memory", "memory.limit_in_bytes", "64M"),
        ("memory", "memory.limit_in_bytes", "24M"),
        ("cpu", "cpu.cfs_quota_us", "50000"),
    ] {
        let parent = root.join(controller);
        let group = parent.join(format!("k3-faults-{}", std::process::id()));
        if !parent.join("cgroup.procs").exists() || fs::create_dir(&group).is_err() {
            continue;
        }
        if fs::write(group.join(file), limit).is_ok() {
            let setup = format!("echo $$ > {}/cgroup.procs", group.display());
            let output = generate(bench, &clean, &[], &setup);
            let outcome = same_or_said(&output, output.stdout == good.stdout);
            bench.table.add("limits of the control group", limit, &output, outcome);
        }
        let _ = std::fs::remove_dir(&group);
    }
}

/// Files that change under a running process.
fn while_running(bench: &mut Bench) {
    const KIND: &str = "files change under k3-run";
    let clean = bench.tiny.path("clean");
    let long = ["-n", "400", "--expert-cache", "1"];
    let good = generate_long(bench, &clean, &bench.tiny.snapshot(), &long, || {});
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    for (i, mode) in
        ["mmap", "resident", "stream", "mmap", "mmap", "stream"].into_iter().enumerate()
    {
        let out = bench.tiny.path("running");
        fs::create_dir(&out).unwrap();
        for (other, bytes) in &bench.clean {
            fs::write(out.join(other), bytes).unwrap();
        }
        let mut options = long.to_vec();
        options.extend(["--memory", mode]);
        let victim =
            out.join(if i < 3 { "dense-layer-003.safetensors" } else { "dense-head.safetensors" });
        let output = generate_long(bench, &out, &bench.tiny.snapshot(), &options, || {
            let file = fs::OpenOptions::new().write(true).open(&victim).unwrap();
            file.set_len(4096).unwrap();
        });
        let outcome = same_or_said(&output, output.stdout == good.stdout);
        bench.table.add(KIND, &format!("{} cut short, {mode}", victim.display()), &output, outcome);
        fs::remove_dir_all(&out).unwrap();
    }
    for cut in [false, true] {
        let snapshot = bench.tiny.path("moving");
        fs::create_dir(&snapshot).unwrap();
        for entry in fs::read_dir(bench.tiny.snapshot()).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, snapshot.join(path.file_name().unwrap())).unwrap();
        }
        let output = generate_long(bench, &clean, &snapshot, &long, || {
            for shard in 1..9 {
                let path = snapshot.join(format!("model-{shard:05}-of-000010.safetensors"));
                if cut {
                    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
                    file.set_len(100_000).unwrap();
                } else {
                    fs::remove_file(&path).unwrap();
                }
            }
        });
        let outcome = same_or_said(&output, output.stdout == good.stdout);
        let what = if cut { "shards cut short" } else { "shards deleted" };
        bench.table.add(KIND, what, &output, outcome);
        fs::remove_dir_all(&snapshot).unwrap();
    }
}

/// Generates, and calls `meanwhile` when it has begun to.
fn generate_long(
    bench: &Bench,
    container: &Path,
    snapshot: &Path,
    options: &[&str],
    meanwhile: impl FnOnce(),
) -> Output {
    use std::io::Read;
    let mut child = Command::new(bench.program("k3-run"))
        .arg("generate")
        .arg(container)
        .arg("--snapshot")
        .arg(snapshot)
        .args(["--prompt", "The keeper", "--temperature", "0", "--no-usage"])
        .args(options)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = vec![0];
    let pipe = child.stdout.as_mut().unwrap();
    let began = pipe.read(&mut stdout).unwrap();
    stdout.truncate(began);
    meanwhile();
    pipe.read_to_end(&mut stdout).unwrap();
    let mut output = child.wait_with_output().unwrap();
    output.stdout = stdout;
    output
}

//! Conversions in parts, by processes that run at once or while the download does: byte for
//! byte the container of one that does it all.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fs_err as fs;
use k3_formats::recipe::Recipe;
use k3_prep::Talk;
use k3_prep::conversion::Conversion;
use k3_prep::follow::Follow;
use k3_prep::plan::ConversionPlan;

fn prep(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_k3-prep"));
    command.current_dir(dir).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(dir: &Path, args: &[&str]) -> Output {
    prep(dir, args).output().unwrap()
}

/// Runs what must succeed.
fn good(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, args);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs what must be refused, and returns why.
fn refused(dir: &Path, args: &[&str]) -> String {
    let output = run(dir, args);
    assert_eq!(output.status.code(), Some(2), "{args:?}");
    String::from_utf8(output.stderr).unwrap()
}

/// A folder with a snapshot `s` and its container `whole`.
fn made() -> tempfile::TempDir {
    let tmp = tempfile::tempdir().unwrap();
    good(tmp.path(), &["synth", "s", "--seed", "70"]);
    good(tmp.path(), &["convert", "-q", "s", "whole"]);
    tmp
}

/// Every file of a folder.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

#[test]
fn processes_with_shards_each_make_the_same_container() {
    let tmp = made();
    let dir = tmp.path();
    for round in 0..5 {
        let out = format!("out {round}");
        let ranges = ["1-3", "4-4", "5-7", "8-10"];
        let running: Vec<_> = ranges
            .iter()
            .map(|r| prep(dir, &["convert", "-q", "s", &out, "--shards", r]).spawn().unwrap())
            .collect();
        for process in running {
            let output = process.wait_with_output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
        assert!(!dir.join(&out).exists(), "nothing is published before --finish");
        good(dir, &["convert", "-q", "s", &out, "--finish"]);
        assert!(contents(&dir.join(&out)) == contents(&dir.join("whole")));
        assert!(!dir.join(format!("{out}.partial")).exists());
        let again = good(dir, &["convert", "-q", "s", &out, "--shards", "1-3"]);
        assert!(again.contains("was complete already"), "{again}");
    }
}

#[test]
fn what_is_missing_or_differs_is_named_and_nothing_is_done_twice() {
    let tmp = made();
    let dir = tmp.path();
    good(dir, &["convert", "-q", "s", "out", "--shards", "1-4"]);
    let why = refused(dir, &["convert", "-q", "s", "out", "--finish"]);
    assert!(why.contains("dense files are not converted yet, those of --shards 5, 6"), "{why}");
    let json = good(dir, &["convert", "-q", "s", "out", "--shards", "2-4", "--json"]);
    assert!(json.contains("\"converted\": 0"), "the other part did them: {json}");
    let why = refused(dir, &["convert", "-q", "s", "out", "--shards", "9-11"]);
    assert!(why.contains("no shards 9-11: there are 10"), "{why}");
    let why = refused(dir, &["convert", "-q", "s", "out", "--shards", "5-10", "--bits", "8"]);
    assert!(why.contains("cannot go on with this work"), "{why}");
    // The plain command does what is left.
    good(dir, &["convert", "-q", "s", "out"]);
    assert!(contents(&dir.join("out")) == contents(&dir.join("whole")));
}

#[test]
fn a_part_whose_shard_changed_is_converted_again() {
    let tmp = made();
    let dir = tmp.path();
    good(dir, &["convert", "-q", "s", "out", "--shards", "1-10"]);
    let shard = dir.join("s/model-00002-of-000010.safetensors");
    let shard = fs::OpenOptions::new().write(true).open(shard).unwrap();
    shard.set_modified(std::time::UNIX_EPOCH + Duration::from_secs(9)).unwrap();
    let why = refused(dir, &["convert", "-q", "s", "out", "--finish"]);
    assert!(why.contains("not converted yet, those of --shards 2\n"), "{why}");
}

#[test]
fn two_with_shards_in_common_are_refused_while_both_run() {
    let tmp = made();
    let dir = tmp.path();
    fs::create_dir(dir.join("out.partial")).unwrap();
    let hold = |name: &str, how| {
        let file = fs::File::create(dir.join("out.partial").join(name)).unwrap();
        rustix::fs::flock(file.file(), how).unwrap();
        file
    };
    use rustix::fs::FlockOperation::{LockExclusive, LockShared};
    let part = hold("journal-3-5.jsonl", LockExclusive);
    let whole = hold("journal.jsonl", LockShared);
    for range in ["5-7", "1-3", "3-5"] {
        let why = refused(dir, &["convert", "-q", "s", "out", "--shards", range]);
        assert!(why.contains("another conversion is working"), "{why}");
    }
    good(dir, &["convert", "-q", "s", "out", "--shards", "6-10"]);
    for plain in [&["convert", "-q", "s", "out"][..], &["convert", "-q", "s", "out", "--finish"]] {
        let why = refused(dir, plain);
        assert!(why.contains("another conversion is working"), "{why}");
    }
    drop((part, whole));
    good(dir, &["convert", "-q", "s", "out"]);
    assert!(contents(&dir.join("out")) == contents(&dir.join("whole")));
}

/// Puts the files of `from` into `to` as a download does, and some as none should.
fn download(from: &Path, to: &Path) {
    let pause = || std::thread::sleep(Duration::from_millis(60));
    let mut names: Vec<_> = contents(from).into_iter().collect();
    names.sort_by_key(|(name, _)| (name.ends_with(".safetensors"), name.len()));
    for (i, (name, bytes)) in names.into_iter().enumerate() {
        let path = to.join(&name);
        if i % 2 == 0 {
            // In place, half by half.
            fs::write(&path, &bytes[..bytes.len() / 2]).unwrap();
            pause();
        } else if i % 3 == 0 {
            // The whole size first, with the mark of the downloader that does so.
            let mark = to.join(format!("{name}.aria2"));
            fs::write(&mark, "").unwrap();
            fs::write(&path, vec![0; bytes.len()]).unwrap();
            pause();
            fs::write(&path, &bytes).unwrap();
            fs::remove_file(&mark).unwrap();
        }
        fs::write(to.join("incoming"), &bytes).unwrap();
        fs::rename(to.join("incoming"), &path).unwrap();
        let time = fs::metadata(from.join(&name)).unwrap().modified().unwrap();
        let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.set_modified(time).unwrap();
        pause();
    }
}

#[test]
fn a_growing_snapshot_is_followed_to_the_same_container() {
    let tmp = made();
    let dir = tmp.path();
    let (from, to, out) = (dir.join("s"), dir.join("grows"), dir.join("out"));
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let recipe = Recipe::default();
    let follow = Follow {
        snapshot: &to,
        out: &out,
        recipe: &recipe,
        calibration: None,
        allow_nonfinite: false,
        talk: Talk::Quiet,
        pool: &pool,
        every: Duration::from_millis(10),
    };
    assert!(follow.run().unwrap_err().to_string().contains("no such folder"));
    fs::create_dir(&to).unwrap();
    let early = std::thread::scope(|scope| {
        let downloading = scope.spawn(|| download(&from, &to));
        let watching = scope.spawn(move || {
            let work = dir.join("out.partial");
            let mut most = 0;
            while !downloading.is_finished() {
                let files = fs::read_dir(&work).into_iter().flatten().flatten();
                let dense = files.filter(|f| {
                    let name = f.file_name().into_string().unwrap();
                    name.starts_with("dense-") && name.ends_with(".safetensors")
                });
                most = most.max(dense.count());
                std::thread::sleep(Duration::from_millis(5));
            }
            most
        });
        let snapshot = follow.run().unwrap();
        let plan = ConversionPlan::new(&snapshot, &recipe).unwrap();
        let mut on_file = |file: &k3_formats::container::manifest::FileRecord| -> _ {
            panic!("{} was not converted before", file.name)
        };
        Conversion {
            force: false,
            allow_nonfinite: false,
            talk: Talk::Quiet,
            pool: &pool,
            on_file: &mut on_file,
        }
        .run(&plan, &out)
        .unwrap();
        watching.join().unwrap()
    });
    assert!(early >= 2, "{early} dense files were there before the download ended");
    let (mut made, mut whole) = (contents(&out), contents(&dir.join("whole")));
    // They differ in the place of the snapshot, and in nothing else.
    for name in ["manifest.json", "SHA256SUMS"] {
        let text = String::from_utf8(made.remove(name).unwrap()).unwrap();
        let wanted = String::from_utf8(whole.remove(name).unwrap()).unwrap();
        if name == "manifest.json" {
            assert_eq!(text.replace("/grows\"", "/s\""), wanted);
        }
    }
    assert!(made == whole);
}

#[test]
fn an_interrupted_conversion_says_how_to_go_on() {
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::ExitStatusExt;

    let tmp = made();
    let dir = tmp.path();
    let last = fs::read_dir(dir.join("s")).unwrap().map(|e| e.unwrap().path());
    let last = last.filter(|p| p.extension().is_some_and(|e| e == "safetensors")).max().unwrap();
    fs::rename(&last, dir.join("kept")).unwrap();
    // With a shard missing it waits, so there is time.
    let mut process = prep(dir, &["convert", "s", "out", "--follow"]).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
    let name = last.file_name().unwrap().to_str().unwrap();
    assert!(lines.any(|line| line.contains(name)), "it says what it waits for");
    let times = |folder: &str| -> BTreeMap<_, _> {
        let files = fs::read_dir(dir.join(folder)).into_iter().flatten().map(|e| e.unwrap());
        let dense = files.filter(|f| f.file_name().to_string_lossy().ends_with(".safetensors"));
        dense.map(|f| (f.file_name(), f.metadata().unwrap().modified().unwrap())).collect()
    };
    // A file that has its name but no record yet is converted again.
    let recorded = || {
        let names = fs::read_dir(dir.join("out.partial")).into_iter().flatten();
        let names = names.map(|file| file.unwrap().file_name().into_string().unwrap());
        let journals = names.filter(|name| name.starts_with("journal"));
        let text: String = journals
            .map(|name| fs::read_to_string(dir.join("out.partial").join(name)).unwrap())
            .collect();
        let mut files = times("out.partial");
        files.retain(|name, _| text.contains(&format!("\"name\":{:?}", name)));
        files
    };
    let began = std::time::Instant::now();
    while recorded().len() < 2 {
        assert!(began.elapsed() < Duration::from_secs(60), "it converts what is there");
        std::thread::sleep(Duration::from_millis(5));
    }
    let kill = Command::new("kill").args(["-INT", &process.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let said: Vec<String> = lines.collect();
    let end = [
        "error: interrupted",
        "hint: what was converted is kept; run the same command again to go on",
    ];
    assert_eq!(said[said.len() - 2..], end, "{said:?}");
    assert_eq!(process.wait().unwrap().signal(), Some(2));

    // Followed again, it does nothing twice and ends when the last shard is there.
    let before = recorded();
    assert!(before.len() >= 2);
    let mut process = prep(dir, &["convert", "s", "out", "--follow"]).spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains(name)), "it waits again");
    fs::rename(dir.join("kept"), &last).unwrap();
    let said: Vec<String> = lines.collect();
    assert!(process.wait().unwrap().success(), "{said:?}");
    let after = times("out");
    assert!(before.iter().all(|(name, time)| after[name] == *time), "{before:?} {after:?}");
    assert!(contents(&dir.join("out")) == contents(&dir.join("whole")));
}

//! Packs: every expert byte by byte as in the shards, whatever happens on the way.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use fs_err as fs;
use k3_formats::container::Container;
use k3_formats::pack::{PACK_FILE, Pack};
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_formats::tensor_name::ExpertPart;
use k3_prep::Talk;
use k3_prep::pack::Packing;
use k3_prep::plan::ConversionPlan;

const PACK: [&str; 8] = ["convert", "-q", "s", "whole", "--experts", "pack", "p", "--jobs=2"];

fn prep(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_k3-prep"));
    command.current_dir(dir).args(args).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn good(dir: &Path, args: &[&str]) -> String {
    let output = prep(dir, args).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {said}");
    String::from_utf8(output.stdout).unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A folder with a snapshot `s` and its container `whole`.
fn made(seed: &str) -> tempfile::TempDir {
    let tmp = tempfile::tempdir().unwrap();
    good(tmp.path(), &["synth", "s", "--seed", seed]);
    good(tmp.path(), &["convert", "-q", "s", "whole"]);
    tmp
}

fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

/// The banks alone: lines of the list come in the order in which banks end.
fn banks(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    contents(dir).into_iter().filter(|(name, _)| name != PACK_FILE).collect()
}

fn records(dir: &Path) -> (Pack, Vec<String>) {
    let pack = Pack::read(dir).unwrap().unwrap();
    let text = fs::read_to_string(dir.join(PACK_FILE)).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines.sort();
    (pack, lines)
}

#[test]
fn every_expert_is_there_as_it_was() {
    let tmp = made("80");
    let dir = tmp.path();
    let said = good(dir, &PACK);
    assert!(said.ends_with("of experts in 6 banks, 0 of them before\n"), "{said}");
    let container = Container::open(&dir.join("whole")).unwrap();
    let (pack, _) = records(&dir.join("p"));
    let stride = pack.header.stride as usize;
    assert_eq!((stride % 4096, pack.complete().unwrap().len()), (0, 6));
    assert_eq!(contents(&dir.join("p")).len(), 7);
    let mut shards = BTreeMap::new();
    for layer in container.config.moe_layers() {
        let bank = pack.bank(layer).unwrap();
        let bytes = fs::read(dir.join("p").join(&bank.name)).unwrap();
        assert_eq!(bytes.len(), 12 * stride);
        assert_eq!(k3_formats::digest::Digest::of(&bytes), bank.sha256);
        for expert in 0..12 {
            let mut at = expert * stride;
            for part in ExpertPart::ALL {
                let (shard, offset) = container.experts.entry(layer, expert).part(part);
                let name = &container.manifest.shards[shard].name;
                let shard = shards
                    .entry(name)
                    .or_insert_with(|| fs::read(dir.join("s").join(name)).unwrap());
                let len = part.bytes(&container.config) as usize;
                assert!(bytes[at..at + len] == shard[offset as usize..][..len]);
                at += len;
            }
            assert!(bytes[at..(expert + 1) * stride].iter().all(|&b| b == 0));
        }
    }
    // Again: nothing to do. A bank that is gone, or cut, is copied again, alone.
    let whole = banks(&dir.join("p"));
    let time = |name: &str| fs::metadata(dir.join("p").join(name)).unwrap().modified().unwrap();
    let names: Vec<&String> = whole.keys().collect();
    let before: Vec<_> = names.iter().map(|name| time(name)).collect();
    fs::remove_file(dir.join("p").join(names[1])).unwrap();
    fs::OpenOptions::new()
        .write(true)
        .open(dir.join("p").join(names[4]))
        .unwrap()
        .set_len(5000)
        .unwrap();
    let said = good(dir, &PACK);
    assert!(said.ends_with("4 of them before\n"), "{said}");
    assert!(banks(&dir.join("p")) == whole);
    let kept: Vec<_> = names.iter().zip(before).map(|(name, t)| time(name) == t).collect();
    assert_eq!(kept, [true, false, true, true, false, true]);
    assert!(good(dir, &PACK).ends_with("6 of them before\n"));
}

#[test]
fn checksums_come_with_the_copy_and_verify_compares_both() {
    let tmp = made("81");
    let dir = tmp.path();
    good(dir, &["convert", "-q", "s", "hashed", "--hash-experts"]);
    let both = ["convert", "-q", "s", "h2", "--hash-experts", "--experts", "pack", "p"];
    good(dir, &both);
    assert!(contents(&dir.join("hashed")) == contents(&dir.join("h2")));
    assert!(good(dir, &both).ends_with("6 of them before\n"));
    fs::rename(dir.join("s"), dir.join("gone")).unwrap();
    for container in ["whole", "h2"] {
        let out = good(dir, &["verify", "-q", container, "--snapshot", "p", "--experts"]);
        assert!(out.contains("banks: 6 of 6 have the size they should have, 6 the bytes"), "{out}");
        assert!(!out.contains("shards:"), "{out}");
    }
    // A changed byte, a changed filler, a cut and a missing bank.
    let bank = |layer: usize| dir.join("p").join(k3_formats::pack::bank_name(layer));
    let flip = |layer: usize, at: usize| {
        let mut bytes = fs::read(bank(layer)).unwrap();
        bytes[at] ^= 1;
        fs::write(bank(layer), bytes).unwrap();
    };
    let stride = records(&dir.join("p")).0.header.stride as usize;
    flip(1, 7 * stride + 5);
    flip(2, stride - 1);
    fs::OpenOptions::new().write(true).open(bank(3)).unwrap().set_len(5).unwrap();
    fs::remove_file(bank(4)).unwrap();
    let verify = ["verify", "-q", "whole", "--snapshot", "p", "--experts"];
    let output = prep(dir, &verify).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let out = String::from_utf8(output.stdout).unwrap();
    for part in [
        "experts-layer-001.bank: layer 1 expert 7: expected CRC-32 ",
        "experts-layer-002.bank: expected SHA-256 ",
        "experts-layer-003.bank: expected ",
        "experts-layer-004.bank: the bank is not there",
        "banks: 4 of 6 have the size they should have, 2 the bytes",
    ] {
        assert!(out.contains(part), "{part}: {out}");
    }
}

#[test]
fn a_copy_that_fails_after_any_bank_goes_on_with_the_next() {
    let tmp = made("82");
    let dir = tmp.path();
    good(dir, &PACK);
    let (want, lines) = (banks(&dir.join("p")), records(&dir.join("p")).1);
    let snapshot = Snapshot::open(&dir.join("s")).unwrap();
    let plan = ConversionPlan::new(&snapshot, &Recipe::default()).unwrap();
    let pool = k3_prep::threads::pool(Some(1)).unwrap();
    let out = dir.join("q");
    let packing = |on_bank| {
        Packing {
            plan: &plan,
            dir: &out,
            allow_nonfinite: false,
            pool: &pool,
            talk: Talk::Quiet,
            on_bank,
        }
        .run()
    };
    for done in 1..6 {
        let error = packing(&|_| Err(k3_formats::Error::missing("power"))).unwrap_err();
        assert!(error.hint_text().unwrap().contains("run the same command again"), "{error}");
        let (pack, _) = records(&out);
        assert_eq!(pack.banks.len(), done);
        assert!(pack.complete().is_err());
        // A line that a power cut left half.
        let mut text = fs::read(out.join(PACK_FILE)).unwrap();
        text.extend(b"{\"layer\":6,\"na");
        fs::write(out.join(PACK_FILE), text).unwrap();
    }
    // While one copies, another refuses.
    let refused = |_: &_| {
        let error = packing(&|_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("another conversion is working in this folder"), "{error}");
        Ok(())
    };
    let packed = packing(&refused).unwrap();
    assert_eq!((packed.before, packed.banks.len()), (5, 6));
    assert!(banks(&out) == want);
    assert_eq!(records(&out).1, lines);
}

#[test]
fn killed_at_any_moment_it_goes_on_and_ends_the_same() {
    let tmp = made("83");
    let dir = tmp.path();
    good(dir, &PACK);
    let want = banks(&dir.join("p"));
    let mut killed = 0;
    for round in 0..8 {
        let out = format!("k{round}");
        let args = ["convert", "-q", "s", "whole", "--experts", "pack", &out, "--jobs=1"];
        for wait in 0_u64.. {
            let mut process = prep(dir, &args).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(8 + 2 * wait + round));
            process.kill().unwrap();
            let output = process.wait_with_output().unwrap();
            if output.status.success() {
                break;
            }
            assert_eq!(output.status.code(), None, "{}", said(&output));
            killed += 1;
        }
        assert!(banks(&dir.join(&out)) == want, "round {round}");
        records(&dir.join(&out)).0.complete().unwrap();
    }
    assert!(killed > 8, "{killed} kills");
}

#[test]
fn two_processes_at_once_end_with_one_pack() {
    let tmp = made("84");
    let dir = tmp.path();
    let running: Vec<_> = (0..2).map(|_| prep(dir, &PACK).spawn().unwrap()).collect();
    let mut well = 0;
    for process in running {
        let output = process.wait_with_output().unwrap();
        well += usize::from(output.status.success());
        let busy = "another conversion is working in this folder";
        assert!(output.status.success() || said(&output).contains(busy), "{}", said(&output));
    }
    assert!(well > 0);
    good(dir, &PACK);
    let out = good(dir, &["verify", "-q", "whole", "--snapshot", "p", "--experts"]);
    assert!(out.contains("6 the bytes"), "{out}");
}

#[test]
fn a_full_disk_is_said_and_what_is_done_is_kept() {
    let tmp = made("85");
    let dir = tmp.path();
    good(dir, &PACK);
    let want = banks(&dir.join("p"));
    let bank = want.values().next().unwrap().len() as u64;
    // Files that may not grow stand for a disk that is full, at each block of a bank and list.
    let mut failed = 0;
    for kib in (0..).map(|n| n * 64).take_while(|kib| kib << 10 < bank + (64 << 10)) {
        let _ = fs::remove_dir_all(dir.join("f"));
        let script = format!("trap '' XFSZ; ulimit -f {kib}; exec \"$@\"");
        let mut args = PACK;
        args[6] = "f";
        let mut command = Command::new("bash");
        command.args(["-c", &script, "bash", env!("CARGO_BIN_EXE_k3-prep")]).args(args);
        let output = command.current_dir(dir).output().unwrap();
        if !output.status.success() {
            failed += 1;
            assert_eq!(output.status.code(), Some(2), "{kib} KiB");
            let text = said(&output);
            assert!(text.contains("f/") && text.contains("hint: "), "{kib} KiB: {text}");
            let left = fs::read_dir(dir.join("f")).unwrap().map(|e| e.unwrap().file_name());
            let half: Vec<_> = left.filter(|n| n.to_string_lossy().ends_with(".part")).collect();
            assert!(half.is_empty(), "{kib} KiB: {half:?}");
            good(dir, &args);
        }
        assert!(banks(&dir.join("f")) == want, "{kib} KiB");
    }
    assert!(failed > 1, "{failed}");
}

#[test]
fn what_is_in_the_way_is_said() {
    let tmp = made("86");
    let dir = tmp.path();
    let snapshot = contents(&dir.join("s"));
    let refused = |args: &[&str]| {
        let output = prep(dir, args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        said(&output)
    };
    let text = refused(&["convert", "-q", "s", "whole", "--experts", "move", "p"]);
    assert!(text.contains("--experts pack DIR"), "{text}");
    let inside = ["convert", "-q", "s", "whole", "--experts", "pack", "s/p"];
    assert!(refused(&inside).contains("lies inside the snapshot"));
    assert!(!dir.join("s/p").exists());
    good(dir, &["synth", "other", "--seed", "87", "--experts", "13"]);
    good(dir, &["convert", "-q", "other", "o", "--experts", "pack", "p"]);
    let text = refused(&PACK);
    assert!(text.contains("there is another pack already: the experts of another model"), "{text}");
    // Nothing is written where a plan is only looked at.
    good(dir, &["convert", "-q", "s", "whole", "--dry-run", "--experts", "pack", "dry"]);
    assert!(!dir.join("dry").exists());
    assert!(contents(&dir.join("s")) == snapshot, "it is as it was");
}

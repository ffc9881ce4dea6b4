//! The doctor names what is wrong, and measures what there is.

use std::path::Path;
use std::process::Command;

use fs_err as fs;
use serde_json::Value;

fn run(dir: &Path, args: &[&str]) -> (Option<i32>, String) {
    let program = env!("CARGO_BIN_EXE_k3-prep");
    let output = Command::new(program).current_dir(dir).args(args).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn diagnosis(dir: &Path, args: &[&str], code: i32) -> Value {
    let (exit, text) = run(dir, &[&["doctor", "--json"], args].concat());
    assert_eq!(exit, Some(code), "{text}");
    let found: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(found["ok"], code == 0);
    assert_eq!(found["problems"].as_array().unwrap().is_empty(), code == 0, "{text}");
    found
}

fn problems(found: &Value) -> String {
    found["problems"].to_string()
}

/// A folder with a snapshot `s` and its container `c`.
fn made() -> tempfile::TempDir {
    let tmp = tempfile::tempdir().unwrap();
    assert_eq!(run(tmp.path(), &["-q", "synth", "s", "--seed", "80"]).0, Some(0));
    assert_eq!(run(tmp.path(), &["-q", "convert", "s", "c"]).0, Some(0));
    tmp
}

#[test]
fn a_good_snapshot_and_its_container_are_well_and_measured() {
    let tmp = made();
    for (path, made_by) in [("s", false), ("c", true)] {
        let found = diagnosis(tmp.path(), &[path], 0);
        assert_eq!((&found["shards"], &found["all_shards"]), (&10.into(), &10.into()));
        assert_eq!(found["made_by"].is_string(), made_by);
        assert!(found["cpu"]["threads"].as_u64().unwrap() >= 1);
        let drives = found["drives"].as_array().unwrap();
        assert_eq!(drives.len(), 1);
        let reads = drives[0]["reads"].as_array().unwrap();
        let in_flight: Vec<_> = reads.iter().map(|read| read["in_flight"].as_u64()).collect();
        assert_eq!(in_flight, [1, 2, 4, 8].map(Some));
        assert!(reads.iter().all(|read| read["bytes_per_second"].as_f64().unwrap() > 0.0));
        let files = fs::read_dir(tmp.path().join("c")).unwrap().count() - 2;
        let hashed = found["hashed"][0].as_u64().unwrap();
        assert_eq!(hashed, if made_by { files as u64 } else { 0 }, "all but manifest and sums");
    }
    let (_, text) = run(tmp.path(), &["doctor", "c"]);
    assert!(text.contains("verdict     all that was checked is as it should be"), "{text}");
    assert!(text.contains("a token chooses"), "{text}");
}

#[test]
fn what_is_missing_cut_or_flipped_is_named() {
    let tmp = made();
    let shard = |n: usize| tmp.path().join(format!("s/model-{n:05}-of-000010.safetensors"));
    fs::remove_file(shard(3)).unwrap();
    let cut = fs::read(shard(5)).unwrap();
    fs::write(shard(5), &cut[..cut.len() - 7]).unwrap();
    for path in ["s", "c"] {
        let found = diagnosis(tmp.path(), &[path], 1);
        assert_eq!(found["shards"], 8);
        let text = problems(&found);
        assert!(text.contains("model-00003-of") && text.contains("model-00005-of"), "{text}");
        assert!(found["verdict"][0].as_str().unwrap().contains("cannot be used"));
    }
    let dense = tmp.path().join("c/dense-layer-003.safetensors");
    let mut bytes = fs::read(&dense).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&dense, bytes).unwrap();
    let text = problems(&diagnosis(tmp.path(), &["c"], 1));
    assert!(text.contains("dense-layer-003.safetensors: expected SHA-256"), "{text}");
}

#[test]
fn shards_without_data_are_not_a_drive_and_other_folders_are_looked_in() {
    let tmp = tempfile::tempdir().unwrap();
    let sparse = ["-q", "synth", "holes", "--preset", "real", "--layers", "2", "--sparse"];
    assert_eq!(run(tmp.path(), &sparse).0, Some(0));
    let found = diagnosis(tmp.path(), &["holes"], 0);
    assert_eq!(found["drives"][0]["reads"].as_array().unwrap().len(), 0);
    assert!(found["verdict"].to_string().contains("could not be measured"));

    let made = made();
    let (from, other) = (made.path().join("s"), made.path().join("other"));
    fs::create_dir(&other).unwrap();
    let name = "model-00002-of-000010.safetensors";
    fs::rename(from.join(name), other.join(name)).unwrap();
    assert!(problems(&diagnosis(made.path(), &["c"], 1)).contains(name));
    let found = diagnosis(made.path(), &["c", "--snapshot", "s", "--snapshot", "other"], 0);
    assert_eq!(found["drives"].as_array().unwrap().len(), 2);
    assert_eq!(run(made.path(), &["doctor", "nowhere"]).0, Some(2));
}

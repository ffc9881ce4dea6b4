//! Verification: whatever changed is found and named.

use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use fs_err as fs;
use k3_formats::digest::Digest;
use k3_formats::recipe::Recipe;
use k3_formats::safetensors_header::Header;
use k3_prep::Talk;
use k3_prep::verify::{Report, Sample, Verification};

use crate::support::{TinyK3, convert};

struct Made {
    tiny: TinyK3,
    out: PathBuf,
}

fn made(seed: u64) -> Made {
    let tiny = TinyK3::new(seed);
    let out = tiny.path("out");
    convert(&tiny.snapshot(), &out, &Recipe::default());
    Made { tiny, out }
}

impl Made {
    fn verify(&self, source: bool, rows: Option<usize>) -> Report {
        verify(&self.out, &[], source, rows)
    }
}

fn verify(out: &Path, snapshots: &[PathBuf], source: bool, rows: Option<usize>) -> Report {
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let rederive = rows.map(|rows| Sample { rows, seed: 0 });
    Verification {
        dir: out,
        snapshots,
        source,
        experts: false,
        rederive,
        calibration: None,
        talk: Talk::Quiet,
        pool: &pool,
    }
    .run()
    .unwrap()
}

/// Exactly what is said, in one text.
fn differences(report: &Report) -> String {
    assert_eq!(report.ok, report.differences.is_empty());
    report.differences.join("\n")
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 0x10;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_good_container_has_no_difference() {
    let made = made(20);
    let report = made.verify(false, Some(8));
    assert_eq!(differences(&report), "");
    assert_eq!(report.notes, Vec::<String>::new());
    assert_eq!((report.shards, report.all_shards), (10, 10));
    assert_eq!(report.tensors, 255);
    assert_eq!(report.rederived.unwrap().tensors, 184);
}

#[test]
fn one_flipped_byte_is_found_in_every_file_and_tensor() {
    let made = made(21);
    let mut flips = 0;
    for entry in fs::read_dir(&made.out).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        let size = fs::metadata(&path).unwrap().len() as usize;
        let mut places: Vec<(usize, Option<String>)> =
            [0, 1, size / 3, size / 2, size - 1].map(|at| (at, None)).to_vec();
        if name.starts_with("dense-layer-00") && !name.contains("-003") && !name.contains("-000") {
            // One KDA layer is like another: the MLA layer and the first stand for all.
            places.truncate(2);
        } else if name.ends_with(".safetensors") {
            let header = Header::read(&path).unwrap();
            places.extend(header.tensors.iter().map(|t| {
                let at = (header.data_start + t.begin + t.bytes() / 2) as usize;
                // Filler bytes belong to no tensor that is worth a name.
                (at, (!t.name.starts_with("__pad__")).then(|| t.name.clone()))
            }));
        }
        let good = fs::read(&path).unwrap();
        for (at, tensor) in places {
            flip(&path, at);
            let text = differences(&made.verify(false, None));
            assert!(text.contains(&name), "byte {at} of {name}: {text:?}");
            if let Some(tensor) = tensor {
                assert!(text.contains(&format!("{name}: {tensor}: expected SHA-256")), "{text}");
            }
            fs::write(&path, &good).unwrap();
            flips += 1;
        }
    }
    assert!(flips > 150, "{flips}");
    assert_eq!(differences(&made.verify(false, None)), "");
}

#[test]
fn strangers_gaps_and_lengths_are_named() {
    let made = made(22);
    fs::write(made.out.join("notes.txt"), "mine").unwrap();
    fs::remove_file(made.out.join("generation_config.json")).unwrap();
    let head = made.out.join("dense-head.safetensors");
    let size = fs::metadata(&head).unwrap().len();
    fs::OpenOptions::new().write(true).open(&head).unwrap().set_len(size - 64).unwrap();
    let text = differences(&made.verify(false, None));
    for expected in [
        "notes.txt: no record of this file",
        "generation_config.json: no such file",
        &format!("dense-head.safetensors: expected {size} bytes, found {}", size - 64),
    ] {
        assert!(text.contains(expected), "{text}\nlacks {expected}");
    }
}

#[test]
fn a_manifest_that_was_edited_consistently_does_not_pass() {
    let made = made(23);
    let path = made.out.join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    let edited = text.replace("\"bits\": 4", "\"bits\": 8");
    assert_ne!(text, edited);
    fs::write(&path, &edited).unwrap();
    // The sums agree with the edited manifest: only the recipe gives it away.
    let sums = fs::read_to_string(made.out.join("SHA256SUMS")).unwrap();
    let old = Digest::of(text.as_bytes()).to_string();
    let sums = sums.replace(&old, &Digest::of(edited.as_bytes()).to_string());
    fs::write(made.out.join("SHA256SUMS"), sums).unwrap();
    let text = differences(&made.verify(false, None));
    assert!(
        text.contains("q_proj.weight: expected int8-row by the recipe, found int4-g64"),
        "{text}"
    );
}

#[test]
fn shards_that_changed_are_named() {
    let made = made(24);
    let shard = |n: usize| made.tiny.snapshot().join(format!("model-{n:05}-of-000010.safetensors"));
    flip(&shard(1), 20);
    let grown = [fs::read(shard(2)).unwrap(), vec![0]].concat();
    let size = grown.len();
    fs::write(shard(2), grown).unwrap();
    fs::remove_file(shard(3)).unwrap();
    let later = UNIX_EPOCH + Duration::from_secs(5);
    fs::File::open(shard(4)).unwrap().set_modified(later).unwrap();
    let report = made.verify(false, None);
    let text = differences(&report);
    assert!(text.contains("model-00001-of-000010.safetensors: "), "{text}");
    let expected = format!("expected {} bytes as at the conversion, found {size}", size - 1);
    assert!(text.contains(&expected), "{text}");
    assert!(text.contains("model-00003-of-000010.safetensors: the shard is not there"), "{text}");
    assert_eq!(report.differences.len(), 3, "{text}");
    let touched = "modified since the conversion, size and header the same: \
                   model-00004-of-000010.safetensors";
    assert_eq!(report.notes[0], touched);
    assert!(report.notes[1].contains("--source") && report.notes[1].contains("--experts"));
}

#[test]
fn shards_may_have_moved_to_several_folders() {
    let made = made(25);
    let other = made.tiny.path("other drive");
    let moved = made.tiny.path("moved");
    fs::create_dir(&other).unwrap();
    for name in ["model-00002-of-000010.safetensors", "model-00008-of-000010.safetensors"] {
        fs::rename(made.tiny.snapshot().join(name), other.join(name)).unwrap();
    }
    fs::rename(made.tiny.snapshot(), &moved).unwrap();
    assert_eq!(made.verify(false, None).differences.len(), 10);
    let report = verify(&made.out, &[moved, other], false, Some(4));
    assert_eq!(differences(&report), "");
    assert!(report.rederived.unwrap().rows > 184);
}

#[test]
fn the_publishers_digests_are_compared() {
    let tiny = TinyK3::new(26);
    let local = tiny.snapshot();
    let metadata = local.join(".cache/huggingface/download");
    fs::create_dir_all(&metadata).unwrap();
    for entry in fs::read_dir(&local).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() || path.ends_with("model-00010-of-000010.safetensors") {
            continue;
        }
        let name = path.file_name().unwrap().to_str().unwrap();
        let digest = Digest::of(&fs::read(&path).unwrap());
        let text = format!("0123\n{digest}\n1.0\n");
        fs::write(metadata.join(format!("{name}.metadata")), text).unwrap();
    }
    let out = tiny.path("out");
    convert(&local, &out, &Recipe::default());
    let report = verify(&out, &[], true, None);
    assert_eq!(differences(&report), "");
    let source = report.source.unwrap();
    assert_eq!((source.equal, source.unpublished), (9, 1));
    assert_eq!(source.by["download metadata"], 9);
    assert!(report.notes[0].contains("1 of 10 shards have no published digest"));

    let shard = local.join("model-00002-of-000010.safetensors");
    let size = fs::metadata(&shard).unwrap().len() as usize;
    flip(&shard, size - 9);
    let text = differences(&verify(&out, &[], true, None));
    assert!(text.contains("model-00002-of-000010.safetensors: expected SHA-256"), "{text}");
    assert_eq!(text.lines().count(), 1);
}

#[test]
fn rederiving_finds_weights_that_do_not_follow_from_the_snapshot() {
    let made = made(27);
    let shard = made.tiny.snapshot().join("model-00001-of-000010.safetensors");
    let header = Header::read(&shard).unwrap();
    let mut names = Vec::new();
    for t in &header.tensors {
        // The top byte of the last element: another exponent, always another code.
        flip(&shard, (header.data_start + t.end - 1) as usize);
        names.push(t.name.clone());
    }
    assert_eq!(differences(&made.verify(false, None)), "", "size and header are the same");
    let text = differences(&made.verify(false, Some(2)));
    for name in names {
        let expected = format!("dense-layer-000.safetensors: {name}: row ");
        assert!(text.contains(&expected), "{text}\nlacks {expected}");
    }
    fs::write(made.tiny.snapshot().join("generation_config.json"), "{}").unwrap();
    let text = differences(&made.verify(false, Some(1)));
    assert!(text.contains("generation_config.json: the snapshot gives another file"), "{text}");
}

#[test]
fn what_is_no_container_says_so() {
    let tiny = TinyK3::new(28);
    let pool = k3_prep::threads::pool(Some(1)).unwrap();
    let run = |dir: &Path| {
        let talk = Talk::Quiet;
        Verification {
            dir,
            snapshots: &[],
            source: false,
            experts: false,
            rederive: None,
            calibration: None,
            talk,
            pool: &pool,
        }
        .run()
        .unwrap_err()
    };
    assert!(run(&tiny.path("nothing")).to_string().ends_with("nothing: no such folder"));
    assert!(run(&tiny.snapshot()).to_string().ends_with("no manifest.json in this folder"));
    fs::create_dir(tiny.path("half.partial")).unwrap();
    fs::write(tiny.path("half.partial/journal.jsonl"), "").unwrap();
    let error = run(&tiny.path("half"));
    assert!(error.to_string().ends_with("half: the conversion is not finished"));
    assert!(error.hint_text().unwrap().contains("run the same `k3-prep convert` again"));
}

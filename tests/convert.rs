//! Conversion: bit for bit what the definition says, whatever interrupts it.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use fs_err as fs;
use k3_formats::container::manifest::FileRecord;
use k3_formats::container::{Container, Manifest};
use k3_formats::digest::Digest;
use k3_formats::recipe::Recipe;
use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::Snapshot;
use k3_formats::{Error, Result};
use k3_prep::Talk;
use k3_prep::conversion::{Conversion, Converted};
use k3_prep::plan::ConversionPlan;
use safetensors::SafeTensors;

use crate::support::{TinyK3, convert, recipe};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tiny-s0")
}

fn plan(snapshot: &Path, recipe: &Recipe) -> Result<ConversionPlan> {
    ConversionPlan::new(&Snapshot::open(snapshot)?, recipe)
}

/// Converts with the default recipe, telling `on_file` of every finished file.
fn convert_with(
    snapshot: &Path,
    out: &Path,
    force: bool,
    on_file: &mut (dyn FnMut(&FileRecord) -> Result<()> + Send),
) -> Result<Converted> {
    let plan = plan(snapshot, &Recipe::default())?;
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    Conversion { force, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&plan, out)
}

fn simply(snapshot: &Path, out: &Path) -> Result<Converted> {
    convert_with(snapshot, out, false, &mut |_| Ok(()))
}

/// Every file of a folder.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

fn edit_shard(snapshot: &Path, shard: &str, edit: impl FnOnce(&Header, &mut Vec<u8>)) {
    let path = snapshot.join(shard);
    let header = Header::read(&path).unwrap();
    let mut bytes = fs::read(&path).unwrap();
    edit(&header, &mut bytes);
    fs::write(&path, bytes).unwrap();
}

fn offset_of(header: &Header, tensor: &str) -> usize {
    let tensor = header.tensors.iter().find(|t| t.name == tensor).unwrap();
    (header.data_start + tensor.begin) as usize
}

const FIRST: &str = "model-00001-of-000010.safetensors";
const SECOND: &str = "model-00002-of-000010.safetensors";
const Q_PROJ: &str = "language_model.model.layers.0.self_attn.q_proj.weight";

#[test]
fn every_matrix_equals_numpys_quantization() {
    let expected = fs::read_to_string(golden().join("quantized.tsv")).unwrap();
    let tmp = tempfile::tempdir().unwrap();
    let mut containers = BTreeMap::new();
    let mut matrices = 0;
    for line in expected.lines() {
        let f: Vec<&str> = line.split('\t').collect();
        let [bits, mla_bits, head_bits] = [0, 1, 2].map(|i| f[i].parse().unwrap());
        let container = containers.entry((bits, mla_bits, head_bits)).or_insert_with(|| {
            let out = tmp.path().join(format!("{bits}-{mla_bits}-{head_bits}"));
            convert(&golden().join("snapshot"), &out, &recipe(bits, mla_bits, head_bits));
            Container::open(&out).unwrap()
        });
        let matrix = container.matrix(f[3]).unwrap();
        assert_eq!(matrix.format.name(), f[4], "{line}");
        assert_eq!(Digest::of(matrix.codes).to_string(), f[5], "{line}");
        assert_eq!(Digest::of(matrix.scales).to_string(), f[6], "{line}");
        matrices += 1;
    }
    assert_eq!(matrices, 3 * 71);
}

#[test]
fn what_is_not_quantized_is_the_snapshots_bytes() {
    let tmp = tempfile::tempdir().unwrap();
    let (snapshot, out) = (golden().join("snapshot"), tmp.path().join("out"));
    convert(&snapshot, &out, &recipe(16, 16, 16));
    let container = Container::open(&out).unwrap();
    let mut compared = 0;
    for shard in Snapshot::open(&snapshot).unwrap().shards {
        let bytes = fs::read(&shard.path).unwrap();
        for (name, tensor) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            if let Ok(stored) = container.stored_bytes(name) {
                assert!(stored == tensor.data(), "{name}");
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 184, "all dense tensors of the config");
}

#[test]
fn files_are_aligned_public_and_readable_by_others() {
    let tmp = tempfile::tempdir().unwrap();
    let out = tmp.path().join("out");
    let manifest = simply(&golden().join("snapshot"), &out).unwrap().manifest;
    for file in manifest.files.iter().filter(|f| !f.tensors.is_empty()) {
        let bytes = fs::read(out.join(&file.name)).unwrap();
        let header = Header::read(&out.join(&file.name)).unwrap();
        assert_eq!(header.data_start % 4096, 0);
        let reference = SafeTensors::deserialize(&bytes).unwrap();
        for tensor in &file.tensors {
            let place = header.tensors.iter().find(|t| t.name == tensor.name).unwrap();
            let matrix =
                matches!(place.shape[..], [rows, _] if rows > 1) && !tensor.name.ends_with(".qs");
            let align = if matrix { 4096 } else { 64 };
            assert_eq!((header.data_start + place.begin) % align, 0, "{}", tensor.name);
            let data = reference.tensor(&tensor.name).unwrap().data();
            assert_eq!(Digest::of(data), tensor.sha256, "{}", tensor.name);
        }
    }
    for entry in fs::read_dir(&out).unwrap() {
        let mode = entry.unwrap().metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o644);
    }
    assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 1, "the work folder is gone");
    assert_eq!(manifest.left_out.len(), 18);
}

#[test]
fn threads_change_no_byte() {
    let tiny = TinyK3::new(3);
    let plan = plan(&tiny.snapshot(), &Recipe::default()).unwrap();
    let run = |jobs: u16| {
        let out = tiny.path(jobs.to_string());
        let pool = k3_prep::threads::pool(Some(jobs)).unwrap();
        let on_file = &mut |_: &_| Ok(());
        Conversion {
            force: false,
            allow_nonfinite: false,
            talk: Talk::Quiet,
            pool: &pool,
            on_file,
        }
        .run(&plan, &out)
        .unwrap();
        contents(&out)
    };
    let one = run(1);
    assert!(one == run(2));
    assert!(one == run(5));
}

#[test]
fn a_conversion_that_fails_after_any_file_goes_on_and_ends_the_same() {
    let tiny = TinyK3::new(4);
    let clean = tiny.path("clean");
    simply(&tiny.snapshot(), &clean).unwrap();
    let files = 9; // embedding, seven layers, head
    for fail_after in 1..=files {
        let out = tiny.path(format!("out-{fail_after}"));
        let work = tiny.path(format!("out-{fail_after}.partial"));
        let mut count = 0;
        let error = convert_with(&tiny.snapshot(), &out, false, &mut |_| {
            count += 1;
            if count < fail_after { Ok(()) } else { Err(Error::unsupported("pulled the plug")) }
        })
        .unwrap_err();
        assert_eq!(error.to_string(), "pulled the plug");
        assert!(!out.exists());
        let done: Vec<_> = fs::read_dir(&work)
            .unwrap()
            .map(|f| f.unwrap())
            .filter(|f| f.file_name().to_str().unwrap().ends_with(".safetensors"))
            .map(|f| (f.file_name(), f.metadata().unwrap().ino()))
            .collect();
        assert!(done.len() >= fail_after);
        // What a kill in the middle of a write and of a journal line leaves.
        fs::write(work.join("dense-layer-001.safetensors.part"), "half").unwrap();
        let journal = work.join("journal.jsonl");
        let mut text = fs::read(&journal).unwrap();
        text.extend_from_slice(b"{\"name\":\"dense-la");
        fs::write(&journal, text).unwrap();
        let mut redone = Vec::new();
        convert_with(&tiny.snapshot(), &out, false, &mut |file| {
            redone.push(file.name.clone());
            Ok(())
        })
        .unwrap();
        assert!(contents(&out) == contents(&clean), "after {fail_after} files");
        assert!(!work.exists());
        // A recorded file is not written again. One that was finished, but not recorded
        // when another thread failed, is.
        let kept = done.iter().filter(|(name, _)| !redone.iter().any(|r| name == r.as_str()));
        let mut kept_count = 0;
        for (name, inode) in kept {
            assert_eq!(fs::metadata(out.join(name)).unwrap().ino(), *inode);
            kept_count += 1;
        }
        assert!(kept_count >= fail_after, "{kept_count} files kept");
    }
}

#[test]
fn work_begun_otherwise_is_not_mixed_with() {
    let tiny = TinyK3::new(6);
    let (snapshot, out) = (tiny.snapshot(), tiny.path("out"));
    let mut first = true;
    let stop = &mut |_: &FileRecord| {
        if std::mem::take(&mut first) { Ok(()) } else { Err(Error::unsupported("stop")) }
    };
    convert_with(&snapshot, &out, false, stop).unwrap_err();
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let other = plan(&snapshot, &recipe(8, 8, 8)).unwrap();
    let other_recipe = |force, on_file: &mut (dyn FnMut(&FileRecord) -> Result<()> + Send)| {
        Conversion { force, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
            .run(&other, &out)
    };
    let error = other_recipe(false, &mut |_| Ok(())).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("made with --bits 4 --mla-bits 8 --head-bits 8"), "{text}");
    assert!(text.contains("asked for --bits 8 --mla-bits 8 --head-bits 8"), "{text}");
    assert!(error.hint_text().unwrap().contains("--force"));

    edit_shard(&snapshot, SECOND, |_, bytes| *bytes.last_mut().unwrap() ^= 1);
    let text = simply(&snapshot, &out).unwrap_err().to_string();
    assert!(text.contains(&format!("{SECOND} is not what it was")), "{text}");

    let text = other_recipe(true, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(text.ends_with("the file changed while it was converted"), "its plan is older: {text}");
    let other = plan(&snapshot, &recipe(8, 8, 8)).unwrap();
    let on_file = &mut |_: &FileRecord| Ok(());
    Conversion { force: true, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&other, &out)
        .unwrap();
    assert_eq!(Manifest::read(&out).unwrap().recipe, recipe(8, 8, 8));
    let fresh = tiny.path("fresh");
    convert(&snapshot, &fresh, &recipe(8, 8, 8));
    assert!(contents(&out) == contents(&fresh));
}

#[test]
fn a_second_conversion_into_the_same_folder_refuses() {
    let tiny = TinyK3::new(7);
    let (snapshot, out) = (tiny.snapshot(), tiny.path("out"));
    let mut refusals = Vec::new();
    convert_with(&snapshot, &out, false, &mut |_| {
        if refusals.is_empty() {
            refusals.push(simply(&snapshot, &out).unwrap_err().to_string());
            refusals.push(
                convert_with(&snapshot, &out, true, &mut |_| Ok(())).unwrap_err().to_string(),
            );
        }
        Ok(())
    })
    .unwrap();
    assert_eq!(refusals.len(), 2);
    for text in refusals {
        assert!(
            text.ends_with("out.partial: another conversion is working in this folder"),
            "{text}"
        );
    }
    let clean = tiny.path("clean");
    simply(&snapshot, &clean).unwrap();
    assert!(contents(&out) == contents(&clean));
}

#[test]
fn what_is_there_already_is_kept_until_it_may_go() {
    let tiny = TinyK3::new(8);
    let (snapshot, out) = (tiny.snapshot(), tiny.path("out"));
    fs::create_dir(&out).unwrap();
    simply(&snapshot, &out).unwrap();
    assert!(simply(&snapshot, &out).unwrap().before, "the same again is nothing to do");
    let before = contents(&out);
    let other = plan(&snapshot, &recipe(8, 8, 8)).unwrap();
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let run = |force, on_file: &mut (dyn FnMut(&FileRecord) -> Result<()> + Send)| {
        Conversion { force, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
            .run(&other, &out)
    };
    let text = run(false, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(text.contains("there is another container already: made with --bits 4"), "{text}");
    run(true, &mut |_| Err(Error::unsupported("stop"))).unwrap_err();
    assert!(contents(&out) == before, "the old one stays until the new one is complete");
    run(true, &mut |_| Ok(())).unwrap();
    assert_eq!(Manifest::read(&out).unwrap().recipe, recipe(8, 8, 8));
    assert!(!tiny.path("out.partial").exists());

    let home = tiny.path("home");
    fs::create_dir(&home).unwrap();
    fs::write(home.join("thesis.txt"), "years of work").unwrap();
    let text = convert_with(&snapshot, &home, true, &mut |_| Ok(())).unwrap_err().to_string();
    assert!(text.contains("is not a container, so it is left alone"), "{text}");
    fs::create_dir(tiny.path("new.partial")).unwrap();
    fs::write(tiny.path("new.partial/thesis.txt"), "more of it").unwrap();
    let text = simply(&snapshot, &tiny.path("new")).unwrap_err().to_string();
    assert!(text.contains("thesis.txt: did not come from a conversion"), "{text}");
    assert!(tiny.path("new.partial/thesis.txt").exists());
}

#[test]
fn output_and_snapshot_are_kept_apart() {
    let tiny = TinyK3::new(9);
    let snapshot = tiny.snapshot();
    let before = contents(&snapshot);
    symlink(&snapshot, tiny.path("link")).unwrap();
    for out in [
        snapshot.clone(),
        snapshot.join("out"),
        snapshot.join("deeper/out"),
        tiny.path("link/out"),
        snapshot.parent().unwrap().to_path_buf(),
    ] {
        let text = convert_with(&snapshot, &out, true, &mut |_| Ok(())).unwrap_err().to_string();
        let named = text.contains("lies inside") || text.contains("is the snapshot itself");
        assert!(named, "{text}");
    }
    assert!(contents(&snapshot) == before);
    assert!(!tiny.path("snapshot.partial").exists());
}

#[test]
fn all_problems_are_listed_before_anything_is_written() {
    let tiny = TinyK3::new(10);
    let snapshot = tiny.snapshot();
    fs::remove_file(snapshot.join(SECOND)).unwrap();
    let third = snapshot.join("model-00003-of-000010.safetensors");
    let size = fs::metadata(&third).unwrap().len();
    fs::OpenOptions::new().write(true).open(&third).unwrap().set_len(size - 1).unwrap();
    fs::write(snapshot.join("model-00004-of-000010.safetensors"), "<!DOCTYPE html>").unwrap();
    edit_shard(&snapshot, FIRST, |header, bytes| {
        let at = 8 + header.data_start as usize - 8;
        let json = String::from_utf8(bytes[8..at].to_vec()).unwrap();
        let json = json.replace(Q_PROJ, &Q_PROJ.replace("q_proj", "Q_proj"));
        bytes[8..at].copy_from_slice(json.as_bytes());
    });
    fs::remove_file(snapshot.join("tiktoken.model")).unwrap();
    let error = simply(&snapshot, &tiny.path("out")).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("cannot be converted: 5 problems"), "{text}");
    for problem in [
        "model-00002-of-000010.safetensors: the shard is missing: no such file",
        &format!("expected {size} bytes, found {}", size - 1),
        "not a safetensors file (it looks like a web page)",
        &format!("{FIRST}: {Q_PROJ}: the index places it here, but the header does not have it"),
        "tiktoken.model: no such file",
    ] {
        assert!(text.contains(problem), "{text}\nlacks {problem}");
    }
    assert!(!tiny.path("out.partial").exists());
    fs::remove_file(snapshot.join("model.safetensors.index.json")).unwrap();
    let text = simply(&snapshot, &tiny.path("out")).unwrap_err().to_string();
    assert!(text.contains("model-00002-of-000010.safetensors: the shard is missing"), "{text}");
}

#[test]
fn missing_and_unfit_tensors_are_named() {
    let tiny = TinyK3::new(11);
    let snapshot = tiny.snapshot();
    fs::remove_file(snapshot.join("model.safetensors.index.json")).unwrap();
    let rename = |shard: &str, from: &str, to: &str| {
        edit_shard(&snapshot, shard, |header, bytes| {
            let end = header.data_start as usize;
            let json = String::from_utf8(bytes[8..end].to_vec()).unwrap();
            assert!(json.contains(from));
            bytes[8..end].copy_from_slice(json.replacen(from, to, 1).as_bytes());
        });
    };
    rename(FIRST, "self_attn.q_proj.weight", "self_attn.q_prok.weight");
    rename(SECOND, "experts.3.w1.weight_scale", "experts.3.w1.weight_scalf");
    rename("model-00003-of-000010.safetensors", "\"F32\",\"shape\":[64]", "\"U32\",\"shape\":[64]");
    let text = simply(&snapshot, &tiny.path("out")).unwrap_err().to_string();
    for problem in [
        "layers.0.self_attn.q_proj.weight: the config implies this tensor, but no shard has it",
        "experts.3.w1.weight_scale (layer 1, expert 3, gate scales): the config implies",
        "expected F32 [64], found U32 [64]",
    ] {
        assert!(text.contains(problem), "{text}\nlacks {problem}");
    }
    assert!(text.contains("3 problems"), "{text}");
}

#[test]
fn a_weight_that_is_no_number_stops_the_conversion_by_name() {
    let tiny = TinyK3::new(12);
    let (rows, cols) = (256, 192);
    edit_shard(&tiny.snapshot(), FIRST, |header, bytes| {
        let tensor = header.tensors.iter().find(|t| t.name == Q_PROJ).unwrap();
        assert_eq!(tensor.shape, [rows, cols]);
        let at = offset_of(header, Q_PROJ) + 2 * (2 * cols + 5);
        bytes[at..at + 2].copy_from_slice(&0x7fc0_u16.to_le_bytes());
    });
    let text = simply(&tiny.snapshot(), &tiny.path("out")).unwrap_err().to_string();
    let expected = format!("{FIRST}: {Q_PROJ}: the weight in row 2, column 5 is NaN or infinite");
    assert!(text.ends_with(&expected), "{text}");
    let norm = "language_model.model.norm.weight";
    let shard = "model-00008-of-000010.safetensors";
    let tiny = TinyK3::new(12);
    edit_shard(&tiny.snapshot(), shard, |header, bytes| {
        let at = offset_of(header, norm) + 2 * 7;
        bytes[at..at + 2].copy_from_slice(&0xff80_u16.to_le_bytes());
    });
    let text = simply(&tiny.snapshot(), &tiny.path("out")).unwrap_err().to_string();
    assert!(text.ends_with(&format!("{norm}: the weight in row 0, column 7 is NaN or infinite")));
}

#[test]
fn every_download_layout_gives_the_same_weights() {
    let tiny = TinyK3::new(13);
    let plain = tiny.path("plain");
    simply(&tiny.snapshot(), &plain).unwrap();
    let dense = |dir: &Path| {
        let mut files = contents(dir);
        files.retain(|name, _| name != "manifest.json" && name != "SHA256SUMS");
        files
    };
    let expected = dense(&plain);

    let repo = tiny.path("models--moonshotai--Kimi-K3");
    let revision = "9f62e4e9fffbd0a83ddd60e1c209d828994b3569";
    let (blobs, links) = (repo.join("blobs"), repo.join("snapshots").join(revision));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&links).unwrap();
    fs::create_dir_all(repo.join("refs")).unwrap();
    fs::write(repo.join("refs/main"), revision).unwrap();
    for (name, bytes) in contents(&tiny.snapshot()) {
        let blob = Digest::of(&bytes).to_string();
        fs::write(blobs.join(&blob), bytes).unwrap();
        symlink(Path::new("../../blobs").join(blob), links.join(name)).unwrap();
    }
    for (from, out) in [(&repo, "by-repo"), (&links, "by-revision")] {
        let manifest = simply(from, &tiny.path(out)).unwrap().manifest;
        assert_eq!(manifest.source.repo.as_deref(), Some("moonshotai/Kimi-K3"));
        assert_eq!(manifest.source.revision.as_deref(), Some(revision));
        assert!(dense(&tiny.path(out)) == expected);
    }
    // And k3-run finds the shards under the same name.
    let container = Container::open(&plain).unwrap();
    let args = crate::support::engine_args(&plain, &["--snapshot", repo.to_str().unwrap()]);
    let options = k3_run::open::expert_options(&container, &args, 0).unwrap();
    assert!(options.dirs == [links.as_path()], "{:?}", options.dirs);
    let target = fs::read_link(links.join(SECOND)).unwrap();
    let blob = links.join(target);
    let mut unfinished = blob.clone().into_os_string();
    unfinished.push(".incomplete");
    fs::rename(&blob, unfinished).unwrap();
    let text = simply(&repo, &tiny.path("out")).unwrap_err().to_string();
    assert!(text.contains(&format!("{SECOND}: the shard is missing: its download is incomplete")));

    let local = tiny.path("local");
    fs::create_dir_all(local.join(".cache/huggingface/download")).unwrap();
    for (name, bytes) in contents(&tiny.snapshot()) {
        let metadata = format!("{revision}\n{}\n1.5\n", Digest::of(&bytes));
        let path = local.join(".cache/huggingface/download").join(format!("{name}.metadata"));
        fs::write(path, metadata).unwrap();
        fs::write(local.join(name), bytes).unwrap();
    }
    let manifest = simply(&local, &tiny.path("by-local")).unwrap().manifest;
    assert_eq!(manifest.source.revision.as_deref(), Some(revision));
    assert!(dense(&tiny.path("by-local")) == expected);
}

#[test]
fn the_index_decides_between_two_copies() {
    let tiny = TinyK3::new(14);
    let snapshot = tiny.snapshot();
    let clean = tiny.path("clean");
    simply(&snapshot, &clean).unwrap();
    let first = fs::read(snapshot.join(FIRST)).unwrap();
    let length = Header::read(&snapshot.join(FIRST)).unwrap().data_start as usize;
    // The stale copy is a whole shard under another name, all zero.
    let mut stale = first[..length].to_vec();
    stale.resize(first.len(), 0);
    let index_path = snapshot.join("model.safetensors.index.json");
    let index = fs::read_to_string(&index_path).unwrap();
    fs::write(snapshot.join("a-stale.safetensors"), &stale).unwrap();
    // A tensor that only the index's mention brings the file into play for.
    let listed =
        index.replacen("\"weight_map\": {", "\"weight_map\": {\"x\": \"a-stale.safetensors\",", 1);
    assert_ne!(listed, index);
    let mut with_x = stale.clone();
    let json = String::from_utf8(stale[8..length].to_vec()).unwrap();
    let entry = r#"{"x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"#;
    let json = json.replacen('{', entry, 1);
    with_x.splice(..length, (json.len() as u64).to_le_bytes().into_iter().chain(json.bytes()));
    fs::write(snapshot.join("a-stale.safetensors"), with_x).unwrap();
    fs::write(&index_path, listed).unwrap();
    let plan = plan(&snapshot, &Recipe::default()).unwrap();
    let warning = format!("{Q_PROJ}: also in a-stale.safetensors; the one in {FIRST} is used");
    assert!(plan.warnings.iter().any(|w| w.starts_with(&warning)), "{:?}", plan.warnings);
    simply(&snapshot, &tiny.path("out")).unwrap();
    let dense = "dense-layer-000.safetensors";
    assert!(contents(&tiny.path("out"))[dense] == contents(&clean)[dense]);

    fs::remove_file(&index_path).unwrap();
    let text = simply(&snapshot, &tiny.path("out2")).unwrap_err().to_string();
    assert!(
        text.contains("also in a-stale.safetensors, and there is no index to decide"),
        "{text}"
    );
}

#[test]
fn odd_names_and_places_work() {
    let tiny = TinyK3::new(15);
    let expected = {
        simply(&tiny.snapshot(), &tiny.path("clean")).unwrap();
        contents(&tiny.path("clean"))["dense-head.safetensors"].clone()
    };
    let bytes = <std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"not utf-8 \xff");
    for name in [Path::new(bytes), Path::new("new\nline"), Path::new("it's \"it\" ✓")] {
        let copy = tiny.path(name);
        fs::create_dir(&copy).unwrap();
        for (file, bytes) in contents(&tiny.snapshot()) {
            fs::write(copy.join(file), bytes).unwrap();
        }
        let out = copy.join("../out of ").with_file_name(format!("out {}", name.display()));
        simply(&copy, &out).unwrap();
        assert!(contents(&out)["dense-head.safetensors"] == expected);
    }
}

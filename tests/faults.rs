//! What can go wrong with files and machines, planted on purpose: each fault is refused with
//! a message that names the file and says what to do, or the result is that of a good run.

use std::collections::BTreeMap;
use std::os::unix::fs::symlink;
use std::path::Path;

use fs_err as fs;
use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_formats::safetensors_header::Header;
use k3_formats::snapshot::Snapshot;
use k3_formats::{Error, Result};
use k3_prep::Talk;
use k3_prep::conversion::Conversion;
use k3_prep::expert_sums::ExpertHashing;
use k3_prep::plan::ConversionPlan;
use safetensors::Dtype;
use serde_json::{Value, json};

use crate::support::TinyK3;

mod programs;
mod reads;
mod system;

fn convert(snapshot: &Path, out: &Path, allow_nonfinite: bool) -> Result<Vec<String>> {
    let snapshot = Snapshot::open(snapshot)?;
    let plan = ConversionPlan::new(&snapshot, &Recipe::default())?;
    let pool = k3_prep::threads::pool(Some(1)).expect("a thread");
    let on_file = &mut |_: &_| Ok(());
    Conversion { force: false, allow_nonfinite, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&plan, out)?;
    Ok(plan.warnings)
}

/// Every file of a folder.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    files.map(|f| (f.file_name().into_string().unwrap(), fs::read(f.path()).unwrap())).collect()
}

/// Links every file of the snapshot into a new folder but `left_out`.
fn linked(tiny: &TinyK3, to: &str, left_out: &str) -> std::path::PathBuf {
    let dir = tiny.path(to);
    fs::create_dir(&dir).unwrap();
    for entry in fs::read_dir(tiny.snapshot()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_name() != left_out {
            fs::hard_link(entry.path(), dir.join(entry.file_name())).unwrap();
        }
    }
    dir
}

type Damage = (&'static str, fn(&[u8], &Path));

/// What a download, an archive or a disk makes of a file.
const DAMAGES: [Damage; 11] = [
    ("absent", |_, _| {}),
    ("a pointer of git", |_, path| {
        let text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5368709120\n";
        fs::write(path, text).unwrap();
    }),
    ("a page of a proxy", |_, path| {
        fs::write(path, "<!doctype html>\n<html><body>503 Service Unavailable</body></html>")
            .unwrap();
    }),
    ("an error of a mirror", |_, path| fs::write(path, "Access denied\n").unwrap()),
    ("empty", |_, path| fs::write(path, "").unwrap()),
    ("all zeroes", |good, path| fs::write(path, vec![0; good.len()]).unwrap()),
    ("cut in half", |good, path| fs::write(path, &good[..good.len() / 2]).unwrap()),
    ("compressed", |good, path| fs::write(path, [b"\x1f\x8b\x08\0", good].concat()).unwrap()),
    ("a folder", |_, path| fs::create_dir(path).unwrap()),
    ("a link to nothing", |_, path| symlink("../blobs/0123.incomplete", path).unwrap()),
    ("a link to itself", |_, path| symlink(path.file_name().unwrap(), path).unwrap()),
];

#[test]
fn every_file_damaged_in_every_way_is_refused_by_name() {
    let tiny = TinyK3::new(60);
    let files = [
        "config.json",
        "tokenizer_config.json",
        "tiktoken.model",
        "generation_config.json",
        "model.safetensors.index.json",
        "model-00001-of-000010.safetensors",
        "model-00010-of-000010.safetensors",
    ];
    for file in files {
        let good = fs::read(tiny.snapshot().join(file)).unwrap();
        for (damage, plant) in DAMAGES {
            let optional = ["generation_config.json", "model.safetensors.index.json"];
            if damage == "absent" && optional.contains(&file) {
                continue;
            }
            let dir = linked(&tiny, &format!("{file}, {damage}"), file);
            plant(&good, &dir.join(file));
            let out = tiny.path("out");
            let outcome = convert(&dir, &out, false);
            let error = outcome.err().unwrap_or_else(|| panic!("{file}, {damage}: taken"));
            let text = error.to_string();
            assert!(text.contains(file), "{damage}: {text}");
            assert!(error.hint_text().is_some(), "{file}, {damage}: no hint: {text}");
            assert!(
                !out.exists() && !tiny.path("out.partial").exists(),
                "{file}: nothing is written"
            );
        }
    }
}

#[test]
fn what_stands_in_for_a_file_is_called_by_its_name() {
    let tiny = TinyK3::new(66);
    for file in [
        "config.json",
        "tiktoken.model",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ] {
        for (damage, words) in [(DAMAGES[1], "a Git LFS pointer"), (DAMAGES[2], "a web page")] {
            let dir = linked(&tiny, &format!("{file} {words}"), file);
            damage.1(&[], &dir.join(file));
            let error = convert(&dir, &tiny.path("out"), false).unwrap_err().to_string();
            assert!(error.contains(file) && error.contains(words), "{error}");
        }
    }
    // A downloader that reserves the whole file first leaves its mark beside it.
    let dir = linked(&tiny, "aria2", "");
    fs::write(dir.join("model-00004-of-000010.safetensors.aria2"), "").unwrap();
    let error = convert(&dir, &tiny.path("out"), false).unwrap_err().to_string();
    assert!(error.contains("model-00004-of-000010.safetensors: the shard is missing"), "{error}");
    assert!(error.contains("its download goes on"), "{error}");
}

/// Readers disagree about which of two equal keys counts.
#[test]
fn keys_that_are_there_twice_are_refused() {
    let tiny = TinyK3::new(67);
    for (file, key) in [
        ("config.json", "hidden_size"),
        ("tokenizer_config.json", "added_tokens_decoder"),
        ("generation_config.json", "eos_token_id"),
    ] {
        let text = fs::read_to_string(tiny.snapshot().join(file)).unwrap();
        let twice = text.replacen(&format!("\"{key}\""), &format!("\"{key}\": 1, \"{key}\""), 1);
        assert_ne!(text, twice);
        let dir = linked(&tiny, file, file);
        fs::write(dir.join(file), twice).unwrap();
        let error = convert(&dir, &tiny.path("out"), false).unwrap_err().to_string();
        let named =
            error.contains(file) && error.contains(&format!("the key {key:?} is there twice"));
        assert!(named, "{error}");
    }
}

/// A tokenizer without the tokens of the chat format is taken, and that is said.
#[test]
fn nameless_chat_tokens_are_a_warning() {
    let tiny = TinyK3::new(68);
    let file = "tokenizer_config.json";
    let mut config: Value =
        serde_json::from_slice(&fs::read(tiny.snapshot().join(file)).unwrap()).unwrap();
    let tokens = config["added_tokens_decoder"].as_object_mut().unwrap();
    tokens.retain(|_, token| token["content"] != "<|sep|>");
    let dir = linked(&tiny, "nameless", file);
    fs::write(dir.join(file), config.to_string()).unwrap();
    let warnings = convert(&dir, &tiny.path("out"), false).unwrap();
    let [warning] = &warnings[..] else { panic!("{warnings:?}") };
    assert!(warning.contains(file) && warning.contains("<|sep|>"), "{warning}");
    assert_eq!(convert(&tiny.snapshot(), &tiny.path("good"), false).unwrap(), [""; 0]);
}

#[test]
fn a_pipe_in_place_of_a_file_does_not_hang() {
    let tiny = TinyK3::new(61);
    for file in ["config.json", "tiktoken.model", "model-00002-of-000010.safetensors"] {
        let dir = linked(&tiny, file, file);
        assert!(
            std::process::Command::new("mkfifo").arg(dir.join(file)).status().unwrap().success()
        );
        let error = convert(&dir, &tiny.path("out"), false).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains("not a regular file"), "{error}");
    }
}

/// Puts `value` at element `at` of a tensor; negative counts from its end.
fn poke(snapshot: &Path, tensor: &str, at: i64, value: f32) -> String {
    for entry in fs::read_dir(snapshot).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|e| e != "safetensors") {
            continue;
        }
        let header = Header::read(&path).unwrap();
        let Some(info) = header.tensors.iter().find(|t| t.name == tensor) else { continue };
        let new = match info.dtype {
            Dtype::F32 => value.to_le_bytes().to_vec(),
            Dtype::BF16 => half::bf16::from_f32(value).to_le_bytes().to_vec(),
            _ => vec![value as u8],
        };
        let elements = info.bytes() as i64 / new.len() as i64;
        let element = at.rem_euclid(elements);
        let begin = (header.data_start + info.begin) as usize + element as usize * new.len();
        let mut bytes = fs::read(&path).unwrap();
        bytes[begin..begin + new.len()].copy_from_slice(&new);
        fs::remove_file(&path).unwrap(); // a hard link of the good one
        fs::write(&path, bytes).unwrap();
        let cols = *info.shape.last().unwrap() as i64;
        return format!("row {}, column {}", element / cols, element % cols);
    }
    panic!("no {tensor}");
}

#[test]
fn numbers_that_are_none_are_refused_by_tensor_and_row_or_allowed() {
    let tiny = TinyK3::new(62);
    let faults = [
        ("language_model.model.layers.0.self_attn.A_log", 1, f32::NAN),
        ("language_model.model.layers.1.input_layernorm.weight", -1, f32::INFINITY),
        ("language_model.model.layers.3.self_attn.o_proj.weight", -1, f32::NEG_INFINITY),
        ("language_model.model.embed_tokens.weight", 77, f32::NAN),
        ("language_model.lm_head.weight", -2, f32::NAN),
        ("language_model.model.layers.1.block_sparse_moe.gate.weight", 5, f32::NAN),
        ("language_model.model.layers.6.block_sparse_moe.experts.11.w3.weight_scale", -1, 255.0),
        ("language_model.model.layers.1.block_sparse_moe.experts.0.w2.weight_scale", 3, 255.0),
    ];
    for (i, (tensor, at, value)) in faults.into_iter().enumerate() {
        let dir = linked(&tiny, &format!("bad {i}"), "");
        let place = poke(&dir, tensor, at, value);
        let error = convert(&dir, &tiny.path(format!("out {i}")), false).unwrap_err();
        let text = error.to_string();
        assert!(text.contains(tensor) && text.contains(&place), "{place}: {text}");
        assert!(error.hint_text().is_some_and(|hint| hint.contains("--allow-nonfinite")));
        convert(&dir, &tiny.path(format!("allowed {i}")), true).unwrap();
    }
    // The smallest and the largest scale there are.
    let dir = linked(&tiny, "legal", "");
    poke(&dir, faults[6].0, 0, 0.0);
    poke(&dir, faults[6].0, 1, 254.0);
    convert(&dir, &tiny.path("legal out"), false).unwrap();
}

/// Every key of the config with every hostile value: refused by key, or without effect on a
/// single weight.
#[test]
fn hostile_configs_are_refused_or_without_effect() {
    let tiny = TinyK3::new(63);
    let good: Value =
        serde_json::from_slice(&fs::read(tiny.snapshot().join("config.json")).unwrap()).unwrap();
    let clean = tiny.path("clean");
    convert(&tiny.snapshot(), &clean, false).unwrap();
    let clean = contents(&clean);
    let values = [
        json!(null),
        json!(0),
        json!(-1),
        json!(0.5),
        json!(u64::MAX),
        json!("7168"),
        json!([0, 0]),
    ];
    let (mut refused, mut harmless) = (0, 0);
    for key in good["text_config"].as_object().unwrap().keys() {
        for (i, value) in values.iter().enumerate() {
            let dir = linked(&tiny, &format!("{key} {i}"), "config.json");
            let mut config = good.clone();
            config["text_config"][key] = value.clone();
            fs::write(dir.join("config.json"), config.to_string()).unwrap();
            let out = tiny.path(format!("out {key} {i}"));
            match convert(&dir, &out, false) {
                Err(error) => {
                    refused += 1;
                    assert!(error.hint_text().is_some(), "{key} = {value}: no hint: {error}");
                }
                Ok(_) => {
                    harmless += 1;
                    for (name, bytes) in contents(&out) {
                        if name.starts_with("dense-") {
                            assert!(bytes == clean[&name], "{key} = {value} changes {name}");
                        }
                    }
                    fs::remove_dir_all(&out).unwrap();
                }
            }
            fs::remove_dir_all(&dir).unwrap();
        }
    }
    assert!(refused > harmless, "{refused} refused, {harmless} harmless");
}

/// An interrupted conversion whose journal was damaged is refused, or ends the same.
#[test]
fn a_damaged_journal_never_gives_another_container() {
    let tiny = TinyK3::new(64);
    let snapshot = Snapshot::open(&tiny.snapshot()).unwrap();
    let plan = ConversionPlan::new(&snapshot, &Recipe::default()).unwrap();
    let clean = tiny.path("clean");
    convert(&tiny.snapshot(), &clean, false).unwrap();
    let clean = contents(&clean);
    let pool = k3_prep::threads::pool(Some(1)).unwrap();
    let mut rng = fastrand::Rng::with_seed(8);
    let mut same = 0;
    for i in 0..30 {
        let out = tiny.path(format!("out {i}"));
        let mut left = 3;
        let on_file = &mut |_: &_| {
            left -= 1;
            if left == 0 { Err(Error::unsupported("stopped by the test")) } else { Ok(()) }
        };
        Conversion {
            force: false,
            allow_nonfinite: false,
            talk: Talk::Quiet,
            pool: &pool,
            on_file,
        }
        .run(&plan, &out)
        .unwrap_err();
        let journal = tiny.path(format!("out {i}.partial")).join("journal.jsonl");
        let mut bytes = fs::read(&journal).unwrap();
        match i % 3 {
            0 => bytes.truncate(rng.usize(0..bytes.len())),
            1 => {
                let at = rng.usize(0..bytes.len());
                bytes[at] ^= 1 << rng.u8(0..8);
            }
            _ => bytes.extend(b"{\"name\":\"../../x\",\"size\":1}\n"),
        }
        fs::write(&journal, bytes).unwrap();
        match convert(&tiny.snapshot(), &out, false) {
            Ok(_) => {
                let mut made = contents(&out);
                // A digest that the journal got wrong is found by verify.
                if made.remove("manifest.json") == clean.get("manifest.json").cloned() {
                    same += 1;
                }
                for (name, bytes) in made {
                    assert!(name == "SHA256SUMS" || bytes == clean[&name], "{name}");
                }
            }
            Err(error) => assert!(error.to_string().contains("out"), "{error}"),
        }
    }
    assert!(same > 5, "{same} ended the same");
}

/// Logits of a few tokens, or why there are none.
fn logits(out: &Path, snapshot: &Path, options: &[&str]) -> anyhow::Result<Vec<f32>> {
    let container = Container::open(out)?;
    let mut all = vec!["--snapshot", snapshot.to_str().expect("UTF-8"), "--expert-cache", "1"];
    all.extend(options);
    let args = crate::support::engine_args(out, &all);
    let mut engine = k3_run::open::engine(&container, &args, k3_run::cli::Act8::Off)?;
    let mut session = k3_run::session::Session::new(&engine, 16);
    let cancel = std::sync::atomic::AtomicBool::new(false);
    let logits = session.extend(&mut engine, &[5, 77, 300, 12, 9], &cancel, |_| {})?;
    Ok(logits.to_vec())
}

fn hashing<'a>(out: &'a Path, pool: &'a rayon::ThreadPool) -> ExpertHashing<'a> {
    ExpertHashing { out, force: false, allow_nonfinite: false, talk: Talk::Quiet, pool }
}

/// Hashing that was stopped goes on: what was read of shards that did not change since is
/// not read again, and the table is the one of a run in one go.
#[test]
fn stopped_hashing_goes_on_where_it_stopped() {
    const STATE: &str = "expert-sums.jsonl";
    let tiny = TinyK3::new(69);
    let pool = k3_prep::threads::pool(Some(1)).unwrap();
    let plan = |snapshot: &Path| {
        ConversionPlan::new(&Snapshot::open(snapshot).unwrap(), &Recipe::default()).unwrap()
    };
    let run = |plan: &ConversionPlan, out: &Path| {
        let on_file = &mut |_: &_| Ok(());
        Conversion { force: false, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
            .run(plan, out)
    };
    let dir = linked(&tiny, "snapshot-2", "");
    let mut whole = plan(&dir);
    whole.hash_experts(hashing(&tiny.path("whole"), &pool)).unwrap();
    let table = |plan: &ConversionPlan| {
        plan.small.iter().find(|f| f.name == "experts.k3x").unwrap().bytes.clone()
    };
    run(&whole, &tiny.path("whole")).unwrap();
    assert!(!tiny.path("whole").join(STATE).exists());

    // Every other record is lost, and one says what no expert's bytes give.
    let out = tiny.path("out");
    plan(&dir).hash_experts(hashing(&out, &pool)).unwrap();
    let state = tiny.path("out.partial").join(STATE);
    let lines = fs::read_to_string(&state).unwrap();
    let mut lines: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.len(), 3, "72 experts, 32 at a time");
    lines.remove(1);
    let sums = vec![7u32; lines[0]["sums"].as_array().unwrap().len()];
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    lines[0]["crc32"] = crc32(&bytes).into();
    lines[0]["sums"] = json!(sums);
    let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
    fs::write(&state, text + "{\"first\":3").unwrap();
    let mut resumed = plan(&dir);
    resumed.hash_experts(hashing(&out, &pool)).unwrap();
    let mut expected = table(&whole);
    let start = expected.len() - 4 * 72;
    expected[start..start + bytes.len()].copy_from_slice(&bytes);
    assert!(table(&resumed) == expected, "the record is taken, the rest is read");

    // A shard that was written to is read again.
    let touched = dir.join("model-00002-of-000010.safetensors");
    let same = fs::read(&touched).unwrap();
    fs::remove_file(&touched).unwrap();
    fs::write(&touched, same).unwrap();
    let again = plan(&dir);
    let error = { again }.hash_experts(hashing(&out, &pool)).unwrap_err().to_string();
    assert!(error.contains("the snapshot has changed"), "{error}");
    let mut again = plan(&dir);
    again.hash_experts(ExpertHashing { force: true, ..hashing(&out, &pool) }).unwrap();
    assert!(table(&again) == table(&whole), "nothing of the old shard is left");

    // A scale that is NaN: all other runs of experts are kept.
    let bad = linked(&tiny, "bad", "");
    let name = "language_model.model.layers.6.block_sparse_moe.experts.11.w3.weight_scale";
    poke(&bad, name, -1, 255.0);
    let out = tiny.path("nan");
    let error = plan(&bad).hash_experts(hashing(&out, &pool)).unwrap_err();
    assert!(error.to_string().contains(name), "{error}");
    assert_eq!(
        fs::read_to_string(tiny.path("nan.partial").join(STATE)).unwrap().lines().count(),
        2
    );
    let mut allowed = plan(&bad);
    let how = ExpertHashing { allow_nonfinite: true, ..hashing(&out, &pool) };
    let said = allowed.hash_experts(how).unwrap();
    assert!(said.len() == 1 && said[0].contains(name), "{said:?}");

    // A container that has checksums gives them; one that has none is in the way.
    let mut known = plan(&tiny.snapshot());
    let plain = tiny.path("plain");
    run(&known, &plain).unwrap();
    let error = known.hash_experts(hashing(&plain, &pool)).unwrap_err();
    assert!(error.to_string().contains("made without --hash-experts"), "{error}");
    let kept = tiny.path("kept");
    known.hash_experts(hashing(&kept, &pool)).unwrap();
    run(&known, &kept).unwrap();
    let mut once_more = plan(&tiny.snapshot());
    once_more.hash_experts(hashing(&kept, &pool)).unwrap();
    assert!(!tiny.path("kept.partial").exists(), "nothing is read");
    assert!(run(&once_more, &kept).unwrap().before);
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, bit: u32| (crc >> 1) ^ if (crc ^ bit) & 1 == 1 { 0xedb8_8320 } else { 0 };
    !bytes.iter().flat_map(|&byte| (0..8).map(move |i| u32::from(byte) >> i)).fold(!0, step)
}

/// A bit that flips in an expert after the conversion: a plain run cannot see it, a checked
/// one stops and names it, and so does verify.
#[test]
fn a_flipped_bit_in_an_expert_is_named_where_checksums_are_compared() {
    let tiny = TinyK3::new(65);
    let (plain, hashed) = (tiny.path("plain"), tiny.path("hashed"));
    convert(&tiny.snapshot(), &plain, false).unwrap();
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let snapshot = Snapshot::open(&tiny.snapshot()).unwrap();
    let mut plan = ConversionPlan::new(&snapshot, &Recipe::default()).unwrap();
    let how = hashing(&hashed, &pool);
    assert_eq!(plan.hash_experts(how).unwrap(), [""; 0]);
    let on_file = &mut |_: &_| Ok(());
    Conversion { force: false, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&plan, &hashed)
        .unwrap();

    let good = logits(&plain, &tiny.snapshot(), &[]).unwrap();
    for options in [&["--verify-experts"][..], &["--verify-experts", "--direct-io", "off"]] {
        assert_eq!(logits(&hashed, &tiny.snapshot(), options).unwrap(), good);
    }
    let error = logits(&plain, &tiny.snapshot(), &["--verify-experts"]).unwrap_err();
    assert!(error.to_string().contains("no checksums"), "{error:#}");
    let verify = |snapshot: &Path, rows| {
        let sample = k3_prep::verify::Sample { rows, seed: 0 };
        k3_prep::verify::Verification {
            dir: &hashed,
            snapshots: &[snapshot.to_path_buf()],
            source: false,
            experts: true,
            rederive: Some(sample),
            calibration: None,
            talk: Talk::Quiet,
            pool: &pool,
        }
        .run()
        .unwrap()
    };
    let report = verify(&tiny.snapshot(), 2);
    assert_eq!(report.differences, Vec::<String>::new());
    assert_eq!(report.experts.unwrap().equal, 72);

    // Codes of every expert of layer 3, so that whichever is chosen has it.
    let dir = linked(&tiny, "flipped", "");
    for expert in 0..12 {
        let name = format!(
            "language_model.model.layers.3.block_sparse_moe.experts.{expert}.w2.weight_packed"
        );
        poke(&dir, &name, -1, 0x5a as f32);
        poke(&dir, &name, 0, 0xa5 as f32);
    }
    let report = verify(&dir, 2);
    assert_eq!(report.differences.len(), 12, "{:?}", report.differences);
    assert!(report.differences[11].contains("layer 3 expert 11: expected CRC-32"));
    let error = format!("{:#}", logits(&hashed, &dir, &["--verify-experts"]).unwrap_err());
    assert!(error.contains("layer 3 expert") && error.contains("expected CRC-32"), "{error}");
    // Without checking, what is said is which command would tell.
    let container = Container::open(&hashed).unwrap();
    let args = crate::support::engine_args(&hashed, &["--snapshot", dir.to_str().unwrap()]);
    let mut options = k3_run::open::expert_options(&container, &args, 0).unwrap();
    options.direct_io = k3_run::experts::DirectIo::Off;
    let mut notes = Vec::new();
    k3_run::experts::ExpertStore::open(&container, &options, &mut notes).unwrap();
    let command = format!("`k3-prep verify {} --experts` tells", hashed.display());
    assert!(notes.concat().contains(&command), "{notes:?}");
    assert!(logits(&hashed, &dir, &[]).is_ok());
}

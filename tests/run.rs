//! The runtime against an independent float64 implementation, and against itself: where
//! things are placed must never change a bit.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use k3_formats::container::Container;
use k3_formats::recipe::Recipe;
use k3_run::engine::{Engine, Inputs, Run, Want};
use k3_run::kernels::Kernels;
use k3_run::session::Session;
use serde_json::Value;

use crate::support::{TinyK3, convert, demo_snapshot, engine, recipe};

const ODD_DIMS: &str = include_str!("fixtures/golden/odd-dims.json");

fn golden_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/golden")
}

/// The f32 values of a C-ordered .npy file, version 1.
fn npy(name: &str) -> Vec<f32> {
    let bytes = std::fs::read(golden_dir().join(name)).unwrap();
    assert_eq!(&bytes[..8], b"\x93NUMPY\x01\x00");
    let data = &bytes[10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]))..];
    data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

fn golden(snapshot: &str) -> Value {
    let text = std::fs::read_to_string(golden_dir().join("golden.json")).unwrap();
    serde_json::from_str::<Value>(&text).unwrap()[snapshot].take()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

fn rel_l2(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let diff: f64 = got.iter().zip(want).map(|(g, w)| square(f64::from(g - w))).sum();
    (diff / want.iter().map(|w| square(f64::from(*w))).sum::<f64>()).sqrt()
}

/// Logits [positions, vocab] and hidden states [positions, layers + 1, hidden].
fn teacher_force(engine: &mut Engine<'_>, ids: &[u32]) -> (Vec<f32>, Vec<f32>) {
    let (hidden, points) = (engine.model().config.hidden, engine.model().layers.len() + 1);
    let mut state = engine.new_state(ids.len());
    let mut trace = vec![0.0; ids.len() * points * hidden];
    let (mut logits, mut done) = (Vec::new(), 0);
    for part in ids.chunks(engine.max_rows()) {
        let mut observe = |point: usize, x: &[f32]| {
            for (row, x) in x.chunks_exact(hidden).enumerate() {
                trace[((done + row) * points + point) * hidden..][..hidden].copy_from_slice(x);
            }
        };
        let mut run = [Run { state: &mut state, rows: part.len(), want: Want::All }];
        let cancel = AtomicBool::new(false);
        let step = engine.step(Inputs::Ids(part), &mut run, &cancel, Some(&mut observe));
        logits.extend_from_slice(step.unwrap());
        done += part.len();
    }
    (logits, trace)
}

fn greedy(engine: &mut Engine<'_>, prompt: &[u32], count: usize) -> Vec<u32> {
    let mut session = Session::new(engine, prompt.len() + count);
    let (mut next, mut new) = (prompt.to_vec(), Vec::new());
    let cancel = AtomicBool::new(false);
    while new.len() < count {
        let logits = session.extend(engine, &next, &cancel, |_| {}).unwrap();
        let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        new.push(best.unwrap() as u32);
        next = vec![*new.last().unwrap()];
    }
    new
}

/// A setting of the reference: how the container is made and what the engine is told.
struct Setting {
    name: &'static str,
    bits: (u32, u32, u32),
    act8: &'static str,
    tolerance: f64,
}

const SETTINGS: [Setting; 4] = [
    Setting { name: "exact", bits: (16, 16, 16), act8: "off", tolerance: 1e-5 },
    Setting { name: "q8", bits: (8, 8, 8), act8: "off", tolerance: 1e-4 },
    Setting { name: "q4", bits: (4, 8, 8), act8: "off", tolerance: 1e-4 },
    Setting { name: "q4-idot", bits: (4, 8, 8), act8: "experts", tolerance: 1e-4 },
];

fn compare_with_reference(name: &str, snapshot: &TinyK3) {
    let golden = golden(name);
    let prompt = ids(&golden["ids"]);
    for Setting { name: setting, bits: (bits, mla, head), act8, tolerance } in SETTINGS {
        let out = snapshot.path(setting);
        convert(&snapshot.snapshot(), &out, &recipe(bits, mla, head));
        let container = Container::open(&out).unwrap();
        let want = npy(&format!("{name}.{setting}.logits.npy"));
        for kernels in Kernels::available().map(Kernels::name) {
            let mut engine = engine(&container, &["--act8", act8, "--kernels", kernels]);
            let (logits, trace) = teacher_force(&mut engine, &prompt);
            let distance = rel_l2(&logits, &want);
            let what = format!("{name} {setting} {kernels}");
            assert!(distance < tolerance, "{what}: logits differ by {distance:.1e}");
            if setting == "exact" {
                compare_trace(name, &trace, &engine, prompt.len());
            }
        }
        let mut engine = engine(&container, &["--act8", act8]);
        let want = ids(&golden["settings"][setting]["greedy"]);
        assert_eq!(greedy(&mut engine, &prompt, want.len()), want, "{name} {setting}");
    }
}

fn compare_trace(name: &str, trace: &[f32], engine: &Engine<'_>, positions: usize) {
    let want = npy(&format!("{name}.exact.trace.npy"));
    let (hidden, points) = (engine.model().config.hidden, engine.model().layers.len() + 1);
    for point in 0..points {
        let pick = |all: &[f32]| -> Vec<f32> {
            let rows = (0..positions).map(|t| &all[(t * points + point) * hidden..][..hidden]);
            rows.flatten().copied().collect()
        };
        let distance = rel_l2(&pick(trace), &pick(&want));
        assert!(distance < 1e-5, "{name}: after layer {point} {distance:.1e}");
    }
}

#[test]
fn tiny_agrees_with_the_reference() {
    compare_with_reference("tiny3", &TinyK3::new(3));
}

#[test]
fn odd_dimensions_agree_with_the_reference() {
    compare_with_reference("odd", &TinyK3::with_dims(ODD_DIMS, 7));
}

#[test]
fn trained_model_continues_like_the_reference() {
    let tmp = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(demo_snapshot().parent().unwrap().join("golden.json"));
    let golden: Value = serde_json::from_str(&text.unwrap()).unwrap();
    for (weights, recipe) in
        [("exact", recipe(16, 16, 16)), ("bits 4, mla 8, head 8", Recipe::default())]
    {
        let out = tmp.path().join(weights);
        convert(&demo_snapshot(), &out, &recipe);
        let container = Container::open(&out).unwrap();
        let mut engine = engine(&container, &[]);
        let cases = golden.as_array().unwrap().iter().filter(|c| c["weights"] == weights);
        let mut compared = 0;
        // Where two tokens are nearly tied, rounding may choose the other one.
        for case in cases.filter(|c| c["smallest_gap"].as_f64().unwrap() > 1e-4) {
            let want = ids(&case["greedy"]);
            let got = greedy(&mut engine, &ids(&case["ids"]), want.len());
            assert_eq!(got, want, "{weights}: {}", case["prompt"]);
            compared += 1;
        }
        assert!(compared >= 4, "{compared} prompts compared");
    }
}

#[test]
fn placement_never_changes_a_bit() {
    let snapshot = TinyK3::new(11);
    let out = snapshot.path("container");
    convert(&snapshot.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    let prompt: Vec<u32> = (0..70).map(|i| (i * 37 + 5) % 700).collect();
    let sets = Kernels::available().map(Kernels::name);
    let numerics =
        ["--act8 off", "--act8 experts", "--act8 on", "--kv-type bf16"].map(String::from);
    for numerics in numerics.into_iter().chain(sets.map(|set| format!("--kernels {set}"))) {
        let numerics: Vec<&str> = numerics.split(' ').collect();
        let run = |options: &[&str]| {
            let options = [&numerics, options].concat();
            let (logits, trace) = teacher_force(&mut engine(&container, &options), &prompt);
            logits.into_iter().chain(trace).map(f32::to_bits).collect::<Vec<_>>()
        };
        let want = run(&[]);
        for options in [
            &["--chunk", "1"][..],
            &["--chunk", "7"],
            &["--chunk", "70"],
            &["--threads", "1"],
            &["--threads", "3", "--chunk", "5"],
            &["--expert-cache", "0"],
            &["--expert-cache", "0", "--chunk", "1", "--readers", "1"],
            &["--expert-cache", "100K", "--chunk", "7"],
            &["--direct-io", "off"],
            &["--direct-io", "off", "--expert-cache", "0", "--threads", "1"],
        ] {
            assert!(run(options) == want, "{numerics:?}: {options:?} changes the result");
        }
    }
}

#[test]
fn a_bf16_cache_stays_near() {
    let tmp = tempfile::tempdir().unwrap();
    convert(&demo_snapshot(), &tmp.path().join("container"), &Recipe::default());
    let container = Container::open(&tmp.path().join("container")).unwrap();
    let prompt: Vec<u32> = (0..150).map(|i| (i * 41 + 3) % 700).collect();
    // Without rounded activations, which turn the smallest change into a step.
    let run = |kv| {
        let options = ["--act8", "off", "--context", "150", "--kv-type", kv];
        teacher_force(&mut engine(&container, &options), &prompt).0
    };
    let distance = rel_l2(&run("bf16"), &run("f32"));
    // A BF16 value is off by up to 2^-9 of itself.
    assert!(0.0 < distance && distance < 1.0 / 512.0, "{distance:.1e}");
}

#[test]
fn sequences_stepped_together_are_as_alone() {
    let snapshot = TinyK3::new(12);
    let out = snapshot.path("container");
    convert(&snapshot.snapshot(), &out, &Recipe::default());
    let container = Container::open(&out).unwrap();
    let mut engine = engine(&container, &[]);
    let prompts: [Vec<u32>; 3] = [vec![5, 6, 7, 8], vec![300], vec![1, 2, 3, 4, 5, 6, 7]];
    let alone: Vec<_> = prompts.iter().map(|p| teacher_force(&mut engine, p).0).collect();
    let mut states: Vec<_> = prompts.iter().map(|p| engine.new_state(p.len())).collect();
    let mut runs: Vec<_> = states
        .iter_mut()
        .zip(&prompts)
        .map(|(state, p)| Run { state, rows: p.len(), want: Want::All })
        .collect();
    let together = engine
        .step(Inputs::Ids(&prompts.concat()), &mut runs, &AtomicBool::new(false), None)
        .unwrap();
    assert!(together == alone.concat(), "rows of one sequence depend on another");
}

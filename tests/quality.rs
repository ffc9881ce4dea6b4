//! Recipes and searched scales end to end: converted, resumed, verified, read.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use k3_formats::calibration::Calibration;
use k3_formats::container::{Container, Manifest};
use k3_formats::quant::{MatrixFormat, Scales};
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_formats::tensor_name::dense_tensors;
use k3_formats::{Error, Result};
use k3_prep::Talk;
use k3_prep::conversion::{Conversion, Converted};
use k3_prep::plan::ConversionPlan;
use k3_prep::verify::{Report, Sample, Verification};
use k3_run::engine::{Inputs, Run, Want};
use k3_run::eval::{Evaluation, Progress, Summary};
use serde_json::Value;

use crate::support::{TinyK3, convert, demo_container, demo_snapshot, engine, program};

/// Every format, some by class, some by name and layer.
const MIXED: &str = r#"{"rules": [
    {"tensor": "o_proj.weight", "layers": "0-1", "format": "bf16"},
    {"class": "kda", "layers": "0", "format": "int4-g64"},
    {"class": "head", "format": "int8-row"},
    {"format": "int4-g32"}]}"#;

fn convert_calibrated(
    snapshot: &Path,
    out: &Path,
    recipe: &Recipe,
    calibration: Option<&Calibration>,
    most_files: usize,
) -> Result<Converted> {
    let plan = ConversionPlan::calibrated(&Snapshot::open(snapshot)?, recipe, calibration)?;
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let mut files = 0;
    let on_file = &mut |_: &_| {
        files += 1;
        if files > most_files { Err(Error::unsupported("stop")) } else { Ok(()) }
    };
    Conversion { force: false, allow_nonfinite: false, talk: Talk::Quiet, pool: &pool, on_file }
        .run(&plan, out)
}

fn rederive(out: &Path, calibration: Option<&Calibration>) -> Report {
    let pool = k3_prep::threads::pool(Some(2)).unwrap();
    let rederive = Some(Sample { rows: 1000, seed: 0 });
    Verification {
        dir: out,
        snapshots: &[],
        source: false,
        experts: false,
        rederive,
        calibration,
        talk: Talk::Quiet,
        pool: &pool,
    }
    .run()
    .unwrap()
}

/// Mean squares as a calibration might find them.
fn calibration(container: &Container) -> Calibration {
    let mut rng = fastrand::Rng::with_seed(4);
    let matrices = dense_tensors(&container.config);
    let squares: Vec<_> = matrices
        .into_iter()
        .filter_map(|spec| spec.matrix_dims().map(|(_, cols)| (spec.name, cols)))
        .map(|(name, cols)| (name, (0..cols).map(|_| rng.f32() * rng.f32()).collect()))
        .collect();
    Calibration::parse(&Calibration::encode(9, &squares).unwrap()).unwrap()
}

#[test]
fn every_choice_of_scales_follows_from_the_snapshot_and_resumes() {
    let tiny = TinyK3::new(21);
    let snapshot = tiny.snapshot();
    let mixed = Recipe::parse(MIXED).unwrap();
    convert(&snapshot, &tiny.path("mse"), &mixed);
    let calibration = calibration(&Container::open(&tiny.path("mse")).unwrap());
    let hessian =
        mixed.clone().with_scales(Scales::Hessian).with_calibration(Some(calibration.sha256));
    for (name, recipe, calibration) in [
        ("absmax", mixed.clone().with_scales(Scales::Absmax), None),
        ("mse", mixed, None),
        ("hessian", hessian, Some(&calibration)),
    ] {
        let (out, again) = (tiny.path(name), tiny.path(format!("{name}-again")));
        convert_calibrated(&snapshot, &out, &recipe, calibration, usize::MAX).unwrap();
        let report = rederive(&out, calibration);
        assert!(report.ok, "{name}: {:?}", report.differences);
        for files in [0, 1, 3] {
            convert_calibrated(&snapshot, &again, &recipe, calibration, files).unwrap_err();
        }
        convert_calibrated(&snapshot, &again, &recipe, calibration, usize::MAX).unwrap();
        for entry in fs::read_dir(&out).unwrap() {
            let name = entry.unwrap().file_name();
            let same = fs::read(out.join(&name)).unwrap() == fs::read(again.join(&name)).unwrap();
            assert!(same, "{name:?}");
        }
    }
    let report = rederive(&tiny.path("hessian"), None);
    assert!(!report.ok);
    assert!(report.differences[0].contains("hessian scales need a calibration file"));
    // Scales of one choice are not those of another.
    let manifest = fs::read_to_string(tiny.path("mse/manifest.json")).unwrap();
    let manifest = manifest.replace("\"scales\": \"mse\"", "\"scales\": \"absmax\"");
    fs::write(tiny.path("mse/manifest.json"), manifest).unwrap();
    assert!(!rederive(&tiny.path("mse"), None).ok);
}

#[test]
fn a_mix_of_formats_is_recorded_and_runs() {
    let tiny = TinyK3::new(22);
    let out = tiny.path("out");
    let recipe = Recipe::parse(MIXED).unwrap();
    convert(&tiny.snapshot(), &out, &recipe);
    let container = Container::open(&out).unwrap();
    assert_eq!(container.manifest.recipe, recipe);
    let mut formats: HashMap<MatrixFormat, usize> = HashMap::new();
    for spec in dense_tensors(&container.config) {
        if let Some(expected) = recipe.format_of(&spec) {
            let found = container.matrix(&spec.name).unwrap().format;
            assert_eq!(found, expected, "{}", spec.name);
            *formats.entry(found).or_default() += 1;
        }
    }
    assert_eq!(formats.len(), MatrixFormat::ALL.len(), "{formats:?}");

    let exact = tiny.path("exact");
    convert(&tiny.snapshot(), &exact, &Recipe::of_bits(16, 16, 16).unwrap());
    let logits = |dir: &Path| {
        let container = Container::open(dir).unwrap();
        let mut engine = engine(&container, &[]);
        let mut state = engine.new_state(8);
        let mut run = [Run { state: &mut state, rows: 8, want: Want::All }];
        let ids = [1, 2, 3, 500, 5, 6, 7, 8];
        let step = engine.step(Inputs::Ids(&ids), &mut run, &AtomicBool::new(false), None);
        step.unwrap().to_vec()
    };
    let (mixed, exact) = (logits(&out), logits(&exact));
    let square = |sum: f64, x: f32| sum + f64::from(x).powi(2);
    let off = mixed.iter().zip(&exact).map(|(a, b)| a - b).fold(0.0, square);
    let off = (off / exact.iter().copied().fold(0.0, square)).sqrt();
    assert!((0.005..0.5).contains(&off), "quantized weights are a little off: {off}");
}

#[test]
fn errors_are_recorded_and_a_search_lowers_them() {
    let tiny = TinyK3::new(23);
    let errors = |recipe: &str, scales| {
        let out = tiny.path(format!("{recipe}-{scales:?}"));
        convert(&tiny.snapshot(), &out, &Recipe::named(recipe).unwrap().with_scales(scales));
        let tensors = Manifest::read(&out).unwrap().files.into_iter().flat_map(|f| f.tensors);
        let errors: Vec<u64> = tensors.filter_map(|t| t.error_ppm).collect();
        assert_eq!(errors.len(), 71);
        errors
    };
    for (recipe, range) in [("fast", 1_000..200_000), ("balanced", 1_000..200_000)] {
        let (absmax, mse) = (errors(recipe, Scales::Absmax), errors(recipe, Scales::Mse));
        assert!(absmax.iter().all(|e| range.contains(e)), "{recipe}: {absmax:?}");
        assert!(mse.iter().zip(&absmax).all(|(mse, absmax)| mse <= absmax), "{recipe}");
        let sums = [mse, absmax].map(|errors| errors.iter().sum::<u64>() as f64);
        assert!(sums[0] < 0.9 * sums[1], "{recipe}: {sums:?}");
    }
}

/// `eval.json` beside the demo: what the float64 reference computed for `eval.txt`, of the
/// exact weights and of the seed's recipe.
#[test]
fn evaluations_agree_with_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    let container = |name: &str, recipe: &Recipe| {
        let out = dir.path().join(name);
        convert(&demo_snapshot(), &out, recipe);
        Container::open(&out).unwrap()
    };
    let exact = container("exact", &Recipe::of_bits(16, 16, 16).unwrap());
    let seed = container("seed", &Recipe::default());
    let fixtures = demo_snapshot().parent().unwrap().to_owned();
    let golden: Value =
        serde_json::from_str(&fs::read_to_string(fixtures.join("eval.json")).unwrap()).unwrap();
    let floats = |key: &str| -> Vec<f64> {
        golden[key].as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect()
    };
    let text = fs::read_to_string(fixtures.join("eval.txt")).unwrap();
    let tokenizer = k3_run::open::tokenizer(&exact.dir).unwrap();
    let ids = tokenizer.encode(&text, k3_formats::tokenizer::Specials::Text);
    let wanted: Vec<u32> = serde_json::from_value(golden["ids"].clone()).unwrap();
    assert_eq!(ids, wanted);

    let mut exact_engine = engine(&exact, &["--act8", "off"]);
    let mut seed_engine = engine(&seed, &["--act8", "off", "--chunk", "7"]);
    let mut losses = Vec::new();
    let mut alone = Evaluation { engine: &mut exact_engine, other: None, worst: 3 };
    for (i, ids) in ids.chunks(64).enumerate() {
        let each = |loss: f64| {
            losses.push(loss);
            Ok(())
        };
        let window = alone.window(ids, 64 * i, each).unwrap();
        assert_eq!((window.tokens, window.worst.len()), (ids.len() - 1, 3));
        assert!(window.worst[0].loss >= window.worst[2].loss);
        assert_eq!(wanted[window.worst[0].at], window.worst[0].token);
    }
    let log_probs = floats("log_probs");
    assert_eq!(losses.len(), log_probs.len());
    for (i, (loss, log_prob)) in losses.iter().zip(&log_probs).enumerate() {
        assert!((loss + log_prob).abs() < 1e-5, "token {i}: {loss} against {}", -log_prob);
    }

    let mut both =
        Evaluation { engine: &mut seed_engine, other: Some(&mut exact_engine), worst: 1 };
    let windows: Vec<_> = ids
        .chunks(64)
        .enumerate()
        .map(|(i, ids)| both.window(ids, 64 * i, |_| Ok(())).unwrap())
        .collect();
    let summary = Summary::new(&windows, true, 1);
    let against = summary.against.unwrap();
    let kl = floats("kl_of_seed");
    let mean = kl.iter().sum::<f64>() / kl.len() as f64;
    assert!((against.kl.value / mean - 1.0).abs() < 1e-4, "{} against {mean}", against.kl.value);
    let same = golden["same_top"].as_f64().unwrap() / kl.len() as f64;
    assert!((against.same_top.value - same).abs() < 1e-9);
    let perplexity = (-log_probs.iter().sum::<f64>() / kl.len() as f64).exp();
    assert!((against.perplexity.value / perplexity - 1.0).abs() < 1e-6);
    let largest = kl.iter().copied().fold(0.0, f64::max);
    let worst = summary.worst[0].against.as_ref().unwrap().kl;
    assert!((worst / largest - 1.0).abs() < 1e-3, "{worst} against {largest}");
}

#[test]
fn an_evaluation_goes_on_with_the_same_digits() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    convert(&demo_snapshot(), &out, &Recipe::named("balanced").unwrap());
    let container = Container::open(&out).unwrap();
    let ids: Vec<u32> = (0..150).map(|i| (i * 37 + 5) % 2000).collect();
    let identity = serde_json::json!({"ids": 150});
    let run = |file: &str, most: usize| {
        let mut engine = engine(&container, &[]);
        let path = dir.path().join(file);
        let (mut progress, mut windows) = Progress::open(&path, &identity).unwrap();
        let mut evaluation = Evaluation { engine: &mut engine, other: None, worst: 2 };
        for (i, ids) in ids.chunks(32).enumerate().skip(windows.len()).take(most) {
            let window = evaluation.window(ids, 32 * i, |_| Ok(())).unwrap();
            windows.push(progress.record(&window).unwrap());
        }
        (Summary::new(&windows, false, 4), fs::read(&path).unwrap())
    };
    let whole = run("whole", usize::MAX);
    assert_eq!((whole.0.windows, whole.0.tokens, whole.0.worst.len()), (5, 145, 4));
    assert_ne!(run("parts", 2).0, whole.0);
    assert!(run("parts", usize::MAX) == whole);
}

#[test]
fn an_evaluation_does_not_go_on_with_other_numbers() {
    let demo = demo_container();
    let text = demo.path().join("text");
    fs::write(&text, "She was surprised to find that he was not at home.").unwrap();
    let eval = |options: &[&str]| {
        let mut eval = Command::new(program());
        eval.arg("eval").arg(demo.path().join("container")).arg("--text").arg(&text);
        eval.arg("--progress").arg(demo.path().join("progress")).args(options).output().unwrap()
    };
    assert_eq!(eval(&[]).status.code(), Some(0));
    assert_eq!(eval(&[]).status.code(), Some(0));
    for options in [["--kv-type", "bf16"], ["--act8", "experts"], ["--top-p-experts", "0.5"]] {
        let refused = eval(&options);
        let said = String::from_utf8(refused.stderr).unwrap();
        assert_eq!(refused.status.code(), Some(2), "{options:?}: {said}");
        assert!(said.contains("the progress of another evaluation"), "{options:?}: {said}");
    }
}

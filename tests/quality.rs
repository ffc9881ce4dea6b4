//! Recipes and searched scales end to end: converted, resumed, verified, read.

use std::collections::HashMap;
use std::fs;
use std::path::Path;
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

use crate::support::{TinyK3, convert, engine};

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

//! Inspection and plans: the numbers of the release to the byte, and every kind of path.

use std::collections::BTreeMap;

use fs_err as fs;
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_prep::inspect::{Inspection, Kind, inspect};
use k3_prep::plan::ConversionPlan;
use k3_prep::synth::{Preset, Routing, SynthOptions};

use crate::support::{TinyK3, convert, recipe};

fn look(path: &std::path::Path) -> Inspection {
    inspect(path, &mut |_, _| {}).unwrap()
}

/// Params, bytes, bytes as int8 and as int4 by class, as published for the release.
const RELEASE: [(&str, u64, u64, u64, u64); 10] = [
    ("kda", 30_387_732_480, 60_775_464_960, 30_403_276_800, 17_093_099_520),
    ("shared", 12_155_092_992, 24_310_185_984, 12_162_252_800, 6_837_239_808),
    ("mla", 5_572_657_152, 11_145_314_304, 5_578_856_448, 3_134_619_648),
    ("latent", 4_726_980_608, 9_453_961_216, 4_730_937_344, 2_658_926_592),
    ("head", 1_174_405_120, 2_348_810_240, 1_175_060_480, 660_602_880),
    ("embedding", 1_174_405_120, 2_348_810_240, 1_175_060_480, 660_602_880),
    ("dense", 726_663_168, 1_453_326_336, 726_962_176, 408_748_032),
    ("router", 590_955_008, 1_182_074_880, 1_182_074_880, 1_182_074_880),
    ("kda_gate", 219_316_224, 438_632_448, 438_632_448, 438_632_448),
    ("small", 15_440_128, 52_960_256, 52_960_256, 52_960_256),
];

#[test]
fn the_whole_release_adds_up_to_the_byte() {
    let dims = Preset::Full.dims();
    let options = SynthOptions { dims, seed: 0, routing: Routing::Flat, sparse: true };
    let full = TinyK3::build(&options);
    let seen = look(&full.snapshot());
    assert!(seen.release, "every header is that of the release");
    assert_eq!((seen.files, seen.file_bytes), (96, 1_560_936_091_448));
    assert_eq!((seen.tensors, seen.tensor_bytes), (497_220, 1_560_860_324_864));
    let mut rows = seen.classes.iter();
    for (class, params, bytes, int8, int4) in RELEASE {
        let row = rows.next().unwrap();
        let found = (row.class, row.params, row.bytes, row.int8_bytes, row.int4_bytes);
        assert_eq!(found, (class, params, bytes, int8, int4));
    }
    let rest: Vec<_> = rows.map(|r| (r.class, r.tensors, r.params, r.bytes)).collect();
    let experts = ("experts", 494_592, 2_722_740_830_208, 1_446_456_066_048);
    assert_eq!(rest, [experts, ("vision", 168, 447_358_976, 894_717_952)]);
    let text = seen.to_string();
    for number in ["2,779,931,837,184", "2,779,484,478,208", "104,189,614,848", "33,127,506,944"] {
        assert!(text.contains(number), "{text}\nlacks {number}");
    }

    let snapshot = Snapshot::open(&full.snapshot()).unwrap();
    for (recipe, column) in [(recipe(8, 8, 8), 3), (recipe(4, 4, 4), 4)] {
        let summary = ConversionPlan::new(&snapshot, &recipe).unwrap().summary();
        let stored: BTreeMap<_, _> =
            summary.classes.iter().map(|c| (c.class, c.stored_bytes)).collect();
        for row in RELEASE {
            // Embeddings are read by row and stay as they are.
            let quantized = if column == 3 { row.3 } else { row.4 };
            let expected = if row.0 == "embedding" { row.2 } else { quantized };
            assert_eq!(stored[row.0], expected, "{} in {recipe}", row.0);
        }
        assert_eq!(summary.source_bytes, 113_509_540_864);
        assert_eq!((summary.experts, summary.scattered_experts), (82_432, 0));
    }
}

#[test]
fn containers_and_single_files_are_looked_into() {
    let tiny = TinyK3::new(40);
    let out = tiny.path("out");
    convert(&tiny.snapshot(), &out, &Recipe::default());
    let container = look(&out);
    assert_eq!(container.kind, Kind::Container);
    let kda = container.classes.iter().find(|c| c.class == "kda").unwrap();
    assert_eq!((kda.tensors, kda.bytes), (50, 691_200), "codes and scales");
    let padding = container.classes.iter().find(|c| c.class == "padding").unwrap();
    assert!(padding.bytes > 0);
    assert_eq!(container.tensors, 255 + padding.tensors);

    let mut names = Vec::new();
    let shard = tiny.snapshot().join("model-00004-of-000010.safetensors");
    let file = inspect(&shard, &mut |_, t| names.push(t.name.clone())).unwrap();
    assert_eq!(file.kind, Kind::File);
    assert_eq!(names.len() as u64, file.tensors);
    // Without a config the layer is known to be MLA by its own tensors.
    assert_eq!(file.classes.iter().find(|c| c.class == "mla").unwrap().tensors, 6);
    assert!(!file.classes.iter().any(|c| c.class == "kda" || c.class == "other"));
}

#[test]
fn a_damaged_shard_does_not_hide_the_others() {
    let tiny = TinyK3::new(41);
    let whole = look(&tiny.snapshot());
    fs::write(tiny.snapshot().join("model-00002-of-000010.safetensors"), "oops").unwrap();
    let seen = look(&tiny.snapshot());
    assert_eq!((whole.files, seen.files), (10, 9));
    assert_eq!(seen.problems.len(), 1);
    assert!(seen.problems[0].contains("model-00002"), "{:?}", seen.problems);
    let nothing = inspect(&tiny.path("nothing"), &mut |_, _| {}).unwrap_err();
    assert!(nothing.to_string().ends_with("nothing: no such folder"));
}

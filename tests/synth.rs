//! Synthetic snapshots as other programs see them.

use std::os::unix::fs::MetadataExt;
use std::process::ExitCode;

use clap::Parser as _;
use k3_formats::config::{Attention, ModelConfig};
use k3_formats::container::Container;
use k3_formats::container::manifest::{FileRecord, Manifest};
use k3_formats::mxfp4;
use k3_formats::quant::MatrixFormat;
use k3_formats::tensor_name::head_name;
use safetensors::{Dtype, SafeTensors};

use crate::support::TinyK3;

#[test]
fn the_reference_reader_opens_every_shard() {
    let tiny = TinyK3::with_dims(r#"{"layers": 3, "full_attn": [2], "vt_layers": 1}"#, 5);
    let mut tensors = 0;
    for shard in 1..=6 {
        let name = format!("model-{shard:05}-of-000006.safetensors");
        let bytes = fs_err::read(tiny.snapshot().join(name)).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        tensors += file.len();
        let numbers = file.iter().filter(|(_, t)| t.dtype() == Dtype::BF16);
        for value in numbers.flat_map(|(_, t)| t.data().chunks_exact(2)) {
            let value = half::bf16::from_le_bytes([value[0], value[1]]).to_f32();
            assert!(value.abs() < 16.0, "{value}");
        }
    }
    // 23 tensors with a dense FFN, 22 and 28 beside the experts, 5 global, 3 + 9 vision.
    assert_eq!(tensors, 23 + (22 + 72) + (28 + 72) + 5 + 3 + 9);
}

#[test]
fn experts_have_the_statistics_of_real_ones() {
    let tiny = TinyK3::new(6);
    let bytes = fs_err::read(tiny.snapshot().join("model-00002-of-000010.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    for (expert, matrix) in [(0, "w1"), (11, "w2"), (7, "w3")] {
        let name = |part: &str| {
            format!(
                "language_model.model.layers.1.block_sparse_moe.experts.{expert}.{matrix}.{part}"
            )
        };
        let packed = file.tensor(&name("weight_packed")).unwrap();
        let scales = file.tensor(&name("weight_scale")).unwrap();
        let mut values = vec![0.0; 2 * packed.data().len()];
        mxfp4::decode_row(packed.data(), scales.data(), &mut values);
        for (group, &scale) in values.chunks(mxfp4::GROUP).zip(scales.data()) {
            let largest = group.iter().fold(0.0, |m: f32, v| m.max(v.abs())) / mxfp4::scale(scale);
            assert!(largest > 3.0 && largest <= 6.0, "{matrix}: {largest}");
        }
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        assert!(mean.abs() < 0.01, "{matrix}: {mean}");
    }
}

#[test]
fn the_command_writes_what_the_options_say() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("s");
    let dims = dir.path().join("dims.json");
    fs_err::write(&dims, r#"{"hidden": 128, "full_attn": [1]}"#).unwrap();
    let cli = |more: &[&str]| {
        let fixed = ["k3-prep", "synth", out.to_str().unwrap(), "--sparse"];
        k3_prep::Cli::try_parse_from(fixed.iter().chain(more)).unwrap()
    };
    let options = ["--layers", "2", "--experts", "4", "--dims", dims.to_str().unwrap()];
    assert_eq!(k3_prep::run(cli(&options)), ExitCode::SUCCESS);
    let config = ModelConfig::read(&out.join("config.json")).unwrap();
    assert_eq!((config.layers(), config.moe.experts, config.hidden), (2, 4, 128));
    assert_eq!(config.attention, [Attention::Mla, Attention::Kda]);
    // The folder is in use now.
    assert_eq!(k3_prep::run(cli(&[])), ExitCode::from(2));
}

#[test]
fn a_sparse_container_is_one_in_everything_but_its_values() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("c");
    let cli = |args: &[&str]| k3_prep::run(k3_prep::Cli::try_parse_from(args).unwrap());
    let path = out.to_str().unwrap();
    let synth = ["k3-prep", "synth", "--container", "--preset", "tiny", "--sparse", path];
    assert_eq!(cli(&synth), ExitCode::SUCCESS);
    assert_eq!(cli(&["k3-prep", "verify", path]), ExitCode::SUCCESS);
    let container = Container::open(&out).unwrap();
    let head = container.matrix(&head_name()).unwrap();
    assert_eq!((head.rows, head.cols, head.format), (1024, 192, MatrixFormat::Int8Row));
    assert!(head.codes.iter().all(|&code| code == 0));
    assert_eq!(container.experts.entry(6, 11).run().unwrap().0, 6);
    let on_disk = |name: &str| fs_err::metadata(out.join(name)).unwrap().blocks() * 512;
    let dense = container.manifest.files.iter().filter(|f| !f.tensors.is_empty());
    let (size, room) = dense.fold((0, 0), |sum, f| (sum.0 + f.size, sum.1 + on_disk(&f.name)));
    assert!(room * 4 < size, "{room} of {size} bytes are on disk");
    // A conversion of the same snapshot has the same names, sizes and formats.
    let real = dir.path().join("real");
    let snapshot = dir.path().join("c.snapshot");
    let convert = ["k3-prep", "convert", snapshot.to_str().unwrap(), real.to_str().unwrap()];
    assert_eq!(cli(&convert), ExitCode::SUCCESS);
    let described = |manifest: &Manifest| {
        let tensors = |f: &FileRecord| {
            f.tensors.iter().map(|t| (t.name.clone(), t.format.clone())).collect::<Vec<_>>()
        };
        let file = |f: &FileRecord| (f.name.clone(), f.size, tensors(f));
        manifest.files.iter().map(file).collect::<Vec<_>>()
    };
    let real = Container::open(&real).unwrap();
    assert_eq!(described(&container.manifest), described(&real.manifest));
    assert_eq!(container.manifest.shards, real.manifest.shards);
}

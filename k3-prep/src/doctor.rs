//! What a support person would ask first: is it all there, what is this machine, how fast is
//! its drive, and what does that come to.

use std::path::{Path, PathBuf};

use k3_formats::config::ModelConfig;
use k3_formats::container::Container;
use k3_formats::container::manifest::MANIFEST_FILE;
use k3_formats::digest::{Digest, Hasher};
use k3_formats::recipe::Recipe;
use k3_formats::snapshot::Snapshot;
use k3_formats::{Error, Result};
use rayon::ThreadPool;
use rayon::prelude::*;
use serde::Serialize;

use crate::block_reader::{BlockReader, Pages};
use crate::footprint::Footprint;
use crate::plan::ConversionPlan;
use crate::problems::Lines;
use crate::size::Bytes;
use crate::verify::shards;

mod drive;
mod machine;

pub use drive::{Drive, ReadSpeed};
pub use machine::{Cpu, Memory};

/// Most bytes of a container that are hashed.
const SAMPLE: u64 = 1 << 30;

/// Everything that was found out.
#[derive(Debug, Serialize)]
pub struct Diagnosis {
    /// Whether nothing stands in the way.
    pub ok: bool,
    /// Name and version of this program.
    pub tool: &'static str,
    /// What made the container, if it is one.
    pub made_by: Option<String>,
    /// The processor.
    pub cpu: Cpu,
    /// Memory and its limits.
    pub memory: Memory,
    /// The file systems that the weights are on, and how fast experts come from them.
    pub drives: Vec<Drive>,
    /// Sizes that follow from the config.
    pub footprint: Footprint,
    /// Bytes of dense weights, of a container.
    pub dense_bytes: Option<u64>,
    /// Shards that are what they should be.
    pub shards: usize,
    /// Shards that there should be.
    pub all_shards: usize,
    /// Files of the container whose digest was compared, and their bytes.
    pub hashed: (usize, u64),
    /// What is wrong.
    pub problems: Vec<String>,
    /// What all of it means, in words.
    pub verdict: Vec<String>,
}

/// What was looked at, apart from the machine.
struct Patient {
    config: ModelConfig,
    made_by: Option<String>,
    dense_bytes: Option<u64>,
    /// Shards that can be read.
    shards: Vec<PathBuf>,
    all_shards: usize,
    hashed: (usize, u64),
    problems: Lines,
}

/// Examines a snapshot, or a container with its shards in `snapshots` (where the manifest
/// says, if there are none). Reads for some seconds, and writes nothing.
///
/// # Errors
/// There is neither a snapshot nor a container, or not even its config can be read.
pub fn examine(path: &Path, snapshots: &[PathBuf], pool: &ThreadPool) -> Result<Diagnosis> {
    let patient = if path.join(MANIFEST_FILE).is_file() {
        container(path, snapshots, pool)?
    } else {
        snapshot(path, pool)?
    };
    let footprint = Footprint::of(&patient.config);
    let drives = drive::measure(&patient.shards, footprint.expert_bytes);
    let mut diagnosis = Diagnosis {
        ok: false,
        tool: crate::TOOL,
        made_by: patient.made_by,
        cpu: Cpu::of_this_machine(),
        memory: Memory::of_this_machine(),
        drives,
        footprint,
        dense_bytes: patient.dense_bytes,
        shards: patient.shards.len(),
        all_shards: patient.all_shards,
        hashed: patient.hashed,
        problems: patient.problems.into_lines(),
        verdict: Vec::new(),
    };
    diagnosis.ok = diagnosis.problems.is_empty();
    diagnosis.verdict = verdict(&diagnosis);
    Ok(diagnosis)
}

fn snapshot(path: &Path, pool: &ThreadPool) -> Result<Patient> {
    let snapshot = Snapshot::open(path)?;
    let mut problems = Lines::default();
    // Planning a conversion checks every header, tensor and small file.
    if let Err(error) = pool.install(|| ConversionPlan::new(&snapshot, &Recipe::default())) {
        problems.add(|| error.to_string());
    }
    let whole = |&shard: &usize| snapshot.header(shard).is_ok();
    let all = snapshot.shards.len();
    let there: Vec<usize> = pool.install(|| (0..all).into_par_iter().filter(whole).collect());
    Ok(Patient {
        shards: there.iter().map(|&n| snapshot.shards[n].path.clone()).collect(),
        all_shards: all,
        config: snapshot.config,
        made_by: None,
        dense_bytes: None,
        hashed: (0, 0),
        problems,
    })
}

fn container(path: &Path, snapshots: &[PathBuf], pool: &ThreadPool) -> Result<Patient> {
    let container = Container::open(path)?;
    let manifest = &container.manifest;
    let mut problems = Lines::default();
    let home = [PathBuf::from(&manifest.snapshot)];
    let snapshots = if snapshots.is_empty() { &home[..] } else { snapshots };
    let mut there = Vec::new();
    let check = |record| shards::check_shard(record, snapshots);
    let checked: Vec<_> = pool.install(|| manifest.shards.par_iter().map(check).collect());
    for (record, outcome) in manifest.shards.iter().zip(checked) {
        match outcome {
            Ok(_) => there.extend(shards::find(&record.name, record.size, snapshots)),
            Err(error) => problems.add(|| error.to_string()),
        }
    }
    let mut hashed = (0, 0);
    // The small files, and dense ones as far as the sample goes.
    let mut files: Vec<_> = manifest.files.iter().collect();
    files.sort_by_key(|file| file.size);
    for file in files {
        if hashed.1 + file.size > SAMPLE {
            break;
        }
        hashed = (hashed.0 + 1, hashed.1 + file.size);
        let path = container.dir.join(&file.name);
        match digest(&path) {
            Ok(found) if found == file.sha256 => {}
            Ok(found) => problems.add(|| {
                let problem = format!("expected SHA-256 {}, found {found}", file.sha256);
                Error::mismatch(problem).in_file(&path).to_string()
            }),
            Err(error) => problems.add(|| error.to_string()),
        }
    }
    Ok(Patient {
        made_by: Some(manifest.tool.clone()),
        dense_bytes: Some(container.dense_bytes()),
        shards: there,
        all_shards: manifest.shards.len(),
        config: container.config,
        hashed,
        problems,
    })
}

fn digest(path: &Path) -> Result<Digest> {
    let mut hasher = Hasher::new();
    BlockReader::open(path, Pages::Keep)?.for_each_block(|_, block| hasher.update(block))?;
    Ok(hasher.finish())
}

fn verdict(of: &Diagnosis) -> Vec<String> {
    let mut lines = Vec::new();
    lines.push(match (of.ok, of.made_by.is_some()) {
        (true, true) => {
            "all that was checked is as it should be; `k3-prep verify` hashes the rest".to_owned()
        }
        (true, false) => "the snapshot is complete and can be converted".to_owned(),
        (false, _) => "it cannot be used as it is: see the problems above".to_owned(),
    });
    let spare = of.memory.spare();
    if let Some(dense) = of.dense_bytes {
        let (dense, free) = (Bytes(dense), Bytes(spare));
        lines.push(if spare > of.dense_bytes.unwrap_or(0) {
            format!("the dense weights ({dense}) fit into the memory that is free ({free})")
        } else {
            format!(
                "the dense weights ({dense}) do not fit into the memory that is free ({free}): \
                 k3-run streams them, which adds to what each token reads"
            )
        });
    }
    let speeds = of.drives.iter().map(|drive| drive.best().map(|read| read.bytes_per_second));
    let token = of.footprint.token_bytes;
    match speeds.collect::<Option<Vec<f64>>>().and_then(|s| s.into_iter().reduce(f64::min)) {
        Some(speed) => lines.push(format!(
            "a token chooses {} of experts: {:.1} s at {}/s if none is in memory; what the expert \
             cache holds is not read, and computing is not counted (`k3-run bench` measures it)",
            Bytes(token),
            token as f64 / speed,
            Bytes(speed as u64)
        )),
        None => lines.push("the drive could not be measured: no shard with data".to_owned()),
    }
    for drive in of.drives.iter().filter(|drive| !drive.direct_io) {
        lines.push(format!(
            "{}: no direct I/O on this file system, so experts go through the page cache; a local \
             ext4 or xfs drive is better",
            drive.dir.display()
        ));
    }
    lines
}

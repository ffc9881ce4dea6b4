//! `k3-prep plan`

use std::io::{self, Write};
use std::time::Duration;

use anyhow::Result;
use k3_formats::snapshot::Snapshot;
use k3_formats::tensor_name::TensorClass;
use serde::Serialize;

use crate::Outcome;
use crate::cli::PlanArgs;
use crate::footprint::Footprint;
use crate::output;
use crate::plan::{ConversionPlan, PlanSummary};
use crate::size::{Bytes, Span, Thousands};
use crate::speed::Speed;
use crate::threads;

/// Everything that `plan` knows.
#[derive(Serialize)]
struct Report {
    plan: PlanSummary,
    files: Vec<File>,
    speed: Option<Speed>,
    memory: Memory,
    footprint: Footprint,
}

#[derive(Serialize)]
struct File {
    name: String,
    bytes: u64,
    tensors: usize,
}

/// Bytes that k3-run keeps in memory, apart from its own code and buffers.
#[derive(Serialize)]
struct Memory {
    /// Dense matrices and vectors, all but the embedding.
    dense: u64,
    /// KDA and convolution states.
    state: u64,
    /// Tokens of context.
    context: u64,
    /// MLA cache for that context, f32.
    cache: u64,
    /// Experts that one token chooses: a smaller cache keeps little from token to token.
    token_experts: u64,
}

impl Memory {
    fn new(plan: &PlanSummary, footprint: &Footprint, context: u64) -> Self {
        let embedding = TensorClass::Embedding.name();
        let dense = plan.classes.iter().filter(|c| c.class != embedding);
        Self {
            dense: dense.map(|c| c.stored_bytes).sum(),
            state: footprint.kda_state_bytes + footprint.conv_state_bytes,
            context,
            cache: context.saturating_mul(footprint.cache_bytes_per_token),
            token_experts: footprint.token_bytes,
        }
    }
}

pub(super) fn run(args: &PlanArgs) -> Result<Outcome> {
    let pool = threads::pool(args.jobs)?;
    let snapshot = Snapshot::open(&args.snapshot)?;
    let (recipe, calibration) = args.recipe.recipe()?;
    let plan = || ConversionPlan::calibrated(&snapshot, &recipe, calibration.as_ref());
    let plan = pool.install(plan)?;
    plan.warnings.iter().for_each(output::warn);
    let dense = plan.dense.iter().map(|f| File {
        name: f.name.clone(),
        bytes: f.layout.file_size(),
        tensors: f.layout.spans.len(),
    });
    let small = plan.small.iter().map(|f| File {
        name: f.name.to_owned(),
        bytes: f.bytes.len() as u64,
        tensors: 0,
    });
    let summary = plan.summary();
    let footprint = Footprint::of(&plan.config);
    let report = Report {
        files: dense.chain(small).collect(),
        speed: if args.no_measure { None } else { Some(Speed::measure(&plan, &pool)?) },
        memory: Memory::new(&summary, &footprint, args.context),
        plan: summary,
        footprint,
    };
    if args.json {
        output::json(&report)?;
    } else {
        output::result(|out| print(&report, out))?;
    }
    Ok(Outcome::Good)
}

fn print(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for file in &report.files {
        writeln!(out, "{:<30} {:>16} {:>5}", file.name, Thousands(file.bytes), file.tensors)?;
    }
    writeln!(out, "\n{}\n", report.plan)?;
    if let Some(speed) = &report.speed {
        print_time(&report.plan, speed, out)?;
    }
    let memory = &report.memory;
    writeln!(out, "k3-run will need in memory")?;
    let context = format!("MLA cache for {} tokens, f32", Thousands(memory.context));
    for (what, bytes) in [
        ("dense weights, all but the embedding", memory.dense),
        ("KDA and convolution state", memory.state),
        (context.as_str(), memory.cache),
        ("experts of one token: an expert cache below this keeps little", memory.token_experts),
    ] {
        writeln!(out, "  {what:<62} {:>20}  {}", Thousands(bytes), Bytes(bytes))?;
    }
    writeln!(
        out,
        "  the embedding stays on disk: {} bytes per token",
        Thousands(report.footprint.embedding_row_bytes)
    )
}

fn print_time(plan: &PlanSummary, speed: &Speed, out: &mut dyn Write) -> io::Result<()> {
    let at = |rate: f64| Span(Duration::from_secs_f64(plan.source_bytes as f64 / rate.max(1.0)));
    match speed.read {
        Some(rate) => writeln!(
            out,
            "reading the dense tensors: {} at {}/s, measured on {}",
            at(rate),
            Bytes(rate as u64),
            Bytes(speed.bytes_read)
        )?,
        None => writeln!(out, "reading: not measured, the shards are holes")?,
    }
    writeln!(
        out,
        "quantizing and hashing meanwhile: {} at {}/s, measured\n",
        at(speed.compute),
        Bytes(speed.compute as u64)
    )
}

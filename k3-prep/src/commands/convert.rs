//! `k3-prep convert`

use std::time::Instant;

use anyhow::Result;
use k3_formats::container::manifest::Manifest;
use k3_formats::snapshot::Snapshot;
use serde::Serialize;

use crate::Outcome;
use crate::cli::ConvertArgs;
use crate::conversion::Conversion;
use crate::folder::OutputFolder;
use crate::output;
use crate::plan::{ConversionPlan, PlanSummary};
use crate::size::{Bytes, Span};
use crate::threads;

#[derive(Serialize)]
struct Report<'a> {
    out: String,
    plan: &'a PlanSummary,
    dry_run: bool,
    files: usize,
    bytes: u64,
    seconds: f64,
}

pub(super) fn run(args: &ConvertArgs) -> Result<Outcome> {
    let start = Instant::now();
    let pool = threads::pool(args.jobs)?;
    let snapshot = Snapshot::open(&args.snapshot)?;
    let plan = pool.install(|| ConversionPlan::new(&snapshot, &args.recipe.recipe()))?;
    let summary = plan.summary();
    OutputFolder::check(&args.out, &plan.snapshot, args.force)?;
    if !args.json && args.dry_run {
        output::result(|out| writeln!(out, "{summary}"))?;
    } else if !args.json {
        output::say(&summary);
    }
    for warning in &plan.warnings {
        output::warn(warning);
    }
    let mut on_file = |_: &_| Ok(());
    let manifest = if args.dry_run {
        None
    } else {
        let conversion = Conversion { force: args.force, pool: &pool, on_file: &mut on_file };
        Some(conversion.run(&plan, &args.out)?)
    };
    report(args, &summary, manifest.as_ref(), start)?;
    Ok(Outcome::Good)
}

fn report(
    args: &ConvertArgs,
    summary: &PlanSummary,
    manifest: Option<&Manifest>,
    start: Instant,
) -> Result<()> {
    let out = args.out.display();
    let files = manifest.map_or(&[][..], |m| &m.files);
    let bytes = files.iter().map(|f| f.size).sum();
    if args.json {
        return output::json(&Report {
            out: out.to_string(),
            plan: summary,
            dry_run: args.dry_run,
            files: files.len(),
            bytes,
            seconds: start.elapsed().as_secs_f64(),
        });
    }
    if args.dry_run {
        output::say("nothing was written");
        return Ok(());
    }
    let (count, took) = (files.len() + 2, Span(start.elapsed()));
    output::result(|w| {
        writeln!(w, "{out}: {} in {count} files, complete after {took}", Bytes(bytes))
    })
}

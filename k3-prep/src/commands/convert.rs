//! `k3-prep convert`

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use k3_formats::snapshot::Snapshot;
use serde::Serialize;

use crate::Outcome;
use crate::cli::ConvertArgs;
use crate::conversion::{self, Conversion, Converted};
use crate::expert_sums::ExpertHashing;
use crate::folder::OutputFolder;
use crate::follow::Follow;
use crate::interrupt;
use crate::output;
use crate::pack::{Packed, Packing};
use crate::part::{Part, PartDone, ShardRange};
use crate::plan::{ConversionPlan, PlanSummary};
use crate::progress::Talk;
use crate::size::{Bytes, Span};
use crate::threads;

/// Time between two looks at a download.
const LOOK_EVERY: Duration = Duration::from_secs(5);

#[derive(Serialize)]
struct PartReport {
    out: String,
    shards: String,
    files: usize,
    converted: usize,
    seconds: f64,
}

#[derive(Serialize)]
struct Report<'a> {
    out: String,
    plan: &'a PlanSummary,
    dry_run: bool,
    files: usize,
    bytes: u64,
    banks: Option<usize>,
    bank_bytes: Option<u64>,
    seconds: f64,
}

/// Where experts are copied to, if they are.
fn pack_folder(args: &ConvertArgs) -> Result<Option<&Path>> {
    match &args.experts[..] {
        [] => Ok(None),
        [what, dir] if what.as_os_str() == "pack" => Ok(Some(dir)),
        [what, ..] => bail!(
            "--experts {}: expected `pack` (hint: --experts pack DIR copies the experts to DIR)",
            what.display()
        ),
    }
}

pub(super) fn run(args: &ConvertArgs, talk: Talk) -> Result<Outcome> {
    let start = Instant::now();
    let pack_folder = pack_folder(args)?.filter(|_| !args.dry_run);
    if !args.dry_run {
        interrupt::explain("what was converted is kept; run the same command again to go on")?;
    }
    let pool = threads::pool(args.jobs)?;
    let (recipe, calibration) = args.recipe.recipe()?;
    let snapshot = if args.follow {
        let follow = Follow {
            snapshot: &args.snapshot,
            out: &args.out,
            recipe: &recipe,
            calibration: calibration.as_ref(),
            allow_nonfinite: args.allow_nonfinite,
            talk,
            pool: &pool,
            every: LOOK_EVERY,
        };
        follow.run()?
    } else {
        Snapshot::open(&args.snapshot)?
    };
    let plan = || ConversionPlan::calibrated(&snapshot, &recipe, calibration.as_ref());
    let mut plan = pool.install(plan)?;
    let folder = OutputFolder::check(&args.out, &plan.snapshot, args.force)?;
    let pack = |plan: &ConversionPlan| {
        let copy = |dir| {
            let allow_nonfinite = args.allow_nonfinite;
            Packing { plan, dir, allow_nonfinite, pool: &pool, talk, on_bank: &|_| Ok(()) }.run()
        };
        pack_folder.map(copy).transpose()
    };
    let mut packed = None;
    if args.hash_experts && !args.dry_run {
        // The table needs what only reading all experts tells; the copy tells it too, and a
        // container that is there already knows it.
        if folder.existing()?.is_none() {
            packed = pack(&plan)?;
        }
        match &packed {
            Some(packed) => plan.set_checksums(&packed.checksums()),
            None => {
                let how = ExpertHashing {
                    out: &args.out,
                    force: args.force,
                    allow_nonfinite: args.allow_nonfinite,
                    talk,
                    pool: &pool,
                };
                plan.hash_experts(how)?.iter().for_each(output::warn);
            }
        }
    }
    let summary = plan.summary();
    conversion::existing(&plan, &folder)?;
    if !args.json && args.dry_run {
        output::result(|out| writeln!(out, "{summary}"))?;
    } else if !args.json && talk == Talk::Progress {
        output::say(&summary);
    }
    for warning in &plan.warnings {
        output::warn(warning);
    }
    let mut on_file = |_: &_| Ok(());
    let converted = if args.dry_run {
        None
    } else {
        let conversion = Conversion {
            force: args.force,
            allow_nonfinite: args.allow_nonfinite,
            talk,
            pool: &pool,
            on_file: &mut on_file,
        };
        if let Some(range) = args.shards {
            let done = conversion.part(&plan, &args.out, Part::Shards(range))?;
            report_part(args, range, done, start)?;
            return Ok(Outcome::Good);
        }
        Some(match args.finish {
            true => conversion.finish(&plan, &args.out)?,
            false => conversion.run(&plan, &args.out)?,
        })
    };
    if packed.is_none() {
        packed = pack(&plan)?;
    }
    report(args, &summary, converted.as_ref(), packed.as_ref(), start)?;
    Ok(Outcome::Good)
}

fn report_part(
    args: &ConvertArgs,
    range: ShardRange,
    done: PartDone,
    start: Instant,
) -> Result<()> {
    let PartDone { files, converted, complete } = done;
    let out = args.out.display();
    if args.json {
        return output::json(&PartReport {
            out: out.to_string(),
            shards: range.to_string(),
            files,
            converted,
            seconds: start.elapsed().as_secs_f64(),
        });
    }
    if complete {
        return output::result(|w| writeln!(w, "{out}: was complete already"));
    }
    let span = Span(start.elapsed());
    output::result(|w| {
        writeln!(w, "{out}: {files} dense files of shards {range}, {converted} now, after {span}")
    })
}

fn report(
    args: &ConvertArgs,
    summary: &PlanSummary,
    converted: Option<&Converted>,
    packed: Option<&Packed>,
    start: Instant,
) -> Result<()> {
    let out = args.out.display();
    let files = converted.map_or(&[][..], |c| &c.manifest.files);
    let bytes = files.iter().map(|f| f.size).sum();
    if args.json {
        return output::json(&Report {
            out: out.to_string(),
            plan: summary,
            dry_run: args.dry_run,
            files: files.len(),
            bytes,
            banks: packed.map(|packed| packed.banks.len()),
            bank_bytes: packed.map(Packed::bytes),
            seconds: start.elapsed().as_secs_f64(),
        });
    }
    if args.dry_run {
        output::say("nothing was written");
        return Ok(());
    }
    let (count, bytes) = (files.len() + 2, Bytes(bytes));
    let state = match converted {
        Some(converted) if converted.before => "was complete already".to_owned(),
        _ => format!("complete after {}", Span(start.elapsed())),
    };
    output::result(|w| writeln!(w, "{out}: {bytes} in {count} files, {state}"))?;
    if let (Some(packed), [_, dir]) = (packed, &args.experts[..]) {
        let (bytes, banks, before) = (Bytes(packed.bytes()), packed.banks.len(), packed.before);
        let dir = dir.display();
        output::result(|w| {
            writeln!(w, "{dir}: {bytes} of experts in {banks} banks, {before} of them before")
        })?;
    }
    Ok(())
}

//! `k3-prep verify`

use std::io::{self, Write};

use anyhow::Result;
use k3_formats::calibration::Calibration;

use crate::Outcome;
use crate::cli::VerifyArgs;
use crate::output;
use crate::progress::Talk;
use crate::size::{Bytes, Thousands};
use crate::threads;
use crate::verify::{Report, Sample, Verification};

pub(super) fn run(args: &VerifyArgs, talk: Talk) -> Result<Outcome> {
    let pool = threads::pool(args.jobs)?;
    let sample = Sample { rows: args.rows as usize, seed: args.seed };
    let calibration = args.calibration.as_deref().map(Calibration::read).transpose()?;
    let verification = Verification {
        dir: &args.container,
        snapshots: &args.snapshot,
        source: args.source,
        experts: args.experts,
        rederive: args.rederive.then_some(sample),
        calibration: calibration.as_ref(),
        talk,
        pool: &pool,
    };
    let report = verification.run()?;
    if args.json {
        output::json(&report)?;
    } else {
        output::result(|out| print(&report, out))?;
    }
    if report.ok {
        return Ok(Outcome::Good);
    }
    output::say("hint: what differs in the container is repaired by converting again (--force)");
    Ok(Outcome::Different)
}

fn print(report: &Report, out: &mut dyn Write) -> io::Result<()> {
    for difference in &report.differences {
        writeln!(out, "differs: {difference}")?;
    }
    for note in &report.notes {
        writeln!(out, "note: {note}")?;
    }
    writeln!(
        out,
        "container: {} files, {}, {} tensors hashed",
        report.files,
        Bytes(report.bytes),
        Thousands(report.tensors as u64)
    )?;
    if let Some(banks) = &report.banks {
        write!(out, "banks: {} of {} have the size they should have", banks.whole, banks.all)?;
        match banks.bytes {
            0 => writeln!(out)?,
            bytes => writeln!(out, ", {} the bytes, {} hashed", banks.equal, Bytes(bytes))?,
        }
    }
    if report.banks.is_none() || report.shards > 0 {
        writeln!(
            out,
            "shards: {} of {} have the size and the header they had",
            report.shards, report.all_shards
        )?;
    }
    if let Some(source) = &report.source {
        let by: Vec<_> = source.by.iter().map(|(from, n)| format!("{n} by {from}")).collect();
        let by = if by.is_empty() { String::new() } else { format!(" ({})", by.join(", ")) };
        writeln!(
            out,
            "source: {} of {} shards have the SHA-256 their publisher gave{by}, {} hashed",
            source.equal,
            report.all_shards,
            Bytes(source.bytes)
        )?;
    }
    if let Some(experts) = &report.experts {
        writeln!(
            out,
            "experts: {} read, {} equal to their checksum",
            Thousands(experts.read as u64),
            Thousands(experts.equal as u64)
        )?;
    }
    if let Some(rederived) = &report.rederived {
        writeln!(
            out,
            "rederived: {} rows of {} tensors",
            Thousands(rederived.rows),
            Thousands(rederived.tensors as u64)
        )?;
    }
    match report.differences.len() {
        0 => writeln!(out, "no difference"),
        n => writeln!(out, "{n} differences"),
    }
}

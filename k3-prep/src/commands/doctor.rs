//! `k3-prep doctor`

use std::io::{self, Write};

use anyhow::Result;

use crate::Outcome;
use crate::cli::DoctorArgs;
use crate::doctor::{Diagnosis, examine};
use crate::output;
use crate::size::Bytes;
use crate::threads;

pub(super) fn run(args: &DoctorArgs) -> Result<Outcome> {
    let pool = threads::pool(None)?;
    let diagnosis = examine(&args.path, &args.snapshot, &pool)?;
    if args.json {
        output::json(&diagnosis)?;
    } else {
        output::result(|out| print(&diagnosis, out))?;
    }
    Ok(if diagnosis.ok { Outcome::Good } else { Outcome::Different })
}

fn print(found: &Diagnosis, out: &mut dyn Write) -> io::Result<()> {
    write!(out, "program     {}", found.tool)?;
    match &found.made_by {
        Some(tool) => writeln!(out, "; the container was made by {tool}")?,
        None => writeln!(out)?,
    }
    let cpu = &found.cpu;
    let features = if cpu.features.is_empty() { "none" } else { &cpu.features.join(" ") };
    writeln!(out, "processor   {}, {} threads, features used: {features}", cpu.arch, cpu.threads)?;
    let memory = &found.memory;
    write!(out, "memory      {} free of {}", Bytes(memory.available), Bytes(memory.total))?;
    match memory.cgroup {
        Some((limit, taken)) => {
            writeln!(out, "; the cgroup allows {}, {} taken", Bytes(limit), Bytes(taken))?;
        }
        None => writeln!(out, "; no limit of a cgroup")?,
    }
    for drive in &found.drives {
        let direct = if drive.direct_io { "direct I/O works" } else { "no direct I/O" };
        write!(out, "drive       {}: {}, {direct}", drive.dir.display(), drive.file_system)?;
        match drive.free {
            Some(free) => writeln!(out, ", {} free", Bytes(free))?,
            None => writeln!(out)?,
        }
        for read in &drive.reads {
            writeln!(
                out,
                "            {} in flight: {}/s, {:.2} ms for {}",
                read.in_flight,
                Bytes(read.bytes_per_second as u64),
                read.milliseconds,
                Bytes(found.footprint.expert_bytes)
            )?;
        }
    }
    writeln!(out, "shards      {} of {} are whole", found.shards, found.all_shards)?;
    if found.made_by.is_some() {
        let (files, bytes) = found.hashed;
        writeln!(out, "digests     {files} files compared, {}", Bytes(bytes))?;
    }
    for problem in &found.problems {
        writeln!(out, "problem     {problem}")?;
    }
    found.verdict.iter().try_for_each(|line| writeln!(out, "verdict     {line}"))
}

//! Where memory would go, and what a token would cost, before anything is taken.

use std::io::Write;
use std::path::Path;

use k3_formats::container::Container;
use serde_json::json;

use crate::cli::{Act8, PlanArgs};
use crate::memory::{MemoryPlan, speed};
use crate::open;
use crate::parallel::{Pool, default_threads};

/// Measured speeds, in bytes per second.
struct Speeds {
    disk: Option<f64>,
    memory: f64,
}

impl Speeds {
    fn measure(container: &Container, threads: usize) -> anyhow::Result<Self> {
        let largest = container.dense_files().iter().max_by_key(|file| file.map.len());
        let disk = largest.and_then(|file| speed::disk(&file.path));
        Ok(Self { disk, memory: speed::memory(&Pool::new(threads)?) })
    }

    /// Seconds of reading and of computing for one token.
    fn seconds(&self, plan: &MemoryPlan) -> (Option<f64>, f64) {
        let per_token = &plan.per_token;
        let read = (per_token.dense_read + per_token.experts_read) as f64;
        (self.disk.map(|disk| read / disk), per_token.computed as f64 / self.memory)
    }
}

pub(super) fn run(args: &PlanArgs) -> anyhow::Result<()> {
    let container = Container::open(&args.engine.container)?;
    let plan = open::memory_plan(&container, &args.engine, Act8::Experts)?;
    let threads = args.engine.threads.unwrap_or_else(default_threads);
    let speeds = Speeds::measure(&container, threads)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        let facts = facts(&container.dir, &plan, &speeds);
        writeln!(out, "{facts:#}")?;
        return Ok(());
    }
    let gb = |bytes: u64| bytes as f64 / 1e9;
    for part in &plan.parts {
        writeln!(out, "{:26} {:>12.1} MB", part.name, part.bytes as f64 / 1e6)?;
    }
    writeln!(out, "{:26} {:>12.1} MB", "at most", plan.total() as f64 / 1e6)?;
    writeln!(out, "{:26} {:>12.1} MB", "budget", plan.ram as f64 / 1e6)?;
    writeln!(out)?;
    writeln!(out, "memory       {}", plan.summary())?;
    let per_token = &plan.per_token;
    writeln!(
        out,
        "a token      reads {:.2} GB of dense weights and about {:.2} GB of experts ({:.2} GB \
         used, {:.0} % expected in the cache)",
        gb(per_token.dense_read),
        gb(per_token.experts_read),
        gb(per_token.experts_used),
        100.0 - 100.0 * per_token.experts_read as f64 / per_token.experts_used.max(1) as f64
    )?;
    let (read, compute) = speeds.seconds(&plan);
    match (speeds.disk, read) {
        (Some(disk), Some(read)) => {
            writeln!(out, "disk         {:.2} GB/s measured: {read:.2} s a token", disk / 1e9)?
        }
        _ => writeln!(out, "disk         direct reads do not work here: speed not known")?,
    }
    writeln!(out, "memory read  {:.2} GB/s measured: {compute:.2} s a token", speeds.memory / 1e9)?;
    let bound = read.unwrap_or(0.0).max(compute);
    writeln!(out, "at best      {bound:.2} s a token, where reading and computing overlap")?;
    Ok(())
}

fn facts(container: &Path, plan: &MemoryPlan, speeds: &Speeds) -> serde_json::Value {
    let (read, compute) = speeds.seconds(plan);
    json!({
        "container": container,
        "budget": plan.ram,
        "total": plan.total(),
        "mode": plan.mode,
        "parts": plan.parts,
        "dense_bytes": plan.dense_bytes,
        "dense_kept": plan.dense_kept,
        "expert_slots": plan.slots,
        "expert_cache_bytes": plan.cache_bytes,
        "per_token": plan.per_token,
        "disk_bytes_per_second": speeds.disk,
        "memory_bytes_per_second": speeds.memory,
        "seconds_per_token": {"read": read, "compute": compute},
    })
}

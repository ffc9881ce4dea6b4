//! The processor, the memory, and what limits it.

use serde::Serialize;
use sysinfo::{MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System};

/// The processor.
#[derive(Debug, Serialize)]
pub struct Cpu {
    /// Architecture this program was built for.
    pub arch: &'static str,
    /// Threads that this process may run at once, quotas of cgroups included.
    pub threads: usize,
    /// Those of its features that kernels use.
    pub features: Vec<&'static str>,
}

impl Cpu {
    pub(super) fn of_this_machine() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Self { arch: std::env::consts::ARCH, threads, features: features() }
    }
}

#[cfg(target_arch = "x86_64")]
fn features() -> Vec<&'static str> {
    use std::arch::is_x86_feature_detected as has;
    [
        ("avx2", has!("avx2")),
        ("fma", has!("fma")),
        ("f16c", has!("f16c")),
        ("avxvnni", has!("avxvnni")),
        ("avx512f", has!("avx512f")),
        ("avx512bw", has!("avx512bw")),
        ("avx512vbmi", has!("avx512vbmi")),
        ("avx512vnni", has!("avx512vnni")),
        ("avx512bf16", has!("avx512bf16")),
    ]
    .into_iter()
    .filter_map(|(name, there)| there.then_some(name))
    .collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn features() -> Vec<&'static str> {
    Vec::new()
}

/// Memory in bytes.
#[derive(Debug, Serialize)]
pub struct Memory {
    /// Of the machine.
    pub total: u64,
    /// That can be taken without pushing anything out.
    pub available: u64,
    /// The limit of this process's cgroup or one above it, and how much of it is taken.
    pub cgroup: Option<(u64, u64)>,
}

impl Memory {
    pub(super) fn of_this_machine() -> Self {
        let Ok(mut system) = System::new() else {
            return Self { total: 0, available: 0, cgroup: None };
        };
        system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
        let cgroup = sysinfo::get_current_pid().ok().and_then(|pid| {
            let only = ProcessesToUpdate::Some(&[pid]);
            system.refresh_processes_specifics(only, false, ProcessRefreshKind::nothing());
            let limits = system.process(pid)?.cgroup_limits()?;
            // Without a limit, it is the machine's memory.
            (limits.total_memory < system.total_memory())
                .then_some((limits.total_memory, limits.rss))
        });
        Self { total: system.total_memory(), available: system.available_memory(), cgroup }
    }

    /// What this process can still take.
    pub fn spare(&self) -> u64 {
        let cgroup = self.cgroup.map(|(limit, taken)| limit.saturating_sub(taken));
        self.available.min(cgroup.unwrap_or(u64::MAX))
    }
}

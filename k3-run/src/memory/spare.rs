//! What this machine can really spare: free memory, the cgroup's limit, a reserve.

use sysinfo::{MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System};

/// The reserve is this part of what is free, but at least [`LEAST_RESERVE`]: past what a
/// machine can spare, a cached expert becomes a page fault, and all gets slower.
const RESERVE_PART: u64 = 16;
const LEAST_RESERVE: u64 = 512 << 20;

/// Free memory and what is left of it to others, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spare {
    /// Memory that can be taken without pushing anything out.
    pub available: u64,
    /// What this process's cgroup, or one above it, still allows.
    pub cgroup: Option<u64>,
    /// Left to others.
    pub reserve: u64,
}

impl Spare {
    fn new(available: u64, cgroup: Option<u64>) -> Self {
        let free = available.min(cgroup.unwrap_or(u64::MAX));
        // Inside a cgroup only its own processes need a reserve.
        Self { available, cgroup, reserve: (free / RESERVE_PART).max(LEAST_RESERVE.min(free / 4)) }
    }

    /// The budget.
    pub fn bytes(&self) -> u64 {
        self.available.min(self.cgroup.unwrap_or(u64::MAX)) - self.reserve
    }
}

/// Asks the system.
pub fn spare() -> Spare {
    // Where the system says nothing, there is nothing to spare; `--ram` says otherwise.
    let Ok(mut system) = System::new() else { return Spare::new(0, None) };
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    let cgroup = sysinfo::get_current_pid().ok().and_then(|pid| {
        let only = ProcessesToUpdate::Some(&[pid]);
        system.refresh_processes_specifics(only, false, ProcessRefreshKind::nothing());
        // The group's page cache can be dropped, so only what is not file-backed counts.
        let limits = system.process(pid)?.cgroup_limits()?;
        Some(limits.total_memory.saturating_sub(limits.rss))
    });
    Spare::new(system.available_memory(), cgroup)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn the_tighter_limit_counts_less_a_reserve() {
        assert_eq!(Spare::new(64 * GIB, None).bytes(), 60 * GIB);
        assert_eq!(Spare::new(64 * GIB, Some(16 * GIB)).bytes(), 15 * GIB);
        assert_eq!(Spare::new(4 * GIB, Some(16 * GIB)).bytes(), 4 * GIB - LEAST_RESERVE);
        assert_eq!(Spare::new(GIB, None).bytes(), GIB - GIB / 4);
    }

    #[test]
    fn this_machine_has_some() {
        let spare = spare();
        assert!(spare.bytes() > 0 && spare.bytes() < spare.available, "{spare:?}");
    }
}

//! The thread pool of a command.

use anyhow::{Context, Result};

/// A pool of `jobs` threads, or of as many as this process may use: affinity and CPU quota
/// count, not the machine's cores.
///
/// # Errors
/// The system gives no threads.
pub fn pool(jobs: Option<u16>) -> Result<rayon::ThreadPool> {
    let threads = match jobs {
        Some(n) => usize::from(n),
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    rayon::ThreadPoolBuilder::new()
        .num_threads(threads)
        .thread_name(|i| format!("k3-prep-{i}"))
        .build()
        .context("cannot start threads")
}

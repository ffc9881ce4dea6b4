//! How fast this machine reads: its disk around the page cache, and its memory.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use memmap2::MmapMut;

use crate::experts::{fill, open_direct};
use crate::parallel::{Chunks, Pool, for_each};

/// One request, about half an expert.
const REQUEST: usize = 8 << 20;

/// Requests in flight.
const READERS: u64 = 4;

/// The disk is read for this long at most.
const DISK_TIME: Duration = Duration::from_millis(400);

/// Bytes of memory that are read: far more than any cache holds.
const MEMORY: usize = 256 << 20;

/// Bytes per second of direct reads of `path`, from its start; `None` where the file is
/// too small to tell or direct reads do not work.
pub(crate) fn disk(path: &Path) -> Option<f64> {
    let size = fs_err::metadata(path).ok()?.len();
    let requests = size / REQUEST as u64;
    let file = open_direct(path).ok().filter(|_| requests >= READERS)?;
    let (next, read) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..READERS {
            scope.spawn(|| {
                let Ok(mut buffer) = MmapMut::map_anon(REQUEST) else { return };
                while start.elapsed() < DISK_TIME {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    let offset = at * REQUEST as u64;
                    if at >= requests || fill(&file, &mut buffer, offset, REQUEST).is_err() {
                        return;
                    }
                    read.fetch_add(REQUEST as u64, Ordering::Relaxed);
                }
            });
        }
    });
    let read = read.into_inner();
    (read > 0).then(|| read as f64 / start.elapsed().as_secs_f64())
}

/// Bytes per second at which the threads of `pool` together read memory.
pub(crate) fn memory(pool: &Pool) -> f64 {
    let mut values = vec![1_u64; MEMORY / size_of::<u64>()];
    let sum = AtomicU64::new(0);
    let mut pass = || {
        let start = Instant::now();
        pool.install(|| {
            for_each(Chunks::new(&mut values, 1 << 14), 8, |_, part| {
                let part: u64 = part.into_slice().iter().sum();
                sum.fetch_add(part, Ordering::Relaxed);
            });
        });
        start.elapsed().as_secs_f64()
    };
    let best = (0..3).map(|_| pass()).fold(f64::INFINITY, f64::min);
    // The sum must be used, or nothing would be read.
    std::hint::black_box(sum.into_inner());
    MEMORY as f64 / best
}
